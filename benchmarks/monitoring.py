"""Cost of `HeadMonitor` with all its columns: whole training steps with it, relative to the same steps without.

Models run in eager mode and compiled. The baseline of a monitored compiled model is the faster of the compiled and the
eager model without a monitor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.inspection_speed import twin_of
from benchmarks.measuring.agreement import Disagreement
from benchmarks.measuring.cases import Case, Entrants, Pair, Run, Step, tidy
from benchmarks.measuring.verdicts import Figure
from polyhead.costs.measuring.runner import Timings
from polyhead.training import HeadMonitor

PLAIN = "training step, sdpa"
EVERY = "polyhead, monitor of every step"
TENTH = "polyhead, monitor of every 10th step"
COMPILED = ", compiled"
BACKEND = "inductor"
PARTS = {"eager": "", "compiled": COMPILED}
BOUNDS = {EVERY: 1.02, TENTH: 1.005}
PEAK_BOUND = 1.01  # of the peak memory of the plain steps
STEPS = 10  # training steps of one timed call, so that `TENTH` observes one of them
_SECONDS, _FEWEST = 15.0, 5  # of one case: time, and fewest alternations


@dataclass(frozen=True)
class Place:
    """Shape of a Llama model and of its batch."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    intermediate: int
    batch: int
    tokens: int
    vocabulary: int = 32_000

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads != self.heads else str(self.heads)
        head_dim = self.width // self.heads
        return f"{self.layers} layers, {heads} heads of {head_dim}, {self.batch} x {self.tokens} tokens"


PLACES = (
    Place(8, 2048, 16, 16, 5632, 2, 2048),
    Place(8, 2048, 16, 16, 5632, 1, 4096),
    Place(8, 2048, 16, 16, 5632, 1, 16384),
    Place(16, 2048, 32, 8, 8192, 2, 4096),  # about 1B parameters
)
ON_A_CPU = (Place(2, 64, 4, 4, 128, 2, 64, 100),)


def plan(
    only: Sequence[str] = tuple(PARTS), *, quick: bool = False, seed: int = 0, gpu: torch.device | None = None
) -> list[Step]:
    """Return the steps of a run: large models in bfloat16 on a GPU, or else a small one on the CPU, without bounds."""
    run = Run.on(gpu, seed=seed, quick=quick, seconds=1.0 if quick else _SECONDS, fewest=_FEWEST)
    places = ON_A_CPU if gpu is None else PLACES[: 1 if quick else None]
    modes = [PARTS[part] for part in PARTS if part in only]
    return [
        Step("monitoring", f"{place}{mode}", run, functools.partial(measure, run, place, mode))
        for place in places
        for mode in modes
    ]


def measure(run: Run, place: Place, mode: str) -> Iterator[Case]:
    """Yield the case of one place and mode; its contenders are models that share their parameters and the optimizer.

    All monitors of a case are entered while it is timed. Eager and compiled models are separate cases, since inside the
    block of a monitor that observes in eager mode no model runs compiled.
    """
    model = _model(run, place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=run.device.type == "cuda")
    generator = torch.Generator().manual_seed(run.seed)
    ids = torch.randint(place.vocabulary, (place.batch, place.tokens), generator=generator).to(run.device)
    bounds = BOUNDS if run.device.type == "cuda" else {}
    plain = [PLAIN, PLAIN + COMPILED] if mode else [PLAIN]
    entrants = Entrants()
    with ExitStack() as stack:
        for name in (*plain, EVERY + mode, TENTH + mode):
            entrants.enter(name, functools.partial(_contender, name, model, optimizer, ids, stack), _check)
        tidy()
        pairs = [Pair(name + mode, plain, bounds.get(name)) for name in BOUNDS]
        yield entrants.case("monitoring", f"{place}{mode}", pairs, items=STEPS, figures=_peaks)


def _contender(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, stack: ExitStack
) -> Callable[[], HeadMonitor | None]:
    """Return a call that takes `STEPS` training steps and returns their monitor, which is exited with `stack`."""
    twin = twin_of(model)
    if name.endswith(COMPILED):
        twin.compile(backend=BACKEND)
    every = {EVERY: 1, TENTH: STEPS}.get(name.removesuffix(COMPILED))
    monitor = None if every is None else stack.enter_context(HeadMonitor(twin, every=every))

    def steps() -> HeadMonitor | None:
        for _ in range(STEPS):
            loss = twin(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step(loss)
        return monitor

    return steps


def _check(monitor: HeadMonitor | None) -> None:
    """Raise if the monitor has not measured all its columns: it would be faster."""
    if monitor is not None:
        history = monitor.history
        unmeasured = [name for name in history.columns if not history[name][0].isfinite().all()]
        if unmeasured:
            raise Disagreement(f"the monitor has no values of {', '.join(unmeasured)}")


def _model(run: Run, place: Place) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=place.width,
        num_hidden_layers=place.layers,
        num_attention_heads=place.heads,
        num_key_value_heads=place.kv_heads,
        intermediate_size=place.intermediate,
        vocab_size=place.vocabulary,
        max_position_embeddings=place.tokens,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(run.seed)
    with torch.device(run.device):
        return LlamaForCausalLM(config).to(run.dtype).train()


def _peaks(timings: Timings) -> Sequence[Figure]:
    peaks = timings.peak_mib
    figures = [Figure(f"peak memory, {name}", peak / 1024, "GiB") for name, peak in peaks.items()]
    for mode in ("", COMPILED):
        if PLAIN + mode in peaks and EVERY + mode in peaks:
            ratio = peaks[EVERY + mode] / peaks[PLAIN + mode]
            figures.append(Figure(f"peak memory, monitor over plain{mode}", ratio, "", PEAK_BOUND))
    return figures
