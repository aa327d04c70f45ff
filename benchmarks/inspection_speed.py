"""Cost of observing a whole model: its forward with statistics of every head, over the same without."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import polyhead
from benchmarks.measuring.agreement import Disagreement, hold
from benchmarks.measuring.results import Figure, Row
from benchmarks.statistics_speed import Step
from benchmarks.statistics_speed.places import ROW_STATISTICS
from benchmarks.statistics_speed.problem import tidy
from polyhead.costs.measuring.runner import OUT_OF_MEMORY, Run, Timings, is_out_of_memory
from polyhead.observation import AttentionMaps
from polyhead.workflows.model_loading import load_model

PLAIN = "SDPA, nothing watched"
ROWS = "polyhead, largest logit, entropy, reach"
DEFAULT = "polyhead, the default statistics"
MAPS = "polyhead, these and maps"
EAGER = "eager, output_attentions, entropy"
CHECKED = 2048  # tokens at which every contender is held against float64
LAYERS, WIDTH, INTERMEDIATE, VOCABULARY = 16, 2048, 8192, 128_256
PEAK_BOUND = 1.01  # of the peak memory of the plain forward


@dataclass(frozen=True)
class Place:
    """A model's shape and its input."""

    heads: int
    head_dim: int
    tokens: int
    bound: float | None = None  # of the row statistics
    kind: str = "causal"  # or "left-padded", "sliding window"
    contenders: tuple[str, ...] = (PLAIN, ROWS, DEFAULT, MAPS)
    maps_bound: float | None = 2.0
    batch: int = 1

    def __str__(self) -> str:
        rows = "" if self.batch == 1 else f"{self.batch} x "
        return f"{LAYERS} layers, {self.heads}/{self.heads // 4} heads of {self.head_dim}, {rows}{self.tokens} tokens"


PLACES = (
    Place(32, 64, 4096, 1.08, contenders=(PLAIN, ROWS, DEFAULT, MAPS, EAGER)),
    Place(32, 64, 8192, 1.06, contenders=(PLAIN, ROWS, DEFAULT, MAPS, EAGER)),
    Place(16, 128, 32768, 1.08, contenders=(PLAIN, ROWS, DEFAULT, MAPS)),
    Place(16, 128, 32768, kind="left-padded", contenders=(PLAIN, ROWS), batch=2),
    Place(16, 128, 32768, kind="sliding window", contenders=(PLAIN, ROWS)),
    Place(16, 128, 131072, 1.10, contenders=(PLAIN, ROWS, MAPS)),
)
QUICK = PLACES[:1]
_SECONDS, _FEWEST = 3.0, 3  # of one place: a forward of 131,072 tokens takes seconds
_CPU_SECONDS = 20.0


def plan(*, quick: bool = False, seed: int = 0, gpu: torch.device | None = None) -> list[Step]:
    """The places of a run: the large models on a GPU, or else MiniLM on the CPU."""
    if gpu is None:
        run = Run(torch.device("cpu"), torch.float32, seed=seed, seconds=2.0 if quick else _CPU_SECONDS)
        model = load_model("minilm").model
        return [
            Step(
                "inspection",
                f"MiniLM, {batch} x {MINILM_TOKENS}",
                run.device,
                functools.partial(minilm, run, model, batch),
            )
            for batch in ((1,) if quick else (1, 8))
        ]
    run = Run(gpu, torch.bfloat16, seed=seed, seconds=1.0 if quick else _SECONDS, fewest=_FEWEST)
    return [
        Step("inspection", f"{place}, {place.kind}", gpu, functools.partial(measure, run, place))
        for place in (QUICK if quick else PLACES)
    ]


def measure(run: Run, place: Place) -> Iterator[Row]:
    """One place; every contender is held against the model in float64 first."""
    model = _model(run, place)
    generator = torch.Generator().manual_seed(run.seed)
    ids = torch.randint(VOCABULARY, (place.batch, place.tokens), generator=generator).to(run.device)
    found = _Contenders(model, place)
    with ExitStack() as stack:
        for name in place.contenders:
            found.enter(name, stack)
        found.check(_inputs(place, ids[:, :CHECKED]))
        tidy()
        inputs = _inputs(place, ids)
        calls = {name: functools.partial(call, inputs) for name, call in found.calls.items()}
        timings = run.time(calls, found.absent)
    compared = [timings.compare(name, PLAIN, place.bound) for name in (ROWS, DEFAULT)]
    compared += [timings.compare(MAPS, PLAIN, place.maps_bound), timings.compare(ROWS, EAGER)]
    bench = "inspection" if place.kind == "causal" else f"inspection, {place.kind}"
    figures = _peaks(timings)
    yield Row.of(bench, str(place), run.dtype, timings, compared, figures=figures, failed="; ".join(found.failures))


