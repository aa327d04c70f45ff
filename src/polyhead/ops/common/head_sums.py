"""Sums per head over the tokens of an attention call, by kernel or in PyTorch; nothing waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.ops.common.row_reduction import has_kernel


class CountedTokens(NamedTuple):
    """Tokens of an attention call."""

    tokens: Tensor  # [batch, queries], boolean
    number: Tensor  # of tokens
    entropies: Tensor | None  # [heads, bins + 1]: histogram of their normalized entropy


def count_tokens(
    keys: Tensor, real: Tensor | None, entropy: Tensor | None = None, *, bins: int = 0, learned_sinks: bool = False
) -> CountedTokens:
    """Return the tokens that see a key in any head, and the histogram of their normalized entropy in each head.

    Args:
        keys: number of visible keys, [batch, heads, queries].
        real: [batch or 1, queries], False for padding; None: all rows count.
        entropy: entropy of each row, of the shape of `keys`; None for no histogram. Rows with a single term do not
            count in it.
        bins: number of bins between 0 and 1; NaN is counted in one more.
        learned_sinks: True if a learned sink adds one term to a row's maximal entropy.
    """
    if keys.numel() and has_kernel(keys):
        from polyhead.ops.common.kernels.head_sums import tokens_and_entropies

        tokens, number, entropies = tokens_and_entropies(entropy, keys, real, bins=bins, learned_sinks=learned_sinks)
        return CountedTokens(tokens, number, None if entropy is None else entropies)
    tokens = (keys > 0).any(1)
    tokens = tokens if real is None else tokens & real
    counts = None
    if entropy is not None:
        terms = keys + int(learned_sinks)
        counted = (keys > 0) & (terms > 1)  # a single term has no entropy
        counted = counted if real is None else counted & real[:, None]
        share = entropy / terms.clamp_min(2.0).log()
        share, counted = (x.transpose(0, 1).flatten(1) for x in (share, counted.expand_as(share)))
        counts = histogram(share, counted, bins)
    return CountedTokens(tokens, tokens.sum(), counts)


def histogram(values: Tensor, counted: Tensor, bins: int) -> Tensor:
    """Return the counts of samples [*shape, samples] between 0 and 1 in equal bins, [*shape, bins + 1].

    Args:
        values: samples; the bins at the ends hold those beyond them, the last one those that are NaN.
        counted: False for samples that are ignored.
        bins: number of bins.
    """
    index = (values * bins).clamp(0, bins - 1).nan_to_num(nan=bins).long()
    counts = torch.zeros(*values.shape[:-1], bins + 1, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(-1, index, counted.long())


def squared_norms(x: Tensor, tokens: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the squared norm of each head over the tokens, [heads].

    Args:
        x: [batch, heads, queries, dim]; rows that are no tokens are ignored, even if they are NaN.
        tokens: [batch, queries], boolean.
        dtype: that of the result, if no kernel computes it in float64.
    """
    if x.numel() and has_kernel(x):
        from polyhead.ops.common.kernels import head_sums as kernels

        return kernels.squared_norms(x, tokens.expand(len(x), -1).contiguous())
    norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    norms = torch.where(tokens[:, None], norms, 0.0)
    return torch.linalg.vector_norm(norms, dim=(0, 2), dtype=dtype).square()


def quadratic_forms(x: Tensor, matrices: Tensor, tokens: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the sum over tokens of x A x^T for each head, [heads].

    Args:
        x: [tokens, heads, dim]; rows that are no tokens are ignored, even if they are NaN.
        matrices: A, [heads, dim, dim], contiguous and of 32 bits at least.
        tokens: boolean, one element for each row of `x`; None: all count.
        dtype: that of the result, if no kernel computes it in float64.
    """
    if x.numel() and x.dtype is not torch.float64 and has_kernel(x):
        from polyhead.ops.common.kernels import head_sums as kernels

        return kernels.quadratic_forms(x if x.stride(2) == 1 else x.contiguous(), matrices, tokens)
    x = x if tokens is None else torch.where(tokens.reshape(-1, 1, 1), x, 0.0)
    by_head = x.transpose(0, 1)
    return (product(by_head.mT, by_head) * matrices).sum((1, 2), dtype=dtype)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return a batched product in float32 at least; squares of 16-bit numbers overflow."""
    if left.is_cuda and left.dtype.itemsize == 2:
        return torch.bmm(left, right, out_dtype=torch.float32)
    dtype = torch.promote_types(left.dtype, torch.float32)
    return torch.bmm(left.to(dtype), right.to(dtype))
