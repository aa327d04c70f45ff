"""The values a vocabulary is made of: a text in two languages, and what is named and explained by such texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)
Group = Literal["looks", "writes", "matters", "other"]
Format = Literal["share", "number", "tokens", "nats"]


@dataclass(frozen=True, slots=True)
class Text:
    """The same said in English and in Chinese."""

    en: str
    zh: str

    def __getitem__(self, language: Language) -> str:
        return self.zh if language == "zh" else self.en

    def to_dict(self) -> dict[str, str]:
        return {"en": self.en, "zh": self.zh}


@dataclass(frozen=True, slots=True)
class Term:
    """A name as it stands in tables and files, what people call it, and what it means."""

    name: str
    label: Text
    about: Text


@dataclass(frozen=True, slots=True)
class Column(Term):
    """A column of the table: what it speaks of, how its numbers are written, and between which limits they lie."""

    group: Group = "other"
    format: Format = "number"
    low: float | None = None
    high: float | None = None

    @property
    def unit(self) -> Text:
        """The unit of its numbers; empty for those without one."""
        return _UNITS.get(self.format, Text("", ""))


_UNITS = {"share": Text("share of 1", "占 1 的比例"), "tokens": Text("tokens", "词元"), "nats": Text("nats", "奈特")}


@dataclass(frozen=True, slots=True)
class Role(Term):
    """A role, and the two letters that stand for it in pictures."""

    letters: str = ""
