"""Attention across heads is its formula: heads are mixed, look at one another at each position, and nowhere else."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead import AttentionOutput, Mask, MultiHeadAttention, attention
from polyhead.errors import OptionError, ShapeError
from polyhead.geometry import HeadLayout
from polyhead.layers.variants import mixing as mixing_layer
from polyhead.layers.variants.mixing import HeadMix, HeadMixing
from tests.error_budget import Compared, assert_draws_within_error_budget, assert_within_error_budget
from tests.layers.head_formula import causal_orders, earlier, heads_of, project

BATCH, LENGTH, KEYS, EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 11, 13, 23, 6, 2, 10, 7
DOUBLE = torch.float64


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def make(**options: Any) -> HeadMix:
    """A float64 layer of awkward sizes in which no parameter has its neutral value."""
    layer = HeadMix(EMBED, HEADS, **{"head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "dtype": DOUBLE, **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


def formula(layer: HeadMix, heads: list[Tensor]) -> Tensor:
    """Concat(softmax(Z Z^T / sqrt(d)) Z) W_O with Z = M [head_1 .. head_h], one position after the other."""
    mixing = layer.combine
    batch, queries, dim = heads[0].shape
    combined = heads[0].new_empty(batch, queries, mixing.num_rows * dim)
    for b in range(batch):
        for n in range(queries):
            stacked = torch.stack([head[b, n] for head in heads])  # [heads, dim]
            if mixing.mix == "heads":
                z = mixing.mix_weight @ stacked
            else:
                z = torch.stack([(weight.flatten(1) @ stacked.flatten()) for weight in mixing.mix_weight])
            if mixing.row_attention == "plain":
                z = torch.softmax(z @ z.T / math.sqrt(dim), -1) @ z
            elif mixing.row_attention == "projected":
                q, k, v = (project(layer, f"combine.row_{name}_proj", z) for name in "qkv")
                z = torch.softmax(q @ k.T / math.sqrt(dim), -1) @ v
            combined[b, n] = z.flatten()
    return project(layer, "out_proj", combined)


OPTIONS: dict[str, dict[str, Any]] = {
    "as many rows": {},
    "fewer rows": {"num_rows": 5},
    "more rows": {"num_rows": 9},
    "full": {"mix": "full"},
    "full, fewer rows, projected": {"mix": "full", "num_rows": 4, "row_attention": "projected"},
    "projected": {"row_attention": "projected"},
    "projected, without bias": {"row_attention": "projected", "bias": False},
    "off": {"row_attention": None},
    "full, off": {"mix": "full", "num_rows": 3, "row_attention": None},
    "grouped queries": {"num_kv_heads": KV_HEADS},
}


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_mixed_heads_are_the_formula(options: str, backend: str, x: Tensor) -> None:
    layer = make(backend=backend, **OPTIONS[options])
    close(layer(x).output, formula(layer, heads_of(layer, x)))
    causal = layer(x, mask=Mask.causal()).output
    close(causal, formula(layer, heads_of(layer, x, visible=earlier(LENGTH))))


@torch.no_grad()
def test_attention_to_a_source_is_the_formula(x: Tensor) -> None:
    layer, source = make(num_rows=5, key_input_dim=19), torch.randn(BATCH, KEYS, 19, dtype=DOUBLE)
    close(layer(x, source).output, formula(layer, heads_of(layer, x, source)))
    close(layer(x, layer.remember(source)).output, formula(layer, heads_of(layer, x, source)))


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Said once by PyTorch on a CPU without bfloat16 instructions.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@torch.no_grad()
def test_rounding_stays_within_the_error_budget(dtype: torch.dtype, x: Tensor) -> None:
    layer = make().to(dtype)
    wide, samples = copy.deepcopy(layer).double(), []
    for tokens, visible, mask in causal_orders(x.to(dtype)):
        plain = formula(layer, heads_of(layer, tokens, visible=visible))
        exact = formula(wide, heads_of(wide, tokens.double(), visible=visible))
        samples.append({"output": Compared(layer(tokens, mask=mask).output, exact, plain)})
    assert_draws_within_error_budget(samples)


# ---- what it reduces to, and what it adds


@pytest.mark.parametrize("mix", ["heads", "full"])
def test_an_identity_without_row_attention_is_plain_attention(mix: str, x: Tensor) -> None:
    layer = make(mix=mix, row_attention=None)
    plain = MultiHeadAttention(EMBED, HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, dtype=DOUBLE)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            plain.get_submodule(name).load_state_dict(layer.get_submodule(name).state_dict())
        identity = torch.eye(HEADS if mix == "heads" else HEADS * VALUE_DIM)
        layer.combine.mix_weight.copy_(identity.view_as(layer.combine.mix_weight))
    assert torch.equal(layer(x).output, plain(x).output)
    assert torch.equal(layer(x, mask=Mask.causal()).output, plain(x, mask=Mask.causal()).output)


def contribution(layer: HeadMix, x: Tensor, row: int, gate: Tensor) -> Tensor:
    """What one row alone writes: the output with every other row's part of W_O at zero."""
    before = layer.out_proj.weight.detach().clone()
    dim = layer.layout.value_dim
    with torch.no_grad():
        layer.out_proj.weight.zero_()
        layer.out_proj.weight[:, row * dim : (row + 1) * dim] = before[:, row * dim : (row + 1) * dim]
        output = layer(x, head_gate=gate).output
        layer.out_proj.weight.copy_(before)
    return output


