"""The gradients of `session.statistics` agree with those of materialised weights, in every integration."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import polyhead
from polyhead import Mask
from polyhead.layers.positions import Rotary, T5Bias
from polyhead.layers.torch_compat import MultiheadAttention
from tests.error_budget import DRAWS, Compared, assert_draws_within_error_budget
from tests.integrations.huggingface import models
from tests.observation.entropy_from_weights import (
    assert_close,
    assert_same_gradients,
    entropy,
    gradients,
    head_means,
    softmax_of_its_input,
)

FAMILIES = {family.name: family for family in models.FAMILIES}
BATCH, TOKENS, WIDTH, HEADS = 3, 11, 24, 4
LENGTHS = (11, 4, 7)
ALBERT = {
    "vocab_size": models.VOCABULARY, "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip


def padded(length: int = models.TOKENS, side: str = "right") -> torch.Tensor:
    """[batch, tokens], 0 for padding."""
    index, lengths = torch.arange(length), torch.tensor([length, 9, 4])[:, None]
    return (index < lengths if side == "right" else index >= length - lengths).long()


def build(name: str) -> nn.Module:
    if name != "albert":
        return models.build(FAMILIES[name])
    torch.manual_seed(0)
    config = transformers.AlbertConfig(**ALBERT)
    return transformers.AutoModel.from_config(config, attn_implementation="eager").double().eval()


CASES = {
    "llama": ("llama", {}, ("attentions",)),
    "llama, padded on the left": ("llama", {"attention_mask": padded(side="left")}, ("attentions",)),
    "llama, padded on the right": ("llama", {"attention_mask": padded()}, ("attentions",)),
    "bert, padded": ("bert", {"attention_mask": padded()}, ("attentions",)),
    "a window and a softcap": ("gemma2", {}, ("attentions",)),
    "learned sinks": ("gpt_oss", {}, ("attentions",)),
    "latents": ("deepseek_v3", {}, ("attentions",)),
    "a learned bias": ("t5", {}, ("encoder_attentions", "decoder_attentions", "cross_attentions")),
    "an encoder and a decoder": ("bart", {"attention_mask": padded()},
                                 ("encoder_attentions", "decoder_attentions", "cross_attentions")),
    "images": ("vit", {}, ("attentions",)),
    "one module, called by every layer": ("albert", {"attention_mask": padded()}, ("attentions",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_transformers_models_have_the_gradient_of_eager_weights(case):
    name, options, lists = CASES[case]
    model = build(name)
    inputs = {"input_ids": models.tokens()} if name == "albert" else models.inputs(FAMILIES[name])
    with softmax_of_its_input():
        eager = model(**inputs, **options, output_attentions=True)
    mask = options.get("attention_mask")
    real = None if mask is None else mask.bool()
    sinks = name == "gpt_oss"
    expected = []
    for kind in lists:
        rows = real if kind in ("attentions", "encoder_attentions") else None
        layers = [head_means(weights, rows, learned_sinks=sinks) for weights in eager[kind]]
        expected += [torch.stack(layers).mean(0)] if name == "albert" else layers
    with polyhead.observe(model, statistics="entropy", keep_statistics=True) as session:
        model(**inputs, **options)
        mean = session.statistics.mean("entropy")
        assert_close(session.profile["entropy"], mean.detach())
        kept = gradients(mean, model)
    assert_close(mean, torch.cat(expected))
    assert_same_gradients(kept, gradients(torch.cat(expected), model))


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def disturbed(layer: nn.Module) -> nn.Module:
    """With weights that make attention far from uniform, and no parameter at a value of its own."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3)
    return layer


