"""Attention tile by tile with an online softmax: forward, backward and row statistics in memory that grows with n.

The forward keeps a running maximum, sum and output for a block of rows; the backward recomputes each tile. A second
derivative replays the tiles on the autograd tape (and there alone memory grows with n²).

On a CPU the matrix products and the exponential bound it; every other pass over a tile costs a tenth of one of them or
less, done in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyhead.ops.common.request import StatisticsRequest
from polyhead.ops.common.statistics import LINEAR, RowStatistics
from polyhead.ops.common.tile_statistics import EXP_UNDERFLOW, RowSums, factors, magnitude
from polyhead.ops.common.tiles import Part, Tiling, slices_of_biases
from polyhead.ops.common.visibility import Span, Visibility


@dataclass(slots=True, eq=False)
class Attended:
    """What the tiles give; each [batch, heads, queries] but the output, which ends in value_dim."""

    output: Tensor | None  # None where there are no values
    logsumexp: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)
    # What the backward needs of each row: the shift and total of its exponentials, and the column blocks of the largest
    # logit and the largest |logit|.
    shift: Tensor | None = None
    total: Tensor | None = None
    blocks: dict[str, Tensor] = field(default_factory=dict)


def attend(
    tiling: Tiling, query: Tensor, key: Tensor, value: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor | None, Tensor, RowStatistics | None]:
    """Output, log-sum-exp and the statistics that were asked for, all on the tape.

    Without values there is no output: the second pass of a backend whose kernel tells nothing of its weights.
    """
    value = None if value is None else value.view_as(value) if value is key else value  # Dynamo takes no tensor twice
    found = _Attention.apply(tiling, query, key, value, sinks, *tiling.bias_tensors)
    output = None if value is None else found[0]
    logsumexp, *rest = found if value is None else found[1:]
    if tiling.statistics is None:
        return output, logsumexp, None
    return output, logsumexp, RowStatistics(**dict(zip(tiling.statistics.names, rest, strict=True)))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tiling: Tiling,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        sinks: Tensor | None,
        *biases: Tensor,
    ) -> tuple[Tensor, ...]:
        found = _forward(tiling, query, key, value, sinks, blocks=any(ctx.needs_input_grad))
        ctx.tiling, ctx.versions = tiling, tiling.versions()
        ctx.blocks = tuple(found.blocks)
        statistics = tuple(found.statistics.values())
        ctx.save_for_backward(
            query,
            key,
            value,
            sinks,
            found.output,
            found.logsumexp,
            found.shift,
            found.total,
            *statistics,
            *found.blocks.values(),
            *biases,
        )
        if "visible_keys" in found.statistics:
            ctx.mark_non_differentiable(found.statistics["visible_keys"])
        ctx.set_materialize_grads(False)
        return (*(() if found.output is None else (found.output,)), found.logsumexp, *statistics)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tiling = ctx.tiling
        tiling.check_versions(ctx.versions)
        query, key, value, sinks, output, logsumexp, shift, total, *rest = ctx.saved_tensors
        names = () if tiling.statistics is None else tiling.statistics.names
        statistics = dict(zip(names, rest, strict=False))
        blocks = dict(zip(ctx.blocks, rest[len(names) :], strict=False))
        inputs = [query, key, value, sinks, *rest[len(names) + len(blocks) :]]
        needed = ctx.needs_input_grad[1:]
        # Whatever arrives at an empty row is selected away, so that a NaN there does not meet a weight of zero.
        empty = logsumexp == -torch.inf
        grads = tuple(
            None if x is None else torch.where(empty if x.ndim == 3 else empty[..., None], 0.0, x) for x in grads
        )
        if torch.is_grad_enabled():
            return None, *_taped_backward(tiling, inputs, needed, grads)
        found = Attended(output, logsumexp, statistics, shift, total, blocks)
        return None, *_backward(tiling, inputs, needed, found, grads)


# ---- forward


def _forward(
    tiling: Tiling, query: Tensor, key: Tensor, value: Tensor | None, sinks: Tensor | None, *, blocks: bool
) -> Attended:
    """Part after part."""
    tiling = tiling.working()
    parts = tiling.parts()
    if len(parts) <= 1:
        return _forward_tiles(tiling, query, key, value, sinks, tiling.visibility, blocks=blocks)
    whole: Attended | None = None
    for part in parts:
        mine = _forward_tiles(
            own := tiling.of(part),
            query[part.batch, part.heads],
            key[part.batch, part.kv_heads],
            None if value is None else value[part.batch, part.kv_heads],
            None if sinks is None else sinks[part.heads],
            own.visibility,
            blocks=blocks,
        )
        whole = _allocated(tiling, mine) if whole is None else whole
        for target, tensor in zip(_tensors(whole), _tensors(mine), strict=True):
            target[part.batch, part.heads] = tensor
    assert whole is not None
    return whole


def _allocated(tiling: Tiling, part: Attended) -> Attended:
    """Room for everyone, after the pattern of a part."""

    def room(x: Tensor | None) -> Any:
        return None if x is None else x.new_empty((tiling.batch, tiling.heads, *x.shape[2:]))

    statistics = {name: room(x) for name, x in part.statistics.items()}
    return Attended(
        room(part.output),
        room(part.logsumexp),
        statistics,
        room(part.shift),
        room(part.total),
        {name: room(x) for name, x in part.blocks.items()},
    )


def _tensors(found: Attended) -> list[Tensor]:
    tensors = (found.output, found.logsumexp, found.shift, found.total)
    return [x for x in (*tensors, *found.statistics.values(), *found.blocks.values()) if x is not None]


def _forward_tiles(
    tiling: Tiling,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sinks: Tensor | None,
    visibility: Visibility | None,
    *,
    blocks: bool,
) -> Attended:
    """Differentiable by the tape."""
    query, turned = tiling.fold(query), tiling.turned(key)
    value = None if value is None else value.flatten(0, 1)
    done = [
        _attended_rows(tiling, query, turned, value, sinks, visibility, rows, blocks=blocks)
        for rows in tiling.row_blocks()
    ] or [_attended_rows(tiling, query, turned, value, sinks, visibility, (0, 0), blocks=blocks)]
    if len(done) == 1:
        return done[0]

    def joined(tensors: list[Any]) -> Any:
        return None if tensors[0] is None else torch.cat(tensors, 2)

    return Attended(
        joined([x.output for x in done]),
        joined([x.logsumexp for x in done]),
        {name: joined([x.statistics[name] for x in done]) for name in done[0].statistics},
        joined([x.shift for x in done]),
        joined([x.total for x in done]),
        {name: joined([x.blocks[name] for x in done]) for name in done[0].blocks},
    )


def _attended_rows(
    tiling: Tiling,
    query: Tensor,
    turned: Tensor,
    value: Tensor | None,
    sinks: Tensor | None,
    visibility: Visibility | None,
    rows: Span,
    *,
    blocks: bool,
) -> Attended:
    """One block of rows over all the keys it may see."""
    query_rows = tiling.rows_of(query, rows)
    shape = (tiling.batch, tiling.heads, rows[1] - rows[0])
    sink: Tensor | None = None
    if sinks is None:
        largest = query.new_full((*query_rows.shape[:2], 1), -torch.inf)
        total = torch.zeros_like(largest)
    else:
        sink = sinks.view(1, -1, 1).expand(shape)
        column = sink.reshape(*query_rows.shape[:2], 1)
        largest = column.detach()
        total = torch.exp(column - torch.where(largest == -torch.inf, 0.0, largest))
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    sums = None
    if tiling.statistics is not None:
        sums = RowSums(tiling, rows, sink, query, blocks=blocks)
    collected = None if value is None else value.new_zeros((*query_rows.shape[:2], value.shape[-1]))
    for columns in tiling.column_blocks(rows):
        tile, _, masked = tiling.logits(query_rows, turned, visibility, rows, columns)
        highest = tile.detach().amax(-1, keepdim=True)
        if sums is not None:
            sums.look(tile, columns, highest, masked=masked)
        previous, largest = largest, torch.maximum(largest, highest)
        before, shift = shift, torch.where(largest == -torch.inf, 0.0, largest)
        decay = torch.exp(previous - shift)
        shifted = tile - shift if torch.is_grad_enabled() else tile.sub_(shift)
        wants_shifted = sums is not None and sums.needs_spread
        tile = tiling.exponential(shifted, keep=wants_shifted)
        row_sums = tile.sum(-1, keepdim=True)
        if sums is not None:
            sums.add(tile, shifted, row_sums, columns, decay, before - shift, total, masked=masked)
        total = total * decay + row_sums
        if collected is not None and value is not None:
            kept = tiling.dropped(tile, tiling.keep(rows, columns))
            value_rows = value[:, columns[0] : columns[1]]
            if torch.is_grad_enabled():
                collected = torch.baddbmm(collected * decay, kept, value_rows)
            else:
                collected.mul_(decay).baddbmm_(kept, value_rows)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    found = Attended(
        None if collected is None else (collected / total).view(*shape, collected.shape[-1]),
        torch.where(empty, -torch.inf, shift + torch.log(total)).view(shape),
        shift=shift.view(shape),
        total=total.view(shape),
    )
    if sums is not None:
        found.statistics = sums.finish(total.view(shape), shift.view(shape))
        found.blocks = {name: x for name, x in (("top", sums.top_block), ("size", sums.size_block)) if x is not None}
    return found


# ---- backward


def _taped_backward(
    tiling: Tiling, inputs: Sequence[Tensor | None], needed: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients as functions that can be differentiated again."""
    query, key, value, sinks, *biases = inputs
    assert query is not None and key is not None
    visibility = _over_biases(tiling, biases)
    found = _forward_tiles(tiling, query, key, value, sinks, visibility, blocks=False)
    outputs = [x for x in (found.output, found.logsumexp) if x is not None] + list(found.statistics.values())
    pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if grad is not None and x.requires_grad]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need and x is not None]
    if not pairs:
        return [None] * len(inputs)
    results = iter(
        torch.autograd.grad(
            [x for x, _ in pairs], wanted, [grad for _, grad in pairs], create_graph=True, allow_unused=True
        )
    )
    return [next(results) if need and x is not None else None for x, need in zip(inputs, needed, strict=True)]


