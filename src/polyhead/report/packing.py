"""Numbers and texts as a page carries them: arrays in few bytes, texts that no reader of HTML can mistake for code."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LONGEST_TEXT = 200  # characters of a token or a name; what is longer is cut, and ends in an ellipsis
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# What ends or opens markup, what ends a line of JavaScript, and what is not seen or turns the text around it.
_ESCAPED = re.compile("[<>&\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff]")


def packed_shares(x: Tensor) -> dict[str, Any]:
    """An array of shares in a byte each: `data / 255 * scale`, with the scale of each entry of the first axis.

    The scale is the largest number there, so that a head that looks everywhere alike is still told apart.

    >>> packed_shares(torch.tensor([[0.0, 0.5], [0.1, 0.02]]))
    {'shape': [2, 2], 'type': 'u8', 'scale': [0.5, 0.1], 'data': 'AP//Mw=='}
    """
    numbers = x.detach().cpu().double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0.0)
    largest = numbers.flatten(1).amax(1) if numbers.numel() else numbers.new_zeros(len(numbers))
    scale = torch.where(largest > 0, largest, 1.0).reshape(-1, *(1 for _ in numbers.shape[1:]))
    data = (numbers / scale * 255).round().to(torch.uint8)
    return {
        "shape": list(x.shape),
        "type": "u8",
        "scale": [float(f"{number:.6g}") for number in largest.tolist()],
        "data": base64.b64encode(data.numpy().tobytes()).decode(),
    }


def packed_floats(x: Tensor) -> dict[str, Any]:
    """An array of numbers in four bytes each, little-endian; NaN stays NaN."""
    data = x.detach().cpu().float().contiguous().numpy().astype("<f4").tobytes()
    return {"shape": list(x.shape), "type": "f32", "scale": None, "data": base64.b64encode(data).decode()}


def clipped(text: str, longest: int = LONGEST_TEXT) -> str:
    """A text that a page can show: no longer than that, and without halves of surrogate pairs.

    >>> clipped("attention", longest=5)
    'atten…'
    """
    text = _LONE_SURROGATE.sub("\ufffd", text)
    return text if len(text) <= longest else f"{text[:longest]}…"


def plain(x: Any) -> Any:
    """What JSON can say: numbers of six digits, null for what is not finite, no lone surrogates, lists for tuples."""
    if isinstance(x, str):
        return _LONE_SURROGATE.sub("\ufffd", x)
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {plain(str(name)): plain(value) for name, value in x.items()}
    return [plain(value) for value in x] if isinstance(x, list | tuple) else x


def json_in_html(value: Any) -> str:
    """A value as JSON that may stand in a `<script>` element: nothing in it can end the element or be taken for markup.

    >>> json_in_html(["</script>"])
    '["\\\\u003c/script\\\\u003e"]'
    """
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
