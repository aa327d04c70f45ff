"""List the model families of the installed transformers that use its attention interface, from their sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from polyhead.errors import OptionError

# Regular expressions instead of `ast`: parsing half a million lines would take ten seconds.
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_USES_INTERFACE = re.compile(r"ALL_ATTENTION_FUNCTIONS(?:\.get_interface\(|\[)")
_COMPUTES = re.compile(
    r"softmax\(|scaled_dot_product_attention\(|multi_head_attention_forward\(|matmul\(|einsum\(|bmm\(", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: one folder of `transformers.models`.

    `attention` lists the classes that use the attention interface, `own` those that compute attention by themselves. A
    family with both is partly supported; one with neither uses the classes of another family.
    """

    name: str
    attention: tuple[str, ...]
    own: tuple[str, ...]

    @property
    def uses_interface(self) -> bool:
        return bool(self.attention)


@cache
def families() -> tuple[Family, ...]:
    """Return all families with a modeling file, sorted by name.

    >>> by_name = {family.name: family for family in families()}
    >>> by_name["llama"].attention, by_name["bloom"].uses_interface
    (('LlamaAttention',), False)
    """
    try:
        import transformers
    except ImportError as error:
        raise OptionError(
            f"listing model families needs transformers, got: {error}; install it with: pip install 'polyhead[hf]'"
        ) from error
    assert transformers.__file__ is not None
    root = Path(transformers.__file__).parent / "models"
    classes_by_family: dict[str, dict[str, list[str]]] = {}
    for path in sorted(root.glob("*/modeling_*.py")):
        kinds = classes_by_family.setdefault(path.parent.name, {"uses": [], "computes": [], "named": []})
        for name, kind in _attention_classes(path.read_text(encoding="utf-8")):
            kinds[kind].append(name)
    return tuple(
        # A class recognised by name only counts if its family has no other: its attention is inside a kernel.
        Family(name, tuple(kinds["uses"]), tuple(kinds["computes"] or ([] if kinds["uses"] else kinds["named"])))
        for name, kinds in classes_by_family.items()
    )


def _attention_classes(source: str) -> Iterator[tuple[str, Literal["uses", "computes", "named"]]]:
    """Yield attention classes: those that use the interface, compute attention, or are recognised by name only."""
    _, *parts = _CLASS.split(source)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if _USES_INTERFACE.search(body):
            yield name, "uses"
        elif "attention" in name.lower() and _COMPUTES.search(body):
            yield name, "computes"
        elif name.endswith("SelfAttention"):
            yield name, "named"
