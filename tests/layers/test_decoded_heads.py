"""Decode kernels read a cache where it lies for layers whose heads are not those of the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyhead import KVCache, MultiHeadAttention
from polyhead.layers import QuantizedCache
from polyhead.layers.kv_cache import PagedCache
from polyhead.layers.multi_head.projected import ProjectedHeads
from polyhead.layers.positions import ALiBi, Rotary
from polyhead.layers.variants import CollaborativeAttention, DifferentialAttention
from tests.ops.interpreter.interpreted import in_the_interpreter

CACHES: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "paged": (PagedCache, {"num_pages": 9, "page_size": 2}),
    "int8": (QuantizedCache, {"capacity": 5}),
}


def differential() -> ProjectedHeads:
    """Each map is one half of the channels of a key."""
    return DifferentialAttention(32, 2, num_kv_heads=1, head_dim=16, causal=True, positions=Rotary(8))


def collaborative() -> ProjectedHeads:
    """Every head reads the one key, and its own channels of the one value."""
    return CollaborativeAttention(32, 2, shared_dim=16, value_dim=8, causal=True)


def uneven() -> MultiHeadAttention:
    """Key head 2 has two readers; 0, 1 and 3, which make two calls, have one."""
    options: dict[str, Any] = {"key_heads": (3, 2, 0, 1, 2), "causal": True, "sinks": True, "positions": ALiBi(5)}
    return MultiHeadAttention(32, 5, head_dim=8, **options)


LAYERS = {"differential": differential, "collaborative": collaborative, "uneven": uneven}


def check(name: str, kind: str, device: str = "cpu") -> None:
    """The kernels' step over a cache, beside the formula's over the keys and values that are in it."""
    torch.manual_seed(3)
    layer = LAYERS[name]().eval().to(device)
    x, (build, own) = torch.randn(1, 4, 32, device=device), CACHES[kind]
    cache = build.for_layout(layer.cache_layout, batch_size=1, device=device, **own)
    with torch.no_grad():
        layer(x[:, :3], cache=cache, backend="reference")
        found, expected = (
            layer(x[:, 3:], cache=held, statistics="entropy", backend=backend)
            for held, backend in ((cache.fork(), "auto"), (cache, "reference"))
        )
    assert (found.backend, expected.backend) == ("fused", "reference")
    torch.testing.assert_close(found.output, expected.output, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found.statistics.entropy, expected.statistics.entropy, rtol=2e-5, atol=2e-5)


def check_all() -> None:
    check("differential", "int8")
    check("collaborative", "paged")
    check("collaborative", "int8")
    check("uneven", "paged")


def test_in_the_interpreter_the_kernels_read_what_each_head_sees() -> None:
    in_the_interpreter(check_all)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", LAYERS)
def test_on_a_gpu_the_kernels_read_what_each_head_sees(name: str, kind: str) -> None:
    check(name, kind, "cuda")
