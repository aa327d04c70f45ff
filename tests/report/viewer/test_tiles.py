"""Tiles, pictures and strips of the viewer, compared with full weights; and the cache."""

from __future__ import annotations

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.masks import Mask
from polyhead.ops.attention import attention
from polyhead.report.viewer import tiles, token_weights
from polyhead.report.viewer.cache import TileCache
from polyhead.report.viewer.distance import distances
from polyhead.report.viewer.failures import RequestError
from polyhead.report.viewer.trace import RecordedAttention

HEADS, KV_HEADS, DIM = 6, 3, 5


def case(queries, keys, kind="causal", seed=0):
    """Return a recorded attention, and all of its weights [heads, queries, keys]."""
    torch.manual_seed(seed)
    query, key = 2 * torch.randn(1, HEADS, queries, DIM), 2 * torch.randn(1, KV_HEADS, keys, DIM)
    mask, scale, softcap = None, None, None
    if kind == "causal":
        mask = Mask.causal()
    elif kind == "window":
        mask = Mask.window(left=37, right=5)
    elif kind == "biased":
        mask = Mask.bias(torch.randn(1, HEADS, queries, keys)) & Mask.dense(torch.rand(1, HEADS, queries, keys) > 0.3)
        scale, softcap = torch.rand(HEADS) + 0.5, 7.0
    found = attention(
        query, key, key, mask=mask, scale=scale, softcap=softcap, weights=True, logsumexp=True, backend="reference"
    )
    return RecordedAttention(query, key, found.logsumexp, mask, scale, softcap), found.weights[0]


