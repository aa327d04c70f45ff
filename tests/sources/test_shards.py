"""Shards of a text: together they are all of its batches, and each of them once."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.sources import Batch, Context, Shard, batches


def contexts(count: int = 41) -> list[Context]:
    return [Context(n // 3, n % 3, [n] * (2 + 7 * n % 13), [False] * (2 + 7 * n % 13)) for n in range(count)]


def read(shard: Shard, start: int = 0, digest: str | None = None) -> list[Batch]:
    return list(batches(contexts(), None, batch_tokens=31, shard=shard, start=start, digest=digest))


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_the_batches_of_all_shards_are_those_of_the_text_and_each_is_in_one(count):
    whole = read(Shard())
    parts = [read(Shard(index, count)) for index in range(count)]
    assert sorted(batch.index for part in parts for batch in part) == list(range(len(whole)))
    for part in parts:
        for batch in part:
            same = whole[batch.index]
            assert batch.digest == same.digest
            for name in ("ids", "mask", "special", "documents", "pieces"):
                assert torch.equal(getattr(batch, name), getattr(same, name))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_a_shard_counts_its_tokens_without_reading_them():
    for index in range(3):
        made = batches(contexts(), None, batch_tokens=31, shard=Shard(index, 3))
        assert made.tokens == sum(batch.tokens for batch in made)


def test_a_shard_continues_after_its_last_batch_and_refuses_another_text():
    shard = Shard(1, 3)
    whole = read(shard)
    rest = read(shard, start=whole[1].index + 1, digest=whole[1].digest)
    assert [batch.index for batch in rest] == [batch.index for batch in whole[2:]]
    with pytest.raises(OptionError, match="different batches before batch"):
        read(shard, start=whole[1].index + 1, digest=whole[0].digest)


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_shard_that_does_not_exist_is_refused(index, count):
    with pytest.raises(OptionError, match=f"got index {index} of count {count}"):
        Shard(index, count)
