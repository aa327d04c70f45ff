"""Positions of the tokens of a call over a KV cache, where its mask is a tensor, which does not show them."""

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

CACHES = 8  # caches of a site that may take turns
_LATER = 1 << 40
_COMPARED = 16  # channels compared with every stored start; only the best match is compared in full


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStart:
    """First token of each sequence in a cache, and its key, by which later calls recognise the cache."""

    first: Tensor  # key index, [batch]; _LATER if all keys are padding
    key: Tensor  # [batch, kv_heads, head_dim]
    is_padded: bool  # whether any sequence may start later than the first key

    @classmethod
    def of(cls, first: Tensor, key: Tensor, *, is_padded: bool = True) -> SequenceStart:
        first = first.expand(key.shape[0])
        first = torch.where(first < key.shape[2], first, _LATER)
        return cls(first, _keys_at(key, first), is_padded)

    def is_of(self, key: Tensor, which: Tensor, dropped: int) -> Tensor:
        """Return whether each sequence of a cache began like the stored one at index `which`; both [batch]."""
        index = self.first[which] - dropped
        is_held = (index >= 0) & (index < key.shape[2])
        return is_held & (_keys_at(key, index) == self.key[which]).flatten(1).all(-1)

    def like(self, key: Tensor, dropped: int) -> Tensor:
        """Return the index of the stored start that each sequence matches in part of one KV head, [batch]."""
        index = (self.first - dropped).clamp(0, key.shape[2] - 1)
        parts = key.detach()[:, 0, :, :_COMPARED][:, index]  # [batch, starts, part of head_dim]
        return (parts == self.key[:, 0, :_COMPARED]).all(-1).to(torch.uint8).argmax(1)


def first_tokens(starts: Iterable[SequenceStart], key: Tensor, unknown: Tensor, dropped: int = 0) -> Tensor:
    """Return the first token of each sequence of a cache, [batch].

    A sequence is recognised at its own place in the batch, of the last cache that began like it; else at another
    place, as after `reorder_cache`.

    Args:
        starts: starts of caches.
        key: keys of the cache.
        unknown: the first token of a sequence that began like none, [batch or 1].
        dropped: number of keys before them that the cache has dropped.
    """
    elsewhere = unknown.expand(key.shape[0])
    own, is_own = elsewhere, torch.zeros_like(elsewhere, dtype=torch.bool)
    for start in starts:
        if not len(start.first) or start.key.shape[1:] != (key.shape[1], key.shape[3]):
            continue
        which = start.like(key, dropped)
        elsewhere = torch.where(start.is_of(key, which, dropped), start.first[which], elsewhere)
        if len(start.first) == len(key):
            is_at_place = start.is_of(key, torch.arange(len(key), device=key.device), dropped)
            own, is_own = torch.where(is_at_place, start.first, own), is_own | is_at_place
    return torch.where(is_own, own, elsewhere)


def _keys_at(key: Tensor, index: Tensor) -> Tensor:
    rows = torch.arange(key.shape[0], device=key.device)
    return key.detach()[rows, :, index.clamp(0, max(key.shape[2] - 1, 0))]


def located(call: AttentionCall, starts: dict[str, deque[SequenceStart]], site: str) -> AttentionCall:
    """Return a call whose dense mask has the positions of its tokens, which the tensor does not show.

    Positions count from the first token that is not padding. With fewer queries than keys, keys come from a cache: a
    query is at its last visible key, or the queries are the last of the visible keys if these are the same for all.
    Where a sequence starts is known from the call that began its cache. Of a cache that another call began, the mask
    shows it: sequences that start later than others of the batch are padded.

    Args:
        call: a call.
        starts: starts of the sequences of the last caches, by site, for the calls that follow; updated.
        site: name of the call's site.
    """
    mask, batch, queries, keys = call.mask, call.query.shape[0], call.query.shape[2], call.key.shape[2]
    if call.cross or not batch or not keys:
        return call
    index, caches = torch.arange(keys, device=call.query.device), starts.setdefault(site, deque(maxlen=CACHES))
    is_dense = mask is not None and len(mask.allowed) + len(mask.biases) > 0
    if queries >= keys:
        non_padding = Tokens.of(mask, call.query, call.key).non_padding() if is_dense else None
        is_known = non_padding is None or is_readable(non_padding)
        is_padded = non_padding is not None and not (is_known and bool(non_padding.all()))
        first = index[:1] if non_padding is None else torch.where(non_padding, index, keys).amin(-1)
        caches.append(SequenceStart.of(first, call.key, is_padded=is_padded))
        if is_padded and is_known:
            return replace(call, mask=with_positions(mask, non_padding))
        marked, of_statistics = with_documents(mask, queries, keys)
        return replace(call, mask=marked if of_statistics is None else of_statistics)
    if not is_dense:
        if not any(start.is_padded for start in caches):
            return call
        first = first_tokens(caches, call.key, index[:1])
        return replace(call, mask=_placed(mask, index[None, keys - queries :], first[:, None], index))
    assert mask is not None
    mask, tokens = located_in_cache(mask, call.query, call.key, caches)
    return replace(call, mask=mask, tokens=tokens)


