"""Rows of attention from partial rows over disjoint keys, with all their statistics and the gradients of both.

With the log-sum-exp L_j of part j and that of the row, L, the share of a part is w_j = exp(L_j - L), and

    output, sums of weights   sum_j w_j x_j            max_logit, max_abs_logit   max_j x_j
    entropy                   sum_j w_j (H_j - log w_j)    visible_keys           sum_j x_j
    confidence                max_j w_j c_j

The log-sum-exp in float32 is as inexact as the logits are large. Each part has its max logit m_j and its confidence
c_j = exp(m_j - L_j) as well, so that the shares are computed from differences of max logits, and from exp(L_j - m_j) =
1 / c_j. A learned sink is one more part, whose log-sum-exp is its logit, without output and of entropy 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import LINEAR, NAMES

Pair = tuple[Tensor, Tensor]  # a result of a part, and its gradient


def part_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the statistics that the parts need, given those of the row, in the order of `statistics.NAMES`."""
    needed = {"max_logit", "confidence", *names} - {"learned_sink_mass"}
    return tuple(name for name in NAMES if name in needed)


def owner_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the maxima whose part has a gradient of its own."""
    needs_max = "max_logit" in names or "confidence" in names
    return (("max_logit",) if needs_max else ()) + (("max_abs_logit",) if "max_abs_logit" in names else ())


def accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


@dataclass(slots=True, eq=False)
class Rows:
    """Merged rows, and what the gradients of their parts need; [batch, heads, queries], the output with value_dim."""

    output: Tensor
    logsumexp: Tensor
    statistics: dict[str, Tensor]
    row_max: Tensor  # largest max logit of the parts and the sink; 0 without keys
    row_sum: Tensor  # sum of exp(L_j - row_max); 1 without keys
    owners: dict[str, Tensor]  # by `owner_names`: the first key of the part that has the maximum

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order of `from_tensors`."""
        rest = (*self.statistics.values(), *self.owners.values())
        return [self.output, self.logsumexp, self.row_max, self.row_sum, *rest]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], names: tuple[str, ...]) -> Rows:
        """Return rows with these `tensors()`, and the names of their statistics."""
        output, logsumexp, row_max, row_sum, *rest = tensors
        statistics = dict(zip(names, rest[: len(names)], strict=True))
        owners = dict(zip(owner_names(names), rest[len(names) :], strict=True))
        return cls(output, logsumexp, statistics, row_max, row_sum, owners)


