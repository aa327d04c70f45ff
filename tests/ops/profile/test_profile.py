"""The profile in plain PyTorch against the full weights, its cost, and its error messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses import FakeTensorMode

from polyhead import Mask, attention
from polyhead.errors import BackendUnsupported, DeviceError, DtypeError, MaskError, OptionError, ShapeError
from polyhead.ops.common.kernels import availability
from polyhead.ops.profile import blockwise, pairs
from polyhead.ops.profile.api import profile
from polyhead.ops.profile.request import BlockMap, offset_bins
from tests.ops.attention.test_blockwise import Allocations
from tests.ops.oracle import Scene, Who, normal
from tests.ops.profile.oracle import Question, questions, vars_of

EVERYTHING: dict[str, Any] = {
    "received": True,
    "received_by_group": True,
    "block_map": BlockMap(resolution=(16, 16), pool="max"),
    "offsets": True,
    "argmax": True,
    "topk": 3,
    "key_set": [0, 5],
    "pairs": [(3, 1), (4, 4)],
    "head_pairs": [(0, 1), (1, 1)],
}


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen rows and eight columns, so that small scenes have several tiles either way."""
    monkeypatch.setattr(blockwise, "_TILE_COLUMNS", 8)
    monkeypatch.setattr(blockwise, "_TILE_ELEMENTS", 1)
    monkeypatch.setattr(pairs, "_PAIR_ELEMENTS", 1)


@pytest.mark.usefixtures("_small_tiles")
@settings(max_examples=60)
@given(questions())
def test_any_profile_of_any_scene_matches_the_full_weights(question: Question) -> None:
    question.check(torch.float32, "blockwise")
    question.check(torch.float16, "blockwise")
    question.check(torch.float64, "blockwise", 1e-8)


@settings(max_examples=20)
@given(questions())
def test_one_large_tile_gives_the_same(question: Question) -> None:
    question.check(torch.bfloat16, "blockwise")


def scene_of(batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int = 8, **options: Any) -> Scene:
    return Scene(
        normal(batch, heads, queries, dim, seed=1),
        normal(batch, kv_heads, keys, dim, seed=2),
        normal(batch, kv_heads, keys, 2, seed=3),
        **options,
    )


def test_long_offsets_fall_into_bins_whose_edges_double() -> None:
    scene = scene_of(1, 2, 1, 331, 331, who=Who(left=300))
    Question(scene, (0, 331), (0, 331), {"offsets": True}).check(torch.float32, "blockwise")
    table = offset_bins()
    assert table.shape == (179, 2)
    assert table[0].tolist() == [-(1 << 31), -(1 << 30) - 1]
    assert table[89].tolist() == [0, 0]
    assert table[25 + 129].tolist() == [65, 128]
    assert table[25 + 130].tolist() == [129, 256]
    assert torch.equal(table[1:, 0], table[:-1, 1] + 1)


@pytest.mark.parametrize("spread", [0.0, 1.0, 128.0])
def test_column_sums_hold_for_uniform_ordinary_and_one_hot_rows(spread: float) -> None:
    """Logits up to 1e4, causal, the bound of the statistics: 1e-3 * max(1, sum)."""
    scene = scene_of(2, 4, 2, 257, 257, dim=64, who=Who(causal=True))
    scene = Scene(scene.query * spread, scene.key, scene.value, who=scene.who, scale=1.0)
    if spread == 128.0:
        assert 5e3 < float((scene.query @ scene.key.repeat_interleave(2, 1).mT).abs().max()) < 2e4
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        question = Question(scene, (0, 257), (0, 257), {"received": True, "block_map": BlockMap((64, 64))})
        question.check(dtype, "blockwise", 1e-3)


def test_ties_go_to_the_lowest_key_within_a_tile_and_across_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "_TILE_COLUMNS", 4)
    query = torch.ones(1, 1, 2, 1)
    key = torch.tensor([0.0, 2, 1, 2, 2, 0, 1, 2, 2, 1]).view(1, 1, 10, 1)
    mask = Mask.dense(torch.tensor([[True] * 10, [False, False, True, False, False, True, True, True, True, True]]))
    lse = attention(query, key, key, mask=mask, logsumexp=True).logsumexp
    found = profile(query, key, lse, mask=mask, argmax=True, topk=7)
    assert found.argmax.tolist() == [[[1, 7]]]
    assert found.top_keys.tolist() == [[[[1, 3, 4, 7, 8, 2, 6], [7, 8, 2, 6, 9, 5, -1]]]]
    assert found.top_weights[0, 0, 1, -1] == 0


