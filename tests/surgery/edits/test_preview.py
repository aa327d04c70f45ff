"""Previewed counts equal those of the edited model."""

from __future__ import annotations

import pytest
import torch
import transformers

import polyhead
from polyhead.costs import Workload
from polyhead.costs.layouts.layout_sources import read_layout
from polyhead.errors import OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.masks import Mask
from polyhead.surgery import PruneHeads, apply, find_layers, fingerprint, preview
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build


@pytest.mark.parametrize("name", ["gpt2", "llama", "whisper", "gpt_neox"])
def test_a_preview_counts_what_is_there_afterwards(name):
    model = build(FAMILIES[name])
    layers = find_layers(model)
    edits = [PruneHeads(layers[0].number, (0,), stack=layers[0].stack)]
    before, counted = fingerprint(model), preview(model, edits, work=Workload.forward(13))
    assert fingerprint(model) == before
    size = sum(p.numel() for p in model.parameters())
    apply(model, edits)
    assert size - sum(p.numel() for p in model.parameters()) == counted.before.parameters - counted.after.parameters > 0
    assert counted.before.heads - counted.after.heads == 1
    changed = [x for x in counted.layers if x.before != x.after]
    assert [x.path for x in changed] == [layers[0].path]
    layout = find_layers(model)[0].layout
    in_cache = 0 if ".encoder." in layers[0].path else 2 * layout.num_kv_heads * layout.head_dim * 8
    assert changed[0].after.cache_bytes_per_token == in_cache
    assert (name == "whisper") == (in_cache == 0)
    assert changed[0].after.flops < changed[0].before.flops
    with pytest.raises(OptionError, match="heads 0 to"):
        preview(model, [PruneHeads(0, (9,), stack=layers[0].stack)])


@pytest.mark.parametrize("with_head", [True, False])
def test_the_cache_of_a_model_of_images_and_text_is_that_of_its_decoder(with_head):
    images = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 14, "patch_size": 7}
    text = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 10}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**images),
        text_config=transformers.LlamaConfig(**text, num_key_value_heads=3, intermediate_size=31),
        image_token_index=60,
    )
    kind = transformers.LlavaForConditionalGeneration if with_head else transformers.LlavaModel
    model = kind(config).eval()
    tokens = torch.arange(11)[None]
    with torch.no_grad():
        filled = model(input_ids=tokens, use_cache=True).past_key_values
    stack = next(layer.stack for layer in find_layers(model) if "language_model" in layer.path)
    counted = preview(model, [PruneHeads(0, (0, 1), stack=stack)])
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in filled.layers)
    assert counted.before.cache_bytes_per_token == stored / tokens.numel() == 2 * 2 * 3 * 10 * 4


@pytest.mark.parametrize("name", ["llama", "mistral", "phi3", "qwen2", "gemma3_text", "cohere2", "starcoder2"])
def test_previewed_flops_are_those_of_a_plan(name):
    model = models.build(next(x for x in models.DECODERS if x.name == name))
    counted = preview(model, [PruneHeads(0, (1,))], work=Workload.forward(23))
    planned = polyhead.plan(read_layout(model.config.to_dict(), causal=True), context=23, phases=["prefill"])
    assert counted.before.flops == planned["prefill"].flops.total


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (None, 23 * 23),
        (Mask.causal(), 23 * 24 // 2),
        (Mask.window(5), 5 * 23 - 10),
        (Mask.window(left=3, right=3), 23 * 23),  # all pairs are counted where attention is not causal
    ],
)
def test_flops_of_a_layer_are_those_of_the_pairs_that_its_mask_leaves(mask, pairs):
    layer = MultiHeadAttention(12, 4, bias=False)
    layer.mask = mask
    counted = preview(layer, [PruneHeads(0, (1,))], work=Workload.forward(23)).before
    assert counted.flops == 2 * 23 * 4 * 12 * 12 + 2 * 2 * pairs * 12
