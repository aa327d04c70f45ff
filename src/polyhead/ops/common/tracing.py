"""Who looks on while operators are called: compilers, function transforms, dispatch modes.

Who traces must meet an operator, which nobody else need pay for. Who transforms must meet plain operators, for which
PyTorch has rules.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

EXPORTED = "an exported graph is to hold plain operators, not one that only polyhead knows"
TRANSFORMED = "PyTorch's function transforms and forward-mode differentiation need plain operators"


def is_exporting() -> bool:
    """Whether the call becomes part of an exported graph.

    The flag behind `torch.compiler.is_exporting`: the function itself says True in every compiled call of PyTorch 2.11.
    """
    return bool(torch.compiler._is_exporting_flag)


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation looks on; a compiler has its own way with them."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def is_forward_mode() -> bool:
    """Whether derivatives go forward along with the values."""
    if not is_transformed():
        return False
    innermost = torch._C._functorch.peek_interpreter_stack()
    return forward_ad._current_level >= 0 or (
        innermost is not None and innermost.key() == torch._C._functorch.TransformType.Jvp
    )


def is_traced(tensor: Tensor) -> bool:
    """Whether a compiler, a dispatch mode, a subclass of tensors or a meta device looks on."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor or tensor.is_meta:
        return True
    return is_watched()


def is_watched() -> bool:
    """Whether a dispatch mode looks on, as one that counts FLOPs does."""
    return _get_current_dispatch_mode() is not None
