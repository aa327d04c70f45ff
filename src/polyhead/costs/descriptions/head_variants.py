"""Descriptions of the variants of multi-head attention: grouped, mixed, talking, differential, collaborative heads."""

from __future__ import annotations

from dataclasses import replace

from polyhead.costs.descriptions.plain_heads import PlainHeads
from polyhead.costs.recording.attention_tensors import record_attention, record_heads, talking_tiles
from polyhead.costs.recording.recorder import Heads, Recorder
from polyhead.costs.recording.tape import Block
from polyhead.costs.work import AttentionCore, Traffic
from polyhead.layers.variants import GroupedHeadsConfig, HeadMixConfig
from polyhead.layers.variants.collaborative.layer import CollaborativeConfig
from polyhead.layers.variants.differential.layer import DifferentialConfig
from polyhead.layers.variants.mixing import FEW_ROWS
from polyhead.layers.variants.talking import TalkingHeadsConfig


class GroupedHeads(PlainHeads[GroupedHeadsConfig]):
    """Heads mixed within groups, then an MLP with `hidden_dim` channels."""

    def __init__(self, config: GroupedHeadsConfig) -> None:
        super().__init__(config)
        assert config.hidden_dim is not None
        self.hidden = config.hidden_dim
        self.mixing_weights = self.concat_channels**2 // config.num_groups  # of all groups together

    @property
    def extra_parameters(self) -> int:
        # The output projection reads `hidden` channels instead of the `outputs` that `projections` counts.
        projections = self.concat_channels * self.hidden + (self.hidden - self.concat_channels) * self.layout.embed_dim
        bias = self.hidden if self.config.output_bias else 0
        return super().extra_parameters + self.mixing_weights + projections + bias

    def combine(self, call: Recorder, heads: Block) -> Block:
        tape, groups, size = call.tape, self.config.num_groups, call.size(call.tokens * self.concat_channels)
        heads = call.flattened(heads, size)
        call.product("mixing", call.tokens, self.concat_channels // groups, self.concat_channels // groups, groups)
        weights = call.size(self.mixing_weights)
        mixed = tape.step(heads, output_size=size, saves=(heads,), backward_workspace=weights)
        contiguous = tape.step(mixed, output_size=size, passes_gradient=True)  # groups of a token made contiguous
        up = call.linear("output", contiguous, self.hidden, self.concat_channels)
        tape.release(contiguous)
        call.passes("output", call.tokens * self.hidden)
        if self.config.activation == "gelu":
            up = tape.step(up, output_size=up.size, saves=(up,), frees=(up,))
        tape.release(mixed)
        return call.linear("output", up, self.layout.embed_dim, self.hidden)


class HeadMix(PlainHeads[HeadMixConfig]):
    """Heads of each token mixed into `num_rows` rows, which may then attend to one another."""

    def __init__(self, config: HeadMixConfig) -> None:
        super().__init__(config)
        assert config.num_rows is not None
        self.rows, self.dim = config.num_rows, self.layout.value_dim

    @property
    def extra_parameters(self) -> int:
        config, rows, dim = self.config, self.rows, self.dim
        mixing = rows * self.layout.num_heads * (1 if config.mix == "heads" else dim**2)
        attention = 3 * dim * (dim + (1 if config.bias else 0)) if config.row_attention == "projected" else 0
        # The output projection reads all rows instead of the `outputs` that `projections` counts.
        output = (rows * dim - self.concat_channels) * self.layout.embed_dim
        return super().extra_parameters + mixing + attention + output

    def combine(self, call: Recorder, heads: Block) -> Block:
        config, tape, rows, dim = self.config, call.tape, self.rows, self.dim
        size, joined = call.size(call.tokens * rows * dim), call.size(call.tokens * self.concat_channels)
        if config.mix == "heads":
            call.product("mixing", rows, dim, self.layout.num_heads, call.tokens)
            by_head = tape.step(heads, output_size=joined, passes_gradient=True)
            mixed = tape.step(by_head, output_size=size, saves=(by_head,), frees=(by_head,), is_strided=True)
        else:
            mixed = call.linear("mixing", call.flattened(heads, joined), rows * dim, self.concat_channels)
        attended = mixed if config.row_attention is None else self._attend_rows(call, mixed)
        flat = call.flattened(attended, size)
        tape.release(*(block for block in (mixed, attended) if block is not flat))
        return call.linear("output", flat, self.layout.embed_dim, rows * dim)

    def _attend_rows(self, call: Recorder, mixed: Block) -> Block:
        """Record attention among the rows of each token: one short sequence per token."""
        tape, tokens, rows, dim = call.tape, call.tokens, self.rows, self.dim
        size = call.size(tokens * rows * dim)
        query = key = value = mixed
        if self.config.row_attention == "projected":
            query, key, value = (self._projected_rows(call, mixed) for _ in range(3))
        call.pieces.append(AttentionCore("forward", tokens, 1, 1, rows, rows, dim, dim, call.dtype, stage="mixing"))
        if call.on_gpu and call.form == "fused" and rows <= FEW_ROWS:
            weights = call.size(tokens * rows**2)
            scaled = tape.step(query, output_size=size)
            logits = tape.step(scaled, key, output_size=weights, saves=(scaled, key), frees=(scaled,))
            softmax = tape.step(logits, output_size=weights, save_output=True, frees=(logits,))
            # The result of a product is contiguous, whatever its factors are.
            output = tape.step(softmax, value, output_size=size, saves=(softmax, value), frees=(softmax,))
        else:
            weight_size = call.wide(tokens * rows**2) if call.form == "materialised" else 0
            call.weight_sizes.append(weight_size)
            output = tape.step(
                query,
                key,
                value,
                output_size=size,
                saves=(query, key, value),
                save_output=True,
                saved_bytes=4 * tokens * rows + 2 * weight_size,
                workspace=weight_size,
                backward_workspace=4 * weight_size,
                is_strided=query.is_strided,
            )
        if query is not mixed:
            tape.release(query, key, value)
        return output

    def _projected_rows(self, call: Recorder, mixed: Block) -> Block:
        """Record a linear layer on every row; strided rows are made contiguous first."""
        tape = call.tape
        contiguous = tape.step(mixed, output_size=mixed.size, passes_gradient=True) if mixed.is_strided else mixed
        output = call.linear("mixing", contiguous, self.dim, self.dim, rows=call.tokens * self.rows)
        if contiguous is not mixed:
            tape.release(contiguous)
        return output


class DifferentialHeads(PlainHeads[DifferentialConfig]):
    """Two attention maps per head over half the channels each, with shared values (Ye et al. 2024)."""

    @property
    def extra_parameters(self) -> int:
        sinks = self.layout.num_heads if self.config.sinks else 0  # of the second maps
        lambdas = 4 * (self.layout.head_dim // 2)  # four vectors
        return super().extra_parameters + lambdas + sinks

    def attend(self, call: Recorder, query: Block, key: Block, value: Block) -> Block:
        """Record the two attention calls, their difference and its norm."""
        tape, maps = call.tape, replace(self.heads, head_dim=self.layout.head_dim // 2)
        elements = call.tokens * self.concat_channels
        call.core(replace(maps, queries=2 * maps.queries, keys=2 * maps.keys), sinks=self.config.sinks)
        # The difference reads both outputs and writes one; the norm and the scaling by 1 - lambda_init read and write.
        call.passes("attention", elements, transfers=7, launches=3)
        halves = [tape.views(block, block.gradient_size // 2, block.gradient_size // 2) for block in (query, key)]
        first, second = (
            record_heads(call, q, k, value, maps, self.layout.key_heads) for q, k in zip(*halves, strict=True)
        )
        difference = tape.step(
            first,
            second,
            output_size=call.size(elements),
            saves=(second,),
            backward_workspace=call.size(elements),
            is_strided=first.is_strided,
        )
        # On a GPU the backward of the norm copies its input and the incoming gradient if they are strided.
        copies = 2 if first.is_strided else 0
        normed = call.normed(difference, elements, self.layout.value_dim, has_weight=False, gradient_copies=copies)
        return tape.step(normed, output_size=normed.size, frees=(difference, normed))


class CollaborativeHeads(PlainHeads[CollaborativeConfig]):
    """Queries and keys shared by all heads, each with its own mixing vector over their channels; values per head.

    Cordonnier et al. 2020, "Multi-Head Attention: Collaborate Instead of Concatenate".
    """

    def __init__(self, config: CollaborativeConfig) -> None:
        super().__init__(config)
        assert config.shared_dim is not None
        self.query_channels = self.key_channels = config.shared_dim
        self.cache_scales = 2  # the cache stores keys and values as one head each

    @property
    def extra_parameters(self) -> int:
        return super().extra_parameters + self.layout.num_heads * self.key_channels  # the mixing vectors

    def attend(self, call: Recorder, query: Block, key: Block, value: Block) -> Block:
        """Record attention of every head, its queries scaled by its mixing vector, to the shared keys."""
        layout, shared, tape, work = self.layout, self.key_channels, call.tape, call.work
        heads, dim = layout.num_heads, layout.value_dim
        elements = call.tokens * heads * shared
        call.passes("attention", elements)  # queries times each head's mixing vector
        call.core(Heads(heads, 1, shared, dim), sinks=self.config.sinks)
        # The core counts one KV head; the values of the others are read as well.
        other_values = work.batch * work.keys * (layout.num_kv_heads - 1) * dim
        call.pieces.append(Traffic("attention", other_values * call.cache_dtype.itemsize, 0))
        size = call.size(elements)
        mixed = tape.step(query, output_size=size, saves=(query,), backward_workspace=size, is_strided=True)
        # Keys are expanded over the heads; their gradients are summed in the backward.
        (expanded,) = tape.views(key, call.size(work.batch * work.keys * heads * shared))
        return record_attention(call, mixed, expanded, value, Heads(heads, heads, shared, dim))


class TalkingHeads(PlainHeads[TalkingHeadsConfig]):
    """Attention maps mixed across heads before and after the softmax (Shazeer et al. 2020, "Talking-Heads Attention").

    Our kernel on a GPU and tiles of PyTorch operators on a CPU do not store the attention weights.
    """

    @property
    def extra_parameters(self) -> int:
        return super().extra_parameters + 2 * self.layout.num_heads**2

    def attend(self, call: Recorder, query: Block, key: Block, value: Block) -> Block:
        layout, work, tape = self.layout, call.work, call.tape
        heads, dim = layout.num_heads, layout.value_dim
        call.core(self.heads, mixing=True)
        if call.form == "materialised":
            return record_attention(call, query, key, value, self.heads)
        rows = work.batch * heads * work.queries
        out = call.size(rows * dim)
        read: tuple[Block, ...] = (query, key, value)
        if call.on_gpu and call.is_guarded:
            read = tuple(tape.step(block, output_size=block.gradient_size, passes_gradient=True) for block in read)
        saved_bytes, workspace, backward_workspace, saves = 4 * rows, 0, out, read
        if call.on_gpu and heads != layout.num_kv_heads:
            backward_workspace += 4 * work.batch * heads * work.keys * (layout.head_dim + dim)
        if not call.on_gpu:
            workspace, backward_tiles = talking_tiles(call, heads)
            # Tiles save three numbers per row: log-sum-exp, row max and sum of the weights; kernels save the first.
            saved_bytes, backward_workspace = 3 * saved_bytes, backward_workspace + backward_tiles
            if call.is_narrow:  # copies in float32 are saved in place of the tensors, and gradients are computed in it
                gradients = sum(block.gradient_size for block in read)
                saves, saved_bytes = (), saved_bytes + 2 * gradients
                backward_workspace += gradients + 3 * out
        return tape.step(
            *read,
            output_size=out,
            saves=saves,
            saved_bytes=saved_bytes,
            workspace=workspace,
            backward_workspace=backward_workspace,
            frees=[block for block in read if block not in (query, key, value)],
            is_strided=not call.on_gpu,
        )
