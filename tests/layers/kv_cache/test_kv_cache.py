"""What each kind of cache promises about memory, sharing, errors and precision."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyhead import Mask, MultiHeadAttention, attention
from polyhead.errors import CacheError
from polyhead.geometry import HeadLayout
from polyhead.layers.kv_cache import (
    GrowingCache,
    KVCache,
    PagedCache,
    PagePool,
    PreallocatedCache,
    QuantizedCache,
    RollingCache,
)

BATCH, HEADS, HEAD_DIM, VALUE_DIM = 3, 2, 5, 7
SIZES: dict[str, Any] = {"num_kv_heads": HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM}

KINDS: dict[str, Callable[..., KVCache]] = {
    "growing": lambda **sizes: GrowingCache(**sizes),
    "preallocated": lambda **sizes: PreallocatedCache(capacity=61, **sizes),
    "rolling": lambda **sizes: RollingCache(window=11, sinks=2, **sizes),
    "paged": lambda **sizes: PagedCache(num_pages=67, page_size=4, **sizes),
    "quantized": lambda **sizes: QuantizedCache(capacity=61, **sizes),
}


def build(kind: str, batch_size: int = BATCH, **changes: Any) -> KVCache:
    return KINDS[kind](batch_size=batch_size, **{**SIZES, **changes})


def block(num_tokens: int, batch: int = BATCH, **options: Any) -> tuple[Tensor, Tensor]:
    key = torch.randn(batch, HEADS, num_tokens, HEAD_DIM, **options)
    return key, torch.randn(batch, HEADS, num_tokens, VALUE_DIM, **options)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_within_int8_bound(actual: Tensor, exact: Tensor) -> None:
    """The bound QuantizedCache states: largest / 254, and the rounding of float32 and of the cache's dtype."""
    info = torch.finfo(exact.dtype)
    largest = exact.double().abs().amax(-1, keepdim=True)
    in_float32 = largest * 2 * torch.finfo(torch.float32).eps + 2.0**-142  # the latter where a scale is denormal
    in_dtype = largest * info.eps / 2 + info.smallest_normal * info.eps
    assert ((actual.double() - exact.double()).abs() <= largest / 254 + in_float32 + in_dtype).all()


