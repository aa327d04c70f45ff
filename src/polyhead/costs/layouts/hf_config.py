"""Read a Hugging Face config as a head layout: every relevant field is read or required, none is guessed.

Sizes must be in the config itself, unless transformers wrote it, since it omits defaults. Optional fields (number of
KV heads, layers with a window) are completed by transformers if it is installed and supports the model, and a note
reports it. Fields that would change the counts in an unsupported way are refused by name; other fields that may
concern attention are noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from polyhead.costs.layouts.hf_built import built_parameters, built_projections, filled_fields
from polyhead.costs.layouts.hf_families import FAMILIES, ROPE_LISTS, WINDOWED, WINDOWED_ROPE, Family
from polyhead.costs.layouts.hf_fields import (
    CONTEXT,
    DTYPE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LATENT,
    LAYERS,
    ROTARY_DIM,
    ROTARY_SHARE,
    WIDTH,
    Fields,
    check_refused,
    checked_size,
    filled_in,
    unread,
)
from polyhead.costs.layouts.model_layout import LayerGroup, ModelLayout, causal_note, check_window, grouped
from polyhead.costs.parameters import count_parameters
from polyhead.errors import OptionError
from polyhead.layers import AttentionConfig, MultiHeadConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.positions.config import RotaryConfig

# Dtypes of an 8-bit KV cache: by the type in compressed-tensors' `kv_cache_scheme`, and by ModelOpt's
# `kv_cache_quant_algo`.
_SCHEME_DTYPES = {"float": torch.float8_e4m3fn, "int": torch.int8}
_ALGORITHM_DTYPES = {"FP8": torch.float8_e4m3fn, "INT8": torch.int8}
_MAX_LAYERS = 100_000  # this module and transformers loop over layers
_MAX_BUILT_LAYERS = 1000  # to count the parameters outside attention; a layer takes about a millisecond
_FULL, _WINDOWED = "full_attention", "sliding_attention"


def read_hf_config(
    config: Mapping[str, Any],
    *,
    name: str = "",
    causal: bool | None = None,
    complete: bool = False,
    by_layer: bool = False,
) -> ModelLayout:
    """Read the head layout of a Hugging Face config.

    Args:
        config: the content of a config.json.
        name: name of the model; default: its own name or model_type.
        causal: whether attention is causal; required if neither the family nor the config implies it.
        complete: the config has no missing fields, so transformers is not consulted.
        by_layer: return a group for each layer, in their order.

    >>> model = read_hf_config({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32,
    ...     "num_hidden_layers": 2, "num_key_value_heads": 2, "attention_bias": False}, complete=True)
    >>> model.config.layout.head_dim, model.config.layout.num_kv_heads, model.layers
    (32, 2, 2)
    """
    text_config, notes = _text_config(config)
    family_name = str(text_config.get("model_type") or "")
    by_transformers = "transformers_version" in config  # transformers wrote it, without fields that have their default
    num_layers = Fields(text_config).find(*LAYERS)
    if isinstance(num_layers, int) and num_layers > _MAX_LAYERS:
        raise OptionError(f"a model may have at most {_MAX_LAYERS:,} layers, got {num_layers:,}")
    defaults, refusal = ({}, None) if complete else filled_fields(text_config, family_name)
    fields = Fields(text_config, defaults, by_transformers, refusal)
    family = FAMILIES.get(family_name)
    _refuse_encoder_decoder(fields.or_unreported_default("is_encoder_decoder"), family_name)
    check_refused(fields)
    layers = fields.size("number of layers", *LAYERS)
    known = family is not None
    if family is None:
        family = _unknown_family(fields, family_name, causal)
    else:
        family_is_causal = _is_causal(fields, family)
        family = replace(family, causal=family_is_causal if causal is None else causal)
        notes += [] if family.causal is family_is_causal else [causal_note(not family_is_causal)]
    configs = _layers(fields, family, family_name, layers, notes)
    groups = tuple(LayerGroup(x, 1) for x in configs) if by_layer else grouped(configs)
    if known and family_name not in WINDOWED and any(getattr(x, "window", None) for x in configs):
        notes.append(f"the plan applies sliding_window, which transformers ignores in {family_name}")
    if not known:
        notes.append(_check_against_built(groups, text_config, family_name, complete=complete))
    if fields.refusal is not None:
        notes.append(f"transformers refuses this config, so no defaults were used: {fields.refusal}")
    quantization = fields.find("quantization_config") or config.get("quantization_config")
    notes += _quantized_weights(quantization)
    layout = ModelLayout(
        name=name or str(text_config.get("_name_or_path") or "") or family_name or "config",
        groups=groups,
        context=fields.optional_size("maximum context", *CONTEXT),
        dtype=_dtype(fields.find(*DTYPE) or Fields(config).find(*DTYPE)),
        cache_dtype=_cache_dtype(quantization),
        notes=(*notes, *filled_in(fields), *unread(fields)),
    )
    if complete or layers > _MAX_BUILT_LAYERS:
        return layout
    return layout.with_parameters(built_parameters(text_config, family_name, causal=layout.is_causal))


def _layers(fields: Fields, family: Family, family_name: str, layers: int, notes: list[str]) -> list[AttentionConfig]:
    """Return the config of each layer with softmax attention; append to `notes` what was not counted."""
    if fields.find("kv_lora_rank") is not None:
        if not all(_listed_rotary(fields, family_name, layers)):
            raise OptionError(
                f"all latent attention layers must have RoPE, got a {family_name} config with layers without it; plan "
                "layouts of their own for these"
            )
        return [_latent(fields, family)] * layers
    if family.latent:
        raise OptionError(f"latent attention needs {', '.join(LATENT)}, got a config without kv_lora_rank")
    windows = _windows(fields, family, layers, notes)
    rotary = _rotary_layers(fields, family, family_name, windows, layers)
    variants = [(window, index in rotary) for index, window in windows.items()]
    configs = {
        (window, has_rope): _multi_head(fields, replace(family, rotary=has_rope), window)
        for window, has_rope in dict.fromkeys(variants)
    }
    return [configs[variant] for variant in variants]


def _listed_rotary(fields: Fields, family_name: str, layers: int) -> list[bool]:
    """Return, for each layer, whether the config lists it as one with RoPE; True for all without a list."""
    for field in ROPE_LISTS:
        listed = fields.or_unreported_default(field)
        if listed is None:
            continue
        _check_entries(field, listed, layers)
        return [bool(x) for x in listed]
    if family_name == "smollm3":
        raise OptionError(
            "a smollm3 config must contain no_rope_layers (1 for each layer with RoPE, otherwise 0), got none; add it, "
            "or install transformers, which supplies the default"
        )
    return [True] * layers


def _check_entries(field: str, listed: Any, layers: int) -> None:
    if not isinstance(listed, list | tuple) or len(listed) != layers:
        count = len(listed) if isinstance(listed, list | tuple) else repr(listed)
        raise OptionError(f"{field} must have one entry for each of the {layers} layers, got {count}")


def _rotary_layers(
    fields: Fields, family: Family, family_name: str, windows: Mapping[int, int | None], layers: int
) -> set[int]:
    """Return the indices of the layers with RoPE."""
    if not family.rotary or fields.or_unreported_default("alibi"):
        return set()
    rotary = {index for index, listed in enumerate(_listed_rotary(fields, family_name, layers)) if listed}
    # Only layers with a window have RoPE; if no layer has a window, all have it, except in Cohere 2.
    if family_name in WINDOWED_ROPE and (family_name.startswith("cohere") or any(windows.values())):
        rotary &= {index for index, window in windows.items() if window is not None}
        if fields.or_unreported_default("prefix_dense_sliding_window_pattern") == 1:  # of Cohere 2 MoE
            mlp_types = fields.or_unreported_default("mlp_layer_types") or ()
            rotary |= {index for index, mlp_type in enumerate(mlp_types) if mlp_type == "dense"}
    return rotary


def _multi_head(fields: Fields, family: Family, window: int | None) -> MultiHeadConfig:
    width, heads = fields.size("width", *WIDTH), fields.size("number of heads", *HEADS)
    head_dim = fields.optional_size("head_dim", *HEAD_DIM)
    kv_heads = _kv_heads(fields, heads)
    check_window(window, causal=family.causal is True)
    layer_type = _FULL if window is None else _WINDOWED
    return MultiHeadConfig(
        width,
        heads,
        num_kv_heads=None if kv_heads is None else checked_size("number of KV heads", kv_heads),
        head_dim=head_dim,
        bias=fields.flag(family.bias),
        output_bias=fields.flag(family.output_bias),
        causal=family.causal is True,
        window=window,
        qk_norm=family.qk_norm,
        positions=_positions(fields, family, head_dim or width // heads, layer_type),
        sinks=family.sinks,
    )


def _positions(fields: Fields, family: Family, head_dim: int, layer_type: str) -> RotaryConfig | None:
    """Return RoPE of all or of the first channels of a head, an even number as in transformers; None without RoPE."""
    if not family.rotary or head_dim % 2 or not fields.has_rope(layer_type):
        return None
    share_or_dim = fields.rotary_share(layer_type)  # a float is a share, an int a number of channels
    if share_or_dim is None and family.is_rotary_partial and not fields.defaults and ROTARY_DIM not in fields.content:
        raise OptionError(
            "a config of this model must set the share or number of channels that RoPE rotates "
            f"({', '.join(ROTARY_SHARE[:2])} or {ROTARY_DIM}), got none of them; add it, or install transformers, "
            "which supplies the default"
        )
    if share_or_dim is None:
        rotated = head_dim
    else:
        rotated = int(head_dim * share_or_dim) if isinstance(share_or_dim, float) else share_or_dim
    rotated += rotated % 2
    return RotaryConfig(rotary_dim=min(rotated, head_dim)) if rotated else None


def _kv_heads(fields: Fields, heads: int) -> Any:
    """Return the number of KV heads; Falcon and ChatGLM have flags for multi-query attention."""
    groups, is_grouped = fields.find("multi_query_group_num"), fields.find("multi_query_attention")
    if groups is not None or is_grouped:  # ChatGLM
        if not isinstance(is_grouped, bool) or (is_grouped and groups is None):
            raise OptionError(
                "multi_query_attention and multi_query_group_num must be set together, "
                f"got {is_grouped!r} and {groups!r}"
            )
        return groups if is_grouped else heads
    multi_query, new = fields.or_default("multi_query"), fields.or_default("new_decoder_architecture")
    if not new and (multi_query or multi_query is False):
        fields.read.update(KV_HEADS)
        return 1 if multi_query else heads
    kv_heads = fields.or_default(*KV_HEADS)
    if isinstance(kv_heads, list | tuple):
        raise OptionError(f"all layers must have the same number of KV heads, got one per layer: {list(kv_heads)}")
    attn_config = fields.content.get("attn_config")
    if kv_heads is None and isinstance(attn_config, Mapping):
        return attn_config.get("kv_n_heads")
    return kv_heads


def _latent(fields: Fields, family: Family) -> LatentConfig:
    missing = [name for name in LATENT if fields.find(name) is None]
    if missing:
        raise OptionError(f"latent attention needs {', '.join(LATENT)}, got a config without {', '.join(missing)}")
    rank, nope, rope, value = (checked_size(name, fields.find(name)) for name in LATENT)
    fields.read.update((*KV_HEADS, *HEAD_DIM))  # present in such configs, but without effect on latent attention
    return LatentConfig(
        fields.size("width", *WIDTH),
        fields.size("number of heads", *HEADS),
        kv_lora_rank=rank,
        q_lora_rank=fields.optional_size("q_lora_rank", "q_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        value_head_dim=value,
        bias=fields.flag(family.bias),
        output_bias=fields.flag(family.output_bias),
        positions=RotaryConfig(interleaved=True),
        causal=family.causal is True,
    )


def _windows(fields: Fields, family: Family, layers: int, notes: list[str]) -> dict[int, int | None]:
    """Return the sliding window of each softmax attention layer by its index; None for full attention."""
    window = fields.or_default("sliding_window", "window_size")
    if fields.or_default("use_sliding_window") is False:
        window = None
    window = checked_size("sliding_window", window) if window else None
    layer_types = fields.or_default("layer_types")
    if layer_types is None:
        # Qwen uses a window in layers from max_window_layers on; other families in all layers or in none.
        num_full = fields.or_default("max_window_layers") or 0
        num_full = checked_size("max_window_layers", num_full) if num_full else 0
        pattern = fields.find("sliding_window_pattern", "_sliding_window_pattern")
        if window is not None and (family.mixed or pattern is not None):
            raise OptionError(
                f"layer_types must list which layers have the window of {window}, got a config without it; "
                "install transformers, which supplies it for this family, or add it"
            )
        return {index: None if index < num_full else window for index in range(layers)}
    _check_entries("layer_types", layer_types, layers)
    softmax = {index: kind for index, kind in enumerate(layer_types) if kind in (_FULL, _WINDOWED)}
    others = sorted({str(kind) for kind in layer_types} - {_FULL, _WINDOWED})
    unknown = [kind for kind in others if kind not in ("linear_attention", "mamba", "recurrent", "conv")]
    if unknown or not softmax:
        raise OptionError(f"layer_types must contain {_FULL} or {_WINDOWED}, got {', '.join(unknown or others)}")
    if others:
        notes.append(f"{layers - len(softmax)} of {layers} layers have no softmax ({', '.join(others)}): not counted")
    if _WINDOWED in softmax.values() and window is None:
        raise OptionError(f"{_WINDOWED} layers need sliding_window, got a config without it")
    return {index: window if kind == _WINDOWED else None for index, kind in softmax.items()}


def _text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the text config of a multimodal config, else the config itself; and notes."""
    if not isinstance(config, Mapping):
        raise OptionError(f"a config must be a dictionary of fields, got {type(config).__name__}")
    _refuse_encoder_decoder(config.get("is_encoder_decoder"), str(config.get("model_type")))
    if not any(name in config for name in HEADS):
        for name in ("text_config", "llm_config", "language_config"):
            if isinstance(config.get(name), Mapping):
                return config[name], [f"only the {name} of {config.get('model_type', 'the model')} is counted"]
    return config, []


