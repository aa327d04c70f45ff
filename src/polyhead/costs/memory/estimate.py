"""How much memory attention layers take at their peak, with fused attention and with weights that are written down."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polyhead.costs.cost import estimate_cost
from polyhead.costs.layer_work import requested_of
from polyhead.costs.memory import latent as latent
from polyhead.costs.memory import routed as routed

# Imported for what they tell of other arrangements.
from polyhead.costs.memory import variants as variants
from polyhead.costs.memory.attention import BACKWARD_COPIES, FORWARD_COPIES, KEPT_COPIES
from polyhead.costs.memory.layers import record_layer
from polyhead.costs.memory.recorder import Device, Form, Recorder
from polyhead.costs.workload import Workload
from polyhead.layers.config import AttentionConfig, MultiHeadConfig
from polyhead.layers.variants.routed.config import RoutedConfig
from polyhead.masks import Mask


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes at the peak of one call, by what they are for.

    `gradients` are those of the parameters, there from the step before. `inputs` are the input of the first layer, the
    output of the last, and in training the gradient of that output. `kept` is what layers keep from the forward for the
    backward, `transient` what the one layer that is at work needs besides. `kept_weights` and `transient_weights` say
    how much of these two are attention weights: copies of h n² numbers, or none where attention is fused. `between` is
    what goes from one layer to the next: training keeps it, and it is in `kept` once less than there are layers.
    """

    parameters: int
    gradients: int
    cache: int
    inputs: int
    kept: int
    transient: int
    kept_weights: int
    transient_weights: int
    between: int

    @property
    def weights(self) -> int:
        """Attention weights of all layers that live at the peak."""
        return self.kept_weights + self.transient_weights

    @property
    def activations(self) -> int:
        return self.inputs + self.kept + self.transient

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.cache + self.activations

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        """Of layers that follow one another: only one of them is at work, and what goes between them counts once."""
        busiest = max(self, other, key=lambda memory: (memory.transient, memory.transient_weights))
        between = max(self.between, other.between)
        return MemoryEstimate(
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            cache=self.cache + other.cache,
            inputs=max(self.inputs, other.inputs),
            kept=self.kept + other.kept + between,
            transient=busiest.transient,
            kept_weights=self.kept_weights + other.kept_weights,
            transient_weights=busiest.transient_weights,
            between=between,
        )


def estimate_memory(
    config: AttentionConfig,
    work: Workload,
    *,
    mask: Mask | None = None,
    form: Form = "fused",
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    cached: bool | None = None,
    layers: int = 1,
    device: Device = "cuda",
) -> MemoryEstimate:
    """What `layers` layers made with `config` hold at their peak.

    Every tensor that a call makes is followed from where it is made to where it is let go, in the forward and in the
    backward. On "cuda" that is what lives on a GPU as the library and PyTorch run there: a fused backward adds up the
    gradient of the queries in float32 and makes gradients of shared keys for every head before they are summed, and
    keys are copied where a mask hides some. On "cpu" tests hold every arrangement to all storages of a built layer; on
    a GPU they hold most of them to `torch.cuda.max_memory_allocated`. `memory_doubts` says what may be
    further off. Workspaces of products and the optimiser are not in it. The other arguments are those of `layer_work`.

    >>> from polyhead.layers.config import MultiHeadConfig
    >>> config, work = MultiHeadConfig(512, 8, bias=False), Workload.forward(8192)
    >>> fused, materialised = (estimate_memory(config, work, form=form) for form in ("fused", "materialised"))
    >>> fused.total >> 20, materialised.total >> 20, materialised.weights == 3 * 4 * 8 * 8192**2
    (50, 6250, True)
    """
    cached = work.past > 0 if cached is None else cached
    requested = requested_of(config, work, mask=mask, dtype=dtype, cache_dtype=cache_dtype, cached=cached)
    cost = estimate_cost(config, work, mask=mask, form=form, dtype=dtype, cache_dtype=cache_dtype)
    call = Recorder.of(config, requested, form, device)
    output, tape = record_layer(config, call), call.tape
    parameters = layers * cost.parameters * dtype.itemsize
    through = output.size
    source = 0 if work.source is None else through // max(1, work.queries) * work.source
    largest = max(call.written, default=0)
    if not work.training:
        held = layers * cost.cache_bytes if cached else 0
        at_work, weights = tape.peak - through, FORWARD_COPIES * largest
        return MemoryEstimate(parameters, 0, held, 2 * through + source, 0, at_work, 0, weights, 0)
    tape.finish(output)
    kept = tape.now - through
    tape.backward()
    return MemoryEstimate(
        parameters=parameters,
        gradients=parameters,
        cache=0,
        inputs=3 * through + source,
        kept=layers * kept + (layers - 1) * through,
        transient=tape.peak - through - kept,
        kept_weights=layers * KEPT_COPIES * sum(call.written),
        transient_weights=(BACKWARD_COPIES - KEPT_COPIES) * largest,
        between=through,
    )


def memory_doubts(config: AttentionConfig, *, device: Device = "cuda") -> tuple[str, ...]:
    """Why `estimate_memory` may be further off than 5% for such a layer there, in words; none where tests hold it.

    >>> from polyhead.layers.config import MultiHeadConfig
    >>> uneven = MultiHeadConfig(512, 8, key_heads=(0,) * 7 + (1,), causal=True)
    >>> memory_doubts(MultiHeadConfig(512, 8)), memory_doubts(uneven)
    ((), ('memory of KV heads with different numbers of readers over a cache, prompts and decoding, ...',))
    """
    doubts = _unmeasured(config) if device == "cuda" else []
    if isinstance(config, RoutedConfig) and config.top_k is None:
        doubts.append(
            f"memory of routed heads is that of the {config.most_heads} heads that a token takes at most; "
            "how many it takes depends on the text"
        )
    return tuple(doubts)


def _unmeasured(config: AttentionConfig) -> list[str]:
    """What no measurement on a GPU holds. Elsewhere it is held to 5%: prompts of multi-head attention, and every
    arrangement's forward and training step.
    """
    if not getattr(config, "causal", False):
        return []
    kind = str(config.to_dict()["kind"]).replace("_", " ")
    named = kind if "head" in kind else f"{kind} heads"
    if isinstance(config, MultiHeadConfig):
        if config.layout.key_heads is None:
            return []
        named = "KV heads with different numbers of readers"
    return [
        f"memory of {named} over a cache, prompts and decoding, is held to 5% on a CPU; "
        "on a GPU it has not been measured"
    ]
