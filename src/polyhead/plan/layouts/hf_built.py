"""What transformers really builds for a config: the weights of each layer's attention, counted without making any."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

# Matrices in what a layer calls its attention, its norms left out.
_OF_ATTENTION = re.compile(r"\b(?:layers|layer|h|blocks|block)\.(\d+)\.(?:self_attn|self_attention|attention|attn)\.")


def config_class(family: str) -> Any:
    """The class that transformers has for a `model_type`; None where it is not installed or has none."""
    try:
        from transformers import AutoConfig

        return type(AutoConfig.for_model(family))
    except (ImportError, ValueError):
        return None


def filled_fields(found: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Every field as transformers' own config has it; empty where there is none, or where it refuses the fields."""
    made = _config(found, family)
    return {} if made is None else dict(made.to_dict())


def built_projections(found: Mapping[str, Any], family: str) -> frozenset[int]:
    """Weights of the matrices in each layer's attention, each number once; empty where nothing is built or found."""
    made = _config(found, family)
    if made is None:
        return frozenset()
    from transformers import AutoModel

    from polyhead.sources.loading import quiet

    with quiet(progress=False), torch.device("meta"):
        try:
            model = AutoModel.from_config(made)
        except (ImportError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError):
            return frozenset()  # parts that are not installed, or a config that only its own code can build
    layers: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        place = _OF_ATTENTION.search(name)
        if place is not None and parameter.ndim == 2:
            layers[place[1]] = layers.get(place[1], 0) + parameter.numel()
    return frozenset(layers.values())


def _config(found: Mapping[str, Any], family: str) -> Any:
    kind = config_class(family)
    if kind is None:
        return None
    from huggingface_hub.errors import StrictDataclassError

    from polyhead.sources.loading import quiet

    with quiet(progress=False):
        try:
            return kind.from_dict(dict(found))
        except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError):
            return None  # fields that it does not take: what they say themselves decides
