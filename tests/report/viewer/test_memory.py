"""Memory of the viewer: the cache is bounded, and no tensor of tokens x tokens is allocated."""

from __future__ import annotations

import gc
import weakref
from itertools import islice, product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyhead.masks import Mask
from polyhead.report.viewer import tiles, token_weights
from polyhead.report.viewer.distance import distances
from polyhead.report.viewer.trace import RecordedAttention
from polyhead.report.viewer.viewing import TracedHead, Viewer

BOUND = 20_000  # bytes


class UncancelledJob:
    """A job that is never cancelled."""

    def check(self) -> None:
        pass

    def send(self, message) -> None:
        pass


def test_cache_of_a_thousand_tiles_stays_within_its_limit(viewed, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_CELLS", 4)
    viewer = Viewer(viewed("llama"), cache_bytes=BOUND)
    trace = viewer.model.trace("A", " ".join(["w1 w2 w3 w4 ."] * 26), ())
    viewer.put("A", trace)
    head = TracedHead(trace, 1, 3)
    side = -(-head.attention.queries // 4)
    assert side == 33
    made: list[weakref.ref] = []
    put = viewer.cache.put

    def watched_put(tile, *key):
        made.append(weakref.ref(tile))
        put(tile, *key)

    monkeypatch.setattr(viewer.cache, "put", watched_put)
    first = None
    for row, column in islice(product(range(side), repeat=2), 1000):
        (*_, tile) = viewer.tile(UncancelledJob(), head, "sum", 0, row, column)
        first = first or tile
        assert viewer.cache.bytes <= BOUND
    gc.collect()
    alive = [tile for tile in (reference() for reference in made) if tile is not None]
    assert len(made) == 1000
    # Evicted tiles are not referenced elsewhere.
    assert sum(tile.untyped_storage().nbytes() for tile in alive) == viewer.cache.bytes
    assert BOUND - 64 < viewer.cache.bytes <= BOUND
    assert len(alive) == len(viewer.cache) < 1000
    # An evicted tile is computed again.
    assert viewer.known_tile(head, "sum", 0, 0, 0) is None
    (*_, again) = viewer.tile(UncancelledJob(), head, "sum", 0, 0, 0)
    assert again == first


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        self.bytes = max([self.bytes, *(x.untyped_storage().nbytes() for x in tensors)])
        return made


def recorded(tokens: int) -> RecordedAttention:
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, tokens, 8), torch.randn(1, 1, tokens, 8)
    return RecordedAttention(query, key, torch.full((1, 1, tokens), 5.0), Mask.causal())


def picture(attention: RecordedAttention) -> None:
    tiles.stacked(tiles.strips(attention, tiles.level_of(attention, tiles.PICTURE_CELLS), "sum"))


def estimate(attention: RecordedAttention) -> None:
    level = tiles.level_of(attention, tiles.ESTIMATE_CELLS)
    rule = tiles.rule_for(attention, level, "max", pairs=1 << 16)
    assert rule is not None
    tiles.stacked(tiles.estimate(attention, level, rule))


def word(attention: RecordedAttention) -> None:
    token_weights.attends(attention, attention.queries // 2)
    token_weights.attended(attention, attention.queries // 2)


def distance(attention: RecordedAttention) -> None:
    (*_,) = distances(attention, attention)


@pytest.mark.parametrize("compute", [picture, estimate, word, distance])
def test_no_computation_allocates_the_whole_matrix(compute):
    """Four times the tokens are sixteen times the pairs; allocations grow at most linearly."""
    most = {}
    for tokens in (1024, 4096):
        with Largest() as largest:
            compute(recorded(tokens))
        most[tokens] = largest.bytes
    assert most[4096] <= 4 * most[1024]
    assert most[4096] < 4 * 4096**2 / 8
