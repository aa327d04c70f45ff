"""The mask function: what transformers says of a mask, as a description wherever it can be described.

transformers hands over a function (batch, head, query, key) -> bool, put together from a few known ones, and the 2-D
mask of the padding. The known ones are recognised by their code and read; anything else is evaluated for every pair
by transformers itself, so that nothing a caller asked for is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.integrations.huggingface.described_masks import DescribedMask
from polyhead.masks import Mask


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a mask function of transformers says, read out of it."""

    left: int | None = None
    right: int | None = None
    chunks: tuple[tuple[int, Tensor], ...] = ()  # their size, and how many tokens of padding stand first [batch]
    documents: tuple[Tensor, ...] = ()  # ids [batch, tokens]
    padding: tuple[Tensor, ...] = ()  # True = real, [batch, tokens]


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the queries and keys of one call stand among all tokens."""

    batch: int
    queries: int
    keys: int
    query_offset: int | Tensor
    key_offset: int
    device: torch.device

    @property
    def ends_together(self) -> bool:
        """Whether the last query stands beside the last key, which is what a `Mask` assumes unless told otherwise."""
        if isinstance(self.query_offset, Tensor):
            return False
        return self.query_offset + self.queries == self.key_offset + self.keys

    @property
    def same_tokens(self) -> bool:
        return self.ends_together and self.queries == self.keys

    def query_index(self) -> Tensor:
        return torch.arange(self.queries, device=self.device) + self.query_offset

    def key_index(self) -> Tensor:
        return torch.arange(self.keys, device=self.device) + self.key_offset


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The registered mask function, called by `transformers.masking_utils` with these names.

    Returns a `DescribedMask`, or None where nothing is hidden and the caller allows it. A mask that cannot be described
    holds its booleans, [batch, 1, queries, keys]. Inside a graph that is being compiled or traced it is the plain
    tensor that eager gets.
    """
    # By name: the compiler of PyTorch 2.11 cannot look into transformers' lazy package.
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    if mask_function is None:
        mask_function = causal_mask_function
    if device is None:  # some versions leave it to be found out
        told = [x.device for x in (attention_mask, q_offset) if isinstance(x, Tensor)]
        device = told[0] if told else "cpu"
    device = torch.device(device)
    sizes = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
    }
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return eager_mask(**sizes, dtype=dtype, allow_is_bidirectional_skip=allow_is_bidirectional_skip, **kwargs)
    pattern = read_pattern(mask_function)
    description = None
    if pattern is not None:
        places = Places(batch_size, q_length, kv_length, q_offset, kv_offset, device)
        description = describe(pattern, places, attention_mask)
    if description is None:
        # Without its leave to skip, transformers evaluates the function for every pair.
        description = Mask.dense(sdpa_mask(**sizes, allow_is_causal_skip=False))
    if description.is_everything and allow_is_bidirectional_skip:
        return None
    return DescribedMask(description, (batch_size, 1, q_length, kv_length), dtype, device)


@cache
def _known() -> dict[CodeType, str]:
    """The code of every mask function that can be read, and the name of the function that makes it."""
    from transformers import masking_utils

    some = torch.zeros(1, 1, dtype=torch.int64)
    makers: dict[str, tuple[Any, ...]] = {
        "and_masks": (masking_utils.causal_mask_function,),
        "sliding_window_overlay": (1,),
        "sliding_window_bidirectional_overlay": (1,),
        "chunked_overlay": (1, some[0]),
        "packed_sequence_mask_function": (some,),
        "padding_mask_function": (some,),
    }
    found = {name: getattr(masking_utils, name)(*arguments) for name, arguments in makers.items()}
    found["causal_mask_function"] = masking_utils.causal_mask_function
    found["bidirectional_mask_function"] = masking_utils.bidirectional_mask_function
    return {function.__code__: name for name, function in found.items()}


