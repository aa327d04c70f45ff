"""What the roles of heads are decided from, gathered document by document, so that every score has its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from polyhead.errors import OptionError, ShapeError
from polyhead.masks import Mask
from polyhead.observation.collectors import BatchMetadata
from polyhead.observation.role_evidence_rows import COLUMNS, Ground, Measured, ground, measure
from polyhead.observation.role_evidence_tokens import BINS, Meaning, Segments, TokenTables
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended

MAX_DOCUMENTS = 256


class EvidenceCollector:
    """Gathers, for each document and head, what `polyhead.analysis.roles` needs; for `observe(collect=[...])`.

    `session.metadata` must say which document each row of the batch is from; with the tokens and their classes it
    learns about repeated tokens, punctuation and rare tokens as well. Texts are taken whole, one a row: no cache, no
    packing.

    Args:
        special, punctuation: which of `metadata.classes` are these; by default the numbers of `sources.TokenClass`,
            with line ends among the punctuation.
        rare: boolean [vocabulary], such as `evidence_tokens.rare_tokens` of the counts in a text.
        meaning: what tokens mean, such as `Meaning.of(model.get_input_embeddings().weight)`.
        segments: which word and which sentence each token is in, such as `polyhead.sources.segments.Segments`.
        most_documents: with more documents than these, those whose numbers are equal modulo this number count as one.
            That bounds the memory: about 1.2 KB for each document and head.
    """

    def __init__(
        self,
        *,
        name: str = "evidence",
        special: Sequence[int] = (0,),
        punctuation: Sequence[int] = (5, 8),
        rare: Tensor | None = None,
        meaning: Meaning | None = None,
        segments: Segments | None = None,
        max_documents: int = MAX_DOCUMENTS,
    ) -> None:
        if rare is not None and (rare.ndim != 1 or rare.dtype is not torch.bool or rare.device.type != "cpu"):
            raise ShapeError(f"rare must be boolean [vocabulary] on the CPU, got {rare.dtype} of {list(rare.shape)}")
        if max_documents < 2:
            raise OptionError(f"an interval needs two documents at least, got most_documents {max_documents}")
        self.name = name
        self.max_documents = max_documents
        self.tables = TokenTables(tuple(special), tuple(punctuation), rare, meaning, segments)
        self._latest: tuple[BatchMetadata, Mask | None, tuple[object, ...], Ground] | None = None

    def empty(self, site: AttentionSite, device: torch.device) -> HeadEvidence | None:
        """None for a cross-attention: its queries have no place among its keys."""
        return HeadEvidence.empty(self, site, device) if site.kind == "self" else None

    def ground_of(self, attended: Attended, real: Tensor | None, metadata: BatchMetadata) -> Ground:
        """Return what no head decides about the batch; computed once for consecutive layers that see the same keys."""
        shape, device = attended.query.shape, attended.query.device
        size = torch.Size((shape[0], shape[2]))
        key = (size, device, attended.query.dtype, attended.sinks is None)
        latest = self._latest
        if latest is not None and latest[0] is metadata and latest[2] == key and _same_keys(latest[1], attended.mask):
            return latest[3]
        causal = attended.mask is not None and attended.mask.right == 0
        if metadata.tokens is not None and metadata.tokens.shape != size:
            raise ShapeError(f"notes must name every token, here {list(size)}, got {list(metadata.tokens.shape)}")
        tokens = self.tables.read(metadata, real, causal=causal, device=device)
        found = ground(attended, real, tokens)
        self._latest = (metadata, attended.mask, key, found)
        return found


def _same_keys(one: Mask | None, other: Mask | None) -> bool:
    """Whether two masks show the same keys, by the identity of their parts: T5 joins them anew in every layer."""
    if one is None or other is None:
        return one is other
    edges = [(m.left, m.right, m.sinks, m.padding, m.packed, m.relative_biases) for m in (one, other)]
    tensors = [(len(m.allowed), *map(id, (*m.allowed, *m.biases))) for m in (one, other)]
    return edges[0] == edges[1] and one.placed is other.placed and tensors[0] == tensors[1]


@dataclass(frozen=True, slots=True, eq=False)
class HeadEvidence:
    """The sums of one site: one row a document, in the order of their numbers. A mergeable value."""

    collector: EvidenceCollector = field(repr=False)
    site: AttentionSite
    documents: Tensor  # int64 [documents], on the CPU
    sums: Tensor  # float64 [documents, heads + 1, columns]; the last row is chance. See `evidence_rows.COLUMNS`
    hits: Tensor  # int64 [documents, heads, bins]: rows whose largest weight is at each offset, -64 to 64 and beyond
    available: Tensor  # int64 [documents, bins]: rows that see a key there
    chance: Tensor  # float64 [documents, bins]: the weight there of a head that looks everywhere alike

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
        """The sums of one name, [documents, heads + 1]."""
        return self.sums[..., COLUMNS.index(name)]

    def update(self, attended: Attended, real: Tensor | None, metadata: BatchMetadata) -> Self:
        queries, keys = attended.query.shape[2], attended.key.shape[2]
        if queries != keys:
            raise OptionError(
                f"evidence is of whole texts, got {queries} queries over {keys} keys; "
                "run the model on whole texts, with use_cache=False"
            )
        documents = metadata.documents
        if documents is None or documents.shape != (attended.query.shape[0],) or documents.device.type != "cpu":
            raise OptionError(
                f"notes must say on the CPU which document each of the {attended.query.shape[0]} texts is from; "
                "set session.notes = Notes(documents=...) before the model is called"
            )
        found = measure(attended, self.collector.ground_of(attended, real, metadata))
        return self._with(documents.to(torch.int64) % self.collector.max_documents, found)

    def merge(self, other: Self) -> Self:
        mine, theirs = ((x.site.name, x.site.kind, x.site.num_heads) for x in (self, other))
        if mine != theirs:
            raise OptionError(f"only evidence of one site can be merged, got {mine} and {theirs}")
        if self.collector.max_documents != other.collector.max_documents:
            raise OptionError(
                "only evidence with one bound on its documents can be merged, "
                f"got {self.collector.max_documents} and {other.collector.max_documents}"
            )
        tensors = (x.to(self.sums.device) for x in (other.sums, other.hits, other.available, other.chance))
        return self._with(other.documents, Measured(*tensors))

    def _with(self, documents: Tensor, found: Measured) -> Self:
        every = torch.unique(torch.cat([self.documents, documents]))
        mine, theirs = (
            torch.searchsorted(every, x).to(self.sums.device, non_blocking=True) for x in (self.documents, documents)
        )

        def joined(one: Tensor, other: Tensor) -> Tensor:
            table = torch.zeros(len(every), *one.shape[1:], dtype=one.dtype, device=one.device)
            return table.index_add_(0, mine, one).index_add_(0, theirs, other)

        return replace(
            self,
            documents=every,
            sums=joined(self.sums, found.sums),
            hits=joined(self.hits, found.hits),
            available=joined(self.available, found.available),
            chance=joined(self.chance, found.chance),
        )

    def state(self) -> dict[str, Tensor]:
        names = ("documents", "sums", "hits", "available", "chance")
        return {name: getattr(self, name) for name in names}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        missing = [name for name in self.state() if name not in state]
        if len(missing):
            raise OptionError(f"saved evidence must hold {', '.join(self.state())}; {', '.join(missing)} not found")
        return replace(
            self,
            documents=state["documents"].cpu(),
            sums=state["sums"],
            hits=state["hits"],
            available=state["available"],
            chance=state["chance"],
        )