class RowMerger:
    """Accumulator of rows, to which the parts are added in any order."""

    def __init__(self, names: tuple[str, ...], like: Tensor, sinks: Tensor | None) -> None:
        """Start with rows without keys, which have learned `sinks` if given; `like` has the shape of the output."""
        self.names, self.like, self.sinks = names, like, sinks
        self.only: tuple[AttentionOutput, int] | None = None  # a first part, which no other has joined yet
        self.has_begun = False

    def add(self, part: AttentionOutput, first_key: int) -> None:
        """Add the attention over some keys, the first of which is `first_key`, with the statistics of `part_names`."""
        if self.only is None and self.sinks is None and not self.has_begun:
            self.only = part, first_key
            return
        self._begin()
        self._merge(part, first_key)

    def _begin(self) -> None:
        """Allocate the sums, unless they are there, and merge what was kept aside."""
        if self.has_begun:
            return
        self.has_begun, like, names = True, self.like, self.names
        rows = like.new_empty(like.shape[:3], dtype=accumulation_dtype(like))
        self.sinks = None if self.sinks is None else self.sinks.to(rows.dtype)[:, None].expand_as(rows)
        self.row_max = torch.full_like(rows, -torch.inf) if self.sinks is None else self.sinks
        self.row_sum = torch.zeros_like(rows) if self.sinks is None else (self.sinks != -torch.inf).to(rows.dtype)
        self.output = torch.zeros_like(like, dtype=rows.dtype)
        self.entropy_sum = torch.zeros_like(rows)  # of a_j (H_j - log a_j) with a_j = exp(L_j - row_max)
        self.linear = {name: torch.zeros_like(rows) for name in names if name in LINEAR}
        self.visible_keys = torch.zeros_like(rows)
        self.maxima = {"max_logit": torch.full_like(rows, -torch.inf), "max_abs_logit": torch.zeros_like(rows)}
        self.owners = {name: torch.full_like(rows, -1, dtype=torch.int64) for name in self.maxima}
        if self.only is not None:
            self._merge(*self.only)
            self.only = None

    def _merge(self, part: AttentionOutput, first_key: int) -> None:
        statistics = part.statistics
        assert statistics is not None and statistics.max_logit is not None and statistics.confidence is not None
        row_max = torch.maximum(self.row_max, statistics.max_logit)
        decay, log_decay = _share(self.row_max, torch.ones_like(row_max), row_max)
        share, log_share = _share(statistics.max_logit, statistics.confidence, row_max)
        if statistics.entropy is not None:
            self.entropy_sum = decay * (self.entropy_sum - log_decay * self.row_sum)
            self.entropy_sum += share * (statistics.entropy - log_share)
        self.row_max, self.row_sum = row_max, self.row_sum * decay + share
        self.output.mul_(decay[..., None]).addcmul_(share[..., None], part.output.to(self.output.dtype))
        for name, total in self.linear.items():
            total.mul_(decay).addcmul_(share, getattr(statistics, name))
        if statistics.visible_keys is not None:
            self.visible_keys += statistics.visible_keys
        for name, largest in self.maxima.items():
            x, owner = getattr(statistics, name), self.owners[name]
            if x is not None:
                # Among equal maxima the lowest key has the gradient, so the part with the lowest keys does.
                is_larger = (x > largest) | x.isnan() | ((x == largest) & (owner > first_key))
                is_larger &= statistics.max_logit != -torch.inf
                self.maxima[name] = torch.where(is_larger, x, largest)
                self.owners[name] = torch.where(is_larger, first_key, owner)

    def finish(self, dtype: torch.dtype) -> Rows:
        """Return the rows of all parts so far, the output in this dtype."""
        if self.only is not None:
            return _rows_of_one(*self.only, self.names, dtype)
        self._begin()
        empty = self.row_sum == 0
        row_sum, row_max = torch.where(empty, 1.0, self.row_sum), torch.where(empty, 0.0, self.row_max)
        statistics = {name: total / row_sum for name, total in self.linear.items()}
        statistics |= self.maxima
        statistics["visible_keys"] = self.visible_keys
        statistics["entropy"] = torch.log(row_sum) + self.entropy_sum / row_sum
        statistics["confidence"] = torch.exp(self.maxima["max_logit"] - row_max) / row_sum
        if self.sinks is not None:
            statistics["learned_sink_mass"] = torch.exp(self.sinks - row_max) / row_sum
        logsumexp = torch.where(empty, -torch.inf, row_max + torch.log(row_sum))
        return Rows(
            (self.output / row_sum[..., None]).to(dtype),
            logsumexp,
            {name: statistics[name] for name in self.names},
            row_max,
            row_sum,
            {name: self.owners[name] for name in owner_names(self.names)},
        )


def _rows_of_one(part: AttentionOutput, first_key: int, names: tuple[str, ...], dtype: torch.dtype) -> Rows:
    """Return the rows of the only part there is: its own results, without rounding them again."""
    statistics = part.statistics
    assert statistics is not None and statistics.max_logit is not None and statistics.confidence is not None
    assert part.logsumexp is not None
    empty = statistics.max_logit == -torch.inf
    owner = torch.where(empty, -1, first_key)
    return Rows(
        part.output.to(dtype),
        part.logsumexp,
        {name: getattr(statistics, name) for name in names},
        torch.where(empty, 0.0, statistics.max_logit),
        torch.where(empty, 1.0, 1 / statistics.confidence),
        dict.fromkeys(owner_names(names), owner),
    )


