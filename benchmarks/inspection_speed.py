"""Cost of observing a whole model: its forward with statistics of every head, over the same without."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import polyhead
from benchmarks.measuring.agreement import hold
from benchmarks.measuring.calls import default_dtype
from benchmarks.measuring.cases import Case, Entrants, Pair, Run, Step, tidy
from benchmarks.measuring.verdicts import Figure
from benchmarks.statistics_speed.places import ROW_STATISTICS
from polyhead.costs.measuring.runner import Timings
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
    """Return the steps of a run: large models on a GPU, or else MiniLM on the CPU."""
    if gpu is None:
        run = Run.on(gpu, seed=seed, quick=quick, seconds=2.0 if quick else _CPU_SECONDS)
        model = load_model("minilm").model
        return [
            Step("inspection", f"MiniLM, {batch} x {MINILM_TOKENS}", run, functools.partial(minilm, run, model, batch))
            for batch in ((1,) if quick else (1, 8))
        ]
    run = Run.on(gpu, seed=seed, quick=quick, seconds=1.0 if quick else _SECONDS, fewest=_FEWEST)
    return [
        Step("inspection", f"{place}, {place.kind}", run, functools.partial(measure, run, place))
        for place in (QUICK if quick else PLACES)
    ]


def measure(run: Run, place: Place) -> Iterator[Case]:
    """Yield the case of a place, after every contender was checked against float64 on the beginning of the text."""
    model = _model(run, place)
    generator = torch.Generator().manual_seed(run.seed)
    ids = torch.randint(VOCABULARY, (place.batch, place.tokens), generator=generator).to(run.device)
    short, inputs = _inputs(place, ids[:, :CHECKED]), _inputs(place, ids)
    real = short.get("attention_mask", torch.ones_like(short["input_ids"])).bool()
    exact = _forward(copy.deepcopy(model).double(), short)[real]
    plain = _forward(model, short)[real]

    def check(name: str, states: Tensor) -> None:
        hold(f"{name}: the last hidden states", states[real], exact, plain)

    found = Entrants()
    with ExitStack() as stack:
        for name in place.contenders:
            forward = _contender(name, model, place, stack)
            if found.enter(name, functools.partial(functools.partial, forward, short), functools.partial(check, name)):
                found.calls[name] = functools.partial(forward, inputs)
        tidy()
        pairs = [Pair(name, PLAIN, place.bound) for name in (ROWS, DEFAULT)]
        pairs += [Pair(MAPS, PLAIN, place.maps_bound), Pair(ROWS, EAGER)]
        bench = "inspection" if place.kind == "causal" else f"inspection, {place.kind}"
        yield found.case(bench, place, pairs, figures=_peaks)


def _contender(name: str, model: nn.Module, place: Place, stack: ExitStack) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return a forward that is observed until the stack is closed, of a model of its own with the same weights."""
    model = twin_of(model)
    if name == EAGER:
        model.set_attn_implementation("eager")  # type: ignore[operator]
    elif name != PLAIN:
        statistics = ROW_STATISTICS if name == ROWS else None
        collect = [AttentionMaps(place.tokens)] if name == MAPS else []
        stack.enter_context(polyhead.observe(model, statistics=statistics, collect=collect))
    return functools.partial(_forward, model, eager=name == EAGER)


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
    with default_dtype(run.dtype), torch.device(run.device):
        if place.kind == "sliding window":
            return MistralModel(MistralConfig(**sizes, sliding_window=4096)).eval()
        return LlamaModel(LlamaConfig(**sizes)).eval()


def twin_of(model: nn.Module) -> nn.Module:
    """Return another model with the same parameters and buffers."""
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


# ---- on a CPU: the packaged MiniLM

MINILM_TOKENS = 256
MINILM_BOUND = 2.0


def minilm(run: Run, model: nn.Module, batch: int) -> Iterator[Case]:
    """Yield the case of a trained encoder of 6 layers and 12 heads at 256 tokens."""
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
        pairs = [Pair(name, PLAIN, MINILM_BOUND) for name in (ROWS, DEFAULT)]
        pairs += [Pair(EAGER, PLAIN), Pair(DEFAULT, EAGER)]
        yield Case("inspection, MiniLM", f"{batch} x {MINILM_TOKENS} tokens", calls, pairs)


@torch.no_grad()
def _encode(model: nn.Module, inputs: dict[str, Tensor], eager: bool) -> object:
    found = model(**inputs, **({"output_attentions": True} if eager else {}))
    if eager:
        return [torch.special.entr(weights).sum(-1).mean((0, 2)) for weights in found.attentions]
    return found.last_hidden_state
