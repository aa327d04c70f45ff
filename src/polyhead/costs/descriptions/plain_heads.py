"""Cost description of multi-head attention, and the base class of those of most variants."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from polyhead.costs.descriptions.layer_description import LayerDescription
from polyhead.costs.recording.attention_tensors import record_heads
from polyhead.costs.recording.recorder import Heads, Recorder
from polyhead.costs.recording.tape import Block
from polyhead.costs.work import Traffic
from polyhead.errors import ShapeError
from polyhead.layers.multi_head.config import HeadsConfig
from polyhead.layers.positions.config import RotaryConfig
from polyhead.layers.variants.routed.config import RoutedConfig

NORM_WEIGHTS = {None: 0, "rms": 2, "layer": 4}  # weight vectors [head_dim] of the query and key norms together
AnyConfig = TypeVar("AnyConfig", bound=HeadsConfig | RoutedConfig)
AnyHeads = TypeVar("AnyHeads", bound=HeadsConfig)


class ProjectedHeads(LayerDescription[AnyConfig]):
    """Queries of `num_query_heads` heads, keys and values, each projected from the input."""

    def __init__(self, config: AnyConfig, num_query_heads: int) -> None:
        super().__init__(config)
        layout = self.layout = config.layout
        # Channels of all heads together; `concat_channels` is the input width of the output projection.
        self.query_channels = num_query_heads * layout.head_dim
        self.key_channels = layout.num_kv_heads * layout.head_dim
        self.value_channels = layout.num_kv_heads * layout.value_dim
        self.concat_channels = num_query_heads * layout.value_dim
        self.cache_scales = 2 * layout.num_kv_heads

    @property
    def projections(self) -> tuple[int, int, int, int]:
        layout, width = self.layout, self.layout.embed_dim
        key = layout.key_input_dim * self.key_channels
        value = layout.value_input_dim * self.value_channels
        return width * self.query_channels, key, value, self.concat_channels * width

    @property
    def other_parameters(self) -> int:
        config, layout = self.config, self.layout
        biases = self.query_channels + self.key_channels + self.value_channels if config.bias else 0
        biases += layout.embed_dim if config.output_bias else 0
        norms = NORM_WEIGHTS[config.qk_norm] * layout.head_dim
        positions = 0 if config.positions is None else config.positions.num_parameters(config.position_layout)
        return biases + norms + positions + (config.num_heads if config.sinks else 0) + self.extra_parameters

    @property
    @abstractmethod
    def extra_parameters(self) -> int:
        """Number of parameters besides projections, biases, norms, positions and sinks."""

    @property
    def cache_elements(self) -> int:
        return self.key_channels + self.value_channels

    def remembered(self, call: Recorder) -> tuple[Block, Block]:
        """Return the keys and values of a source that an earlier call projected."""
        rows = call.work.batch * call.work.keys
        key, value = (call.tape.external(call.size(rows * width)) for width in (self.key_channels, self.value_channels))
        return key, value

    def normed_and_rotated(self, call: Recorder, query: Block, key: Block, query_channels: int) -> tuple[Block, Block]:
        """Record norms and rotary positions of queries and new keys, and cache writes; returns both blocks.

        `query_channels` are those of the queries per token: of the selected heads alone in routed heads.
        """
        config, dim, kind = self.config, self.layout.head_dim, self.config.qk_norm
        query_numbers, key_numbers = call.tokens * query_channels, call.new_keys * self.key_channels
        remembered = call.work.remembered
        if kind is not None:
            call.passes("positions", query_numbers + key_numbers, launches=1 if remembered else 2)
            projected, query = query, call.normed(query, query_numbers, dim, kind=kind, by_head=True)
            call.tape.release(projected)
            key = key if remembered else call.normed(key, key_numbers, dim, kind=kind, by_head=True)
        rotary = config.positions, config.position_layout.head_dim
        for numbers in (query_numbers, key_numbers):
            call.rotary_passes(numbers, *rotary)
        if isinstance(config.positions, RotaryConfig):
            call.rotary_tables(config.positions)
            rotated = call.rotated(query, query_numbers, *rotary)
            rotated_key = key if remembered else call.rotated(key, key_numbers, *rotary)
            call.tape.release(query, *(() if remembered else (key,)))
            query, key = rotated, rotated_key
        call.cache_writes(self.cache_elements)
        return query, key


class PlainHeads(ProjectedHeads[AnyHeads]):
    """Projections, attention and output projection of `MultiHeadAttention`.

    A variant overrides `attend`, from queries, keys and values to the heads' outputs, or `combine`, from these to the
    layer's output, and adds its parameters to `extra_parameters`.
    """

    def __init__(self, config: AnyHeads) -> None:
        super().__init__(config, config.num_heads)
        layout = self.layout
        self.heads = Heads(layout.num_heads, layout.num_kv_heads, layout.head_dim, layout.value_dim)
        self.gate_channels = {None: 0, "head": layout.num_heads, "channel": self.concat_channels}[config.output_gate]

    @property
    def extra_parameters(self) -> int:
        return self.gate_channels * (self.layout.embed_dim + 1)  # weight and bias of the gate projection

    def record(self, call: Recorder) -> Block:
        heads = self.attend(call, *self._projected(call))
        return self.combine(call, heads if self.config.output_gate is None else self._gated(call, heads))

    def attend(self, call: Recorder, query: Block, key: Block, value: Block) -> Block:
        """Record the outputs of all heads."""
        call.core(self.heads, sinks=self.config.sinks)
        return record_heads(call, query, key, value, self.heads, self.layout.key_heads)

    def combine(self, call: Recorder, heads: Block) -> Block:
        """Record the output projection of the heads."""
        flat = call.flattened(heads, call.size(call.tokens * self.concat_channels))
        return call.linear("output", flat, self.layout.embed_dim, self.concat_channels)

    def _projected(self, call: Recorder) -> tuple[Block, Block, Block]:
        """Record queries, keys and values, with their norms and positions, and the writes to the cache."""
        layout, tape, new, work = self.layout, call.tape, call.new_keys, call.work
        width, key_width, value_width = layout.embed_dim, layout.key_input_dim, layout.value_input_dim
        queries, keys, values = self.query_channels, self.key_channels, self.value_channels
        sizes = [call.size(call.tokens * queries), call.size(new * keys), call.size(new * values)]
        if work.source is None:
            if (key_width, value_width) != (width, width):
                raise ShapeError(
                    "self-attention needs one input width, got a layer with query, key and value inputs of width "
                    f"{width}, {key_width} and {value_width}; count it with Workload.cross"
                )
            columns = queries + keys + values
            if work.training:
                # Q, K and V matrices are concatenated for one product, and so are the gradients of its outputs.
                weights, gradients = call.size(columns * width), call.size(call.tokens * columns)
                call.pieces.append(Traffic("projection", 2 * weights, gradient_bytes=2 * gradients))
            query, key, value = tape.views(call.linear("projection", call.x, columns, width, joined=True), *sizes)
        elif work.remembered:
            query = call.linear("projection", call.x, queries, width)
            key, value = self.remembered(call)
        else:
            query = call.linear("projection", call.x, queries, width)
            source = tape.external(call.size(new * key_width))
            if key_width == value_width:
                joined = call.linear("projection", source, keys + values, key_width, rows=new, joined=True)
                key, value = tape.views(joined, *sizes[1:])
            else:
                key = call.linear("projection", source, keys, key_width, rows=new)
                value_source = tape.external(call.size(new * value_width))
                value = call.linear("projection", value_source, values, value_width, rows=new)
        query, key = self.normed_and_rotated(call, query, key, queries)
        return query, key, value

    def _gated(self, call: Recorder, heads: Block) -> Block:
        """Record the output gates and the heads multiplied by them."""
        tape, gates, outputs = call.tape, self.gate_channels, call.tokens * self.concat_channels
        logits = call.linear("projection", call.x, gates, self.layout.embed_dim)
        call.passes("output", outputs, transfers=3, launches=2)
        gate = tape.step(logits, output_size=call.size(call.tokens * gates), save_output=True, frees=(logits,))
        return tape.step(
            heads,
            gate,
            output_size=heads.size,
            saves=(heads, gate),
            # The gradient of a per-head gate is first computed per channel.
            backward_workspace=call.size(outputs) if self.config.output_gate == "head" else 0,
            frees=(gate,),
            is_strided=heads.is_strided,
        )
