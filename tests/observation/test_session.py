"""A session observes the requested layers and heads, and leaves the model unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import polyhead
from polyhead import HeadId, Mask
from polyhead.errors import OptionError
from polyhead.observation import Contributions, HeadProfile
from polyhead.observation.transformers_models import interface_modules
from tests.integrations.huggingface import models
from tests.integrations.huggingface.compare import BOUND, assert_same, result
from tests.waiting import waiting_is_an_error

FAMILIES = {family.name: family for family in models.FAMILIES}


def build(name="llama", **options):
    return models.build(FAMILIES[name], **options)


def observed(model, *batches, **options):
    with torch.no_grad(), polyhead.observe(model, **options) as session:
        for ids in batches:
            model(input_ids=ids)
    return session


def assert_equal_tables(one: HeadProfile, other: HeadProfile, bound: float = 1e-12) -> None:
    assert one.sites == other.sites
    assert one.heads == other.heads
    assert set(one.columns) == set(other.columns)
    for name in one.columns:
        torch.testing.assert_close(one[name], other[name], rtol=bound, atol=bound, equal_nan=True, msg=name)


def trace_of(model):
    """Everything of a model that a session could leave behind."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    configs = [(m.config.to_dict(), m.config._attn_implementation) for m in model.modules() if hasattr(m, "config")]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return hooks, attributes, configs, [m.training for m in model.modules()], weights


def assert_same_trace(one, other):
    assert one[:-1] == other[:-1]
    assert one[-1].keys() == other[-1].keys()
    for name, tensor in one[-1].items():
        assert torch.equal(tensor, other[-1][name]), name


# ---- leaving no trace


