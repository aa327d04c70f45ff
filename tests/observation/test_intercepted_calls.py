"""Models that call attention functions of PyTorch directly are observed, and nothing of the process changes."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import _get_current_function_mode_stack

import polyhead
from polyhead import HeadId
from polyhead.errors import GradientError, OptionError
from polyhead.layers.torch_compat import MultiheadAttention
from polyhead.observation import AttentionMaps, Contributions, find_projections
from tests.integrations.huggingface.compare import BOUND
from tests.observation.direct_models import (
    DIM,
    GPT,
    HEADS,
    VOCABULARY,
    WIDTH,
    Block,
    CachedAttention,
    CausalSelfAttention,
    ContextAttention,
    DiffusionBlock,
    MaskedAttention,
    join_heads,
    split_heads,
    weights_of,
)
from tests.observation.from_weights import Expected, assert_table
from tests.observation.test_session import assert_equal_tables, assert_same_trace, trace_of
from tests.observation.test_session import build as build_family

BATCH, TOKENS, SOURCE = 2, 11, 7


def build(model: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    return model.double().eval()


def ids(batch: int = BATCH, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(1))


def tokens(batch: int = BATCH, length: int = TOKENS, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def causal_weights(model: GPT, inputs: torch.Tensor) -> list[torch.Tensor]:
    found = []
    allowed = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool).tril()

    def read(module, args, output):
        query, key, _ = module.heads(*args)
        found.append(weights_of(query, key, allowed))

    hooks = [block.attn.register_forward_hook(read) for block in model.h]
    with torch.no_grad():
        model(inputs)
    for hook in hooks:
        hook.remove()
    return found


def all_rows(batch: int = BATCH, length: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(batch, length, dtype=torch.bool), torch.zeros(batch, dtype=torch.int64)


# ---- statistics against the materialised softmax


@pytest.mark.parametrize("kv_heads", [HEADS, 1])
def test_a_model_in_the_style_of_nanogpt_is_one_line(kv_heads):
    model, inputs = build(GPT(kv_heads=kv_heads)), ids()
    expected = Expected()
    expected.add(causal_weights(model, inputs), *all_rows())
    with torch.no_grad():
        before = model(inputs)
        with polyhead.observe(model) as session:
            assert torch.equal(model(inputs), before)
    assert [site.name for site in dict.fromkeys(session.profile.sites)] == ["h.0.attn", "h.1.attn"]
    assert_table(session.profile, {"self": expected})
    assert session.skipped == []
    assert session.profile.note == ""


def band(length: int) -> torch.Tensor:
    index = torch.arange(length)
    return ((index - index[:, None]).abs() <= 2) & (index <= index[:, None])


LEFT, RIGHT = (
    torch.tensor([[0, 0, 0], [1, 1, 1]], dtype=torch.bool),
    torch.tensor([[1, 1, 1], [0, 0, 0]], dtype=torch.bool),
)
PADDED_LEFT = torch.cat([LEFT, torch.ones(BATCH, TOKENS - 3, dtype=torch.bool)], 1)
PADDED_RIGHT = torch.cat([torch.ones(BATCH, TOKENS - 3, dtype=torch.bool), RIGHT], 1)
TRIL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
BIAS = torch.randn(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)).double()
MASKS = {
    "everything": torch.ones(TOKENS, TOKENS, dtype=torch.bool),
    "causal": TRIL,
    "causal, four axes": TRIL[None, None],
    "added causal": torch.zeros(TOKENS, TOKENS).double().masked_fill(~TRIL, -torch.inf),
    "window": band(TOKENS),
    "padding on the left": PADDED_LEFT[:, None, None],
    "padding on the right": PADDED_RIGHT[:, None, None],
    "causal and padding on the left": TRIL & PADDED_LEFT[:, None, None],
    "added padding": torch.zeros(BATCH, 1, 1, TOKENS).double().masked_fill(~PADDED_RIGHT[:, None, None], -torch.inf),
    "added padding of the lowest number": torch.zeros(BATCH, 1, 1, TOKENS)
    .double()
    .masked_fill(~PADDED_LEFT[:, None, None], torch.finfo(torch.float64).min),
    "added padding on the left of -1e4": torch.zeros(BATCH, 1, 1, TOKENS)
    .double()
    .masked_fill(~PADDED_LEFT[:, None, None], -1e4),
    "added causal of -1e9": torch.zeros(TOKENS, TOKENS).double().masked_fill(~TRIL, -1e9),
    "bias of each head": BIAS,
    "bias of each query": BIAS[:1, :, :1],
    "no keys for one row": TRIL & (torch.arange(TOKENS) != 4)[:, None],
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_every_kind(name):
    mask, layer, x = MASKS[name], build(MaskedAttention()), tokens()
    real = PADDED_LEFT if "left" in name or "lowest" in name else PADDED_RIGHT if "padding" in name else all_rows()[0]
    query, key, _ = (split_heads(part) for part in layer.qkv(x).detach().chunk(3, -1))
    expected = Expected()
    weights = weights_of(query, key, mask)
    expected.add([weights], real, real.to(torch.uint8).argmax(-1))
    with torch.no_grad():
        before = layer(x, mask)
        with polyhead.observe(layer) as session:
            assert torch.equal(layer(x, mask), before)
    assert session.skipped == []
    assert_table(session.profile, {"self": expected})


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"is_causal": True, "scale": 1.7}])
def test_the_scale_is_that_of_the_call(options):
    layer, x = build(MaskedAttention()), tokens()
    query, key, _ = (split_heads(part) for part in layer.qkv(x).detach().chunk(3, -1))
    expected = Expected()
    expected.add([weights_of(query, key, TRIL if "is_causal" in options else None, options["scale"])], *all_rows())
    with torch.no_grad(), polyhead.observe(layer) as session:
        layer(x, **options)
    assert_table(session.profile, {"self": expected})


class Functional(nn.Module):
    """Calls the attention function with the tensors that it receives."""

    num_heads = HEADS

    def forward(self, query, key, value, *args, **options):
        return F.scaled_dot_product_attention(query, key, value, *args, **options)


def heads_of(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize(("queries", "keys"), [(TOKENS, SOURCE), (SOURCE, TOKENS)])
def test_causal_calls_of_other_lengths_align_the_first_query_with_the_first_key(queries, keys):
    query, key = heads_of(BATCH, HEADS, queries, DIM), heads_of(BATCH, HEADS, keys, DIM, seed=4)
    weights = weights_of(query, key, torch.ones(queries, keys, dtype=torch.bool).tril())
    with torch.no_grad(), polyhead.observe(Functional()) as session:
        assert torch.equal(
            session.model(query, key, key, is_causal=True),
            F.scaled_dot_product_attention(query, key, key, is_causal=True),
        )
    distance = (torch.arange(queries)[:, None] - torch.arange(keys)).abs()
    expected = {
        "entropy": -torch.xlogy(weights, weights).sum(-1),
        "mean_distance": (weights * distance).sum(-1),
        "self_mass": (weights * (distance == 0)).sum(-1),
        "sink_mass": weights[..., 0],
    }
    for name, values in expected.items():
        torch.testing.assert_close(session.profile[name], values.mean((0, 2)), rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_pytorch_are_recognised(variant):
    query, key = heads_of(BATCH, HEADS, SOURCE, DIM), heads_of(BATCH, HEADS, TOKENS, DIM, seed=4)
    offset = 0 if variant is causal_upper_left else TOKENS - SOURCE
    weights = weights_of(query, key, torch.ones(SOURCE, TOKENS, dtype=torch.bool).tril(offset))
    with torch.no_grad(), polyhead.observe(Functional()) as session:
        session.model(query, key, key, variant(SOURCE, TOKENS))
    distance = torch.arange(SOURCE)[:, None] + offset - torch.arange(TOKENS)
    torch.testing.assert_close(session.profile["mean_distance"], (weights * distance.abs()).sum(-1).mean((0, 2)))
    torch.testing.assert_close(session.profile["entropy"], -torch.xlogy(weights, weights).sum(-1).mean((0, 2)))


def test_non_contiguous_inputs_broadcast_heads_and_values_of_another_width():
    query = heads_of(BATCH, TOKENS, DIM, HEADS).permute(0, 3, 1, 2)
    key, value = heads_of(1, 1, TOKENS, DIM, seed=4), heads_of(1, 1, TOKENS, 2, seed=5)
    model = Functional()
    model.cross = False
    with torch.no_grad(), polyhead.observe(model, collect=[Contributions()]) as session:
        output = model(query, key, value)
    assert output.shape == (BATCH, HEADS, TOKENS, 2)
    weights = weights_of(query, key)
    torch.testing.assert_close(session.profile["entropy"], -torch.xlogy(weights, weights).sum(-1).mean((0, 2)))
    (states,) = session.observations.collected.values()
    torch.testing.assert_close(states["contributions"].moments.mean.flatten(), (weights @ value).mean((0, 2)).flatten())


def test_statistics_are_those_before_dropout_and_the_dropout_is_the_models_own():
    model, inputs = build(GPT(dropout=0.4)).train(), ids()
    torch.manual_seed(5)
    expected = model(inputs)
    with polyhead.observe(model) as session:
        torch.manual_seed(5)
        assert torch.equal(model(inputs), expected)
        random = torch.get_rng_state()
    torch.manual_seed(5)
    model(inputs)
    assert torch.equal(torch.get_rng_state(), random)
    weights = causal_weights(model.eval(), inputs)[0]  # the inputs of the first layer do not depend on dropout
    entropy = -torch.xlogy(weights, weights).sum(-1).mean((0, 2))
    torch.testing.assert_close(session.profile["entropy"][:HEADS], entropy)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_as_in_the_model(dtype):
    model, inputs = build(GPT()).float(), ids()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        before = model(inputs)
        with polyhead.observe(model) as session:
            assert torch.equal(model(inputs), before)
    exact = torch.cat([-torch.xlogy(w, w).sum(-1).mean((0, 2)) for w in causal_weights(model, inputs)])
    torch.testing.assert_close(session.profile["entropy"], exact, rtol=0.05, atol=0.05)


# ---- sites


def test_self_and_cross_attention_of_one_class_are_told_apart_by_their_inputs():
    model, x = build(nn.ModuleList([DiffusionBlock(WIDTH), DiffusionBlock(WIDTH)])), tokens()
    for context in (tokens(length=SOURCE, seed=2), tokens(seed=2)):  # also of the same length
        with torch.no_grad(), polyhead.observe(model) as session:
            for block in model:
                x = block(x, context)
        kinds = {site.name: site.kind for site in session.profile.sites}
        assert kinds == {"0.attn1": "self", "0.attn2": "cross", "1.attn1": "self", "1.attn2": "cross"}
        table = session.profile
        own = torch.tensor([site.kind == "self" for site in table.sites])
        assert table["mean_distance"][~own].isnan().all()
        assert table["mean_distance"][own].isfinite().all()


def test_cross_attention_against_the_formula():
    layer, x, context = build(ContextAttention()), tokens(), tokens(length=SOURCE, seed=2)
    expected = Expected(cross=True)
    weights = weights_of(split_heads(layer.to_q(x)), split_heads(layer.to_k(context))).detach()
    expected.add([weights], torch.ones(BATCH, TOKENS, dtype=torch.bool), torch.zeros(BATCH, dtype=torch.int64))
    with torch.no_grad(), polyhead.observe(layer) as session:
        layer(x, context)
    assert_table(session.profile, {"cross": expected})


class Pool(nn.Module):
    """A learned query for all tokens, as in timm's attention pooling."""

    def __init__(self):
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x):
        query, key = split_heads(self.latent.expand(len(x), -1, -1)), split_heads(x)
        return join_heads(F.scaled_dot_product_attention(query, key, key))


