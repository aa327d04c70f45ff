"""Observe the attention heads of a running model: `observe` and the mergeable values it collects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhead.lazy import lazy_exports

if TYPE_CHECKING:
    from polyhead.observation.exports import *
    from polyhead.observation.exports import __all__ as __all__

__getattr__, __dir__ = lazy_exports(__name__)
