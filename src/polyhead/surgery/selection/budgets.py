"""Size of a model without some of its heads, and whether it meets a target."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from polyhead.costs import Workload
from polyhead.errors import OptionError
from polyhead.surgery.adapters.attention_layer import AttentionLayer, is_conv1d
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, read_heads
from polyhead.surgery.edits.head_edits import PruneHeads
from polyhead.surgery.edits.preview import HeadCounts, preview, uncached_layers
from polyhead.surgery.options import Target
from polyhead.surgery.selection.evidence import editable_layers

RemovedHeads = dict[str, tuple[int, ...]]  # pruned heads, by layer
COUNTED_CALL = Workload.forward(512)  # whose FLOPs are counted
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")  # names in configs
NO_CACHE = (
    "a cache target needs a model with a KV cache, got {target} for a model without one, such as an encoder; "
    "use a share of its heads (30%-heads) or of its FLOPs (1.2x-faster)"
)


@dataclass(frozen=True, slots=True)
class Size:
    """Remaining shares of a model: heads, KV cache bytes per token, FLOPs.

    `cache` is None for a model without a KV cache, such as an encoder.
    """

    heads: float
    cache: float | None
    flops: float

    def excess(self, target: Target) -> float:
        """Return the share of heads, cache or FLOPs removed beyond a target; negative if the target is not met."""
        if target.kind == "heads":
            return 1 - target.amount - self.heads
        return 1 / target.amount - self._remaining(target)

    def reaches(self, target: Target) -> bool:
        """Return whether this size meets the target."""
        return self.excess(target) >= -1e-9

    def meets(self, target: Target) -> str:
        """Return the highest target of the same kind that this size meets, as `Target.parse` reads it."""
        if target.kind == "heads":
            return f"{math.floor(1000 * (1 - self.heads) + 1e-6) / 10:g}%-heads"
        return f"{math.floor(100 / self._remaining(target) + 1e-6) / 100:g}x-{target.kind}"

    def _remaining(self, target: Target) -> float:
        remaining = self.cache if target.kind == "cache" else self.flops
        if remaining is None:
            raise OptionError(NO_CACHE.format(target=target))
        return remaining

    def __str__(self) -> str:
        cache = "" if self.cache is None else f", {self.cache:.0%} of the cache"
        return f"{self.heads:.0%} of the heads{cache} and {self.flops:.0%} of the model's FLOPs"


class SizeCounter:
    """Sizes of a model without heads of these layers, by the shapes of its weights."""

    def __init__(self, model: nn.Module, layers: Mapping[str, AttentionLayer]) -> None:
        self.model, self.layers = model, layers
        self._has_cache = keeps_cache(model)
        self._other_flops = other_flops(model, COUNTED_CALL)
        self._counts: dict[tuple[str, tuple[int, ...]], HeadCounts] = {}  # of layers without these heads

    def __call__(self, removed: Mapping[str, Sequence[int]]) -> Size:
        """Return the size of the model without these heads, by layer."""
        pruned = {path: tuple(heads) for path, heads in removed.items() if len(heads)}
        if not pruned:
            return Size(1.0, 1.0 if self._has_cache else None, 1.0)
        # A search requests many sizes, mostly of layers that were counted before.
        if unknown := {path: heads for path, heads in pruned.items() if (path, heads) not in self._counts}:
            for layer in preview(self.model, prune_edits(self.layers, unknown), work=COUNTED_CALL).layers:
                self._counts[layer.path, ()] = layer.before
                if layer.path in unknown:
                    self._counts[layer.path, unknown[layer.path]] = layer.after
        before = [self._counts[path, ()] for path in self.layers]
        after = [self._counts[path, pruned.get(path, ())] for path in self.layers]
        return Size(
            sum(x.heads for x in after) / sum(x.heads for x in before),
            sum(x.cache_bytes_per_token for x in after) / sum(x.cache_bytes_per_token for x in before)
            if self._has_cache
            else None,
            (sum(x.flops for x in after) + self._other_flops) / (sum(x.flops for x in before) + self._other_flops),
        )


def prune_edits(layers: Mapping[str, AttentionLayer], removed: Mapping[str, Sequence[int]]) -> list[PruneHeads]:
    """Return the edits that remove these heads, by layer."""
    return [
        PruneHeads(layers[path].number, tuple(heads), stack=layers[path].stack)
        for path, heads in removed.items()
        if len(heads)
    ]


def describe_removed(heads: Mapping[str, HeadWeights], removed: Mapping[str, Sequence[int]]) -> str:
    """Describe how many of these heads are pruned."""
    total = sum(layer_heads.num_heads for layer_heads in heads.values())
    return f"{sum(map(len, removed.values()))} of {total} heads are pruned"


def check_target(target: Target, model: nn.Module) -> None:
    """Raise `OptionError` for a target that no form can meet, by the shapes of the model's weights."""
    if target.kind == "cache" and not keeps_cache(model):
        raise OptionError(NO_CACHE.format(target=target))
    layers = editable_layers(model)
    heads = {path: read_heads(model, layer, device="meta").num_heads for path, layer in layers.items()}
    size_of = SizeCounter(model, layers)
    check_reachable(target, size_of({path: range(1, count) for path, count in heads.items()}))


def check_reachable(target: Target, smallest: Size) -> None:
    """Raise `OptionError` if the smallest size that a model can be pruned to does not meet a target."""
    if not smallest.reaches(target):
        raise OptionError(
            f"every layer keeps at least one head, which leaves {smallest} of this model, got a target of {target}"
        )


def keeps_cache(model: nn.Module) -> bool:
    """Return whether some of a model's layers keep a KV cache."""
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    return len(uncached_layers(model, layers)) < len(layers)


def other_flops(model: nn.Module, work: Workload) -> int:
    """Return the FLOPs of all linear layers, experts and routers outside attention, for one call."""
    attention = {source.path for layer in find_layers(model) for source in layer.sources}
    attention |= {layer.output for layer in find_layers(model)}
    weights = sum(_used_weights(model, module) for path, module in model.named_modules() if path not in attention)
    return 2 * work.batch * work.queries * weights


def _used_weights(model: nn.Module, module: nn.Module) -> int:
    """Return the number of a module's own weights that are multiplied with each token.

    Of the experts of a mixture, stored as [experts, ...], those that the router selects; all that are not routed.
    """
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return module.get_parameter("weight").numel()
    own = [x for _, x in module.named_parameters(recurse=False)]
    experts = sum(x.numel() for x in own if x.ndim == 3)
    if experts and "top_k_index" in inspect.signature(module.forward).parameters:
        count = next(x.shape[0] for x in own if x.ndim == 3)
        return experts * _experts_per_token(model, module) // count
    if hasattr(module, "num_experts") or hasattr(module, "top_k"):  # a router, or experts that are all computed
        return experts + sum(x.numel() for x in own if x.ndim == 2)
    return 0


def _experts_per_token(model: nn.Module, module: nn.Module) -> int:
    """Return how many routed experts a token passes through, by the model's config."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in EXPERTS_PER_TOKEN:
        if isinstance(value := getattr(text, name, None), int):
            return value
    raise OptionError(
        f"FLOPs of a mixture of experts need the number of experts per token in its config "
        f"({', '.join(EXPERTS_PER_TOKEN)}), got none for {type(module).__name__}"
    )
