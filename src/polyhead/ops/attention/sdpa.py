"""PyTorch's fused attention kernels with polyhead's masks, without the math path.

The kernel that will run is known in advance. The guarantees of `attention` are added around it: rows without visible
keys are unmasked and their output set to 0; NaN and Inf in keys and values are replaced first, and a row that sees such
a key is set to NaN afterwards. Log-sum-exp and row statistics, which the kernels do not return, are computed by a
second pass over the logits that does not read the values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled

from polyhead.ops.attention import causal_flash
from polyhead.ops.attention.scaled_dot_product import (
    kernel_name,
    records_gradients,
    scaled_dot_product,
    with_positive_scale,
)
from polyhead.ops.attention.tiled_softmax import attend
from polyhead.ops.common.kernel_call import with_dense_rows
from polyhead.ops.common.nonfinite import can_launch, over_heads, without_nonfinite
from polyhead.ops.common.request import AttentionOutput, AttentionRequest
from polyhead.ops.common.tiles import prepare
from polyhead.ops.common.tracing import TRANSFORMED, is_forward_mode, is_transformed
from polyhead.ops.common.visibility import Visibility


def unsupported_reasons(request: AttentionRequest) -> list[str]:
    """Return the reasons why PyTorch's fused kernels do not support a request; empty if they do."""
    reasons = []
    if request.weights:
        reasons.append("PyTorch's fused kernels do not return weights")
    if request.softcap is not None:
        reasons.append("PyTorch's fused kernels have no softcap")
    if request.sinks is not None:
        reasons.append("PyTorch's fused kernels have no learned sinks")
    if request.logsumexp and request.statistics is None:
        reasons.append("PyTorch's fused kernels return no differentiable log-sum-exp")
    if isinstance(request.scale, Tensor) and request.query.dtype is torch.float16:
        reasons.append("PyTorch's fused kernels take one scale, and scaling float16 queries beforehand may overflow")
    if request.dropout and request.seed is not None:
        reasons.append("PyTorch's fused kernels draw their own dropout and cannot replay a seed")
    if is_forward_mode():
        reasons.append("PyTorch's fused kernels have no forward-mode derivative")
    elif request.statistics is not None and is_transformed():
        reasons.append(TRANSFORMED)
    return reasons + math_reasons(request)


def math_reasons(request: AttentionRequest) -> list[str]:
    """Return the reasons why PyTorch would run its math path, which materialises the weights."""
    if request.query.device.type == "cpu":
        return _cpu_math_reasons(request)
    if torch.compiler.is_compiling() or request.query.device.type == "meta":
        return []
    if kernel(request) != "math":
        return []
    _, heads, kv_heads, _, _ = request.sizes
    return [
        "PyTorch would take its math path, which materialises the weights: no fused kernel serves "
        f"{request.query.dtype} with head_dim {request.query.shape[-1]}, value_dim {request.value.shape[-1]}, "
        f"{heads} query and {kv_heads} KV heads"
        + (" and this mask" if request.visibility is not None else "")
        + " here"
    ]


def _cpu_math_reasons(request: AttentionRequest) -> list[str]:
    reasons = []
    prefix = "PyTorch would take its math path, which materialises the weights: "
    if request.dropout:
        reasons.append(prefix + "its CPU kernel has no dropout")
    visibility = request.visibility
    if visibility is not None and torch.is_grad_enabled() and any(x.requires_grad for x in visibility.bias_tensors):
        reasons.append(prefix + "its CPU kernel has no gradient of a bias")
    if not torch.compiler.is_compiling() and not flash_sdp_enabled():
        reasons.append(
            prefix + "flash attention is switched off by torch.backends.cuda.enable_flash_sdp or sdpa_kernel"
        )
    return reasons


