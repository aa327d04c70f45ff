"""The forms in which families keep the projections of their heads: names, and the order of the rows in fused ones."""

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
    """A linear module that makes queries, keys or values, and in which order their rows lie in it.

    Rows of several parts are side by side, all queries first; or head by head, as GPT-NeoX has them.
    """

    path: str
    holds: tuple[Part, ...]
    by_head: bool = False

    def rows(self, layout: HeadLayout) -> dict[Part, Tensor]:
        """Which rows each head has, [heads, dim] for each part."""
        sizes = {part: size_of(part, layout) for part in self.holds}
        if self.by_head:
            width = sum(dim for _, dim in sizes.values())
            found, start = {}, 0
            for part, (heads, dim) in sizes.items():
                found[part] = torch.arange(heads)[:, None] * width + start + torch.arange(dim)
                start += dim
            return found
        found, start = {}, 0
        for part, (heads, dim) in sizes.items():
            found[part] = start + torch.arange(heads * dim).view(heads, dim)
            start += heads * dim
        return found


def size_of(part: Part, layout: HeadLayout) -> tuple[int, int]:
    heads = layout.num_heads if part == "query" else layout.num_kv_heads
    return heads, layout.value_dim if part == "value" else layout.head_dim


@dataclass(frozen=True, slots=True)
class ProjectionFormat:
    """The names under which a family keeps its projections; fused ones only where the order of their rows is known."""

    sources: tuple[Source, ...]
    outputs: tuple[str, ...]
    families: tuple[str, ...] = ()
    equal: bool = False  # whether queries, keys and values are cut apart as equal parts


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
# What an attention module may be given without any of it being by head.
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
# The model's width by its names. A module that shapes its heads by it cannot have fewer of them.
MODEL_WIDTHS = frozenset(("embed_dim", "hidden_size", "d_model", "dim"))
# The sizes of a layer's heads by the names that modules of transformers keep them under.
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
NUM_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
GROUP_SIZES = ("num_key_value_groups",)
HEADS_WIDTHS = ("all_head_size", "split_size", "inner_dim")
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
