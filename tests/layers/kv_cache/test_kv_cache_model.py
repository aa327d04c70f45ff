"""Every cache against a plain list of tokens, through random appends, crops, reorders, forks, resets and copies."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

from polyhead.errors import CacheError
from polyhead.layers.kv_cache import (
    CacheView,
    GrowingCache,
    KVCache,
    PagedCache,
    PreallocatedCache,
    QuantizedCache,
    RollingCache,
)
from polyhead.masks import Mask
from polyhead.ops.common.visibility import resolve

HEADS, HEAD_DIM, VALUE_DIM = 2, 5, 7
CAPACITY, WINDOW, SINKS, ROLLBACK, PAGES, PAGE_SIZE = 23, 5, 2, 3, 29, 3
PADDING_ID = 99_99


def block_of(ids: list[list[int]], width: int, num_tokens: int) -> Tensor:
    """Tokens as [batch, heads, tokens, width] small integers under a largest value of 127, which int8 holds exactly."""
    block = torch.zeros(len(ids), HEADS, num_tokens, width)
    for row, tokens in enumerate(ids):
        for place in range(num_tokens):
            token = tokens[place] if place < len(tokens) else PADDING_ID
            block[row, :, place, :3] = torch.tensor([127.0, token // 100, token % 100])
            block[row, :, place, 3] = torch.arange(HEADS).float()
            block[row, :, place, 4] = width
    return block


def ids_of(view: CacheView) -> list[list[int]]:
    """The token in each slot, having checked that every head of key and value holds that token."""
    tokens = (view.key[:, 0, :, 1] * 100 + view.key[:, 0, :, 2]).long().tolist()
    return [list(row) for row in tokens]


@dataclass
class Sequence:
    """One sequence as the plain model sees it: its tokens, and which of them a rolling cache still has."""

    tokens: list[int] = field(default_factory=list)
    stored: set[int] = field(default_factory=set)


@dataclass
class Twin:
    """A cache and the lists it must agree with."""

    cache: KVCache
    model: list[Sequence]
    built_batch: int


class CacheMachine(RuleBasedStateMachine):
    rollback = 0

    def build(self, batch: int) -> KVCache:
        raise NotImplementedError

    @initialize(batch=st.sampled_from([0, 1, 2, 3, 3]))
    def start(self, batch: int) -> None:
        self.next_id = 0
        self.twins = [Twin(self.build(batch), [Sequence() for _ in range(batch)], batch)]

    def pick(self, choice: int) -> Twin:
        return self.twins[choice % len(self.twins)]

    # ---- what the model expects

    def visible(self, sequence: Sequence, position: int) -> list[int]:
        return sequence.tokens[: position + 1]

    def may_crop(self, sequence: Sequence, length: int) -> bool:
        return True

    def keep(self, sequence: Sequence) -> None:
        sequence.stored = set(range(len(sequence.tokens)))

    def expects_overflow(self, twin: Twin, counts: list[int], num_tokens: int) -> bool:
        return False

    # ---- rules

    @rule(choice=st.integers(0, 6), num_tokens=st.integers(0, 7), data=st.data())
    def append(self, choice: int, num_tokens: int, data: st.DataObject) -> None:
        twin = self.pick(choice)
        batch = len(twin.model)
        if data.draw(st.booleans(), label="ragged"):
            counts = data.draw(st.lists(st.integers(0, num_tokens), min_size=batch, max_size=batch))
            lengths = counts
        else:
            counts, lengths = [num_tokens] * batch, None
        new = [list(range(self.next_id + 10 * row, self.next_id + 10 * row + n)) for row, n in enumerate(counts)]
        key, value = block_of(new, HEAD_DIM, num_tokens), block_of(new, VALUE_DIM, num_tokens)
        if self.expects_overflow(twin, counts, num_tokens):
            with pytest.raises(CacheError, match=r"too many|missing"):
                twin.cache.append(key, value, lengths=lengths)
            return
        self.next_id = (self.next_id + 10 * max(batch, 1)) % 9000
        view = twin.cache.append(key, value, lengths=lengths)
        starts = [len(sequence.tokens) for sequence in twin.model]
        for sequence, tokens in zip(twin.model, new, strict=True):
            sequence.tokens = sequence.tokens + tokens
        self.check_append(twin, view, starts, counts, num_tokens)
        for sequence in twin.model:
            self.keep(sequence)

    def check_append(self, twin: Twin, view: CacheView, starts: list[int], counts: list[int], num_tokens: int) -> None:
        """Each new query sees, through the view's mask, exactly the tokens that stand before it, and itself."""
        assert view.new_lengths == tuple(counts)
        keys = view.key.shape[2]
        held = ids_of(view)
        mask = view.masked(Mask.causal())
        sight = resolve(mask, batch=len(counts), heads=HEADS, queries=num_tokens, keys=keys, device=torch.device("cpu"))
        allowed = None if sight is None else sight.allowed_tile((0, num_tokens), (0, keys))
        if allowed is None:
            allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        allowed = allowed.expand(len(counts), -1, num_tokens, keys)[:, 0]
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for place in range(num_tokens):
                seen = [held[row][slot] for slot in allowed[row, place].nonzero().flatten().tolist()]
                expected = self.visible(twin.model[row], start + place) if place < count else []
                assert sorted(seen) == sorted(expected)

    @rule(choice=st.integers(0, 6), length=st.integers(0, SINKS) | st.integers(0, 30))
    def crop_all(self, choice: int, length: int) -> None:
        twin = self.pick(choice)
        self.crop_to(twin, length, [min(length, len(sequence.tokens)) for sequence in twin.model])

    @rule(choice=st.integers(0, 6), back=st.lists(st.integers(0, 4), min_size=8, max_size=8))
    def crop_each(self, choice: int, back: list[int]) -> None:
        twin = self.pick(choice)
        if twin.cache.batch_size != len(twin.model):
            return  # a growing cache knows no sequences before its first block
        kept = [max(len(sequence.tokens) - n, 0) for sequence, n in zip(twin.model, back, strict=False)]
        self.crop_to(twin, kept, kept)

    def crop_to(self, twin: Twin, argument: int | list[int], kept: list[int]) -> None:
        if not all(self.may_crop(sequence, length) for sequence, length in zip(twin.model, kept, strict=True)):
            with pytest.raises(CacheError, match="can be cropped to"):
                twin.cache.crop(argument)
            return
        twin.cache.crop(argument)
        for sequence, length in zip(twin.model, kept, strict=True):
            sequence.tokens = sequence.tokens[:length]
            sequence.stored = {position for position in sequence.stored if position < length}

    @rule(choice=st.integers(0, 6), index=st.lists(st.integers(0, 20), max_size=5), as_tensor=st.booleans())
    def reorder(self, choice: int, index: list[int], as_tensor: bool) -> None:
        twin = self.pick(choice)
        if isinstance(twin.cache, GrowingCache) and twin.cache.capacity == 0:
            return
        index = [row % len(twin.model) for row in index] if twin.model else []
        twin.cache.reorder(torch.tensor(index, dtype=torch.int64) if as_tensor else index)
        twin.model = [copy.deepcopy(twin.model[row]) for row in index]

    @rule(choice=st.integers(0, 6))
    def fork(self, choice: int) -> None:
        twin = self.pick(choice)
        if len(self.twins) < 3:
            self.twins.append(Twin(twin.cache.fork(), copy.deepcopy(twin.model), twin.built_batch))

    @rule(choice=st.integers(0, 6))
    def drop(self, choice: int) -> None:
        if len(self.twins) > 1:
            del self.twins[choice % len(self.twins)]

    @rule(choice=st.integers(0, 6), by_pickle=st.booleans())
    def replace_by_a_copy(self, choice: int, by_pickle: bool) -> None:
        twin = self.pick(choice)
        twin.cache = pickle.loads(pickle.dumps(twin.cache)) if by_pickle else copy.deepcopy(twin.cache)

    @rule(choice=st.integers(0, 6))
    def reset(self, choice: int) -> None:
        twin = self.pick(choice)
        twin.cache.reset()
        twin.model = [Sequence() for _ in range(twin.built_batch)]

    # ---- what holds after every step

    @invariant()
    def every_cache_agrees_with_its_lists(self) -> None:
        for twin in getattr(self, "twins", []):
            if isinstance(twin.cache, GrowingCache) and twin.cache.batch_size != len(twin.model):
                assert twin.cache.capacity == 0  # before the first append a growing cache knows no batch
                continue
            assert twin.cache.lengths == tuple(len(sequence.tokens) for sequence in twin.model)
            if isinstance(twin.cache, GrowingCache) and twin.cache.capacity == 0:
                continue
            view = twin.cache.view()
            self.check_heads(view)
            allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool) if view.mask is None else view.mask.allowed[0]
            allowed = allowed.expand(len(twin.model), 1, 1, view.key.shape[2])[:, 0, 0]
            for row, sequence in enumerate(twin.model):
                held = [token for token, there in zip(ids_of(view)[row], allowed[row].tolist(), strict=True) if there]
                assert sorted(held) == sorted(sequence.tokens[position] for position in sequence.stored)

    @staticmethod
    def check_heads(view: CacheView) -> None:
        for tensor, width in ((view.key, HEAD_DIM), (view.value, VALUE_DIM)):
            written = tensor[..., 0] == 127
            heads = torch.arange(HEADS)[:, None].expand_as(tensor[..., 0])
            assert torch.equal(tensor[..., 3][written], heads[written].float())
            assert (tensor[..., 4][written] == width).all()
        assert torch.equal(view.key[..., 1:3], view.value[..., 1:3])


