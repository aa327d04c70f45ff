"""Heads are things: separate, stacked and contracted projections agree, views write through, a closed gate removes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from polyhead import Mask, MultiHeadAttention
from polyhead.errors import CheckpointError, OptionError, ShapeError
from polyhead.layers import HeadMatrices
from polyhead.layers.positions import ALiBi, Rotary
from tests.gradients import FAST

BATCH, LENGTH, EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 11, 23, 6, 2, 10, 7
DOUBLE = torch.float64
BACKENDS = ["reference", "blockwise", "sdpa", "auto"]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def make(num_kv_heads: int = HEADS, **options: object) -> MultiHeadAttention:
    sizes = {"head_dim": HEAD_DIM, "value_dim": VALUE_DIM, **options}
    layer = MultiHeadAttention(EMBED, HEADS, num_kv_heads=num_kv_heads, dtype=DOUBLE, **sizes)  # type: ignore[arg-type]
    with torch.no_grad():  # a bias of zero would hide that it is added in the wrong place
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


# ---- one layer, three ways to write it


def separate_heads(heads: list[HeadMatrices], x: Tensor, output_bias: Tensor | float = 0.0) -> Tensor:
    """Concat(head_1 .. head_h) W_O with head_i = softmax((X Wq_i)(X Wk_i)^T / sqrt(d_k)) X Wv_i, one head at a time."""
    outputs = []
    for head in heads:
        query = x @ head.query + (0.0 if head.query_bias is None else head.query_bias)
        key = x @ head.key + (0.0 if head.key_bias is None else head.key_bias)
        value = x @ head.value + (0.0 if head.value_bias is None else head.value_bias)
        weights = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), -1)
        outputs.append(weights @ value)
    return torch.cat(outputs, -1) @ torch.cat([head.output for head in heads]) + output_bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_kv_heads", [HEADS, KV_HEADS, 1])
def test_separate_projections_and_the_stacked_one_are_the_same_layer(num_kv_heads: int, bias: bool, x: Tensor) -> None:
    layer = make(num_kv_heads, bias=bias)
    separate = separate_heads(list(layer.heads), x, layer.out_proj.bias if bias else 0.0)
    for backend in BACKENDS:
        close(layer(x, backend=backend).output, separate)


def test_the_tensor_contraction_is_the_same_layer(x: Tensor) -> None:
    layer = make(bias=False)
    query, key, value = (
        torch.stack([getattr(head, name) for head in layer.heads]) for name in ("query", "key", "value")
    )
    output = torch.stack([head.output for head in layer.heads])  # [heads, value_dim, embed]
    logits = torch.einsum("bne,hed,bmf,hfd->bhnm", x, query, x, key) / math.sqrt(HEAD_DIM)
    weights = logits.softmax(-1)
    contracted = torch.einsum("bhnm,bme,hev,hvo->bno", weights, x, value, output)
    close(layer(x).output, contracted)
    close(layer(x, weights=True).weights, weights)


def test_a_projection_in_two_steps_folds_into_one(x: Tensor) -> None:
    """X W^Q W_i^Q with a common W^Q [embed, embed] and own W_i^Q [embed, head_dim] is X (W^Q W_i^Q)."""
    common = [torch.randn(EMBED, EMBED, dtype=DOUBLE) / EMBED**0.5 for _ in range(3)]
    own = [
        [torch.randn(EMBED, size, dtype=DOUBLE) / EMBED**0.5 for size in (HEAD_DIM, HEAD_DIM, VALUE_DIM)]
        for _ in range(HEADS)
    ]
    outputs = [torch.randn(VALUE_DIM, EMBED, dtype=DOUBLE) for _ in range(HEADS)]
    folded = [
        HeadMatrices(*(first @ second for first, second in zip(common, steps, strict=True)), output=output)
        for steps, output in zip(own, outputs, strict=True)
    ]
    in_two_steps = []
    for steps in own:
        query, key, value = (x @ first @ second for first, second in zip(common, steps, strict=True))
        in_two_steps.append(torch.softmax(query @ key.mT / math.sqrt(HEAD_DIM), -1) @ value)
    expected = torch.cat(in_two_steps, -1) @ torch.cat(outputs)
    close(MultiHeadAttention.from_heads(folded)(x).output, expected)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 12, 24])
def test_parameters_are_four_times_d_model_squared_whatever_the_head_count(num_heads: int) -> None:
    layer = MultiHeadAttention(24, num_heads, bias=False)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 4 * 24**2 == layer.layout.num_parameters


def test_parameters_have_the_names_that_sharding_and_adapters_look_for() -> None:
    names = {f"{part}_proj.{kind}" for part in ("q", "k", "v", "out") for kind in ("weight", "bias")}
    assert {name for name, _ in make().named_parameters()} == names
    layer = make(qk_norm="rms", output_gate="head", sinks=True)
    extra = {"q_norm.weight", "k_norm.weight", "gate_proj.weight", "gate_proj.bias", "sinks"}
    assert {name for name, _ in layer.named_parameters()} == names | extra


# ---- heads as views


@pytest.mark.parametrize("num_kv_heads", [HEADS, KV_HEADS, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_taken_apart_and_built_from_its_heads_is_the_same(num_kv_heads: int, bias: bool, x: Tensor) -> None:
    layer = make(num_kv_heads, bias=bias, positions=Rotary(HEAD_DIM), causal=True)
    again = MultiHeadAttention.from_heads(
        list(layer.heads),
        num_kv_heads=num_kv_heads,
        output_bias=layer.out_proj.bias,
        positions=Rotary(HEAD_DIM),
        causal=True,
    )
    assert again.layout == layer.layout
    for name, parameter in layer.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
    assert torch.equal(again(x).output, layer(x).output)


@pytest.mark.parametrize("name", ["query", "key", "value", "output", "query_bias", "key_bias", "value_bias"])
def test_writing_to_a_head_changes_the_layer(name: str, x: Tensor) -> None:
    layer = make()
    before, untouched = layer(x).output, copy.deepcopy(layer)
    with torch.no_grad():
        getattr(layer.heads[4], name).add_(1.0)
    for index, (ours, theirs) in enumerate(zip(layer.heads, untouched.heads, strict=True)):
        for part in HeadMatrices.__slots__:
            same = torch.equal(getattr(ours, part), getattr(theirs, part))
            assert same == (index != 4 or part != name)
    if name != "key_bias":  # adds the same to every logit of a row, which the softmax does not see
        assert not torch.allclose(layer(x).output, before)
    close(layer(x).output, separate_heads(list(layer.heads), x, layer.out_proj.bias))


def test_heads_of_a_group_show_the_same_key_and_value() -> None:
    layer = make(KV_HEADS)
    for index, head in enumerate(layer.heads):
        leader = layer.heads[index - index % (HEADS // KV_HEADS)]
        assert head.key.data_ptr() == leader.key.data_ptr()
        assert head.value.data_ptr() == leader.value.data_ptr()
        assert head.shares_key_and_value(leader)
        assert index % 3 == 0 or head.query.data_ptr() != leader.query.data_ptr()
    assert not layer.heads[0].shares_key_and_value(layer.heads[3])
    with torch.no_grad():
        layer.heads[5].key.fill_(7.0)
    assert bool((layer.heads[3].key == 7.0).all())
    assert not bool((layer.heads[2].key == 7.0).any())


def test_heads_are_a_sequence() -> None:
    heads = make().heads
    assert len(heads) == HEADS
    assert [head.query.data_ptr() for head in heads[1:3]] == [heads[1].query.data_ptr(), heads[2].query.data_ptr()]
    assert heads[-1].output.data_ptr() == heads[HEADS - 1].output.data_ptr()
    assert [tuple(t.shape) for t in (heads[0].query, heads[0].value, heads[0].output)] == [
        (EMBED, HEAD_DIM),
        (EMBED, VALUE_DIM),
        (VALUE_DIM, EMBED),
    ]
    with pytest.raises(IndexError, match="heads 0 to 5, got 6"):
        heads[HEADS]


def test_gradients_reach_the_layer_through_a_view() -> None:
    layer = make()
    layer.heads[2].query.square().sum().backward()
    grad = layer.q_proj.weight.grad
    assert grad is not None
    own = slice(2 * HEAD_DIM, 3 * HEAD_DIM)
    assert torch.equal(grad[own], 2 * layer.q_proj.weight.detach()[own])
    assert int(grad.count_nonzero()) == HEAD_DIM * EMBED


def test_heads_that_do_not_fit_together_are_refused() -> None:
    heads = list(make(KV_HEADS).heads)
    with pytest.raises(ShapeError, match="at least one head, got an empty list"):
        MultiHeadAttention.from_heads([])
    with pytest.raises(
        OptionError, match="same key and value matrices and biases, got different ones in heads 0 and 3"
    ):
        MultiHeadAttention.from_heads(heads, num_kv_heads=1)
    other = HeadMatrices(*(getattr(heads[1], name) for name in HeadMatrices.__slots__[:5]), heads[1].key_bias + 1)
    with pytest.raises(OptionError, match="biases, got different ones in heads 0 and 1"):
        MultiHeadAttention.from_heads([heads[0], other, *heads[2:]], num_kv_heads=KV_HEADS)
    without = HeadMatrices(heads[1].query, heads[1].key, heads[1].value, heads[1].output)
    with pytest.raises(OptionError, match="either all heads or none must have a query_bias, got head 1 without one"):
        MultiHeadAttention.from_heads([heads[0], without])
    narrow = HeadMatrices(heads[1].query[:, :5], *(getattr(heads[1], name) for name in HeadMatrices.__slots__[1:]))
    with pytest.raises(ShapeError, match=r"query of head 1 must be \[23, 10\], got \[23, 5\]"):
        MultiHeadAttention.from_heads([heads[0], narrow])


# ---- checkpoints


def test_a_checkpoint_of_another_head_count_is_refused_before_a_weight_changes() -> None:
    saved = MultiHeadAttention(24, 6).state_dict()
    layer = MultiHeadAttention(24, 4)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(
        CheckpointError, match="num_heads 6 where the layer has 4, num_kv_heads 6 where the layer has 4, head_dim 4"
    ):
        layer.load_state_dict(saved)
    assert all(torch.equal(value, layer.state_dict()[name]) for name, value in before.items())


def test_a_checkpoint_of_another_grouping_is_refused_inside_a_model() -> None:
    def model(**heads: int) -> nn.Sequential:
        return nn.Sequential(MultiHeadAttention(24, bias=False, **heads))  # type: ignore[arg-type]

    # 4 heads of 6 over 2 of 6, and 2 heads of 12 over 1 of 12: every weight has the same shape.
    saved = model(num_heads=4, num_kv_heads=2).state_dict()
    with pytest.raises(CheckpointError, match="num_kv_heads 2 where the layer has 1"):
        model(num_heads=2, num_kv_heads=1).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="num_kv_heads 2 where the layer has 1"):
        model(num_heads=2, num_kv_heads=1).load_state_dict(saved, strict=False, assign=True)


def test_weights_without_a_head_count_are_accepted(x: Tensor) -> None:
    source, target = make(), make()
    weights = {name: value for name, value in source.state_dict().items() if "_extra_state" not in name}
    assert set(weights) == set(dict(source.named_parameters()))
    target.load_state_dict(weights)
    assert "_extra_state" not in weights  # the caller's dictionary stays as it was
    assert torch.equal(target(x).output, source(x).output)


# ---- gates


def without_heads(layer: MultiHeadAttention, removed: set[int], **options: object) -> MultiHeadAttention:
    """The layer with heads physically gone; in grouped attention whole groups go."""
    kept = [head for index, head in enumerate(layer.heads) if index not in removed]
    size = layer.layout.group_size
    return MultiHeadAttention.from_heads(
        kept, num_kv_heads=len(kept) // size, output_bias=layer.out_proj.bias, **options
    )


REMOVALS = [(HEADS, {0, 3}), (HEADS, {5}), (KV_HEADS, {0, 1, 2}), (KV_HEADS, {3, 4, 5})]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_kv_heads", "removed"), REMOVALS)
def test_a_gate_of_zero_is_the_layer_without_the_head(
    num_kv_heads: int, removed: set[int], backend: str, x: Tensor
) -> None:
    options = {"positions": Rotary(HEAD_DIM), "causal": True}
    layer = make(num_kv_heads, **options)
    gate = torch.tensor([float(index not in removed) for index in range(HEADS)], dtype=DOUBLE)
    smaller = without_heads(layer, removed, **options)
    assert smaller.layout.num_heads == HEADS - len(removed)
    expected = smaller(x, backend=backend).output
    for shaped in (gate, gate.expand(BATCH, -1), gate[:, None].expand(BATCH, -1, LENGTH)):
        close(layer(x, head_gate=shaped, backend=backend).output, expected)
    layer.head_gate = gate
    close(layer(x, backend=backend).output, expected)


def test_a_gate_of_zero_hides_even_a_head_that_overflowed(x: Tensor) -> None:
    """Removal knows nothing of the removed head's numbers, however large those are."""
    layer = make()
    with torch.no_grad():
        layer.heads[2].value.mul_(1e300)
    gate = torch.ones(HEADS, dtype=DOUBLE).index_fill(0, torch.tensor(2), 0.0)
    close(layer(x, head_gate=gate).output, without_heads(layer, {2})(x).output)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gate_multiplies_each_heads_output_before_the_output_projection(backend: str, x: Tensor) -> None:
    layer = make(KV_HEADS)
    gates = {
        "head": torch.randn(HEADS, dtype=DOUBLE),
        "sequence": torch.randn(BATCH, HEADS, dtype=DOUBLE),
        "token": torch.randn(BATCH, HEADS, LENGTH, dtype=DOUBLE),
    }
    single = [layer(x, head_gate=torch.eye(HEADS, dtype=DOUBLE)[h]).output - layer.out_proj.bias for h in range(HEADS)]
    contributions = torch.stack(single, 1)  # [batch, heads, queries, embed]
    full = {
        "head": gates["head"].view(1, HEADS, 1, 1),
        "sequence": gates["sequence"].view(BATCH, HEADS, 1, 1),
        "token": gates["token"][..., None],
    }
    for kind, gate in gates.items():
        expected = (contributions * full[kind]).sum(1) + layer.out_proj.bias
        close(layer(x, head_gate=gate, backend=backend).output, expected)
        other = torch.randn(HEADS, dtype=DOUBLE)
        layer.head_gate = other
        both = (contributions * full[kind] * other.view(1, HEADS, 1, 1)).sum(1) + layer.out_proj.bias
        close(layer(x, head_gate=gate, backend=backend).output, both)
        layer.head_gate = None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 2, 3)])
