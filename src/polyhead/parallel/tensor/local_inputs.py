"""Arguments of a call that have a head axis, for the heads of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from polyhead.errors import MaskError
from polyhead.masks import Mask
from polyhead.ops.common.gates import gate_factors


def local_gate(gate: Tensor, heads: Sequence[int], num_heads: int, maps: int, shape: tuple[int, int]) -> Tensor:
    """Return the factors of some heads from a gate [heads], [batch, heads] or [batch, heads, queries].

    A gate may also have a factor for each of the `maps` softmax maps of every head. `shape` is batch and queries.
    """
    axis = 0 if isinstance(gate, Tensor) and gate.ndim == 1 else 1
    for count in (1, maps):
        if isinstance(gate, Tensor) and 1 <= gate.ndim <= 3 and gate.shape[axis] == count * num_heads:
            by_map = gate.unflatten(axis, (count, num_heads)).narrow(axis + 1, heads[0], len(heads))
            return by_map.flatten(axis, axis + 1)
    return gate_factors(gate, shape[0], num_heads, shape[1])  # raises, and lists the valid shapes


@dataclass(slots=True, eq=False)
class LocalMasks:
    """Masks of one call for the heads of one rank, and the terms of all heads that they were made of.

    Args:
        heads: contiguous heads of the rank.
        num_heads: heads of the whole layer.
        shared: called with each term that has a gradient, which is that of this rank's heads alone.
    """

    heads: Sequence[int]
    num_heads: int
    shared: Callable[[Tensor], Tensor]
    _whole: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by the id of the local term, kept alive

    def local(self, mask: Mask, *, of_parameters: bool = False) -> Mask:
        """Return a mask for the heads of the rank.

        With `of_parameters`, the terms are computed from parameters whose gradients are summed over ranks already.
        """
        return mask.with_head_terms(partial(self._term, is_summed=of_parameters))

    def whole(self, mask: Mask) -> Mask:
        """Return a mask that contains local terms with the terms of all heads in their place."""
        return mask.with_head_terms(lambda term, _: self._whole.get(id(term), (term, term))[1])

    def _term(self, term: Tensor, axis: int, *, is_summed: bool) -> Tensor:
        if term.shape[axis] not in (1, self.num_heads):
            raise MaskError(
                f"a mask of a head-parallel layer must have 1 head or all {self.num_heads} heads of the layer, got "
                f"{term.shape[axis]} in a term of shape {list(term.shape)}"
            )
        local = self.shared(term) if term.requires_grad and not is_summed else term
        if self.num_heads > 1 and term.shape[axis] > 1:
            local = local.narrow(axis, self.heads[0], len(self.heads))
        if local is not term:
            self._whole[id(local)] = local, term
        return local
