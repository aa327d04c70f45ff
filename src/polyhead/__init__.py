"""polyhead: multi-head attention you can run, watch and reshape, one head at a time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polyhead.version import VERSION

if TYPE_CHECKING:
    from polyhead.exports import *  # noqa: F403
    from polyhead.exports import __all__ as __all__

__version__ = VERSION


def __getattr__(name: str) -> Any:
    """Import the library when its first name is used: the command line shows its help without importing PyTorch."""
    if not name.startswith("__") or name == "__all__":
        exports = import_module("polyhead.exports")
        globals().update({public: getattr(exports, public) for public in exports.__all__}, __all__=exports.__all__)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("polyhead.exports").__all__})