def test_rows_without_visible_keys_add_nothing_and_have_no_key() -> None:
    query = torch.randn(1, 2, 6, 4)
    query[:, :, 4:] = torch.nan  # padding may hold anything
    key = torch.randn(1, 1, 6, 4)
    key[:, :, 4:] = torch.inf
    mask = Mask.lengths([4])
    lse = attention(query, key, key, mask=mask, logsumexp=True).logsumexp
    found = profile(query, key, lse, mask=mask, **EVERYTHING)
    for name, x in vars_of(found).items():
        assert x.isfinite().all(), name
    torch.testing.assert_close(found.received.sum(-1), torch.full((1, 2), 4.0))
    assert (found.argmax[..., 4:] == -1).all()
    assert (found.top_keys[..., 4:, :] == -1).all()
    assert found.pair_weights[0, 0, 1] == 0


def test_two_equal_heads_are_no_distance_apart_and_disjoint_ones_log_two() -> None:
    query = torch.randn(1, 2, 5, 8).repeat(1, 2, 1, 1)[:, [0, 2, 1]]
    key = torch.randn(1, 1, 9, 8)
    sees_left = torch.tensor([True] * 4 + [False] * 5)
    heads = torch.stack([sees_left, sees_left, ~sees_left])[None, :, None].expand(1, 3, 5, 9)
    mask = Mask.dense(heads)
    lse = attention(query, key, key, mask=mask, logsumexp=True).logsumexp
    found = profile(query, key, lse, mask=mask, head_pairs=[(0, 1), (0, 2), (2, 1)])
    assert found.head_divergence[0, 0] == found.head_distance[0, 0] == 0
    log_two = torch.full((2,), 2.0).log()
    torch.testing.assert_close(found.head_divergence[0, 1:], log_two)
    torch.testing.assert_close(found.head_distance[0, 1:], log_two.sqrt())


def test_the_divergence_of_almost_equal_heads_is_exact() -> None:
    query = torch.randn(1, 1, 7, 8, dtype=torch.float64).repeat(1, 2, 1, 1)
    query[:, 1] += 1e-3 * torch.randn(7, 8, dtype=torch.float64)
    key = torch.randn(1, 1, 31, 8, dtype=torch.float64)
    found = {}
    for dtype in (torch.float64, torch.float32):
        q, k = query.to(dtype), key.to(dtype)
        lse = attention(q, k, k, logsumexp=True, backend="reference").logsumexp
        found[dtype] = float(profile(q, k, lse, head_pairs=[(0, 1)]).head_divergence)
    assert 1e-9 < found[torch.float64] < 1e-5
    # The heads are a thousandth apart, and float32 holds that difference to a few of its ten-thousandths.
    assert found[torch.float32] == pytest.approx(found[torch.float64], rel=0.02)


