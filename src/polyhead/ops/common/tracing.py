"""Detect tracing, functional transforms and dispatch modes.

A tracer must see a custom operator, whose overhead eager calls avoid. A functional transform must see plain PyTorch
operators, for which PyTorch has transformation rules.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

EXPORTED = "an exported graph must contain plain PyTorch operators, not polyhead's own"
_CHECKPOINT = "torch.utils.checkpoint"  # the module of its dispatch modes, whose names are private
TRANSFORMED = "PyTorch's function transforms and forward-mode differentiation need plain operators"


def is_exporting() -> bool:
    """Return True while the call is traced by `torch.export`.

    Reads the flag behind `torch.compiler.is_exporting`: in PyTorch 2.11 that function returns True in every compiled
    call.
    """
    return bool(torch.compiler._is_exporting_flag)


def is_transformed() -> bool:
    """Return True under torch.func or forward-mode AD; False under a compiler, which handles both itself."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def is_forward_mode() -> bool:
    """Return True while forward-mode derivatives are computed."""
    if not is_transformed():
        return False
    innermost = torch._C._functorch.peek_interpreter_stack()
    return forward_ad._current_level >= 0 or (
        innermost is not None and innermost.key() == torch._C._functorch.TransformType.Jvp
    )


def is_traced(tensor: Tensor) -> bool:
    """Return True under a compiler or a dispatch mode, and for tensor subclasses and meta tensors."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor or tensor.is_meta:
        return True
    return _get_current_dispatch_mode() is not None


def is_watched() -> bool:
    """Return True while a dispatch mode is active, for instance PyTorch's FLOP counter."""
    return _get_current_dispatch_mode() is not None


def may_overwrite() -> bool:
    """Return True if results of operators may be overwritten: neither autograd nor selective checkpointing keeps them.

    Selective checkpointing is a dispatch mode, which returns results that it has kept to the recomputation. Under other
    modes, such as counters of FLOPs or of memory, the same operators run as without them.
    """
    if torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or not is_watched():
        return True
    return all(type(mode).__module__ != _CHECKPOINT for mode in _get_current_dispatch_mode_stack())