@pytest.mark.parametrize("row_attention", ["plain", "projected", None])
def test_one_heads_output_changes_what_another_contributes(row_attention: Any, x: Tensor) -> None:
    """With M the identity row 0 is head 0's own; only the attention among rows lets head 4 reach it."""
    layer = make(row_attention=row_attention)
    with torch.no_grad():
        layer.combine.mix_weight.copy_(torch.eye(HEADS))
    gate = torch.ones(HEADS, dtype=DOUBLE)
    louder = gate.clone()
    louder[4] = 2.0
    change = contribution(layer, x, 0, louder) - contribution(layer, x, 0, gate)
    if row_attention is None:
        assert int(change.count_nonzero()) == 0
    else:
        assert float(change.abs().amax(-1).min()) > 1e-9  # at every position, far above rounding
        assert float(change.abs().max()) > 0.1


def test_rows_look_at_rows_of_their_own_position_alone(x: Tensor) -> None:
    layer = make()
    heads = torch.stack(heads_of(layer, x), 2)
    moved = heads.clone()
    moved[1, 5, 3] += 1.0
    changed = (layer.combine(moved) != layer.combine(heads)).view(BATCH, LENGTH, HEADS, VALUE_DIM).any(-1)
    expected = torch.zeros(BATCH, LENGTH, HEADS, dtype=torch.bool)
    expected[1, 5] = True
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("row_attention", ["plain", "projected"])
def test_who_looked_at_whom_can_be_asked(row_attention: Any, x: Tensor) -> None:
    layer = make(row_attention=row_attention, num_rows=5)
    rows = layer.combine.rows(torch.stack(heads_of(layer, x), 2))
    result = layer.combine.attend(rows, weights=True)
    assert (result.backend, layer.combine.attend(rows).backend) == ("reference", "sdpa")
    assert result.weights.shape == (BATCH, LENGTH, 5, 5)
    values = rows if row_attention == "plain" else layer.combine.row_v_proj(rows)
    close(result.weights @ values, result.output)
    close(result.output.flatten(2), layer.combine(torch.stack(heads_of(layer, x), 2)))
    with pytest.raises(OptionError, match="requires row_attention, got a layer with row_attention None"):
        make(row_attention=None).combine.attend(rows)


def test_more_positions_than_a_kernel_can_start_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    layer = make(num_rows=5)
    rows = layer.combine.rows(torch.stack(heads_of(layer, x), 2))
    whole = layer.combine.attend(rows, weights=True)
    sizes: list[int] = []

    def counted(query: Tensor, *others: Tensor, **options: Any) -> AttentionOutput:
        sizes.append(query.shape[0])
        return attention(query, *others, **options)

    monkeypatch.setattr(mixing_layer, "_MAX_POSITIONS", 13)
    monkeypatch.setattr(mixing_layer, "attention", counted)
    parts = layer.combine.attend(rows, weights=True)
    assert sizes == [13, 13, 7]
    close(parts.output, whole.output)
    close(parts.weights, whole.weights)