@pytest.mark.parametrize("name", ["llama", "bart", "t5", "clip", "siglip_vision_model"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was_also_after_an_exception(name, fails):
    model = build(name)
    if name == "clip":  # each tower its own
        model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    before, random = trace_of(model), torch.get_rng_state()
    with torch.no_grad():
        expected = result(model(**models.inputs(FAMILIES[name])))
    session = polyhead.observe(model)
    assert_same_trace(trace_of(model), before)

    def run():
        with torch.no_grad(), session:
            model(**models.inputs(FAMILIES[name]))
            assert model.config._attn_implementation == "polyhead" or name == "clip"
            return 1 // (not fails)

    if fails:
        with pytest.raises(ZeroDivisionError):
            run()
    else:
        run()
    assert_same_trace(trace_of(model), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert len(session.profile)
    with torch.no_grad():
        assert torch.equal(result(model(**models.inputs(FAMILIES[name]))), expected)


def test_an_exception_inside_a_layer_leaves_nothing_open():
    model = build()
    before = trace_of(model)
    with pytest.raises(OptionError, match="alibi_slopes"), polyhead.observe(model):
        model(input_ids=models.tokens(), alibi_slopes=torch.ones(4))
    assert_same_trace(trace_of(model), before)
    assert len(observed(model, models.tokens()).profile) == 8


def test_gradients_and_training_mode():
    model = build().train()
    ids = models.tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with polyhead.observe(model) as session:
        assert model.training
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(not x.moments.mean.requires_grad for x in session.observations.sites)
    for name, parameter in model.named_parameters():
        size = float(expected[name].abs().max())
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=BOUND * max(size, 1e-6), msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_a_checkpointed_layer_is_counted_once(reentrant, every):
    model = build(dtype=torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = models.tokens()
    with polyhead.observe(model, every=every) as session:
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for _ in range(3)]
        sum(losses).backward()
    assert session.profile["tokens"].eq(ids.numel() * (3 if every == 1 else 2)).all()


def test_statistics_are_those_before_dropout():
    model = build("bert").train()
    assert model.config.attention_probs_dropout_prob > 0
    ids = models.tokens()
    with torch.no_grad(), polyhead.observe(model, layers=[0]) as session:
        model.embeddings.eval()  # the first layer then reads the same tokens twice
        model(input_ids=ids)
    assert model.encoder.training
    assert_equal_tables(session.profile, observed(model.eval(), ids, layers=[0]).profile)


def test_weights_can_still_be_asked_for():
    model = build()
    with torch.no_grad():
        expected = model(input_ids=models.tokens(), output_attentions=True).attentions
        with polyhead.observe(model):
            actual = model(input_ids=models.tokens(), output_attentions=True).attentions
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


# ---- asking for less


def test_some_layers_and_some_heads():
    model = build()
    whole = observed(model, models.tokens()).profile
    place = {(site.layer, head): index for index, (site, head) in enumerate(zip(whole.sites, whole.heads, strict=True))}
    cases = [
        ({"layers": [1]}, [(1, head) for head in range(4)]),
        ({"heads": [0, 3]}, [(0, 0), (0, 3), (1, 0), (1, 3)]),
        ({"heads": [HeadId(0, 2), HeadId(1, 1)]}, [(0, 2), (1, 1)]),
        ({"layers": ["model.layers.0.self_attn"], "heads": {2}}, [(0, 2)]),
    ]
    for options, expected in cases:
        table = observed(model, models.tokens(), **options).profile
        assert [(site.layer, head) for site, head in zip(table.sites, table.heads, strict=True)] == expected
        rows = [place[head] for head in expected]
        for name in table.columns:
            assert torch.equal(table[name], whole[name][rows]), name


def test_layers_are_numbered_within_each_stack():
    model = build("bart")
    with torch.no_grad(), polyhead.observe(model, layers=[1]) as session:
        model(**models.inputs(FAMILIES["bart"]))
    assert {(site.name, site.kind, site.layer, site.num_heads) for site in session.profile.sites} == {
        ("model.encoder.layers.1.self_attn", "self", 1, 4),
        ("model.decoder.layers.1.self_attn", "self", 1, 2),
        ("model.decoder.layers.1.encoder_attn", "cross", 1, 2),
    }


def test_cross_attention_knows_its_tokens_although_self_attention_is_not_watched():
    model = build("bart", dtype=torch.float32)
    inputs = models.inputs(FAMILIES["bart"])
    mask = torch.ones_like(inputs["decoder_input_ids"])
    mask[0, 4:] = 0
    with torch.no_grad(), polyhead.observe(model, layers=["model.decoder.layers.0.encoder_attn"]) as session:
        model(**inputs, decoder_attention_mask=mask)
    assert session.profile["tokens"].eq(int(mask.sum())).all()


def test_every_second_batch():
    model = build()
    batches = [models.tokens(seed=seed) for seed in range(5)]
    assert_equal_tables(
        observed(model, *batches, every=2).profile, observed(model, batches[0], batches[2], batches[4]).profile
    )


def test_some_statistics_and_their_parameters():
    model = build()
    table = observed(model, models.tokens(), statistics=("mean_distance", "entropy")).profile
    assert table.names == ("entropy", "mean_distance")
    near = observed(model, models.tokens(), statistics=polyhead.Statistics("window_mass", "sink_mass", window=2))
    wide = observed(model, models.tokens(), statistics=polyhead.Statistics("window_mass", "sink_mass", sink_keys=5))
    assert (near.profile["window_mass"] < wide.profile["window_mass"]).all()
    assert (near.profile["sink_mass"] < wide.profile["sink_mass"]).all()
    assert observed(build("gpt_oss"), models.tokens(), statistics="learned_sink_mass").profile["tokens"].eq(69).all()


def test_sites_without_defined_statistics_are_left_out():
    model = build("bart")
    with torch.no_grad(), polyhead.observe(model, statistics="mean_distance") as session:
        model(**models.inputs(FAMILIES["bart"]))
    assert {site.kind for site in session.profile.sites} == {"self"}


def test_modules_added_after_the_session_was_made_are_watched():
    model = nn.Sequential(polyhead.MultiHeadAttention(16, 2))
    session = polyhead.observe(model)
    model.append(polyhead.MultiHeadAttention(16, 4))
    with session:
        model[1](model[0](torch.randn(2, 3, 16)).output)
    assert len(session.profile) == 6


# ---- merging


def test_two_sessions_merged_are_one():
    model = build("bart")
    inputs = models.inputs(FAMILIES["bart"])
    halves = [{name: x[part] for name, x in inputs.items()} for part in (slice(0, 1), slice(1, None))]

    def run(*batches):
        with torch.no_grad(), polyhead.observe(model) as session:
            for batch in batches:
                model(**batch)
        return session.observations

    one, two, both = run(halves[0]), run(halves[1]), run(*halves)
    assert_equal_tables(one.merge(two).profile, both.profile)
    assert_equal_tables(two.merge(one).profile, both.profile)
    # A batch may be cut differently: the rows themselves then differ by the rounding of the products.
    assert_equal_tables(run(inputs).profile, both.profile, BOUND)


def test_a_session_goes_on_when_it_is_entered_again():
    model, batches = build(), [models.tokens(seed=seed) for seed in (3, 4)]
    session = polyhead.observe(model)
    for ids in batches:
        with torch.no_grad(), session:
            model(input_ids=ids)
        model(input_ids=ids)  # outside, nobody watches
    assert_equal_tables(session.profile, observed(model, *batches).profile)


class Shuffled(nn.Module):
    """Two layers, which are called in either order."""

    def __init__(self, order: tuple[int, int]) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(polyhead.MultiHeadAttention(12, 3) for _ in range(2)), order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x).output
        return x


@pytest.mark.parametrize("statistics", ["entropy", False])
def test_layers_that_were_numbered_differently_are_not_merged(statistics):
    runs = []
    for order in ((0, 1), (1, 0)):
        session = polyhead.observe(Shuffled(order), statistics=statistics, collect=[Contributions()])
        with torch.no_grad(), session:
            session.model(torch.randn(2, 5, 12))
        runs.append(session.observations)
    with pytest.raises(OptionError, match=r"only observations of the same model can be merged, got 'layers\.1' as"):
        runs[0].merge(runs[1])


def test_other_statistics_and_other_heads_are_not_merged():
    model = build()
    one = observed(model, models.tokens()).observations
    with pytest.raises(OptionError, match="of the same statistics can be merged"):
        one.merge(observed(model, models.tokens(), statistics="entropy").observations)
    with pytest.raises(OptionError, match="only the same heads"):
        one.merge(observed(model, models.tokens(), heads=[1]).observations)


def test_a_site_is_saved_and_loaded(tmp_path):
    from safetensors.torch import load_file, save_file

    (first, *_) = observed(build(), models.tokens()).observations.sites
    save_file({name: x.contiguous() for name, x in first.state().items()}, tmp_path / "site.safetensors")
    again = first.with_state(load_file(tmp_path / "site.safetensors"))
    for name, column in again.compute().items():
        assert torch.equal(column, first.compute()[name]), name


def test_sessions_of_two_models_may_stand_inside_each_other():
    one, other = build("llama"), build("gpt2")
    with torch.no_grad(), polyhead.observe(one) as outer, polyhead.observe(other) as inner:
        one(input_ids=models.tokens())
        other(input_ids=models.tokens())
    assert_equal_tables(outer.profile, observed(one, models.tokens()).profile)
    assert_equal_tables(inner.profile, observed(other, models.tokens()).profile)


def test_a_compiled_model_is_watched_as_well():
    model = build()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), polyhead.observe(model) as session:
        compiled(input_ids=models.tokens())
    assert_equal_tables(session.profile, observed(model, models.tokens()).profile)


# ---- layers that are not of transformers


def test_polyhead_layers():
    layer = polyhead.MultiHeadAttention(32, 4, num_kv_heads=2, causal=True).double()
    model, x = nn.Sequential(layer), torch.randn(3, 11, 32, dtype=torch.float64)
    mask = Mask.lengths([11, 4, 7])
    before = trace_of(model)
    expected = layer(x, mask=mask, statistics=True)
    with polyhead.observe(model) as session:
        plain = layer(x, mask=mask)
        requested = layer(x, mask=mask, statistics="visible_keys")
    assert plain.statistics is None
    assert dict(requested.statistics.items()).keys() == {"visible_keys"}
    torch.testing.assert_close(plain.output, layer(x, mask=mask).output)
    assert_same_trace(trace_of(model), before)
    table = session.profile
    assert table["tokens"].eq(2 * 22).all()
    seen = expected.statistics.visible_keys > 0
    for name in ("entropy", "mean_distance", "self_mass", "max_logit"):
        rows = getattr(expected.statistics, name)
        for head in range(4):
            torch.testing.assert_close(table[name][head], rows[:, head][seen[:, head]].mean())


def test_a_step_over_our_cache_counts_new_tokens_once():
    layer = polyhead.MultiHeadAttention(32, 4, causal=True).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    with torch.no_grad(), polyhead.observe(layer) as whole:
        layer(x)
    cache = polyhead.layers.kv_cache.GrowingCache()
    with torch.no_grad(), polyhead.observe(layer) as steps:
        layer(x[:, :6], cache=cache)
        for index in range(6, 9):
            layer(x[:, index : index + 1], cache=cache)
    one, other = whole.profile, steps.profile
    for name in one.columns:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-9, msg=name)


