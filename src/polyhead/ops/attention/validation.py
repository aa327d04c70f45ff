"""Validation of `attention`'s arguments, which other operations share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead.errors import DeviceError, DtypeError, OptionError, ShapeError
from polyhead.masks import Mask
from polyhead.ops.common.request import AttentionRequest, StatisticsRequest
from polyhead.ops.common.statistics import Statistics, as_statistics
from polyhead.ops.common.validation import (
    DTYPES,
    cast_for_autocast,
    check_mask,
    check_per_head,
    check_softcap,
    checked_scale,
    is_autocast,
    is_number,
)
from polyhead.ops.common.visibility import Visibility, resolve


def checked_request(
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
    logsumexp: bool = False,
    finite: bool = False,
    statistics: bool | str | Sequence[str] | Statistics | None = None,
) -> AttentionRequest:
    """Validate the arguments and build the request that backends take."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        kinds = [type(x).__name__ for x in (query, key, value)]
        raise DtypeError(f"query, key and value must be tensors, got {kinds[0]}, {kinds[1]} and {kinds[2]}")
    query_shape, key_shape, value_shape = query.shape, key.shape, value.shape
    if not (len(query_shape) == len(key_shape) == len(value_shape) == 4):
        raise ShapeError(
            "query, key and value must be [batch, heads, sequence, head_dim], "
            f"got shapes {list(query_shape)}, {list(key_shape)} and {list(value_shape)}"
        )
    device = query.device
    if is_autocast(device.type):
        query, key, value = cast_for_autocast(device.type, query, key, value)
    dtype = query.dtype
    if not (dtype is key.dtype is value.dtype):
        raise DtypeError(f"query, key and value must have one dtype, got {dtype}, {key.dtype} and {value.dtype}")
    if dtype not in DTYPES:
        raise DtypeError(f"attention takes float16, bfloat16, float32 or float64, got {dtype}")
    if not (device == key.device == value.device):
        raise DeviceError(f"query, key and value must be on one device, got {device}, {key.device} and {value.device}")
    batch, heads, queries, head_dim = query_shape
    key_batch, kv_heads, keys, key_dim = key_shape
    value_batch, value_heads, values, _ = value_shape
    if not (batch == key_batch == value_batch):
        raise ShapeError(f"query, key and value must have one batch size, got {batch}, {key_batch} and {value_batch}")
    if value_heads != kv_heads or values != keys:
        raise ShapeError(
            "key and value must have the same heads and the same sequence, "
            f"got {kv_heads} heads of {keys} and {value_heads} heads of {values}"
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
    scale = checked_scale(scale, heads, query)
    if softcap is not None:
        check_softcap(softcap)
    if sinks is not None:
        check_per_head("sinks", sinks, heads, query)
    if not (is_number(dropout) and 0.0 <= dropout < 1.0):
        raise OptionError(f"dropout must be at least 0 and less than 1, got {dropout!r}")
    requested = as_statistics(statistics)
    names = () if requested is None else requested.wanted(learned_sinks=sinks is not None)
    visibility, row_statistics = None, None
    if mask is not None:
        check_mask(mask)
        visibility = resolve(
            mask, batch=batch, heads=heads, queries=queries, keys=keys, device=device, ordinals="sink_mass" in names
        )
    if seed is not None:
        seed = _seed(seed, query)
    if requested is not None:
        places = visibility or Visibility(queries, keys, device, offset=keys - queries)
        row_statistics = StatisticsRequest(names, requested.sink_keys, requested.window, places)
    options = (scale, softcap, sinks, dropout, seed, weights, logsumexp, finite, row_statistics)
    return AttentionRequest(query, key, value, visibility, *options)


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
