"""Several linear maps of one input in a single matrix product, while each keeps its own name and parameters.

A layer's `q_proj`, `k_proj` and `v_proj` stay ordinary `nn.Linear` modules, so that checkpoints, sharding and adapters
find them. A `JointProjection` lays their parameters next to each other in memory and sees them as one tall matrix
without copying. Whatever breaks that (an adapter in place of a module, a hook, parameters that were moved, sharded or
replaced, autocast, a traced graph) is noticed at the call, and the modules are called one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module


class JointProjection:
    """The maps of `linears`, which must have one input width, as one matrix product where that is possible."""

    __slots__ = ("_laid", "bias", "linears", "sizes", "weight")

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = tuple(linears)
        self.sizes = [linear.out_features for linear in linears]
        self.weight: Tensor | None = _lay_side_by_side([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears]
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            self.bias = _lay_side_by_side(biases)
            if self.bias is None:
                self.weight = None
        self._laid = (
            [(linear, linear.weight, linear.weight.data_ptr()) for linear in linears] if self.weight is not None else []
        )
        self._laid += (
            [(linear, linear.bias, linear.bias.data_ptr()) for linear in linears] if self.bias is not None else []
        )

    def is_one_product(self, x: Tensor) -> bool:
        """Whether the parameters still lie where they were laid, and calling the modules would do nothing else."""
        weight = self.weight
        if weight is None or torch.compiler.is_compiling() or x.dtype is not weight.dtype or _is_transformed():
            return False
        for linear, parameter, pointer in self._laid:
            held = linear._parameters.get  # a parametrised module no longer holds its weight
            if parameter is not held("weight") and parameter is not held("bias") or parameter.data_ptr() != pointer:
                return False
        return all(map(is_plain, self.linears)) and not torch.is_autocast_enabled(x.device.type)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """`[linear(x) for linear in linears]`."""
        if not self.is_one_product(x):
            return [linear(x) for linear in self.linears]
        if torch.is_grad_enabled():
            parameters = [linear.weight for linear in self.linears]
            parameters += [linear.bias for linear in self.linears if linear.bias is not None]
            if x.requires_grad or any(p.requires_grad for p in parameters):
                if not x.is_cpu:
                    # Here copying the weights costs less than a backward written in Python.
                    return self._copied(x)
                outputs: Sequence[Tensor] = _Joint.apply(x, self, *parameters)
                return outputs
        return self.joined(x).split_with_sizes(self.sizes, -1)

    def _copied(self, x: Tensor) -> Sequence[Tensor]:
        weight = torch.cat([linear.weight for linear in self.linears])
        bias = None if self.bias is None else torch.cat([linear.bias for linear in self.linears])
        return F.linear(x, weight, bias).split_with_sizes(self.sizes, -1)

    def joined(self, x: Tensor) -> Tensor:
        """All outputs side by side on the last axis; only where `is_one_product` and nothing needs a gradient."""
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


def is_plain(linear: nn.Module) -> bool:
    """Whether calling the module would do its matrix product and nothing else."""
    if type(linear) is not nn.Linear or nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
        return False
    return not (
        linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks
    )


def _is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on, for which `_Joint` has no rules."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


@torch.no_grad()
def _lay_side_by_side(parameters: Sequence[Tensor | None]) -> Tensor | None:
    """Move parameters into one block of memory, end to end by rows, and return it; None where they do not fit together."""
    plain = [p for p in parameters if type(p) is nn.Parameter and p.is_contiguous() and not p.is_meta]
    if len(plain) != len(parameters) or _is_transformed():
        return None
    first = plain[0]
    if any(p.dtype is not first.dtype or p.device != first.device or p.shape[1:] != first.shape[1:] for p in plain):
        return None
    rows = [p.shape[0] for p in plain]
    if not _are_adjacent(plain):
        for parameter, part in zip(plain, torch.cat([p.detach() for p in plain]).split(rows), strict=True):
            parameter.data = part
    return first.detach().as_strided((sum(rows), *first.shape[1:]), first.stride())


def _are_adjacent(parameters: Sequence[Tensor]) -> bool:
    """Whether each parameter begins where the one before it ends, in the same storage."""
    first = parameters[0]
    end, storage = first.data_ptr() + first.nbytes, first.untyped_storage().data_ptr()
    for parameter in parameters[1:]:
        if parameter.data_ptr() != end or parameter.untyped_storage().data_ptr() != storage:
            return False
        end += parameter.nbytes
    return True


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, joint: JointProjection, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.joint = joint
        ctx.save_for_backward(x, *parameters[: len(joint.sizes)])
        return joint.joined(x).split_with_sizes(joint.sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors  # raises where a weight was written to since the forward
        joint: JointProjection = ctx.joint
        grad = torch.cat(grads, -1)
        needs = ctx.needs_input_grad
        count = len(weights)
        needs_weight, needs_bias = any(needs[2 : 2 + count]), any(needs[2 + count :])
        # A second derivative must see each weight; a first one can use the block they lie in.
        weight = torch.cat(weights) if torch.is_grad_enabled() or joint.weight is None else joint.weight
        rows = grad.flatten(0, -2)
        grad_x = grad @ weight if needs[0] else None
        grad_weights = (rows.T @ x.flatten(0, -2)).split_with_sizes(joint.sizes) if needs_weight else [None] * count
        grad_biases = rows.sum(0).split_with_sizes(joint.sizes) if needs_bias else [None] * (len(needs) - 2 - count)
        return grad_x, None, *grad_weights, *grad_biases
