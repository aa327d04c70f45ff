"""Generating through a layer with any cache, any positions and ragged batches equals one forward over everything."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead import KVCache, Mask, MultiHeadAttention, attention
from polyhead.errors import CacheError, MaskError, OptionError
from polyhead.layers.kv_cache import GrowingCache, PagedCache, PreallocatedCache, QuantizedCache, RollingCache
from polyhead.layers.positions import (
    ALiBi,
    DynamicNTKScaling,
    Learned,
    Positions,
    QuadraticRelative1D,
    Rotary,
    Sinusoidal,
    T5Bias,
)
from polyhead.layers.variants import DifferentialAttention, TalkingHeads
from tests.pairs import in_turn

BATCH, LENGTH, EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 29, 23, 6, 2, 10, 7
WINDOW = 5
DOUBLE = torch.float64

POSITIONS: dict[str, Callable[[], Positions | None]] = {
    "none": lambda: None,
    "rotary": lambda: Rotary(HEAD_DIM),
    "partial, interleaved rotary": lambda: Rotary(HEAD_DIM, rotary_dim=4, interleaved=True),
    "ALiBi": lambda: ALiBi(HEADS),
    "T5": lambda: T5Bias(HEADS, num_buckets=8, max_distance=11, bidirectional=False),
    "quadratic": lambda: QuadraticRelative1D(HEADS),
    "learned": lambda: Learned(31, EMBED),
    "sinusoidal": lambda: Sinusoidal(EMBED),
}
CACHES: dict[str, tuple[type[KVCache], dict[str, int]]] = {
    "growing": (GrowingCache, {}),
    "preallocated": (PreallocatedCache, {"capacity": 31}),
    "paged": (PagedCache, {"num_pages": 31, "page_size": 4}),
}
PIECES = {"token by token": [1] * LENGTH, "a prompt, then tokens": [17] + [1] * 12, "in chunks": [5, 1, 11, 2, 10]}


def make(**options: Any) -> MultiHeadAttention:
    sizes: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM}
    layer = MultiHeadAttention(EMBED, HEADS, **{"causal": True, "dtype": DOUBLE, **sizes, **options}).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


def new_cache(kind: str, layer: MultiHeadAttention, batch: int = BATCH) -> KVCache:
    build, options = CACHES[kind]
    return build.for_layout(layer.layout, batch_size=batch, dtype=DOUBLE, **options)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


def generate(layer: MultiHeadAttention, x: Tensor, cache: KVCache, pieces: list[int], **options: Any) -> Tensor:
    with torch.no_grad():
        blocks = x.split(pieces, 1)
        return torch.cat([layer(block, cache=cache, **options).output for block in blocks], 1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("positions", "kind", "pieces"), in_turn(POSITIONS, CACHES, PIECES))
def test_generation_through_the_layer_equals_the_full_forward(
    positions: str, kind: str, pieces: str, x: Tensor
) -> None:
    layer = make(positions=POSITIONS[positions]())
    cache = new_cache(kind, layer)
    close(generate(layer, x, cache, PIECES[pieces]), layer(x).output)
    assert cache.lengths == (LENGTH,) * BATCH


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
def test_generation_equals_the_full_forward_in_every_backend(backend: str, x: Tensor) -> None:
    layer = make(positions=ALiBi(HEADS), backend=backend)
    close(generate(layer, x, new_cache("growing", layer), PIECES["in chunks"]), layer(x).output)


def test_generation_with_every_other_option_equals_the_full_forward(x: Tensor) -> None:
    layer = make(
        positions=Rotary(HEAD_DIM), qk_norm="rms", output_gate="channel", softcap=3.0, sinks=True, window=WINDOW
    )
    gate = torch.randn(HEADS, dtype=DOUBLE)
    whole = layer(x, head_gate=gate).output
    close(generate(layer, x, new_cache("paged", layer), PIECES["in chunks"], head_gate=gate), whole)


@pytest.mark.parametrize(("positions", "pieces", "sinks"), in_turn(POSITIONS, PIECES, [0, 2]))
def test_a_window_generates_with_a_rolling_cache_of_its_size(
    positions: str, pieces: str, sinks: int, x: Tensor
) -> None:
    layer = make(positions=POSITIONS[positions](), **({} if sinks else {"window": WINDOW}))
    cache = RollingCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, window=WINDOW, sinks=sinks)
    expected = layer(x, mask=Mask.window(WINDOW, sinks=sinks)).output
    close(generate(layer, x, cache, PIECES[pieces]), expected)
    assert cache.nbytes == BATCH * KV_HEADS * (WINDOW + sinks) * (HEAD_DIM + VALUE_DIM) * 8


@pytest.mark.parametrize("rollback", [0, 2])
@pytest.mark.parametrize("kind", ["multi-head", "uneven", "talking", "differential"])
def test_weights_over_a_rolling_cache_are_in_the_order_of_the_tokens(kind: str, rollback: int, x: Tensor) -> None:
    layer: Any = {
        "multi-head": lambda: make(),
        "uneven": lambda: make(num_kv_heads=None, key_heads=(0, 1, 0, 0, 0, 1)),
        "talking": lambda: TalkingHeads(EMBED, HEADS, head_dim=4, causal=True, dtype=DOUBLE),
        "differential": lambda: DifferentialAttention(EMBED, HEADS, head_dim=4, causal=True, dtype=DOUBLE),
    }[kind]()
    cache, expected = RollingCache(window=WINDOW, rollback=rollback), layer(x, mask=Mask.window(WINDOW), weights=True)
    with torch.no_grad():
        for start, stop in ((0, 5), *((i, i + 1) for i in range(5, 17))):
            found = layer(x[:, start:stop], cache=cache, weights=True).weights
            close(found, expected.weights[:, :, start:stop, stop - found.shape[3] : stop])
    assert found.shape[3] == WINDOW + rollback
    ragged = RollingCache(window=WINDOW)
    with torch.no_grad():
        layer(x[:, :11], cache=ragged, lengths=[11, 9, 2])
        found = layer(x[:, 11:12], cache=ragged, weights=True).weights
    assert found[2, :, :, : WINDOW - 3].eq(0).all()  # three tokens, after empty slots
    close(found.sum(-1), torch.ones_like(found[..., 0]))
    assert found[2, :, :, WINDOW - 3 :].ne(0).all()


LENGTHS = [19, 5, 12]


def ragged_steps(layer: MultiHeadAttention, x: Tensor, cache: KVCache, steps: int) -> tuple[Tensor, list[Tensor]]:
    """Prompts of LENGTHS padded on the right, then `steps` tokens of each sequence; x holds each sequence from 0 on."""
    longest = max(LENGTHS)
    prompt = x[:, :longest].clone()
    for row, length in enumerate(LENGTHS):
        prompt[row, length:] = 99.0  # must not matter
    rows, ends = torch.arange(BATCH), torch.tensor(LENGTHS)
    with torch.no_grad():
        first = layer(prompt, cache=cache, lengths=LENGTHS).output
        return first, [layer(x[rows, ends + step][:, None], cache=cache).output for step in range(steps)]


@pytest.mark.parametrize("kind", [*CACHES, "rolling"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_ragged_batch_generates_as_each_sequence_would_alone(positions: str, kind: str, x: Tensor) -> None:
    layer = make(positions=POSITIONS[positions](), **({"window": WINDOW} if kind == "rolling" else {}))
    if kind == "rolling":
        cache: KVCache = RollingCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, window=WINDOW)
    else:
        cache = new_cache(kind, layer)
    first, steps = ragged_steps(layer, x, cache, 10)
    for row, length in enumerate(LENGTHS):
        alone = layer(x[row : row + 1, : length + 10]).output[0]
        close(first[row, :length], alone[:length])
        close(torch.stack([step[row, 0] for step in steps]), alone[length:])
    assert cache.lengths == tuple(length + 10 for length in LENGTHS)


def test_some_sequences_may_wait_while_others_go_on(x: Tensor) -> None:
    layer = make(positions=Rotary(HEAD_DIM))
    cache = new_cache("growing", layer)
    counts = [[3, 0, 7], [0, 0, 0], [2, 7, 1], [7, 1, 0]]
    done, outputs = [0] * BATCH, [[] for _ in range(BATCH)]
    with torch.no_grad():
        for block_counts in counts:
            block = torch.stack([x[row, at : at + 7] for row, at in enumerate(done)])
            output = layer(block, cache=cache, lengths=block_counts).output
            for row, count in enumerate(block_counts):
                outputs[row].append(output[row, :count])
                done[row] += count
    for row in range(BATCH):
        close(torch.cat(outputs[row]), layer(x[row : row + 1, : done[row]]).output[0])


@pytest.mark.parametrize("kind", [*CACHES, "rolling"])
def test_beams_are_reordered_with_their_caches(kind: str, x: Tensor) -> None:
    layer = make(positions=Rotary(HEAD_DIM), **({"window": WINDOW} if kind == "rolling" else {}))
    if kind == "rolling":
        cache: KVCache = RollingCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, window=WINDOW)
    else:
        cache = new_cache(kind, layer)
    history = x[:, :7]
    with torch.no_grad():
        layer(history, cache=cache)
        for step, order in enumerate(([2, 0, 0], [1, 1, 2], [0, 2, 1])):
            cache.reorder(order)
            token = torch.randn(BATCH, 1, EMBED, dtype=DOUBLE)
            history = torch.cat([history[order], token], 1)
            output = layer(token, cache=cache).output
            close(output[:, 0], layer(history).output[:, 7 + step])


def test_a_fork_and_a_crop_go_their_own_ways(x: Tensor) -> None:
    layer = make(positions=Rotary(HEAD_DIM))
    cache = new_cache("paged", layer)
    other = torch.randn(BATCH, 3, EMBED, dtype=DOUBLE)
    with torch.no_grad():
        layer(x[:, :11], cache=cache)
        fork = cache.fork()
        kept = layer(x[:, 11:13], cache=cache).output
        branch = layer(other, cache=fork).output
        cache.crop(7)
        again = layer(x[:, 7:11], cache=cache).output
    close(kept, layer(x[:, :13]).output[:, 11:])
    close(branch, layer(torch.cat([x[:, :11], other], 1)).output[:, 11:])
    close(again, layer(x[:, :11]).output[:, 7:])


def test_rotary_scaling_that_depends_on_the_length_sees_the_whole_sequence(x: Tensor) -> None:
    layer = make(positions=Rotary(HEAD_DIM, scaling=DynamicNTKScaling(2.0, 13)))
    cache = new_cache("growing", layer)
    with torch.no_grad():
        layer(x[:, :12], cache=cache)
        token = layer(x[:, 12:13], cache=cache).output
    close(token, layer(x[:, :13]).output[:, 12:])  # up to the trained length nothing is stretched


def test_int8_generation_stays_within_its_bound(x: Tensor) -> None:
    """Keys and values are off by at most a 254th of their token's largest number, which bounds what outputs can be."""
    layer = make()
    cache = QuantizedCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, capacity=31)
    generated = generate(layer, x, cache, PIECES["a prompt, then tokens"])
    with torch.no_grad():
        exact = layer(x).output
        split = lambda y: y.unflatten(-1, (KV_HEADS, -1)).transpose(1, 2)  # noqa: E731
        query = layer.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = split(layer.k_proj(x)), split(layer.v_proj(x))
        key_step, value_step = (t.abs().amax(-1) / 254 * (1 + 1e-6) for t in (key, value))  # [batch, kv_heads, keys]
        per_head = lambda t: t.repeat_interleave(HEADS // KV_HEADS, 1)  # noqa: E731
        # A logit moves by at most |q|_1 * step, so a weight by a factor of at most exp(2 * the largest move).
        move = (query.abs().sum(-1)[..., None] * per_head(key_step)[:, :, None]).amax(-1) / HEAD_DIM**0.5
        weights = attention(query, key, value, mask=Mask.causal(), weights=True).weights
        drift = torch.expm1(2 * move)[..., None] * weights
        bound = drift @ per_head(value).abs() + (weights + drift) @ per_head(value_step)[..., None]
        allowed = bound.transpose(1, 2).flatten(2) @ layer.out_proj.weight.abs().T
    error = (generated - exact).abs()
    assert bool((error <= allowed).all())
    assert float(error.max()) > 1e-6  # the cache was really in int8


def test_a_full_cache_says_by_how_much_and_stays_usable(x: Tensor) -> None:
    layer = make()
    cache = PreallocatedCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, capacity=13)
    with torch.no_grad():
        layer(x[:, :11], cache=cache)
        with pytest.raises(CacheError, match="capacity of 13 tokens per sequence, got 16: 3 too many"):
            layer(x[:, 11:16], cache=cache)
        close(layer(x[:, 11:13], cache=cache).output, layer(x[:, :13]).output[:, 11:])


