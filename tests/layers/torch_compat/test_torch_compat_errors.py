"""What the drop-in refuses, it refuses with PyTorch's own words; what PyTorch lets pass, it lets pass."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead.layers.torch_compat import MultiheadAttention


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def b(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "no width": lambda kind: kind(0, 2),
    "no heads": lambda kind: kind(8, 0),
    "negative heads": lambda kind: kind(8, -2),
    "heads do not divide": lambda kind: kind(10, 3),
    "missing heads": lambda kind: kind(10),
    "unknown option": lambda kind: kind(10, 2, heads=3),
    "wrong dtype": lambda kind: kind(10, 2, dtype=torch.int32),
}

# name: (options of the module, arguments, keyword arguments); sequence first unless it says otherwise
CALLS: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "query of one dimension": ({}, (x(4), x(4), x(4)), {}),
    "query of four dimensions": ({}, (x(2, 3, 5, 4),) * 3, {}),
    "unbatched key": ({}, (x(7, 3, 4), x(5, 4), x(5, 3, 4)), {}),
    "unbatched value": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 4)), {}),
    "batched key": ({}, (x(7, 4), x(5, 3, 4), x(5, 4)), {}),
    "batched value": ({}, (x(7, 4), x(5, 4), x(5, 3, 4)), {}),
    "query of another width": ({}, (x(7, 3, 6), x(5, 3, 4), x(5, 3, 4)), {}),
    "key and value of another width": ({}, (x(7, 3, 4), x(5, 3, 6), x(5, 3, 6)), {}),
    "self-attention of another width": ({"batch_first": True}, (x(3, 7, 6),) * 3, {}),
    "value of another length": ({}, (x(7, 3, 4), x(5, 3, 4), x(6, 3, 4)), {}),
    "key of another batch": ({}, (x(7, 3, 4), x(5, 2, 4), x(5, 2, 4)), {}),
    "key of another batch, batch first": ({"batch_first": True}, (x(3, 7, 4), x(2, 5, 4), x(2, 5, 4)), {}),
    "key of another kdim": ({"kdim": 6}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {}),
    "value of another vdim": ({"vdim": 6}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {}),
    "value of another length, kdim": ({"kdim": 6}, (x(7, 3, 4), x(5, 3, 6), x(6, 3, 4)), {}),
    "1-D padding of a batch": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"key_padding_mask": b(5)}),
    "3-D padding": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"key_padding_mask": b(3, 1, 5)}),
    "2-D padding of one sequence": ({}, (x(7, 4), x(5, 4), x(5, 4)), {"key_padding_mask": b(1, 5)}),
    "padding of another length": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"key_padding_mask": b(3, 6)}),
    "padding of another batch": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"key_padding_mask": b(2, 5)}),
    "padding of the inference operator": ({"batch_first": True}, (x(3, 7, 4),) * 3, {"key_padding_mask": b(3, 5)}),
    "integer padding": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"key_padding_mask": b(3, 5).long()}),
    "1-D attn_mask": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"attn_mask": b(5)}),
    "4-D attn_mask": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"attn_mask": b(3, 2, 7, 5)}),
    "transposed attn_mask": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"attn_mask": b(5, 7)}),
    "attn_mask with too few heads": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"attn_mask": b(3, 7, 5)}),
    "attn_mask of one sequence": ({}, (x(7, 4), x(5, 4), x(5, 4)), {"attn_mask": b(3, 7, 5)}),
    "2-D attn_mask of one sequence": ({}, (x(7, 4), x(5, 4), x(5, 4)), {"attn_mask": b(5, 7)}),
    "attn_mask of the inference operator": ({"batch_first": True}, (x(3, 7, 4),) * 3, {"attn_mask": b(5, 5)}),
    "integer attn_mask": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"attn_mask": b(7, 5).int()}),
    "a list for a mask": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"attn_mask": [[False] * 5] * 7}),
    "double attn_mask": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"attn_mask": x(7, 5, dtype=torch.float64)}),
    "double padding": ({}, (x(7, 3, 4), x(5, 3, 4), x(5, 3, 4)), {"key_padding_mask": x(3, 5, dtype=torch.float64)}),
    "causal hint without a mask": ({}, (x(7, 3, 4), x(7, 3, 4), x(7, 3, 4)), {"is_causal": True}),
    "causal hint, no weights": ({}, (x(7, 3, 4),) * 3, {"is_causal": True, "need_weights": False}),
    "causal hint, inference": ({"batch_first": True}, (x(3, 7, 4),) * 3, {"is_causal": True}),
    "causal hint beside a 1-D mask": (
        {},
        (x(7, 3, 4),) * 3,
        {"is_causal": True, "attn_mask": b(7), "need_weights": False},
    ),
    "causal hint beside any 2-D mask": (
        {},
        (x(7, 3, 4),) * 3,
        {"is_causal": True, "attn_mask": b(5, 6), "need_weights": False},
    ),
    "causal hint beside a 3-D mask": (
        {},
        (x(7, 4),) * 3,
        {"is_causal": True, "attn_mask": b(5, 6, 7), "need_weights": False},
    ),
    "double input": ({}, (x(7, 3, 4, dtype=torch.float64),) * 3, {}),
    "double key": ({}, (x(7, 3, 4), x(5, 3, 4, dtype=torch.float64), x(5, 3, 4, dtype=torch.float64)), {}),
    "integer input": ({}, (x(7, 3, 4, dtype=torch.int64),) * 3, {}),
    "input on another device": ({}, (torch.zeros(7, 3, 4, device="meta"),) * 3, {}),
    "no key": ({}, (x(7, 3, 4), None, x(7, 3, 4)), {}),
    "no query": ({}, (None, x(7, 3, 4), x(7, 3, 4)), {}),
    "an unknown argument": ({}, (x(7, 3, 4),) * 3, {"mask": None}),
    "dropout above one": ({"dropout": 1.5}, (x(7, 3, 4),) * 3, {}),
    "dropout below zero": ({"dropout": -0.5}, (x(7, 3, 4),) * 3, {"need_weights": False}),
}


def outcome(run: Callable[[], Any]) -> tuple[str, str] | None:
    """Kind and words of the error, without the names by which Python tells one class from another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except Exception as error:  # noqa: BLE001 - any error at all is to be compared with PyTorch's
            return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_bad_constructor_call_is_refused_in_the_words_of_pytorch(name: str) -> None:
    expected = outcome(lambda: CONSTRUCTORS[name](nn.MultiheadAttention))
    assert expected is not None
    assert outcome(lambda: CONSTRUCTORS[name](MultiheadAttention)) == expected


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_refused_in_the_words_of_pytorch(name: str, training: bool) -> None:
    build, arguments, options = CALLS[name]
    results = []
    for kind in (nn.MultiheadAttention, MultiheadAttention):
        module = kind(4, 2, **build).train(training)
        with torch.set_grad_enabled(training):
            results.append(outcome(lambda module=module: module(*arguments, **options)))
    assert results[1] == results[0]