def test_a_window_costs_its_own_tiles_and_masked_tiles_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "_TILE_COLUMNS", 64)
    monkeypatch.setattr(blockwise, "_TILE_ELEMENTS", 64 * 64)
    x = torch.randn(1, 1, 1024, 4)
    counts = {}
    multiply = torch.bmm
    for name, mask, window in (
        ("all", None, {}),
        ("causal", Mask.causal(), {}),
        ("window", None, {"rows": (100, 228), "columns": (500, 564)}),
    ):
        tiles = []
        lse = attention(x, x, x, mask=mask, logsumexp=True).logsumexp
        monkeypatch.setattr(torch, "bmm", lambda *args, tiles=tiles: tiles.append(1) or multiply(*args))
        profile(x, x, lse, mask=mask, received=True, argmax=True, block_map=(32, 32), **window)
        monkeypatch.setattr(torch, "bmm", multiply)
        counts[name] = len(tiles)
    assert counts == {"all": 16 * 16, "causal": 16 * 17 // 2, "window": 2}


@pytest.mark.parametrize(
    "mask",
    [None, Mask.causal(), Mask.documents([0] * 500 + [1] * 524) & Mask.causal()],
    ids=["all", "causal", "documents"],
)
def test_memory_does_not_grow_with_n_squared(monkeypatch: pytest.MonkeyPatch, mask: Mask | None) -> None:
    tile = 1 << 14
    monkeypatch.setattr(blockwise, "_TILE_ELEMENTS", tile)
    query, key = torch.randn(1, 2, 1024, 8), torch.randn(1, 1, 1024, 8)
    lse = attention(query, key, key, mask=mask, logsumexp=True).logsumexp
    with Allocations() as allocations:
        profile(query, key, lse, mask=mask, **EVERYTHING)
    assert allocations.largest <= 2 * tile == 1024 * 1024 // 32
    assert allocations.peak < 24 * 4 * tile


def test_keys_are_never_repeated_for_the_heads_that_share_them() -> None:
    query, key = torch.randn(1, 8, 3, 32), torch.randn(1, 1, 1024, 32)
    lse = attention(query, key, key, logsumexp=True).logsumexp
    with Allocations() as allocations:
        profile(query, key, lse, received=True, argmax=True)
    assert allocations.largest <= key.numel()


def test_a_profile_is_not_differentiable() -> None:
    query, key = torch.randn(1, 2, 7, 4, requires_grad=True), torch.randn(1, 1, 7, 4, requires_grad=True)
    lse = attention(query, key, key, logsumexp=True).logsumexp
    found = profile(query, key, lse, **EVERYTHING)
    assert not any(x.requires_grad for x in vars_of(found).values())
    with pytest.raises(RuntimeError, match="does not require grad"):
        found.received.sum().backward()


def test_under_autocast_the_profile_matches_attention() -> None:
    query, key = torch.randn(1, 4, 33, 16), torch.randn(1, 2, 33, 16)
    with torch.autocast("cpu", torch.bfloat16):
        result = attention(query, key, key, backend="reference", weights=True)
        found = profile(query, key, result.logsumexp, received=True, pairs=[(3, 4)])
    torch.testing.assert_close(found.received, result.weights.sum(2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.pair_weights[..., 0], result.weights[:, :, 3, 4], atol=1e-5, rtol=1e-5)


def test_any_strides_are_read() -> None:
    wide = torch.randn(33, 2, 3, 4, 10)
    query = wide.permute(1, 3, 0, 4, 2)[..., 1]  # [2, 4, 33, 10]
    key = wide.permute(1, 3, 0, 4, 2)[:, 1::2, :, :, 2]
    lse = attention(query, key, key, logsumexp=True).logsumexp.mT.contiguous().mT
    ours = profile(query, key, lse, **EVERYTHING)
    plain = profile(query.contiguous(), key.contiguous(), lse.contiguous(), **EVERYTHING)
    for name, x in vars_of(ours).items():
        torch.testing.assert_close(x, vars_of(plain)[name], msg=name)


def test_no_queries_no_keys_and_no_pairs_give_empty_results() -> None:
    nothing: Tensor = torch.randn(2, 2, 0, 4)
    found = profile(nothing, torch.randn(2, 1, 5, 4), torch.randn(2, 2, 0), received=True, argmax=True, topk=2)
    assert found.received.equal(torch.zeros(2, 2, 5))
    assert found.argmax.shape == (2, 2, 0)
    lse = torch.full((2, 2, 3), -torch.inf)
    found = profile(torch.randn(2, 2, 3, 4), torch.randn(2, 1, 0, 4), lse, received=True, argmax=True, topk=2)
    assert found.received.shape == (2, 2, 0)
    assert (found.argmax == -1).all()
    assert (found.top_keys == -1).all()
    found = profile(torch.randn(2, 2, 3, 4), torch.randn(2, 1, 5, 4), torch.zeros(2, 2, 3), pairs=[], head_pairs=[])
    assert found.pair_weights.shape == (2, 2, 0)
    assert found.head_distance.shape == (2, 0)


QUERY, KEY, LSE = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 6, 5)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, OptionError, "needs at least one requested result, got none"),
    ({"query": [1.0]}, DtypeError, "must be tensors, got list and Tensor"),
    ({"query": QUERY[0]}, ShapeError, r"got shapes \[6, 5, 4\] and \[2, 3, 7, 4\]"),
    ({"query": QUERY.double()}, DtypeError, "one dtype, got torch.float64 and torch.float32"),
    ({"query": QUERY.int(), "key": KEY.int()}, DtypeError, "got torch.int32"),
    ({"key": KEY[:1]}, ShapeError, "one batch size and one head_dim"),
    ({"key": torch.randn(2, 4, 7, 4)}, ShapeError, "got 6 and 4"),
    ({"logsumexp": None}, DtypeError, r"attention\(..., logsumexp=True\) returns, got NoneType"),
    ({"logsumexp": LSE[..., None]}, ShapeError, r"here \[2, 6, 5\], got \[2, 6, 5, 1\]"),
    ({"logsumexp": LSE.half()}, DtypeError, "got torch.float16"),
    ({"logsumexp": LSE.to("meta")}, DeviceError, "got cpu, cpu and meta"),
    ({"mask": torch.ones(5, 7)}, MaskError, "got Tensor"),
    ({"scale": torch.ones(3)}, ShapeError, r"shape \[3\] for 6 heads"),
    ({"scale": float("inf")}, OptionError, "got inf"),
    ({"softcap": 0.0}, OptionError, "got 0.0"),
    ({"topk": 17}, OptionError, "0 to 16, got 17"),
    ({"block_map": 16}, OptionError, "got int"),
    ({"block_map": (16, 0)}, OptionError, r"got \(16, 0\)"),
    ({"rows": (0, 6), "received": True}, OptionError, r"within 0 to 5, got \(0, 6\)"),
    ({"columns": (3, 3), "received": True}, OptionError, r"within 0 to 7, got \(3, 3\)"),
    ({"key_set": [7]}, OptionError, "0 to 6, got 7"),
    ({"key_set": torch.ones(5, dtype=torch.bool)}, ShapeError, r"got \[5\]"),
    ({"key_set": torch.ones(7)}, DtypeError, "got torch.float32"),
    ({"pairs": [(0, 7)]}, OptionError, "keys of pairs must be 0 to 6, got 7"),
    ({"pairs": [(0, 1)], "rows": (2, 4)}, OptionError, "queries of pairs must be 2 to 3, got 0"),
    ({"pairs": [(1, 2, 3)]}, ShapeError, r"got shape \[1, 3\]"),
    ({"head_pairs": [(0, 6)]}, OptionError, "0 to 5, got 6"),
    ({"head_pairs": [0, 1]}, ShapeError, r"got shape \[2\]"),
    ({"received": True, "backend": "sdpa"}, OptionError, "got 'sdpa'"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), WRONG, ids=lambda x: str(list(x)) if isinstance(x, dict) else "")
