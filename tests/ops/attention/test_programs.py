"""Attention under torch.compile, without graph breaks and with gradients, and torch.export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import AttentionOutput, Mask, attention
from tests.ops.oracle import ON_THE_CPU

# Dynamo instantiates torch.autograd.Function to follow a context that is written to, and warns about itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

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

# Each backend tiles a resolved mask in its own way, so each is tested with every kind; how a mask is resolved is the
# same for all of them, and is traced with `reference` alone.
TOGETHER = {
    "window of left padding": lambda x: (
        MASKS["left padding"](x) & MASKS["window"](x) & MASKS["bias"](x) & MASKS["torch"](x)
    ),
    "documents": lambda x: MASKS["documents"](x) & MASKS["positions"](x) & MASKS["dense"](x) & MASKS["relative"](x),
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


def test_every_mask_compiles_in_one_graph() -> None:
    def compute(x: dict[str, Tensor]) -> dict[str, Tensor]:
        query, key, value = x["query"], x["key"], x["value"]
        return {
            name: attention(query, key, value, mask=mask(x), backend="reference").output for name, mask in MASKS.items()
        }

    x = inputs(requires_grad=False)
    torch.testing.assert_close(torch.compile(compute, fullgraph=True, backend="eager")(x), compute(x))


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_masks_compile_in_one_graph_with_their_gradients(backend: str) -> None:
    # The others: causal with `blockwise` in the test of every option; no mask with `blockwise` (a layer with sinks), no
    # mask with `sdpa` (a plain one) and causal with it (rotary positions) in tests/layers/multi_head.
    def compute(x: dict[str, Tensor]) -> dict[str, AttentionOutput]:
        query, key, value = x["query"], x["key"], x["value"]
        return {name: attention(query, key, value, mask=mask(x), backend=backend) for name, mask in TOGETHER.items()}

    x = inputs()
    learned = [x["query"], x["key"], x["value"]]
    compiled = torch.compile(compute, fullgraph=True, backend="aot_eager")
    expected, result = compute(x), compiled(x)
    for name in TOGETHER:
        assert result[name].backend == expected[name].backend == backend
        torch.testing.assert_close(result[name].output, expected[name].output, msg=name)
    for ours, theirs in zip(
        torch.autograd.grad(sum(x.output.square().sum() for x in result.values()), learned),
        torch.autograd.grad(sum(x.output.square().sum() for x in expected.values()), learned),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("backend", "seed"), [("reference", 5), ("blockwise", torch.tensor([5]))])
def test_every_option_compiles_in_one_graph(backend: str, seed: int | Tensor) -> None:
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
            seed=seed,
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


@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_broken_keys_behind_a_mask_stay_hidden_in_a_compiled_program(backend: str) -> None:
    """A compiled program cannot read whether all is finite, so it always runs the guarded path."""
    x = inputs(requires_grad=False)
    x["key"][1, :, 11:] = torch.nan
    x["value"][1, :, 11:] = torch.inf

    def compute(x: dict[str, Tensor]) -> Tensor:
        return attention(x["query"], x["key"], x["value"], mask=Mask.lengths(x["lengths"]), backend=backend).output

    result = torch.compile(compute, fullgraph=True, backend="aot_eager")(x)
    assert result.isfinite().all()
    torch.testing.assert_close(result, compute(x))


class Attends(nn.Module):
    def __init__(self, masks: tuple[str, ...] = ("causal",), **options: Any) -> None:
        super().__init__()
        self.masks, self.options = masks, options

    def forward(self, x: dict[str, Tensor]) -> list[AttentionOutput]:
        query, key, value = x["query"], x["key"], x["value"]
        return [attention(query, key, value, mask=MASKS[mask](x), **self.options) for mask in self.masks]


def test_outputs_leave_an_exported_program_as_what_they_are() -> None:
    x = inputs(requires_grad=False)
    module = Attends(tuple(MASKS))
    results = torch.export.export(module, (x,)).module()(x)
    for result, expected in zip(results, module(x), strict=True):
        assert isinstance(result, AttentionOutput)
        torch.testing.assert_close(result.output, expected.output)
        assert (result.logsumexp, result.weights, result.statistics) == (None, None, None)
        assert result.backend == "sdpa"


def test_an_exported_program_returns_weights_and_log_sum_exp() -> None:
    x = inputs(requires_grad=False)
    module = Attends(weights=True, logsumexp=True)
    (result,) = torch.export.export(module, (x,)).module()(x)
    (expected,) = module(x)
    for name in ("output", "weights", "logsumexp"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name))


def test_an_exported_program_holds_no_unrolled_tiles() -> None:
    x = inputs(requires_grad=False)
    program = torch.export.export(Attends(softcap=2.0), (x,))
    assert program.module()(x)[0].backend == "reference"


def test_an_exported_program_takes_any_length() -> None:
    x = inputs(requires_grad=False)
    x = {name: x[name] for name in ("query", "key", "value")}
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = ({name: {2: length} for name in x},)
    module = Attends()
    program = torch.export.export(module, (x,), dynamic_shapes=shapes)
    longer = {name: torch.randn(2, tensor.shape[1], 31, 8) for name, tensor in x.items()}
    torch.testing.assert_close(program.module()(longer)[0].output, module(longer)[0].output)


def test_an_output_is_a_tree_of_its_tensors() -> None:
    result = AttentionOutput(torch.ones(2), backend="reference")
    leaves, spec = torch.utils._pytree.tree_flatten(result)
    assert sum(isinstance(leaf, Tensor) for leaf in leaves) == 1
    back = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert isinstance(back, AttentionOutput)
    assert (back.backend, back.logsumexp) == ("reference", None)
