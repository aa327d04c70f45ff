"""Caches built as docs/caches.md shows them: sizes, dtype and device come from the first block."""

from __future__ import annotations

import gc
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.errors import CacheError
from polyhead.layers import LatentAttention, MultiHeadAttention, kv_cache
from polyhead.layers.kv_cache import (
    GrowingCache,
    KVCache,
    LatentCache,
    PagedCache,
    PreallocatedCache,
    PreallocatedLatentCache,
    QuantizedCache,
    RollingCache,
)

DOCS = Path(__file__).parents[3] / "docs" / "caches.md"
HEADS, HEAD_DIM, VALUE_DIM = 2, 5, 7
KINDS: dict[str, Callable[..., KVCache]] = {
    "growing": GrowingCache,
    "preallocated": lambda **sizes: PreallocatedCache(capacity=31, **sizes),
    "quantized": lambda **sizes: QuantizedCache(capacity=31, **sizes),
    "rolling": lambda **sizes: RollingCache(window=29, sinks=2, **sizes),
    "paged": lambda **sizes: PagedCache(num_pages=37, page_size=4, **sizes),
}
LIMITED: dict[str, Callable[[], KVCache]] = {
    "preallocated": lambda: PreallocatedCache(capacity=5),
    "quantized": lambda: QuantizedCache(capacity=5),
    "paged": lambda: PagedCache(num_pages=5, page_size=1),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def block(num_tokens: int, batch: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    key = torch.randn(batch, HEADS, num_tokens, HEAD_DIM, dtype=dtype)
    return key, torch.randn(batch, HEADS, num_tokens, VALUE_DIM, dtype=dtype)


def test_every_constructor_of_the_guide_works():
    shown = re.findall(r"^\| (`[^|]*`) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    forms = re.findall(r"`(\w+Cache)\(([^)]*)\)`", " ".join(shown))
    assert {name for name, _ in forms} == {name for name in kv_cache.__all__ if name.endswith("Cache")} - {"KVCache"}
    layers = (
        MultiHeadAttention(23, 1, causal=True).eval(),
        LatentAttention(24, 2, kv_lora_rank=13, causal=True).eval(),
    )
    for name, arguments in forms:
        options = {argument.partition("=")[0].strip(): 11 for argument in arguments.split(",") if argument}
        cache = getattr(kv_cache, name)(**options)
        layer = layers["Latent" in name]
        with torch.no_grad():
            x = torch.randn(2, 7, layer.layout.embed_dim)
            parts = torch.cat([layer(x[:, :4], cache=cache).output, layer(x[:, 4:], cache=cache).output], dim=1)
            if name == "QuantizedCache":  # rounds, and must round as one that is built with its sizes
                built = kv_cache.QuantizedCache(**options, batch_size=2, num_kv_heads=1, head_dim=23)
                expected = [layer(x[:, :4], cache=built).output, layer(x[:, 4:], cache=built).output]
                assert torch.equal(parts, torch.cat(expected, dim=1))
            else:
                torch.testing.assert_close(parts, layer(x).output, atol=1e-5, rtol=0)
        assert cache.lengths == (7, 7), name


def test_memory_is_allocated_by_the_first_block_and_freed_by_reset(kind):
    cache = KINDS[kind]()
    assert (cache.nbytes, cache.lengths, cache.batch_size) == (0, (), 0)
    for batch, dtype in ((3, torch.float32), (5, torch.float64)):
        view = cache.append(*block(6, batch, dtype))
        assert (view.key.shape, view.key.dtype) == ((batch, HEADS, 6, HEAD_DIM), dtype)
        assert view.value.shape == (batch, HEADS, 6, VALUE_DIM)
        assert cache.nbytes > 0
        with pytest.raises(CacheError, match=f"has a batch size of {batch}, got a block of batch 2"):
            cache.append(*block(1, 2, dtype))
        cache.reset()
        assert (cache.nbytes, cache.lengths) == (0, ())


def test_sizes_that_are_passed_are_checked_against_the_first_block(kind):
    for size, words in (
        ({"head_dim": 6}, "has head_dim 6, got head_dim 5"),
        ({"value_dim": 5}, "has value_dim 5, got value_dim 7"),
        ({"num_kv_heads": 1}, "has num_kv_heads 1, got num_kv_heads 2"),
        ({"dtype": torch.float64}, "has dtype torch.float64, got dtype torch.float32"),
        ({"batch_size": 2}, "has a batch size of 2, got a block of batch 3"),
    ):
        cache = KINDS[kind](**size)
        with pytest.raises(CacheError, match=words):
            cache.append(*block(1))
        assert cache.nbytes == 0
    with pytest.raises(CacheError, match=r"floating point, got torch\.int64"):
        KINDS[kind]().append(torch.ones(1, 1, 1, 1).long(), torch.ones(1, 1, 1, 1).long())
    with pytest.raises(CacheError, match=r"floating point, got torch\.int8"):
        KINDS[kind](dtype=torch.int8)


@pytest.mark.parametrize("limited", LIMITED)
def test_a_first_block_that_does_not_fit_leaves_the_cache_as_it_was(limited):
    cache = LIMITED[limited]()
    with pytest.raises(CacheError, match=r"capacity of 5 tokens|needs 18 more pages"):
        cache.append(*block(6))
    assert (cache.nbytes, cache.lengths) == (0, ())
    assert cache.append(*block(5, batch=1)).key.shape == (1, HEADS, 5, HEAD_DIM)


def test_a_cache_can_be_copied_before_its_first_block(kind):
    cache = KINDS[kind]()
    for twin in (cache.fork(), pickle.loads(pickle.dumps(cache))):
        assert twin.append(*block(4, batch=2)).key.shape == (2, HEADS, 4, HEAD_DIM)
    assert cache.lengths == ()
    cache.append(*block(6))
    for twin in (cache.fork(), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(twin.view().key, cache.view().key)
        twin.reset()
        assert twin.append(*block(4, batch=2)).key.shape == (2, HEADS, 4, HEAD_DIM)


def test_nothing_can_be_read_before_the_first_block(kind):
    with pytest.raises(CacheError, match="layout from the first append"):
        KINDS[kind]().view()
    with pytest.raises(CacheError, match="reorder before the first append"):
        KINDS[kind]().reorder([0])


def test_a_reset_frees_the_pool_unless_a_fork_uses_it():
    cache = PagedCache(num_pages=37, page_size=4)
    for read in (lambda: cache.pool, lambda: cache.block_tables, lambda: cache.branch(2)):
        with pytest.raises(CacheError, match="layout from the first append"):
            read()
    cache.append(*block(6))
    fork, pool = cache.fork(), weakref.ref(cache.pool)
    before = fork.view().key.clone()
    cache.reset()
    cache.append(*block(6))
    assert cache.pool is not fork.pool
    assert torch.equal(fork.view().key, before)
    assert fork.pool.num_free == 37 - 6
    del fork
    gc.collect()
    assert pool() is None


@pytest.mark.parametrize("make", [LatentCache, lambda **sizes: PreallocatedLatentCache(capacity=31, **sizes)])
def test_a_latent_cache_takes_the_width_of_values_from_its_layer(make):
    first, second = (LatentAttention(24, 2, kv_lora_rank=rank, causal=True).eval() for rank in (13, 11))
    x, cache = torch.randn(2, 6, 24), make()
    with pytest.raises(CacheError, match="value_dim from the LatentAttention that it is passed to"):
        cache.append(torch.ones(2, 1, 3, 17))
    with torch.no_grad():
        first(x, cache=cache)
        with pytest.raises(CacheError, match="has value_dim 13, got value_dim 11"):
            second(x, cache=cache)
        assert cache.lengths == (6, 6)
        cache.reset()
        torch.testing.assert_close(second(x, cache=cache).output, second(x).output, atol=1e-5, rtol=0)


def test_a_failed_first_call_leaves_the_width_of_values_open():
    first, second = (LatentAttention(24, 2, kv_lora_rank=rank, causal=True).eval() for rank in (13, 11))
    cache: Any = PreallocatedLatentCache(capacity=3)
    with torch.no_grad():
        with pytest.raises(CacheError, match="capacity of 3 tokens"):
            first(torch.randn(2, 6, 24), cache=cache)
        assert second(torch.randn(2, 3, 24), cache=cache).output.shape == (2, 3, 24)
