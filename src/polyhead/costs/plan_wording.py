"""Text of a plan for tables and pages, with formatted numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from polyhead.costs.layouts.model_layout import ModelLayout
from polyhead.costs.options import Phase
from polyhead.costs.phases import USABLE, PhasePlan, verdict
from polyhead.costs.planning import Fit, Plan
from polyhead.costs.quantities import count, decimal_size, dtype_name, plural, seconds, size
from polyhead.costs.ranks_plan import HeadShare, RankPhase, RanksPlan
from polyhead.costs.timing.machine import MachineSummary

BOUNDS = {
    "matrix": "matrix units",
    "exponentials": "exponentials",
    "bandwidth": "memory bandwidth",
    "launch": "launch overhead: launching the kernels takes longer than running them",
}
# Rows of a phase's table: name, field of `MatrixFlops`, and the stage whose bytes and time are shown.
_ROWS = (
    ("projection", "projection", "projection"),
    ("positions, norms", None, "positions"),
    ("cache writes", None, "cache"),
    ("attention", None, "attention"),
    ("scores", "scores", None),
    ("softmax", None, None),
    ("values", "values", None),
    ("head mixing", "mixing", "mixing"),
    ("output", "output", "output"),
    ("waiting for launches", None, "launch"),
)
WITHIN_ATTENTION = ("scores", "softmax", "values")
STAGE_NAMES = {stage: name for name, _, stage in _ROWS if stage is not None}


class Row(NamedTuple):
    """Row of a phase's table: its name and formatted cells; empty cells do not apply."""

    name: str
    flops: str
    exponentials: str
    bytes: str
    time: str


def title(plan: Plan, phase: PhasePlan) -> str:
    if phase.phase == "training":
        return "training step, forward and backward"
    if phase.phase == "decode":
        return "decode step, last token of the context"
    return "prefill of the full context" if plan.model.is_causal else "forward over the full context"


def requested(plan: Plan) -> str:
    """Return one line with the plan's batch, context, dtypes and machine."""
    where, dtypes = "", dtype_name(plan.dtype)
    if plan.machine is not None:
        where = f" on {machine_words(plan.machine) if plan.is_timed else f'{plan.machine.name} (times not measured)'}"
    if plan.cache_dtype is not plan.dtype:
        dtypes += f", cache in {dtype_name(plan.cache_dtype)}"
    return f"batch {plan.batch}, context {plan.context:,}, {dtypes}{where}; attention layers only"


def machine_words(machine: MachineSummary) -> str:
    """Return a machine's name, and in brackets the source of its times and their error.

    >>> from polyhead.costs.timing.machine import Machine
    >>> [machine_words(Machine.load(name).summary) for name in ("nvidia-h200", "nvidia-l4")]
    ['nvidia-h200 (measured, median error 8%, worst 33%)', 'nvidia-l4 (datasheet estimate, error not measured)']
    """
    kind = "datasheet estimate" if machine.kind == "datasheet" else machine.kind
    return f"{machine.name} ({kind}, {error_words(machine)})"


def error_words(machine: MachineSummary) -> str:
    error = machine.error
    return "error not measured" if error is None else f"median error {error.median:.0%}, worst {error.worst:.0%}"


def layout_words(model: ModelLayout) -> str:
    """Return one line that describes the head layout.

    >>> from polyhead.costs.layouts.layout_sources import read_layout
    >>> layout_words(read_layout("llama3.1-8b"))
    '32 layers of 32 heads x 128 over 8 KV heads, d_model 4096'
    """
    groups, width = [], 0
    for group in model.groups:
        layout = group.config.layout  # type: ignore[attr-defined]
        width = layout.embed_dim
        heads = getattr(group.config, "num_heads", layout.num_heads)
        text = f"{plural(group.layers, 'layer')} of {plural(heads, 'head')} x {layout.head_dim}"
        if hasattr(layout, "kv_lora_rank"):
            text += f" over a latent of {layout.cache_width}"
        elif layout.num_kv_heads != heads:
            text += f" over {plural(layout.num_kv_heads, 'KV head')}"
        window = getattr(group.config, "window", None)
        groups.append(text + (f" and a window of {window:,}" if window else ""))
    return f"{'; '.join(groups)}, d_model {width}"


