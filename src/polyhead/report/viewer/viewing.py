"""`Viewer`: a model with up to two texts, and the computations that answer the page's requests.

Each computation is a generator of messages: JSON-compatible values, the last of which is marked as done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polyhead.errors import OptionError
from polyhead.report.packing import clipped, packed_floats, packed_weights
from polyhead.report.viewer import tiles, words
from polyhead.report.viewer.cache import TileCache
from polyhead.report.viewer.distance import distances
from polyhead.report.viewer.failures import gone
from polyhead.report.viewer.jobs import Job, Message
from polyhead.report.viewer.model import Head, Progress, ViewedModel
from polyhead.report.viewer.output import difference
from polyhead.report.viewer.reading import KeptAttention, Reading
from polyhead.report.viewer.tiles import Pool, Rule

SLOTS = ("A", "B")
PAUSE: Message = {}  # empty: lets another job run
ALL_WEIGHTS_TOKENS = 128  # up to which all weights of all heads are sent at once
WINDOW_TOKENS = 1024
WORD_CELLS = 1024
EXACT_PAIRS = 1 << 28  # of all heads together, up to which the maps of all heads are exact: a few seconds on two cores
ROUGH_PAIRS = 1 << 27  # sampled by the estimates of all heads together


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """One head of one reading."""

    reading: Reading
    place: int
    head: int

    @property
    def attention(self) -> KeptAttention:
        return self.reading.attentions[self.place].head(self.head)


def _check_run(run: Mapping[str, Any], model: ViewedModel) -> None:
    """Check that a run has the heads that the model has now; the model may have been edited since."""
    originals = {(site["name"], site["kind"]): site["originals"] for site in run["sites"]}
    for site in (place.site for place in model.places):
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
        self._slots: dict[str, Reading | None] = dict.fromkeys(SLOTS)
        self._lock = threading.Lock()

    # ---- loaded texts

    def reading(self, number: int) -> Reading:
        for reading in self._slots.values():
            if reading is not None and reading.number == number:
                return reading
        raise gone(number)

    @property
    def head_counts(self) -> tuple[int, ...]:
        return tuple(place.site.num_heads for place in self.model.places)

    @property
    def readings(self) -> Mapping[str, Reading | None]:
        """The reading of each slot."""
        return dict(self._slots)

    def forget(self) -> None:
        """Clear the cache of tiles, to free memory."""
        self.cache.clear()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def hold(self, reading: Reading) -> None:
        """Put a text into its slot, in place of the earlier one."""
        self._hold(reading.slot, reading)

    def _hold(self, slot: str, reading: Reading | None) -> None:
        with self._lock:
            before, self._slots[slot] = self._slots[slot], reading
        if before is not None:
            self.cache.forget(before.number)

    # ---- texts

    def read(self, job: Job, slot: str, text: str, off: frozenset[Head]) -> Iterator[Message]:
        reading = self.model.read(slot, text, off, _progress(job, "read"))
        job.check()  # a cancelled job must not change the slot
        self.hold(reading)
        yield {"done": True, "reading": reading.to_dict()}

    def again(self, job: Job, before: Reading, off: frozenset[Head]) -> Iterator[Message]:
        self.reading(before.number)  # raises if it was replaced while the job was queued
        reading = self.model.again(before, off, _progress(job, "read"))
        job.check()
        self.hold(reading)
        yield {"done": True, "reading": reading.to_dict()}

    def close(self, job: Job, slot: str) -> Iterator[Message]:
        self._hold(slot, None)
        yield {"done": True}

    def step(self, job: Job, before: Reading, token: int | None) -> Iterator[Message]:
        self.reading(before.number)  # raises if it was replaced while the job was queued
        reading = self.model.step(before, token, _progress(job, "read"))
        job.check()
        self.hold(reading)
        ids, axis = (reading.ids, reading.text) if reading.target_ids is None else (reading.target_ids, reading.target)
        assert axis is not None
        written = "text" if reading.target_ids is None else "target"
        rows = [
            {"place": number, "attends": words.attends(attention, attention.queries - 1).to_dict(WORD_CELLS)}
            for number, (place, attention) in enumerate(zip(self.model.places, reading.attentions, strict=True))
            if place.queries == written
        ]
        token = ids[-1]
        new_token = {"id": token, "text": clipped(axis.tokens[-1]), "probability": before.output.probability(token)}
        yield {"done": True, "token": new_token, "reading": reading.to_dict(), "rows": rows}

    def back(self, job: Job, before: Reading) -> Iterator[Message]:
        self.reading(before.number)
        reading = self.model.back(before, _progress(job, "read"))
        job.check()
        self.hold(reading)
        yield {"done": True, "reading": reading.to_dict()}

    # ---- model output

    def effect(self, job: Job, reading: Reading, off: frozenset[Head]) -> Iterator[Message]:
        after = self.model.output_without(reading, off, _progress(job, "read without them"))
        outputs = {"before": reading.output.to_dict(), "after": after.to_dict()}
        yield {"done": True, **outputs, **difference(reading.output, after)}

    def compare(self, job: Job, one: Reading, other: Reading) -> Iterator[Message]:
        yield difference(one.output, other.output)

    # ---- all heads

    def heads(self, job: Job, reading: Reading, grid: int, pool: Pool) -> Iterator[Message]:
        attentions = reading.attentions
        longest = max(max(x.queries, x.keys) for x in attentions)
        pairs = sum(x.heads * x.queries * x.keys for x in attentions)
        all_weights = longest <= ALL_WEIGHTS_TOKENS
        level = 0 if all_weights else max(tiles.level_of(x, grid) for x in attentions)
        rough = pairs > EXACT_PAIRS and not all_weights
        rules = [tiles.rule_for(x, level, pool, ROUGH_PAIRS // len(attentions)) if rough else None for x in attentions]
        kind = "weights" if all_weights else "estimate" if any(rules) else "blocks"
        yield {"how": _how(level, next((x for x in rules if x is not None), None), kind)}
        for number, (attention, rule) in enumerate(zip(attentions, rules, strict=True)):
            parts = [] if rule is None else [*_checked(job, tiles.estimate(attention, level, rule))]
            parts = parts or [*_checked(job, tiles.strips(attention, level, pool))]
            cells = torch.cat([part.cells for part in parts], 1)
            yield {
                "place": number,
                "exact": rule is None,
                "weights": packed_weights(cells) if all_weights else packed_floats(cells),
                "progress": {"step": "heads", "done": number + 1, "total": len(attentions), "unit": "layers"},
            }
        yield {"done": True}

    def word(
        self, job: Job, reading: Reading, token: int, axis: str, side: str, places: tuple[int, ...], cells: int
    ) -> Iterator[Message]:
        for number in places:
            place, attention = self.model.places[number], reading.attentions[number]
            is_query = side != "keys" and place.queries == axis
            is_key = side != "queries" and place.keys == axis
            yield {
                "place": number,
                "attends": words.attends(attention, token).to_dict(cells) if is_query else None,
                "attended": words.attended(attention, token).to_dict(cells) if is_key else None,
            }
        yield {"done": True}

    # ---- one head

    def picture(self, job: Job, head: HeadPlace, pool: Pool) -> Iterator[Message]:
        """Yield the whole matrix: an estimate first, then exact strips."""
        attention = head.attention
        level = tiles.level_of(attention, tiles.PICTURE_CELLS)
        known = self.known_picture(head, pool)
        if known is not None:
            yield {"how": _how(level, None, "blocks"), "level": level, "weights": packed_floats(known)}
            yield {"done": True}
            return
        coarse = tiles.level_of(attention, tiles.ESTIMATE_CELLS)
        rule = tiles.rule_for(attention, coarse, pool)
        if rule is not None:
            cells = tiles.stacked(_checked(job, tiles.estimate(attention, coarse, rule)))[0]
            yield {"how": _how(coarse, rule, "estimate"), "level": coarse, "weights": packed_floats(cells)}
        yield {"how": _how(level, None, "blocks"), "level": level}
        yield from self._exact_picture(head, pool)
        yield {"done": True}

    def _exact_picture(self, head: HeadPlace, pool: Pool) -> Iterator[Message]:
        attention = head.attention
        level = tiles.level_of(attention, tiles.PICTURE_CELLS)
        total = -(-attention.queries // tiles.strip_height(attention, level, (0, attention.keys)))
        made = []
        for number, strip in enumerate(tiles.strips(attention, level, pool)):
            made.append(strip.cells[0])
            yield {
                "strip": {"first": strip.first, "weights": packed_floats(strip.cells[0])},
                "progress": {"step": "picture", "done": number + 1, "total": total, "unit": "strips"},
            }
        self._keep(torch.cat(made), head, pool, "picture")

    def known_picture(self, head: HeadPlace, pool: Pool) -> torch.Tensor | None:
        return self.cache.get(head.reading.number, head.place, head.head, pool, "picture")

    def tile(self, job: Job, head: HeadPlace, pool: Pool, level: int, row: int, column: int) -> Iterator[Message]:
        """Compute one tile."""
        rows, columns = tiles.tile_spans(head.attention, level, row, column)
        parts = []
        for strip in tiles.strips(head.attention, level, pool, rows, columns):
            parts.append(strip.cells[0])
            yield PAUSE
        cells = torch.cat(parts)
        self._keep(cells, head, pool, level, row, column)
        yield tile_message(cells, rows, columns, level)

    def known_tile(self, head: HeadPlace, pool: Pool, level: int, row: int, column: int) -> Message | None:
        """Return a tile from the cache, or pooled from a cached picture; None if there is neither."""
        attention = head.attention
        spans = tiles.tile_spans(attention, level, row, column)
        picture_level = tiles.level_of(attention, tiles.PICTURE_CELLS)
        if level >= picture_level and (picture := self.known_picture(head, pool)) is not None:
            return tile_message(tiles.cut_out(picture, picture_level, level, row, column, pool), *spans, level)
        cells = self.cache.get(head.reading.number, head.place, head.head, pool, level, row, column)
        return None if cells is None else tile_message(cells, *spans, level)

    def window(self, job: Job, head: HeadPlace, rows: tiles.Span, columns: tiles.Span) -> Iterator[Message]:
        yield {"weights": packed_floats(tiles.window(head.attention, rows, columns, 0, "sum")[0])}

    def distance(self, job: Job, one: HeadPlace, other: HeadPlace) -> Iterator[Message]:
        """Yield progress and then the mean Jensen-Shannon divergence and distance of two heads."""
        result = None
        total = one.attention.queries
        for result in distances(one.attention, other.attention):
            yield {"progress": {"step": "distance", "done": result.rows, "total": total, "unit": "rows"}}
        assert result is not None
        values = {"divergence": result.divergence, "distance": result.distance, "rows": result.rows}
        yield {"done": True, **values}

    def _keep(self, cells: torch.Tensor, head: HeadPlace, *key: Any) -> None:
        # Tiles of a reading that was replaced in the meantime are of no use.
        if self._slots[head.reading.slot] is head.reading:
            self.cache.put(cells, head.reading.number, head.place, head.head, *key)


def tile_message(cells: torch.Tensor, rows: tiles.Span, columns: tiles.Span, level: int) -> Message:
    return {"rows": list(rows), "columns": list(columns), "block": 1 << level, "weights": packed_floats(cells)}


def _how(level: int, rule: Rule | None, kind: str) -> Message:
    return {
        "kind": kind,
        "exact": rule is None,
        "block": 1 << level,
        "rule": None if rule is None else rule.to_dict(),
    }


def _checked(job: Job, parts: Iterator[tiles.Strip]) -> Iterator[tiles.Strip]:
    for part in parts:
        job.check()
        yield part


def _progress(job: Job, step: str) -> Progress:
    def report(done: int, total: int) -> None:
        job.check()
        job.send({"progress": {"step": step, "done": done, "total": total, "unit": "layers"}})

    return report
