"""Models that call flash-attn and xformers are observed; the packages are stand-ins of their signatures."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import threading
from contextlib import nullcontext
from types import FunctionType, ModuleType

import pytest
import torch
import torch.nn.functional as F
import transformers.modeling_utils  # noqa: F401  looks for flash-attn when it is imported, where a stand-in would not do
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import polyhead
from polyhead.errors import OptionError
from polyhead.observation import Contributions, foreign_functions
from tests.observation import foreign_stand_ins as stand_ins
from tests.observation.test_intercepted_calls import build, process_state

BATCH, TOKENS, SOURCE, HEADS, DIM = 2, 11, 7, 6, 5
WIDTH = HEADS * DIM
LENGTHS = (4, 1, 6)
OFFSETS = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
ORIGINAL = {"flash": stand_ins.flash_attn_func}  # not a name of a module, which sessions replace
STATISTICS = (
    *("entropy", "normalized_entropy", "confidence", "max_logit", "mean_distance", "mean_offset", "sink_mass"),
    *("self_mass", "previous_mass", "next_mass", "window_mass"),
)


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    found = stand_ins.modules()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    before = {name: dict(vars(module)) for name, module in found.items()}
    yield found
    assert {name: dict(vars(module)) for name, module in found.items()} == before
    assert not foreign_functions._REPLACEMENTS.holders
    assert not foreign_functions._REPLACEMENTS.wrappers


def flash(name="flash_attn_func", **options):
    """Return a function over [batch, sequence, heads, head_dim] that calls one of flash-attn."""

    def attend(query, key, value):
        function = getattr(sys.modules["flash_attn"], name)
        if name == "flash_attn_qkvpacked_func":
            return function(torch.stack([query, key, value], 2), **options)
        if name == "flash_attn_kvpacked_func":
            return function(query, torch.stack([key, value], 2), **options)
        return function(query, key, value, **options)

    return attend


def memory_efficient(bias=None, **options):
    def attend(query, key, value):
        bound = bias() if isinstance(bias, type) else bias
        return sys.modules["xformers.ops"].memory_efficient_attention(query, key, value, bound, **options)

    return attend


def sdpa(mask=None, **options):
    def attend(query, key, value):
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        output = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped, **options)
        return output.transpose(1, 2)

    return attend


class Attention(nn.Module):
    def __init__(self, attend, kv_heads: int = HEADS):
        super().__init__()
        self.attend = attend
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, kv_heads * DIM), nn.Linear(WIDTH, kv_heads * DIM)

    def forward(self, x, encoder_hidden_states=None):
        source = x if encoder_hidden_states is None else encoder_hidden_states
        projected = (self.query(x), self.key(source), self.value(source))
        return self.out(self.attend(*(part.unflatten(-1, (-1, DIM)) for part in projected)).flatten(-2))


class Model(nn.Module):
    """Two layers, and inputs that are the same for every function."""

    def __init__(self, attend, kv_heads: int = HEADS):
        super().__init__()
        self.layers = nn.ModuleList(Attention(attend, kv_heads) for _ in range(2))
        build(self)

    def forward(self, x, encoder_hidden_states=None):
        for layer in self.layers:
            x = x + layer(x, encoder_hidden_states)
        return x


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    shape = shape or (BATCH, TOKENS)
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def observed(model, *inputs, **options):
    """Return the session of one forward, whose output is bitwise that without it."""
    with torch.no_grad():
        before = model(*inputs)
        with polyhead.observe(model, statistics=STATISTICS, **options) as session:
            assert torch.equal(model(*inputs), before)
    assert session.materialised == []
    return session


def assert_same(actual, expected, columns=STATISTICS):
    """Compare everything that two sessions have counted."""
    assert actual.skipped == expected.skipped == []
    assert actual.profile.sites == expected.profile.sites
    assert actual.observations.calls == expected.observations.calls
    for name in ("tokens", *columns):
        torch.testing.assert_close(
            actual.profile[name], expected.profile[name], rtol=1e-9, atol=1e-9, equal_nan=True, msg=name
        )
    assert actual.profile["tokens"].min() > 0
    for site, states in expected.observations.collected.items():
        found = actual.observations.collected[site]["contributions"].moments
        torch.testing.assert_close(found.mean, states["contributions"].moments.mean)


def band(left: int, right: int, queries: int = TOKENS, keys: int = TOKENS) -> torch.Tensor:
    offset = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    return (offset >= -left) & (offset <= right)


BIAS = torch.randn(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)).double()
TRIL = band(TOKENS, 0)
BIAS_OF_TRIL = torch.zeros(1, 1, TOKENS, TOKENS).double().masked_fill(~TRIL, -torch.inf)
PADDING = torch.zeros(BATCH, 1, 1, TOKENS).double()
PADDING[1, ..., :3] = -torch.inf
CASES = {
    "flash": (flash(), sdpa()),
    "flash, causal": (flash(causal=True), sdpa(is_causal=True)),
    "flash, scale and probs": (flash(softmax_scale=0.7, causal=True), sdpa(is_causal=True, scale=0.7)),
    "flash, packed qkv": (flash("flash_attn_qkvpacked_func", causal=True), sdpa(is_causal=True)),
    "flash, packed kv": (flash("flash_attn_kvpacked_func", softmax_scale=0.3), sdpa(scale=0.3)),
    "flash, window": (flash(window_size=(2, 1)), sdpa(band(2, 1))),
    "flash, window to the left": (flash(window_size=(2, -1)), sdpa(band(2, TOKENS))),
    "flash, window to the right": (flash(window_size=(-1, 2)), sdpa(band(TOKENS, 2))),
    "flash, causal window": (flash(causal=True, window_size=(3, 0)), sdpa(band(3, 0))),
    "flash, causal hides what a window shows": (flash(causal=True, window_size=[3, 5]), sdpa(band(3, 0))),
    "flash, no effect on the weights": (flash(deterministic=True, softcap=0), sdpa()),
    "xformers": (memory_efficient(), sdpa()),
    "xformers, scale": (memory_efficient(scale=0.7, op=("a kernel", None)), sdpa(scale=0.7)),
    "xformers, bias": (memory_efficient(BIAS), sdpa(BIAS)),
    "xformers, causal bias": (memory_efficient(BIAS_OF_TRIL), sdpa(BIAS_OF_TRIL)),
    "xformers, padding": (memory_efficient(PADDING), sdpa(PADDING)),
    "xformers, causal": (memory_efficient(stand_ins.LowerTriangularMask), sdpa(is_causal=True)),
    "xformers, causal at the end": (memory_efficient(stand_ins.LowerTriangularFromBottomRightMask), sdpa(TRIL)),
}


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_statistics_are_those_of_the_model_with_scaled_dot_product_attention(monkeypatch, name, shown):
    monkeypatch.setattr(stand_ins, "shown", shown)  # whether softmax and products of the function can be intercepted
    attend, reference = CASES[name]
    expected = observed(Model(reference), tokens(), collect=[Contributions()])
    session = observed(Model(attend), tokens(), collect=[Contributions()])
    assert_same(session, expected)
    assert {site.name: count for site, count in session.observations.calls.items()} == {"layers.0": 1, "layers.1": 1}


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_kvpacked_func"])
def test_heads_that_share_keys(kv_heads, name):
    expected = observed(Model(sdpa(is_causal=True), kv_heads), tokens(), collect=[Contributions()])
    session = observed(Model(flash(name, causal=True), kv_heads), tokens(), collect=[Contributions()])
    assert_same(session, expected)


@pytest.mark.parametrize("attend", [flash(), flash("flash_attn_kvpacked_func"), memory_efficient()])
@pytest.mark.parametrize("length", [SOURCE, TOKENS, 13])
def test_cross_attention(attend, length):
    inputs = tokens(), tokens(BATCH, length, seed=2)
    session = observed(Model(attend), *inputs)
    assert {site.kind for site in session.profile.sites} == {"cross"}
    assert_same(session, observed(Model(sdpa()), *inputs), STATISTICS[:4])  # the others need positions


class Heads(nn.Module):
    """Attention to heads that it receives, as in modules of flash-attn."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, query, key, value):
        return self.attend(query, key, value)


