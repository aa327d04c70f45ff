"""How much memory attention layers take at their peak, with fused attention and with weights that are written down."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Literal

import torch

from polyhead.layers.config import AttentionConfig, HeadsConfig
from polyhead.masks import Mask
from polyhead.plan.cost import estimate_cost
from polyhead.plan.layer_work import layer_work
from polyhead.plan.work import AttentionCore
from polyhead.plan.workload import Workload

Form = Literal["fused", "materialised"]
# Copies of the weights that the formula holds at once: logits, exponentials and weights in a forward; of these a
# backward finds the last two, and makes four more on the way to the gradient of the logits.
FORWARD_COPIES, KEPT_COPIES, BACKWARD_COPIES = 3, 2, 6


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes at the peak of one call, by what they are for.

    `gradients` are those of the parameters, there from the step before. `inputs` are the input of the first layer, the
    output of the last, and in training the gradient of that output. `kept` is what layers keep from the forward for the
    backward, `transient` what the one layer that is at work needs besides. `weights` says how much of these two are
    attention weights: copies of h n² numbers, or none where attention is fused.
    """

    parameters: int
    gradients: int
    cache: int
    inputs: int
    kept: int
    transient: int
    weights: int

    @property
    def activations(self) -> int:
        return self.inputs + self.kept + self.transient

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.cache + self.activations

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        """Of layers that follow one another: only one of them is at work, and what goes between them counts once."""
        fields = [field.name for field in dataclasses.fields(self)]
        added = {name: getattr(self, name) + getattr(other, name) for name in fields}
        busiest = max(self, other, key=lambda memory: memory.transient)
        shared = {"inputs": max(self.inputs, other.inputs), "transient": busiest.transient}
        return MemoryEstimate(**{**added, **shared})


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
) -> MemoryEstimate:
    """What `layers` layers made with `config` hold at their peak.

    Counted is what lives on a GPU as the library and PyTorch run there: a fused backward adds up the gradient of the
    queries in float32, and makes gradients of shared keys for every head before they are summed. Held to
    `torch.cuda.max_memory_allocated` for multi-head and grouped heads; for other arrangements it is what their pieces
    write. Mask tensors, workspaces of products and the optimiser are not in it. Arguments are those of `layer_work`.

    >>> from polyhead.layers.config import MultiHeadConfig
    >>> config, work = MultiHeadConfig(512, 8, bias=False), Workload.forward(8192)
    >>> fused, materialised = (estimate_memory(config, work, form=form) for form in ("fused", "materialised"))
    >>> fused.total >> 20, materialised.total >> 20, materialised.weights == 3 * 4 * 8 * 8192**2
    (50, 6250, True)
    """
    cached = work.past > 0 if cached is None else cached
    forward = layer_work(
        config, replace(work, training=False), mask=mask, dtype=dtype, cache_dtype=cache_dtype, cached=cached
    ).pieces
    cost = estimate_cost(config, work, mask=mask, form=form, dtype=dtype, cache_dtype=cache_dtype)
    tokens, size = work.batch * work.queries, dtype.itemsize
    width = config.layout.embed_dim  # type: ignore[attr-defined]
    through = tokens * width * size
    source = 0 if work.source is None else work.batch * work.source * width * size
    core = next(piece for piece in forward if isinstance(piece, AttentionCore) and piece.stage == "attention")
    before = sum(piece.kept for piece in forward if piece.stage in ("projection", "positions"))
    attended = [piece.kept for piece in forward if piece.stage == "attention"]
    after = sum(piece.kept for piece in forward if piece.stage in ("mixing", "output"))
    heads_out = core.kept - _logsumexp(core)
    wide = 0 if form == "fused" else _widened(core)
    parameters = cost.parameters * size
    held = layers * cost.cache_bytes if cached else 0
    if not work.training:
        weights = FORWARD_COPIES * cost.weights_bytes
        at_attention = before + sum(attended) + wide + weights
        at_output = before + heads_out + after  # the output of the layer among it
        transient = max(at_attention, at_output) - through
        return MemoryEstimate(layers * parameters, 0, held, 2 * through + source, 0, transient, weights)
    joint = 0
    if isinstance(config, HeadsConfig) and work.source is None:
        # The three projections are laid side by side for one product, and that copy waits for its gradient.
        layout = config.layout
        rows = layout.num_heads * layout.head_dim + layout.num_kv_heads * (layout.head_dim + layout.value_dim)
        joint = rows * layout.embed_dim * size
    kept = joint + before + sum(attended) + after - through + wide + KEPT_COPIES * cost.weights_bytes
    if form == "materialised":
        # At the softmax the heads' outputs and their gradients are gone, and of the three only the values' has come.
        of_values = 4 * core.batch * core.kv_heads * core.keys * core.value_dim
        at_softmax = of_values - heads_out + (BACKWARD_COPIES - KEPT_COPIES) * cost.weights_bytes
        transient = max(at_softmax, heads_out)
    else:
        guarded = heads_out if len(attended) > 1 else 0  # the output before NaN was put back is let go by then
        transient = heads_out - guarded + _gradients(core)
    return MemoryEstimate(
        layers * parameters,
        layers * parameters,
        0,
        3 * through + source,
        layers * kept + (layers - 1) * through,
        transient,
        (layers * KEPT_COPIES + BACKWARD_COPIES - KEPT_COPIES) * cost.weights_bytes,
    )


def _logsumexp(core: AttentionCore) -> int:
    return 4 * core.batch * core.heads * core.queries


def _widened(core: AttentionCore) -> int:
    """Queries, keys, values and outputs once more in float32, in which the formula computes."""
    if core.dtype.itemsize >= 4:
        return 0
    rows, seen = core.batch * core.heads * core.queries, core.batch * core.kv_heads * core.keys
    return 4 * (rows * (core.head_dim + core.value_dim) + seen * (core.head_dim + core.value_dim))


def _gradients(core: AttentionCore) -> int:
    """Gradients of queries, keys and values, and what a fused backward needs to add them up."""
    size, rows = core.dtype.itemsize, core.batch * core.heads * core.queries
    of_source = core.batch * core.keys * (core.head_dim + core.value_dim)
    own = size * (rows * core.head_dim + core.kv_heads * of_source)
    shared = size * core.heads * of_source if core.heads != core.kv_heads else 0
    return own + shared + (4 * rows * core.head_dim if size < 4 else 0)
