"""Check that edits are applied to the model they were made for."""

from __future__ import annotations

from polyhead.errors import OptionError
from polyhead.sources.fingerprint import fingerprint

__all__ = ["check_expected", "fingerprint"]


def check_expected(expect: str | None, actual: str) -> None:
    """Raise `OptionError` if the model's fingerprint is not the expected one; None accepts any."""
    if expect is not None and expect != actual:
        raise OptionError(f"these edits are for the model with fingerprint {expect}, got one with {actual}")
