"""Results of the heads of all ranks, in the order of the whole layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, RowStatistics
from polyhead.parallel.tensor.collectives import gather
from polyhead.parallel.tensor.shards import padded

if TYPE_CHECKING:
    from polyhead.parallel.tensor.layer import HeadParallelism


class WholeHeads:
    """Gathers the results of one call.

    Ranks must agree on what is gathered, so it depends on what the caller requested alone.

    Args:
        parallelism: distribution of the layer.
        logsumexp: whether the caller requested the log-sum-exp.
    """

    def __init__(self, parallelism: HeadParallelism, *, logsumexp: bool) -> None:
        self._parallelism = parallelism
        self._logsumexp = logsumexp
        self._gathered: AttentionOutput | None = None  # without its output, which differs inside and outside the layer

    def result(self, local: AttentionOutput, output: Tensor) -> AttentionOutput:
        """Return a result with the statistics, weights and log-sum-exp of all heads.

        Args:
            local: result of the heads of this rank.
            output: output of the whole result.
        """
        if self._gathered is None:
            weights, statistics = local.weights, local.statistics
            logsumexp = local.logsumexp if self._logsumexp else None
            self._gathered = replace(
                local,
                weights=None if weights is None else self._maps(weights, "the gather of attention weights"),
                logsumexp=None if logsumexp is None else self._maps(logsumexp, "the gather of log-sum-exp"),
                statistics=None if statistics is None else self._statistics(statistics),
            )
        return replace(self._gathered, output=output)

    def attended(self, local: Attended) -> Attended:
        """Return an attention of all heads, each with its own copy of the keys and values that it reads.

        Keys and values that all heads of the layer share remain one. The mask is left local.

        Args:
            local: attention of the heads of this rank.
        """
        result = self.result(local.result, self._maps(local.result.output, "the gather of heads' outputs"))
        return replace(
            local,
            query=self._maps(local.query, "the gather of queries"),
            key=self._sources(local.key, "the gather of keys"),
            value=self._sources(local.value, "the gather of values"),
            result=result,
            sinks=None if local.sinks is None else self._maps(local.sinks[None], "the gather of sinks")[0],
        )

    def _statistics(self, local: RowStatistics) -> RowStatistics:
        rows = dict(local.items())
        stacked = torch.stack([*rows.values()])  # [statistics, batch, heads, queries]
        parts = self._maps(stacked.flatten(0, 1), "the gather of statistics").unflatten(0, stacked.shape[:2])
        whole = dict(zip(rows, parts.unbind(0), strict=True))
        return RowStatistics(**{name: x.detach() if name == "visible_keys" else x for name, x in whole.items()})

    def _maps(self, x: Tensor, what: str) -> Tensor:
        """Gather [batch, maps * heads of this rank, ...] as [batch, maps * heads, ...], without zero heads."""
        parallelism, split = self._parallelism, self._parallelism.split
        by_map = x.unflatten(1, (parallelism.maps, -1))
        block = padded(by_map, 2, split.block - by_map.shape[2])
        whole = gather(parallelism.ranks, block, 2, what, same_use=True)
        return whole.narrow(2, 0, split.num_heads).flatten(1, 2)

    def _sources(self, x: Tensor, what: str) -> Tensor:
        """Gather the keys or values [batch, maps * KV heads of this rank, ...], one per head."""
        parallelism = self._parallelism
        if parallelism.is_multi_query:
            return x
        layout = parallelism.layout
        heads, sources = layout.num_heads, x.shape[1] // parallelism.maps
        if sources != heads:  # latents have no map of heads: all heads read the one
            read = [0 if sources == 1 else layout.key_head(head) for head in range(heads)]
            index = torch.tensor(read, device=x.device)
            x = x.unflatten(1, (parallelism.maps, sources)).index_select(2, index).flatten(1, 2)
        return self._maps(x, what)