def test_what_a_cache_cannot_be_used_for_is_refused(x: Tensor) -> None:
    layer = make()
    with pytest.raises(OptionError, match=r"for cross-attention use layer.remember\(key\)"):
        layer(x, x, cache=GrowingCache())
    with pytest.raises(OptionError, match=r"without one use mask=Mask.lengths"):
        layer(x, lengths=[1, 2, 3])
    with pytest.raises(CacheError, match="does not support gradients, got a key that requires one"):
        layer(x, cache=GrowingCache())
    with torch.no_grad(), pytest.raises(CacheError, match="has a batch size of 2, got a block of batch 3"):
        layer(x, cache=new_cache("preallocated", layer, batch=2))
    wrong = PreallocatedCache(capacity=31, batch_size=BATCH, num_kv_heads=3, head_dim=HEAD_DIM, dtype=DOUBLE)
    with torch.no_grad(), pytest.raises(CacheError, match="has num_kv_heads 3, got num_kv_heads 2"):
        layer(x, cache=wrong)


@pytest.mark.parametrize("queries", [None, [11, 4, 7]])
def test_padding_of_a_prompt_is_passed_as_lengths_and_never_cached(queries: list[int] | None, x: Tensor) -> None:
    layer, cache, lengths = make(positions=Rotary(HEAD_DIM)), GrowingCache(), [11, 4, 7]
    with torch.no_grad():
        with pytest.raises(OptionError, match=r"is passed as lengths=, got Mask\(causal & lengths of 3 sequences"):
            layer(x[:, :11], cache=cache, mask=Mask.lengths(lengths, queries=queries))
        assert cache.lengths == ()
        layer(x[:, :11], cache=cache, lengths=lengths)
        token = layer(x[:, 11:12], cache=cache).output
        for row, length in enumerate(lengths):
            alone = torch.cat([x[row : row + 1, :length], x[row : row + 1, 11:12]], 1)
            close(token[row : row + 1], layer(alone).output[:, -1:])
        with pytest.raises(OptionError, match="is passed as lengths="):  # the new token of the second sequence
            layer(x[:, 12:13], cache=cache, mask=Mask.lengths([13, 5, 9]))
        full = Mask.lengths([13, 6, 9])  # no padding among the new tokens
        close(layer(x[:, 12:13], cache=cache.fork(), mask=full).output, layer(x[:, 12:13], cache=cache).output)


