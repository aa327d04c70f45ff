"""A mask as kernels read it: plain numbers and tensors, None for absent terms.

A kernel takes a whole `MaskArguments` as one argument. Triton compiles a specialisation for each pattern of None, so
that a mask costs only what it uses. Per-token tensors are int32 and contiguous; `stride_query` and `stride_key` are
their batch strides, 0 where all sequences share one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

MASK_TENSORS = (
    "query_position",
    "key_position",
    "key_ordinal",
    "query_document",
    "key_document",
    "first_key",
    "last_key",
    "first_query",
    "last_query",
    "full_key",
    "full_query",
    "allowed",
    "poison",
)
# In `full_key` and `full_query`: some indices between the first and the last visible one are masked. Beyond any index.
GAPS = 2**31 - 1
_OPTIONS = ("left", "right", "sinks")  # None or a number, passed as two numbers: 0 and 0, or 1 and the number
_NUMBERS = ("offset", "stride_query", "stride_key", "table_zero")
# The types of `MaskArguments.flat`: bias and table may need gradients, `MASK_TENSORS` do not.
MASK_SCHEMA = "Tensor? bias, Tensor? table, Tensor?[] mask_tensors, SymInt[] mask_numbers"


class MaskArguments(NamedTuple):
    """Terms of one mask; the module docstring describes their types."""

    left: int | None = None  # keys up to this many positions before the query are visible, None: any number
    right: int | None = None  # and up to this many after it
    sinks: int | None = None  # keys with a smaller ordinal are visible regardless of `left`
    offset: int = 0  # query i has position i + offset, key j has position j, unless the position tensors are set
    stride_query: int = 0
    stride_key: int = 0
    query_position: Tensor | None = None  # [batch or 1, queries]
    key_position: Tensor | None = None  # [batch or 1, keys]
    key_ordinal: Tensor | None = None  # [batch or 1, keys]: index among the non-padding keys of its sequence; None: j
    query_document: Tensor | None = None  # [batch or 1, queries]: sees keys of the same document; -1 sees none
    key_document: Tensor | None = None  # [batch or 1, keys]: -2 is seen by none
    # The ends of what documents and dense terms leave visible; `left` and `right` are applied in addition.
    first_key: Tensor | None = None  # [batch or 1, queries]: first key that the query sees
    last_key: Tensor | None = None  # [batch or 1, queries]: last key that the query sees
    first_query: Tensor | None = None  # [batch or 1, keys]: first query that sees the key; for the backward only
    last_query: Tensor | None = None  # [batch or 1, keys]: last query that sees the key; for the backward only
    # `first_key` or `first_query` where everything up to the last one is visible too, `GAPS` where it is not.
    full_key: Tensor | None = None  # [batch or 1, queries]
    full_query: Tensor | None = None  # [batch or 1, keys]; for the backward only
    allowed: Tensor | None = None  # boolean [batch or 1, heads or 1, queries or 1, keys], with its strides (0: shared)
    allowed_batch: int = 0
    allowed_head: int = 0
    allowed_query: int = 0
    allowed_key: int = 0
    bias: Tensor | None = None  # added to the logits, -inf masks; [batch or 1, heads or 1, queries or 1, keys]
    bias_batch: int = 0
    bias_head: int = 0
    bias_query: int = 0
    bias_key: int = 0
    table: Tensor | None = None  # [heads or 1, distances], contiguous: a bias by distance, clamped at its ends
    table_head: int = 0  # stride of heads, 0: shared
    table_zero: int = 0  # column of distance 0
    table_width: int = 0
    poison: Tensor | None = None  # [batch, kv_heads, keys], contiguous: NaN at replaced non-finite keys, else 0

    @property
    def is_band(self) -> bool:
        """True if the mask is only a causal or sliding-window band, the same for all sequences and heads.

        Unlike with `Visibility.is_band`, attention sinks (`sinks`) are not part of a band here.
        """
        terms = (self.sinks, self.query_position, self.query_document, self.allowed, self.bias, self.table)
        return all(x is None for x in terms)

    def with_dense(self, *, bias: Tensor | None, table: Tensor | None) -> MaskArguments:
        """Return a copy with this bias and table, and with the strides and sizes of `allowed`, bias and table."""
        fields: dict[str, Any] = {}
        for name, x in (("allowed", self.allowed), ("bias", bias)):
            if x is not None:
                batch, head, query, key = shared_strides(x)
                fields |= {f"{name}_batch": batch, f"{name}_head": head, f"{name}_query": query, f"{name}_key": key}
        if table is not None:
            heads, width = table.shape
            fields |= {"table": table.contiguous(), "table_head": width if heads > 1 else 0, "table_width": width}
        return self._replace(bias=bias, **fields) if len(fields) else self

    def flat(self) -> tuple[Any, ...]:
        """Return the arguments of an operator, of the types of `MASK_SCHEMA`; the inverse of `from_flat`."""
        numbers: list[int] = []
        for option in (getattr(self, name) for name in _OPTIONS):
            numbers += (0, 0) if option is None else (1, option)
        numbers += [getattr(self, name) for name in _NUMBERS]
        return self.bias, self.table, [getattr(self, name) for name in MASK_TENSORS], numbers

    @classmethod
    def from_flat(
        cls, bias: Tensor | None, table: Tensor | None, tensors: Sequence[Tensor | None], numbers: Sequence[int]
    ) -> MaskArguments:
        """Return the mask of an operator's arguments."""
        fields: dict[str, Any] = dict(zip(MASK_TENSORS, tensors, strict=True))
        for i, name in enumerate(_OPTIONS):
            fields[name] = numbers[2 * i + 1] if numbers[2 * i] else None
        fields |= zip(_NUMBERS, numbers[2 * len(_OPTIONS) :], strict=True)
        return cls(**fields).with_dense(bias=bias, table=table)


def shared_strides(tensor: Tensor) -> list[int]:
    """Return the strides, with 0 for broadcast axes, which have one element."""
    return [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
