"""Short ways for plain calls of `attention`: to PyTorch's kernel and, with statistics, to the Hopper kernel.

Plain calls are unmasked or causal. The result of validation and the choice of a backend then depend on sizes, strides,
dtypes and devices alone. They cost as much host time as the kernel takes at small sizes, so they run once for each of
these.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.ops.attention import dispatch, fused
from polyhead.ops.attention.sdpa import straight
from polyhead.ops.attention.validation import checked_request
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.request import AttentionOutput, as_output
from polyhead.ops.common.statistics import Statistics
from polyhead.ops.common.tracing import is_traced, is_transformed
from polyhead.ops.common.validation import is_autocast

_MOST_KNOWN = 4096
_known: dict[Hashable, bool] = {}  # whether calls with these properties can take the short way to PyTorch's kernel
# The mask and the statistics of calls that the Hopper kernel computes; None for other calls.
_known_statistics: dict[Hashable, tuple[MaskArguments, tuple[str, ...]] | None] = {}


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | Tensor | None, finite: bool
) -> Tensor | None:
    """Return the output of a call with default options, or None if `attention` must take the long way.

    Only plain tensors in eager mode take it. What may change between two calls with the same sizes is read in every
    call: autocast, function transforms, PyTorch's choice of kernels and recorded gradients.
    """
    properties = _properties(query, key, value, mask, scale)
    if properties is None:
        return None
    is_supported = _known.get(properties)
    if is_supported is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        is_supported = _known[properties] = _is_supported(query, key, value, mask)
    return straight(query, key, value, scale, mask is not None, finite) if is_supported else None  # type: ignore[arg-type]


def attend_with_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: float | Tensor | None,
    finite: bool,
    statistics: object,
) -> AttentionOutput | None:
    """Return the result of a call with statistics and other default options, or None for the long way.

    Besides what `attend` reads in every call, these are recorded gradients and the alignment of the tensors.
    """
    if not query.is_cuda or (mask is not None and not finite) or not _is_hashable(statistics):
        return None
    properties = _properties(query, key, value, mask, scale)
    if properties is None or (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16:
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    properties = (*properties, statistics)
    if properties not in _known_statistics:
        if len(_known_statistics) >= _MOST_KNOWN:
            _known_statistics.clear()
        request = checked_request(query, key, value, mask=mask, finite=finite, statistics=statistics)  # type: ignore[arg-type]
        call = fused.hopper_call(request) if dispatch.choose(request) == "fused" else None
        _known_statistics[properties] = None if call is None else (call.mask, call.names)
    known = _known_statistics[properties]
    if known is None or (scale is not None and scale <= 0):
        return None
    from polyhead.ops.attention.kernels.forward_hopper import forward

    packed, names = known
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    call = KernelCall(query, key, value, packed, factor, names=names)
    output, logsumexp, rows = forward(call, row_poison=None, names=names)
    return as_output([output, logsumexp, *rows.values()], names)


def _is_hashable(statistics: object) -> bool:
    if type(statistics) is tuple:
        return all(type(name) is str for name in statistics)
    return type(statistics) in (str, Statistics)


def _properties(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | Tensor | None
) -> tuple[Hashable, ...] | None:
    """Return what decides how a plain call is computed; None for a call that is not plain."""
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
    return (
        *(query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride()),
        *(query.dtype, key.dtype, value.dtype, device, key.device, value.device, is_causal),
    )


def _is_supported(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> bool:
    """Validate a call, and return True if PyTorch's kernel takes its tensors as they are, for every real row."""
    request = checked_request(query, key, value, mask=mask)
    queries, keys = query.shape[2], key.shape[2]
    is_aligned = mask is None or (request.visibility is not None and queries == keys > 1)
    is_dense = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    return is_aligned and is_dense and query.shape[-1] == value.shape[-1] and query.numel() > 0 and keys > 0