def _refuse_encoder_decoder(is_encoder_decoder: Any, family: str) -> None:
    if is_encoder_decoder:
        raise OptionError(
            f"a model must be an encoder or a decoder, got an encoder-decoder ({family}); count its "
            "layers by their sizes: --d-model, --heads, --layers"
        )


def _check_against_built(
    groups: tuple[LayerGroup, ...], content: Mapping[str, Any], family: str, *, complete: bool
) -> str:
    """Compare a family that is not in `FAMILIES` with what transformers builds; return a note, raise if they differ."""
    counted = {count_parameters(group.config).projections for group in groups}
    built = frozenset() if complete else built_projections(content, family)
    if built and not built <= counted:
        raise OptionError(
            f"by its config the attention of {family} has {_numbers(counted)} weights per layer, but transformers "
            f"builds {_numbers(built)}: it has parts that are not supported"
        )
    name = family or "a config without model_type"
    checked = "match what transformers builds" if built else "are read from the common field names"
    # Latent attention is counted with the norms that every family has on its latents.
    uncounted = "biases" if any(isinstance(group.config, LatentConfig) for group in groups) else "biases and norms"
    return (
        f"{name} is not among the known families: its projections {checked}, and parameters of "
        f"{uncounted} are not counted"
    )


def _numbers(numbers: Iterable[int]) -> str:
    return " or ".join(f"{number:,}" for number in sorted(numbers))


