"""Properties of the tiles: memory linear in n, no repeated keys, second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from polyhead import Mask, attention
from polyhead.ops.common import tiles
from tests.gradients import FAST, of_one_vector
from tests.ops.oracle import ON_THE_CPU


class Allocations(TorchDispatchMode):
    """Record the elements of the largest tensor that any operator allocates, and the peak bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}  # and those that went since they were last looked for
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
                reference = StorageWeakRef(storage)
                if reference.cdata not in self._alive:
                    self._alive[reference.cdata] = (reference, storage.nbytes())
                    self._bytes += storage.nbytes()
        if self._bytes > self.peak:
            self._alive = {name: kept for name, kept in self._alive.items() if not kept[0].expired()}
            self._bytes = sum(size for _, size in self._alive.values())
            self.peak = max(self.peak, self._bytes)
        return result


def spent(n: int, mask: Mask | None, *, learned: tuple[Tensor, ...] = (), **options: Any) -> tuple[Allocations, int]:
    """Return the allocations of one forward and backward over n tokens, and the bytes of its queries."""
    query, key = torch.randn(1, 2, n, 8, requires_grad=True), torch.randn(1, 1, n, 8, requires_grad=True)
    with Allocations() as allocations:
        output = attention(query, key, key, mask=mask, backend="blockwise", **options).output
        torch.autograd.grad(output.sum(), (query, key, *learned))
    return allocations, query.nbytes


