"""Heads masked at the input of W_O, the oracle of pruning; and model outputs as one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers
from tests.integrations.huggingface import models

FAMILIES = {family.name: family for family in models.FAMILIES}
REFUSED = {
    "gpt_oss": "sinks of shape",
    "olmo2": r"q_norm \(\{'q_norm.weight': \[32\]\}\)",
    "deepseek_v3": "no known names and order",
    "llama4_text": "qk_norm",
    "t5": "relative_attention_bias",
}
# Their own code applies rotary positions in float32, whatever the model's dtype.
ROUNDED = ("cohere", "modernbert")
EDITABLE = sorted(set(FAMILIES) - set(REFUSED))


def build(family: models.Family, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a small random model with random biases and norms, so that swapped ones are detected."""
    model = models.build(family, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.25)
    return model


def decoder(
    heads: int = 6,
    kv_heads: int = 2,
    hidden: int = 60,
    head_dim: int = 10,
    *,
    name: str = "llama",
    dtype: torch.dtype = torch.float64,
) -> nn.Module:
    """Build a decoder of a family with these head counts and widths."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": hidden, "head_dim": head_dim}
    return build(models.Family(name, "decoder", {**FAMILIES[name].options, **sizes}), dtype=dtype)


def batches_of_tokens(count: int = 6, length: int = 13) -> list[dict[str, Tensor]]:
    """Return random tokens, four rows per batch."""
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(3, 61, (4, length), generator=generator)} for _ in range(count)]


@contextmanager
def switched_off(model: nn.Module, heads: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Multiply heads, by layer path, by 0 at the input of W_O."""
    with ExitStack() as undo:
        for layer in find_layers(model):
            if layer.path in heads:
                hook = _gate(layer, heads[layer.path])
                undo.callback(model.get_submodule(layer.output).register_forward_pre_hook(hook).remove)
        yield


def _gate(layer: AttentionLayer, heads: Sequence[int]) -> Any:
    count = layer.layout.num_heads

    def hook(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        factors = torch.ones(count, 1, dtype=given[0].dtype)
        factors[list(heads)] = 0
        return ((given[0].unflatten(-1, (count, -1)) * factors).flatten(-2), *given[1:])

    return hook


@torch.no_grad()
def result_of(model: nn.Module, family: models.Family) -> Tensor:
    """Return the logits, or the last hidden state."""
    output = model(**models.inputs(family))
    if family.kind == "clip":
        return torch.cat((output.text_embeds.flatten(), output.image_embeds.flatten()))
    return output.logits if "logits" in output else output.last_hidden_state


@torch.no_grad()
def generated(model: nn.Module, family: models.Family) -> Tensor:
    """Return the scores of four tokens generated with a KV cache."""
    given = {name: x for name, x in models.inputs(family).items() if name != "decoder_input_ids"}
    output = model.generate(
        **given,
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(output.logits)


def some_heads(layer: AttentionLayer) -> tuple[int, ...]:
    """Return heads to prune: a whole group of grouped layers, else two that are not adjacent."""
    layout = layer.layout
    if layout.num_kv_heads < layout.num_heads:
        return tuple(head for head in range(layout.num_heads) if layout.key_head(head) == 0)
    return (0, 2) if layout.num_heads > 3 else (0,)
