"""Positions of tokens in calls over a KV cache, inferred where the mask is a dense tensor.

Statistics need each token's index among the non-padding tokens of its sequence, which a dense mask does not state. The
first token of each sequence is known from the call that began its cache; later calls recognise the cache by the key of
that token.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyhead.masks import Mask, is_readable
from polyhead.observation.attention_calls import AttentionCall
from polyhead.observation.rows import Tokens, dense_terms, with_documents, with_positions

if TYPE_CHECKING:
    from polyhead.observation.calls import Call

CACHES = 8  # number of latest caches per site that are remembered, as calls may alternate between several
_LATER = 1 << 40  # index of the first token of a sequence that has only padding so far
_COMPARED = 16  # channels that are compared with every stored start; only a match in these is compared in full


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStart:
    """First non-padding token of each sequence in a cache, and its key, by which later calls recognise the cache."""

    first: Tensor  # key index, [batch]; _LATER if all keys are padding
    key: Tensor  # [batch, kv_heads, head_dim]
    is_padded: bool  # whether any sequence may start later than the first key

    @classmethod
    def of(cls, first: Tensor, key: Tensor, *, is_padded: bool = True) -> SequenceStart:
        first = first.expand(key.shape[0])
        first = torch.where(first < key.shape[2], first, _LATER)
        return cls(first, _keys_at(key, first), is_padded)

    def matches(self, key: Tensor, candidate: Tensor, dropped: int) -> Tensor:
        """Return whether each sequence of a cache has the stored start at index `candidate`; both are [batch]."""
        index = self.first[candidate] - dropped
        is_in_cache = (index >= 0) & (index < key.shape[2])
        return is_in_cache & (_keys_at(key, index) == self.key[candidate]).flatten(1).all(-1)

    def find_candidates(self, key: Tensor, dropped: int) -> Tensor:
        """Return the index of the first stored start that each sequence matches in some channels of KV head 0, [batch].

        The index is 0 if there is none, so that `matches` must confirm it.
        """
        index = (self.first - dropped).clamp(0, key.shape[2] - 1)
        parts = key.detach()[:, 0, :, :_COMPARED][:, index]  # [batch, starts, part of head_dim]
        return (parts == self.key[:, 0, :_COMPARED]).all(-1).to(torch.uint8).argmax(1)


def first_tokens(starts: Iterable[SequenceStart], key: Tensor, unknown: Tensor, dropped: int = 0) -> Tensor:
    """Return the index of the first token of each sequence of a cache, [batch].

    A sequence is compared with the stored starts at its own batch index, where the latest match counts. Without a match
    it is compared with those at all batch indices, as `reorder_cache` may have moved it.

    Args:
        starts: starts of caches.
        key: keys of the cache.
        unknown: index that is returned for a sequence without a match, [batch or 1].
        dropped: number of leading keys that the cache has dropped; indices include them.
    """
    moved = unknown.expand(key.shape[0])
    in_place, is_in_place = moved, torch.zeros_like(moved, dtype=torch.bool)
    for start in starts:
        if not len(start.first) or start.key.shape[1:] != (key.shape[1], key.shape[3]):
            continue
        candidate = start.find_candidates(key, dropped)
        moved = torch.where(start.matches(key, candidate, dropped), start.first[candidate], moved)
        if len(start.first) == len(key):
            is_match = start.matches(key, torch.arange(len(key), device=key.device), dropped)
            in_place, is_in_place = torch.where(is_match, start.first, in_place), is_in_place | is_match
    return torch.where(is_in_place, in_place, moved)


def _keys_at(key: Tensor, index: Tensor) -> Tensor:
    rows = torch.arange(key.shape[0], device=key.device)
    return key.detach()[rows, :, index.clamp(0, max(key.shape[2] - 1, 0))]


def locate_tokens(call: AttentionCall, starts: dict[str, deque[SequenceStart]], site: str) -> AttentionCall:
    """Return the call with a mask that states the positions of its tokens.

    Positions count from the first non-padding token. With fewer queries than keys, the keys come from a cache, and each
    query is at its last visible key; if all queries see the same keys, they are the last of these keys. The first token
    of each sequence is that of the call that began its cache. If no such call is known, it is the first key that the
    mask shows, in sequences where that is later than in others of the batch: these are taken for left-padded.

    Args:
        call: a call.
        starts: starts of the sequences of the last caches, by site, for the calls that follow; updated.
        site: name of the call's site.
    """
    mask, batch, queries, keys = call.mask, call.query.shape[0], call.query.shape[2], call.key.shape[2]
    if call.cross or not batch or not keys:
        return call
    index, caches = torch.arange(keys, device=call.query.device), starts.setdefault(site, deque(maxlen=CACHES))
    has_dense_terms = mask is not None and len(mask.allowed) + len(mask.biases) > 0
    if queries >= keys:
        non_padding = Tokens.of(mask, call.query, call.key).non_padding() if has_dense_terms else None
        is_known = non_padding is None or is_readable(non_padding)
        is_padded = non_padding is not None and not (is_known and bool(non_padding.all()))
        first = index[:1] if non_padding is None else torch.where(non_padding, index, keys).amin(-1)
        caches.append(SequenceStart.of(first, call.key, is_padded=is_padded))
        if is_padded and is_known:
            return replace(call, mask=with_positions(mask, non_padding))
        call_mask, statistics_mask = with_documents(mask, queries, keys)
        return replace(call, mask=call_mask if statistics_mask is None else statistics_mask)
    if not has_dense_terms:
        if not any(start.is_padded for start in caches):
            return call
        first = first_tokens(caches, call.key, index[:1])
        return replace(call, mask=_placed(mask, index[None, keys - queries :], first[:, None], index))
    assert mask is not None
    mask, tokens = locate_tokens_in_cache(mask, call.query, call.key, caches)
    return replace(call, mask=mask, tokens=tokens)


def has_only_dense_terms(mask: Mask) -> bool:
    """Return whether a mask has dense terms and no others, so that it does not state the positions of tokens."""
    return not mask.is_everything and replace(mask, allowed=(), biases=()).is_everything


def locate_tokens_in_cache(
    mask: Mask,
    query: Tensor,
    key: Tensor,
    caches: deque[SequenceStart],
    *,
    offset: int | Tensor | None = None,
    dropped: int = 0,
) -> tuple[Mask, Tensor]:
    """Return a dense mask with the positions of its tokens added, and which queries are not padding, [batch, queries].

    Args:
        mask: mask of a call with fewer queries than keys.
        query: queries of the call.
        key: keys of the cache.
        caches: starts of sequences in caches of the site; updated.
        offset: index of the first query among the keys; None: inferred from the mask.
        dropped: number of keys that the cache has dropped before these.
    """
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    index, visible = torch.arange(keys, device=query.device), _visible_keys(mask)  # [batch or 1, queries or 1, keys]
    is_shown, hide = visible.any(1), offset is None
    if offset is None:
        last = torch.where(visible, index, -1).amax(-1).expand(-1, queries)
        offsets = last - index[:queries]
        offset = offsets.amax(-1, keepdim=True)  # padding queries see less than others, or nothing
        if queries > 1:
            # Under a causal mask the offset is that of several queries. Otherwise all see the same keys: they are the
            # last of these.
            is_causal = (offsets == offset).sum(-1, keepdim=True) > 1
            offset = torch.where(is_causal, offset, (last.amax(-1, keepdim=True) - (queries - 1)).clamp_min(0))
    else:
        if not isinstance(offset, Tensor):
            offset = torch.full((1, 1), offset, device=query.device)
        offset = offset.to(query.device).view(1, 1)
    positions = index[:queries] + offset.clamp_min(0)
    shown_first = torch.where(is_shown, index, keys).amin(-1)
    # A first visible key after key 0 is padding on the left where it is later than in another sequence. Where all are
    # later, a window may hide the first keys, unless the cache has dropped the keys before its window.
    unknown = torch.where(shown_first > (0 if dropped else shown_first.amin()), shown_first + dropped, 0)
    first = torch.minimum(first_tokens(caches, key, unknown, dropped) - dropped, shown_first)
    if not dropped:
        # Queries from the beginning of a preallocated cache show where their sequence starts.
        first = torch.where(offset[:, 0] <= 0, shown_first, first)
        if queries > 1:
            caches.append(SequenceStart.of(first, key))
    rows = max(len(is_shown), len(positions))
    at_keys = positions.clamp_max(keys - 1).expand(rows, -1)
    tokens = is_shown.expand(rows, -1).gather(1, at_keys).expand(batch, -1)
    return _placed(mask, positions, first[:, None], index, hide=hide), tokens


def _placed(mask: Mask | None, positions: Tensor, first: Tensor, index: Tensor, *, hide: bool = True) -> Mask:
    """Return a mask with positions added, counted from `first` [batch or 1, 1], the index of the first token.

    `positions` are the key indices of the queries. Keys before the first token are padding: they are masked or, if
    `hide` is False, placed after all others and left to the mask. A row in which a finite bias masks every key attends
    to all of them, padding included, which `hide` would change.
    """
    key_positions = index - first
    if hide:
        key_positions = key_positions.clamp_min(-1)
    else:
        key_positions = torch.where(key_positions < 0, key_positions + 2 * len(index), key_positions)
    placed = Mask.positions(positions - first, key_positions)
    return placed if mask is None else mask & placed


def sequence_start(mask: Mask, key: Tensor) -> SequenceStart:
    """Return the starts of the sequences of a new cache with these keys, under a dense mask."""
    index, is_shown = torch.arange(key.shape[2], device=key.device), _visible_keys(mask).any(1)
    return SequenceStart.of(torch.where(is_shown, index, len(index)).amin(-1), key)


def _visible_keys(mask: Mask) -> Tensor:
    """Return the keys that the dense terms of a mask show to any head, [batch or 1, queries or 1, keys]."""
    return reduce(operator.and_, dense_terms(mask)).any(1)


def locate_sinks(call: Call, tokens: Tokens, dropped: int, first: Tensor | None) -> None:
    """Set in a call which attention-sink keys a sliding-window cache still contains.

    `first` is the index of the first token of each sequence, [batch or 1]; None: inferred from padding in the cache.
    """
    if first is None:
        first = tokens.first_token()
        first = torch.where(first > 0, first + dropped, 0)
    assert call.requested is not None
    if call.requested.sink_keys == 1:
        call.sinks_in_view = (first >= dropped).expand(tokens.batch)
    elif call.mask is None or call.mask.placed is None:
        index = torch.arange(tokens.keys, device=tokens.device) + dropped - first[:, None]
        placed = Mask.positions(index[:, tokens.keys - tokens.queries :], index.clamp_min(-1))
        call.mask = placed if call.mask is None else call.mask & placed
