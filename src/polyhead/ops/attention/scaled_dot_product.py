"""`F.scaled_dot_product_attention` with gradients that do not depend on other calls in the process.

PyTorch's cache of plans for cuDNN's backward is shared by all calls of a thread, and does not distinguish layouts of
the output gradient (`cudnn_backward.py`). A call that records gradients runs cuDNN on separate plans, or PyTorch's
flash or memory-efficient operator, called directly: disabling cuDNN by its flag would change the state of the whole
process. Calls without gradients keep cuDNN's forward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyhead.ops.attention import cudnn_backward
from polyhead.ops.attention.alignment import aligned
from polyhead.ops.common.tracing import is_exporting, is_transformed

_NAMES = {backend.value: name.removesuffix("_ATTENTION").lower() for name, backend in SDPBackend.__members__.items()}


def scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    grouped: bool = False,
) -> Tensor:
    """Attend as `F.scaled_dot_product_attention` does, with gradients that depend on this call alone.

    An exported graph contains PyTorch's operator unchanged: its kernel is chosen when the graph runs.
    """
    if query.is_cuda:
        query, key, value = aligned(query, key, value)
        if mask is not None and mask.dtype is not torch.bool:  # PyTorch copies boolean ones
            (mask,) = aligned(mask)
    is_empty = query.is_cuda and not (query.numel() and key.numel())
    if not is_empty and not _avoids_cudnn(query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    if torch.compiler.is_compiling():
        # The kernel is chosen while the graph is traced, and so is its backward.
        with without_cudnn():
            return F.scaled_dot_product_attention(
                query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped
            )
    if torch.is_autocast_enabled("cuda"):
        # Autocast covers PyTorch's function but not the operators below it.
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (_autocast(x, dtype) for x in (query, key, value))
        mask = None if mask is None else _autocast(mask, dtype)
    # For empty tensors cuDNN's kernel returns no tensor at all, and the formula costs nothing.
    name = "math" if is_empty else _training_kernel(query, key, value, mask, dropout, causal, grouped)
    if name == "cudnn":
        return cudnn_backward.attend(query, key, value, causal, scale)
    if name == "flash":
        return _flash(query, key, value, dropout, causal, scale)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    if name == "efficient":
        return _efficient(query, key, value, mask, dropout, causal, scale)
    return torch._scaled_dot_product_attention_math(
        query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=grouped
    )[0]


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a query and a scale with the same products, for kernels that need a scale above zero.

    PyTorch's kernels multiply scores by the scale after masking, so a causal mask's -inf becomes NaN or +inf.
    """
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (query * 0.0, 1.0)


def kernel_name(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    grouped: bool = False,
) -> str:
    """Return the kernel that `scaled_dot_product` runs in eager mode: cudnn, flash, efficient or math."""
    if _avoids_cudnn(query, key, value, mask):
        return _training_kernel(query, key, value, mask, dropout, causal, grouped)
    choice = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    return _NAMES[choice]


def records_gradients(*tensors: Tensor | None) -> bool:
    """Return True if autograd or a function transform may differentiate with respect to any of these."""
    if is_transformed() or torch._C._are_functorch_transforms_active():
        return True  # tensors of an inner level do not show whether the transform differentiates them
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def without_cudnn() -> AbstractContextManager[None]:
    """Disable cuDNN's attention in this process, for gradients of models that call PyTorch's function."""
    # Dynamo traces these getters, but not those of torch.backends.cuda.
    backends = [SDPBackend.FLASH_ATTENTION] if torch._C._get_flash_sdp_enabled() else []
    backends += [SDPBackend.EFFICIENT_ATTENTION] if torch._C._get_mem_efficient_sdp_enabled() else []
    backends += [SDPBackend.MATH] if torch._C._get_math_sdp_enabled() else []
    return sdpa_kernel(backends)


def _avoids_cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return True if PyTorch might run cuDNN's backward on a plan for another layout."""
    return query.is_cuda and not query.is_nested and not is_exporting() and records_gradients(query, key, value, mask)


def _training_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, grouped: bool
) -> str:
    """Return the fastest kernel that supports the call and was not disabled by the user."""
    if query.dim() != 4:
        return "math"
    params = SDPAParams(query, key, value, mask, dropout, causal, grouped)
    is_flash = can_use_flash_attention(params)
    is_plain = mask is None and not dropout and (not is_flash or cudnn_backward.is_worth_it(query, key))
    if is_plain and cudnn_backward.is_available(query) and can_use_cudnn_attention(params):
        return "cudnn"
    if is_flash:
        return "flash"
    return "efficient" if can_use_efficient_attention(params) else "math"


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None) -> Tensor:
    """Run the flash operator, which takes head dims that are multiples of 8."""
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    padding = -head_dim % 8
    if padding:
        query, key, value = (F.pad(x, (0, padding)) for x in (query, key, value))
    output = torch._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)[0]
    return output[..., :head_dim] if padding else output


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """Run the memory-efficient operator, which needs a four-axis mask with aligned rows."""
    if mask is not None:
        keys = key.shape[2]
        mask = mask.expand(*mask.shape[:-1], keys)
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            mask = F.pad(mask.contiguous(), (0, -keys % 8))[..., :keys]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], keys)
    return torch._scaled_dot_product_efficient_attention(query, key, value, mask, True, dropout, causal, scale=scale)[0]