def heads(length: int, seed: int) -> torch.Tensor:
    return tokens(BATCH, length, seed=seed).unflatten(-1, (HEADS, DIM))


AT_THE_END = memory_efficient(stand_ins.LowerTriangularFromBottomRightMask)


@pytest.mark.parametrize("attend", [flash(causal=True), flash("flash_attn_kvpacked_func", causal=True), AT_THE_END])
@pytest.mark.parametrize(("queries", "keys"), [(SOURCE, TOKENS), (1, TOKENS)])
def test_causal_calls_of_other_lengths_align_the_last_query_with_the_last_key(attend, queries, keys):
    inputs = heads(queries, 3), heads(keys, 4), heads(keys, 5)
    reference = Heads(sdpa(causal_lower_right(queries, keys)))
    session = observed(Heads(attend), *inputs)
    with torch.no_grad(), polyhead.observe(reference, statistics=STATISTICS) as expected:
        reference(*inputs)
    assert_same(session, expected)


@pytest.mark.parametrize(("queries", "keys"), [(SOURCE, TOKENS), (TOKENS, SOURCE)])
def test_the_lower_triangular_mask_of_xformers_aligns_the_first_query_with_the_first_key(queries, keys):
    inputs = heads(queries, 3), heads(keys, 4), heads(keys, 5)
    session = observed(Heads(memory_efficient(stand_ins.LowerTriangularMask)), *inputs)
    assert_same(session, observed(Heads(sdpa(is_causal=True)), *inputs))


