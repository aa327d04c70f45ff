"""Routed heads on a GPU: the numbers of float64, nothing that waits, graphs that can be replayed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead import Mask
from polyhead.layers.kv_cache import PreallocatedCache
from polyhead.layers.positions import Rotary
from polyhead.layers.variants import RoutedHeads
from polyhead.layers.variants.routed import layer as routed_layer
from polyhead.layers.variants.routed.layer import RoutedOutput
from polyhead.layers.variants.routed.router import Routing
from tests.error_budget import DRAWS, Compared, assert_draws_within_error_budget
from tests.layers.head_formula import earlier
from tests.layers.variants.routed_formula import routed_formula, scramble

pytestmark = pytest.mark.gpu
BATCH, LENGTH, EMBED, HEADS, DIM = 2, 333, 192, 6, 32
SHAPES: dict[str, dict[str, Any]] = {
    "shared": {"top_k": 2},
    "shared, two KV heads": {"top_k": 3, "num_kv_heads": 2, "normalise": "chosen"},
    "shared, top_p": {"top_p": 0.6},
    "full": {"shape": "full", "top_k": 2},
    "full, grouped": {"shape": "full", "top_k": 2, "num_kv_heads": 2, "always_on": 1},
    "full, threshold": {"shape": "full", "threshold": 0.2},
}
FIXED = ["shared", "shared, two KV heads", "full", "full, grouped"]
shapes = pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)


def make(options: dict[str, Any], dtype: torch.dtype, **more: Any) -> RoutedHeads:
    sizes = {"head_dim": DIM, "causal": True, "device": "cuda", "dtype": dtype}
    layer = scramble(RoutedHeads(EMBED, HEADS, **sizes, **options, **more))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.3)
    return layer


def tokens(dtype: torch.dtype, length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, EMBED, device="cuda").to(dtype)


def differentiated(call: Any, x: Tensor, layer: RoutedHeads, gradient: Tensor) -> dict[str, Tensor]:
    """The output and its gradients; that of a key's bias is left out, which is 0 but for rounding."""
    x = x.detach().requires_grad_()
    names = [name for name, _ in layer.named_parameters() if not name.startswith(("router", "k_proj.bias"))]
    named = {"x": x, **{name: layer.get_parameter(name) for name in names}}
    output = call(x)
    found = torch.autograd.grad(output, list(named.values()), gradient)
    return {"output": output, **dict(zip(named, found, strict=True))}


