"""The mask of a whole sequence, restricted to some queries and some keys."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.common.visibility import Span, Visibility


def visible_columns(visibility: Visibility, rows: Span, columns: Span) -> Span | None:
    """Return the part of `columns` that some query of `rows` may see, None if a causal mask or a window hides all."""
    spans = [(max(first, columns[0]), min(last, columns[1])) for first, last in visibility.spans(rows)]
    spans = [(first, last) for first, last in spans if first < last]
    return (spans[0][0], spans[-1][1]) if spans else None


def crop(visibility: Visibility, rows: Span, columns: Span, *, positions: bool, ordinals: bool) -> Visibility | None:
    """Return the mask of the queries in `rows` and the keys in `columns`; None if all see all and nothing else matters.

    Kernels may assume that the last query is aligned with the last key. Where it is not, positions become explicit.

    Args:
        visibility: the mask of all queries and keys.
        rows, columns: spans of the queries and of the keys.
        positions: statistics compare positions.
        ordinals: statistics need the first keys of each sequence.
    """
    left, right = visibility.left, visibility.right
    query_positions, key_positions = visibility.query_positions, visibility.key_positions
    key_ordinals, sinks = visibility.key_ordinals, visibility.sinks
    num_queries, num_keys = rows[1] - rows[0], columns[1] - columns[0]
    if query_positions is None:  # a band that hides no pair of these is not needed
        min_distance = columns[0] - (rows[1] - 1) - visibility.offset
        max_distance = columns[1] - 1 - rows[0] - visibility.offset
        left = None if left is None or min_distance >= -left else left
        right = None if right is None or max_distance <= right else right
    sinks = 0 if left is None else sinks
    ordinals = ordinals or sinks > 0
    cropped = replace(
        visibility,
        num_queries=num_queries,
        num_keys=num_keys,
        left=left,
        right=right,
        sinks=sinks,
        offset=num_keys - num_queries,
        query_positions=_tokens(query_positions, rows),
        key_positions=_tokens(key_positions, columns),
        key_ordinals=_tokens(key_ordinals, columns),
        query_real=_tokens(visibility.query_real, rows),
        key_real=_tokens(visibility.key_real, columns),
        documents=tuple((q[:, slice(*rows)], k[:, slice(*columns)]) for q, k in visibility.documents),
        allowed=None if visibility.allowed is None else _pairs(visibility.allowed, rows, columns),
        biases=tuple(_pairs(bias, rows, columns) for bias in visibility.biases),
    )
    index = torch.arange(max(rows[1], columns[1]), device=visibility.device)[None]
    needs_ordinals = ordinals and columns[0] > 0 and key_ordinals is None
    if needs_ordinals:
        cropped = replace(cropped, key_ordinals=_tokens(index, columns))
    is_aligned = visibility.offset + rows[0] - columns[0] == cropped.offset
    compares = positions or left is not None or right is not None or len(visibility.relative_biases) > 0
    # Of a band kernels read no ordinals: explicit positions, which make it something else, go with them.
    if query_positions is None and ((compares and not is_aligned) or needs_ordinals):
        query_index, key_index = index[:, slice(*rows)], index[:, slice(*columns)]
        return replace(cropped, query_positions=query_index + visibility.offset, key_positions=key_index)
    is_everything = cropped.is_band and left is None and right is None
    return None if is_everything and not positions else cropped


def _tokens(x: Tensor | None, span: Span) -> Tensor | None:
    return None if x is None else x[:, span[0] : span[1]]


def _pairs(x: Tensor, rows: Span, columns: Span) -> Tensor:
    x = x[..., columns[0] : columns[1]]
    return x if x.shape[2] == 1 else x[:, :, rows[0] : rows[1]]
