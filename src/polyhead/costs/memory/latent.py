"""Tensors of latent attention (MLA), absorbed or expanded as the layer would choose."""

from __future__ import annotations

from polyhead.costs.memory.attention import record_attention
from polyhead.costs.memory.layers import record_layer
from polyhead.costs.memory.recorder import Heads, Recorder
from polyhead.costs.memory.tape import Block
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.latent.forms import LatentLayout, absorbing_is_cheaper


@record_layer.register
def record_latent(config: LatentConfig, call: Recorder) -> Block:
    layout, work, tape = config.layout, call.requested.work, call.tape
    rope, tokens = layout.qk_rope_head_dim, call.tokens
    queries = _queries(layout, call)
    sizes = (call.size(tokens * layout.num_heads * dim) for dim in (layout.qk_nope_head_dim, rope))
    q_nope, q_rope = tape.views(queries, *sizes)
    if rope:
        call.rotation(rope)
        q_rope = call.rotated(q_rope, tokens * layout.num_heads * rope)
    latents = _compressed(layout, call)
    keys = None if work.source is None and not call.requested.cached else work.keys
    cheaper = absorbing_is_cheaper(layout, work.queries, keys)
    absorbed = cheaper if config.form == "auto" else config.form == "absorbed"
    outputs = (_absorbed if absorbed else _expanded)(layout, call, q_nope, q_rope, latents)
    channels = layout.num_heads * layout.value_head_dim
    return call.linear(call.flattened(outputs, call.size(tokens * channels)), layout.embed_dim, channels)


def _queries(layout: LatentLayout, call: Recorder) -> Block:
    """Record the queries of all heads, projected from a query latent or from the input."""
    width, rank, channels = layout.embed_dim, layout.q_lora_rank, layout.num_heads * layout.head_dim
    if not rank:
        return call.linear(call.x, channels, width)
    latent = call.linear(call.x, rank, width)
    normed = call.normed(latent, call.tokens * rank, rank)
    call.tape.release(latent)
    queries = call.linear(normed, channels, rank)
    call.tape.release(normed)
    return queries


def _compressed(layout: LatentLayout, call: Recorder) -> Block:
    """Record the latents concatenated with the rotary key: the contents of a cache."""
    tape, new = call.tape, call.requested.new_keys
    width, rank, rope, cache_width = layout.embed_dim, layout.kv_lora_rank, layout.qk_rope_head_dim, layout.cache_width
    source = call.x if call.requested.work.source is None else tape.external(call.size(new * width))
    compressed = call.linear(source, cache_width, width, rows=new)
    latent, k_rope = tape.views(compressed, call.size(new * rank), call.size(new * rope))
    if not rope:
        latents = call.normed(latent, new * rank, rank)
    else:
        rotated = call.rotated(k_rope, new * rope)
        normed = call.normed(latent, new * rank, rank)
        latents = tape.step(normed, rotated, output_size=call.size(new * cache_width))
        tape.release(normed, rotated)
    tape.release(compressed)
    return latents


def _absorbed(layout: LatentLayout, call: Recorder, q_nope: Block, q_rope: Block, latents: Block) -> Block:
    """Record attention of all heads over the latents, whose first channels are the values."""
    tape, rope, rank, cache_width = call.tape, layout.qk_rope_head_dim, layout.kv_lora_rank, layout.cache_width
    rows, keys = call.tokens * layout.num_heads, call.requested.work.batch * call.requested.work.keys
    up_key, up_value = (layout.num_heads * rank * dim for dim in (layout.qk_nope_head_dim, layout.value_head_dim))
    query = tape.step(q_nope, output_size=call.size(rows * rank), saves=(q_nope,), backward_workspace=call.size(up_key))
    if rope:
        absorbed, query = query, tape.step(query, q_rope, output_size=call.size(rows * cache_width))
        tape.release(absorbed)
    (value,) = tape.views(latents, call.size(keys * rank))
    summed = record_attention(call, query, latents, value, Heads(layout.num_heads, 1, cache_width, rank))
    if rope:  # sums that are not contiguous head by head are copied
        summed = tape.step(summed, output_size=call.size(rows * rank))
    of_values = call.size(up_value)
    outputs = tape.step(
        summed, output_size=call.size(rows * layout.value_head_dim), saves=(summed,), backward_workspace=of_values
    )
    tape.release(query)
    outputs.is_strided = True
    return outputs


def _expanded(layout: LatentLayout, call: Recorder, q_nope: Block, q_rope: Block, latents: Block) -> Block:
    """Record attention with keys and values per head, expanded from all latents."""
    tape, rope, heads = call.tape, layout.qk_rope_head_dim, layout.num_heads
    nope, value_dim, head_dim = layout.qk_nope_head_dim, layout.value_head_dim, layout.head_dim
    rows, keys = call.tokens * heads, call.requested.work.batch * call.requested.work.keys
    latent, k_rope = tape.views(latents, call.size(keys * layout.kv_lora_rank), call.size(keys * rope))
    up = call.linear(latent, heads * (nope + value_dim), layout.kv_lora_rank, rows=keys)
    key, value = tape.views(up, call.size(keys * heads * nope), call.size(keys * heads * value_dim))
    query = q_nope
    if rope:
        query = tape.step(q_nope, q_rope, output_size=call.size(rows * head_dim))
        query.is_strided = call.on_gpu
        # All heads share the rotary key, so its gradients are summed over heads.
        shared = call.size(keys * heads * rope)
        key = tape.step(key, k_rope, output_size=call.size(keys * heads * head_dim), backward_workspace=shared)
    outputs = record_attention(call, query, key, value, Heads(heads, heads, head_dim, value_dim))
    tape.release(up, *((query, key) if rope else ()))
    return outputs
