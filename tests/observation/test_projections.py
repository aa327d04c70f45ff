"""The projection matrices of a model's heads, found from activations."""

from __future__ import annotations

import copy

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


class Adapted(nn.Module):
    """A linear layer with an adapter of its own beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.linear, dtype = base, base.weight.dtype
        self.down = nn.Linear(base.in_features, 3, bias=False, dtype=dtype)
        self.up = nn.Linear(3, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x))


class Direct(nn.Module):
    """A linear layer with an adapter that consists of parameters."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.linear, self.delta = base, nn.Parameter(torch.randn_like(base.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x @ self.delta.T


class OnlyDown(nn.Module):
    """A projection with a weight of its own, whose only linear layers are those of the adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight, dtype = base.weight, base.weight.dtype
        self.lora = nn.Sequential(
            nn.Linear(base.in_features, 3, bias=False, dtype=dtype),
            nn.Linear(3, base.out_features, bias=False, dtype=dtype),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.lora(x)


class LowRank(nn.Linear):
    """A linear layer that computes more than its weight and bias, as those of loralib."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.delta = nn.Parameter(torch.randn_like(base.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.delta.T


@pytest.mark.parametrize("adapter", ["plain", "dora", "disabled"])
def test_lora_of_peft_is_part_of_the_output_projection(adapter):
    peft = pytest.importorskip("peft")
    model = models.build(FAMILIES["llama"])
    inputs = models.inputs(FAMILIES["llama"])
    config = peft.LoraConfig(r=3, target_modules=["o_proj"], init_lora_weights=False, use_dora=adapter == "dora")
    wrapped = peft.get_peft_model(model, config).eval()
    if adapter == "disabled":
        wrapped.disable_adapter_layers()
    expected = models.build(FAMILIES["llama"]) if adapter == "disabled" else copy.deepcopy(wrapped).merge_and_unload()
    for site, head_projections in find_projections(wrapped, lambda: wrapped(**inputs)).items():
        weight = expected.get_submodule(site.name.removeprefix("base_model.model.")).o_proj.weight
        if adapter == "dora":
            assert head_projections.output is None
        else:
            torch.testing.assert_close(head_projections.output, weight.T.unflatten(0, (site.num_heads, -1)))


@pytest.mark.parametrize("wrap", [Adapted, Direct, OnlyDown, LowRank])
@pytest.mark.parametrize("projection", ["q_proj", "v_proj", "o_proj"])
def test_a_layer_that_computes_more_than_its_weight_has_no_matrix(projection, wrap):
    model = models.build(FAMILIES["llama"])
    inputs = models.inputs(FAMILIES["llama"])
    for layer in model.model.layers:
        setattr(layer.self_attn, projection, wrap(getattr(layer.self_attn, projection)))
    part = {"q_proj": "query", "v_proj": "value", "o_proj": "output"}[projection]
    found = find_projections(model, lambda: model(**inputs))
    assert [getattr(x, part) for x in found.values()] == [None] * len(found)
    assert all(x.key is not None for x in found.values())


def test_a_layer_of_polyhead_with_an_adapter_has_no_matrices():
    layer = polyhead.MultiHeadAttention(16, 4)
    layer.out_proj = Adapted(layer.out_proj)
    layer.out_proj.weight = layer.out_proj.linear.weight  # as the wrappers of PEFT
    ((_, found),) = find_projections(layer, lambda: layer(torch.randn(1, 3, 16))).items()
    assert found.output is None


class TwoCalls(nn.Module):
    """Two calls of the attention function in one forward, each with projections of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(15, 45) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(15, 15) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for read, write in zip(self.inputs, self.outputs, strict=True):
            query, key, value = (part.unflatten(-1, (3, 5)).transpose(1, 2) for part in read(x).chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(query, key, value)
            x = x + write(y.transpose(1, 2).flatten(2))
        return x


def test_an_adapter_of_a_further_call_in_one_forward_is_no_matrix_either():
    model, x = TwoCalls(), torch.randn(2, 7, 15)
    first, second = find_projections(model, lambda: model(x)).values()
    for found, linear in zip((first, second), model.outputs, strict=True):
        torch.testing.assert_close(found.output, linear.weight.T.unflatten(0, (3, 5)))
    model.outputs = nn.ModuleList(Direct(linear) for linear in model.outputs)
    sites = {site.name: found.output for site, found in find_projections(model, lambda: model(x)).items()}
    assert sites == {"TwoCalls": None, "TwoCalls#2": None}
