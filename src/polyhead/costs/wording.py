"""A plan in words: what its tables and its page say of it, each number as people read it."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.costs.layouts.model import ModelLayout, dtype_name
from polyhead.costs.phases import PhasePlan, is_causal
from polyhead.costs.planning import Plan
from polyhead.costs.quantities import count, seconds, size

BOUNDS = {
    "matrix": "matrix units",
    "exponentials": "exponentials",
    "bandwidth": "memory bandwidth",
    "launch": "launches: calling and starting kernels takes longer than what they do",
}
# What each row is: its name, its FLOPs, and the stage whose bytes and time it shows.
_ROWS = (
    ("projection", "projection", "projection"),
    ("positions, norms", None, "positions"),
    ("into the cache", None, "cache"),
    ("attention", None, "attention"),
    ("scores", "scores", None),
    ("softmax", None, None),
    ("values", "values", None),
    ("mixing of heads", "mixing", "mixing"),
    ("output", "output", "output"),
    ("waiting for launches", None, "launch"),
)
WITHIN_ATTENTION = ("scores", "softmax", "values")
STAGE_NAMES = {stage: name for name, _, stage in _ROWS if stage is not None}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a phase's table; empty words where there is nothing to say."""

    name: str
    flops: str
    exponentials: str
    bytes: str
    time: str

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return self.flops, self.exponentials, self.bytes, self.time


def title(plan: Plan, phase: PhasePlan) -> str:
    if phase.phase == "training":
        return "training step, forward and backward"
    if phase.phase == "decode":
        return "decoding the token that completes the context"
    return "prefill of the whole context" if is_causal(plan.model) else "forward over the whole context"


def requested(plan: Plan) -> str:
    """What the plan is for, in one line."""
    where = f" on {plan.machine}" if plan.machine else ""
    dtypes = str(dtype_name(plan.dtype))
    if plan.cache_dtype is not plan.dtype:
        dtypes += f", cache in {dtype_name(plan.cache_dtype)}"
    return f"batch {plan.batch}, context {plan.context:,}, {dtypes}{where}; attention layers alone"


def layout_words(model: ModelLayout) -> str:
    """How the heads lie.

    >>> from polyhead.costs.layouts.reading import read_layout
    >>> layout_words(read_layout("llama3.1-8b"))
    '32 layers of 32 heads x 128 over 8 KV heads, d_model 4096'
    """
    told, width = [], 0
    for group in model.groups:
        layout = group.config.layout  # type: ignore[attr-defined]
        width = layout.embed_dim
        heads = getattr(group.config, "num_heads", layout.num_heads)
        words = f"{_several(group.layers, 'layer')} of {_several(heads, 'head')} x {layout.head_dim}"
        if hasattr(layout, "kv_lora_rank"):
            words += f" over a latent of {layout.cache_width}"
        elif layout.num_kv_heads != heads:
            words += f" over {_several(layout.num_kv_heads, 'KV head')}"
        window = getattr(group.config, "window", None)
        told.append(words + (f" and a window of {window:,}" if window else ""))
    return f"{'; '.join(told)}, d_model {width}"


def facts(plan: Plan) -> list[tuple[str, str]]:
    """What is true of the layout in every phase: a name, and what is said of it."""
    parameters, identity = plan.parameters, plan.identity
    parts = [(name[0].upper(), getattr(parameters, name)) for name in ("query", "key", "value", "output")]
    told = ", ".join(f"{name} {count(part)}" for name, part in (*parts, ("other", parameters.other)) if part)
    square = "Q, K, V and O of a layer are 4 d_model²"
    if not identity.holds:
        because = ", and ".join(identity.reasons)
        square = f"{identity.found / identity.expected:.3g} of 4 d_model², because {because}"
    found = [("parameters", f"{count(parameters.total)}: {told}"), ("identity", square)]
    if plan.cache_bytes_per_token:
        cache = f"{size(plan.cache_bytes_per_token)} a token, {size(plan.cache_bytes)} in all"
        if plan.rolling_cache_bytes < plan.cache_bytes:
            cache += f", {size(plan.rolling_cache_bytes)} in caches that roll with the window"
        found.append(("cache", cache))
    return [*found, ("crossover", crossover_words(plan))]


def crossover_words(plan: Plan) -> str:
    if plan.crossover is None:
        return "never: windows keep scores and values below the projections"
    return f"from {plan.crossover:,} tokens on, scores and values (n²) cost more FLOPs than projections (n d²)"


def rows(phase: PhasePlan) -> list[Row]:
    """The table of a phase, its total last; what costs nothing is left out."""
    found = []
    for name, field, stage in _ROWS:
        flops = getattr(phase.flops, field) if field else 0
        moved = phase.bytes.get(stage, 0) if stage else 0
        exponentials = phase.exponentials if name == "softmax" else 0
        taken = phase.timing.stages.get(stage, 0.0) if phase.timing is not None and stage is not None else 0.0
        if flops or moved or exponentials or taken:
            products, powers = (count(number) if number else "" for number in (flops, exponentials))
            found.append(Row(name, products, powers, size(moved) if moved else "", seconds(taken) if taken else ""))
    total = "" if phase.timing is None else seconds(phase.timing.seconds)
    return [
        *found,
        Row("total", count(phase.flops.total), count(phase.exponentials), size(phase.total_bytes), total),
    ]


def below(phase: PhasePlan) -> list[tuple[str, str]]:
    """What is said under a phase's table."""
    fused, written = phase.fused, phase.materialised
    parts = [(name, getattr(fused, name)) for name in ("parameters", "gradients", "cache", "activations")]
    told = ", ".join(f"{name} {size(part)}" for name, part in parts if part)
    found = [("intensity", f"{phase.intensity:.3g} FLOPs a byte"), ("memory", f"{size(fused.total)}: {told}")]
    if phase.rolling_cache < fused.cache:
        found.append(("", f"{size(phase.rolling_total)} with rolling caches, which take {size(phase.rolling_cache)}"))
    if written.weights:
        found.append(
            ("", f"{size(written.total)} with weights written down, {size(written.weights)} of it h n² numbers")
        )
    if phase.timing is not None:
        words = BOUNDS[phase.timing.bound]
        if phase.timing.bound == "launch":
            words += f", which by itself takes {seconds(phase.timing.working)}"
        found.append(("bound by", words))
    return found


def _several(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