@pytest.mark.parametrize("attend", [flash(causal=True), AT_THE_END])
def test_the_first_of_more_queries_than_keys_see_none_and_are_not_counted(attend):
    inputs = heads(TOKENS, 3), heads(SOURCE, 4), heads(SOURCE, 5)
    weights = stand_ins._attend(*inputs, band(TOKENS, 0, TOKENS, SOURCE))[2][:, :, TOKENS - SOURCE :]
    session = observed(Heads(attend), *inputs)
    assert session.profile["tokens"].eq(BATCH * SOURCE).all()
    torch.testing.assert_close(session.profile["entropy"], -torch.xlogy(weights, weights).sum(-1).mean((0, 2)))
    distance = torch.arange(SOURCE)[:, None] - torch.arange(SOURCE)
    torch.testing.assert_close(session.profile["mean_distance"], (weights * distance).sum(-1).mean((0, 2)))


@pytest.mark.parametrize("options", [{}, {"window_size": (4, 2)}, {"window_size": (4, 0), "causal": True}])
def test_queries_of_a_cache(options):
    inputs = heads(SOURCE, 3), heads(TOKENS, 4), heads(TOKENS, 5)
    left, right = options.get("window_size", (TOKENS, TOKENS))
    allowed = band(left, right, SOURCE, TOKENS)
    session = observed(Heads(flash(**options)), *inputs)
    weights = stand_ins._attend(*inputs, allowed)[2]
    distance = torch.arange(SOURCE)[:, None] + TOKENS - SOURCE - torch.arange(TOKENS)
    torch.testing.assert_close(session.profile["entropy"], -torch.xlogy(weights, weights).sum(-1).mean((0, 2)))
    mean_distance = (weights * distance.abs()).sum(-1).mean((0, 2))
    torch.testing.assert_close(session.profile["mean_distance"], mean_distance)


