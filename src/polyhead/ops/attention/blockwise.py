"""The formula in tiles with an online softmax: any device, any option, memory that grows with n and not with n²."""

from __future__ import annotations

from polyhead.ops.attention.tiled_softmax import attend
from polyhead.ops.common.request import AttentionOutput, AttentionRequest
from polyhead.ops.common.tiles import prepare
from polyhead.ops.common.tracing import TRANSFORMED, is_transformed


def unsupported_reasons(request: AttentionRequest) -> list[str]:
    return [TRANSFORMED] if is_transformed() else []


def run(request: AttentionRequest) -> AttentionOutput:
    ready = prepare(request)
    output, logsumexp, statistics = attend(ready.tiling, ready.query, ready.key, ready.value, ready.sinks)
    assert output is not None
    weights = ready.tiling.weights(ready.query, ready.key, logsumexp) if request.weights else None
    return AttentionOutput(output.to(request.query.dtype), logsumexp, weights, statistics, backend="blockwise")
