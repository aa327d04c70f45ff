"""`Viewer`: a model with up to two texts, and the computations that answer the page's requests.

Each computation is a generator of messages: JSON-compatible values, the last of which is marked as done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from polyhead.errors import OptionError
from polyhead.report.packing import clipped, packed_floats, packed_weights
from polyhead.report.viewer import tiles
from polyhead.report.viewer.cache import TileCache
from polyhead.report.viewer.distance import distances
from polyhead.report.viewer.failures import gone
from polyhead.report.viewer.jobs import Job, Message
from polyhead.report.viewer.model import Head, Progress, ViewedModel
from polyhead.report.viewer.output import difference
from polyhead.report.viewer.tiles import Pool, Rule
from polyhead.report.viewer.token_weights import attended, attends, row_message
from polyhead.report.viewer.trace import RecordedAttention, Trace

SLOTS = ("A", "B")
PAUSE: Message = {}  # empty: lets another job run
HEADS_CELLS = 32  # maximum cells per side of the maps that `heads` sends of a text of more than ALL_WEIGHTS_TOKENS
ALL_WEIGHTS_TOKENS = 128  # longest text of which `heads` sends all weights
WINDOW_CELLS = 1 << 20  # maximum number of weights in a window, which are sent token by token
WORD_CELLS = 1024  # maximum number of cells in a row of weights from or to one token
EXACT_PAIRS = 1 << 28  # most (query, key) pairs, of all heads, for which `heads` is exact: a few seconds on two cores
ROUGH_PAIRS = 1 << 27  # pairs, of all heads, that `heads` samples for an estimate


@dataclass(frozen=True, slots=True)
class TracedHead:
    """One head of one trace."""

    trace: Trace
    layer: int
    head: int

    @property
    def attention(self) -> RecordedAttention:
        return self.trace.attentions[self.layer].head(self.head)


def _check_run(run: Mapping[str, Any], model: ViewedModel) -> None:
    """Check that a run has the heads that the model has now; the model may have been edited since."""
    originals = {(site["name"], site["kind"]): site["originals"] for site in run["sites"]}
    for site in (layer.site for layer in model.layers):
        of_model = [site.label(head) for head in range(site.num_heads)]
        if (of_run := originals.get((site.name, site.kind), of_model)) != of_model:
            raise OptionError(
                f"a run and the viewed model must have the same heads, got a run whose heads of {site.name!r} are "
                f"originally {', '.join(of_run)}, and a model whose heads are originally {', '.join(of_model)}; "
                "inspect the model again"
            )


class Viewer:
    """A model, up to two texts, and their cached tiles; only the worker thread writes, any thread may read."""

    def __init__(
        self,
        model: ViewedModel,
        *,
        cache_bytes: int = 256 << 20,
        run: Mapping[str, Any] | None = None,
        lang: str = "en",
    ) -> None:
        if run is not None:
            _check_run(run, model)
        self.model = model
        self.cache = TileCache(cache_bytes)
        self.run = run
        self.lang = lang
        self._slots: dict[str, Trace | None] = dict.fromkeys(SLOTS)

    # ---- loaded texts

    def find(self, number: int) -> Trace:
        for trace in self._slots.values():
            if trace is not None and trace.number == number:
                return trace
        raise gone(number)

    @property
    def head_counts(self) -> tuple[int, ...]:
        return tuple(layer.site.num_heads for layer in self.model.layers)

    @property
    def traces(self) -> Mapping[str, Trace | None]:
        """The trace of each slot."""
        return dict(self._slots)

    def forget(self) -> None:
        """Clear the cache of tiles, to free memory."""
        self.cache.clear()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def put(self, slot: str, trace: Trace | None) -> None:
        """Replace the trace of a slot and discard the cached tiles of the old one; None removes it."""
        before, self._slots[slot] = self._slots[slot], trace
        if before is not None:
            self.cache.forget(before.number)

    # ---- texts

    def trace(self, job: Job, slot: str, text: str, ablated: frozenset[Head]) -> Iterator[Message]:
        yield self._loaded(job, self.model.trace(slot, text, ablated, _progress(job, "trace")))

    def retrace(self, job: Job, before: Trace, ablated: frozenset[Head]) -> Iterator[Message]:
        """Run the same tokens with other heads ablated, and replace the trace."""
        self.find(before.number)  # raises if it was replaced while the job was queued
        yield self._loaded(job, self.model.retrace(before, ablated, _progress(job, "trace")))

    def close(self, job: Job, slot: str) -> Iterator[Message]:
        self.put(slot, None)
        yield {"done": True}

    def step(self, job: Job, before: Trace, token: int | None) -> Iterator[Message]:
        """Generate one token, `token` or the most likely one, and send its attention weights in all heads."""
        self.find(before.number)
        trace = self.model.step(before, token, _progress(job, "trace"))
        loaded = self._loaded(job, trace)
        ids, axis = trace.extended
        extended = "text" if trace.target_ids is None else "target"
        rows = [
            {"layer": number, "attends": row_message(attends(attention, attention.queries - 1), WORD_CELLS)}
            for number, (layer, attention) in enumerate(zip(self.model.layers, trace.attentions, strict=True))
            if layer.queries == extended
        ]
        probability = before.output.probability(ids[-1])
        new_token = {"id": ids[-1], "text": clipped(axis.tokens[-1]), "probability": probability}
        yield {**loaded, "token": new_token, "rows": rows}

    def undo(self, job: Job, before: Trace) -> Iterator[Message]:
        """Remove the last generated token."""
        self.find(before.number)
        yield self._loaded(job, self.model.undo(before, _progress(job, "trace")))

    def _loaded(self, job: Job, trace: Trace) -> Message:
        """Put a trace into its slot, unless the job was cancelled."""
        job.check()
        self.put(trace.slot, trace)
        return {"done": True, "trace": trace.to_dict()}

    # ---- model output

    def effect(self, job: Job, trace: Trace, ablated: frozenset[Head]) -> Iterator[Message]:
        """Compare the output with that of the same text with more heads ablated; the trace stays."""
        after = self.model.output_without(trace, ablated, _progress(job, "effect"))
        outputs = {"before": trace.output.to_dict(), "after": after.to_dict()}
        yield {"done": True, **outputs, **difference(trace.output, after)}

    def compare(self, job: Job, one: Trace, other: Trace) -> Iterator[Message]:
        yield {"done": True, **difference(one.output, other.output)}

    # ---- all heads

    def heads(self, job: Job, trace: Trace) -> Iterator[Message]:
        """Yield the attention maps of all heads, layer by layer: all weights, or blocks, or an estimate of them."""
        attentions = trace.attentions
        longest = max(max(x.queries, x.keys) for x in attentions)
        pairs = sum(x.heads * x.queries * x.keys for x in attentions)
        all_weights = longest <= ALL_WEIGHTS_TOKENS
        level = 0 if all_weights else max(tiles.level_of(x, HEADS_CELLS) for x in attentions)
        rough = pairs > EXACT_PAIRS and not all_weights
        rules = [tiles.rule_for(x, level, "sum", ROUGH_PAIRS // len(attentions)) if rough else None for x in attentions]
        kind = "weights" if all_weights else "estimate" if any(rules) else "blocks"
        yield {"precision": _precision(level, next((x for x in rules if x is not None), None), kind)}
        for number, (attention, rule) in enumerate(zip(attentions, rules, strict=True)):
            parts = tiles.strips(attention, level, "sum") if rule is None else tiles.estimate(attention, level, rule)
            cells = tiles.stacked(_checked(job, parts))
            yield {
                "layer": number,
                "exact": rule is None,
                "weights": packed_weights(cells) if all_weights else packed_floats(cells),
                "progress": {"step": "heads", "done": number + 1, "total": len(attentions), "unit": "layers"},
            }
        yield {"done": True}

    def word(self, job: Job, trace: Trace, token: int, axis: str, cells: int) -> Iterator[Message]:
        """Yield the weights from and to one token in all heads, layer by layer."""
        for number, (layer, attention) in enumerate(zip(self.model.layers, trace.attentions, strict=True)):
            is_query, is_key = layer.queries == axis, layer.keys == axis
            yield {
                "layer": number,
                "attends": row_message(attends(attention, token), cells) if is_query else None,
                "attended": row_message(attended(attention, token), cells) if is_key else None,
            }
        yield {"done": True}

    # ---- one head

    def picture(self, job: Job, head: TracedHead, pool: Pool) -> Iterator[Message]:
        """Yield the whole matrix: an estimate first, then exact strips."""
        attention = head.attention
        level = tiles.level_of(attention, tiles.PICTURE_CELLS)
        exact = {"precision": _precision(level, None, "blocks"), "level": level}
        known = self.known_picture(head, pool)
        if known is not None:
            yield {**exact, "weights": packed_floats(known)}
            yield {"done": True}
            return
        coarse = tiles.level_of(attention, tiles.ESTIMATE_CELLS)
        rule = tiles.rule_for(attention, coarse, pool)
        if rule is not None:
            cells = tiles.stacked(_checked(job, tiles.estimate(attention, coarse, rule)))[0]
            yield {"precision": _precision(coarse, rule, "estimate"), "level": coarse, "weights": packed_floats(cells)}
        yield exact
        total = -(-attention.queries // tiles.strip_height(attention, level, (0, attention.keys)))
        parts = []
        for number, strip in enumerate(tiles.strips(attention, level, pool)):
            parts.append(strip.cells[0])
            yield {
                "strip": {"first": strip.first, "weights": packed_floats(strip.cells[0])},
                "progress": {"step": "picture", "done": number + 1, "total": total, "unit": "strips"},
            }
        self._cache(torch.cat(parts), head, pool, "picture")
        yield {"done": True}

    def known_picture(self, head: TracedHead, pool: Pool) -> torch.Tensor | None:
        return self.cache.get(head.trace.number, head.layer, head.head, pool, "picture")

    def tile(self, job: Job, head: TracedHead, pool: Pool, level: int, row: int, column: int) -> Iterator[Message]:
        """Compute one tile."""
        rows, columns = tiles.tile_spans(head.attention, level, row, column)
        parts = []
        for strip in tiles.strips(head.attention, level, pool, rows, columns):
            parts.append(strip.cells[0])
            yield PAUSE
        cells = torch.cat(parts)
        self._cache(cells, head, pool, level, row, column)
        yield tile_message(cells, rows, columns, level)

    def known_tile(self, head: TracedHead, pool: Pool, level: int, row: int, column: int) -> Message | None:
        """Return a tile from the cache, or pooled from a cached picture; None if there is neither."""
        attention = head.attention
        spans = tiles.tile_spans(attention, level, row, column)
        picture_level = tiles.level_of(attention, tiles.PICTURE_CELLS)
        if level >= picture_level and (picture := self.known_picture(head, pool)) is not None:
            return tile_message(tiles.cut_out(picture, picture_level, level, row, column, pool), *spans, level)
        cells = self.cache.get(head.trace.number, head.layer, head.head, pool, level, row, column)
        return None if cells is None else tile_message(cells, *spans, level)

    def window(self, job: Job, head: TracedHead, rows: tiles.Span, columns: tiles.Span) -> Iterator[Message]:
        yield {"done": True, "weights": packed_floats(tiles.window(head.attention, rows, columns, 0, "sum")[0])}

    def distance(self, job: Job, one: TracedHead, other: TracedHead) -> Iterator[Message]:
        """Yield progress and then the mean Jensen-Shannon divergence and distance of two heads."""
        result = None
        total = one.attention.queries
        for result in distances(one.attention, other.attention):
            yield {"progress": {"step": "distance", "done": result.rows, "total": total, "unit": "rows"}}
        assert result is not None
        yield {"done": True, **asdict(result)}

    def _cache(self, cells: torch.Tensor, head: TracedHead, *key: Any) -> None:
        # Tiles of a trace that was replaced in the meantime are of no use.
        if self._slots[head.trace.slot] is head.trace:
            self.cache.put(cells, head.trace.number, head.layer, head.head, *key)


def tile_message(cells: torch.Tensor, rows: tiles.Span, columns: tiles.Span, level: int) -> Message:
    return {"done": True, "rows": rows, "columns": columns, "block": 1 << level, "weights": packed_floats(cells)}


def _precision(level: int, rule: Rule | None, kind: str) -> Message:
    return {"kind": kind, "exact": rule is None, "block": 1 << level, "rule": None if rule is None else asdict(rule)}


def _checked(job: Job, parts: Iterator[tiles.Strip]) -> Iterator[tiles.Strip]:
    for part in parts:
        job.check()
        yield part


def _progress(job: Job, step: str) -> Progress:
    def report(done: int, total: int) -> None:
        job.check()
        job.send({"progress": {"step": step, "done": done, "total": total, "unit": "layers"}})

    return report
