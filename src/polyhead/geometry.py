"""Head ids, head layouts and head origins: plain values shared by every other package."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyhead.errors import OptionError, PolyheadError, ShapeError


def checked_integer(name: str, value: int, *, at_least: int = 0, error: type[PolyheadError] = ShapeError) -> int:
    """Return `value`, or raise `error` unless it is an integer of at least that size; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(f"{name} must be an integer, got {value!r}")
    if value < at_least:
        raise error(f"{name} must be at least {at_least}, got {value}")
    return value


class HeadId(NamedTuple):
    """One head of a model: `HeadId(layer=5, head=3)`, written L5H3.

    >>> str(HeadId(5, 3))
    'L5H3'
    >>> HeadId.parse("L5H3")
    HeadId(layer=5, head=3)
    """

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def parse(cls, text: str) -> HeadId:
        """Return the head written L5H3 or l5h3.

        Args:
            text: layer and head, as in L5H3.

        Raises:
            OptionError: the text is not of this form.
        """
        if not isinstance(text, str) or (match := re.fullmatch(r"[Ll]([0-9]+)[Hh]([0-9]+)", text)) is None:
            numbers = re.fullmatch(r"([0-9]+)\.([0-9]+)", text) if isinstance(text, str) else None
            meant = cls(5, 3) if numbers is None else cls(int(numbers[1]), int(numbers[2]))
            raise OptionError(f"a head is written {meant}, for layer {meant.layer} and head {meant.head}; got {text!r}")
        return cls(int(match[1]), int(match[2]))


def original_name(layer: int, label: str) -> str:
    """Return the names of the original heads that a `HeadOrigins.label` of a layer lists.

    >>> original_name(2, "5"), original_name(2, "1+3"), original_name(2, "1+new"), original_name(2, "padding")
    ('L2H5', 'L2H1+L2H3', 'L2H1+new', 'padding')
    """
    return "+".join(
        str(HeadId(layer, int(part))) if re.fullmatch("[0-9]{1,9}", part) else part for part in label.split("+")
    )


def name_with_origin(layer: int, head: int, label: str | None) -> str:
    """Return the name of a head, with its original name if its label differs; None is an unknown label.

    >>> name_with_origin(2, 4, "4"), name_with_origin(2, 4, "5")
    ('L2H4', 'L2H4 (originally L2H5)')
    """
    name = str(HeadId(layer, head))
    return name if label in (None, str(head)) else f"{name} (originally {original_name(layer, label)})"


def parse_heads(heads: str | Iterable[str | HeadId | tuple[int, int]]) -> list[HeadId]:
    """Return the heads of a list such as "L0H3,L1H7" or [(0, 3), (1, 7)]."""
    parts = heads.split(",") if isinstance(heads, str) else heads
    return [HeadId.parse(x.strip()) if isinstance(x, str) else HeadId(*x) for x in parts]


