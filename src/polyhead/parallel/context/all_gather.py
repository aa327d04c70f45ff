"""Attention of this rank's queries over keys and values that are gathered from all ranks first.

One collective each, no merging, and gradients without computing anything twice; but every rank stores the keys and
values of the whole sequence.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from polyhead.ops.common.request import AttentionOutput, as_output
from polyhead.parallel.context.crop import visible_columns
from polyhead.parallel.context.layout import gathered
from polyhead.parallel.context.parts import ContextCall, of_span


def attend(
    call: ContextCall, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *, logsumexp: bool
) -> AttentionOutput:
    """Return output, log-sum-exp if requested, and statistics of this rank's queries over the keys of all ranks."""
    keys, values = gathered([key, value], 2, call.group, call.layout)
    chunks = []
    for i_query, rows in enumerate(call.query_spans):
        # A chunk that sees nothing attends to one key, which its mask hides: its rows are those of `attention`.
        columns = visible_columns(call.visibility, rows, (0, keys.shape[2])) or (0, min(1, keys.shape[2]))
        k, v = (x.narrow(2, columns[0], columns[1] - columns[0]) for x in (keys, values))
        query_rows = of_span(query, call.query_spans, i_query, rows)
        chunks.append(call.attend(rows, columns, query_rows, k, v, names=call.names, logsumexp=logsumexp, sinks=sinks))
    backend = f"all_gather/{chunks[0].backend}"
    if len(chunks) == 1:
        return replace(chunks[0], backend=backend)
    rows_of = [x for x in map(_rows, chunks) if x is not None]
    if len(rows_of) < len(chunks):  # a kernel without a log-sum-exp, which was not requested
        return AttentionOutput(torch.cat([chunk.output for chunk in chunks], 2), backend=backend)
    return as_output([torch.cat(x, 2) for x in zip(*rows_of, strict=True)], call.names, backend)


def _rows(chunk: AttentionOutput) -> list[Tensor] | None:
    """Return output, log-sum-exp and statistics; None without a log-sum-exp."""
    if chunk.logsumexp is None:
        return None
    statistics = [] if chunk.statistics is None else [x for _, x in chunk.statistics.items()]
    return [chunk.output, chunk.logsumexp, *statistics]
