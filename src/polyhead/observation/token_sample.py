"""`TokenSample`: what heads say at the same few tokens, so that heads of different layers can be laid side by side.

Second moments compare the heads of one layer. Between layers there are too many pairs for that, and the outputs of two
layers are never there at once; but at a sample of tokens they can be kept. Which tokens those are is decided by a hash
of the token's document, piece and place: the smallest win. So every site keeps the same tokens, whatever the batches
were, and two samples merge into the sample of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.collectors import BatchMetadata
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended

_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class TokenSample:
    """Gathers, at a sample of tokens, the outputs of some heads times a matrix each.

    Args:
        projections: for the sites to look at, by name and kind, [heads, value_dim, any], as many as the site has heads,
            or as `heads` names there.
        tokens: how many tokens to keep at most.
        heads: which heads, where not all.
        seed: another sample for another seed.
    """

    projections: Mapping[tuple[str, str], Tensor]
    tokens: int = 1024
    heads: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    seed: int = 0
    name: str = "token_sample"

    def empty(self, site: AttentionSite, device: torch.device) -> SiteSample | None:
        place = (site.name, site.kind)
        if place not in self.projections:
            return None
        matrices = self.projections[place].detach().to(device, torch.float32)
        values = torch.zeros(0, matrices.shape[0], matrices.shape[2], device=device)
        return SiteSample(self, place, matrices, torch.zeros(0, dtype=torch.int64, device=device), values)


@dataclass(frozen=True, slots=True, eq=False)
class SiteSample:
    """What one site's heads say at the sampled tokens, in the order of the tokens' hashes."""

    sample: TokenSample
    place: tuple[str, str]
    matrices: Tensor
    hashes: Tensor  # [tokens] int64, rising
    values: Tensor  # [tokens, heads, any]

    def update(self, attended: Attended, real: Tensor | None, metadata: BatchMetadata) -> Self:
        output, logsumexp = attended.result.output.detach(), attended.result.logsumexp
        assert logsumexp is not None
        if metadata.documents is None:
            raise OptionError("a sample of tokens needs session.notes that say which document each row is from")
        batch, _, queries, dim = output.shape
        if not dim:
            return self  # only the weights are known
        counted = torch.isfinite(logsumexp).any(1)
        if real is not None:
            counted = counted & real
        chosen = self.sample.heads.get(self.place)
        said = output if chosen is None else torch.stack([output[:, head] for head in chosen], 1)
        hashes = torch.where(counted, _hashes(metadata, counted, self.sample.seed), _NEVER).flatten()
        # Only the tokens that may stay are projected; rows without a token lose against all others.
        few = min(self.sample.tokens, hashes.shape[0])
        hashes, order = hashes.sort(stable=True)
        rows = said.transpose(1, 2).reshape(batch * queries, *said.shape[1::2])[order[:few]]
        values = torch.einsum("thd,hde->the", rows.float(), self.matrices)
        return self._joined(hashes[:few], values)

    def _joined(self, hashes: Tensor, values: Tensor) -> Self:
        together, order = torch.cat([self.hashes, hashes]).sort(stable=True)
        kept = order[: self.sample.tokens]
        joined = torch.cat([self.values, values])[kept]
        return type(self)(self.sample, self.place, self.matrices, together[: self.sample.tokens], joined)

    def merge(self, other: Self) -> Self:
        device = self.hashes.device
        return self._joined(other.hashes.to(device), other.values.to(device))

    def found(self) -> tuple[Tensor, Tensor]:
        """The hashes and the values of the tokens that are there, on the CPU in float64."""
        there = int((self.hashes != _NEVER).sum())
        return self.hashes[:there].cpu(), self.values[:there].double().cpu()

    def state(self) -> dict[str, Tensor]:
        return {"hashes": self.hashes, "values": self.values}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        return type(self)(self.sample, self.place, self.matrices, state["hashes"], state["values"])


def _hashes(metadata: BatchMetadata, counted: Tensor, seed: int) -> Tensor:
    """A positive number for every token, [batch, queries], that looks like chance and never changes.

    Places count the tokens of a row, so that padding moves none of them.
    """
    assert metadata.documents is not None
    documents = metadata.documents.to(counted.device, torch.int64, non_blocking=True)
    pieces = torch.zeros_like(documents) if metadata.pieces is None else metadata.pieces.to(documents)
    mixed = _mixed(_mixed(_mixed(documents + seed) + pieces)[:, None] + counted.cumsum(-1))
    return mixed.clamp_min(0) + torch.where(mixed < 0, -(mixed + 1), 0)


def _mixed(x: Tensor) -> Tensor:
    """Steele, Lea and Flood's finaliser of SplitMix64; its products wrap around as they should."""
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
