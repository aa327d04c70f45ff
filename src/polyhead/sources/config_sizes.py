"""Limits on the sizes in a model's config, checked before any tensor is allocated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyhead.errors import CheckpointError
from polyhead.files import read_json, short

CONFIG_BYTES = 1 << 24
MAX_ELEMENTS_PER_BYTE = 16  # elements in memory per byte of the weight files; 4-bit weights have 2
_SLACK = 1 << 26  # elements; causal masks and position tables are not part of the files
_MAX_DEPTH = 8  # maximum nesting of configs
# Counts of submodules, heads, and widths; a list has one entry per layer.
_COUNTS = re.compile(r"(num_|n_)(\w+_)?(hidden_layers|layers?|blocks|experts|local_experts)|(en|de)coder_layers")
_HEADS = re.compile(r"(num_|n_)(\w+_)?heads?|(en|de)coder_attention_heads")
_WIDTHS = re.compile(r"hidden_size|d_model|n_embd|embed_dim|dim|intermediate_size|d_ff|d_kv|head_dim|vocab_size")
_LIMITS = ((_COUNTS, 4096), (_HEADS, 1 << 16), (_WIDTHS, 1 << 26))
_MAY_BE_ZERO = ("experts", "local_experts", "nextn_predict_layers", "key_value_heads", "kv_heads", "heads_kv")


def check_sizes(config: Mapping[str, Any], place: str, depth: int = 0) -> None:
    """Check every size in a config and its nested configs.

    >>> check_sizes({"num_attention_heads": -3}, "config.json")
    Traceback (most recent call last):
    polyhead.errors.CheckpointError: num_attention_heads must be an integer of 1 to 65,536, got -3 in config.json
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"configs may be nested to a depth of {_MAX_DEPTH}, got more in {place}")
    for name, value in config.items():
        if isinstance(value, Mapping):
            if name.endswith("config"):
                check_sizes(value, place, depth + 1)
            continue
        maximum = next((maximum for rule, maximum in _LIMITS if rule.fullmatch(name)), None)
        if maximum is None or value is None:
            continue
        for size in value if isinstance(value, list) else (value,):
            minimum = 0 if name.endswith(_MAY_BE_ZERO) else 1
            if isinstance(size, bool) or not isinstance(size, int) or not minimum <= size <= maximum:
                raise CheckpointError(
                    f"{name} must be an integer of {minimum} to {maximum:,}, got {short(size)} in {place}"
                )


def check_config(folder: Path) -> None:
    """Check the config.json of a folder: a JSON object of bounded size, with plausible model sizes."""
    path = folder / "config.json"
    check_sizes(read_json(path, "a model's config.json is a JSON object", CheckpointError, CONFIG_BYTES), str(path))


def check_room(model_class: Any, config: Any, num_bytes: int, place: str) -> None:
    """Check, by building the model on the meta device, that its size is plausible for its weight files."""
    model = build_on_meta(model_class, config)
    elements = sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    if elements > MAX_ELEMENTS_PER_BYTE * num_bytes + _SLACK:
        raise CheckpointError(
            f"a config must match the size of its weight files, got {elements:,} elements for {num_bytes:,} bytes of "
            f"weights in {place}"
        )


def build_on_meta(model_class: Any, config: Any) -> Any:
    """Build a model of a class or an auto class on the meta device, from a copy of its config."""
    import copy

    import torch
    from transformers import initialization

    with torch.random.fork_rng(devices=[]), torch.device("meta"), initialization.no_init_weights():
        build = getattr(model_class, "_from_config", None) or model_class.from_config
        return build(copy.deepcopy(config))