def _is_causal(fields: Fields, family: Family) -> bool:
    """Return whether a model of a known family is causal.

    `use_bidirectional_attention` is a boolean in these families (elsewhere it may be "all"), and `family.causal` a
    constant or the name of a field.
    """
    if fields.or_unreported_default("use_bidirectional_attention"):
        return False
    return bool(fields.or_unreported_default(family.causal)) if isinstance(family.causal, str) else family.causal


def _unknown_family(fields: Fields, family_name: str, causal: bool | None) -> Family:
    """Return what the config of a family that is not in `FAMILIES` implies; raise if it does not imply the mask."""
    if causal is None:
        architectures = " ".join(map(str, fields.content.get("architectures") or ()))
        if fields.or_unreported_default("use_bidirectional_attention") in (True, "all"):
            causal = False
        elif fields.find("is_decoder") or "CausalLM" in architectures or "LMHeadModel" in architectures:
            causal = True
        elif "MaskedLM" in architectures:
            causal = False
        else:
            source = f"of {family_name}" if family_name else "without model_type"
            raise OptionError(
                f"a config must imply whether attention is causal, got a config {source} that does not; "
                "pass --causal or --bidirectional (causal=...)"
            )
    names = {**fields.defaults, **fields.content}
    kind = fields.or_unreported_default("position_embedding_type")
    is_rotary = any("rope" in key or "rotary" in key for key in names)
    if "position_embedding_type" in names:
        is_rotary = kind in ("rope", "rotary")
    return Family(causal=causal, rotary=is_rotary)


