"""Generating with any cache, in whatever pieces, equals one forward over the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.layers.kv_cache import (
    GrowingCache,
    KVCache,
    PagedCache,
    PreallocatedCache,
    QuantizedCache,
    RollingCache,
)
from polyhead.masks import Mask
from polyhead.ops.attention import attention
from tests.waiting import waiting_is_an_error

BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM, VALUE_DIM = 3, 6, 2, 29, 5, 7
WINDOW, SINKS = 11, 2
SIZES: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "dtype": torch.float64}

EXACT: dict[str, Callable[[int], KVCache]] = {
    "growing": lambda batch: GrowingCache(),
    "preallocated": lambda batch: PreallocatedCache(capacity=37, batch_size=batch, **SIZES),
    "paged": lambda batch: PagedCache(num_pages=37, page_size=4, batch_size=batch, **SIZES),
}
ROLLING: dict[str, Callable[[int], KVCache]] = {
    "rolling": lambda batch: RollingCache(window=WINDOW, sinks=SINKS, batch_size=batch, **SIZES),
    "rolling that goes back": lambda batch: RollingCache(
        window=WINDOW, sinks=SINKS, rollback=4, batch_size=batch, **SIZES
    ),
}
SHAPES = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))  # of query, key and value
PIECES = {"token by token": [1] * TOKENS, "in chunks": [5, 1, 1, 7, 2, 13], "prompt, then tokens": [19] + [1] * 10}


def masks() -> dict[str, Mask]:
    slopes = torch.tensor([0.5**h for h in range(HEADS)], dtype=torch.float64)
    table = slopes[:, None] * torch.arange(-40, 1, dtype=torch.float64)
    return {
        "causal": Mask.causal(),
        "causal and window": Mask.causal() & Mask.window(7),
        "window with sinks": Mask.window(5, sinks=2),
        "ALiBi": Mask.causal() & Mask.relative(table, zero=40),
    }


@dataclass
class Sample:
    query: Tensor
    key: Tensor
    value: Tensor

    def piece(self, start: int, stop: int) -> Sample:
        return Sample(self.query[:, :, start:stop], self.key[:, :, start:stop], self.value[:, :, start:stop])

    def forward(self, mask: Mask | None) -> Tensor:
        return attention(self.query, self.key, self.value, mask=mask, backend="reference").output


@pytest.fixture
def sample() -> Sample:
    double: Any = {"dtype": torch.float64}
    return Sample(
        torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM, **double),
        torch.randn(BATCH, KV_HEADS, TOKENS, HEAD_DIM, **double),
        torch.randn(BATCH, KV_HEADS, TOKENS, VALUE_DIM, **double),
    )


def step(
    cache: KVCache, piece: Sample, mask: Mask | None, backend: str, lengths: Sequence[int] | None = None
) -> Tensor:
    view = cache.append(piece.key, piece.value, lengths=lengths)
    return attention(piece.query, view.key, view.value, mask=view.masked(mask), backend=backend).output


def generate(cache: KVCache, sample: Sample, pieces: Sequence[int], mask: Mask | None, backend: str = "auto") -> Tensor:
    outputs, start = [], 0
    for size in pieces:
        outputs.append(step(cache, sample.piece(start, start + size), mask, backend))
        start += size
    return torch.cat(outputs, dim=2)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "auto"])
@pytest.mark.parametrize("mask", list(masks()))
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("kind", EXACT)
def test_generation_equals_the_full_forward(kind: str, pieces: str, mask: str, backend: str, sample: Sample) -> None:
    actual = generate(EXACT[kind](BATCH), sample, PIECES[pieces], masks()[mask], backend)
    torch.testing.assert_close(actual, sample.forward(masks()[mask]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "auto"])
@pytest.mark.parametrize("mask", [*masks(), "none"])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("kind", ROLLING)
def test_a_rolling_cache_equals_the_full_forward_with_its_window(
    kind: str, pieces: str, mask: str, backend: str, sample: Sample
) -> None:
    requested = masks().get(mask)
    window = Mask.window(WINDOW, sinks=SINKS)
    actual = generate(ROLLING[kind](BATCH), sample, PIECES[pieces], requested, backend)
    expected = sample.forward(window if requested is None else requested & window)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


RAGGED_PIECES = [(7, [7, 2, 5]), (1, [1, 1, 1]), (1, [0, 1, 1]), (4, [1, 4, 0]), (13, [13, 11, 6]), (3, [0, 2, 3])]


@pytest.mark.parametrize("mask", list(masks()))
@pytest.mark.parametrize("kind", [*EXACT, *ROLLING])
def test_a_ragged_batch_equals_each_sequence_alone(kind: str, mask: str, sample: Sample) -> None:
    chosen = masks()[mask]
    cache = {**EXACT, **ROLLING}[kind](BATCH)
    outputs: list[list[Tensor]] = [[] for _ in range(BATCH)]
    for size, lengths in RAGGED_PIECES:
        starts = cache.lengths or (0,) * BATCH
        piece = Sample(*(torch.full((BATCH, h, size, d), torch.nan, dtype=torch.float64) for h, d in SHAPES))
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            real = sample.piece(start, start + length)
            for padded, tokens in ((piece.query, real.query), (piece.key, real.key), (piece.value, real.value)):
                padded[row, :, :length] = tokens[row]
        output = step(cache, piece, chosen, "reference", lengths)
        for row, length in enumerate(lengths):
            outputs[row].append(output[row, :, :length])
            assert not output[row, :, length:].any()  # padding attends to nothing, and its NaN stays where it is
    if kind in ROLLING:
        chosen = chosen & Mask.window(WINDOW, sinks=SINKS)
    expected = sample.forward(chosen)
    for row, parts in enumerate(outputs):
        actual = torch.cat(parts, dim=1)
        assert actual.shape[1] == cache.lengths[row]
        torch.testing.assert_close(actual, expected[row, :, : actual.shape[1]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [*EXACT, *ROLLING])
def test_a_sequence_that_has_ended_attends_to_nothing(kind: str, sample: Sample) -> None:
    cache = {**EXACT, **ROLLING}[kind](BATCH)
    step(cache, sample.piece(0, 19), None, "reference", [19, 17, 18])
    for start in (19, 20):
        output = step(cache, sample.piece(start, start + 1), None, "reference", [1, 0, 1])
        assert not output[1].any()
        assert output[[0, 2]].all()


@pytest.mark.parametrize("kind", [*EXACT, *ROLLING])
def test_rolling_back_a_rejected_draft_leaves_generation_as_it_was(kind: str, sample: Sample) -> None:
    cache = {**EXACT, **ROLLING}[kind](BATCH)
    drafts = 1 if kind == "rolling" else 4
    outputs = [step(cache, sample.piece(0, 17), Mask.causal(), "auto")]
    for at in range(17, TOKENS):
        noise = Sample(*(torch.randn(BATCH, h, drafts, d, dtype=torch.float64) for h, d in SHAPES))
        step(cache, noise, Mask.causal(), "auto")
        cache.crop(at)
        outputs.append(step(cache, sample.piece(at, at + 1), Mask.causal(), "auto"))
    mask = Mask.window(WINDOW, sinks=SINKS) if kind in ROLLING else Mask.causal()
    torch.testing.assert_close(torch.cat(outputs, dim=2), sample.forward(mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ROLLING)
def test_a_rolling_cache_taken_back_to_its_sinks_starts_over(kind: str, sample: Sample) -> None:
    cache = ROLLING[kind](BATCH)
    step(cache, sample, None, "auto")
    cache.crop(0)
    actual = generate(cache, sample, [1, 7, 1, 20], None)
    expected = sample.forward(Mask.window(WINDOW, sinks=SINKS))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [*EXACT, *ROLLING])
def test_beams_that_swap_places_continue_their_own_sequence(kind: str, sample: Sample) -> None:
    cache = {**EXACT, **ROLLING}[kind](BATCH)
    index = [2, 0, 0]
    step(cache, sample.piece(0, 17), Mask.causal(), "auto")
    cache.reorder(torch.tensor(index))
    swapped = Sample(sample.query[index], sample.key[index], sample.value[index])
    actual = step(cache, swapped.piece(17, TOKENS), Mask.causal(), "auto")
    mask = Mask.window(WINDOW, sinks=SINKS) if kind in ROLLING else Mask.causal()
    torch.testing.assert_close(actual, swapped.forward(mask)[:, :, 17:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [*EXACT, *ROLLING])
def test_cached_keys_serve_cross_attention(kind: str, sample: Sample) -> None:
    cache = {**EXACT, **ROLLING}[kind](BATCH)
    lengths = [11, 7, 3]
    memory = sample.piece(0, 11)
    cache.append(memory.key, memory.value, lengths=lengths)
    for queries in (1, 11, 13):  # as many queries as keys is no self-attention here
        asking = sample.query[:, :, :queries]
        view = cache.view()
        actual = attention(asking, view.key, view.value, mask=view.mask, backend="reference").output
        for row, length in enumerate(lengths):
            alone = memory.piece(0, length)
            one = slice(row, row + 1)
            expected = attention(asking[one], alone.key[one], alone.value[one], backend="reference").output
            torch.testing.assert_close(actual[one], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("mask", list(masks()))
def test_int8_generation_is_within_the_bound_that_follows_from_the_caches(
    pieces: str, mask: str, sample: Sample
) -> None:
    """A logit moves by at most d = scale * sum|q| * largest|k| / 254, each weight by a factor within exp(+-2d)."""
    cache = QuantizedCache(capacity=TOKENS, batch_size=BATCH, **SIZES)
    chosen = masks()[mask]
    actual = generate(cache, sample, PIECES[pieces], chosen, "reference")
    weights = attention(sample.query, sample.key, sample.value, mask=chosen, backend="reference", weights=True).weights
    assert weights is not None
    group = HEADS // KV_HEADS
    slack = 1 + 2**-20  # float32 rounding of the scales
    key_error = sample.key.abs().amax((2, 3)) / 254 * slack  # [batch, kv_heads]
    value_error = sample.value.abs().amax((2, 3)) / 254 * slack
    moved = HEAD_DIM**-0.5 * sample.query.abs().sum(-1) * key_error.repeat_interleave(group, 1)[..., None]
    absolute = weights @ sample.value.abs().repeat_interleave(group, 1)  # [batch, heads, queries, value_dim]
    factor = torch.exp(2 * moved)[..., None]
    bound = (factor - 1) * absolute + value_error.repeat_interleave(group, 1)[..., None, None] * slack
    error = (actual - sample.forward(chosen)).abs()
    assert (error <= bound).all()
    assert error.max() > 0  # it was int8 that answered


@pytest.mark.slow
# The other two pairs: tests/layers/multi_head/test_multi_head_programs.py and tests/layers/test_decode.py.
@pytest.mark.parametrize(("kind", "lengths"), [("preallocated", [5, 3, 4]), ("quantized", None)])
def test_one_compiled_graph_decodes_every_further_token(kind: str, lengths: list[int] | None, sample: Sample) -> None:
    sizes: dict[str, Any] = {"capacity": 37, "batch_size": BATCH, **SIZES}
    build: Any = {"preallocated": PreallocatedCache, "quantized": QuantizedCache}[kind]
    eager, compiled = build(**sizes), build(**sizes)
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled_step = torch.compile(step, backend=count, fullgraph=True)
    for cache in (eager, compiled):
        step(cache, sample.piece(0, 5), Mask.causal(), "reference", lengths)
    for at in range(5, 13):
        piece = sample.piece(at, at + 1)
        actual = compiled_step(compiled, piece, Mask.causal(), "reference")
        torch.testing.assert_close(actual, step(eager, piece, Mask.causal(), "reference"), rtol=1e-12, atol=1e-12)
        assert compiled.lengths == eager.lengths
    assert len(graphs) <= 2  # one for the first length it meets, one for all the others


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "ragged"])
@pytest.mark.parametrize("kind", [*EXACT, *ROLLING, "quantized"])
def test_no_append_waits_for_the_device(kind: str, ragged: bool, sample: Sample) -> None:
    on_device: dict[str, Any] = {**SIZES, "device": "cuda", "batch_size": BATCH}
    builders: dict[str, Callable[[], KVCache]] = {
        "growing": lambda: GrowingCache(),
        "preallocated": lambda: PreallocatedCache(capacity=37, **on_device),
        "quantized": lambda: QuantizedCache(capacity=37, **on_device),
        "paged": lambda: PagedCache(num_pages=37, page_size=4, **on_device),
        "rolling": lambda: RollingCache(window=WINDOW, sinks=SINKS, **on_device),
        "rolling that goes back": lambda: RollingCache(window=WINDOW, sinks=SINKS, rollback=4, **on_device),
    }
    cache = builders[kind]()
    there = Sample(sample.query.cuda(), sample.key.cuda(), sample.value.cuda())
    index = torch.tensor([2, 0, 1], device="cuda")
    with waiting_is_an_error():
        for start, stop in [(0, 7), (7, 8), (8, 13), (13, 14), (14, 15), (15, 19)]:
            piece = there.piece(start, stop)
            view = cache.append(piece.key, piece.value, lengths=[stop - start, 1, 1] if ragged else None)
            assert view.key.is_cuda
            cache.next_positions(3)
            cache.view()
        cache.crop([length - 1 for length in cache.lengths])
        cache.reorder([2, 0, 1] if ragged or kind == "paged" else index)
        cache.fork().append(piece.key[:, :, :1], piece.value[:, :, :1])
