"""The verdict on one model: what `polyhead.observe` reports of it, held against the softmaxes that it computed."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyhead
from benchmarks.coverage.catalogue import Call
from benchmarks.coverage.oracle import Rows, Softmax, joined, rows_of, softmaxes_of
from benchmarks.measuring.calls import default_dtype
from polyhead.errors import PolyheadError
from polyhead.observation import HeadProfile

TOLERANCE = 2e-5  # of float32 statistics and outputs, relative to the larger of 1 and the exact value
EXACT, SLOW, PARTIAL, REFUSED, WRONG, NONE = "exact", "slow", "partial", "refused", "wrong", "no attention"
VERDICTS = (EXACT, SLOW, PARTIAL, REFUSED, WRONG, NONE)


@dataclass(slots=True)
class Judgement:
    """Verdict on one model, with its evidence.

    `sites` counts the attention sites that the oracle saw, `observed` those whose statistics agree; `missing` are
    neither observed nor listed by the session, `wrong` says which numbers differ.
    """

    verdict: str
    reason: str = ""
    sites: int = 0
    observed: int = 0
    worst: float = 0.0  # largest error of a statistic that was compared
    output: float = 0.0  # largest difference of the model's outputs
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that say something, as JSON types."""
        return {name: value for name, value in asdict(self).items() if value or name in ("verdict", "sites")}


def judge(model: nn.Module, call: Callable[[], Any]) -> Judgement:
    """Observe a model and compare it with an oracle.

    Args:
        model: a model, in evaluation mode.
        call: runs the model on its inputs, always with the same random numbers.
    """
    with torch.no_grad():
        expected = call()
        again = output_difference(expected, call())
    softmaxes, recorded = softmaxes_of(model, call)
    attention = [x for x in softmaxes if x.is_attention]
    result = Judgement(EXACT if attention else NONE, sites=len({x.path for x in attention}))
    if again > TOLERANCE:
        result.notes.append(f"two runs without a session differ by {again:.1e}")
    first = _state(model)
    with torch.no_grad():
        call()
    before = _state(model)
    own = _changes(first, before)  # by every forward of the model
    computed = _Computed(expected, attention)
    judged = _observed(model, call, computed, copy.deepcopy(result), is_random=again > TOLERANCE)
    if judged.verdict == WRONG and not judged.missing and isinstance(call, Call):
        judged = _within_rounding(model, call, _Computed(recorded, attention), result, judged)
    if changed := [x for x in _changes(before, _state(model)) if x not in own]:
        judged.verdict = WRONG
        judged.wrong.append(f"left behind by the session: {', '.join(changed[:5])}")
    return judged


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """Outputs of a model without a session, and its softmaxes over keys."""

    outputs: Any
    attention: list[Softmax]


def _within_rounding(model: nn.Module, call: Call, plain: _Computed, result: Judgement, wrong: Judgement) -> Judgement:
    """Return whether rounding in float32 is what differs: the judgement, or `wrong` if it is not.

    In float64 a session must be right within the usual tolerance. In float32, compared with the model in float64, the
    model's outputs may be off by twice as much as without a session, computed operator by operator, and statistics by
    as much as the logits of that computation justify.
    """
    try:
        with default_dtype(torch.float64):
            exact_call = call.in_float64()
            softmaxes, outputs = softmaxes_of(exact_call.model, exact_call)
            exact = _Computed(outputs, [x for x in softmaxes if x.is_attention])
            result.notes.append("within float32 rounding")
            in_float64 = _observed(exact_call.model, exact_call, exact, copy.deepcopy(result), is_random=False)
    except Exception as error:  # noqa: BLE001 - not every model runs in float64
        wrong.notes.append(f"not judged in float64: {type(error).__name__}: {error}")
        return wrong
    if in_float64.verdict == WRONG:
        wrong.notes.append("also in float64: " + "; ".join((*in_float64.wrong, *in_float64.missing)))
        return wrong
    rounded = _observed(model, call, exact, copy.deepcopy(result), is_random=False, plain=plain)
    if rounded.verdict == WRONG:
        wrong.notes.append("in float64 it is right, in float32 beyond rounding: " + "; ".join(rounded.wrong))
        return wrong
    return rounded