@dataclass
class _Contenders:
    model: nn.Module
    place: Place
    calls: dict[str, Callable[[dict[str, Tensor]], Tensor]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def enter(self, name: str, stack: ExitStack) -> None:
        # Each has a model of its own around the same weights: a session switches its model over.
        model = _twin(self.model)
        if name in (PLAIN, EAGER):
            model.set_attn_implementation("eager" if name == EAGER else "sdpa")  # type: ignore[operator]
            self.calls[name] = functools.partial(_forward, model, eager=name == EAGER)
            return
        statistics = ROW_STATISTICS if name == ROWS else None
        collect = [AttentionMaps(self.place.tokens)] if name == MAPS else []
        stack.enter_context(polyhead.observe(model, statistics=statistics, collect=collect))
        self.calls[name] = functools.partial(_forward, model)

    def check(self, inputs: dict[str, Tensor]) -> None:
        wide = copy.deepcopy(self.model).double()
        wide.set_attn_implementation("sdpa")  # type: ignore[operator]
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        exact = _forward(wide, inputs)[real]
        del wide
        plain = self.calls[PLAIN](inputs)[real]
        for name, call in list(self.calls.items()):
            try:
                hold(f"{name}: the last hidden states", call(inputs)[real], exact, plain)
            except Disagreement as error:
                self._leave(name, f"not timed: {error}")
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._leave(name, OUT_OF_MEMORY)

    def _leave(self, name: str, reason: str) -> None:
        del self.calls[name]
        if name.startswith("polyhead"):
            self.failures.append(f"{name}: {reason}")
        else:
            self.absent[name] = reason


def _model(run: Run, place: Place) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel, MistralConfig, MistralModel

    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": place.heads,
        "num_key_value_heads": place.heads // 4,
        "head_dim": place.head_dim,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131072,
        "attn_implementation": "sdpa",
        "use_cache": False,
    }
    torch.manual_seed(run.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(run.dtype)
    try:
        with torch.device(run.device):
            if place.kind == "sliding window":
                return MistralModel(MistralConfig(**sizes, sliding_window=4096)).eval()
            return LlamaModel(LlamaConfig(**sizes)).eval()
    finally:
        torch.set_default_dtype(before)


def _twin(model: nn.Module) -> nn.Module:
    """Another model with the same parameters and buffers."""
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _inputs(place: Place, ids: Tensor) -> dict[str, Tensor]:
    if place.kind != "left-padded":
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1:, : ids.shape[1] // 4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def _forward(model: nn.Module, inputs: dict[str, Tensor], *, eager: bool = False) -> Tensor:
    found = model(**inputs, use_cache=False, **({"output_attentions": True} if eager else {}))
    for weights in found.attentions if eager else ():
        torch.special.entr(weights.float()).sum(-1).mean((0, 2))
    states: Tensor = found.last_hidden_state
    return states


def _peaks(timings: Timings) -> Sequence[Figure]:
    peaks = timings.peak_mib
    figures = [Figure(f"peak memory, {name}", peak / 1024, "GiB") for name, peak in peaks.items()]
    if PLAIN in peaks and ROWS in peaks:
        figures.append(Figure("peak memory, statistics over plain", peaks[ROWS] / peaks[PLAIN], "", PEAK_BOUND))
    return figures


# ---- on a CPU, the model that everybody has

MINILM_TOKENS = 256
MINILM_BOUND = 2.0


def minilm(run: Run, model: nn.Module, batch: int) -> Iterator[Row]:
    """A real encoder of 6 layers and 12 heads at 256 tokens."""
    generator = torch.Generator().manual_seed(run.seed)
    ids = torch.randint(1000, 30_000, (batch, MINILM_TOKENS), generator=generator)
    inputs = {"input_ids": ids.to(run.device), "attention_mask": torch.ones_like(ids).to(run.device)}
    calls: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        for name in (PLAIN, ROWS, DEFAULT, EAGER):
            own = copy.deepcopy(model)
            own.set_attn_implementation("eager" if name == EAGER else "sdpa")  # type: ignore[operator]
            if name in (ROWS, DEFAULT):
                statistics = ROW_STATISTICS if name == ROWS else None
                stack.enter_context(polyhead.observe(own, statistics=statistics))
            calls[name] = functools.partial(_encode, own, inputs, name == EAGER)
        timings = run.time(calls)
    compared = [timings.compare(name, PLAIN, MINILM_BOUND) for name in (ROWS, DEFAULT)]
    compared += [timings.compare(EAGER, PLAIN), timings.compare(DEFAULT, EAGER)]
    yield Row.of("inspection, MiniLM", f"{batch} x {MINILM_TOKENS} tokens", run.dtype, timings, compared)


@torch.no_grad()
def _encode(model: nn.Module, inputs: dict[str, Tensor], eager: bool) -> object:
    found = model(**inputs, **({"output_attentions": True} if eager else {}))
    if eager:
        return [torch.special.entr(weights).sum(-1).mean((0, 2)) for weights in found.attentions]
    return found.last_hidden_state