def facts(plan: Plan) -> list[tuple[str, str]]:
    """Return (name, text) of the properties of the plan: fit into its machine, parameters, cache, crossover."""
    identity, cache = plan.identity, cache_words(plan)
    square = "Q, K, V and O of a layer have 4 d_model² weights"
    if not identity.holds:
        reasons = ", and ".join(identity.reasons)
        square = f"{identity.found / identity.expected:.3g} of 4 d_model², because {reasons}"
    fits = []
    for fit in plan.fits:
        fits += [fit_words(plan, fit), *([] if fit.verdict == "fits" else [fit_help(fit)])]
    fits += [fit_scope(plan)] if fits else []
    lines = [("" if index else "fit", text) for index, text in enumerate(fits)]
    lines += [("parameters", ": ".join(parameter_words(plan))), ("identity", square)]
    lines += [("cache", ", ".join(cache))] if cache else []
    lines.append(("crossover", crossover_words(plan)))
    if plan.ranks is not None:
        lines += [("" if index else "ranks", text) for index, text in enumerate(rank_words(plan, plan.ranks))]
    return lines


DIMENSIONS = {"tensor": "tensor parallel", "context": "context parallel", "fsdp": "FSDP2"}
COLLECTIVE_COLUMNS = ("pass", "operation", "ranks of", "calls", "per call", "sent", "time")


def rank_words(plan: Plan, ranks: RanksPlan) -> list[str]:
    """Return what a rank stores and needs, line by line."""
    sizes = [(getattr(ranks.ranks, name), text) for name, text in DIMENSIONS.items()]
    lines = [" x ".join(f"{number} of {text}" for number, text in sizes if number > 1) or "1"]
    shares = zip(ranks.heads, plan.model.groups, strict=True)
    lines += dict.fromkeys(_share_words(share, group.config.layout) for share, group in shares)  # type: ignore[attr-defined]
    stored = f"a rank stores {count(ranks.parameters)} parameters of attention"
    if ranks.cache_bytes_per_token and ranks.ranks.context == 1:
        stored += f", and {size(ranks.cache_bytes_per_token)} of cache per token"
    lines.append(stored)
    for phase in ranks.phases:
        text = f"{phase.phase} needs {size(phase.needed)} on each for {counted(plan, phase.phase)}"
        if phase.verdict is not None and plan.machine is not None:
            state = "is tight" if phase.verdict == "tight" else phase.verdict
            memory = next(fit.machine_bytes for fit in plan.fits if fit.phase == phase.phase)
            text = f"{phase.phase} {state}: {decimal_size(phase.needed)} of {decimal_size(memory)} on each"
        lines.append(text)
    return lines


def _share_words(share: HeadShare, layout: Any) -> str:
    text = f"a rank computes {share.heads} of {plural(layout.num_heads, 'head')}"
    if share.kv_heads is not None:
        text += f" and {share.kv_heads} of {plural(layout.num_kv_heads, 'KV head')}"
    return text + (f"; {plural(share.padding, 'zero head')} as padding" if share.padding else "")


def collective_rows(phase: RankPhase) -> list[tuple[str, ...]]:
    """Return name and cells (`COLLECTIVE_COLUMNS`) of each collective of a phase, and their total."""
    table = []
    for x in phase.collectives:
        cells = "backward" if x.is_backward else "forward", x.operation, DIMENSIONS[x.dimension], f"{x.calls:,}"
        time = "" if x.seconds is None else seconds(x.seconds)
        table.append((x.name, *cells, size(x.bytes / x.calls), size(x.bytes), time))
    times = [x.seconds for x in phase.collectives]
    total = seconds(sum(x for x in times if x is not None)) if times and None not in times else ""
    return [*table, ("total", "", "", "", "", "", size(phase.sent), total)]


def fit_words(plan: Plan, fit: Fit) -> str:
    """Return whether a phase fits into the plan's machine, what was counted, and the largest batch that fits."""
    state = "is tight" if fit.verdict == "tight" else fit.verdict
    text = f"{fit.phase} {state}: {decimal_size(fit.needed_bytes)} of {decimal_size(fit.machine_bytes)}"
    text += f" for {counted(plan, fit.phase)}"
    return f"{text}; the largest batch is {fit.max_batch:,}" if fit.verdict == "fits" else text


def fit_help(fit: Fit) -> str:
    """Return what would make a phase fit that is tight or does not fit."""
    options = [f"--batch {fit.max_batch}"] if fit.max_batch else []
    options += [f"--context {fit.max_context}"] if fit.max_context else []
    for name, needed in (("--cache-dtype int8", fit.int8_bytes), ("rolling caches", fit.rolling_bytes)):
        if needed is not None and needed < min(fit.needed_bytes, fit.machine_bytes):
            options.append(f"{name} ({decimal_size(needed)}, {verdict(needed, fit.machine_bytes)})")
    if not options:
        return "  to fit: more memory; not even batch 1 fits, nor a context of one token"
    return f"  to fit: {', or '.join(options)}"