def test_a_named_backend_serves_tokens_and_rows(x: Tensor) -> None:
    for backend in ("reference", "blockwise", "sdpa"):
        layer = make(backend=backend)
        rows = layer.combine.rows(torch.stack(heads_of(layer, x), 2))
        assert layer(x).backend == layer.combine.attend(rows).backend == backend
    assert layer(x, backend="reference").backend == "reference"


@pytest.mark.parametrize("shape", [(0, LENGTH), (BATCH, 0)])
@pytest.mark.parametrize("options", ["as many rows", "full, fewer rows, projected", "off"])
def test_no_tokens_give_no_output(options: str, shape: tuple[int, int]) -> None:
    layer = make(**OPTIONS[options])
    assert layer(torch.empty(*shape, EMBED, dtype=DOUBLE)).output.shape == (*shape, EMBED)


def test_a_new_layer_keeps_its_heads_apart() -> None:
    assert torch.equal(HeadMix(24, 6).combine.mix_weight, torch.eye(6))
    fewer = HeadMix(24, 6, num_rows=5).combine.mix_weight
    assert fewer.shape == (5, 6)
    assert int(fewer.count_nonzero()) == 30
    full = HeadMix(24, 6, num_rows=5, mix="full").combine.mix_weight.detach()
    assert full.shape == (5, 4, 6, 4)
    assert float(full.abs().max()) <= math.sqrt(6 / (20 + 24))  # Glorot's bound for 24 inputs and 20 outputs


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_rows": 0}, ShapeError, "num_rows must be at least 1, got 0"),
        ({"num_rows": 2.0}, ShapeError, "num_rows must be an integer, got 2.0"),
        ({"mix": "rows"}, OptionError, "mix must be 'heads' or 'full', got 'rows'"),
        (
            {"row_attention": True},
            OptionError,
            "row_attention must be 'plain', 'projected' or None, got True",
        ),
        ({"backend": "fast"}, OptionError, "backend must be 'auto', .* got 'fast'"),
        ({"value_dim": 0}, ShapeError, "value_dim must be at least 1, got 0"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        HeadMix(24, 6, **options)


def test_a_mixing_made_for_other_heads_is_refused() -> None:
    mixing = HeadMixing(HeadLayout(24, 6))
    with pytest.raises(ShapeError, match="HeadMixing must be built for the layer's heads, got 6 heads of 4 for a"):
        MultiHeadAttention(48, 6, combine=mixing)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_few_rows_are_left_to_products_within_the_error_budget(dtype: torch.dtype) -> None:
    rows, gradient = (torch.randn(2, 333, 16, 64, device="cuda").to(dtype) for _ in range(2))
    few, many = (HeadMixing(HeadLayout(1024, 16), count, device="cuda", dtype=dtype) for count in (16, 33))
    assert few.attend(rows).backend == "products"
    assert many.attend(torch.randn(1, 5, 33, 64, device="cuda", dtype=dtype)).backend != "products"

    def both(rows: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        rows = rows.detach().requires_grad_()
        few.backend = backend
        output = few.attend(rows).output
        return output.detach(), torch.autograd.grad(output, rows, gradient.to(rows.dtype))[0]

    def formula(rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.detach().requires_grad_()
        weights = torch.softmax((rows @ rows.mT) * 64**-0.5, -1)
        output = weights @ rows
        return output.detach(), torch.autograd.grad(output, rows, gradient.to(rows.dtype))[0]

    plain, exact = formula(rows), both(rows.double(), "reference")
    for name, found, loose, wanted in zip(("output", "gradient"), both(rows, "auto"), plain, exact, strict=True):
        assert_within_error_budget(found, exact=wanted, plain=loose, name=name)
