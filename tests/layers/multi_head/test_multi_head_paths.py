"""The short way through a layer and the long one give the same numbers and gradients, whatever was done to it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, prune

from polyhead import Mask, MultiHeadAttention
from polyhead.layers import base_attention

BATCH, LENGTH, EMBED, HEADS, KV_HEADS, HEAD_DIM = 3, 11, 23, 6, 2, 5
DOUBLE = torch.float64


def make(**options: Any) -> MultiHeadAttention:
    layer = MultiHeadAttention(EMBED, HEADS, head_dim=HEAD_DIM, dtype=DOUBLE, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


class Ways(list[str]):
    """Which way each call of a layer took."""

    def __call__(self, layer: MultiHeadAttention, x: Tensor, **options: Any) -> Tensor:
        calls = len(self)
        output = layer(x, **options).output
        if len(self) == calls:
            self.append("short")
        return output


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Calls layers and remembers the way they took: only the long one goes through `attention`."""
    taken, attention = Ways(), base_attention.attention

    def watched(*args: Any, **options: Any) -> Any:
        taken.append("long")
        return attention(*args, **options)

    monkeypatch.setattr(base_attention, "attention", watched)
    return taken


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def results(call: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and the gradient of the input and of every parameter that has one."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    output = call(leaf)
    (output * torch.linspace(-1, 1, output.numel(), dtype=DOUBLE).view_as(output)).sum().backward()
    assert leaf.grad is not None
    grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "input": leaf.grad, **grads}


def straightforward(layer: MultiHeadAttention, x: Tensor, causal: bool = False) -> Tensor:
    """The modules called one by one around PyTorch's attention."""

    def split(y: Tensor, heads: int) -> Tensor:
        return y.unflatten(-1, (heads, -1)).transpose(1, 2)

    q = split(layer.q_proj(x), HEADS)
    k, v = (split(linear(x), layer.layout.num_kv_heads) for linear in (layer.k_proj, layer.v_proj))
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return layer.out_proj(heads.transpose(1, 2).flatten(2))


def same_on_both_ways(ways: Ways, layer: MultiHeadAttention, x: Tensor, expected_way: str = "short") -> None:
    """The layer against its modules called one by one, by the way it takes itself and by the long one."""
    exact = results(lambda y: straightforward(layer, y), layer, x)
    for options, way in (
        ({}, expected_way),
        ({"mask": Mask()}, "long"),
        ({"head_gate": torch.ones(HEADS, dtype=DOUBLE)}, "long"),
        ({"backend": "sdpa"}, "long"),
    ):
        ways.clear()
        ours = results(lambda y, options=options: ways(layer, y, **options), layer, x)
        assert ways == [way]
        assert ours.keys() == exact.keys()
        for name in exact:
            close(ours[name], exact[name])
    with torch.no_grad():
        close(layer(x).output, exact["output"])
        close(layer(x, mask=Mask()).output, exact["output"])


LAYOUTS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped": {"num_kv_heads": KV_HEADS},
    "multi-query": {"num_kv_heads": 1},
    "without bias": {"bias": False},
    "with output bias alone": {"bias": False, "output_bias": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_ways_are_the_modules_called_one_by_one(layout: str, ways: Ways, x: Tensor) -> None:
    same_on_both_ways(ways, make(**LAYOUTS[layout]), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_ways_agree_on_a_causal_layer(layout: str, ways: Ways, x: Tensor) -> None:
    layer = make(causal=True, **LAYOUTS[layout])
    exact = results(lambda y: straightforward(layer, y, causal=True), layer, x)
    for options in ({}, {"backend": "sdpa"}, {"mask": Mask.lengths([LENGTH] * BATCH)}, {"backend": "blockwise"}):
        ours = results(lambda y, options=options: ways(layer, y, **options), layer, x)
        for name in exact:
            close(ours[name], exact[name])
    assert ways == ["short", "long", "long", "long"]


def test_what_the_short_way_cannot_do_takes_the_long_one(ways: Ways, x: Tensor) -> None:
    for options in ({"qk_norm": "rms"}, {"output_gate": "head"}, {"softcap": 3.0}, {"sinks": True}, {"value_dim": 7}):
        ways(make(**options), x)
    ways(make(dropout=0.5), x)
    ways(make(), x, weights=True)
    ways(make(), x, logsumexp=True)
    gated = make()
    gated.head_gate = torch.ones(HEADS, dtype=DOUBLE)
    ways(gated, x)
    assert set(ways) == {"long"}
    ways(make(dropout=0.5).eval(), x)
    assert ways[-1] == "short"


# ---- what people do to modules


def hooked(layer: MultiHeadAttention) -> None:
    layer.q_proj.register_forward_hook(lambda module, args, output: output * 2)


def hooked_before(layer: MultiHeadAttention) -> None:
    layer.v_proj.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def hooked_at_the_end(layer: MultiHeadAttention) -> None:
    layer.out_proj.register_forward_hook(lambda module, args, output: output - 3)


def hooked_backward(layer: MultiHeadAttention) -> None:
    layer.k_proj.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 0.5,))