def materialised_bytes(request: AttentionRequest) -> int:
    """Return the bytes of the mask tensor that PyTorch's kernel would need."""
    visibility = request.visibility
    if visibility is None or _needs_no_mask_tensor(visibility):
        return 0
    batch, heads, _, queries, keys = request.sizes
    per_sequence = (
        visibility.key_real is not None or len(visibility.documents) > 0 or visibility.query_positions is not None
    )
    shapes = [x.shape for x in (*visibility.biases, *([visibility.allowed] if visibility.allowed is not None else []))]
    batch_size = max([s[0] for s in shapes] + [batch if per_sequence else 1])
    head_size = max([s[1] for s in shapes] + [heads if visibility.relative_biases else 1])
    only_keys = visibility.left is None and visibility.right is None and len(visibility.documents) == 0
    rows = 1 if only_keys and not visibility.relative_biases and all(s[2] == 1 for s in shapes) else queries
    return batch_size * head_size * rows * keys * (request.query.element_size() if visibility.has_bias else 1)


def kernel(request: AttentionRequest) -> str:
    """Return the kernel that PyTorch will run: cudnn, flash, efficient or math. Computes no attention."""
    query, key, value = request.query, request.key, request.value
    batch, heads, kv_heads, queries, keys = request.sizes
    call = _Call(query, key, value, None, False, 1.0, heads != kv_heads)
    visibility = request.visibility
    if visibility is not None:
        call.causal = bool(_needs_no_mask_tensor(visibility) and queries > 1)
        if not _needs_no_mask_tensor(visibility):
            mask = query.new_empty(keys) if visibility.has_bias else query.new_empty(keys, dtype=torch.bool)
            mask.requires_grad_(torch.is_grad_enabled() and any(x.requires_grad for x in visibility.bias_tensors))
            call.mask = mask.expand(batch, heads, queries, keys)
    _adapt_to_kernels(call)
    return call.kernel(request.dropout)


def run(request: AttentionRequest) -> AttentionOutput:
    call = _prepare(request)
    output = scaled_dot_product(
        call.query,
        call.key,
        call.value,
        call.mask,
        request.dropout,
        call.causal,
        scale=call.scale,
        grouped=call.grouped,
    )
    value_dim = request.value.shape[-1]
    if output.shape[-1] != value_dim:
        output = output[..., :value_dim]
    if call.has_keys is not None:
        output = torch.where(call.has_keys, output, 0.0)
    if call.poison is not None:
        output = output + call.poison[..., None].to(output.dtype)
    if request.statistics is None:
        return AttentionOutput(output, backend="sdpa")
    prepared = prepare(request, dropout=False)
    _, logsumexp, statistics = attend(prepared.tiling, prepared.query, prepared.key, None, None)
    return AttentionOutput(output, logsumexp, None, statistics, backend="sdpa")


def straight(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, causal: bool, finite: bool
) -> Tensor | None:
    """Compute causal or unmasked self-attention of a layer's own tensors, without validation.

    At small sizes the checks of `attention` cost more than the kernel.

    Args:
        query, key, value, scale, finite: as in `attention`.
        causal: attend to the query's own position and earlier ones.

    Returns:
        The output, or None if PyTorch would not run a fused kernel.
    """
    if scale is not None:
        query, scale = with_positive_scale(query, scale)
    grouped = key.shape[1] != query.shape[1]
    if query.is_cpu:
        if not flash_sdp_enabled():
            return None
    elif not query.numel():
        return None  # `attention` handles empty tensors
    elif not _is_flash_sure(query) and kernel_name(query, key, value, None, 0.0, causal, grouped=grouped) == "math":
        return None
    poison, recomputes = None, False
    if causal and not finite:
        if query.is_cuda and records_gradients(query, key, value):
            if causal_flash.can_serve(query, key, value):
                return causal_flash.attend(query, key, value, scale)
        else:
            recomputes = _can_recompute(query, key, value)
        if not recomputes:
            key, value, poison = without_nonfinite(key, value)
    output = scaled_dot_product(query, key, value, None, 0.0, causal, scale=scale, grouped=grouped)
    if recomputes:
        from polyhead.ops.attention.kernels.nonfinite_rows import recompute_nonfinite_rows

        scale = query.shape[-1] ** -0.5 if scale is None else scale
        recompute_nonfinite_rows(query, key, value, output, scale=scale, left=None, right=0)
    if poison is None:
        return output
    return output + over_heads(poison.cumsum(-1), query.shape[1])[..., None].to(output.dtype)


