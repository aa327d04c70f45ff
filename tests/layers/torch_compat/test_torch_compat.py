"""The drop-in for `torch.nn.MultiheadAttention`: what it shares with PyTorch's class, and what it does better."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from polyhead.layers.torch_compat import MultiheadAttention

BATCH, TOKENS, MEMORY, WIDTH, HEADS = 3, 7, 5, 22, 2
BUILDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "separate widths": {"kdim": 13, "vdim": 17},
    "learned key": {"add_bias_kv": True},
    "learned key of separate widths": {"add_bias_kv": True, "vdim": 17, "bias": False},
    "zero key": {"add_zero_attn": True},
    "double": {"dtype": torch.float64},
}
both = pytest.mark.parametrize("need_weights", [False, True], ids=["no weights", "weights"])
modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def pair(*args: Any, training: bool = False, **options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """Our module and PyTorch's with the same weights, biases that are not zero."""
    theirs = nn.MultiheadAttention(*args, **options).train(training)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "bias" in name:
                parameter.normal_()
    ours = MultiheadAttention(*args, **options).train(training)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


# ---- what is the same by construction


@pytest.mark.parametrize("name", BUILDS)
def test_a_seed_gives_the_initial_weights_of_pytorch(name: str) -> None:
    states = []
    for kind in (MultiheadAttention, nn.MultiheadAttention):
        torch.manual_seed(5)
        module = kind(WIDTH, HEADS, **BUILDS[name])
        states.append((module.state_dict(), torch.rand(3)))
    (ours, our_next), (theirs, their_next) = states
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert torch.equal(our_next, their_next)


@pytest.mark.parametrize("name", BUILDS)
def test_state_dicts_load_in_both_directions(name: str) -> None:
    ours, theirs = (kind(WIDTH, HEADS, **BUILDS[name]) for kind in (MultiheadAttention, nn.MultiheadAttention))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    ours.load_state_dict(nn.MultiheadAttention(WIDTH, HEADS, **BUILDS[name]).state_dict(), strict=True)


def test_a_module_survives_deepcopy_pickle_and_torch_save() -> None:
    module = MultiheadAttention(WIDTH, HEADS, add_bias_kv=True).eval()
    tokens = torch.randn(TOKENS, BATCH, WIDTH)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for again in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
    ):
        assert isinstance(again, MultiheadAttention)
        assert torch.equal(again(tokens, tokens, tokens)[0], module(tokens, tokens, tokens)[0])


def test_a_module_on_the_meta_device_knows_its_shapes() -> None:
    module = MultiheadAttention(WIDTH, HEADS, device="meta")
    tokens = torch.zeros(TOKENS, BATCH, WIDTH, device="meta")
    output, weights = module(tokens, tokens, tokens, attn_mask=torch.zeros(TOKENS, TOKENS, device="meta"))
    assert (output.shape, weights.shape) == ((TOKENS, BATCH, WIDTH), (BATCH, TOKENS, TOKENS))


# ---- rows with nothing to attend to


