"""PyTorch's fused kernels behind our masks: which one will run is known before it does, and never its slow math path.

What those kernels cannot promise is made so around them: rows with nothing to attend to are opened to finite keys and
their output selected away; keys that hold NaN or Inf are cleaned first, and a row that sees one is given NaN again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from polyhead.functional.guard import over_heads, without_broken
from polyhead.functional.request import AttentionOutput, AttentionRequest
from polyhead.functional.visibility import Visibility

_KERNELS = {
    int(SDPBackend.MATH): "math",
    int(SDPBackend.FLASH_ATTENTION): "flash",
    int(SDPBackend.EFFICIENT_ATTENTION): "efficient",
    int(SDPBackend.CUDNN_ATTENTION): "cudnn",
    int(SDPBackend.OVERRIDEABLE): "overrideable",
}


def unsupported_reasons(request: AttentionRequest) -> list[str]:
    reasons = []
    if request.weights:
        reasons.append("PyTorch's fused kernels do not return weights")
    if request.softcap is not None:
        reasons.append("PyTorch's fused kernels have no softcap")
    if request.sinks is not None:
        reasons.append("PyTorch's fused kernels have no learned sinks")
    if request.logsumexp:
        reasons.append("PyTorch's fused kernels give no log-sum-exp with a gradient")
    if request.dropout and request.seed is not None:
        reasons.append("PyTorch's fused kernels draw their own dropout and cannot replay a seed")
    if reasons:
        return reasons
    return math_reasons(request)


def math_reasons(request: AttentionRequest) -> list[str]:
    """Why PyTorch would leave its fused kernels for the path that materialises the weights; empty if it would not."""
    if request.query.device.type == "cpu":
        return _cpu_math_reasons(request)
    if torch.compiler.is_compiling() or request.query.device.type == "meta":
        return []
    if kernel(request) != "math":
        return []
    batch, heads, kv_heads, _, _ = request.sizes
    return [
        "PyTorch would take its math path, which materialises the weights: no fused kernel serves "
        f"{request.query.dtype} with head_dim {request.query.shape[-1]}, value_dim {request.value.shape[-1]}, "
        f"{heads} query and {kv_heads} key heads"
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
        reasons.append(prefix + "its CPU kernel gives no gradient of a bias")
    if not torch.backends.cuda.flash_sdp_enabled():
        reasons.append(
            prefix + "flash attention is switched off by torch.backends.cuda.enable_flash_sdp or sdpa_kernel"
        )
    return reasons


def materialised_bytes(request: AttentionRequest) -> int:
    """How large a mask tensor PyTorch's kernel would have to be handed."""
    visibility = request.visibility
    if visibility is None or _as_causal(visibility):
        return 0
    batch, heads, _, queries, keys = request.sizes
    per_sequence = visibility.key_real is not None or visibility.documents or visibility.query_positions is not None
    shapes = [x.shape for x in (*visibility.biases, *([visibility.allowed] if visibility.allowed is not None else []))]
    batch_size = max([s[0] for s in shapes] + [batch if per_sequence else 1])
    head_size = max([s[1] for s in shapes] + [heads if visibility.relative_biases else 1])
    only_keys = visibility.left is None and visibility.right is None and not visibility.documents
    rows = 1 if only_keys and not visibility.relative_biases and all(s[2] == 1 for s in shapes) else queries
    return batch_size * head_size * rows * keys * (request.query.element_size() if visibility.has_bias else 1)


def kernel(request: AttentionRequest) -> str:
    """The name of the kernel PyTorch will run: cudnn, flash, efficient or math."""
    call = _prepare(request)
    return _KERNELS[_choice(call)]


def run(request: AttentionRequest) -> AttentionOutput:
    call = _prepare(request)
    output = F.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        call.mask,
        request.dropout,
        call.causal,
        scale=call.scale,
        enable_gqa=call.grouped,
    )
    value_dim = request.value.shape[-1]
    if output.shape[-1] != value_dim:
        output = output[..., :value_dim]
    if call.filled_rows is not None:
        output = torch.where(call.filled_rows, output, 0.0)
    if call.sees_broken is not None:
        output = output + torch.where(call.sees_broken[..., None], torch.nan, 0.0).to(output.dtype)
    return AttentionOutput(output, backend="sdpa")


