"""The fields of a Hugging Face config: the names they go by, which were read, and which must not be passed over."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyhead.errors import OptionError

# The names that a size has in the configs of different families.
WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim", "d_kv")
CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
DTYPE = ("dtype", "torch_dtype")
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

# Refused where they say anything: the counts would be wrong, and nobody would see it.
_REFUSED = {
    "pruned_heads": "layers with different numbers of heads",
    "add_cross_attention": "layers of cross-attention beside those of self-attention",
    "cross_attention_layers": "layers of cross-attention among those of self-attention",
    "block_configs": "layers with heads of their own, or without attention",
    "use_cla": "layers that read the cache of others",
    "global_head_dim": "heads of another width in some layers",
    "num_global_key_value_heads": "other numbers of KV heads in some layers",
    "num_kv_shared_layers": "layers that read the cache of others",
    "num_query_heads": "numbers of heads by layer",
    "attn_output_gate": "a gate projected together with the queries",
    "index_topk": "keys chosen by an indexer",
    "cross_layer_attention": "layers that read the cache of others",
    "attention_chunk_size": "attention within chunks",
    "use_qk_norm": "norms with a weight of every head's own",
    "qk_layernorm": "norms of queries and keys",
    "num_hidden_groups": "one set of parameters for several layers",
    "attention_types": "windows of some layers, spelled as no other family does",
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
        "layers that are no softmax attention, or not all of them",
    ),
}
_SEEMS = re.compile(r"attn|attention|head|window|kv|qk|quer|key|latent|lora|sink|alibi|causal|bidirectional|layer_type")
# They sound like it and change no count: rates, scales, caps, what a call returns, or what is read by another name.
_HARMLESS = re.compile(
    r"dropout|drop$|pdrop|softcap|implementation|output_attentions|keys_to_ignore|scale_attn|scalar|multiplier|upcast|"
    r"fp32|qk_head_dim|rope_interleave|parallel_attn|new_decoder_architecture|classifier|pooler|ffn|clip_qkv|"
    r"max_window_layers|use_sliding_window|sliding_window_pattern|no_rope|_name_or_path|original_max"
)


@dataclass
class Fields:
    """The fields of a config, with a note of which were read; `defaults` stand in for those that a file leaves out."""

    held: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    saved: bool = False  # whether transformers wrote the config
    refusal: str | None = None  # why transformers, which knows the family, fills in nothing
    read: set[str] = field(default_factory=set)
    filled: dict[str, Any] = field(default_factory=dict)

    def find(self, *names: str) -> Any:
        """What the config says under the first of these names that it has; None where it says nothing."""
        self.read.update(names)
        for name in names:
            if self.held.get(name) is not None:
                return self.held[name]
        return None

    def or_default(self, *names: str) -> Any:
        """The same, or what transformers takes for this family; None where neither says anything."""
        found = self.find(*names)
        if found is not None or any(name in self.held for name in names):
            return found
        for name in names:
            if self.defaults.get(name) is not None:
                self.filled[name] = self.defaults[name]
                return self.defaults[name]
        return None

    def quietly(self, name: str) -> Any:
        """The same of one field, without a note: of those that are looked at and change nothing."""
        self.read.add(name)
        found = self.held.get(name)
        return self.defaults.get(name) if found is None else found

    def size(self, what: str, *names: str) -> int:
        """A size that must stand in the config itself, unless transformers wrote it: it leaves out its defaults."""
        found = self.or_default(*names) if self.saved else self.find(*names)
        if found is None:
            raise OptionError(
                f"a config must say its {what} ({', '.join(names)}), got one without; its fields are "
                f"{', '.join(sorted(map(str, self.held))) or 'none'}"
            )
        return checked_size(what, found)

    def flag(self, value: bool | str) -> bool:
        """A boolean of the family, or of the field that it names."""
        if isinstance(value, bool):
            return value
        found = self.or_default(value)
        if not isinstance(found, bool):
            if found is None and self.refusal is not None:
                raise OptionError(
                    f"a config that leaves out {value} must be one that transformers takes, which fills it in; "
                    f"transformers refuses this one: {self.refusal}"
                )
            raise OptionError(
                f"{value} must be true or false for this model, got {found!r}; add it to the config"
                + ("" if self.defaults else ", or install transformers, which knows what is left out")
            )
        return found


def check_refused(fields: Fields) -> None:
    for name, what in _REFUSED.items():
        value = fields.quietly(name)
        if value:
            source = "" if fields.held.get(name) is not None else ", which transformers fills in for this family"
            raise OptionError(f"{name} means {what}, which is not counted here; got {name}={_short(value)}{source}")
    share = fields.find("cla_share_factor")
    if share not in (None, 1) and fields.find("use_cla") is None:
        raise OptionError(
            f"cla_share_factor means layers that read the cache of others, unless use_cla is false; got {share!r} alone"
        )
    _check_attn_config(fields)


def _check_attn_config(fields: Fields) -> None:
    """MPT keeps what concerns attention in a part of its own, of which plain heads alone are counted."""
    found = fields.held.get("attn_config")
    if not isinstance(found, Mapping):
        return
    fields.read.add("attn_config")
    usual: dict[str, tuple[Any, ...]] = {
        "attn_type": (None, "multihead_attention"),
        "qk_ln": (None, False),
        "qk_gn": (None, False),
        "prefix_lm": (None, False),
        "sliding_window_size": (None, -1),
    }
    if fields.held.get("model_type") != "dbrx":  # which has KV heads by this name, and nothing else by the others
        usual["kv_n_heads"] = (None, *(fields.held[name] for name in HEADS if name in fields.held))
    for name, plain in usual.items():
        if found.get(name) not in plain:
            raise OptionError(
                f"attn_config.{name} means heads or masks that are not counted here unless it is "
                f"{' or '.join(_short(value) for value in plain)}; got {_short(found[name])}"
            )


def checked_size(what: str, size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise OptionError(f"{what} must be a positive integer, got {size!r}")
    return size


def filled_in(fields: Fields) -> list[str]:
    if not fields.filled:
        return []
    told = ", ".join(f"{name} {_short(value)}" for name, value in sorted(fields.filled.items()))
    return [f"the config leaves out what transformers fills in for its family: {told}"]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 40 else f"{text[:36]} ..."


def unread(fields: Fields) -> list[str]:
    names = sorted(
        name
        for name, value in fields.held.items()
        if _SEEMS.search(name) and not _HARMLESS.search(name) and name not in fields.read
        if value not in (None, False, {}, [])
    )
    return [f"fields that may concern attention and were not read: {', '.join(names)}"] if names else []
