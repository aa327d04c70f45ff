"""Find the padding rows of an attention call from its mask, and correct row statistics for keys masked by a bias."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.masks import Mask, is_readable
from polyhead.ops.attention import RowStatistics
from polyhead.ops.common.visibility import resolve

# Models mask with -inf, the minimum of a dtype, -1e9 or -1e4 (-9984 in bfloat16); exp(-9000) is 0 in every dtype.
MASKING_BIAS = -9e3
_STORED_PAIRS = 1 << 26  # pairs of a query and a key whose visibility is in memory at a time


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Mask and sizes of one self-attention call, from which its padding rows are derived on demand."""

    mask: Mask | None
    batch: int
    queries: int
    keys: int
    device: torch.device

    @classmethod
    def of(cls, mask: Mask | None, query: Tensor, key: Tensor) -> Tokens:
        return cls(mask, query.shape[0], query.shape[2], key.shape[2], query.device)

    def non_padding(self) -> Tensor | None:
        """Return [batch or 1, queries], False for padding; None without padding. Does not synchronise with the device.

        Padding tokens are identified by their keys, which are masked for all queries; as queries they need not be
        masked, and in encoders they still attend to other tokens. A dense mask with fewer queries than keys does not
        determine which keys belong to the queries: there, every row with a visible key counts.
        """
        mask = self.mask
        if mask is None or self.keys < self.queries:
            return None
        terms = []
        for padding in mask.padding:
            if padding.side == "left" or self.queries == self.keys:
                terms.append(self._at_queries(_length_mask(padding.keys, self.keys, padding.side, self.device)))
            if padding.queries is not None:
                terms.append(_length_mask(padding.queries, self.queries, padding.side, self.device))
        terms += [documents.queries.to(self.device, non_blocking=True) >= 0 for documents in mask.packed]
        if mask.placed is not None:
            terms.append(self._at_queries(mask.placed[1].to(self.device, non_blocking=True) >= 0))
        for allowed in dense_terms(mask):
            if allowed.shape[2] == 1 or self.queries == self.keys:
                terms.append(self._at_queries(allowed.any(1).any(1)))
        return reduce(operator.and_, terms) if len(terms) else None

    def first_token(self) -> Tensor:
        """Return the index of the first non-padding key, [batch or 1]."""
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        if self.mask is None:
            return first
        for padding in self.mask.padding:
            if padding.side == "left":
                first = torch.maximum(first, self.keys - padding.keys.to(self.device, non_blocking=True))
        key_masks = [] if self.mask.placed is None else [self.mask.placed[1].to(self.device, non_blocking=True) >= 0]
        key_masks += [allowed.any(1).any(1) for allowed in dense_terms(self.mask)]
        for keys in key_masks:
            first = torch.maximum(first, keys.to(torch.uint8).argmax(-1))
        return first

    def _at_queries(self, key_values: Tensor) -> Tensor:
        """Select from per-key values [batch or 1, keys] those of the query tokens."""
        mask, keys = self.mask, self.keys
        if mask is None or mask.placed is None or not keys:
            return key_values[:, keys - self.queries :]
        query_at, key_at = (x.to(self.device, non_blocking=True) for x in mask.placed)
        rows = max(x.shape[0] for x in (key_values, query_at, key_at))
        if len(mask.packed):
            # Positions may start anew in each document, so tokens are compared by both.
            for documents in mask.packed:
                ids = (documents.queries, documents.queries if documents.keys is None else documents.keys)
                query_ids, key_ids = (x.to(self.device, non_blocking=True) for x in ids)
                step = torch.maximum(query_at.amax(), key_at.amax()) + 1
                query_at = torch.where((query_at >= 0) & (query_ids >= 0), query_at + query_ids * step, -1)
                key_at = torch.where((key_at >= 0) & (key_ids >= 0), key_at + key_ids * step, -1)
            rows = max(rows, query_at.shape[0], key_at.shape[0])
            ordered, order = key_at.expand(rows, -1).sort(dim=-1)
            query_at = query_at.expand(rows, -1).contiguous()
            nearest = torch.searchsorted(ordered, query_at).clamp_max(keys - 1)
            is_token = (query_at >= 0) & (ordered.gather(1, nearest) == query_at)
            return is_token & key_values.expand(rows, -1).gather(1, order.gather(1, nearest))
        # Key positions are consecutive, so positions modulo their number are distinct; -1 gets a separate slot.
        query_slots, key_slots = (torch.where(x >= 0, x % keys, keys).expand(rows, -1) for x in (query_at, key_at))
        slots = torch.zeros(rows, keys + 1, dtype=torch.bool, device=self.device)
        slots = slots.scatter(1, key_slots, key_values.expand(rows, -1))
        slots[:, keys:].zero_()
        return slots.gather(1, query_slots)


