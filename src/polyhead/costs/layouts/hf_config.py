"""A Hugging Face config read as a head layout: every field that matters is found or asked for, none is guessed.

Sizes must stand in the config itself, unless transformers wrote it. What a config may leave out (how many KV heads,
which layers have a window) is filled in by transformers, where it is installed and knows the model, and a note says so.
Fields that would change the counts in a way that is not known here are refused by their names; fields that only sound
like attention are noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from polyhead.costs.layouts.families import FAMILIES, Family
from polyhead.costs.layouts.hf_built import Filled, built_projections, filled_fields
from polyhead.costs.layouts.hf_fields import (
    CONTEXT,
    DTYPE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LATENT,
    LAYERS,
    WIDTH,
    Fields,
    check_refused,
    checked_size,
    filled_in,
    unread,
)
from polyhead.costs.layouts.model import LayerGroup, ModelLayout, check_window, grouped, requested_for
from polyhead.costs.parameters import count_parameters
from polyhead.errors import OptionError
from polyhead.layers.config import AttentionConfig, MultiHeadConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.positions.config import PositionsConfig, RotaryConfig

# The numbers of a cache of 8 bits, by the words of compressed-tensors and by those of ModelOpt.
_CACHED = {"float": torch.float8_e4m3fn, "int": torch.int8}
_ALGORITHMS = {"FP8": torch.float8_e4m3fn, "INT8": torch.int8}
_MOST_LAYERS = 100_000  # here and by transformers they are gone through one by one
_FULL, _WINDOWED = "full_attention", "sliding_attention"


def read_hf_config(
    found: Mapping[str, Any], *, name: str = "", causal: bool | None = None, complete: bool = False
) -> ModelLayout:
    """The head layout of a Hugging Face config.

    Args:
        found: the config as a dictionary, as it stands in config.json.
        name: what to call the model; its own name or kind by default.
        causal: whether tokens see no later ones; asked for where neither the family nor the config tells.
        complete: that nothing is left to transformers, which is then not asked.

    >>> model = read_hf_config({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32,
    ...     "num_hidden_layers": 2, "num_key_value_heads": 2, "attention_bias": False}, complete=True)
    >>> model.config.layout.head_dim, model.config.layout.num_kv_heads, model.layers
    (32, 2, 2)
    """
    whole, (found, notes) = found, _text_config(found)
    family_name = str(found.get("model_type") or "")
    saved = "transformers_version" in whole
    many = Fields(found).find(*LAYERS)
    if isinstance(many, int) and many > _MOST_LAYERS:
        raise OptionError(f"a model of at most {_MOST_LAYERS:,} layers is counted, got {many:,}")
    filled = Filled() if complete else filled_fields(found, family_name)
    fields = Fields(found, filled.fields, saved, filled.refusal)
    family = FAMILIES.get(family_name)
    _refuse_two_stacks(fields.quietly("is_encoder_decoder"), family_name)
    check_refused(fields)
    layers = fields.size("number of layers", *LAYERS)
    known = family is not None
    if family is None:
        family = _unknown_family(fields, family_name, causal)
    else:
        own = _is_causal(fields, family)
        family = replace(family, causal=own if causal is None else causal)
        notes += [] if family.causal is own else [requested_for(not own)]
    groups = grouped(_layers(fields, family, layers, notes))
    if not known:
        notes.append(_held_to_what_is_built(groups, found, family_name, complete=complete))
    if fields.refusal is not None:
        notes.append(f"transformers refuses this config and fills in nothing that it leaves out: {fields.refusal}")
    context = fields.or_default(*CONTEXT)
    return ModelLayout(
        name=name or str(found.get("_name_or_path") or "") or family_name or "config",
        groups=groups,
        context=None if context is None else checked_size("longest context", context),
        dtype=_dtype(fields.find(*DTYPE) or Fields(whole).find(*DTYPE)),
        cache_dtype=_cache_dtype(whole.get("quantization_config")),
        notes=(*notes, *filled_in(fields), *unread(fields)),
    )


def _layers(fields: Fields, family: Family, layers: int, notes: list[str]) -> list[AttentionConfig]:
    """One config a layer."""
    if fields.find("kv_lora_rank") is not None:
        return [_latent(fields, family)] * layers
    if family.latent:
        raise OptionError(f"latent heads need {', '.join(LATENT)}, got a config without kv_lora_rank")
    return [_heads(fields, family, window) for window in _windows(fields, family, layers, notes)]


def _heads(fields: Fields, family: Family, window: int | None) -> MultiHeadConfig:
    width, heads = fields.size("width", *WIDTH), fields.size("number of heads", *HEADS)
    head_dim = fields.or_default(*HEAD_DIM)
    kv_heads = _kv_heads(fields, heads)
    head_dim = None if head_dim is None else checked_size("width of a head", head_dim)
    check_window(window, causal=family.causal is True)
    turned = family.rotary and (head_dim or width // heads) % 2 == 0
    positions: PositionsConfig | None = RotaryConfig() if turned else None
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
        positions=positions,
        sinks=family.sinks,
    )


def _kv_heads(fields: Fields, heads: int) -> Any:
    """Falcon and its like say in words whether there is one KV head; the others say how many there are."""
    groups, in_groups = fields.find("multi_query_group_num"), fields.find("multi_query_attention")
    if groups is not None or in_groups:  # as ChatGLM has them
        if not isinstance(in_groups, bool) or (in_groups and groups is None):
            raise OptionError(
                "multi_query_attention says whether the heads share as many KV heads as multi_query_group_num says, "
                f"so one needs the other; got {in_groups!r} and {groups!r}"
            )
        return groups if in_groups else heads
    multi_query, new = fields.or_default("multi_query"), fields.or_default("new_decoder_architecture")
    if multi_query and not new:
        fields.read.update(KV_HEADS)
        return 1
    if multi_query is False and not new:
        fields.read.update(KV_HEADS)
        return heads
    found = fields.or_default(*KV_HEADS)
    if isinstance(found, list | tuple):
        raise OptionError(f"one number of KV heads is counted for all layers, got one for each: {list(found)}")
    part = fields.held.get("attn_config")
    if found is None and isinstance(part, Mapping):
        return part.get("kv_n_heads")
    return found


def _latent(fields: Fields, family: Family) -> LatentConfig:
    missing = [name for name in LATENT if fields.find(name) is None]
    if missing:
        raise OptionError(f"latent heads need {', '.join(LATENT)}, got a config without {', '.join(missing)}")
    rank, nope, rope, value = (checked_size(name, fields.find(name)) for name in LATENT)
    queries = fields.or_default("q_lora_rank")
    fields.read.update((*KV_HEADS, *HEAD_DIM))  # they say nothing of latent heads, though such configs have them
    return LatentConfig(
        fields.size("width", *WIDTH),
        fields.size("number of heads", *HEADS),
        kv_lora_rank=rank,
        q_lora_rank=None if queries is None else checked_size("q_lora_rank", queries),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        value_head_dim=value,
        bias=fields.flag(family.bias),
        output_bias=fields.flag(family.output_bias),
        positions=RotaryConfig(interleaved=True),
        causal=family.causal is True,
    )


def _windows(fields: Fields, family: Family, layers: int, notes: list[str]) -> list[int | None]:
    """The window of each layer of softmax attention, None where it sees everything."""
    window = fields.or_default("sliding_window", "window_size")
    if fields.or_default("use_sliding_window") is False:
        window = None
    window = checked_size("sliding_window", window) if window else None
    kinds = fields.or_default("layer_types")
    if kinds is None:
        # Qwen gives a window to the layers from max_window_layers on; every other family to all or to none.
        full = fields.or_default("max_window_layers") or 0
        full = checked_size("max_window_layers", full) if full else 0
        pattern = fields.find("sliding_window_pattern", "_sliding_window_pattern")
        if window is not None and (family.mixed or pattern is not None):
            raise OptionError(
                f"which layers have the window of {window} must be said by layer_types, got a config without them; "
                "install transformers, which knows this family, or add them"
            )
        return [None if index < full else window for index in range(layers)]
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        count = len(kinds) if isinstance(kinds, list | tuple) else repr(kinds)
        raise OptionError(f"layer_types must name the kind of each of the {layers} layers, got {count}")
    softmax = [kind for kind in kinds if kind in (_FULL, _WINDOWED)]
    others = sorted({str(kind) for kind in kinds} - {_FULL, _WINDOWED})
    unknown = [kind for kind in others if kind not in ("linear_attention", "mamba", "recurrent", "conv")]
    if unknown or not softmax:
        raise OptionError(
            f"layers are counted that are {_FULL} or {_WINDOWED}, got {', '.join(unknown or others)} in layer_types"
        )
    if others:
        notes.append(f"{layers - len(softmax)} of {layers} layers have no softmax ({', '.join(others)}): left out")
    if _WINDOWED in softmax and window is None:
        raise OptionError(f"layers of {_WINDOWED} need a sliding_window, got a config without one")
    return [window if kind == _WINDOWED else None for kind in softmax]


def _text_config(found: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The part that reads text, where a config holds several."""
    if not isinstance(found, Mapping):
        raise OptionError(f"a config is a dictionary of fields, got {type(found).__name__}")
    _refuse_two_stacks(found.get("is_encoder_decoder"), str(found.get("model_type")))
    if not any(name in found for name in HEADS):
        for name in ("text_config", "llm_config", "language_config"):
            if isinstance(found.get(name), Mapping):
                return found[name], [f"counted is the {name} of {found.get('model_type', 'the model')}, no other part"]
    return found, []


