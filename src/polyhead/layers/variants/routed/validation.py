"""Head layout of a routed layer, and validation of its options, masks and routings."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polyhead.errors import MaskError, OptionError, ShapeError
from polyhead.geometry import HeadLayout
from polyhead.layers import checks
from polyhead.layers.base_attention import Memory
from polyhead.layers.positions import BiasesLogits, Positions
from polyhead.layers.variants.routed.router import Routing
from polyhead.masks import Mask

SHAPES = ("shared", "full")


def routed_layout(embed_dim: int, num_heads: int, shape: str, sizes: dict[str, int | None]) -> HeadLayout:
    """Return the layout of all query heads; in shape "shared" each head has a query for every KV head."""
    checks.check_one_of("shape", shape, SHAPES)
    if shape == "full":
        return checks.layout_of(embed_dim, num_heads, sizes)
    checks.check_size("num_kv_heads", sizes.get("num_kv_heads"))
    single = checks.layout_of(embed_dim, num_heads, {**sizes, "num_kv_heads": 1})
    kv_heads = sizes.get("num_kv_heads") or 1
    return HeadLayout(embed_dim, num_heads * kv_heads, kv_heads, single.head_dim, single.value_dim)


def check_shape_options(shape: str, top_k: int | None, *, sinks: bool, dropout: float) -> None:
    if shape == "shared" and sinks:
        raise OptionError(
            "shape 'shared' does not support sinks, since a slot may be any head; got sinks=True; use shape 'full'"
        )
    if dropout and (shape == "full" or top_k is None):
        raise OptionError(
            f"dropout requires shape 'shared' with top_k, got dropout {dropout} with shape {shape!r}"
            f"{'' if shape == 'full' else ' and a varying number of heads'}; apply dropout to the output instead"
        )


def check_shape_positions(shape: str, positions: type[Positions]) -> None:
    if shape == "shared" and issubclass(positions, BiasesLogits):
        raise OptionError(
            "shape 'shared' does not support positions that bias logits, since a slot may be any head; "
            f"got positions {positions.__name__}; use Rotary, or shape 'full'"
        )


def check_source(key: Any, batch: int, layout: HeadLayout, projection: nn.Module) -> None:
    """Check that a source or `Memory` matches the layer and the batch size of the queries."""
    if isinstance(key, Memory):
        checks.check_memory(key.key, key.value, batch, layout)
        return
    checks.check_padded("routed heads take", "key", key, layout.embed_dim, projection)
    if key.shape[0] != batch:
        raise ShapeError(
            f"query, key and value must have the same batch size, got {batch}, {key.shape[0]} and {key.shape[0]}"
        )


def check_routing(routing: Any, query: Tensor, num_heads: int) -> None:
    """Check the type, shapes and values of a routing passed to `forward`."""
    if not isinstance(routing, Routing):
        raise OptionError(
            f"routing must be a polyhead.layers.variants.Routing, such as the routing of an earlier result, "
            f"got {type(routing).__name__}"
        )
    routing.check(query.shape[0], query.shape[1], num_heads, query.device)
    routing.check_values()


def check_shared_mask(mask: Mask) -> None:
    tensors = (*mask.allowed, *mask.biases, *(term.table[None] for term in mask.relative_biases))
    if any(x.shape[1] != 1 for x in tensors):
        raise MaskError(
            "in shape 'shared' a slot may be any head, so a mask or bias must be the same for all heads, "
            f"got {mask!r}; use shape 'full'"
        )
