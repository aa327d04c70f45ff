"""Costs of a layer from its config alone: totals (`estimate_cost`), and its work piece by piece (`layer_work`).

Nothing is built and nothing is measured; tests compare parameters, matrix FLOPs, exponentials and cache bytes with
built layers, PyTorch's FLOP counter and real caches, and require equality.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch

from polyhead.costs.descriptions import describe
from polyhead.costs.options import Phase
from polyhead.costs.recording.recorder import Form, Recorder
from polyhead.costs.work import AttentionCore, MatrixFlops, Work, backward_pieces, total_flops
from polyhead.costs.workload import Workload, visible_pairs
from polyhead.errors import MaskError, OptionError
from polyhead.layers.config import AttentionConfig
from polyhead.masks import Mask
from polyhead.ops.decode.fused import MOST_QUERIES


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Cost of one layer under one workload.

    `pairs` counts the visible (query, key) pairs of one head over all sequences, or all pairs if the weights are
    materialised. `backward` is zero outside training.
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
        """Return the estimate as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> CostEstimate:
        """Return the estimate that `to_json` wrote.

        Args:
            text: JSON text.
        """
        values: dict[str, Any] = json.loads(text)
        for name in ("forward", "backward"):
            values[name] = MatrixFlops(**values[name])
        return cls(**values)


def estimate_cost(
    config: AttentionConfig,
    work: Workload,
    *,
    mask: Mask | None = None,
    form: Form = "fused",
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
) -> CostEstimate:
    """Count the cost of the workload `work` for a layer with this config.

    Args:
        config: config of the layer.
        work: the call to count.
        mask: a causal mask or sliding window passed to the call, in addition to the layer's own; with `form`
            "materialised" it changes nothing.
        form: "fused" counts visible pairs only (kernels also compute the masked pairs of tiles that a mask edge
            crosses), stores no attention weights, and recomputes scores and exponentials in the backward.
            "materialised" computes every pair and stores the weights.
        dtype: dtype of the layer. Materialised weights are float32, or float64 for a float64 layer.
        cache_dtype: dtype of the cache, default `dtype`; torch.int8 is a `QuantizedCache`.

    Returns:
        Parameters, FLOPs, exponentials and bytes; integers, exact.

    >>> from polyhead.layers.multi_head.config import MultiHeadConfig
    >>> config = MultiHeadConfig(4096, 32, num_kv_heads=8, causal=True, bias=False)
    >>> cost = estimate_cost(config, Workload.decode(past=8191))
    >>> cost.parameters, cost.forward.scores, cost.cache_bytes_per_token
    (41943040, 67108864, 4096)
    """
    fused, layer = form == "fused", describe(config)
    mask = mask if fused else None
    recorder = Recorder(config, work, mask=mask, dtype=dtype, cache_dtype=cache_dtype, cached=work.past > 0, form=form)
    pairs = work.batch * visible_pairs(work.queries, work.keys, recorder.mask if fused else None)
    layer.record(recorder)
    forward, backward = total_flops(recorder.pieces), MatrixFlops()
    exponentials = sum(piece.exponentials for piece in recorder.pieces)
    if work.training and fused:
        gradients = backward_pieces(recorder.pieces)
        backward = total_flops(gradients)
        exponentials += sum(piece.exponentials for piece in gradients)
    elif work.training:
        backward = forward + forward  # the gradient of each of a product's two factors costs as much as the product
    weights = sum(piece.heads * piece.pairs for piece in recorder.pieces if isinstance(piece, AttentionCore))
    per_token = layer.cache_bytes_per_token(recorder.cache_dtype)
    return CostEstimate(
        parameters=layer.num_parameters,
        pairs=pairs,
        forward=forward,
        backward=backward,
        exponentials=exponentials,
        weights_bytes=0 if fused else weights * (8 if dtype is torch.float64 else 4),
        cache_bytes_per_token=per_token,
        cache_bytes=work.batch * work.keys * per_token,
    )


def layer_work(
    config: AttentionConfig,
    work: Workload,
    *,
    mask: Mask | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    cached: bool | None = None,
    layers: int = 1,
) -> Work:
    """Return the work of a layer with this config, using fused attention.

    Args:
        config: config of the layer.
        work: the call to describe.
        mask: a causal mask or sliding window passed to the call, in addition to the layer's own.
        dtype: dtype of the layer.
        cache_dtype: dtype of the cache, default `dtype`.
        cached: whether the call writes and reads a cache; by default if there are past tokens.
        layers: number of such layers in a row.

    >>> from polyhead.layers.multi_head.config import MultiHeadConfig
    >>> work = layer_work(MultiHeadConfig(512, 8, causal=True), Workload.decode(past=1000, batch=4))
    >>> work.phase, work.flops, work.bytes
    ('decode', 16588800, 10346496)
    >>> [type(piece).__name__ for piece in work.pieces]
    ['Product', 'Traffic', 'AttentionCore', 'Product']
    """
    recorder = checked_recorder(config, work, mask=mask, dtype=dtype, cache_dtype=cache_dtype, cached=cached)
    describe(config).record(recorder)
    pieces = [piece for piece in recorder.pieces if piece.bytes]
    phase: Phase = "decode" if work.past and work.queries <= MOST_QUERIES else "prefill"
    if not work.training:
        return Work(phase, tuple(pieces), layers)
    return Work("training", (*pieces, *backward_pieces(pieces)), layers)


def checked_recorder(config: AttentionConfig, work: Workload, *, cached: bool | None, **options: Any) -> Recorder:
    """Return a recorder for a call whose work and memory can be counted; `cached` is by default `work.past > 0`."""
    recorder = Recorder(config, work, cached=work.past > 0 if cached is None else cached, **options)
    if recorder.mask is not None and (not recorder.mask.is_band or recorder.mask.sinks):
        raise MaskError(f"mask must be a causal mask or a sliding window, got {recorder.mask!r}")
    if recorder.cached and (work.training or work.source is not None):
        raise OptionError("a cache needs self-attention without gradients, got cached=True for training or a source")
    if work.past and not recorder.cached:
        raise OptionError(f"past tokens need a cache, got cached=False with past {work.past}")
    return recorder
