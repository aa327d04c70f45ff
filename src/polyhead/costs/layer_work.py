"""Work of a layer from its config: the matrix products, attention calls and elementwise passes that it runs."""

from __future__ import annotations

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
    mask, cached = checked_call(config, work, mask, cached)
    call = Recorder.of(config, work, mask=mask, dtype=dtype, cache_dtype=cache_dtype, cached=cached)
    describe(config).record(call)
    pieces = [piece for piece in call.pieces if piece.bytes]
    return Work(phase_of(work), (*pieces, *(backward_pieces(pieces) if work.training else ())), layers)


def checked_call(
    config: AttentionConfig, work: Workload, mask: Mask | None, cached: bool | None
) -> tuple[Mask | None, bool]:
    """Return the mask of the call combined with the layer's, and whether the call uses a cache."""
    mask = config.mask if mask is None else mask if config.mask is None else config.mask & mask
    if mask is not None and (not mask.is_band or mask.sinks):
        raise MaskError(f"mask must be a causal mask or a sliding window, got {mask!r}")
    cached = work.past > 0 if cached is None else cached
    if cached and (work.training or work.source is not None):
        raise OptionError("a cache needs self-attention without gradients, got cached=True for training or a source")
    if work.past and not cached:
        raise OptionError(f"past tokens need a cache, got cached=False with past {work.past}")
    return mask, cached


def phase_of(work: Workload) -> Phase:
    if work.training:
        return "training"
    return "decode" if work.past and work.queries <= MOST_QUERIES else "prefill"
