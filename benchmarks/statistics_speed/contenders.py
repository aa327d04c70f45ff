"""Attention as each contender computes it, given one problem: a builder returns the call that is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyhead
from benchmarks.measuring.cases import OURS
from benchmarks.statistics_speed.exact import Found
from benchmarks.statistics_speed.places import ROW_STATISTICS
from benchmarks.statistics_speed.problem import Problem
from polyhead import AttentionOutput

WITH = f"{OURS}, statistics"
WITHOUT = f"{OURS}, no statistics"
GUARDED = f"{OURS}, statistics, finite=False"
PENALTY = f"{OURS}, entropy penalty"
PROFILE = f"{OURS}, profile"
CUDNN = "cuDNN SDPA"
FLASH = "flash SDPA"
FLEX = "FlexAttention, lse + max"
MATERIALISED = "materialised weights"
BACKEND = "fused"
SDPA = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}


def ours(problem: Problem, **options: Any) -> Callable[[], AttentionOutput]:
    """`polyhead.attention` with these options."""
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask

    def call() -> AttentionOutput:
        with torch.no_grad():
            return polyhead.attention(query, key, value, mask=mask, **options)

    return call


def with_rows(
    problem: Problem, names: Sequence[str] = ROW_STATISTICS, *, finite: bool = True, backend: str | None = None
) -> Callable[[], AttentionOutput]:
    """`polyhead.attention` with log-sum-exp and these statistics, from the kernels of a GPU by default."""
    statistics = tuple(names) or None
    return ours(problem, statistics=statistics, logsumexp=True, backend=backend or BACKEND, finite=finite)


def pytorch(problem: Problem) -> Callable[[], Tensor]:
    """PyTorch's own function with the kernel that it chooses."""
    query, key, value, causal = problem.query, problem.key, problem.value, problem.causal
    grouped = problem.shape.group > 1

    def call() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)

    return call


def sdpa(problem: Problem, name: str) -> Callable[[], Tensor]:
    """PyTorch's own function with one of its kernels and no other."""
    query, key, value, causal = problem.query, problem.key, problem.value, problem.causal
    grouped, kernel = problem.shape.group > 1, SDPA[name]

    def call() -> Tensor:
        with torch.no_grad(), sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)

    return call


def flex(problem: Problem) -> Callable[[], tuple[Tensor, Any]]:
    """Return FlexAttention compiled for this shape, with the row statistics that it supports."""
    from torch.nn.attention import flex_attention as module

    if not hasattr(module, "AuxRequest"):
        raise RuntimeError(f"torch {torch.__version__} has no AuxRequest, without which there are no maxima")
    torch.compiler.reset()  # each shape compiles anew, and the count of recompilations is limited
    compiled: Callable[..., Any] = torch.compile(module.flex_attention, dynamic=False)
    wanted = module.AuxRequest(lse=True, max_scores=True)
    tokens, grouped = problem.shape.tokens, problem.shape.group > 1
    mask = None
    if problem.causal:
        mask = module.create_block_mask(_not_after, None, None, tokens, tokens, device=problem.query.device)

    def call() -> tuple[Tensor, Any]:
        with torch.no_grad():
            return compiled(
                problem.query, problem.key, problem.value, block_mask=mask, enable_gqa=grouped, return_aux=wanted
            )

    return call


def _not_after(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def read_flex(result: tuple[Tensor, Any]) -> Found:
    output, row_stats = result
    return Found(output, {"logsumexp": row_stats.lse, "max_logit": row_stats.max_scores})


def materialised(problem: Problem) -> Callable[[], Found]:
    """Return the baseline with materialised weights: softmax in float32, and each statistic computed from them."""
    tokens, device = problem.shape.tokens, problem.query.device
    place = torch.arange(tokens, device=device)
    distance = (place[:, None] - place).abs().float()
    future = place > place[:, None] if problem.causal else None
    scale, group = 1 / math.sqrt(problem.shape.head_dim), problem.shape.group

    def call() -> Found:
        with torch.no_grad():
            key, value = problem.key, problem.value
            if group > 1:
                key, value = (x.repeat_interleave(group, 1) for x in (key, value))
            logits = (problem.query @ key.transpose(-1, -2)).float() * scale
            if future is not None:
                logits = logits.masked_fill(future, -torch.inf)
            weights = torch.softmax(logits, -1)
            rows = {
                "logsumexp": logits.logsumexp(-1),
                "max_logit": logits.amax(-1),
                "entropy": torch.special.entr(weights).sum(-1),
                "mean_distance": (weights * distance).sum(-1),
            }
            return Found(weights.to(value.dtype) @ value, rows)

    return call


class TrainingStep:
    """Forward and backward of one problem, with the gradients that arrive from above drawn beforehand."""

    def __init__(self, problem: Problem, *, seed: int = 0) -> None:
        self.problem = problem
        self.leaves = tuple(x.detach().requires_grad_() for x in (problem.query, problem.key, problem.value))
        generator = torch.Generator(problem.query.device).manual_seed(seed)
        self.upstream = torch.randn(
            problem.query.shape, generator=generator, device=problem.query.device, dtype=problem.query.dtype
        )
        self.entropy_upstream = torch.randn(
            problem.query.shape[:3], generator=generator, device=problem.query.device, dtype=torch.float32
        )

    def ours(self, *, penalty: bool = False, backend: str | None = None) -> Callable[[], tuple[Tensor, ...]]:
        """With row statistics; `penalty` sends a gradient through the entropy as well."""
        mask = self.problem.mask

        def call() -> tuple[Tensor, ...]:
            result = polyhead.attention(
                *self.leaves,
                mask=mask,
                statistics=ROW_STATISTICS,
                logsumexp=True,
                backend=backend or BACKEND,
                finite=True,
            )
            if not penalty:
                return torch.autograd.grad(result.output, self.leaves, self.upstream)
            assert result.statistics is not None and result.statistics.entropy is not None
            both = (result.output, result.statistics.entropy)
            return torch.autograd.grad(both, self.leaves, (self.upstream, self.entropy_upstream))

        return call

    def sdpa(self, name: str | None) -> Callable[[], tuple[Tensor, ...]]:
        """PyTorch's function: with one of its kernels, or with the one it chooses itself."""
        grouped, causal = self.problem.shape.group > 1, self.problem.causal
        query, key, value = self.leaves

        def call() -> tuple[Tensor, ...]:
            with nullcontext() if name is None else sdpa_kernel(SDPA[name]):
                output = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)
            return torch.autograd.grad(output, self.leaves, self.upstream)

        return call
