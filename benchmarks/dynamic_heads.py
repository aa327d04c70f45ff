"""`python -m benchmarks dynamic_heads`: heads that are pruned or added in training against a fixed number of them.

Every training of a task may spend the same FLOPs, counted step by step with the heads that a model has then; what has
fewer heads makes more steps. On average over the steps all schedules have the same number of heads.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring.json_lines import append_result, read_lines
from benchmarks.measuring.runner import print_table
from benchmarks.training.text import english_text
from polyhead.costs.measuring import machine_facts
from polyhead.layers import MultiHeadAttention
from polyhead.layers.positions import Rotary
from polyhead.layers.transformer import LanguageModel, SequenceToSequence
from polyhead.training import DynamicHeads, HeadChange

WIDTH, HIDDEN, DIM, LAYERS = 64, 128, 16, 2
HEADS, CHANGES = 4, 4  # heads per layer of the fixed number; changes, each by as many heads as there are layers
SEEDS, STEPS = 5, 250  # steps of the fixed number of heads
RATE, WARM_UP, LAST = 3e-3, 0.1, 0.05  # learning rate; share of the compute; last share of the rate
T_95 = 2.776  # two-sided 95% of Student's t with 4 degrees of freedom, for five seeds
SCHEDULES = {"fixed": HEADS, "prune": HEADS + CHANGES // 2, "grow": HEADS - CHANGES // 2}  # heads per layer at first
BOS, PAD = 0, 1  # bytes that no text has


@dataclass(frozen=True)
class Task:
    """A model, batches by seed, what is held out, and the name of the data."""

    name: str
    data: str
    build: Callable[[int], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    held_out: Sequence[tuple[Tensor, ...]]
    tokens: tuple[int, int]  # of a batch: of the decoder and of the source


@dataclass(frozen=True)
class Result:
    """Result of one training: `bits` of a held-out byte; `heads` of every layer at the end."""

    task: str
    schedule: str
    seed: int
    bits: float
    steps: int
    flops: int
    heads: list[int]
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def language(data: Path | None, batch: int = 16, context: int = 64) -> Task:
    """Return the next-byte task on Tiny Shakespeare, or on the packaged texts."""
    file = None if data is None else data / "tinyshakespeare" / "input.txt"
    text = file.read_bytes() if file is not None and file.exists() else english_text().encode() * 8
    learned, held_out = torch.tensor(list(text)).split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])
    pieces = held_out.unfold(0, context + 1, context)[:1600]

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        return (
            learned.unfold(0, context + 1, 1)[torch.randint(len(learned) - context, (batch,), generator=generator)],
        )

    def build(heads: int) -> nn.Module:
        return LanguageModel(256, WIDTH, heads, LAYERS, head_dim=DIM, hidden_dim=HIDDEN, positions=Rotary(DIM))

    name = "tinyshakespeare" if file is not None and file.exists() else "packaged texts"
    return Task("language model", name, build, draw, [(x,) for x in pieces.split(100)], (batch * context, 0))


def translation(data: Path | None, batch: int = 16, sources: int = 16, targets: int = 40) -> Task:
    """Return the task from Chinese characters to English bytes of Tatoeba, or from reversed words of packaged texts."""
    file = None if data is None else data / "tatoeba" / "cmn-eng.txt"
    if file is not None and file.exists():
        lines = [line.split("\t") for line in file.read_text(encoding="utf-8-sig").splitlines()]
        pairs = [(line[1], line[0]) for line in lines if len(line) > 1]
    else:
        words = english_text().split() * 4
        pairs = [(" ".join(words[i : i + 3]), " ".join(words[i : i + 3][::-1])) for i in range(len(words) - 3)]
    pairs = [(s, t) for s, t in pairs if len(s) <= sources and len(t.encode()) < targets]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [pairs[i] for i in order]
    count = len(pairs) // 10
    common = [x for x, n in Counter("".join(s for s, _ in pairs[count:])).most_common(1500) if n > 2]
    index = {x: i + 2 for i, x in enumerate(common)}
    source = torch.tensor([[index.get(x, 0) for x in s] + [PAD] * (sources - len(s)) for s, _ in pairs])
    encoded = [[BOS, *t.encode(), BOS] for _, t in pairs]
    target = torch.tensor([x + [PAD] * (targets + 1 - len(x)) for x in encoded])

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        chosen = torch.randint(count, len(pairs), (batch,), generator=generator)
        return source[chosen], target[chosen]

    def build(heads: int) -> nn.Module:
        options: dict[str, Any] = {"head_dim": DIM, "hidden_dim": HIDDEN, "positions": Rotary(DIM)}
        return SequenceToSequence(len(index) + 2, 256, WIDTH, heads, LAYERS, **options)

    held_out = list(zip(source[: min(count, 1500)].split(100), target[: min(count, 1500)].split(100), strict=True))
    name = "tatoeba" if file is not None and file.exists() else "packaged texts"
    return Task("translation", name, build, draw, held_out, (batch * targets, batch * sources))


TASKS: dict[str, Callable[[Path | None], Task]] = {"language": language, "translation": translation}


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the mean nats of a byte of the text, or of the translation without its padding."""
    *sources, tokens = batch
    if sources:
        lengths = (sources[0] != PAD).sum(1)
        logits = model(sources[0], tokens[:, :-1], source_lengths=lengths)
    else:
        logits = model(tokens[:, :-1])
    ignored = PAD if sources else -100
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=ignored)


