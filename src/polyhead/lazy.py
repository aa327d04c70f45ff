"""Import the public names of a package when the first of them is used.

The command line shows help and refuses bad arguments without importing PyTorch: importing a small module of a package
must not import the whole package. A package imports its public names in `exports.py`, each as itself so that type
checkers take it for public too, and its `__init__.py` has

    __getattr__, __dir__ = lazy_exports(__name__)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that import a submodule, or `exports`, on first use."""
    namespace = vars(sys.modules[package])

    def load() -> list[str]:
        exports = import_module(f"{package}.exports")
        public = {name: value for name, value in vars(exports).items() if not name.startswith("_")}
        for name, value in {**public, "__all__": sorted(public)}.items():
            namespace.setdefault(name, value)  # a name that the user replaced stays replaced
        return list(public)

    def get(name: str) -> Any:
        if not name.startswith("__") or name == "__all__":
            if find_spec(f"{package}.{name}") is not None:
                return import_module(f"{package}.{name}")
            load()
            if name in namespace:
                return namespace[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*load(), *namespace})

    return get, names
