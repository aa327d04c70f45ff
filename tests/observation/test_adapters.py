"""Custom attention modules are observed through an adapter, and their outputs are unchanged."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import polyhead
from polyhead import Mask
from polyhead.errors import OptionError, ShapeError
from polyhead.observation import AttentionMaps, Contributions
from tests.integrations.huggingface.compare import BOUND
from tests.observation.from_weights import Expected, assert_table
from tests.observation.test_session import assert_equal_tables, assert_same_trace, trace_of

BATCH, TOKENS, SOURCE, HEADS, DIM = 3, 13, 7, 2, 5
WIDTH = HEADS * DIM


class Handwritten(nn.Module):
    """Attention by hand. It can be told which keys are hidden, and what to multiply its heads with."""

    def __init__(self, causal: bool = False, scale: float = 0.7):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.causal, self.scale = causal, scale
        self.factors = None
        self.weights = None

    def heads(self, x, source=None):
        source = x if source is None else source
        parts = self.query(x), self.key(source), self.value(source)
        return [part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in parts]

    def forward(self, x, source=None, real=None):
        query, key, value = self.heads(x, source)
        logits = query @ key.mT * self.scale
        if real is not None:
            logits = logits.masked_fill(~real[:, None, None], -torch.inf)
        if self.causal:
            logits = logits.masked_fill(torch.ones(logits.shape[2:]).bool().triu(1), -torch.inf)
        weights = logits.softmax(-1)
        self.weights = weights.detach()
        said = weights @ value
        if self.factors is not None:
            said = said * self.factors[:, None, None]
        return self.output(said.transpose(1, 2).flatten(2))


class Adapter:
    gates = False

    def watch(self, module, notify):
        def note(module, inputs, named):
            source, real = named.get("source"), named.get("real")
            mask = Mask.causal() if module.causal else Mask()
            if real is not None:
                mask = mask & Mask.dense(real[:, None, None])
            query, key, value = module.heads(inputs[0], source)
            # Which queries are padding is not said by the keys of another sequence.
            module.factors = notify(query, key, value, mask=mask, scale=module.scale, cross=source is not None)

        return module.register_forward_pre_hook(note, with_kwargs=True)


class GatedAdapter(Adapter):
    gates = True


def model(**options):
    torch.manual_seed(0)
    made = nn.Sequential(Handwritten(**options), nn.Linear(WIDTH, WIDTH), Handwritten(**options)).double()
    for layer in (made[0], made[2]):
        layer.query.weight.data.mul_(4)
    return made.eval()


def tokens(count=TOKENS, seed=1):
    return torch.randn(BATCH, count, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padding():
    return torch.arange(TOKENS) < torch.tensor([TOKENS, 11, 5])[:, None]


# ---- the same numbers as from the weights


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_statistics_are_those_of_the_modules_own_weights(causal, padded):
    made, x = model(causal=causal), tokens()
    real = padding() if padded else None
    with polyhead.observe(made, adapters={Handwritten: Adapter()}) as session:
        first = made[0](x, real=real)
        made[2](first, real=real)
    stack = Expected()
    rows = padding() if padded else torch.ones(BATCH, TOKENS).bool()
    stack.add([made[0].weights, made[2].weights], rows, torch.zeros(BATCH).long())
    assert_table(session.profile, {"self": stack})
    assert [site.name for site in dict.fromkeys(session.profile.sites)] == ["0", "2"]


def test_a_cross_attention_has_no_positions():
    made = model()
    with polyhead.observe(made, adapters={Handwritten: Adapter()}) as session:
        made[0](tokens(), source=tokens(SOURCE, seed=2))
    stack = Expected(cross=True)
    stack.add([made[0].weights], torch.ones(BATCH, TOKENS).bool(), torch.zeros(BATCH).long())
    assert_table(session.profile, {"cross": stack})


class CheckedAdapter(Adapter):
    """Passes the module's own head outputs, and possibly other arguments than the module uses."""

    def __init__(self, **changed):
        self.changed = changed
        self.outputs = 0

    def watch(self, module, notify):
        def note(module, inputs, named, output):
            query, key, value = module.heads(*inputs)
            real, mask = named.get("real"), Mask.causal()
            mask = mask if real is None else mask & Mask.dense(real[:, None, None])
            own = module.weights @ value
            self.outputs += 1
            notify(query, key, value, **{"mask": mask, "scale": module.scale, "output": own, **self.changed})

        return module.register_forward_hook(note, with_kwargs=True)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_correct_adapter_passes_the_check_of_its_output(padded, dtype):
    made, named = model(causal=True).to(dtype), {"real": padding()} if padded else {}
    adapter = CheckedAdapter()
    with torch.no_grad(), polyhead.observe(made, adapters={Handwritten: adapter}) as session:
        made[0](tokens().to(dtype), **named)
    assert adapter.outputs == 1
    assert session.profile["tokens"].tolist() == HEADS * [float(padding().sum() if padded else BATCH * TOKENS)]


