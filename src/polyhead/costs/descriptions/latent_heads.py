"""Description of latent attention (MLA, DeepSeek-V2, 2024), absorbed or expanded as the layer would choose."""

from __future__ import annotations

from polyhead.costs.descriptions.layer_description import LayerDescription
from polyhead.costs.recording.attention_tensors import record_attention
from polyhead.costs.recording.recorder import Heads, Recorder
from polyhead.costs.recording.tape import Block
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.latent.forms import absorbing_is_cheaper
from polyhead.layers.positions.config import RotaryConfig


class LatentHeads(LayerDescription[LatentConfig]):
    """Keys and values of all heads expanded from one latent per token, or attention over the latents themselves."""

    def __init__(self, config: LatentConfig) -> None:
        super().__init__(config)
        layout = self.layout = config.layout
        self.query_channels = layout.num_heads * layout.head_dim
        self.concat_channels = layout.num_heads * layout.value_head_dim  # input width of the output projection

    @property
    def projections(self) -> tuple[int, int, int, int]:
        """Weights of the projections; that of keys includes the down-projection and both up-projections."""
        layout, width, rank = self.layout, self.layout.embed_dim, self.layout.q_lora_rank
        query = rank * (width + self.query_channels) if rank else width * self.query_channels
        up = layout.kv_lora_rank * layout.num_heads * (layout.qk_nope_head_dim + layout.value_head_dim)
        return query, width * layout.cache_width + up, 0, self.concat_channels * width

    @property
    def other_parameters(self) -> int:
        config, layout = self.config, self.layout
        biases = (layout.q_lora_rank or self.query_channels) + layout.cache_width if config.bias else 0
        biases += layout.embed_dim if config.output_bias else 0
        positions = 0 if config.positions is None else config.positions.num_parameters(config.position_layout)
        sinks = layout.num_heads if config.sinks else 0
        return biases + layout.q_lora_rank + layout.kv_lora_rank + sinks + positions

    @property
    def cache_elements(self) -> int:
        return self.layout.cache_width

    def record(self, call: Recorder) -> Block:
        layout, work, tape = self.layout, call.work, call.tape
        rope, tokens = layout.qk_rope_head_dim, call.tokens
        sizes = (call.size(tokens * layout.num_heads * dim) for dim in (layout.qk_nope_head_dim, rope))
        q_nope, q_rope = tape.views(self._queries(call), *sizes)
        if rope:
            assert isinstance(self.config.positions, RotaryConfig)
            call.rotary_tables(self.config.positions)
            q_rope = call.rotated(q_rope, tokens * layout.num_heads * rope, self.config.positions, rope)
        latents = self._compressed(call)
        cheaper = absorbing_is_cheaper(layout, work.queries, work.keys)
        absorbed = cheaper if self.config.form == "auto" else self.config.form == "absorbed"
        call.kernel_choices.append(absorbed)
        outputs = (self._absorbed if absorbed else self._expanded)(call, q_nope, q_rope, latents)
        flat = call.flattened(outputs, call.size(tokens * self.concat_channels))
        return call.linear("output", flat, layout.embed_dim, self.concat_channels)

    def _queries(self, call: Recorder) -> Block:
        """Record the queries of all heads, projected from a query latent or from the input."""
        width, rank = self.layout.embed_dim, self.layout.q_lora_rank
        if not rank:
            return call.linear("projection", call.x, self.query_channels, width)
        latent = call.linear("projection", call.x, rank, width)
        call.passes("positions", call.tokens * rank)
        normed = call.normed(latent, call.tokens * rank, rank)
        call.tape.release(latent)
        queries = call.linear("projection", normed, self.query_channels, rank)
        call.tape.release(normed)
        return queries

    def _compressed(self, call: Recorder) -> Block:
        """Record the latents concatenated with the rotary key: the contents of a cache."""
        layout, tape, new = self.layout, call.tape, call.new_keys
        width, rank, rope = layout.embed_dim, layout.kv_lora_rank, layout.qk_rope_head_dim
        cache_width = layout.cache_width
        if call.work.remembered:
            call.rotary_passes(call.tokens * layout.num_heads * rope, self.config.positions, rope)
            return tape.external(call.size(call.work.batch * call.work.keys * cache_width))
        source = call.x if call.work.source is None else tape.external(call.size(new * width))
        compressed = call.linear("projection", source, cache_width, width, rows=new)
        for numbers in (call.tokens * layout.num_heads * rope, new * rope):
            call.rotary_passes(numbers, self.config.positions, rope)
        call.passes("positions", new * (rank + cache_width), launches=2)  # the norm, and the concatenation
        call.cache_writes(cache_width)
        latent, k_rope = tape.views(compressed, call.size(new * rank), call.size(new * rope))
        if not rope:
            latents = call.normed(latent, new * rank, rank)
        else:
            rotated = call.rotated(k_rope, new * rope, self.config.positions, rope)
            normed = call.normed(latent, new * rank, rank)
            latents = tape.step(normed, rotated, output_size=call.size(new * cache_width), frees=(normed, rotated))
        tape.release(compressed)
        return latents

    def _absorbed(self, call: Recorder, q_nope: Block, q_rope: Block, latents: Block) -> Block:
        """Record attention of all heads over the latents, whose first channels are the values."""
        layout, tape, heads = self.layout, call.tape, self.layout.num_heads
        nope, rope, value_dim = layout.qk_nope_head_dim, layout.qk_rope_head_dim, layout.value_head_dim
        rank, cache_width = layout.kv_lora_rank, layout.cache_width
        rows, keys = call.tokens * heads, call.work.batch * call.work.keys
        call.product("projection", call.tokens, rank, nope, heads)
        up_key = call.size(heads * rank * nope)
        query = tape.step(q_nope, output_size=call.size(rows * rank), saves=(q_nope,), backward_workspace=up_key)
        call.passes("attention", rows * cache_width)
        if rope:
            query = tape.step(query, q_rope, output_size=call.size(rows * cache_width), frees=(query,))
        (value,) = tape.views(latents, call.size(keys * rank))
        over_latents = Heads(heads, 1, cache_width, rank)
        call.core(over_latents, shared=True, sinks=self.config.sinks)
        summed = record_attention(call, query, latents, value, over_latents)
        if rope and (call.on_gpu or call.work.batch > 1):  # sums that are not contiguous head by head are copied
            summed = tape.step(summed, output_size=call.size(rows * rank))
        call.product("output", call.tokens, value_dim, rank, heads)
        return tape.step(
            summed,
            output_size=call.size(rows * value_dim),
            saves=(summed,),
            backward_workspace=call.size(heads * rank * value_dim),
            frees=(query,),
            is_strided=True,
        )

    def _expanded(self, call: Recorder, q_nope: Block, q_rope: Block, latents: Block) -> Block:
        """Record attention with keys and values per head, expanded from all latents."""
        layout, tape, rope, heads = self.layout, call.tape, self.layout.qk_rope_head_dim, self.layout.num_heads
        nope, value_dim, head_dim = layout.qk_nope_head_dim, layout.value_head_dim, layout.head_dim
        rows, keys = call.tokens * heads, call.work.batch * call.work.keys
        latent, k_rope = tape.views(latents, call.size(keys * layout.kv_lora_rank), call.size(keys * rope))
        up = call.linear("projection", latent, heads * (nope + value_dim), layout.kv_lora_rank, rows=keys)
        key, value = tape.views(up, call.size(keys * heads * nope), call.size(keys * heads * value_dim))
        call.passes("attention", (rows + keys * heads) * head_dim, launches=2)
        query = q_nope
        if rope:
            query = tape.step(q_nope, q_rope, output_size=call.size(rows * head_dim), is_strided=call.on_gpu)
            # All heads share the rotary key, so its gradients are summed over heads.
            shared = call.size(keys * heads * rope)
            key = tape.step(key, k_rope, output_size=call.size(keys * heads * head_dim), backward_workspace=shared)
        expanded = Heads(heads, heads, head_dim, value_dim)
        call.core(expanded, cached=False, sinks=self.config.sinks)
        outputs = record_attention(call, query, key, value, expanded)
        tape.release(up, *((query, key) if rope else ()))
        return outputs
