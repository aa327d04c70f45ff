"""Continuous batching: packed sequences with a paged cache have the statistics of each sequence alone."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import polyhead
from polyhead.errors import OptionError

transformers = pytest.importorskip("transformers")
LENGTHS = (5, 17, 2, 13)  # of the prompts
NEW_TOKENS = 7
VOCABULARY = 61


def _config(kind: type, **options: Any) -> Any:
    return kind(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        **options,
    )


def llama() -> nn.Module:
    return _model(transformers.LlamaForCausalLM, _config(transformers.LlamaConfig, attn_implementation="sdpa"))


def mistral() -> nn.Module:
    """All layers have a sliding window, shorter than the prompts and than what is generated."""
    config = _config(transformers.MistralConfig, sliding_window=6, attn_implementation="sdpa")
    return _model(transformers.MistralForCausalLM, config)


def gpt_oss() -> nn.Module:
    """A layer with a sliding window and one without, with learned sinks, by eager attention."""
    options = {"num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = _config(transformers.GptOssConfig, sliding_window=6, attn_implementation="eager", **options)
    return _model(transformers.GptOssForCausalLM, config)


def _model(kind: Any, config: Any) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = kind(config).eval()
    for name, parameter in model.named_parameters():  # logits far from zero
        if name.endswith(("q_proj.weight", "k_proj.weight", "sinks")):
            nn.init.normal_(parameter, std=0.7)
    return model


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def options(**more: Any) -> Any:
    """Prompts are longer than a step (`max_batch_tokens`), so that prefills are split and mixed with decoding."""
    given = {"num_blocks": 32, "page_size": 8, "max_batch_tokens": 11, "allow_block_sharing": False, **more}
    return transformers.ContinuousBatchingConfig(**given)


def generation() -> Any:
    return transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)


def generate(model: Any, inputs: list[list[int]], **more: Any) -> list[list[int]]:
    """Return the generated tokens of each prompt."""
    results = model.generate_batch(inputs, generation_config=generation(), continuous_batching_config=options(**more))
    assert [result.error for result in results.values()] == [None] * len(inputs)
    return [result.generated_tokens for result in results.values()]


def forwards(model: nn.Module, inputs: list[list[int]], generated: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of each sequence, without the last token, which no step reads."""
    with torch.no_grad():
        return [
            model(torch.tensor([[*tokens, *new[:-1]]])).logits[0] for tokens, new in zip(inputs, generated, strict=True)
        ]


