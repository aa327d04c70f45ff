"""Train models and watch their heads while they learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhead.lazy import lazy_exports

if TYPE_CHECKING:
    from polyhead.training.exports import *

__getattr__, __dir__ = lazy_exports(__name__)
