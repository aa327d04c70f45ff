"""The local-mass kernel against float64, in Triton's interpreter and on a GPU with the forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead import Mask, Statistics, attention
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from tests.ops.interpreter.interpreted import in_the_interpreter, poisoned_memory
from tests.ops.oracle import Scene, Who, normal

NAMES = ("sink_mass", "self_mass", "previous_mass", "next_mass", "window_mass")
# The defaults of `polyhead.observe`.
OBSERVED = ("max_logit", "entropy", "confidence", "mean_distance", *NAMES, "visible_keys")
SMALL = (16, 16, 4, 1)  # tiles so small that short sequences have several
BANDS = {
    "all": (None, None),
    "causal": (None, 0),
    "some after": (None, 5),
    "window": (9, 0),
    "both sides": (3, 2),
    "self": (0, 0),
}


def scene(
    band: str,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    queries: int = 37,
    keys: int = 53,
    dim: int = 24,
    spread: float = 1.0,
    scale: float | None = None,
) -> Scene:
    left, right = BANDS[band]
    return Scene(
        normal(batch, heads[0], queries, dim, seed=1) * spread,
        normal(batch, heads[1], keys, dim, seed=2) * spread,
        normal(batch, heads[1], keys, 5, seed=3),
        who=Who(left=left, right=right),
        scale=scale,
    )


def sizes() -> dict[str, Scene]:
    return {
        "one of everything": scene("causal", batch=1, heads=(1, 1), queries=1, keys=1, dim=16),
        "one query": scene("all", queries=1, dim=16),
        "a whole number of tiles": scene("causal", queries=32, keys=48, dim=16),
        "many queries a KV head": scene("both sides", batch=1, heads=(7, 1), queries=19, keys=19, dim=40),
        "no group": scene("window", heads=(3, 3), queries=41, keys=41, dim=72),
        "dim of 128": scene("causal", batch=1, heads=(2, 1), queries=33, keys=35, dim=128),
        "dim of 256": scene("some after", batch=1, heads=(2, 1), queries=17, keys=35, dim=256),
        "huge logits": scene("causal", queries=53, spread=25.0),
        "a scale of its own": scene("causal", scale=1.7),
    }


def run(
    case: Scene,
    device: str,
    names: tuple[str, ...],
    sink_keys: int,
    window: int,
    logsumexp: Tensor | None = None,
) -> dict[str, Tensor]:
    from polyhead.ops.attention.kernels.local_mass import masses

    exact = case.to(torch.float64).formula()
    queries, keys = case.sizes[2:]
    call = KernelCall(
        case.query.to(device),
        case.key.to(device),
        case.value.to(device),
        MaskArguments(left=case.who.left, right=case.who.right, offset=keys - queries),
        scale=case.query.shape[-1] ** -0.5 if case.scale is None else float(case.scale),
        sink_keys=sink_keys,
        window=window,
    )
    with poisoned_memory():
        return masses(call, exact.logsumexp.float().to(device) if logsumexp is None else logsumexp, names=names)


def expected(case: Scene, sink_keys: int, window: int) -> dict[str, Tensor]:
    """Return the named sums of weights, from the full attention weights."""
    batch, _, queries, keys = case.sizes
    weights = case.to(torch.float64).formula().weights
    distance = case.who.distances(batch, queries, keys)[:, None]
    first = (torch.arange(keys) < sink_keys).expand_as(distance)
    chosen = (first, distance == 0, distance == -1, distance == 1, distance.abs() <= window)
    return {name: (weights * which).sum(-1) for name, which in zip(NAMES, chosen, strict=True)}


def tiles(blocks: tuple[int, int, int, int]) -> Any:
    from polyhead.ops.attention.kernels import local_mass as module

    return mock.patch.object(module, "choose_blocks", return_value=module.Blocks(*blocks))


def check(name: str, case: Scene, dtype: torch.dtype, device: str, sink_keys: int = 1, window: int = 8) -> None:
    case = case.to(dtype)
    found = run(case, device, NAMES, sink_keys, window)
    assert tuple(found) == NAMES
    scale = case.query.shape[-1] ** -0.5 if case.scale is None else float(case.scale)
    size = scale * float(case.query.double().norm(dim=-1).max() * case.key.double().norm(dim=-1).max())
    bound = 2**-23 * (16 + 4 * size)  # what the rounding of the logits does to a weight
    for mass, right in expected(case, sink_keys, window).items():
        assert found[mass].dtype is torch.float32
        error = (found[mass].cpu().double() - right).abs().max()
        assert error <= bound, f"{name}, {dtype}: {mass} is off by {error:.3e}, allowed {bound:.3e}"


def check_bands(device: str, dtypes: list[torch.dtype]) -> None:
    for band in BANDS:
        case = scene(band, batch=1, heads=(2, 1), dim=11)
        for dtype in dtypes:
            for sink_keys, window in ((1, 8), (21, 0), (100, 200)):
                check(f"{band}, {sink_keys}, {window}", case, dtype, device, sink_keys, window)


def check_sizes(device: str, dtypes: list[torch.dtype]) -> None:
    for name, case in sizes().items():
        for dtype in dtypes:
            check(name, case, dtype, device)


def check_each_alone(device: str) -> None:
    """Check each mass requested alone, with its own range of keys."""
    for band in ("all", "causal", "both sides"):
        case = scene(band, batch=1, heads=(1, 1), dim=13).to(torch.float32)
        right = expected(case, 2, 6)
        for name in NAMES:
            found = run(case, device, (name,), 2, 6)
            assert list(found) == [name]
            assert (found[name].cpu().double() - right[name]).abs().max() < 1e-5, (band, name)


def check_broken_rows(device: str) -> None:
    """Check that NaN in a row's log-sum-exp makes all of its masses NaN, also those of masked keys."""
    case = scene("causal").to(torch.float32)
    clean = run(case, device, NAMES, 1, 8)
    logsumexp = case.to(torch.float64).formula().logsumexp.float().to(device)
    logsumexp[1, 2, 5:20] = torch.nan
    found = run(case, device, NAMES, 1, 8, logsumexp=logsumexp)
    for name, mass in found.items():
        assert mass.isnan().equal(logsumexp.isnan()), name
        assert mass[~logsumexp.isnan()].equal(clean[name][~logsumexp.isnan()]), name
    # What stands in keys that a row does not see never reaches it.
    broken = case.key.clone()
    broken[:, :, 30:] = torch.nan
    hidden = Scene(case.query, broken, case.value, who=case.who)
    found = run(hidden, device, NAMES, 1, 8, logsumexp=case.to(torch.float64).formula().logsumexp.float().to(device))
    before = 30 - (53 - 37)  # the rows that stand before key 30
    for name, mass in found.items():
        assert mass[:, :, :before].equal(clean[name][:, :, :before]), name