def test_invalid_arguments_raise(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"query": QUERY, "key": KEY, "logsumexp": LSE, **wrong}
    with pytest.raises(error, match=words):
        profile(**arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either block or resolution, got block None"),
        ({"block": (2, 2), "resolution": (3, 3)}, "either block or resolution"),
        ({"block": (2, 2), "pool": "median"}, "got 'median'"),
        ({"resolution": (2.0, 2)}, "two positive integers"),
    ],
)
def test_an_invalid_block_map_raises(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        BlockMap(**options)


def test_the_kernels_report_unsupported_requests() -> None:
    query = torch.randn(1, 1, 3, 300, dtype=torch.float64)
    places = Mask.positions(torch.arange(3), torch.arange(3))
    with pytest.raises(BackendUnsupported) as caught:
        profile(query, query, torch.zeros(1, 1, 3), mask=places, offsets=True, backend="fused")
    reasons = " / ".join(caught.value.reasons)
    for words in ("run on CUDA devices, got tensors on cpu", "got float64", "got 300", "explicit positions"):
        assert words in reasons


def test_the_kernels_refuse_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "capability", lambda device: (7, 5))
    monkeypatch.setattr(availability, "HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with FakeTensorMode():
        query, logsumexp = torch.empty(1, 2, 5, 8, device="cuda"), torch.empty(1, 2, 5, device="cuda")
        with pytest.raises(BackendUnsupported, match=r"needs compute capability 8\.0, got 7\.5"):
            profile(query, query, logsumexp, received=True, backend="fused")


def test_atomics_are_avoided_under_deterministic_algorithms() -> None:
    """The kernels report it as a reason, so that "auto" uses another backend and a named backend raises."""
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8)
    logsumexp = (query @ key.mT * 8**-0.5).logsumexp(-1)
    torch.use_deterministic_algorithms(True)
    try:
        for wanted in ({"received": True}, {"block_map": (2, 2)}, {"offsets": True}):
            with pytest.raises(BackendUnsupported, match="in a nondeterministic order"):
                profile(query, key, logsumexp, backend="fused", **wanted)
            assert profile(query, key, logsumexp, **wanted).backend == "blockwise"
    finally:
        torch.use_deterministic_algorithms(False)
