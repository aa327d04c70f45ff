"""Check, format and parse counts, sizes in bytes, times and dtypes. Importing this module does not import PyTorch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from polyhead.errors import OptionError

if TYPE_CHECKING:
    import torch

_SI_PREFIXES = ("", "K", "M", "G", "T", "P", "E")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)", re.IGNORECASE)
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_DTYPE_ALIASES |= {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_DTYPES = frozenset(("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"))
_DTYPES |= {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?B|bit)/s", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)")


def check_count(name: str, number: object, *, least: int = 0) -> None:
    """Raise unless `number` is an integer of at least `least`, which is 0 or 1."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise OptionError(f"{name} must be a {'positive' if least else 'non-negative'} integer, got {number!r}")


def count(number: float) -> str:
    """Format a count with an SI prefix.

    >>> count(0), count(999), count(41943040), count(5.1e18)
    ('0', '999', '41.9 M', '5.1 E')
    """
    return _scaled(float(number), 1000, _SI_PREFIXES)


def size(number: float) -> str:
    """Format a number of bytes with a binary prefix.

    >>> size(512), size(131072), size(1.5 * 2**30)
    ('512 B', '128 KiB', '1.5 GiB')
    """
    return _scaled(float(number), 1024, _BYTE_UNITS)


def decimal_size(number: float) -> str:
    """Format a number of bytes with a decimal prefix, as on the datasheets of machines.

    >>> decimal_size(80e9), decimal_size(2**30)
    ('80 GB', '1.07 GB')
    """
    return _scaled(float(number), 1000, _DECIMAL_UNITS)


def seconds(number: float) -> str:
    """Format a time in s, ms or µs.

    >>> seconds(2.5), seconds(0.0123), seconds(4.2e-5)
    ('2.5 s', '12.3 ms', '42 µs')
    """
    if number >= 1 or number == 0:
        return f"{_digits(number)} s"
    return f"{_digits(number * 1e3)} ms" if number >= 1e-3 else f"{_digits(number * 1e6)} µs"


def parse_count(text: str, *, of_bytes: bool = False, name: str = "a count") -> int:
    """Parse a count with an SI prefix, or a number of bytes; errors call it `name`.

    A number of bytes has a decimal (kB, MB, GB) or a binary prefix (KiB, MiB, GiB); one without a unit (64K) is binary.

    >>> parse_count("1.5G"), [parse_count(x, of_bytes=True) for x in ("64KiB", "64K", "64kB")]
    (1500000000, [65536, 65536, 64000])
    """
    match = _QUANTITY.fullmatch(text.strip())
    unit = "" if match is None else match[3].lower()
    if match is None or (unit and not of_bytes) or ("i" in unit and not match[2]):
        example = "65536, 64KiB or 1.5GiB" if of_bytes else "1000000, 500M or 1.5G"
        raise OptionError(f"{name} must be a number such as {example}; got {text!r}")
    base = 1024 if of_bytes and unit != "b" else 1000
    return round(float(match[1]) * base ** _SI_PREFIXES.index(match[2].upper()))


def parse_seconds(text: str, *, name: str = "a time") -> float:
    """Parse a time with a unit into seconds; errors call it `name`.

    >>> parse_seconds("20ms"), parse_seconds("1.5 s")
    (0.02, 1.5)
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{name} must be a time such as 2s, 20ms or 300us; got {text!r}")
    return float(match[1]) / {"s": 1, "ms": 1e3, "us": 1e6, "µs": 1e6}[match[2]]


def parse_bandwidth(text: str, *, name: str = "a bandwidth") -> float:
    """Parse a bandwidth into bytes per second; errors call it `name`.

    >>> parse_bandwidth("450GB/s"), parse_bandwidth("200 Gbit/s")
    (450000000000.0, 25000000000.0)
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise OptionError(f"{name} must be a bandwidth such as 450GB/s, 64GiB/s or 200Gbit/s; got {text!r}")
    unit = match[3].lower()
    scale = (1024 if unit == "ib" else 1000) ** _SI_PREFIXES.index(match[2].upper())
    return float(match[1]) * scale / (8 if unit == "bit" else 1)


def plural(number: int, noun: str) -> str:
    """Format a count and its noun, in the plural unless the count is 1.

    >>> plural(1, "head"), plural(4096, "head")
    ('1 head', '4,096 heads')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def named_dtype(name: object) -> torch.dtype:
    """Return the dtype with this name or alias.

    >>> named_dtype("bf16"), named_dtype("torch.float32")
    (torch.bfloat16, torch.float32)
    """
    import torch

    dtype: torch.dtype = getattr(torch, parse_dtype(name))
    return dtype


def parse_dtype(name: object) -> str:
    """Return PyTorch's name of a dtype, from that name or an alias.

    >>> parse_dtype("bf16"), parse_dtype("torch.float32")
    ('bfloat16', 'float32')
    """
    text = str(name).removeprefix("torch.").lower()
    text = _DTYPE_ALIASES.get(text, text)
    if text not in _DTYPES:
        raise OptionError(f"dtype must be float32, bfloat16, float16, float8_e4m3fn or int8; got {name!r}")
    return text


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units:
        # A number that would print as 1000 (or 1024) of a unit is 1 of the next one.
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
