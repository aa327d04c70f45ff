"""`TokenSample`: collect head outputs at a fixed sample of tokens, to compare heads of different layers.

Second moments compare the heads of one layer. Across layers there are too many pairs, and the outputs of two layers are
never available at once; at a sample of tokens they can be stored. The sample is bottom-k: the tokens with the smallest
hashes of document, piece (one context of a long document) and position. Every site thus keeps the same tokens,
independent of batching, and two samples merge into the sample of their union.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.collectors import BatchMetadata, counted_rows, exclude_padding
from polyhead.observation.document_sums import checked_documents
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended

_PADDING_HASH = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class TokenSample:
    """Collector of projected head outputs at a sample of tokens.

    Args:
        projections: matrices [heads, value_dim, out_dim] by the (name, kind) of the sites to sample: one per head that
            is sampled.
        tokens: maximum number of tokens in the sample.
        heads: heads to sample, by the (name, kind) of the site; all by default.
        seed: seed of the sample.
    """

    projections: Mapping[tuple[str, str], Tensor]
    tokens: int = 1024
    heads: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    seed: int = 0
    name: str = "token_sample"

    def empty(self, site: AttentionSite, device: torch.device) -> SiteSample | None:
        site_key = (site.name, site.kind)
        if site_key not in self.projections:
            return None
        matrices = self.projections[site_key].detach().to(device, torch.float32)
        values = torch.zeros(0, matrices.shape[0], matrices.shape[2], device=device)
        return SiteSample(self, site_key, matrices, torch.zeros(0, dtype=torch.int64, device=device), values)


@dataclass(frozen=True, slots=True, eq=False)
class SiteSample:
    """Projected head outputs of one site at the sampled tokens, sorted by token hash."""

    sample: TokenSample
    site_key: tuple[str, str]  # (name, kind) of the site
    matrices: Tensor
    hashes: Tensor  # [tokens] int64, ascending
    values: Tensor  # [tokens, heads, out_dim]

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        output = attended.result.output.detach()
        batch, _, queries, dim = output.shape
        checked_documents(metadata, batch, "a token sample needs")
        if metadata.pieces is not None and metadata.pieces.shape != (batch,):
            raise OptionError(
                f"pieces must be one index per text, here [{batch}], got shape {list(metadata.pieces.shape)}"
            )
        if not dim:
            return self  # only the weights are available
        counted = counted_rows(exclude_padding(attended, non_padding))
        chosen = self.sample.heads.get(self.site_key)
        outputs = output if chosen is None else torch.stack([output[:, head] for head in chosen], 1)
        hashes = torch.where(counted, token_hashes(metadata, counted, self.sample.seed), _PADDING_HASH).flatten()
        # Only tokens that may enter the sample are projected; padding rows have the largest hash.
        limit = min(self.sample.tokens, hashes.shape[0])
        hashes, order = hashes.sort(stable=True)
        rows = outputs.transpose(1, 2).reshape(batch * queries, *outputs.shape[1::2])[order[:limit]]
        values = torch.einsum("thd,hde->the", rows.float(), self.matrices)
        return self._joined(hashes[:limit], values)

    def _joined(self, hashes: Tensor, values: Tensor) -> Self:
        merged, order = torch.cat([self.hashes, hashes]).sort(stable=True)
        selected = order[: self.sample.tokens]
        joined = torch.cat([self.values, values])[selected]
        return type(self)(self.sample, self.site_key, self.matrices, merged[: self.sample.tokens], joined)

    def merge(self, other: Self) -> Self:
        device = self.hashes.device
        return self._joined(other.hashes.to(device), other.values.to(device))

    def rows(self) -> Tensor:
        """Return the values at the sampled tokens, float64 [tokens, heads, out_dim] on the CPU."""
        return self.values[: int((self.hashes != _PADDING_HASH).sum())].double().cpu()

    def token_hashes(self) -> Tensor:
        """Return the hashes of the sampled tokens, ascending, on the CPU."""
        return self.hashes[self.hashes != _PADDING_HASH].cpu()

    def state(self) -> dict[str, Tensor]:
        return {"hashes": self.hashes, "values": self.values}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        return type(self)(self.sample, self.site_key, self.matrices, state["hashes"], state["values"])


def token_hashes(metadata: BatchMetadata, counted: Tensor, seed: int) -> Tensor:
    """Return a deterministic non-negative hash of every token, [batch, queries].

    Positions count non-padding tokens, so that padding does not affect them.
    """
    assert metadata.documents is not None
    documents = metadata.documents.to(counted.device, torch.int64, non_blocking=True)
    pieces = torch.zeros_like(documents) if metadata.pieces is None else metadata.pieces.to(documents)
    hashed = _splitmix(_splitmix(_splitmix(documents + seed) + pieces)[:, None] + counted.cumsum(-1))
    # A negative hash x becomes -(x + 1): `abs` of the smallest int64 is negative.
    return hashed.clamp_min(0) + torch.where(hashed < 0, -(hashed + 1), 0)


def _splitmix(x: Tensor) -> Tensor:
    """Return the SplitMix64 finaliser (Steele, Lea and Flood, 2014) of `x`; products wrap around as intended."""
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ _shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift_right(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return `x` logically shifted to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
