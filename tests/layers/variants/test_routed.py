"""`RoutedHeads` against the formula: both shapes, fixed and varying numbers of heads, masks, gates, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead import Mask, MultiHeadAttention, Statistics
from polyhead.errors import CheckpointError, DeviceError, DtypeError, MaskError, OptionError, ShapeError
from polyhead.layers.positions import ALiBi, Learned, Rotary
from polyhead.layers.variants import RoutedHeads
from polyhead.layers.variants.routed.router import Routing
from polyhead.ops.selected_rows import row_products
from tests.error_budget import DRAWS, assert_within_error_budget
from tests.gradients import FAST
from tests.layers.head_formula import earlier
from tests.layers.variants.routed_formula import routed_formula, scramble

BATCH, LENGTH, EMBED, HEADS, DIM = 3, 11, 26, 6, 5
DOUBLE = torch.float64
SHAPES: dict[str, dict[str, Any]] = {
    "shared": {"shape": "shared", "top_k": 2},
    "shared, chosen": {"shape": "shared", "top_k": 3, "normalise": "chosen"},
    "shared, two KV heads": {"shape": "shared", "top_k": 2, "num_kv_heads": 2, "value_dim": 7},
    "shared, top_p": {"shape": "shared", "top_p": 0.6, "num_kv_heads": 2},
    "shared, always on": {"shape": "shared", "threshold": 0.2, "always_on": 1},
    "full": {"shape": "full", "top_k": 2, "value_dim": 7},
    "full, grouped": {"shape": "full", "top_k": 2, "num_kv_heads": 2, "always_on": 2},
    "full, top_p": {"shape": "full", "top_p": 0.5, "k_max": 4, "normalise": "chosen"},
    "full, threshold": {"shape": "full", "threshold": 0.25, "k_min": 2, "always_on": 1, "bias": False},
}
shapes = pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
LAYER_SHAPES = ("shared", "full")


def make(options: dict[str, Any], **more: Any) -> RoutedHeads:
    return scramble(RoutedHeads(EMBED, HEADS, **{"head_dim": DIM, "dtype": DOUBLE, **options, **more})).eval()


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, EMBED, dtype=DOUBLE)


@shapes
@pytest.mark.parametrize("causal", [False, True])
def test_output_is_that_of_the_formula(options, causal):
    layer, x = make(options, causal=causal), tokens()
    result = layer(x)
    expected, _ = routed_formula(layer, x, result.routing, visible=earlier(LENGTH) if causal else None)
    torch.testing.assert_close(result.output, expected)


@shapes
def test_padding_sees_nothing_and_changes_nothing(options):
    layer, x, lengths = make(options, causal=True), tokens(), [LENGTH, 4, 0]
    real = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    visible = earlier(LENGTH) & real[:, None, :] & real[:, :, None]
    result = layer(x, mask=Mask.lengths(lengths))
    expected, _ = routed_formula(layer, x, result.routing, visible=visible)
    torch.testing.assert_close(result.output, expected)
    assert torch.equal(result.routing.real, real)
    broken = torch.where(real[..., None], x, torch.randn_like(x) * 100)
    again = layer(broken, mask=Mask.lengths(lengths))
    torch.testing.assert_close(again.output[real], result.output[real])
    for name in ("balance_loss", "z_loss"):
        torch.testing.assert_close(getattr(again.routing, name), getattr(result.routing, name))


@shapes
def test_gradients_are_those_of_the_formula(options):
    layer, x = make(options, causal=True), tokens().requires_grad_()
    inputs = [x, *layer.parameters()]
    gradient = torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    result = layer(x)
    expected, _ = routed_formula(layer, x, layer(x).routing, visible=earlier(LENGTH))
    found = torch.autograd.grad(result.output, inputs, gradient)
    named = dict(zip(["x", *dict(layer.named_parameters())], found, strict=True))
    assert named["router.gate.weight"].abs().max() > 1e-6
    for name, expected_grad in zip(named, torch.autograd.grad(expected, inputs, gradient), strict=True):
        torch.testing.assert_close(named[name], expected_grad, msg=lambda text, name=name: f"{name}: {text}")


def test_second_derivatives_pass_through_the_grouped_products():
    layer = make({"top_k": 2}, backend="reference")
    x = torch.randn(1, 2, EMBED, dtype=DOUBLE, requires_grad=True)
    routing = layer(x).routing
    fixed = Routing(routing.heads, routing.weights.detach(), HEADS)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, routing=fixed).output[..., :3], (x,), **FAST)


@shapes
def test_cross_attention_and_a_remembered_source(options):
    layer, x, source = make(options), tokens(7), tokens(13)
    result = layer(x, source)
    expected, _ = routed_formula(layer, x, result.routing, source=source)
    torch.testing.assert_close(result.output, expected)
    torch.testing.assert_close(layer(x, layer.remember(source)).output, expected)


# ---- dense attention: every head with weight 1


def dense_twin(layer: RoutedHeads) -> MultiHeadAttention:
    """Return multi-head attention with the same heads."""
    layout = layer.layout
    twin = MultiHeadAttention(
        layout.embed_dim, layer.num_heads, num_kv_heads=layout.num_kv_heads, head_dim=layout.head_dim,
        value_dim=layout.value_dim, causal=True, dtype=layer.query_weight.dtype,
    )  # fmt: skip
    weights = {
        "q_proj.weight": layer.query_weight.mT.reshape(-1, layout.embed_dim),
        "q_proj.bias": layer.query_bias.reshape(-1),
        "out_proj.weight": layer.output_weight.reshape(-1, layout.embed_dim).T,
        "out_proj.bias": layer.output_bias,
        **{name: x for name, x in layer.named_parameters() if name.startswith(("k_proj", "v_proj"))},
    }
    twin.load_state_dict(weights)
    return twin


@pytest.mark.numerics
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", LAYER_SHAPES)
def test_every_head_with_weight_one_is_the_dense_layer_within_the_error_budget(shape, dtype):
    exact = make({"shape": shape, "top_k": 2}, causal=True)
    layer = RoutedHeads(EMBED, HEADS, head_dim=DIM, shape=shape, top_k=2, causal=True, dtype=dtype)
    layer.load_state_dict(exact.state_dict())
    x = torch.cat([tokens() for _ in range(DRAWS)]).to(dtype)
    exact.load_state_dict(layer.state_dict())  # the same rounded weights
    outputs = {}
    for name, module in (("exact", dense_twin(exact)), ("plain", dense_twin(layer)), ("routed", layer)):
        given = x.to(module.k_proj.weight.dtype).requires_grad_()
        options = {"routing": Routing.every_head(len(x), LENGTH, HEADS, given)} if name == "routed" else {}
        output = module(given, **options, backend=None if name == "exact" else "reference").output
        (gradient,) = torch.autograd.grad(output.sum(), given)
        outputs[name] = (output, gradient)
    for index, name in enumerate(("output", "gradient")):
        exactly, plain, routed = (outputs[kind][index] for kind in ("exact", "plain", "routed"))
        assert_within_error_budget(routed, exact=exactly, plain=plain, name=name)


# ---- statistics and weights


@shapes
def test_statistics_are_those_of_the_chosen_rows_and_no_others(options):
    layer, x = make(options, causal=True), tokens()
    result = layer(x, statistics=Statistics(sink_keys=2, window=3), logsumexp=True)
    _, weights = routed_formula(layer, x, result.routing, visible=earlier(LENGTH))
    rows = result.statistics
    chosen = result.routing.is_chosen.transpose(1, 2).repeat(1, layer.rows_per_head, 1)
    distance = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    expected = {
        "entropy": -torch.special.xlogy(weights, weights).sum(-1),
        "confidence": weights.amax(-1),
        "mean_distance": (weights * distance.abs()).sum(-1),
        "sink_mass": weights[..., :2].sum(-1),
        "window_mass": (weights * (distance.abs() <= 3)).sum(-1),
        "visible_keys": chosen * torch.arange(1.0, LENGTH + 1, dtype=DOUBLE),
    }
    for name, values in expected.items():
        torch.testing.assert_close(getattr(rows, name), values, msg=lambda text, name=name: f"{name}: {text}")
    assert torch.equal(rows.max_logit == -torch.inf, ~chosen)
    assert torch.equal(result.logsumexp == -torch.inf, ~chosen)


@pytest.mark.parametrize("kind", ["shared", "shared, two KV heads"])
def test_weights_are_those_of_the_formula_and_zero_for_heads_not_chosen(kind):
    layer, x = make(SHAPES[kind]), tokens()
    result = layer(x, weights=True)
    _, expected = routed_formula(layer, x, result.routing)
    torch.testing.assert_close(result.weights, expected)


@shapes
def test_gates_multiply_head_outputs(options):
    layer, x = make(options), tokens()
    maps = HEADS * layer.rows_per_head  # heads of KV head 0, then those of KV head 1, ...
    routing = layer(x).routing
    gate = torch.rand(BATCH, maps, LENGTH, dtype=DOUBLE)
    gate[:, ::HEADS] = 0.0  # head 0, with every KV head
    found = layer(x, routing=routing, head_gate=gate, statistics="entropy")
    out = torch.zeros_like(x) + (0.0 if layer.output_bias is None else layer.output_bias)
    dim = layer.layout.value_dim
    for row in range(layer.rows_per_head):
        # One KV head at a time: the rows of W_O for the others are zero.
        only = make(options)
        only.load_state_dict(layer.state_dict())
        with torch.no_grad():
            part = torch.zeros_like(layer.output_weight)
            part[:, row * dim : (row + 1) * dim] = layer.output_weight[:, row * dim : (row + 1) * dim]
            only.output_weight.copy_(part)
        factors = gate[:, row * HEADS : (row + 1) * HEADS].transpose(1, 2).gather(2, routing.heads)
        gated = Routing(routing.heads, routing.weights * factors, HEADS, counts=routing.counts)
        part_output = only(x, routing=gated).output
        out = out + part_output - (0.0 if layer.output_bias is None else layer.output_bias)
    torch.testing.assert_close(found.output, out)
    layer.head_gate = gate
    torch.testing.assert_close(layer(x, routing=routing).output, out)
    torch.testing.assert_close(
        layer(x, routing=routing, statistics="entropy").statistics.entropy, found.statistics.entropy
    )


# ---- cost


@shapes
def test_only_selected_rows_are_projected(options, monkeypatch):
    layer, x, multiplied = make(options), tokens(), []

    def parts(order: Tensor, ends: Tensor, matrices: Tensor) -> Any:
        found = original(order, ends, matrices)
        multiplied.append(sum(len(index) for index, _ in found))
        return found

    original = row_products._parts
    monkeypatch.setattr(row_products, "_parts", parts)
    routing = layer(x).routing
    chosen = int(routing.is_chosen.sum())
    assert chosen < BATCH * LENGTH * HEADS
    assert multiplied == [chosen, chosen]  # rows of the query and the output projection


# ---- positions, norms and other options


@shapes
def test_rotary_positions_and_norms_are_applied_per_row(options):
    layer = make(options, head_dim=6, value_dim=6, positions=Rotary(6), qk_norm="rms", softcap=3.0, scale=0.7)
    x = tokens()
    routing = Routing.every_head(BATCH, LENGTH, HEADS, x)
    result = layer(x, routing=routing, token_positions=torch.arange(5, 5 + LENGTH), logsumexp=True)
    layout, per_head = layer.layout, layer.rows_per_head
    query = torch.einsum("bnd,hdc->bhnc", x, layer.query_weight)
    query = query if layer.query_bias is None else query + layer.query_bias[:, None]
    query = query.unflatten(-1, (per_head, 6)).permute(0, 3, 1, 2, 4).flatten(1, 2)
    key = layer.k_proj(x).unflatten(-1, (layout.num_kv_heads, 6)).transpose(1, 2)
    query, key = (layer.positions(norm(y), 5) for norm, y in ((layer.q_norm, query), (layer.k_norm, key)))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = 3.0 * torch.tanh(0.7 * (query @ key.mT) / 3.0)
    torch.testing.assert_close(result.logsumexp, torch.logsumexp(logits, -1))


def test_added_positions_and_biases_of_full_heads():
    x = tokens()
    learned = make({"shape": "full", "top_k": 2}, positions=Learned(LENGTH, EMBED))
    plain = make({"shape": "full", "top_k": 2})
    plain.load_state_dict({k: v for k, v in learned.state_dict().items() if not k.startswith("positions")})
    torch.testing.assert_close(learned(x).output, plain(x + learned.positions.weight).output)
    slopes = make({"shape": "full", "top_k": 2}, positions=ALiBi(HEADS), sinks=True)
    routing = Routing.every_head(BATCH, LENGTH, HEADS, x)
    twin = dense_twin(slopes)
    twin.positions, twin.mask, twin.sinks = slopes.positions, None, slopes.sinks
    twin._has_plain_heads = False
    torch.testing.assert_close(slopes(x, routing=routing).output, twin(x).output)


def test_dropout_of_shared_heads_is_drawn_by_the_seed():
    layer, x = make({"top_k": 2}, dropout=0.5).train(), tokens()
    first, again, other = (layer(x, seed=seed).output for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(layer.eval()(x).output, make_same(layer)(x).output)


def make_same(layer: RoutedHeads) -> RoutedHeads:
    twin = make({"top_k": 2})
    twin.load_state_dict(layer.state_dict())
    return twin


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_under_autocast_the_products_are_those_of_the_lower_dtype():
    for shape in LAYER_SHAPES:
        layer = make({"shape": shape, "top_k": 2}).float()
        x = tokens().float()
        with torch.autocast("cpu", torch.bfloat16):
            result = layer(x)
        assert result.output.dtype is torch.bfloat16
        torch.testing.assert_close(result.output.float(), layer(x, routing=result.routing).output, rtol=0.1, atol=0.3)


# ---- errors


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"top_k": 2, "shape": "half"}, OptionError, "shape must be 'shared' or 'full', got 'half'"),
        ({"top_k": 2, "sinks": True}, OptionError, "does not support sinks.*use shape 'full'"),
        ({"top_k": 2, "shape": "full", "dropout": 0.1}, OptionError, "got dropout 0.1 with shape 'full'"),
        ({"top_p": 0.5, "dropout": 0.1}, OptionError, "got dropout 0.1 with shape 'shared' and a varying number"),
        ({"top_k": 2, "positions": ALiBi(HEADS)}, OptionError, "got positions ALiBi"),
        ({"top_k": 2, "shape": "full", "num_kv_heads": 4}, ShapeError, "multiple of num_kv_heads, got 6 and 4"),
        ({"top_k": 2, "num_kv_heads": 0}, ShapeError, "num_kv_heads must be at least 1, got 0"),
        ({"top_k": 2, "positions": Rotary(4)}, ShapeError, "head_dim 5"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        RoutedHeads(EMBED, HEADS, **{"head_dim": DIM, **options})


def test_calls_that_cannot_be_served_are_refused():
    layer, full, x = make({"top_k": 2}), make({"shape": "full", "top_k": 2}), tokens()
    with pytest.raises(OptionError, match=r"weights require shape 'shared'.*got shape 'full'"):
        full(x, weights=True)
    with pytest.raises(OptionError, match="with a varying number of heads"):
        make({"top_p": 0.5})(x, weights=True)
    with pytest.raises(MaskError, match="must be the same for all heads"):
        layer(x, mask=Mask.dense(torch.ones(1, 2, LENGTH, LENGTH, dtype=torch.bool)))
    with pytest.raises(ShapeError, match=r"3 x 11 tokens and 6 heads, got heads \[3, 7, 6\]"):
        layer(x, routing=Routing.every_head(BATCH, 7, HEADS, x))
    with pytest.raises(ShapeError, match="over 5 heads"):
        layer(x, routing=Routing.every_head(BATCH, LENGTH, 5, x))
    with pytest.raises(OptionError, match="lengths require a cache"):
        layer(x, lengths=[1, 2, 3])
    with pytest.raises(ShapeError, match=rf"query must be \[batch, sequence, {EMBED}\]"):
        layer(x[0])
    with pytest.raises(DtypeError, match="dtype of the layer"):
        layer(x.float())


@shapes
def test_a_source_of_another_batch_is_refused_before_anything_is_computed(options):
    layer, x = make(options), tokens()
    layer.router.register_forward_pre_hook(lambda *_: pytest.fail("the router was called"))
    for batch in (1, 2 * BATCH):
        source = torch.randn(batch, 7, EMBED, dtype=DOUBLE)
        with pytest.raises(ShapeError, match=f"must have the same batch size, got 3, {batch} and {batch}"):
            layer(x, source)
        with pytest.raises(ShapeError, match=f"query and memory must have the same batch size, got 3 and {batch}"):
            layer(x, layer.remember(source))
    with pytest.raises(DtypeError, match=r"key must be a tensor .*, got list"):
        layer(x, [x])
    nested = torch.nested.nested_tensor([x[0], x[1], x[2, :5]], layout=torch.jagged)
    for given in ((nested,), (x, nested)):
        with pytest.raises(OptionError, match="routed heads take padded sequences, got a nested"):
            layer(*given)


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_of_another_type_is_refused(causal):
    layer, x = make({"top_k": 2}, causal=causal), tokens()
    for mask in (torch.ones(LENGTH, LENGTH), "causal"):
        with pytest.raises(MaskError, match=rf"must be a polyhead\.Mask, got {type(mask).__name__}; use Mask\.dense"):
            layer(x, mask=mask)


def altered(**changes: Any) -> Routing:
    """Return a routing to heads 0 and 1 for every token, with the given fields changed."""
    heads = torch.arange(2).repeat(BATCH, LENGTH, 1)
    return Routing(**{"heads": heads, "weights": torch.ones(BATCH, LENGTH, 2, dtype=DOUBLE), "num_heads": 6} | changes)


def changed(tensor: Tensor, value: int) -> Tensor:
    """Return a copy with `value` at token 4 of sequence 1."""
    tensor = tensor.clone()
    tensor[1, 4] = value
    return tensor


@pytest.mark.parametrize("kind", ["shared", "shared, top_p", "full", "full, threshold"])
@pytest.mark.parametrize(
    ("routing", "error", "words"),
    [
        ({"heads": 0}, OptionError, r"routing must be a .*Routing, such as .*, got dict"),
        (altered(heads=None), DtypeError, "heads of a routing must be a tensor, got NoneType"),
        (altered(heads=altered().weights), DtypeError, r"must be torch\.int64 indices, got torch\.float64"),
        (altered(weights=altered().heads), DtypeError, "weights of a routing must be floating point"),
        (altered(heads=torch.tensor(0)), ShapeError, r"3 x 11 tokens and 6 heads, got heads \[\]"),
        (
            altered(heads=altered().heads[..., :0], weights=altered().weights[..., :0]),
            ShapeError,
            "slots per token, got 0",
        ),
        (Routing.every_head(BATCH, LENGTH, 7, altered().weights), ShapeError, "over 7 heads"),
        (
            altered(heads=torch.zeros(BATCH, LENGTH, 7, dtype=torch.int64), weights=torch.ones(BATCH, LENGTH, 7)),
            ShapeError,
            "1 to 6 slots per token, got 7",
        ),
        (altered(heads=altered().heads + 5), OptionError, "must be 0 to 5, also in unused slots, got 5 to 6"),
        (altered(heads=altered().heads - 1), OptionError, "got -1 to 0"),
        (altered(heads=changed(altered().heads, 3)), OptionError, "head 3 twice for token 4 of sequence 1"),
        (altered(counts=[2]), DtypeError, "counts of a routing must be a tensor, got list"),
        (altered(counts=altered().heads), ShapeError, r"counts .* must be \[3, 11\], .* got \[3, 11, 2\]"),
        (altered(counts=altered().weights[..., 0]), DtypeError, "counts of a routing must be int32 or int64"),
        (altered(counts=changed(altered().heads[..., 1], 3)), OptionError, "0 to its 2 slots, got 1 to 3"),
        (altered(counts=changed(altered().heads[..., 1], -1)), OptionError, "got -1 to 1"),
        (altered(weights=altered().weights.to("meta")), DeviceError, "weights of a routing .* got meta and cpu"),
    ],
)
def test_an_invalid_routing_is_refused(kind, routing, error, words):
    with pytest.raises(error, match=words):
        make(SHAPES[kind])(tokens(), routing=routing)


@pytest.mark.parametrize("kind", ["shared, top_p", "full, threshold"])
def test_unused_slots_may_contain_any_head(kind):
    layer, x = make(SHAPES[kind]), tokens()
    counts = changed(torch.ones(BATCH, LENGTH, dtype=torch.int64), 0)
    same = torch.full((BATCH, LENGTH, 2), 3)
    given = altered(heads=same, counts=counts)
    found = layer(x, routing=given)
    one = altered(heads=same[..., :1], weights=given.weights[..., :1], counts=counts)
    torch.testing.assert_close(found.output, layer(x, routing=one).output)
    assert torch.equal(given.is_chosen.sum(-1), counts)


def test_a_checkpoint_of_another_layout_is_refused():
    layer, other = make({"top_k": 2, "num_kv_heads": 2}), make({"top_k": 2, "head_dim": 10, "num_kv_heads": 1})
    assert layer.query_weight.shape == other.query_weight.shape
    with pytest.raises(CheckpointError, match="a different head layout"):
        layer.load_state_dict(other.state_dict())
