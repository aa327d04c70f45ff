"""One training run of the stability benchmark, with the loss and the largest logits of every step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.alarms.outcomes import outcome
from benchmarks.alarms.runs import GROWTH, PLANTED, Run, Trace
from benchmarks.alarms.stacked_model import COLUMNS
from benchmarks.alarms.stacked_model import Sizes as RunSizes
from benchmarks.stability.trials import Result, Setting, Trial
from benchmarks.training.loop import BETAS, CLIP, autocast, byte_losses
from benchmarks.training.model import ByteModel
from benchmarks.training.text import Batches, Text
from polyhead.training import HeadHistory, HeadMonitor, MonitorCallback, QKClip, StepRecord


class _StopAtNonFinite(MonitorCallback):
    """Stop a run whose loss is not finite, without waiting for the device in each step."""

    def on_record(self, record: StepRecord) -> None:
        self.should_stop |= not math.isfinite(record.loss)


def train(
    trial: Trial,
    text: Text,
    device: torch.device,
    *,
    facts: Mapping[str, Any] | None = None,
    report: Callable[[int, int], None] = lambda done, steps: None,
) -> Result:
    """Train the model of a trial: in bfloat16 with float32 weights on a GPU, in float32 elsewhere."""
    began, setting = time.perf_counter(), trial.setting
    torch.manual_seed(setting.seed)
    model = ByteModel(setting.attention(trial.contender), setting.sizes).to(device).train()
    optimizers = build_optimizers(model, setting, device)
    batches = Batches(text, batch=setting.batch, context=setting.context, seed=setting.seed, device=device)
    run = _run(trial)
    stop, clipped = _StopAtNonFinite(), []
    statistics = ("max_logit",) if trial.part == "clip" else COLUMNS
    with ExitStack() as stack:
        clip = None
        if trial.threshold is not None:
            clip = stack.enter_context(QKClip(model, optimizers[0], trial.threshold))
        monitor = stack.enter_context(HeadMonitor(model, statistics=statistics, callbacks=[stop]))
        for step in range(setting.steps):
            if stop.should_stop:
                break
            if trial.plant == "query" and step >= PLANTED:
                scale_query(model, *run.place, GROWTH["query"])
            rate = trial.rate * _factor(trial, step)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = rate * group["rate_factor"]
            with autocast(device):
                loss, _ = byte_losses(model, batches.draw())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if clip is not None:
                clipped.append((torch.cat(list(clip.latest.factor.values())) < 1).sum())
            monitor.step(loss)
            report(step + 1, setting.steps)
        history = monitor.history
    return Result(
        trial,
        losses=history.losses,
        max_logits=history["max_logit"].amax(1).tolist(),
        clipped=None if clip is None else [int(x) for x in torch.stack(clipped).tolist()],
        outcome=outcome(_trace(run, history)) if trial.part == "alarms" else None,
        parameters=sum(x.numel() for x in model.parameters()),
        seconds=round(time.perf_counter() - began, 2),
        facts=dict(facts or {}),
    )


def _factor(trial: Trial, step: int) -> float:
    """Return the learning rate of a step as a share of the trial's: a linear warm-up, and what is planted."""
    growth = GROWTH["rate"] ** max(0, step - PLANTED) if trial.plant == "rate" else 1.0
    return growth * min(1.0, (step + 1) / max(1, trial.setting.warm_up))


def build_optimizers(model: ByteModel, setting: Setting, device: torch.device) -> list[torch.optim.Optimizer]:
    """Return AdamW; or Muon for the matrices of the blocks, and AdamW for the rest.

    W_Q and W_K belong to the first, in a group whose learning rate is multiplied by `qk_rate_factor`. Matrices decay,
    vectors do not.
    """
    logits: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            logits.append(weight)
        elif weight.ndim > 1:
            (rest if name.startswith("embedding") else matrices).append(weight)
        else:
            vectors.append(weight)

    def group(weights: list[nn.Parameter], decay: float = setting.weight_decay, factor: float = 1.0) -> dict[str, Any]:
        return {"params": weights, "weight_decay": decay, "rate_factor": factor}

    blocks = [group(logits, factor=setting.qk_rate_factor), group(matrices)]
    others = [group(rest), group(vectors, 0.0)]
    options: dict[str, Any] = {"betas": BETAS, "fused": device.type == "cuda"}
    if setting.optimizer == "adamw":
        return [torch.optim.AdamW([*blocks, *others], **options)]
    # Updates with the root mean square of AdamW's, so that the same learning rates apply.
    return [torch.optim.Muon(blocks, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(others, **options)]


@torch.no_grad()
def scale_query(model: ByteModel, layer: int, head: int, factor: float) -> None:
    """Multiply W_Q of one head."""
    attention: Any = model.attention[layer]
    dim = attention.layout.head_dim
    attention.q_proj.weight[head * dim : (head + 1) * dim] *= factor


def _run(trial: Trial) -> Run:
    """Return the trial as a run of the benchmark of alarms, which draws the planted head from the seed."""
    setting = trial.setting
    sizes = RunSizes(setting.width, setting.heads, setting.layers, setting.context, setting.batch)
    return Run(setting.seed, trial.rate, "text", sizes, trial.plant, setting.steps)


def _trace(run: Run, history: HeadHistory) -> Trace:
    """Return the records of a monitor as a trace of the benchmark of alarms."""
    values: Tensor = torch.stack([history[name] for name in COLUMNS], 1)
    return Trace(run, torch.tensor(history.losses), values)
