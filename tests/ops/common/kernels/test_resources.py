"""Tiles that fit into shared memory: predicted from their sizes, else found by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from polyhead import Mask, attention
from polyhead.ops.attention.kernels.forward import choose_blocks, fit_blocks
from polyhead.ops.common.kernels import resources
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.kernels.resources import Blocks, launch_fitting
from tests.ops.interpreter.interpreted import in_the_interpreter

LIMITS = {(9, 0): 232448, (8, 0): 166912, (8, 6): 101376, (8, 9): 101376, (12, 0): 101376}
ROWS = torch.zeros(1, 1, dtype=torch.int32)
MASKS = {
    "causal": MaskArguments(right=0),
    "left padding": MaskArguments(right=0, query_document=ROWS, key_document=ROWS, key_ordinal=ROWS),
    "dense": MaskArguments(allowed=torch.zeros(1, 1, 1, 1, dtype=torch.bool)),
    "bias": MaskArguments(bias=torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)),
    "bias of float32 and table": MaskArguments(bias=torch.zeros(1, 1, 1, 1), table=torch.zeros(1, 1)),
}


def fitted(machine: tuple[int, int], mask: MaskArguments, width: int, size: int, requested: int) -> Blocks:
    blocks = choose_blocks(width, size, 4096, requested, machine)
    return fit_blocks(blocks, (width, width), size, mask, machine, LIMITS[machine])


@pytest.mark.parametrize("machine", LIMITS)
@pytest.mark.parametrize("name", MASKS)
def test_keys_values_and_what_is_added_to_logits_fit(name: str, machine: tuple[int, int]) -> None:
    mask = MASKS[name]
    per_logit = sum(x.element_size() for x in (mask.bias, mask.table) if x is not None)
    for width in (16, 64, 128, 256):
        for size in (2, 4):
            for requested in (0, 4, 5, 13):
                rows, columns, _, stages, _ = fitted(machine, mask, width, size, requested)
                queue = stages * columns * (2 * width * size + rows * per_logit)
                assert queue < LIMITS[machine]
                assert rows >= 16
                assert columns >= 16


def test_blocks_that_fit_are_unchanged() -> None:
    # Compiled for sm_90 these take 230,400 and 231,480 bytes or more of 232,448: the second was too near.
    assert fitted((9, 0), MASKS["causal"], 128, 2, 3) == Blocks(128, 128, 8, 3)
    assert fitted((9, 0), MASKS["left padding"], 128, 2, 3) == Blocks(128, 128, 8, 2)
    assert fitted((8, 6), MASKS["left padding"], 128, 2, 3) == Blocks(128, 64, 8, 2)


def test_smaller_blocks_come_to_an_end() -> None:
    blocks: Blocks | None = Blocks(128, 128, 8, 3)
    seen = []
    while blocks is not None:
        seen.append(blocks)
        blocks = blocks.smaller()
    assert seen[1] == Blocks(128, 128, 8, 2)
    assert seen[-1] == Blocks(16, 16, 8, 1)
    assert len(set(seen)) == len(seen)


class Machine:
    """A kernel that fits up to some tile size."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.tried: list[int] = []

    def launch(self, size: int) -> None:
        self.tried.append(size)
        if size > self.fits:
            raise OutOfResources(size, self.fits, "shared memory")


def halved(size: int) -> int | None:
    return size // 2 if size > 1 else None


def test_a_launch_that_does_not_fit_is_made_smaller_and_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_fitting_tiles", {})
    machine = Machine(30)
    launch_fitting(machine.launch, 100, halved, lambda: "one")
    assert machine.tried == [100, 50, 25]
    launch_fitting(machine.launch, 100, halved, lambda: "one")
    assert machine.tried == [100, 50, 25, 25]
    launch_fitting(machine.launch, 28, halved, lambda: "another")
    assert machine.tried[4:] == [28]


def test_kind_is_not_called_if_the_first_launch_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_fitting_tiles", {})
    launch_fitting(Machine(100).launch, 100, halved, lambda: pytest.fail("it was asked"))


def test_a_launch_that_never_fits_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_fitting_tiles", {})
    with pytest.raises(OutOfResources, match="shared memory"):
        launch_fitting(Machine(0).launch, 4, halved, lambda: "one")


def test_halved_blocks_come_to_an_end_and_never_become_taller_than_wide() -> None:
    blocks: Blocks | None = Blocks(64, 128, 8, 3)
    seen = []
    while blocks is not None:
        seen.append(blocks)
        assert blocks.rows <= blocks.columns
        blocks = blocks.halved()
    assert seen[-1] == Blocks(16, 16, 8, 1)
    assert len(set(seen)) == len(seen)