@pytest.mark.parametrize("changed", [{"scale": 0.8}, {"mask": Mask()}, {"mask": Mask.window(5)}])
def test_an_adapter_whose_attention_is_not_the_modules_is_refused(changed):
    made = model(causal=True)
    words = "differ from the module's by .* of their norm"
    with pytest.raises(OptionError, match=words), polyhead.observe(made, adapters={"2": CheckedAdapter(**changed)}):
        made(tokens())


def test_a_forgotten_padding_mask_is_refused_at_the_first_padded_batch():
    """Its shapes and arguments are those of the unpadded batch before it: only the output tells them apart."""
    made, adapter = model(causal=True), CheckedAdapter(mask=Mask.causal())
    with polyhead.observe(made, adapters={"0": adapter}) as session:
        made[0](tokens())
        with pytest.raises(OptionError, match="got head outputs for '0' that differ from the module's by"):
            made[0](tokens(), real=padding())
    assert adapter.outputs == 2
    assert session.profile["tokens"].tolist() == HEADS * [float(BATCH * TOKENS)]


def test_the_profile_names_the_modules_whose_output_was_not_compared():
    made = model(causal=True)
    with polyhead.observe(made, adapters={"0": CheckedAdapter(), "2": Adapter()}, statistics="entropy") as session:
        made[0](tokens())
        assert repr(session.profile) == "HeadProfile(2 heads, 39 tokens: entropy)"
        assert "not compared" not in str(session.profile)
        made[2](tokens())
    note = "not compared with the module's own output, pass `output` to `notify`: 2"
    assert repr(session.profile) == f"HeadProfile(4 heads, 39 tokens: entropy; {note})"
    assert str(session.profile).endswith(f"\n{note}")
    assert "pass `output` to `notify`: 2" in session.profile._repr_html_()
    many = nn.Sequential(*(Handwritten() for _ in range(11))).double()
    with polyhead.observe(many, adapters={Handwritten: Adapter()}) as session:
        many(tokens())
    assert repr(session.profile).endswith("`notify`: 0, 1, 2, …)")


@pytest.mark.parametrize("cross", [False, True])
def test_padding_that_is_not_in_the_mask(cross):
    class Telling(Adapter):
        def watch(self, module, notify):
            def note(module, inputs):
                notify(*module.heads(*inputs), scale=module.scale, tokens=padding(), cross=cross)

            return module.register_forward_pre_hook(note)

    made = model()
    with polyhead.observe(made, adapters={"0": Telling()}) as session:
        made[0](tokens(), *([tokens(SOURCE, seed=2)] if cross else []))
    stack = Expected(cross=cross)
    stack.add([made[0].weights], padding(), torch.zeros(BATCH).long())
    assert_table(session.profile, {"cross" if cross else "self": stack})


def test_softcap_and_learned_sinks():
    query, key, value = (torch.randn(BATCH, HEADS, TOKENS, DIM).double() for _ in range(3))
    options = {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0]).double(), "mask": Mask.causal()}

    class Telling:
        def watch(self, module, notify):
            return module.register_forward_pre_hook(lambda module, inputs: notify(query, key, value, **options))

    names = ("entropy", "max_logit", "learned_sink_mass")
    with polyhead.observe(nn.Identity(), adapters={nn.Identity: Telling()}, statistics=names) as session:
        session.model(tokens())
    rows = polyhead.attention(query, key, value, **options, statistics=names, backend="reference").statistics
    for name in names:
        expected = getattr(rows, name).transpose(0, 1).flatten(1).mean(-1)
        torch.testing.assert_close(session.profile[name], expected, rtol=0, atol=BOUND)


def test_pytorchs_own_layer_through_an_adapter():
    """An adapter takes the place of what observe would have done by itself, and finds the same."""
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double().eval()

    class Told:
        def watch(self, module, notify):
            def note(module, inputs):
                parts = nn.functional.linear(inputs[0], module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
                notify(*(part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in parts))

            return module.register_forward_pre_hook(note)

    x, tables = tokens(), []
    for adapters in (None, {nn.MultiheadAttention: Told()}):
        with torch.no_grad(), polyhead.observe(layer, adapters=adapters) as session:
            layer(x, x, x)
        tables.append(session.profile)
    assert_equal_tables(*tables, bound=1e-9)


def test_collectors_work_with_adapters():
    made, x = model(causal=True), tokens()
    with polyhead.observe(made, adapters={"2": Adapter()}, collect=[AttentionMaps(TOKENS), Contributions()]) as session:
        made(x)
    (found,) = (states for site, states in session.observations.collected.items() if site.name == "2")
    assert "2" not in session.materialised
    torch.testing.assert_close(found["maps"].received, made[2].weights.sum((0, 2)), rtol=0, atol=BOUND)
    assert found["contributions"].moments.count == BATCH * TOKENS


class BloomAdapter:
    """A module of somebody else's, whose bias and mask are added to the logits."""

    def watch(self, module, notify):
        def note(module, inputs, named):
            alibi, hidden = named["alibi"], inputs[0]
            query, key, value = module._reshape(module.query_key_value(hidden))
            bias = alibi.view(hidden.shape[0], module.num_heads, 1, -1) * module.beta
            mask = Mask.bias(bias + named["attention_mask"])
            notify(query, key, value, mask=mask, scale=module.inv_norm_factor)

        return module.register_forward_pre_hook(note, with_kwargs=True)


def test_an_adapter_and_the_softmax_of_the_model_agree():
    from transformers.models.bloom.modeling_bloom import BloomAttention

    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4, attn_implementation="eager")
    bloom, ids = transformers.BloomForCausalLM(config).eval(), torch.randint(3, 61, (BATCH, TOKENS))
    tables = []
    for options in ({"adapters": {BloomAttention: BloomAdapter()}}, {}):
        with torch.no_grad(), polyhead.observe(bloom, **options) as session:
            bloom(input_ids=ids, attention_mask=padding().long(), use_cache=False)
        tables.append(session.profile)
    one, other = tables
    assert one["tokens"].eq(int(padding().sum())).all()
    assert one["max_logit"].isfinite().all()
    for column in other.columns:
        torch.testing.assert_close(one[column], other[column], rtol=1e-5, atol=1e-5, msg=column)


