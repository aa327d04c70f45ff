"""`DescribedMask`: a lazy attention mask, a tensor subclass that stores a `polyhead.Mask` instead of values.

Between the mask function and the attention function, models and `generate` read the mask's shape, dtype and device,
move it, slice it and combine it. `DescribedMask` is a tensor [batch, 1, queries, keys] without storage. Passing it on
costs nothing; the first computation materialises the values of eager attention: 0 where a query may attend, the minimum
of the dtype elsewhere. All families support these; boolean masks are inverted by some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from polyhead.masks import Documents, Mask, Padding
from polyhead.ops.common.visibility import resolve

_aten = torch.ops.aten
_SAME_VALUES = (_aten.detach.default, _aten.alias.default, _aten.clone.default)


class DescribedMask(Tensor):
    """A `polyhead.Mask` as an additive mask tensor [batch, 1, queries, keys], materialised on demand.

    Args:
        description: the mask that the tensor stands for.
        shape: [batch, 1, queries, keys].
        dtype: dtype of the additive mask.
        device: device of the additive mask.
        anchor: tensor that stands for the mask in a compiled graph; an empty one by default.

    >>> import torch
    >>> from polyhead import Mask
    >>> mask = DescribedMask(Mask.causal(), (1, 1, 3, 3), torch.float16, torch.device("cpu"))
    >>> mask
    DescribedMask([1, 1, 3, 3], Mask(causal))
    >>> mask[0, 0]
    tensor([[     0., -65504., -65504.],
            [     0.,      0., -65504.],
            [     0.,      0.,      0.]], dtype=torch.float16)
    """

    description: Mask
    made: Tensor | None  # the dense mask once materialised; it may have been modified, so it supersedes the description
    first_tokens: Tensor | None  # [batch or 1], of each sequence among all tokens, also those that a cache has dropped
    anchor: Tensor

    @staticmethod
    def __new__(
        cls,
        description: Mask,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        anchor: Tensor | None = None,
    ) -> DescribedMask:
        mask: DescribedMask = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        mask.description = description
        mask.made = mask.first_tokens = None
        # torch.compile requires at least one inner tensor.
        mask.anchor = torch.empty(0, device=device) if anchor is None else anchor
        for name, part in zip(_part_names(description), description.tensors, strict=True):
            setattr(mask, name, part)
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        mask = args[0] if args else None
        if isinstance(mask, DescribedMask) and mask.made is None:
            if function in _SAME_VALUES:
                return mask._moved(mask.device)
            if function is _aten._to_copy.default and keywords.get("dtype") in (None, mask.dtype):
                return mask._moved(torch.device(keywords.get("device") or mask.device))
        plain = tree_map_only(DescribedMask, DescribedMask.dense, (tuple(args), keywords))
        result = function(*plain[0], **plain[1])
        if isinstance(mask, DescribedMask) and _writes_first(function):
            return mask  # an in-place operation
        return result

    def dense(self) -> Tensor:
        """Return the values [batch, 1, queries, keys]; materialised once, so that in-place changes persist.

        These are booleans (True = may attend) if that is the dtype.
        """
        if self.made is None:
            batch, _, queries, keys = self.shape
            visibility = resolve(self.description, batch=batch, heads=1, queries=queries, keys=keys, device=self.device)
            allowed = None if visibility is None else visibility.allowed_tile((0, queries), (0, keys))
            if self.dtype is torch.bool:
                everything = torch.ones(self.shape, dtype=torch.bool, device=self.device)
                self.made = everything if allowed is None else everything & allowed
            else:
                values = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
                self.made = values if allowed is None else torch.where(allowed, values, torch.finfo(self.dtype).min)
        return self.made

    def _moved(self, device: torch.device) -> DescribedMask:
        description = self.description if device == self.device else self.description.to(device)
        mask = DescribedMask(description, self.shape, self.dtype, device)
        mask.first_tokens = None if self.first_tokens is None else self.first_tokens.to(device)
        return mask

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DescribedMask({list(self.shape)}, {self.description!r})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        return _rebuild, (
            _layout(self.description),
            self.description.tensors,
            tuple(self.shape),
            self.dtype,
            self.device,
        )

    # ---- protocol of torch.compile for tensor subclasses

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["anchor", *_part_names(self.description)], (_layout(self.description), self.dtype, str(self.device))

    @staticmethod
    def __tensor_unflatten__(
        parts: Mapping[str, Tensor], context: tuple[Any, ...], size: Sequence[int], stride: Sequence[int]
    ) -> DescribedMask:
        layout, dtype, device = context
        anchor, *rest = parts.values()
        return _rebuild(layout, rest, size, dtype, torch.device(device), anchor)


def _writes_first(function: Any) -> bool:
    arguments = function._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def _part_names(description: Mask) -> list[str]:
    return [f"part_{index}" for index in range(len(description.tensors))]


def _layout(description: Mask) -> tuple[Any, ...]:
    """Return the non-tensor part of a description as comparable values."""
    return (
        description.left,
        description.right,
        description.sinks,
        tuple((term.queries is not None, term.side) for term in description.padding),
        tuple(term.keys is not None for term in description.packed),
        description.placed is not None,
        len(description.allowed),
    )


def _rebuild(
    layout: tuple[Any, ...],
    parts: Sequence[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    anchor: Tensor | None = None,
) -> DescribedMask:
    left, right, sinks, padding, packed, placed, allowed = layout
    remaining = list(parts)

    def take(present: bool = True) -> Any:
        return remaining.pop(0) if present else None

    # In the order of `Mask.tensors`.
    description = Mask(left=left, right=right, sinks=sinks)
    description = replace(description, padding=tuple(Padding(take(), take(present), side) for present, side in padding))
    description = replace(description, packed=tuple(Documents(take(), take(present)) for present in packed))
    description = replace(description, placed=(take(), take()) if placed else None)
    description = replace(description, allowed=tuple(take() for _ in range(allowed)))
    return DescribedMask(description, shape, dtype, device, anchor)