def test_left_padding_may_be_hidden_by_the_mask_of_every_call(x: Tensor) -> None:
    layer, cache, lengths = make(positions=Rotary(HEAD_DIM)), GrowingCache(), [11, 4, 7]
    with torch.no_grad():
        layer(x[:, :11], cache=cache, mask=Mask.lengths(lengths, side="left"))
        token = layer(x[:, 11:12], cache=cache, mask=Mask.lengths([n + 1 for n in lengths], side="left")).output
        for row, length in enumerate(lengths):
            close(token[row : row + 1], layer(x[row : row + 1, 11 - length : 12]).output[:, -1:])


@pytest.mark.parametrize("kind", ["growing", "paged"])
@pytest.mark.parametrize(
    "hiding", ["left", "by key", "bias by key", "documents", "by pair", "bias by pair", "positions"]
)
def test_keys_that_a_mask_hid_need_a_mask_in_every_later_call(hiding: str, kind: str, x: Tensor) -> None:
    layer = make(positions=Rotary(HEAD_DIM))
    cache = GrowingCache() if kind == "growing" else PagedCache(num_pages=24, page_size=4)
    visible = torch.arange(12)[None] >= torch.tensor([0, 7, 4])[:, None]

    def mask(keys: int) -> Mask:
        by_key = visible[:, None, None, :keys]
        documents = visible[:, :keys].long()
        by_pair = by_key & torch.ones(keys, keys, dtype=torch.bool).tril()[-1 if keys == 12 else 0 :]
        places = torch.arange(keys)
        return {
            "left": lambda: Mask.lengths([keys - 0, keys - 7, keys - 4], side="left"),
            "by key": lambda: Mask.dense(by_key),
            "bias by key": lambda: Mask.bias(torch.zeros(by_key.shape, dtype=DOUBLE).masked_fill(~by_key, -torch.inf)),
            "documents": lambda: Mask.documents(documents[:, -1:] if keys == 12 else documents, documents),
            "by pair": lambda: Mask.dense(by_pair),
            "bias by pair": lambda: Mask.bias(
                torch.zeros(by_pair.shape, dtype=DOUBLE).masked_fill(~by_pair, -torch.inf)
            ),
            "positions": lambda: Mask.positions(
                places[-1:] if keys == 12 else places, torch.where(visible[:, :keys], places, -1)
            ),
        }[hiding]()

    with torch.no_grad():
        layer(x[:, :11], cache=cache, mask=mask(11))
        copies = [cache, cache.fork(), pickle.loads(pickle.dumps(cache))]
        for copied in copies:
            before = copied.lengths
            for other in (None, Mask.window(3)):
                with pytest.raises(OptionError, match="needs a mask over all keys that hides them, got"):
                    layer(x[:, 11:12], cache=copied, mask=other)
            assert copied.lengths == before
        token = layer(x[:, 11:12], cache=cache, mask=mask(12)).output
        for row, first in enumerate((0, 7, 4)):
            close(token[row : row + 1], layer(x[row : row + 1, first:12]).output[:, -1:])
        cache.reset()
        layer(x[:, :3], cache=cache, mask=Mask.dense(torch.ones(3, 3, dtype=torch.bool).tril()))
        layer(x[:, 3:4], cache=cache)


