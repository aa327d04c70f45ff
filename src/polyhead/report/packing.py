"""Encoding of arrays and texts for a page: compact base64 arrays, and JSON and text that are safe inside HTML."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

MAX_TEXT_LENGTH = 200  # characters of a token or a name; longer texts are truncated with an ellipsis
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Markup characters, JavaScript line terminators, and invisible or bidirectional control characters.
_ESCAPED = re.compile("[<>&\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff]")


def packed_weights(x: Tensor) -> dict[str, Any]:
    """Quantise an array of weights to one byte each: `data / 255 * scale`, with one scale per entry of the first axis.

    The scale is the maximum of the entry, so that nearly uniform attention keeps its resolution. An array with negative
    or non-finite numbers, which a byte cannot hold, is encoded by `packed_floats`.

    >>> import torch
    >>> packed_weights(torch.tensor([[0.0, 0.5], [0.1, 0.02]]))
    {'shape': [2, 2], 'type': 'u8', 'scale': [0.5, 0.1], 'data': 'AP//Mw=='}
    """
    import torch

    numbers = x.detach().cpu().double()
    if not bool((numbers.isfinite() & (numbers >= 0)).all()):
        return packed_floats(numbers.float())
    largest = numbers.flatten(1).amax(1) if numbers.numel() else numbers.new_zeros(len(numbers))
    scale = torch.where(largest > 0, largest, 1.0).reshape(-1, *(1 for _ in numbers.shape[1:]))
    data = (numbers / scale * 255).round().to(torch.uint8)
    return {
        "shape": list(x.shape),
        "type": "u8",
        "scale": [float(f"{number:.6g}") for number in largest.tolist()],
        "data": base64.b64encode(data.numpy().tobytes()).decode(),
    }


def packed_floats(x: Tensor, *, bits: Literal[32, 64] = 32) -> dict[str, Any]:
    """Encode an array as little-endian floats in base64; NaN and infinities are preserved."""
    data = x.detach().cpu().contiguous().numpy().astype(f"<f{bits // 8}").tobytes()
    return {"shape": list(x.shape), "type": f"f{bits}", "scale": None, "data": base64.b64encode(data).decode()}


def clipped(text: str, longest: int = MAX_TEXT_LENGTH) -> str:
    """Return a text truncated to `longest` characters, with lone surrogates replaced.

    >>> clipped("attention", longest=5)
    'atten…'
    """
    text = _LONE_SURROGATE.sub("\ufffd", text)
    return text if len(text) <= longest else f"{text[:longest]}…"


def plain(x: Any) -> Any:
    """Return a JSON-compatible value: six significant digits, null for non-finite, no lone surrogates, no tuples.

    Dataclasses become objects with the names of their fields.
    """
    if is_dataclass(x) and not isinstance(x, type):
        x = asdict(x)
    if isinstance(x, str):
        return _LONE_SURROGATE.sub("\ufffd", x)
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {plain(str(name)): plain(value) for name, value in x.items()}
    return [plain(value) for value in x] if isinstance(x, list | tuple) else x


def json_in_html(value: Any) -> str:
    """Return a value as JSON that is safe inside a `<script>` element: it cannot end the element or open markup.

    >>> json_in_html(["</script>"])
    '["\\\\u003c/script\\\\u003e"]'
    """
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def text_in_html(text: str) -> str:
    """Escape a text for HTML; control, format and surrogate characters become replacement characters.

    >>> text_in_html("<b>")
    '&lt;b&gt;'
    """
    return html.escape("".join("\ufffd" if unicodedata.category(x) in ("Cc", "Cf", "Cs") else x for x in text))