def _observed(
    model: nn.Module,
    call: Callable[[], Any],
    exact: _Computed,
    result: Judgement,
    *,
    is_random: bool,
    plain: _Computed | None = None,
) -> Judgement:
    """Observe a model and compare; what the rounding of `plain` allows may exceed the tolerance."""
    try:
        with torch.no_grad(), polyhead.observe(model) as session:
            output = call()
    except PolyheadError as error:
        if result.verdict != NONE:
            result.verdict = REFUSED
        result.reason = str(error)
        return result
    except Exception as error:  # noqa: BLE001 - a model that runs without a session must run with one
        result.verdict = WRONG
        result.wrong.append(f"the session raised {type(error).__name__}: {error}")
        return result
    result.output = output_difference(exact.outputs, output)
    allowed = TOLERANCE if plain is None else max(TOLERANCE, 2 * output_difference(exact.outputs, plain.outputs))
    if not result.output <= allowed and not is_random:
        result.wrong.append(f"outputs of the model differ by {result.output:.1e}")
    if len(session.materialised):
        result.verdict = SLOW
    result.skipped = [f"{site}: {reason}" for site, reason in session.skipped]
    tables = tables_of(session.profile)
    names = {name for name, _ in tables}
    by_site, missing = assigned(exact.attention, names)
    of_plain = None if plain is None else assigned(plain.attention, names)[0]
    listed = {site.partition("#")[0] for site, _ in session.skipped}
    silent = sorted({x.path for x in missing} - {x.path for x in missing if any(m.path in listed for m in x.modules)})
    result.missing = silent
    for (name, kind), table in tables.items():
        rounded = None if of_plain is None else of_plain.get((name, kind), [])
        match = matched(by_site.get((name, kind), []), table, rounded)
        if not match.error <= TOLERANCE:
            result.wrong.append(f"{name} ({kind}): {match.sentence}")
        else:
            result.observed += 1
            result.worst = max(result.worst, match.error)
    if result.wrong or silent:
        result.verdict = WRONG
    elif missing:
        result.verdict = PARTIAL if result.observed else REFUSED
        result.reason = result.skipped[0] if result.skipped else "not observed"
    return result


def tables_of(profile: HeadProfile) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Return the columns of each site of a profile, by its name and kind."""
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, site in enumerate(profile.sites):
        rows[site.name, site.kind].append(index)
    names = ("tokens", *profile.names, *(f"{name}_max" for name in profile.names))
    return {
        key: {name: profile[name][index] for name in names if name in profile.columns} for key, index in rows.items()
    }


def assigned(attention: list[Softmax], sites: set[str]) -> tuple[dict[tuple[str, str], list[Softmax]], list[Softmax]]:
    """Assign softmaxes to the innermost site that ran, as both kinds; return also those without any."""
    by_site: dict[tuple[str, str], list[Softmax]] = defaultdict(list)
    missing = []
    counts: dict[str, int] = defaultdict(int)
    for softmax in attention:
        for path, number in softmax.ordinals.items():
            counts[path] = max(counts[path], number)
    for softmax in attention:
        for running in reversed(softmax.modules):
            number = softmax.ordinals[running.path]
            numbered = f"{running.path}#{number}"
            name = numbered if numbered in sites else running.path
            own = sorted((x for x in sites if x.partition("#")[0] == running.path), key=lambda x: (len(x), x))
            if name not in sites and len(own) == counts[running.path]:
                name = own[number - 1]  # the session also numbers calls that are no attention
            if name in sites:
                by_site[name, "self"].append(softmax)
                by_site[name, "cross"].append(softmax)
                break
        else:
            missing.append(softmax)
    return by_site, missing


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The softmaxes of a site that agree best with its statistics, and the axis of their heads.

    `error` is the largest of a statistic, and `sentence` says which one it is.
    """

    error: float
    sentence: str
    softmaxes: Sequence[Softmax] = ()
    axis: int = 0


def matched(softmaxes: list[Softmax], table: Mapping[str, Tensor], plain: list[Softmax] | None = None) -> Match:
    """Return the best match of a site, with the largest error beyond what the rounding of `plain` allows.

    If no logit is off by more than d, then to first order no statistic is by more than 2 d, relative to the larger of 1
    and its value: a mass moves by at most d / 2, an entropy or a distance by at most 2 d of itself.
    """
    if not softmaxes or (plain is not None and [x.logits.shape for x in plain] != [x.logits.shape for x in softmaxes]):
        return Match(float("inf"), "the model computed no attention there")
    heads = len(table["tokens"])
    best = Match(float("inf"), f"{heads} heads, of logits {[*softmaxes[0].logits.shape]}")
    chosen = [x for x in softmaxes if x.kind == "softmax"]
    allowed = 0.0 if plain is None else 2 * max(map(_rounding, plain, softmaxes))
    for choice in (chosen, [x for x in chosen if _is_self(x)], [x for x in chosen if not _is_self(x)]):
        for axis in range(chosen[0].logits.ndim - 2 + 1) if choice else ():
            parts = [_rows(x, heads, axis) for x in choice]
            if all(part is not None for part in parts):
                exact = joined([part for part in parts if part is not None]).table()
                if all(float(x.logits.amax(-1).abs().max()) == 0 for x in choice):
                    exact = {name: x for name, x in exact.items() if "logit" not in name}  # its maximum was subtracted
                error, sentence = _compared(exact, table, allowed)
                best = min(best, Match(error, sentence, choice, axis), key=lambda x: x.error)
    return best


