"""The projection matrices of a model's heads, found from activations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polyhead
from polyhead.observation.output_projections import reads_heads
from polyhead.observation.projections import find_projections
from tests.integrations.huggingface import models

FAMILIES = {family.name: family for family in models.FAMILIES}
# What stands between the projection and the attention, so that no matrix says what a query is.
NORMED = {"qwen3", "gemma3_text", "olmo2", "llama4_text"}
COMPOSED = {"deepseek_v3"}  # queries and keys are put together from two layers


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_read(name):
    model = models.build(FAMILIES[name])
    inputs = models.inputs(FAMILIES[name])
    found = find_projections(model, lambda: model(**inputs))
    assert len(found)
    some_query = False
    for site, head_projections in found.items():
        # Latent heads make their values of a latent, of which a matrix from the embedding says nothing.
        assert (head_projections.value is None) == (name == "deepseek_v3"), site
        assert head_projections.output is not None, site
        assert head_projections.output.shape[0] == site.num_heads
        some_query |= head_projections.query is not None and head_projections.key is not None
    if name in COMPOSED:
        assert not some_query
    elif name not in NORMED:
        assert all(x.query is not None and x.key is not None for x in found.values())


def test_llama_has_the_rows_and_columns_of_its_projections():
    model = models.build(FAMILIES["llama"])
    inputs = models.inputs(FAMILIES["llama"])
    found = find_projections(model, lambda: model(**inputs))
    for site, head_projections in found.items():
        module = model.get_submodule(site.name)
        heads, dim = site.num_heads, module.head_dim
        torch.testing.assert_close(
            head_projections.query, module.q_proj.weight.T.unflatten(1, (heads, dim)).transpose(0, 1)
        )
        torch.testing.assert_close(
            head_projections.value, module.v_proj.weight.T.unflatten(1, (-1, dim)).transpose(0, 1)
        )
        torch.testing.assert_close(head_projections.output, module.o_proj.weight.T.unflatten(0, (heads, dim)))


def test_a_scale_that_stands_in_the_query_is_in_its_matrix():
    model = models.build(FAMILIES["whisper"])
    inputs = models.inputs(FAMILIES["whisper"])
    found = find_projections(model, lambda: model(**inputs))
    for site, head_projections in found.items():
        module = model.get_submodule(site.name)
        dim = module.head_dim
        exact = module.q_proj.weight.T.unflatten(1, (-1, dim)).transpose(0, 1) * dim**-0.5
        torch.testing.assert_close(head_projections.query, exact, rtol=1e-4, atol=1e-6)


def test_fused_projections_are_taken_apart():
    model = models.build(FAMILIES["gpt_neox"])
    inputs = models.inputs(FAMILIES["gpt_neox"])
    for site, head_projections in find_projections(model, lambda: model(**inputs)).items():
        fused = model.get_submodule(site.name).query_key_value.weight
        parts = fused.T.unflatten(1, (site.num_heads, 3, -1))  # [in, heads, 3, dim]
        for index, found in enumerate((head_projections.query, head_projections.key, head_projections.value)):
            torch.testing.assert_close(found, parts[:, :, index].transpose(0, 1))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_polyhead_and_torch_layers(kv_heads):
    layer = polyhead.MultiHeadAttention(16, 4, num_kv_heads=kv_heads)
    ((_, head_projections),) = find_projections(layer, lambda: layer(torch.randn(1, 3, 16))).items()
    torch.testing.assert_close(head_projections.query[3], layer.heads[3].query)
    torch.testing.assert_close(head_projections.key[-1], layer.heads[3].key)
    assert head_projections.key.shape[0] == head_projections.value.shape[0] == kv_heads
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(1, 3, 16)
    ((_, head_projections),) = find_projections(theirs, lambda: theirs(x, x, x)).items()
    torch.testing.assert_close(head_projections.query[1], theirs.in_proj_weight[4:8].T)
    torch.testing.assert_close(head_projections.output[1], theirs.out_proj.weight[:, 4:8].T)
    assert theirs.training


def test_partial_projections_are_none():
    """Keys and values of latent heads are made of a latent; heads that are combined have no rows of their own."""
    latent = polyhead.LatentAttention(16, 4, kv_lora_rank=6, form="expanded")
    ((_, head_projections),) = find_projections(latent, lambda: latent(torch.randn(1, 3, 16))).items()
    assert head_projections.key is None
    assert head_projections.value is None
    torch.testing.assert_close(head_projections.output, latent.out_proj.weight.T.unflatten(0, (4, 4)))
    grouped = polyhead.layers.variants.GroupedHeads(16, 4, num_groups=2)
    ((_, head_projections),) = find_projections(grouped, lambda: grouped(torch.randn(1, 3, 16))).items()
    torch.testing.assert_close(head_projections.query[1], grouped.q_proj.weight[4:8].T)
    assert head_projections.output is None


def test_the_mode_of_every_module_is_restored():
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.Dropout(0.1))
    model[1].eval()  # frozen in a model that is being trained
    x = torch.randn(5, 1, 16)
    find_projections(model, lambda: model[0](x, x, x))
    assert [module.training for module in model.modules()] == [True, True, True, False]


def test_an_input_reads_heads_up_to_gates_and_in_their_order():
    heads = torch.randn(2, 3, 5, 7)
    read = heads.transpose(1, 2).flatten(2)  # [batch, tokens, heads * dim]
    gates = torch.tensor([1.5, 0.0, 0.2])[:, None, None]
    assert reads_heads(read, heads)
    assert reads_heads((heads * gates).transpose(1, 2).reshape(10, 21), heads)
    assert not reads_heads(heads.flip(1).transpose(1, 2).flatten(2), heads)
    assert not reads_heads(read.transpose(0, 1), heads)
    assert not reads_heads(torch.zeros_like(read), heads)
    assert not reads_heads(read[..., :14], heads)
