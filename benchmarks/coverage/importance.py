"""The verdict on importance: what `ablate` reports of each head, held against the model with weights of 0 there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import polyhead
from benchmarks.coverage.catalogue import Call
from benchmarks.coverage.judge import Match, assigned, matched, tables_of, tensors_of
from benchmarks.coverage.oracle import Gate, Softmax, softmaxes_of
from benchmarks.measuring.calls import default_dtype
from polyhead.analysis.importance import ablate
from polyhead.errors import OptionError, PolyheadError
from polyhead.observation import HeadProfile

TOLERANCE = 1e-5  # of the change of a loss of order 1
EVERY, PART, REFUSED, WRONG = "every", "part", "refused", "wrong"
MOST_HEADS = 6  # of a model; of more, one head of each site is compared
Site = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Found:
    """Heads whose ablation was compared, the largest error, and what it says of the other sites."""

    heads: int
    error: float
    effect: float  # the largest change of the loss
    sentence: str
    unmatched: tuple[str, ...]


def judge_importance(model: nn.Module, call: Call) -> dict[str, Any]:
    """Compare what `ablate` reports of each head with the loss of the model in which its weights are 0.

    The loss is a projection of all outputs. The oracle multiplies the softmax that the model itself computes,
    and uses no code of polyhead. Where rounding in float32 may decide, the model is compared in float64.

    Args:
        model: a model, in evaluation mode.
        call: runs the model, always with the same random numbers.

    Returns:
        `importance`: "every" if the heads of every site with attention agree, "part" if those of some sites do,
        "refused" if `ablate` refuses the model, "wrong"; and the reason, the heads compared and the largest error.
    """
    try:
        found = _compared(call)
        note = {}
        if not found.error <= TOLERANCE:
            with default_dtype(torch.float64):
                rounded, found = found, _compared(call.in_float64())
            note = {"importance_note": f"compared in float64; in float32 it differs by {rounded.error:.1e}"}
    except PolyheadError as error:
        return {"importance": REFUSED, "importance_reason": str(error)}
    numbers = {"importance_heads": found.heads, "importance_error": found.error, "importance_effect": found.effect}
    if not found.error <= TOLERANCE:
        return {"importance": WRONG, "importance_reason": found.sentence, **numbers, **note}
    if found.effect <= TOLERANCE:
        return {"importance_reason": "no head changes the loss by more than 1e-5", **numbers}  # nothing to compare
    if found.unmatched:
        reason = f"not measured at {', '.join(found.unmatched[:3])}"
        return {"importance": PART, "importance_reason": reason, **numbers, **note}
    return {"importance": EVERY, **numbers, **note}


def _compared(call: Call) -> _Found:
    """Ablate the heads of all sites, and compare."""
    model = call.model
    softmaxes, outputs = softmaxes_of(model, call)
    loss = projection(outputs)
    with torch.no_grad(), polyhead.observe(model) as session:
        call()
    matches, unmatched = _matches([x for x in softmaxes if x.is_attention], tables_of(session.profile))
    order = {id(softmax): number for number, softmax in enumerate(softmaxes)}

    def without(site: Site, heads: int, head: int) -> Tensor:
        gate = Gate(matches[site].axis, heads, head, 0.0)
        return loss(softmaxes_of(model, call, {order[id(x)]: gate for x in matches[site].softmaxes})[1])

    try:
        importance = ablate(model, [{}], lambda *_: loss(call()))
    except PolyheadError:
        raise
    except Exception as raised:
        if any(
            _raises(type(raised), without, site, heads, head) for site, heads, head in _heads(matches, session.profile)
        ):
            raise OptionError(f"without a head the model raises {type(raised).__name__}: {raised}") from raised
        raise
    rows = [
        (row, (site.name, site.kind), site.num_heads, head)
        for row, (site, head) in enumerate(zip(importance.sites, importance.heads, strict=True))
        if (site.name, site.kind) in matches
    ]
    unmatched |= {site[0] for site in matches} - {site[0] for _, site, _, _ in rows}
    if len(rows) > MOST_HEADS:
        rows = [x for x in rows if x[3] == [*matches].index(x[1]) % x[2]]
    intact = float(loss(outputs))
    error, effect, sentence = 0.0, 0.0, ""
    for row, site, heads, head in rows:
        change, reported = float(without(site, heads, head)) - intact, float(importance["ablation"][row])
        effect = max(effect, abs(change))
        if not abs(change - reported) <= error:
            error = abs(change - reported)
            sentence = f"without head {head} of {site[0]} the loss changes by {change:.6g}, reported is {reported:.6g}"
    return _Found(len(rows), error, effect, sentence, tuple(sorted(unmatched)))


def _heads(matches: Mapping[Site, Match], profile: HeadProfile) -> Iterator[tuple[Site, int, int]]:
    for site in dict.fromkeys(x for x in profile.sites if (x.name, x.kind) in matches):
        for head in range(site.num_heads):
            yield (site.name, site.kind), site.num_heads, head


def _raises(kind: type[Exception], work: Callable[..., Any], *arguments: Any) -> bool:
    try:
        work(*arguments)
    except kind:
        return True
    return False


def _matches(
    attention: list[Softmax], tables: Mapping[Site, Mapping[str, Tensor]]
) -> tuple[dict[Site, Match], set[str]]:
    """Return the softmaxes of each site of a profile, and the names of modules and sites without a match."""
    by_site, missing = assigned(attention, {name for name, _ in tables})
    matches = {site: matched(by_site.get(site, []), table) for site, table in tables.items()}
    found = {site: match for site, match in matches.items() if len(match.softmaxes)}
    return found, {x.path for x in missing} | {site[0] for site in matches if site not in found}


def projection(outputs: Any) -> Callable[[Any], Tensor]:
    """Return a loss: a projection of all tensors of an output on a wave, of order 1 for these outputs.

    The number of elements may differ without a head, as where a model predicts durations.
    """
    scales = [float(x.abs().amax().clamp_min(1)) * x.numel() ** 0.5 for x in _values(outputs)]

    def loss(output: Any) -> Tensor:
        parts = [x.flatten() / scale for x, scale in zip(_values(output), scales, strict=True)]
        waves = [torch.cos(2.0**0.5 * torch.arange(len(x), dtype=torch.float64) ** 1.5) for x in parts]
        return torch.stack([x @ wave for x, wave in zip(parts, waves, strict=True)]).mean()

    return loss


def _values(output: Any) -> list[Tensor]:
    """Return the finite values of floating-point tensors in an output, except for attention weights."""
    if isinstance(output, Mapping):
        output = [x for name, x in output.items() if "attentions" not in name]
    tensors = [x.double() for x in tensors_of(output) if x.is_floating_point() and x.numel()]
    return [torch.where(x.isfinite(), x, 0.0) for x in tensors]
