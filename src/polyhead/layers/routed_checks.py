"""The heads of a routed layer, and which options go together with which of its shapes."""

from __future__ import annotations

from polyhead.errors import MaskError, OptionError
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.masks import Mask

SHAPES = ("shared", "full")


def routed_layout(embed_dim: int, num_heads: int, shape: str, sizes: dict[str, int | None]) -> HeadLayout:
    """Every query head there is, over the key/value heads: in shape "shared" a head has a query for each of those."""
    checks.check_one_of("shape", shape, SHAPES)
    if shape == "full":
        return checks.layout_of(embed_dim, num_heads, sizes)
    checks.check_size("num_kv_heads", sizes.get("num_kv_heads"))
    one = checks.layout_of(embed_dim, num_heads, {**sizes, "num_kv_heads": 1})
    kv_heads = sizes.get("num_kv_heads") or 1
    return HeadLayout(embed_dim, num_heads * kv_heads, kv_heads, one.head_dim, one.value_dim)


def check_shape_options(shape: str, top_k: int | None, *, sinks: bool, dropout: float) -> None:
    if shape == "shared" and sinks:
        raise OptionError(
            "sinks belong to heads, and over shared keys the rows of all heads lie together; got sinks=True with "
            "shape 'shared'; use shape 'full'"
        )
    if dropout and (shape == "full" or top_k is None):
        raise OptionError(
            f"attention of chosen rows has no dropout, got {dropout} with shape {shape!r}"
            f"{'' if shape == 'full' else ' and a number of heads for each token'}; drop from the output instead"
        )


def check_shape_positions(shape: str, biases: bool, name: str) -> None:
    if shape == "shared" and biases:
        raise OptionError(
            "what positions add to the logits belongs to heads, and over shared keys the rows of all heads lie "
            f"together; got positions {name} with shape 'shared'; use Rotary, or shape 'full'"
        )


def check_shared_mask(mask: Mask) -> None:
    tensors = (*mask.allowed, *mask.biases, *(term.table[None] for term in mask.relative_biases))
    if any(x.shape[1] != 1 for x in tensors):
        raise MaskError(
            "over shared keys the rows of all heads lie together, so a mask or bias must be the same for all of them, "
            f"got {mask!r}; use shape 'full'"
        )
