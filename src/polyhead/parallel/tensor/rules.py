"""Rules by which the parameters of each attention layer are distributed over ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from polyhead.errors import OptionError
from polyhead.layers.base_attention import BaseAttention
from polyhead.layers.latent.layer import LatentAttention
from polyhead.layers.multi_head.layer import MultiHeadAttention
from polyhead.layers.multi_head.projected import ProjectedHeads
from polyhead.layers.torch_compat import MultiheadAttention
from polyhead.layers.variants.collaborative import CollaborativeAttention
from polyhead.layers.variants.differential import DifferentialAttention
from polyhead.layers.variants.grouped import GroupedHeads
from polyhead.layers.variants.mixing import HeadMix
from polyhead.layers.variants.routed import RoutedHeads
from polyhead.layers.variants.talking import TalkingHeads

Unit = Literal["heads", "kv_heads", "maps"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Distribution of one parameter.

    `unit` is what its rows (or columns, with `dim` 1) belong to; None for a parameter that all heads share. Parameters
    by "maps", which are not contiguous per head, and shared ones are replicated, and their gradients are summed.
    """

    unit: Unit | None = None
    dim: int = 0


_BY_HEAD, _BY_KV_HEAD, _SHARED = Rule("heads"), Rule("kv_heads"), Rule()
_COMMON = {
    r"out_proj\.weight": Rule("heads", dim=1),
    r"out_proj\.bias": _SHARED,
    r"positions\..+": _SHARED,
    r"head_gate": _SHARED,
}
_PROJECTED = {
    **_COMMON,
    r"q_proj\.(weight|bias)": _BY_HEAD,
    r"[kv]_proj\.(weight|bias)": _BY_KV_HEAD,
    r"gate_proj\.(weight|bias)": _BY_HEAD,
    r"sinks": _BY_HEAD,
    r"[qk]_norm\..+": _SHARED,
}
# The first pattern that matches a parameter's name is its rule. A class that is not listed is refused.
_RULES: Mapping[type[BaseAttention], Mapping[str, Rule]] = {
    MultiHeadAttention: _PROJECTED,
    DifferentialAttention: {**_PROJECTED, r"sinks": Rule("maps"), r"lambda_[qk][12]": _SHARED},
    CollaborativeAttention: {r"[qk]_proj\.(weight|bias)": _SHARED, r"mixing": _BY_HEAD, **_PROJECTED},
    LatentAttention: {
        **_COMMON,
        r"q_proj\.(weight|bias)": _BY_HEAD,
        r"(q_b|kv_b)_proj\.weight": _BY_HEAD,
        r"(q_a|kv_a)_(proj|norm)\.(weight|bias)": _SHARED,
        r"sinks": _BY_HEAD,
    },
}
_STACKED = (
    "no collective but another layout: its stacked in_proj_weight is not contiguous per head; "
    "convert it with polyhead.MultiHeadAttention.from_torch"
)
# Layers whose heads interact before the output projection, and the collective that they would need.
_INTERACTING: Mapping[type[nn.Module], str] = {
    TalkingHeads: "an all-gather of the queries and keys of all heads, whose logits are mixed before the softmax, and "
    "a reduce-scatter of the weights that are mixed after it",
    HeadMix: "an all-gather of the outputs of all heads, which attend to one another before the output projection",
    GroupedHeads: "an all-reduce of the hidden layer of the MLP, before its activation",
    RoutedHeads: "an all-to-all of the rows that select each head, whose number differs between ranks",
    MultiheadAttention: _STACKED,
    nn.MultiheadAttention: _STACKED,
}


def check_supported(module: nn.Module) -> None:
    """Raise `OptionError` unless the heads of a module can be distributed over ranks."""
    name, layers = type(module).__name__, ", ".join(x.__name__ for x in _RULES)
    needed = next((text for cls, text in _INTERACTING.items() if isinstance(module, cls)), None)
    if needed is None and isinstance(module, ProjectedHeads) and module.combine is not None:
        needed = f"an all-gather of the outputs of all heads, which {type(module.combine).__name__} combines"
    if needed is not None:
        raise OptionError(
            f"HeadParallel takes layers whose heads do not interact before the output projection ({layers}), got "
            f"{name}, which would need {needed}"
        )
    if type(module) not in _RULES:
        raise OptionError(
            f"HeadParallel takes {layers}, whose parameters it knows, got {name}; apply it to the attention layers of "
            "a model before torch.compile, adapters and other wrappers"
        )


def rule_of(layer_class: type[BaseAttention], parameter: str) -> Rule:
    """Return the rule of a parameter, by its name in the layer."""
    for pattern, rule in _RULES[layer_class].items():
        if re.fullmatch(pattern, parameter):
            return rule
    raise OptionError(
        f"HeadParallel knows the parameters of {layer_class.__name__}, got another, {parameter!r}; add parameters and "
        "adapters after the layer is distributed"
    )
