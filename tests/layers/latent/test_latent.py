"""Latent heads against their formula in float64, in both forms."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import Mask, Statistics, attention
from polyhead.errors import CheckpointError, OptionError, ShapeError
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.latent.forms import FORMS, LatentLayout, form_products
from polyhead.layers.latent.layer import LatentAttention
from polyhead.layers.positions import ALiBi, Learned, Rotary
from tests.error_budget import Compared, assert_draws_within_error_budget, key_orders
from tests.layers.latent.latent_formula import (
    DOUBLE,
    EMBED,
    HEADS,
    NOPE,
    QUERY_RANK,
    RANK,
    ROPE,
    SIZES,
    VALUE,
    formula,
    make,
)
from tests.ops.oracle import ON_THE_CPU

BATCH, LENGTH, KEYS = 3, 17, 19


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE)


def edge(queries: int = LENGTH, window: int | None = None) -> Tensor:
    before = torch.arange(queries)[:, None] - torch.arange(queries)
    return ((before >= 0) & (before < (queries if window is None else window)))[None]


@pytest.fixture
def x() -> Tensor:
    return randn(BATCH, LENGTH, EMBED)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


# ---- the numbers

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed queries": {"q_lora_rank": QUERY_RANK},
    "without positions": {"positions": None},
    "without bias": {"bias": False},
    "output bias alone": {"bias": False, "output_bias": True},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": True},
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_option_is_the_formula(name: str, form: str, x: Tensor) -> None:
    layer = make(**LAYERS[name], form=form)
    given = {key: value for key, value in LAYERS[name].items() if key in ("softcap", "scale")}
    close(layer(x).output, formula(layer, x, **given)[0])
    close(layer(x, mask=Mask.causal()).output, formula(layer, x, visible=edge(), **given)[0])


@pytest.mark.parametrize("backend", ON_THE_CPU)
@pytest.mark.parametrize("window", [None, 5])
def test_a_layers_own_mask_in_every_backend(window: int | None, backend: str, form: str, x: Tensor) -> None:
    layer = make(causal=True, window=window, form=form)
    result = layer(x, backend=backend)
    close(result.output, formula(layer, x, visible=edge(window=window))[0])
    assert result.backend == backend


def test_padding_is_not_seen(form: str, x: Tensor) -> None:
    layer, lengths = make(causal=True, form=form), [17, 11, 3]
    real = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    x = torch.where(real[..., None], x, torch.nan)
    expected = formula(layer, x.nan_to_num(), visible=edge() & real[:, None, :])[0]
    close(layer(x, mask=Mask.lengths(torch.tensor(lengths))).output[real], expected[real])


def test_cross_attention_and_a_source_remembered(form: str, x: Tensor) -> None:
    layer, source = make(positions=None, form=form), randn(BATCH, KEYS, EMBED)
    expected = formula(layer, x, source)[0]
    close(layer(x, source).output, expected)
    memory = layer.remember(source)
    assert memory.key.shape == (BATCH, 1, KEYS, RANK)
    close(layer(x, memory).output, expected)


def test_the_keys_of_another_sequence_turn_from_its_start(form: str, x: Tensor) -> None:
    layer = make(form=form)
    source = x[:, : LENGTH - 4]
    close(layer(x, layer.remember(source)).output, layer(x, source).output)
    whole = layer(x, mask=Mask.dense((torch.arange(LENGTH) < LENGTH - 4)[None, None, None])).output
    close(layer(x, source).output, whole)


def test_tokens_may_stand_anywhere(form: str, x: Tensor) -> None:
    layer = make(form=form)
    positions = torch.randperm(97)[: BATCH * LENGTH].view(BATCH, LENGTH)
    close(layer(x, token_positions=positions).output, formula(layer, x, positions=positions)[0])


@pytest.mark.parametrize("positions", [lambda: ALiBi(HEADS), lambda: Learned(31, EMBED)])
def test_other_positions_serve_both_forms(positions: Any, x: Tensor) -> None:
    layer = make(positions=positions(), causal=True)
    close(layer(x, form="absorbed").output, layer(x, form="expanded").output)
    without = copy.deepcopy(layer)
    without.positions = None
    assert (layer(x).output - without(x).output).abs().max() > 1e-3


def test_a_gate_multiplies_the_heads(form: str, x: Tensor) -> None:
    layer, gate = make(form=form), randn(HEADS)
    expected = formula(layer, x, gate=gate)[0]
    close(layer(x, head_gate=gate).output, expected)
    close(layer(x, head_gate=gate[None, :, None].expand(BATCH, HEADS, LENGTH)).output, expected)
    layer.head_gate = gate
    close(layer(x).output, expected)


def test_a_seed_drops_the_same_weights_in_both_forms(x: Tensor) -> None:
    layer = make(dropout=0.4)
    expanded, absorbed = (layer(x, seed=31, form=form).output for form in FORMS)
    close(absorbed, expanded)
    assert (expanded - layer.eval()(x, seed=31).output).abs().max() > 1e-3


@pytest.mark.parametrize("q_lora_rank", [None, QUERY_RANK])
def test_gradients_are_those_of_the_formula(q_lora_rank: int | None, form: str, x: Tensor) -> None:
    layer = make(q_lora_rank=q_lora_rank, causal=True, form=form)
    inputs = [x.requires_grad_(), *layer.parameters()]
    toward = randn(BATCH, LENGTH, EMBED)
    expected = torch.autograd.grad(formula(layer, x, visible=edge())[0], inputs, toward)
    for found, wanted in zip(torch.autograd.grad(layer(x).output, inputs, toward), expected, strict=True):
        close(found, wanted)


def differentiated(output: Tensor, x: Tensor, layer: LatentAttention, toward: Tensor) -> dict[str, Tensor]:
    """The output, and what comes back from `toward` at the input and at every parameter."""
    names = ["output", "input", *(name for name, _ in layer.named_parameters())]
    gradients = torch.autograd.grad(output, [x, *layer.parameters()], toward.to(output.dtype))
    return dict(zip(names, [output.detach(), *gradients], strict=True))


@pytest.mark.numerics
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_stay_within_the_error_budget(dtype: torch.dtype) -> None:
    """Over several draws and orders of the tokens: the largest error among a few numbers says little of either side.

    Both forms are compared with the same exact numbers.
    """
    draws: dict[str, list[dict[str, Compared]]] = {form: [] for form in FORMS}
    for other in key_orders(LENGTH):
        wide_layer = make(q_lora_rank=QUERY_RANK).to(dtype).double()
        layer = copy.deepcopy(wide_layer).to(dtype)
        x, toward = (randn(BATCH, LENGTH, EMBED).to(dtype) for _ in range(2))
        wide, narrow, again = (x.to(d, copy=True).requires_grad_() for d in (DOUBLE, dtype, dtype))
        exact = differentiated(formula(wide_layer, wide)[0], wide, wide_layer, toward)
        for form in FORMS:
            found = differentiated(layer(again, form=form).output, again, layer, toward)
            for order in (torch.arange(LENGTH), other):
                plain = formula(layer, narrow[:, order], positions=order, absorbed=form == "absorbed")[0]
                loose = differentiated(plain, narrow, layer, toward[:, order])
                loose["output"] = loose["output"][:, order.argsort()]
                compared = {name: Compared(found.get(name), right, loose[name]) for name, right in exact.items()}
                draws[form].append(compared)
                found = {}  # ours has one order
    for of_a_form in draws.values():
        assert_draws_within_error_budget(of_a_form)


# ---- what it tells


def from_weights(weights: Tensor) -> dict[str, Tensor]:
    distance = torch.arange(weights.shape[-1]) - torch.arange(weights.shape[-2])[:, None]
    return {
        "entropy": -torch.special.xlogy(weights, weights).sum(-1),
        "confidence": weights.amax(-1),
        "mean_distance": (weights * distance.abs()).sum(-1),
        "sink_mass": weights[..., 0],
        "self_mass": weights.diagonal(0, -2, -1),
    }


@pytest.mark.parametrize("backend", [None, *ON_THE_CPU])
def test_statistics_are_those_of_the_materialised_weights(backend: str | None, form: str, x: Tensor) -> None:
    layer = make(causal=True, form=form)
    output, weights = formula(layer, x, visible=edge())
    result = layer(x, statistics=True, backend=backend)
    close(result.output, output)
    for name, expected in from_weights(weights).items():
        close(getattr(result.statistics, name), expected)
    close(layer(x, weights=True).weights, weights)


def test_a_cross_attention_compares_no_positions(form: str, x: Tensor) -> None:
    statistics = make(form=form)(x, randn(BATCH, KEYS, EMBED), statistics=True).statistics
    assert statistics.entropy.shape == (BATCH, HEADS, LENGTH)
    assert statistics.mean_distance is None
    assert statistics.self_mass is None


def test_who_listens_can_know_every_weight_again(form: str, x: Tensor) -> None:
    layer, told = make(causal=True, form=form), []
    layer._listener = told.append
    result = layer(x, logsumexp=True, statistics=Statistics("entropy"))
    (attended,) = told
    weights = formula(layer, x, visible=edge())[1]
    close(attended.profile(received=True).received, weights.sum(-2))
    close(layer.out_proj(attended.result.output.transpose(1, 2).flatten(2)), result.output)
    close(attended.result.statistics.entropy, from_weights(weights)["entropy"])


# ---- which form, and why


def test_the_absorbed_form_is_multi_query_attention_over_memory_that_is_not_copied(x: Tensor) -> None:
    layer, told = make(form="absorbed"), []
    layer._listener = told.append
    layer(x)
    (attended,) = told
    assert attended.query.shape == (BATCH, HEADS, LENGTH, RANK + ROPE)
    assert attended.key.shape == (BATCH, 1, LENGTH, RANK + ROPE)
    assert attended.value.shape == (BATCH, 1, LENGTH, RANK)
    assert attended.value.data_ptr() == attended.key.data_ptr()


@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_values_may_be_a_slice_of_the_keys(backend: str) -> None:
    query, key = randn(BATCH, HEADS, 3, RANK + ROPE), randn(BATCH, 1, KEYS, RANK + ROPE)
    sliced = attention(query, key, key[..., :RANK], backend=backend).output
    assert torch.equal(sliced, attention(query, key, key[..., :RANK].clone(), backend=backend).output)


def test_auto_takes_the_form_of_fewer_multiply_adds(x: Tensor) -> None:
    layer, told = make(kv_lora_rank=31), []
    layer._listener = told.append
    layout = layer.layout
    taken = set()
    for queries, keys in [(1, 2), (1, 97), (7, 97), (11, 13), (41, 43), (97, 97), (97, 3)]:
        choice = layer.explain(queries, keys)
        costs = [form_products(layout, form, queries, keys) for form in FORMS]
        assert (choice.expanded, choice.absorbed) == tuple(costs)
        assert choice.chosen == ("absorbed" if costs[1] < costs[0] else "expanded")
        layer(randn(1, queries, EMBED), randn(1, keys, EMBED))
        assert told.pop().key.shape[1] == (1 if choice.chosen == "absorbed" else HEADS)
        taken.add(choice.chosen)
    assert taken == set(FORMS)


@pytest.mark.parametrize(("rank", "chosen"), [(RANK, "expanded"), (3, "absorbed"), (31, "expanded")])
def test_self_attention_goes_by_the_width_of_the_latent(rank: int, chosen: str) -> None:
    layer, told = make(kv_lora_rank=rank, qk_nope_head_dim=11 if rank == RANK else NOPE, value_head_dim=11), []
    layer._listener = told.append
    layer(randn(1, LENGTH, EMBED))
    assert layer.explain(LENGTH).chosen == chosen
    assert told[0].key.shape[1] == (1 if chosen == "absorbed" else HEADS)


def test_the_counted_multiply_adds_are_those_that_run() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    layer, memory_of = make(), randn(1, KEYS, EMBED)
    for form in FORMS:
        counts = []
        for queries, source in ((7, memory_of), (7, memory_of[:, :13])):
            memory = layer.remember(source)
            with FlopCounterMode(display=False) as counter:
                layer(randn(1, queries, EMBED), memory, form=form, backend="reference")
            rest = 2 * queries * (EMBED * HEADS * (NOPE + ROPE) + HEADS * VALUE * EMBED)
            counts.append(counter.get_total_flops() - rest)
        assert counts == [2 * form_products(layer.layout, form, 7, keys) for keys in (KEYS, 13)]


def test_explain_prints_both_forms_and_the_reason() -> None:
    layer = make()
    assert str(layer.explain(1, 100)).splitlines()[1] == "-> absorbed  15,210 multiply-adds  fewer multiply-adds"
    assert "-> expanded" in str(layer.explain(1, 100, form="expanded"))
    assert layer.explain(1, 100, form="expanded").reason == "form='expanded' was requested"
    assert NOPE + VALUE == 2 * RANK
    assert layer.explain(17).reason == "equal multiply-adds"


def test_explain_says_who_reads_a_latent_cache() -> None:
    layer = make(kv_lora_rank=528, dtype=torch.float32, causal=True)
    wide = "latents must have a multiple of 16 channels up to 512, got 528"
    rotary = "rotary channels of latents must be a multiple of 8 up to 128, got 6"
    cpu = "our kernels run on CUDA devices, got tensors on cpu"
    assert layer.explain(1, 100).refusals == (wide, rotary, cpu)
    assert str(layer.explain(1, 100)).endswith(f"a LatentCache is read by attention: {wide}; {rotary}; {cpu}")
    fitting = make(kv_lora_rank=512, positions=Rotary(64), dtype=torch.float32, backend="sdpa")
    assert fitting.explain(1, 100).refusals == ("backend='sdpa' was requested", cpu)
    assert "up to 16 new tokens per sequence, got 17" in fitting.explain(17, 100).refusals[1]
    assert str(replace(fitting.explain(1, 100), refusals=())).endswith("a LatentCache is read by the decode kernels")


def test_a_projection_that_is_more_than_a_matrix_is_called(x: Tensor) -> None:
    layer, seen = make(), []
    handle = layer.kv_b_proj.register_forward_hook(lambda *call: seen.append(call))
    assert layer.explain(1, 1000).chosen == "expanded"
    assert layer.explain(1, 1000).reason == "kv_b_proj has hooks"
    layer(x[:, :1], x)
    assert len(seen) == 1
    with pytest.raises(OptionError, match="reads the weight of kv_b_proj, got a kv_b_proj that has hooks"):
        layer(x, form="absorbed")
    handle.remove()
    layer.kv_b_proj.bias = nn.Parameter(randn(HEADS * (NOPE + VALUE)))
    assert layer.explain(1, 1000).reason == "kv_b_proj has a bias"
    close(layer(x[:, :1], x).output, layer(x[:, :1], x, form="expanded").output)
    layer.kv_b_proj = nn.Sequential(layer.kv_b_proj)  # type: ignore[assignment]
    assert layer.explain(1, 1000).reason == "kv_b_proj is a Sequential"


# ---- checkpoints and refusals


def test_a_checkpoint_of_other_heads_is_refused() -> None:
    saved = make(positions=None, bias=False).state_dict()
    twin = make(positions=None, bias=False)
    twin.load_state_dict(saved)
    assert all(torch.equal(weight, saved[name]) for name, weight in twin.named_parameters())
    other = LatentAttention(EMBED, 1, kv_lora_rank=RANK, qk_nope_head_dim=HEADS * NOPE, value_head_dim=HEADS * VALUE)
    with pytest.raises(CheckpointError, match="num_heads 5 where the layer has 1"):
        other.load_state_dict(saved, strict=False)
    del saved["_extra_state"]
    make(positions=None, bias=False).load_state_dict(saved)


def test_the_default_sizes() -> None:
    assert LatentAttention(24, 4, kv_lora_rank=5).layout == LatentLayout(24, 4, 5, 0, 6, 0, 6)
    layer = LatentAttention(24, 4, kv_lora_rank=5, positions=Rotary(2), q_lora_rank=3, value_head_dim=7)
    assert layer.layout == LatentLayout(24, 4, 5, 3, 6, 2, 7)
    words = "24, 4, kv_lora_rank=5, q_lora_rank=3, qk_nope_head_dim=6, qk_rope_head_dim=2, value_head_dim=7"
    assert layer.extra_repr() == words


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kv_lora_rank": 0}, ShapeError, "kv_lora_rank must be at least 1, got 0"),
        ({"q_lora_rank": 2.0}, ShapeError, "q_lora_rank must be an integer, got 2.0"),
        ({"qk_nope_head_dim": None}, ShapeError, "when qk_nope_head_dim is not given, got 23 and 5"),
        ({"qk_rope_head_dim": {}, "positions": None}, ShapeError, "qk_rope_head_dim must be an integer, got {}"),
        ({"qk_rope_head_dim": 0}, ShapeError, "qk_rope_head_dim must be at least 1, got 0"),
        ({"qk_rope_head_dim": 4}, ShapeError, r"Rotary\(head_dim=6\) for a qk_rope_head_dim of 4"),
        ({"qk_rope_head_dim": 4, "positions": None}, OptionError, r"got 4 with positions None; pass .*Rotary\(4\)"),
        ({"positions": nn.Identity()}, OptionError, "a module of polyhead.layers.positions, got Identity"),
        ({"positions": ALiBi(3)}, ShapeError, r"ALiBi\(num_heads=3\) for a layer with num_heads 5"),
        ({"form": "latent"}, OptionError, "form must be 'auto', 'expanded' or 'absorbed', got 'latent'"),
        ({"norm_eps": 0.0}, OptionError, "norm_eps must be positive and finite, got 0.0"),
        ({"window": 3}, OptionError, "needs causal=True, got window 3"),
        ({"dropout": 1.0}, OptionError, "dropout must be at least 0 and less than 1, got 1.0"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LatentAttention(EMBED, HEADS, **{**SIZES, "positions": Rotary(ROPE), **options})


@pytest.mark.parametrize("more", [{}, {"qk_nope_head_dim": 8}], ids=["a share", "given"])
@pytest.mark.parametrize(
    ("embed_dim", "num_heads", "words"),
    [
        (32, 0, "num_heads must be at least 1, got 0"),
        (32, -4, "num_heads must be at least 1, got -4"),
        (0, 4, "embed_dim must be at least 1, got 0"),
        ("32", 4, "embed_dim must be an integer, got '32'"),
        (32, "4", "num_heads must be an integer, got '4'"),
        (None, 4, "embed_dim must be an integer, got None"),
        (32, None, "num_heads must be an integer, got None"),
        (32.0, 4, "embed_dim must be an integer, got 32.0"),
    ],
)
def test_sizes_are_checked_before_they_are_divided(embed_dim: Any, num_heads: Any, words: str, more: Any) -> None:
    for kind in (LatentAttention, LatentConfig):
        with pytest.raises(ShapeError, match=words):
            kind(embed_dim, num_heads, kv_lora_rank=8, **more)


def test_a_wrong_call_is_refused(x: Tensor) -> None:
    layer = make()
    with pytest.raises(ShapeError, match=r"query must be \[batch, sequence, 23\], got shape \[3, 17, 5\]"):
        layer(x[..., :5])
    with pytest.raises(ShapeError, match=r"key must be \[batch, sequence, 23\], got shape \[3, 17, 5\]"):
        layer(x, x[..., :5])
    with pytest.raises(OptionError, match="form must be 'auto', 'expanded' or 'absorbed', got 'fast'"):
        layer(x, form="fast")
    with pytest.raises(OptionError, match=r"without one use mask=Mask\.lengths"):
        layer(x, lengths=[3, 2, 1])
    with pytest.raises(OptionError, match=r"cache must be a polyhead\.KVCache, got dict"):
        layer(x, cache={})
    with pytest.raises(ShapeError, match=r"\[5\], \[3, 5\] or \[3, 5, 17\], got \[4\]"):
        layer(x, head_gate=torch.ones(4))
    jagged = torch.nested.as_nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(OptionError, match=r"got a nested query; pad it and use Mask\.lengths"):
        layer(jagged)
