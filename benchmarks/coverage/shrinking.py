"""Small versions of transformers' configs, by rules on the names of their fields."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

VOCABULARY, TEXT, WIDTH, HEADS, HEAD_DIM = 97, 13, 32, 4, 8
IMAGE, PATCH = 32, 8
MROPE = [2, 1, 1]  # half of a head
_FIRST_SPECIAL = 90  # special tokens are renumbered downwards from here

OVERRIDES = Path(__file__).with_name("overrides.toml")
Rule = Callable[[Any], Any]


def _each(value: int | Callable[[int], int]) -> Rule:
    """Return a rule for a number or a list of as many numbers."""
    of = value if callable(value) else lambda index: value
    return lambda old: type(old)(of(index) for index in range(len(old))) if isinstance(old, list | tuple) else of(0)


def _at_most(bound: int) -> Rule:
    return lambda old: type(old)(min(x, bound) for x in old) if isinstance(old, list | tuple) else min(old, bound)


# The first expression that matches a whole name decides.
RULES: tuple[tuple[str, Rule], ...] = (
    (r".*vocab_size|.*vocab_size_.*|num_classes", _at_most(VOCABULARY)),
    (
        r"(.*_)?(num_)?(key_value|kv)_heads|num_kv_heads|.*num_key_value_heads.*|n_kv_heads?|multi_query_group_num",
        _at_most(2),
    ),
    (
        r"qk_rope_head_dim|(qk_|v_|kv_|global_|attention_|swa_|index_)*(nope_)?head_dim|d_kv|d_head|rotary_dim|kv_channels|attention_head_(dim|size)",
        _each(HEAD_DIM),
    ),
    (r".*mrope_section", lambda old: MROPE),
    (
        r"(.*_)?(num_|n_)?(attention_|attn_|hash_)?heads?|(.*_)?num_attention_heads|n_heads?|.*attention_heads",
        _each(lambda i: HEADS),
    ),
    (r"(kv|q|v|o)_lora_rank", _each(16)),
    (r"num_experts_per_tok|moe_k|top_?k|moe_topk|num_experts_per_token|moe_num_active.*", _at_most(2)),
    (r"(n|num|moe_num)_(local_|routed_|total_)?experts", _each(4)),
    (r"n_group|topk_group|num_expert_groups?", _each(1)),
    (
        r"num_(hidden_layers|layers|blocks|decoder_layers|encoder_layers)|n_layers?|(encoder|decoder)_layers|.*num_hidden_layers|.*_num_layers|num_.*_layers|depth|.*_layers|.*_depth",
        _at_most(2),
    ),
    (r"depths|layers|num_encoder_blocks_list|stage_repeats", _each(lambda i: 1)),
    (r"hidden_sizes|embed_dims|neck_hidden_sizes|decoder_hidden_sizes_list", _each(lambda i: 16 << i)),
    (r"decoder_in_channels", _each(WIDTH)),
    (r"num_pos_feats", _each(WIDTH // 2)),
    (r"embed_dim_per_stage", _each(lambda i: WIDTH << i)),
    (r"backbone_channel_list", _each(lambda i: 8 * WIDTH >> i)),
    (r"image_size|img_size|input_size", _each(IMAGE)),
    (r"patch_size|patch_sizes_?", _at_most(PATCH)),
    (r"num_mel_bins|feature_size|n_mels|num_mels", _at_most(16)),
    (r"conv_dim|tdnn_dim", _each(16)),
    (r"num_conv_pos_embeddings|num_conv_pos_embedding_groups", _at_most(4)),
    (r"num_(object_)?queries|num_query_tokens|num_latents|qformer_num_query_tokens|resampler_n_latents", _at_most(7)),
    (
        r"intermediate_size.*|.*_ffn_dim|ffn_dim|d_ff|.*intermediate_size|.*_inner|.*intermediate_dim|mlp_dim|.*feedforward.*|ffn_hidden_size",
        lambda old: 48 if isinstance(old, int) and old > 48 else old,
    ),
    (r"max_(source|target)_positions|max_position_embeddings|n_positions|max_.*positions?.*", _at_most(128)),
    (
        r"sliding_window|window_size|attention_window|local_attention|sliding_window_size|attention_chunk_size",
        _at_most(4),
    ),
    (
        r"hidden_size|d_model|n_embd|.*hidden_dim|embed_dim|.*_hidden_size|dim|width|.*_dim|.*_size|.*_channels|.*_width|.*_rank|channels|.*_features|.*_units|hidden_channels",
        lambda old: WIDTH if isinstance(old, int) and not isinstance(old, bool) and old > 64 else old,
    ),
)
_COMPILED = tuple((re.compile(name), rule) for name, rule in RULES)
_TOKEN = re.compile(r".*token_(ids?|index)|.*_token|.*_token_.*id")
_PATTERNS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "attention_layers")


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return the table of what the rules do not get right, by library and name."""
    return tomllib.loads(OVERRIDES.read_text(encoding="utf-8"))


