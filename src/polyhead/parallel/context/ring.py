"""Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values travel from rank to rank, queries stay.

A rank stores its own shard alone. The backward sends keys and values around once more, computes each part again, and
the gradients of keys and values travel with them; the next transfer runs while a part is computed. Merging the parts of
a row is described in `merging`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import GradientError
from polyhead.ops.common.request import AttentionOutput, as_output
from polyhead.ops.common.validation import without_autocast
from polyhead.ops.common.visibility import Span
from polyhead.parallel.context.crop import visible_columns
from polyhead.parallel.context.merging import (
    RowMerger,
    Rows,
    accumulation_dtype,
    part_gradients,
    part_names,
    sink_gradient,
)
from polyhead.parallel.context.parts import ContextCall, of_span
from polyhead.parallel.groups import RankGroup, Transfer


def attend(call: ContextCall, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> AttentionOutput:
    """Return output, log-sum-exp and statistics of this rank's queries over the keys of all ranks."""
    results = _RingAttention.apply(call, query, key, value, sinks)
    return as_output(results[1:], call.names, backend=f"ring/{results[0]}")


def circulate(group: RankGroup, tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield each rank and its tensors, those of this rank first; the next ones arrive in the meantime."""
    current = [x.contiguous() for x in tensors]
    for step in range(group.size):
        arriving, transfer = current, None
        if step < group.size - 1:
            arriving = [torch.empty_like(x) for x in current]
            transfer = _pass_on(group, current, arriving)
        yield (group.rank - step) % group.size, current
        if transfer is not None:
            transfer.wait()
        current = arriving


def _pass_on(group: RankGroup, tensors: Sequence[Tensor], arriving: Sequence[Tensor]) -> Transfer:
    """Start to send tensors to the next rank, and to receive those of the previous one."""
    sent = [group.send(x, (group.rank + 1) % group.size) for x in tensors]
    return group.start(sent + [group.receive(x, (group.rank - 1) % group.size) for x in arriving])


def parts(call: ContextCall, source: int) -> Iterator[tuple[int, Span, int, Span]]:
    """Yield (query chunk, its span, key chunk, visible span) of pairs of this rank's queries and keys of `source`."""
    for i_query, rows in enumerate(call.query_spans):
        for i_key, columns in enumerate(call.key_spans(source)):
            visible = visible_columns(call.visibility, rows, columns)
            if visible is not None:
                yield i_query, rows, i_key, visible


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: ContextCall, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> tuple[Any, ...]:
        rows, backend = _forward(call, query, key, value, sinks)
        ctx.call, ctx.has_sinks = call, sinks is not None
        results = (rows.output, rows.logsumexp, *rows.statistics.values())
        saved = (query, key, value, *(() if sinks is None else (sinks,)), *rows.tensors())
        ctx.num_saved = len(saved)
        ctx.save_for_backward(*saved, *call.tensors())  # the latter so that autograd notices if they are changed
        if "visible_keys" in rows.statistics:
            ctx.mark_non_differentiable(rows.statistics["visible_keys"])
        ctx.set_materialize_grads(False)
        return backend, *results

    @staticmethod
    def backward(ctx: Any, _: None, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise GradientError("the ring has no second derivative, got create_graph=True; use method='all_gather'")
        query, key, value, *rest = ctx.saved_tensors[: ctx.num_saved]
        sinks = rest.pop(0) if ctx.has_sinks else None
        call = ctx.call
        rows = Rows.from_tensors(rest, call.names)
        names = ("output", "logsumexp", *call.names)
        dtype = accumulation_dtype(query)
        given = {name: grad.to(dtype) for name, grad in zip(names, grads, strict=True) if grad is not None}
        empty = rows.logsumexp == -torch.inf  # whose gradients are 0, whatever arrives
        given = {name: torch.where(empty if x.ndim == 3 else empty[..., None], 0.0, x) for name, x in given.items()}
        with without_autocast(query.device.type):
            grad_query, grad_key, grad_value = _backward(call, query, key, value, rows, given)
        grad_sinks = None if sinks is None or not ctx.needs_input_grad[4] else sink_gradient(sinks, rows, given)
        return None, grad_query, grad_key, grad_value, grad_sinks


def _forward(call: ContextCall, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Rows, str]:
    spans, names = call.query_spans, part_names(call.names)
    mergers: list[RowMerger | None] = [None] * len(spans)
    backend = ""
    for source, (keys, values) in circulate(call.group, (key, value)):
        key_spans = call.key_spans(source)
        for i_query, rows, i_key, columns in parts(call, source):
            k, v = (of_span(x, key_spans, i_key, columns) for x in (keys, values))
            query_rows = of_span(query, spans, i_query, rows)
            part = call.attend(rows, columns, query_rows, k, v, names=names, logsumexp=True)
            backend = part.backend
            merger = mergers[i_query] or RowMerger(call.names, part.output, sinks)
            merger.add(part, columns[0])
            mergers[i_query] = merger
    chunks = []
    for i_query, (start, stop) in enumerate(spans):
        like = query.new_empty((*query.shape[:2], stop - start, value.shape[-1]))
        chunks.append((mergers[i_query] or RowMerger(call.names, like, sinks)).finish(query.dtype))
    if len(chunks) == 1:
        return chunks[0], backend
    tensors = [torch.cat(x, 2) for x in zip(*(chunk.tensors() for chunk in chunks), strict=True)]
    return Rows.from_tensors(tensors, call.names), backend


def _backward(
    call: ContextCall, query: Tensor, key: Tensor, value: Tensor, rows: Rows, grads: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's queries, keys and values, those of the latter from all ranks."""
    group, spans, dtype = call.group, call.query_spans, accumulation_dtype(query)
    grad_query = torch.zeros_like(query, dtype=dtype)
    own: list[Tensor] = []
    travelling, arriving, transfer = [], [], None
    for source, (keys, values) in circulate(group, (key, value)):
        totals = [torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (keys, values)]
        for i_query, chunk, i_key, columns in parts(call, source):
            key_spans = call.key_spans(source)
            inputs = [of_span(query, spans, i_query, chunk)]
            inputs += [of_span(x, key_spans, i_key, columns) for x in (keys, values)]
            targets = [of_span(grad_query, spans, i_query, chunk)]
            targets += [of_span(x, key_spans, i_key, columns) for x in totals]
            of_chunk = [of_span(x, spans, i_query, chunk) for x in rows.tensors()]
            of_rows = Rows.from_tensors(of_chunk, call.names)
            of_grads = {name: of_span(x, spans, i_query, chunk) for name, x in grads.items()}
            results = _part_backward(call, inputs, chunk, columns, of_rows, of_grads)
            for target, grad in zip(targets, results, strict=True):
                target += grad
        if source == group.rank:
            own = totals
            continue
        if transfer is not None:  # what the ranks before this one added to the gradients of the same keys
            transfer.wait()
            totals = [x + before for x, before in zip(totals, arriving, strict=True)]
        travelling, arriving = totals, [torch.empty_like(x) for x in totals]
        transfer = _pass_on(group, travelling, arriving)
    if transfer is not None:
        transfer.wait()
        own = [x + others for x, others in zip(own, arriving, strict=True)]
    return grad_query.to(query.dtype), own[0].to(key.dtype), own[1].to(value.dtype)


def _part_backward(
    call: ContextCall, inputs: list[Tensor], chunk: Span, columns: Span, rows: Rows, grads: dict[str, Tensor]
) -> list[Tensor]:
    """Return the gradients of one part's queries, keys and values, whose attention is computed again."""
    names = part_names(tuple(name for name in call.names if name in grads))
    with torch.enable_grad():
        query, key, value = inputs = [x.detach().requires_grad_() for x in inputs]
        part = call.attend(chunk, columns, query, key, value, names=names, logsumexp=True)
    pairs = part_gradients(part, columns[0], rows, grads)
    results = torch.autograd.grad([x for x, _ in pairs], inputs, [grad for _, grad in pairs], allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, results, strict=True)]
