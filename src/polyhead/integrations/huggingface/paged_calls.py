"""Attention calls of transformers' continuous batching: sequences packed in one row, keys in a paged cache.

The model's own attention function computes the output. If the call is observed, statistics are computed in a second
pass over the same queries and the keys that the cache returned, sequence by sequence; single queries of sequences of
similar lengths are one batch. Lengths are read on the host, once per observed step. Tokens that are computed again,
since a full cache had evicted their request, are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.integrations.huggingface.arguments import refuse_unknown
from polyhead.integrations.huggingface.attention import WATCHERS
from polyhead.integrations.huggingface.evicted_requests import REPEATED
from polyhead.masks import Mask
from polyhead.ops.attended import Attended
from polyhead.ops.attention import attention
from polyhead.ops.common.gates import gate_factors

# Arguments of continuous batching that do not change what attention computes from the keys of the cache.
_PAGED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "read_index", "write_index", "block_table")
_OTHERS = ("cache", "logits_indices", "logits_processor_args", "is_causal", "dropout")
_USED = ("scaling", "softcap", "s_aux", "sliding_window", "position_ids")


@contextmanager
def observed_implementation(name: str) -> Iterator[None]:
    """Pass the paged calls of an attention implementation of transformers to the observers of their modules."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS[name]
    observed = partial(attend_paged, name, function)
    AttentionInterface.register(name, observed)
    try:
        yield
    finally:
        if ALL_ATTENTION_FUNCTIONS[name] is observed:  # keep what was registered meanwhile
            AttentionInterface.register(name, function)


