"""Gradients of one call of polyhead's attention kernels.

Those of plain heads are computed by cuDNN's backward on separate plans, given our output and log-sum-exp, all others by
our own kernel. The gradient of a maximum belongs to one key per row, and is gathered and scattered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.attention import cudnn_backward
from polyhead.ops.common.kernel_call import KernelCall, laid_out_like, with_dense_rows
from polyhead.ops.common.statistics import MAXIMA


def gradients(
    call: KernelCall,
    grad_output: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    grad_logsumexp: Tensor | None,
    grad_statistics: Sequence[Tensor | None],
    statistics: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor]:
    """Return the gradients of query, key and value, and of head_scale, sinks, bias and table if `needed`."""
    head_scale, mask = call.head_scale, call.mask
    row_values = {name: x for name, x in zip(call.names, statistics, strict=True) if x is not None}
    row_gradients = {name: x.contiguous() for name, x in zip(call.names, grad_statistics, strict=True) if x is not None}
    row_gradients.pop("visible_keys", None)
    need_scale, need_sinks, need_bias, need_table = needed
    query, nonzero_scale = call.query, head_scale
    if head_scale is not None and need_scale:
        # A scale of 0 would make its gradient 0 / 0; a query of 0 with a scale of 1 has the same logits and does not.
        is_zero = head_scale == 0
        query = torch.where(is_zero[:, None, None], 0.0, query)
        nonzero_scale = torch.where(is_zero, 1.0, head_scale)
    query, key, value, grad_output = (with_dense_rows(x) for x in (query, call.key, call.value, grad_output))
    dense_call = replace(call, query=query, key=key, value=value, head_scale=nonzero_scale)
    indices: dict[str, Tensor] = {}
    requested = tuple(name for name in MAXIMA if name in row_gradients)
    if len(requested):
        # The argmax is recomputed only if a gradient of a maximum is needed, so that the forward need not store it.
        from polyhead.ops.attention.kernels.forward import forward

        original = replace(dense_call, query=with_dense_rows(call.query), head_scale=head_scale)
        *_, indices = forward(replace(original, dropout=0.0, seed=None, names=requested), argmax=True)
    argmax_grads = _ArgmaxGradients(row_gradients, row_values, indices)
    for name in ("max_logit", "max_abs_logit"):
        row_gradients.pop(name, None)
    if grad_logsumexp is not None:
        row_gradients["logsumexp"] = grad_logsumexp.contiguous()

    if not len(row_gradients) and _can_use_cudnn(call):
        cudnn_grads = _cudnn_gradients(dense_call, grad_output, output, logsumexp)
        grads: list[Tensor | None] = [*cudnn_grads, None, None, None]
    else:
        from polyhead.ops.attention.kernels.backward import backward

        grads = [
            *backward(
                dense_call,
                grad_output,
                output,
                logsumexp,
                row_gradients=row_gradients,
                row_values={name: x for name, x in row_values.items() if name in row_gradients},
                bias_shape=tuple(mask.bias.shape) if mask.bias is not None and need_bias else None,
                table_shape=tuple(mask.table.shape) if mask.table is not None and need_table else None,
            )
        ]
    if len(argmax_grads.terms):
        grads = argmax_grads.add_to(grads, dense_call)
    grad_query, grad_key, grad_value, grad_sinks, grad_bias, grad_table = grads
    assert grad_query is not None and grad_key is not None and grad_value is not None
    result = []
    if head_scale is not None and nonzero_scale is not None and need_scale:
        # The logits are linear in both: grad_scale = sum(grad_query * query) / scale. Rows without keys have no
        # gradient, even if the query is not finite. The terms cancel in a long sum, hence float64.
        product = grad_query.double() * torch.where(grad_query == 0, 0.0, call.query.double())
        result.append((product.sum((0, 2, 3)) / nonzero_scale).to(head_scale.dtype))
        grad_query = torch.where((head_scale == 0)[:, None, None], 0.0, grad_query)
    for need, like, grad in (
        (need_sinks, call.sinks, grad_sinks),
        (need_bias, mask.bias, grad_bias),
        (need_table, mask.table, grad_table),
    ):
        if need and like is not None and grad is not None:
            result.append(laid_out_like(grad, like))
    inputs = zip((grad_query, grad_key, grad_value), (call.query, call.key, call.value), strict=True)
    return [*(laid_out_like(grad, like) for grad, like in inputs), *result]


class _ArgmaxGradients:
    """Gradients of the rows' maxima, each of which belongs to one key, the argmax.

    With j the argmax, d max_logit / d s_j is 1, and d max_abs_logit / d s_j is the sign of s_j. Of the derivative of
    the confidence p_j only the term p_j is added here: the rest is the same for all keys of the row, and part of C in
    `kernels.backward`.
    """

    def __init__(self, grads: dict[str, Tensor], values: dict[str, Tensor], indices: dict[str, Tensor]) -> None:
        # Key indices and the gradients of their logits, each [batch, heads, queries].
        self.terms: list[tuple[Tensor, Tensor]] = []
        i_key = indices.get("argmax")
        grad: Tensor | None = grads.get("max_logit")
        if "confidence" in grads:
            grad_confidence = grads["confidence"] * values["confidence"]
            grad = grad_confidence if grad is None else grad + grad_confidence
        if grad is not None and i_key is not None:
            self.terms.append((i_key, torch.where(i_key >= 0, grad, 0.0)))
        signed_index, grad = indices.get("argmax_abs"), grads.get("max_abs_logit")
        if grad is not None and signed_index is not None:
            sign = 1 - 2 * (signed_index & 1)
            self.terms.append((signed_index >> 1, torch.where(signed_index >= 0, sign * grad, 0.0)))

    def add_to(self, grads: Sequence[Tensor | None], call: KernelCall) -> list[Tensor | None]:
        """Return the gradients of query, key, value, sinks, bias and table with these terms added."""
        query, key, softcap, mask = call.query, call.key, call.softcap, call.mask
        factor = call.scale if call.head_scale is None else call.scale * call.head_scale.float()[:, None]
        batch, heads, queries, _ = query.shape
        index = [torch.arange(n, device=query.device) for n in (batch, heads, queries)]
        i_batch, i_head, i_query = index[0][:, None, None], index[1][:, None], index[2]
        i_kv_head = i_head // (heads // key.shape[1])
        grad_query, grad_key, grad_value, grad_sinks = (None if x is None else x.float() for x in grads[:4])
        # Sums over many rows, in the kernel's precision.
        grad_bias, grad_table = (None if x is None else x.double() for x in grads[4:])
        assert grad_query is not None and grad_key is not None
        for i_key, grad in self.terms:
            is_valid = i_key >= 0
            i_key = i_key.clamp_min(0).long()
            tile_key = key[i_batch, i_kv_head, i_key].float()  # [batch, heads, queries, head_dim]
            tile_query = torch.where(is_valid[..., None], query.float(), 0.0)
            slope = grad * factor  # gradient of the dot product
            if softcap is not None:
                tanh_logits = torch.tanh((tile_query * tile_key).sum(-1) * factor / softcap)
                slope = slope * (1 - tanh_logits * tanh_logits)
            grad_query = grad_query + slope[..., None] * tile_key
            grad_key.index_put_((i_batch, i_kv_head, i_key), slope[..., None] * tile_query, accumulate=True)
            if grad_bias is not None:
                broadcast = [
                    i if size > 1 else i * 0
                    for i, size in zip((i_batch, i_head, i_query), grad_bias.shape, strict=False)
                ]
                grad_bias.index_put_((*broadcast, i_key), grad.double(), accumulate=True)
            if grad_table is not None:
                i_row = i_batch if mask.stride_query else i_batch * 0
                query_position = (
                    i_query + mask.offset if mask.query_position is None else mask.query_position[i_row, i_query]
                )
                key_position = i_key if mask.key_position is None else mask.key_position[i_row, i_key]
                column = (key_position - query_position + mask.table_zero).clamp(0, mask.table_width - 1).long()
                i_table = i_head if mask.table_head else i_head * 0
                grad_table.index_put_((i_table, column), grad.double(), accumulate=True)
        return [grad_query, grad_key, grad_value, grad_sinks, grad_bias, grad_table]


def _can_use_cudnn(call: KernelCall) -> bool:
    """Return True if cuDNN's backward computes the gradient of this call, and faster than our kernel."""
    query, key, mask = call.query, call.key, call.mask
    is_unmasked = mask.left is None and mask.right is None
    is_causal = mask.left is None and mask.right == 0 and query.shape[2] == key.shape[2]
    dim = query.shape[-1]
    return (
        call.is_plain
        and query.dtype in (torch.float16, torch.bfloat16)
        and (is_unmasked or is_causal)
        and mask.is_band
        and dim == call.value.shape[-1]
        and dim <= 128
        and dim % 8 == 0
        and torch.backends.cudnn.enabled
        and torch.backends.cudnn.is_available()
        and cudnn_backward.is_worth_it(query, key)
        and cudnn_backward.is_available(query)
    )


def _cudnn_gradients(
    call: KernelCall, grad_output: Tensor, output: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run cuDNN's backward after our forward, of which it needs only the output and the log-sum-exp."""
    inputs, options = (grad_output, call.query, call.key, call.value), (call.mask.right is not None, call.scale)
    if call.mask.poison is None:
        return cudnn_backward.backward(*inputs, output, logsumexp, *options)
    # A NaN row would spread, as 0 * NaN, to keys it does not see. Its own gradient is set to NaN below.
    is_nonfinite = logsumexp.isnan()
    output = torch.where(is_nonfinite[..., None], 0.0, output)
    logsumexp = torch.where(is_nonfinite, torch.inf, logsumexp)
    grad_query, grad_key, grad_value = cudnn_backward.backward(*inputs, output, logsumexp, *options)
    return torch.where(is_nonfinite[..., None], torch.nan, grad_query), grad_key, grad_value