OURS = {
    "plain": lambda: polyhead.MultiHeadAttention(WIDTH, HEADS, causal=True),
    "grouped keys": lambda: polyhead.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, causal=True),
    "uneven groups": lambda: polyhead.MultiHeadAttention(WIDTH, HEADS, key_heads=(0, 0, 0, 1), causal=True),
    "sinks": lambda: polyhead.MultiHeadAttention(WIDTH, HEADS, sinks=True),
    "latent, expanded": lambda: polyhead.LatentAttention(WIDTH, HEADS, kv_lora_rank=6, causal=True, form="expanded"),
    "latent, absorbed": lambda: polyhead.LatentAttention(WIDTH, HEADS, kv_lora_rank=6, causal=True, form="absorbed"),
    "groups and an MLP": lambda: polyhead.layers.variants.GroupedHeads(WIDTH, HEADS, num_groups=2, causal=True),
    "mixed": lambda: polyhead.layers.variants.HeadMix(WIDTH, HEADS, causal=True),
    "differential": lambda: polyhead.layers.variants.DifferentialAttention(WIDTH, HEADS, causal=True),
    "collaborative": lambda: polyhead.layers.variants.CollaborativeAttention(WIDTH, HEADS, causal=True),
    "talking": lambda: polyhead.layers.variants.TalkingHeads(WIDTH, HEADS, causal=True),
    "routed": lambda: polyhead.layers.variants.RoutedHeads(WIDTH, HEADS, top_k=2, causal=True),
    "routed, with keys of their own": lambda: polyhead.layers.variants.RoutedHeads(
        WIDTH, HEADS, shape="full", top_k=2, causal=True
    ),
    "routed by their probability": lambda: polyhead.layers.variants.RoutedHeads(WIDTH, HEADS, top_p=0.6, causal=True),
    "learned biases": lambda: polyhead.MultiHeadAttention(WIDTH, HEADS, positions=T5Bias(HEADS)),
    "rotated": lambda: polyhead.MultiHeadAttention(WIDTH, HEADS, positions=Rotary(WIDTH // HEADS), causal=True),
}


@pytest.mark.parametrize("kind", OURS)
def test_polyhead_layers_have_the_gradient_of_the_formula(kind):
    layer = disturbed(OURS[kind]().double())
    x, mask = noise(BATCH, TOKENS, WIDTH), Mask.lengths(LENGTHS)
    # Chosen rows have no matrix of weights; what the formula gives of them is tested against one by itself.
    has_weights = kind not in ("routed, with keys of their own", "routed by their probability")
    names = ("visible_keys",) if has_weights else ("visible_keys", "entropy")
    plain = layer(x, mask=mask, weights=has_weights, statistics=names, backend="reference")
    rows = entropy(plain.weights, learned_sinks=kind == "sinks") if has_weights else plain.statistics.entropy
    assert rows.requires_grad  # [batch, heads, queries]
    seen = plain.statistics.visible_keys > 0  # of routed heads, those of the tokens that chose them
    expected = torch.stack([rows[:, head][seen[:, head]].mean() for head in range(rows.shape[1])])
    with polyhead.observe(layer, statistics="entropy", keep_statistics=True) as session:
        result = layer(x, mask=mask)
        assert result.statistics is None  # the caller has requested none
        mean = session.statistics.mean("entropy")
        (site,) = session.statistics.values()
        assert torch.equal(site.tokens, seen)
        assert_close(site.entropy[seen], rows[seen])
    assert_close(mean, expected)
    assert_same_gradients(gradients(mean, layer), gradients(expected, layer))


class Two(nn.Module):
    """Two layers of PyTorch's kind; the second reads what the first writes."""

    def __init__(self, kind: type[nn.MultiheadAttention]) -> None:
        super().__init__()
        self.first, self.second = (kind(WIDTH, HEADS, batch_first=True).double() for _ in range(2))

    def forward(self, x: torch.Tensor, padding: torch.Tensor, weights: bool = False):
        found = []
        for layer in (self.first, self.second):
            out, seen = layer(x, x, x, key_padding_mask=padding, need_weights=weights, average_attn_weights=False)
            found.append(seen)
            x = x + out
        return found if weights else x


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, MultiheadAttention])
@pytest.mark.parametrize("training", [False, True])
def test_torch_layers_have_the_gradient_of_their_returned_weights(kind, training):
    model = disturbed(Two(kind)).train(training)
    x, real = noise(BATCH, TOKENS, WIDTH), torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
    expected = torch.cat([head_means(weights, real) for weights in model(x, ~real, weights=True)])
    with polyhead.observe(model, statistics="entropy", keep_statistics=True) as session:
        model(x, ~real)
        mean = session.statistics.mean("entropy")
    assert_close(mean, expected)
    assert_same_gradients(gradients(mean, model), gradients(expected, model))


