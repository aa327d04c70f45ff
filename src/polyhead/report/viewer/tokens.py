"""What stands at each place of a text: the tokens a model reads, with the piece of the text that each stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyhead.report.packing import clipped
from polyhead.sources import special_tokens

_TAIL = 8  # tokens before a generated one that are decoded with it: its spaces and split characters depend on them


@dataclass(frozen=True, slots=True)
class Axis:
    """The tokens along one side of an attention; spans are in code points of the text, -1 where there is none."""

    tokens: tuple[str, ...]
    special: tuple[int, ...]  # the places of tokens that stand for no text
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
        """One more at the end, which stands for no piece of the text that was given."""
        places = (*self.special, len(self.tokens)) if special else self.special
        return Axis((*self.tokens, text), places, (*self.starts, -1), (*self.ends, -1))


@dataclass(frozen=True, slots=True)
class TokenisedText:
    """What is read of a text: ids with special tokens around, and how many there were before it was cut."""

    ids: tuple[int, ...]
    axis: Axis
    total: int


def tokenise_text(tokenizer: Any, text: str, most: int, *, closed: bool) -> TokenisedText:
    """The first tokens of a text; `closed` puts what the tokenizer writes after a text behind it."""
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
    room = max(0, most - len(before) - len(after))
    inner = inner[:room]
    ids = (*before, *inner, *after)
    texts, starts, ends = [], [], []
    names = tokenizer.convert_ids_to_tokens(list(ids))
    for place, name in enumerate(names):
        number = place - len(before)
        start, end = spans[number] if spans is not None and 0 <= number < len(inner) else (-1, -1)
        if end <= start:  # a token that the tokenizer added, or one of a tokenizer that does not say where it stands
            start = end = -1
        texts.append(text[start:end] if start >= 0 else str(name))
        starts.append(start)
        ends.append(end)
    outside = {place for place in range(len(ids)) if not len(before) <= place < len(before) + len(inner)}
    outside |= {place for place, token in enumerate(ids) if token in wrapping.ids}
    return TokenisedText(ids, Axis(tuple(texts), tuple(sorted(outside)), tuple(starts), tuple(ends)), total)


def axis_of_ids(tokenizer: Any, ids: Sequence[int]) -> Axis:
    """Tokens that were never a text: what a decoder begins with."""
    special = special_tokens(tokenizer).ids
    axis = Axis((), (), (), ())
    for place, token in enumerate(ids):
        axis = axis.with_token(text_after(tokenizer, ids[:place], token), special=token in special)
    return axis


def text_after(tokenizer: Any, before: Sequence[int], token: int) -> str:
    """What a token adds to the text before it, spaces included; its name where it adds nothing that can be seen."""
    tail = list(before[-_TAIL:])
    whole, without = _decoded(tokenizer, [*tail, token]), _decoded(tokenizer, tail)
    if whole.startswith(without) and len(whole) > len(without):
        return whole[len(without) :]
    return _decoded(tokenizer, [token]) or str(tokenizer.convert_ids_to_tokens(token))


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""
