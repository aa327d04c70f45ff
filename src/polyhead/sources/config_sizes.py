"""The sizes that a model's config may have, checked before a single tensor is made of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyhead.errors import CheckpointError
from polyhead.files import read_json, short

CONFIG_BYTES = 1 << 24
MOST_ELEMENTS_PER_BYTE = 16  # of a model in memory, for each byte of its files; 4-bit weights have 2
_SLACK = 1 << 26  # elements; causal masks and tables of positions are no part of the files
_DEEPEST = 8  # configs within configs
# Counts that a class goes through one by one, heads, and widths; a list has one of them for each layer.
_COUNTS = re.compile(r"(num_|n_)(\w+_)?(hidden_layers|layers?|blocks|experts|local_experts)|(en|de)coder_layers")
_HEADS = re.compile(r"(num_|n_)(\w+_)?heads?|(en|de)coder_attention_heads")
_WIDTHS = re.compile(r"hidden_size|d_model|n_embd|embed_dim|dim|intermediate_size|d_ff|d_kv|head_dim|vocab_size")
_LIMITS = ((_COUNTS, 4096), (_HEADS, 1 << 16), (_WIDTHS, 1 << 26))
_OFTEN_NOTHING = ("experts", "local_experts", "nextn_predict_layers", "key_value_heads", "kv_heads", "heads_kv")


def check_sizes(found: Mapping[str, Any], place: str, depth: int = 0) -> None:
    """Check every size that a config names, in it and in the configs inside it.

    >>> check_sizes({"num_attention_heads": -3}, "config.json")
    Traceback (most recent call last):
    polyhead.errors.CheckpointError: num_attention_heads must be an integer of 1 to 65,536, got -3 in config.json
    """
    if depth > _DEEPEST:
        raise CheckpointError(f"a config holds others to a depth of {_DEEPEST}, got more in {place}")
    for name, value in found.items():
        if isinstance(value, Mapping):
            if name.endswith("config"):
                check_sizes(value, place, depth + 1)
            continue
        most = next((most for rule, most in _LIMITS if rule.fullmatch(name)), None)
        if most is None or value is None:
            continue
        for one in value if isinstance(value, list) else (value,):
            least = 0 if name.endswith(_OFTEN_NOTHING) else 1
            if isinstance(one, bool) or not isinstance(one, int) or not least <= one <= most:
                raise CheckpointError(f"{name} must be an integer of {least} to {most:,}, got {short(one)} in {place}")


def check_config(folder: Path) -> None:
    """Check the config.json of a folder: a JSON object of bounded size, with sizes that can be."""
    path = folder / "config.json"
    check_sizes(read_json(path, "a model's config.json is a JSON object", CheckpointError, CONFIG_BYTES), str(path))


def check_room(model_class: Any, config: Any, num_bytes: int, place: str) -> None:
    """Check, with a model that has no memory, that a config makes no more of its files than they can fill."""
    import copy

    import torch
    from transformers import initialization

    with torch.random.fork_rng(devices=[]), torch.device("meta"), initialization.no_init_weights():
        build = getattr(model_class, "_from_config", None) or model_class.from_config
        model = build(copy.deepcopy(config))
    elements = sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    if elements > MOST_ELEMENTS_PER_BYTE * num_bytes + _SLACK:
        raise CheckpointError(
            f"a config describes the weights beside it, got one of {elements:,} numbers for {num_bytes:,} bytes of "
            f"weights in {place}"
        )