def _refuse_two_stacks(both: Any, family: str) -> None:
    if both:
        raise OptionError(
            f"a model of one stack is counted, got an encoder with a decoder ({family}); count its "
            "layers by their sizes: --d-model, --heads, --layers"
        )


def _held_to_what_is_built(
    groups: tuple[LayerGroup, ...], found: Mapping[str, Any], family: str, *, complete: bool
) -> str:
    """What can be said of a family whose code nobody read; refused where transformers builds it otherwise."""
    ours = {count_parameters(group.config).projections for group in groups}
    built = frozenset() if complete else built_projections(found, family)
    if built and not built <= ours:
        raise OptionError(
            f"by its fields the attention of {family} has {_numbers(ours)} weights a layer, and what transformers "
            f"builds has {_numbers(built)}: it is made of something that is not counted here"
        )
    name = family or "a config without model_type"
    checked = "as large as what transformers builds" if built else "taken from the fields of the usual names"
    # Latents come with the norms that every family has on them.
    uncounted = "biases" if any(isinstance(group.config, LatentConfig) for group in groups) else "biases and norms"
    return (
        f"{name} is not among the families whose code was read: its projections are {checked}, and parameters of "
        f"{uncounted} are left out"
    )


def _numbers(numbers: Iterable[int]) -> str:
    return " or ".join(f"{number:,}" for number in sorted(numbers))