def check_strides(device: str) -> None:
    wide = normal(2, 37, 4, 48, seed=1, dtype=torch.float32)
    query, key = (wide[..., a:b].transpose(1, 2) for a, b in ((0, 24), (24, 48)))
    case = Scene(query, key[:, :2], key[:, :2], who=Who(left=None, right=0))
    whole = Scene(*(x.contiguous() for x in (case.query, case.key, case.value)), who=case.who)
    found, same = (run(x, device, NAMES, 1, 8) for x in (case, whole))
    for name in NAMES:
        assert found[name].equal(same[name])


TYPES = [torch.float32, torch.float16]


def check_in_small_tiles(*checks: Callable[..., None], **options: Any) -> None:
    with tiles(SMALL):
        for check in checks:
            check("cpu", **options)


def test_in_the_interpreter_every_band_keeps_to_the_bounds() -> None:
    in_the_interpreter(check_in_small_tiles, check_bands, dtypes=TYPES)


def test_in_the_interpreter_all_sizes_keep_to_the_bounds() -> None:
    in_the_interpreter(check_in_small_tiles, check_sizes, dtypes=TYPES)
    in_the_interpreter(check, "gpu tiles", scene("causal"), torch.float16, "cpu")


def test_in_the_interpreter_the_rest_holds_too() -> None:
    in_the_interpreter(check_in_small_tiles, check_each_alone, check_broken_rows, check_strides)


