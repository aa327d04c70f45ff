"""Compare the profile kernels with the full weights, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from polyhead.ops.profile.api import profile
from polyhead.ops.profile.request import BlockMap
from tests.ops.interpreter.interpreted import in_the_interpreter
from tests.ops.oracle import Scene, Who, normal
from tests.ops.profile.oracle import Question, assert_right, moved
from tests.two_dtypes import DTYPES, in_two_dtypes


def scene_of(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, who: Who | None = None, **options: Any
) -> Scene:
    return Scene(
        normal(batch, heads, queries, dim, seed=1),
        normal(batch, kv_heads, keys, dim, seed=2),
        normal(batch, kv_heads, keys, 2, seed=3),
        who=who or Who(),
        **options,
    )


DOCUMENTS = ((0,) * 9 + (1,) * 17 + (-1,) * 2 + (2,) * 11, (3,) * 20 + (0,) * 19)
SCENES = {
    "all": lambda: scene_of(2, 2, 1, 37, 53, 24),
    "causal": lambda: scene_of(1, 3, 1, 53, 53, 16, Who(causal=True)),
    "window": lambda: scene_of(1, 2, 2, 61, 61, 8, Who(causal=True, left=19, first=3)),
    "window both ways": lambda: scene_of(2, 2, 1, 47, 67, 16, Who(left=21, right=23)),
    "lengths": lambda: scene_of(2, 2, 1, 41, 41, 16, Who(causal=True, key_lengths=(41, 13))),
    "left padding": lambda: scene_of(2, 2, 1, 41, 41, 16, Who(left=5, first=2, key_lengths=(23, 0), side="left")),
    "documents": lambda: scene_of(2, 2, 1, 39, 39, 16, Who(causal=True, query_documents=DOCUMENTS)),
    "dense, bias and table": lambda: scene_of(
        2, 2, 1, 19, 37, 16, Who(dense=normal(1, 2, 19, 37, seed=5) < 0.8),
        bias=normal(2, 1, 1, 37, seed=6), table=normal(2, 11, seed=7), zero=5,
    ),
    "softcap, sinks and scales": lambda: scene_of(
        1, 4, 2, 29, 29, 40, Who(causal=True), softcap=2.5, sinks=normal(4, seed=8),
        scale=normal(4, seed=9) * torch.tensor([1.0, 1, 0, 1]),
    ),
}  # fmt: skip
BY_RESOLUTION = {"block_map": BlockMap(resolution=(4, 4))}
# Options of `profile` without a result per query, which the column kernel computes.
COLUMN_OPTIONS: tuple[dict[str, Any], ...] = (
    {"received": True, "received_by_group": True},
    {"received": True, "block_map": BlockMap(block=(16, 16))},
    {"received": True, "block_map": BlockMap(block=(4, 8), pool="max")},
    {"block_map": BlockMap(block=(32, 48), pool="mean")},
    {"received": True, "block_map": BlockMap(block=(7, 4))},
    {"received": True, "block_map": BlockMap(block=(20, 40))},
    {"block_map": BlockMap(block=(4, 5), pool="max")},
    {"block_map": BlockMap(block=(5, 3))},
    BY_RESOLUTION,
    {"offsets": True},
)
# Options with a result per query, which need the row kernel or that of the head pairs.
ROW_OPTIONS: tuple[dict[str, Any], ...] = (
    {"argmax": True, "received": True, "block_map": BlockMap(block=(8, 20))},
    {"topk": 1, "offsets": True},
    {"topk": 5, "key_set": [0, 3, 17]},
    {"topk": 16, "argmax": True, "block_map": BlockMap(block=(16, 7), pool="max"), "received": True, "offsets": True},
    {"head_pairs": [(0, 1), (1, 0), (1, 1)]},
)
TILE_SIZES = (16, 16), (16, 32), (32, 32)


@contextmanager
def tiles(rows: int, columns: int) -> Iterator[None]:
    """Use tiles of this size, and fill the result of `torch.empty` with NaN (integers with -77)."""
    from polyhead.ops.common.kernels.resources import Blocks
    from polyhead.ops.profile.kernels import divergence, second_pass

    modules = (second_pass, divergence)
    originals = [module.tiles_for for module in modules]
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        fresh = empty(*args, **kwargs)
        return fresh.fill_(torch.nan if fresh.is_floating_point() else -77)

    for module in modules:
        module.tiles_for = lambda *args, **kwargs: Blocks(rows, columns, 4, 1)
    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = empty
        for module, function in zip(modules, originals, strict=True):
            module.tiles_for = function


def check_in_interpreter(dtype: torch.dtype, names: list[str], step: int) -> None:
    """Check every `step`-th set of options with each kind of mask.

    Tile sizes rotate, and every other profile is of a window of rows and columns.
    """
    count = 0
    for start, name in enumerate(names):
        scene = SCENES[name]()
        _, _, queries, keys = scene.sizes
        for options in (*COLUMN_OPTIONS, *ROW_OPTIONS)[start % step :: step]:
            count += 1
            rows, columns = ((5, queries - 3), (3, keys - 5)) if count % 2 else ((0, queries), (0, keys))
            with tiles(*TILE_SIZES[count % len(TILE_SIZES)]):
                Question(scene, rows, columns, options).check(dtype, "fused")


def check_generated(examples: int) -> None:
    """Check generated profiles; the kernels may refuse some, but only for explicit positions.

    Refused ones are not among the `examples`, so that as many are checked whatever a version of hypothesis draws.
    """
    from hypothesis import HealthCheck, given, reject, seed, settings
    from hypothesis import strategies as st

    from polyhead.errors import BackendUnsupported
    from tests.ops.profile.oracle import questions

    served, refused = 0, []

    @seed(0)
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(questions(), st.sampled_from(TILE_SIZES), st.sampled_from([torch.float32, torch.float16]))
    def check(question: Question, place: tuple[int, int], dtype: torch.dtype) -> None:
        nonlocal served
        try:
            with tiles(*place):
                question.check(dtype, "fused")
        except BackendUnsupported as unsupported:
            refused.extend(unsupported.reasons)
            reject()
        served += 1

    check()
    assert served == examples
    assert all("explicit positions" in reason for reason in refused)


def check_kernels_agree(device: str) -> None:
    """Compare the row kernel, which uses atomics, with the column kernel: received weights, block map and offsets."""
    from polyhead.ops.common.kernel_masks import pack
    from polyhead.ops.common.visibility import resolve
    from polyhead.ops.profile.kernels.prepare import prepare
    from polyhead.ops.profile.kernels.second_pass import second_pass

    scene = SCENES["window"]().to(torch.float32)
    _, heads, queries, keys = scene.sizes
    query, key = scene.query.to(device), scene.key.to(device)
    visibility = resolve(scene.mask, batch=1, heads=heads, queries=queries, keys=keys, device=query.device)
    lse = scene.run("reference").logsumexp.to(device)
    problem = prepare(query, key, lse, 0.3, None, (0, queries), (0, keys))
    mask = pack(visibility, for_columns=True)
    options = {"received": True, "block": (16, 20), "offsets": True}
    rows, columns = (second_pass(problem, mask, by_columns=by_columns, **options) for by_columns in (False, True))
    assert rows.keys() == columns.keys() == {"received", "block_map", "offsets"}
    for name, x in rows.items():
        torch.testing.assert_close(x, columns[name], atol=1e-5, rtol=1e-5)


# Function that builds the scene, and the window of rows and columns that is profiled.
LONG_SCENES = {
    "all": (lambda: scene_of(1, 2, 1, 331, 331, 16), (0, 331), (0, 331)),
    "causal": (lambda: scene_of(1, 1, 1, 331, 331, 16, Who(causal=True)), (7, 331), (0, 307)),
    "one tile": (lambda: scene_of(2, 2, 1, 37, 53, 24), (5, 34), (3, 48)),
    "more keys": (lambda: scene_of(1, 1, 1, 97, 571, 16, Who(causal=True)), (5, 94), (23, 566)),
    "window both ways": (lambda: scene_of(1, 1, 1, 251, 389, 16, Who(left=150, right=90)), (0, 251), (0, 389)),
    "lengths": (lambda: scene_of(2, 1, 1, 211, 211, 16, Who(causal=True, key_lengths=(211, 83))), (0, 211), (0, 211)),
}


def check_far_offsets(names: list[str], tile: tuple[int, int], small_tile: tuple[int, int]) -> None:
    """Check offsets in rows long enough for wide bins: tiles lie within a bin, cross an edge, or span several bins.

    `small_tile` is the size where `tiles_for` is called with `register_heavy`, as for tiles that cross an edge of bins.
    """
    from polyhead.ops.common.kernels.resources import Blocks
    from polyhead.ops.profile.kernels import second_pass

    for name in names:
        scene, rows, columns = LONG_SCENES[name]
        with tiles(*small_tile):
            second_pass.tiles_for = lambda *args, register_heavy=False, **kwargs: Blocks(
                *(small_tile if register_heavy else tile), 4, 1
            )
            question = Question(scene(), rows, columns, {"offsets": True, "received": True, "block_map": (64, 64)})
            question.check(torch.float32, "fused")


def check_bins() -> None:
    """Check the index and the end of the bin of every offset near an edge against `offset_bins`."""
    from polyhead.ops.profile.request import offset_bins
    from tests.ops.profile.kernels.offset_bins import bins_kernel

    edges = [64 << k for k in range(25)]
    near = [edge + step for edge in edges for step in range(-3, 4) if edge + step < 1 << 30]
    offset = torch.tensor(sorted({*range(-200, 201), *near, *(-x for x in near)}), dtype=torch.int32)
    index, end = torch.empty_like(offset), torch.empty_like(offset)
    bins_kernel[(-(-len(offset) // 256),)](offset, index, end, len(offset), BLOCK=256)
    bins = offset_bins()
    exact = [next(i for i, (low, high) in enumerate(bins.tolist()) if low <= x <= high) for x in offset.tolist()]
    assert index.tolist() == exact
    assert end.tolist() == [int(bins[i, 1]) for i in exact]


def check_ties_and_strides(device: str) -> None:
    """Check that ties go to the first key, and that tensors may have any strides."""
    query = torch.ones(1, 1, 2, 1, device=device)
    key = torch.tensor([0.0, 2, 1, 2, 2, 0, 1, 2, 2, 1] * 4, device=device).view(1, 1, 40, 1)
    lse = (query @ key.mT).logsumexp(-1)
    found = profile(query, key, lse, scale=1.0, argmax=True, topk=16, backend="fused")
    assert found.argmax.tolist() == [[[1, 1]]]
    assert found.top_keys[0, 0, 0].tolist() == [1, 3, 4, 7, 8, 11, 13, 14, 17, 18, 21, 23, 24, 27, 28, 31]

    wide = torch.randn(33, 2, 3, 4, 24, device=device)
    query = wide[:, :, 0].permute(1, 2, 0, 3)
    key = wide[:, :, 1, ::2].permute(1, 2, 0, 3)
    transposed = torch.randn(2, 4, 24, 33, device=device).mT  # the last axis is not contiguous
    for q in (query, transposed):
        lse = (q @ key.repeat_interleave(2, 1).mT * 24**-0.5).logsumexp(-1)
        strided = lse.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        ours = profile(q, key, strided, received=True, argmax=True, backend="fused")
        plain = profile(q, key, lse, received=True, argmax=True, backend="blockwise")
        torch.testing.assert_close(ours.received, plain.received, atol=1e-5, rtol=1e-5)
        assert ours.argmax.equal(plain.argmax)


def check_hidden_values(device: str, dtype: torch.dtype) -> None:
    """Check that NaN and Inf in padding do not propagate, and that received weights hold for logits near 1e4."""
    from polyhead import Mask

    generator = torch.Generator().manual_seed(7)  # fixed, because the size of the logits is asserted below
    query, key = (torch.randn(1, heads, 40, 16, generator=generator).to(device) for heads in (2, 1))
    query[:, :, 33:], key[:, :, 33:] = torch.nan, torch.inf
    query, key = query.to(dtype), key.to(dtype)
    logits = query[:, :, :33].float() @ key[:, :, :33].float().mT / 4
    lse = torch.cat([logits.logsumexp(-1), torch.full((1, 2, 7), -torch.inf, device=device)], -1)
    options: dict[str, Any] = {"received": True, "block_map": (16, 16), "argmax": True, "topk": 2}
    for mask in (Mask.lengths([33]), Mask.lengths([33]) & Mask.window(left=50)):
        for requested in ({"received": True, "block_map": (16, 16), "offsets": True}, options):
            found = profile(query, key, lse, mask=mask, backend="fused", **requested)
            assert found.received.isfinite().all()
            assert found.block_map.isfinite().all()
            torch.testing.assert_close(found.received.sum(-1), torch.full_like(lse[..., 0], 33.0))
    assert (found.argmax[..., 33:] == -1).all()

    # float32 sums the products of bfloat16 numbers exactly, so the only error left is that of the weights.
    query, key = (x[:, :, :33].bfloat16().to(dtype) for x in (query, key))
    query, key = query * 128, key * 4
    exact = query.double() @ key.double().mT * 0.9
    assert 3e3 < float(exact.abs().max()) < 1e4
    lse = exact.logsumexp(-1).float()
    sums = (exact - exact.logsumexp(-1, keepdim=True)).exp().sum(2)
    found = profile(query, key, lse, scale=0.9, received=True, backend="fused")
    # Rounding the log-sum-exp to float32 alone causes up to half of this error.
    assert ((found.received.double() - sums).abs() / sums.clamp_min(1)).max() < 1e-3


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 3), (torch.float16, 5)])
@pytest.mark.parametrize("names", [list(SCENES)[:3], list(SCENES)[3:6], list(SCENES)[6:]], ids=", ".join)
def test_every_flag_on_every_kind_of_mask(dtype: torch.dtype, step: int, names: list[str]) -> None:
    in_the_interpreter(check_in_interpreter, dtype, names, step)


@pytest.mark.parametrize(
    ("names", "tile", "small_tile"),
    [
        (["all", "more keys"], (64, 64), (32, 64)),
        (["causal", "window both ways", "lengths"], (32, 64), (32, 32)),
        (["one tile"], (128, 128), (64, 64)),
    ],
)
def test_offsets_far_and_near(names: list[str], tile: tuple[int, int], small_tile: tuple[int, int]) -> None:
    in_the_interpreter(check_far_offsets, names, tile, small_tile)


def test_bins_end_where_the_next_begins() -> None:
    in_the_interpreter(check_bins)


def test_any_profile_of_any_scene() -> None:
    in_the_interpreter(check_generated, 16)


def test_both_kernels_agree_on_ties_strides_and_masked_values() -> None:
    in_the_interpreter(check_kernels_agree, "cpu")
    in_the_interpreter(check_ties_and_strides, "cpu")
    for dtype in (torch.float32, torch.float16):
        in_the_interpreter(check_hidden_values, "cpu", dtype)


# ---- on a GPU, at the default tile sizes


def check_on_gpu(question: Question, dtype: torch.dtype) -> None:
    """Check a profile on a GPU, with the backend and the tiles that are chosen by default."""
    question = replace(question, scene=question.scene.on("cuda"))
    scene = question.scene.to(dtype)
    device = scene.query.device
    lse = scene.run("reference", device.type).logsumexp.cuda()
    scale = scene.scale.cuda() if isinstance(scene.scale, torch.Tensor) else scene.scale
    found = profile(
        scene.query.cuda(),
        scene.key.cuda(),
        lse,
        mask=None if scene.mask is None else scene.mask.to("cuda"),
        scale=scale,
        softcap=scene.softcap,
        rows=question.rows,
        columns=question.columns,
        **question.options,
    )
    assert found.backend == "fused"
    assert_right(moved(found, device), question, 1e-4)


def windows(queries: int, keys: int, kind: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return two windows of rows and columns.

    Triton specialises a kernel on starts that 16 divides, so the same compiled kernel serves both unless `kind` is
    "mixed".
    """
    whole, odd = ((0, queries), (0, keys)), ((5, queries - 3), (3, keys - 5))
    return {
        "mixed": [whole, odd],
        "16 divides both starts": [whole, ((16, queries), (16, keys - 6))],
        "16 divides no start": [((5, queries - 2), (3, keys - 6)), ((3, queries), (5, keys))],
    }[kind]


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize(("name", "dtype"), in_two_dtypes(SCENES))
def test_on_a_gpu_every_flag_on_every_kind_of_mask(name: str, dtype: torch.dtype, part: int) -> None:
    """Check a third of the options, each with one kind of windows in float32 and the other in half precision."""
    scene = SCENES[name]()
    _, _, queries, keys = scene.sizes
    for index, options in list(enumerate((*COLUMN_OPTIONS, *ROW_OPTIONS)))[part::3]:
        kind = ("16 divides both starts", "16 divides no start")[(index + (dtype is torch.float32)) % 2]
        if options == BY_RESOLUTION:  # the block size, and so the kernel, depends on the size of the window
            kind = "mixed"
        for rows, columns in windows(queries, keys, kind):
            check_on_gpu(Question(scene, rows, columns, options), dtype)