def unmasked(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor | None:
    """Attention without mask or options over tensors a layer has just made and need not check again.

    None where PyTorch would not take a fused kernel. At small sizes the checks of `attention` cost more than it does.
    """
    grouped = key.shape[1] != query.shape[1]
    if query.is_cpu:
        if not torch.backends.cuda.flash_sdp_enabled():
            return None
    elif not torch._fused_sdp_choice(query, key, value, scale=scale, enable_gqa=grouped):
        return None
    if scale is None and not grouped:
        return F.scaled_dot_product_attention(query, key, value)
    return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=grouped)


@dataclass(slots=True)
class _Call:
    """The arguments PyTorch gets, and what is to be done with its answer."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    grouped: bool
    filled_rows: Tensor | None = None  # [batch or 1, heads or 1, queries, 1]: False where a row attends to nothing
    sees_broken: Tensor | None = None  # [batch, heads, queries]


def _prepare(request: AttentionRequest) -> _Call:
    query, key, value = request.query, request.key, request.value
    scale = request.scale
    if isinstance(scale, Tensor):
        query, scale = query * scale.to(query.dtype)[:, None, None], 1.0
    grouped = key.shape[1] != query.shape[1]
    call = _Call(query, key, value, None, False, scale, grouped)
    if request.visibility is not None:
        _apply_visibility(call, request.visibility, request.dropout)
    if query.device.type == "cpu" and query.shape[-1] != value.shape[-1]:
        _pad_to_one_width(call)
    if grouped and query.device.type != "cpu" and not torch.compiler.is_compiling() and _choice(call) == 0:
        heads = query.shape[1]
        repeated = _Call(
            call.query, over_heads(call.key, heads), over_heads(call.value, heads), call.mask, call.causal, scale, False
        )
        if _choice(repeated) != 0:
            call.key, call.value, call.grouped = repeated.key, repeated.value, False
    return call


def _choice(call: _Call, dropout: float = 0.0) -> int:
    return torch._fused_sdp_choice(
        call.query, call.key, call.value, call.mask, dropout, call.causal, scale=call.scale, enable_gqa=call.grouped
    )


def _pad_to_one_width(call: _Call) -> None:
    """Zeros that change nothing: the CPU kernel wants keys and values of one width."""
    width = max(call.query.shape[-1], call.value.shape[-1])
    call.query, call.key, call.value = (
        x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (call.query, call.key, call.value)
    )


def _as_causal(visibility: Visibility) -> bool:
    """Whether PyTorch's own causal flag, or no mask at all, serves every real row.

    Right padding of a self-attention needs no mask beside it: no real row looks that far.
    """
    only_causal = visibility.right == 0 and visibility.left is None
    square = visibility.num_queries == visibility.num_keys
    others = visibility.allowed is not None or visibility.documents or visibility.has_bias
    if not only_causal or others or visibility.query_positions is not None:
        return False
    return (square and visibility.pads_right_only) or (visibility.num_queries == 1 and visibility.key_real is None)


def _apply_visibility(call: _Call, visibility: Visibility, dropout: float) -> None:
    rows, columns = (0, visibility.num_queries), (0, visibility.num_keys)
    heads = call.query.shape[1]
    call.key, call.value, broken = without_broken(call.key, call.value)
    if visibility.query_real is not None:
        real = visibility.query_real[:, None, :, None]
        call.query = torch.where(real, call.query, 0.0)
        call.filled_rows = real
    if _as_causal(visibility):
        call.causal = visibility.num_queries > 1
        if broken is not None:
            seen = broken.cummax(-1).values if visibility.num_queries > 1 else broken.any(-1, keepdim=True)
            call.sees_broken = over_heads(seen, heads)
            if visibility.query_real is not None:
                call.sees_broken = call.sees_broken & visibility.query_real[:, None]
        return
    allowed = visibility.without_query_padding().allowed_tile(rows, columns)
    bias = visibility.bias_tile(rows, columns, call.query.dtype)
    if allowed is not None:
        if visibility.may_leave_rows_empty:
            filled = allowed.any(-1, keepdim=True)
            allowed = allowed | ~filled
            call.filled_rows = filled if call.filled_rows is None else call.filled_rows & filled
        if broken is not None:
            call.sees_broken = (allowed & over_heads(broken, heads)[:, :, None]).any(-1)
            if call.filled_rows is not None:
                call.sees_broken = call.sees_broken & call.filled_rows.squeeze(-1)
    if bias is not None:
        call.mask = bias if allowed is None else torch.where(allowed, bias, -torch.inf)
    else:
        call.mask = allowed