SIZES = {"num_kv_heads": HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM}


class GrowingMachine(CacheMachine):
    def build(self, batch: int) -> KVCache:
        return GrowingCache()


class PreallocatedMachine(CacheMachine):
    def build(self, batch: int) -> KVCache:
        return PreallocatedCache(capacity=CAPACITY, batch_size=batch, **SIZES)

    def expects_overflow(self, twin: Twin, counts: list[int], num_tokens: int) -> bool:
        if not twin.model:  # an empty batch has room for as many tokens as any other
            return int(twin.cache.next_positions(1)) + num_tokens > CAPACITY
        return any(len(sequence.tokens) + n > CAPACITY for sequence, n in zip(twin.model, counts, strict=True))


class QuantizedMachine(PreallocatedMachine):
    def build(self, batch: int) -> KVCache:
        return QuantizedCache(capacity=CAPACITY, batch_size=batch, **SIZES)


class RollingMachine(CacheMachine):
    def build(self, batch: int) -> KVCache:
        return RollingCache(window=WINDOW, sinks=SINKS, rollback=self.rollback, batch_size=batch, **SIZES)

    def visible(self, sequence: Sequence, position: int) -> list[int]:
        return [
            token
            for place, token in enumerate(sequence.tokens[: position + 1])
            if place < SINKS or place > position - WINDOW
        ]

    def keep(self, sequence: Sequence) -> None:
        length = len(sequence.tokens)
        held = sequence.stored | set(range(max(sequence.stored, default=-1) + 1, length))
        sequence.stored = {place for place in held if place < SINKS or place >= length - WINDOW - self.rollback}

    def may_crop(self, sequence: Sequence, length: int) -> bool:
        needed = {place for place in range(length) if place < SINKS or place > length - WINDOW}
        return needed <= sequence.stored


