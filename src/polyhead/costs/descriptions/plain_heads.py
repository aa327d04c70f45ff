"""Description of multi-head attention, from which those of its variants derive."""

from __future__ import annotations

from typing import TypeVar

from polyhead.costs.descriptions.layer_description import NORM_WEIGHTS, LayerDescription
from polyhead.costs.recording.recorder import Heads, Recorder
from polyhead.costs.recording.tape import Block
from polyhead.costs.recording.uneven import record_heads
from polyhead.costs.work import Traffic
from polyhead.errors import ShapeError
from polyhead.layers.config import HeadsConfig
from polyhead.layers.positions.config import RotaryConfig

AnyHeads = TypeVar("AnyHeads", bound=HeadsConfig)


class PlainHeads(LayerDescription[AnyHeads]):
    """Projections, attention and output projection of `MultiHeadAttention`.

    A variant overrides `attend`, from queries, keys and values to the heads' outputs, or `combine`, from these to the
    layer's output, and adds its parameters to `extra_parameters`.
    """

    def __init__(self, config: AnyHeads) -> None:
        super().__init__(config)
        layout = self.layout = config.layout
        self.heads = Heads(layout.num_heads, layout.num_kv_heads, layout.head_dim, layout.value_dim)
        # Channels of all heads together.
        self.queries, self.keys = layout.num_heads * layout.head_dim, layout.num_kv_heads * layout.head_dim
        self.values, self.outputs = layout.num_kv_heads * layout.value_dim, layout.num_heads * layout.value_dim
        self.gates = {None: 0, "head": layout.num_heads, "channel": self.outputs}[config.output_gate]
        self.cache_scales = 2 * layout.num_kv_heads

    @property
    def projections(self) -> tuple[int, int, int, int]:
        layout, width = self.layout, self.layout.embed_dim
        inputs = width * self.queries, layout.key_input_dim * self.keys, layout.value_input_dim * self.values
        return *inputs, self.outputs * width

    @property
    def other_parameters(self) -> int:
        config, layout, width = self.config, self.layout, self.layout.embed_dim
        biases = (self.queries + self.keys + self.values if config.bias else 0) + (width if config.output_bias else 0)
        norms = NORM_WEIGHTS[config.qk_norm] * layout.head_dim
        positions = 0 if config.positions is None else config.positions.num_parameters(config.turning)
        sinks = layout.num_heads if config.sinks else 0
        return biases + norms + self.gates * (width + 1) + sinks + positions + self.extra_parameters

    @property
    def extra_parameters(self) -> int:
        """Parameters that plain heads do not have."""
        return 0

    @property
    def cache_numbers(self) -> int:
        return self.keys + self.values

    def record(self, call: Recorder) -> Block:
        heads = self.attend(call, *self._projected(call))
        return self.combine(call, heads if self.config.output_gate is None else self._gated(call, heads))

    def attend(self, call: Recorder, query: Block, key: Block, value: Block) -> Block:
        """Record the outputs of all heads."""
        heads = self.heads
        call.core(heads.queries, heads.keys, heads.head_dim, heads.value_dim, sinks=self.config.sinks)
        return record_heads(call, query, key, value, heads, self.layout.key_heads)

    def combine(self, call: Recorder, heads: Block) -> Block:
        """Record the output projection of the heads."""
        flat = call.flattened(heads, call.size(call.tokens * self.outputs))
        return call.linear("output", flat, self.layout.embed_dim, self.outputs)

    def _projected(self, call: Recorder) -> tuple[Block, Block, Block]:
        """Record queries, keys and values, with their norms and positions, and the writes to the cache."""
        config, layout, tape, new, work = self.config, self.layout, call.tape, call.new_keys, call.work
        width, key_width, value_width = layout.embed_dim, layout.key_input_dim, layout.value_input_dim
        queries, keys, values = self.queries, self.keys, self.values
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
        else:
            query = call.linear("projection", call.x, queries, width)
            source = tape.external(call.size(new * key_width))
            if key_width == value_width:
                joined = call.linear("projection", source, keys + values, key_width, rows=new, joined=True)
                key, value = tape.views(joined, *sizes[1:])
            else:
                key = call.linear("projection", source, keys, key_width, rows=new)
                value = call.linear("projection", source, values, value_width, rows=new)
        if config.qk_norm is not None:
            call.passes("positions", call.tokens * queries + new * keys, launches=2)
            query = call.normed(query, call.tokens * queries, layout.head_dim, kind=config.qk_norm, by_head=True)
            key = call.normed(key, new * keys, layout.head_dim, kind=config.qk_norm, by_head=True)
        call.rotations(config.positions, queries)
        call.rotations(config.positions, 0 if work.remembered else keys)
        call.cache_writes(keys + values)
        if isinstance(config.positions, RotaryConfig):
            call.rotation(config.positions.rotary_dim or layout.head_dim)
            rotated = call.rotated(query, call.tokens * queries), call.rotated(key, new * keys)
            tape.release(query, key)
            query, key = rotated
        return query, key, value

    def _gated(self, call: Recorder, heads: Block) -> Block:
        """Record the output gates and the heads multiplied by them."""
        tape, gates, outputs = call.tape, self.gates, call.tokens * self.outputs
        logits = call.linear("projection", call.x, gates, self.layout.embed_dim)
        call.passes("output", outputs, reads=2, launches=2)
        gate = tape.step(logits, output_size=call.size(call.tokens * gates), save_output=True)
        tape.release(logits)
        # The gradient of a per-head gate is first computed per channel.
        workspace = call.size(outputs) if self.config.output_gate == "head" else 0
        gated = tape.step(heads, gate, output_size=heads.size, saves=(heads, gate), backward_workspace=workspace)
        tape.release(gate)
        gated.is_strided = heads.is_strided
        return gated
