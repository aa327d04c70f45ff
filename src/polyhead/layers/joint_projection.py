"""Several linear projections of one input as a single matrix product; each remains a module.

A layer's `q_proj`, `k_proj` and `v_proj` stay ordinary `nn.Linear` modules, so that checkpoints, sharding and adapters
find them. A `JointProjection` stores their parameters contiguously and views them as one stacked matrix without
copying. Anything that invalidates this (an adapter in place of a module, a hook, parameters that were moved, sharded
or replaced, autocast, a traced graph) is detected at the call, and the modules are called one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from polyhead.ops.common.tracing import is_transformed

_LINEAR = nn.Linear.forward


class JointProjection:
    """Apply `linears`, which must have the same input width, as one matrix product where possible."""

    __slots__ = ("_hooks", "_laid", "_parameters", "bias", "linears", "sizes", "weight")

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = tuple(linears)
        self.sizes = [linear.out_features for linear in linears]
        self.weight: Tensor | None = _stack_parameters([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears]
        self.bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            self.bias = _stack_parameters(biases)
            if self.bias is None:
                self.weight = None
        self._parameters = tuple(p for p in (*(linear.weight for linear in linears), *biases) if p is not None)
        self._hooks = tuple(hooks for linear in linears for hooks in hooks_of(linear))
        self._laid = [
            (linear._parameters, name, parameter, 0 if parameter is None else parameter.data_ptr())
            for linear in linears
            for name, parameter in linear._parameters.items()
            if self.weight is not None
        ]

    def is_one_product(self, x: Tensor) -> bool:
        """Return True if the parameters are still contiguous and calling the modules would do nothing else.

        Checked at every call, so it must stay within a few microseconds.
        """
        weight = self.weight
        if weight is None or torch.compiler.is_compiling() or x.dtype is not weight.dtype:
            return False
        if x.is_cpu is not weight.is_cpu or x.get_device() != weight.get_device():
            return False
        if any(self._hooks) or has_global_hooks() or torch._C._is_any_autocast_enabled() or is_transformed():
            return False
        if not all(map(is_plain_linear, self.linears)):
            return False
        for table, name, parameter, pointer in self._laid:
            if table.get(name) is not parameter or (parameter is not None and parameter.data_ptr() != pointer):
                return False
        return True

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Return `[linear(x) for linear in linears]`."""
        if self.is_one_product(x):
            return self.joined(x).split_with_sizes(self.sizes, -1)
        return [linear(x) for linear in self.linears]

    def joined(self, x: Tensor) -> Tensor:
        """Return all outputs concatenated on the last axis; requires `is_one_product`."""
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self._parameters)):
            if x.is_cpu:
                tracked: Tensor = _apply_joint(x, self, *self._parameters)
                return tracked
            # On a device copying the weights costs less than a backward written in Python.
            count = len(self.sizes)
            weights, biases = self._parameters[:count], self._parameters[count:]
            return F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)


def apply_linears(joint: JointProjection | None, linears: tuple[nn.Module, ...], x: Tensor) -> Sequence[Tensor]:
    """Return `[linear(x) for linear in linears]`, by `joint` if it is still of these modules."""
    if joint is not None and joint.linears == linears:
        return joint(x)
    return [linear(x) for linear in linears]


def is_plain_linear(module: nn.Module) -> bool:
    """Return True if the module is an `nn.Linear` whose `forward` was not replaced.

    Adapters and offloading replace it. Hooks are checked separately, see `hooks_of`.
    """
    return type(module) is nn.Linear and "forward" not in module.__dict__ and nn.Linear.forward is _LINEAR


def hooks_of(linear: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the module's hook tables; if any is non-empty, a call is more than a matrix product."""
    return linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks


def has_global_hooks() -> bool:
    return bool(
        nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
    )


@torch.no_grad()
def _stack_parameters(parameters: Sequence[Tensor | None]) -> Tensor | None:
    """Move parameters into one block, stacked by rows, and return it; None if not possible."""
    plain = [p for p in parameters if type(p) is nn.Parameter and p.is_contiguous() and not p.is_meta]
    if len(plain) != len(parameters) or is_transformed():
        return None
    if len({p.data_ptr() for p in plain}) != len(plain):
        return None  # tied parameters stay tied
    first = plain[0]
    if any(p.dtype is not first.dtype or p.device != first.device or p.shape[1:] != first.shape[1:] for p in plain):
        return None
    rows = [p.shape[0] for p in plain]
    if not _are_adjacent(plain):
        for parameter, part in zip(plain, torch.cat([p.detach() for p in plain]).split(rows), strict=True):
            parameter.data = part
    return first.detach().as_strided((sum(rows), *first.shape[1:]), first.stride())


def _are_adjacent(parameters: Sequence[Tensor]) -> bool:
    """Return True if the parameters are adjacent in one storage."""
    first = parameters[0]
    end, storage = first.data_ptr() + first.nbytes, first.untyped_storage().data_ptr()
    for parameter in parameters[1:]:
        if parameter.data_ptr() != end or parameter.untyped_storage().data_ptr() != storage:
            return False
        end += parameter.nbytes
    return True


class _Joint(torch.autograd.Function):
    """Autograd function of the joint product, written for little Python overhead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, joint: JointProjection, *parameters: Tensor) -> Tensor:
        assert joint.weight is not None
        ctx.joint = joint
        ctx.versions = [weight._version for weight in parameters[: len(joint.sizes)]]
        ctx.save_for_backward(x)
        return F.linear(x, joint.weight, joint.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        joint: JointProjection = ctx.joint
        parameters, count = joint._parameters, len(joint.sizes)
        # A second derivative needs the graph of each weight; a first one can use the contiguous block.
        weight = torch.cat(parameters[:count]) if torch.is_grad_enabled() or joint.weight is None else joint.weight
        rows, needs = grad.flatten(0, -2), ctx.needs_input_grad
        grad_x = None
        if needs[0]:
            # The weights are not saved tensors, so autograd does not check their versions.
            if ctx.versions != [weight._version for weight in parameters[:count]]:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    "a projection's weight was modified between the forward and the backward"
                )
            grad_x = grad @ weight
        grad_weights: Sequence[Tensor | None] = [None] * count
        grad_biases: Sequence[Tensor | None] = [None] * (len(parameters) - count)
        if True in needs[2 : 2 + count]:
            grad_weights = (rows.t() @ x.flatten(0, -2)).split_with_sizes(joint.sizes)
        if True in needs[2 + count :]:
            grad_biases = rows.sum(0).split_with_sizes(joint.sizes)
        return grad_x, None, *grad_weights, *grad_biases


# The C++ `apply`, without the Python wrapper's check for functorch transforms: `is_one_product` has ruled them out, and
# at a few tokens the check takes longer than everything else here.
_apply_joint = super(torch.autograd.Function, _Joint).apply
