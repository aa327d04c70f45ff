"""Description of routed heads, at the maximum number of heads per token and an even load over heads."""

from __future__ import annotations

from polyhead.costs.descriptions.plain_heads import ProjectedHeads
from polyhead.costs.recording.attention_tensors import BACKWARD_COPIES, FORWARD_COPIES, KEPT_COPIES, record_attention
from polyhead.costs.recording.recorder import INDEX, Heads, Recorder
from polyhead.costs.recording.tape import Block
from polyhead.layers.variants.routed.config import RoutedConfig


class RoutedHeads(ProjectedHeads[RoutedConfig]):
    """Queries, attention and outputs of the selected heads alone; router, keys and values of every token."""

    def __init__(self, config: RoutedConfig) -> None:
        self.per_head = config.layout.num_kv_heads if config.shape == "shared" else 1  # queries per selected head
        super().__init__(config, config.num_heads * self.per_head)
        self.routed = config.num_heads - config.always_on

    @property
    def extra_parameters(self) -> int:
        return self.layout.embed_dim * self.routed

    def record(self, call: Recorder) -> Block:
        config, layout, tape, tokens, new = self.config, self.layout, call.tape, call.tokens, call.new_keys
        width, kv_heads, slots = layout.embed_dim, layout.num_kv_heads, config.max_heads
        rows = tokens * slots  # (token, selected head) pairs
        per_head, keys, values = self.per_head, self.key_channels, self.value_channels
        inside, outside = per_head * layout.head_dim, per_head * layout.value_dim  # channels of one selected head
        factors = self._gate(call, rows)
        order = tape.step(output_size=INDEX * rows)
        call.product("projection", tokens, slots * inside, width)
        query = tape.step(
            call.x,
            output_size=call.size(rows * inside),
            saves=(call.x, order),
            workspace=self._one_head(call, rows, width + inside),
            backward_workspace=max(self._summed(call, rows, inside), self._outer(call, rows, inside)),
        )
        if config.bias:
            size = query.size
            query = tape.step(query, output_size=size, workspace=size, passes_gradient=True, frees=(query,))
        if per_head > 1:  # rows are regrouped by KV head
            query = tape.step(query, output_size=query.size, passes_gradient=True, frees=(query,), is_strided=True)
        if call.work.remembered:
            key, value = self.remembered(call)
        else:
            source = call.x if call.work.source is None else tape.external(call.size(new * width))
            joined = call.linear("projection", source, keys + values, width, rows=new, joined=True)
            key, value = tape.views(joined, call.size(new * keys), call.size(new * values))
        query, key = self.normed_and_rotated(call, query, key, slots * inside)
        # A dense grid over the selected heads; rows of heads that only some tokens select are packed.
        num_rows = slots * per_head
        heads = Heads(num_rows, min(kv_heads, num_rows), layout.head_dim, layout.value_dim)
        call.core(heads, sinks=config.sinks)
        if config.shape == "shared" and config.top_k is not None:  # all queries of a selected head
            outputs = record_attention(call, query, key, value, heads)
        else:
            # Rows over shared keys need a separate sort order.
            sorting = order if config.shape == "full" else tape.step(output_size=INDEX * rows * per_head)
            outputs = self._chosen_rows(call, query, key, value, rows * per_head, sorting)
        weighed = outputs
        if tape.training or not call.on_gpu:  # otherwise the kernel applies the weights during the product
            saves = (outputs, factors)
            size = call.size(rows * outside)
            weighed = tape.step(*saves, output_size=size, saves=saves, is_strided=outputs.is_strided)
        flat = call.flattened(weighed, weighed.size)
        if flat is not weighed and weighed is not outputs:
            tape.release(weighed)
        call.product("output", tokens, width, slots * outside)
        output = tape.step(
            flat,
            output_size=call.size(tokens * width),
            saves=(flat, order),
            workspace=self._summed(call, rows, outside),
            backward_workspace=self._outer(call, rows, outside),
        )
        if not config.output_bias:
            return output
        return tape.step(output, output_size=output.size, passes_gradient=True, frees=(output,))

    def _gate(self, call: Recorder, rows: int) -> Block:
        """Record the routing weights of the selected heads, [rows]."""
        tape, routed = call.tape, self.routed
        logits = call.linear("projection", call.x, routed, self.layout.embed_dim)
        top_logits = tape.step(logits, output_size=call.wide(rows), saved_bytes=INDEX * rows, save_output=True)
        softmax = tape.step(logits, output_size=call.wide(call.tokens * routed), save_output=True)
        return tape.step(softmax, output_size=call.wide(rows), frees=(top_logits, softmax))

    def _one_head(self, call: Recorder, rows: int, channels: int) -> int:
        """Return the bytes of one head's product on a CPU, which loops over heads; 0 on a GPU."""
        of_head = call.tokens if self.config.always_on else rows // self.config.num_heads
        return 0 if call.on_gpu else call.size(of_head * channels)

    def _outer(self, call: Recorder, rows: int, channels: int) -> int:
        """Return the bytes of the gradients of all heads' matrices, and of the operands of one of them."""
        width = self.layout.embed_dim
        return call.size(self.config.num_heads * width * channels) + self._one_head(call, rows, width + channels)

    def _summed(self, call: Recorder, rows: int, channels: int) -> int:
        """Return the bytes of the sum over a token's rows: all products on a GPU, one head's and sums on a CPU."""
        width = self.layout.embed_dim
        if call.on_gpu:
            return call.size(rows * width)
        widened = call.wide(call.tokens * width) if call.is_narrow else 0
        return widened + self._one_head(call, rows, width + channels)

    def _chosen_rows(self, call: Recorder, query: Block, key: Block, value: Block, rows: int, order: Block) -> Block:
        """Record attention of rows sorted by head, with its output back in token order."""
        layout, work, tape = self.layout, call.work, call.tape
        head_dim, dim, key_rows = layout.head_dim, layout.value_dim, work.batch * work.keys * layout.num_kv_heads
        by_head = tape.step(query, output_size=call.size(rows * head_dim), saves=(order,))
        out = call.size(rows * dim)
        saved_bytes, extra = 4 * rows, 0
        read: tuple[Block, ...] = (by_head, key, value)
        # The decode kernels do not support selected rows, so a cache is guarded like other keys.
        copied = not call.on_gpu or (call.mask is not None and not call.finite)
        if copied:
            # A CPU splits the sequences, which a backward keeps in float32; a GPU replaces NaN and Inf.
            is_widened = tape.training and not call.on_gpu and call.is_narrow
            of_copy = call.wide if is_widened else call.size
            sources = [
                tape.step(block, output_size=of_copy(key_rows * size), passes_gradient=not is_widened)
                for block, size in ((key, head_dim), (value, dim))
            ]
            read = (by_head, *sources)
        saved_blocks = read
        if not call.on_gpu:
            # Heads are processed in tiles, which save scaled queries; their outputs are concatenated twice.
            saved_bytes, extra, saved_blocks = saved_bytes + call.wide(rows * (head_dim + dim)), out, read[1:]
        backward_workspace = 0
        if call.form == "materialised":
            weights = call.wide(rows * work.keys)
            call.weight_sizes.append(weights)
            saved_bytes, extra = saved_bytes + KEPT_COPIES * weights, extra + (FORWARD_COPIES - KEPT_COPIES) * weights
            backward_workspace = (BACKWARD_COPIES - KEPT_COPIES) * weights
        sorted_rows = tape.step(
            *read,
            output_size=out,
            saves=saved_blocks,
            save_output=call.on_gpu,
            saved_bytes=saved_bytes,
            workspace=extra,
            backward_workspace=backward_workspace,
            frees=read[1:] if copied else (),
        )
        return tape.step(sorted_rows, output_size=out, saves=(order,), frees=(by_head, sorted_rows))
