"""Attention inside other people's programs: compiled without a graph break, exported, and under vmap-free autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import AttentionOutput, Mask, attention
from polyhead.functional import BACKENDS

ALLOWED = torch.rand(2, 1, 19, 19, generator=torch.Generator().manual_seed(1)) < 0.7
MASKS = {
    "nothing": lambda x: None,
    "causal": lambda x: Mask.causal(),
    "window": lambda x: Mask.window(5, sinks=2),
    "lengths": lambda x: Mask.lengths(x["lengths"]) & Mask.causal(),
    "left padding": lambda x: Mask.lengths(x["lengths"], side="left") & Mask.causal(),
    "documents": lambda x: Mask.documents(x["documents"]) & Mask.causal(),
    "two documents": lambda x: Mask.documents(x["documents"], x["documents"]) & Mask.causal(),
    "positions": lambda x: Mask.positions(x["positions"], x["positions"]) & Mask.causal(),
    "dense": lambda x: Mask.dense(x["allowed"]),
    "bias": lambda x: Mask.bias(x["bias"]),
    "relative": lambda x: Mask.relative(x["table"], 4) & Mask.causal(),
    "torch": lambda x: Mask.from_torch(~x["allowed"][0, 0], x["padding"]),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(requires_grad: bool = True) -> dict[str, Tensor]:
    floats = {
        "query": torch.randn(2, 6, 19, 8),
        "key": torch.randn(2, 2, 19, 8),
        "value": torch.randn(2, 2, 19, 8),
    }
    rest = {
        "lengths": torch.tensor([19, 11]),
        "documents": torch.tensor([[0] * 7 + [1] * 12, [0] * 17 + [-1] * 2]),
        "positions": torch.arange(19),
        "allowed": ALLOWED,
        "padding": torch.arange(19) >= torch.tensor([[19], [13]]),
        "bias": torch.randn(1, 6, 19, 19),
        "table": torch.randn(6, 9),
    }
    return {name: x.requires_grad_(requires_grad) for name, x in floats.items()} | rest


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_mask_compiles_in_one_graph_with_its_gradients(backend: str, mask: str) -> None:
    def compute(x: dict[str, Tensor]) -> AttentionOutput:
        return attention(x["query"], x["key"], x["value"], mask=MASKS[mask](x), backend=backend)

    x = inputs()
    learned = [x["query"], x["key"], x["value"]]
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    expected, result = compute(x), compiled(x)
    assert result.backend == expected.backend == backend
    torch.testing.assert_close(result.output, expected.output)
    for ours, theirs in zip(
        torch.autograd.grad(result.output.square().sum(), learned),
        torch.autograd.grad(expected.output.square().sum(), learned),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_every_option_compiles_in_one_graph(backend: str) -> None:
    sinks, scale = torch.randn(6, requires_grad=True), torch.rand(6, requires_grad=True)

    def compute(x: dict[str, Tensor]) -> AttentionOutput:
        return attention(
            x["query"],
            x["key"],
            x["value"],
            mask=Mask.causal() & Mask.relative(x["table"], 4),
            sinks=sinks,
            scale=scale,
            softcap=3.0,
            dropout=0.25,
            seed=5,
            logsumexp=True,
            weights=True,
            backend=backend,
        )

    x = inputs()
    x["table"].requires_grad_()
    learned = [x["query"], x["key"], x["value"], x["table"], sinks, scale]
    expected, result = compute(x), torch.compile(compute, fullgraph=True, backend="aot_eager")(x)
    for name in ("output", "logsumexp", "weights"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name))
    for ours, theirs in zip(
        torch.autograd.grad(result.output.square().sum(), learned),
        torch.autograd.grad(expected.output.square().sum(), learned),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_broken_keys_behind_a_mask_stay_hidden_in_a_compiled_program(backend: str) -> None:
    """A compiled program cannot look whether all is finite, so it takes the guarded way every time."""
    x = inputs(requires_grad=False)
    x["key"][1, :, 11:] = torch.nan
    x["value"][1, :, 11:] = torch.inf

    def compute(x: dict[str, Tensor]) -> Tensor:
        return attention(x["query"], x["key"], x["value"], mask=Mask.lengths(x["lengths"]), backend=backend).output

    result = torch.compile(compute, fullgraph=True, backend="aot_eager")(x)
    assert result.isfinite().all()
    torch.testing.assert_close(result, compute(x))


class Attends(nn.Module):
    def __init__(self, mask: str, **options: Any) -> None:
        super().__init__()
        self.mask, self.options = mask, options

    def forward(self, x: dict[str, Tensor]) -> AttentionOutput:
        return attention(x["query"], x["key"], x["value"], mask=MASKS[self.mask](x), **self.options)


@pytest.mark.parametrize("mask", MASKS)
def test_an_output_leaves_an_exported_program_as_what_it_is(mask: str) -> None:
    x = inputs(requires_grad=False)
    module = Attends(mask)
    program = torch.export.export(module, (x,))
    result = program.module()(x)
    assert isinstance(result, AttentionOutput)
    torch.testing.assert_close(result.output, module(x).output)
    assert (result.logsumexp, result.weights, result.statistics) == (None, None, None)
    assert result.backend == "sdpa"


def test_an_exported_program_returns_weights_and_log_sum_exp() -> None:
    x = inputs(requires_grad=False)
    module = Attends("causal", weights=True, logsumexp=True)
    result = torch.export.export(module, (x,)).module()(x)
    expected = module(x)
    for name in ("output", "weights", "logsumexp"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name))


def test_an_exported_program_holds_no_unrolled_tiles() -> None:
    x = inputs(requires_grad=False)
    program = torch.export.export(Attends("causal", softcap=2.0), (x,))
    assert program.module()(x).backend == "reference"


def test_an_exported_program_takes_any_length() -> None:
    x = inputs(requires_grad=False)
    x = {name: x[name] for name in ("query", "key", "value")}
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = ({name: {2: length} for name in x},)
    module = Attends("causal")
    program = torch.export.export(module, (x,), dynamic_shapes=shapes)
    longer = {name: torch.randn(2, tensor.shape[1], 31, 8) for name, tensor in x.items()}
    torch.testing.assert_close(program.module()(longer).output, module(longer).output)


def test_an_output_is_a_tree_of_its_tensors() -> None:
    result = AttentionOutput(torch.ones(2), backend="reference")
    leaves, spec = torch.utils._pytree.tree_flatten(result)
    assert sum(isinstance(leaf, Tensor) for leaf in leaves) == 1
    back = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert isinstance(back, AttentionOutput)
    assert (back.backend, back.logsumexp) == ("reference", None)
