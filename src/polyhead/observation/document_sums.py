"""`DocumentSums`: collect the row statistics of each document, from which standard errors over documents follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Self

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.collectors import BatchMetadata
from polyhead.observation.statistics import NAMES, AttentionSite, SiteStatistics
from polyhead.ops.attended import Attended
from polyhead.ops.attention import RowStatistics
from polyhead.ops.common.row_reduction import SHARE

MAX_DOCUMENTS = 256


@dataclass(frozen=True, slots=True)
class DocumentSums:
    """Collector of the number of rows and the sum of every statistic that the session computes, by document and head.

    `session.metadata.documents` is required. Documents whose indices are equal modulo `MAX_DOCUMENTS` are pooled, which
    bounds the memory: 4 KB per head and statistic.
    """

    name: str = "documents"

    def empty(self, site: AttentionSite, device: torch.device) -> SiteDocumentSums:
        return SiteDocumentSums(site, torch.zeros(0, dtype=torch.int64))


@dataclass(frozen=True, slots=True, eq=False)
class SiteDocumentSums:
    """State of `DocumentSums` at one site."""

    site: AttentionSite
    documents: Tensor  # int64 [documents], sorted, on the CPU
    totals: Mapping[str, Tensor] = field(default_factory=dict)  # by statistic, [documents, heads, rows and sum]

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        rows = attended.result.statistics
        if rows is None or rows.visible_keys is None:
            return self
        batch, heads, queries = rows.visible_keys.shape
        documents = checked_documents(metadata, batch, "sums by document need")
        keys = rows.visible_keys
        values = {x.name: getattr(rows, x.name) for x in fields(rows)}
        if non_padding is not None:
            values["visible_keys"] = torch.where(non_padding[:, None], keys, 0)  # rows without keys do not count
        # Every head of every text is a head of one text, so that one reduction returns the moments of each.
        folded = RowStatistics(**{x: y if y is None else y.reshape(1, -1, queries) for x, y in values.items()})
        columns = [x for x in NAMES if values["entropy" if x == SHARE else x] is not None]
        empty = SiteStatistics.empty(self.site, range(batch * heads), columns, keys.device)
        moments = empty.update(folded, learned_sinks=attended.sinks is not None).moments
        totals = torch.stack([moments.count, moments.count * moments.mean], -1).unflatten(1, (batch, heads))
        return self._with(documents % MAX_DOCUMENTS, dict(zip(columns, totals, strict=True)))

    def merge(self, other: Self) -> Self:
        return self._with(other.documents, other.totals)

    def _with(self, documents: Tensor, added: Mapping[str, Tensor]) -> Self:
        return type(self)(self.site, *summed_by_document((self.documents, self.totals), (documents, added)))

    def state(self) -> dict[str, Tensor]:
        return {"documents": self.documents, **self.totals}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        totals = {name: x for name, x in state.items() if name != "documents"}
        return type(self)(self.site, state["documents"].cpu(), totals)


def checked_documents(metadata: BatchMetadata, batch: int, rule: str) -> Tensor:
    """Return the document index of each text of a batch, int64 [batch]; raise if the metadata has none.

    Args:
        metadata: metadata of the batch.
        batch: number of texts.
        rule: beginning of the message, such as "evidence needs".
    """
    documents = metadata.documents
    if documents is None or documents.shape != (batch,) or documents.device.type != "cpu":
        raise OptionError(
            f"{rule} the document index of each of the {batch} texts, on the CPU; "
            "set session.metadata = BatchMetadata(documents=...) before calling the model"
        )
    return documents.to(torch.int64)


def summed_by_document(*parts: tuple[Tensor, Mapping[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sorted documents of all parts, and their sums by name, on the device of the first part that has them.

    A part has document indices [rows], on the CPU and not necessarily distinct, and its sums [rows, ...] by name.
    """
    documents = torch.unique(torch.cat([x for x, _ in parts]))
    sums: dict[str, Tensor] = {}
    for rows, (name, x) in ((rows, item) for rows, part in parts for item in part.items()):
        if name not in sums:
            sums[name] = torch.zeros(len(documents), *x.shape[1:], dtype=x.dtype, device=x.device)
        index = torch.searchsorted(documents, rows).to(sums[name].device, non_blocking=True)
        sums[name].index_add_(0, index, x.to(sums[name].device))
    return documents, sums
