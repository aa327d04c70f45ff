"""Attention weights that transformers builds for a config, counted on the meta device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

# Names of parameters in a layer's attention module.
_OF_ATTENTION = re.compile(r"\b(?:layers|layer|h|blocks|block)\.(\d+)\.(?:self_attn|self_attention|attention|attn)\.")
# Exceptions that configs and models raise on unsupported sizes.
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def config_class(family: str) -> Any:
    """Return transformers' config class for a `model_type`; None if there is none or transformers is missing."""
    try:
        from transformers import AutoConfig

        return type(AutoConfig.for_model(family))
    except (ImportError, ValueError):
        return None


def filled_fields(content: Mapping[str, Any], family: str) -> tuple[Mapping[str, Any], str | None]:
    """Return the fields completed by transformers, and its error message if it refuses the config.

    There are no fields if transformers is missing or does not support the family.
    """
    config, refusal = _config(content, family)
    if config is None:
        return {}, refusal
    text = _text_part(config)
    return (config.to_dict() if text is config else {**config.to_dict(), **text.to_dict()}), None


def built_projections(content: Mapping[str, Any], family: str) -> frozenset[int]:
    """Return the distinct numbers of attention weights per layer; empty if the model cannot be built."""
    model = _built(content, family, "AutoModel")
    if model is None:
        return frozenset()
    layers: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        place = _OF_ATTENTION.search(name)
        if place is not None and parameter.ndim == 2:
            layers[place[1]] = layers.get(place[1], 0) + parameter.numel()
    return frozenset(layers.values())


def built_parameters(content: Mapping[str, Any], family: str, *, causal: bool) -> int | None:
    """Return the parameters of the whole model, with the head of a causal one; None if it cannot be built."""
    kinds = ("AutoModelForCausalLM", "AutoModel") if causal else ("AutoModel",)
    model = next(filter(None, (_built(content, family, kind) for kind in kinds)), None)
    return None if model is None else sum(parameter.numel() for parameter in model.parameters())


def _built(content: Mapping[str, Any], family: str, kind: str) -> Any:
    """Return the model that a class of transformers builds from a config, on the meta device; None if it cannot."""
    config, _ = _config(content, family)
    if config is None:
        return None
    import transformers

    from polyhead.sources.load_errors import quiet

    with quiet(progress=False), torch.device("meta"):
        try:
            return getattr(transformers, kind).from_config(_text_part(config), trust_remote_code=False)
        except (*_REFUSALS, ImportError, OSError):
            return None  # missing dependencies, or a config that needs remote code


def _text_part(config: Any) -> Any:
    """Return the text config of a multimodal model, whose layers are counted; else the config itself."""
    text = getattr(config, "text_config", None)
    return text if hasattr(text, "to_dict") else config


def _config(content: Mapping[str, Any], family: str) -> tuple[Any, str | None]:
    """Return transformers' config, or None with its error message if it refuses the fields of a known family."""
    kind = config_class(family)
    if kind is None:
        return None, None
    from huggingface_hub.errors import StrictDataclassError

    from polyhead.sources.load_errors import quiet

    with quiet(progress=False):
        try:
            return kind.from_dict(dict(content)), None
        except (*_REFUSALS, StrictDataclassError) as error:
            # The last line is the reason; the lines before it name the check and the class of the error.
            lines = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            return None, re.sub(r"^\s*\w+Error: ", "", lines[0]).strip().rstrip(".")
