"""A TransformerBridge is observed and gated as the transformers model that it wraps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import polyhead
from polyhead.errors import OptionError

pytest.importorskip(
    "transformer_lens.model_bridge", reason="needs TransformerLens 4: pip install 'transformer-lens>=4'"
)
VOCABULARY = 41
IDS = torch.randint(VOCABULARY, (2, 19), generator=torch.Generator().manual_seed(5))
CONFIGS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=32, vocab_size=VOCABULARY)),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(
            hidden_size=24,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            vocab_size=VOCABULARY,
        ),
    ),
}


@pytest.fixture(params=CONFIGS)
def pair(request: Any, tmp_path: Path) -> tuple[Any, Any]:
    """A model of transformers, and a bridge to a copy of it."""
    from transformer_lens.model_bridge import TransformerBridge

    kind, config = CONFIGS[request.param]
    torch.manual_seed(7)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(7)  # logits far from zero
    words = Tokenizer(models.WordLevel({f"w{x}": x for x in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"bos_token": "w1", "eos_token": "w2", "pad_token": "w3", "unk_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    wrapped = copy.deepcopy(model)
    wrapped.set_attn_implementation("eager")
    bridge = TransformerBridge.boot_transformers(str(tmp_path), hf_model=wrapped, tokenizer=tokenizer)
    return model, bridge.eval()


@torch.no_grad()
def test_statistics_are_those_of_the_patterns_and_of_the_model(pair):
    model, bridge = pair
    logits, cache = bridge.run_with_cache(IDS)
    with polyhead.observe(bridge, statistics=("entropy", "previous_mass")) as session:
        torch.testing.assert_close(bridge(IDS), logits, atol=1e-5, rtol=0)
    with polyhead.observe(model, statistics=("entropy", "previous_mass")) as expected:
        model(IDS)
    patterns = torch.stack([cache["pattern", layer] for layer in (0, 1)]).double()
    entropy = -(patterns * patterns.clamp_min(1e-30).log()).sum(-1).mean((1, 3)).flatten()
    torch.testing.assert_close(session.profile["entropy"], entropy, atol=1e-5, rtol=0)
    for column in expected.profile.columns:
        torch.testing.assert_close(session.profile[column], expected.profile[column], atol=1e-5, rtol=0)
    torch.testing.assert_close(bridge.run_with_cache(IDS)[1]["pattern", 1].double(), patterns[1])  # restored


@torch.no_grad()
def test_gates_equal_the_ablation_by_a_hook(pair):
    _, bridge = pair

    def ablate(z: torch.Tensor, hook: Any) -> torch.Tensor:
        z[:, :, 1] = 0
        return z

    ablated = bridge.run_with_hooks(IDS, fwd_hooks=[("blocks.1.attn.hook_z", ablate)])
    with polyhead.observe(bridge, statistics=False) as session:
        bridge(IDS)
        path = next(name for name, module in bridge.named_modules() if module is session.attention_modules[1])
        session.gates[path, "self"] = torch.tensor([1.0, 0.0, 1.0])
        gated = bridge(IDS)
    assert (bridge(IDS) - ablated).abs().max() > 0.1
    torch.testing.assert_close(gated, ablated, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("how", ["compatibility mode", "edited weights"])
def test_processed_and_edited_weights_are_observed(pair, how):
    _, bridge = pair
    if how == "edited weights":
        bridge.blocks[1].attn.q.weight.mul_(3)
    else:
        bridge.enable_compatibility_mode()
    expected, cache = bridge.run_with_cache(IDS)
    with polyhead.observe(bridge, statistics="max_logit") as session:
        torch.testing.assert_close(bridge(IDS), expected, atol=1e-5, rtol=0)
    weights = cache["attn_scores", 1].flatten(1)
    assert session.profile["max_logit_max"][3:].max() == pytest.approx(float(weights.max()), abs=1e-5)


@torch.no_grad()
def test_hooks_outside_of_attention_fire_and_those_inside_are_refused(pair):
    _, bridge = pair
    name = "blocks.0.hook_resid_post"
    expected = bridge.run_with_cache(IDS, names_filter=name)[1][name]
    with polyhead.observe(bridge, statistics="entropy") as session:
        torch.testing.assert_close(bridge.run_with_cache(IDS, names_filter=name)[1][name], expected, atol=1e-5, rtol=0)
        with pytest.raises(OptionError, match=r"do not fire, got hooks on .*hook_pattern"):
            bridge.run_with_cache(IDS, names_filter="blocks.1.attn.hook_pattern")
    assert session.profile["tokens"].tolist() == [IDS.numel()] * 6
