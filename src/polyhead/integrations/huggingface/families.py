"""Which model families of the installed transformers use its attention interface: read from their sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from polyhead.errors import OptionError

# By lines and words: parsing half a million lines would take ten seconds.
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_ASKS = re.compile(r"ALL_ATTENTION_FUNCTIONS(?:\.get_interface\(|\[)")
_COMPUTES = re.compile(
    r"softmax\(|scaled_dot_product_attention\(|multi_head_attention_forward\(|matmul\(|einsum\(|bmm\(", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Family:
    """One folder of `transformers.models`.

    `attention` names its classes that ask the interface; `own` those that compute attention by themselves. A family
    with both is served in part; one without either builds on another family's classes.
    """

    name: str
    attention: tuple[str, ...]
    own: tuple[str, ...]

    @property
    def uses_interface(self) -> bool:
        return bool(self.attention)


@cache
def families() -> tuple[Family, ...]:
    """Every family that has a modeling file, by name.

    >>> found = {family.name: family for family in families()}
    >>> found["llama"].attention, found["bloom"].uses_interface
    (('LlamaAttention',), False)
    """
    try:
        import transformers
    except ImportError as error:
        raise OptionError(
            f"the list of families is read from transformers, got: {error}; pip install 'polyhead[hf]'"
        ) from error
    assert transformers.__file__ is not None
    root = Path(transformers.__file__).parent / "models"
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(root.glob("*/modeling_*.py")):
        kinds = found.setdefault(path.parent.name, {"asks": [], "computes": [], "named": []})
        for name, kind in _attention_classes(path.read_text(encoding="utf-8")):
            kinds[kind].append(name)
    return tuple(
        # A class that only bears the name counts where nothing else in its family does: its code is in a kernel.
        Family(name, tuple(kinds["asks"]), tuple(kinds["computes"] or ([] if kinds["asks"] else kinds["named"])))
        for name, kinds in found.items()
    )


def _attention_classes(source: str) -> Iterator[tuple[str, Literal["asks", "computes", "named"]]]:
    """The attention classes, and whether they ask the interface, compute by themselves or only bear the name."""
    _, *parts = _CLASS.split(source)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if _ASKS.search(body):
            yield name, "asks"
        elif "attention" in name.lower() and _COMPUTES.search(body):
            yield name, "computes"
        elif name.endswith("SelfAttention"):
            yield name, "named"
