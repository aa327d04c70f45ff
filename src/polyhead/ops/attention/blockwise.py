"""Blockwise backend: tiles of plain PyTorch with an online softmax, in memory linear in n.

It supports any device and any option.
"""

from __future__ import annotations

from polyhead.ops.attention.tiled_softmax import attend
from polyhead.ops.common.request import AttentionOutput, AttentionRequest
from polyhead.ops.common.tiles import prepare
from polyhead.ops.common.tracing import TRANSFORMED, is_transformed


def unsupported_reasons(request: AttentionRequest) -> list[str]:
    return [TRANSFORMED] if is_transformed() else []


def run(request: AttentionRequest) -> AttentionOutput:
    prepared = prepare(request)
    output, logsumexp, statistics = attend(
        prepared.tiling, prepared.query, prepared.key, prepared.value, prepared.sinks
    )
    assert output is not None
    weights = prepared.tiling.weights(prepared.query, prepared.key, logsumexp) if request.weights else None
    return AttentionOutput(output.to(request.query.dtype), logsumexp, weights, statistics, backend="blockwise")
