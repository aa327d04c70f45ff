"""Latent heads in what people do with layers: compilers, exporters, autocast, copies, nothing at all."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead import Mask
from polyhead.layers.kv_cache.latent import PreallocatedLatentCache
from polyhead.layers.latent.forms import FORMS
from polyhead.layers.latent.layer import LatentAttention
from polyhead.layers.positions import Rotary
from tests.layers.compiling import with_dynamic_sizes
from tests.layers.latent.latent_formula import DOUBLE, EMBED, HEADS, RANK, ROPE, SIZES, make

BATCH, LENGTH = 3, 7
pytestmark = [
    # Said once by PyTorch on a CPU without bfloat16 instructions.
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning"),
    # Dynamo instantiates an autograd function, which PyTorch itself deprecates.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def randn(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, EMBED, dtype=DOUBLE)


def differentiated(call: Callable[[Tensor], Any], layer: LatentAttention, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    output = call(leaf).output
    return [output, *torch.autograd.grad(output.square().sum(), [leaf, *layer.parameters()])]


@pytest.mark.parametrize("form", FORMS)
def test_the_layer_compiles_whole_forward_and_backward(form: str) -> None:
    layer = make(causal=True, q_lora_rank=7, form=form)
    # Dynamic sizes and AOTAutograd take most of the time, so one form has each.
    dynamic = form == "absorbed"
    compiled = torch.compile(layer, fullgraph=True, backend="eager" if dynamic else "aot_eager")
    for shape in ((BATCH, LENGTH), (5, 11))[: 1 + dynamic]:
        x, call = randn(*shape), with_dynamic_sizes(compiled, 0, 1) if dynamic else compiled
        with torch._dynamo.config.patch(error_on_recompile=shape != (BATCH, LENGTH)):
            pairs = zip(differentiated(call, layer, x), differentiated(layer, layer, x), strict=True)
        for found, expected in pairs:
            close(found, expected, 1e-9)


@pytest.mark.parametrize("lengths", [None, [LENGTH, 2, 5]])
def test_a_compiled_layer_generates_with_a_latent_cache(lengths: list[int] | None) -> None:
    layer = make(causal=True).eval()
    # Writes into the cache by index, which lengths need, are those that AOTAutograd may get wrong.
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if lengths else "eager")
    blocks = [randn(), *(randn(length=1) for _ in range(3))]
    results = []
    with torch.no_grad():
        for call in (compiled, layer):
            cache = PreallocatedLatentCache.for_layout(
                layer.layout.absorbed, batch_size=BATCH, capacity=17, dtype=DOUBLE
            )
            # A compiled prompt in one of the two: each graph takes its time.
            outputs = [(layer if lengths else call)(blocks[0], cache=cache, lengths=lengths).output]
            results.append(torch.cat([*outputs, *(call(block, cache=cache).output for block in blocks[1:])], 1))
    close(*results)


def test_an_exported_layer_takes_other_lengths() -> None:
    layer, x = make(causal=True).eval(), randn()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    program = torch.export.export(layer, (x,), dynamic_shapes={"query": {0: batch, 1: length}})
    other = randn(5, 11)
    close(program.module()(other).output, layer(other).output)


@pytest.mark.parametrize("form", FORMS)
def test_autocast_computes_in_its_dtype(form: str) -> None:
    layer, x = make(causal=True, dtype=torch.float32, form=form), randn().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(x)
    assert result.output.dtype is torch.bfloat16
    error = (result.output.float() - layer(x).output).abs().max()
    assert 0 < error < 0.05 * layer(x).output.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_nothing_in_gives_nothing_out(form: str) -> None:
    layer = make(causal=True, form=form)
    assert layer(randn(0)).output.shape == (0, LENGTH, EMBED)
    assert layer(randn(length=0)).output.shape == (BATCH, 0, EMBED)


def test_a_row_that_sees_nothing_gives_the_output_bias() -> None:
    layer = make()
    for form in FORMS:
        output = layer(randn(), mask=Mask.dense(torch.zeros(1, 1, 1, LENGTH, dtype=torch.bool)), form=form).output
        close(output, layer.out_proj.bias.expand_as(output))


def test_copies_pickles_and_a_meta_device() -> None:
    layer, x = make(causal=True), randn()
    expected = layer(x).output
    assert torch.equal(copy.deepcopy(layer)(x).output, expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x).output, expected)
    empty = LatentAttention(EMBED, HEADS, **SIZES, positions=Rotary(ROPE, interleaved=True), causal=True, device="meta")
    assert empty(torch.empty(2, 3, EMBED, device="meta")).output.shape == (2, 3, EMBED)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = empty.to_empty(device="cpu").double()
    loaded.load_state_dict(torch.load(file))
    assert torch.equal(loaded(x).output, expected)


def test_a_fresh_layer_starts_with_neutral_norms_and_biases() -> None:
    layer = LatentAttention(EMBED, HEADS, **SIZES, q_lora_rank=7, sinks=True)
    for name, parameter in layer.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif parameter.ndim == 1:
            assert (parameter == 0).all()
        else:
            limit = (6 / sum(parameter.shape)) ** 0.5
            assert 0.8 * limit < parameter.abs().max() <= limit
    assert layer.layout.cache_width == RANK
