"""What transformers really builds for a config: the weights of each layer's attention, counted without making any."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# Matrices in what a layer calls its attention, its norms left out.
_OF_ATTENTION = re.compile(r"\b(?:layers|layer|h|blocks|block)\.(\d+)\.(?:self_attn|self_attention|attention|attn)\.")
# What the code of a config or a model raises on sizes that it was not written for.
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Filled:
    """Every field as transformers' own config has it, or in its words why it takes none of them."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    refusal: str | None = None


def config_class(family: str) -> Any:
    """The class that transformers has for a `model_type`; None where it is not installed or has none."""
    try:
        from transformers import AutoConfig

        return type(AutoConfig.for_model(family))
    except (ImportError, ValueError):
        return None


def filled_fields(found: Mapping[str, Any], family: str) -> Filled:
    """What transformers makes of these fields; nothing where it is not installed or does not know the family."""
    made = _config(found, family)
    if made is None or isinstance(made, str):
        return Filled(refusal=made)
    text = _text_part(made)
    return Filled(made.to_dict() if text is made else {**made.to_dict(), **text.to_dict()})


def built_projections(found: Mapping[str, Any], family: str) -> frozenset[int]:
    """Weights of the matrices in each layer's attention, each number once; empty where nothing is built or found."""
    made = _config(found, family)
    if made is None or isinstance(made, str):
        return frozenset()
    from transformers import AutoModel

    from polyhead.sources.loading import quiet

    with quiet(progress=False), torch.device("meta"):
        try:
            model = AutoModel.from_config(_text_part(made))
        except (*_REFUSALS, ImportError, OSError):
            return frozenset()  # parts that are not installed, or a config that only its own code can build
    layers: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        place = _OF_ATTENTION.search(name)
        if place is not None and parameter.ndim == 2:
            layers[place[1]] = layers.get(place[1], 0) + parameter.numel()
    return frozenset(layers.values())


def _text_part(made: Any) -> Any:
    """Where the fields of a flat config went that also sees or hears: the layers counted are those that read text."""
    text = getattr(made, "text_config", None)
    return text if hasattr(text, "to_dict") else made


def _config(found: Mapping[str, Any], family: str) -> Any:
    """The config as transformers has it, the words with which it refuses it, or None where it knows nothing of it."""
    kind = config_class(family)
    if kind is None:
        return None
    from huggingface_hub.errors import StrictDataclassError

    from polyhead.sources.loading import quiet

    with quiet(progress=False):
        try:
            return kind.from_dict(dict(found))
        except (*_REFUSALS, StrictDataclassError) as error:
            # The last line says it, after one that names the check and one class of error or another.
            words = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            return re.sub(r"^\s*\w+Error: ", "", words[0]).strip().rstrip(".")
