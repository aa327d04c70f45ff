"""Reference that a contender must match before it is timed: the float64 formula at sampled rows of the problem."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring.agreement import hold, hold_within
from benchmarks.statistics_speed.problem import Problem
from polyhead import AttentionOutput
from polyhead.ops.profile import AttentionProfile

ROWS = 64
COLUMNS = 64
GRADIENT_TOKENS = 256  # the float64 gradient holds tokens x tokens weights


@dataclass(frozen=True, eq=False)
class Found:
    """Output of an attention: [batch, heads, queries, head_dim], and whatever else [batch, heads, queries]."""

    output: Tensor
    rows: Mapping[str, Tensor] = field(default_factory=dict)  # logsumexp among them

    @classmethod
    def of(cls, result: AttentionOutput) -> Found:
        rows = {} if result.statistics is None else dict(result.statistics.items())
        return cls(result.output, rows if result.logsumexp is None else {**rows, "logsumexp": result.logsumexp})


class Exact:
    """The last sequence of a problem at some of its rows, in float64 and with every intermediate in its own dtype."""

    def __init__(self, problem: Problem, *, seed: int = 0) -> None:
        tokens = problem.query.shape[2]
        drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[: ROWS - 2]
        self.problem = problem
        self.index = torch.cat([drawn, torch.tensor([0, tokens - 1])]).unique().to(problem.query.device)

    @functools.cached_property
    def right(self) -> Found:
        return formula(self.problem, self.index, torch.float64)

    @functools.cached_property
    def plain(self) -> Found:
        return formula(self.problem, self.index, self.problem.query.dtype)

    def check(self, name: str, found: Found) -> None:
        """Raise unless rounding at every step explains the errors."""
        with torch.no_grad():
            hold(f"{name}: the output", self._rows(found.output), self.right.output, self.plain.output)
            for what, actual in found.rows.items():
                hold(f"{name}: {what}", self._rows(actual), self.right.rows[what], self.plain.rows[what])

    def check_ours(self, name: str, found: Found) -> None:
        """Check the output in the same way, and our statistics within absolute bounds."""
        self.check(name, Found(found.output))
        key = self.problem.key[-1].float().norm(dim=-1).amax(-1).repeat_interleave(self.problem.shape.group)
        query = self._rows(self.problem.query).float().norm(dim=-1)
        logit = 1e-5 * self.problem.scale * (query * key[:, None]).double()  # [1, heads, rows]
        for what, actual in found.rows.items():
            right = self.right.rows[what]
            allowed = {
                "max_logit": logit,
                "logsumexp": logit + 1e-5,
                "entropy": torch.full_like(right, 1e-3),
                "mean_distance": 1e-3 * right.clamp_min(1.0),
            }[what]
            hold_within(f"{name}: {what}", self._rows(actual), right, allowed)

    def _rows(self, x: Tensor) -> Tensor:
        return x[-1:, :, self.index]


def formula(problem: Problem, index: Tensor, dtype: torch.dtype) -> Found:
    """Compute the last sequence's queries at `index`, one KV head at a time, with every intermediate in `dtype`."""
    group = problem.shape.group
    outputs, rows = [], []
    for head in range(problem.shape.kv_heads):
        query = problem.query[-1, head * group : (head + 1) * group, index].to(dtype)
        key, value = (x[-1, head].to(dtype) for x in (problem.key, problem.value))
        output, row_stats = _one_key_head(query, key, value, problem, index)
        outputs.append(output)
        rows.append(row_stats)
    return Found(torch.cat(outputs)[None], {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]})


def _one_key_head(
    query: Tensor, key: Tensor, value: Tensor, problem: Problem, index: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    distance = torch.arange(len(key), device=key.device) - (index + problem.first_query)[:, None]
    logits = query @ key.T * problem.scale
    if problem.causal:
        logits = logits.masked_fill(distance > 0, -torch.inf)
    weights = torch.softmax(logits, -1)
    rows = {
        "max_logit": logits.amax(-1),
        "logsumexp": logits.logsumexp(-1),
        "entropy": torch.special.entr(weights).sum(-1),
        "mean_distance": (weights * distance.abs()).sum(-1),
    }
    return weights @ value, rows


def check_gradients(
    name: str, problem: Problem, grads: tuple[Tensor, ...], upstream: Tensor, entropy_upstream: Tensor | None
) -> None:
    """Check the gradients of query, key and value of a short problem against autograd through the formula."""

    def reference(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (problem.query, problem.key, problem.value)]
        query, key, value = leaves
        key, value = (x.repeat_interleave(problem.shape.group, 1) for x in (key, value))
        logits = query @ key.transpose(-1, -2) * problem.scale
        hidden = torch.ones_like(logits, dtype=torch.bool).triu(1) & problem.causal
        weights = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)
        outputs, given = [weights @ value], [upstream.to(dtype)]
        if entropy_upstream is not None:
            # log(0) of a hidden weight has no derivative, so the entropy is taken as L - sum of p s.
            total = logits.masked_fill(hidden, -torch.inf).logsumexp(-1)
            outputs.append(total - (weights * logits.masked_fill(hidden, 0.0)).sum(-1))
            given.append(entropy_upstream.to(dtype))
        return torch.autograd.grad(outputs, leaves, given)

    exact, plain = reference(torch.float64), reference(problem.query.dtype)
    for what, ours, right, rounded in zip(("query", "key", "value"), grads, exact, plain, strict=True):
        hold(f"{name}: the gradient of the {what}", ours, right, rounded)


def check_profile(name: str, problem: Problem, logsumexp: Tensor, profile: AttentionProfile) -> None:
    """Check column sums at random keys against float64, and the map against its row sums and the column sums.

    The tolerance is 1e-3 of the larger of 1 and the exact value.
    """
    received, block_map = profile.received, profile.block_map
    assert received is not None and block_map is not None and profile.block is not None
    tokens = problem.key.shape[2]
    drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))[:COLUMNS].to(received.device)
    for head in range(problem.shape.heads):
        query = problem.query[-1, head].double()
        key = problem.key[-1, head // problem.shape.group, drawn].double()
        logits = query @ key.T * problem.scale
        if problem.causal:
            logits = logits.masked_fill(drawn > torch.arange(len(query), device=drawn.device)[:, None], -torch.inf)
        right = torch.exp(logits - logsumexp[-1, head].double()[:, None]).sum(0)
        hold_within(f"{name}: received", received[-1, head, drawn], right, 1e-3 * right.clamp_min(1.0))
    height, width = profile.block
    rows = torch.full_like(block_map[..., 0], height, dtype=torch.float64)
    rows[..., -1] = tokens - height * (block_map.shape[2] - 1)
    hold_within(f"{name}: the map's rows", block_map.double().sum(-1), rows, 1e-3 * rows)
    columns = F.pad(received.double(), (0, block_map.shape[3] * width - tokens))
    columns = columns.unflatten(-1, (block_map.shape[3], width)).sum(-1)
    hold_within(f"{name}: the map's columns", block_map.double().sum(-2), columns, 1e-3 * columns.clamp_min(1.0))