class WrittenBytes(TorchDispatchMode):
    """Counts the bytes that operators write: what they return, views of what they were given left out."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        in_place = func._schema.is_mutable
        if func._overloadpacket in (torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_):
            self.total += args[2].nbytes  # it returns all of the tensor it writes a few values into
            return result
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (in_place or x.untyped_storage().data_ptr() not in before):
                self.total += x.nbytes
        return result


def bytes_written(append: Callable[[], Any]) -> int:
    with WrittenBytes() as counter:
        append()
    return counter.total


# ---- every kind


def test_a_new_cache_is_empty_and_uniform(kind: str) -> None:
    cache = build(kind)
    assert cache.lengths == (0,) * BATCH
    assert not cache.is_ragged
    assert cache.batch_size == BATCH


def test_what_was_appended_comes_back_in_the_cache_dtype(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        cache = build(kind, dtype=dtype)
        key, value = block(7, dtype=dtype)
        view = cache.append(key, value)
        assert view.key.dtype is dtype
        assert view.value.dtype is dtype
        if kind == "quantized":
            assert_within_int8_bound(view.key, key)
        else:
            assert torch.equal(view.key, key)


def test_uniform_sequences_need_no_mask_and_ragged_ones_do(kind: str) -> None:
    cache = build(kind)
    first = cache.append(*block(1))
    assert first.mask is None
    second = cache.append(*block(4), lengths=[4, 1, 3])
    assert second.mask is not None
    assert second.new_lengths == (4, 1, 3)
    assert cache.lengths == second.lengths == (5, 2, 4)
    assert cache.is_ragged
    assert cache.view().mask is not None
    levelled = cache.append(*block(3), lengths=torch.tensor([0, 3, 1]))
    assert cache.lengths == (5, 5, 5)
    assert not cache.is_ragged
    assert levelled.mask is not None  # the block's padding still has to be hidden


def test_padding_takes_no_room() -> None:
    cache = PreallocatedCache(capacity=5, batch_size=2, **SIZES)
    cache.append(*block(9, batch=2), lengths=[5, 2])
    cache.append(*block(7, batch=2), lengths=[0, 3])
    assert cache.lengths == (5, 5)


def test_an_empty_batch_and_an_empty_block_work(kind: str) -> None:
    cache = build(kind, batch_size=0)
    assert cache.append(*block(3, batch=0)).key.shape == (0, HEADS, 3, HEAD_DIM)
    assert cache.append(*block(2, batch=0)).value.shape == (0, HEADS, 5, VALUE_DIM)
    cache.crop(4)
    cache.reorder([])
    assert cache.fork().view().key.shape == (0, HEADS, 4, HEAD_DIM)
    cache = build(kind)
    assert cache.append(*block(0)).key.shape == (BATCH, HEADS, 0, HEAD_DIM)
    cache.append(*block(3))
    assert cache.append(*block(0)).key.shape == (BATCH, HEADS, 3, HEAD_DIM)


def test_next_positions_are_absolute_and_each_sequences_own(kind: str) -> None:
    cache = build(kind)
    assert cache.next_positions(3).tolist() == [[0, 1, 2]]
    for _ in range(3):
        cache.append(*block(7))
    assert cache.next_positions(2).tolist() == [[21, 22]]
    cache.append(*block(2), lengths=[2, 0, 1])
    assert cache.next_positions(2).tolist() == [[23, 24], [21, 22], [22, 23]]


def test_for_layout_takes_the_sizes_of_the_heads(kind: str) -> None:
    layout = HeadLayout(24, 6, num_kv_heads=HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM)
    own: dict[str, dict[str, int]] = {
        "preallocated": {"capacity": 13},
        "quantized": {"capacity": 13},
        "rolling": {"window": 13},
        "paged": {"num_pages": 13},
    }
    cache = type(build(kind)).for_layout(
        layout, batch_size=BATCH, dtype=torch.float64, device="cpu", **own.get(kind, {})
    )
    assert cache.append(*block(3, dtype=torch.float64)).value.shape == (BATCH, HEADS, 3, VALUE_DIM)
    with pytest.raises(CacheError, match=r"has dtype torch.float64, got dtype torch.float32"):
        cache.append(*block(3))


def test_reorder_may_change_the_batch_size_and_reset_restores_it(kind: str) -> None:
    cache = build(kind)
    key = cache.append(*block(5)).key.clone()
    cache.reorder([2, 2, 0, 1, 0])
    assert torch.equal(cache.view().key, key[[2, 2, 0, 1, 0]])
    with pytest.raises(CacheError, match="has a batch size of 5, got a block of batch 3"):
        cache.append(*block(1))
    assert cache.append(*block(1, batch=5)).key.shape[0] == 5
    cache.reset()
    assert cache.append(*block(2)).key.shape == (BATCH, HEADS, 2, HEAD_DIM)


def test_a_copy_has_the_same_tokens_and_its_own_memory(kind: str) -> None:
    cache = build(kind)
    cache.append(*block(5))
    before = cache.view().key.clone()
    for twin in (cache.fork(), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(twin.view().key, before)
        twin.crop(3)
        twin.append(*block(4))
        assert torch.equal(cache.view().key, before)


def test_writing_works_in_and_out_of_inference_mode(kind: str) -> None:
    with torch.inference_mode():
        cache = build(kind)
        cache.append(*block(3))
        twin = cache.fork()
    for each in (cache, twin):
        each.append(*block(2), lengths=[2, 1, 2])
        with torch.inference_mode():
            each.append(*block(1))
            each.reorder([1, 0, 2])
        assert each.append(*block(1)).lengths == (6, 7, 7)


# ---- refusals: each says the rule and what arrived, and changes nothing

WRONG_BLOCKS: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], str]] = {
    "rank": (
        lambda: (torch.zeros(3, 2, 5), torch.zeros(3, 2, 1, 7)),
        r"key must be \[batch, kv_heads.*got shape \[3, 2, 5\]",
    ),
    "batch": (lambda: block(1, batch=2), "has a batch size of 3, got a block of batch 2"),
    "heads": (lambda: (torch.zeros(3, 6, 1, 5), torch.zeros(3, 6, 1, 7)), "has num_kv_heads 2, got num_kv_heads 6"),
    "head_dim": (lambda: (torch.zeros(3, 2, 1, 6), torch.zeros(3, 2, 1, 7)), "has head_dim 5, got head_dim 6"),
    "value_dim": (lambda: (torch.zeros(3, 2, 1, 5), torch.zeros(3, 2, 1, 5)), "has value_dim 7, got value_dim 5"),
    "dtype": (lambda: block(1, dtype=torch.float16), "has dtype torch.float32, got dtype torch.float16"),
    "device": (lambda: block(1, device="meta"), "has device cpu, got device meta"),
    "key and value": (
        lambda: (torch.zeros(3, 2, 1, 5), torch.zeros(3, 2, 4, 7)),
        r"agree in batch, heads and tokens, got \[3, 2, 1\] and \[3, 2, 4\]",
    ),
    "two dtypes": (
        lambda: (torch.zeros(3, 2, 1, 5), torch.zeros(3, 2, 1, 7).half()),
        "agree in dtype and device, got torch.float32 on cpu and torch.float16 on cpu",
    ),
    "gradient": (
        lambda: block(1, requires_grad=True),
        r"does not support gradients, got a key that requires one.*no_grad",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_BLOCKS)
def test_a_block_of_another_layout_is_refused_and_leaves_no_trace(kind: str, wrong: str) -> None:
    make, words = WRONG_BLOCKS[wrong]
    cache = build(kind, dtype=torch.float32, device="cpu")
    for _ in range(2):  # before and after the first block, for the cache that takes its layout from it
        before = cache.lengths
        with pytest.raises(CacheError, match=words):
            cache.append(*make())
        assert cache.lengths == before
        cache.append(*block(2))


def test_a_tensor_with_gradient_is_taken_where_gradients_are_off(kind: str) -> None:
    cache = build(kind)
    with torch.no_grad():
        view = cache.append(*block(2, requires_grad=True))
    assert not view.key.requires_grad


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([1, 2], "one integer per sequence, got 2 for a batch of 3"),
        ([1, 4, 0], "between 0 and the block's 3 tokens, got 4 for sequence 1"),
        ([1, 2, -1], "got -1 for sequence 2"),
        ([1, 2.0, 1], "must be a list of integers"),
        (
            torch.zeros(3, dtype=torch.int64, device="meta"),
            "must be Python integers or a CPU tensor, got a tensor on meta",
        ),
    ],
)
def test_lengths_that_do_not_fit_the_block_are_refused(kind: str, lengths: Any, words: str) -> None:
    with pytest.raises(CacheError, match=words):
        build(kind).append(*block(3), lengths=lengths)


def test_crop_and_reorder_say_what_they_can_do(kind: str) -> None:
    cache = build(kind)
    cache.append(*block(5), lengths=[5, 3, 4])
    with pytest.raises(CacheError, match="sequence 1 can be cropped to between 0 and its 3 tokens, got 4"):
        cache.crop([4, 4, 4])
    with pytest.raises(CacheError, match="one length or one per sequence, got 2 for a batch of 3"):
        cache.crop([4, 2])
    with pytest.raises(CacheError, match="crop length must be at least 0, got -1"):
        cache.crop(-1)
    with pytest.raises(CacheError, match="rows 0 to 2, got 3"):
        cache.reorder([0, 3])
    with pytest.raises(CacheError, match=r"1-D, int32 or int64, got torch.float32 of shape \[3\]"):
        cache.reorder(torch.zeros(3))
    cache.crop(4)
    assert cache.lengths == (4, 3, 4)


def test_a_growing_cache_has_no_rows_to_reorder_before_its_first_block() -> None:
    with pytest.raises(CacheError, match="reorder before the first append"):
        GrowingCache().reorder([0])
    with pytest.raises(CacheError, match="layout from the first append"):
        GrowingCache().view()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PreallocatedCache(capacity=-1, batch_size=1, **SIZES), "capacity must be at least 0, got -1"),
        (lambda: PreallocatedCache(capacity=3, batch_size=1.5, **SIZES), "batch_size must be an integer, got 1.5"),
        (
            lambda: PreallocatedCache(capacity=3, batch_size=1, num_kv_heads=0, head_dim=3),
            "num_kv_heads must be at least 1",
        ),
        (lambda: PreallocatedCache(capacity=3, batch_size=1, **SIZES, dtype=torch.int8), "floating point.*torch.int8"),
        (lambda: RollingCache(window=0, batch_size=1, **SIZES), "window must be at least 1, got 0"),
        (lambda: RollingCache(window=3, sinks=-2, batch_size=1, **SIZES), "sinks must be at least 0, got -2"),
        (lambda: PagedCache(num_pages=3, page_size=0, batch_size=1, **SIZES), "page_size must be at least 1, got 0"),
    ],
)
def test_sizes_out_of_range_are_refused(make: Callable[[], KVCache], words: str) -> None:
    with pytest.raises(CacheError, match=words):
        make()


# ---- preallocated and growing


def test_a_preallocated_view_is_a_window_into_the_buffer() -> None:
    cache = PreallocatedCache(capacity=31, batch_size=BATCH, **SIZES)
    first, second = cache.append(*block(5)), cache.append(*block(1))
    assert first.key.data_ptr() == second.key.data_ptr() == cache.view().key.data_ptr()
    assert first.value.data_ptr() == second.value.data_ptr()
    assert second.key.shape == (BATCH, HEADS, 6, HEAD_DIM)


@pytest.mark.parametrize("lengths", [None, [1, 0, 1]])
def test_decoding_a_token_copies_nothing_that_grows_with_the_cache(lengths: list[int] | None) -> None:
    def step(filled: int) -> int:
        cache = PreallocatedCache(capacity=4099, batch_size=BATCH, **SIZES)
        cache.append(*block(filled), lengths=[filled, filled - 2, filled - 1] if lengths else None)
        token = block(1)
        return bytes_written(lambda: cache.append(*token, lengths=lengths))

    assert step(7) == step(4001) < 1000


@pytest.mark.parametrize("bounded", ["preallocated", "quantized"])
def test_overflow_says_by_how_much_and_changes_nothing(bounded: str) -> None:
    cache = build(bounded)
    cache.append(*block(50), lengths=[50, 40, 30])
    with pytest.raises(CacheError, match="capacity of 61 tokens per sequence, got 67: 6 too many"):
        cache.append(*block(17))
    assert cache.lengths == (50, 40, 30)
    cache.append(*block(17), lengths=[11, 17, 17])


def test_growing_copies_each_token_less_than_twice() -> None:
    cache = GrowingCache()
    token = block(1)
    size = sum(x.nbytes for x in token)
    count = 1031
    written = bytes_written(lambda: [cache.append(*token) for _ in range(count)])
    assert count <= cache.capacity < 2 * count
    # The tokens themselves, less than two copies of each to grow, and less than four to clear the new memory.
    assert written < count * size * (1 + 2 + 4)


def test_a_growing_cache_gives_its_memory_back_on_reset_and_takes_another_layout() -> None:
    cache = GrowingCache()
    cache.append(*block(19))
    assert cache.nbytes == BATCH * HEADS * 19 * (HEAD_DIM + VALUE_DIM) * 4
    cache.reset()
    assert cache.nbytes == 0
    cache.append(torch.zeros(2, 3, 1, 11), torch.zeros(2, 3, 1, 11))
    assert cache.lengths == (1, 1)


def test_a_growing_cache_holds_to_what_its_constructor_was_told() -> None:
    with pytest.raises(CacheError, match="has head_dim 11, got head_dim 5"):
        GrowingCache(head_dim=11).append(*block(1))
    with pytest.raises(CacheError, match="has a batch size of 2, got a block of batch 3"):
        GrowingCache(batch_size=2).append(*block(1))


# ---- rolling


def test_a_rolling_cache_never_needs_more_memory() -> None:
    cache = RollingCache(window=7, sinks=3, rollback=2, batch_size=BATCH, **SIZES)
    assert cache.nbytes == BATCH * HEADS * 12 * (HEAD_DIM + VALUE_DIM) * 4
    before = cache.nbytes
    for _ in range(29):
        assert cache.append(*block(1)).key.shape[2] <= 12
    view = cache.append(*block(13))
    assert view.key.shape[2] == 12 + 13
    assert cache.lengths == (42,) * BATCH
    assert cache.nbytes == before


def test_decoding_with_a_turned_ring_writes_one_token() -> None:
    cache = RollingCache(window=4001, batch_size=BATCH, **SIZES)
    cache.append(*block(4007))
    token = block(1)
    buffer = cache.view().key.data_ptr()
    assert cache.append(*token).key.data_ptr() == buffer
    positions_only = 8 * 4001 * 8  # a few int64 vectors over the slots, none of them times heads and dims
    assert bytes_written(lambda: cache.append(*token)) < positions_only < cache.nbytes


def test_a_rolling_cache_goes_back_as_far_as_it_was_built_to() -> None:
    for rollback in (0, 3):
        cache = RollingCache(window=5, sinks=2, rollback=rollback, batch_size=1, **SIZES)
        cache.append(*block(31, batch=1))
        with pytest.raises(CacheError, match=rf"cropped to {30 - rollback} tokens or its first 2, got {29 - rollback}"):
            cache.crop(29 - rollback)
        cache.crop(30 - rollback)
        assert cache.lengths == (30 - rollback,)
        cache.append(*block(1, batch=1))  # which brings no dropped token back
        with pytest.raises(CacheError, match=f"got {29 - rollback}; build it with rollback at least"):
            cache.crop(29 - rollback)
        cache.crop(2)
        cache.append(*block(4, batch=1))
        assert cache.lengths == (6,)


def test_a_reordered_rolling_cache_knows_what_each_sequence_has_dropped() -> None:
    key, value = block(31, batch=2)
    views = []
    for order in ([0, 1], [1, 0]):
        cache = RollingCache(window=5, sinks=2, rollback=3, batch_size=2, **SIZES)
        cache.append(key[order], value[order], lengths=[(31, 4)[row] for row in order])
        cache.reorder(order)
        torch.manual_seed(5)
        views.append(cache.append(*block(1, batch=2)))
    query = torch.randn_like(key[:, :, :1])
    one, other = (attention(query, x.key, x.value, mask=x.mask, weights=True) for x in views)
    assert (one.weights > 0).sum(-1).unique().tolist() == [5, 7]  # all five tokens; the window and two first ones
    torch.testing.assert_close(other.output, one.output)


# ---- paged


def paged(batch_size: int = 1, num_pages: int = 11, page_size: int = 4) -> PagedCache:
    return PagedCache(num_pages=num_pages, page_size=page_size, batch_size=batch_size, **SIZES)


def test_a_fork_shares_every_page_and_copies_only_the_one_it_writes_to() -> None:
    cache = paged()
    cache.append(*block(10, batch=1))  # two full pages and a half
    twin = cache.fork()
    assert cache.pool is twin.pool
    assert cache.pool.num_free == 11 - 3
    assert torch.equal(cache.block_tables, twin.block_tables)
    twin.append(*block(1, batch=1))
    assert cache.pool.num_free == 11 - 4
    assert twin.block_tables[0, :2].tolist() == cache.block_tables[0, :2].tolist()
    assert twin.block_tables[0, 2] != cache.block_tables[0, 2]
    cache.append(*block(1, batch=1))  # nobody else holds its page any more
    assert cache.pool.num_free == 11 - 4


def test_a_fork_at_a_page_boundary_copies_nothing() -> None:
    cache = paged()
    cache.append(*block(8, batch=1))
    twin = cache.fork()
    twin.append(*block(1, batch=1))
    assert cache.pool.num_free == 11 - 3


def test_beams_are_reordered_without_copying_a_page() -> None:
    cache = paged(batch_size=3)
    cache.append(*block(6))
    pages = cache.block_tables.clone()
    before = cache.view().key.clone()
    assert bytes_written(lambda: cache.reorder([1, 1, 2])) <= 3 * 8
    assert torch.equal(cache.block_tables, pages[[1, 1, 2]])
    assert torch.equal(cache.view().key, before[[1, 1, 2]])
    assert cache.pool.num_free == 11 - 4
    cache.append(*block(1))  # rows 0 and 1 part ways: one of them copies the page they share
    assert cache.pool.num_free == 11 - 5


def test_the_last_user_of_a_shared_page_writes_in_place() -> None:
    cache = paged(num_pages=4)
    cache.append(*block(6, batch=1))
    cache.reorder([0, 0, 0])
    cache.append(*block(1))  # three rows share a page and two are free: only two may copy it
    assert cache.pool.num_free == 0
    assert cache.block_tables[:, 1].unique().numel() == 3


def test_sequences_branch_from_one_prefix() -> None:
    prefix = paged(batch_size=2)
    key = prefix.append(*block(9, batch=2)).key.clone()
    answers = prefix.branch(5, row=1, length=6)
    assert answers.lengths == (6,) * 5
    assert answers.pool.num_free == 11 - 6
    assert torch.equal(answers.view().key, key[1:, :, :6].expand(5, -1, -1, -1))
    with pytest.raises(CacheError, match="0 to 9 tokens of sequence 1, got 10"):
        prefix.branch(2, row=1, length=10)
    with pytest.raises(CacheError, match="0 to 1, got 2"):
        prefix.branch(2, row=2)
    answers.append(*block(1, batch=5))
    assert answers.pool.num_free == 0
    assert torch.equal(prefix.view().key, key)


def test_a_pool_that_runs_out_says_how_many_pages_are_missing_and_changes_nothing() -> None:
    cache = paged(batch_size=2)
    cache.append(*block(10, batch=2))
    twin = cache.fork()
    before = twin.view().key.clone()
    with pytest.raises(CacheError, match=r"needs 10 more pages of 4 tokens, got a pool of 11 with 5 free: 5 missing"):
        twin.append(*block(18, batch=2))
    assert twin.lengths == (10, 10)
    assert cache.pool.num_free == 5
    assert torch.equal(twin.view().key, before)
    cache.reset()
    assert twin.append(*block(8, batch=2)).lengths == (18, 18)


def test_pages_go_back_when_a_cache_is_reset_cropped_or_forgotten() -> None:
    cache = paged()
    cache.append(*block(10, batch=1))
    cache.crop(5)
    assert cache.pool.num_free == 11 - 2
    twin = cache.fork()
    twin.append(*block(20, batch=1))
    assert cache.pool.num_free == 11 - 2 - 6
    del twin
    gc.collect()
    assert cache.pool.num_free == 11 - 2
    cache.reset()
    assert cache.pool.num_free == 11
    assert cache.nbytes == 0


def test_block_tables_and_pool_are_all_a_kernel_needs() -> None:
    cache = paged(batch_size=3)
    cache.append(*block(9), lengths=[9, 2, 5])
    view, tables = cache.view(), cache.block_tables
    assert tables.dtype is torch.int32
    assert tables.shape == (3, 3)
    assert tables[1, 1:].tolist() == [0, 0]
    for row, length in enumerate(cache.lengths):
        for position in range(length):
            page, place = int(tables[row, position // 4]), position % 4
            assert torch.equal(cache.pool.keys[page, place], view.key[row, :, position])
            assert torch.equal(cache.pool.values[page, place], view.value[row, :, position])


def test_caches_of_different_batches_live_on_one_pool() -> None:
    first = paged(batch_size=2)
    second = PagedCache.on_pool(first.pool, batch_size=3)
    first.append(*block(3, batch=2))
    key = second.append(*block(5)).key.clone()
    assert first.pool.num_free == 11 - 2 - 6
    first.append(*block(1, batch=2))
    assert torch.equal(second.view().key, key)
    assert second.nbytes == 6 * (first.pool.nbytes // 11)
    assert isinstance(second.pool, PagePool)


# ---- int8


@settings(max_examples=60)
@given(
    exponent=st.integers(-44, 37),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_int8_is_within_its_stated_bound(exponent: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(BATCH, HEADS, 13, HEAD_DIM, generator=generator, dtype=torch.float64)
    if dtype is torch.float16:
        exponent = max(min(exponent, 4), -7)
    key = (key * 10.0**exponent).to(dtype)
    cache = QuantizedCache(capacity=13, batch_size=BATCH, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=dtype)
    view = cache.append(key, key)
    assert_within_int8_bound(view.key, key)


def test_int8_takes_the_memory_it_says() -> None:
    cache = QuantizedCache(capacity=19, batch_size=BATCH, **SIZES)
    assert cache.nbytes == BATCH * HEADS * 19 * (HEAD_DIM + 4 + VALUE_DIM + 4)


def test_int8_keeps_zeros_exact() -> None:
    cache = QuantizedCache(capacity=19, batch_size=BATCH, **SIZES)
    key, value = block(3)
    assert not cache.append(key * 0, value * 0).key.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_int8_keeps_a_broken_token_loud_and_its_neighbours_whole(bad: float) -> None:
    cache = QuantizedCache(capacity=19, batch_size=BATCH, **SIZES)
    key, value = block(5)
    clean = cache.fork().append(key, value)
    key[1, 0, 3, 2] = bad
    view = cache.append(key, value)
    assert view.key[1, 0, 3].isnan().all()
    broken = torch.zeros_like(key, dtype=torch.bool)
    broken[1, 0, 3] = True
    assert torch.equal(view.key[~broken], clean.key[~broken])
    assert torch.equal(view.value, clean.value)


@torch.no_grad()
def test_a_rolling_cache_refuses_a_mask_with_more_first_keys_than_it_keeps() -> None:
    layer, x = MultiHeadAttention(16, 2, causal=True).eval(), torch.randn(1, 12, 16)
    mask = Mask.window(4, sinks=2)
    with pytest.raises(CacheError, match="as its sinks, 1, got a mask with 2; build the cache with sinks=2"):
        layer(x, cache=RollingCache(window=4, sinks=1), mask=mask)
    cache = RollingCache(window=4, sinks=2)
    steps = [layer(token, cache=cache, mask=mask).output for token in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x, mask=mask).output)


MASKS_BY_KEY = {
    "dense": Mask.dense(torch.ones(2, 1, 1, 4, dtype=torch.bool)),
    "bias": Mask.bias(torch.full((1, 4), 0.5)),
    "padding on the left": Mask.lengths([3, 2], side="left"),
    "documents": Mask.documents(torch.ones(1, dtype=torch.int64), torch.ones(4, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", MASKS_BY_KEY)
@torch.no_grad()
def test_a_rolling_cache_out_of_order_refuses_a_mask_by_key(name: str) -> None:
    layer, x = MultiHeadAttention(16, 2, causal=True).eval(), torch.randn(2, 7, 16)
    cache = RollingCache(window=4)
    layer(x[:, :3], cache=cache)
    layer(x[:, 3:4], cache=cache, mask=MASKS_BY_KEY[name])  # all tokens are still there, in order
    cache.holds_masked_keys = False
    with pytest.raises(CacheError, match="a mask can only be causal or a window"):
        layer(x[:, 4:5], cache=cache, mask=MASKS_BY_KEY[name])
    after = [layer(token, cache=cache).output for token in x[:, 4:].split(1, 1)]
    torch.testing.assert_close(torch.cat(after, 1), layer(x, mask=Mask.window(4)).output[:, 4:])


@torch.no_grad()
def test_a_cache_with_tokens_of_one_layer_refuses_another() -> None:
    first, second = (MultiHeadAttention(16, 2, causal=True).eval() for _ in range(2))
    x, cache = torch.randn(2, 5, 16), GrowingCache()
    expected = first(x).output
    hidden = first(x[:, :3], cache=cache).output
    with pytest.raises(CacheError, match="a cache that another MultiHeadAttention has filled; build a cache for each"):
        second(hidden, cache=cache)
    torch.testing.assert_close(first(x[:, 3:4], cache=cache).output, expected[:, 3:4])
    copied = copy.deepcopy(first)
    torch.testing.assert_close(copied(x[:, 4:], cache=cache.fork()).output, expected[:, 4:])
    for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        torch.testing.assert_close(copied(x[:, 4:], cache=other).output, expected[:, 4:])
    del first  # a layer that was replaced
    gc.collect()
    torch.testing.assert_close(copied(x[:, 4:], cache=cache).output, expected[:, 4:])
    cache.reset()
    assert second(x, cache=cache).output.shape == x.shape


@pytest.mark.parametrize("in_call", [False, True])
def test_a_rolling_cache_refuses_a_mask_that_sees_further(in_call: bool) -> None:
    wide = Mask.window(9)
    layer = MultiHeadAttention(16, 2, causal=True, window=None if in_call else 9).eval()
    x = torch.randn(1, 12, 16)
    for window, fits in ((8, False), (9, True)):
        cache = RollingCache(window=window)
        with torch.no_grad():
            if fits:
                layer(x, cache=cache, mask=wide if in_call else None)
                continue
            with pytest.raises(
                CacheError, match="a rolling cache keeps the keys of its own window, 8, got a mask with a"
            ):
                layer(x, cache=cache, mask=wide if in_call else None)
        assert cache.lengths == ()
