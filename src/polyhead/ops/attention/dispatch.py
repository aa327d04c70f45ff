"""Choice of a backend: each reports why it cannot run a request, and `auto` takes the first that can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polyhead.errors import BackendUnsupported, OptionError
from polyhead.ops.attention import blockwise, fused, reference, sdpa
from polyhead.ops.attention.mask_rule import (
    is_bias_read_by_distance,
    is_mask_too_large,
    is_plain_forward_for_hopper,
    is_window_too_large,
)
from polyhead.ops.common.request import AttentionOutput, AttentionRequest
from polyhead.ops.common.tracing import EXPORTED, is_exporting, is_traced
from polyhead.ops.common.validation import check_backend
from polyhead.ops.common.visibility import Visibility


@dataclass(frozen=True, slots=True)
class Choice:
    """Suitability of one backend for a request."""

    backend: str
    supported: bool
    reasons: tuple[str, ...] = ()  # why it cannot run the request
    kernel: str = ""  # kernel that would run
    backward: str = ""  # kernel that would compute the gradients; empty if none are recorded
    avoided: str = ""  # why `auto` chooses another backend, though this one could run the request


@dataclass(frozen=True, slots=True)
class Explanation:
    """The backend that `auto` chooses for a request, and the suitability of each. Prints as a table."""

    chosen: str
    choices: tuple[Choice, ...]

    def __getitem__(self, backend: str) -> Choice:
        for choice in self.choices:
            if choice.backend == backend:
                return choice
        raise OptionError(f"backend must be one of {', '.join(c.backend for c in self.choices)}, got {backend!r}")

    @property
    def kernel(self) -> str:
        return self[self.chosen].kernel

    @property
    def backward(self) -> str:
        """Kernel that would compute the gradients; empty if none are recorded."""
        return self[self.chosen].backward

    def __str__(self) -> str:
        lines = []
        for choice in self.choices:
            mark = "->" if choice.backend == self.chosen else "  "
            text = choice.kernel if choice.supported else "no: " + "; ".join(choice.reasons)
            more = choice.avoided or (choice.backward and f"backward: {choice.backward}")
            lines.append(f"{mark} {choice.backend:<10} {text}{more and f'; {more}'}")
        return "\n".join(lines)


_RUN: dict[str, Callable[[AttentionRequest], AttentionOutput]] = {
    "sdpa": sdpa.run,
    "fused": fused.run,
    "blockwise": blockwise.run,
    "reference": reference.run,
}
_REASONS: dict[str, Callable[[AttentionRequest], list[str]]] = {
    "sdpa": sdpa.unsupported_reasons,
    "fused": fused.unsupported_reasons,
    "blockwise": blockwise.unsupported_reasons,
    "reference": reference.unsupported_reasons,
}
BACKENDS = tuple(_RUN)


def order(request: AttentionRequest) -> tuple[str, ...]:
    """Return the order in which `auto` tries the backends.

    PyTorch's fused kernels first, then our own for what those do not support, then tiles of plain PyTorch, then the
    formula. Statistics cost almost nothing in our kernel. Requested weights are materialised anyway, so the formula is
    the most direct way to compute them.
    """
    if request.weights:
        return ("reference", "blockwise")
    if request.statistics is not None:
        return ("fused", "blockwise", "reference")
    return ("sdpa", "fused", "blockwise", "reference")


def choose(request: AttentionRequest) -> str:
    """Return the first backend in `order` that can run the request and is not avoided."""
    for backend in order(request):
        if not _REASONS[backend](request) and not _avoided(backend, request):
            return backend
    return "reference"


def run(request: AttentionRequest, backend: str) -> AttentionOutput:
    if backend == "auto":
        return _RUN[choose(request)](request)
    check_backend(backend, BACKENDS)
    reasons = _REASONS[backend](request)
    if reasons:
        raise BackendUnsupported(backend, reasons)
    return _RUN[backend](request)


def explain(request: AttentionRequest) -> Explanation:
    chosen, choices = choose(request), []
    for backend in BACKENDS:
        reasons = _REASONS[backend](request)
        kernel = "" if reasons else _kernel(backend, request)
        avoided = "" if reasons or backend == chosen else _avoided(backend, request) or f"auto tries {chosen} first"
        backward = "" if reasons or not request.needs_grad else _backward(backend, request)
        choices.append(Choice(backend, not reasons, tuple(reasons), kernel, backward, avoided))
    return Explanation(chosen, tuple(choices))


def _avoided(backend: str, request: AttentionRequest) -> str:
    """Return the reason why `auto` skips a backend that could run the request; empty if it does not."""
    if backend == "sdpa":
        return _sdpa_avoided(request)
    if backend == "blockwise" and is_exporting():
        return "an exported graph must contain plain PyTorch operators, not unrolled tiles"
    if backend == "fused" and is_exporting():
        return EXPORTED
    return ""


def _sdpa_avoided(request: AttentionRequest) -> str:
    if request.statistics is not None:
        return "this second pass takes longer than tiles that compute them in one pass"
    visibility = request.visibility
    if _is_plain_forward_for_our_kernel(request):
        return "our forward is faster at these sizes"
    if visibility is None or is_exporting():
        return ""
    if is_mask_too_large(size := sdpa.materialised_bytes(request)):
        return f"its mask would be materialised, {size / 2**30:.1f} GiB"
    if _is_window_for_our_kernel(request, visibility) and not fused.unsupported_reasons(request):
        return "it computes every pair that the window masks, and our kernel skips them"
    if _is_bias_for_our_kernel(request, visibility) and not fused.unsupported_reasons(request):
        return "it needs the bias of every pair materialised, and our kernel reads it by distance"
    return ""


def _is_plain_forward_for_our_kernel(request: AttentionRequest) -> bool:
    query, visibility, (_, _, _, queries, keys) = request.query, request.visibility, request.sizes
    sizes = {"queries": queries, "keys": keys, "head_dim": query.shape[-1]}
    is_causal = visibility is not None
    if is_traced(query) or not is_plain_forward_for_hopper(query.device.type, query.dtype, causal=is_causal, **sizes):
        return False
    is_plain = visibility is None or (visibility.is_band and visibility.left is None and visibility.right == 0)
    return is_plain and not request.dropout and not request.needs_grad and fused.hopper_call(request) is not None


def _is_window_for_our_kernel(request: AttentionRequest, visibility: Visibility) -> bool:
    """Return True if the mask is only a sliding window and our kernel is faster at these sizes."""
    if visibility.left is None:
        return False
    query, (batch, heads, _, queries, keys) = request.query, request.sizes
    sizes = (batch, heads, queries, keys, query.shape[-1])
    return is_window_too_large(query.device.type, query.dtype, *sizes) and visibility.is_window


def _is_bias_for_our_kernel(request: AttentionRequest, visibility: Visibility) -> bool:
    """Return True if the mask has a relative bias that our kernel computes faster than PyTorch's."""
    if not len(visibility.relative_biases):
        return False
    query, (batch, heads, _, queries, keys) = request.query, request.sizes
    training = request.needs_grad
    return is_bias_read_by_distance(
        query.device.type,
        query.dtype,
        training=training,
        learned=training and any(term.table.requires_grad for term in visibility.relative_biases),
        pairs=batch * heads * queries * keys,
    )


def _kernel(backend: str, request: AttentionRequest) -> str:
    """Return a description of the kernel that would run, for `Choice.kernel`."""
    if backend == "sdpa":
        text = f"PyTorch's {sdpa.kernel(request)} kernel on {request.query.device.type}"
        return text if request.statistics is None else text + ", then a second pass over the logits for the statistics"
    if backend == "fused":
        return fused.kernel(request)
    return {"blockwise": "tiles of plain PyTorch, online softmax", "reference": "the formula, weights materialised"}[
        backend
    ]


def _backward(backend: str, request: AttentionRequest) -> str:
    """Return a description of the kernel that would compute the gradients, for `Choice.backward`."""
    if backend == "sdpa":
        return f"PyTorch's {sdpa.kernel(request)} kernel"
    return {"fused": "our kernel", "blockwise": "tiles, recomputed", "reference": "autograd of the formula"}[backend]
