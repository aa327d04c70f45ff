"""`TalkingHeads`: its formula, its mixes that start as nothing, its caches, configs, counts and watchers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import polyhead
from polyhead import Mask, MultiHeadAttention, build_attention
from polyhead.costs import Workload, estimate_cost
from polyhead.errors import MaskError, OptionError
from polyhead.layers import AttentionConfig, config_of
from polyhead.layers.kv_cache import GrowingCache, PreallocatedCache, RollingCache
from polyhead.layers.positions import ALiBi, Rotary, T5Bias
from polyhead.layers.positions.config import ALiBiConfig, RotaryConfig, T5BiasConfig
from polyhead.layers.variants import TalkingHeads, TalkingHeadsConfig
from polyhead.observation import AttentionMaps
from polyhead.observation.projections import find_projections
from polyhead.ops.attended import Attended
from tests.error_budget import ORDERS, assert_within_error_budget
from tests.ops.talking_heads.formula import mixed, plain_talking, talking_maps

BATCH, LENGTH, KEYS, EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 11, 13, 24, 6, 2, 10, 7
DOUBLE = torch.float64


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def make(**options: Any) -> TalkingHeads:
    """A float64 layer of awkward sizes in which no parameter has its neutral value."""
    sizes = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "dtype": DOUBLE}
    layer = TalkingHeads(EMBED, HEADS, **{**sizes, **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)


def heads_of(layer: TalkingHeads, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = ((layer.q_proj, x, HEADS), (layer.k_proj, source, KV_HEADS), (layer.v_proj, source, KV_HEADS))
    query, key, value = (linear(given).unflatten(-1, (count, -1)).transpose(1, 2) for linear, given, count in parts)
    return query, key, value


def formula(layer: TalkingHeads, x: Tensor, source: Tensor, mask: Mask | None = None) -> Tensor:
    heads = plain_talking(
        *heads_of(layer, x, source), layer.logits_mix, layer.weights_mix, mask=mask, scale=layer.scale
    )
    return layer.out_proj(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 4}, {"scale": 0.6}])
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_the_layer_and_every_gradient_are_those_of_the_formula(x: Tensor, options: dict, backend: str) -> None:
    layer = make(**options, backend=backend)
    x.requires_grad_()
    found, expected = layer(x).output, formula(layer, x, x, layer.mask)
    close(found, expected)
    into = [x, *layer.parameters()]
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), into) for out in (found, expected)), strict=True):
        close(one, other)


def test_cross_attention_padding_and_gates_are_as_in_multi_head_attention(x: Tensor) -> None:
    layer, source = make(), torch.randn(BATCH, KEYS, EMBED, dtype=DOUBLE)
    close(layer(x, source).output, formula(layer, x, source))
    close(layer(x, layer.remember(source)).output, formula(layer, x, source))
    mask = Mask.lengths([11, 7, 3])
    padded = layer(x, mask=mask).output
    for index, length in enumerate((11, 7, 3)):
        alone = x[index : index + 1, :length]
        close(padded[index : index + 1, :length], formula(layer, alone, alone))
    hidden = torch.arange(LENGTH) >= torch.tensor([[11], [7], [3]])
    torchs = layer(x, mask=Mask.from_torch(key_padding_mask=hidden)).output
    for index, length in enumerate((11, 7, 3)):
        close(torchs[index, :length], padded[index, :length])
    jagged = torch.nested.nested_tensor([row[:n] for row, n in zip(x, (11, 7, 3), strict=True)], layout=torch.jagged)
    close(layer(jagged).output[1], padded[1, :7])
    gate = torch.rand(HEADS, dtype=DOUBLE)
    heads = plain_talking(*heads_of(layer, x, x), layer.logits_mix, layer.weights_mix) * gate[:, None, None]
    close(layer(x, head_gate=gate).output, layer.out_proj(heads.transpose(1, 2).flatten(2)))


@pytest.mark.numerics
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # a CPU without bfloat16 instructions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_layer_is_multi_head_attention_within_the_error_budget(dtype: torch.dtype) -> None:
    talking = TalkingHeads(EMBED, HEADS, causal=True, positions=Rotary(EMBED // HEADS), dtype=dtype)
    plain = MultiHeadAttention(EMBED, HEADS, causal=True, positions=Rotary(EMBED // HEADS), dtype=dtype)
    state = {name: value for name, value in talking.state_dict().items() if not name.endswith("_mix")}
    plain.load_state_dict(state)
    x = torch.randn(ORDERS * BATCH, LENGTH, EMBED, dtype=dtype)
    exact = copy.deepcopy(plain).double()(x.double(), backend="reference").output
    assert_within_error_budget(talking(x).output, exact=exact, plain=plain(x).output)


SIZES = {"batch_size": BATCH, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "dtype": DOUBLE}
CACHES = {
    "growing": GrowingCache,
    "preallocated": lambda: PreallocatedCache(capacity=16, **SIZES),
    "rolling": lambda: RollingCache(window=5, **SIZES),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("positions", [None, lambda: Rotary(HEAD_DIM)], ids=["no positions", "rotary"])
def test_generation_with_a_cache_equals_the_full_forward(x: Tensor, kind: str, positions: Any) -> None:
    options = {"window": 5} if kind == "rolling" else {}
    layer = make(causal=True, positions=None if positions is None else positions().double(), **options)
    expected, cache = layer(x).output, CACHES[kind]()
    with torch.no_grad():
        found = [layer(x[:, start:stop], cache=cache).output for start, stop in ((0, 4), (4, 5), (5, 6), (6, LENGTH))]
    close(torch.cat(found, 1), expected)


def test_statistics_and_combined_weights_are_the_materialised_ones(x: Tensor) -> None:
    layer = make(causal=True)
    query, key, _ = heads_of(layer, x, x)
    _, weights = talking_maps(query, key, layer.logits_mix, mask=Mask.causal())
    found = layer(x, statistics=["entropy", "self_mass"]).statistics
    entropy = -torch.where(weights > 0, weights * torch.log(weights.clamp_min(1e-300)), 0.0).sum(-1)
    close(found.entropy, entropy)
    close(found.self_mass, weights.diagonal(dim1=-2, dim2=-1))
    close(layer(x, weights=True).weights, weights)
    combined, told = mixed(weights, layer.weights_mix), layer.combined_weights(x)
    close(told.signed_mass, combined.sum(-1))
    close(told.absolute_mass, combined.abs().sum(-1))
    close(told.largest_weight, combined.abs().amax(-1))
    assert layer.combined_weights(x, statistics="largest_weight").signed_mass is None
    with pytest.raises(OptionError, match=r"need not sum to 1.*got 'entropy'"):
        layer.combined_weights(x, statistics=("signed_mass", "entropy"))


def test_who_watches_sees_each_softmax(x: Tensor) -> None:
    layer = make(causal=True)
    _, weights = talking_maps(*heads_of(layer, x, x)[:2], layer.logits_mix, mask=Mask.causal())
    statistics = layer(x, statistics=True).statistics
    with (
        torch.no_grad(),
        polyhead.observe(layer, statistics=("entropy", "mean_distance"), collect=[AttentionMaps(4)]) as session,
    ):
        layer(x)
    for name in ("entropy", "mean_distance"):
        means = torch.tensor([row[name] for row in session.profile.rows()], dtype=DOUBLE)
        torch.testing.assert_close(means, getattr(statistics, name).mean((0, 2)), rtol=1e-6, atol=1e-9)
    assert layer._listener is None
    told: list[Attended] = []
    layer._listener = told.append
    layer(x, logsumexp=True)
    seen = told[0].profile(block_map=(1, 1)).block_map
    torch.testing.assert_close(seen.double(), weights, rtol=1e-6, atol=1e-7)


def test_the_wiring_of_a_map_has_the_queries_and_keys_of_all_heads(x: Tensor) -> None:
    layer = make(causal=True, bias=False)
    (head_projections,) = find_projections(layer, lambda: layer(x)).values()
    query, key, _ = heads_of(layer, x, x)
    logits, _ = talking_maps(query, key, layer.logits_mix, scale=1.0)
    close((x[:, None] @ head_projections.query) @ (x[:, None] @ head_projections.key).mT, logits)
    assert head_projections.value.shape == (KV_HEADS, EMBED, VALUE_DIM)
    assert head_projections.output.shape == (HEADS, VALUE_DIM, EMBED)


OPTIONS = {
    "plain": {},
    "groups": {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM, "bias": False, "scale": 0.3},
    "edges": {"causal": True, "window": 5, "qk_norm": "rms", "output_gate": "head", "backend": "blockwise"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_config_builds_the_layer_and_goes_through_json(options: dict[str, Any]) -> None:
    config = TalkingHeadsConfig(EMBED, HEADS, **options, positions=RotaryConfig(rotary_dim=4))
    layer = build_attention(config, dtype=DOUBLE)
    assert isinstance(layer, TalkingHeads)
    assert config_of(layer) == config == AttentionConfig.from_json(config.to_json())
    assert config.to_dict()["kind"] == "talking_heads"
    other = TalkingHeads(EMBED, HEADS, **options, positions=Rotary(config.head_dim, rotary_dim=4), dtype=DOUBLE)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    assert layer(x).output.equal(other(x).output)
    built = sum(parameter.numel() for parameter in layer.parameters())
    assert estimate_cost(config, Workload.forward(LENGTH)).parameters == built


@pytest.mark.parametrize(
    "work", [Workload.forward(LENGTH, batch=2), Workload.training_step(LENGTH), Workload.decode(KEYS, batch=2)]
)
def test_matrix_flops_are_those_that_pytorch_counts(work: Workload) -> None:
    layer = build_attention(config := TalkingHeadsConfig(EMBED, HEADS, num_kv_heads=KV_HEADS, backend="reference"))
    x = torch.randn(work.batch, work.queries, EMBED, requires_grad=True)
    cache = GrowingCache() if work.past else None
    with torch.set_grad_enabled(work.training):
        if work.past:
            layer(torch.randn(work.batch, work.past, EMBED), cache=cache)
        with FlopCounterMode(display=False) as counter:
            output = layer(x, cache=cache).output
            if work.training:
                output.sum().backward()
    assert estimate_cost(config, work, form="materialised").matrix_flops == counter.get_total_flops()


# Dynamo instantiates an autograd function, which PyTorch itself deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_layer_compiles_whole_forward_and_backward(x: Tensor) -> None:
    layer = make(causal=True)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, expected = (
        torch.autograd.grad(call(x).output.square().sum(), list(layer.parameters())) for call in (compiled, layer)
    )
    torch.compiler.reset()
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def test_copies_checkpoints_and_resets_carry_the_mixes(x: Tensor) -> None:
    layer = make()
    assert copy.deepcopy(layer)(x).output.equal(layer(x).output)
    fresh = TalkingHeads(EMBED, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, value_dim=VALUE_DIM, dtype=DOUBLE)
    assert fresh.logits_mix.equal(torch.eye(HEADS, dtype=DOUBLE))
    assert fresh.weights_mix.equal(fresh.logits_mix)
    fresh.load_state_dict(layer.state_dict())
    assert fresh(x).output.equal(layer(x).output)
    fresh.reset_parameters()
    assert fresh.weights_mix.equal(torch.eye(HEADS, dtype=DOUBLE))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softcap": 3.0}, "talking heads do not support softcap, got 3.0"),
        ({"sinks": True}, "talking heads do not support sinks, got True"),
        ({"dropout": 0.1}, "talking heads do not support dropout, got 0.1"),
        ({"key_heads": (0, 0, 0, 0, 0, 1)}, "talking heads do not support key_heads"),
        ({"backend": "sdpa"}, "backend of talking heads must be.*got 'sdpa'"),
    ],
)
def test_what_talking_heads_cannot_have_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    for kind in (TalkingHeads, TalkingHeadsConfig):
        with pytest.raises(OptionError, match=words):
            kind(EMBED, HEADS, **options)


def test_what_would_not_know_its_mix_is_refused(x: Tensor) -> None:
    for positions, config in ((ALiBi(HEADS), ALiBiConfig()), (T5Bias(HEADS), T5BiasConfig())):
        with pytest.raises(OptionError, match="positions that bias logits"):
            TalkingHeads(EMBED, HEADS, positions=positions)
        with pytest.raises(OptionError, match="positions that bias logits"):
            TalkingHeadsConfig(EMBED, HEADS, positions=config)
    layer = make()
    with pytest.raises(MaskError, match=rf"got a Mask\.dense of \[1, {HEADS}, "):
        layer(x, mask=Mask.dense(torch.ones(1, HEADS, LENGTH, LENGTH, dtype=torch.bool)))
    with pytest.raises(OptionError, match="a seed is for dropout"):
        layer(x, seed=3)
    assert not hasattr(layer, "to_torch")
    with pytest.raises(OptionError, match="does not support combine"):
        TalkingHeads(EMBED, HEADS, combine=nn.Identity())


def test_weights_of_torch_are_taken_over(x: Tensor) -> None:
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=DOUBLE)
    ours = TalkingHeads.from_torch(theirs)
    close(ours(x).output, theirs(x, x, x)[0])
