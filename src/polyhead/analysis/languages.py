"""`Text`: a text in both languages of a report, English and Chinese."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)


@dataclass(frozen=True, slots=True)
class Text:
    """A text in English and in Chinese, or the template of one, with fields as in `str.format`."""

    en: str
    zh: str

    def __getitem__(self, language: Language) -> str:
        return self.zh if language == "zh" else self.en

    def format(self, **fields: object) -> Text:
        """Return the text with its fields filled in, in both languages.

        Args:
            fields: values of the fields, as in `str.format`; of a `Text`, each language takes its own.
        """
        en, zh = (
            {name: x[language] if isinstance(x, Text) else x for name, x in fields.items()} for language in LANGUAGES
        )
        return Text(self.en.format(**en), self.zh.format(**zh))

    def to_dict(self) -> dict[str, str]:
        """Return the text of each language, by its code."""
        return {language: self[language] for language in LANGUAGES}
