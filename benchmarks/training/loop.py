"""One training run, from a seed to the bits per held-out byte."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training.model import ByteModel, parameters, step_flops
from benchmarks.training.text import Batches, Text
from benchmarks.training.trials import Contest, Result, Trial

WARM_UP, LAST = 0.1, 0.1  # of the steps, and of the rate
BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0


def train(
    contest: Contest,
    trial: Trial,
    text: Text,
    device: torch.device,
    *,
    facts: Mapping[str, Any] | None = None,
    report: Callable[[int, int], None] = lambda done, steps: None,
) -> Result:
    """Train and evaluate the model of a trial: in bfloat16 with float32 weights on a GPU, in float32 elsewhere."""
    began = time.perf_counter()
    config, sizes = contest.variants[trial.variant], contest.sizes_of(trial.variant)
    steps = contest.steps_of(trial.variant, trial.budget)
    torch.manual_seed(trial.seed)
    model = ByteModel(config, sizes).to(device)
    optimizer = torch.optim.AdamW(_groups(model), lr=trial.rate, betas=BETAS, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _factor(step, steps))
    batches = Batches(text, batch=contest.batch, context=sizes.context, seed=trial.seed, device=device)
    for step in range(steps):
        pieces = batches.draw()
        with autocast(device):
            loss, own = byte_losses(model, pieces)
        (loss + own).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        report(step + 1, steps)
    return Result(
        trial,
        bits=_bits(model.eval(), text.questions(sizes.context), contest.batch, device),
        steps=steps,
        tokens=steps * contest.batch * sizes.context,
        parameters=parameters(config, sizes),
        flops=steps * step_flops(config, sizes, contest.batch),
        seconds=round(time.perf_counter() - began, 2),
        facts=dict(facts or {}),
    )


def _factor(step: int, steps: int) -> float:
    """Return the share of the learning rate: linear warm-up, then cosine decay."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    every = [x for x in model.parameters() if x.requires_grad]
    matrices, vectors = [x for x in every if x.ndim > 1], [x for x in every if x.ndim <= 1]
    return [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context of bfloat16 on a GPU, of float32 elsewhere."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def byte_losses(model: nn.Module, pieces: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nats per byte of pieces [batch, context + 1], and the layers' own losses."""
    logits, own = model(pieces[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), pieces[:, 1:].flatten()), own


@torch.no_grad()
def _bits(model: nn.Module, questions: Tensor, batch: int, device: torch.device) -> float:
    """Return the mean bits per held-out byte; later bytes of a context have more context."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for pieces in questions.split(batch):
        with autocast(device):
            total += byte_losses(model, pieces.to(device).long())[0].double() * len(pieces)
    bits = total.item() / len(questions) / math.log(2)
    return bits if math.isfinite(bits) else math.nan