def _rounding(rounded: Softmax, exact: Softmax) -> float:
    """Return the largest error of a logit that is not masked."""
    is_visible = (rounded.logits > rounded.masked) & (exact.logits > exact.masked)
    return float(torch.where(is_visible, rounded.logits - exact.logits, 0).abs().max())


def _is_self(softmax: Softmax) -> bool:
    return softmax.logits.shape[-1] - softmax.has_sink() == softmax.logits.shape[-2]


def _rows(softmax: Softmax, heads: int, axis: int) -> Rows | None:
    """Return the rows of a softmax with its heads in this axis; beyond the axes, in all of them but the last two."""
    leading = softmax.logits.ndim - 2
    if axis == leading:
        count = softmax.logits[..., 0, 0].numel()
        if softmax.logits.numel() == 0 or count % heads:
            return None
        flat = softmax.logits.reshape(-1, *softmax.logits.shape[-2:])
        return rows_of(replace(softmax, logits=flat), heads, 0)
    return rows_of(softmax, heads, axis) if softmax.logits.shape[axis] == heads else None


def _compared(exact: Mapping[str, Tensor], table: Mapping[str, Tensor], allowed: float) -> tuple[float, str]:
    """Return the largest error among the columns that both have; 0 for one that is allowed."""
    worst = (0.0, "")
    for name, values in table.items():
        if name not in exact or bool(values.isnan().all()):
            continue
        want, got = exact[name], values.double()
        error = ((got - want).abs() / want.abs().clamp_min(1)).nan_to_num(torch.inf)
        error = torch.where(got.isnan() & want.isnan() | (got == want) | (error <= allowed), 0, error)
        if not bool((error <= worst[0]).all()):
            head = int(error.argmax())
            worst = (
                float(error[head]),
                f"{name} of head {head} is {float(got[head]):.6g}, exact {float(want[head]):.6g}",
            )
    return worst


# ---- what must be as before


def _state(model: nn.Module) -> dict[str, Any]:
    """Return what a session may not change, by name."""
    from transformers import PreTrainedModel

    state: dict[str, Any] = {
        "F.scaled_dot_product_attention": F.scaled_dot_product_attention,
        "F.softmax": F.softmax,
        "F.multi_head_attention_forward": F.multi_head_attention_forward,
        "torch.softmax": torch.softmax,
        "Tensor.softmax": Tensor.softmax,
        "Module.__call__": nn.Module.__call__,
        "MHA fast path": torch.backends.mha.get_fastpath_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "training": model.training,
    }
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            state[f"{path}.{name}"] = dict(value) if isinstance(value, dict) else value
        state[f"{path}.forward"] = type(module).forward
        if isinstance(module, PreTrainedModel):
            state[f"{path}.config"] = module.config.to_dict()
            state[f"{path}._attn_implementation"] = module.config._attn_implementation
    return state


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names whose values are no longer the same objects."""
    return sorted(
        name
        for name in {*before, *after}
        if name not in before or name not in after or not _same(before[name], after[name])
    )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return [*one] == [*other] and all(one[key] is other[key] or _equal(one[key], other[key]) for key in one)
    return one is other or _equal(one, other)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    with suppress(Exception):
        return bool(one == other)
    return False


def output_difference(one: Any, other: Any) -> float:
    """Return the largest difference of all tensors in two outputs, relative to the largest value of each."""
    worst = 0.0
    for x, y in zip(tensors_of(one), tensors_of(other), strict=False):
        if x.shape != y.shape:
            return float("inf")
        if x.is_floating_point() and x.numel():
            x, y = x.double().nan_to_num(7.0), y.double().nan_to_num(7.0)
            worst = max(worst, float((x - y).abs().max() / x.abs().max().clamp_min(1)))
    return worst


def tensors_of(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        x = [*x.values()]
    if isinstance(x, list | tuple):
        return [tensor for part in x for tensor in tensors_of(part)]
    return []
