"""A mask as kernels read it: plain numbers and tensors, None for what a mask does not have.

A kernel takes the whole tuple as one argument. Triton compiles a variant for each pattern of None, so that a mask costs
only what it uses. Per-token tensors are int32 and contiguous; `stride_query` and `stride_key` step from one sequence of
the batch to the next, and are 0 where all sequences share one row.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MaskArguments(NamedTuple):
    left: int | None = None  # a key may stand this many places before the query, None: any number
    right: int | None = None  # and this many after it
    sinks: int | None = None  # keys of a smaller ordinal are visible whatever `left` says
    offset: int = 0  # query i stands at i + offset, key j at j, unless the position tensors say otherwise
    stride_query: int = 0
    stride_key: int = 0
    query_position: Tensor | None = None  # [batch or 1, queries]
    key_position: Tensor | None = None  # [batch or 1, keys]
    key_ordinal: Tensor | None = None  # [batch or 1, keys]: which key of its sequence; None: j
    query_document: Tensor | None = None  # [batch or 1, queries]: sees keys of the same document; -1 sees none
    key_document: Tensor | None = None  # [batch or 1, keys]: -2 is seen by none
    first_key: Tensor | None = None  # [batch or 1, queries]: no key before it is of the query's document
    last_key: Tensor | None = None  # [batch or 1, queries]: nor after it
    first_query: Tensor | None = None  # [batch or 1, keys]: the same for keys, which only a backward needs
    last_query: Tensor | None = None
    allowed: Tensor | None = None  # boolean [batch or 1, heads or 1, queries or 1, keys], with its strides (0: shared)
    allowed_batch: int = 0
    allowed_head: int = 0
    allowed_query: int = 0
    allowed_key: int = 0
    bias: Tensor | None = None  # added to the logits, -inf hides; [batch or 1, heads or 1, queries or 1, keys]
    bias_batch: int = 0
    bias_head: int = 0
    bias_query: int = 0
    bias_key: int = 0
    table: Tensor | None = None  # [heads or 1, distances], contiguous: a bias by distance, held at its ends
    table_head: int = 0
    table_zero: int = 0
    table_width: int = 0
    poison: Tensor | None = None  # [batch, kv_heads, keys], contiguous: NaN at keys whose NaN or Inf was taken out

    @property
    def is_band(self) -> bool:
        """Whether it is a causal edge or a window, the same for every sequence and head, and nothing else."""
        hiding = (self.sinks, self.query_position, self.query_document, self.allowed, self.bias, self.table)
        return all(x is None for x in hiding)
