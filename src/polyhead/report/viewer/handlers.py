"""Handlers of the viewer's routes: validate a request against the model and its texts, and return its computation.

The computations are the methods of `Viewer` of the same names, with their docstrings.
"""

from __future__ import annotations

from polyhead.report.viewer.jobs import Message, Work
from polyhead.report.viewer.request_fields import TEXT_BYTES, RequestFields
from polyhead.report.viewer.trace import Trace
from polyhead.report.viewer.viewing import SLOTS, WINDOW_CELLS, WORD_CELLS, TracedHead, Viewer

MAX_SAFE_INTEGER = 2**53 - 1  # of JavaScript
POOLS = ("sum", "max")


class RequestHandlers:
    """The handlers, one method per route of the same name."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer

    # ---- texts

    def trace(self, fields: RequestFields) -> Work:
        slot, text = fields.choice("slot", SLOTS), fields.text("text", TEXT_BYTES)
        ablated = fields.heads("ablated", self.viewer.head_counts, frozenset())
        return lambda job: self.viewer.trace(job, slot, text, ablated)

    def retrace(self, fields: RequestFields) -> Work:
        trace, ablated = self._trace(fields), fields.heads("ablated", self.viewer.head_counts)
        return lambda job: self.viewer.retrace(job, trace, ablated)

    def close(self, fields: RequestFields) -> Work:
        slot = fields.choice("slot", SLOTS)
        return lambda job: self.viewer.close(job, slot)

    def step(self, fields: RequestFields) -> Work:
        trace = self._trace(fields)
        token = fields.integer("token", 0, MAX_SAFE_INTEGER, None)
        return lambda job: self.viewer.step(job, trace, token)

    def undo(self, fields: RequestFields) -> Work:
        trace = self._trace(fields)
        return lambda job: self.viewer.undo(job, trace)

    # ---- outputs

    def effect(self, fields: RequestFields) -> Work:
        trace, ablated = self._trace(fields), fields.heads("ablated", self.viewer.head_counts)
        return lambda job: self.viewer.effect(job, trace, ablated)

    def compare(self, fields: RequestFields) -> Work:
        one, other = self._trace(fields, "one"), self._trace(fields, "other")
        return lambda job: self.viewer.compare(job, one, other)

    # ---- attention

    def heads(self, fields: RequestFields) -> Work:
        trace = self._trace(fields)
        return lambda job: self.viewer.heads(job, trace)

    def word(self, fields: RequestFields) -> Work:
        trace, axis = self._trace(fields), fields.choice("axis", ("text", "target"), "text")
        tokens = trace.text if axis == "text" or trace.target is None else trace.target
        token = fields.integer("token", 0, len(tokens.tokens) - 1)
        cells = fields.integer("cells", 1, WORD_CELLS, WORD_CELLS)
        return lambda job: self.viewer.word(job, trace, token, axis, cells)

    def picture(self, fields: RequestFields) -> Work:
        head, pool = self._head(fields), fields.choice("pool", POOLS, "sum")
        return lambda job: self.viewer.picture(job, head, pool)

    def tile(self, fields: RequestFields) -> Work | Message:
        head, pool = self._head(fields), fields.choice("pool", POOLS, "sum")
        level, row, column = (fields.integer(name, 0, MAX_SAFE_INTEGER) for name in ("level", "row", "column"))
        cached = self.viewer.known_tile(head, pool, level, row, column)
        return cached if cached is not None else lambda job: self.viewer.tile(job, head, pool, level, row, column)

    def window(self, fields: RequestFields) -> Work:
        head = self._head(fields)
        rows = fields.span("rows", head.attention.queries, WINDOW_CELLS)
        columns = fields.span("columns", head.attention.keys, WINDOW_CELLS // (rows[1] - rows[0]))
        return lambda job: self.viewer.window(job, head, rows, columns)

    def distance(self, fields: RequestFields) -> Work:
        one, other = (self._head(fields.part(name)) for name in ("one", "other"))
        return lambda job: self.viewer.distance(job, one, other)

    # ---- shared by several routes

    def _trace(self, fields: RequestFields, name: str = "trace") -> Trace:
        return self.viewer.find(fields.integer(name, 0, MAX_SAFE_INTEGER))

    def _head(self, fields: RequestFields) -> TracedHead:
        counts = self.viewer.head_counts
        trace = self._trace(fields)
        layer = fields.integer("layer", 0, len(counts) - 1)
        return TracedHead(trace, layer, fields.integer("head", 0, counts[layer] - 1))
