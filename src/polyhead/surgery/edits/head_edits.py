"""Edits of a layer's heads as values: frozen, written as JSON, and each a function from heads to heads.

An edit says what is to be done and holds no weights. Several edits of one layer are done in their order, so that the
second speaks of the heads as the first left them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.files import in_one_line, short
from polyhead.layers.registry import Registry
from polyhead.surgery.adapters.head_weights import HeadWeights, with_row

EDITS: Registry[HeadEdit] = Registry("a head edit")


@dataclass(frozen=True)
class HeadEdit(ABC):
    """A change to the heads of layer `layer`; `stack` says of which stack, where a model has several."""

    layer: int
    _: KW_ONLY
    stack: str | None = None

    def __post_init__(self) -> None:
        _check_count("layer", self.layer, 0)
        if self.stack is not None and not isinstance(self.stack, str):
            raise OptionError(f"stack must be the name of a stack of layers, got {self.stack!r}")

    @abstractmethod
    def change(self, heads: HeadWeights) -> HeadWeights:
        """The heads after the edit; refused where they are not there."""


@dataclass(frozen=True)
class EditHeads(HeadEdit):
    """A change to these heads of a layer."""

    heads: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "heads", tuple(sorted(_checked_heads(self.heads))))


@EDITS.register("prune")
@dataclass(frozen=True)
class PruneHeads(EditHeads):
    """Take heads away, and with them the KV heads that nobody reads any more.

    >>> PruneHeads(layer=3, heads=(7, 1))
    PruneHeads(layer=3, stack=None, heads=(1, 7))
    """

    def change(self, heads: HeadWeights) -> HeadWeights:
        _check_in_range(self.heads, heads.num_heads)
        kept = [head for head in range(heads.num_heads) if head not in self.heads]
        if not kept:
            raise OptionError(
                f"a layer must keep a head, got all {heads.num_heads} heads of layer {self.layer} to prune"
            )
        return heads.select(kept)


@EDITS.register("reorder")
@dataclass(frozen=True)
class ReorderHeads(HeadEdit):
    """Put heads into another order: the head that is to stand first is named first. The model stays the same function.

    >>> ReorderHeads(layer=0, order=(2, 0, 1)).order
    (2, 0, 1)
    """

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "order", _checked_heads(self.order))

    def change(self, heads: HeadWeights) -> HeadWeights:
        _check_in_range(self.order, heads.num_heads)
        if len(self.order) != heads.num_heads:
            missing = sorted(set(range(heads.num_heads)) - set(self.order))
            raise OptionError(f"an order names each of the {heads.num_heads} heads once, got none of {missing}")
        return heads.select(self.order)


@EDITS.register("merge")
@dataclass(frozen=True)
class MergeHeads(EditHeads):
    """Make several heads one, at the place of the first: the mean of what they read, the sum of what they write.

    Heads that compute the same are merged without loss, whatever their output matrices are. They must read the same
    KV head, or each be the only reader of its own.

    >>> MergeHeads(layer=5, heads=(2, 0))
    MergeHeads(layer=5, stack=None, heads=(0, 2))
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.heads) < 2:
            raise OptionError(f"merging takes at least two heads, got {list(self.heads)}")

    def change(self, heads: HeadWeights) -> HeadWeights:
        _check_in_range(self.heads, heads.num_heads)
        first, *others = self.heads
        together, keys = list(self.heads), [heads.key_heads[head] for head in self.heads]
        if len(set(keys)) > 1 and any(heads.key_heads.count(key) > 1 for key in keys):
            raise OptionError(
                "heads are merged that read one KV head, or that each have a KV head of their own; got heads "
                f"{together} of layer {self.layer}, which read KV heads {keys} beside other heads"
            )
        merged = replace(
            heads,
            query=with_row(heads.query, first, heads.query[together].mean(0)),
            query_bias=_mean_bias(heads.query_bias, together),
            output=with_row(heads.output, first, heads.output[together].sum(0)),
            origins=tuple(None if head in self.heads else x for head, x in enumerate(heads.origins)),
            made_of=tuple(
                tuple(sorted(y for other in self.heads for y in heads.made_of[other])) if head == first else x
                for head, x in enumerate(heads.made_of)
            ),
        )
        if len(set(keys)) > 1:
            merged = replace(
                merged,
                key=with_row(heads.key, keys[0], heads.key[keys].mean(0)),
                value=with_row(heads.value, keys[0], heads.value[keys].mean(0)),
                key_bias=_mean_bias(heads.key_bias, keys),
                value_bias=_mean_bias(heads.value_bias, keys),
            )
        return merged.select([head for head in range(heads.num_heads) if head not in others])


@EDITS.register("group_queries")
@dataclass(frozen=True)
class GroupQueries(HeadEdit):
    """Let query heads share KV heads: each group of KV heads becomes one, the mean of their matrices.

    Every KV head stands in one group. Query heads keep their places. This is the plain conversion to grouped-query
    attention; means of heads that were not aligned lose much.

    >>> GroupQueries(layer=0, groups=((0, 1), (2, 3)))
    GroupQueries(layer=0, stack=None, groups=((0, 1), (2, 3)))
    """

    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.groups, str) or not isinstance(self.groups, Sequence):
            raise OptionError(f"groups must list the KV heads of each group, got {self.groups!r}")
        groups = tuple(_checked_heads(group) for group in self.groups)
        _checked_heads([head for group in groups for head in group])
        object.__setattr__(self, "groups", groups)

    def change(self, heads: HeadWeights) -> HeadWeights:
        count = heads.key.shape[0]
        named = [head for group in self.groups for head in group]
        _check_in_range(named, count, "KV heads")
        if len(named) < count:
            missing = sorted(set(range(count)) - set(named))
            raise OptionError(f"every one of the {count} KV heads stands in a group, got none with {missing}")

        def pooled(x: Tensor) -> Tensor:
            return torch.stack([x[list(group)].mean(0) for group in self.groups])

        place = {head: index for index, group in enumerate(self.groups) for head in group}
        alone = {head for group in self.groups if len(group) == 1 for head in group}
        return replace(
            heads,
            key=pooled(heads.key),
            value=pooled(heads.value),
            key_bias=None if heads.key_bias is None else pooled(heads.key_bias),
            value_bias=None if heads.value_bias is None else pooled(heads.value_bias),
            key_heads=tuple(place[key] for key in heads.key_heads),
            origins=tuple(x if key in alone else None for key, x in zip(heads.key_heads, heads.origins, strict=True)),
        )