def counted(plan: Plan, phase: Phase) -> str:
    """Return the parts of the memory that a phase needs."""
    if plan.model.other_parameters is None:
        return "attention alone"
    if phase == "training":
        return (
            "all weights, gradients, AdamW's state (8 bytes per parameter) and attention's activations, with "
            "activation checkpointing in all other layers"
        )
    return f"all weights{', cache' if plan.model.is_causal else ''} and attention's activations"


def fit_scope(plan: Plan) -> str:
    """Return the memory that `fit_words` does not count, and the margin for it."""
    rest = "other activations, logits and the CUDA context come on top"
    if plan.model.other_parameters is None:
        rest = f"all other weights, optimizer state, {rest}"
    return f"fits: at most {USABLE:.0%} of the memory, since {rest}; GB are 10⁹ bytes, GiB are 2³⁰"


def parameter_words(plan: Plan) -> tuple[str, str]:
    """Return the number of parameters, and its parts."""
    parameters = plan.parameters
    parts = [(name[0].upper(), getattr(parameters, name)) for name in ("query", "key", "value", "output")]
    breakdown = ", ".join(f"{name} {count(part)}" for name, part in (*parts, ("other", parameters.other)) if part)
    return count(parameters.total), breakdown


def cache_words(plan: Plan) -> tuple[str, str] | None:
    """Return the size of the cache per token, and in total; None without a cache."""
    if not plan.cache_bytes_per_token:
        return None
    rolling = plan.rolling_cache_bytes < plan.cache_bytes
    rest = f", {size(plan.rolling_cache_bytes)} with rolling caches" if rolling else ""
    return f"{size(plan.cache_bytes_per_token)} per token", f"{size(plan.cache_bytes)} in total{rest}"


def crossover_words(plan: Plan) -> str:
    if plan.crossover is None:
        return "none: with windows, scores and values never cost more FLOPs than projections"
    return f"from {plan.crossover:,} tokens, scores and values (n²) cost more FLOPs than projections (n d²)"


def rows(phase: PhasePlan) -> list[Row]:
    """Return the rows of a phase's table, the total last; rows without any cost are omitted."""
    table = []
    for name, field, stage in _ROWS:
        flops = getattr(phase.flops, field) if field else 0
        moved = phase.bytes.get(stage, 0) if stage else 0
        exponentials = phase.exponentials if name == "softmax" else 0
        time = phase.timing.stages.get(stage, 0.0) if phase.timing is not None and stage is not None else 0.0
        if flops or moved or exponentials or time:
            products, powers = (count(number) if number else "" for number in (flops, exponentials))
            table.append(Row(name, products, powers, size(moved) if moved else "", seconds(time) if time else ""))
    total = "" if phase.timing is None else seconds(phase.timing.seconds)
    return [*table, Row("total", count(phase.flops.total), count(phase.exponentials), size(phase.total_bytes), total)]


def below(phase: PhasePlan) -> list[tuple[str, str]]:
    """Return (name, text) of the lines under a phase's table: intensity, peak memory, bound."""
    fused, materialised = phase.fused, phase.materialised
    parts = [(name, getattr(fused, name)) for name in ("parameters", "gradients", "cache", "activations")]
    breakdown = ", ".join(f"{name} {size(part)}" for name, part in parts if part)
    lines = [("intensity", f"{phase.intensity:.3g} FLOPs per byte"), ("memory", f"{size(fused.total)}: {breakdown}")]
    if phase.rolling_cache < fused.cache:
        lines.append(("", f"{size(phase.rolling_total)} with rolling caches of {size(phase.rolling_cache)}"))
    if materialised.weights:
        lines.append(
            (
                "",
                f"{size(materialised.total)} with materialised weights, of which {size(materialised.weights)} are h n²",
            )
        )
    if phase.timing is not None:
        bound = BOUNDS[phase.timing.bound]
        if phase.timing.bound == "launch":
            device = phase.timing.device_seconds
            waiting = phase.timing.seconds - device
            bound += f", {seconds(device)} of running and {seconds(waiting)} of waiting for launches"
        lines.append(("bound by", bound))
    return lines