LONG_ROWS = {"all": Who(), "causal": Who(causal=True), "window": Who(causal=True, left=200, first=4)}


@pytest.mark.gpu
@pytest.mark.parametrize(("who", "dim", "dtype"), in_two_dtypes(itertools.product(LONG_ROWS, [16, 40, 64, 128, 256])))
def test_on_a_gpu_long_rows_of_every_head_dim(who: str, dim: int, dtype: torch.dtype) -> None:
    scene = scene_of(1, 4, 2, 700, 700, dim, LONG_ROWS[who])
    for options in (
        {"received": True, "received_by_group": True, "block_map": BlockMap(block=(128, 128))},
        {"received": True, "block_map": BlockMap(block=(32, 16), pool="max")},
        {"received": True, "block_map": BlockMap(block=(200, 150))},
        {"offsets": True},
        {"argmax": True, "topk": 16, "key_set": [0, 1, 511], "received": True, "block_map": BlockMap(block=(64, 256))},
        {"head_pairs": [(0, 1), (0, 3)]},
    ):
        check_on_gpu(Question(scene, (0, 700), (0, 700), options), dtype)


@pytest.mark.gpu
def test_on_a_gpu_more_heads_than_a_grid_axis_has_room_for() -> None:
    query = torch.randn(70_000, 1, 5, 16, device="cuda", dtype=torch.bfloat16)
    lse = (query.float() @ query.float().mT / 4).logsumexp(-1)
    found = profile(query, query, lse, received=True, argmax=True)
    plain = profile(query, query, lse, received=True, argmax=True, backend="blockwise")
    torch.testing.assert_close(found.received, plain.received, atol=1e-4, rtol=1e-4)
    assert found.argmax.equal(plain.argmax)


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check_kernels_agree, check_ties_and_strides])
def test_on_a_gpu_both_kernels_agree_on_ties_and_strides(check: Callable[[str], None]) -> None:
    check("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_masked_values_do_not_leak(dtype: torch.dtype) -> None:
    check_hidden_values("cuda", dtype)
