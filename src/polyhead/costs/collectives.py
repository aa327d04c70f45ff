"""Bytes of the collectives of attention layers over several ranks.

Counted is what ring algorithms send: an all-gather sends a rank's shard to each of the others, a reduce-scatter of S
bytes (ranks - 1) / ranks of S, an all-reduce twice that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from polyhead.costs.descriptions import describe
from polyhead.costs.layouts.model_layout import LayerGroup, ModelLayout
from polyhead.costs.options import Phase, Ranks
from polyhead.costs.phases import PhaseSizes
from polyhead.costs.ranks_plan import Collective, HeadShare
from polyhead.layers.config import AttentionConfig, build_attention
from polyhead.observation.accumulators import Histogram
from polyhead.parallel.context.layers import check_layer
from polyhead.parallel.context.traffic import ContextBytes, context_bytes
from polyhead.parallel.tensor.head_split import HeadSplit, local_layout
from polyhead.parallel.tensor.rules import check_supported
from polyhead.parallel.tensor.shards import OUTPUT_BIAS, shards_of

MONITORED = 5  # row statistics of `HeadMonitor` by default


class LayerShare(NamedTuple):
    """One kind of layer on the rank with most heads."""

    layers: int
    config: AttentionConfig  # of the heads of the rank
    heads: HeadShare
    shapes: list[tuple[int, ...]]  # of what a rank of tensor parallel stores of each parameter
    summed: list[int]  # elements of the parameters that all heads share
    output_bias: int

    @classmethod
    def of(cls, group: LayerGroup, ranks: Ranks) -> LayerShare:
        with torch.device("meta"):
            layer: Any = build_attention(group.config)
        if ranks.context > 1:
            check_layer(type(layer).__name__, layer)
        layout, config, shards = layer.layout, group.config, {}
        split = HeadSplit(layout.num_heads, ranks.tensor)
        if ranks.tensor > 1:
            check_supported(layer)
            shards = shards_of(layer, ranks.tensor, 0)
            layouts = [local_layout(layout, split.computed(rank)) for rank in range(ranks.tensor)]
            layout = max(layouts, key=lambda x: (getattr(x, "num_kv_heads", 0), x.num_heads))
            names = [x for x in ("num_heads", "num_kv_heads", "key_heads") if hasattr(config, x)]
            changed = {name: getattr(layout, name) for name in names}
            changed |= {"init": "xavier"} if hasattr(config, "init") else {}  # costs do not depend on it
            config = replace(config, **changed)
        parameters = {name: tuple(x.shape) for name, x in layer.named_parameters(remove_duplicate=False)}
        kv_heads = getattr(layout, "num_kv_heads", None)
        return cls(
            group.layers,
            config,
            HeadShare(group.layers, layout.num_heads, kv_heads, split.padding),
            [shards[name].local_shape(shape) if name in shards else shape for name, shape in parameters.items()],
            [math.prod(shape) for name, shape in parameters.items() if name in shards and shards[name].is_summed],
            math.prod(parameters.get(OUTPUT_BIAS, (0,))),
        )

    def elements(self, fsdp: int) -> int:
        """Return the elements of a layer's parameters on a rank, with those that pad their first axes for FSDP2."""
        return sum(-(-shape[0] // fsdp) * math.prod(shape[1:]) for shape in self.shapes)

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        return describe(self.config).cache_bytes_per_token(dtype) if getattr(self.config, "causal", False) else 0

    def context_bytes(self, ranks: Ranks, sizes: PhaseSizes) -> ContextBytes:
        layout: Any = self.config.layout  # type: ignore[attr-defined]
        return context_bytes(
            batch=sizes.batch,
            kv_heads=layout.num_kv_heads,
            tokens=sizes.context,
            head_dim=layout.head_dim,
            value_dim=layout.value_dim,
            ranks=ranks.context,
            dtype=sizes.dtype,
            method=ranks.method,
        )


def other_parameters(model: ModelLayout, ranks: Ranks) -> int | None:
    """Return the parameters outside attention that a rank stores, None if their number is unknown."""
    others = model.other_parameters
    return None if others is None else -(-others // (ranks.tensor * ranks.fsdp))


def calls_of(
    model: ModelLayout, shares: list[LayerShare], ranks: Ranks, phase: Phase, sizes: PhaseSizes
) -> Iterator[Collective]:
    """Yield the collectives of one phase, each by kind of layer, without their times.

    Args:
        model: attention layers of the model.
        shares: its kinds of layers on a rank.
        ranks: ranks by dimension.
        phase: the phase.
        sizes: sequences of a rank, tokens of a whole sequence, and dtypes.
    """
    training, itemsize = phase == "training", sizes.dtype.itemsize
    rows = sizes.batch * (1 if phase == "decode" else sizes.context // ranks.context)
    for share in shares:
        width: int = share.config.layout.embed_dim  # type: ignore[attr-defined]
        by_layer = [*_tensor(share, ranks, rows * width * itemsize, itemsize, training=training)]
        if ranks.context > 1:
            by_layer += _context(share.context_bytes(ranks, sizes), ranks, training=training)
        weights = share.elements(ranks.fsdp) * itemsize
        by_layer += _sharded("the layers' weights", "the layers' gradients", weights, ranks, training=training)
        yield from (replace(x, calls=x.calls * share.layers, bytes=x.bytes * share.layers) for x in by_layer)
    others = other_parameters(model, ranks)
    if others is not None:
        for x in _sharded("all other weights", "their gradients", others * itemsize, ranks, training=training):
            yield replace(x, calls=x.calls * model.layers)
    if training and ranks.fsdp > 1 and ranks.tensor == ranks.context == 1:
        size = monitor_bytes([x.heads.heads for x in shares for _ in range(x.layers)], ranks.fsdp)
        name = "HeadMonitor, in an observed step"
        yield Collective(name, "all-reduce", "fsdp", True, 1, _all_reduce(size, ranks.fsdp))


def _tensor(share: LayerShare, ranks: Ranks, hidden: int, itemsize: int, *, training: bool) -> Iterator[Collective]:
    """Yield the collectives of a head-parallel layer whose inputs and outputs have `hidden` bytes."""
    count = ranks.tensor
    if count == 1:
        return
    half = _reduce_scatter(hidden, count)  # also the bytes of an all-gather of the same tensor
    if ranks.sequence_parallel and training:
        yield Collective("the inputs' sequence", "all-gather", "tensor", False, 1, half)
        yield Collective("sum of the heads' outputs", "reduce-scatter", "tensor", False, 1, half)
        yield Collective("gradient of the output", "all-gather", "tensor", True, 1, half)
        yield Collective("sum of the input's gradients", "reduce-scatter", "tensor", True, 1, half)
    else:
        yield Collective("sum of the heads' outputs", "all-reduce", "tensor", False, 1, 2 * half)
        if training:
            yield Collective("sum of the input's gradients", "all-reduce", "tensor", True, 1, 2 * half)
    shared = [*share.summed]
    if ranks.sequence_parallel and share.output_bias:
        shared.append(share.output_bias)
    if training and shared:
        sent = sum(_all_reduce(x * itemsize, count) for x in shared)
        yield Collective("sums of shared parameters' gradients", "all-reduce", "tensor", True, len(shared), sent)


def _context(sent: ContextBytes, ranks: Ranks, *, training: bool) -> Iterator[Collective]:
    """Yield the collectives of a layer within `context_parallel`."""
    others, is_ring = ranks.context - 1, sent.method == "ring"
    yield Collective("comparison of the arguments", "send", "context", False, others, sent.check)
    operation, calls = ("send", 2 * others) if is_ring else ("all-gather", 2)
    yield Collective(f"keys and values ({sent.method})", operation, "context", False, calls, sent.forward)
    if training:
        operation, calls = ("send", 4 * others) if is_ring else ("all-to-all", 2)
        name = "keys and values, and their gradients" if is_ring else "gradients of keys and values"
        yield Collective(name, operation, "context", True, calls, sent.backward)


def _sharded(weights: str, gradients: str, shard: int, ranks: Ranks, *, training: bool) -> Iterator[Collective]:
    """Yield the collectives of parameters of which a rank stores `shard` bytes."""
    if ranks.fsdp > 1:
        sent = (ranks.fsdp - 1) * shard
        yield Collective(weights, "all-gather", "fsdp", False, 1, sent)
        if training:
            yield Collective(weights, "all-gather", "fsdp", True, 1, sent)
            yield Collective(gradients, "reduce-scatter", "fsdp", True, 1, sent)
    if ranks.context > 1 and training:
        yield Collective(gradients, "all-reduce", "context", True, 1, _all_reduce(shard, ranks.context))


def monitor_bytes(heads: list[int], ranks: int) -> int:
    """Return the size of the one tensor that `HeadMonitor` all-reduces in an observed step, without pairs of heads.

    It has counts, sums and the maxima of every rank of each row statistic; the histogram of entropies, the number of
    tokens, squared norms of outputs and gradients; the loss; and for all of these and each layer whether a rank has it.

    Args:
        heads: number of heads of each layer.
        ranks: ranks with other data.
    """
    by_head = MONITORED * (2 + ranks) + Histogram.BINS + 1 + 2
    flags = len(heads) * 7 + 1
    return (sum(heads) * by_head + len(heads) + 1 + flags) * torch.float64.itemsize


def _all_reduce(size: int, ranks: int) -> int:
    return -(-2 * (ranks - 1) * size // ranks)


def _reduce_scatter(size: int, ranks: int) -> int:
    return -(-(ranks - 1) * size // ranks)