def step_flops(model: nn.Module, task: Task, batch: int) -> int:
    """Return the FLOPs of the matrix products of a step, forward and backward: three times those of the forward."""
    decoded, source = task.tokens
    total = 0
    for path, module in model.named_modules():
        is_encoder = path.startswith("encoder")
        tokens = source if is_encoder else decoded
        if isinstance(module, MultiHeadAttention):
            is_cross = "cross_attention" in path
            keys = source if is_cross else tokens
            sizes = {name: getattr(module, f"{name}_proj").weight.numel() for name in ("q", "k", "v", "out")}
            pairs = tokens * keys // batch
            visible = pairs if is_encoder or is_cross else pairs // 2
            total += 2 * tokens * (sizes["q"] + sizes["out"]) + 2 * keys * (sizes["k"] + sizes["v"])
            total += 4 * visible * module.layout.num_heads * DIM
        elif isinstance(module, nn.Linear) and "attention" not in path:
            total += 2 * tokens * module.weight.numel()
    return 3 * total


def train(task: Task, schedule: str, seed: int, *, steps: int = STEPS) -> Result:
    """Train a model until the compute of `steps` steps with the fixed number of heads is spent, and evaluate it."""
    began, batch = time.process_time(), len(task.batch(torch.Generator())[0])
    budget = steps * step_flops(task.build(HEADS), task, batch)
    torch.manual_seed(seed)
    model = task.build(SCHEDULES[schedule]).train()
    attention = [x for x in model.modules() if isinstance(x, MultiHeadAttention)]
    times = [steps * (i + 1) // (CHANGES + 1) for i in range(CHANGES)]
    change = {"fixed": None, "prune": HeadChange(prune=len(attention)), "grow": HeadChange(grow=len(attention))}[
        schedule
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)
    generator, spent, made = torch.Generator().manual_seed(seed), 0, 0
    with DynamicHeads(model, optimizer, {} if change is None else dict.fromkeys(times, change), seed=seed) as heads:
        while (flops := step_flops(model, task, batch)) + spent <= budget:
            for group in optimizer.param_groups:
                group["lr"] = RATE * _factor(spent / budget)
            loss = loss_of(model, task.batch(generator))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            heads.step(loss)
            spent, made = spent + flops, made + 1
    bits = evaluate(model.eval(), task)
    counts = [x.layout.num_heads for x in attention]
    return Result(task.name, schedule, seed, bits, made, spent, counts, round(time.process_time() - began, 1))


def _factor(done: float) -> float:
    """Return the share of the learning rate after this share of the compute: linear up, half a cosine down."""
    if done < WARM_UP:
        return (done + 0.01) / (WARM_UP + 0.01)
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


@torch.no_grad()
def evaluate(model: nn.Module, task: Task) -> float:
    """Return the bits of a held-out byte."""
    nats, count = 0.0, 0
    for batch in task.held_out:
        targets = int((batch[-1][:, 1:] != PAD).sum())
        nats, count = nats + loss_of(model, batch).item() * targets, count + targets
    return nats / count / math.log(2)


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return a table, header first: means over seeds with 95% intervals, and differences to the fixed heads by seed."""
    lines: list[tuple[str, ...]] = [
        ("task", "heads per layer", "steps", "TFLOP", "bits per byte", "difference to fixed", "seeds")
    ]
    for task in dict.fromkeys(x.task for x in results):
        by_seed = {(x.schedule, x.seed): x.bits for x in results if x.task == task}
        for schedule, first in SCHEDULES.items():
            found = [x for x in results if (x.task, x.schedule) == (task, schedule)]
            if not found:
                continue
            paired = [x.bits - by_seed["fixed", x.seed] for x in found if ("fixed", x.seed) in by_seed]
            last = statistics.fmean(found[0].heads)
            lines.append(
                (
                    task,
                    f"{first}" if schedule == "fixed" else f"{first} to {last:g}",
                    f"{statistics.fmean(x.steps for x in found):.0f}",
                    f"{found[0].flops / 1e12:.3f}",
                    _interval([x.bits for x in found], ""),
                    "" if schedule == "fixed" else _interval(paired, "+"),
                    f"{len(found)}",
                )
            )
    return lines


def _interval(values: Sequence[float], sign: str) -> str:
    if not values:
        return ""
    half = T_95 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) == SEEDS else math.nan
    return f"{statistics.fmean(values):{sign}.3f} ± {half:.3f}"


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw the differences to the fixed number of heads, seed by seed, and their means with 95% intervals."""
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(x.task for x in results))
    figure, axes = plt.subplots(1, len(tasks), figsize=(7, 2.8), squeeze=False, sharey=True, layout="constrained")
    for axis, task in zip(axes[0], tasks, strict=True):
        fixed = {x.seed: x.bits for x in results if (x.task, x.schedule) == (task, "fixed")}
        for place, schedule in enumerate(("prune", "grow")):
            values = [x.bits - fixed[x.seed] for x in results if (x.task, x.schedule) == (task, schedule)]
            half = T_95 * statistics.stdev(values) / math.sqrt(len(values))
            axis.plot([place + 0.15] * len(values), values, "o", color="0.6", markersize=3)
            axis.errorbar(place, statistics.fmean(values), half, fmt="o", color="C0", capsize=4)
        axis.axhline(0, color="0.3", linewidth=0.8)
        axis.set_xticks([0, 1], ["pruning, 6 to 2", "growing, 2 to 6"])
        axis.set(xlim=(-0.5, 1.5), title=task)
    axes[0, 0].set_ylabel("bits per byte,\ncompared with 4 fixed heads")
    with plt.rc_context({"svg.hashsalt": "polyhead", "svg.fonttype": "none"}):  # the same file for the same results
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def run(output: Path, figure: Path | None, only: Sequence[str], *, quick: bool, commit: str | None) -> None:
    """Make the trainings that a file lacks, print the table, and draw the figure."""
    torch.set_num_threads(1)
    folder = os.environ.get("POLYHEAD_DATA")
    data = Path(folder) if folder else None
    facts = machine_facts.describe(torch.device("cpu"), commit)
    done = {(x.task, x.schedule, x.seed) for x in read_results(output)}
    for seed in range(1 if quick else SEEDS):
        for task in [TASKS[name](data) for name in only]:
            for schedule in SCHEDULES:
                if (task.name, schedule, seed) in done:
                    continue
                result = train(task, schedule, seed, steps=20 if quick else STEPS)
                append_result(
                    output, Result(**{**asdict(result), "facts": {**facts, "data": task.data, "quick": quick}})
                )
    print_table(*rows(read_results(output)))
    if figure is not None:
        draw(read_results(output), figure)


def read_results(path: Path) -> list[Result]:
    """Return the finished trainings of a file."""
    return read_lines(path, lambda line: Result(**json.loads(line)))