# ---- leaving no trace, and choosing


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_as_it_was_and_computes_what_it_did(fails):
    made, x = model(), tokens()
    expected, before = made(x), trace_of(made)

    def run():
        with polyhead.observe(made, adapters={Handwritten: Adapter()}) as session:
            assert torch.equal(made(x), expected)
            assert len(session.profile) == 2 * HEADS
            return 1 // (not fails)

    if fails:
        with pytest.raises(ZeroDivisionError):
            run()
    else:
        run()
    assert_same_trace(trace_of(made), before)


def test_gradients_are_the_modules_own():
    made, x = model(), tokens()
    made(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in made.parameters()]
    made.zero_grad()
    with polyhead.observe(made, adapters={Handwritten: Adapter()}, collect=[Contributions()]):
        made(x).square().sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(made.parameters(), expected, strict=True))


def test_a_path_goes_before_a_class():
    told = []

    class Noting(Adapter):
        def __init__(self, name):
            self.name = name

        def watch(self, module, notify):
            told.append(self.name)
            return super().watch(module, notify)

    made = model()
    with polyhead.observe(made, adapters={Handwritten: Noting("class"), "2": Noting("path")}, layers=[1]) as session:
        made(tokens())
    assert told == ["class", "path"]
    assert {site.name for site in session.profile.sites} == {"2"}


# ---- gates


def test_gates_multiply_the_heads_of_an_adapter_that_says_so():
    made, x = model(), tokens()
    with polyhead.observe(made, adapters={Handwritten: GatedAdapter()}) as session:
        plain = made[0](x)
        session.gates["0", "self"] = gate = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
        gated = made[0](x)
    said = made[0].weights @ made[0].heads(x)[2]
    missing = nn.functional.linear(said[:, 0], made[0].output.weight[:, :DIM])
    torch.testing.assert_close(gated, plain - missing, rtol=0, atol=1e-12)
    gated.sum().backward()
    assert gate.grad.abs().min() > 0
    assert session.profile["tokens"].eq(2 * BATCH * TOKENS).all()


def test_gates_are_refused_for_an_adapter_that_does_not():
    made = model()
    with polyhead.observe(made, adapters={Handwritten: Adapter()}, statistics=False) as session:
        session.gates["0", "self"] = torch.ones(HEADS)
        with pytest.raises(OptionError, match="multiplies the heads' outputs, got a gate for '0' and Adapter"):
            made(tokens())


# ---- refusing


def test_names_that_the_model_does_not_have():
    with pytest.raises(OptionError, match="got 'nowhere', which matches none"):
        polyhead.observe(model(), adapters={"nowhere": Adapter()})
    with pytest.raises(OptionError, match="got Conv2d, which matches none"):
        polyhead.observe(model(), adapters={nn.Conv2d: Adapter()})
    with pytest.raises(OptionError, match=r"got Linear, which contains none of them; pass adapters"):
        polyhead.observe(nn.Linear(3, 3))


def test_a_module_that_uses_the_interface_needs_no_adapter():
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(OptionError, match=r"'layers.0.self_attn' is already observed through the attention interface"):
        polyhead.observe(transformers.LlamaModel(config), adapters={LlamaAttention: Adapter()})


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"query": torch.zeros(2, 3, 4)}, r"\[batch, heads, sequence, head_dim\], got \[2, 3, 4\]"),
        ({"value": None}, "got .* NoneType"),
        ({"output": torch.zeros(2, 4, 3)}, r"output must be the head outputs .*, got \[2, 4, 3\]"),
        ({"tokens": torch.ones(1, 3).bool()}, r"tokens must be \[batch, queries\], here \[2, 4\], got \[1, 3\]"),
    ],
)
def test_arguments_of_an_adapter_are_checked(told, words):
    class Telling:
        def watch(self, module, notify):
            parts = {name: torch.zeros(2, 3, 4, 5) for name in ("query", "key", "value")}
            return module.register_forward_pre_hook(lambda module, inputs: notify(**{**parts, **told}))

    with (
        polyhead.observe(nn.Identity(), adapters={nn.Identity: Telling()}) as session,
        pytest.raises(ShapeError, match=words),
    ):
        session.model(tokens())
