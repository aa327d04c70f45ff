"""Generating with latent heads, any cache and either form, equals one forward over everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead import KVCache, Mask, MultiHeadAttention
from polyhead.errors import CacheError, OptionError
from polyhead.layers.kv_cache import GrowingCache, PagedCache, PreallocatedCache, QuantizedCache, RollingCache
from polyhead.layers.kv_cache.latent import LatentCache, PreallocatedLatentCache
from polyhead.layers.latent.forms import FORMS
from polyhead.layers.latent.layer import LatentAttention
from polyhead.layers.positions import ALiBi, Learned, Positions, Rotary
from tests.layers.latent.latent_formula import DOUBLE, EMBED, HEADS, RANK, ROPE, make
from tests.ops.interpreter.interpreted import in_the_interpreter
from tests.pairs import in_turn

BATCH, LENGTH = 3, 29
CACHES: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "latent": (LatentCache, {}),
    "latent, preallocated": (PreallocatedLatentCache, {"capacity": 31}),
    "growing": (GrowingCache, {}),
    "preallocated": (PreallocatedCache, {"capacity": 31}),
    "paged": (PagedCache, {"num_pages": 31, "page_size": 4}),
}
LATENT = ["latent", "latent, preallocated"]
PIECES = {"token by token": [1] * LENGTH, "a prompt, then tokens": [17] + [1] * 12, "in chunks": [5, 1, 11, 2, 10]}
POSITIONS: dict[str, Callable[[], Positions | None]] = {
    "none": lambda: None,
    "rotary": lambda: Rotary(ROPE),
    "ALiBi": lambda: ALiBi(HEADS),
    "learned": lambda: Learned(31, EMBED),
}


def new_cache(kind: str, layer: LatentAttention, **options: Any) -> KVCache:
    build, own = CACHES[kind]
    return build.for_layout(layer.layout.absorbed, batch_size=BATCH, dtype=DOUBLE, **own, **options)


def generate(layer: LatentAttention, x: Tensor, cache: KVCache, pieces: list[int], **options: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([layer(block, cache=cache, **options).output for block in x.split(pieces, 1)], 1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


@pytest.mark.parametrize(("positions", "kind", "pieces"), in_turn(POSITIONS, CACHES, PIECES))
def test_generation_equals_the_full_forward(positions: str, kind: str, pieces: str, x: Tensor) -> None:
    layer = make(positions=POSITIONS[positions](), causal=True)
    cache = new_cache(kind, layer)
    close(generate(layer, x, cache, PIECES[pieces]), layer(x).output)
    assert cache.lengths == (LENGTH,) * BATCH


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
def test_either_form_generates_in_every_backend(backend: str, form: str, x: Tensor) -> None:
    layer = make(causal=True, q_lora_rank=7, backend=backend, form=form)
    close(generate(layer, x, new_cache("latent", layer), PIECES["in chunks"]), layer(x, form="expanded").output)


def test_a_step_is_absorbed_and_a_prompt_expanded(x: Tensor) -> None:
    layer, told = make(causal=True, kv_lora_rank=31), []
    layer._listener = told.append
    cache = new_cache("latent", layer)
    generate(layer, x, cache, [27, 1, 1])
    assert [attended.key.shape[1] for attended in told] == [HEADS, 1, 1]
    assert [attended.key.shape[2] for attended in told] == [27, 28, 29]
    assert told[-1].key.data_ptr() == told[-1].value.data_ptr() == cache.view().key.data_ptr()


@pytest.mark.parametrize("form", FORMS)
def test_statistics_of_a_step_are_those_of_the_whole(form: str, x: Tensor) -> None:
    layer = make(causal=True, sinks=True)
    whole = layer(x, statistics=True, weights=True, logsumexp=True, form="expanded")
    cache = new_cache("latent", layer)
    generate(layer, x[:, :-3], cache, [LENGTH - 3])
    with torch.no_grad():
        step = layer(x[:, -3:], cache=cache, statistics=True, weights=True, logsumexp=True, form=form)
    close(step.weights, whole.weights[:, :, -3:])
    close(step.logsumexp, whole.logsumexp[..., -3:])
    names = [name for name, _ in whole.statistics.items()]
    assert len(names) > 8
    for name in names:
        close(getattr(step.statistics, name), getattr(whole.statistics, name)[..., -3:])


@pytest.mark.parametrize("kind", LATENT)
def test_a_latent_cache_keeps_a_token_once_for_all_heads(kind: str, x: Tensor) -> None:
    layer = make(causal=True)
    cache, plain = new_cache(kind, layer), new_cache("preallocated", layer)
    for held in (cache, plain):
        generate(layer, x, held, [LENGTH])
    slots = cache.capacity  # type: ignore[attr-defined]
    assert cache.nbytes == BATCH * slots * layer.layout.cache_width * 8
    assert layer.layout.cache_width == RANK + ROPE
    assert plain.nbytes == BATCH * 31 * (RANK + ROPE + RANK) * 8
    view = cache.view()
    assert view.key.shape == (BATCH, 1, LENGTH, RANK + ROPE)
    assert torch.equal(view.value, view.key[..., :RANK])
    assert view.storage.value.data_ptr() == view.storage.key.data_ptr()


@pytest.mark.parametrize("kind", CACHES)
def test_ragged_prompts_go_on_as_each_would_alone(kind: str, x: Tensor) -> None:
    layer, lengths = make(causal=True), [19, 5, 12]
    cache = new_cache(kind, layer)
    prompt = x[:, :19].clone()
    for row, length in enumerate(lengths):
        prompt[row, length:] = 99.0  # must not matter
    whole, ends, rows = layer(x).output, torch.tensor(lengths), torch.arange(BATCH)
    with torch.no_grad():
        first = layer(prompt, cache=cache, lengths=lengths).output
        for row, length in enumerate(lengths):
            close(first[row, :length], whole[row, :length])
        for step in range(4):
            close(layer(x[rows, ends + step][:, None], cache=cache).output[:, 0], whole[rows, ends + step])


@pytest.mark.parametrize("kind", LATENT)
def test_beams_forks_and_drafts_taken_back(kind: str, x: Tensor) -> None:
    layer = make(causal=True)
    cache = new_cache(kind, layer)
    generate(layer, x[:, :11], cache, [11])
    fork = cache.fork()
    generate(layer, x[:, 11:19], cache, [8])
    cache.crop(13)
    close(generate(layer, x[:, 13:], cache, [1] * 16), layer(x).output[:, 13:])
    order = [2, 0, 0]
    fork.reorder(order)
    mixed = torch.cat((x[order, :11], x[:, 11:]), 1)
    close(generate(layer, x[:, 11:], fork, [3, 15]), layer(mixed).output[:, 11:])
    cache.reset()
    assert cache.lengths == (0,) * BATCH
    close(generate(layer, x, cache, PIECES["in chunks"]), layer(x).output)


@pytest.mark.parametrize("form", FORMS)
def test_a_window_generates_with_a_rolling_cache(form: str, x: Tensor) -> None:
    layer = make(causal=True, window=5, form=form)
    cache = RollingCache.for_layout(layer.layout.absorbed, batch_size=BATCH, dtype=DOUBLE, window=5)
    close(generate(layer, x, cache, PIECES["in chunks"]), layer(x, mask=Mask.window(5)).output)


def test_an_int8_cache_serves_with_its_own_error(x: Tensor) -> None:
    layer = make(causal=True)
    cache = QuantizedCache.for_layout(layer.layout.absorbed, batch_size=BATCH, capacity=31, dtype=DOUBLE)
    generate(layer, x[:, :-1], cache, [LENGTH - 1])
    with torch.no_grad():
        expanded, absorbed = (layer(x[:, -1:], cache=cache.fork(), form=form).output for form in FORMS)
    close(absorbed, expanded)
    assert 0 < (absorbed - layer(x).output[:, -1:]).abs().max() < 0.2


def check_kernel() -> None:
    """Steps go to the kernels for latents and give what the formula gives, whatever lies in slots without a token."""
    from polyhead.ops.decode.kernels import latent as kernels

    torch.manual_seed(7)
    x = torch.randn(2, 21, EMBED)
    for rank, lengths in ((16, None), (16, [17, 9]), (272, [17, 0])):
        layer = make(kv_lora_rank=rank, positions=Rotary(8), causal=True, dtype=torch.float32, form="absorbed")
        cache = LatentCache(value_dim=rank)
        with torch.no_grad(), mock.patch.object(kernels, "leave_parts", wraps=kernels.leave_parts) as taken:
            layer(x[:, :17], cache=cache, lengths=lengths, backend="reference")
            for row, length in enumerate(cache.lengths):
                cache._buffers[0][row, :, length:] = torch.nan
            twin = cache.fork()
            found = layer(x[:, 17:20], cache=cache, statistics=True)
            expected = layer(x[:, 17:20], cache=twin, statistics=True, backend="reference")
        assert (found.backend, expected.backend) == ("fused", "reference")
        assert taken.call_count == 1
        assert layer.explain(3, 20).refusals == ()
        torch.testing.assert_close(found.output, expected.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            dict(found.statistics.items()), dict(expected.statistics.items()), rtol=1e-4, atol=1e-4
        )


def test_in_the_interpreter_the_decode_kernel_reads_the_latents_where_they_lie() -> None:
    in_the_interpreter(check_kernel)


# ---- refusals


def test_a_latent_cache_refuses_values_that_it_would_lose() -> None:
    layer = MultiHeadAttention(EMBED, 1)
    with (
        torch.no_grad(),
        pytest.raises(CacheError, match=r"first channels .* got separate values of shape \[1, 1, 2"),
    ):
        layer(torch.randn(1, 2, EMBED), cache=LatentCache(value_dim=5))


def test_a_latent_cache_refuses_other_sizes(x: Tensor) -> None:
    layer = make(causal=True)
    with torch.no_grad(), pytest.raises(CacheError, match="this cache has value_dim 5, got value_dim 11"):
        layer(x, cache=GrowingCache(value_dim=5))
    with torch.no_grad(), pytest.raises(CacheError, match="this cache has head_dim 16, got head_dim 17"):
        layer(x, cache=LatentCache(value_dim=RANK, head_dim=16))
    with pytest.raises(CacheError, match="got 7 and 6"):
        LatentCache(value_dim=7, head_dim=6)
    with pytest.raises(CacheError, match="got 7 and 6"):
        PreallocatedLatentCache(capacity=3, batch_size=1, value_dim=7, head_dim=6)
    with pytest.raises(CacheError, match="capacity of 3 tokens per sequence, got 4"):
        PreallocatedLatentCache(capacity=3, batch_size=1, value_dim=5, head_dim=6).append(torch.ones(1, 1, 4, 6))


def test_a_cache_holds_no_source_and_no_gradient(x: Tensor) -> None:
    layer = make()
    with pytest.raises(OptionError, match=r"for cross-attention use layer\.remember"):
        layer(x, x, cache=LatentCache(value_dim=RANK))
    with pytest.raises(CacheError, match="a cache does not support gradients"):
        layer(x, cache=LatentCache(value_dim=RANK))


def test_a_refused_form_leaves_the_cache_as_it_was(x: Tensor) -> None:
    layer, cache = make(causal=True), LatentCache(value_dim=RANK)
    generate(layer, x, cache, [LENGTH])
    with torch.no_grad(), pytest.raises(OptionError, match="got 'fast'"):
        layer(x, cache=cache, form="fast")
    assert cache.lengths == (LENGTH,) * BATCH