def parse_head_groups(groups: str | Iterable[Sequence[HeadId | tuple[int, int]]]) -> list[list[HeadId]]:
    """Return groups of heads such as "L1H3+L1H7,L2H0+L2H4"; each has two or more heads of one layer, none twice."""
    parts = [x.replace("+", ",") for x in groups.split(",")] if isinstance(groups, str) else groups
    found = [parse_heads(part) for part in parts]
    used: set[HeadId] = set()
    for group in found:
        if len({head.layer for head in group}) != 1 or len(group) < 2:
            got = "+".join(map(str, group))
            raise OptionError(f"a group must be two or more heads of one layer, e.g. L1H3+L1H7; got {got!r}")
        repeated = next((head for head in group if head in used or group.count(head) > 1), None)
        if repeated is not None:
            raise OptionError(f"a head may occur only once, got {repeated} more than once")
        used |= set(group)
    return found


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Head counts and widths of one attention layer.

    Multi-head attention has `num_kv_heads == num_heads`, multi-query attention has one KV head, grouped-query
    attention a number in between. Query head `i` reads KV head `i // group_size`, or KV head `key_heads[i]` where
    groups are uneven. A `key_heads` that describes even groups in order is equivalent to None and is stored as None.

    A size of 0 stands for its default: num_kv_heads = num_heads (or as many as `key_heads` names), head_dim = embed_dim
    / num_heads, value_dim = head_dim, key_input_dim = embed_dim, value_input_dim = key_input_dim.

    >>> layout = HeadLayout(512, 8, num_kv_heads=2)
    >>> layout.head_dim, layout.group_size, layout.num_parameters
    (64, 4, 655360)
    >>> HeadLayout(512, 7)
    Traceback (most recent call last):
    polyhead.errors.ShapeError: embed_dim must be a multiple of num_heads when head_dim is not given, got 512 and 7
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    key_input_dim: int = 0
    value_input_dim: int = 0
    key_heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name == "key_heads":
                continue
            has_default = field.default is not dataclasses.MISSING
            checked_integer(field.name, getattr(self, field.name), at_least=0 if has_default else 1)
        if self.head_dim == 0 and self.embed_dim % self.num_heads:
            raise ShapeError(
                "embed_dim must be a multiple of num_heads when head_dim is not given, "
                f"got {self.embed_dim} and {self.num_heads}"
            )
        fill = object.__setattr__  # the dataclass is frozen
        if self.key_heads is not None:
            fill(self, "key_heads", checked_key_heads(self.key_heads, self.num_heads, self.num_kv_heads))
            fill(self, "num_kv_heads", max(self.key_heads) + 1)
        fill(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        fill(self, "head_dim", self.head_dim or self.embed_dim // self.num_heads)
        fill(self, "value_dim", self.value_dim or self.head_dim)
        fill(self, "key_input_dim", self.key_input_dim or self.embed_dim)
        fill(self, "value_input_dim", self.value_input_dim or self.key_input_dim)
        size, rest = divmod(self.num_heads, self.num_kv_heads)
        if rest == 0 and self.key_heads == tuple(i // size for i in range(self.num_heads)):
            fill(self, "key_heads", None)
        elif rest and self.key_heads is None:
            raise ShapeError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}; "
                "for uneven groups pass key_heads, the KV head that each head reads"
            )

    @property
    def group_size(self) -> int:
        """Number of query heads per KV head; defined for even groups only."""
        if self.key_heads is not None:
            raise ShapeError(
                f"uneven groups have no single group_size, got key_heads {self.key_heads}; use key_head(i)"
            )
        return self.num_heads // self.num_kv_heads

    def key_head(self, head: int) -> int:
        """Return the index of the KV head that a query head reads."""
        return head // self.group_size if self.key_heads is None else self.key_heads[head]

    @property
    def num_parameters(self) -> int:
        """Number of weights in the four projections without biases; 4 * embed_dim**2 for plain MHA."""
        query = self.embed_dim * self.num_heads * self.head_dim
        key = self.key_input_dim * self.num_kv_heads * self.head_dim
        value = self.value_input_dim * self.num_kv_heads * self.value_dim
        return query + key + value + self.num_heads * self.value_dim * self.embed_dim

    def to_dict(self) -> dict[str, Any]:
        """Return every size by name, and `key_heads` where groups are uneven."""
        sizes = dataclasses.asdict(self)
        return sizes if self.key_heads is not None else {k: v for k, v in sizes.items() if k != "key_heads"}

    @classmethod
    def from_dict(cls, sizes: dict[str, Any]) -> HeadLayout:
        names = [field.name for field in dataclasses.fields(cls)]
        unknown, missing = sorted(set(sizes) - set(names)), sorted({"embed_dim", "num_heads"} - set(sizes))
        if unknown or missing:
            raise ShapeError(
                f"a head layout has embed_dim, num_heads and optionally {', '.join(names[2:])}; "
                f"got unknown names {unknown} and missing names {missing}"
            )
        return cls(**sizes)


@dataclass(frozen=True, slots=True)
class HeadOrigins:
    """Original heads of each head of an edited layer, by which it is identified after any number of edits.

    `heads[i]` lists the original heads that head i consists of: one for an unchanged head, several for a merged head.
    Heads added by an edit are numbered -1, -2, ...; a zero head used as padding has an empty list. `total` is the
    number of original heads.

    >>> origins = HeadOrigins(((0,), (1, 3), (-1,)), total=4)
    >>> origins.label(1), origins.label(2), origins.removed
    ('1+3', 'new', (2,))
    """

    heads: tuple[tuple[int, ...], ...]
    total: int

    def __post_init__(self) -> None:
        sources = [head for parts in self.heads for head in parts]
        if any(isinstance(x, bool) or not isinstance(x, int) for x in (self.total, *sources)) or self.total < 1:
            raise ShapeError(
                f"origins must be integer head indices and total at least 1, got {self.heads} and total {self.total!r}"
            )
        if any(x >= self.total for x in sources) or len(set(sources)) < len(sources):
            raise ShapeError(f"origins must use each head of 0 to {self.total - 1} at most once, got {self.heads}")
        object.__setattr__(self, "heads", tuple(tuple(sorted(parts)) for parts in self.heads))

    @classmethod
    def unedited(cls, count: int) -> HeadOrigins:
        """Return the origins of a layer that was not edited: each head is its own.

        Args:
            count: number of heads.
        """
        return cls(tuple((head,) for head in range(count)), count)

    @property
    def is_unedited(self) -> bool:
        return self == HeadOrigins.unedited(self.total)

    @property
    def removed(self) -> tuple[int, ...]:
        """Original heads that no longer contribute to any head."""
        sources = {head for parts in self.heads for head in parts}
        return tuple(head for head in range(self.total) if head not in sources)

    def label(self, head: int) -> str:
        """Return the original indices of a head joined by +, `new` for an added head, `padding` for a zero head.

        `original_name` writes them as heads of a layer.

        Args:
            head: index of a present head.
        """
        return "+".join("new" if x < 0 else str(x) for x in self.heads[head]) or "padding"

    def then(self, heads: Sequence[Sequence[int]]) -> HeadOrigins:
        """Return the origins after a further edit whose head i consists of the current heads `heads[i]`.

        Args:
            heads: for each head after the edit, the present heads that it consists of; none for a new head.

        >>> HeadOrigins(((0,), (1, 3), (-1,)), total=4).then([(1, 0), (-1,), (2,)]).heads
        ((0, 1, 3), (-2,), (-1,))
        """
        lowest = min((x for parts in self.heads for x in parts), default=0)
        merged = [
            tuple(y for x in parts for y in (self.heads[x] if x >= 0 else (min(lowest, 0) + x,))) for parts in heads
        ]
        return HeadOrigins(tuple(merged), self.total)

    def to_dict(self) -> dict[str, Any]:
        """Return the origins as a dictionary of JSON types."""
        return {"heads": [list(parts) for parts in self.heads], "total": self.total}

    @classmethod
    def from_dict(cls, data: Any) -> HeadOrigins:
        """Return the origins that `to_dict` wrote, after checking them.

        Args:
            data: the dictionary.
        """
        try:
            return cls(tuple(tuple(parts) for parts in data["heads"]), data["total"])
        except (KeyError, TypeError) as error:
            raise ShapeError(f"origins must have heads (lists of integers) and a total, got {data!r}") from error


def checked_key_heads(key_heads: Sequence[int], num_heads: int, num_kv_heads: int = 0) -> tuple[int, ...]:
    """Return `key_heads` as a tuple, or raise unless every KV head is read by at least one query head.

    With `num_kv_heads` 0 the number of KV heads is inferred from the map.
    """
    if isinstance(key_heads, str) or not isinstance(key_heads, Sequence):
        raise ShapeError(f"key_heads must list a KV head for each head, got {key_heads!r}")
    if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in key_heads):
        raise ShapeError(f"key_heads must contain KV head indices, from 0 on, got {list(key_heads)}")
    if len(key_heads) != num_heads:
        raise ShapeError(f"key_heads must list a KV head for each of the {num_heads} heads, got {len(key_heads)}")
    count = num_kv_heads or max(key_heads) + 1
    unread = sorted(set(range(count)) - set(key_heads))
    if max(key_heads) >= count or unread:
        raise ShapeError(
            f"key_heads must read each of the {count} KV heads at least once and no other, got key_heads "
            f"{list(key_heads)}" + (f", which never reads {unread}" if unread else "")
        )
    return tuple(key_heads)
