"""Packed arrays and texts of a page: unpacking inverts packing, and text cannot become code."""

from __future__ import annotations

import base64
import json
import math
import re

import numpy as np
import pytest
import torch

from polyhead.report.packing import MAX_TEXT_LENGTH, clipped, json_in_html, packed_floats, packed_weights, plain

HOSTILE = (
    "<script>window.hacked=1</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]>&amp;\"'",
    "line\u2028and\u2029paragraph",
    "\u202eright to left\u202c \u2066isolate\u2069",
    "zero\u200bwidth\ufeff\u00ad",
    "\0\x01\x1b[31m\x7f\x85\r\n",
    "\U0001f600 你好",
)


def unpacked(packed: dict) -> np.ndarray:
    data = base64.b64decode(packed["data"])
    if packed["type"] != "u8":
        return np.frombuffer(data, {"f32": "<f4", "f64": "<f8"}[packed["type"]]).reshape(packed["shape"])
    numbers = np.frombuffer(data, np.uint8).reshape(packed["shape"]) / 255
    scale = np.array(packed["scale"]).reshape(-1, *(1 for _ in packed["shape"][1:]))
    return numbers * scale


def test_unpacked_shares_are_within_half_a_quantisation_step():
    shares = torch.rand(5, 7, 11).softmax(-1) * torch.tensor([1.0, 1e-3, 0.5, 0.02, 1e-6])[:, None, None]
    found = unpacked(packed_weights(shares))
    bound = 0.5 / 255 * shares.flatten(1).amax(1).numpy() * (1 + 1e-4)
    assert (np.abs(found - shares.numpy()).reshape(5, -1).max(1) <= bound).all()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.5])
def test_numbers_that_a_byte_cannot_hold_remain(number):
    shares = torch.tensor([[0.0, 0.0], [number, 0.5], [1.0, 0.1]])
    np.testing.assert_array_equal(unpacked(packed_weights(shares)), shares.numpy())


def test_shares_of_zero_and_of_no_tokens():
    assert unpacked(packed_weights(torch.zeros(2, 3))).tolist() == [[0.0] * 3] * 2
    assert packed_weights(torch.zeros(3, 0, 0))["data"] == ""


def test_unpacked_floats_are_identical():
    numbers = torch.tensor([[1.5, -2.25e-8], [math.nan, 3e38]])
    np.testing.assert_array_equal(unpacked(packed_floats(numbers)), numbers.numpy())
    np.testing.assert_array_equal(unpacked(packed_floats(numbers.T)), numbers.T.numpy())
    doubles = torch.tensor([1 / 3, -math.inf, math.nan], dtype=torch.float64)
    np.testing.assert_array_equal(unpacked(packed_floats(doubles, bits=64)), doubles.numpy())


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_cannot_leave_the_json(text):
    written = json_in_html({"token": text, text: 1})
    assert json.loads(written) == {"token": text, text: 1}
    assert not re.search("[<>&\u2028\u2029\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]", written)
    assert all(ord(character) >= 32 and not 0x7F <= ord(character) <= 0x9F for character in written)


def test_halves_of_surrogate_pairs_become_the_replacement_character():
    written = json_in_html(["\ud83d", "ok\udcff", "\U0001f600"])
    assert json.loads(written.encode("utf-8")) == ["\ufffd", "ok\ufffd", "\U0001f600"]


def test_long_text_is_truncated_with_an_ellipsis():
    assert clipped("x" * 100_000) == "x" * MAX_TEXT_LENGTH + "…"
    assert clipped("x" * MAX_TEXT_LENGTH) == "x" * MAX_TEXT_LENGTH
    assert clipped("\udc80") == "\ufffd"


def test_non_finite_numbers_are_null():
    assert plain({"a": (math.nan, -math.inf, 1 / 3), "b": True, "c": 3}) == {
        "a": [None, None, 0.333333],
        "b": True,
        "c": 3,
    }
