"""One model under two implementations, and the error bound for their difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import polyhead.integrations.huggingface

# Results are float32, or float64 of which most families' eager rounds the weights to float32 and the norms compute in
# it. Each of the dozens of roundings in two layers moves a result by about float32's epsilon, 1.2e-7, of its largest
# element: within 64 of them, 8e-6. A mask that is wrong in one place moves it by 1e-2.
BOUND = 64 * torch.finfo(torch.float32).eps


@contextmanager
def implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Switch a model, and back."""
    before = model.config._attn_implementation
    model.set_attn_implementation(polyhead.integrations.huggingface.register() if name == "polyhead" else name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def result(output: Any) -> Tensor:
    """The tensor that everything else of an output is made of."""
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if output.get(name) is not None:
            return output[name]
    raise AssertionError(f"no result among {list(output)}")


def assert_same(actual: Tensor, expected: Tensor, where: Tensor | None = None) -> None:
    """Equal within `BOUND` of the largest element; `where` [batch, sequence] leaves out the rows of padding."""
    assert actual.shape == expected.shape
    assert actual.dtype is expected.dtype
    if where is not None:
        actual, expected = actual[where], expected[where]
    assert expected.numel()
    assert actual.isfinite().all()
    error, size = float((actual - expected).abs().max()), float(expected.abs().max())
    assert size > 1e-3, "a result of zeros proves nothing"
    assert error <= BOUND * size, f"error {error:.2e} exceeds {BOUND * size:.2e}"