def empty_row_masks(dtype: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """Masks under which row 2 of sequence 1 sees nothing, in every way PyTorch lets one say it."""
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[1] = True
    row = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    row[2] = True
    partial = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    partial[1, :4] = True
    rest = row.clone()
    rest[2, :4] = False
    per_head = torch.zeros(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.bool)
    per_head[1, :, 2] = True
    masks = {
        "padding": {"key_padding_mask": padding},
        "attn_mask": {"attn_mask": row},
        "both together": {"attn_mask": rest, "key_padding_mask": partial},
        "per head": {"attn_mask": per_head.flatten(0, 1)},
    }
    floats = {
        f"{name}, float": {k: torch.zeros(v.shape, dtype=dtype).masked_fill(v, -math.inf) for k, v in mask.items()}
        for name, mask in masks.items()
    }
    return masks | floats


@both
@modes
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", empty_row_masks(torch.float32))
def test_a_row_with_nothing_to_attend_to_gives_the_output_bias_and_no_gradient(
    name: str, batch_first: bool, dropout: float, training: bool, need_weights: bool
) -> None:
    module, _ = pair(WIDTH, HEADS, dropout=dropout, batch_first=batch_first, training=training, dtype=torch.float64)
    size = (BATCH, TOKENS, WIDTH) if batch_first else (TOKENS, BATCH, WIDTH)
    tokens = torch.randn(size, dtype=torch.float64, requires_grad=training)
    with torch.set_grad_enabled(training):
        output, weights = module(
            tokens, tokens, tokens, need_weights=need_weights, **empty_row_masks(torch.float64)[name]
        )
    row = output[1, 2] if batch_first else output[2, 1]
    torch.testing.assert_close(row, module.out_proj.bias, rtol=0, atol=1e-15)
    assert output.isfinite().all()
    if need_weights:
        assert weights.isfinite().all()
        assert not weights[1, 2].any()
    if training:
        row.sum().backward()
        assert not tokens.grad.any()
        assert all(p.grad is None or not p.grad.any() for n, p in module.named_parameters() if n != "out_proj.bias")


@both
def test_a_row_that_one_head_alone_cannot_fill_loses_that_head_alone(need_weights: bool) -> None:
    module, theirs = pair(WIDTH, HEADS, batch_first=True)
    tokens = torch.randn(BATCH, TOKENS, WIDTH)
    hidden = torch.zeros(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.bool)
    hidden[1, 0, 2] = True
    with torch.no_grad():
        options = {"attn_mask": hidden.flatten(0, 1), "average_attn_weights": False}
        output, weights = module(tokens, tokens, tokens, need_weights=need_weights, **options)
        _, expected = theirs(tokens, tokens, tokens, average_attn_weights=False)
        values = (tokens[1] @ theirs.in_proj_weight[2 * WIDTH :].T + theirs.in_proj_bias[2 * WIDTH :]).view(
            TOKENS, HEADS, -1
        )
        heads = torch.stack([torch.zeros(WIDTH // HEADS), expected[1, 1, 2] @ values[:, 1]])
        torch.testing.assert_close(output[1, 2], theirs.out_proj(heads.flatten()))
    if need_weights:
        assert not weights[1, 0, 2].any()
        torch.testing.assert_close(weights[1, 1], expected[1, 1])


# ---- what is hidden does not leak


@both
@modes
@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_nan_and_inf_in_hidden_memory_reach_no_output_and_no_gradient(
    name: str, dropout: float, kind: str, broken: float, training: bool, need_weights: bool
) -> None:
    module, _ = pair(WIDTH, HEADS, batch_first=True, training=training, dropout=dropout)
    hidden = torch.zeros((BATCH, MEMORY) if name == "key_padding_mask" else (TOKENS, MEMORY), dtype=torch.bool)
    hidden[:, 3] = True
    mask = hidden if kind == "bool" else torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)
    query, memory = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, MEMORY, WIDTH)
    poisoned = memory.clone()
    poisoned[:, 3] = broken
    results = []
    for keys in (memory, poisoned):
        module.zero_grad()
        keys.requires_grad_()
        torch.manual_seed(11)
        output, weights = module(query, keys, keys, need_weights=need_weights, **{name: mask})
        (output.square().sum() + (0 if weights is None else weights.square().sum())).backward()
        results.append([output, keys.grad, *(p.grad for p in module.parameters())])
    for clean, dirty in zip(*results, strict=True):
        torch.testing.assert_close(dirty, clean)


@both
@modes
def test_nan_in_padding_of_a_self_attention_reaches_no_real_token(training: bool, need_weights: bool) -> None:
    module, _ = pair(WIDTH, HEADS, batch_first=True, training=training)
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[:, 5:] = True
    tokens = torch.randn(BATCH, TOKENS, WIDTH)
    poisoned = tokens.masked_fill(padding[..., None], math.nan)
    results = []
    for x in (tokens, poisoned):
        module.zero_grad()
        with torch.set_grad_enabled(training):
            output = module(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0][:, :5]
        results.append([output])
        if training:
            output.square().sum().backward()
            results[-1] += [p.grad for p in module.parameters()]
    for clean, dirty in zip(*results, strict=True):
        torch.testing.assert_close(dirty, clean)


@both
@modes
@pytest.mark.parametrize("hint", [False, True], ids=["mask", "hint"])
def test_a_nan_that_is_seen_is_shown_to_those_who_see_it(hint: bool, training: bool, need_weights: bool) -> None:
    module, _ = pair(WIDTH, HEADS, batch_first=True, training=training)
    tokens = torch.randn(BATCH, TOKENS, WIDTH)
    tokens[1, 4] = math.nan
    causal = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    with torch.set_grad_enabled(training):
        output, _ = module(tokens, tokens, tokens, attn_mask=causal, need_weights=need_weights, is_causal=hint)
    assert output[1, :4].isfinite().all()
    assert output[1, 4:].isnan().all()
    assert output[0].isfinite().all()


@both
def test_a_float_mask_that_learns_gets_the_gradient_of_pytorch(need_weights: bool) -> None:
    ours, theirs = pair(WIDTH, HEADS, dtype=torch.float64)
    tokens = torch.randn(TOKENS, BATCH, WIDTH, dtype=torch.float64)
    gradients = []
    for module in (ours, theirs):
        bias = torch.linspace(-1, 1, TOKENS * TOKENS, dtype=torch.float64).view(TOKENS, TOKENS).requires_grad_()
        module(tokens, tokens, tokens, attn_mask=bias, need_weights=need_weights)[0].square().sum().backward()
        gradients.append(bias.grad)
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


# ---- which way a call takes


def test_a_short_call_in_inference_takes_the_operator_of_pytorch_and_a_long_one_does_not() -> None:
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    for tokens, weights, taken in ((TOKENS, False, True), (67, False, False), (67, True, True)):
        x = torch.randn(1, tokens, WIDTH)
        with (
            torch.no_grad(),
            mock.patch("torch._native_multi_head_attention", wraps=torch._native_multi_head_attention) as native,
        ):
            module(x, x, x, need_weights=weights)
        assert native.called == taken


@pytest.mark.parametrize("reason", ["training", "grad", "odd heads", "switch"])
def test_the_operator_of_pytorch_is_left_alone_where_pytorch_leaves_it(reason: str) -> None:
    module = MultiheadAttention(WIDTH, 11 if reason == "odd heads" else HEADS, batch_first=True)
    module.train(reason == "training")
    x = torch.randn(BATCH, TOKENS, WIDTH)
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(reason != "switch")
    try:
        with (
            torch.set_grad_enabled(reason == "grad"),
            mock.patch("torch._native_multi_head_attention") as native,
        ):
            module(x, x, x)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    assert not native.called


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")
def test_no_weights_are_held_where_none_are_asked_for() -> None:
    """(1, 8192, 16) with two heads would hold 512 MiB of weights; the peak is read from the allocator's own record."""
    module = MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(1, 8192, 16)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        module(x, x, x, need_weights=False)
    assert max(event.cpu_memory_usage for event in profile.events()) < 2**24


def test_a_default_device_changes_nothing() -> None:
    module = MultiheadAttention(WIDTH, HEADS)
    tokens, hidden = torch.randn(TOKENS, BATCH, WIDTH), torch.ones(BATCH, TOKENS, dtype=torch.bool)
    with torch.device("cpu"):
        output, _ = module(tokens, tokens, tokens, key_padding_mask=hidden)
    torch.testing.assert_close(output, module.out_proj.bias.expand_as(output))


def test_a_tensor_with_functions_of_its_own_is_left_to_them() -> None:
    class Witness(Tensor):
        seen: list[str] = []  # noqa: RUF012 - one list for the one test

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.seen.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    tokens = torch.randn(TOKENS, BATCH, WIDTH).as_subclass(Witness)
    MultiheadAttention(WIDTH, HEADS)(tokens, tokens, tokens)
    assert "multi_head_attention_forward" in Witness.seen
