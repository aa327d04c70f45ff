"""Edit the heads of a trained model: describe, preview, apply and undo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhead.lazy import lazy_exports

if TYPE_CHECKING:
    from polyhead.surgery.exports import *

__getattr__, __dir__ = lazy_exports(__name__)
