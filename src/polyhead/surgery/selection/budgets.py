"""Size of a model without some of its heads, and whether it meets a target."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from polyhead.costs import Workload
from polyhead.errors import OptionError
from polyhead.surgery.adapters.attention_layer import is_conv1d
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.edits.preview import uncached_layers
from polyhead.surgery.options import Target

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

    def reaches(self, target: Target) -> bool:
        """Return whether this size meets the target."""
        if target.kind == "heads":
            return self.heads <= 1 - target.amount + 1e-9
        remaining = self.cache if target.kind == "cache" else self.flops
        if remaining is None:
            raise OptionError(NO_CACHE.format(target=target))
        return remaining * target.amount <= 1 + 1e-9

    def __str__(self) -> str:
        cache = "" if self.cache is None else f", {self.cache:.0%} of the cache"
        return f"{self.heads:.0%} of the heads{cache} and {self.flops:.0%} of the FLOPs"


def check_target(target: Target, model: nn.Module) -> None:
    """Raise `OptionError` for a cache target of a model without a KV cache."""
    if target.kind == "cache" and not keeps_cache(model):
        raise OptionError(NO_CACHE.format(target=target))


def keeps_cache(model: nn.Module) -> bool:
    """Return whether some of a model's layers keep a KV cache."""
    layers = [layer for layer in find_layers(model) if not layer.refusals]
    return len(uncached_layers(model, layers)) < len(layers)


def other_flops(model: nn.Module, work: Workload) -> int:
    """Return the FLOPs of all linear layers outside attention, for one call."""
    attention = {source.path for layer in find_layers(model) for source in layer.sources}
    attention |= {layer.output for layer in find_layers(model)}
    count = sum(
        module.get_parameter("weight").numel()
        for path, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and path not in attention
    )
    return 2 * work.batch * work.queries * count
