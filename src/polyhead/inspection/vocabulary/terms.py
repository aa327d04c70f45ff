"""Value types of the vocabulary: terms with a label and an explanation in two languages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyhead.analysis.languages import Text

# "companion": the deviation, maximum, error or chance level of another column.
Group = Literal["attention", "output", "importance", "other", "companion"]
Format = Literal["share", "number", "tokens", "nats"]


@dataclass(frozen=True, slots=True)
class Term:
    """A term: its name in tables and files, its label and its explanation."""

    name: str
    label: Text
    about: Text


@dataclass(frozen=True, slots=True)
class Column(Term):
    """A column of the table: its group, the format of its numbers and the limits of their range."""

    group: Group = "other"
    format: Format = "number"
    low: float | None = None
    high: float | None = None

    @property
    def unit(self) -> Text:
        """Unit of the numbers; empty for those without one."""
        return _UNITS.get(self.format, Text("", ""))


_UNITS = {"share": Text("fraction", "比例"), "tokens": Text("tokens", "词元"), "nats": Text("nats", "奈特")}


@dataclass(frozen=True, slots=True)
class Role(Term):
    """A role, with the two letters that mark it in grids."""

    letters: str = ""