class Joint(nn.Module):
    """Attention over the tokens of two streams, as in MMDiT."""

    def forward(self, hidden_states, encoder_hidden_states):
        x = split_heads(torch.cat([hidden_states, encoder_hidden_states], 1))
        return join_heads(F.scaled_dot_product_attention(x, x, x))


def test_pooling_is_cross_attention_and_joint_attention_is_not():
    for model, inputs, kind in (
        (Pool(), (tokens(),), "cross"),
        (Pool(), (tokens(batch=1),), "cross"),
        (Joint(), (tokens(), tokens(length=SOURCE)), "self"),
    ):
        with torch.no_grad(), polyhead.observe(build(model)) as session:
            model(*inputs)
        assert {site.kind for site in session.profile.sites} == {kind}


class Attend(nn.Module):
    """The attention of projected heads as a module of its own, as in x-transformers."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q * 1.0, k, v)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.to_kv = Attend(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, context=None):
        source = x if context is None else context
        return join_heads(self.attend(split_heads(x), split_heads(self.to_kv(source)), split_heads(source)))


@pytest.mark.parametrize("length", [TOKENS, SOURCE])
def test_a_module_for_projected_heads_has_the_kind_of_the_module_around_it(length):
    model, x = build(Outer()), tokens()
    for context, kind in ((None, "self"), (tokens(length=length, seed=2), "cross")):
        with torch.no_grad(), polyhead.observe(model) as session:
            model(x, context)
        assert {(site.name, site.kind) for site in session.profile.sites} == {("attend", kind)}


def test_a_batch_of_as_many_sequences_as_keys_is_no_context():
    with torch.no_grad(), polyhead.observe(Joint()) as session:
        session.model(tokens(batch=7, length=4), tokens(batch=7, length=3))
    assert {site.kind for site in session.profile.sites} == {"self"}


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = MaskedAttention(), MaskedAttention()

    def forward(self, x, repeat=1):
        heads = split_heads(x)
        for _ in range(repeat):
            x = x + join_heads(F.scaled_dot_product_attention(heads, heads, heads))
            x = x + join_heads(F.scaled_dot_product_attention(heads, heads, heads, scale=2.0))
        return self.other(self.one(self.one(x)))


def test_calls_of_one_module_are_numbered_and_calls_of_a_shared_module_are_one_site():
    model, x = build(Twice()), tokens()
    with torch.no_grad(), polyhead.observe(model) as session:
        model(x)
        model(x)
    calls = {site.name: count for site, count in session.observations.calls.items()}
    assert calls == {"Twice": 2, "Twice#2": 2, "one": 4, "other": 2}
    entropy = session.profile["entropy"].view(4, HEADS)
    weights = weights_of(split_heads(x), split_heads(x), scale=2.0)
    torch.testing.assert_close(entropy[1], -torch.xlogy(weights, weights).sum(-1).mean((0, 2)))
    with torch.no_grad(), polyhead.observe(model, layers=["Twice#2"]) as session:
        model(x)
    assert {site.name for site in session.profile.sites} == {"Twice#2"}


def test_a_later_call_of_a_module_has_a_gate_of_its_own():
    model, x = build(Twice()), tokens()
    with torch.no_grad(), polyhead.observe(model, statistics=False) as session:
        session.gates["Twice#2", "self"] = torch.zeros(HEADS)
        gated = model(x)
    heads = split_heads(x)
    with torch.no_grad():
        inner = x + join_heads(F.scaled_dot_product_attention(heads, heads, heads))
        torch.testing.assert_close(gated, model.other(model.one(model.one(inner))))
    with polyhead.observe(model) as session:
        session.gates["Twice#3", "self"] = torch.zeros(HEADS)
        with pytest.raises(OptionError, match=r"'Twice#3', 'self'\), which was not called"):
            model(x)


def test_layers_and_heads_are_selected_as_in_other_models():
    model, inputs = build(GPT(layers=3)), ids()
    with torch.no_grad(), polyhead.observe(model) as session:
        model(inputs)
    table = session.profile
    for options, rows in (
        ({"layers": [1]}, range(HEADS, 2 * HEADS)),
        ({"layers": ["h.2.attn"]}, range(2 * HEADS, 3 * HEADS)),
        ({"heads": [2]}, (2, 2 + HEADS, 2 + 2 * HEADS)),
        ({"heads": [HeadId(1, 0)]}, (HEADS,)),
    ):
        with torch.no_grad(), polyhead.observe(model, **options) as session:
            model(inputs)
        assert torch.equal(session.profile["entropy"], table["entropy"][list(rows)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": [7]}, "numbered 0 to 1 in each stack, got 7"),
        ({"layers": ["h.0"]}, r"got 'h\.0', which contains h\.0\.attn"),
        ({"layers": ["h.0.attn#2"]}, r"got 'h\.0\.attn#2'"),
        ({"heads": [3]}, "up to 3 per layer, got 3"),
    ],
)
def test_layers_and_heads_that_were_not_called_raise_on_exit(options, words):
    model = build(GPT())
    with torch.no_grad(), pytest.raises(OptionError, match=words), polyhead.observe(model, **options):
        model(ids())


def test_layers_that_are_no_modules_raise_at_once():
    with pytest.raises(OptionError, match=r"got 'h\.9\.attn', which the model does not have"):
        polyhead.observe(GPT(), layers=["h.9.attn"])
    with pytest.raises(OptionError, match=r"got 'h\.0\.attn#1'"):
        polyhead.observe(GPT(), layers=["h.0.attn#1"])


class Rectified(nn.Module):
    def forward(self, x):
        return (x @ x.mT).relu() @ x


def test_a_model_that_calls_no_attention_function_raises_after_its_forward():
    model = nn.Sequential(Rectified())
    trace = trace_of(model)
    with (
        pytest.raises(OptionError, match=r"got Sequential, which ran without any of them; pass adapters"),
        polyhead.observe(model),
    ):
        model(tokens())  # the forward raises, before the session is exited
    # A part of it alone: on exit.
    with pytest.raises(OptionError, match="ran without any of them"), polyhead.observe(model):
        model[0](tokens())
    with polyhead.observe(model):
        pass  # it did not run
    assert_same_trace(trace_of(model), trace)


# ---- the machinery of a session


def test_every_k_th_call_and_merging():
    model = build(GPT())
    parts = [ids(1, TOKENS), ids(3, 5), ids(2, 8)]
    with torch.no_grad(), polyhead.observe(model, every=2) as session:
        for part in parts:
            model(part)
    kept = session.profile
    separate = []
    for part in (parts[0], parts[2]):
        with torch.no_grad(), polyhead.observe(model) as session:
            model(part)
        separate.append(session.observations)
    assert_equal_tables(kept, separate[1].merge(separate[0]).profile, 1e-9)


def test_collectors_receive_the_heads_outputs_of_the_model():
    model, inputs = build(GPT()), ids()
    with torch.no_grad(), polyhead.observe(model, collect=[AttentionMaps(TOKENS), Contributions()]) as session:
        model(inputs)
    for weights, (site, states) in zip(
        causal_weights(model, inputs), session.observations.collected.items(), strict=True
    ):
        torch.testing.assert_close(states["maps"].map.double(), weights.sum(0), rtol=1e-6, atol=1e-6)
        assert int(states["contributions"].moments.count) == inputs.numel()
        assert site.num_heads == HEADS


def test_gates_equal_an_ablation_by_hand():
    model, inputs = build(GPT()), ids()
    ablated = copy.deepcopy(model)
    ablated.h[1].attn.c_proj.weight.data[:, DIM : 2 * DIM] = 0
    gate = torch.ones(HEADS)
    gate[1] = 0
    with torch.no_grad(), polyhead.observe(model) as session:
        session.gates["h.1.attn", "self"] = gate
        torch.testing.assert_close(model(inputs), ablated(inputs))
        del session.gates["h.1.attn", "self"]
        assert not torch.allclose(model(inputs), ablated(inputs))


def test_a_gate_that_no_call_uses_raises():
    model = build(GPT())
    with polyhead.observe(model) as session:
        with pytest.raises(OptionError, match=r"got 'h\.5\.attn'"):
            session.gates["h.5.attn", "self"] = torch.ones(HEADS)
        session.gates["h.0", "self"] = torch.ones(HEADS)  # not known before the first forward
        with torch.no_grad(), pytest.raises(OptionError, match=r"got \('h\.0', 'self'\), which was not called"):
            model(ids())
        del session.gates["h.0", "self"]
        model(ids())
        with pytest.raises(OptionError, match=r"got 'h\.0'; the model has h\.0\.attn, h\.1\.attn"):
            session.gates["h.0", "self"] = torch.ones(HEADS)


def test_importance_scores_agree_with_finite_differences_of_a_gate():
    from polyhead.analysis.importance import ablate, gradient_scores

    model, inputs = build(GPT()), ids()

    def loss(model, batch):
        return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    scores = gradient_scores(model, [inputs], loss)
    step, estimates = 1e-5, []
    with torch.no_grad(), polyhead.observe(model, statistics=False) as session:
        for layer in range(2):
            for head in range(HEADS):
                losses = []
                for sign in (1, -1):
                    gate = torch.ones(HEADS).double()
                    gate[head] += sign * step
                    session.gates[f"h.{layer}.attn", "self"] = gate
                    losses.append(loss(model, inputs))
                del session.gates[f"h.{layer}.attn", "self"]
                estimates.append((losses[1] - losses[0]) / (2 * step))
    torch.testing.assert_close(scores["taylor"], torch.stack(estimates), rtol=1e-4, atol=1e-6)
    assert len(ablate(model, [inputs], loss)["ablation"]) == 2 * HEADS


def test_projections_are_found():
    model = build(GPT())
    found = find_projections(model, lambda: model(ids()))
    for site, projections in found.items():
        layer = model.get_submodule(site.name)
        weight = layer.c_attn.weight[:WIDTH].unflatten(0, (HEADS, DIM)).transpose(1, 2)
        torch.testing.assert_close(projections.query, weight)
        torch.testing.assert_close(projections.output, layer.c_proj.weight.T.unflatten(0, (HEADS, DIM)))
    assert len(found) == 2


def test_two_sessions_observe_one_model_and_their_gates_multiply():
    model, inputs = build(GPT()), ids()
    with torch.no_grad(), polyhead.observe(model) as alone:
        alone.gates["h.0.attn", "self"] = torch.tensor([1.0, 0.5, 0.0])
        expected = model(inputs)
    with torch.no_grad(), polyhead.observe(model) as outer, polyhead.observe(model.h[0]) as inner:
        outer.gates["h.0.attn", "self"] = torch.tensor([0.5, 0.5, 1.0])
        inner.gates["attn", "self"] = torch.tensor([2.0, 1.0, 0.0])
        torch.testing.assert_close(model(inputs), expected)
    assert_equal_tables(outer.profile, alone.profile)
    assert torch.equal(inner.profile["entropy"], alone.profile["entropy"][:HEADS])
    assert _get_current_function_mode_stack() == []


# ---- gradients and checkpointing


def gradients(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointed", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_are_the_models_own_bit_by_bit(checkpointed, dropout):
    model, inputs = build(GPT(dropout=dropout)).train(), ids()
    model.checkpointed = checkpointed
    torch.manual_seed(3)
    expected = gradients(model, inputs)
    with polyhead.observe(model) as session:
        torch.manual_seed(3)
        observed = gradients(model, inputs)
    assert all(torch.equal(observed[name], expected[name]) for name in expected)
    assert session.profile["tokens"].eq(inputs.numel()).all()
    # The backward may also run after the session.
    torch.manual_seed(3)
    model.zero_grad()
    with polyhead.observe(model):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())
    loss.backward()
    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in model.named_parameters())


def test_selective_checkpointing_matches_operators_of_the_model_alone():
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    saved = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    model, x = build(nn.Sequential(Block(), Block())).train(), tokens().requires_grad_()
    contexts = partial(create_selective_checkpoint_contexts, policy)

    def run():
        output = x
        for block in model:
            output = checkpoint(block, output, use_reentrant=False, context_fn=contexts)
        return torch.autograd.grad(output.square().sum(), x)[0]

    expected = run()
    with polyhead.observe(model) as session:
        assert torch.equal(run(), expected)
    assert session.profile["tokens"].eq(BATCH * TOKENS).all()


class CheckpointedInside(CausalSelfAttention):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_a_function_that_is_checkpointed_inside_a_module():
    model, x = build(CheckpointedInside()).train(), tokens().requires_grad_()
    expected = torch.autograd.grad(model(x).square().sum(), x)[0]
    with polyhead.observe(model) as session:
        assert torch.equal(torch.autograd.grad(model(x).square().sum(), x)[0], expected)
    assert session.profile["tokens"].eq(BATCH * TOKENS).all()


@pytest.mark.parametrize("checkpointed", [None, "non-reentrant"])
def test_kept_statistics_are_differentiable(checkpointed):
    model, inputs = build(GPT()).train(), ids()

    def exact(parameter):
        block = model.h[0]
        x = block.ln_1(model.wte(inputs) + model.wpe(torch.arange(TOKENS)))
        query, key, _ = block.attn.heads(x)
        logs = (query @ key.mT * DIM**-0.5).masked_fill(~TRIL, -torch.inf).log_softmax(-1)
        entropy = -(logs.exp() * logs.masked_fill(~TRIL, 0.0)).sum(-1)
        return torch.autograd.grad(entropy.mean(), parameter)[0]

    expected = exact(model.h[0].attn.c_attn.weight)
    model.checkpointed = checkpointed
    with polyhead.observe(model, statistics="entropy", keep_statistics=True) as session:
        model(inputs)
        rows = session.statistics["h.0.attn"]
        assert rows.output.shape == (BATCH, HEADS, TOKENS, DIM)
        rows.mean("entropy").mean().backward()
    torch.testing.assert_close(model.h[0].attn.c_attn.weight.grad, expected)


def test_kept_statistics_under_reentrant_checkpointing_have_no_gradients():
    model = build(GPT()).train()
    model.checkpointed = "reentrant"
    with polyhead.observe(model, statistics="entropy", keep_statistics=True) as session:
        model(ids())
        with pytest.raises(GradientError):
            session.statistics.mean("entropy")


# ---- caches


def generate(model: CachedAttention, x: torch.Tensor, prompt: int) -> list[torch.Tensor]:
    model.past, model.seen = None, 0
    with torch.no_grad():
        return [model(part) for part in (x[:, :prompt], *x[:, prompt:].split(1, 1))]


@pytest.mark.parametrize("size", [None, TOKENS + 4])
@pytest.mark.parametrize("padded", [False, True])
def test_steps_of_a_cache_have_the_statistics_of_one_forward(size, padded):
    model, x = build(CachedAttention(size)), tokens()
    real, first = all_rows()
    if padded:
        first = torch.tensor([0, 3])
        real = torch.arange(TOKENS) >= first[:, None]
        model.padding = torch.arange(size or TOKENS) >= first[:, None]
    query, key, _ = (split_heads(part) for part in model.qkv(x).detach().chunk(3, -1))
    expected = Expected()
    expected.add([weights_of(query, key, TRIL & real[:, None, None])], real, first)
    with polyhead.observe(model) as session:
        generate(model, x, 7)
    assert {site.kind for site in session.profile.sites} == {"self"}
    assert_table(session.profile, {"self": expected})


@pytest.mark.parametrize("starts", [((0, 3), (5, 1)), ((4, 2), (0, 0)), ((0, 0), (0, 4))])
def test_caches_that_take_turns_keep_the_starts_of_their_sequences(starts):
    model = build(CachedAttention())
    parts = [(tokens(seed=seed), torch.tensor(first), {}) for seed, first in enumerate(starts, 1)]
    expected = Expected()
    for x, first, _ in parts:
        real = torch.arange(TOKENS) >= first[:, None]
        query, key, _ = (split_heads(part) for part in model.qkv(x).detach().chunk(3, -1))
        expected.add([weights_of(query, key, TRIL & real[:, None, None])], real, first)
    with torch.no_grad(), polyhead.observe(model) as session:
        for start, stop in ((0, 7), *((step, step + 1) for step in range(7, TOKENS))):
            for x, first, state in parts:
                model.past, model.seen = state.get("past"), start
                model.padding = torch.arange(TOKENS) >= first[:, None]
                model(x[:, start:stop])
                state["past"] = model.past
    assert_table(session.profile, {"self": expected})


def test_sequences_that_change_places_keep_their_starts():
    model, x, first = build(CachedAttention()), tokens(), torch.tensor([4, 2])
    real, expected = torch.arange(TOKENS) >= first[:, None], Expected()
    query, key, _ = (split_heads(part) for part in model.qkv(x).detach().chunk(3, -1))
    expected.add([weights_of(query, key, TRIL & real[:, None, None])], real, first)
    with torch.no_grad(), polyhead.observe(model) as session:
        model.past, model.seen, model.padding = None, 0, real
        model(x[:, :7])
        model.past, model.padding = tuple(state.flip(0) for state in model.past), real.flip(0)
        for step in range(7, TOKENS):
            model(x.flip(0)[:, step : step + 1])
    assert_table(session.profile, {"self": expected})


# ---- axes


class Axes(nn.Module):
    """Heads in other axes than [batch, heads, sequence, head_dim]."""

    def __init__(self, style: str):
        super().__init__()
        self.style, self.num_heads = style, HEADS

    def forward(self, x):
        match self.style:
            case "two":
                return F.scaled_dot_product_attention(x, x, x)
            case "one head":
                return F.scaled_dot_product_attention(x, x, x, is_causal=True)
            case "windows":  # as in Hiera: [batch, heads, windows, tokens, head_dim]
                heads = x.unflatten(1, (2, -1)).unflatten(-1, (HEADS, DIM)).permute(0, 3, 1, 2, 4)
                return F.scaled_dot_product_attention(heads, heads, heads)
            case "batch times heads":
                heads = split_heads(x).flatten(0, 1)
                return F.scaled_dot_product_attention(heads, heads, heads)


def test_calls_with_other_axes():
    x = tokens(length=10)
    with torch.no_grad(), polyhead.observe(Axes("windows"), collect=[Contributions()]) as session:
        output = session.model(x)
    assert output.shape == (BATCH, HEADS, 2, 5, DIM)
    heads = x.unflatten(1, (2, -1)).unflatten(-1, (HEADS, DIM)).permute(0, 1, 3, 2, 4).flatten(0, 1)
    weights = weights_of(heads, heads)
    torch.testing.assert_close(session.profile["entropy"], -torch.xlogy(weights, weights).sum(-1).mean((0, 2)))
    (states,) = session.observations.collected.values()
    torch.testing.assert_close(states["contributions"].moments.mean.flatten(), output.mean((0, 2, 3)).flatten())
    with torch.no_grad(), polyhead.observe(Axes("two")) as session:
        session.model(x[0])
    assert len(session.profile) == 1
    with torch.no_grad(), polyhead.observe(Axes("one head")) as session:
        session.model(x)
    weights = weights_of(x[:, None], x[:, None], torch.ones(10, 10, dtype=torch.bool).tril())
    torch.testing.assert_close(session.profile["entropy"], -torch.xlogy(weights, weights).sum(-1).mean((0, 2)))


def test_gates_of_calls_with_other_axes():
    model, x = Axes("windows"), tokens(length=10)
    with torch.no_grad(), polyhead.observe(model) as session:
        before = model(x)
        session.gates["Axes", "self"] = torch.tensor([1.0, 0.0, 2.0]).double()
        torch.testing.assert_close(model(x), before * torch.tensor([1.0, 0.0, 2.0])[:, None, None, None])


# ---- what is not understood


def test_what_is_not_understood_runs_as_it_is_and_is_listed():
    model, x = Axes("batch times heads"), tokens()
    with torch.no_grad():
        before = model(x)
        with polyhead.observe(model) as session:
            assert torch.equal(model(x), before)
            model(x)
    (skipped,) = session.skipped
    assert skipped.site == "Axes"
    assert "axes of batch and heads must be known" in skipped.reason
    assert len(session.profile) == 0
    assert "not observed: Axes (the axes" in repr(session.profile)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*torch.jit.script")
def test_transforms_of_torch_func_run_as_they_are():
    model, x = build(MaskedAttention()), tokens()
    expected = torch.func.vmap(model)(x[:, None])
    with polyhead.observe(model) as session:
        assert torch.equal(torch.func.vmap(model)(x[:, None]), expected)
        with sdpa_kernel(SDPBackend.MATH):
            _, tangent = torch.func.jvp(model, (x,), (x,))
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(tangent, torch.func.jvp(model, (x,), (x,))[1])
    assert ["torch.func" in skipped.reason for skipped in session.skipped] == [True]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_traces_and_tensors_without_values_run_as_they_are():
    model, x = build(MaskedAttention()), tokens()
    with torch.no_grad(), polyhead.observe(model) as session:
        traced = torch.jit.trace(model, x, check_trace=False)
        model.to("meta")(x.to("meta"))
    torch.testing.assert_close(traced(x), build(MaskedAttention())(x))
    assert [skipped.reason.rpartition(" got ")[2] for skipped in session.skipped] == ["it is traced", "a meta tensor"]
    assert len(session.profile) == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_run_as_they_are():
    parts = [torch.randn(HEADS, length, DIM) for length in (3, 5)]
    nested = torch.nested.nested_tensor([part.transpose(0, 1) for part in parts], layout=torch.jagged).transpose(1, 2)
    with torch.no_grad(), polyhead.observe(Functional()) as session:
        output = session.model(nested, nested, nested)
    assert output.is_nested
    assert "plain tensors, got a nested tensor" in session.skipped[0].reason


def test_an_error_of_the_call_is_pytorchs_own_and_nothing_is_counted():
    model, x = build(MaskedAttention()), tokens()
    with torch.no_grad(), polyhead.observe(model) as session:
        with pytest.raises(RuntimeError, match="size of tensor"):
            model(x, torch.ones(3, 5, dtype=torch.bool))
        model(x)
    assert session.profile["tokens"].eq(BATCH * TOKENS).all()


class MultiHeadFunction(nn.Module):
    """`F.multi_head_attention_forward`, called with the weights of a `torch.nn.MultiheadAttention`, sequence first."""

    def __init__(self, separate: bool = False, **options: bool) -> None:
        super().__init__()
        sizes = {"kdim": WIDTH - 1, "vdim": WIDTH - 1} if separate else {}
        self.weights = nn.MultiheadAttention(WIDTH, HEADS, **sizes, **options)
        nn.init.normal_(self.weights.in_proj_bias)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> torch.Tensor:
        x = self.weights
        separate = {name: getattr(x, name) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")}
        return F.multi_head_attention_forward(
            query, key, value, WIDTH, HEADS, x.in_proj_weight, x.in_proj_bias, x.bias_k, x.bias_v, x.add_zero_attn, 0.0,
            x.out_proj.weight, x.out_proj.bias, self.training, use_separate_proj_weight=x.in_proj_weight is None,
            **separate, **options,
        )[0]  # fmt: skip


BIAS = torch.linspace(-2, 2, BATCH * HEADS * TOKENS * TOKENS).view(BATCH * HEADS, TOKENS, TOKENS).double().sin()
PADDING = torch.zeros(BATCH, TOKENS).double()
PADDING[1, 7:] = -torch.inf
FUNCTION_CALLS = {
    "plain": {},
    "without weights": {"need_weights": False},
    "bias": {"attn_mask": BIAS},
    "bias and padding": {"attn_mask": BIAS, "key_padding_mask": PADDING},
    "causal": {"attn_mask": ~TRIL, "is_causal": True, "need_weights": False},
    "padding on the left": {"key_padding_mask": PADDING.flip(-1), "need_weights": False},
}


@pytest.mark.parametrize("inputs", ["self", "cross", "unbatched", "separate"])
@pytest.mark.parametrize("case", FUNCTION_CALLS)
def test_the_function_of_torchs_multihead_attention_is_observed_like_its_module(case, inputs):
    model, options = build(MultiHeadFunction(separate=inputs == "separate")), dict(FUNCTION_CALLS[case])
    x = tokens().transpose(0, 1)
    others = {"cross": tokens(seed=5).transpose(0, 1), "separate": tokens(seed=5).transpose(0, 1)[..., 1:]}
    if inputs == "unbatched":
        x = x[:, -1]
        options = {name: y[-1] if name == "key_padding_mask" else y for name, y in options.items()}
        options |= {"attn_mask": BIAS[-HEADS:]} if "bias" in case else {}
    given = (x, others.get(inputs, x), others.get(inputs, x))
    gate = torch.linspace(0, 1, HEADS).double()
    sessions, outputs = [], []
    for module in (model, model.weights):
        with torch.no_grad():
            with polyhead.observe(module) as session:
                out = module(*given, **options)
            site = session.profile.sites[0]
            with polyhead.observe(module) as gated:
                gated.gates[site.name, site.kind] = gate
                gated_out = module(*given, **options)
        sessions.append(session)
        outputs.append([y if isinstance(y, torch.Tensor) else y[0] for y in (out, gated_out)])
    function, module = (session.profile for session in sessions)
    with torch.no_grad():
        assert torch.equal(outputs[0][0], model(*given, **options))
    assert not torch.allclose(*outputs[0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert [site.kind for site in function.sites] == [site.kind for site in module.sites]
    assert not sessions[0].skipped
    for name in module.columns:
        torch.testing.assert_close(function[name], module[name], rtol=0, atol=0, equal_nan=True, msg=name)


def test_statistics_of_the_function_have_gradients():
    model, x = build(MultiHeadFunction()), tokens().transpose(0, 1)
    gradients = []
    for module in (model, model.weights):
        with polyhead.observe(module, statistics="entropy", keep_statistics=True) as session:
            module(x, x, x, attn_mask=BIAS)
            session.statistics.mean("entropy").sum().backward()
        gradients.append(model.weights.in_proj_weight.grad)
        model.weights.in_proj_weight.grad = None
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def test_gates_of_the_function_need_its_dropout_to_be_off():
    class Direct(MultiHeadFunction):
        def forward(self, x):
            w = self.weights
            return F.multi_head_attention_forward(
                x, x, x, WIDTH, HEADS, w.in_proj_weight, w.in_proj_bias, None, None, False, 0.1, w.out_proj.weight,
                w.out_proj.bias, self.training,
            )[0]  # fmt: skip

    model = build(Direct()).train()
    with polyhead.observe(model) as session:
        session.gates["Direct", "self"] = torch.zeros(HEADS).double()
        with pytest.raises(OptionError, match="need dropout to be off"):
            model(tokens())


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_keys_without_a_position_in_the_function_are_listed(option):
    model, x = build(MultiHeadFunction(**{option: True})), tokens()
    with torch.no_grad(), polyhead.observe(model) as session:
        model(x, x, x)
    assert "not all projected from its inputs" in session.skipped[0].reason


class Scaled(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        return super().forward(3 * query, key, value, **options)


class Causal(nn.MultiheadAttention):
    def forward(self, x, need_weights=False, average_attn_weights=True):
        options = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
        return super().forward(x, x, x, attn_mask=~TRIL, **options)


def patched() -> nn.Module:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    layer.forward = lambda query, *rest, original=layer.forward, **options: original(query / 2, *rest, **options)
    return layer


@pytest.mark.parametrize("kind", [Scaled, Causal, patched])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_forward_of_its_own_around_that_of_torchs_layer_is_observed(kind, need_weights):
    layer, x = build(patched() if kind is patched else kind(WIDTH, HEADS, batch_first=True)), tokens()
    inputs, expected = (x,) if kind is Causal else (x, x, x), Expected()
    with torch.no_grad():
        weights = layer(*inputs, need_weights=True, average_attn_weights=False)[1]
        with polyhead.observe(nn.Sequential(layer, nn.MultiheadAttention(WIDTH, HEADS).double())) as session:
            output = layer(*inputs, need_weights=need_weights)[0]
        assert torch.equal(output, layer(*inputs, need_weights=need_weights)[0])
    expected.add([weights], *all_rows())
    assert_table(session.profile, {"self": expected})


def test_a_layer_with_a_forward_of_its_own_is_not_bypassed_by_the_fast_path():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    for layer in encoder.layers:
        layer.self_attn = Scaled(8, 2, batch_first=True)
    with torch.no_grad(), polyhead.observe(build(encoder)) as session:
        encoder(tokens()[..., :8])
    assert [site.name for site in dict.fromkeys(session.profile.sites)] == ["layers.0.self_attn", "layers.1.self_attn"]


def test_a_forward_of_its_own_around_our_version_of_torchs_layer_is_refused():
    class Ours(MultiheadAttention):
        def forward(self, query, key, value, **options):
            return super().forward(3 * query, key, value, **options)

    with pytest.raises(OptionError, match=r"that override forward cannot be observed, .* got Ours;"):
        polyhead.observe(nn.Sequential(Ours(WIDTH, HEADS), nn.MultiheadAttention(WIDTH, HEADS)))


def test_the_hint_of_torchs_multihead_attention_is_followed_where_it_replaces_the_mask():
    layer, x = build(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)), tokens()
    profiles = []
    with torch.no_grad():
        for mask in (torch.zeros_like(TRIL), ~TRIL):
            with polyhead.observe(layer) as session:
                layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
            profiles.append(session.profile)
    for name in profiles[0].columns:
        torch.testing.assert_close(profiles[0][name], profiles[1][name], rtol=0, atol=0, msg=name)


# ---- beside modules that are observed in other ways


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.torch, self.ours = (
            MaskedAttention(),
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
            polyhead.MultiHeadAttention(WIDTH, HEADS),
        )

    def forward(self, x):
        x = self.own(x)
        x = self.torch(x, x, x, need_weights=False)[0]
        return self.ours(x).output


def test_layers_that_are_observed_in_other_ways_count_once():
    model, x = build(Mixed()), tokens()
    with torch.no_grad(), polyhead.observe(model) as session:
        model(x)
    assert {site.name: count for site, count in session.observations.calls.items()} == {"own": 1, "torch": 1, "ours": 1}
    assert session.profile["tokens"].eq(BATCH * TOKENS).all()
    assert session.skipped == []


def test_a_class_inside_a_function_is_found_beside_other_attention():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.torch = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x):
            heads = [F.scaled_dot_product_attention(part, part, part) for part in [split_heads(x)]]
            x = join_heads(heads[0])
            return self.torch(x, x, x)[0]

    with torch.no_grad(), polyhead.observe(build(Local())) as session:
        session.model(tokens())
    assert {site.name for site in session.observations.calls} == {"Local", "torch"}


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_models_that_use_the_interface_throughout_are_not_intercepted(name):
    session = polyhead.observe(build_family(name))
    assert session.possible_modules == session.attention_modules
    assert len(session.attention_modules) > 0


def test_an_adapter_takes_precedence():
    class Adapter:
        def watch(self, module, notify):
            def hook(module, inputs, output):
                query, key, value = (split_heads(part) for part in module.qkv(*inputs).chunk(3, -1))
                notify(query, key, value)

            return module.register_forward_hook(hook)

    model, x = build(nn.Sequential(MaskedAttention(), MaskedAttention())), tokens()
    with torch.no_grad(), polyhead.observe(model, adapters={"0": Adapter()}) as session:
        model(x)
    assert {site.name: count for site, count in session.observations.calls.items()} == {"0": 1, "1": 1}
    assert session.profile["tokens"].eq(BATCH * TOKENS).all()


def test_a_function_of_polyhead_inside_a_module_is_not_intercepted():
    class Calls(nn.Module):
        def forward(self, x):
            heads = split_heads(x)
            y = polyhead.attention(heads, heads, heads, mask=polyhead.Mask.causal()).output
            return join_heads(F.scaled_dot_product_attention(y, y, y))

    with torch.no_grad(), polyhead.observe(Calls()) as session:
        session.model(tokens())
    assert [site.name for site in session.observations.calls] == ["Calls"]
    assert list(session.observations.calls.values()) == [1]


def test_a_transformers_model_without_the_interface_is_observed():
    import transformers

    config = transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=False,
        attn_implementation="sdpa",
    )
    model = transformers.FalconModel(config).eval()
    inputs = ids()
    padding = torch.ones_like(inputs)
    padding[1, :4] = 0
    with torch.no_grad():
        before = model(inputs, attention_mask=padding)[0]
        with polyhead.observe(model) as session:
            assert torch.equal(model(inputs, attention_mask=padding)[0], before)
    assert len(session.profile) == 8
    assert session.profile["tokens"].eq(int(padding.sum())).all()
    eager = transformers.FalconModel._from_config(config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    with torch.no_grad(), polyhead.observe(eager) as weights:
        eager(inputs, attention_mask=padding)
    assert len(weights.materialised) == 2
    assert session.materialised == []
    for name in ("entropy", "mean_distance", "sink_mass"):
        torch.testing.assert_close(session.profile[name], weights.profile[name], rtol=BOUND, atol=BOUND)


# ---- compiled and exported models


def test_compiled_models_run_in_eager_mode():
    model, inputs = build(GPT()), ids()
    with torch.no_grad(), polyhead.observe(model) as plain:
        expected = model(inputs)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(inputs)
        with polyhead.observe(compiled) as session:
            torch.testing.assert_close(compiled(inputs), expected)
    assert torch.equal(session.profile["entropy"], plain.profile["entropy"])
    model.h[0].compile(backend="eager")
    with torch.no_grad(), polyhead.observe(model) as session:
        model(inputs)
    assert_equal_tables(session.profile, plain.profile)


def test_exported_programs_are_observed():
    model, inputs = build(GPT()), ids()
    with torch.no_grad(), polyhead.observe(model) as plain:
        model(inputs)
    program = torch.export.export(model, (inputs,)).module()
    with torch.no_grad(), polyhead.observe(program) as session:
        program(inputs)
    torch.testing.assert_close(session.profile["entropy"], plain.profile["entropy"])


# ---- nothing changes


def process_state(model: nn.Module) -> tuple[object, ...]:
    """Functions, modes, hooks and attributes that a session could change."""
    functions = [
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        torch._C._nn.scaled_dot_product_attention,
    ]
    methods = [type(module).__call__ for module in model.modules()] + [nn.Module.__call__, nn.Module._call_impl]
    attributes = [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]
    global_hooks = torch.nn.modules.module
    hooks = [dict(global_hooks._global_forward_hooks), dict(global_hooks._global_forward_pre_hooks)]
    modes = (_get_current_function_mode_stack(), torch.utils._python_dispatch._get_current_dispatch_mode_stack())
    settings = (torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled(), torch._dynamo.eval_frame._stance)
    return functions, methods, attributes, hooks, modes, settings, torch.get_rng_state().tolist()


class Raises(nn.Module):
    def __init__(self, error: BaseException | None):
        super().__init__()
        self.error, self.attn = error, MaskedAttention()

    def forward(self, x):
        x = self.attn(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [None, ValueError("no"), KeyboardInterrupt()])
def test_nothing_of_the_process_changes(error):
    import torch._dynamo.eval_frame

    model, x = build(nn.Sequential(Raises(None), Raises(error))), tokens()
    before = process_state(model)
    session = polyhead.observe(model)
    assert process_state(model) == before
    with nullcontext() if error is None else pytest.raises(type(error)), torch.no_grad(), session:
        model(x)
    assert process_state(model) == before
    assert len(session.observations.sites) == (2 if error is None else 0)
    model[1].error = None
    with torch.no_grad(), session:
        model(x)
    assert session.profile["tokens"].eq(BATCH * TOKENS * (2 if error is None else 1)).all()


def test_an_interrupt_inside_the_attention_function_leaves_nothing(monkeypatch):
    from polyhead.observation import intercepted_calls

    model, x = build(MaskedAttention()), tokens()
    before = process_state(model)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(intercepted_calls, "attention", interrupted)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt), polyhead.observe(model):
        model(x)
    assert process_state(model) == before


def test_a_mode_that_an_interrupt_left_behind_is_removed_and_others_stay():
    from torch.overrides import TorchFunctionMode

    from polyhead.observation.intercepted_calls import _InterceptingMode

    class Other(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, other = build(MaskedAttention()), Other()
    with polyhead.observe(model) as session:
        torch._C._push_on_torch_function_stack(_InterceptingMode(session._interceptor))
        torch._C._push_on_torch_function_stack(other)
    assert _get_current_function_mode_stack() == [other]
    torch._C._pop_torch_function_stack()


def test_other_threads_and_other_models_are_not_observed():
    model, other, x = build(MaskedAttention()), build(MaskedAttention()), tokens()
    modes, outputs = [], []

    def work():
        with torch.no_grad():
            outputs.append(other(x))
        modes.append(_get_current_function_mode_stack())

    class Starts(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = model

        def forward(self, x):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return self.attn(x)

    with torch.no_grad(), polyhead.observe(Starts()) as session:
        session.model(x)
        other(x)
        F.scaled_dot_product_attention(x, x, x)
    assert modes == [[]]
    assert len(outputs) == 1
    assert {site.name: count for site, count in session.observations.calls.items()} == {"attn": 1}


def test_a_call_of_the_model_from_a_second_thread_raises():
    model, x, errors = build(MaskedAttention()), tokens(), []

    def work():
        try:
            model(x)
        except OptionError as error:
            errors.append(str(error))

    with torch.no_grad(), polyhead.observe(model):
        model(x)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "from one thread only" in errors[0]


def test_a_copy_and_a_pickle_of_an_observed_model_are_not_observed(tmp_path):
    model, x = build(MaskedAttention()), tokens()
    with torch.no_grad(), polyhead.observe(model) as session:
        copied = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        assert torch.equal(copied(x), model(x))
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(x), copied(x))
    assert session.profile["tokens"].eq(BATCH * TOKENS).all()
