"""Fields of a Hugging Face config: their aliases, which of them were read, and which are unsupported."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyhead.costs.quantities import check_count
from polyhead.errors import OptionError

# Aliases of each size in the configs of different families.
WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim", "d_kv", "dim_head")
CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
DTYPE = ("dtype", "torch_dtype")
ROTARY_SHARE = ("partial_rotary_factor", "rotary_pct", "rotary_percentage", "rotary_emb_fraction", "rope_pct")
ROTARY_DIM = "rotary_dim"
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

# Refused if set: the counts would be silently wrong.
_REFUSED = {
    "pruned_heads": "layers with different numbers of heads",
    "add_cross_attention": "cross-attention in addition to self-attention",
    "cross_attention_layers": "cross-attention in some layers",
    "block_configs": "layers with different heads, or without attention",
    "use_cla": "cross-layer sharing of the KV cache",
    "global_head_dim": "another head_dim in some layers",
    "num_global_key_value_heads": "another number of KV heads in some layers",
    "num_kv_shared_layers": "cross-layer sharing of the KV cache",
    "num_query_heads": "numbers of heads per layer",
    "attn_output_gate": "a gate projected together with the queries",
    "index_topk": "keys selected by an indexer",
    "cross_layer_attention": "cross-layer sharing of the KV cache",
    "attention_chunk_size": "chunked attention",
    "use_qk_norm": "QK norms with per-head weights",
    "qk_layernorm": "norms of queries and keys",
    "partial_rotary_factors": "another number of rotated channels in some layers",
    "num_hidden_groups": "parameters shared across layers",
    "lambda_std_dev": "two softmax calls per head (differential attention)",
    "attention_types": "windows in some layers, in a format of this family alone",
    **dict.fromkeys(
        (
            "state_size",
            "ssm_state_size",
            "mamba_d_state",
            "attn_layer_indices",
            "attn_layer_period",
            "block_types",
            "hybrid_override_pattern",
            "layers_block_type",
            "attention_hidden_size",
            "qk_dim_factor",
        ),
        "layers without softmax attention",
    ),
}
_SEEMS = re.compile(r"attn|attention|head|window|kv|qk|quer|key|latent|lora|sink|alibi|causal|bidirectional|layer_type")
# Fields with such names that change no count: rates, scales, caps, output flags, or aliases that are read elsewhere.
_HARMLESS = re.compile(
    r"dropout|drop$|pdrop|softcap|implementation|output_attentions|keys_to_ignore|scale_attn|scalar|multiplier|upcast|"
    r"fp32|qk_head_dim|rope_interleave|parallel_attn|new_decoder_architecture|classifier|pooler|ffn|clip_qkv|"
    r"max_window_layers|use_sliding_window|sliding_window_pattern|no_rope|_name_or_path|original_max"
)


@dataclass
class Fields:
    """Fields of a config, with a record of those that were read; `defaults` supply missing ones."""

    content: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    saved: bool = False  # whether transformers wrote the config
    refusal: str | None = None  # transformers' error message, if it refused the config
    read: set[str] = field(default_factory=set)
    filled: dict[str, Any] = field(default_factory=dict)  # fields that were taken from `defaults`

    def find(self, *names: str) -> Any:
        """Return the value of the first of these names in the config; None if there is none."""
        self.read.update(names)
        for name in names:
            if self.content.get(name) is not None:
                return self.content[name]
        return None

    def or_default(self, *names: str) -> Any:
        """Return the value in the config, or transformers' default for this family, recorded in `filled`; else None."""
        value = self.find(*names)
        if value is not None or any(name in self.content for name in names):
            return value
        for name in names:
            if self.defaults.get(name) is not None:
                self.filled[name] = self.defaults[name]
                return self.defaults[name]
        return None

    def or_unreported_default(self, name: str) -> Any:
        """Return the value in the config, or the default without recording it in `filled`, which notes report."""
        self.read.add(name)
        value = self.content.get(name)
        return self.defaults.get(name) if value is None else value

    def size(self, what: str, *names: str) -> int:
        """Return a required size; defaults apply only if transformers wrote the config, since it omits them."""
        value = self.or_default(*names) if self.saved else self.find(*names)
        if value is None:
            raise OptionError(
                f"a config must contain its {what} ({', '.join(names)}), got only the fields "
                f"{', '.join(sorted(map(str, self.content))) or 'none'}"
            )
        return checked_size(what, value)

    def optional_size(self, what: str, *names: str) -> int | None:
        """Return a size or its default; None if there is neither."""
        value = self.or_default(*names)
        return None if value is None else checked_size(what, value)

    def rotary_share(self, layer_type: str) -> float | int | None:
        """Return the rotated share of the channels of a head (a float), or their number (an int); None if all are.

        transformers moves the share into `rope_parameters`, which may be a dictionary per type of layer.
        """
        for source in (self.content, self.defaults):
            share = next((source[name] for name in ROTARY_SHARE if source.get(name) is not None), None)
            for name in ("rope_parameters", "rope_scaling"):
                scaling = source.get(name)
                if share is None and isinstance(scaling, Mapping):
                    nested = scaling.get(layer_type)
                    share = (nested if isinstance(nested, Mapping) else scaling).get(ROTARY_SHARE[0])
            number = source.get(ROTARY_DIM) if share is None else None
            if share is not None or number is not None:
                if source is self.defaults and share != 1:
                    self.filled[ROTARY_DIM if share is None else ROTARY_SHARE[0]] = number if share is None else share
                return checked_share(share) if number is None else checked_size(ROTARY_DIM, number)
            if ROTARY_DIM in source:  # null: all channels
                return None
        return None

    def has_rope(self, layer_type: str) -> bool:
        """Return whether layers of a type have RoPE: its entry in `rope_parameters` is null if they do not."""
        return not any(
            isinstance(parameters, Mapping) and layer_type in parameters and parameters[layer_type] is None
            for parameters in (self.content.get("rope_parameters"), self.defaults.get("rope_parameters"))
        )

    def flag(self, value: bool | str) -> bool:
        """Return a boolean constant of the family, or the value of the field it names."""
        if isinstance(value, bool):
            return value
        flag = self.or_default(value)
        if not isinstance(flag, bool):
            if flag is None and self.refusal is not None:
                raise OptionError(
                    f"a config without {value} must be valid for transformers, which supplies the default; "
                    f"transformers refuses it: {self.refusal}"
                )
            raise OptionError(
                f"{value} must be true or false for this model, got {flag!r}; add it to the config"
                + ("" if self.defaults else ", or install transformers, which supplies the default")
            )
        return flag


