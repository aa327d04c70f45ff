"""Peak memory of attention layers, with fused attention and with materialised attention weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from polyhead.costs.cost import checked_recorder
from polyhead.costs.descriptions import describe
from polyhead.costs.recording.attention_tensors import BACKWARD_COPIES, FORWARD_COPIES, KEPT_COPIES
from polyhead.costs.recording.recorder import Form
from polyhead.costs.work import Device
from polyhead.costs.workload import Workload
from polyhead.layers import AttentionConfig, MultiHeadConfig
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.positions.config import RotaryConfig
from polyhead.layers.variants.collaborative.layer import CollaborativeConfig
from polyhead.layers.variants.routed.config import RoutedConfig
from polyhead.masks import Mask


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak bytes of one call, by purpose.

    `gradients` are those of the parameters, still allocated from the previous step. `inputs` are the input of the first
    layer, the source of cross-attention, the output of the last layer and, in training, the gradient of that output.
    `cache` is the KV cache, or the remembered keys and values of a source, of all layers.
    `kept` is what all layers save for the backward, `transient` what the layer being computed needs in addition.
    `kept_weights` and `transient_weights` are the parts of these two that are attention weights (h n² elements per
    copy); 0 if attention is fused. `between` is the activation between two layers: training saves it, and `kept`
    contains it (layers - 1) times. `tables` are the tables by position, such as cos and sin of RoPE, and their bytes;
    layers of equal positions share one. `kernel_choices` are the kernels and tiles selected for the calls: memory grows
    with batch and tokens while they stay the same, and may drop where they change.
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
    tables: tuple[tuple[str, int], ...] = ()
    kernel_choices: tuple[Hashable, ...] = field(default=(), compare=False, repr=False)

    @property
    def weights(self) -> int:
        """Bytes of attention weights of all layers at the peak."""
        return self.kept_weights + self.transient_weights

    @property
    def activations(self) -> int:
        return self.inputs + self.kept + self.transient + self.table_bytes

    @property
    def table_bytes(self) -> int:
        return sum(size for _, size in self.tables)

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.cache + self.activations

    def to_dict(self) -> dict[str, int]:
        """Return all bytes by name, including totals."""
        totals = {"weights": self.weights, "activations": self.activations, "total": self.total}
        content = {**dataclasses.asdict(self), **totals, "tables": self.table_bytes}
        del content["kernel_choices"]
        return content

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        """Combine consecutive layers: one of them runs at a time, and the activation between them counts once."""
        busiest = max(self, other, key=lambda memory: (memory.transient, memory.transient_weights))
        between, tables = max(self.between, other.between), dict(self.tables)
        for positions, size in other.tables:
            tables[positions] = max(size, tables.get(positions, 0))
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
            tables=tuple(tables.items()),
            kernel_choices=(*self.kernel_choices, *other.kernel_choices),
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
    """Estimate the peak memory of `layers` layers with this config.

    Every tensor of a call is tracked from allocation to release, in the forward and in the backward. "cuda" models the
    kernels that the library and PyTorch run on a GPU: a fused backward accumulates the query gradient in float32 and
    computes gradients of shared keys per head before summing them, and keys are copied if a mask hides some. Tests
    compare the estimate of every variant with the bytes of all storages of a built layer on a CPU, and most estimates
    with `torch.cuda.max_memory_allocated` on a GPU; `memory_caveats` lists the exceptions. Matmul workspaces and
    optimizer state are not included. The other arguments are those of `layer_work`.

    Args:
        config: config of the layers.
        work: the call whose peak is estimated.
        mask: a causal mask or sliding window passed to the call, in addition to the layer's own.
        form: "fused" stores no attention weights, "materialised" stores all of them.
        dtype: dtype of weights and activations.
        cache_dtype: dtype of the cache, default `dtype`; torch.int8 is a `QuantizedCache`.
        cached: whether the call has a cache; by default where `work` has past tokens.
        layers: number of layers; all but one keep only what a later step needs.
        device: "cuda" or "cpu", whose kernels need different workspaces.

    Returns:
        Bytes by purpose, and their peak as `total`.

    >>> from polyhead.layers import MultiHeadConfig
    >>> config, work = MultiHeadConfig(512, 8, bias=False), Workload.forward(8192)
    >>> fused, materialised = (estimate_memory(config, work, form=form) for form in ("fused", "materialised"))
    >>> fused.total >> 20, materialised.total >> 20, materialised.weights == 3 * 4 * 8 * 8192**2
    (50, 6250, True)
    """
    dtypes = {"dtype": dtype, "cache_dtype": cache_dtype}
    call = checked_recorder(config, work, mask=mask, cached=cached, form=form, device=device, **dtypes)
    layer, tape = describe(config), call.tape
    output = layer.record(call)
    per_token = layer.cache_bytes_per_token(call.dtype if work.remembered else call.cache_dtype)
    cache = layers * work.batch * work.keys * per_token if call.cached or work.remembered else 0
    parameters = layers * layer.num_parameters * dtype.itemsize
    activation = output.size  # size of a layer's input and of its output
    source = 0
    if work.source is not None and not work.remembered:
        source = call.size(work.batch * work.source * _source_width(config))
    largest = max(call.weight_sizes, default=0)
    if not work.training:
        transient, weights = tape.peak - activation, FORWARD_COPIES * largest
        sizes = (parameters, 0, cache, 2 * activation + source, 0, transient, 0, weights, 0)
        return MemoryEstimate(*sizes, tables=tuple(call.tables.items()), kernel_choices=tuple(call.kernel_choices))
    tape.finish(output)
    saved = tape.now - activation
    tape.backward()
    return MemoryEstimate(
        parameters=parameters,
        gradients=parameters,
        cache=cache,
        inputs=3 * activation + source,
        kept=layers * saved + (layers - 1) * activation,
        transient=tape.peak - activation - saved,
        kept_weights=layers * KEPT_COPIES * sum(call.weight_sizes),
        transient_weights=(BACKWARD_COPIES - KEPT_COPIES) * largest,
        between=activation,
        tables=tuple(call.tables.items()),
        kernel_choices=tuple(call.kernel_choices),
    )


def _source_width(config: AttentionConfig) -> int:
    """Return the channels of a token of the source: one tensor, or two where keys and values differ in width."""
    width: int = config.layout.embed_dim  # type: ignore[attr-defined]
    if not isinstance(config, HeadsConfig):
        return width
    layout = config.layout
    return sum({layout.key_input_dim, layout.value_input_dim})


def memory_caveats(config: AttentionConfig, *, device: Device = "cuda") -> tuple[str, ...]:
    """Return reasons why `estimate_memory` may be off by more than 5% for this layer; empty if there are none.

    Args:
        config: config of the layer.
        device: "cuda" or "cpu".

    >>> from polyhead.layers import MultiHeadConfig
    >>> uneven = MultiHeadConfig(512, 8, key_heads=(0,) * 7 + (1,), causal=True)
    >>> memory_caveats(MultiHeadConfig(512, 8)), memory_caveats(uneven)
    ((), ('memory of uneven KV groups over a cache (prefill and decode) ...',))
    """
    caveats = [*(_unmeasured(config) if device == "cuda" else []), *_of_rotary(config, device)]
    if isinstance(config, RoutedConfig) and config.top_k is None:
        caveats.append(
            f"memory of routed heads assumes the maximum of {config.max_heads} heads per token; "
            "the actual number depends on the text"
        )
    if isinstance(config, RoutedConfig) and device == "cpu":
        caveats.append(
            "the memory of routed heads of shape 'full' depends on the text: on a CPU it was up to 25% off, and up to "
            "45% too high over long sources"
            if config.shape == "full"
            else "the memory of routed heads on a CPU was up to 12% too low in 16 bits"
        )
    return tuple(caveats)


def _of_rotary(config: AttentionConfig, device: Device) -> list[str]:
    """Return a message if RoPE makes estimates for this layer less accurate."""
    positions = getattr(config, "positions", None)
    if not isinstance(positions, RotaryConfig):
        return []
    if isinstance(config, CollaborativeConfig):
        return [
            "the memory of collaborative heads with RoPE, which rotates the queries of every head, was up to 15% off "
            "on a CPU"
        ]
    if positions.rotary_dim == config.position_layout.head_dim:  # type: ignore[attr-defined]
        return []
    if isinstance(config, RoutedConfig):
        return ["the memory of routed heads with partial RoPE was up to 16% too high on a CPU"]
    text = "the memory of partial RoPE was within 5% on a CPU; it has not been measured on a GPU"
    return [text] if device == "cuda" else []


def _unmeasured(config: AttentionConfig) -> list[str]:
    """Return a message if estimates for this layer were not measured on a GPU: those of variants with a cache."""
    if not getattr(config, "causal", False):
        return []
    kind = str(config.to_dict()["kind"]).replace("_", " ")
    label = kind if "head" in kind else f"{kind} heads"
    if isinstance(config, MultiHeadConfig):
        if config.layout.key_heads is None:
            return []
        label = "uneven KV groups"
    return [
        f"memory of {label} over a cache (prefill and decode) is tested to 5% on a CPU; "
        "it has not been measured on a GPU"
    ]