def test_our_cross_attention_has_no_positions():
    layer = polyhead.MultiHeadAttention(32, 4)
    with polyhead.observe(layer) as session:
        layer(torch.randn(2, 5, 32), torch.randn(2, 7, 32))
    table = session.profile
    assert {site.kind for site in table.sites} == {"cross"}
    assert "mean_distance" not in table.names
    assert table["tokens"].eq(10).all()


def test_a_caller_with_another_window_is_rejected():
    layer = polyhead.MultiHeadAttention(32, 4)
    with polyhead.observe(layer), pytest.raises(OptionError, match="with the same window, got 8 and 64"):
        layer(torch.randn(2, 5, 32), statistics=polyhead.Statistics("window_mass", window=64))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # PyTorch's own, of its own shortcut
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("evaluating", [False, True])
def test_the_encoder_of_torch(batch_first, evaluating):
    torch.manual_seed(3)
    block = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=batch_first, dtype=torch.float64)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=batch_first)
    model.train(not evaluating)
    x, padding = torch.randn(3, 7, 32, dtype=torch.float64), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = padding[2, 2:] = True
    x = x if batch_first else x.transpose(0, 1)
    before = trace_of(model)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        with polyhead.observe(model) as session:
            actual = model(x, src_key_padding_mask=padding)
        first = model.layers[0].self_attn
        _, weights = first(x, x, x, key_padding_mask=padding, average_attn_weights=False)
    assert_same_trace(trace_of(model), before)
    real = ~padding if batch_first else ~padding.T
    torch.testing.assert_close(actual[real], expected[real])
    table = session.profile
    assert [(site.name, site.layer) for site in table.sites[::4]] == [
        ("layers.0.self_attn", 0),
        ("layers.1.self_attn", 1),
    ]
    assert table["tokens"].eq(int((~padding).sum())).all()
    entropy = -torch.xlogy(weights, weights).sum(-1)  # [batch, heads, queries]
    for head in range(4):
        torch.testing.assert_close(table["entropy"][head], entropy[:, head][~padding].mean())