def _is_causal(fields: Fields, family: Family) -> bool:
    """What a family of which the code was read makes of its config."""
    if fields.quietly("use_bidirectional_attention"):
        return False
    return bool(fields.quietly(family.causal)) if isinstance(family.causal, str) else family.causal


def _unknown_family(fields: Fields, name: str, causal: bool | None) -> Family:
    if causal is None:
        architectures = " ".join(map(str, fields.held.get("architectures") or ()))
        if fields.quietly("use_bidirectional_attention") in (True, "all"):
            causal = False
        elif fields.find("is_decoder") or "CausalLM" in architectures or "LMHeadModel" in architectures:
            causal = True
        elif "MaskedLM" in architectures:
            causal = False
        else:
            raise OptionError(
                f"whether tokens see later ones must be known, got a config of {name or 'no model_type'} that does not "
                "say it; say causal or bidirectional"
            )
    rotary = any("rope" in key or "rotary" in key for key in fields.held)
    return Family(causal=causal, rotary=rotary)


def _dtype(name: Any) -> torch.dtype | None:
    found = None if name is None else getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else None


def _cache_dtype(quantization: Any) -> torch.dtype | None:
    """What a quantised checkpoint says of its cache: numbers of 8 bits, or nothing."""
    if not isinstance(quantization, Mapping):
        return None
    scheme, algorithm = quantization.get("kv_cache_scheme"), quantization.get("kv_cache_quant_algo")
    if scheme:
        bits, kind = (scheme.get("num_bits"), scheme.get("type")) if isinstance(scheme, Mapping) else (scheme, None)
        if bits != 8 or not isinstance(kind, str) or kind not in _CACHED:
            raise OptionError(
                "quantization_config.kv_cache_scheme is counted with num_bits 8 and type float or int, "
                f"got {bits!r} and {kind!r}; leave it out to count a cache of the layers' own numbers"
            )
        return _CACHED[kind]
    if algorithm and str(algorithm).upper() not in _ALGORITHMS:
        raise OptionError(
            f"quantization_config.kv_cache_quant_algo is counted as {' or '.join(_ALGORITHMS)}, got {algorithm!r}; "
            "leave it out to count a cache of the layers' own numbers"
        )
    return _ALGORITHMS[str(algorithm).upper()] if algorithm else None
