"""The check that edits are made in the model that they were meant for."""

from __future__ import annotations

from polyhead.errors import OptionError
from polyhead.sources.fingerprint import fingerprint

__all__ = ["check_expected", "fingerprint"]


def check_expected(expect: str | None, found: str) -> None:
    """That edits are made in the model that they were meant for, where that was said."""
    if expect is not None and expect != found:
        raise OptionError(f"these edits are for the model with fingerprint {expect}, got one with {found}")
