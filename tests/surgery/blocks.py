"""A polyhead layer as a model, text for it, and its loss without some heads."""

from __future__ import annotations

import torch
from torch import nn

from polyhead.layers import MultiHeadAttention
from polyhead.surgery import HeadWeights, OutputMoments, collect_moments, find_layers, read_heads
from polyhead.surgery.compensation.least_squares import OutputRegression


class Block(nn.Module):
    """A named layer, called like a model."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        super().__init__()
        self.attention = layer

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.attention(x).output


def block(*, bias: bool = True, heads: int = 5) -> Block:
    return Block(MultiHeadAttention(7 * heads, heads, bias=bias).double())


def text(width: int = 35, count: int = 4) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(3, 19, width, dtype=torch.float64) + 0.5} for _ in range(count)]


def outputs_of_heads(model: Block, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return the input of W_O, [tokens, channels]."""
    seen = []
    hook = model.attention.out_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    hook.remove()
    return torch.cat(seen)


def of_layer(model: Block, batches: list[dict[str, torch.Tensor]]) -> tuple[OutputMoments, HeadWeights]:
    (layer,) = find_layers(model)
    return collect_moments(model, batches)["attention"], read_heads(model, layer)


def grouped(heads: int = 6, kv_heads: int = 3) -> Block:
    return Block(MultiHeadAttention(35, heads, num_kv_heads=kv_heads, head_dim=5, bias=False).double())


def loss_without(problem: OutputRegression, removed, root=None) -> float:
    """Return the mean square error after compensation, solved directly, in a metric."""
    count = len(problem.mean) // problem.head_width
    kept = [head for head in range(count) if head not in removed]
    return loss_with(problem, kept, problem.solve(kept)[0], root)


def loss_with(problem: OutputRegression, kept, matrix: torch.Tensor, root=None) -> float:
    """Return the mean square error if only these heads write, with this output matrix."""
    off = problem.matrix.clone()
    off[problem.channels(kept)] -= matrix
    seen = off if root is None else off @ root
    return float((seen * (problem.products @ seen)).sum())
