"""A short way for plain calls of `attention`, unmasked or causal, to PyTorch's kernel.

In such calls the result of validation and the choice of a backend depend on sizes, strides, dtypes and devices alone.
They cost as much host time as the kernel takes at small sizes, so they run once for each of these.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.ops.attention.sdpa import straight
from polyhead.ops.attention.validation import checked_request
from polyhead.ops.common.tracing import is_traced, is_transformed
from polyhead.ops.common.validation import is_autocast

_MOST_KNOWN = 4096
_known: dict[Hashable, bool] = {}  # whether calls with these properties can take the short way


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | Tensor | None, finite: bool
) -> Tensor | None:
    """Return the output of a call with default options, or None if `attention` must take the long way.

    Only plain tensors in eager mode take it. What may change between two calls with the same sizes is read in every
    call: autocast, function transforms, PyTorch's choice of kernels and recorded gradients.
    """
    if not (type(query) is type(key) is type(value) is Tensor) or is_traced(query) or is_transformed():
        return None
    if not (scale is None or (type(scale) is float and math.isfinite(scale))) or torch._C._is_tracing():
        return None
    is_causal = mask is not None
    if is_causal and not (isinstance(mask, Mask) and mask.is_just_causal):
        return None
    device = query.device
    if is_autocast(device.type):
        return None  # it casts tensors of several dtypes, which are refused without it
    properties = (
        *(query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride()),
        *(query.dtype, key.dtype, value.dtype, device, key.device, value.device, is_causal),
    )
    is_supported = _known.get(properties)
    if is_supported is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        is_supported = _known[properties] = _is_supported(query, key, value, mask)
    return straight(query, key, value, scale, is_causal, finite) if is_supported else None


def _is_supported(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> bool:
    """Validate a call, and return True if PyTorch's kernel takes its tensors as they are, for every real row."""
    request = checked_request(query, key, value, mask=mask)
    queries, keys = query.shape[2], key.shape[2]
    is_aligned = mask is None or (request.visibility is not None and queries == keys > 1)
    is_dense = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    return is_aligned and is_dense and query.shape[-1] == value.shape[-1] and query.numel() > 0 and keys > 0
