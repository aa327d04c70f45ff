"""Handlers of the viewer's routes: validate a request against the model and its texts, and submit a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from polyhead.report.viewer.jobs import BACKGROUND, INTERACTIVE, Job, Jobs, Message
from polyhead.report.viewer.questions import LONGEST_CLIENT, Question
from polyhead.report.viewer.reading import Reading
from polyhead.report.viewer.viewing import SLOTS, WINDOW_TOKENS, WORD_CELLS, HeadPlace, Viewer

TEXT_BYTES = 4 << 20
LARGEST_INTEGER = 2**53 - 1  # Number.MAX_SAFE_INTEGER of JavaScript
POOLS = ("sum", "max")


class RequestHandlers:
    """The handlers, one method per route.

    Jobs of one client in one lane replace each other: a later `turn` cancels the earlier job.
    """

    def __init__(self, viewer: Viewer, jobs: Jobs) -> None:
        self.viewer, self.jobs = viewer, jobs

    # ---- texts

    def read(self, requested: Question) -> Job:
        slot, text = requested.choice("slot", SLOTS), requested.text("text", TEXT_BYTES)
        off = requested.heads("off", self.viewer.head_counts, frozenset())
        return self._submit(requested, "read", lambda job: self.viewer.read(job, slot, text, off))

    def again(self, requested: Question) -> Job:
        before, off = self._reading(requested), requested.heads("off", self.viewer.head_counts)
        return self._submit(requested, "read", lambda job: self.viewer.again(job, before, off))

    def close(self, requested: Question) -> Job:
        slot = requested.choice("slot", SLOTS)
        return self._submit(requested, "read", lambda job: self.viewer.close(job, slot))

    def step(self, requested: Question) -> Job:
        before = self._reading(requested)
        token = requested.integer("token", 0, LARGEST_INTEGER, None)
        return self._submit(requested, "read", lambda job: self.viewer.step(job, before, token))

    def back(self, requested: Question) -> Job:
        before = self._reading(requested)
        return self._submit(requested, "read", lambda job: self.viewer.back(job, before))

    # ---- outputs

    def effect(self, requested: Question) -> Job:
        reading, off = self._reading(requested), requested.heads("off", self.viewer.head_counts)
        return self._submit(requested, "effect", lambda job: self.viewer.effect(job, reading, off))

    def compare(self, requested: Question) -> Job:
        one, other = self._reading(requested, "one"), self._reading(requested, "other")
        return self._submit(requested, "compare", lambda job: self.viewer.compare(job, one, other))

    # ---- attention

    def heads(self, requested: Question) -> Job:
        reading, pool = self._reading(requested), requested.choice("pool", POOLS, "sum")
        grid = requested.integer("grid", 16, 128, 32)
        return self._submit(requested, "heads", lambda job: self.viewer.heads(job, reading, grid, pool), BACKGROUND)

    def word(self, requested: Question) -> Job:
        reading, places = self._reading(requested), len(self.viewer.model.places)
        axis = requested.choice("axis", ("text", "target"), "text")
        tokens = reading.text if axis == "text" or reading.target is None else reading.target
        token = requested.integer("token", 0, len(tokens.tokens) - 1)
        side = requested.choice("side", ("queries", "keys", "both"), "both")
        chosen = requested.numbers("places", places, tuple(range(places)))
        cells = requested.integer("cells", 1, WORD_CELLS, WORD_CELLS)
        return self._submit(
            requested, "word", lambda job: self.viewer.word(job, reading, token, axis, side, chosen, cells)
        )

    def picture(self, requested: Question) -> Job:
        head, pool = self._head(requested), requested.choice("pool", POOLS, "sum")
        return self._submit(requested, "picture", lambda job: self.viewer.picture(job, head, pool), BACKGROUND)

    def tile(self, requested: Question) -> Job | dict[str, Any]:
        head, pool = self._head(requested), requested.choice("pool", POOLS, "sum")
        level, row, column = (requested.integer(name, 0, LARGEST_INTEGER) for name in ("level", "row", "column"))
        client = self._client(requested)
        known = self.viewer.known_tile(head, pool, level, row, column)
        if known is not None:
            return known
        work = lambda job: self.viewer.tile(job, head, pool, level, row, column)  # noqa: E731
        return self.jobs.submit(work, lane="tile", **client)

    def window(self, requested: Question) -> Job:
        head = self._head(requested)
        rows = requested.span("rows", head.attention.queries, WINDOW_TOKENS)
        columns = requested.span("columns", head.attention.keys, WINDOW_TOKENS)
        return self._submit(requested, "window", lambda job: self.viewer.window(job, head, rows, columns))

    def distance(self, requested: Question) -> Job:
        ends = []
        for name in ("one", "other"):
            part = requested.part(name)
            ends.append(self._head(part))
            part.end()
        return self._submit(requested, "distance", lambda job: self.viewer.distance(job, *ends), BACKGROUND)

    def cancel(self, requested: Question) -> dict[str, Any]:
        client, lane = requested.text("client", LONGEST_CLIENT), requested.text("lane", LONGEST_CLIENT, None)
        requested.end()
        return {"cancelled": self.jobs.cancel(client, lane)}

    # ---- shared by several routes

    def _submit(
        self, requested: Question, lane: str, work: Callable[[Job], Iterator[Message]], urgency: int = INTERACTIVE
    ) -> Job:
        return self.jobs.submit(work, lane=lane, urgency=urgency, **self._client(requested))

    def _client(self, requested: Question) -> dict[str, Any]:
        """Return the client and its turn, and reject unknown fields: all others have been read."""
        client = {
            "client": requested.text("client", LONGEST_CLIENT, ""),
            "turn": requested.integer("turn", 0, LARGEST_INTEGER, 0),
        }
        requested.end()
        return client

    def _reading(self, requested: Question, name: str = "reading") -> Reading:
        return self.viewer.reading(requested.integer(name, 0, LARGEST_INTEGER))

    def _head(self, requested: Question) -> HeadPlace:
        counts = self.viewer.head_counts
        reading = self._reading(requested)
        place = requested.integer("place", 0, len(counts) - 1)
        return HeadPlace(reading, place, requested.integer("head", 0, counts[place] - 1))
