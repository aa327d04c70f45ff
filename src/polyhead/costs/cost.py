"""Count parameters, matrix FLOPs, exponentials and cache bytes of a layer from its config alone.

Nothing is built and nothing is measured; tests compare the counts with built layers, PyTorch's FLOP counter and real
caches, and require equality. A new attention variant registers its own function with `count_layer`:

    @count_layer.register
    def count_grouped_heads(config: GroupedHeadsConfig, work: Workload, pairs: int) -> LayerCounts: ...
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Literal

import torch

from polyhead.costs.workload import Workload, visible_pairs
from polyhead.errors import DtypeError, OptionError, ShapeError
from polyhead.layers.config import AttentionConfig
from polyhead.layers.multi_head.config import HeadsConfig, MultiHeadConfig
from polyhead.masks import Mask


@dataclass(frozen=True, slots=True)
class MatrixFlops:
    """FLOPs of matrix products by purpose; a multiply-add counts as two."""

    projection: int = 0  # input to queries, keys, values and gates
    scores: int = 0  # queries by keys
    values: int = 0  # attention weights by values
    mixing: int = 0  # heads by heads, in variants that mix them
    output: int = 0  # heads to output

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def __add__(self, other: MatrixFlops) -> MatrixFlops:
        return MatrixFlops(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def times(self, layers: int) -> MatrixFlops:
        return MatrixFlops(*(layers * flops for flops in dataclasses.astuple(self)))


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Counts of one forward pass of a layer, from which `estimate_cost` derives everything else."""

    parameters: int
    forward: MatrixFlops
    recomputed: MatrixFlops  # the part of `forward` that a fused backward recomputes
    exponentials: int  # of every softmax
    weights: int  # elements of the attention weights, if materialised
    cache_numbers: int  # elements that a token adds to the cache
    cache_scales: int | None = None  # float32 scales per token of an int8 cache; None: int8 is not supported


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Cost of one layer under one workload.

    `pairs` counts the (query, key) pairs of one head over all sequences. `backward` is zero outside training.
    `weights_bytes` is one copy of the attention weights if they are materialised, else 0. `cache_bytes` covers every
    key of the call; a rolling cache takes `cache_bytes_per_token` for each token of its window.
    """

    parameters: int
    pairs: int
    forward: MatrixFlops
    backward: MatrixFlops
    exponentials: int
    weights_bytes: int
    cache_bytes_per_token: int
    cache_bytes: int

    @property
    def matrix_flops(self) -> int:
        return self.forward.total + self.backward.total

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> CostEstimate:
        values: dict[str, Any] = json.loads(text)
        for name in ("forward", "backward"):
            values[name] = MatrixFlops(**values[name])
        return cls(**values)


def estimate_cost(
    config: AttentionConfig,
    work: Workload,
    *,
    mask: Mask | None = None,
    form: Literal["fused", "materialised"] = "fused",
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
) -> CostEstimate:
    """Count the cost of `work` in a layer with this config.

    Args:
        mask: a causal mask or sliding window passed to the call, in addition to the layer's own.
        form: "fused" counts visible pairs only (kernels also compute the masked pairs of tiles that a mask edge
            crosses), stores no attention weights, and recomputes scores and exponentials in the backward.
            "materialised" computes every pair and stores the weights.
        dtype: dtype of the layer. Materialised weights are float32, or float64 for a float64 layer.
        cache_dtype: dtype of the cache, default `dtype`; torch.int8 is a `QuantizedCache`.

    >>> config = MultiHeadConfig(4096, 32, num_kv_heads=8, causal=True, bias=False)
    >>> cost = estimate_cost(config, Workload.decode(past=8191))
    >>> cost.parameters, cost.forward.scores, cost.cache_bytes_per_token
    (41943040, 67108864, 4096)
    """
    if form not in ("fused", "materialised"):
        raise OptionError(f"form must be 'fused' or 'materialised', got {form!r}")
    fused = form == "fused"
    if not fused:
        mask = None
    elif config.mask is not None:
        mask = config.mask if mask is None else config.mask & mask
    pairs = work.batch * visible_pairs(work.queries, work.keys, mask)
    counts = count_layer(config, work, pairs)
    forward, backward = counts.forward, MatrixFlops()
    if work.training:
        backward = forward + forward  # one product per factor's gradient
        backward = backward + counts.recomputed if fused else backward
    per_token = _cache_bytes(counts, dtype if cache_dtype is None else cache_dtype)
    return CostEstimate(
        parameters=counts.parameters,
        pairs=pairs,
        forward=forward,
        backward=backward,
        exponentials=counts.exponentials * (2 if work.training and fused else 1),
        weights_bytes=0 if fused else counts.weights * (8 if dtype is torch.float64 else 4),
        cache_bytes_per_token=per_token,
        cache_bytes=work.batch * work.keys * per_token,
    )


@singledispatch
def count_layer(config: AttentionConfig, work: Workload, pairs: int) -> LayerCounts:
    """Count one forward pass of a layer of this kind; each head scores `pairs` (query, key) pairs in total."""
    raise OptionError(
        f"no counts for {type(config).__name__}; register a function with polyhead.costs.count_layer.register"
    )


@count_layer.register
def count_multi_head(config: MultiHeadConfig, work: Workload, pairs: int) -> LayerCounts:
    return count_heads(config, work, pairs, config.layout.num_heads * config.layout.value_dim)


def count_heads(config: HeadsConfig, work: Workload, pairs: int, combined: int) -> LayerCounts:
    """Count multi-head attention with an output projection of `combined` input channels."""
    layout = config.layout
    width, heads, kv_heads = layout.embed_dim, layout.num_heads, layout.num_kv_heads
    if work.source is None and (layout.key_input_dim, layout.value_input_dim) != (width, width):
        raise ShapeError(
            "self-attention needs one input width, got a layer with query, key and value inputs of width "
            f"{width}, {layout.key_input_dim} and {layout.value_input_dim}; count it with Workload.cross"
        )
    queries, outputs = heads * layout.head_dim, heads * layout.value_dim
    keys, values = kv_heads * layout.head_dim, kv_heads * layout.value_dim
    gates = {None: 0, "head": heads, "channel": outputs}[config.output_gate]
    norms = {None: 0, "rms": 2 * layout.head_dim, "layer": 4 * layout.head_dim}[config.qk_norm]
    biases = (queries + keys + values if config.bias else 0) + (width if config.output_bias else 0)
    weights = layout.num_parameters + (combined - outputs) * width
    parameters = weights + biases + norms + gates * (width + 1) + (heads if config.sinks else 0)
    if config.positions is not None:
        parameters += config.positions.num_parameters(layout)
    tokens, new_keys = work.batch * work.queries, work.batch * work.new_keys
    source = layout.key_input_dim * keys + layout.value_input_dim * values
    return LayerCounts(
        parameters=parameters,
        forward=MatrixFlops(
            projection=2 * tokens * width * (queries + gates) + 2 * new_keys * source,
            scores=2 * pairs * queries,
            values=2 * pairs * outputs,
            output=2 * tokens * combined * width,
        ),
        recomputed=MatrixFlops(scores=2 * pairs * queries),
        exponentials=heads * (pairs + (tokens if config.sinks else 0)),
        weights=heads * pairs,
        cache_numbers=keys + values,
        cache_scales=2 * kv_heads,
    )


def _cache_bytes(counts: LayerCounts, dtype: torch.dtype) -> int:
    if dtype is torch.int8:
        if counts.cache_scales is None:
            raise OptionError(
                "latent attention has no int8 cache, got cache_dtype torch.int8; a QuantizedCache would store the "
                "latents twice, as keys and as values"
            )
        return counts.cache_numbers + counts.cache_scales * torch.float32.itemsize
    if not dtype.is_floating_point:
        raise DtypeError(f"cache_dtype must be a floating-point dtype or torch.int8 (with scales), got {dtype}")
    return counts.cache_numbers * dtype.itemsize