def pooled(weights, block, pool):
    """Return the sum or the maximum of each block of weights; blocks at the edges are smaller."""
    rows, columns = (-(-size // block) for size in weights.shape)
    padded = torch.zeros(rows * block, columns * block)  # no weight is negative
    padded[: weights.shape[0], : weights.shape[1]] = weights
    blocks = padded.view(rows, block, columns, block)
    return blocks.sum((1, 3)) if pool == "sum" else blocks.amax((1, 3))


@pytest.fixture
def small_sizes(monkeypatch):
    """Tiles of 16 cells and pictures of 32, so that a short text has many of them."""
    monkeypatch.setattr(tiles, "TILE_CELLS", 16)
    monkeypatch.setattr(tiles, "PICTURE_CELLS", 32)
    monkeypatch.setattr(tiles, "STRIP_PAIRS", {"cpu": 1500})


@pytest.mark.parametrize("pool", ["sum", "max"])
@pytest.mark.parametrize("kind", ["full", "causal", "window", "biased"])
def test_every_tile_of_every_level_is_exact(small_sizes, kind, pool):
    recorded, weights = case(131, 131 if kind != "full" else 97, kind)
    head, expected = recorded.head(4), weights[4]
    top = tiles.top_level(head)
    assert top == 4
    picture_level = tiles.level_of(head, tiles.PICTURE_CELLS)
    assert picture_level == 3
    picture = tiles.stacked(tiles.strips(head, picture_level, pool))[0]
    torch.testing.assert_close(picture, pooled(expected, 8, pool), atol=1e-6, rtol=1e-4)
    for level in range(top + 1):
        side = 16 << level
        for row in range(-(-131 // side)):
            for column in range(-(-expected.shape[1] // side)):
                rows, columns = tiles.tile_spans(head, level, row, column)
                window = expected[slice(*rows), slice(*columns)]
                assert rows[0] == row * side
                assert columns[0] == column * side
                whole = torch.cat([x.cells[0] for x in tiles.strips(head, level, pool, rows, columns)])
                torch.testing.assert_close(whole, pooled(window, 1 << level, pool), atol=1e-6, rtol=1e-4)
                if level >= picture_level:
                    cut = tiles.cut_out(picture, picture_level, level, row, column, pool)
                    torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-5)


def test_strips_are_contiguous(small_sizes):
    recorded, _ = case(131, 131)
    strips = list(tiles.strips(recorded.head(0), 1, "sum"))
    assert len(strips) == -(-131 // tiles.strip_height(recorded.head(0), 1, (0, 131))) > 5
    reached = 0
    for strip in strips:
        assert strip.first == reached
        reached += strip.cells.shape[1]
    assert reached == 66


def test_tile_outside_the_matrix_is_refused():
    recorded, _ = case(19, 23, "full")
    with pytest.raises(RequestError, match="level must be 0 to 0 for this text, got 1"):
        tiles.tile_spans(recorded, 1, 0, 0)
    with pytest.raises(RequestError, match="the row of a tile of level 0 must be 0 to 0 for this text, got 1"):
        tiles.tile_spans(recorded, 0, 1, 0)
    with pytest.raises(RequestError, match=r"the column .* got 7"):
        tiles.tile_spans(recorded, 0, 0, 7)


@pytest.mark.parametrize("pool", ["sum", "max"])
def test_estimate_follows_its_sampling_rule(pool):
    recorded, weights = case(131, 131)
    rule = tiles.rule_for(recorded, 4, pool, pairs=3 * HEADS * 131 * 9)
    assert rule == tiles.Rule(16, 3, pool)
    found = tiles.stacked(tiles.estimate(recorded, 4, rule))
    assert found.shape == (HEADS, 9, 9)
    for number in range(9):
        start, stop = 16 * number, min(16 * number + 16, 131)
        first = (start + stop) // 2 - 1
        looked_at = weights[:, first : first + 3]
        if pool == "sum":
            expected = looked_at.sum(1, keepdim=True) * (stop - start) / 3
        else:
            expected = looked_at.amax(1, keepdim=True)
        for head in range(HEADS):
            cells = pooled(expected[head].expand(1, -1), 16, pool)
            torch.testing.assert_close(found[head, number : number + 1], cells, atol=1e-6, rtol=1e-4)
    if pool == "sum":  # the weights of each row add up to 1, so that every row of blocks has its mass
        torch.testing.assert_close(found.sum(-1)[0], torch.tensor([16.0] * 8 + [3.0]), atol=1e-4, rtol=0)


def test_no_estimate_if_it_would_include_all_rows():
    recorded, _ = case(131, 131)
    assert tiles.rule_for(recorded, 4, "sum") is None


def test_estimate_of_an_incomplete_block_is_exact():
    recorded, _ = case(17, 17)
    found = tiles.stacked(tiles.estimate(recorded, 3, tiles.Rule(8, 5, "sum")))
    torch.testing.assert_close(found.sum(-1), torch.tensor([8.0, 8.0, 1.0]).expand(HEADS, 3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["full", "causal", "window", "biased"])
def test_a_token_in_every_head(kind):
    recorded, weights = case(67, 67, kind)
    torch.testing.assert_close(token_weights.attends(recorded, 41), weights[:, 41], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(token_weights.attended(recorded, 29), weights[:, :, 29], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_thin_windows_of_a_long_text(kind):
    """A few rows with all keys, and a few keys with all rows, are tiled differently."""
    queries = 1511
    recorded, weights = case(queries, queries if kind != "full" else 1301, kind)
    torch.testing.assert_close(token_weights.attends(recorded, 1401), weights[:, 1401], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(token_weights.attended(recorded, 907), weights[:, :, 907], atol=1e-6, rtol=1e-4)
    found = recorded.profile(
        block_map=(7, 32), rows=(1200, 1219), received=True, argmax=True, topk=3, offsets=True, key_set=[0, 5, 600]
    )
    rows = weights[:, 1200:1219]
    for head in range(HEADS):
        expected = torch.stack([row_of_blocks(rows[head, i : i + 7], 32) for i in range(0, 19, 7)])
        torch.testing.assert_close(found.block_map[0, head], expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.received[0], rows.sum(1), atol=1e-6, rtol=1e-4)
    assert torch.equal(found.argmax[0], rows.argmax(-1))
    torch.testing.assert_close(found.top_weights[0], rows.topk(3).values, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.key_set_mass[0], rows[..., [0, 5, 600]].sum(-1), atol=1e-6, rtol=1e-4)
    columns = recorded.profile(received=True, offsets=True, argmax=True, columns=(300, 303))
    torch.testing.assert_close(columns.received[0], weights[..., 300:303].sum(1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(columns.offsets[0].sum(-1), weights[..., 300:303].sum((1, 2)), atol=1e-5, rtol=1e-4)


def row_of_blocks(rows, width):
    return torch.stack([rows[:, j : j + width].sum() for j in range(0, rows.shape[1], width)])


def test_long_row_is_pooled_and_lists_its_top_tokens():
    import base64

    weights = torch.rand(3, 43)
    row = token_weights.row_message(weights, 16)
    assert row["block"] == 4
    assert row["weights"]["shape"] == [3, 11]
    cells = torch.frombuffer(bytearray(base64.b64decode(row["weights"]["data"])), dtype=torch.float32).view(3, 11)
    assert torch.equal(cells[:, 10], weights[:, 40:].amax(1))
    assert torch.equal(cells[:, 2], weights[:, 8:12].amax(1))
    assert row["top"]["tokens"][1] == weights[1].sort(descending=True).indices[:8].tolist()
    assert token_weights.row_message(weights, 43)["block"] == 1


def test_the_distance_of_two_heads_is_that_of_their_rows(monkeypatch):
    one, first = case(53, 53, "causal", seed=1)
    other, second = case(53, 53, "causal", seed=2)
    monkeypatch.setattr(tiles, "STRIP_PAIRS", {"cpu": 53 * 40})  # ten rows at a time
    *_, found = parts = list(distances(one.head(2), other.head(5)))
    assert len(parts) == 6
    p, q = first[2].double(), second[5].double()
    middle = (p + q) / 2
    divergence = (torch.xlogy(p, p / middle).nan_to_num() + torch.xlogy(q, q / middle).nan_to_num()).sum(-1) / 2
    assert found.rows == 53
    assert found.divergence == pytest.approx(float(divergence.mean()), rel=1e-4)
    assert found.distance == pytest.approx(float(divergence.clamp_min(0).sqrt().mean()), rel=1e-4)


def test_heads_that_cannot_be_compared_are_refused():
    one, other, longer = case(19, 19)[0], case(19, 19, "full")[0], case(23, 23)[0]
    with pytest.raises(RequestError, match="19 x 19 tokens and one over 23 x 23"):
        next(distances(one.head(0), longer.head(0)))
    with pytest.raises(RequestError, match=r"the same mask to be compared, got Mask\(causal\) and None"):
        next(distances(one.head(0), other.head(0)))


# ---- cache


def test_cache_never_exceeds_its_limit():
    cache = TileCache(1000)
    for number in range(50):
        cache.put(torch.full((5, 5), float(number)), 1, number)
        assert cache.bytes <= 1000
    assert len(cache) == 10
    assert cache.get(1, 39) is None
    assert float(cache.get(1, 40)[0, 0]) == 40.0


def test_least_recently_used_tile_is_evicted_first():
    cache = TileCache(300)
    for number in range(3):
        cache.put(torch.zeros(25), 1, number)
    assert cache.get(1, 0) is not None
    cache.put(torch.zeros(25), 1, 3)
    assert cache.get(1, 1) is None
    assert cache.get(1, 0) is not None


def test_tiles_of_one_trace_are_removed_together():
    cache = TileCache(10_000)
    for trace in (1, 2):
        cache.put(torch.zeros(25), trace, "picture")
    cache.forget(1)
    assert cache.get(1, "picture") is None
    assert cache.get(2, "picture") is not None
    assert cache.bytes == 100
    cache.clear()
    assert (len(cache), cache.bytes) == (0, 0)


def test_a_cache_keeps_no_large_tensor_alive_for_a_small_view_of_it():
    cache = TileCache(1000)
    cache.put(torch.zeros(100_000)[:50], 1)
    assert cache.get(1).untyped_storage().nbytes() == 200
    cache.put(torch.zeros(251), 2)
    assert cache.get(2) is None
    cache.put(torch.zeros(10), 1)
    assert cache.bytes == 40
    with pytest.raises(OptionError, match="got -1"):
        TileCache(-1)
