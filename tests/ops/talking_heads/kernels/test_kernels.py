"""The kernels of talking heads against float64, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead import Mask
from polyhead.errors import BackendUnsupported
from polyhead.ops.talking_heads.api import mixed_weights, talking_attention
from tests.error_budget import DRAWS, Compared, assert_draws_within_error_budget
from tests.ops.interpreter.interpreted import in_the_interpreter, poisoned_memory
from tests.ops.talking_heads.formula import mixed, plain_talking, talking_maps
from tests.two_dtypes import in_two_dtypes

NAMES = ("query", "key", "value", "logits_mix", "weights_mix")


@dataclass(frozen=True)
class Case:
    heads: int = 6
    kv_heads: int = 3
    queries: int = 23
    keys: int = 37
    dims: tuple[int, int] = (11, 7)
    batch: int = 1
    mask: Mask | None = None

    def tensors(self, dtype: torch.dtype, device: str, draw: int = 0) -> tuple[list[Tensor], Tensor]:
        """Return query, key, value, both mixes, and the gradient of the output."""
        generator = torch.Generator().manual_seed(3 + draw)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

        query = normal(self.batch, self.heads, self.queries, self.dims[0])
        key, value = (normal(self.batch, self.kv_heads, self.keys, dim) for dim in self.dims)
        eye = torch.eye(self.heads, device=device, dtype=dtype)
        mixes = [eye + 0.3 * normal(self.heads, self.heads) for _ in range(2)]
        return [query, key, value, *mixes], normal(self.batch, self.heads, self.queries, self.dims[1])


DOCUMENTS = torch.tensor([[0] * 9 + [1] * 14, [3] * 5 + [-1] * 4 + [2] * 14])
SMALL = {
    "nothing": Case(),
    "causal": Case(mask=Mask.causal()),
    "window": Case(heads=16, kv_heads=16, mask=Mask.window(9), dims=(16, 16)),
    "window and first keys": Case(mask=Mask.window(left=4, right=2, sinks=2)),
    "lengths": Case(batch=2, keys=23, mask=Mask.lengths([19, 0]) & Mask.causal()),
    "documents": Case(batch=2, keys=23, mask=Mask.documents(DOCUMENTS) & Mask.causal()),
    "dense": Case(batch=2, mask=Mask.dense(torch.arange(2 * 23 * 37).view(2, 1, 23, 37) % 7 > 2) & Mask.causal()),
    "padding": Case(batch=2, mask=Mask.from_torch(key_padding_mask=torch.arange(37) >= torch.tensor([[29], [0]]))),
    "32 heads": Case(heads=32, kv_heads=8, queries=17, keys=17, mask=Mask.causal()),
    "one of everything": Case(heads=1, kv_heads=1, queries=1, keys=1, dims=(1, 1)),
}
LONG = {
    f"{heads} heads of {dim}, {name}": Case(heads, heads // 2, 390, 517, (dim, dim), mask=mask)
    for heads, dim in ((8, 128), (12, 64), (16, 64), (16, 128), (32, 64))
    for name, mask in (("nothing", None), ("causal", Mask.causal()), ("window", Mask.window(100)))
}


def differentiated(function: Callable[..., Tensor], tensors: Sequence[Tensor], grad: Tensor) -> dict[str, Tensor]:
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    output = function(*tensors)
    return {"output": output, **dict(zip(NAMES, torch.autograd.grad(output, tensors, grad), strict=True))}


@contextmanager
def tiles(small: bool) -> Iterator[None]:
    """Use blocks of 16 by 16 and three parts of keys, so that short sequences have several; else the default ones."""
    if not small:
        yield
        return
    from polyhead.ops.common.kernels.resources import Blocks
    from polyhead.ops.talking_heads.kernels import launch

    with (
        mock.patch.dict(launch._BLOCKS, dict.fromkeys(launch._BLOCKS, Blocks(16, 16, 4, 1))),
        mock.patch.object(launch, "_num_key_parts", return_value=3),
    ):
        yield


def check(name: str, case: Case, dtype: torch.dtype, device: str, *, small: bool = True) -> None:
    """Check the output, every gradient, and the statistics."""
    tensors, grad = case.tensors(dtype, device)
    mask = case.mask if case.mask is None else case.mask.to(device)

    def by_formula(tensors: Sequence[Tensor], grad: Tensor) -> dict[str, Compared]:
        wide = [x.double() for x in tensors]
        exact = differentiated(lambda *x: plain_talking(*x, mask=mask), wide, grad.double())
        plain = differentiated(lambda *x: plain_talking(*x, mask=mask), tensors, grad)
        return {part: Compared(None, right, plain[part]) for part, right in exact.items()}

    def fused(*x: Tensor) -> Tensor:
        found = talking_attention(*x[:3], logits_mix=x[3], weights_mix=x[4], mask=mask, backend="fused")
        assert found.backend == "fused"
        return found.output

    with tiles(small), poisoned_memory():
        found = differentiated(fused, tensors, grad)
    samples = [by_formula(*case.tensors(dtype, device, draw)) for draw in range(DRAWS if case.keys < 100 else 2)]
    samples[0] = {part: x._replace(actual=found[part]) for part, x in samples[0].items()}
    assert_draws_within_error_budget(samples, name=name)


def check_statistics(case: Case, dtype: torch.dtype, device: str, *, small: bool = True) -> None:
    """Check the statistics of each softmax and of the mixed weights against the formula."""
    (query, key, value, logits_mix, weights_mix), _ = case.tensors(dtype, device)
    mask = case.mask if case.mask is None else case.mask.to(device)
    mixes = {"logits_mix": logits_mix, "weights_mix": weights_mix, "mask": mask}
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in mixes.items()}
    exact = talking_attention(
        query.double(), key.double(), value.double(), **wide, statistics=True, backend="reference"
    )
    with tiles(small), poisoned_memory():
        found = talking_attention(query, key, value, **mixes, statistics=True, backend="fused")
        told = mixed_weights(query, key, **mixes, backend="fused")
    assert found.statistics is not None
    assert exact.statistics is not None
    assert found.logsumexp is not None
    assert exact.logsumexp is not None
    torch.testing.assert_close(found.logsumexp.double(), exact.logsumexp, rtol=2e-5, atol=2e-5)
    largest = float(query.shape[2] + key.shape[2])
    for name, x in exact.statistics.items():
        unit = {"mean_distance": largest, "mean_offset": largest, "mean_squared_distance": largest**2}.get(name, 1.0)
        torch.testing.assert_close(
            getattr(found.statistics, name).double(),
            x,
            rtol=2e-5,
            atol=3e-5 * unit,
            msg=lambda text, n=name: f"{n} {text}",
        )
    _, weights = talking_maps(query.double(), key.double(), logits_mix.double(), mask=mask)
    combined = mixed(weights, weights_mix.double())
    for actual, expected in (
        (told.signed_mass, combined.sum(-1)),
        (told.absolute_mass, combined.abs().sum(-1)),
        (told.largest_weight, combined.abs().amax(-1)),
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def check_poison(device: str, *, small: bool = True) -> None:
    """Check that a NaN reaches only the rows that see it, in outputs and gradients."""
    case = Case(batch=2, keys=23, mask=(Mask.lengths([19, 11]) & Mask.causal()).to(device))
    tensors, grad = case.tensors(torch.float16, device)
    broken = [x.clone() for x in tensors]
    broken[1][0, 0, 19:], broken[2][1, 0, 11:], broken[0][1, 2, 11:] = torch.nan, torch.inf, torch.nan
    spoilt = grad.clone()
    spoilt[1, :, 11:] = torch.nan

    def fused(*x: Tensor) -> Tensor:
        return talking_attention(*x[:3], logits_mix=x[3], weights_mix=x[4], mask=case.mask, backend="fused").output

    with tiles(small):
        expected, found = differentiated(fused, tensors, grad), differentiated(fused, broken, spoilt)
        for part, x in expected.items():
            assert found[part].equal(x), part
        broken[1][0, 0, 7] = torch.nan
        output = fused(*broken)
    rows = output.isnan().any(-1)
    assert rows[0, :, 7:19].all()
    assert not rows[0, :, :7].any()
    assert not rows[0, :, 19:].any()
    assert not rows[1].any()


def check_second_derivative(device: str) -> None:
    tensors, _ = SMALL["causal"].tensors(torch.float16, device)
    query, key, value, before, after = (x.requires_grad_() for x in tensors)
    output = talking_attention(query, key, value, logits_mix=before, weights_mix=after, backend="fused").output
    (gradient,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(BackendUnsupported, match='no second derivative; backend="reference" has one'):
        torch.autograd.grad(gradient.sum(), key)


def test_in_the_interpreter_a_second_derivative_raises() -> None:
    in_the_interpreter(check_second_derivative, "cpu")


@pytest.mark.numerics
@pytest.mark.parametrize("name", SMALL)
def test_in_the_interpreter_outputs_and_gradients_keep_to_the_bounds(name: str) -> None:
    in_the_interpreter(check, name, SMALL[name], torch.float16, "cpu")


@pytest.mark.parametrize("name", ["nothing", "window", "lengths", "dense"])
def test_in_the_interpreter_statistics_are_right(name: str) -> None:
    in_the_interpreter(check_statistics, SMALL[name], torch.float16, "cpu")


@pytest.mark.numerics
def test_in_the_interpreter_default_tiles_and_nan_propagation() -> None:
    in_the_interpreter(check, "causal", SMALL["causal"], torch.float16, "cpu", small=False)
    wide = Case(8, 4, 11, 19, (128, 70), mask=Mask.causal())
    in_the_interpreter(check, "wide", wide, torch.float16, "cpu", small=False)
    in_the_interpreter(check_poison, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), in_two_dtypes({**SMALL, **LONG}, float32=False))
def test_on_a_gpu_outputs_and_gradients_keep_to_the_bounds(name: str, dtype: torch.dtype) -> None:
    check(name, {**SMALL, **LONG}[name], dtype, "cuda", small=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", {**SMALL, **LONG})
def test_on_a_gpu_statistics_are_right(name: str) -> None:
    check_statistics({**SMALL, **LONG}[name], torch.bfloat16, "cuda", small=False)


@pytest.mark.gpu
def test_on_a_gpu_nan_reaches_only_rows_that_see_it() -> None:
    check_poison("cuda", small=False)


@pytest.mark.gpu
def test_on_a_gpu_memory_grows_with_n_and_a_repetition_gives_the_same_bits() -> None:
    case = Case(16, 16, 4096, 4096, (64, 64))
    tensors, grad = case.tensors(torch.bfloat16, "cuda")

    def fused(*x: Tensor) -> Tensor:
        return talking_attention(*x[:3], logits_mix=x[3], weights_mix=x[4], backend="fused").output

    first = differentiated(fused, tensors, grad)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    second = differentiated(fused, tensors, grad)
    assert torch.cuda.max_memory_allocated() - held < 16 * tensors[0].nbytes
    assert all(second[part].equal(x) for part, x in first.items())


@pytest.mark.gpu
def test_on_a_gpu_the_operators_compile_to_one_graph() -> None:
    case = Case(16, 4, 130, 130, (64, 64), mask=Mask.causal())
    tensors, grad = case.tensors(torch.bfloat16, "cuda")

    def fused(*x: Tensor) -> Tensor:
        return talking_attention(*x[:3], logits_mix=x[3], weights_mix=x[4], mask=case.mask).output

    expected = differentiated(fused, tensors, grad)
    found = differentiated(torch.compile(fused, fullgraph=True, backend="aot_eager"), tensors, grad)
    assert all(found[part].equal(x) for part, x in expected.items())


@pytest.mark.parametrize(
    ("tokens", "causal", "rows", "parts"),
    [(2048, False, 16, 8), (4096, False, 32, 4), (4096, True, 16, 4), (8192, True, 32, 2), (65536, True, 32, 1)],
)
def test_blocks_are_halved_when_multiprocessors_would_be_idle(tokens: int, causal: bool, rows: int, parts: int) -> None:
    talking = pytest.importorskip("polyhead.ops.talking_heads.kernels.launch", reason="Triton is not installed")
    from polyhead.ops.common.kernels.mask_arguments import MaskArguments
    from polyhead.ops.talking_heads.kernels.tiles import Poison

    query = torch.empty(1, 16, tokens, 64, dtype=torch.bfloat16, device="meta")
    mix = torch.empty(16, 16, dtype=torch.bfloat16, device="meta")
    mask = MaskArguments(right=0 if causal else None)
    problem = talking.Problem(query, query, query, mix, mix, 0.125, mask, Poison(None, None))
    with mock.patch.object(talking, "multiprocessors", return_value=132):
        assert talking._choose_blocks(problem, "output").rows == rows
        assert talking._num_key_parts(problem) == parts
        windowed = problem._replace(mask=MaskArguments(left=100, right=0))
        assert talking._num_key_parts(windowed) == 1