def _over_biases(tiling: Tiling, biases: Sequence[Tensor | None]) -> Visibility | None:
    """The visibility over the tensors that autograd saved, which a taped backward must differentiate."""
    if tiling.visibility is None or not biases:
        return tiling.visibility
    return tiling.visibility.with_bias_tensors([x for x in biases if x is not None])


def _backward(
    tiling: Tiling,
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    found: Attended,
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    query, key, value, sinks, *biases = inputs
    assert query is not None and key is not None
    has_output = found.output is not None
    flows, grad_sinks = _flows(tiling, found, sinks, grads[0] if has_output else None, grads[int(has_output) :])
    grad_query, grad_key = torch.empty_like(query), torch.zeros_like(key)
    grad_value = None if value is None else torch.zeros_like(value)
    grad_biases = [
        torch.zeros_like(x, dtype=_sum_dtype(x, found.logsumexp)) if need and x is not None else None
        for x, need in zip(biases, needed[4:], strict=True)
    ]
    visibility = _over_biases(tiling, biases)
    tiling = tiling.working()
    for part in tiling.parts():
        own = tiling.of(part)
        _backward_tiles(
            own,
            own.visibility if own is not tiling else visibility,
            query[part.batch, part.heads],
            key[part.batch, part.kv_heads],
            None if value is None else value[part.batch, part.kv_heads],
            flows.of(part),
            grad_query[part.batch, part.heads],
            grad_key[part.batch, part.kv_heads],
            None if grad_value is None else grad_value[part.batch, part.kv_heads],
            slices_of_biases(visibility, grad_biases, part),
        )
    rounded = [
        None if grad is None or x is None else grad.to(x.dtype) for grad, x in zip(grad_biases, biases, strict=True)
    ]
    results = [grad_query, grad_key, grad_value, grad_sinks, *rounded]
    return [grad if need else None for grad, need in zip(results, needed, strict=True)]


def _sum_dtype(bias: Tensor, like: Tensor) -> torch.dtype:
    """The dtype in which a bias's gradient is summed: float64 where rows or all pairs of a distance add up in it."""
    is_long = bias.ndim == 2 or bias.shape[2] == 1  # a table, or one row for all queries
    return torch.float64 if is_long and bias.device.type != "mps" else like.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Flows:
    """What flows back into every row, reduced to the few numbers that a tile needs of it.

    With p the weights, x the logits less the shift, l their total and f_j what a linear statistic F is a sum of:

        ds_j = p_j [dp_j + common + slope * x_j + sum_F g_F f_j], and at the largest logits besides what flows to them.

    All but the last is divided by l here, row by row, so that a tile needs exp(x) alone: a weight computed from the
    log-sum-exp would be coarse where logits are large.
    """

    shift: Tensor
    common: Tensor
    slope: Tensor | None  # of the entropy
    grad_output: Tensor | None
    linear: dict[str, Tensor]
    peaks: dict[
        str, tuple[Tensor, Tensor]
    ]  # the column block that a row's largest logit stands in, and what flows to it

    def of(self, part: Part) -> _Flows:
        """What flows into the rows of a part."""
        place = (part.batch, part.heads)
        return _Flows(
            self.shift[place],
            self.common[place],
            None if self.slope is None else self.slope[place],
            None if self.grad_output is None else self.grad_output[place],
            {name: x[place] for name, x in self.linear.items()},
            {name: (block[place], flow[place]) for name, (block, flow) in self.peaks.items()},
        )


def _flows(
    tiling: Tiling, found: Attended, sinks: Tensor | None, grad_output: Tensor | None, grads: Sequence[Tensor | None]
) -> tuple[_Flows, Tensor | None]:
    """What flows into the rows, and the gradient of the learned sinks [heads]; `grads` are those of the log-sum-exp and
    of the statistics in their order."""
    total, shift, known = found.total, found.shift, found.statistics
    assert total is not None and shift is not None
    names = () if tiling.statistics is None else tiling.statistics.names
    grad_logsumexp, *rest = grads
    arrived = {name: grad for name, grad in zip(names, rest, strict=True) if grad is not None}
    common = torch.zeros_like(total) if grad_logsumexp is None else grad_logsumexp
    if grad_output is not None and found.output is not None:
        common = common - (found.output * grad_output).sum(-1)
    for name in ("entropy", "confidence", "learned_sink_mass", *LINEAR):
        if name in arrived:
            common = common - arrived[name] * known[name]
    grad_sinks = None if sinks is None else _grad_sinks(sinks, shift, total, common, arrived, known)
    slope: Tensor | None = None
    if "entropy" in arrived:
        common = common + arrived["entropy"] * torch.log(total)
        slope = -arrived["entropy"] / total
    peaks = {}
    top = arrived.get("max_logit")
    if "confidence" in arrived:
        to_confidence = arrived["confidence"] * known["confidence"]
        top = to_confidence if top is None else top + to_confidence
    if top is not None:
        peaks["top"] = (found.blocks["top"], top)
    if "max_abs_logit" in arrived:
        peaks["size"] = (found.blocks["size"], arrived["max_abs_logit"])
    flows = _Flows(
        shift,
        common / total,
        slope,
        None if grad_output is None else grad_output / total[..., None],
        {name: grad / total for name, grad in arrived.items() if name in LINEAR},
        peaks,
    )
    return flows, grad_sinks


def _grad_sinks(
    sinks: Tensor,
    shift: Tensor,
    total: Tensor,
    common: Tensor,
    arrived: dict[str, Tensor],
    known: dict[str, Tensor],
) -> Tensor:
    """A sink is one more term of each row's sum and entropy, without a value and without a place."""
    logit = sinks.view(1, -1, 1) - shift
    share = torch.exp(logit) / total
    flow = common
    if "entropy" in arrived:
        flow = flow - arrived["entropy"] * torch.where(share == 0, 0.0, logit - torch.log(total))
    result = share * flow
    if "learned_sink_mass" in arrived:
        result = result + arrived["learned_sink_mass"] * known["learned_sink_mass"]
    wide = torch.float64 if result.device.type != "mps" else result.dtype
    return result.sum((0, 2), dtype=wide).to(sinks.dtype)


def _backward_tiles(
    tiling: Tiling,
    visibility: Visibility | None,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    flows: _Flows,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor | None,
    grad_biases: Sequence[Tensor | None],
) -> None:
    """Write the gradients of one part into the tensors given for them."""
    turned_key = tiling.turned(key)
    turned_value = None if value is None or flows.grad_output is None else tiling.turned(value)
    key, query = key.flatten(0, 1), tiling.fold(query)
    is_broken = tiling.poison is not None or tiling.query_poison is not None
    key_sums = torch.zeros_like(turned_key)  # [pairs, head_dim, keys], as the products come out fastest
    value_sums = None if turned_value is None else torch.zeros_like(turned_value)

    def column(x: Tensor) -> Tensor:
        return tiling.rows_of(tiling.fold(x)[..., None], rows)

    for rows in tiling.row_blocks():
        query_rows = tiling.rows_of(query, rows)
        shift, common = column(flows.shift), column(flows.common)
        slope = None if flows.slope is None else column(flows.slope)
        grad_rows = None if flows.grad_output is None else tiling.rows_of(tiling.fold(flows.grad_output), rows)
        query_sums = torch.zeros_like(query_rows)
        for columns in tiling.column_blocks(rows):
            cut = slice(*columns)
            tile, bent, masked = tiling.logits(query_rows, turned_key, visibility, rows, columns)
            hidden = tile == -torch.inf if is_broken else None
            peaks = _peaks(tiling, flows, tile, rows, columns, masked=masked)
            shifted = tile.sub_(shift)
            weights = tiling.exponential(shifted, keep=slope is not None)
            if hidden is not None:
                weights.masked_fill_(hidden, 0.0)
            into = tiling.room("gradients", weights.shape, weights)
            if turned_value is None or grad_rows is None or value_sums is None:
                grad_tile = torch.empty_like(weights) if into is None else into
                grad_tile.copy_(common)
            else:
                keep = tiling.keep(rows, columns)
                kept = tiling.dropped(weights, keep)
                value_sums[:, :, cut] += torch.bmm(grad_rows.transpose(1, 2), kept)
                grad_tile = torch.bmm(grad_rows, turned_value[:, :, cut], out=into)
                grad_tile = tiling.dropped(grad_tile, keep).add_(common)
            if slope is not None:
                grad_tile.addcmul_(shifted.clamp_(min=EXP_UNDERFLOW) if masked else shifted, slope)
            if tiling.statistics is not None and len(flows.linear):
                _add_linear(tiling, flows, tiling.statistics, grad_tile, rows, columns)
            grad_tile.mul_(weights)
            if hidden is not None:
                grad_tile.masked_fill_(hidden, 0.0)
            for place, flow in peaks:
                grad_tile.scatter_add_(-1, place, flow)
            for index, grad_bias in enumerate(grad_biases):
                if grad_bias is not None and visibility is not None:
                    _add_bias_grad(tiling, visibility, index, grad_bias, grad_tile, rows, columns)
            if bent is not None:
                grad_tile.mul_(1 - bent * bent)
            query_sums.baddbmm_(grad_tile, key[:, cut])
            key_sums[:, :, cut] += torch.bmm(query_rows.transpose(1, 2), grad_tile)
        grad_query[:, :, rows[0] : rows[1]] = tiling.by_head(query_sums)
    grad_key.copy_(key_sums.transpose(1, 2).view(tiling.batch, tiling.kv_heads, *key.shape[1:]))
    if grad_value is not None and value_sums is not None:
        grad_value.copy_(value_sums.transpose(1, 2).reshape(grad_value.shape))


def _peaks(
    tiling: Tiling, flows: _Flows, tile: Tensor, rows: Span, columns: Span, *, masked: bool
) -> list[tuple[Tensor, Tensor]]:
    """Where in this tile the largest logits of its rows stand, and what flows to them: 0 where they stand elsewhere."""
    found = []
    for name, (block, flow) in flows.peaks.items():
        here = tiling.fold(block)[:, :, rows[0] : rows[1]].flatten(1)[..., None] == columns[0]
        into = torch.where(here, tiling.rows_of(tiling.fold(flow)[..., None], rows), 0.0)
        place = (tile if name == "top" else magnitude(tile, masked=masked)).max(-1, keepdim=True).indices
        if name == "size":
            into = into * tile.gather(-1, place).sign()
        found.append((place, into))
    return found


def _add_linear(
    tiling: Tiling, flows: _Flows, request: StatisticsRequest, grad_tile: Tensor, rows: Span, columns: Span
) -> None:
    by_head = tiling.by_head(grad_tile)
    for name, factor in factors(request, tuple(flows.linear), rows, columns, grad_tile):
        by_head.addcmul_(factor, flows.linear[name][:, :, rows[0] : rows[1], None])


def _add_bias_grad(
    tiling: Tiling, visibility: Visibility, index: int, grad: Tensor, grad_tile: Tensor, rows: Span, columns: Span
) -> None:
    """Sum a tile's gradient into the gradient of the bias it came from."""
    tile = tiling.by_head(grad_tile)
    if index < len(visibility.biases):
        for axis in range(3):
            if grad.shape[axis] == 1:
                tile = tile.sum(axis, keepdim=True)
        target = grad if grad.shape[2] == 1 else grad[:, :, slice(*rows)]
        target[..., slice(*columns)] += tile.to(grad.dtype)
        return
    places = visibility.relative_index(visibility.relative_biases[index - len(visibility.biases)], rows, columns)
    tile = (
        tile.sum(0) if places.ndim == 2 or places.shape[0] == 1 else tile.transpose(0, 1)
    )  # [heads, (batch,) rows, columns]
    tile = tile.sum(0, keepdim=True) if grad.shape[0] == 1 else tile
    grad.index_add_(1, places.flatten(), tile.flatten(1).to(grad.dtype))