def attend_paged(
    name: str,
    function: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *positional: Any,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call an attention function of transformers; report the call if its module is observed and the cache is paged."""
    begin, cache = WATCHERS.get(module), keywords.get("cache")
    if begin is None or cache is None:
        return function(module, query, key, value, attention_mask, *positional, **keywords)
    update = _RecordedUpdate(cache)
    with update.recording():
        output, weights = function(module, query, key, value, attention_mask, *positional, **keywords)
    sinks = keywords.get("s_aux")
    # All rows are tokens; the mask only says that this is self-attention.
    watched = begin(module, query, update.key, Mask.causal(), learned_sinks=sinks is not None)
    if watched is None:
        return output, weights
    if watched.requested is not None:
        _check_arguments(name, module, cache, update.keywords, keywords, positional)
        scale, softcap = keywords.get("scaling"), keywords.get("softcap")
        sinks = None if sinks is None else sinks.reshape(-1)
        for part in _parts(module, cache, update.keywords, keywords):
            selected = part.queries(query), part.keys(update.key), part.keys(update.value)
            result = attention(
                *selected[:2],
                selected[2][..., :1],  # the statistics need no values
                mask=part.mask,
                scale=scale,
                softcap=softcap,
                sinks=sinks,
                statistics=watched.requested,
            )
            rows = result.statistics
            if rows is not None and rows.sink_mass is not None and part.sinks_in_view is not None:
                mass = torch.where(part.sinks_in_view[:, None, None], rows.sink_mass, 0.0)
                result = replace(result, statistics=replace(rows, sink_mass=mass))
            watched.notify(Attended(*selected, result, part.mask, scale, softcap, sinks))
    if watched.gate is not None:
        factors = gate_factors(watched.gate, 1, query.shape[1], query.shape[2])
        output = output * factors.transpose(1, 2).to(output.dtype)
    return output, weights


class _RecordedUpdate:
    """The keys and values that a paged cache returns in one attention call, and the arguments that it resolves."""

    key: Tensor
    value: Tensor
    keywords: Mapping[str, Any]

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @contextmanager
    def recording(self) -> Iterator[None]:
        update = self.cache.update

        def recorded(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.key, self.value = result = update(*args, **kwargs)
            self.keywords = kwargs["kwargs"]
            return result

        self.cache.__dict__["update"] = recorded
        try:
            yield
        finally:
            del self.cache.__dict__["update"]
        if not hasattr(self, "key"):
            raise OptionError("continuous batching is observed where attention updates its paged cache, got no update")


def _check_arguments(
    name: str,
    module: nn.Module,
    cache: Any,
    resolved: Mapping[str, Any],
    keywords: dict[str, Any],
    positional: tuple[Any, ...],
) -> None:
    if len(positional):
        raise OptionError(f"attention functions must be called with keywords, got {len(positional)} more values")
    refuse_unknown({x: value for x, value in keywords.items() if x not in (*_PAGED, *_OTHERS, *_USED)})
    if resolved.get("block_table") is not None:
        raise OptionError(
            "continuous batching is observed without block tables, got one; initialize it inside the session"
        )
    if keywords.get("softcap") is not None and "flash" not in name:
        raise OptionError(
            f"transformers' {name} ignores the softcap of {type(module).__name__} in continuous batching, got "
            f"{keywords['softcap']}; use a flash attention implementation"
        )
    window, cache_window = keywords.get("sliding_window"), _window(module, cache)
    if window is not None and int(window) != cache_window:
        raise OptionError(f"the layer and its cache must have the same sliding window, got {window} and {cache_window}")


def _window(module: nn.Module, cache: Any) -> int | None:
    window = getattr(cache.layer_to_allocator[module.layer_idx], "sliding_window", None)
    return None if window is None else int(window)


# ---- sequences of a step


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Sequences of one packed row that are computed together: one, or several of a single query each."""

    query_index: slice | Tensor  # of tensors: [sequences, 1]
    key_index: slice | Tensor  # [sequences, longest], with the keys of each at its end
    mask: Mask
    sinks_in_view: Tensor | None  # [sequences]; False where a sliding window has dropped the first keys

    def queries(self, x: Tensor) -> Tensor:
        """Return [sequences, heads, queries, head_dim] of a packed [1, heads, tokens, head_dim]."""
        return _selected(x, self.query_index)

    def keys(self, x: Tensor) -> Tensor:
        """Return [sequences, kv_heads, keys, head_dim] of packed keys or values."""
        return _selected(x, self.key_index)


def _selected(x: Tensor, index: slice | Tensor) -> Tensor:
    return x[:, :, index] if isinstance(index, slice) else x[0][:, index].transpose(0, 1)


# By cache: the cumulative lengths of a step, a tensor that each step makes anew, and the parts by kind of layer.
_STEPS: WeakKeyDictionary[Any, tuple[Tensor, dict[str, list[_Part]]]] = WeakKeyDictionary()


def _parts(module: nn.Module, cache: Any, resolved: Mapping[str, Any], keywords: Mapping[str, Any]) -> list[_Part]:
    """Return the sequences of the current step, as all layers with the same kind of cache attend to them."""
    ends, layer_type = keywords["cu_seq_lens_q"], cache.layer_to_allocator[module.layer_idx].layer_type
    step = _STEPS.get(cache)
    if step is None or step[0] is not ends:
        step = _STEPS[cache] = ends, {}
    parts = step[1].get(layer_type)
    if parts is None:
        window = _window(module, cache)
        positions = None if window is None else _positions(keywords.get("position_ids"))
        key_ends, repeated = resolved["cu_seq_lens_k"].tolist(), REPEATED.get(cache, [])
        parts = _split(ends.tolist(), key_ends, repeated, window, positions, ends.device)
        step[1][layer_type] = parts
    return parts


def _positions(position_ids: Any) -> list[int]:
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        got = list(position_ids.shape) if isinstance(position_ids, Tensor) else type(position_ids).__name__
        raise OptionError(f"layers with a sliding window need position_ids [1, tokens], got {got}")
    positions: list[int] = position_ids[0].tolist()
    return positions


def _split(
    ends: list[int],
    key_ends: list[int],
    repeated: list[int],
    window: int | None,
    positions: list[int] | None,
    device: torch.device,
) -> list[_Part]:
    """Return the parts of a row, from the cumulative lengths of its queries and keys, without repeated queries.

    Single queries are grouped by the binary logarithm of their number of keys, so that less than half is padding.
    """
    mask = Mask.causal() if window is None else Mask.window(window)
    parts: list[_Part] = []
    single: dict[int, list[tuple[int, int, int, bool]]] = defaultdict(list)
    skipped = [*repeated, *[0] * (len(ends) - 1 - len(repeated))]
    starts_of_new = (start + skip for start, skip in zip(ends, skipped, strict=False))
    for start, end, key_start, key_end in zip(starts_of_new, ends[1:], key_ends, key_ends[1:], strict=False):
        keys = key_end - key_start
        is_complete = positions is None or positions[end - 1] < keys
        if end - start == 1:
            single[keys.bit_length()].append((start, key_end, keys, is_complete))
        elif end > start:
            in_view = None if is_complete else torch.zeros(1, dtype=torch.bool, device=device)
            parts.append(_Part(slice(start, end), slice(key_start, key_end), mask, in_view))
    for group in single.values():
        starts, stops, lengths, complete = (torch.tensor(x, device=device) for x in zip(*group, strict=True))
        longest = max(keys for _, _, keys, _ in group)
        index = (stops[:, None] - longest + torch.arange(longest, device=device)).clamp_min(0)
        padded = mask if len(group) == 1 else mask & Mask.lengths(lengths, side="left")
        in_view = None if all(x for *_, x in group) else complete
        parts.append(_Part(starts[:, None], index, padded, in_view))
    return parts or [_Part(slice(0), slice(0), mask, None)]  # no rows
