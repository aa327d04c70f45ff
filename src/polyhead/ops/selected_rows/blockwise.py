"""Chosen rows by plain PyTorch: pair after pair, each an attention of its own over the keys that its rows may see."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.attention import dispatch
from polyhead.ops.common.request import AttentionOutput, AttentionRequest
from polyhead.ops.common.statistics import RowStatistics
from polyhead.ops.common.visibility import Span, Visibility
from polyhead.ops.selected_rows.request import RaggedRequest

# Rows of a pair that are taken together; a causal edge hides the keys behind the last of them.
_ROWS = 512


def run(request: RaggedRequest, backend: str) -> AttentionOutput:
    """Every piece by the named backend of `attention`, "blockwise" or "reference"."""
    whole = request.whole
    _, heads, kv_heads, *_ = whole.sizes
    # Pieces that lie side by side, so that their gradients are put together once and not added up one by one.
    keys, values = whole.key.flatten(0, 1).unbind(0), whole.value.flatten(0, 1).unbind(0)
    spans = _spans(request.offsets.tolist())
    pieces = request.query.split([stop - start for _, start, stop in spans] + [request.query.shape[0] - spans[-1][2]])
    results = []
    for (pair, start, stop), query in zip(spans, pieces, strict=False):
        i_batch, i_head = request.pair(pair)
        i_kv_pair = i_batch * kv_heads + i_head // (heads // kv_heads)
        places = request.positions[start:stop].long()
        piece = _piece(whole, places, query, keys[i_kv_pair], values[i_kv_pair], i_batch, i_head)
        results.append(dispatch.run(piece, backend))
    return _joined(request, results, backend)


def run_nobody(request: RaggedRequest, backend: str) -> AttentionOutput:
    """A batch of no sequences, whose rows are all padding: the named backend's attention of nothing, with its graph."""
    whole = request.whole
    nothing = replace(whole, query=request.query[:0].view(whole.query.shape))
    return _joined(request, [dispatch.run(nothing, backend)], backend)


def _spans(offsets: list[int]) -> list[tuple[int, int, int]]:
    """Pair, first row and end of each piece; one empty piece where there are no rows."""
    spans = [
        (pair, start, min(start + _ROWS, offsets[pair + 1]))
        for pair in range(len(offsets) - 1)
        for start in range(offsets[pair], offsets[pair + 1], _ROWS)
    ]
    return spans if len(spans) else [(0, 0, 0)]


def _piece(
    whole: AttentionRequest, places: Tensor, query: Tensor, key: Tensor, value: Tensor, i_batch: int, i_head: int
) -> AttentionRequest:
    """The attention of the rows at `places` of one pair: one sequence, one head."""
    columns = _columns(whole.visibility, places) if whole.visibility is not None else (0, key.shape[0])
    per_head = slice(i_head, i_head + 1)
    scale, requested = whole.scale, whole.statistics
    return AttentionRequest(
        query[None, None],
        key[None, None, columns[0] : columns[1]],
        value[None, None, columns[0] : columns[1]],
        None if whole.visibility is None else _seen_by(whole.visibility, places, columns, i_batch, i_head),
        scale[per_head] if isinstance(scale, Tensor) else scale,
        whole.softcap,
        None if whole.sinks is None else whole.sinks[per_head],
        0.0,
        None,
        False,
        True,
        whole.finite,
        None
        if requested is None
        else replace(requested, places=_seen_by(requested.places, places, columns, i_batch, i_head)),
    )


def _columns(visibility: Visibility, places: Tensor) -> Span:
    """The keys that some of the rows may see."""
    if visibility.query_positions is not None or not places.numel():
        return 0, visibility.num_keys
    spans = visibility.spans((int(places[0]), int(places[-1]) + 1))
    return (spans[0][0], spans[-1][1]) if len(spans) else (0, 0)


def _seen_by(visibility: Visibility, places: Tensor, columns: Span, i_batch: int, i_head: int) -> Visibility:
    """What the rows at `places` of one sequence and head see of the keys in `columns`."""
    index = torch.arange(*columns, device=visibility.device)[None]

    def of_rows(x: Tensor) -> Tensor:
        return _one(x, 0, i_batch)[:, places]

    def of_keys(x: Tensor) -> Tensor:
        return _one(x, 0, i_batch)[:, columns[0] : columns[1]]

    def of_pairs(x: Tensor) -> Tensor:
        x = _one(_one(x, 0, i_batch), 1, i_head)
        return (x if x.shape[2] == 1 else x[:, :, places])[..., columns[0] : columns[1]]

    query_positions, key_positions, ordinals = (
        visibility.query_positions,
        visibility.key_positions,
        visibility.key_ordinals,
    )
    return replace(
        visibility,
        num_queries=places.shape[0],
        num_keys=columns[1] - columns[0],
        query_positions=places[None] + visibility.offset if query_positions is None else of_rows(query_positions),
        key_positions=index if key_positions is None else of_keys(key_positions),
        key_ordinals=index if ordinals is None else of_keys(ordinals),
        query_real=None if visibility.query_real is None else of_rows(visibility.query_real),
        key_real=None if visibility.key_real is None else of_keys(visibility.key_real),
        documents=tuple((of_rows(mine), of_keys(theirs)) for mine, theirs in visibility.documents),
        allowed=None if visibility.allowed is None else of_pairs(visibility.allowed),
        biases=tuple(of_pairs(bias) for bias in visibility.biases),
        relative_biases=tuple(replace(x, table=_one(x.table, 0, i_head)) for x in visibility.relative_biases),
    )


def _one(x: Tensor, axis: int, index: int) -> Tensor:
    """Element `index` of an axis that may be shared, which stays an axis of one."""
    return x if x.shape[axis] == 1 else x.narrow(axis, index, 1)


def _joined(request: RaggedRequest, results: list[AttentionOutput], backend: str) -> AttentionOutput:
    """The pieces after one another, and behind them what is told of padding."""
    total = request.query.shape[0]

    def join(pieces: list[Tensor], nothing: float) -> Tensor:
        there = torch.cat([x.flatten(0, 2) for x in pieces])
        padding = there.new_full((total - there.shape[0], *there.shape[1:]), nothing)
        return torch.cat([there, padding])

    statistics = None
    if request.whole.statistics is not None:
        rows = [dict(result.statistics.items()) for result in results if result.statistics is not None]
        statistics = RowStatistics(
            **{
                name: join([row[name] for row in rows], -torch.inf if name == "max_logit" else 0.0)
                for name in request.whole.statistics.names
            }
        )
    sums = [result.logsumexp for result in results if result.logsumexp is not None]
    output = join([result.output for result in results], 0.0)
    return AttentionOutput(output, join(sums, -torch.inf), statistics=statistics, backend=backend)
