"""Cost model of attention layers: parameters, FLOPs, bytes, memory and time, from a config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhead.lazy import lazy_exports

if TYPE_CHECKING:
    from polyhead.costs.exports import *

__getattr__, __dir__ = lazy_exports(__name__)