@EDITS.register("revive")
@dataclass(frozen=True)
class ReviveHeads(HeadEdit):
    """Grow `count` new heads behind the others, that write nothing yet: the model stays the same function.

    Their queries, keys and values are random, in directions that the other heads of the layer do not read as far as
    there is room; their output matrices are zero, for training to fill. To give a dead head something to do, prune it
    and grow another; of heads that do the same, merge them first.

    >>> ReviveHeads(layer=2, count=1)
    ReviveHeads(layer=2, stack=None, count=1, seed=0)
    """

    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count("count", self.count, 1)
        _check_count("seed", self.seed, 0)

    def change(self, heads: HeadWeights) -> HeadWeights:
        if heads.key_heads != tuple(range(heads.num_heads)):
            raise OptionError(
                "a new head brings a KV head of its own, so that every head of the layer must have one; got "
                f"{heads.num_heads} heads over {heads.key.shape[0]} KV heads in layer {self.layer}"
            )
        generator = torch.Generator().manual_seed(self.seed)
        grown = {name: self._fresh(getattr(heads, name), generator) for name in ("query", "key", "value")}
        for name in ("output", "query_bias", "key_bias", "value_bias"):
            held = getattr(heads, name)
            if held is not None:
                grown[name] = torch.cat((held, held.new_zeros(self.count, *held.shape[1:])))
        total = heads.num_heads + self.count
        first = min(0, *(x for made_of in heads.made_of for x in made_of)) - 1
        return replace(
            heads,
            **grown,
            key_heads=tuple(range(total)),
            origins=(*heads.origins, *[None] * self.count),
            made_of=(*heads.made_of, *((first - number,) for number in range(self.count))),
        )

    def _fresh(self, held: Tensor, generator: torch.Generator) -> Tensor:
        """The matrices with new ones behind them, as long in the mean as the old, and orthogonal if possible."""
        dim, width = held.shape[1:]
        drawn = torch.randn(self.count * dim, width, generator=generator, dtype=torch.float64)
        if held.is_meta:
            return torch.cat((held, held.new_empty(self.count, dim, width)))
        old = held.detach().to("cpu", torch.float64).flatten(0, 1)
        room = width - old.shape[0]
        if room >= drawn.shape[0]:
            directions = torch.linalg.qr(old.T)[0]
            drawn = drawn - (drawn @ directions) @ directions.T
        drawn = drawn / drawn.norm(dim=1, keepdim=True) * old.norm(dim=1).mean()
        return torch.cat((held, drawn.view(self.count, dim, width).to(held)))


def edits_to_json(edits: Sequence[HeadEdit]) -> str:
    """Edits in their order as a JSON list.

    >>> edits_from_json(edits_to_json([PruneHeads(3, (1, 7))]))
    (PruneHeads(layer=3, stack=None, heads=(1, 7)),)
    """
    return json.dumps([EDITS.to_dict(edit) for edit in checked_edits(edits)])


def edits_from_json(text: str) -> tuple[HeadEdit, ...]:
    """The edits that `edits_to_json` wrote."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"edits are a JSON list, got {short(text)}: {in_one_line(error)}") from error
    if not isinstance(found, list):
        raise OptionError(f"edits are a JSON list, got {short(text)}")
    return checked_edits([EDITS.from_dict(one) for one in found])


def checked_edits(edits: Any) -> tuple[HeadEdit, ...]:
    """Edits as a tuple; refused where there are none, or where one is something else."""
    edits = (edits,) if isinstance(edits, HeadEdit) else edits
    if isinstance(edits, str) or not isinstance(edits, Sequence) or not all(isinstance(x, HeadEdit) for x in edits):
        raise OptionError(f"edits are a sequence of PruneHeads, MergeHeads and others, got {edits!r}")
    if not len(edits):
        raise OptionError("there must be an edit to make, got none")
    return tuple(edits)


def _checked_heads(heads: Any) -> tuple[int, ...]:
    if isinstance(heads, str) or not isinstance(heads, Sequence):
        raise OptionError(f"heads are named by their numbers, got {heads!r}")
    if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in heads):
        raise OptionError(f"heads are named by their numbers, from 0 on, got {list(heads)}")
    if not len(heads):
        raise OptionError("an edit names at least one head, got none")
    repeated = sorted({x for x in heads if list(heads).count(x) > 1})
    if repeated:
        raise OptionError(f"a head is named once, got {repeated} more than once in {list(heads)}")
    return tuple(heads)


def _check_in_range(named: Sequence[int], count: int, noun: str = "heads") -> None:
    unknown = sorted(head for head in named if head >= count)
    if unknown:
        raise OptionError(f"this layer has {noun} 0 to {count - 1}, got {unknown}")


def _check_count(name: str, number: object, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise OptionError(f"{name} must be an integer of at least {least}, got {number!r}")


def _mean_bias(biases: Tensor | None, heads: list[int]) -> Tensor | None:
    return None if biases is None else with_row(biases, heads[0], biases[heads].mean(0))