TABLE = torch.randn(2, 33, requires_grad=True)
LONG_MASKS = {
    "nothing": lambda n: None,
    "causal": lambda n: Mask.causal(),
    "window": lambda n: Mask.window(100, sinks=3),
    "lengths": lambda n: Mask.lengths([n - 7]) & Mask.causal(),
    "documents": lambda n: Mask.documents(torch.arange(n) // 300) & Mask.causal(),
    "positions": lambda n: Mask.positions(torch.arange(n), torch.arange(n)) & Mask.causal(),
    "relative": lambda n: Mask.relative(TABLE, 20) & Mask.causal(),
}


@pytest.mark.parametrize("mask", LONG_MASKS)
def test_memory_of_forward_and_backward_grows_with_n(monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    tile = 1 << 14
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 256)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", tile)
    learned = (TABLE,) if mask == "relative" else ()
    small, _ = spent(512, LONG_MASKS[mask](512), learned=learned)
    large, query_bytes = spent(1024, LONG_MASKS[mask](1024), learned=learned)
    assert large.largest <= tile == 1024 * 1024 // 64
    assert large.peak < 2.2 * small.peak
    assert large.peak < 16 * query_bytes + 24 * 4 * tile


def test_memory_with_dropout_softcap_and_sinks_grows_with_n(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = 1 << 14
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 256)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", tile)
    allocations, query_bytes = spent(
        1024, Mask.causal(), dropout=0.2, softcap=5.0, sinks=torch.zeros(2), scale=torch.ones(2)
    )
    assert allocations.largest <= tile
    assert allocations.peak < 16 * query_bytes + 32 * 4 * tile


def test_the_default_tiles_stay_small_at_any_length() -> None:
    allocations, _ = spent(2048, Mask.causal())
    assert allocations.largest <= tiles.TILE_ELEMENTS
    query = torch.randn(8, 16, 64, 8)  # more heads than a tile of the least height has room for
    with Allocations() as allocations:
        attention(query, query, query, backend="blockwise")
    assert allocations.largest <= tiles.TILE_ELEMENTS


def test_a_window_skips_the_tiles_outside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 64)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 64 * 64)
    seen = []
    logits = tiles.Tiling.logits

    def counted(self: Any, *args: Any) -> Any:
        seen.append(args[-1])
        return logits(self, *args)

    monkeypatch.setattr(tiles.Tiling, "logits", counted)
    x = torch.randn(1, 1, 1024, 4)
    counts = {}
    for name, mask in {"all": None, "causal": Mask.causal(), "window": Mask.window(64, sinks=2)}.items():
        seen.clear()
        attention(x, x, x, mask=mask, backend="blockwise")
        counts[name] = len(seen)
    assert counts == {"all": 16 * 16, "causal": 16 * 17 // 2, "window": 2 * 16 - 1 + 14}


@pytest.mark.parametrize("backend", ON_THE_CPU)
@pytest.mark.parametrize("mask", [None, Mask.causal(), Mask.window(100), Mask.lengths([997])], ids=repr)
def test_keys_and_values_are_never_repeated_for_the_heads_that_share_them(backend: str, mask: Mask | None) -> None:
    query = torch.randn(1, 8, 3, 32, requires_grad=True)
    key, value = (torch.randn(1, 1, 1024, 32, requires_grad=True) for _ in range(2))
    with Allocations() as allocations:
        output = attention(query, key, value, mask=mask, backend=backend).output
        torch.autograd.grad(output.sum(), (query, key, value))
    assert allocations.largest <= key.numel()


MASKED = {
    "nothing": None,
    "causal": Mask.causal(),
    "window": Mask.window(3, sinks=1),
    "lengths": Mask.lengths([5]) & Mask.causal(),
    "documents": Mask.documents([0] * 9 + [1] * 7 + [-1] * 2, [1] * 3 + [0] * 4),
    "dense": Mask.dense(torch.rand(1, 1, 18, 7, generator=torch.Generator().manual_seed(2)) < 0.6),
}


@pytest.mark.parametrize(
    ("mask", "options"),
    [(name, {}) for name in MASKED] + [("lengths", {"softcap": 1.5}), ("documents", {"dropout": 0.4, "seed": 3})],
    ids=str,
)
def test_first_and_second_derivatives_are_those_of_the_numbers(
    monkeypatch: pytest.MonkeyPatch, mask: str, options: dict[str, Any]
) -> None:
    """Uses two row blocks of 18 queries and three column blocks of 7 keys."""
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 3)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1)

    def compute(
        query: Tensor, key: Tensor, value: Tensor, bias: Tensor, table: Tensor, sinks: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        both = Mask.bias(bias) & Mask.relative(table, 3)
        both = both if MASKED[mask] is None else both & MASKED[mask]
        result = attention(
            query, key, value, mask=both, sinks=sinks, scale=scale, backend="blockwise", logsumexp=True, **options
        )
        return result.output, result.logsumexp

    shapes = [(1, 4, 18, 3), (1, 2, 7, 3), (1, 2, 7, 2), (1, 1, 18, 7), (4, 5), (4,), (4,)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    joined, vector = of_one_vector(compute, inputs)
    assert gradcheck(joined, vector, **FAST)
    assert gradgradcheck(joined, vector, **FAST)


def test_every_second_derivative_of_a_small_attention_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 2)

    def compute(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        mask = Mask.causal() & Mask.bias(bias)
        return attention(query, key, value, mask=mask, sinks=sinks, softcap=2.0, backend="blockwise").output

    shapes = [(1, 2, 3, 2), (1, 1, 5, 2), (1, 1, 5, 1), (3, 5), (2,)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert gradgradcheck(compute, inputs)


def test_second_derivatives_agree_with_the_reference() -> None:
    query, key = (torch.randn(2, 3, 19, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    seconds = []
    for backend in ("blockwise", "reference"):
        output = attention(query, key, key, mask=Mask.causal(), backend=backend).output
        (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), (query, key)))
    for ours, theirs in zip(*seconds, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_weights_of_the_tiles_can_be_differentiated() -> None:
    query, key = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def weights(query: Tensor, key: Tensor) -> Tensor:
        return attention(query, key, key, mask=Mask.causal(), backend="blockwise", weights=True).weights

    assert gradcheck(weights, (query, key))
    assert gradgradcheck(weights, (query, key), fast_mode=True)


@pytest.mark.parametrize("kind", ["table", "bias of keys"])
@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_the_gradient_of_what_many_pairs_share_is_summed_in_more_than_its_dtype(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses many tiles, each of which adds less than a rounding error of the sum."""
    monkeypatch.setattr(tiles, "TILE_COLUMNS", 16)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1)
    length, dtype = 300, torch.bfloat16
    zeros, value = torch.zeros(1, 1, length, 4), torch.linspace(0, 1, length)[None, None, :, None].expand(1, 1, -1, 4)

    def gradient(dtype: torch.dtype, backend: str) -> Tensor:
        shared = torch.zeros(1, 2) if kind == "table" else torch.zeros(1, 1, 1, length)
        shared = shared.to(dtype).requires_grad_()
        mask = Mask.relative(shared, 1) if kind == "table" else Mask.bias(shared)
        output = attention(*(x.to(dtype) for x in (zeros, zeros, value)), mask=mask, backend=backend).output
        return torch.autograd.grad(output.sum(), shared)[0].double()

    right = gradient(torch.float64, "reference")
    bound = torch.finfo(dtype).eps * right.abs().max()  # half of it for the values, half for the result
    assert (gradient(dtype, backend) - right).abs().max() <= bound