def _dtype(name: Any) -> torch.dtype | None:
    dtype = None if name is None else getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def _quantized_weights(quantization: Any) -> list[str]:
    """Return a note if a checkpoint has quantised weights, which are counted in the dtype of the plan."""
    if not isinstance(quantization, Mapping):
        return []
    method = quantization.get("quant_method") or quantization.get("quant_algo")
    is_cache_alone = "kv_cache_scheme" in quantization and not quantization.get("config_groups")
    if not method or is_cache_alone:
        return []
    return [f"this checkpoint has weights quantised by {method}; all weights are counted in the dtype of the plan"]


def _cache_dtype(quantization: Any) -> torch.dtype | None:
    """Return the 8-bit cache dtype of a quantised checkpoint, or None."""
    if not isinstance(quantization, Mapping):
        return None
    scheme, algorithm = quantization.get("kv_cache_scheme"), quantization.get("kv_cache_quant_algo")
    if scheme:
        bits, kind = (scheme.get("num_bits"), scheme.get("type")) if isinstance(scheme, Mapping) else (scheme, None)
        if bits != 8 or not isinstance(kind, str) or kind not in _SCHEME_DTYPES:
            raise OptionError(
                "quantization_config.kv_cache_scheme must have num_bits 8 and type float or int, "
                f"got {bits!r} and {kind!r}; remove it to count a cache in the layers' dtype"
            )
        return _SCHEME_DTYPES[kind]
    if algorithm and str(algorithm).upper() not in _ALGORITHM_DTYPES:
        raise OptionError(
            f"quantization_config.kv_cache_quant_algo must be {' or '.join(_ALGORITHM_DTYPES)}, got {algorithm!r}; "
            "remove it to count a cache in the layers' dtype"
        )
    return _ALGORITHM_DTYPES[str(algorithm).upper()] if algorithm else None