class RollingMachineThatGoesBack(RollingMachine):
    rollback = ROLLBACK


class PagedMachine(CacheMachine):
    def build(self, batch: int) -> KVCache:
        return PagedCache(num_pages=PAGES, page_size=PAGE_SIZE, batch_size=batch, **SIZES)

    def expects_overflow(self, twin: Twin, counts: list[int], num_tokens: int) -> bool:
        """Count pages from scratch: whole pages to add, and partly filled last pages that someone else holds too."""
        cache = twin.cache
        assert isinstance(cache, PagedCache)
        uses = Counter(page for other in self.sharing(cache) for page in pages_of(other))
        needed = 0
        for row, (sequence, new) in enumerate(zip(twin.model, counts, strict=True)):
            length = len(sequence.tokens)
            needed += -(-(length + new) // PAGE_SIZE) - -(-length // PAGE_SIZE)
            if new and length % PAGE_SIZE:
                last = int(cache.block_tables[row, length // PAGE_SIZE])
                if uses[last] > 1:
                    uses[last] -= 1
                    needed += 1
        return needed > cache.pool.num_free

    def sharing(self, cache: PagedCache) -> list[PagedCache]:
        return [t.cache for t in self.twins if isinstance(t.cache, PagedCache) and t.cache.pool is cache.pool]

    @rule(choice=st.integers(0, 6), row=st.integers(0, 6), batch=st.integers(0, 3), share=st.integers(0, 100))
    def branch(self, choice: int, row: int, batch: int, share: int) -> None:
        twin = self.pick(choice)
        if twin.model and len(self.twins) < 3:
            assert isinstance(twin.cache, PagedCache)
            sequence = twin.model[row % len(twin.model)]
            length = share * len(sequence.tokens) // 100
            branch = twin.cache.branch(batch, row=row % len(twin.model), length=length)
            model = [Sequence(sequence.tokens[:length], set(range(length))) for _ in range(batch)]
            self.twins.append(Twin(branch, model, batch))

    @invariant()
    def every_page_is_counted(self) -> None:
        for twin in getattr(self, "twins", []):
            cache = twin.cache
            uses = Counter(page for other in self.sharing(cache) for page in pages_of(other))
            assert [cache.pool.uses(page) for page in range(PAGES)] == [uses[page] for page in range(PAGES)]
            assert cache.pool.num_free == PAGES - len(uses)


def pages_of(cache: PagedCache) -> list[int]:
    tables = cache.block_tables.tolist()
    return [p for table, n in zip(tables, cache.lengths, strict=True) for p in table[: -(-n // PAGE_SIZE)]]


MACHINES = {
    "growing": GrowingMachine,
    "preallocated": PreallocatedMachine,
    "quantized": QuantizedMachine,
    "rolling": RollingMachine,
    "rolling that goes back": RollingMachineThatGoesBack,
    "paged": PagedMachine,
}
CHECKED = settings(max_examples=20, stateful_step_count=30)


@pytest.mark.parametrize("kind", MACHINES)
def test_any_sequence_of_operations_leaves_what_plain_lists_would_hold(kind: str) -> None:
    run_state_machine_as_test(MACHINES[kind], settings=CHECKED)
