"""`attention`, on which every layer is built, and `explain`, which reports the chosen backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyhead.errors import DeviceError, DtypeError, MaskError, OptionError, ShapeError
from polyhead.masks import Mask
from polyhead.ops.attention import dispatch
from polyhead.ops.attention.dispatch import Explanation
from polyhead.ops.common.request import AttentionOutput, AttentionRequest, StatisticsRequest
from polyhead.ops.common.statistics import Statistics, as_statistics
from polyhead.ops.common.visibility import Visibility, resolve

if TYPE_CHECKING:
    from jaxtyping import Float

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
        seed: makes dropout a function of (seed, batch, head, query, key), the same in each of polyhead's own backends.
        backend: "auto", or one of "sdpa", "fused", "blockwise", "reference". A named backend never falls back.
        weights: also return the weights, before dropout, in the accumulation dtype.
        statistics: per-row statistics to return, e.g. ("entropy", "max_logit"); True for all, or
            `polyhead.Statistics(...)`; see `polyhead.ops.attention.RowStatistics`. Statistics that are not requested
            cost nothing.
        logsumexp: return the log-sum-exp of each row, even if this requires a slower backend.
        finite: a guarantee that keys and values contain no NaN or Inf. Under a mask it saves the passes that keep
            masked non-finite values from spreading; if it does not hold, they may spread.

    A row without visible keys has exactly zero output and zero gradient. NaN and Inf in masked keys and values never
    reach an output or a gradient.

    >>> import torch, polyhead
    >>> query, key = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 5, 16)
    >>> result = polyhead.attention(query, key, key, mask=polyhead.Mask.causal())
    >>> result.output.shape, result.backend
    (torch.Size([2, 8, 5, 16]), 'sdpa')
    """
    request = _request(
        query, key, value, mask, scale, softcap, sinks, dropout, seed, weights, logsumexp, finite, statistics
    )
    kind = query.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):
            return dispatch.run(request, backend)
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
    """Return the backend that would run this call, and the reasons why the others would not.

    >>> import torch, polyhead
    >>> x = torch.randn(1, 4, 6, 8)
    >>> print(polyhead.explain(x, x, x, softcap=30.0))
       sdpa       no: PyTorch's fused kernels have no softcap
       fused      no: our kernels run on CUDA devices, got tensors on cpu
    -> blockwise  tiles of plain PyTorch, online softmax
       reference  the formula, weights materialised
    """
    request = _request(
        query, key, value, mask, scale, softcap, sinks, dropout, seed, weights, logsumexp, finite, statistics
    )
    return dispatch.explain(request)


