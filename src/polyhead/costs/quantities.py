"""Format and parse counts, sizes in bytes and times: 1.34 G, 16 GiB, 230 µs."""

from __future__ import annotations

import re

_COUNTS = ("", "K", "M", "G", "T", "P", "E")
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)")


def count(number: float) -> str:
    """Format a count with an SI prefix.

    >>> count(0), count(999), count(41943040), count(5.1e18)
    ('0', '999', '41.9 M', '5.1 E')
    """
    return _scaled(float(number), 1000, _COUNTS)


def size(number: float) -> str:
    """Format a number of bytes with a binary prefix.

    >>> size(512), size(131072), size(1.5 * 2**30)
    ('512 B', '128 KiB', '1.5 GiB')
    """
    return _scaled(float(number), 1024, _BYTES)


def seconds(number: float) -> str:
    """Format a time in s, ms or µs.

    >>> seconds(2.5), seconds(0.0123), seconds(4.2e-5)
    ('2.5 s', '12.3 ms', '42 µs')
    """
    if number >= 1 or number == 0:
        return f"{_digits(number)} s"
    return f"{_digits(number * 1e3)} ms" if number >= 1e-3 else f"{_digits(number * 1e6)} µs"


def parse_count(text: str, *, of_bytes: bool = False) -> int:
    """Parse a count with an SI prefix, or a number of bytes with a binary one.

    >>> parse_count("1.5G"), parse_count("64KiB", of_bytes=True), parse_count("64K", of_bytes=True)
    (1500000000, 65536, 65536)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not of_bytes):
        example = "65536, 64KiB or 1.5GiB" if of_bytes else "1000000, 500M or 1.5G"
        raise ValueError(f"expected a number such as {example}; got {text!r}")
    base = 1024 if of_bytes else 1000
    return round(float(match[1]) * base ** _COUNTS.index(match[2].upper()))


def parse_seconds(text: str) -> float:
    """Parse a time with a unit into seconds.

    >>> parse_seconds("20ms"), parse_seconds("1.5 s")
    (0.02, 1.5)
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected a time such as 2s, 20ms or 300us; got {text!r}")
    return float(match[1]) / {"s": 1, "ms": 1e3, "us": 1e6, "µs": 1e6}[match[2]]


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units:
        if number < base * 0.9995 or unit == units[-1]:
            return f"{_digits(number)} {unit}".rstrip()
        number /= base
    raise AssertionError("unreachable: the last unit accepts any number")


def _digits(number: float) -> str:
    """Format with three significant digits, without an exponent."""
    if number >= 1000:
        return f"{number:,.0f}"
    text = f"{number:.3g}"
    return f"{number:.0f}" if "e" in text else text
