"""Which question becomes which computation: what each route takes, held against the model and its texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from polyhead.report.viewer.jobs import PATIENT, QUICK, Job, Jobs, Message
from polyhead.report.viewer.questions import LONGEST_CLIENT, Question
from polyhead.report.viewer.reading import Reading
from polyhead.report.viewer.viewing import SLOTS, WINDOW_TOKENS, WORD_CELLS, HeadPlace, Viewer

TEXT_BYTES = 4 << 20
LARGEST = 2**53 - 1  # of an integer that JavaScript holds
POOLS = ("sum", "max")


class Questions:
    """What each route takes, checked, and which computation it becomes."""

    def __init__(self, viewer: Viewer, jobs: Jobs) -> None:
        self.viewer, self.jobs = viewer, jobs

    # ---- texts

    def read(self, asked: Question) -> Job:
        slot, text = asked.choice("slot", SLOTS), asked.text("text", TEXT_BYTES)
        off = asked.heads("off", self.viewer.head_counts, frozenset())
        return self._submit(asked, "read", lambda job: self.viewer.read(job, slot, text, off))

    def again(self, asked: Question) -> Job:
        before, off = self._reading(asked), asked.heads("off", self.viewer.head_counts)
        return self._submit(asked, "read", lambda job: self.viewer.again(job, before, off))

    def close(self, asked: Question) -> Job:
        slot = asked.choice("slot", SLOTS)
        return self._submit(asked, "read", lambda job: self.viewer.close(job, slot))

    def step(self, asked: Question) -> Job:
        before = self._reading(asked)
        token = asked.integer("token", 0, LARGEST, None)
        return self._submit(asked, "read", lambda job: self.viewer.step(job, before, token))

    def back(self, asked: Question) -> Job:
        before = self._reading(asked)
        return self._submit(asked, "read", lambda job: self.viewer.back(job, before))

    # ---- outputs

    def effect(self, asked: Question) -> Job:
        reading, off = self._reading(asked), asked.heads("off", self.viewer.head_counts)
        return self._submit(asked, "effect", lambda job: self.viewer.effect(job, reading, off))

    def compare(self, asked: Question) -> Job:
        one, other = self._reading(asked, "one"), self._reading(asked, "other")
        return self._submit(asked, "compare", lambda job: self.viewer.compare(job, one, other))

    # ---- attention

    def heads(self, asked: Question) -> Job:
        reading, pool = self._reading(asked), asked.choice("pool", POOLS, "sum")
        grid = asked.integer("grid", 16, 128, 32)
        return self._submit(asked, "heads", lambda job: self.viewer.heads(job, reading, grid, pool), PATIENT)

    def word(self, asked: Question) -> Job:
        reading, places = self._reading(asked), len(self.viewer.model.places)
        axis = asked.choice("axis", ("text", "target"), "text")
        tokens = reading.text if axis == "text" or reading.target is None else reading.target
        token = asked.integer("token", 0, len(tokens.tokens) - 1)
        side = asked.choice("side", ("queries", "keys", "both"), "both")
        chosen = asked.numbers("places", places, tuple(range(places)))
        cells = asked.integer("cells", 1, WORD_CELLS, WORD_CELLS)
        return self._submit(asked, "word", lambda job: self.viewer.word(job, reading, token, axis, side, chosen, cells))

    def picture(self, asked: Question) -> Job:
        head, pool = self._head(asked), asked.choice("pool", POOLS, "sum")
        return self._submit(asked, "picture", lambda job: self.viewer.picture(job, head, pool), PATIENT)

    def tile(self, asked: Question) -> Job | dict[str, Any]:
        head, pool = self._head(asked), asked.choice("pool", POOLS, "sum")
        level, row, column = (asked.integer(name, 0, LARGEST) for name in ("level", "row", "column"))
        client = self._client(asked)
        known = self.viewer.known_tile(head, pool, level, row, column)
        if known is not None:
            return known
        work = lambda job: self.viewer.tile(job, head, pool, level, row, column)  # noqa: E731
        return self.jobs.submit(work, lane="tile", **client)

    def window(self, asked: Question) -> Job:
        head = self._head(asked)
        rows = asked.span("rows", head.attention.queries, WINDOW_TOKENS)
        columns = asked.span("columns", head.attention.keys, WINDOW_TOKENS)
        return self._submit(asked, "window", lambda job: self.viewer.window(job, head, rows, columns))

    def distance(self, asked: Question) -> Job:
        ends = []
        for name in ("one", "other"):
            part = asked.part(name)
            ends.append(self._head(part))
            part.end()
        return self._submit(asked, "distance", lambda job: self.viewer.distance(job, *ends), PATIENT)

    def cancel(self, asked: Question) -> dict[str, Any]:
        client, lane = asked.text("client", LONGEST_CLIENT), asked.text("lane", LONGEST_CLIENT, None)
        asked.end()
        return {"cancelled": self.jobs.cancel(client, lane)}

    # ---- what several share

    def _submit(
        self, asked: Question, lane: str, work: Callable[[Job], Iterator[Message]], urgency: int = QUICK
    ) -> Job:
        return self.jobs.submit(work, lane=lane, urgency=urgency, **self._client(asked))

    def _client(self, asked: Question) -> dict[str, Any]:
        """Who asks, and at which turn; these are the last fields of a question."""
        client = {"client": asked.text("client", LONGEST_CLIENT, ""), "turn": asked.integer("turn", 0, LARGEST, 0)}
        asked.end()
        return client

    def _reading(self, asked: Question, name: str = "reading") -> Reading:
        return self.viewer.reading(asked.integer(name, 0, LARGEST))

    def _head(self, asked: Question) -> HeadPlace:
        counts = self.viewer.head_counts
        reading = self._reading(asked)
        place = asked.integer("place", 0, len(counts) - 1)
        return HeadPlace(reading, place, asked.integer("head", 0, counts[place] - 1))