def test_heads_that_a_module_receives_have_the_kind_of_the_module_around_it():
    inner = Heads(lambda query, key, value: flash()(query * 1.5, key, value))  # as by rotary embeddings

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x, context=None):
            source = x if context is None else context
            query, key = (part.unflatten(-1, (HEADS, DIM)) for part in (x, source))
            return self.inner(query, key, key)

    for context, kind in ((None, "self"), (tokens(seed=2), "cross"), (tokens(BATCH, SOURCE, seed=2), "cross")):
        session = observed(Outer(), tokens(), context)
        assert {(site.name, site.kind) for site in session.profile.sites} == {("inner", kind)}


# ---- packed sequences


def packed(name="flash_attn_varlen_func", offsets=(OFFSETS, OFFSETS), **options):
    def attend(query, key, value):
        function = getattr(sys.modules["flash_attn"], name)
        if name == "flash_attn_varlen_qkvpacked_func":
            return function(torch.stack([query, key, value], 1), offsets[0], max(LENGTHS), **options)
        lengths = (*offsets, max(LENGTHS), max(LENGTHS))
        if name == "flash_attn_varlen_kvpacked_func":
            return function(query, torch.stack([key, value], 1), *lengths, **options)
        return function(query, key, value, *lengths, **options)

    return attend


PACKED = ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]
PACKED_OPTIONS = [
    ({}, sdpa()),
    ({"causal": True}, sdpa(is_causal=True)),
    ({"causal": True, "window_size": (2, 0)}, None),
]


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(("options", "reference"), PACKED_OPTIONS)
def test_packed_documents_have_the_statistics_of_each_alone(name, options, reference):
    x = tokens(TOKENS)
    offsets = (OFFSETS, OFFSETS.clone())  # equal tensors
    session = observed(Model(packed(name, offsets, **options)), x, collect=[Contributions()])

    def windowed(query, key, value):
        return sdpa(band(2, 0, query.shape[1], query.shape[1]))(query, key, value)

    model = Model(windowed if reference is None else reference)
    options = {"statistics": STATISTICS, "collect": [Contributions()]}
    with torch.no_grad(), polyhead.observe(model, **options) as expected:
        for document in x.split(LENGTHS):
            model(document[None])
    assert session.skipped == []
    for column in ("tokens", *STATISTICS):
        torch.testing.assert_close(session.profile[column], expected.profile[column], rtol=1e-9, atol=1e-9, msg=column)
    for site, states in expected.observations.collected.items():
        found = session.observations.collected[site]["contributions"].moments
        torch.testing.assert_close(found.mean, states["contributions"].moments.mean)


def test_tokens_outside_of_all_documents_are_not_counted():
    short = OFFSETS[:3]
    session = observed(Model(packed(offsets=(short, short), causal=True)), tokens(TOKENS))
    assert session.profile["tokens"].eq(5).all()
    expected = Model(sdpa(is_causal=True))
    with torch.no_grad(), polyhead.observe(expected.layers[0], statistics="entropy") as reference:
        for document in tokens(TOKENS)[:5].split(LENGTHS[:2]):
            expected.layers[0](document[None])
    torch.testing.assert_close(session.profile["entropy"][:HEADS], reference.profile["entropy"])


# ---- results, gates and gradients


@pytest.mark.parametrize("gated", [False, True])
def test_other_results_than_the_output_are_those_of_the_call(gated):
    results = []

    def attend(*heads):
        results.append(flash(causal=True, return_attn_probs=True)(*heads))
        return results[-1][0]

    model = Heads(attend)
    inputs = heads(TOKENS, 3), heads(TOKENS, 4), heads(TOKENS, 5)
    with torch.no_grad(), polyhead.observe(model, statistics=STATISTICS) as session:
        if gated:
            session.gates["Heads", "self"] = torch.full((HEADS,), 0.5).double()
        output = model(*inputs)
    expected = stand_ins._attend(*inputs, TRIL)
    assert len(results[0]) == 3
    assert torch.equal(output, expected[0] * (0.5 if gated else 1))
    assert torch.equal(results[0][1], expected[1])
    assert torch.equal(results[0][2], expected[2])
    assert_same(session, observed(Heads(sdpa(is_causal=True)), *inputs))


