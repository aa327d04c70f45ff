"""Limits of what the viewer accepts."""

from __future__ import annotations

TEXT_BYTES = 4 << 20
