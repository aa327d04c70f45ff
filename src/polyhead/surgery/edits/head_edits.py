"""Edits of a layer's heads as values: frozen, stored as JSON, each a function from `HeadWeights` to `HeadWeights`.

An edit holds no weights. Several edits of one layer are applied in order: the indices of the second are those after the
first.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.files import in_one_line, short
from polyhead.geometry import checked_integer
from polyhead.layers.registry import Registry
from polyhead.surgery.adapters.head_weights import KV_PARTS, HeadWeights, with_row

EDITS: Registry[HeadEdit] = Registry("a head edit")


@dataclass(frozen=True)
class HeadEdit(ABC):
    """An edit of the heads of layer `layer`; `stack` selects the stack if a model has several.

    Args:
        layer: index of the layer within its stack, from 0.
        stack: name of the stack, for models with several (encoder, decoder, cross-attention).
    """

    layer: int
    _: KW_ONLY
    stack: str | None = None

    def __post_init__(self) -> None:
        checked_integer("layer", self.layer, error=OptionError)
        if self.stack is not None and not isinstance(self.stack, str):
            raise OptionError(f"stack must be the name of a stack of layers, got {self.stack!r}")

    @abstractmethod
    def change(self, heads: HeadWeights) -> HeadWeights:
        """Return the heads after the edit; raises if it refers to heads that do not exist.

        Args:
            heads: weights of the layer before the edit.
        """


@dataclass(frozen=True)
class SelectedHeadsEdit(HeadEdit):
    """Base of the edits that list query heads in `heads`, which is sorted.

    Args:
        heads: indices of query heads.
    """

    heads: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "heads", tuple(sorted(_checked_heads(self.heads))))


@EDITS.register("prune")
@dataclass(frozen=True)
class PruneHeads(SelectedHeadsEdit):
    """Remove heads, and the KV heads that no remaining head reads.

    >>> PruneHeads(layer=3, heads=(7, 1))
    PruneHeads(layer=3, stack=None, heads=(1, 7))
    """

    def change(self, heads: HeadWeights) -> HeadWeights:
        _check_in_range(self.heads, heads.num_heads)
        remaining = [head for head in range(heads.num_heads) if head not in self.heads]
        if not remaining:
            raise OptionError(
                f"a layer must keep at least one head, got all {heads.num_heads} heads of layer {self.layer} to prune"
            )
        return heads.select(remaining)


@EDITS.register("reorder")
@dataclass(frozen=True)
class ReorderHeads(HeadEdit):
    """Permute heads. The function is unchanged.

    Args:
        order: for each position, the index that its head has before the edit.

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
            raise OptionError(f"an order must name each of the {heads.num_heads} heads once, got none of {missing}")
        return heads.select(self.order)


@EDITS.register("merge")
@dataclass(frozen=True)
class MergeHeads(SelectedHeadsEdit):
    """Merge heads into the first of them: the mean of their Q, K and V, the sum of their outputs.

    Heads with equal Q, K and V are merged without loss, whatever their output matrices are. They must read the same KV
    head, or each be the only reader of its own.

    >>> MergeHeads(layer=5, heads=(2, 0))
    MergeHeads(layer=5, stack=None, heads=(0, 2))
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.heads) < 2:
            raise OptionError(f"merging needs at least two heads, got {list(self.heads)}")

    def change(self, heads: HeadWeights) -> HeadWeights:
        _check_in_range(self.heads, heads.num_heads)
        first, *others = indices = list(self.heads)
        kv_heads = [heads.key_heads[head] for head in indices]
        if len(set(kv_heads)) > 1 and any(heads.key_heads.count(kv_head) > 1 for kv_head in kv_heads):
            raise OptionError(
                "merged heads must read one KV head, or each have a KV head of their own; got heads "
                f"{indices} of layer {self.layer}, which read KV heads {kv_heads} shared with other heads"
            )

        def averaged(rows: list[int]) -> Callable[[Tensor], Tensor]:
            return lambda x: with_row(x, rows[0], x[rows].mean(0))

        merged = replace(
            heads.mapped(averaged(indices), "query", "query_bias"),
            output=with_row(heads.output, first, heads.output[indices].sum(0)),
            origins=tuple(None if head in self.heads else x for head, x in enumerate(heads.origins)),
            made_of=tuple(
                tuple(sorted(y for other in self.heads for y in heads.made_of[other])) if head == first else x
                for head, x in enumerate(heads.made_of)
            ),
        )
        if len(set(kv_heads)) > 1:
            merged = merged.mapped(averaged(kv_heads), *KV_PARTS)
        return merged.select([head for head in range(heads.num_heads) if head not in others])


@EDITS.register("group_queries")
@dataclass(frozen=True)
class GroupQueries(HeadEdit):
    """Mean-pool each group of KV heads into one, shared by their query heads.

    Every KV head is in exactly one group. Query heads keep their positions. This is the mean pooling of GQA uptraining
    (Ainslie et al. 2023), without the training: a baseline that loses much if heads are not aligned first.

    Args:
        groups: KV heads of each group.

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
        group_of = {kv_head: index for index, group in enumerate(self.groups) for kv_head in group}
        _check_in_range(list(group_of), count, "KV heads")
        if len(group_of) < count:
            missing = sorted(set(range(count)) - set(group_of))
            raise OptionError(f"every one of the {count} KV heads must be in a group, got none with {missing}")

        def pooled(x: Tensor) -> Tensor:
            return torch.stack([x[list(group)].mean(0) for group in self.groups])

        return replace(
            heads.mapped(pooled, *KV_PARTS),
            key_heads=tuple(group_of[kv_head] for kv_head in heads.key_heads),
            origins=tuple(
                x if len(self.groups[group_of[kv_head]]) == 1 else None
                for kv_head, x in zip(heads.key_heads, heads.origins, strict=True)
            ),
        )