def test_the_weights_of_packed_sequences_may_be_returned_too():
    def first(*heads):
        return packed(causal=True, return_attn_probs=True)(*heads)[0]

    expected = observed(Model(packed(causal=True)), tokens(TOKENS))
    assert_same(observed(Model(first), tokens(TOKENS)), expected)


@pytest.mark.parametrize(
    ("attend", "reference"),
    [
        (flash(causal=True), sdpa(is_causal=True)),
        (flash("flash_attn_qkvpacked_func", causal=True), sdpa(is_causal=True)),
        (memory_efficient(BIAS), sdpa(BIAS)),
    ],
)
def test_gates_scale_the_heads(attend, reference):
    gate, outputs = torch.linspace(0, 1, HEADS).double(), []
    for model in (Model(attend), Model(reference)):
        gate.requires_grad_(True)
        with polyhead.observe(model) as session:
            session.gates["layers.1", "self"] = gate
            outputs.append(model(tokens()))
        (gradient,) = torch.autograd.grad(outputs[-1].square().sum(), gate)
        outputs.append(gradient)
    torch.testing.assert_close(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[1], outputs[3])
    assert not torch.allclose(outputs[0], Model(attend)(tokens()))


def test_gates_of_packed_sequences():
    model, x, gate = Model(packed(causal=True)), tokens(TOKENS), torch.rand(1, HEADS, TOKENS).double()
    with torch.no_grad(), polyhead.observe(model) as session:
        session.gates["layers.0", "self"] = gate
        output = model(x)

    def gated(*heads):
        return packed(causal=True)(*heads) * gate[0].T[..., None]

    model.layers[0].attend = gated
    with torch.no_grad():
        torch.testing.assert_close(model(x), output)


