"""Lazy masks inside compiled, checkpointed and loaded transformers models."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="these tests are about models of transformers")

from transformers import CompileConfig

from tests.integrations.huggingface.compare import assert_same, implementation, result
from tests.integrations.huggingface.models import DECODERS, Family, build, tokens

BY_NAME = {family.name: family for family in DECODERS}
BOTH_MASKS = BY_NAME["qwen2"]  # a layer with a sliding window, and one that sees all earlier tokens


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones_like(tokens())
    mask[1, :6] = 0
    return tokens() * mask, mask


@pytest.mark.slow
def test_a_compiled_decoding_step_takes_the_mask_that_generate_made():
    model = build(BOTH_MASKS, dtype=torch.float32)
    ids, mask = padded()
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4, "min_new_tokens": 4}
    with implementation(model, "eager"):
        expected = model.generate(**options)
    compiled = CompileConfig(backend="eager", fullgraph=True, mode=None, dynamic=None)
    compiled._compile_all_devices = True  # transformers compiles by itself on GPUs alone
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with implementation(model, "polyhead"):
        actual = model.generate(**options, cache_implementation="static", compile_config=compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert torch.equal(actual, expected)


@pytest.mark.slow
def test_a_whole_model_compiles_without_a_break():
    model = build(BOTH_MASKS, dtype=torch.float32)
    ids, mask = padded()
    with torch.no_grad(), implementation(model, "eager"):
        expected = result(model(input_ids=ids, attention_mask=mask, use_cache=False))
    torch._dynamo.reset()
    with torch.no_grad(), implementation(model, "polyhead"):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        actual = result(compiled(input_ids=ids, attention_mask=mask, use_cache=False))
    assert_same(actual, expected, where=mask.bool())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    family: Family = BY_NAME["gemma2"]
    ids, mask = padded()
    found = []
    for checkpointed in (False, True):
        model = build(family, dtype=torch.float32).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with implementation(model, "polyhead"):
            embedded = model.get_input_embeddings()(ids)
            loss = result(model(inputs_embeds=embedded, attention_mask=mask, use_cache=False))[mask.bool()].square()
            loss.mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert_same(found[1], found[0])


def test_a_model_can_be_loaded_with_the_name(tmp_path):
    import transformers

    model = build(BY_NAME["llama"], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    import polyhead.integrations.huggingface

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=polyhead.integrations.huggingface.register()
    )
    assert loaded.config._attn_implementation == "polyhead"
    with torch.no_grad():
        assert_same(result(loaded(tokens())), result(model(tokens())))
