"""Several sessions on one model: each has the results that it would have alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from polyhead import MultiHeadAttention, Statistics, observe
from polyhead.errors import OptionError
from polyhead.observation import AttentionDistances

IDS = torch.randint(3, 31, (3, 7), generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=31)).eval()


MODELS = {
    "transformers": (llama, IDS, "model.layers.1.self_attn", 4),
    "ours": (lambda: MultiHeadAttention(8, 2, causal=True).eval(), TOKENS, "MultiHeadAttention", 2),
    "torch": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0).eval(),
        TOKENS,
        "self_attn",
        2,
    ),
}


def columns(session) -> dict[str, list]:
    return {name: column.tolist() for name, column in session.profile.columns.items()}


@pytest.mark.parametrize("kind", MODELS)
def test_sessions_that_are_nested_count_what_they_would_count_alone(kind):
    build, data, _, _ = MODELS[kind]
    model = build()
    requests = [
        {"statistics": ("entropy", "sink_mass")},
        {"statistics": ("max_logit", "entropy"), "keep_statistics": True},
    ]
    alone = []
    for request in requests:
        with observe(model, **request) as session:
            model(data)
            model(data)
        alone.append(columns(session))
    with observe(model, **requests[0]) as outer:
        model(data)
        with observe(model, **requests[1]) as inner:
            model(data)
            assert inner.statistics.mean("entropy").requires_grad
            model(data)
    assert columns(inner) == alone[1]
    with observe(model, **requests[0]) as session:
        for _ in range(3):
            model(data)
    assert columns(outer) == columns(session)
    with torch.no_grad():  # and none is left
        plain = model(data)
    assert plain is not None
    assert not any("_listener" in vars(module) for module in model.modules())


def test_collectors_of_one_session_do_not_need_them_in_the_other():
    model = llama()
    collected = {"statistics": False, "collect": [AttentionDistances()]}
    with torch.no_grad(), observe(model, statistics="entropy") as outer, observe(model, **collected) as inner:
        model(IDS)
    with torch.no_grad(), observe(model, statistics=False, collect=[AttentionDistances()]) as alone:
        model(IDS)
    assert outer.profile["tokens"].tolist() == [21] * 8
    for site, states in alone.observations.collected.items():
        for name, state in states.items():
            ours, theirs = inner.observations.collected[site][name].state(), state.state()
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("kind", ["transformers", "ours"])
def test_gates_of_nested_sessions_multiply(kind):
    build, data, path, heads = MODELS[kind]
    model, generator = build(), torch.Generator().manual_seed(1)
    by_head, by_sequence = torch.rand(heads, generator=generator), torch.rand(len(data), heads, generator=generator)

    def output() -> torch.Tensor:
        found = model(data)
        return found.logits if kind == "transformers" else found.output

    with torch.no_grad():
        with observe(model, statistics=False) as session:
            session.gates[path, "self"] = by_head * by_sequence
            expected = output()
        with observe(model, statistics=False) as outer, observe(model, statistics="entropy") as inner:
            outer.gates[path, "self"] = by_head
            inner.gates[path, "self"] = by_sequence
            torch.testing.assert_close(output(), expected)
            del inner.gates[path, "self"]
            assert not torch.allclose(output(), expected)


def test_two_gates_on_a_layer_of_torch_are_refused_and_the_layer_goes_on():
    model = MODELS["torch"][0]()
    with torch.no_grad():
        plain = model(TOKENS)
        with observe(model, statistics=False) as outer, observe(model, statistics="entropy") as inner:
            outer.gates["self_attn", "self"] = torch.tensor([0.5, 1.0])
            gated = model(TOKENS)
            inner.gates["self_attn", "self"] = torch.tensor([1.0, 0.5])
            with pytest.raises(OptionError, match="gated by one session at a time"):
                model(TOKENS)
            del inner.gates["self_attn", "self"]
            torch.testing.assert_close(model(TOKENS), gated)
        assert not torch.allclose(gated, plain)
        torch.testing.assert_close(model(TOKENS), plain)


def test_options_of_statistics_that_differ_are_refused():
    model = llama()
    with (
        observe(model, statistics=Statistics("window_mass", window=4)),
        observe(model, statistics=Statistics("window_mass", window=8)),
        pytest.raises(OptionError, match="window_mass with the same window, got 8 and 4"),
    ):
        model(IDS)


@pytest.mark.parametrize("kind", MODELS)
def test_sessions_are_exited_in_reverse_order(kind):
    build, data, _, _ = MODELS[kind]
    model = build()
    outer, inner = observe(model, statistics="entropy"), observe(model, statistics="max_logit")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(OptionError, match="reverse order"):
        outer.__exit__(None, None, None)
    with torch.no_grad():
        model(data)  # both go on
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert (outer.profile["tokens"] > 0).all()
    assert (inner.profile["tokens"] > 0).all()


def test_sessions_on_other_models_may_be_exited_in_any_order():
    """Settings of the whole process hold until the last session is exited, and are then as before."""

    def settings() -> tuple[str, bool]:
        return torch._dynamo.eval_frame._stance.stance, torch.backends.mha.get_fastpath_enabled()

    assert settings() == ("default", True)
    build, data, _, _ = MODELS["torch"]
    first, second = observe(build()), observe(build())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert settings() == ("force_eager", False)
    with torch.no_grad():
        second.model(data)
    second.__exit__(None, None, None)
    assert second.profile["tokens"].tolist() == [10, 10]
    assert settings() == ("default", True)


def test_a_checkpointed_model_is_counted_once_by_each():
    model = llama().train()
    model.gradient_checkpointing_enable()
    with observe(model, statistics="entropy") as outer, observe(model, statistics="max_logit") as inner:
        model(IDS, labels=IDS).loss.backward()
    assert outer.profile["tokens"].tolist() == inner.profile["tokens"].tolist() == [21] * 8


@pytest.mark.parametrize("is_outer", [True, False])
def test_several_sinks_over_a_window_in_a_nested_session(is_outer):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, vocab_size=31, sliding_window=4)).eval()
    sinks, cache = {"statistics": Statistics("sink_mass", sink_keys=3)}, DynamicCache(config=model.config)
    with torch.no_grad():
        with observe(model, **sinks) as whole:
            model(IDS)
        entropy = {"statistics": "entropy"}
        with (
            observe(model, **(sinks if is_outer else entropy)) as outer,
            observe(model, **(entropy if is_outer else sinks)) as inner,
        ):
            for step in range(IDS.shape[1]):
                model(IDS[:, step : step + 1], past_key_values=cache)
    steps = outer if is_outer else inner
    for name, values in whole.profile.columns.items():
        torch.testing.assert_close(steps.profile[name], values, rtol=1e-5, atol=1e-6, msg=name)