def is_dense(mask: Mask) -> bool:
    """Return whether a mask consists of dense terms alone, which do not show the positions of tokens in a cache."""
    return not mask.is_everything and replace(mask, allowed=(), biases=()).is_everything


def located_in_cache(
    mask: Mask,
    query: Tensor,
    key: Tensor,
    caches: deque[SequenceStart],
    *,
    offset: int | Tensor | None = None,
    dropped: int = 0,
) -> tuple[Mask, Tensor]:
    """Return a dense mask with the positions of its tokens, and which queries are tokens, [batch, queries].

    Args:
        mask: mask of a call with fewer queries than keys.
        query: queries of the call.
        key: keys of the cache.
        caches: starts of sequences in caches of the site; updated.
        offset: index of the first query among the keys; None: as the mask shows.
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
            is_causal = (offsets == offset).sum(-1, keepdim=True) > 1
            offset = torch.where(is_causal, offset, (last.amax(-1, keepdim=True) - (queries - 1)).clamp_min(0))
    else:
        if not isinstance(offset, Tensor):
            offset = torch.full((1, 1), offset, device=query.device)
        offset = offset.to(query.device).view(1, 1)
    positions = index[:queries] + offset.clamp_min(0)
    shown_first = torch.where(is_shown, index, keys).amin(-1)
    # All later than the first key: that may be a window, unless the cache has dropped what is outside of it.
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
    """Add positions of queries, by key index, to a mask; keys before the first token, [batch or 1, 1], are padding.

    They are not hidden if `hide` is False: rows that a finite bias hides attend to them.
    """
    of_keys = index - first
    of_keys = of_keys.clamp_min(-1) if hide else torch.where(of_keys < 0, of_keys + 2 * len(index), of_keys)
    placed = Mask.positions(positions - first, of_keys)
    return placed if mask is None else mask & placed


def sequence_start(mask: Mask, key: Tensor) -> SequenceStart:
    """Return the start of the sequences of a cache that begins with these keys, under a dense mask."""
    index, is_shown = torch.arange(key.shape[2], device=key.device), _visible_keys(mask).any(1)
    return SequenceStart.of(torch.where(is_shown, index, len(index)).amin(-1), key)


def _visible_keys(mask: Mask) -> Tensor:
    """Return the keys that the dense terms of a mask show to any head, [batch or 1, queries or 1, keys]."""
    return reduce(operator.and_, dense_terms(mask)).any(1)


def locate_sinks(call: Call, tokens: Tokens, dropped: int, first: Tensor | None) -> None:
    """Set which of the first keys a sliding-window cache still holds, of sequences whose first tokens are `first`."""
    if first is None:  # padding that the cache still holds shows the first token
        first = tokens.first_token()
        first = torch.where(first > 0, first + dropped, 0)
    assert call.requested is not None
    if call.requested.sink_keys == 1:
        call.sinks_in_view = (first >= dropped).expand(tokens.batch)
    elif call.mask is None or call.mask.placed is None:
        index = torch.arange(tokens.keys, device=tokens.device) + dropped - first[:, None]
        placed = Mask.positions(index[:, tokens.keys - tokens.queries :], index.clamp_min(-1))
        call.mask = placed if call.mask is None else call.mask & placed
