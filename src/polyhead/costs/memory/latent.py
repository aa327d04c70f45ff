"""The tensors of latent heads, in the form that the layer takes."""

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
    whole = _queries(layout, call)
    sizes = (call.size(tokens * layout.num_heads * dim) for dim in (layout.qk_nope_head_dim, rope))
    still, turning = tape.views(whole, *sizes)
    if rope:
        call.rotation(rope)
        turning = call.turned(turning, tokens * layout.num_heads * rope)
    held = _compressed(layout, call)
    keys = None if work.source is None and not call.requested.cached else work.keys
    cheaper = absorbing_is_cheaper(layout, work.queries, keys)
    absorbed = cheaper if config.form == "auto" else config.form == "absorbed"
    outputs = (_absorbed if absorbed else _expanded)(layout, call, still, turning, held)
    channels = layout.num_heads * layout.value_head_dim
    return call.linear(call.flattened(outputs, call.size(tokens * channels)), layout.embed_dim, channels)


def _queries(layout: LatentLayout, call: Recorder) -> Block:
    """The queries of all heads, made of a latent of their own or of the input."""
    width, rank, channels = layout.embed_dim, layout.q_lora_rank, layout.num_heads * layout.head_dim
    if not rank:
        return call.linear(call.x, channels, width)
    latent = call.linear(call.x, rank, width)
    normed = call.normed(latent, call.tokens * rank, rank)
    call.tape.let_go(latent)
    whole = call.linear(normed, channels, rank)
    call.tape.let_go(normed)
    return whole


def _compressed(layout: LatentLayout, call: Recorder) -> Block:
    """The latents and, beside them, the key that turns: what a cache keeps."""
    tape, new = call.tape, call.requested.new_keys
    width, rank, rope, kept = layout.embed_dim, layout.kv_lora_rank, layout.qk_rope_head_dim, layout.cache_width
    source = call.x if call.requested.work.source is None else tape.given(call.size(new * width))
    compressed = call.linear(source, kept, width, rows=new)
    latent, turning = tape.views(compressed, call.size(new * rank), call.size(new * rope))
    if not rope:
        held = call.normed(latent, new * rank, rank)
    else:
        turned = call.turned(turning, new * rope)
        normed = call.normed(latent, new * rank, rank)
        held = tape.step(normed, turned, gives=call.size(new * kept))
        tape.let_go(normed, turned)
    tape.let_go(compressed)
    return held


def _absorbed(layout: LatentLayout, call: Recorder, still: Block, turning: Block, held: Block) -> Block:
    """All heads over the latents, whose first channels are the values."""
    tape, rope, rank, kept = call.tape, layout.qk_rope_head_dim, layout.kv_lora_rank, layout.cache_width
    rows, keys = call.tokens * layout.num_heads, call.requested.work.batch * call.requested.work.keys
    up_key, up_value = (layout.num_heads * rank * dim for dim in (layout.qk_nope_head_dim, layout.value_head_dim))
    query = tape.step(still, gives=call.size(rows * rank), keeps=(still,), gradient_work=call.size(up_key))
    if rope:
        inside, query = query, tape.step(query, turning, gives=call.size(rows * kept))
        tape.let_go(inside)
    (value,) = tape.views(held, call.size(keys * rank))
    summed = record_attention(call, query, held, value, Heads(layout.num_heads, 1, kept, rank))
    if rope:  # sums that do not lie head by head are put together
        summed = tape.step(summed, gives=call.size(rows * rank))
    of_values = call.size(up_value)
    outputs = tape.step(summed, gives=call.size(rows * layout.value_head_dim), keeps=(summed,), gradient_work=of_values)
    tape.let_go(query)
    outputs.is_apart = True
    return outputs


def _expanded(layout: LatentLayout, call: Recorder, still: Block, turning: Block, held: Block) -> Block:
    """Every head with keys and values of its own, made anew of all latents."""
    tape, rope, heads = call.tape, layout.qk_rope_head_dim, layout.num_heads
    nope, value_dim, head_dim = layout.qk_nope_head_dim, layout.value_head_dim, layout.head_dim
    rows, keys = call.tokens * heads, call.requested.work.batch * call.requested.work.keys
    latent, beside = tape.views(held, call.size(keys * layout.kv_lora_rank), call.size(keys * rope))
    up = call.linear(latent, heads * (nope + value_dim), layout.kv_lora_rank, rows=keys)
    key, value = tape.views(up, call.size(keys * heads * nope), call.size(keys * heads * value_dim))
    query = still
    if rope:
        query = tape.step(still, turning, gives=call.size(rows * head_dim))
        query.is_apart = call.on_gpu
        # The turning key is one for all heads, so that its gradients are summed.
        shared = call.size(keys * heads * rope)
        key = tape.step(key, beside, gives=call.size(keys * heads * head_dim), gradient_work=shared)
    outputs = record_attention(call, query, key, value, Heads(heads, heads, head_dim, value_dim))
    tape.let_go(up, *((query, key) if rope else ()))
    return outputs
