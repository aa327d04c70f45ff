"""Grouped heads are their formula, reduce to layers one knows, and have the weights they say."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead import Mask, MultiHeadAttention
from polyhead.errors import OptionError, ShapeError
from polyhead.geometry import HeadLayout
from polyhead.layers.variants.grouped import GroupedHeads, HeadGroups, hidden_dim_at_parity
from tests.error_budget import Compared, assert_draws_within_error_budget
from tests.layers.head_formula import causal_orders, earlier, heads_of, project

BATCH, LENGTH, KEYS, EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, HIDDEN = 3, 11, 13, 23, 6, 2, 10, 7, 17
DOUBLE = torch.float64
GROUPS = [1, 2, 3, 6]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def make(num_groups: int, **options: Any) -> GroupedHeads:
    """A float64 layer of awkward sizes in which no parameter has its neutral value."""
    sizes = {"head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "hidden_dim": HIDDEN, "dtype": DOUBLE}
    layer = GroupedHeads(EMBED, HEADS, num_groups=num_groups, **{**sizes, **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return layer


def plain_twin(layer: GroupedHeads, *, output_bias: bool = True) -> MultiHeadAttention:
    """Plain attention with the same queries, keys and values."""
    layout = layer.layout
    plain = MultiHeadAttention(
        layout.embed_dim,
        layout.num_heads,
        head_dim=layout.head_dim,
        value_dim=layout.value_dim,
        output_bias=output_bias,
        dtype=DOUBLE,
    )
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            plain.get_submodule(name).load_state_dict(layer.get_submodule(name).state_dict())
    return plain


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


def formula(layer: GroupedHeads, heads: list[Tensor]) -> Tensor:
    """W_2 GELU(W_1 Concat(Group_1 .. Group_g)) with Group_i = Concat(its heads) A_i, one group after the other."""
    size = layer.layout.num_heads // layer.num_groups
    groups = [
        torch.cat(heads[i * size : (i + 1) * size], -1) @ layer.combine.group_weight[i] for i in range(layer.num_groups)
    ]
    hidden = project(layer, "combine.up", torch.cat(groups, -1))
    if layer.combine.activation == "gelu":
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    return project(layer, "out_proj", hidden)


OPTIONS: dict[str, dict[str, Any]] = {
    "gelu": {},
    "linear": {"activation": "linear"},
    "without bias": {"bias": False},
    "with output bias alone": {"bias": False, "output_bias": True},
    "grouped queries": {"num_kv_heads": KV_HEADS},
}


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_groups", GROUPS)
def test_grouped_heads_are_the_formula(num_groups: int, options: str, backend: str, x: Tensor) -> None:
    layer = make(num_groups, **OPTIONS[options])
    close(layer(x, backend=backend).output, formula(layer, heads_of(layer, x)))
    causal = layer(x, mask=Mask.causal(), backend=backend).output
    close(causal, formula(layer, heads_of(layer, x, visible=earlier(LENGTH))))


@pytest.mark.parametrize(
    ("options", "inputs", "outputs"),
    [({}, True, True), ({"bias": False}, False, False), ({"bias": False, "output_bias": True}, False, True)],
)
def test_the_mlp_has_the_biases_of_the_output(options: dict[str, bool], inputs: bool, outputs: bool) -> None:
    layer = make(3, **options)
    assert all((linear.bias is not None) == inputs for linear in (layer.q_proj, layer.k_proj, layer.v_proj))
    assert all((linear.bias is not None) == outputs for linear in (layer.combine.up, layer.out_proj))


def test_attention_to_a_source_is_the_formula(x: Tensor) -> None:
    layer, source = make(3, key_input_dim=19), torch.randn(BATCH, KEYS, 19, dtype=DOUBLE)
    close(layer(x, source).output, formula(layer, heads_of(layer, x, source)))
    close(layer(x, layer.remember(source)).output, formula(layer, heads_of(layer, x, source)))


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Said once by PyTorch on a CPU without bfloat16 instructions.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_rounding_stays_within_the_error_budget(dtype: torch.dtype, x: Tensor) -> None:
    layer = make(3).to(dtype)
    wide, samples = copy.deepcopy(layer).double(), []
    with torch.no_grad():
        for tokens, visible, mask in causal_orders(x.to(dtype)):
            plain = formula(layer, heads_of(layer, tokens, visible=visible))
            exact = formula(wide, heads_of(wide, tokens.double(), visible=visible))
            samples.append({"output": Compared(layer(tokens, mask=mask).output, exact, plain)})
    assert_draws_within_error_budget(samples)


# ---- what it reduces to


def test_one_group_is_plain_attention_followed_by_an_mlp(x: Tensor) -> None:
    """A is then the whole of W_O, and W_2 GELU(W_1 .) an ordinary feed-forward network."""
    layer = make(1)
    joined = HEADS * VALUE_DIM
    plain = MultiHeadAttention(
        joined, HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, output_bias=False, dtype=DOUBLE
    )  # as wide as what A writes
    wide = torch.zeros(BATCH, LENGTH, joined, dtype=DOUBLE)
    wide[..., :EMBED] = x
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            theirs, ours = layer.get_submodule(name), plain.get_submodule(name)
            ours.weight.zero_()
            ours.weight[:, :EMBED] = theirs.weight
            ours.bias.copy_(theirs.bias)
        plain.out_proj.weight.copy_(layer.combine.group_weight[0].T)
    close(layer(x).output, layer.out_proj(F.gelu(layer.combine.up(plain(wide).output))))


def test_a_group_for_each_head_only_turns_that_heads_values(x: Tensor) -> None:
    """(P V_i) A_i = P (V_i A_i), so A_i folds into the value projection and leaves an identity behind."""
    layer = make(HEADS)
    expected = layer(x).output
    with torch.no_grad():
        maps = torch.block_diag(*layer.combine.group_weight)
        layer.v_proj.weight.copy_(maps.T @ layer.v_proj.weight)
        layer.v_proj.bias.copy_(layer.v_proj.bias @ maps)
        layer.combine.group_weight.copy_(torch.eye(VALUE_DIM, dtype=DOUBLE).expand(HEADS, -1, -1))
    close(layer(x).output, expected)


@pytest.mark.parametrize("num_groups", GROUPS)
def test_identity_groups_with_a_linear_mlp_are_plain_attention(num_groups: int, x: Tensor) -> None:
    layer = make(num_groups, activation="linear")
    plain = plain_twin(layer)
    with torch.no_grad():
        inside = HEADS * VALUE_DIM // num_groups
        layer.combine.group_weight.copy_(torch.eye(inside, dtype=DOUBLE).expand(num_groups, -1, -1))
        up, down = layer.combine.up, layer.out_proj
        plain.out_proj.weight.copy_(down.weight @ up.weight)
        plain.out_proj.bias.copy_(down.weight @ up.bias + down.bias)
    close(layer(x).output, plain(x).output)


@pytest.mark.parametrize("num_groups", GROUPS)
def test_a_linear_mlp_is_plain_attention_with_the_product_of_its_matrices(num_groups: int, x: Tensor) -> None:
    layer = make(num_groups, activation="linear", bias=False)
    plain = plain_twin(make(num_groups, activation="linear"), output_bias=False)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            plain.get_submodule(name).weight.copy_(layer.get_submodule(name).weight)
            plain.get_submodule(name).bias.zero_()
        groups = torch.block_diag(*layer.combine.group_weight)  # Concat(groups) = Concat(heads) A
        plain.out_proj.weight.copy_(layer.out_proj.weight @ layer.combine.up.weight @ groups.T)
    close(layer(x).output, plain(x).output)


def test_a_head_meets_the_heads_of_its_own_group_alone(x: Tensor) -> None:
    layer = make(3)
    heads = torch.stack(heads_of(layer, x), 2)
    moved = heads.clone()
    moved[:, :, 2] += 1.0  # of group 1, with head 3
    seen: list[Tensor] = []
    layer.combine.up.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    layer.combine(heads), layer.combine(moved)
    changed = (seen[0] != seen[1]).unflatten(-1, (3, 2 * VALUE_DIM)).flatten(0, 1).any(0)
    assert changed.tolist() == [[False] * 14, [True] * 14, [False] * 14]


# ---- how many weights it has

LAYOUTS = {
    "plain": HeadLayout(48, 6),
    "a remainder": HeadLayout(30, 6),
    "a prime width": HeadLayout(23, 6, head_dim=3),
    "grouped queries": HeadLayout(48, 6, num_kv_heads=2),
    "multi-query": HeadLayout(48, 6, num_kv_heads=1),
    "narrower values": HeadLayout(48, 6, value_dim=5),
    "narrow keys": HeadLayout(48, 6, key_input_dim=19, value_input_dim=13),
}


@pytest.mark.parametrize("num_groups", [2, 3, 6])
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_those_of_plain_attention_less_a_remainder(name: str, num_groups: int) -> None:
    layout = LAYOUTS[name]
    embed_dim, num_heads, *sizes = layout.to_dict().values()
    named = dict(zip(list(layout.to_dict())[2:], sizes, strict=True))
    layer = GroupedHeads(embed_dim, num_heads, num_groups=num_groups, bias=False, device="meta", **named)
    assert layer.hidden_dim == hidden_dim_at_parity(layout, num_groups)
    channel = num_heads * layout.value_dim + embed_dim
    assert 0 <= 4 * embed_dim**2 - sum(p.numel() for p in layer.parameters()) < channel


def test_usual_heads_have_exactly_the_weights_of_plain_attention_and_a_known_width() -> None:
    for embed_dim, num_heads, num_groups, hidden_dim in ((512, 8, 2, 128), (512, 8, 4, 192), (768, 12, 6, 320)):
        layer = GroupedHeads(embed_dim, num_heads, num_groups=num_groups, bias=False, device="meta")
        assert layer.hidden_dim == hidden_dim == embed_dim * (num_groups - 1) // (2 * num_groups)
        assert sum(p.numel() for p in layer.parameters()) == 4 * embed_dim**2


def test_a_width_that_leaves_no_hidden_channel_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"= 2304 weights, got 2304 in .* with num_groups 1; pass hidden_dim"):
        GroupedHeads(24, 6, num_groups=1)
    with pytest.raises(ShapeError, match=r"with num_groups 6; pass hidden_dim"):
        GroupedHeads(24, 6, num_groups=6, head_dim=50)
    assert GroupedHeads(24, 6, num_groups=1, hidden_dim=5).hidden_dim == 5


# ---- errors


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_groups": 4}, ShapeError, "num_heads must be a multiple of num_groups, got 6 and 4"),
        ({"num_groups": 0}, ShapeError, "num_groups must be at least 1, got 0"),
        ({"num_groups": True}, ShapeError, "num_groups must be an integer, got True"),
        ({"num_groups": 2, "hidden_dim": 0}, ShapeError, "hidden_dim must be at least 1, got 0"),
        (
            {"num_groups": 2, "activation": "relu"},
            OptionError,
            "activation must be 'gelu' or 'linear', got 'relu'",
        ),
        ({"num_groups": 2, "head_dim": -1}, ShapeError, "head_dim must be at least 1, got -1"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        GroupedHeads(24, 6, **options)


def test_groups_made_for_other_heads_are_refused() -> None:
    groups = HeadGroups(HeadLayout(24, 6), 2)
    with pytest.raises(ShapeError, match="HeadGroups must be built for the layer's heads, got 6 heads of 4 for a"):
        MultiHeadAttention(24, 4, combine=groups)