def dense_terms(mask: Mask) -> list[Tensor]:
    """Return the dense terms of a mask as booleans; a bias hides a key by -inf or a large negative number."""
    return [*mask.allowed, *(bias.detach() > MASKING_BIAS for bias in mask.biases)]


def non_padding_rows(tokens: Tokens | Tensor | None) -> Tensor | None:
    """Return the mask of non-padding rows, [batch or 1, queries], which `tokens` is or determines."""
    return tokens.non_padding() if isinstance(tokens, Tokens) else tokens


def with_positions(mask: Mask | None, non_padding: Tensor | None) -> Mask | None:
    """Return a mask whose positions count from the first non-padding token, which a dense mask lacks."""
    if mask is None or non_padding is None or mask.placed is not None or len(mask.packed):
        return mask
    index = torch.arange(non_padding.shape[1], device=non_padding.device)
    first = torch.where(non_padding, index, len(index)).amin(-1, keepdim=True)
    return mask & Mask.positions(index - first, torch.where(non_padding, index - first, -1))


def with_documents(mask: Mask | None, queries: int, keys: int) -> tuple[Mask | None, Mask | None]:
    """Return a mask that marks the documents of its dense terms, of which `sink_mass` counts the first keys.

    A document begins at a token where no later query sees an earlier key and no earlier query a later one, as between
    the images of a block-diagonal mask or after padding on the left. Pairs that the mask shows stay visible. Reads
    values, without waiting for a device. A row that a finite bias hides attends to all keys, which documents would
    change: then the mask of the call marks none, and the statistics of other rows need a mask of their own.

    Args:
        mask: mask of a self-attention call.
        queries: number of queries.
        keys: number of keys.

    Returns:
        The mask of the call, and that of its statistics where it may differ, else None.
    """
    if mask is None or queries != keys or len(mask.packed) or mask.placed is not None or len(mask.padding):
        return mask, None
    terms = [*mask.allowed, *mask.biases]
    if not len(terms) or torch.compiler.is_compiling():
        return mask, None
    if terms[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return mask, None
    index = torch.arange(keys, device=terms[0].device)
    if any(x.shape[2] > 1 for x in terms):
        visible = _visible_pairs(mask, queries, keys, index)  # [batch or 1, queries, keys]
        starts, shown = _document_starts(visible, index), visible.any(1)
    else:
        shown = reduce(operator.and_, (x.any(1)[:, 0] for x in dense_terms(mask)))  # [batch or 1, keys]
        starts = torch.zeros_like(shown)
    # Queries of padding may see tokens after it, as in an encoder; only the statistics, without them, may be cut there.
    after_padding = (index == shown.to(torch.uint8).argmax(-1, keepdim=True)) & shown & (index > 0) & ~starts
    marked = starts | after_padding
    is_needed = marked.any()
    if is_readable(is_needed) and not bool(is_needed):
        return mask, None
    of_statistics = mask & Mask.documents(marked.cumsum(-1))
    largest = [x.amax(-1) for x in mask.biases]
    hidden_rows = [((x <= MASKING_BIAS) & (x > -torch.inf)).any() for x in largest]
    hides_rows = torch.stack(hidden_rows).any() if len(hidden_rows) else torch.zeros_like(is_needed)
    if is_readable(is_needed):
        is_shared = bool(starts.any()) and not bool(hides_rows)  # whether documents leave the output as it is
        of_call = mask & Mask.documents(starts.cumsum(-1)) if is_shared else mask
        return of_call, None if is_shared and not bool(after_padding.any()) else of_statistics
    # A term that is the same for all sequences but not for all heads is a bias of positions, and hides no row or key.
    may_hide = any(x.shape[0] > 1 or x.shape[1] == 1 for x in terms)
    return mask & Mask.documents((starts & ~hides_rows).cumsum(-1)), of_statistics if may_hide else None


def _document_starts(visible: Tensor, index: Tensor) -> Tensor:
    """Return the tokens at which documents begin, [batch or 1, keys]."""
    keys, is_row = len(index), visible.any(-1)
    # Rows without keys constrain nothing.
    first = torch.where(is_row, visible.to(torch.uint8).argmax(-1), keys)
    last = torch.where(is_row, keys - 1 - visible.flip(-1).to(torch.uint8).argmax(-1), -1)
    earliest = first.flip(-1).cummin(-1).values.flip(-1)
    latest = F.pad(last.cummax(-1).values[:, :-1], (1, 0), value=-1)
    starts = (earliest >= index) & (latest < index)
    # Not within padding, which nobody sees: there every token would be a start.
    return starts & (earliest < keys) & (index > 0)


def _visible_pairs(mask: Mask, queries: int, keys: int, index: Tensor) -> Tensor:
    visible = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=index.device)
    for allowed in dense_terms(mask):
        visible = visible & allowed.any(1, keepdim=True)
    offset = index - index[:, None]
    if mask.left is not None:
        visible = visible & (offset >= -mask.left)
    if mask.right is not None:
        visible = visible & (offset <= mask.right)
    return visible[:, 0]