def test_only_few_keys_of_a_band_get_a_separate_pass() -> None:
    pytest.importorskip("triton")
    from polyhead.ops.attention.kernels.local_mass import can_serve

    query, key = torch.zeros(1, 2, 30, 16), torch.zeros(1, 2, 64, 16)
    mask = MaskArguments(right=0, offset=34)
    causal = KernelCall(query, key, key, mask, scale=0.25, window=8)
    assert can_serve(causal)
    assert can_serve(replace(causal, mask=MaskArguments(offset=34), window=64))
    assert not can_serve(replace(causal, window=100))
    assert not can_serve(replace(causal, sink_keys=100))
    assert not can_serve(replace(causal, mask=mask._replace(offset=3)))
    assert not can_serve(replace(causal, query=key, key=query, mask=mask._replace(offset=-34)))
    assert not can_serve(replace(causal, mask=mask._replace(bias=key)))
    assert not can_serve(replace(causal, mask=mask._replace(key_ordinal=key)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_every_band_and_size_keeps_to_the_bounds(dtype: torch.dtype) -> None:
    check_bands("cuda", [dtype])
    check_sizes("cuda", [dtype])


@pytest.mark.gpu
def test_on_a_gpu_the_rest_holds_too() -> None:
    check_each_alone("cuda")
    check_broken_rows("cuda")
    check_strides("cuda")


@pytest.mark.gpu
def test_on_a_gpu_more_than_65535_heads_are_served() -> None:
    case = scene("causal", batch=70_001, heads=(1, 1), queries=3, keys=3, dim=16).to(torch.bfloat16)
    found = run(case, "cuda", NAMES, 1, 8)
    for name, right in expected(case, 1, 8).items():
        assert (found[name].cpu().double() - right).abs().max() < 1e-4, name


def tensors(heads: tuple[int, int], queries: int, keys: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(queries + keys)
    query = torch.randn(2, queries, heads[0], dim, device="cuda", dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(2, keys, heads[1], dim, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(2))
    return [query, key, value]


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [((4, 2), 500, 777, 128), ((6, 2), 333, 333, 64), ((8, 8), 130, 130, 96)])
@pytest.mark.parametrize("mask", [None, Mask.causal(), Mask.window(100)], ids=["all", "causal", "window"])
def test_on_hopper_both_kernels_together_give_what_is_asked(
    mask: Mask | None, sizes: tuple[Any, ...], dtype: torch.dtype
) -> None:
    from polyhead.ops.attention.kernels import forward, forward_hopper

    inputs = tensors(*sizes, dtype)
    requested = Statistics(*OBSERVED, sink_keys=2, window=8)
    with (
        mock.patch.object(forward, "forward", side_effect=AssertionError("the portable kernel was taken")),
        mock.patch.object(forward_hopper, "forward", wraps=forward_hopper.forward) as taken,
    ):
        found = attention(*inputs, mask=mask, statistics=requested, logsumexp=True, backend="fused").statistics
    assert taken.call_count == 1
    doubles = [x.double() for x in inputs]
    exact = attention(*doubles, mask=mask, statistics=requested, backend="reference").statistics
    assert found is not None
    assert exact is not None
    right, keys = dict(exact.items()), sizes[2]
    size = float(inputs[0].double().norm(dim=-1).max() * inputs[1].double().norm(dim=-1).max()) * sizes[3] ** -0.5
    bounds = {"max_logit": 1e-5 * size, "entropy": 1e-3, "mean_distance": 1e-5 * keys, "visible_keys": 0.0}
    there = dict(found.items())
    assert set(there) == set(OBSERVED)
    for name, rows in there.items():
        torch.testing.assert_close(rows.double(), right[name], rtol=0, atol=bounds.get(name, 1e-5), msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
def test_on_hopper_gradients_flow_through_the_masses() -> None:
    inputs = tensors((4, 2), 200, 200, 64, torch.bfloat16)
    names = ("entropy", "confidence", "max_logit", *NAMES)
    grads = []
    for backend, dtype in (("fused", torch.bfloat16), ("reference", torch.float64), ("reference", torch.bfloat16)):
        leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
        result = attention(*leaves, mask=Mask.causal(), statistics=names, backend=backend)
        assert result.statistics is not None
        loss = result.output.double().sum()
        for place, (_, rows) in enumerate(result.statistics.items()):
            loss = loss + (rows.double() * torch.linspace(-1, 1 + place, rows.shape[-1], device="cuda")).sum()
        grads.append(torch.autograd.grad(loss, leaves))
    for found, exact, plain in zip(*grads, strict=True):
        budget = 2 * (plain.double() - exact).abs().max() + 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
        assert (found.double() - exact).abs().max() <= budget


@pytest.mark.gpu
@pytest.mark.skipif(not on_hopper(), reason="needs a Hopper GPU")
def test_on_hopper_a_nonfinite_key_reaches_only_rows_that_see_it() -> None:
    query, key, value = tensors((4, 2), 200, 200, 64, torch.bfloat16)
    key[0, 1, 150] = torch.nan
    requested = Statistics(*OBSERVED)
    found = attention(query, key, value, mask=Mask.causal(), statistics=requested, backend="fused").statistics
    assert found is not None
    broken = torch.zeros(2, 4, 200, dtype=torch.bool, device="cuda")
    broken[0, 2:, 150:] = True
    for name, rows in found.items():
        assert rows.isnan().equal(broken & (name != "visible_keys")), name
