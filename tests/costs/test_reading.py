"""Layouts are read from configs as they stand: held to the modules that transformers builds, and refused by name."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

import polyhead
from polyhead.costs import Workload, estimate_cost
from polyhead.costs.layouts import known_models
from polyhead.costs.layouts.hf_built import config_class
from polyhead.costs.layouts.hf_config import read_hf_config
from polyhead.costs.layouts.hf_families import FAMILIES, WINDOWED
from polyhead.costs.layouts.known_models import KNOWN, known_model
from polyhead.costs.layouts.layout_sources import from_sizes, read_layout
from polyhead.costs.layouts.model_layout import LayerGroup, ModelLayout
from polyhead.costs.quantities import named_dtype
from polyhead.errors import OptionError, ShapeError
from polyhead.layers import LatentConfig, MultiHeadConfig
from polyhead.layers.config import AttentionConfig
from polyhead.layers.positions.config import RotaryConfig

TINY: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "vocab_size": 31}
TINY |= {
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TINY, "num_key_value_heads": 2}
LATENT = {"kv_lora_rank": 10, "q_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
GPT = {"n_embd": 48, "n_head": 6, "n_layer": 2, "vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "gpt_neox", "opt"), TINY),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), GPT),
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3", "qwen2", "granite", "smollm3", "olmo", "glm"), GROUPED),
    **{name: {**GROUPED, "head_dim": 12} for name in ("qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")},
    **{name: {**TINY, **LATENT, "num_experts": 4, "n_routed_experts": 8} for name in ("deepseek_v2", "deepseek_v3")},
    **dict.fromkeys(("qwen2_moe", "starcoder2", "phi", "cohere", "gpt_oss"), GROUPED),
    "gpt_oss": {**GROUPED, "head_dim": 12},
    "glm": {**GROUPED, "head_dim": 8},
    "bloom": {"hidden_size": 48, "n_head": 6, "n_layer": 2, "vocab_size": 31},
    "distilbert": {"dim": 48, "n_heads": 6, "n_layers": 2, "hidden_dim": 40, "vocab_size": 31},
    "falcon": {**TINY, "multi_query": True},
    "gptj": {**GPT, "rotary_dim": 4},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama, bias": {**GROUPED, "model_type": "llama", "attention_bias": True},
    "llama, head_dim": {**GROUPED, "model_type": "llama", "head_dim": 10},
    "falcon, new": {**TINY, "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 3},
    "falcon, multi-head": {**TINY, "model_type": "falcon", "multi_query": False, "bias": True},
    "gpt_bigcode, multi-head": {**GPT, "model_type": "gpt_bigcode", "multi_query": False},
    "deepseek, plain queries": {**TINY, **LATENT, "model_type": "deepseek_v2", "q_lora_rank": None},
    "opt, no bias": {**TINY, "model_type": "opt", "enable_bias": False},
    "qwen2_moe, no bias": {**GROUPED, "model_type": "qwen2_moe", "qkv_bias": False},
}
ALL = {**{name: {**options, "model_type": name} for name, options in CONFIGS.items()}, **VARIANTS}


def built_parameters(found: dict[str, Any]) -> int:
    """Parameters in the attention of the first layer, as transformers builds it."""
    transformers = pytest.importorskip("transformers")
    config = type(transformers.AutoConfig.for_model(found["model_type"])).from_dict(found)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    of_attention = re.compile(
        r"(?:^|\.)(?:layers|layer|h)\.0\.(?:self_attn|self_attention|attention|attn)\.(?!.*LayerNorm)"
    )
    sizes = [p.numel() for name, p in model.named_parameters() if of_attention.search(name)]
    assert sizes
    return sum(sizes)


def test_every_family_is_tried():
    assert {options["model_type"] for options in ALL.values()} == set(FAMILIES)
    assert len(ALL) >= 30


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by a model that transformers has
@pytest.mark.parametrize("found", ALL.values(), ids=ALL)
def test_parameters_are_those_of_the_attention_that_transformers_builds(found):
    model = read_hf_config(found)
    work = Workload.forward(3)
    assert estimate_cost(model.groups[0].config, work).parameters == built_parameters(found)
    assert model.layers == 2
    assert not [note for note in model.notes if "ignored fields" in note]


@pytest.mark.parametrize("found", [GROUPED | {"model_type": "llama"}, ALL["deepseek_v3"]], ids=["grouped", "latent"])
def test_a_cache_holds_what_the_cache_of_transformers_holds(found):
    transformers = pytest.importorskip("transformers")
    config = type(transformers.AutoConfig.for_model(found["model_type"])).from_dict(found)
    model = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    cost = estimate_cost(read_hf_config(found).groups[0].config, Workload.prefill(7, batch=3), dtype=torch.float32)
    with torch.no_grad():
        cache = model(torch.ones(3, 7, dtype=torch.long), use_cache=True).past_key_values
    layer = cache.layers[0]
    held = layer.keys.nbytes + layer.values.nbytes
    if held == 3 * 7 * 4 * 6 * (6 + 4 + 5) and "kv_lora_rank" in found:
        pytest.skip("this transformers keeps the expanded heads, and not the latents that they are made of")
    assert cost.cache_bytes == held


def test_windows_by_layer_in_every_spelling():
    explicit = {**GROUPED, "model_type": "llama", "num_hidden_layers": 3, "sliding_window": 5, "attention_bias": False}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = read_hf_config({**explicit, "layer_types": kinds}, complete=True)
    assert [(group.config.window, group.layers) for group in model.groups] == [(5, 2), (None, 1)]
    every = read_hf_config({**explicit, "model_type": "mistral"}, complete=True)
    assert [(group.config.window, group.layers) for group in every.groups] == [(5, 3)]
    behind = {**explicit, "model_type": "qwen2", "max_window_layers": 1, "use_sliding_window": True}
    model = read_hf_config(behind, complete=True)
    assert [(group.config.window, group.layers) for group in model.groups] == [(None, 1), (5, 2)]
    unused = read_hf_config({**behind, "use_sliding_window": False}, complete=True)
    assert [(group.config.window, group.layers) for group in unused.groups] == [(None, 3)]
    with pytest.raises(OptionError, match="one entry for each of the 3 layers, got 2"):
        read_hf_config({**explicit, "layer_types": kinds[:2]}, complete=True)
    with pytest.raises(OptionError, match=r"layer_types must contain .*, got chunked_attention"):
        read_hf_config({**explicit, "layer_types": [*kinds[:2], "chunked_attention"]}, complete=True)
    for family in ({"model_type": "gemma2"}, {"sliding_window_pattern": 6}):
        with pytest.raises(OptionError, match="layer_types must list which layers have the window of 5"):
            read_hf_config({**explicit, **family}, complete=True)
    with pytest.raises(OptionError, match="need sliding_window"):
        read_hf_config({**explicit, "layer_types": kinds, "sliding_window": None}, complete=True)


def test_a_window_that_only_transformers_knows_of_is_filled_in_and_noted():
    pytest.importorskip("transformers")
    found = {**GROUPED, "model_type": "gemma2", "head_dim": 12, "num_hidden_layers": 4, "sliding_window": 7}
    model = read_hf_config(found)
    assert [(group.config.window, group.layers) for group in model.groups] == [(7, 2), (None, 2)]
    assert any("layer_types" in note and "defaults of transformers" in note for note in model.notes)


def test_a_window_that_transformers_ignores_is_noted():
    found = {**GROUPED, "attention_bias": False, "sliding_window": 5}
    note = "the plan applies sliding_window, which transformers ignores in llama"
    assert note in read_hf_config({**found, "model_type": "llama"}, complete=True).notes
    assert note not in read_hf_config({**found, "model_type": "llama", "sliding_window": None}, complete=True).notes
    assert not any("ignores" in note for note in read_hf_config({**found, "model_type": "mistral"}).notes)
    for family in FAMILIES:
        module = type(transformers.AutoConfig.for_model(family)).__module__.replace("configuration_", "modeling_")
        source = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")  # importing some warns
        assert ("sliding_window" in source) == (family in WINDOWED), family


def test_layers_without_a_softmax_are_left_out_and_noted():
    found = {**GROUPED, "model_type": "llama", "num_hidden_layers": 4, "attention_bias": False}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    model = read_hf_config({**found, "layer_types": kinds}, complete=True)
    assert model.layers == 1
    assert "3 of 4 layers have no softmax (linear_attention): not counted" in model.notes


@pytest.mark.parametrize(
    ("config", "rotated"),
    [
        ({"model_type": "phi", "partial_rotary_factor": 0.25, **TINY, "num_attention_heads": 2}, 6),
        ({"model_type": "phi", **TINY, "num_attention_heads": 2}, 12),  # transformers' default
        ({"model_type": "gpt_neox", "rotary_pct": 1.0, **TINY}, 8),
        ({"model_type": "gpt_neox", "rotary_pct": 0.375, **TINY}, 4),  # 3 channels are rotated in pairs
        ({"model_type": "gpt_neox", "rotary_pct": 0.0, **TINY}, None),
        ({"model_type": "gptj", **GPT, "rotary_dim": 6}, 6),
        ({"model_type": "gptj", **GPT, "rotary_dim": None}, 8),
        ({"model_type": "gptj", **GPT}, 8),  # the default of 64 is more than the head has
        ({"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}, **GROUPED}, 4),
        ({"model_type": "phi3", "rope_scaling": {"partial_rotary_factor": 0.75, "type": "x"}, **GROUPED}, 6),
    ],
    ids=str,
)
def test_the_channels_that_rope_rotates_are_read(config, rotated):
    model = read_hf_config(config, complete="rope_scaling" in config)
    positions = model.config.positions
    assert (None if positions is None else positions.rotary_dim) == rotated
    default = config["model_type"] == "phi" and "partial_rotary_factor" not in config
    assert any("partial_rotary_factor 0.5" in note for note in model.notes) == default


def test_the_channels_that_rope_rotates_differ_by_type_of_layer():
    types = ["sliding_attention", "full_attention"]
    nested = {"full_attention": {"partial_rotary_factor": 0.25}, "sliding_attention": {"rope_theta": 1e4}}
    config = {"model_type": "gemma3_text", **GROUPED, "head_dim": 16, "sliding_window": 9, "layer_types": types}
    model = read_hf_config({**config, "attention_bias": False, "rope_parameters": nested}, complete=True)
    assert {group.config.window: group.config.positions.rotary_dim for group in model.groups} == {9: 16, None: 4}


def test_rotated_channels_that_are_no_share_or_missing_are_refused():
    for share in (1.5, -0.5, "half", True):
        with pytest.raises(OptionError, match=f"must be from 0 to 1, got {share!r}"):
            read_hf_config({"model_type": "phi", "partial_rotary_factor": share, **TINY}, complete=True)
    with pytest.raises(OptionError, match=r"rotary_dim must be a positive integer, got 2.5"):
        read_hf_config({"model_type": "gptj", "rotary_dim": 2.5, **GPT}, complete=True)
    with pytest.raises(
        OptionError,
        match="must set the share or number of channels that RoPE rotates",
    ):
        read_hf_config({"model_type": "phi", **TINY}, complete=True)


EIGHT = {**GROUPED, "num_hidden_layers": 8, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SOME_ROTARY: dict[str, dict[str, Any]] = {
    "smollm3": EIGHT,
    "smollm3, listed": {**EIGHT, "no_rope_layers": [1, 0, 0, 1, 1, 0, 1, 1]},
    "smollm3, interval": {**EIGHT, "no_rope_layer_interval": 3},
    "cohere2": EIGHT,
    "cohere2, without windows": {**EIGHT, "layer_types": ["full_attention"] * 8},
    "cohere2_moe": {**EIGHT, **EXPERTS, "first_k_dense_replace": 0},
    "cohere2_moe, dense prefix": {
        **EIGHT, **EXPERTS, "layer_types": ["full_attention", "full_attention", *["sliding_attention"] * 6],
        "mlp_layer_types": ["dense", *["sparse"] * 7],
    },
    "exaone4": EIGHT,
    "exaone4, without windows": {**EIGHT, "sliding_window": None, "layer_types": ["full_attention"] * 8},
    "exaone_moe": {**EIGHT, **EXPERTS},
    "flint": {**EIGHT, **EXPERTS},
    "kolibri1": {**EIGHT, **EXPERTS},
    "granite_swa": {**EIGHT, "layer_rope_theta": [1e4, 0, 1e4, 1e4, 0, 0, 1e6, 1e4]},
    "granitemoe_swa": {**EIGHT, "num_local_experts": 4, "layer_rope_theta": [0, *[1e4] * 7]},
    "falcon, alibi": {**TINY, "multi_query": True, "alibi": True},
    "falcon": {**TINY, "multi_query": True},
}  # fmt: skip


@pytest.mark.parametrize("case", [case for case in SOME_ROTARY if config_class(case.split(",")[0]) is not None])
def test_rope_is_counted_in_the_layers_that_transformers_rotates(case, monkeypatch):
    config = config_class(name := case.split(",")[0])(**SOME_ROTARY[case])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    running: list[int] = []
    rotated: set[int] = set()
    for module in model.modules():
        if (index := getattr(module, "layer_idx", None)) is not None:
            module.register_forward_pre_hook(lambda *_, index=index: running.append(index))
    code = sys.modules[type(model).__module__]
    rotate = code.apply_rotary_pos_emb

    def recorded(*args: Any, **options: Any) -> Any:
        rotated.add(running[-1])
        return rotate(*args, **options)

    monkeypatch.setattr(code, "apply_rotary_pos_emb", recorded)
    with torch.no_grad():
        model(torch.randint(3, 31, (1, 9)))
    layout = read_hf_config({"model_type": name, **SOME_ROTARY[case]}, by_layer=True, causal=True)
    assert {index for index, group in enumerate(layout.groups) if group.config.positions is not None} == rotated
    assert not any("RoPE" in note for note in layout.notes)


def test_lists_of_layers_with_rope_are_checked_and_layers_without_need_no_time_for_it():
    config = {"model_type": "smollm3", "attention_bias": False, **GROUPED}
    with pytest.raises(OptionError, match="no_rope_layers must have one entry for each of the 2 layers, got 3"):
        read_hf_config({**config, "no_rope_layers": [1, 0, 1]}, complete=True)
    with pytest.raises(OptionError, match=r"must contain no_rope_layers \(1 for each layer"):
        read_hf_config(config, complete=True)
    with pytest.raises(OptionError, match="all latent attention layers must have RoPE"):
        read_hf_config({**config, **LATENT, "no_rope_layers": [1, 0]}, complete=True)
    nested = {"full_attention": None, "sliding_attention": {"rope_theta": 1e4}}
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "rope_parameters": nested}
    model = read_hf_config({"model_type": "gemma3_text", "attention_bias": False, **GROUPED, **types}, complete=True)
    assert {group.config.window: group.config.positions is None for group in model.groups} == {9: False, None: True}
    all_layers, one = (
        polyhead.plan({**config, "no_rope_layers": layers}, context=50, phases=["training"])["training"]
        for layers in ([1, 1], [1, 0])
    )
    assert one.flops == all_layers.flops  # of matrix products
    assert one.total_bytes < all_layers.total_bytes
    assert one.fused.tables == all_layers.fused.tables


@pytest.mark.parametrize(
    ("name", "kind", "is_rotary"), [("esm", "rotary", True), ("esm", "absolute", False), ("granitex", "nope", False)]
)
def test_the_kind_of_positions_of_another_family_is_read(name, kind, is_rotary):
    config = {"model_type": name, "position_embedding_type": kind, "rope_theta": 1e4, **TINY}
    if kind == "rotary":
        del config["rope_theta"]
    model = read_hf_config(config, complete=True, causal=False)
    assert (model.config.positions is not None) == is_rotary


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "NVFP4"),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": None, "config_groups": {"group_0": {}}},
            "compressed",
        ),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, None),
        ({"kv_cache_quant_algo": "FP8"}, None),
    ],
)
def test_weights_of_quantised_checkpoints_are_counted_with_a_note(quantization, method):
    found = {**TINY, "model_type": "llama", "attention_bias": False, "quantization_config": quantization}
    notes = [x for x in read_hf_config(found, complete=True).notes if "quantised" in x]
    assert len(notes) == (method is not None)
    assert method is None or f"weights quantised by {method}" in notes[0]


def test_numbers_are_those_that_the_config_names():
    found = {**GROUPED, "model_type": "llama", "attention_bias": False, "torch_dtype": "bfloat16"}
    model = read_hf_config(found, complete=True)
    assert (model.dtype, model.cache_dtype, model.context) == (torch.bfloat16, None, 64)
    fp8 = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert read_hf_config({**found, "quantization_config": fp8}).cache_dtype is torch.float8_e4m3fn
    assert read_hf_config({**found, "quantization_config": {"kv_cache_quant_algo": "FP8"}}).cache_dtype.itemsize == 1


@pytest.mark.parametrize(("kind", "dtype"), [("float", torch.float8_e4m3fn), ("int", torch.int8)])
def test_a_cache_of_eight_bits_is_read_and_of_no_other_width(kind, dtype):
    found = {**GROUPED, "model_type": "llama", "attention_bias": False}

    def read(scheme: Any) -> ModelLayout:
        return read_hf_config({**found, "quantization_config": {"kv_cache_scheme": scheme}}, complete=True)

    assert read({"num_bits": 8, "type": kind}).cache_dtype is dtype
    assert read(None).cache_dtype is None
    for half in ({"num_bits": 8}, {"type": kind}, {"num_bits": 8, "type": [kind]}, "fp8"):
        with pytest.raises(OptionError, match="kv_cache_scheme must have num_bits 8"):
            read(half)
    with pytest.raises(OptionError, match=rf"kv_cache_scheme must have num_bits 8 .*got 4 and '{kind}'"):
        read({"num_bits": 4, "type": kind})
    with pytest.raises(OptionError, match="kv_cache_quant_algo must be FP8 or INT8, got 'NVFP4'"):
        read_hf_config({**found, "quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, complete=True)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "electra"])
def test_an_encoder_that_is_made_a_decoder_is_causal(family):
    found = {**TINY, "model_type": family}
    assert not read_hf_config(found, complete=True).config.causal
    assert not read_hf_config({**found, "is_decoder": False}, complete=True).config.causal
    assert read_hf_config({**found, "is_decoder": True}, complete=True).config.causal


def test_an_encoder_whose_code_has_no_decoder_stays_one():
    assert not read_hf_config({**ALL["distilbert"], "is_decoder": True}, complete=True).config.causal


def test_the_longest_context_is_transformers_own_where_the_file_leaves_it_out():
    pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 7, "sliding_window": 1024}
    model = read_hf_config({"model_type": "gemma3", "text_config": text, "transformers_version": "4.50.0"})
    assert model.context == 131072
    assert any("defaults of transformers" in note and "max_position_embeddings 131072" in note for note in model.notes)
    assert read_hf_config({**TINY, "model_type": "bert", "max_position_embeddings": None}).context is None


CHATGLM = {"model_type": "chatglm", "hidden_size": 48, "num_attention_heads": 6, "num_layers": 2, "kv_channels": 10}


def test_head_dim_as_cpm_ant_says_it():
    model = read_hf_config({**TINY, "model_type": "cpmant", "dim_head": 5}, causal=True, complete=True)
    assert model.config.layout.head_dim == 5


def test_key_heads_as_chatglm_says_them():
    shared = {**CHATGLM, "multi_query_attention": True, "multi_query_group_num": 2}
    model = read_hf_config(shared, causal=True)
    assert (model.config.layout.num_kv_heads, model.config.layout.head_dim) == (2, 10)
    assert not [note for note in model.notes if "ignored fields" in note]
    own = read_hf_config({**shared, "multi_query_attention": False}, causal=True)
    assert own.config.layout.num_kv_heads == 6
    for half in ({"multi_query_group_num": 2}, {"multi_query_attention": True}):
        with pytest.raises(OptionError, match="must be set together"):
            read_hf_config({**CHATGLM, **half}, causal=True)


def test_the_width_of_a_head_as_t5_says_it():
    found = {"model_type": "t5", "d_model": 48, "num_heads": 6, "num_layers": 2, "d_kv": 10}
    model = read_hf_config({**found, "is_encoder_decoder": False}, causal=False)
    assert model.config.layout.head_dim == 10


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            {"model_type": "mpt", "attn_config": {"kv_n_heads": 2}},
            r"attn_config\.kv_n_heads must be null or 6, .*; got 2",
        ),
        ({"model_type": "mpt", "attn_config": {"attn_type": "grouped_query_attention"}}, r"attn_config\.attn_type"),
        ({"model_type": "mpt", "attn_config": {"qk_ln": True}}, r"attn_config\.qk_ln"),
        ({"model_type": "nemotron-nas", "block_configs": [{"attention": {"no_op": True}}]}, "block_configs means"),
        (
            {"model_type": "hunyuan", "use_cla": True, "cla_share_factor": 2},
            "use_cla means cross-layer sharing of the KV cache",
        ),
        ({"model_type": "hunyuan", "cla_share_factor": 2}, "cla_share_factor means .*got 2 alone"),
        ({"model_type": "mllama_text_model", "cross_attention_layers": [1]}, "cross_attention_layers means"),
        ({"model_type": "diffllama", "lambda_std_dev": 0.1}, "lambda_std_dev means .*differential attention"),
    ],
)
def test_fields_of_one_family_alone_are_refused_by_their_names(found, words):
    with pytest.raises(OptionError, match=words):
        read_hf_config({**TINY, **found}, causal=True, complete=True)


def test_a_default_that_means_differential_attention_is_refused():
    with pytest.raises(OptionError, match=r"lambda_std_dev means .*the default of transformers for this family"):
        read_hf_config({**TINY, "model_type": "diffllama"}, causal=True)


def test_fields_that_say_what_is_usual_are_not_refused():
    plain = {**TINY, "model_type": "mpt", "attn_config": {"attn_type": "multihead_attention", "kv_n_heads": 6}}
    assert read_hf_config(plain, causal=True, complete=True).config.layout.num_kv_heads == 6
    apart = {**TINY, "model_type": "hunyuan", "use_cla": False, "cla_share_factor": 2}
    assert read_hf_config(apart, causal=True).layers == 2
    dbrx = {**TINY, "model_type": "dbrx", "attn_config": {"kv_n_heads": 3}}
    assert read_hf_config(dbrx, causal=True, complete=True).config.layout.num_kv_heads == 3


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gemma3n_text", "num_kv_shared_layers=15, the default of transformers"),
        ("jamba", "mamba_d_state=16, the default of transformers"),
        ("mllama_text_model", r"cross_attention_layers=\[3, 8, .*the default of transformers"),
        ("bart", "got an encoder-decoder"),
    ],
)
def test_what_only_transformers_knows_of_is_refused_as_well(family, words):
    pytest.importorskip("transformers")
    with pytest.raises(OptionError, match=words):
        read_hf_config({**GROUPED, "model_type": family}, causal=True)


def test_a_family_that_nobody_read_is_noted_and_must_say_who_looks_ahead():
    found = {**GROUPED, "model_type": "brand_new", "attention_temperature_table": [1], "attention_dropout": 0.1}
    with pytest.raises(OptionError, match="must imply whether attention is causal, got a config of brand_new"):
        read_hf_config(found)
    model = read_hf_config(found, causal=True)
    assert model.config == MultiHeadConfig(48, 6, num_kv_heads=2, bias=False, causal=True)
    assert any("brand_new is not among the known families" in note for note in model.notes)
    assert "ignored fields that may concern attention: attention_temperature_table" in model.notes
    assert not read_hf_config({**found, "architectures": ["BrandNewForMaskedLM"]}).config.causal
    assert read_hf_config({**found, "architectures": ["BrandNewForCausalLM"]}).config.causal


def test_a_family_that_nobody_read_is_held_to_what_transformers_builds():
    pytest.importorskip("transformers")
    same = read_hf_config({**GROUPED, "model_type": "olmo2"}, causal=True)
    assert any("its projections match what transformers builds" in note for note in same.notes)
    assert estimate_cost(same.config, Workload.forward(1)).parameters == 48 * (2 * 48 + 2 * 16)
    with pytest.raises(OptionError, match=r"has 9,216 weights per layer, but transformers builds 16,128"):
        read_hf_config({**TINY, "model_type": "longformer"}, causal=False)  # queries, keys and values of global tokens


def test_of_a_flat_config_that_also_sees_the_layers_of_text_are_compared():
    pytest.importorskip("transformers")
    model = read_hf_config({**GROUPED, "model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 32}}, causal=True)
    assert model.config.layout.num_kv_heads == 2
    assert any("its projections match what transformers builds" in note for note in model.notes)


def test_a_model_that_cannot_be_built_is_taken_from_its_fields():
    pytest.importorskip("transformers")
    small = {name: value for name, value in GROUPED.items() if name != "pad_token_id"}  # beyond the words it has
    model = read_hf_config({**small, "model_type": "glm4"}, causal=True)
    assert any("its projections are read from the common field names" in note for note in model.notes)


def test_norms_of_latents_are_not_reported_as_left_out():
    latent = read_hf_config({**TINY, **LATENT, "model_type": "brand_new"}, causal=True)
    assert any(note.endswith("and parameters of biases are not counted") for note in latent.notes)
    plain = read_hf_config({**TINY, "model_type": "brand_new"}, causal=True)
    assert any(note.endswith("and parameters of biases and norms are not counted") for note in plain.notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 7, "hidden_size": 256}, r"refuses it: .*256\) is not a multiple .*\(7\)$"),
        ({"head_dim": 11}, "refuses it: RoPE requires an even rotary dimension"),
    ],
)
def test_why_transformers_refused_a_config_is_passed_on(change, words):
    pytest.importorskip("transformers")
    found = {**TINY, "model_type": "llama", **change}
    with pytest.raises(OptionError, match=words) as caught:
        read_hf_config(found)
    assert "install" not in str(caught.value)


def test_a_config_that_transformers_refuses_and_that_says_all_itself_is_noted():
    pytest.importorskip("transformers")
    model = read_hf_config({**GROUPED, "model_type": "llama", "attention_bias": False, "head_dim": 11})
    assert model.config.layout.head_dim == 11
    assert any(note.startswith("transformers refuses this config, so no defaults were used") for note in model.notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": None}, "a config must contain its number of heads"),
        ({"num_attention_heads": 0}, "number of heads must be a positive integer, got 0"),
        ({"num_hidden_layers": 10**30}, "a model may have at most 100,000 layers"),
        ({"text_config": "none", "head_dim": -1}, "head_dim must be a positive integer, got -1"),
        ({"sliding_window": 5, "max_window_layers": "x"}, "max_window_layers must be a positive integer, got 'x'"),
        ({"hidden_size": None}, "a config must contain its width"),
        ({"num_hidden_layers": None}, "a config must contain its number of layers"),
        ({"num_attention_heads": -6}, "number of heads must be a positive integer, got -6"),
        ({"head_dim": 2.5}, "head_dim must be a positive integer, got 2.5"),
        ({"num_key_value_heads": [2, 1]}, r"got one per layer: \[2, 1\]"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads means layers with different numbers of heads"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers means cross-layer sharing of the KV cache"),
        ({"state_size": 128}, "state_size means layers without softmax attention"),
        ({"is_encoder_decoder": True}, "got an encoder-decoder"),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"kv_lora_rank": 8}, "got a config without qk_nope_head_dim, qk_rope_head_dim, v_head_dim"),
    ],
)
def test_what_is_missing_or_cannot_be_counted_is_named(change, words):
    found = {**GROUPED, "model_type": "llama", "attention_bias": False, **change}
    with pytest.raises(OptionError, match=words):
        read_hf_config(found)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ShapeError, match="got 48 and 7"):
        read_hf_config(
            {**TINY, "model_type": "llama", "attention_bias": False, "num_attention_heads": 7}, complete=True
        )


def test_an_unknown_bias_is_required():
    with pytest.raises(OptionError, match="attention_bias must be true or false for this model, got None"):
        read_hf_config({**GROUPED, "model_type": "llama"}, complete=True)


def test_the_text_part_of_a_model_that_sees_is_counted():
    text = {**GROUPED, "model_type": "llama", "attention_bias": False}
    model = read_hf_config({"model_type": "pixels", "text_config": text, "vision_config": {}}, complete=True)
    assert model.config.layout.num_heads == 6
    assert "only the text_config of pixels is counted" in model.notes


def test_a_config_that_transformers_wrote_leaves_its_defaults_out():
    transformers = pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 7, "sliding_window": 1024}
    whole = {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16", "transformers_version": "4.50.0"}
    model = read_hf_config(whole)
    usual = transformers.AutoConfig.for_model("gemma3_text")
    assert model.config.layout.num_heads == usual.num_attention_heads
    assert model.config.layout.head_dim == usual.head_dim
    assert [(group.config.window, group.layers) for group in model.groups] == [(1024, 6), (None, 1)]
    assert model.dtype is torch.bfloat16
    assert any("defaults of transformers" in note and "num_attention_heads 8" in note for note in model.notes)
    with pytest.raises(OptionError, match="a config must contain its number of heads"):
        read_hf_config({name: value for name, value in whole.items() if name != "transformers_version"})


# ---- by whatever names a layout


def test_a_layout_by_file_folder_dictionary_and_value(tmp_path):
    ours = MultiHeadConfig(24, 6, num_kv_heads=2, causal=True)
    theirs = {**GROUPED, "model_type": "llama", "attention_bias": False}
    (tmp_path / "ours.json").write_text(ours.to_json(), encoding="utf-8")
    folder = tmp_path / "small-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(theirs), encoding="utf-8")
    assert read_layout(ours, layers=3).groups[0].layers == 3
    assert read_layout(tmp_path / "ours.json", layers=3) == ModelLayout.of(ours, 3, name="ours")
    assert read_layout(str(folder)).name == "small-llama"
    assert read_layout(folder / "config.json").groups == read_layout(theirs).groups
    model = read_layout(folder)
    (tmp_path / "again.json").write_text(model.to_json(), encoding="utf-8")
    assert read_layout(tmp_path / "again.json") == model
    with pytest.raises(OptionError, match="got layers 3 as well"):
        read_layout(folder, layers=3)


def test_the_requested_mask_is_used_whatever_names_the_layout():
    ours = MultiHeadConfig(24, 6, num_kv_heads=2, causal=True, positions=RotaryConfig())
    both = ModelLayout("both", (LayerGroup(ours, 2), LayerGroup(MultiHeadConfig(24, 4), 3)))
    theirs = {**GROUPED, "model_type": "llama", "attention_bias": False}
    for source in ("llama3.1-8b", "deepseek-v3", ours, ours.to_dict(), both.to_dict(), theirs):
        model = read_layout(source, causal=False)
        assert not any(group.config.causal for group in model.groups)
        assert any(note.endswith("counted as bidirectional, as requested") for note in model.notes)
    for source in ("bert-base", MultiHeadConfig(24, 6), both.to_dict(), {**TINY, "model_type": "bert"}):
        model = read_layout(source, causal=True)
        assert all(group.config.causal for group in model.groups)
        assert any(note.endswith("counted as causal, as requested") for note in model.notes)
    assert read_layout(ours.to_dict(), causal=False).config == dataclasses.replace(ours, causal=False)
    assert read_layout("llama3.1-8b", causal=True) == read_layout("llama3.1-8b")
    assert read_layout("bert-base", causal=False) == read_layout("bert-base")


@pytest.mark.parametrize("source", ["mistral-7b", MultiHeadConfig(24, 6, causal=True, window=5).to_dict()])
def test_a_window_of_layers_that_look_both_ways_is_refused(source):
    with pytest.raises(OptionError, match="a window needs causal layers, got a window of"):
        read_layout(source, causal=False)


def test_a_config_without_a_causal_edge_is_left_as_it_is():
    @dataclasses.dataclass(frozen=True)
    class Edgeless(AttentionConfig):
        def build(self, **options: Any) -> Any:
            raise NotImplementedError

        @classmethod
        def of(cls, layer: Any) -> Any:
            raise NotImplementedError

    assert read_layout(Edgeless()).config == Edgeless()
    with pytest.raises(OptionError, match="Edgeless has no field `causal`, got causal True"):
        read_layout(Edgeless(), causal=True)


PLAIN = {"kind": "multi_head", "embed_dim": 24, "num_heads": 6}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": 3}, "groups and notes must be lists, got groups 3"),
        ({"groups": []}, "a model must have at least one attention layer"),
        ({"groups": [3]}, "group 0 must be an object with layers and config, got 3"),
        (
            {"groups": [{"layers": 2, "config": PLAIN}, {"layers": 2}]},
            "group 1 must be an object with layers and config, got {'layers': 2}",
        ),
        ({"groups": [{"layers": "2", "config": PLAIN}]}, "layers must be a positive integer, got '2'"),
        ({"groups": [{"layers": 2, "config": 7}]}, "must be a dictionary with a kind, got 7"),
        ({"context": "long"}, "context must be a positive integer or null, got 'long'"),
        ({"other_parameters": -1}, "other_parameters must be a non-negative integer or null, got -1"),
        ({"notes": 3}, "got groups .* and notes 3"),
        ({"dtype": "float12"}, "got 'float12'"),
    ],
)
def test_a_layout_of_groups_that_is_none_is_refused_with_what_it_lacks(change, words):
    with pytest.raises(OptionError, match=words):
        read_layout({"name": "x", "groups": [{"layers": 2, "config": PLAIN}], **change})


def test_what_is_no_layout_is_refused_with_what_would_be(tmp_path):
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(OptionError, match=r"list\.json: it contains a list"):
        read_layout(tmp_path / "list.json")
    with pytest.raises(OptionError, match="a config must be a JSON file, got"):
        read_layout(tmp_path / "broken.json")
    with pytest.raises(OptionError, match=r"must contain a config\.json"):
        read_layout(tmp_path)
    with pytest.raises(OptionError, match="there is no such file or folder"):
        read_layout("./nowhere/at/all")


def test_sizes_make_a_layout():
    model = from_sizes(512, 8, kv_heads=2, head_dim=128, layers=6, window=64)
    assert model.config == MultiHeadConfig(512, 8, num_kv_heads=2, head_dim=128, causal=True, window=64, bias=False)
    assert (model.layers, model.name) == (6, "8/2x128 at 512")
    with pytest.raises(ShapeError, match="embed_dim must be at least 1, got -512"):
        from_sizes(-512, 8)
    with pytest.raises(OptionError, match="layers must be a positive integer, got 0"):
        from_sizes(512, 8, layers=0)


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_are_complete(name):
    model = known_model(name)
    assert model.notes == ()
    assert model == read_layout(name)


def test_known_models_have_the_sizes_that_were_published():
    parameters = {
        "gpt3-175b": 96 * (4 * 12288**2 + 4 * 12288),
        "llama3.1-8b": 32 * (2 * 4096**2 + 2 * 4096 * 1024),
        "bert-base": 12 * (4 * 768**2 + 4 * 768),
    }
    for name, expected in parameters.items():
        model = known_model(name)
        found = sum(
            group.layers * estimate_cost(group.config, Workload.forward(1)).parameters for group in model.groups
        )
        assert found == expected
    v3 = known_model("deepseek-v3").config
    assert isinstance(v3, LatentConfig)
    # 70.3 KB a token over 61 layers in 16 bits, as DeepSeek-AI and others report it.
    assert 61 * estimate_cost(v3, Workload.decode(1)).cache_bytes_per_token == 61 * 576 * 2 == 70272


def test_dtypes_by_name():
    assert named_dtype("fp8") is torch.float8_e4m3fn
    assert named_dtype("int8") is torch.int8
    with pytest.raises(OptionError, match="got 'float12'"):
        named_dtype("float12")


# Sizes of published configs that do not concern attention.
REST = {
    "bert-base": ("BertModel", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "llama3.1-8b": ("LlamaForCausalLM", {"intermediate_size": 14336, "vocab_size": 128256}),
    "qwen3-0.6b": (
        "Qwen3ForCausalLM",
        {"intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True},
    ),
    "gemma2-9b": ("Gemma2ForCausalLM", {"intermediate_size": 14336, "vocab_size": 256000}),
    "gpt-oss-20b": (
        "GptOssForCausalLM",
        {"intermediate_size": 2880, "vocab_size": 201088, "num_local_experts": 32},
    ),
}


@pytest.mark.parametrize("name", REST)
def test_known_models_have_the_parameters_that_transformers_builds(name):
    kind, sizes = REST[name]
    model_class = getattr(transformers, kind)
    content, parameters = known_models._MODELS[name]
    config = model_class.config_class.from_dict({**content, **sizes})
    with torch.device("meta"):
        model = model_class(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == parameters
    layout = known_model(name)
    assert layout.parameters.total + layout.other_parameters == total


def test_a_config_counts_the_parameters_of_the_model_that_it_builds():
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=61
    )
    layout = read_hf_config(config.to_dict())
    total = sum(parameter.numel() for parameter in transformers.LlamaForCausalLM(config).parameters())
    assert layout.other_parameters == total - 3 * 4 * 64 * 64
    assert ModelLayout.from_dict(layout.to_dict()) == layout
    assert read_hf_config(config.to_dict(), complete=True).other_parameters is None


def test_counting_parameters_runs_no_foreign_code_and_is_bounded():
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
              "num_hidden_layers": 2, "attention_bias": False, "intermediate_size": 96, "vocab_size": 61}  # fmt: skip
    expected = read_hf_config(config).other_parameters
    hostile = {"auto_map": {"AutoModelForCausalLM": "foreign.Model", "AutoModel": "foreign.Model"}}
    assert read_hf_config({**config, **hostile}).other_parameters == expected
    with mock.patch("transformers.AutoModelForCausalLM.from_config", side_effect=ValueError) as build:
        read_hf_config({**config, **hostile})
    assert build.call_args.kwargs == {"trust_remote_code": False}
    assert read_hf_config({**config, "num_hidden_layers": 100_000}).other_parameters is None


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("hub cannot be reached", r"not in its cache; use a local config\.json; did you mean llama3\.1-8b\?$"),
        ("no such model", r"no such model; did you mean llama3\.1-8b\?$"),
    ],
)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B"])
def test_a_misspelt_known_model_is_refused_with_its_name(failure, words, name):
    with mock.patch("polyhead.sources.load_errors.describe_failure", side_effect=OptionError(failure)):
        with pytest.raises(OptionError, match=words):
            read_layout(name)
        with pytest.raises(OptionError, match=failure) as caught:
            read_layout("some/other")
    assert "did you mean" not in str(caught.value)


def test_edited_layers_of_several_kinds_keep_theirs(tmp_path):
    config = {"model_type": "smollm3", "attention_bias": False, **GROUPED, "no_rope_layers": [0, 1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    heads = {"embed_dim": 48, "head_dim": 8}
    layers = {"model.layers.0.self_attn": {**heads, "num_heads": 4, "num_kv_heads": 2}}
    edits = tmp_path / "polyhead.json"
    edits.write_text(json.dumps({"form": "uneven", "layers": layers}))
    with pytest.raises(OptionError, match=r"all layers .* must be listed, got .* with 2 layers.* and 1 in polyhead"):
        read_layout(tmp_path)
    layers["model.layers.1.self_attn"] = {**heads, "num_heads": 5, "num_kv_heads": 5}
    edits.write_text(json.dumps({"form": "uneven", "layers": layers}))
    groups = [group.config for group in read_layout(tmp_path).groups]
    assert [(x.num_heads, x.num_kv_heads, x.positions is None) for x in groups] == [(4, 2, True), (5, 5, False)]
    edits.write_text(json.dumps({"form": "padded"}))
    (tmp_path / "config.json").write_text(json.dumps({**config, "no_rope_layers": [1, 1]}))
    assert [group.layers for group in read_layout(tmp_path).groups] == [2]