def _can_recompute(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if rows that are not finite can be recomputed after PyTorch's forward, instead of cleaned inputs.

    The caller checks that no gradients are recorded.
    """
    if not can_launch(query) or query.shape[-1] > 256:
        return False
    is_cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is not query.dtype
    is_dense = query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    is_short = query.dtype in (torch.bfloat16, torch.float16)
    return is_short and not is_cast and is_dense and _has_flash(query.get_device())


def _is_flash_sure(query: Tensor) -> bool:
    """Return True if PyTorch's flash kernel certainly supports these queries; cheaper than `kernel_name`."""
    is_common = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in (64, 128)
    return is_common and query.is_cuda and flash_sdp_enabled() and _has_flash(query.get_device())


@functools.cache
def _has_flash(device: int) -> bool:
    """Return True for NVIDIA GPUs from sm_80 on; on others PyTorch is queried for each call."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(slots=True)
class _Call:
    """Arguments of PyTorch's function, and corrections of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    grouped: bool
    has_keys: Tensor | None = None  # [batch or 1, heads or 1, queries, 1]: False for rows without visible keys
    poison: Tensor | None = None  # [batch, heads, queries or 1]: NaN where a row sees a non-finite key, else 0

    def kernel(self, dropout: float = 0.0) -> str:
        return kernel_name(
            self.query, self.key, self.value, self.mask, dropout, self.causal, scale=self.scale, grouped=self.grouped
        )


def _prepare(request: AttentionRequest) -> _Call:
    """Return the request as arguments that PyTorch's fused kernels support."""
    query, key, value, scales = request.query, request.key, request.value, request.scale
    scale = 1.0
    if not isinstance(scales, Tensor):
        query, scale = with_positive_scale(query, scales)
    grouped = key.shape[1] != query.shape[1]
    call = _Call(query, key, value, None, False, scale, grouped)
    if request.visibility is not None:
        _apply_visibility(call, request.visibility, request.finite)
    if isinstance(scales, Tensor):  # after NaN in rows without keys was replaced: their gradient is 0 times the query
        call.query = call.query * scales.to(query.dtype)[:, None, None]
    _adapt_to_kernels(call)
    return call


def _adapt_to_kernels(call: _Call) -> None:
    """Meet the fused kernels' requirements, so that PyTorch does not fall back to its math path."""
    if call.query.is_cpu and call.query.shape[-1] != call.value.shape[-1]:
        _pad_to_one_width(call)
    if not call.query.stride(-1) == call.key.stride(-1) == call.value.stride(-1) == 1:
        # Otherwise PyTorch silently runs its math path.
        call.query, call.key, call.value = (with_dense_rows(x) for x in (call.query, call.key, call.value))
    call.mask = None if call.mask is None else with_dense_rows(call.mask)
    if call.grouped and not call.query.is_cpu and _needs_repeated_heads(call):
        heads = call.query.shape[1]
        repeated = replace(call, key=over_heads(call.key, heads), value=over_heads(call.value, heads), grouped=False)
        if torch.compiler.is_compiling() or repeated.kernel() != "math":
            call.key, call.value, call.grouped = repeated.key, repeated.value, False


def _needs_repeated_heads(call: _Call) -> bool:
    """Return True if PyTorch would run its math path because there are fewer KV heads than query heads."""
    if torch.compiler.is_compiling():
        # The choice cannot be traced. Without cuDNN, flash supports no mask and the efficient kernel no groups.
        return call.mask is not None and records_gradients(call.query, call.key, call.value, call.mask)
    return call.kernel() == "math"


def _pad_to_one_width(call: _Call) -> None:
    """Pad with zeros, which do not change the result: the CPU kernel needs keys and values of one width."""
    width = max(call.query.shape[-1], call.value.shape[-1])
    call.query, call.key, call.value = (
        x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (call.query, call.key, call.value)
    )


def _needs_no_mask_tensor(visibility: Visibility) -> bool:
    """Return True if PyTorch's causal flag, or no mask at all, is correct for every real row.

    Right padding of a causal self-attention needs no mask tensor: the padding comes after every real row.
    """
    only_causal = visibility.right == 0 and visibility.left is None
    is_square = visibility.num_queries == visibility.num_keys
    has_other_terms = visibility.allowed is not None or len(visibility.documents) > 0 or visibility.has_bias
    if not only_causal or has_other_terms or visibility.query_positions is not None:
        return False
    return (is_square and visibility.pads_right_only) or (visibility.num_queries == 1 and visibility.key_real is None)


def _apply_visibility(call: _Call, visibility: Visibility, finite: bool) -> None:
    """Set mask, causal flag and corrections of a call, and clean its tensors."""
    heads = call.query.shape[1]
    poison = None
    if not finite:
        call.key, call.value, poison = without_nonfinite(call.key, call.value)
    if visibility.query_real is not None:
        call.has_keys = visibility.query_real[:, None, :, None]
    if _needs_no_mask_tensor(visibility):
        if visibility.num_queries > 1:  # a branch: comparing a traced size gives a symbol, which the kernel rejects
            call.causal = True
        if poison is not None:
            call.poison = over_heads(poison.cumsum(-1) if call.causal else poison.sum(-1, keepdim=True), heads)
    else:
        rows, columns = (0, visibility.num_queries), (0, visibility.num_keys)
        allowed = visibility.without_query_padding().allowed_tile(rows, columns)
        if allowed is not None and visibility.may_leave_rows_empty:
            sees_keys = allowed.any(-1, keepdim=True)
            allowed = allowed | ~sees_keys
            call.has_keys = sees_keys if call.has_keys is None else call.has_keys & sees_keys
        if poison is not None:
            row_poison = poison.sum(-1, keepdim=True) if allowed is None else _row_poison(poison, allowed, heads)
            call.poison = over_heads(row_poison, heads)
        call.mask = _as_one_tensor(allowed, visibility.bias_tile(rows, columns, call.query.dtype))
    if call.has_keys is not None:
        # A row that is set to 0 must not carry a NaN into the kernel, whose backward would multiply it by zero.
        call.query = torch.where(call.has_keys, call.query, 0.0)
        call.poison = None if call.poison is None else torch.where(call.has_keys.squeeze(-1), call.poison, 0.0)


def _as_one_tensor(allowed: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return a boolean mask, or a bias with -inf for masked pairs if there is a bias."""
    if bias is None:
        return allowed
    return bias if allowed is None else torch.where(allowed, bias, -torch.inf)


def _row_poison(poison: Tensor, allowed: Tensor, heads: int) -> Tensor:
    """Return NaN for rows that see a poisoned key and 0 for others, [batch, heads, queries or 1]."""
    is_nonfinite = over_heads(poison.isnan().to(torch.float32), heads)  # [batch, heads, keys]
    if allowed.shape[2] == 1:
        count = (allowed[:, :, 0] * is_nonfinite).sum(-1, keepdim=True)
    elif allowed.shape[:2] == (1, 1):
        count = F.linear(is_nonfinite, allowed[0, 0].to(is_nonfinite.dtype))
    elif allowed.shape[1] == 1:
        count = torch.bmm(is_nonfinite, allowed[:, 0].to(is_nonfinite.dtype).transpose(1, 2))
    else:
        count = (allowed.to(is_nonfinite.dtype) @ is_nonfinite[..., None]).squeeze(-1)
    return torch.where(count > 0, torch.nan, 0.0)
