"""Fast paths of plain calls of `attention`: to PyTorch's kernel, or to our Hopper kernel with statistics or if faster.

Plain calls are unmasked or causal; those on a CPU are in `cpu_calls.py`. The result of validation and the choice of a
backend depend on their sizes, strides, dtypes and devices alone. They cost as much host time as the kernel takes at
small sizes, so they run once for each of these.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.ops.attention import dispatch, fused
from polyhead.ops.attention.mask_rule import is_plain_forward_for_hopper
from polyhead.ops.attention.scaled_dot_product import records_gradients
from polyhead.ops.attention.sdpa import straight
from polyhead.ops.attention.validation import checked_request
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.request import AttentionOutput, AttentionRequest, as_output
from polyhead.ops.common.statistics import Statistics
from polyhead.ops.common.tracing import is_traced, is_transformed
from polyhead.ops.common.validation import is_autocast

_MOST_KNOWN = 4096
_CAUSAL = Mask.causal()
# The mask and the statistics of a call that the Hopper kernel computes.
_HopperCall = tuple[MaskArguments, tuple[str, ...]]
# Whether PyTorch's kernel can take calls with these properties, and the Hopper kernel if no gradients are recorded.
_known: dict[Hashable, tuple[bool, _HopperCall | None]] = {}
_known_statistics: dict[Hashable, _HopperCall | None] = {}


def self_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool, finite: bool
) -> Tensor | None:
    """Compute causal or unmasked self-attention of a layer's own tensors, without validation.

    Args:
        query, key, value, scale, finite: as in `attention`.
        causal: attend to the query's own position and earlier ones.

    Returns:
        The output, from PyTorch's kernel or from ours where it is faster; None if PyTorch would not run a fused kernel.
    """
    sizes = {"queries": query.shape[2], "keys": key.shape[2], "head_dim": query.shape[3]}
    if query.is_cuda and is_plain_forward_for_hopper("cuda", query.dtype, causal=causal, **sizes):
        result = attend(query, key, value, _CAUSAL if causal else None, scale, finite)
        if result is not None:
            return result.output
    return straight(query, key, value, scale, causal, finite)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | Tensor | None, finite: bool
) -> AttentionOutput | None:
    """Return the result of a call with default options, or None if it has no fast path.

    Only plain tensors in eager mode have one. What may change between two calls with the same sizes is read in every
    call: autocast, function transforms, PyTorch's choice of kernels, recorded gradients, alignment, sign of the scale.
    """
    properties = _properties(query, key, value, mask, scale)
    if properties is None:
        return None
    known = _known.get(properties)
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        known = _known[properties] = _fast_paths(query, key, value, mask)
    is_supported, hopper_call = known
    if hopper_call is not None and _can_run(query, key, value, scale) and not records_gradients(query, key, value):  # type: ignore[arg-type]
        return _run(hopper_call, query, key, value, mask, scale, finite)  # type: ignore[arg-type]
    output = straight(query, key, value, scale, mask is not None, finite) if is_supported else None  # type: ignore[arg-type]
    return None if output is None else AttentionOutput(output, backend="sdpa")


def attend_with_statistics(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: float | Tensor | None,
    finite: bool,
    statistics: object,
) -> AttentionOutput | None:
    """Return the result of a call with statistics and other default options, or None if it has no fast path."""
    if not query.is_cuda or not _is_hashable(statistics):
        return None
    properties = _properties(query, key, value, mask, scale)
    if properties is None:
        return None
    with_gradients = records_gradients(query, key, value)
    properties = (*properties, statistics, with_gradients)
    if properties not in _known_statistics:
        if len(_known_statistics) >= _MOST_KNOWN:
            _known_statistics.clear()
        request = checked_request(query, key, value, mask=mask, finite=finite, statistics=statistics)  # type: ignore[arg-type]
        _known_statistics[properties] = _hopper_call(request)
    known = _known_statistics[properties]
    if known is None or not _can_run(query, key, value, scale):  # type: ignore[arg-type]
        return None
    return _run(known, query, key, value, mask, scale, finite, with_gradients=with_gradients)  # type: ignore[arg-type]


def _hopper_call(request: AttentionRequest) -> _HopperCall | None:
    """Return the mask and the statistics of a request that `auto` computes with the Hopper kernel; None for others."""
    call = fused.hopper_call(request) if dispatch.choose(request) == "fused" else None
    return None if call is None else (call.mask, call.names)


def _can_run(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> bool:
    """Return True if the Hopper kernel can run this call, given that it can run one with these sizes and strides."""
    is_aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0
    return is_aligned and (scale is None or scale > 0)


def _run(
    known: _HopperCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: float | None,
    finite: bool,
    *,
    with_gradients: bool = False,
) -> AttentionOutput:
    """Run the Hopper kernel."""
    from polyhead.ops.attention.kernels.forward_hopper import forward

    packed, names = known
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    call = KernelCall(query, key, value, packed, factor, names=names)
    if with_gradients:
        return fused.attend_under_band(call, finite=finite or mask is None)
    output, logsumexp, rows = forward(call, names=names, finite=finite or mask is None)
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


@torch.no_grad()
def _fast_paths(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> tuple[bool, _HopperCall | None]:
    """Validate a call, and return the fast paths of calls like it.

    These are whether PyTorch's kernel takes the tensors as they are, and the Hopper kernel's call without gradients.
    """
    request = checked_request(query, key, value, mask=mask)
    queries, keys = query.shape[2], key.shape[2]
    is_aligned = mask is None or (request.visibility is not None and queries == keys > 1)
    is_dense = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    is_regular = query.shape[-1] == value.shape[-1] and query.numel() > 0 and keys > 0
    return is_aligned and is_dense and is_regular, _hopper_call(request)