@pytest.mark.parametrize(
    ("attend", "reference"),
    [(flash(causal=True), sdpa(is_causal=True)), (memory_efficient(PADDING), sdpa(PADDING))],
)
def test_kept_statistics_are_differentiable(attend, reference):
    found = []
    for model in (Model(attend), Model(reference)):
        with polyhead.observe(model, statistics=("entropy", "mean_distance"), keep_statistics=True) as session:
            model(tokens())
            loss = session.statistics.mean("entropy").sum() + session.statistics.mean("mean_distance").square().sum()
            found.append(torch.autograd.grad(loss, [model.layers[0].query.weight, model.layers[1].key.weight]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_gradients_are_the_models_own_bit_by_bit(use_reentrant):
    model, x = Model(flash(causal=True, dropout_p=0.3)), tokens().requires_grad_(True)

    def gradients():
        torch.manual_seed(3)
        model.zero_grad()
        output = x
        for layer in model.layers:
            added = layer(output) if use_reentrant is None else checkpoint(layer, output, use_reentrant=use_reentrant)
            output = output + added
        output.square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = [gradient.clone() for gradient in gradients()]
    with polyhead.observe(model) as session:
        actual = gradients()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert session.profile["tokens"].eq(BATCH * TOKENS).all()


def test_two_sessions_observe_one_model_and_their_gates_multiply():
    model, x = Model(flash(causal=True)), tokens()
    first, second = torch.rand(HEADS).double(), torch.rand(HEADS).double()
    with torch.no_grad():
        with polyhead.observe(model) as session:
            session.gates["layers.0", "self"] = first * second
            expected = model(x)
        with polyhead.observe(model) as outer, polyhead.observe(model) as inner:
            outer.gates["layers.0", "self"], inner.gates["layers.0", "self"] = first, second
            torch.testing.assert_close(model(x), expected)
    for other in (outer, inner):
        assert other.observations.calls == session.observations.calls
        assert other.skipped == []
        for name in ("tokens", "entropy", "mean_distance"):
            torch.testing.assert_close(other.profile[name], session.profile[name])


# ---- what is not understood


def cached(query, key, value):
    return sys.modules["flash_attn"].flash_attn_with_kvcache(query, key, value)


SKIPPED = {
    "softcap": (flash(softcap=20.0), "its argument softcap may change the attention, got 20.0"),
    "alibi": (
        flash(alibi_slopes=torch.ones(HEADS)),
        "its argument alibi_slopes may change the attention, got a Tensor",
    ),
    "cache": (cached, "flash_attn_with_kvcache attends to a cache"),
    "diagonal blocks": (memory_efficient(stand_ins.BlockDiagonalMask), "got a BlockDiagonalMask"),
    "a bias in a mask": (
        memory_efficient(stand_ins.LowerTriangularMaskWithTensorBias),
        "got a LowerTriangularMaskWithTensorBias",
    ),
    "integers": (memory_efficient(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.int64)), "got a tensor of torch.int64"),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_what_is_not_understood_runs_as_it_is_and_is_listed(monkeypatch, name):
    monkeypatch.setattr(stand_ins, "shown", True)
    attend, reason = SKIPPED[name]
    session = observed(Model(attend), tokens())
    assert [skipped.site for skipped in session.skipped] == ["layers.0", "layers.1"]
    assert all(reason in skipped.reason for skipped in session.skipped)
    assert session.observations.calls == {}


def test_packed_sequences_of_other_lengths_are_listed():
    other = torch.tensor([0, 3, 6, 11], dtype=torch.int32)
    session = observed(Model(packed(offsets=(OFFSETS, other))), tokens(TOKENS))
    assert {x.reason for x in session.skipped} == {
        "cu_seqlens_q and cu_seqlens_k must be the same tensor, or equal ones on the CPU"
    }
    table = torch.zeros(3, 1, dtype=torch.int32)
    session = observed(Model(packed(block_table=table)), tokens(TOKENS))
    assert {x.reason for x in session.skipped} == {"its argument block_table may change the attention, got a Tensor"}


def test_batches_of_one_head_are_listed():
    class OneHead(nn.Module):
        def forward(self, x):
            return sys.modules["xformers.ops"].memory_efficient_attention(x, x, x)

    session = observed(OneHead(), tokens())
    assert "must be [batch, sequence, heads, head_dim], got [3, 3, 3] axes" in session.skipped[0].reason


def test_old_versions_without_windows_may_align_causal_masks_otherwise(packages):
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
        return stand_ins.flash_attn_func(q, k, v, causal=causal)

    flash_attn_func.__module__ = stand_ins.INTERFACE
    packages["flash_attn"].flash_attn_func = flash_attn_func
    session = observed(Heads(flash(causal=True)), heads(SOURCE, 3), heads(TOKENS, 4), heads(TOKENS, 5))
    assert "before 2.3" in session.skipped[0].reason
    assert_same(observed(Model(flash(causal=True)), tokens()), observed(Model(sdpa(is_causal=True)), tokens()))
    packages["flash_attn"].flash_attn_func = stand_ins.flash_attn_func


def test_a_substitute_for_a_package_is_observed_by_what_it_calls(packages):
    def memory_efficient_attention(query, key, value, attn_bias=None, **options):
        return sdpa()(query, key, value)  # with a mask that it ignores

    packages["xformers.ops"].memory_efficient_attention = memory_efficient_attention
    session = observed(Model(memory_efficient(stand_ins.LowerTriangularMask)), tokens())
    assert_same(session, observed(Model(sdpa()), tokens()))
    packages["xformers.ops"].memory_efficient_attention = stand_ins.memory_efficient_attention


def test_an_error_of_the_call_is_its_own_and_nothing_is_counted():
    session = polyhead.observe(Model(flash(heads=3)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'heads'"), torch.no_grad(), session:
        session.model(tokens())
    assert session.observations.calls == {}
    assert session.skipped == []


# ---- names under which a model has the function


SOURCES = {
    "by name": "from flash_attn import flash_attn_func\n",
    "under another name": "from flash_attn.flash_attn_interface import flash_attn_func as attend\n",
    "of the package": "import flash_attn\n",
    "inside of forward": "",
}
CALLS = {
    "by name": "flash_attn_func",
    "under another name": "attend",
    "of the package": "flash_attn.flash_attn_func",
    "inside of forward": "flash_attn_func",
}
CLASS = """
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear({width}, 3 * {width})

    def forward(self, x):
        {first}
        query, key, value = (part.unflatten(-1, ({heads}, -1)) for part in self.qkv(x).chunk(3, -1))
        return {call}(query, key, value, causal=True).flatten(2)
"""


def written(path, monkeypatch, name: str) -> ModuleType:
    """Return the imported module of a file with a model that imports the function in one way."""
    first = "from flash_attn import flash_attn_func" if name == "inside of forward" else "pass"
    source = SOURCES[name] + CLASS.format(width=WIDTH, heads=HEADS, first=first, call=CALLS[name])
    file = "model_" + name.replace(" ", "_")
    (path / f"{file}.py").write_text(source)
    monkeypatch.syspath_prepend(path)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, file, raising=False)
    module = importlib.import_module(file)
    monkeypatch.setitem(sys.modules, file, module)
    return module


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_functions_are_found_under_any_name_in_the_models_file(tmp_path, monkeypatch, name, beside):
    module = written(tmp_path, monkeypatch, name)
    before = dict(vars(module))
    layers = [module.Layer(), module.Layer()]
    if beside:  # then the code of a class decides whether it is likely to call attention functions
        layers.append(nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True))
    model = build(nn.Sequential(*layers))
    with torch.no_grad(), polyhead.observe(model) as session:
        model(tokens())
    sites = {site.name for site in session.profile.sites}
    assert sites == ({"0", "1", "2.self_attn"} if beside else {"0", "1"})
    assert dict(vars(module)) == before


def test_a_file_that_is_imported_during_a_session_has_the_function_afterwards(tmp_path, monkeypatch):
    with torch.no_grad(), polyhead.observe(Model(flash())) as session:
        session.model(tokens())
        module = written(tmp_path, monkeypatch, "by name")
        alias = written(tmp_path, monkeypatch, "under another name")
        assert module.flash_attn_func is not ORIGINAL["flash"]
    assert module.flash_attn_func is ORIGINAL["flash"]
    model = build(nn.Sequential(alias.Layer()))
    expected = build(nn.Sequential(module.Layer()))
    assert torch.equal(model(tokens()), expected(tokens()))
    assert_same(observed(model, tokens()), observed(expected, tokens()))


# ---- what a session leaves


def state_of(model) -> tuple:
    namespaces = [vars(module) for module in sys.modules.values() if isinstance(module, ModuleType)]
    names = foreign_functions.NAMES
    return process_state(model), [{name: id(x[name]) for name in names & x.keys()} for x in namespaces]


@pytest.mark.parametrize("error", [None, ValueError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("inside", [False, True])
def test_nothing_of_the_process_changes(monkeypatch, error, inside):
    model, x = Model(flash(causal=True)), tokens()

    def raises(*args, **options):
        if error is not None:
            raise error

    if inside:  # of the function
        monkeypatch.setattr(stand_ins, "_band", lambda *args: raises() or band(TOKENS, 0))
    else:
        model.register_forward_hook(raises)
    before = state_of(model)
    session = polyhead.observe(model)
    assert state_of(model) == before
    with nullcontext() if error is None else pytest.raises(type(error)), torch.no_grad(), session:
        assert sys.modules["flash_attn"].flash_attn_func is not ORIGINAL["flash"]
        assert sys.modules["flash_attn"].flash_attn_func.__wrapped__ is ORIGINAL["flash"]
        model(x)
    assert state_of(model) == before
    assert len(session.observations.sites) == (2 if error is None else 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_of_several_sessions_restores_the_functions(order):
    models = Model(flash()), Model(flash(causal=True))
    before = state_of(models[0]), state_of(models[1])
    sessions = [polyhead.observe(model) for model in models]
    for session in sessions:
        session.__enter__()
    wrapper = sys.modules["flash_attn"].flash_attn_func
    with torch.no_grad():
        models[order[0]](tokens())
        sessions[order[0]].__exit__(None, None, None)
        assert sys.modules["flash_attn"].flash_attn_func is wrapper
        models[order[1]](tokens())
        sessions[order[1]].__exit__(None, None, None)
    assert (state_of(models[0]), state_of(models[1])) == before
    for session in sessions:
        assert set(session.observations.calls.values()) == {1}


def test_what_others_have_put_in_the_place_of_a_wrapper_stays(packages):
    def other(q, k, v):
        return q

    with torch.no_grad(), polyhead.observe(Model(flash())) as session:
        session.model(tokens())
        packages["flash_attn"].flash_attn_func = other
    assert packages["flash_attn"].flash_attn_func is other
    assert packages[stand_ins.INTERFACE].flash_attn_func is stand_ins.flash_attn_func
    packages["flash_attn"].flash_attn_func = stand_ins.flash_attn_func


def test_sessions_of_models_without_attention_functions_replace_nothing():
    layer = polyhead.MultiHeadAttention(WIDTH, HEADS).double()
    with torch.no_grad(), polyhead.observe(layer):
        assert sys.modules["flash_attn"].flash_attn_func is stand_ins.flash_attn_func


def test_other_threads_and_other_models_are_not_observed():
    model, other, x, outputs = Model(flash()), Model(flash()), tokens(), []

    def work():
        with torch.no_grad():
            outputs.append(other(x))
            q = heads(TOKENS, 3)
            outputs.append(sys.modules["flash_attn"].flash_attn_func(q, q, q))

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
        work()
    assert len(outputs) == 4
    names = {site.name: count for site, count in session.observations.calls.items()}
    assert names == {"attn.layers.0": 1, "attn.layers.1": 1}
    assert session.skipped == []


def test_a_call_of_the_model_from_a_second_thread_raises():
    model, x, errors = Model(flash()), tokens(), []

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


def test_a_call_of_polyheads_operators_is_not_intercepted(packages):
    namespace = {"__name__": "polyhead.ops.attention", "flash_attn": packages["flash_attn"]}
    exec("def attend(q, k, v):\n    return flash_attn.flash_attn_func(q, k, v)", namespace)
    attend = namespace["attend"]
    assert isinstance(attend, FunctionType)

    def both(*heads):
        return attend(*heads) + sdpa()(*heads)

    session = observed(Model(both), tokens())
    assert {site.name: count for site, count in session.observations.calls.items()} == {"layers.0": 1, "layers.1": 1}


def test_calls_inside_of_modules_that_are_reported_in_another_way_are_not_intercepted(monkeypatch):
    from polyhead.observation import intercepted_calls

    monkeypatch.setattr(intercepted_calls, "uses_interface", lambda kind: kind is Attention)  # of transformers
    model, x = Model(flash()), tokens()
    model.own = Heads(flash())
    model.register_forward_hook(lambda module, inputs, output: model.own(*(heads(TOKENS, 3),) * 3).flatten(2))
    session = observed(model, x)
    assert {site.name: count for site, count in session.observations.calls.items()} == {"own": 1}


def test_copies_and_pickles_have_the_function(tmp_path, monkeypatch):
    module = written(tmp_path, monkeypatch, "by name")
    model = build(nn.Sequential(module.Layer()))
    with torch.no_grad(), polyhead.observe(model):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        expected = model(tokens())
    assert module.flash_attn_func is ORIGINAL["flash"]
    for x in copies:
        assert torch.equal(x(tokens()), expected)