class LowRank(nn.Module):
    """An adapter as those of LoRA: the old map plus a product of two thin ones."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False, dtype=DOUBLE)
        self.up = nn.Linear(2, linear.out_features, bias=False, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(layer: MultiHeadAttention) -> None:
    layer.q_proj = LowRank(layer.q_proj)  # type: ignore[assignment]
    layer.v_proj = LowRank(layer.v_proj)  # type: ignore[assignment]


def adapted_at_the_end(layer: MultiHeadAttention) -> None:
    layer.out_proj = LowRank(layer.out_proj)  # type: ignore[assignment]


def weight_normed(layer: MultiHeadAttention) -> None:
    parametrizations.weight_norm(layer.q_proj)


def orthogonal(layer: MultiHeadAttention) -> None:
    parametrizations.orthogonal(layer.k_proj)


def pruned(layer: MultiHeadAttention) -> None:
    prune.random_unstructured(layer.v_proj, "weight", 0.3)


def another_linear(layer: MultiHeadAttention) -> None:
    layer.k_proj = copy.deepcopy(layer.k_proj)
    with torch.no_grad():
        layer.k_proj.weight.mul_(2)


def another_hooked_linear_at_the_end(layer: MultiHeadAttention) -> None:
    layer.out_proj = copy.deepcopy(layer.out_proj)
    hooked_at_the_end(layer)


def another_parameter(layer: MultiHeadAttention) -> None:
    layer.q_proj.weight = nn.Parameter(layer.q_proj.weight.detach() * 3)


def another_bias(layer: MultiHeadAttention) -> None:
    layer.v_proj.bias = nn.Parameter(layer.v_proj.bias.detach() - 5)


def without_a_bias(layer: MultiHeadAttention) -> None:
    layer.k_proj.bias = None  # type: ignore[assignment]


def other_data(layer: MultiHeadAttention) -> None:
    layer.k_proj.weight.data = layer.k_proj.weight.data * -1
    layer.q_proj.bias.data = layer.q_proj.bias.data + 1


def assigned(layer: MultiHeadAttention) -> None:
    layer.load_state_dict(make().state_dict(), assign=True)


TREATMENTS = [
    hooked,
    hooked_before,
    hooked_at_the_end,
    hooked_backward,
    adapted,
    adapted_at_the_end,
    weight_normed,
    orthogonal,
    pruned,
    another_linear,
    another_hooked_linear_at_the_end,
    another_parameter,
    another_bias,
    without_a_bias,
    other_data,
    assigned,
]


@pytest.mark.parametrize("treatment", TREATMENTS, ids=lambda f: f.__name__)
def test_a_changed_module_is_called_and_never_passed_over(
    treatment: Callable[[MultiHeadAttention], None], ways: Ways, x: Tensor
) -> None:
    layer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        treatment(layer)
    same_on_both_ways(ways, layer, x, expected_way="long")


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_bias_given_to_a_layer_without_is_added(name: str, ways: Ways, x: Tensor) -> None:
    layer = make(bias=False)
    linear = layer.get_submodule(name)
    linear.bias = nn.Parameter(torch.randn(linear.out_features, dtype=DOUBLE))
    same_on_both_ways(ways, layer, x, expected_way="long")


def test_a_hook_on_all_modules_is_called(ways: Ways, x: Tensor) -> None:
    layer, seen = make(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        ways(layer, x)
    finally:
        handle.remove()
    assert ways == ["long"]
    assert {id(module) for module in seen} >= {
        id(m) for m in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    }
    ways(layer, x)
    assert ways[-1] == "short"


FROZEN = [("q_proj.weight",), ("k_proj.weight", "k_proj.bias"), ("v_proj.bias", "out_proj.weight"), ("out_proj.bias",)]


@pytest.mark.parametrize("frozen", FROZEN, ids=" ".join)
def test_frozen_parameters_get_no_gradient_and_the_others_theirs(
    frozen: tuple[str, ...], ways: Ways, x: Tensor
) -> None:
    layer = make()
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    same_on_both_ways(ways, layer, x)
    assert all(layer.get_parameter(name).grad is None for name in frozen)


def test_a_wholly_frozen_layer_still_passes_gradients_on(ways: Ways, x: Tensor) -> None:
    layer = make().requires_grad_(False)
    same_on_both_ways(ways, layer, x)
    assert not layer(x).output.requires_grad


def test_a_tied_weight_gets_the_gradients_of_both_its_places(ways: Ways, x: Tensor) -> None:
    layer = make()
    layer.k_proj.weight = layer.q_proj.weight
    same_on_both_ways(ways, layer, x, expected_way="long")
    layer.double()  # every move lays the projections side by side again, which a tied pair must survive
    assert layer.k_proj.weight is layer.q_proj.weight
    same_on_both_ways(ways, layer, x, expected_way="long")


MOVES: dict[str, Callable[[MultiHeadAttention], MultiHeadAttention]] = {
    "there and back in dtype": lambda layer: layer.float().double(),
    "deepcopy": copy.deepcopy,
    "to_empty and load": lambda layer: _emptied(layer),
    "share_memory": lambda layer: layer.share_memory(),
    "weights loaded": lambda layer: _loaded(layer),
    "requires_grad_ twice": lambda layer: layer.requires_grad_(False).requires_grad_(True),
}


def _emptied(layer: MultiHeadAttention) -> MultiHeadAttention:
    weights = copy.deepcopy(layer.state_dict())
    layer.to_empty(device="cpu").load_state_dict(weights)
    return layer


def _loaded(layer: MultiHeadAttention) -> MultiHeadAttention:
    layer.load_state_dict(make().state_dict())
    return layer


@pytest.mark.parametrize("move", MOVES)
def test_a_moved_or_copied_layer_still_takes_the_short_way(move: str, ways: Ways, x: Tensor) -> None:
    same_on_both_ways(ways, MOVES[move](make()), x)


# ---- torch.func and forward-mode differentiation


def test_functional_call_uses_the_parameters_it_is_given(x: Tensor) -> None:
    layer, other = make(), make()
    given = dict(other.named_parameters())
    close(torch.func.functional_call(layer, given, (x,)).output, other(x).output)
    some = {name: given[name] for name in ("k_proj.weight", "out_proj.bias")}
    changed = copy.deepcopy(layer)
    changed.load_state_dict({**layer.state_dict(), **{name: p.detach() for name, p in some.items()}})
    close(torch.func.functional_call(layer, some, (x,)).output, changed(x).output)
    close(layer(x).output, straightforward(layer, x))


def test_torch_func_grad_over_input_and_parameters_is_the_gradient(x: Tensor) -> None:
    layer = make(num_kv_heads=KV_HEADS)
    exact = results(lambda y: layer(y).output, layer, x)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(y: Tensor, given: dict[str, Tensor]) -> Tensor:
        output = torch.func.functional_call(layer, given, (y,)).output
        return (output * torch.linspace(-1, 1, output.numel(), dtype=DOUBLE).view_as(output)).sum()

    grad_x, grads = torch.func.grad(loss, argnums=(0, 1))(x, parameters)
    close(grad_x, exact["input"])
    for name in parameters:
        close(grads[name], exact[name])
    close(torch.func.grad(lambda y: loss(y, {}))(x), exact["input"])  # the parameters as they are
    only = {"out_proj.weight": parameters["out_proj.weight"]}
    close(torch.func.grad(lambda p: loss(x, p))(only)["out_proj.weight"], exact["out_proj.weight"])


@contextmanager
def slow_batching_is_no_error() -> Iterator[None]:
    """PyTorch's CPU kernel has no batching rule of its own; it says so and loops."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        yield


