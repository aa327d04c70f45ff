"""The layout in which a gradient reaches PyTorch's attention.

PyTorch keeps the plans that cuDNN made for a backward by the sizes and strides of query, key and value. A plan is made
for the strides of one gradient of the output, and another call with the same inputs and a gradient that lies otherwise
in memory is read by that plan all the same: its gradients are wrong, and nothing says so. So every gradient is brought
into the layout of the output before it gets there, which is the same for the same inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from polyhead.functional.tracing import is_exporting, is_transformed


def keep_gradient_layout(output: Tensor) -> Tensor:
    """The output of PyTorch's attention, whose gradient will have its layout; nothing is copied where it has."""
    if not (output.requires_grad and _may_be_planned(output)) or is_exporting():
        return output
    if torch.compiler.is_compiling() or is_transformed():
        return _Kept.apply(output)
    output.register_hook(functools.partial(laid_out, strides=output.stride()))
    return output


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The same numbers with these strides. Those of an axis of one entry do not matter."""
    if all(own == asked for size, own, asked in zip(x.shape, x.stride(), strides, strict=True) if size > 1):
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


def _may_be_planned(output: Tensor) -> bool:
    return output.is_cuda


class _Kept(torch.autograd.Function):
    """The same for those who trace or transform: they know no hooks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.strides = output.stride()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return laid_out(grad, ctx.strides)