def test_a_gate_is_differentiable(shape: tuple[int, ...], backend: str) -> None:
    layer = MultiHeadAttention(4, 2, dtype=DOUBLE)
    x = torch.randn(2, 3, 4, dtype=DOUBLE, requires_grad=True)
    gate = torch.rand(shape, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, g: layer(y, head_gate=g, backend=backend).output, (x, gate), **FAST)


def test_a_closed_gate_still_has_a_gradient_that_says_what_the_head_is_worth(x: Tensor) -> None:
    layer = make()
    gate = torch.zeros(HEADS, dtype=DOUBLE, requires_grad=True)
    layer(x, head_gate=gate).output.sum().backward()
    assert gate.grad is not None
    assert int(gate.grad.count_nonzero()) == HEADS


def test_a_gate_on_the_layer_is_not_in_its_checkpoint_and_moves_with_it() -> None:
    layer = make()
    names = set(layer.state_dict())
    layer.head_gate = torch.ones(HEADS, dtype=DOUBLE)
    assert set(layer.state_dict()) == names
    assert set(dict(layer.named_parameters())) == names - {"_extra_state"}
    assert layer.float().head_gate is not None
    assert layer.head_gate.dtype is torch.float32
    assert copy.deepcopy(layer).head_gate is not None


def test_a_gate_may_be_a_parameter_of_the_layer(x: Tensor) -> None:
    layer = make()
    gate = torch.randn(HEADS, dtype=DOUBLE)
    expected = layer(x, head_gate=gate).output
    layer.head_gate = nn.Parameter(gate.clone())
    close(layer(x).output, expected)
    layer(x).output.sum().backward()
    assert layer.head_gate.grad is not None