@pytest.mark.parametrize("build", [llama, mistral, gpt_oss])
def test_statistics_are_those_of_each_sequence_alone(build):
    model, inputs = build(), prompts()
    expected = generate(model, inputs)
    implementation = model.config._attn_implementation
    with polyhead.observe(model) as session:
        assert generate(model, inputs) == expected
    assert (model.config._attn_implementation, "init_continuous_batching" in vars(model)) == (implementation, False)
    with polyhead.observe(model) as alone:
        forwards(model, inputs, expected)
    found, reference = session.profile, alone.profile
    assert set(found["tokens"].tolist()) == {sum(LENGTHS) + len(LENGTHS) * (NEW_TOKENS - 1)}
    assert found.sites == reference.sites
    assert found["entropy_std"].min() > 0.1
    for column in reference.columns:
        torch.testing.assert_close(found[column], reference[column], atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("build", [llama, gpt_oss])
@pytest.mark.parametrize("num_blocks", [4, 5])
def test_tokens_of_requests_that_a_full_cache_evicts_count_once(build, num_blocks):
    """An evicted request is prefilled again with its prompt and all tokens that it has generated."""
    model, inputs = build(), prompts() * 2
    steps: list[int] = []
    with polyhead.observe(
        model, callback=lambda session: steps.append(int(session.profile["tokens"].max()))
    ) as session:
        generated = generate(model, inputs, num_blocks=num_blocks)
    assert steps == sorted(steps)
    with polyhead.observe(model) as alone:
        forwards(model, inputs, generated)
    found, reference = session.profile, alone.profile
    assert set(found["tokens"].tolist()) == {2 * (sum(LENGTHS) + len(LENGTHS) * (NEW_TOKENS - 1))}
    for column in reference.columns:
        torch.testing.assert_close(found[column], reference[column], atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_step_of_repeated_tokens_alone_is_reported_without_tokens():
    model, counts = llama(), []

    def callback(session: polyhead.observation.Session) -> None:
        profile = session.take().profile
        counts.append(int(profile["tokens"].max()))
        assert polyhead.observation.HeadMetrics.of(profile).to_open_metrics().endswith("# EOF\n")

    with polyhead.observe(model, statistics=("entropy", "max_logit"), callback=callback):
        generate(model, prompts() * 2, num_blocks=4, max_batch_tokens=6)
    assert 0 in counts
    assert sum(counts) == 2 * (sum(LENGTHS) + len(LENGTHS) * (NEW_TOKENS - 1))


def test_every_kth_step_is_observed_and_reported_to_the_callback():
    model, inputs = llama(), prompts()[:1]
    taken: list[int] = []
    threads: set[threading.Thread] = set()

    def callback(session: polyhead.observation.Session) -> None:
        taken.append(int(session.take().profile["tokens"].max()))
        threads.add(threading.current_thread())

    with polyhead.observe(model, statistics="entropy", every=3, callback=callback) as session:
        generate(model, inputs)  # a step for the prompt, then six of one token each
        assert taken == [LENGTHS[0], 1, 1]
        generate(model, inputs)  # steps 7 to 13, in another thread
    assert taken == [LENGTHS[0], 1, 1, 1, 1]
    assert len(threads) == 2
    assert threading.current_thread() not in threads
    assert len(session.profile) == 0


def test_gates_ablate_heads_in_every_step():
    model, inputs = llama(), prompts()
    plain, gate = generate(model, inputs), torch.tensor([0.0, 1, 1, 0, 0, 1])
    with polyhead.observe(model, statistics=False) as session:
        session.gates["model.layers.0.self_attn", "self"] = gate
        ablated = generate(model, inputs)
    assert ablated != plain
    with polyhead.observe(model, statistics=False) as session:
        session.gates["model.layers.0.self_attn", "self"] = gate
        logits = forwards(model, inputs, ablated)
    for tokens, rows, new in zip(inputs, logits, ablated, strict=True):
        assert rows[len(tokens) - 1 :].argmax(-1).tolist() == new


def test_two_sessions_observe_the_same_manager():
    model, inputs = llama(), prompts()
    with (
        polyhead.observe(model, statistics="entropy") as outer,
        polyhead.observe(model, statistics="max_logit", every=2) as inner,
    ):
        generate(model, inputs)
    tokens = sum(LENGTHS) + len(LENGTHS) * (NEW_TOKENS - 1)
    assert set(outer.profile["tokens"].tolist()) == {tokens}
    assert 0 < inner.profile["tokens"].max() < tokens
    assert model.config._attn_implementation == "sdpa"


def test_a_session_that_ends_while_requests_run_counts_whole_steps():
    model, inputs = llama(), prompts()
    seen = threading.Event()
    with polyhead.observe(model, statistics="entropy", callback=lambda session: seen.set()) as session:
        manager = model.init_continuous_batching(generation(), options())
        manager.start()
        manager.add_requests(inputs, max_new_tokens=29)
        assert seen.wait(60)
    counted = session.profile["tokens"].tolist()
    assert len(set(counted)) == 1  # as many tokens in every layer
    assert "init_continuous_batching" not in vars(model)
    results = [manager.get_result(timeout=60) for _ in inputs]
    manager.stop(block=True)
    assert [len(result.generated_tokens) for result in results if result is not None] == [29] * len(inputs)
    assert session.profile["tokens"].tolist() == counted  # nothing was observed after the session


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"use_cuda_graph": True}, "got use_cuda_graph;"),
        ({"use_cuda_graph": (False, True)}, "got use_cuda_graph;"),
        (
            {"default_compile_level": 1, "max_blocks_per_request": 4},
            "got default_compile_level, max_blocks_per_request",
        ),
    ],
)
def test_what_does_not_pass_through_python_is_refused(given, named):
    model = llama()
    with polyhead.observe(model) as session:
        with pytest.raises(OptionError, match=named):
            model.init_continuous_batching(generation(), options(**given))
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3]]))  # the session observes the model as before
    assert session.profile["tokens"].tolist() == [3.0] * 12


def test_collectors_and_kept_statistics_are_refused():
    model = llama()
    for more in ({"collect": [polyhead.observation.AttentionDistances()]}, {"keep_statistics": True}):
        with (
            polyhead.observe(model, **more),
            pytest.raises(OptionError, match="without collectors and keep_statistics"),
        ):
            model.init_continuous_batching(generation(), options())


def test_managers_from_before_the_session_are_refused():
    model = llama()
    manager = model.init_continuous_batching(generation(), options())
    manager.warmup()  # prepares the inputs for the implementation of the config
    with polyhead.observe(model) as session:
        manager.start()
        manager.add_request([1, 2, 3])
        result = manager.get_result(timeout=60)
        manager.stop(block=True, keep_for_next_session=True)
        assert result is not None
        assert "enter the session first" in result.error
        with pytest.raises(OptionError, match="got a persistent one"):
            model.init_continuous_batching(generation(), options())
    assert len(session.profile) == 0
    model.destroy_cached_continuous_batching_manager()


def test_other_calls_are_refused_once_a_manager_was_created():
    model = llama()
    with polyhead.observe(model, statistics="entropy"):
        generate(model, prompts()[2:3])
        with pytest.raises(OptionError, match=r"got 'sdpa'.*After continuous batching was initialized"):
            model(torch.tensor([[1, 2, 3]]))


def test_a_softcap_that_transformers_ignores_is_refused():
    config = _config(transformers.Gemma2Config, attn_implementation="eager", layer_types=["full_attention"] * 2)
    model = _model(transformers.Gemma2ForCausalLM, config)
    with polyhead.observe(model):
        results = model.generate_batch(
            prompts()[:1], generation_config=generation(), continuous_batching_config=options()
        )
    assert [("ignores the softcap" in result.error) for result in results.values()] == [True]


def test_a_copy_of_an_observed_model_is_not_observed():
    model = llama()
    with polyhead.observe(model, statistics="entropy") as session:
        other = copy.deepcopy(model)
        assert other.init_continuous_batching.__self__ is other
    assert len(session.profile) == 0
