"""Storage formats of Q/K/V/O projections by model family: module names, and row order if fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyhead.geometry import HeadLayout

Part = Literal["query", "key", "value"]
PARTS: tuple[Part, ...] = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class Source:
    """A linear module that produces queries, keys or values, and the order of their rows in it.

    Fused parts are concatenated, all query rows first; or interleaved head by head (`by_head`), as in GPT-NeoX.
    """

    path: str
    holds: tuple[Part, ...]
    by_head: bool = False

    def rows(self, layout: HeadLayout) -> dict[Part, Tensor]:
        """Return the row indices of each head, [heads, dim] for each part."""
        sizes = {part: size_of(part, layout) for part in self.holds}
        width = sum(dim for _, dim in sizes.values())  # of the parts of one head
        rows, start = {}, 0
        for part, (heads, dim) in sizes.items():
            stride = width if self.by_head else dim
            rows[part] = start + torch.arange(heads)[:, None] * stride + torch.arange(dim)
            start += dim if self.by_head else heads * dim
        return rows


def size_of(part: Part, layout: HeadLayout) -> tuple[int, int]:
    heads = layout.num_heads if part == "query" else layout.num_kv_heads
    return heads, layout.value_dim if part == "value" else layout.head_dim


@dataclass(frozen=True, slots=True)
class ProjectionFormat:
    """Projection names of a model family; fused formats only where their row order is known."""

    sources: tuple[Source, ...]
    outputs: tuple[str, ...]
    families: tuple[str, ...] = ()
    equal: bool = False  # whether queries, keys and values are split into equal parts


def separate(query: str, key: str, value: str) -> tuple[Source, ...]:
    return Source(query, ("query",)), Source(key, ("key",)), Source(value, ("value",))


PROJECTION_FORMATS = (
    ProjectionFormat(separate("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense", "Wo")),
    ProjectionFormat(separate("q_lin", "k_lin", "v_lin"), ("out_lin",)),
    ProjectionFormat(separate("query", "key", "value"), ("^.output.dense",)),
    ProjectionFormat(separate("q", "k", "v"), ("o",)),
    ProjectionFormat(
        (Source("q_attn", ("query",)), Source("c_attn", ("key", "value"))), ("c_proj",), ("gpt2",), equal=True
    ),
    ProjectionFormat((Source("c_attn", PARTS),), ("c_proj",), ("gpt2",), equal=True),
    ProjectionFormat((Source("qkv_proj", PARTS),), ("o_proj",), ("phi3",)),
    ProjectionFormat((Source("Wqkv", PARTS),), ("Wo",), ("modernbert",), equal=True),
    ProjectionFormat((Source("query_key_value", PARTS, by_head=True),), ("dense",), ("gpt_neox",), equal=True),
)
HEAD_WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
# Arguments of an attention module's forward that are known not to be per head.
ARGUMENTS = frozenset(
    (
        "self",
        "hidden_states",
        "attention_mask",
        "past_key_values",
        "past_key_value",
        "layer_past",
        "position_embeddings",
        "position_ids",
        "cache_position",
        "key_value_states",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "cross_attention_states",
        "cu_seqlens",
        "max_seqlen",
        "output_attentions",
        "use_cache",
        "kwargs",
    )
)
# Names of the model width. A module that reshapes its heads by it cannot have fewer of them.
MODEL_WIDTHS = frozenset(("embed_dim", "hidden_size", "d_model", "dim"))
# Attribute names under which transformers modules keep the sizes of their heads.
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
NUM_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
GROUP_SIZES = ("num_key_value_groups",)
HEADS_WIDTHS = ("all_head_size", "split_size", "inner_dim")
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