def test_a_gate_works_beside_a_mask_a_gate_projection_and_left_out_rows(x: Tensor) -> None:
    layer = make(output_gate="channel", positions=ALiBi(HEADS), causal=True)
    gate = torch.randn(BATCH, HEADS, dtype=DOUBLE)
    mask = Mask.lengths([LENGTH, 0, 5])
    outputs = [layer(x, mask=mask, head_gate=gate, backend=name).output for name in ("reference", "blockwise")]
    close(outputs[1], outputs[0])
    assert torch.equal(outputs[0][1], layer.out_proj.bias.expand(LENGTH, -1))


def test_a_gate_of_another_shape_is_refused(x: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"a gate must have .* \[6\], \[3, 6\] or \[3, 6, 11\], got \[6, 3\]"):
        make()(x, head_gate=torch.ones(HEADS, BATCH))


class Adapted(nn.Linear):
    """A projection that computes more than its weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_projections_that_compute_more_than_their_weights_have_no_matrices_of_heads(name: str) -> None:
    layer = make()
    linear = getattr(layer, name)
    adapted = Adapted(linear.in_features, linear.out_features, dtype=DOUBLE)
    adapted.load_state_dict(linear.state_dict())
    setattr(layer, name, adapted)
    with pytest.raises(OptionError, match=f"nothing but their weight and bias, got {name} with Adapted; merge"):
        _ = layer.heads
    setattr(layer, name, nn.utils.parametrizations.weight_norm(linear))  # a write to its weight would be lost
    with pytest.raises(OptionError, match=f"got {name} with a parametrization"):
        _ = layer.heads
    nn.utils.parametrize.remove_parametrizations(linear, "weight")
    assert len(layer.heads) == HEADS
