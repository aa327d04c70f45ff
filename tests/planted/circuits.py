"""Circuits of the planted heads, as two small matrices in the coordinates of the stream's subspaces."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from polyhead.errors import OptionError
from tests.planted.spaces import Sizes, gaussian, random_rotation

PLANTED_ROLES: dict[str, frozenset[str]] = {
    "previous": frozenset({"positional", "previous"}),
    "self": frozenset({"positional", "self"}),
    "next": frozenset({"positional", "next"}),
    "long-range": frozenset({"positional", "long-range"}),
    "local": frozenset({"local"}),
    "sink": frozenset({"sink"}),
    "broad": frozenset({"broad"}),
    "duplicate-token": frozenset({"duplicate-token"}),
    "induction": frozenset({"induction", "copy"}),
    "copy": frozenset({"copy"}),
    "anti-copy": frozenset({"anti-copy"}),
}

# In units of the gap: an equal token, the first place, and the query's own place for a head that looks for others.
# A token that is not equal reaches MAX_COSINE * _MATCH = 2, so each step of the ladder is one gap or more.
_MATCH, _REST, _NOT_ITSELF = 4.0, 3.0, -2.0
_IN_THE_WINDOW = 1.0  # deviation of the local head's logits by content, so that its favourite is no fixed offset
_NEXT_TO_NOTHING = 0.01  # of a logit; it takes about half its square, 5e-5 nats, off the entropy


@dataclass(frozen=True, slots=True)
class Sharpness:
    """Strengths of the planted heads.

    Attributes:
        gap: by how much the logit of the planted key exceeds that of any other; for heads that copy, what the logit of
            a token they wholly attend to gains (or loses), on average over the words.
        spread: standard deviation of the logits of heads that look at random content, and of random heads.
        window: standard deviation of the local head's window, in tokens.
        offset: how far back the long-range head looks.
        write: length of what a head writes; that of a token's embedding is 1. The more, the more the streams of
            single tokens differ in length, and the less exact are gaps and duplicates in later layers.
    """

    gap: float = 10.0
    spread: float = 2.0
    window: float = 3.0
    offset: int = 17
    write: float = 0.05

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            if isinstance(number, bool) or not (isinstance(number, int | float) and 0 < number < math.inf):
                raise OptionError(f"{field.name} must be positive and finite, got {number!r}")
        if not isinstance(self.offset, int):
            raise OptionError(f"offset counts tokens, got {self.offset!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Circuit:
    """Circuit of one head, before it is factored into matrices."""

    logits: Tensor  # [head_dim, head_dim], queries by keys, over the axes of position and then of content
    writes: Tensor  # [token_dim, axes of the target], of the attended token; a written vector has length 1 or so
    key_content: Literal["token", "previous"] = "token"
    target: Literal["spare", "previous", "output"] = "spare"


@dataclass(frozen=True, slots=True)
class Drawer:
    """Draws circuits; two of one name differ in whatever their role leaves open."""

    sizes: Sizes
    sharpness: Sharpness
    generator: torch.Generator

    def draw(self, name: str) -> Circuit:
        """A circuit of a name in `PLANTED_ROLES`, or of a head that looks at random content and has no role."""
        gap, spread = self.sharpness.gap, self.sharpness.spread
        match name:
            case "previous":
                whole = torch.eye(self.sizes.token_dim, dtype=torch.float64)
                return Circuit(self._at_offset(1), whole, target="previous")
            case "self":
                return Circuit(self._at_offset(0), self._half())
            case "next":
                return Circuit(self._at_offset(-1), self._half())
            case "long-range":
                return Circuit(self._at_offset(self.sharpness.offset), self._half())
            case "local":
                return Circuit(self._window() + self._content(_IN_THE_WINDOW, of_places=False), self._half())
            case "sink":
                return Circuit(gap * self._first_place(), self._half())
            case "broad":
                return Circuit(self._content(_NEXT_TO_NOTHING), self._half())
            case "duplicate-token":
                elsewhere = _NOT_ITSELF * self._block(places=torch.eye(self.sizes.max_length))
                return Circuit(gap * (self._match() + elsewhere), self._half())
            case "induction":
                return Circuit(gap * self._match(), self._copying(1.0), key_content="previous", target="output")
            case "copy":
                return Circuit(self._content(spread), self._copying(1.0), target="output")
            case "anti-copy":
                return Circuit(self._content(spread), self._copying(-1.0), target="output")
            case "content":
                return Circuit(self._content(spread), self._half())
        raise OptionError(f"a circuit is one of {', '.join(PLANTED_ROLES)} or content, got {name!r}")

    # ---- where to look: [head_dim, head_dim]

    def _block(self, places: Tensor | None = None, content: Tensor | None = None) -> Tensor:
        count = self.sizes.max_length
        logits = torch.zeros(self.sizes.head_dim, self.sizes.head_dim, dtype=torch.float64)
        if places is not None:
            logits[:count, :count] = places
        if content is not None:
            logits[count:, count:] = content
        return logits

    def _at_offset(self, back: int) -> Tensor:
        places = torch.arange(self.sizes.max_length)
        wanted = torch.zeros(len(places), len(places), dtype=torch.float64)
        wanted[places, (places - back).clamp(0, len(places) - 1)] = self.sharpness.gap
        return self._block(places=wanted)

    def _window(self) -> Tensor:
        places = torch.arange(self.sizes.max_length, dtype=torch.float64)
        distance = (places[:, None] - places) / self.sharpness.window
        return self._block(places=(-distance.square() / 2).clamp(min=-self.sharpness.gap))

    def _first_place(self) -> Tensor:
        first = torch.zeros(self.sizes.max_length, self.sizes.max_length)
        first[:, 0] = 1.0
        return self._block(places=first)

    def _match(self) -> Tensor:
        return _MATCH * self._block(content=torch.eye(self.sizes.token_dim)) + _REST * self._first_place()

    def _content(self, spread: float, *, of_places: bool = True) -> Tensor:
        """Logits of the given standard deviation: unit vectors on both sides of a Gaussian matrix give normal ones."""
        tokens, places = self.sizes.token_dim, self.sizes.max_length
        share = spread / math.sqrt(2) if of_places else spread
        content = gaussian(tokens, tokens, generator=self.generator)
        place = gaussian(places, places, generator=self.generator) if of_places else None
        return share * self._block(place, content)

    # ---- what to write: [token_dim, axes of the target]

    def _half(self) -> Tensor:
        """A random half of the token's vector, to random axes of spare."""
        read = random_rotation(self.sizes.token_dim, self.generator)[:, : self.sizes.write_dim]
        write = random_rotation(self.sizes.spare_dim, self.generator)[: self.sizes.write_dim]
        return math.sqrt(self.sizes.token_dim / self.sizes.write_dim) * read @ write

    def _copying(self, sign: float) -> Tensor:
        """A random half of the token's vector, to the same half of its unembedding."""
        half = random_rotation(self.sizes.token_dim, self.generator)[:, : self.sizes.write_dim]
        return sign * math.sqrt(self.sizes.token_dim / self.sizes.write_dim) * half @ half.T
