"""Compare the drop-in `MultiheadAttention` with `torch.nn.MultiheadAttention`, all options drawn at random together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polyhead.layers.torch_compat import MultiheadAttention

MASKS = ("none", "bool", "float", "float with -inf")


@dataclass
class Case:
    """One drawn call: constructor arguments of the module, arguments of the call, and the mode."""

    build: dict[str, Any]
    seed: int
    dtype: torch.dtype
    shape: tuple[int, int, int]  # batch, queries, keys
    unbatched: bool
    same: str  # the inputs that are one tensor: "all", "key and value" or "none"
    attn_mask: str  # kind of mask, see `random_mask`
    per_head: bool  # attn_mask is [batch * heads, queries, keys] instead of [queries, keys]
    key_padding_mask: str  # kind of mask
    training: bool
    grad: bool
    call: dict[str, Any] = field(default_factory=dict)


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    num_heads = draw(st.sampled_from([1, 2, 3, 4]))
    embed_dim = num_heads * draw(st.sampled_from([1, 3, 4, 5]))
    same = draw(st.sampled_from(["all", "key and value", "none"]))
    other_width = same == "none" and draw(st.booleans())
    keys = draw(st.integers(1, 7))
    shape = (draw(st.integers(1, 3)), keys if same == "all" else draw(st.integers(1, 5)), keys)
    attn_mask = draw(st.sampled_from([*MASKS, "causal", "float causal"]))
    return Case(
        build={
            "embed_dim": embed_dim,
            "num_heads": num_heads,
            "dropout": draw(st.sampled_from([0.0, 0.0, 0.3])),
            "bias": draw(st.booleans()),
            "add_bias_kv": draw(st.sampled_from([False, False, True])),
            "add_zero_attn": draw(st.sampled_from([False, False, True])),
            "kdim": draw(st.sampled_from([3, 7])) if other_width else None,
            "vdim": draw(st.sampled_from([None, 5])) if other_width else None,
            "batch_first": draw(st.booleans()),
        },
        seed=draw(st.integers(0, 2**31)),
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32])),
        shape=shape,
        unbatched=draw(st.sampled_from([False, False, True])),
        same=same,
        attn_mask=attn_mask,
        per_head=draw(st.booleans()),
        key_padding_mask=draw(st.sampled_from(MASKS)),
        training=draw(st.booleans()),
        grad=draw(st.booleans()),
        call={
            "need_weights": draw(st.booleans()),
            "average_attn_weights": draw(st.booleans()),
            "is_causal": "causal" in attn_mask and draw(st.booleans()),
        },
    )


def random_mask(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Return a random or causal mask with the first key visible in every row; None for the kind "none"."""
    hidden = torch.rand(shape) < 0.4
    if "causal" in kind:
        hidden = torch.ones(shape, dtype=torch.bool).triu(1)
    hidden[..., 0] = False
    if kind == "none":
        return None
    if kind in ("bool", "causal"):
        return hidden
    values = torch.zeros(shape, dtype=dtype) if kind == "float causal" else torch.randn(shape, dtype=dtype)
    return values if kind == "float" else values.masked_fill(hidden, -torch.inf)


def arguments_of(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    batch, queries, keys = case.shape
    batch = 1 if case.unbatched else batch
    width, heads = case.build["embed_dim"], case.build["num_heads"]

    def tokens(count: int, features: int) -> Tensor:
        if case.unbatched:
            size = (count, features)
        else:
            size = (batch, count, features) if case.build["batch_first"] else (count, batch, features)
        return torch.randn(size, dtype=case.dtype).requires_grad_(case.grad)

    query = tokens(queries, width)
    key = query if case.same == "all" else tokens(keys, case.build["kdim"] or width)
    value = key if case.same != "none" else tokens(keys, case.build["vdim"] or width)
    mask_shape = (batch * heads, queries, keys) if case.per_head else (queries, keys)
    attn_mask = random_mask(case.attn_mask, mask_shape, case.dtype)
    padding = random_mask(case.key_padding_mask, (keys,) if case.unbatched else (batch, keys), case.dtype)
    return [query, key, value], {"attn_mask": attn_mask, "key_padding_mask": padding, **case.call}


def run(module_class: type[nn.MultiheadAttention], case: Case) -> list[Tensor]:
    """Build, call and differentiate a module; return output, weights and gradients in a fixed order."""
    torch.manual_seed(case.seed)
    module = module_class(**case.build, dtype=case.dtype).train(case.training)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "bias" in name:  # PyTorch initialises biases to zero, which would hide one that is not applied
                parameter.normal_()
    inputs, options = arguments_of(case)
    with warnings.catch_warnings(), torch.set_grad_enabled(case.grad):
        warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask and attn_mask")
        warnings.filterwarnings("ignore", message="Converting mask without torch.bool dtype to bool")
        output, weights = module(*inputs, **options)
        results = [output] if weights is None else [output, weights]
        if case.grad:
            loss = sum((x * torch.linspace(0.5, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in results)
            parameters = [p for p in module.parameters() if p.requires_grad]
            results += torch.autograd.grad(loss, list({id(x): x for x in inputs}.values()) + parameters)
    results.append(torch.rand(3))  # equal only if the generators are in the same state
    return results


@settings(max_examples=120)
@given(cases())
def test_any_call_gives_the_numbers_of_pytorch(case: Case) -> None:
    ours, theirs = run(MultiheadAttention, case), run(nn.MultiheadAttention, case)
    assert len(ours) == len(theirs)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if case.dtype is torch.float64 else {"rtol": 2e-5, "atol": 2e-5}
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, **tolerance)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 5), (3, 0, 5), (3, 5, 0), (3, 0, 0)], ids=str)
def test_empty_batches_and_sequences_give_what_pytorch_gives(
    shape: tuple[int, int, int], training: bool, need_weights: bool, batch_first: bool
) -> None:
    batch, queries, keys = shape
    modules = []
    for module_class in (MultiheadAttention, nn.MultiheadAttention):
        torch.manual_seed(7)
        modules.append(module_class(6, 2, batch_first=batch_first).train(training))
    query, key = (torch.randn((batch, n, 6) if batch_first else (n, batch, 6)) for n in (queries, keys))
    with torch.set_grad_enabled(training):
        mine, expected = (module(query, key, key, need_weights=need_weights) for module in modules)
    assert mine[0].shape == query.shape
    torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 5), (3, 0, 5), (3, 5, 0), (3, 0, 0)], ids=str)
def test_empty_batches_and_sequences_take_masks(
    shape: tuple[int, int, int], training: bool, need_weights: bool
) -> None:
    """Without a key there is nothing to attend to, so the output is the bias."""
    batch, queries, keys = shape
    module = MultiheadAttention(6, 2, batch_first=True).train(training)
    query, key = torch.randn(batch, queries, 6), torch.randn(batch, keys, 6)
    for first, second in ((query, key), (key, key)):
        attn_mask = torch.zeros(first.shape[1], keys, dtype=torch.bool)
        padding = torch.zeros(batch, keys, dtype=torch.bool)
        for options in (
            {"attn_mask": attn_mask},
            {"key_padding_mask": padding},
            {"attn_mask": attn_mask, "key_padding_mask": padding},
        ):
            with torch.set_grad_enabled(training):
                output, weights = module(first, second, second, need_weights=need_weights, **options)
            assert output.shape == first.shape
            assert weights is None or weights.shape == (batch, first.shape[1], keys)
            if not keys:
                torch.testing.assert_close(output, module.out_proj.bias.expand_as(output))
