"""Inspections: from observations of a text to roles, similarity and importance of every head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhead.lazy import lazy_exports

if TYPE_CHECKING:
    from polyhead.inspection.exports import *

__getattr__, __dir__ = lazy_exports(__name__)