@EDITS.register("revive")  # the name in saved files
@dataclass(frozen=True)
class AddHeads(HeadEdit):
    """Append new heads after the last. Their output matrices are zero, so that the function is unchanged.

    Their query, key and value matrices are random, orthogonal to those of the layer's other heads where there are
    enough dimensions; their output matrices are to be trained. To replace a dead head, prune it and add a new one; to
    replace duplicates, merge them first.

    Args:
        count: number of heads to add.
        seed: seed of their weights.

    >>> AddHeads(layer=2, count=1)
    AddHeads(layer=2, stack=None, count=1, seed=0)
    """

    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_integer("count", self.count, at_least=1, error=OptionError)
        checked_integer("seed", self.seed, error=OptionError)

    def change(self, heads: HeadWeights) -> HeadWeights:
        if heads.key_heads != tuple(range(heads.num_heads)):
            raise OptionError(
                "a new head adds its own KV head, so every head of the layer must have one; got "
                f"{heads.num_heads} heads over {heads.key.shape[0]} KV heads in layer {self.layer}"
            )
        generator = torch.Generator().manual_seed(self.seed)
        extended = {name: self._extended(getattr(heads, name), generator) for name in ("query", "key", "value")}
        for name in ("output", "query_bias", "key_bias", "value_bias"):
            tensor = getattr(heads, name)
            if tensor is not None:
                extended[name] = torch.cat((tensor, tensor.new_zeros(self.count, *tensor.shape[1:])))
        total = heads.num_heads + self.count
        first = min(0, *(x for made_of in heads.made_of for x in made_of)) - 1  # added heads are -1, -2, ...
        return replace(
            heads,
            **extended,
            key_heads=tuple(range(total)),
            origins=(*heads.origins, *[None] * self.count),
            made_of=(*heads.made_of, *((first - number,) for number in range(self.count))),
        )

    def _extended(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        """Append random matrices with rows of the old mean norm, orthogonal to the old rows if possible."""
        dim, width = weight.shape[1:]
        if weight.is_meta:
            return torch.cat((weight, weight.new_empty(self.count, dim, width)))
        drawn = torch.randn(self.count * dim, width, generator=generator, dtype=torch.float64)
        old = weight.detach().to("cpu", torch.float64).flatten(0, 1)
        if old.shape[0] + drawn.shape[0] <= width:
            directions = torch.linalg.qr(old.T)[0]
            drawn = drawn - (drawn @ directions) @ directions.T
        drawn = drawn / drawn.norm(dim=1, keepdim=True) * old.norm(dim=1).mean()
        return torch.cat((weight, drawn.view(self.count, dim, width).to(weight)))


def edits_to_json(edits: Sequence[HeadEdit]) -> str:
    """Return edits, in order, as a JSON list.

    Args:
        edits: edits of a model.

    >>> edits_from_json(edits_to_json([PruneHeads(3, (1, 7))]))
    (PruneHeads(layer=3, stack=None, heads=(1, 7)),)
    """
    return json.dumps([EDITS.to_dict(edit) for edit in checked_edits(edits)])


def edits_from_json(text: str) -> tuple[HeadEdit, ...]:
    """Read the edits that `edits_to_json` wrote.

    Args:
        text: JSON text.

    Returns:
        The edits, in order.
    """
    try:
        content = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"edits must be a JSON list, got {short(text)}: {in_one_line(error)}") from error
    if not isinstance(content, list):
        raise OptionError(f"edits must be a JSON list, got {short(text)}")
    return checked_edits([EDITS.from_dict(edit) for edit in content])


def checked_edits(edits: Any) -> tuple[HeadEdit, ...]:
    """Return an edit or a sequence of edits as a tuple; raises if it is empty or has something else in it."""
    edits = (edits,) if isinstance(edits, HeadEdit) else edits
    if isinstance(edits, str) or not isinstance(edits, Sequence) or not all(isinstance(x, HeadEdit) for x in edits):
        raise OptionError(f"edits must be a sequence of PruneHeads, MergeHeads and others, got {edits!r}")
    if not len(edits):
        raise OptionError("edits must contain at least one edit, got none")
    return tuple(edits)


def _checked_heads(heads: Any) -> tuple[int, ...]:
    if isinstance(heads, str) or not isinstance(heads, Sequence):
        raise OptionError(f"heads must be a sequence of indices, got {heads!r}")
    if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in heads):
        raise OptionError(f"heads must be indices of at least 0, got {list(heads)}")
    if not len(heads):
        raise OptionError("an edit must name at least one head, got none")
    repeated = sorted({x for x in heads if list(heads).count(x) > 1})
    if repeated:
        raise OptionError(f"heads must be distinct, got {repeated} more than once in {list(heads)}")
    return tuple(heads)


def _check_in_range(indices: Sequence[int], count: int, noun: str = "heads") -> None:
    unknown = sorted(head for head in indices if head >= count)
    if unknown:
        raise OptionError(f"this layer has {noun} 0 to {count - 1}, got {unknown}")
