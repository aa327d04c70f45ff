"""The formula in tiles with an online softmax: any device, any option, memory that grows with n and not with n²."""

from __future__ import annotations

from polyhead.functional.request import AttentionOutput, AttentionRequest
from polyhead.functional.tiled_softmax import attend
from polyhead.functional.tiles import Tiling as _Tiling
from polyhead.functional.tiles import prepare

_TILE_ELEMENTS = 1 << 21  # logits of one tile, all heads together: with their exponentials they stay in a CPU's cache
_TILE_COLUMNS = 512


def unsupported_reasons(request: AttentionRequest) -> list[str]:
    return []


def run(request: AttentionRequest) -> AttentionOutput:
    ready = prepare(request, columns=_TILE_COLUMNS, elements=_TILE_ELEMENTS)
    tiling: _Tiling = ready.tiling
    output, logsumexp, statistics = attend(tiling, ready.query, ready.key, ready.value, ready.sinks)
    assert output is not None
    weights = tiling.weights(ready.query, ready.key, logsumexp) if request.weights else None
    return AttentionOutput(output.to(request.query.dtype), logsumexp, weights, statistics, backend="blockwise")