def shrunk(kind: Any, overrides: Mapping[str, Any] | None = None, like: Any = None) -> Any:
    """Return a small config of a class; `overrides` are by field, dotted for those of nested configs.

    The table's entry of its model type holds wherever such a config is nested.

    Args:
        kind: class of configs.
        overrides: values of fields, which no rule changes.
        like: the config to shrink; the default config of the class.
    """
    overrides = {**table().get("transformers", {}).get(kind.model_type, {}).get("config", {}), **(overrides or {})}
    given = {} if like is None else _given(kind, like)
    like = _default(kind, overrides) if like is None else like
    values: dict[str, Any] = {}
    fields = _defaults(kind)
    for name, default in {**fields, **given}.items():
        if name in overrides or name in kind.sub_configs:
            continue
        small = default if name == "num_hidden_layers" and "out_features" in given else _small(name, default)
        if name in given or small != default:
            values[name] = small
    for name in kind.sub_configs:
        inner, own = getattr(like, name, None), _inner(overrides, name)
        if name not in overrides and inner is not None and not isinstance(inner, dict):
            values[name] = shrunk(type(inner), own, inner)
    if "head_dim" in fields and fields["head_dim"] is None:
        values["head_dim"] = HEAD_DIM
    if "kv_lora_rank" in fields and "num_key_value_heads" in values:
        values["num_key_value_heads"] = HEADS  # latent attention has as many as there are queries
    if "mrope_section" in getattr(kind, "ignore_keys_at_rope_validation", ()) and fields["rope_parameters"] is None:
        values["rope_parameters"] = {"mrope_section": MROPE}
    if "window_size" in values and "spatial_merge_size" in fields:
        values["window_size"] = 2 * fields["spatial_merge_size"] * PATCH  # in pixels
    values |= {name: value for name, value in overrides.items() if "." not in name}
    values |= _several_kinds_of_layers(like, values, overrides)
    return kind(**values)


def _default(kind: Any, overrides: Mapping[str, Any]) -> Any:
    """Return the default config of a class; with the overrides, where the class does not accept its own defaults."""
    try:
        return kind()
    except Exception:  # noqa: BLE001 - whatever it misses
        return kind(**{name: value for name, value in overrides.items() if "." not in name})


def _defaults(kind: type) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def _given(kind: type, like: Any) -> dict[str, Any]:
    """Return the fields of a config that another one contains which are not as in the default config of its class.

    Fields without a default are computed from others, which shrinking changes, unless they are names.
    """
    base, given = vars(kind()), vars(like)
    changed = {}
    for name, default in _defaults(kind).items():
        value = given.get(name, default)
        is_name = isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(x, str) for x in value))
        if value == base.get(name, default) or name in _PATTERNS or name.startswith("_"):
            continue
        if default is not None or is_name:
            changed[name] = value
    changed |= {name: value for name, value in given.items() if name not in base and not name.startswith("_")}
    if (features := given.get("_out_features")) != base.get("_out_features"):
        if "num_hidden_layers" in given and f"stage{given['num_hidden_layers']}" in given["stage_names"]:
            features = [f"stage{index + 1}" for index in range(len(features))]  # a stage is a layer
            changed["num_hidden_layers"] = len(features)
        changed["out_features"] = features
    return changed


def _inner(overrides: Mapping[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in overrides.items() if key.startswith(prefix)}


def _small(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _small(key, part) for key, part in value.items()}
    if _TOKEN.fullmatch(name):
        return _token(name, value)
    numbers = value if isinstance(value, list | tuple) else [value]
    if not len(numbers) or not all(isinstance(x, int) and not isinstance(x, bool) for x in numbers):
        return value
    for pattern, rule in _COMPILED:
        if pattern.fullmatch(name):
            return rule(value)
    return value


def _token(name: str, value: Any) -> Any:
    """Return a special token within the vocabulary, the same for every config in which it has this name."""
    if isinstance(value, list):
        return [_token(name, x) for x in value]
    if isinstance(value, bool) or not isinstance(value, int) or value < 50:
        return value
    return 50 + sum(name.replace("index", "id").encode()) % (_FIRST_SPECIAL - 50)


def _several_kinds_of_layers(like: Any, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return as many layers as show each kind of layer that the config alternates between."""
    if "num_hidden_layers" not in values or "num_hidden_layers" in overrides:
        return {}
    count = values["num_hidden_layers"]
    fields: dict[str, Any] = {}
    for name in _PATTERNS:
        pattern = getattr(like, name, None)
        if isinstance(pattern, list | tuple) and all(isinstance(x, str) for x in pattern) and len(pattern):
            count = max(count, *(list(pattern).index(kind) + 1 for kind in set(pattern)))
            if _defaults(type(like)).get(name) is not None:
                fields[name] = pattern
    return {
        "num_hidden_layers": count,
        **{name: type(x)(x[:count]) for name, x in fields.items() if name not in overrides},
    }
