"""A text run through the model: queries, keys and log-sum-exp of every attention call.

All weights can be recomputed from these, with memory linear in the length of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor

from polyhead.masks import Mask
from polyhead.observation import AttentionSite
from polyhead.ops.attended import Attended
from polyhead.ops.profile import AttentionProfile, profile
from polyhead.report.viewer.output import Output
from polyhead.report.viewer.token_texts import Axis

AxisName = Literal["text", "target"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer of a forward pass: a site, and the index of the call where layers share a module.

    Its queries and keys are tokens of the text, or of the target, which is what a decoder has generated so far.
    """

    site: AttentionSite
    call: int
    queries: AxisName
    keys: AxisName


@dataclass(frozen=True, slots=True, eq=False)
class RecordedAttention:
    """One attention call over one text, without values: enough to recompute every weight."""

    query: Tensor  # [1, heads, queries, head_dim]
    key: Tensor  # [1, kv_heads, keys, head_dim]
    logsumexp: Tensor  # [1, heads, queries]
    mask: Mask | None = None
    scale: float | Tensor | None = None
    softcap: float | None = None

    @classmethod
    def of(cls, attended: Attended) -> RecordedAttention:
        logsumexp = attended.result.logsumexp
        assert logsumexp is not None
        # Copies, as views would keep larger tensors alive.
        query, key, logsumexp = (
            x.detach().clone(memory_format=torch.contiguous_format) for x in (attended.query, attended.key, logsumexp)
        )
        return cls(query, key, logsumexp, attended.mask, attended.scale, attended.softcap)

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def queries(self) -> int:
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        return self.key.shape[2]

    @property
    def bytes(self) -> int:
        tensors = [self.query, self.key, self.logsumexp]
        if self.mask is not None:
            tensors += [*self.mask.allowed, *self.mask.biases]
        return sum(x.numel() * x.element_size() for x in tensors)

    def head(self, number: int) -> RecordedAttention:
        """Return the attention of one head, as views."""
        kv_head = number // (self.heads // self.key.shape[1])
        scale = self.scale[number : number + 1] if isinstance(self.scale, Tensor) else self.scale
        return replace(
            self,
            query=self.query[:, number : number + 1],
            key=self.key[:, kv_head : kv_head + 1],
            logsumexp=self.logsumexp[:, number : number + 1],
            mask=None if self.mask is None else _mask_of_head(self.mask, number),
            scale=scale,
        )

    def profile(self, **requested: object) -> AttentionProfile:
        """Return `polyhead.profile` of this attention."""
        return profile(
            self.query,
            self.key,
            self.logsumexp,
            mask=self.mask,
            scale=self.scale,
            softcap=self.softcap,
            **requested,  # type: ignore[arg-type]
        )


def _mask_of_head(mask: Mask, head: int) -> Mask:
    def of(x: Tensor, axis: int) -> Tensor:
        return x if x.shape[axis] == 1 else x.narrow(axis, head, 1)

    return mask.with_head_terms(of)


@dataclass(frozen=True, slots=True, eq=False)
class TraceInputs:
    """Token ids of a text, and of the target of an encoder-decoder, and the heads to ablate."""

    slot: str
    ids: tuple[int, ...]
    text: Axis
    target_ids: tuple[int, ...] | None  # of an encoder-decoder
    target: Axis | None
    tokens_in_text: int  # special tokens included; more than len(ids) if the text was truncated
    ablated: frozenset[tuple[int, int]] = frozenset()  # (layer, head)
    generated: int = 0

    @property
    def extended(self) -> tuple[tuple[int, ...], Axis]:
        """The sequence that generation extends: the target of an encoder-decoder, else the text itself."""
        if self.target_ids is not None and self.target is not None:
            return self.target_ids, self.target
        return self.ids, self.text

    def extended_to(self, ids: tuple[int, ...], axis: Axis, generated: int) -> Self:
        """Return the same inputs with another sequence in place of the one that generation extends."""
        if self.target_ids is None:
            return replace(self, ids=ids, text=axis, generated=generated)
        return replace(self, target_ids=ids, target=axis, generated=generated)


@dataclass(frozen=True, slots=True, eq=False)
class Trace(TraceInputs):
    """A text with the model's output and all attention calls; `number` is unique."""

    number: int = field(kw_only=True)
    output: Output = field(kw_only=True)
    attentions: tuple[RecordedAttention, ...] = field(kw_only=True)  # one per layer
    seconds: float = field(kw_only=True)

    @property
    def bytes(self) -> int:
        return sum(x.bytes for x in self.attentions)

    def to_dict(self) -> dict[str, object]:
        read = len(self.ids) - (self.generated if self.target_ids is None else 0)
        cut = None if self.tokens_in_text <= read else {"tokens_in_text": self.tokens_in_text, "tokens_read": read}
        return {
            "id": self.number,
            "slot": self.slot,
            "text": self.text.to_dict(),
            "target": None if self.target is None else self.target.to_dict(),
            "cut": cut,
            "ablated": sorted(self.ablated),
            "generated": self.generated,
            "output": self.output.to_dict(),
            "bytes": self.bytes,
            "seconds": self.seconds,
        }