def test_nested_tensors_are_refused_and_the_shortcut_is_given_back():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(5, 32)], layout=torch.jagged)
    with pytest.raises(OptionError, match="got a nested input"), polyhead.observe(layer):
        layer(nested, nested, nested)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("options", [{"kdim": 24, "vdim": 20}, {"bias": False}, {"batch_first": True}])
def test_one_layer_of_torch(options):
    layer = nn.MultiheadAttention(32, 4, **options).double()
    query, key = torch.randn(5, 3, 32, dtype=torch.float64), torch.randn(7, 3, layer.kdim, dtype=torch.float64)
    value = torch.randn(7, 3, layer.vdim, dtype=torch.float64)
    bias = torch.randn(12, 5, 7, dtype=torch.float64)
    if layer.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    expected, weights = layer(query, key, value, attn_mask=bias, average_attn_weights=False)
    with polyhead.observe(layer, statistics=("entropy", "confidence")) as session:
        actual, _ = layer(query, key, value, attn_mask=bias)
    torch.testing.assert_close(actual, expected)
    table = session.profile
    torch.testing.assert_close(table["confidence"], weights.amax(-1).mean((0, 2)))
    torch.testing.assert_close(table["entropy"], -torch.xlogy(weights, weights).sum(-1).mean((0, 2)))
    assert table["tokens"].eq(15).all()


def test_keys_that_torch_appends_are_refused():
    layer = nn.MultiheadAttention(32, 4, add_zero_attn=True)
    with polyhead.observe(layer), pytest.raises(OptionError, match="add_bias_kv and add_zero_attn"):
        layer(torch.randn(5, 32), torch.randn(5, 32), torch.randn(5, 32))


def test_the_decoder_of_torch_tells_self_from_cross_attention():
    block = nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(block, 2).eval()
    target, source = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad(), polyhead.observe(model) as session:
        model(target, source, tgt_mask=causal == -torch.inf, tgt_key_padding_mask=padding)
    table = session.profile
    assert {(site.stack, site.kind) for site in table.sites} == {
        ("layers.*.self_attn", "self"),
        ("layers.*.multihead_attn", "cross"),
    }
    assert table["tokens"].eq(8).all()
    own = torch.tensor([site.kind == "self" for site in table.sites])
    assert table["next_mass"][own].eq(0).all()
    assert table["next_mass"][~own].isnan().all()


