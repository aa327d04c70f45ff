"""Fast path of plain self-attention with little Python overhead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from polyhead.layers.joint_projection import is_plain_linear
from polyhead.ops.attention import self_attention

if TYPE_CHECKING:
    from polyhead.layers.multi_head.projected import ProjectedHeads


def forward_plain(layer: ProjectedHeads, x: Tensor, causal: bool) -> Tensor | None:
    """Return the output of plain self-attention; None where the fast path does not apply.

    At short sequences the checks that it skips cost more than the matrix products.
    """
    modules = layer._modules
    joint, out_proj = layer._of_self, modules["out_proj"]
    layout = layer.layout
    gated = layer._buffers.get("head_gate", layer) is not None  # also True if a parameter replaced the buffer
    if joint is None or x.ndim != 3 or x.is_nested or gated or (layer.training and layer.dropout):
        return None
    batch, length, width = x.shape
    last, hooks = layer._last
    if width != layout.embed_dim or not (batch and length) or out_proj is not last or any(hooks):
        return None
    if not is_plain_linear(out_proj):
        return None
    if joint.linears != (modules["q_proj"], modules["k_proj"], modules["v_proj"]) or not joint.is_one_product(x):
        return None
    joined = joint.joined(x)
    if joined.requires_grad and not joined.is_cpu:
        # On a device the gradients of three column blocks are concatenated faster than those of one stack.
        parts = joined.split_with_sizes(joint.sizes, -1)
        q, k, v = (part.view(batch, length, -1, layout.head_dim).transpose(1, 2) for part in parts)
    elif layout.group_size == 1:
        stacked = joined.view(batch, length, 3, layout.num_heads, layout.head_dim)
        q, k, v = stacked.permute(2, 0, 3, 1, 4).unbind(0)
    else:
        stacked = joined.view(batch, length, -1, layout.head_dim).transpose(1, 2)
        q, k, v = stacked.split_with_sizes((layout.num_heads, layout.num_kv_heads, layout.num_kv_heads), 1)
    heads = self_attention(q, k, v, layer.scale, causal, layer.finite)
    if heads is None:
        return None
    out_params = out_proj._parameters  # attribute access to `out_proj.weight` takes as long as a small product
    return F.linear(heads.transpose(1, 2).reshape(batch, length, -1), out_params["weight"], out_params["bias"])  # type: ignore[arg-type]
