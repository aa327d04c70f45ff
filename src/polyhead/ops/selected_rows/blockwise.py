"""Selected rows in plain PyTorch: one attention per (batch, head) pair over its visible keys."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.attention import dispatch
from polyhead.ops.common.request import AttentionOutput, AttentionRequest
from polyhead.ops.common.statistics import RowStatistics
from polyhead.ops.common.visibility import Span, Visibility
from polyhead.ops.selected_rows.request import RaggedRequest

# Rows of a pair that are processed together; keys after the last of them are skipped under a causal mask.
_MAX_ROWS = 512


def run(request: RaggedRequest, backend: str) -> AttentionOutput:
    """Run every piece with the named backend of `attention`, "blockwise" or "reference"."""
    full_request = request.full_request
    _, heads, kv_heads, *_ = full_request.sizes
    # One unbind, so that the gradients of the pieces are stacked once instead of added one by one.
    keys, values = full_request.key.flatten(0, 1).unbind(0), full_request.value.flatten(0, 1).unbind(0)
    spans = _row_spans(request.rows.offsets.tolist())
    pieces = request.query.split([stop - start for _, start, stop in spans] + [request.query.shape[0] - spans[-1][2]])
    results = []
    for (pair, start, stop), query in zip(spans, pieces, strict=False):
        i_batch, i_head = request.pair(pair)
        i_kv_pair = i_batch * kv_heads + i_head // (heads // kv_heads)
        indices = request.rows.positions[start:stop].long()
        piece = _piece_request(full_request, indices, query, keys[i_kv_pair], values[i_kv_pair], i_batch, i_head)
        results.append(dispatch.run(piece, backend))
    return _concatenate(request, results, backend)


def run_empty_batch(request: RaggedRequest, backend: str) -> AttentionOutput:
    """Run a batch of size 0, whose rows are all padding.

    The named backend computes an empty attention, for its graph.
    """
    full_request = request.full_request
    empty = replace(full_request, query=request.query[:0].view(full_request.query.shape))
    return _concatenate(request, [dispatch.run(empty, backend)], backend)


def _row_spans(offsets: list[int]) -> list[tuple[int, int, int]]:
    """Return pair, first row and end of each piece; one empty piece if there are no rows."""
    spans = [
        (pair, start, min(start + _MAX_ROWS, offsets[pair + 1]))
        for pair in range(len(offsets) - 1)
        for start in range(offsets[pair], offsets[pair + 1], _MAX_ROWS)
    ]
    return spans if len(spans) else [(0, 0, 0)]


def _piece_request(
    full_request: AttentionRequest,
    indices: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    i_batch: int,
    i_head: int,
) -> AttentionRequest:
    """Return the request for the queries at `indices` of one pair: one sequence, one head."""
    visibility, requested, scale = full_request.visibility, full_request.statistics, full_request.scale
    first, stop = (0, key.shape[0]) if visibility is None else _columns(visibility, indices)
    per_sequence, per_head, keys = slice(i_batch, i_batch + 1), slice(i_head, i_head + 1), slice(first, stop)
    if requested is not None:
        requested = replace(requested, places=requested.places.select(per_sequence, per_head, indices, keys))
    return AttentionRequest(
        query[None, None],
        key[None, None, keys],
        value[None, None, keys],
        visibility=None if visibility is None else visibility.select(per_sequence, per_head, indices, keys),
        scale=scale[per_head] if isinstance(scale, Tensor) else scale,
        softcap=full_request.softcap,
        sinks=None if full_request.sinks is None else full_request.sinks[per_head],
        dropout=0.0,
        seed=None,
        weights=False,
        logsumexp=True,
        finite=full_request.finite,
        statistics=requested,
    )


def _columns(visibility: Visibility, indices: Tensor) -> Span:
    """Return the span of keys visible to any of the rows."""
    if visibility.query_positions is not None or not indices.numel():
        return 0, visibility.num_keys
    spans = visibility.spans((int(indices[0]), int(indices[-1]) + 1))
    return (spans[0][0], spans[-1][1]) if len(spans) else (0, 0)


def _concatenate(request: RaggedRequest, results: list[AttentionOutput], backend: str) -> AttentionOutput:
    """Concatenate the results of the pieces and append those of padding rows."""
    total = request.query.shape[0]

    def join(pieces: list[Tensor], padding_value: float) -> Tensor:
        rows = torch.cat([x.flatten(0, 2) for x in pieces])
        padding = rows.new_full((total - rows.shape[0], *rows.shape[1:]), padding_value)
        return torch.cat([rows, padding])

    statistics = None
    if request.full_request.statistics is not None:
        stats = [dict(result.statistics.items()) for result in results if result.statistics is not None]
        statistics = RowStatistics(
            **{
                name: join([piece[name] for piece in stats], -torch.inf if name == "max_logit" else 0.0)
                for name in request.full_request.statistics.names
            }
        )
    logsumexps = [result.logsumexp for result in results if result.logsumexp is not None]
    output = join([result.output for result in results], 0.0)
    return AttentionOutput(output, join(logsumexps, -torch.inf), statistics=statistics, backend=backend)