def _request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: float | Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    seed: int | Tensor | None,
    weights: bool,
    logsumexp: bool,
    finite: bool,
    statistics: bool | str | Sequence[str] | Statistics | None,
) -> AttentionRequest:
    """Validate the arguments and build the request that backends take."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        kinds = [type(x).__name__ for x in (query, key, value)]
        raise DtypeError(f"query, key and value must be tensors, got {kinds[0]}, {kinds[1]} and {kinds[2]}")
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ShapeError(
            "query, key and value must be [batch, heads, sequence, head_dim], "
            f"got shapes {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    kind = query.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (
            x.to(dtype) if x.dtype in (torch.float32, torch.float16, torch.bfloat16) else x for x in (query, key, value)
        )
    if not (query.dtype is key.dtype is value.dtype):
        raise DtypeError(f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}")
    if query.dtype not in _DTYPES:
        raise DtypeError(f"attention takes float16, bfloat16, float32 or float64, got {query.dtype}")
    if not (query.device == key.device == value.device):
        raise DeviceError(
            f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}"
        )
    batch, heads, queries, head_dim = query.shape
    key_batch, kv_heads, keys, key_dim = key.shape
    if key_batch != batch or value.shape[0] != batch:
        raise ShapeError(
            f"query, key and value must have one batch size, got {batch}, {key_batch} and {value.shape[0]}"
        )
    if value.shape[1] != kv_heads or value.shape[2] != keys:
        raise ShapeError(
            "key and value must have the same heads and the same sequence, "
            f"got {kv_heads} heads of {keys} and {value.shape[1]} heads of {value.shape[2]}"
        )
    if key_dim != head_dim:
        raise ShapeError(f"query and key must have one head_dim, got {head_dim} and {key_dim}")
    if head_dim == 0 or heads == 0 or kv_heads == 0:
        raise ShapeError(
            "there must be at least one head and one channel, "
            f"got {heads} heads, {kv_heads} KV heads and head_dim {head_dim}"
        )
    if heads % kv_heads:
        raise ShapeError(f"query heads must be a multiple of KV heads, got {heads} and {kv_heads}")
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    elif isinstance(scale, Tensor):
        _check_per_head("scale", scale, heads, query)
    elif not (_is_number(scale) and math.isfinite(scale)):
        raise OptionError(f"scale must be a finite number, or a tensor with one number per head, got {scale!r}")
    if softcap is not None and not (_is_number(softcap) and 0 < softcap < math.inf):
        raise OptionError(f"softcap must be positive and finite, got {softcap!r}; pass None for no softcap")
    if sinks is not None:
        _check_per_head("sinks", sinks, heads, query)
    if not (_is_number(dropout) and 0.0 <= dropout < 1.0):
        raise OptionError(f"dropout must be at least 0 and less than 1, got {dropout!r}")
    requested = as_statistics(statistics)
    names = () if requested is None else requested.wanted(learned_sinks=sinks is not None)
    visibility = None
    if mask is not None:
        if not isinstance(mask, Mask):
            hint = "Mask.dense(mask) for a boolean tensor (True = may attend), Mask.bias(mask) for values to add"
            raise MaskError(f"mask must be a polyhead.Mask, got {type(mask).__name__}; use {hint}")
        visibility = resolve(
            mask,
            batch=batch,
            heads=heads,
            queries=queries,
            keys=keys,
            device=query.device,
            ordinals="sink_mass" in names,
        )
    if seed is not None:
        seed = _seed(seed, query)
    return AttentionRequest(
        query,
        key,
        value,
        visibility,
        scale,
        softcap,
        sinks,
        dropout,
        seed,
        weights,
        logsumexp,
        finite,
        None if requested is None else _statistics_request(requested, names, visibility, queries, keys, query.device),
    )


def _statistics_request(
    requested: Statistics,
    names: tuple[str, ...],
    visibility: Visibility | None,
    queries: int,
    keys: int,
    device: torch.device,
) -> StatisticsRequest:
    places = visibility if visibility is not None else Visibility(queries, keys, device, offset=keys - queries)
    return StatisticsRequest(names, requested.sink_keys, requested.window, places)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float | torch.SymInt | torch.SymFloat) and not isinstance(x, bool)


def _seed(seed: int | Tensor, query: Tensor) -> Tensor:
    """Return the seed as an int64 tensor of one element on the device of the query."""
    if isinstance(seed, Tensor):
        if seed.dtype is not torch.int64 or seed.numel() != 1:
            raise OptionError(
                "seed must be an integer or an int64 tensor of one element, "
                f"got {seed.dtype} of shape {list(seed.shape)}"
            )
        if seed.device != query.device:
            raise DeviceError(f"seed must be on the device of the query, got {seed.device} and {query.device}")
        return seed.reshape(1)
    if isinstance(seed, bool) or not isinstance(seed, int | torch.SymInt) or not -(1 << 63) <= seed < 1 << 63:
        raise OptionError(f"seed must be an integer of 64 bits, got {seed!r}")
    return torch.full((1,), seed, dtype=torch.int64, device=query.device)


def _check_per_head(name: str, tensor: Tensor, heads: int, query: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise OptionError(f"{name} must be a tensor with one number per head, got {type(tensor).__name__}")
    if tensor.shape != (heads,):
        raise ShapeError(f"{name} must have one number per head, got shape {list(tensor.shape)} for {heads} heads")
    if not tensor.is_floating_point():
        raise DtypeError(f"{name} must be floating point, got {tensor.dtype}")
    if tensor.device != query.device:
        raise DeviceError(f"{name} must be on the device of the query, got {tensor.device} and {query.device}")
