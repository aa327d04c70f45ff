"""Work of a layer from its config: the matrix products, attention calls and elementwise passes that it runs."""

from __future__ import annotations

from typing import Any

import torch

from polyhead.costs.descriptions import describe
from polyhead.costs.recording.recorder import Recorder
from polyhead.costs.work import Phase, Work, backward_pieces
from polyhead.costs.workload import Workload
from polyhead.errors import MaskError, OptionError
from polyhead.layers.config import AttentionConfig
from polyhead.masks import Mask
from polyhead.ops.decode.fused import MOST_QUERIES


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
        mask: a causal mask or sliding window passed to the call, in addition to the layer's own.
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
    call = checked_call(config, work, mask=mask, dtype=dtype, cache_dtype=cache_dtype, cached=cached)
    describe(config).record(call)
    pieces = [piece for piece in call.pieces if piece.bytes]
    phase: Phase = "decode" if work.past and work.queries <= MOST_QUERIES else "prefill"
    if not work.training:
        return Work(phase, tuple(pieces), layers)
    return Work("training", (*pieces, *backward_pieces(pieces)), layers)


def checked_call(config: AttentionConfig, work: Workload, *, cached: bool | None, **options: Any) -> Recorder:
    """Return a recorder for a call whose work and memory can be counted; `cached` is by default `work.past > 0`."""
    call = Recorder(config, work, cached=work.past > 0 if cached is None else cached, **options)
    if call.mask is not None and (not call.mask.is_band or call.mask.sinks):
        raise MaskError(f"mask must be a causal mask or a sliding window, got {call.mask!r}")
    if call.cached and (work.training or work.source is not None):
        raise OptionError("a cache needs self-attention without gradients, got cached=True for training or a source")
    if work.past and not call.cached:
        raise OptionError(f"past tokens need a cache, got cached=False with past {work.past}")
    return call
