"""How latent heads are sized, and what each of the two ways to compute them costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import ShapeError
from polyhead.geometry import HeadLayout
from polyhead.masks import Mask
from polyhead.ops.decode.api import cached_reasons
from polyhead.ops.decode.fused import CacheArguments

FORMS = ("expanded", "absorbed")


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """The sizes of a layer of latent heads. `q_lora_rank` 0: queries are not compressed.

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
            check_latent_size(field.name, getattr(self, field.name))

    @property
    def head_dim(self) -> int:
        """Channels of a head's query and key, the turning ones included; their root scales the logits."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Numbers that generation keeps of a token, one set for all heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expanded(self) -> HeadLayout:
        """The heads as attention sees them once every head has keys and values of its own."""
        return HeadLayout(self.embed_dim, self.num_heads, self.num_heads, self.head_dim, self.value_head_dim)

    @property
    def absorbed(self) -> HeadLayout:
        """The heads as attention sees them when all of them read the latents: multi-query. Caches hold this."""
        return HeadLayout(self.embed_dim, self.num_heads, 1, self.cache_width, self.kv_lora_rank)

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)


def check_latent_size(name: str, size: object) -> None:
    """One of the sizes of `LatentLayout`; two of them may be 0, which is none."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise ShapeError(f"{name} must be an integer, got {size!r}")
    if size < 0 or (size == 0 and name not in ("q_lora_rank", "qk_rope_head_dim")):
        raise ShapeError(f"{name} must be positive, got {size}")


def still_channels(embed_dim: int, num_heads: int, given: int | None) -> int:
    """Channels of a head's query and key that do not turn: given, or the head's share of the width."""
    check_latent_size("embed_dim", embed_dim)
    check_latent_size("num_heads", num_heads)
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
    """Which form serves a call, and the multiply-adds of each for one sequence. Prints as a table.

    Counted is what differs: keys and values expanded from the latents (or queries taken into the latent space and
    heads out of it), and attention over every pair of query and key. A mask spares both forms alike. `refusals` says
    why the decode kernels do not read a `LatentCache` for the absorbed form; where it is empty, they do.
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
    """Multiply-adds between the latents and the heads' outputs, for one sequence."""
    up = layout.kv_lora_rank * (layout.qk_nope_head_dim + layout.value_head_dim)  # of a token and head, either way
    if form == "expanded":
        return layout.num_heads * (keys * up + queries * keys * (layout.head_dim + layout.value_head_dim))
    return layout.num_heads * (queries * up + queries * keys * (layout.cache_width + layout.kv_lora_rank))


def absorbing_is_cheaper(layout: LatentLayout, queries: int, keys: int | None) -> bool:
    """Whether `form_products` of the absorbed form are fewer; `keys` None says that they are the queries' tokens.

    The same tokens are told apart from as many others, so that a traced graph asks nothing of a size it does not know.
    """
    own = layout.qk_nope_head_dim + layout.value_head_dim
    wider = 2 * layout.kv_lora_rank - own  # channels that a pair of query and key costs more in the latent space
    if keys is None:
        return wider < 0
    return (keys - queries) * layout.kv_lora_rank * own > queries * keys * wider


@torch.no_grad()
def decode_refusals(layout: LatentLayout, weight: Tensor, queries: int, keys: int, mask: Mask | None) -> list[str]:
    """Why the decode kernels do not read a latent cache for so many new tokens, with such weights."""
    one = weight.new_empty(layout.cache_width)
    query = one.expand(1, layout.num_heads, queries, -1)
    held = one.expand(1, 1, keys, -1)
    cache = CacheArguments(held, held[..., : layout.kv_lora_rank], shared=True)
    return cached_reasons(query, cache, keys, mask=mask)
