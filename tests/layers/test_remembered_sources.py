"""A remembered source is that of the layer which has projected it."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyhead import MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.layers import LatentAttention, Memory
from polyhead.layers.positions import Rotary
from polyhead.layers.variants import RoutedHeads
from polyhead.surgery import ReorderHeads, apply

LAYERS: dict[str, Callable[[], Any]] = {
    "multi-head": lambda: MultiHeadAttention(15, 3),
    "grouped, rotary": lambda: MultiHeadAttention(24, 6, num_kv_heads=2, positions=Rotary(4)),
    "latent": lambda: LatentAttention(15, 3, kv_lora_rank=7),
    "routed": lambda: RoutedHeads(15, 3, top_k=2),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_a_source_that_one_layer_remembers_is_refused_by_another(name: str) -> None:
    first, second = (LAYERS[name]().eval() for _ in range(2))
    width = first.layout.embed_dim
    x, source = torch.randn(2, 5, width), torch.randn(2, 11, width)
    memory, expected = first.remember(source), first(x, source).output
    torch.testing.assert_close(first(x, memory).output, expected)
    with pytest.raises(OptionError, match=r"with a memory of another \w+; call remember of this layer"):
        second(x, memory)
    copied = copy.deepcopy(first)
    for other in (Memory(memory.key, memory.value), copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        torch.testing.assert_close(copied(x, other).output, expected)
    del first
    gc.collect()
    with pytest.raises(OptionError, match="with a memory of another layer, which is gone"):
        copied(x, memory)


@torch.no_grad()
def test_a_source_that_a_layer_remembers_from_before_its_heads_were_edited_is_refused() -> None:
    layer, x, source = MultiHeadAttention(15, 3).eval(), torch.randn(2, 5, 15), torch.randn(2, 11, 15)
    memory, expected = layer.remember(source), layer(x, source).output
    apply(layer, [ReorderHeads(0, (2, 0, 1))])
    with pytest.raises(OptionError, match="before its heads were edited; call remember again"):
        layer(x, memory)
    torch.testing.assert_close(layer(x, layer.remember(source)).output, expected)


@torch.no_grad()
@pytest.mark.parametrize("removed", ["q_norm", "k_norm"])
def test_a_source_is_remembered_as_it_is_projected_where_one_norm_was_removed(removed: str) -> None:
    layer = MultiHeadAttention(15, 3, qk_norm="rms").eval()
    x, source = torch.randn(2, 5, 15), torch.randn(2, 11, 15)
    both = layer(x, source).output
    setattr(layer, removed, None)
    output = layer(x, source).output
    torch.testing.assert_close(layer(x, layer.remember(source)).output, output)
    assert not torch.allclose(output, both)
    other = "k_norm" if removed == "q_norm" else "q_norm"
    setattr(layer, other, None)
    assert not torch.allclose(layer(x, source).output, output)  # the other norm was still applied
