"""Exceptions of polyhead. Each message states the rule, what arrived, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class PolyheadError(Exception):
    """Base class of every exception that polyhead raises deliberately."""


class ShapeError(PolyheadError, ValueError):
    """A tensor shape, size or count violates a constraint."""


class DtypeError(PolyheadError, TypeError):
    """A tensor has an unsupported dtype, or two dtypes disagree."""


class DeviceError(PolyheadError, ValueError):
    """Tensors that must share a device are on different devices."""


class MaskError(PolyheadError, ValueError):
    """A mask is malformed, ambiguous or incompatible with the attention it is used for."""


class CacheError(PolyheadError, ValueError):
    """A KV cache is full, has a different layout, or does not support the operation."""


class CheckpointError(PolyheadError, RuntimeError):
    """A state dict was saved by a layer with a different head layout."""


class OptionError(PolyheadError, ValueError):
    """An option is out of range, or two options are mutually exclusive."""


class NonFiniteError(OptionError):
    """A model's loss or outputs are NaN or Inf, because of its weights or its input."""


class GradientError(PolyheadError, RuntimeError):
    """A gradient is requested of a value that is not differentiable."""


class CommunicationError(PolyheadError, RuntimeError):
    """A rank of several processes failed, disagrees with the others, or does not answer; the message names it."""


class BackendUnsupported(PolyheadError, RuntimeError):
    """An explicitly requested backend does not support the call; `reasons` lists every reason.

    Args:
        backend: name of the backend that was requested.
        reasons: reasons why it cannot serve the call, at least one.
    """

    def __init__(self, backend: str, reasons: Sequence[str]) -> None:
        self.backend = backend
        self.reasons = tuple(reasons)
        super().__init__(f"backend {backend!r} cannot serve this request: " + "; ".join(self.reasons))

    def __reduce__(self) -> tuple[type[BackendUnsupported], tuple[str, tuple[str, ...]]]:
        return type(self), (self.backend, self.reasons)
