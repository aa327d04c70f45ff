"""Gated heads, `MultiHeadAttention(output_gate=...)`: each head's output times a sigmoid of the layer's input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

import polyhead
from polyhead import Mask, MultiHeadAttention
from polyhead.layers.kv_cache import GrowingCache, PreallocatedCache
from polyhead.layers.positions import Rotary
from tests.error_budget import Compared, assert_draws_within_error_budget
from tests.gradients import FAST
from tests.layers.head_formula import causal_orders, earlier, heads_of, project

BATCH, LENGTH, KEYS, EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 11, 13, 23, 6, 2, 10, 7
DOUBLE = torch.float64
WIDTHS = {"head": 1, "channel": VALUE_DIM}
# Dynamo instantiates an autograd function, which PyTorch itself deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
every_gate = pytest.mark.parametrize("gate", WIDTHS)


def make(gate: str, **options: Any) -> MultiHeadAttention:
    sizes: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "dtype": DOUBLE}
    layer = MultiHeadAttention(EMBED, HEADS, output_gate=gate, **{**sizes, **options})  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return layer


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


def formula(layer: MultiHeadAttention, x: Tensor, heads: list[Tensor]) -> Tensor:
    """Concat(head_1 * sigmoid(X G_1) .. head_h * sigmoid(X G_h)) W_O; G_i has one column, or one for each channel."""
    gates = project(layer, "gate_proj", x).chunk(len(heads), -1)
    gated = [head / (1 + torch.exp(-gate)) for head, gate in zip(heads, gates, strict=True)]
    return project(layer, "out_proj", torch.cat(gated, -1))


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
@every_gate
def test_gated_heads_are_the_formula(gate: str, backend: str, x: Tensor) -> None:
    layer = make(gate)
    assert layer.gate_proj is not None
    assert layer.gate_proj.weight.shape == (HEADS * WIDTHS[gate], EMBED)
    close(layer(x, backend=backend).output, formula(layer, x, heads_of(layer, x)))
    causal = layer(x, mask=Mask.causal(), backend=backend).output
    close(causal, formula(layer, x, heads_of(layer, x, visible=earlier(LENGTH))))


@every_gate
def test_the_gate_reads_the_queries_side_of_a_cross_attention(gate: str, x: Tensor) -> None:
    layer, source = make(gate, key_input_dim=19), torch.randn(BATCH, KEYS, 19, dtype=DOUBLE)
    close(layer(x, source).output, formula(layer, x, heads_of(layer, x, source)))


@pytest.mark.numerics
@every_gate
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Said once by PyTorch on a CPU without bfloat16 instructions.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@torch.no_grad()
def test_rounding_stays_within_the_error_budget(dtype: torch.dtype, gate: str, x: Tensor) -> None:
    layer = make(gate).to(dtype)
    wide, samples = copy.deepcopy(layer).double(), []
    for tokens, visible, mask in causal_orders(x.to(dtype)):
        plain = formula(layer, tokens, heads_of(layer, tokens, visible=visible))
        exact = formula(wide, tokens.double(), heads_of(wide, tokens.double(), visible=visible))
        samples.append({"output": Compared(layer(tokens, mask=mask).output, exact, plain)})
    assert_draws_within_error_budget(samples)


@every_gate
def test_an_open_gate_is_plain_attention_and_a_shut_one_removes_the_head(gate: str, x: Tensor) -> None:
    layer = make(gate, num_kv_heads=HEADS)
    plain = MultiHeadAttention(EMBED, HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, dtype=DOUBLE)
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("gate_proj")})
    assert layer.gate_proj is not None
    with torch.no_grad():
        layer.gate_proj.weight.zero_()
        layer.gate_proj.bias.fill_(100.0)  # a sigmoid of one in float64
        close(layer(x).output, plain(x).output)
        layer.gate_proj.bias.view(HEADS, -1)[4] = -1000.0  # and of zero
    others = [head for index, head in enumerate(plain.heads) if index != 4]
    smaller = MultiHeadAttention.from_heads(others, output_bias=plain.out_proj.bias)
    close(layer(x).output, smaller(x).output)


@every_gate
def test_a_new_layers_gates_follow_its_input_around_one_half(gate: str) -> None:
    layer = MultiHeadAttention(24, 6, output_gate=gate)  # type: ignore[arg-type]
    assert layer.gate_proj is not None
    assert int(layer.gate_proj.bias.count_nonzero()) == 0
    assert torch.equal(torch.sigmoid(layer.gate_proj(torch.zeros(24))), torch.full_like(layer.gate_proj.bias, 0.5))


@every_gate
def test_padding_reaches_nothing_through_the_gate(gate: str, x: Tensor) -> None:
    """The gate of a padded query is computed from what the padding holds, and multiplies a head of zeros."""
    layer, lengths = make(gate, causal=True), [LENGTH, 5, 0]
    padded = x.clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = 1e3
    output = layer(padded, mask=Mask.lengths(lengths)).output
    for row, length in enumerate(lengths):
        if length:
            close(output[row, :length], layer(x[row : row + 1, :length]).output[0])
        close(output[row, length:], layer.out_proj.bias.expand(LENGTH - length, -1))


@every_gate
def test_statistics_are_of_the_heads_before_their_gates(gate: str, x: Tensor) -> None:
    layer = make(gate, causal=True)
    found = layer(x, statistics=True).statistics
    with torch.no_grad():
        layer.gate_proj.bias.fill_(-3.0)
    for name, rows in layer(x, statistics=True).statistics.items():
        assert torch.equal(rows, getattr(found, name)), name
    with torch.no_grad(), polyhead.observe(layer) as session:
        layer(x)
    close(session.profile["entropy"], found.entropy.mean((0, 2)))


@every_gate
def test_every_parameter_has_its_gradient(gate: str) -> None:
    layer = MultiHeadAttention(3, 4, head_dim=2, causal=True, output_gate=gate, dtype=DOUBLE)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 3, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, *_: layer(y).output, [x, *layer.parameters()], **FAST)


@every_gate
@torch.no_grad()
def test_generation_equals_the_full_forward(gate: str, x: Tensor) -> None:
    layer = make(gate, causal=True, positions=Rotary(HEAD_DIM))
    for cache in (
        GrowingCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE),
        PreallocatedCache.for_layout(layer.layout, batch_size=BATCH, dtype=DOUBLE, capacity=LENGTH),
    ):
        parts = [layer(part, cache=cache).output for part in x.split([5, 1, 3, 1, 1], 1)]
        close(torch.cat(parts, 1), layer(x).output)


def test_a_gated_layer_compiles_whole(x: Tensor) -> None:
    layer = make("head", causal=True)  # "channel": tests/layers/multi_head/test_multi_head_programs.py
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [call(leaf).output for call, leaf in zip((compiled, layer), leaves, strict=True)]
    close(*outputs)
    close(*(torch.autograd.grad(y.square().sum(), z)[0] for y, z in zip(outputs, leaves, strict=True)))
    torch.compiler.reset()


@torch.no_grad()
def test_a_gate_for_each_channel_is_that_of_qwen3_next_on_copied_weights() -> None:
    """Qwen3-Next has the gate of Qiu et al. 2025 after its attention, in the second half of each head's query rows."""
    config = Qwen3NextConfig(
        hidden_size=EMBED,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": 7001.0, "partial_rotary_factor": 0.4},
        attn_implementation="eager",
    )
    theirs = Qwen3NextAttention(config, 0).double().eval()
    for parameter in theirs.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    layer = MultiHeadAttention(
        EMBED,
        HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        bias=False,
        causal=True,
        positions=Rotary(HEAD_DIM, base=7001.0, rotary_dim=4),
        qk_norm="rms",
        output_gate="channel",
        dtype=DOUBLE,
    )
    queries, gates = theirs.q_proj.weight.unflatten(0, (HEADS, 2, HEAD_DIM)).unbind(1)
    layer.q_proj.weight.copy_(queries.flatten(0, 1))
    layer.gate_proj.weight.copy_(gates.flatten(0, 1))
    for ours, name in ((layer.k_proj, "k_proj"), (layer.v_proj, "v_proj"), (layer.out_proj, "o_proj")):
        ours.weight.copy_(theirs.get_submodule(name).weight)
    for ours, norm in ((layer.q_norm, theirs.q_norm), (layer.k_norm, theirs.k_norm)):
        assert isinstance(ours, nn.RMSNorm)
        ours.eps = config.rms_norm_eps
        ours.weight.copy_(1 + norm.weight)  # theirs is a distance from one
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    turns = Qwen3NextRotaryEmbedding(config)(x, torch.arange(LENGTH)[None])
    hidden = torch.zeros(LENGTH, LENGTH, dtype=DOUBLE).masked_fill(~earlier(LENGTH), -torch.inf)
    expected, _ = theirs(x, turns, hidden[None, None])
    close(layer(x).output, expected, 1e-5)  # their norms and softmax are in float32
