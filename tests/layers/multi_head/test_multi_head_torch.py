"""A layer becomes a torch.nn.MultiheadAttention and back, with the same numbers, or says why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import Mask, MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.layers import LatentAttention
from polyhead.layers.positions import Rotary
from polyhead.layers.transformer import DecoderBlock
from polyhead.layers.variants import RoutedHeads

BATCH, QUERIES, KEYS, EMBED, HEADS, KEY_WIDTH, VALUE_WIDTH = 3, 7, 11, 30, 5, 19, 23
DOUBLE = torch.float64

MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without bias": {"bias": False},
    "kdim and vdim": {"kdim": KEY_WIDTH, "vdim": VALUE_WIDTH},
    "kdim alone": {"kdim": KEY_WIDTH},
    "kdim and vdim, without bias": {"kdim": KEY_WIDTH, "vdim": VALUE_WIDTH, "bias": False},
    "batch second": {"batch_first": False},
    "with dropout": {"dropout": 0.25},
}


def torch_module(options: dict[str, Any]) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, **options}, dtype=DOUBLE).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


def inputs(module: nn.MultiheadAttention) -> list[Tensor]:
    shapes = ((QUERIES, EMBED), (KEYS, module.kdim), (KEYS, module.vdim))
    return [torch.randn(BATCH, *shape, dtype=DOUBLE) for shape in shapes]


def torch_output(module: nn.MultiheadAttention, tensors: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    if not module.batch_first:
        tensors = [t.transpose(0, 1) for t in tensors]
    output, weights = module(*tensors, average_attn_weights=False, **options)
    return output if module.batch_first else output.transpose(0, 1), weights


@pytest.mark.parametrize("options", [{"num_heads": 3}, {"bias": False}, {"key_heads": (1, 0, 2, 3, 4)}])
def test_from_torch_refuses_options_that_would_change_the_numbers(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OptionError, match=f"the module determines {name}, got {name}="):
        MultiHeadAttention.from_torch(torch_module({}), **options)


@pytest.mark.parametrize("options", MODULES)
def test_from_torch_gives_the_same_numbers(options: str) -> None:
    module = torch_module(MODULES[options])
    layer = MultiHeadAttention.from_torch(module)
    assert (layer.layout.embed_dim, layer.layout.num_heads) == (EMBED, HEADS)
    assert (layer.layout.key_input_dim, layer.layout.value_input_dim) == (module.kdim, module.vdim)
    assert (layer.q_proj.bias is None) == (module.in_proj_bias is None)
    assert (layer.dropout, layer.training) == (module.dropout, False)
    tensors = inputs(module)
    hidden = torch.rand(BATCH, KEYS) < 0.3
    hidden[:, 0] = False
    blocked = torch.rand(QUERIES, KEYS) < 0.3
    blocked[:, 0] = False
    output, weights = torch_output(module, tensors, key_padding_mask=hidden, attn_mask=blocked)
    ours = layer(*tensors, mask=Mask.from_torch(blocked, hidden), weights=True)
    torch.testing.assert_close(ours.output, output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.weights, weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", MODULES)
def test_there_and_back_is_the_same_module(options: str) -> None:
    module = torch_module(MODULES[options])
    layer = MultiHeadAttention.from_torch(module)
    again = layer.to_torch()
    assert again.batch_first
    assert again.state_dict().keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert (again.dropout, again.training, again.kdim, again.vdim) == (module.dropout, False, module.kdim, module.vdim)
    tensors = inputs(module)
    torch.testing.assert_close(again(*tensors)[0], torch_output(module, tensors)[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer(*tensors).output, again(*tensors)[0], rtol=1e-12, atol=1e-12)


def test_conversions_copy_and_share_nothing() -> None:
    module = torch_module({})
    layer = MultiHeadAttention.from_torch(module)
    again = layer.to_torch()
    with torch.no_grad():
        layer.q_proj.weight.zero_()
    assert int(module.in_proj_weight.count_nonzero()) == module.in_proj_weight.numel()
    assert torch.equal(again.in_proj_weight, module.in_proj_weight)


def test_from_torch_takes_options_of_our_own() -> None:
    module = torch_module({"dropout": 0.25})
    layer = MultiHeadAttention.from_torch(module, causal=True, dropout=0.0, backend="reference")
    assert (layer.dropout, layer.backend) == (0.0, "reference")
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=DOUBLE)
    later = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    torch.testing.assert_close(layer(x).output, module(x, x, x, attn_mask=later)[0], rtol=1e-12, atol=1e-12)


def test_training_mode_and_dtype_come_along() -> None:
    module = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.bfloat16)
    layer = MultiHeadAttention.from_torch(module)
    assert layer.training
    assert layer.q_proj.weight.dtype is torch.bfloat16
    assert layer.to_torch().training


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_from_torch_refuses_what_has_no_counterpart(options: dict[str, bool]) -> None:
    with pytest.raises(OptionError, match="add_bias_kv and add_zero_attn are not supported; use polyhead"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(EMBED, HEADS, **options))


NO_COUNTERPART: dict[str, tuple[dict[str, Any], str]] = {
    "grouped heads": ({"num_kv_heads": 1}, "this head layout"),
    "a head_dim": ({"head_dim": 7}, "this head layout"),
    "a value_dim": ({"value_dim": 7}, "this head layout"),
    "positions": ({"positions": Rotary(6)}, "positions"),
    "causal": ({"causal": True}, "causal or window"),
    "qk_norm": ({"qk_norm": "rms"}, "qk_norm"),
    "output_gate": ({"output_gate": "head"}, "an output gate"),
    "softcap": ({"softcap": 3.0}, "softcap"),
    "scale": ({"scale": 0.5}, "a scale"),
    "sinks": ({"sinks": True}, "sinks"),
    "one-sided bias": ({"output_bias": False}, "a bias in only some of the projections"),
}


@pytest.mark.parametrize("case", NO_COUNTERPART)
def test_to_torch_refuses_what_has_no_counterpart(case: str) -> None:
    options, words = NO_COUNTERPART[case]
    with pytest.raises(OptionError, match=f"torch.nn.MultiheadAttention has no counterpart for {words}"):
        MultiHeadAttention(EMBED, HEADS, **options).to_torch()


def test_to_torch_names_everything_that_has_no_counterpart() -> None:
    layer = MultiHeadAttention(EMBED, HEADS, causal=True, sinks=True)
    layer.head_gate = torch.ones(HEADS)
    with pytest.raises(OptionError, match="no counterpart for causal or window, sinks, a head_gate"):
        layer.to_torch()


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_to_torch_refuses_an_adapter_and_takes_a_parametrization() -> None:
    layer = MultiHeadAttention(EMBED, HEADS, dtype=DOUBLE).eval()
    torch.nn.utils.parametrizations.weight_norm(layer.k_proj)
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=DOUBLE)
    torch.testing.assert_close(layer.to_torch()(x, x, x)[0], layer(x).output)
    layer.v_proj = Doubled(EMBED, EMBED, dtype=DOUBLE)
    with pytest.raises(OptionError, match="no counterpart for a projection that computes more than its weight"):
        layer.to_torch()


LAYERS: dict[str, nn.Module] = {
    "multi-head": MultiHeadAttention(EMBED, HEADS),
    "latent": LatentAttention(EMBED, HEADS, kv_lora_rank=7),
    "routed": RoutedHeads(EMBED, HEADS, top_k=2),
    "block": DecoderBlock(EMBED, HEADS),
}


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("layer", LAYERS)
def test_pytorchs_masks_are_refused_with_the_mask_to_use(layer: str, name: str) -> None:
    with pytest.raises(OptionError, match=r"use mask=Mask\.from_torch\(attn_mask, key_padding_mask\)"):
        LAYERS[layer](torch.randn(BATCH, QUERIES, EMBED), **{name: torch.zeros(BATCH, QUERIES, dtype=torch.bool)})