def read_pattern(mask_function: Callable[..., Any]) -> Pattern | None:
    """What a mask function says; None where it is not one of those we know."""
    code = getattr(mask_function, "__code__", None)
    name = None if code is None else _known().get(code)
    if code is None or name is None:
        return None
    cells = getattr(mask_function, "__closure__", None) or ()
    held = {variable: cell.cell_contents for variable, cell in zip(code.co_freevars, cells, strict=True)}
    try:
        match name:
            case "causal_mask_function":
                return Pattern(right=0)
            case "bidirectional_mask_function":
                return Pattern()
            case "sliding_window_overlay":
                return Pattern(left=int(held["sliding_window"]) - 1)
            case "sliding_window_bidirectional_overlay":
                return Pattern(left=int(held["sliding_window"]), right=int(held["sliding_window"]))
            case "chunked_overlay":
                return Pattern(chunks=((int(held["chunk_size"]), held["left_padding"]),))
            case "packed_sequence_mask_function":
                return Pattern(documents=(held["packed_sequence_mask"],))
            case "padding_mask_function":
                return Pattern(padding=(held["padding_mask"],))
            case _:
                patterns = [read_pattern(part) for part in held["mask_functions"]]
    except KeyError:  # another version of transformers names its variables otherwise
        return None
    return _all_of([pattern for pattern in patterns if pattern is not None]) if None not in patterns else None


def _all_of(patterns: list[Pattern]) -> Pattern:
    lefts = [pattern.left for pattern in patterns if pattern.left is not None]
    rights = [pattern.right for pattern in patterns if pattern.right is not None]
    return Pattern(
        left=min(lefts) if lefts else None,
        right=min(rights) if rights else None,
        chunks=tuple(term for pattern in patterns for term in pattern.chunks),
        documents=tuple(term for pattern in patterns for term in pattern.documents),
        padding=tuple(term for pattern in patterns for term in pattern.padding),
    )


def describe(pattern: Pattern, places: Places, attention_mask: Tensor | None) -> Mask | None:
    """The pattern and the padding as one mask; None where our masks have no words for it."""
    if pattern.left is not None and pattern.left < 0:
        return None  # a window of no keys at all
    mask = Mask(left=pattern.left, right=pattern.right)
    stated = not places.ends_together and (mask.left is not None or mask.right is not None)
    for ids in pattern.documents:
        if not places.same_tokens or places.key_offset or ids.shape[-1] != places.keys:
            return None
        mask = mask & Mask.documents(ids)
    for size, left_padding in pattern.chunks:
        key_ids, query_ids = (
            (index - left_padding[:, None]) // size for index in (places.key_index(), places.query_index())
        )
        if places.same_tokens:
            mask = mask & Mask.documents(key_ids)
        else:
            mask, stated = mask & Mask.documents(query_ids, key_ids), True
    real = None
    for term in (attention_mask, *pattern.padding):
        if term is not None:
            local = _local(term.to(device=places.device, dtype=torch.bool), places)
            real = local if real is None else real & local
    if stated:
        return mask & _stated(places, real)
    return mask if real is None else mask & _padding(real, places, causal=mask.right == 0)


def _local(real: Tensor, places: Places) -> Tensor:
    """The part of a 2-D mask that speaks of the keys of this call; keys beyond its end are not there yet."""
    missing = places.key_offset + places.keys - real.shape[-1]
    real = F.pad(real, (0, missing)) if missing > 0 else real
    return real[:, places.key_offset : places.key_offset + places.keys]


def _stated(places: Places, real: Tensor | None) -> Mask:
    """Every token's place said outright, counted from the first real token; hidden keys stand at -1."""
    queries, keys = places.query_index()[None], places.key_index()[None]
    if real is not None:
        first = torch.where(real, keys, keys[:, -1:] + 1).amin(-1, keepdim=True)
        queries, keys = queries - first, torch.where(real, keys - first, -1)
    return Mask.positions(queries, keys)


def _padding(real: Tensor, places: Places, *, causal: bool) -> Mask:
    """Padding in the form that costs least. Reads the mask once a forward, as transformers does for sdpa."""
    everything, right, left = _shape_of_padding(real)
    if everything:
        return Mask()
    lengths = real.sum(-1)
    if right and causal and places.same_tokens:
        # The queries beyond the end are hidden too: no real token of a causal model ever reads what they compute.
        return Mask.lengths(lengths)
    if left:
        # Every query stays: an encoder's padded rows may be read by a convolution, as they are under eager.
        queries = torch.full(lengths.shape, places.queries, dtype=lengths.dtype, device=lengths.device)
        return Mask.lengths(lengths, queries=queries, side="left")
    return Mask.dense(real[:, None, None, :])


def _shape_of_padding(real: Tensor) -> tuple[bool, bool, bool]:
    """Whether nothing is hidden, whether all that is hidden stands on the right, and on the left."""
    if real.is_meta or (real.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False, False, False  # there is nothing to read, or nobody may wait for it
    step = real[:, 1:].to(torch.int8) - real[:, :-1].to(torch.int8)
    everything, right, left = torch.stack([real.all(), (step <= 0).all(), (step >= 0).all()]).tolist()
    return everything, right, left
