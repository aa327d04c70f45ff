"""A session raises where it would otherwise silently miss calls, layers or heads."""

import copy
import threading

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from polyhead import HeadId, MultiHeadAttention, observe
from polyhead.errors import OptionError
from polyhead.observation.observations import Observations
from polyhead.surgery import PruneHeads, apply

IDS = torch.randint(3, 31, (3, 7), generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=31)).eval()


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=31, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("kind", ["transformers", "ours", "torch"])
def test_calls_from_a_second_thread_are_refused(kind: str) -> None:
    models: dict[str, nn.Module] = {
        "transformers": llama(),
        "ours": MultiHeadAttention(8, 2, causal=True).eval(),
        "torch": nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval(),
    }
    model, data = models[kind], IDS if kind == "transformers" else TOKENS
    caught: list[Exception] = []

    def call() -> None:
        try:
            with torch.no_grad():
                model(data)
        except OptionError as error:
            caught.append(error)

    with torch.no_grad(), observe(model) as session:
        model(data)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert "one thread" in str(caught[0])
    assert set(session.profile["tokens"].tolist()) == {data.shape[0] * data.shape[1]}
    with session:  # entered again, it may count another thread's
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert set(session.profile["tokens"].tolist()) == {2 * data.shape[0] * data.shape[1]}


@torch.no_grad()
def test_a_model_switched_to_another_attention_inside_a_session_is_refused() -> None:
    model = llama()
    with observe(model) as session:
        model(IDS)
        model.set_attn_implementation("eager")
        with pytest.raises(OptionError, match="got 'eager'; switch it before"):
            model(IDS)
    assert model.config._attn_implementation == "eager"
    assert session.profile["tokens"].tolist() == [21] * 8


@torch.no_grad()
def test_attention_modules_that_are_new_inside_a_session_are_named() -> None:
    model = nn.Sequential(MultiHeadAttention(8, 2), nn.Identity()).eval()
    fresh = MultiHeadAttention(8, 2)
    with pytest.raises(OptionError, match="got new ones: 0"), observe(model):
        model[0] = fresh
    hf = llama()
    attending = copy.deepcopy(hf.model.layers[0].self_attn)
    with pytest.raises(OptionError, match=r"got new ones: model\.layers\.0\.self_attn"), observe(hf):
        hf.model.layers[0].self_attn = attending
    assert hf.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_heads_that_are_removed_inside_a_session_or_between_two_entries_are_refused() -> None:
    model = gpt2()
    session = observe(model)
    with session:
        model(IDS)
        record = apply(model, [PruneHeads(layer=0, heads=(1,))])
        with pytest.raises(OptionError, match=r"got 3 heads in 'transformer\.h\.0\.attn', which had 4"):
            model(IDS)
    with pytest.raises(OptionError, match="got 3 heads"), session:
        model(IDS)
    assert record is not None


@torch.no_grad()
def test_heads_that_no_layer_has_are_refused_when_all_layers_were_seen() -> None:
    model = llama()
    for heads, named in (([9], "9"), ([0, HeadId(7, 0)], "L7H0"), ([HeadId(1, 4)], "L1H4")):
        with pytest.raises(OptionError, match=f"up to 4 per layer, got {named}"), observe(model, heads=heads):
            model(IDS)
    with observe(model, heads=[0, HeadId(1, 3)]) as session:
        model(IDS)
    assert len(session.profile["tokens"]) == 3


def test_the_path_of_a_module_that_does_not_attend_is_refused() -> None:
    with pytest.raises(OptionError, match=r"got 'model\.layers\.1', which contains model\.layers\.1\.self_attn"):
        observe(llama(), layers=["model.layers.1"])


@torch.no_grad()
def test_observations_that_number_a_layer_differently_are_not_merged() -> None:
    model = nn.ModuleList(MultiHeadAttention(8, 2) for _ in range(2)).eval()

    def read(*order: int) -> Observations:
        with observe(model) as session:
            for index in order:
                model[index](TOKENS)
        return session.observations

    assert read(0, 1).merge(read(0, 1)).profile["tokens"].tolist() == [20] * 4
    with pytest.raises(OptionError, match="order of their first call"):
        read(0, 1).merge(read(1, 0))