# ---- refusing


def test_a_model_that_does_not_use_the_interface_is_refused():
    import transformers

    config = transformers.YosoConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(OptionError, match=r"got YosoModel.*YosoSelfAttention.*adapters="):
        polyhead.observe(transformers.YosoModel(config))
    with pytest.raises(OptionError, match="got Linear, which contains none of them"):
        polyhead.observe(nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"layers": [-1]}, "layers must be non-negative indices or module paths, got -1"),
        ({"layers": ["q_projection"]}, "got 'q_projection'"),
        ({"heads": ["a"]}, "heads must be non-negative indices"),
        ({"statistics": "entropie"}, "got 'entropie'"),
        ({"statistics": ()}, r"several names or polyhead.Statistics\(...\), got \(\)"),
    ],
)
def test_invalid_arguments_are_rejected(options, words):
    with pytest.raises(OptionError, match=words):
        polyhead.observe(polyhead.MultiHeadAttention(8, 2), **options)


def test_a_part_of_an_observed_model_can_be_observed_too():
    model = build()
    before = trace_of(model)
    with torch.no_grad(), polyhead.observe(model) as whole:
        with polyhead.observe(model.model) as part:
            model(models.tokens())
        assert model.config._attn_implementation == "polyhead"
    assert_same_trace(trace_of(model), before)
    assert torch.equal(part.profile["entropy"], whole.profile["entropy"])
    assert [f"model.{site.name}" for site in part.profile.sites] == [site.name for site in whole.profile.sites]


def test_a_session_is_entered_once_at_a_time():
    session = polyhead.observe(polyhead.MultiHeadAttention(8, 2))
    with session, pytest.raises(OptionError, match="already entered"), session:
        pass
    with pytest.raises(OptionError, match=r"takes a torch.nn.Module, got str"):
        polyhead.observe("model")


# ---- showing


def test_the_table_reads_well():
    table = observed(build(), models.tokens(), statistics=("entropy", "max_logit")).profile
    text = str(table).splitlines()
    assert text[0].split() == ["head", "tokens", "entropy", "max_logit", "max_logit_max"]
    assert text[1] == "model.layers.*.self_attn, self-attention"
    assert text[2].split()[:2] == ["L0H0", "69"]
    assert len(text) == 2 + len(table) == 10
    assert repr(table) == "HeadProfile(8 heads, 69 tokens: entropy, max_logit)"
    html = table._repr_html_()
    assert html.count("<td>model.layers.1.self_attn</td>") == 4
    assert "L1H3: entropy" in html
    (row, *_) = table.rows()
    assert row["site"] == "model.layers.0.self_attn"
    assert row["entropy"] == float(table["entropy"][0])
    with pytest.raises(OptionError, match="got 'mean_distance'"):
        table["mean_distance"]
    assert len(polyhead.observe(build()).profile) == 0


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mistral", "bert", "bart"])
def test_nothing_waits_for_the_device_inside_a_layer(name):
    model = build(name, dtype=torch.bfloat16).cuda()
    inputs = {key: x.cuda() for key, x in models.inputs(FAMILIES[name]).items()}
    # The cache of a window waits by itself: at its first tokens it moves the window's size to the device.
    options = {"use_cache": False} if name == "mistral" else {}
    calls = 0

    def guarded(forward):
        def run(*positional, **keywords):
            nonlocal calls
            calls += 1
            with waiting_is_an_error():
                return forward(*positional, **keywords)

        return run

    with torch.no_grad(), polyhead.observe(model) as session:
        model(**inputs, **options)  # compiles the kernels
        for module in interface_modules(model):
            module.forward = guarded(module.forward)
        model(**inputs, **options)
    assert calls == len(session.observations.sites) > 0
    assert session.profile["entropy"].isfinite().all()