def test_vmap_over_inputs_and_per_sample_gradients_are_a_loop(x: Tensor) -> None:
    layer = make()
    with slow_batching_is_no_error():
        close(torch.func.vmap(lambda y: layer(y[None]).output[0])(x), layer(x).output)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(given: dict[str, Tensor], y: Tensor) -> Tensor:
        return torch.func.functional_call(layer, given, (y[None],)).output.square().sum()

    with slow_batching_is_no_error():
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for row in range(BATCH):
        alone = torch.func.grad(loss)(parameters, x[row])
        for name in parameters:
            close(each[name][row], alone[name])


def test_an_ensemble_by_vmap_over_stacked_parameters_is_a_loop(x: Tensor) -> None:
    layers = [make() for _ in range(4)]
    parameters, buffers = torch.func.stack_module_state(layers)
    skeleton = copy.deepcopy(layers[0]).to("meta")
    with slow_batching_is_no_error():
        together = torch.func.vmap(lambda p: torch.func.functional_call(skeleton, (p, buffers), (x,)).output)(
            parameters
        )
    close(together, torch.stack([layer(x).output for layer in layers]))


# PyTorch loads its forward-mode rules on first use, and some of them through its own deprecated script compiler.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_differentiation_is_the_jacobian_times_the_tangent(x: Tensor) -> None:
    layer, tangent = make(), torch.randn_like(x)
    call = lambda y: layer(y, backend="reference").output  # noqa: E731
    step = 1e-6
    expected = (call(x + step * tangent) - call(x - step * tangent)) / (2 * step)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(dual, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.func.jvp(call, (x,), (tangent,))[1], dual, rtol=1e-12, atol=1e-12)