def compared(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Compared]:
    """A layer and tokens drawn at random: its output and its gradients."""
    layer, x, gradient = make(options, dtype), tokens(dtype), tokens(dtype)
    exact = make(options, torch.float64)
    exact.load_state_dict(layer.state_dict())
    exact = exact.cpu()
    found = layer(x).routing
    routing = Routing(found.heads, found.weights.detach(), HEADS, counts=found.counts)
    counts = None if found.counts is None else found.counts.cpu()
    exactly = Routing(found.heads.cpu(), found.weights.detach().cpu().double(), HEADS, counts=counts)
    visible = earlier(LENGTH)
    ours = differentiated(lambda x: layer(x, routing=routing).output, x, layer, gradient)
    plain = differentiated(lambda x: routed_formula(layer, x, routing, visible=visible.cuda())[0], x, layer, gradient)
    wanted = differentiated(
        lambda x: routed_formula(exact, x, exactly, visible=visible)[0],
        x.cpu().double(),
        exact,
        gradient.cpu().double(),
    )
    return {name: Compared(ours[name].cpu(), value, plain[name].cpu()) for name, value in wanted.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@shapes
def test_output_and_gradients_are_within_the_error_budget(options, dtype):
    # The gradient of a value's bias is as many numbers as a head has channels.
    draws = [compared(options, dtype) for _ in range(DRAWS)]
    if dtype is torch.float32 and options is SHAPES["shared"]:
        draws = [{name: found for name, found in draw.items() if name != "v_proj.bias"} for draw in draws]
    assert_draws_within_error_budget(draws)


@pytest.mark.xfail(strict=True, reason="1.25 of it: all keys of a row err with their log-sum-exp, see RESULTS.md")
def test_the_gradient_of_a_shared_values_bias_is_within_the_error_budget_of_float32():
    draws = [compared(SHAPES["shared"], torch.float32) for _ in range(DRAWS)]
    assert_draws_within_error_budget([{"v_proj.bias": draw["v_proj.bias"]} for draw in draws])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("kind", FIXED)
def test_forward_and_backward_wait_for_nothing(kind):
    layer, x = make(SHAPES[kind], torch.bfloat16, positions=Rotary(DIM).cuda(), finite=True), tokens(torch.bfloat16)

    def step() -> None:
        result = layer(x, statistics="entropy")
        loss = result.output.float().square().mean() + result.routing.balance_loss + result.routing.z_loss
        loss.backward()

    step()  # compiles kernels and fills tables
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("kind", FIXED)
def test_a_given_routing_and_a_mask_over_a_cache_wait_for_nothing(kind):
    layer, x = make(SHAPES[kind], torch.bfloat16, finite=True), tokens(torch.bfloat16, 40)
    mask = Mask.lengths([40, 39], queries=[5, 4]).to("cuda")
    cache = PreallocatedCache.for_layout(
        layer.layout, batch_size=BATCH, capacity=48, device="cuda", dtype=torch.bfloat16
    )

    @torch.no_grad()
    def step() -> list[RoutedOutput]:
        cache.reset()
        routing = layer(x[:, :35], cache=cache).routing
        twin = cache.fork()
        options = {"mask": mask, "lengths": [5] * BATCH}
        last = [layer(x[:, 35:], cache=cache, **options)]
        last.append(layer(x[:, 35:], cache=twin, routing=last[0].routing, **options))
        layer(x[:, :35], routing=routing)
        return last

    step()  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, again = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.output, again.output)
    assert found.routing.real.sum(-1).tolist() == [5, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@shapes
def test_a_mask_over_a_cache_is_that_of_the_full_forward(options, dtype):
    layer, x = make(options, dtype), tokens(dtype, 40)
    cache = PreallocatedCache.for_layout(layer.layout, batch_size=BATCH, capacity=48, device="cuda", dtype=dtype)
    full = layer(x, mask=Mask.lengths([40, 36])).output
    with torch.no_grad():
        layer(x[:, :35], cache=cache)
        result = layer(x[:, 35:], cache=cache, mask=Mask.lengths([40, 36], queries=[5, 1]), lengths=[5, 5])
    real = result.routing.real
    assert real.sum(-1).tolist() == [5, 1]
    torch.testing.assert_close(result.output[real], full[:, 35:][real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@shapes
def test_heads_weighed_inside_the_output_product_are_the_same(options, dtype):
    layer, x = make(options, dtype), tokens(dtype)
    gate = torch.rand(layer.layout.num_heads, device="cuda", dtype=dtype)
    for given in ({}, {"head_gate": gate}):
        with torch.no_grad():
            inside = layer(x, **given).output
            with mock.patch.object(routed_layer, "weighs_rows", return_value=False):
                assert layer(x, **given).output.equal(inside)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@shapes
def test_a_batch_of_nothing(options, dtype):
    layer, x = make(options, dtype), tokens(dtype)[:0].requires_grad_()
    result = layer(x, statistics=True, logsumexp=True)
    assert result.output.shape == (0, LENGTH, EMBED)
    assert result.statistics.entropy.shape == (0, layer.layout.num_heads, LENGTH)
    inputs = [x, *layer.parameters()]
    gradients = torch.autograd.grad(result.output.float().sum() + result.routing.balance_loss, inputs)
    assert all(bool((gradient == 0).all()) for gradient in gradients)
    cache = PreallocatedCache.for_layout(layer.layout, batch_size=0, capacity=9, device="cuda", dtype=dtype)
    with torch.no_grad():
        for length in (5, 1):
            assert layer(x[:, :length], cache=cache).output.shape == (0, length, EMBED)


@shapes
def test_a_graph_replays_other_routings(options):
    layer = make(options, torch.bfloat16, finite=True)
    x, other = tokens(torch.bfloat16), tokens(torch.bfloat16)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph, static = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            output = layer(static).output
        for given in (x, other):
            static.copy_(given)
            graph.replay()
            torch.testing.assert_close(output, layer(given).output)


@pytest.mark.parametrize("kind", FIXED)
def test_generation_equals_the_full_forward(kind):
    layer, x = make(SHAPES[kind], torch.float32, positions=Rotary(DIM).cuda()), tokens(torch.float32, 40)
    cache = PreallocatedCache.for_layout(layer.layout, batch_size=BATCH, capacity=48, device="cuda")
    with torch.no_grad():
        pieces = [layer(block, cache=cache).output for block in x.split([29, 1, 1, 4, 5], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), layer(x).output, rtol=1e-4, atol=1e-4)


# Inductor would rather have TensorFloat32, which is not requested here.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled on the fly:UserWarning")  # of the gate
@pytest.mark.slow
@pytest.mark.parametrize("kind", FIXED)
def test_inductor_compiles_the_layer_whole(kind):
    torch.compiler.reset()
    layer, x = make(SHAPES[kind], torch.float32), tokens(torch.float32)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x).output, layer(x).output, rtol=1e-3, atol=1e-3)