def hidden_by_bias(mask: Mask | None, shape: Sequence[int]) -> Tensor | None:
    """Return the number of keys that a finite bias masks, [batch or 1, heads or 1, queries or 1].

    Such a bias gives a weight of zero, but the key is still counted in `visible_keys`. Keys that another part of the
    mask hides are not: they are not counted there.

    Args:
        mask: mask of a call.
        shape: batch, heads and queries of the call.
    """
    if mask is None or not len(mask.biases):
        return None
    biases = [bias.detach() for bias in mask.biases]
    if len(biases) == 1 and replace(mask, biases=()).is_everything:
        return ((biases[0] <= MASKING_BIAS) & (biases[0] != -torch.inf)).sum(-1)
    (batch, heads, queries), keys = shape, biases[0].shape[-1]
    visibility = resolve(mask, batch=batch, heads=heads, queries=queries, keys=keys, device=biases[0].device)
    assert visibility is not None

    def count(start: int, stop: int) -> Tensor:
        visible = visibility.allowed_tile((start, stop), (0, keys))
        assert visible is not None
        low = [(x if x.shape[2] == 1 else x[:, :, start:stop]) <= MASKING_BIAS for x in biases]
        return (visible & reduce(operator.or_, low)).sum(-1)

    if torch.compiler.is_compiling():  # a loop over rows would compile the code for one number of them
        return count(0, queries)
    maps = batch * max(x.shape[1] for x in (*biases, *mask.allowed))
    step = max(1, _STORED_PAIRS // max(1, maps * keys))
    return torch.cat([count(start, min(start + step, queries)) for start in range(0, max(queries, 1), step)], 2)


def corrected(rows: RowStatistics, hidden: Tensor | None, sinks_in_view: Tensor | None) -> RowStatistics:
    """Subtract keys masked by a bias (`hidden_by_bias`), and zero `sink_mass` where [batch] is False."""
    if sinks_in_view is not None and rows.sink_mass is not None:
        rows = replace(rows, sink_mass=torch.where(sinks_in_view[:, None, None], rows.sink_mass, 0.0))
    if hidden is not None and rows.visible_keys is not None:
        rows = replace(rows, visible_keys=rows.visible_keys - hidden)
    return rows


def _length_mask(lengths: Tensor, size: int, side: str, device: torch.device) -> Tensor:
    lengths = lengths.to(device, non_blocking=True)[:, None]
    index = torch.arange(size, device=device)
    return index < lengths if side == "right" else index >= size - lengths


def matching_tokens(tokens: Tokens | Tensor | None, queries: Tokens | Tensor | None) -> Tokens | Tensor | None:
    """Return the tokens of an earlier call if their shape matches the queries of this one, else None."""
    if tokens is None or not isinstance(queries, Tokens):
        return None
    sizes = (tokens.batch, tokens.queries) if isinstance(tokens, Tokens) else tuple(tokens.shape)
    return tokens if sizes == (queries.batch, queries.queries) else None