@pytest.mark.parametrize("kind", ["latent", "latent, absorbed", "grouped", "mixed"])
def test_every_attention_variant_is_observed(kind):
    """Statistics agree with the layer's returned weights, and its output is unchanged."""
    torch.manual_seed(0)
    layer = {
        "latent": lambda: polyhead.LatentAttention(16, 4, kv_lora_rank=6, causal=True, form="expanded"),
        "latent, absorbed": lambda: polyhead.LatentAttention(16, 4, kv_lora_rank=6, causal=True, form="absorbed"),
        "grouped": lambda: polyhead.layers.variants.GroupedHeads(16, 4, num_groups=2, causal=True),
        "mixed": lambda: polyhead.layers.variants.HeadMix(16, 4, causal=True),
    }[kind]().eval()
    x = torch.randn(2, 7, 16)
    with torch.no_grad():
        plain = layer(x, weights=True)
        with polyhead.observe(layer, statistics=("entropy", "mean_distance")) as session:
            seen = layer(x)
    torch.testing.assert_close(seen.output, plain.output)
    weights = plain.weights.double()
    entropy = -torch.xlogy(weights, weights).sum(-1).mean((0, 2))
    torch.testing.assert_close(session.profile["entropy"], entropy, atol=1e-5, rtol=1e-5)
    distance = (torch.arange(7)[:, None] - torch.arange(7)).abs()
    torch.testing.assert_close(
        session.profile["mean_distance"], (weights * distance).sum(-1).mean((0, 2)), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("kind", ["polyhead", "torch"])
def test_a_copy_made_during_a_session_is_not_observed(kind: str) -> None:
    """As an average of the weights is, which training loops copy at any time."""
    polyhead_layer = polyhead.MultiHeadAttention(16, 2, causal=True)
    layer = (polyhead_layer if kind == "polyhead" else nn.MultiheadAttention(16, 2, batch_first=True)).eval()

    def run(module: nn.Module) -> torch.Tensor:
        return module(x).output if kind == "polyhead" else module(x, x, x)[0]

    x = torch.randn(3, 5, 16)
    with polyhead.observe(layer, statistics="entropy") as session:
        copied = copy.deepcopy(layer)
        torch.testing.assert_close(run(copied), run(layer))
    assert session.profile["tokens"].tolist() == [15, 15]
    assert torch.equal(run(copied), run(layer))


def test_eager_modules_that_are_given_no_mask_attend_to_all_keys_as_without_a_session():
    """transformers' eager attention ignores `is_causal`, which sdpa applies without a mask (bridgetower)."""
    model = build("bert")
    model.set_attn_implementation("eager")
    layer = interface_modules(model)[0]
    layer.is_causal = True
    x = torch.randn(2, 7, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).double()
    before = set(vars(layer))
    with torch.no_grad():
        expected = layer(x)[0]
        with polyhead.observe(layer) as session:
            torch.testing.assert_close(layer(x)[0], expected, rtol=1e-10, atol=1e-12)
    assert session.profile["tokens"].tolist() == [14] * len(session.profile)
    assert set(vars(layer)) == before


# ---- torch.nn.MultiheadAttention


def new_inputs(module, inputs):
    return tuple(3 * x for x in inputs)


def inputs_in_place(module, inputs):
    inputs[0].mul_(3)


def new_weights(module, inputs):
    module.in_proj_weight.data.mul_(3)


@pytest.mark.parametrize("hook", [new_inputs, inputs_in_place, new_weights])
@pytest.mark.parametrize("is_entered", [False, True])
def test_hooks_registered_inside_a_session_run_before_its_own(hook, is_entered):
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(16, 4).eval(), torch.randn(5, 2, 16)
    changed, weights = x.clone(), copy.deepcopy(layer)
    if hook is not new_weights:
        changed = 3 * x
    else:
        weights.in_proj_weight.data.mul_(3)
    with torch.no_grad():
        with polyhead.observe(weights) as expected:
            weights(changed, changed, changed)
        if not is_entered:
            handle = layer.register_forward_pre_hook(hook)
        with polyhead.observe(layer) as session, polyhead.observe(layer) as inner:
            if is_entered:
                handle = layer.register_forward_pre_hook(hook)
            layer(x, x, x)
        handle.remove()
    for observed in (session, inner):
        for name in ("entropy", "confidence", "max_logit", "sink_mass"):
            torch.testing.assert_close(observed.profile[name], expected.profile[name], msg=name)


def test_three_views_of_one_tensor_attend_to_themselves():
    layer, x = nn.MultiheadAttention(16, 4).eval(), torch.randn(2, 5, 16)
    tables = []
    for inputs in (
        [x.transpose(0, 1)] * 3,
        [x.transpose(0, 1) for _ in range(3)],
        [x.transpose(0, 1).clone() for _ in range(3)],
    ):
        with torch.no_grad(), polyhead.observe(layer) as session:
            layer(*inputs)
        tables.append(session.profile)
    assert_equal_tables(tables[0], tables[1])
    assert tables[2].sites[0].kind == "cross"