def check_refused(fields: Fields) -> None:
    for name, what in _REFUSED.items():
        value = fields.or_unreported_default(name)
        if value:
            source = "" if fields.content.get(name) is not None else ", the default of transformers for this family"
            raise OptionError(f"{name} means {what}, which is not supported; got {name}={_short(value)}{source}")
    share = fields.find("cla_share_factor")
    if share not in (None, 1) and fields.find("use_cla") is None:
        raise OptionError(
            f"cla_share_factor means cross-layer sharing of the KV cache unless use_cla is false; got {share!r} alone"
        )
    _check_attn_config(fields)


def _check_attn_config(fields: Fields) -> None:
    """Refuse an `attn_config` (MPT's attention options) that changes the heads or the mask."""
    attn_config = fields.content.get("attn_config")
    if not isinstance(attn_config, Mapping):
        return
    fields.read.add("attn_config")
    supported: dict[str, tuple[Any, ...]] = {
        "attn_type": (None, "multihead_attention"),
        "qk_ln": (None, False),
        "qk_gn": (None, False),
        "prefix_lm": (None, False),
        "sliding_window_size": (None, -1),
    }
    if fields.content.get("model_type") != "dbrx":  # whose number of KV heads is kv_n_heads
        supported["kv_n_heads"] = (None, *(fields.content[name] for name in HEADS if name in fields.content))
    for name, values in supported.items():
        if attn_config.get(name) not in values:
            raise OptionError(
                f"attn_config.{name} must be {' or '.join(_short(value) for value in values)}, the only supported "
                f"heads and masks; got {_short(attn_config[name])}"
            )


def checked_share(share: Any) -> float:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise OptionError(f"the share of the channels that RoPE rotates must be from 0 to 1, got {share!r}")
    return float(share)


def checked_size(what: str, size: Any) -> int:
    check_count(what, size, least=1)
    return int(size)


def filled_in(fields: Fields) -> list[str]:
    if not fields.filled:
        return []
    values = ", ".join(f"{name} {_short(value)}" for name, value in sorted(fields.filled.items()))
    return [f"missing from the config, defaults of transformers used: {values}"]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 40 else f"{text[:36]} ..."


def unread(fields: Fields) -> list[str]:
    names = sorted(
        name
        for name, value in fields.content.items()
        if _SEEMS.search(name) and not _HARMLESS.search(name) and name not in fields.read
        if value not in (None, False, {}, [])
    )
    return [f"ignored fields that may concern attention: {', '.join(names)}"] if names else []