class Handwritten(nn.Module):
    """Attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights: torch.Tensor | None = None

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.input(x).chunk(3, -1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(x)
        self.weights = (query @ key.mT * 0.7).softmax(-1)
        return self.output((self.weights @ value).transpose(1, 2).flatten(2))


class Adapter:
    def __init__(self, detached: bool = False) -> None:
        self.detached = detached

    def watch(self, module, notify):
        def note(module, inputs):
            parts = module.heads(*inputs)
            notify(*(part.detach() if self.detached else part for part in parts), scale=0.7)

        return module.register_forward_pre_hook(note)


def test_modules_with_an_adapter_have_the_gradient_of_their_weights():
    model = disturbed(nn.Sequential(Handwritten(), Handwritten()).double())
    options = {"statistics": "entropy", "keep_statistics": True}
    with polyhead.observe(model, adapters={Handwritten: Adapter()}, **options) as session:
        model(noise(BATCH, TOKENS, WIDTH))
        mean = session.statistics.mean("entropy")
    expected = torch.cat([head_means(layer.weights) for layer in model])
    assert_close(mean, expected)
    assert_same_gradients(gradients(mean, model), gradients(expected, model))
    with polyhead.observe(model, adapters={Handwritten: Adapter(detached=True)}, **options) as session:
        model(noise(BATCH, TOKENS, WIDTH))
        with pytest.raises(polyhead.errors.GradientError, match="got entropy of '0', which does not"):
            session.statistics.mean("entropy")


def test_a_softmax_by_hand_has_the_gradient_of_the_returned_weights():
    config = transformers.BloomConfig(vocab_size=models.VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    model = disturbed(transformers.BloomModel(config).double().eval())
    ids, mask = models.tokens(), padded(side="left")
    with softmax_of_its_input():
        weights = model(ids, attention_mask=mask, output_attentions=True).attentions
        expected = torch.cat([head_means(x, mask.bool()) for x in weights])
        options = {"statistics": ("entropy", "mean_distance"), "keep_statistics": True}
        with polyhead.observe(model, **options) as session:
            output = model(ids, attention_mask=mask)
            assert "attentions" not in output
            mean = session.statistics.mean("entropy")
    assert_close(mean, expected)
    assert_same_gradients(gradients(mean, model), gradients(expected, model))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_float32_gradients_are_within_the_error_budget(name, device):
    exact_model = build(name)
    model = models.build(FAMILIES[name], dtype=torch.float32)
    model.load_state_dict(exact_model.state_dict())
    exact_model.load_state_dict(model.state_dict())  # the same numbers, which float32 can hold
    mask = padded()
    draws = []
    for seed in range(DRAWS):
        inputs = {"input_ids": models.tokens(seed=seed), "attention_mask": mask}
        found = []
        for eager in (exact_model, model.cpu()):
            with softmax_of_its_input():
                weights = eager(**inputs, output_attentions=True).attentions
            found.append(flat(gradients(torch.cat([head_means(x, mask.bool()) for x in weights]), eager)))
        with polyhead.observe(model.to(device), statistics="entropy", keep_statistics=True) as session:
            model(**{key: x.to(device) for key, x in inputs.items()})
            actual = flat(gradients(session.statistics.mean("entropy"), model)).cpu()
        draws.append({"gradients": Compared(actual, *found)})
    assert_draws_within_error_budget(draws, name=name)


def flat(found: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.flatten() for x in found.values()])


NAMES = (
    "entropy", "normalized_entropy", "confidence", "max_logit", "max_abs_logit", "mean_distance", "mean_offset",
    "mean_squared_distance",
    "sink_mass", "self_mass", "previous_mass", "next_mass", "window_mass",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_statistic_has_the_gradient_of_the_formula(name):
    """The means over tokens, of all that can be named, against the whole matrix of weights."""
    layer = disturbed(polyhead.MultiHeadAttention(WIDTH, HEADS, causal=True).double())
    x, mask = noise(BATCH, TOKENS, WIDTH), Mask.lengths(LENGTHS)
    requested = polyhead.Statistics(*(n for n in NAMES if n != "normalized_entropy"), "visible_keys", window=2)
    plain = layer(x, mask=mask, backend="reference", statistics=requested).statistics
    keys = plain.visible_keys
    rows = plain.entropy / keys.clamp_min(2).log() if name == "normalized_entropy" else getattr(plain, name)
    counted = (keys > 1 if name == "normalized_entropy" else keys > 0)[:, 0]
    expected = rows.transpose(0, 1)[:, counted].mean(-1)
    options = {"statistics": polyhead.Statistics(name, window=2) if name != "normalized_entropy" else name}
    with polyhead.observe(layer, keep_statistics=True, **options) as session:
        layer(x, mask=mask)
        mean = session.statistics.mean(name)
        assert_close(session.profile[name], mean.detach(), name)
    assert_close(mean, expected, name)
    if name != "next_mass":  # of which a causal layer has none
        assert_same_gradients(gradients(mean, layer), gradients(expected, layer))