def part_gradients(part: AttentionOutput, first_key: int, rows: Rows, grads: dict[str, Tensor]) -> list[Pair]:
    """Return the results of a part that have a gradient, each with it.

    Args:
        part: the attention over some keys, as it was merged.
        first_key: the first of these keys.
        rows: the merged rows.
        grads: gradients of the rows by name: output, logsumexp, or a statistic.
    """
    statistics = part.statistics
    assert statistics is not None and statistics.max_logit is not None and statistics.confidence is not None
    assert part.logsumexp is not None
    share, log_share = _share(statistics.max_logit.detach(), statistics.confidence.detach(), rows.row_max)
    weight, log_weight = share / rows.row_sum, log_share - torch.log(rows.row_sum)
    empty = statistics.max_logit == -torch.inf
    values = {name: x.detach() for name, x in statistics.items()} | {"output": part.output.detach()}
    pairs = [(part.logsumexp, _grad_logsumexp(values, weight, log_weight, empty, rows, grads))]
    for name, grad in grads.items():
        if name == "output":
            pairs.append((part.output, (grad * weight[..., None]).to(part.output.dtype)))
        elif name == "entropy" or name in LINEAR:
            pairs.append((getattr(statistics, name), grad * weight))
    grad_max = grads.get("max_logit")
    if "confidence" in grads:  # exp(max_logit - logsumexp)
        grad_confidence = grads["confidence"] * rows.statistics["confidence"]
        grad_max = grad_confidence if grad_max is None else grad_max + grad_confidence
    for name, grad_largest in (("max_logit", grad_max), ("max_abs_logit", grads.get("max_abs_logit"))):
        if grad_largest is not None:
            is_owner = rows.owners[name] == first_key
            pairs.append((getattr(statistics, name), torch.where(is_owner, grad_largest, 0.0)))
    return pairs


def sink_gradient(sinks: Tensor, rows: Rows, grads: dict[str, Tensor]) -> Tensor:
    """Return the gradient of the learned sinks [heads], a part of each row without output and of entropy 0."""
    logits = sinks.to(rows.row_sum.dtype)[:, None].expand_as(rows.row_sum)
    share, log_share = _share(logits, torch.ones_like(logits), rows.row_max)
    values = {"learned_sink_mass": torch.ones_like(logits)}
    log_weight = log_share - torch.log(rows.row_sum)
    grad = _grad_logsumexp(values, share / rows.row_sum, log_weight, logits == -torch.inf, rows, grads)
    return grad.sum((0, 2), dtype=torch.float64).to(sinks.dtype)


def _grad_logsumexp(
    values: dict[str, Tensor], weight: Tensor, log_weight: Tensor, empty: Tensor, rows: Rows, grads: dict[str, Tensor]
) -> Tensor:
    """Return the gradient of the log-sum-exp of a part with these results (0 where absent), through its share."""
    total = torch.zeros_like(weight)
    for name, grad in grads.items():
        if name == "logsumexp":
            total = total + grad
        elif name == "output":
            change = values[name].to(weight.dtype) - rows.output if name in values else -rows.output
            total = total + (grad * change).sum(-1)
        elif name == "entropy":
            total = total + grad * (values.get(name, 0.0) - log_weight - rows.statistics[name])
        elif name == "confidence":
            total = total - grad * rows.statistics[name]
        elif name in LINEAR or name == "learned_sink_mass":
            total = total + grad * (values.get(name, 0.0) - rows.statistics[name])
    return torch.where(empty, 0.0, total * weight)


def _share(max_logit: Tensor, confidence: Tensor, row_max: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(L_j - row_max) and its logarithm for parts of this max logit and confidence; 0 and 0 without keys."""
    empty = max_logit == -torch.inf
    shifted = torch.where(empty, 0.0, max_logit - row_max)
    confidence = torch.where(empty, 1.0, confidence)
    return torch.where(empty, 0.0, torch.exp(shifted) / confidence), shifted - torch.log(confidence)
