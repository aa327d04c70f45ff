"""One context-parallel call, and the attention of some of its queries over some of its keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polyhead.ops.attention import dispatch
from polyhead.ops.common.request import AttentionOutput, AttentionRequest, StatisticsRequest
from polyhead.ops.common.statistics import POSITIONAL
from polyhead.ops.common.visibility import Span, Visibility
from polyhead.parallel.context.crop import crop
from polyhead.parallel.context.layout import Layout, chunk_spans
from polyhead.parallel.groups import RankGroup


@dataclass(frozen=True, slots=True, eq=False)
class ContextCall:
    """A validated call of `context_attention`, besides its differentiable tensors."""

    group: RankGroup
    layout: Layout
    num_queries: int  # of this rank's shard
    num_keys: int
    visibility: Visibility  # of the whole sequence; it may hide nothing
    scale: float | Tensor
    softcap: float | None
    finite: bool
    backend: str
    names: tuple[str, ...] = ()  # of statistics
    sink_keys: int = 1
    window: int = 0

    @property
    def query_spans(self) -> list[Span]:
        """Chunks of this rank's queries, in the order of its shard."""
        return chunk_spans(self.num_queries, self.group.rank, self.group.size, self.layout)

    def key_spans(self, rank: int) -> list[Span]:
        """Return the chunks of a rank's keys, in the order of its shard."""
        return chunk_spans(self.num_keys, rank, self.group.size, self.layout)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of mask and scale, which must not change between forward and backward."""
        mask = self.visibility
        fields = (mask.query_positions, mask.key_positions, mask.key_ordinals, mask.query_real, mask.key_real)
        documents = [ids for pair in mask.documents for ids in pair]
        optional = [*fields, mask.allowed, *documents, *mask.bias_tensors]
        return [x for x in (*optional, self.scale) if isinstance(x, Tensor)]

    def attend(
        self,
        rows: Span,
        columns: Span,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        names: tuple[str, ...],
        logsumexp: bool,
        sinks: Tensor | None = None,
    ) -> AttentionOutput:
        """Attend from the queries of `rows` to the keys of `columns`, which the tensors contain alone.

        Args:
            rows, columns: spans of the queries and of the keys in the whole sequence.
            query, key, value: of these queries and keys.
            names: statistics to compute.
            logsumexp: return the log-sum-exp.
            sinks: learned sinks, one per head.
        """
        positional = any(name in POSITIONAL for name in names)
        visibility = crop(self.visibility, rows, columns, positions=positional, ordinals="sink_mass" in names)
        statistics = None
        if len(names):
            sizes = query.shape[2], key.shape[2]
            places = visibility or Visibility(*sizes, query.device, offset=sizes[1] - sizes[0])
            statistics = StatisticsRequest(names, self.sink_keys, self.window, places)
        options = (self.scale, self.softcap, sinks, 0.0, None, False, logsumexp, self.finite, statistics)
        return dispatch.run(AttentionRequest(query, key, value, visibility, *options), self.backend)


def of_span(shard: Tensor, spans: list[Span], index: int, span: Span) -> Tensor:
    """Return the tokens of `span`, which is within chunk `index`, from axis 2 of a shard with these chunks."""
    before = sum(stop - start for start, stop in spans[:index])
    return shard.narrow(2, before + span[0] - spans[index][0], span[1] - span[0])
