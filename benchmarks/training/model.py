"""A small byte-level language model whose layers have one attention variant."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training.text import BYTES
from polyhead.costs import Workload, estimate_cost
from polyhead.layers import AttentionConfig, build_attention
from polyhead.layers.blocks import FeedForward
from polyhead.layers.variants import DifferentialConfig, RoutedOutput

BALANCE, Z = 0.01, 0.001  # of the losses that keep routed heads in use


@dataclass(frozen=True)
class Sizes:
    """Everything of a model but its attention."""

    embed_dim: int = 384
    layers: int = 6
    context: int = 512
    hidden: int = 1536  # of the feed-forward networks


class ByteModel(nn.Module):
    """Bytes [batch, context] to logits of the next: pre-norm blocks; positions are those of the attention layers."""

    def __init__(self, config: AttentionConfig, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.embed_dim
        self.embedding = nn.Embedding(BYTES, width)
        self.attention = nn.ModuleList(build_attention(_of_layer(config, index)) for index in range(sizes.layers))
        self.feed_forward = nn.ModuleList(FeedForward(width, sizes.hidden) for _ in range(sizes.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * sizes.layers + 1))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits, and the layers' own losses: those of routed heads, else 0."""
        own = torch.zeros((), device=tokens.device)
        x = self.embedding(tokens)
        for index, (attend, feed_forward) in enumerate(zip(self.attention, self.feed_forward, strict=True)):
            result = attend(self.norms[2 * index](x))
            if isinstance(result, RoutedOutput) and result.routing is not None:
                own = own + BALANCE * result.routing.balance_loss + Z * result.routing.z_loss
            x = x + result.output
            x = x + feed_forward(self.norms[2 * index + 1](x))
        return F.linear(self.norms[-1](x), self.embedding.weight), own


def _of_layer(config: AttentionConfig, index: int) -> AttentionConfig:
    """Return the config of a layer, for variants whose layers depend on their index."""
    return replace(config, layer_index=index) if isinstance(config, DifferentialConfig) else config


def parameters(config: AttentionConfig, sizes: Sizes) -> int:
    """Return the number of parameters of a `ByteModel` without building it."""
    width = sizes.embed_dim
    table = BYTES * width
    norms = (2 * sizes.layers + 1) * 2 * width
    feed_forward = 2 * width * sizes.hidden + sizes.hidden + width
    attention = estimate_cost(config, Workload.forward(1)).parameters
    return table + norms + sizes.layers * (feed_forward + attention)


def step_flops(config: AttentionConfig, sizes: Sizes, batch: int) -> int:
    """Return the FLOPs of the matrix products of a training step, with those of a fused backward."""
    tokens = batch * sizes.context
    attention = estimate_cost(config, Workload.training_step(sizes.context, batch=batch)).matrix_flops
    dense = 2 * sizes.layers * sizes.embed_dim * sizes.hidden + BYTES * sizes.embed_dim
    return sizes.layers * attention + 6 * tokens * dense
