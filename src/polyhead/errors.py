"""The errors polyhead raises: each says the rule, what arrived, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class PolyheadError(Exception):
    """The base of every error raised on purpose by polyhead."""


class ShapeError(PolyheadError, ValueError):
    """A tensor or a count does not have the size that the rule asks for."""


class DtypeError(PolyheadError, TypeError):
    """A tensor has a dtype that the operation cannot take, or two dtypes disagree."""


class DeviceError(PolyheadError, ValueError):
    """Tensors that must live together live on different devices."""


class MaskError(PolyheadError, ValueError):
    """A mask is ill-formed, ambiguous or does not fit the attention it is used for."""


class CacheError(PolyheadError, ValueError):
    """A key/value cache is full, of another layout, or asked for something it cannot do."""


class CheckpointError(PolyheadError, RuntimeError):
    """A state dict was saved by a layer with another head layout."""


class OptionError(PolyheadError, ValueError):
    """An option has a value outside its range, or two options exclude each other."""


class GradientError(PolyheadError, RuntimeError):
    """A number is read to be differentiated, and has no gradient."""


class BackendUnsupported(PolyheadError, RuntimeError):
    """A backend was named that cannot serve the request; `reasons` lists every reason why."""

    def __init__(self, backend: str, reasons: Sequence[str]) -> None:
        self.backend = backend
        self.reasons = tuple(reasons)
        super().__init__(f"backend {backend!r} cannot serve this request: " + "; ".join(self.reasons))

    def __reduce__(self) -> tuple[type[BackendUnsupported], tuple[str, tuple[str, ...]]]:
        return type(self), (self.backend, self.reasons)
