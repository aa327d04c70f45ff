"""`torch.func` and forward-mode AD: correct derivatives or an error, never a silent zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from polyhead import AttentionOutput, Mask, attention
from polyhead.errors import BackendUnsupported
from tests.ops.interpreter.interpreted import in_the_interpreter

pytestmark = [  # PyTorch's own, of how it maps, differentiates forward and compiles
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented"),
]

KEY = torch.randn(1, 2, 11, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
QUERIES = torch.randn(3, 1, 2, 11, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
DIRECTION = torch.randn(1, 2, 11, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def loss_of(backend: str, statistics: tuple[str, ...] | None, key: Tensor = KEY) -> Callable[[Tensor], Tensor]:
    def loss(query: Tensor) -> Tensor:
        result = attention(query, key, key, mask=Mask.causal(), backend=backend, statistics=statistics)
        total = result.output.square().sum()
        if result.statistics is not None and result.statistics.entropy is not None:
            total = total + result.statistics.entropy.sum()
        return total

    return loss


def by_dual_numbers(loss: Callable[[Tensor], Tensor], query: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(query, DIRECTION.to(query.dtype)))).tangent
    assert tangent is not None
    return tangent


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda loss, query: (torch.func.grad(loss)(query) * DIRECTION.to(query.dtype)).sum(),
    "jvp": lambda loss, query: torch.func.jvp(loss, (query,), (DIRECTION.to(query.dtype),))[1],
    "dual numbers": by_dual_numbers,
}


@pytest.mark.parametrize("statistics", [None, ("entropy",)])
@pytest.mark.parametrize("way", DERIVATIVES)
@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
def test_a_derivative_is_right_or_refused(backend: str, way: str, statistics: tuple[str, ...] | None) -> None:
    leaf = QUERIES[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of("reference", statistics)(leaf), leaf)
    loss = loss_of(backend, statistics)
    if backend == "blockwise" or (backend == "sdpa" and (way != "grad" or statistics is not None)):
        with pytest.raises(BackendUnsupported, match="forward-mode"):
            DERIVATIVES[way](loss, QUERIES[0])
    else:
        torch.testing.assert_close(DERIVATIVES[way](loss, QUERIES[0]), (grad * DIRECTION).sum())


@pytest.mark.parametrize("statistics", [None, ("entropy",)])
def test_auto_is_mapped_over_a_batch(statistics: tuple[str, ...] | None) -> None:
    loss = loss_of("auto", statistics)
    torch.testing.assert_close(torch.func.vmap(loss)(QUERIES), torch.stack([loss(query) for query in QUERIES]))


def check_kernels() -> None:
    """Check that our kernels reject forward-mode AD, whose derivative would silently be zero."""
    query, key = QUERIES[0].float(), KEY.float()
    for derivative in DERIVATIVES.values():
        with pytest.raises(BackendUnsupported, match="forward-mode"):
            derivative(loss_of("fused", ("entropy",), key), query)
    with pytest.raises(BackendUnsupported, match="function transforms"):
        torch.func.vmap(loss_of("fused", None, key))(QUERIES.float())


def test_in_the_interpreter_our_kernels_refuse() -> None:
    in_the_interpreter(check_kernels)


@pytest.mark.parametrize("statistics", [None, ("entropy",)])
def test_a_compiled_call_takes_the_backend_of_an_eager_one(statistics: tuple[str, ...] | None) -> None:
    """An exported one takes plain operators, the only ones available to other programs."""

    class Layer(torch.nn.Module):
        def forward(self, query: Tensor) -> AttentionOutput:
            return attention(query, KEY, KEY, mask=Mask.causal(), statistics=statistics)

    torch.compiler.reset()
    with torch.no_grad():
        eager, compiled = (call(QUERIES[0]) for call in (Layer(), torch.compile(Layer(), backend="eager")))
        assert eager.backend == ("sdpa" if statistics is None else "blockwise")
        assert compiled.backend == eager.backend
        exported = torch.export.export(Layer(), (QUERIES[0],)).module()(QUERIES[0])
    assert exported.backend == ("sdpa" if statistics is None else "reference")
    torch.testing.assert_close(exported.output, eager.output)