def test_a_failed_call_does_not_mark_the_cache_as_holding_masked_keys(x: Tensor) -> None:
    layer, cache = make(), GrowingCache()
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        with pytest.raises(OptionError):
            layer(x[:, 3:4], cache=cache, mask=Mask.lengths([4, 2, 3], side="left"), backend="no such backend")
        layer(x[:, 3:4], cache=cache)


def test_an_empty_batch_and_an_empty_block_pass_through_a_cache() -> None:
    layer = make(positions=Rotary(HEAD_DIM))
    with torch.no_grad():
        cache = GrowingCache()
        for length in (3, 0, 1):
            assert layer(torch.zeros(0, length, EMBED, dtype=DOUBLE), cache=cache).output.shape == (0, length, EMBED)
        cache, x = GrowingCache(), torch.randn(2, 3, EMBED, dtype=DOUBLE)
        layer(x[:, :2], cache=cache)
        assert layer(x[:, :0], cache=cache).output.shape == (2, 0, EMBED)
        close(layer(x[:, 2:], cache=cache).output, layer(x).output[:, 2:])


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_of_another_type_is_refused_before_the_cache_takes_a_token(x: Tensor, causal: bool) -> None:
    layer, cache = make(causal=causal), GrowingCache()
    for mask in (torch.ones(3, 3, dtype=torch.bool), "causal"):
        with torch.no_grad(), pytest.raises(MaskError, match=rf"must be a polyhead\.Mask, got {type(mask).__name__}"):
            layer(x[:, :3], cache=cache, mask=mask)
    assert cache.lengths == ()
