"""Tokens of a text, with the character span of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyhead.report.packing import clipped
from polyhead.sources import special_tokens

_TAIL = 8  # preceding tokens that are decoded with a generated one: its spaces and split characters depend on them


@dataclass(frozen=True, slots=True)
class Axis:
    """Tokens along one axis of an attention matrix; spans are in code points of the text, -1 where there is none."""

    tokens: tuple[str, ...]
    special: tuple[int, ...]  # positions of special tokens
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def to_dict(self) -> dict[str, object]:
        return {
            "tokens": [clipped(x) for x in self.tokens],
            "special": list(self.special),
            "start": list(self.starts),
            "end": list(self.ends),
        }

    def with_token(self, text: str, *, special: bool) -> Axis:
        """Return the axis with one more token, which has no span in the text."""
        positions = (*self.special, len(self.tokens)) if special else self.special
        return Axis((*self.tokens, text), positions, (*self.starts, -1), (*self.ends, -1))

    def without_last(self) -> Axis:
        """Return the axis without its last token."""
        last = len(self.tokens) - 1
        special = tuple(position for position in self.special if position < last)
        return Axis(self.tokens[:last], special, self.starts[:last], self.ends[:last])


@dataclass(frozen=True, slots=True)
class TokenisedText:
    """A tokenised text: ids with special tokens, and their number before truncation."""

    ids: tuple[int, ...]
    axis: Axis
    total: int

    @property
    def is_empty(self) -> bool:
        """Whether all tokens are special ones."""
        return len(self.axis.special) == len(self.ids)


def tokenise_text(tokenizer: Any, text: str, most: int, *, closed: bool) -> TokenisedText:
    """Return the first `most` tokens of a text; `closed` adds the trailing special tokens."""
    wrapping = special_tokens(tokenizer)
    before, after = wrapping.before, wrapping.after if closed else ()
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        truncation=False,
        padding=False,
        return_attention_mask=False,
        return_offsets_mapping=bool(tokenizer.is_fast),
        verbose=False,
    )
    inner, spans = list(encoded["input_ids"]), encoded.get("offset_mapping")
    total = len(before) + len(inner) + len(after)
    inner = inner[: max(0, most - len(before) - len(after))]
    ids = (*before, *inner, *after)
    texts, starts, ends = [], [], []
    names = tokenizer.convert_ids_to_tokens(list(ids))
    for position, name in enumerate(names):
        number = position - len(before)
        start, end = spans[number] if spans is not None and 0 <= number < len(inner) else (-1, -1)
        if end <= start:  # a special token, or a tokenizer without offsets
            start = end = -1
        texts.append(text[start:end] if start >= 0 else str(name))
        starts.append(start)
        ends.append(end)
    outside = {position for position in range(len(ids)) if not len(before) <= position < len(before) + len(inner)}
    outside |= {position for position, token in enumerate(ids) if token in wrapping.ids}
    return TokenisedText(ids, Axis(tuple(texts), tuple(sorted(outside)), tuple(starts), tuple(ends)), total)


def axis_of_ids(tokenizer: Any, ids: Sequence[int]) -> Axis:
    """Return the axis of tokens without a text, such as the start tokens of a decoder."""
    special = special_tokens(tokenizer).ids
    axis = Axis((), (), (), ())
    for position, token in enumerate(ids):
        axis = axis.with_token(text_after(tokenizer, ids[:position], token), special=token in special)
    return axis


def text_after(tokenizer: Any, before: Sequence[int], token: int) -> str:
    """Return the text that a token adds to the preceding ones, including spaces; its name if it adds none."""
    tail = list(before[-_TAIL:])
    extended, prefix = _decoded(tokenizer, [*tail, token]), _decoded(tokenizer, tail)
    if extended.startswith(prefix) and len(extended) > len(prefix):
        return extended[len(prefix) :]
    return _decoded(tokenizer, [token]) or str(tokenizer.convert_ids_to_tokens(token))


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""