def test_the_table_of_bad_calls_holds_bad_calls() -> None:
    """Some rows are there to pass in one mode (a hint that the inference operator ignores); most must be refused."""
    refused = [
        name
        for name, (build, arguments, options) in CALLS.items()
        if outcome(lambda b=build, a=arguments, o=options: nn.MultiheadAttention(4, 2, **b)(*a, **o))
    ]
    assert len(refused) >= 40
    assert set(CALLS) - set(refused) <= {"causal hint beside any 2-D mask"}


@pytest.mark.parametrize("missing", ["bias_k", "bias_v", "in_proj_weight"])
def test_a_parameter_taken_away_is_missed_in_the_words_of_pytorch(missing: str) -> None:
    results = []
    for kind in (nn.MultiheadAttention, MultiheadAttention):
        module = kind(4, 2, add_bias_kv=True)
        setattr(module, missing, None)
        results.append(outcome(lambda module=module: module(*(x(7, 3, 4),) * 3)))
    assert results[0] is not None
    assert results[1] == results[0]


def test_masks_of_two_kinds_bring_the_warning_of_pytorch() -> None:
    tokens, options = x(7, 3, 4), {"attn_mask": x(7, 7), "key_padding_mask": b(3, 7)}
    for kind in (nn.MultiheadAttention, MultiheadAttention):
        with pytest.warns(UserWarning, match="Support for mismatched key_padding_mask and attn_mask is deprecated"):
            kind(4, 2)(tokens, tokens, tokens, **options)


def test_signatures_are_those_of_pytorch() -> None:
    for name in ("__init__", "forward", "merge_masks"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (MultiheadAttention, nn.MultiheadAttention))
        assert [(p.name, p.default, p.kind) for p in ours.parameters.values()] == [
            (p.name, p.default, p.kind) for p in theirs.parameters.values()
        ]