# ---- training


def test_a_weight_written_to_after_the_forward_makes_the_backward_refuse(x: Tensor) -> None:
    layer = make()
    output = layer(x.requires_grad_()).output
    with torch.no_grad():
        layer.k_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_gradients_add_up_over_several_forwards(x: Tensor) -> None:
    layer = make()
    first, second = (results(lambda y: layer(y).output, layer, part) for part in (x, -2 * x))
    layer.zero_grad()
    for part in (x, -2 * x):
        output = layer(part).output
        (output * torch.linspace(-1, 1, output.numel(), dtype=DOUBLE).view_as(output)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        close(parameter.grad, first[name] + second[name])


class ThreeLinears(nn.Module):
    """The same attention with three projections that know nothing of each other."""

    def __init__(self, like: MultiHeadAttention) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear = getattr(like, name)
            own = nn.Linear(linear.in_features, linear.out_features, dtype=DOUBLE)
            own.load_state_dict(linear.state_dict())
            setattr(self, name, own)
        self.layout = like.layout

    def forward(self, x: Tensor) -> Tensor:
        return straightforward(self, x)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_kv_heads", [HEADS, KV_HEADS])
@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    ],
    ids=["SGD", "AdamW foreach", "Adam fused"],
)
def test_training_equals_that_of_three_separate_linear_maps(
    build: Callable[..., torch.optim.Optimizer], num_kv_heads: int, ways: Ways
) -> None:
    layer = make(num_kv_heads=num_kv_heads)
    plain = ThreeLinears(layer)
    optimizers = [build(layer.parameters()), build(plain.parameters())]
    for step in range(5):
        data = torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
        losses = [(ways(layer, data) - data).square().mean(), (plain(data) - data).square().mean()]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss.backward()
            optimizer.step()
        close(losses[0], losses[1])
    assert ways == ["short"] * 5
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(layer.get_parameter(name), parameter, rtol=1e-9, atol=1e-9)
