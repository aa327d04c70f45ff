"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" with the known names that contain a name or resemble it, "" if there are none."""
    known, name = tuple(known), name.lower()
    similar = [x for x in known if name in x] or get_close_matches(name, known, n=1)
    return f"did you mean {' or '.join(similar)}?" if similar else ""
