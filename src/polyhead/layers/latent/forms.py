"""Layout of latent attention, and the costs of its expanded and absorbed forms."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import ShapeError
from polyhead.geometry import HeadLayout, checked_integer
from polyhead.masks import Mask
from polyhead.ops.decode.api import cached_reasons
from polyhead.ops.decode.fused import CacheArguments

FORMS = ("expanded", "absorbed")


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """Sizes of a latent attention layer; `q_lora_rank` 0 means uncompressed queries.

    >>> layout = LatentLayout(7168, 128, 512, 1536, 128, 64, 128)
    >>> layout.head_dim, layout.cache_width
    (192, 576)
    >>> layout.absorbed.num_kv_heads, layout.absorbed.head_dim, layout.absorbed.value_dim
    (1, 576, 512)
    """

    embed_dim: int
    num_heads: int
    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    value_head_dim: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            may_be_zero = field.name in ("q_lora_rank", "qk_rope_head_dim")
            checked_integer(field.name, getattr(self, field.name), at_least=0 if may_be_zero else 1)

    @property
    def head_dim(self) -> int:
        """Channels of a head's query and key, rotary ones included; sets the scale of the logits."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Numbers cached per token, shared by all heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expanded(self) -> HeadLayout:
        """Head layout of the expanded form: multi-head attention with a key and value per head."""
        return HeadLayout(self.embed_dim, self.num_heads, self.num_heads, self.head_dim, self.value_head_dim)

    @property
    def absorbed(self) -> HeadLayout:
        """Head layout of the absorbed form, multi-query attention over the latents; also that of caches."""
        return HeadLayout(self.embed_dim, self.num_heads, 1, self.cache_width, self.kv_lora_rank)

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)


def resolve_nope_head_dim(embed_dim: int, num_heads: int, given: int | None) -> int:
    """Return qk_nope_head_dim, the channels without rotary positions; embed_dim / num_heads by default."""
    checked_integer("embed_dim", embed_dim, at_least=1)
    checked_integer("num_heads", num_heads, at_least=1)
    if given is not None:
        return given
    if embed_dim % num_heads:
        raise ShapeError(
            "embed_dim must be a multiple of num_heads when qk_nope_head_dim is not given, "
            f"got {embed_dim} and {num_heads}"
        )
    return embed_dim // num_heads


@dataclass(frozen=True, slots=True)
class FormChoice:
    """Form chosen for a call, and the multiply-adds of both forms for one sequence. Prints as a table.

    Only what differs is counted: keys and values expanded from the latents (or queries projected into the latent space
    and heads out of it), and attention over every query-key pair. A mask reduces both forms equally. `refusals` lists
    why the decode kernels do not read a `LatentCache` in the absorbed form; if empty, they do.
    """

    chosen: str
    expanded: int
    absorbed: int
    reason: str
    refusals: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = []
        for form in FORMS:
            mark, why = ("->", f"  {self.reason}") if form == self.chosen else ("  ", "")
            lines.append(f"{mark} {form}  {getattr(self, form):,} multiply-adds{why}")
        reader = f"attention: {'; '.join(self.refusals)}" if self.refusals else "the decode kernels"
        return "\n".join([*lines, f"   absorbed, a LatentCache is read by {reader}"])


def form_products(layout: LatentLayout, form: str, queries: int, keys: int) -> int:
    """Return the multiply-adds from the latents to the heads' outputs, for one sequence."""
    up = layout.kv_lora_rank * (layout.qk_nope_head_dim + layout.value_head_dim)  # per token and head, in either form
    if form == "expanded":
        return layout.num_heads * (keys * up + queries * keys * (layout.head_dim + layout.value_head_dim))
    return layout.num_heads * (queries * up + queries * keys * (layout.cache_width + layout.kv_lora_rank))


def absorbing_is_cheaper(layout: LatentLayout, queries: int, keys: int | None) -> bool:
    """Return True if the absorbed form is cheaper; `keys` None is self-attention without a cache.

    Self-attention is a separate case, so that a traced graph has no guard on a symbolic sequence length.
    """
    if keys is None:
        queries = keys = 1  # any equal lengths, whose projections from and into the latents cost the same
    return form_products(layout, "absorbed", queries, keys) < form_products(layout, "expanded", queries, keys)


@torch.no_grad()
def decode_refusals(layout: LatentLayout, weight: Tensor, queries: int, keys: int, mask: Mask | None) -> list[str]:
    """Return the reasons why the decode kernels do not support a latent cache of these sizes."""
    channels = weight.new_empty(layout.cache_width)
    query = channels.expand(1, layout.num_heads, queries, -1)
    latents = channels.expand(1, 1, keys, -1)
    cache = CacheArguments(latents, latents[..., : layout.kv_lora_rank], shared=True)
    return cached_reasons(query, cache, keys, mask=mask)
