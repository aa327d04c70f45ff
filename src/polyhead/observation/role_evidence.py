"""`EvidenceCollector`: per-document evidence for head roles, from which scores and confidence intervals follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self, get_args

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.masks import Mask
from polyhead.observation.accumulators import NamedTensors
from polyhead.observation.collectors import BatchMetadata
from polyhead.observation.direct_logits import DirectLogits
from polyhead.observation.document_sums import MAX_DOCUMENTS, checked_documents, summed_by_document
from polyhead.observation.role_evidence_rows import (
    COLUMNS,
    COPY_ROWS,
    PROFILED,
    PROFILED_PAIRS,
    BatchBaseline,
    TokenLogits,
    measure,
    measure_baseline,
)
from polyhead.observation.role_evidence_tokens import BINS, SPECIAL, EvidenceKind, Segmenter, TokenTables, TokenVectors
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended


class EvidenceCollector:
    """Collector of the per-document, per-head sums that `polyhead.analysis.roles` needs.

    `session.metadata.documents` is required; `tokens` and `classes`, of `sources.TokenClass`, add evidence on repeated
    tokens, punctuation and rare tokens. Each row of a batch must be one complete text: no KV cache, no packing.

    Args:
        rare: boolean [vocabulary], such as `role_evidence_tokens.rare_tokens` of the token counts of a text.
        meaning: token embeddings, such as `TokenVectors.of(model.get_input_embeddings().weight)`.
        segments: function from tokens to word and sentence indices, such as `polyhead.sources.segments.Segments`.
        direct_logits: the path from head outputs to logits, such as that of `find_direct_logits`, for copy and
            anti-copy.
        max_documents: documents whose indices are equal modulo this number are pooled. This bounds the memory: about
            1.2 KB per document and head.
        only: "pairs" collects the duplicate and induction columns and `sink_mass`; "rows" collects all columns except
            duplicate and induction. Columns and counts that are not collected are 0. By default all are.
    """

    def __init__(
        self,
        *,
        name: str = "evidence",
        rare: Tensor | None = None,
        meaning: TokenVectors | None = None,
        segments: Segmenter | None = None,
        direct_logits: DirectLogits | None = None,
        max_documents: int = MAX_DOCUMENTS,
        only: EvidenceKind | None = None,
    ) -> None:
        if rare is not None and (rare.ndim != 1 or rare.dtype is not torch.bool or rare.device.type != "cpu"):
            raise ShapeError(f"rare must be boolean [vocabulary] on the CPU, got {rare.dtype} of {list(rare.shape)}")
        if max_documents < 2:
            raise OptionError(f"confidence intervals need at least two documents, got max_documents {max_documents}")
        if only not in (None, *get_args(EvidenceKind)):
            raise OptionError(f"only must be {', '.join(map(repr, get_args(EvidenceKind)))} or None, got {only!r}")
        self.name = name
        self.max_documents = max_documents
        self.direct_logits = direct_logits
        self.only = only
        self.tables = TokenTables(rare, meaning, segments, only)
        self._latest: tuple[BatchMetadata, Mask | None, tuple[object, ...], BatchBaseline] | None = None

    def empty(self, site: AttentionSite, device: torch.device) -> HeadEvidence | None:
        """Return an empty state; None for cross-attention, whose queries have no positions among its keys."""
        return HeadEvidence.empty(self, site, device) if site.kind == "self" else None

    def baseline_of(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> BatchBaseline:
        """Return the head-independent baseline of a batch, cached for consecutive layers with the same mask."""
        shape, device = attended.query.shape, attended.query.device
        size = torch.Size((shape[0], shape[2]))
        key = (size, device, attended.query.dtype, attended.sinks is None)
        latest = self._latest
        if latest is not None and latest[0] is metadata and latest[2] == key and _same_keys(latest[1], attended.mask):
            return latest[3]
        causal = attended.mask is not None and attended.mask.right == 0
        if metadata.tokens is not None and metadata.tokens.shape != size:
            raise ShapeError(
                f"session.metadata.tokens must have the shape of the batch, {list(size)}, "
                f"got {list(metadata.tokens.shape)}"
            )
        tokens = self.tables.metadata_of(metadata, non_padding, causal=causal, device=device)
        if self.only == "pairs":
            baseline = measure_baseline(attended, non_padding, tokens, only_pairs=True)
        else:
            logits = self._token_logits(metadata, non_padding, device)
            baseline = measure_baseline(attended, non_padding, tokens, logits)
        self._latest = (metadata, attended.mask, key, baseline)
        return baseline

    def _token_logits(
        self, metadata: BatchMetadata, non_padding: Tensor | None, device: torch.device
    ) -> TokenLogits | None:
        if self.direct_logits is None or metadata.tokens is None:
            return None
        ordinary = torch.ones_like(metadata.tokens, dtype=torch.bool)
        if metadata.classes is not None:
            ordinary = metadata.classes != SPECIAL
        ordinary, tokens = (x.to(device, non_blocking=True) for x in (ordinary, metadata.tokens))
        present = torch.ones_like(ordinary) if non_padding is None else non_padding.expand_as(ordinary)
        ordinary = ordinary & present & (present.cumsum(-1) > 1)  # the first token is an attention sink
        rows = torch.arange(COPY_ROWS, device=device) * present.sum(-1, keepdim=True) // COPY_ROWS
        sampled = torch.nn.functional.pad(rows.diff(dim=-1) > 0, (1, 0), value=True)
        rows = rows + present.to(torch.uint8).argmax(-1, keepdim=True)
        return TokenLogits(rows, sampled, tokens, ordinary, self.direct_logits.directions(metadata.tokens).to(device))


def _same_keys(first: Mask | None, second: Mask | None) -> bool:
    """Return whether two masks have identical parts; T5 combines the same parts into a new mask in every layer."""
    if first is None or second is None:
        return first is second
    edges = [(m.left, m.right, m.sinks, m.padding, m.packed, m.relative_biases) for m in (first, second)]
    tensors = [(len(m.allowed), *map(id, (*m.allowed, *m.biases))) for m in (first, second)]
    return edges[0] == edges[1] and first.placed is second.placed and tensors[0] == tensors[1]


@dataclass(frozen=True, slots=True, eq=False)
class HeadEvidence(NamedTensors):
    """State of `EvidenceCollector` at one site: sums per document, sorted by document index."""

    collector: EvidenceCollector = field(repr=False)
    site: AttentionSite
    documents: Tensor  # int64 [documents], on the CPU
    sums: Tensor  # float64 [documents, heads + 1, columns]; the last row is chance. See `role_evidence_rows.COLUMNS`
    hits: Tensor  # int64 [documents, heads, bins]: rows whose max weight is at each offset, -64 to 64 and beyond
    available: Tensor  # int64 [documents, bins]: rows with a visible key at each offset
    chance: Tensor  # float64 [documents, bins]: weight at each offset under uniform attention

    @property
    def profiled(self) -> dict[str, bool]:
        """Arguments of the profile; see `CollectorState`."""
        return PROFILED_PAIRS if self.collector.only == "pairs" else PROFILED

    @property
    def output(self) -> Tensor | None:
        """W_O of the site, float32 [heads, value_dim, width], if the collector has it."""
        direct_logits = self.collector.direct_logits
        output = None if direct_logits is None else direct_logits.outputs.get((self.site.name, self.site.kind))
        return None if output is None else output.to(self.sums.device, torch.float32)

    @classmethod
    def empty(cls, collector: EvidenceCollector, site: AttentionSite, device: torch.device) -> Self:
        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(0, *shape, dtype=dtype, device=device)

        return cls(
            collector,
            site,
            torch.zeros(0, dtype=torch.int64),
            zeros(site.num_heads + 1, len(COLUMNS)),
            zeros(site.num_heads, BINS, dtype=torch.int64),
            zeros(BINS, dtype=torch.int64),
            zeros(BINS),
        )

    def column(self, name: str) -> Tensor:
        """Return the sums of one column, [documents, heads + 1]."""
        return self.sums[..., COLUMNS.index(name)]

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        queries, keys = attended.query.shape[2], attended.key.shape[2]
        if queries != keys:
            raise OptionError(
                f"evidence needs complete texts, got {queries} queries over {keys} keys; "
                "run the model on complete texts, with use_cache=False"
            )
        documents = checked_documents(metadata, attended.query.shape[0], "evidence needs")
        baseline = self.collector.baseline_of(attended, non_padding, metadata)
        sums = measure(attended, baseline, self.output)
        return self._with(documents % self.collector.max_documents, sums)

    def merge(self, other: Self) -> Self:
        own_site, other_site = ((x.site.name, x.site.kind, x.site.num_heads) for x in (self, other))
        if own_site != other_site:
            raise OptionError(f"only evidence of the same site can be merged, got {own_site} and {other_site}")
        for name in ("max_documents", "only"):
            own, others = (getattr(x.collector, name) for x in (self, other))
            if own != others:
                raise OptionError(f"only evidence with the same {name} can be merged, got {own} and {others}")
        return self._with(other.documents, {name: x for name, x in other.state().items() if name != "documents"})

    def _with(self, documents: Tensor, added: Mapping[str, Tensor]) -> Self:
        own = {name: getattr(self, name) for name in added}
        all_documents, sums = summed_by_document((self.documents, own), (documents, added))
        return NamedTensors.with_state(self, {"documents": all_documents, **sums})

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        loaded = NamedTensors.with_state(self, state)
        # Columns that a run of an earlier version did not begin with would be of a part of the text, and it counted the
        # token itself in its word and sentence.
        missing = len(COLUMNS) - loaded.sums.shape[-1]
        if missing:
            nan = loaded.sums.new_full((*loaded.sums.shape[:-1], missing + 4), torch.nan)
            loaded = replace(loaded, sums=torch.cat([loaded.sums[..., :-4], nan], -1))
        return replace(loaded, documents=loaded.documents.cpu())