class Narrow:
    """A kernel that fits up to a number of pairs, and the number of launches that were too large."""

    def __init__(self, kernel: Any, max_pairs: int = 16 * 16) -> None:
        self.kernel = kernel
        self.max_pairs = max_pairs
        self.refused = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            if kwargs["BLOCK_M"] * kwargs["BLOCK_N"] > self.max_pairs:
                self.refused += 1
                raise OutOfResources(2, 1, "shared memory")
            self.kernel[grid](*args, **kwargs)

        return launch


def check_gradients_and_profiles_fit() -> None:
    from polyhead import profile
    from polyhead.ops.attention.kernels import backward
    from polyhead.ops.profile.kernels import crossing as crossing
    from polyhead.ops.profile.kernels import second_pass as walks

    places = [(backward, "_queries_kernel"), (backward, "_keys_kernel"), (walks, "_column_kernel")]
    places += [(walks, "_row_kernel"), (crossing, "_crossing_kernel")]
    narrow = [Narrow(getattr(module, name)) for module, name in places]
    for (module, name), kernel in zip(places, narrow, strict=True):
        setattr(module, name, kernel)
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1, heads, 37, 8, generator=generator).requires_grad_() for heads in (2, 1, 1)]
    found, exact = (
        torch.autograd.grad(attention(*tensors, mask=Mask.causal(), backend=backend).output.square().sum(), tensors)
        for backend in ("fused", "reference")
    )
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)

    query, key = (x.detach() for x in tensors[:2])
    lse = attention(query, key, key, mask=Mask.causal(), logsumexp=True, backend="reference").logsumexp
    offsets = {"received": True, "block_map": (8, 8), "offsets": True}
    column_kernel = narrow[2]
    for requested, kernel in (
        ({"argmax": True, "topk": 3}, column_kernel),
        (offsets, column_kernel),
        (offsets, column_kernel.kernel),
    ):
        # Where the walk has room for its tiles, the pieces of the few that cross an edge of bins may have none.
        walks._column_kernel = kernel
        resources._fitting_tiles.clear()
        one, other = (
            profile(query, key, lse, mask=Mask.causal(), backend=backend, **requested)
            for backend in ("fused", "blockwise")
        )
        for name in ("received", "block_map", "offsets", "argmax", "top_keys", "top_weights"):
            if getattr(other, name) is not None:
                torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=1e-5, rtol=1e-5)
    assert all(kernel.refused for kernel in narrow), [kernel.refused for kernel in narrow]

    # Pieces found beside wide tiles are none of narrow ones, which come after them.
    resources._fitting_tiles.clear()
    crossing._crossing_kernel = Narrow(narrow[4].kernel, 32 * 32)
    query, key = query.half(), key.half()
    for walk in (column_kernel.kernel, column_kernel):
        walks._column_kernel = walk
        one, other = (
            profile(query, key, lse, mask=Mask.causal(), backend=backend, **offsets)
            for backend in ("fused", "blockwise")
        )
        torch.testing.assert_close(one.offsets, other.offsets, atol=1e-5, rtol=1e-5)
    assert crossing._crossing_kernel.refused


def test_gradients_and_profiles_run_with_less_shared_memory() -> None:
    in_the_interpreter(check_gradients_and_profiles_fit)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["left padding", "left padding, window", "dense", "bias", "table"])
def test_on_a_gpu_no_mask_asks_for_more_than_there_is(kind: str, dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(dim)
    sequence, heads = 389, 4
    query, key, value = (torch.randn(2, heads, sequence, dim, device="cuda", dtype=dtype) for _ in range(3))
    padding = Mask.lengths([sequence, 211], side="left")
    masks = {
        "left padding": Mask.causal() & padding,
        "left padding, window": Mask.window(64, sinks=4) & padding,
        "dense": Mask.dense(torch.rand(2, heads, sequence, sequence) < 0.7),
        "bias": Mask.bias(torch.randn(2, heads, sequence, sequence).to(dtype)),
        "table": Mask.causal() & Mask.relative(torch.randn(heads, 33), 16),
    }
    mask = masks[kind].to("cuda")
    # Three statistics take the widest tiles, all of them the most sums.
    for names in (("max_logit", "entropy", "mean_distance"), True):
        found = attention(query, key, value, mask=mask, statistics=names, backend="fused").statistics
        exact = attention(*(x.double() for x in (query, key, value)), mask=mask, statistics=names, backend="reference")
        assert found is not None
        assert exact.statistics is not None
        assert (found.entropy.double() - exact.statistics.entropy).abs().max() < 1e-3
