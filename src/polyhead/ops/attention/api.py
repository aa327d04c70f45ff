"""`attention`, on which every layer is built, and `explain`, which reports the chosen backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from polyhead.masks import Mask
from polyhead.ops.attention import cpu_calls, dispatch, plain_calls
from polyhead.ops.attention.dispatch import Explanation
from polyhead.ops.attention.validation import checked_request
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import Statistics
from polyhead.ops.common.validation import without_autocast

if TYPE_CHECKING:
    from jaxtyping import Float


def attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    *,
    mask: Mask | None = None,
    scale: float | Float[Tensor, " heads"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str = "auto",
    weights: bool = False,
    statistics: bool | str | Sequence[str] | Statistics | None = None,
    logsumexp: bool = False,
    finite: bool = False,
) -> AttentionOutput:
    """Compute softmax attention of every query over its visible keys: softmax(scale * Q K^T) V per head.

    Args:
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim]; `heads` must be a multiple of `kv_heads`, and query head i reads
            KV head `i // (heads // kv_heads)`. Keys are not repeated in memory unless the kernel requires it.
        value: [batch, kv_heads, keys, value_dim].
        mask: the keys each query may attend to; see `polyhead.Mask`.
        scale: factor of the dot products; 1/sqrt(head_dim) by default. One number, or one per head.
        softcap: soft-caps the logits to `softcap * tanh(logits / softcap)`, before mask and bias.
        sinks: one learned logit per head that takes part in the softmax and has no value.
        dropout: dropout rate of the weights.
        seed: makes dropout a function of (seed, batch, head, query, key), the same in every backend that supports it
            (all but "sdpa"). By default dropout is drawn from PyTorch's generator.
        backend: "auto", or one of "sdpa", "fused", "blockwise", "reference". A named backend never falls back.
        weights: also return the weights, before dropout, in the accumulation dtype.
        statistics: per-row statistics to return, e.g. ("entropy", "max_logit"); True for all, or
            `polyhead.Statistics(...)`; see `polyhead.ops.attention.RowStatistics`. Statistics that are not requested
            cost nothing.
        logsumexp: return the log-sum-exp of each row, even if this requires a slower backend.
        finite: the caller guarantees that keys and values contain no NaN or Inf. A masked call then skips the removal
            of masked NaN and Inf, which would otherwise propagate as 0 * NaN.

    Returns:
        The output [batch, heads, queries, value_dim], the backend that computed it, and what was requested besides.

    Raises:
        ShapeError, DtypeError, DeviceError, MaskError, OptionError: tensors or options do not fit together.
        BackendUnsupported: the named backend cannot compute the call; the reasons are listed.

    A row without visible keys has exactly zero output and zero gradient. NaN and Inf in masked keys and values never
    reach an output or a gradient, unless `finite` is wrongly set.

    >>> import torch, polyhead
    >>> query, key = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 5, 16)
    >>> result = polyhead.attention(query, key, key, mask=polyhead.Mask.causal())
    >>> result.output.shape, result.backend
    (torch.Size([2, 8, 5, 16]), 'sdpa')
    """
    has_defaults = softcap is None and sinks is None and seed is None and backend == "auto" and not weights
    if has_defaults and type(dropout) is float and not dropout and isinstance(query, Tensor):
        if statistics is not None:
            result = plain_calls.attend_with_statistics(query, key, value, mask, scale, finite, statistics)
            if result is not None:
                return result
        elif not logsumexp:
            attend = cpu_calls.attend if query.is_cpu else plain_calls.attend
            result = attend(query, key, value, mask, scale, finite)
            if result is not None:
                return result
    request = checked_request(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
        seed=seed,
        weights=weights,
        logsumexp=logsumexp,
        finite=finite,
        statistics=statistics,
    )
    with without_autocast(query.device.type):
        return dispatch.run(request, backend)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    weights: bool = False,
    statistics: bool | str | Sequence[str] | Statistics | None = None,
    logsumexp: bool = False,
    finite: bool = False,
) -> Explanation:
    """Return the backend that `attention` would choose for the same arguments, and why it would not choose others.

    Args:
        query, key, value, mask, scale, softcap, sinks, dropout, seed, weights, statistics, logsumexp, finite: as in
            `attention`.

    Raises:
        ShapeError, DtypeError, DeviceError, MaskError, OptionError: tensors or options do not fit together.

    >>> import torch, polyhead
    >>> x = torch.randn(1, 4, 6, 8)
    >>> print(polyhead.explain(x, x, x, softcap=30.0))
       sdpa       no: PyTorch's fused kernels have no softcap
       fused      no: our kernels run on CUDA devices, got tensors on cpu
    -> blockwise  tiles of plain PyTorch, online softmax
       reference  the formula, weights materialised; auto tries blockwise first
    """
    request = checked_request(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
        seed=seed,
        weights=weights,
        logsumexp=logsumexp,
        finite=finite,
        statistics=statistics,
    )
    return dispatch.explain(request)
