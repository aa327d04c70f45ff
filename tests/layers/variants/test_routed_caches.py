"""Generating with routed heads and any cache equals one forward over everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead import KVCache, Mask
from polyhead.errors import OptionError
from polyhead.layers.kv_cache import GrowingCache, PagedCache, PreallocatedCache, RollingCache
from polyhead.layers.positions import ALiBi, Rotary
from polyhead.layers.variants import RoutedHeads
from polyhead.layers.variants.routed.layer import RoutedOutput
from tests.layers.variants.routed_formula import scramble

BATCH, LENGTH, EMBED, HEADS, DIM = 3, 19, 22, 5, 6
DOUBLE = torch.float64
CACHES: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "growing": (GrowingCache, {}),
    "preallocated": (PreallocatedCache, {"capacity": 23}),
    "paged": (PagedCache, {"num_pages": 23, "page_size": 4}),
}
SHAPES: dict[str, dict[str, Any]] = {
    "shared": {"top_k": 2, "num_kv_heads": 2, "positions": Rotary(DIM)},
    "shared, top_p": {"top_p": 0.6, "positions": Rotary(DIM)},
    "full": {"shape": "full", "top_k": 2, "always_on": 1, "sinks": True},
    "full, threshold": {"shape": "full", "threshold": 0.25, "positions": ALiBi(HEADS)},
}
RULES: dict[str, dict[str, Any]] = {
    f"{shape}, {name}": {"shape": shape, name: value}
    for shape in ("shared", "full")
    for name, value in (("top_k", 2), ("top_p", 0.6), ("threshold", 0.25))
}
PIECES = {"token by token": [1] * LENGTH, "a prompt, then chunks": [7, 1, 1, 6, 4]}
shapes = pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
rules = pytest.mark.parametrize("options", RULES.values(), ids=RULES)


def make(options: dict[str, Any], **more: Any) -> RoutedHeads:
    layer = RoutedHeads(EMBED, HEADS, head_dim=DIM, causal=True, dtype=DOUBLE, **options, **more)
    return scramble(layer).eval()


def new_cache(kind: str, layer: RoutedHeads) -> KVCache:
    build, own = CACHES[kind]
    return build.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, **own)


def generate(layer: RoutedHeads, x: Tensor, cache: KVCache, pieces: list[int]) -> Tensor:
    with torch.no_grad():
        return torch.cat([layer(block, cache=cache).output for block in x.split(pieces, 1)], 1)


# Every shape with every cache in pieces that hold single tokens too; from the first token on one by one, the caches
# take turns.
@pytest.mark.parametrize(
    ("shape", "kind", "pieces"),
    [
        *((shape, kind, "a prompt, then chunks") for shape in SHAPES for kind in CACHES),
        *((shape, kind, "token by token") for shape, kind in zip(SHAPES, [*CACHES, "paged"], strict=True)),
    ],
)
def test_generation_equals_the_full_forward(shape, kind, pieces):
    layer, x = make(SHAPES[shape]), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    cache = new_cache(kind, layer)
    torch.testing.assert_close(generate(layer, x, cache, PIECES[pieces]), layer(x).output)
    assert cache.lengths == (LENGTH,) * BATCH


@shapes
def test_a_cache_keeps_the_keys_of_every_token_whoever_chose_them(options):
    layer, x = make(options), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    cache = GrowingCache()
    with torch.no_grad():
        layer(x, cache=cache)
    kv_heads = HEADS if layer.shape == "full" else options.get("num_kv_heads", 1)
    assert cache.view().key.shape == (BATCH, kv_heads, LENGTH, DIM)


@shapes
def test_prompts_of_different_lengths(options):
    layer, lengths = make(options), [4, 7, 2]
    prompt, step = (torch.randn(BATCH, n, EMBED, dtype=DOUBLE) for n in (7, 1))
    cache = new_cache("preallocated", layer)
    with torch.no_grad():
        first = layer(prompt, cache=cache, lengths=lengths)
        then = layer(step, cache=cache)
        assert first.routing.real.sum(-1).tolist() == lengths
        for index, length in enumerate(lengths):
            alone = torch.cat([prompt[index, :length], step[index]])[None]
            expected = layer(alone).output[0]
            torch.testing.assert_close(first.output[index, :length], expected[:length])
            torch.testing.assert_close(then.output[index], expected[length:])


@shapes
def test_a_rolling_cache_equals_a_window(options):
    layer, x = make(options, window=5), torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    cache = RollingCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, window=5)
    torch.testing.assert_close(generate(layer, x, cache, PIECES["a prompt, then chunks"]), layer(x).output)


def test_documents_in_one_row_are_sequences_of_their_own():
    for options in SHAPES.values():
        layer, x = make(options), torch.randn(1, 9, EMBED, dtype=DOUBLE)
        ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
        positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])
        together = layer(x, mask=Mask.documents(ids), token_positions=positions).output
        apart = torch.cat([layer(part).output for part in x.split([4, 5], 1)], 1)
        torch.testing.assert_close(together, apart)


# ---- masks of real tokens over a cache


def after(layer: RoutedHeads, x: Tensor, start: int, **options: Any) -> RoutedOutput:
    """The call for x[:, start:] over a cache of what stands before."""
    cache = GrowingCache()
    with torch.no_grad():
        layer(x[:, :start], cache=cache)
        return layer(x[:, start:], cache=cache, **options)


def assert_losses_are_of(result: RoutedOutput, real: Tensor, layer: RoutedHeads, new: Tensor) -> None:
    """The losses are those of the real tokens, one after another, and of no others."""
    alone = layer.router(new[real][None])
    for name in ("balance_loss", "z_loss"):
        torch.testing.assert_close(getattr(result.routing, name), getattr(alone, name))


@rules
def test_lengths_of_all_keys_hide_nothing_from_a_new_token(options):
    layer, x = make(options), torch.randn(BATCH, 5, EMBED, dtype=DOUBLE)
    result = after(layer, x, 4, mask=Mask.lengths([5] * BATCH))
    torch.testing.assert_close(result.output, layer(x).output[:, 4:])
    assert_losses_are_of(result, torch.ones(BATCH, 1, dtype=torch.bool), layer, x[:, 4:])


@rules
@pytest.mark.parametrize("kept", [[2] * BATCH, [2, 1, 0]], ids=["padding kept", "padding dropped"])
def test_padded_new_tokens_over_a_cache_see_and_count_nothing(options, kept):
    layer, x, new = make(options), torch.randn(BATCH, 6, EMBED, dtype=DOUBLE), [2, 1, 0]
    keys = [6, 5, 4]
    result = after(layer, x, 4, lengths=kept, mask=Mask.lengths(keys, queries=new))
    real = torch.arange(2) < torch.tensor(new)[:, None]
    torch.testing.assert_close(result.output[real], layer(x, mask=Mask.lengths(keys)).output[:, 4:][real])
    assert torch.equal(result.routing.real, real)
    assert_losses_are_of(result, real, layer, x[:, 4:])


@rules
def test_a_mask_over_a_cache_is_that_of_the_same_keys_without_one(options):
    layer, x = make(options), torch.randn(BATCH, 6, EMBED, dtype=DOUBLE)
    mask = Mask.lengths([6, 6, 6], queries=[2, 1, 2])
    result = after(layer, x, 4, mask=mask, lengths=[2] * BATCH)
    torch.testing.assert_close(result.output, layer(x[:, 4:], x, mask=mask).output)
    assert result.routing.real.sum(-1).tolist() == [2, 1, 2]


@rules
def test_documents_go_on_over_a_cache(options):
    layer, x = make(options), torch.randn(BATCH, 9, EMBED, dtype=DOUBLE)
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 2, -1], [3, 3, 3, 3, 3, 3, 3, 3, 3]])
    result = after(layer, x, 6, mask=Mask.documents(ids[:, 6:], ids))
    torch.testing.assert_close(result.output, layer(x, mask=Mask.documents(ids)).output[:, 6:])
    assert torch.equal(result.routing.real, ids[:, 6:] >= 0)
    assert_losses_are_of(result, ids[:, 6:] >= 0, layer, x[:, 6:])


def test_lengths_and_a_mask_both_say_which_new_tokens_are_real():
    layer, x = make(RULES["shared, top_k"]), torch.randn(BATCH, 3, EMBED, dtype=DOUBLE)
    with torch.no_grad():
        result = layer(x, cache=GrowingCache(), lengths=[3, 2, 3], mask=Mask.lengths([3, 3, 1]))
    assert result.routing.real.sum(-1).tolist() == [3, 2, 1]


def test_a_cache_is_for_the_layer_s_own_tokens():
    layer, x = make(SHAPES["shared"]), torch.randn(BATCH, 4, EMBED, dtype=DOUBLE)
    with pytest.raises(OptionError, match=r"use layer\.remember"):
        layer(x, x, cache=GrowingCache())
    with pytest.raises(OptionError, match=r"must be a polyhead\.KVCache, got dict"):
        layer(x, cache={})
