"""Mask function for transformers: converts its mask functions to `polyhead.Mask` descriptions where possible.

transformers passes a function (batch, head, query, key) -> bool, composed of a few known ones, and the 2-D padding
mask. Known functions are recognised by their code objects and their closures are read; any other function is evaluated
for every pair by transformers itself, so that no constraint is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.integrations.huggingface.described_masks import DescribedMask
from polyhead.masks import Mask

# By id of a config: the implementation that it selects outside of the session that has switched it to polyhead's. Masks
# are those of that implementation: of sdpa, they are boolean, and none where `is_causal` of the module stands for it.
ORIGINALS: dict[int, str] = {}


@dataclass(frozen=True, slots=True)
class Pattern:
    """Constraints of a transformers mask function, extracted from its closure."""

    left: int | None = None
    right: int | None = None
    chunks: tuple[tuple[int, Tensor], ...] = ()  # chunk size, and number of left padding tokens [batch]
    documents: tuple[Tensor, ...] = ()  # ids [batch, tokens]
    padding: tuple[Tensor, ...] = ()  # False for padding, [batch, tokens]


@dataclass(frozen=True, slots=True, eq=False)
class CallPositions:
    """Sizes of one call, and the positions of its queries and keys in the sequence."""

    batch: int
    queries: int
    keys: int
    query_offset: int | Tensor
    key_offset: int
    device: torch.device

    @property
    def is_end_aligned(self) -> bool:
        """True if the last query is aligned with the last key, the default of `Mask`."""
        if isinstance(self.query_offset, Tensor):
            return False
        return self.query_offset + self.queries == self.key_offset + self.keys

    @property
    def same_tokens(self) -> bool:
        return self.is_end_aligned and self.queries == self.keys

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
    """Build the mask of one call; registered mask function, called by `transformers.masking_utils`.

    Returns a `DescribedMask`, or None if nothing is masked and the caller allows it. A mask function that is not
    recognised is stored as a dense boolean mask [batch, 1, queries, keys]. While compiling or tracing, it returns the
    plain tensor of eager attention. In a session on a model that uses sdpa, it returns None where transformers does
    for sdpa, which leaves the mask to `is_causal` of the attention module, and its values are boolean.
    """
    # Imported by name: the compiler of PyTorch 2.11 cannot resolve attributes of transformers' lazy package.
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    if mask_function is None:
        mask_function = causal_mask_function
    if device is None:  # some versions do not pass it
        devices = [x.device for x in (attention_mask, q_offset) if isinstance(x, Tensor)]
        device = devices[0] if devices else "cpu"
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
    original = ORIGINALS.get(id(kwargs.get("config")), "")
    if original == "sdpa":
        # Whether sdpa has no mask does not depend on the function; this one's values are views of one element.
        skipped = sdpa_mask(
            **{**sizes, "mask_function": _everything, "use_vmap": False},
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            **kwargs,
        )
        if skipped is None:
            return None
        dtype = torch.bool
    pattern = read_pattern(mask_function)
    description = None
    if pattern is not None:
        positions = CallPositions(batch_size, q_length, kv_length, q_offset, kv_offset, device)
        description = describe(pattern, positions, attention_mask, keeps_rows=original in ("sdpa", "eager"))
    if description is None:
        # With allow_is_causal_skip=False, transformers evaluates the function for every pair.
        description = Mask.dense(sdpa_mask(**sizes, allow_is_causal_skip=False))
    if description.is_everything and allow_is_bidirectional_skip:
        return None
    mask = DescribedMask(description, (batch_size, 1, q_length, kv_length), dtype, device)
    if pattern is not None and kv_offset:
        mask.first_tokens = _first_tokens([x for x in (attention_mask, *pattern.padding) if x is not None], device)
    return mask


def _first_tokens(non_padding: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Return the first token of each sequence, [batch or 1], from padding masks [batch, tokens]; None if unknown."""
    if not len(non_padding):
        return torch.zeros(1, dtype=torch.int64, device=device)
    return (non_padding[0].to(device) != 0).to(torch.uint8).argmax(-1) if len(non_padding) == 1 else None


def _everything(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query.new_ones((1, 1, 1, 1), dtype=torch.bool)


def make_mask_or_none(*args: Any, **kwargs: Any) -> Tensor | None:
    """Build the mask of one call like `make_mask`; in compiled code, like transformers does for sdpa.

    That is no dense mask where `is_causal` of the attention module determines it.
    """
    from transformers.masking_utils import sdpa_mask

    return (sdpa_mask if torch.compiler.is_compiling() else make_mask)(*args, **kwargs)


@cache
def _known_functions() -> dict[CodeType, str]:
    """Return the code objects of the recognised mask functions, with the names of their factories."""
    from transformers import masking_utils

    dummy = torch.zeros(1, 1, dtype=torch.int64)
    makers: dict[str, tuple[Any, ...]] = {
        "and_masks": (masking_utils.causal_mask_function,),
        "sliding_window_overlay": (1,),
        "sliding_window_bidirectional_overlay": (1,),
        "chunked_overlay": (1, dummy[0]),
        "packed_sequence_mask_function": (dummy,),
        "padding_mask_function": (dummy,),
    }
    functions = {name: getattr(masking_utils, name)(*arguments) for name, arguments in makers.items()}
    functions["causal_mask_function"] = masking_utils.causal_mask_function
    functions["bidirectional_mask_function"] = masking_utils.bidirectional_mask_function
    return {function.__code__: name for name, function in functions.items()}


def read_pattern(mask_function: Callable[..., Any]) -> Pattern | None:
    """Return the constraints of a mask function; None if it is not recognised."""
    code = getattr(mask_function, "__code__", None)
    name = None if code is None else _known_functions().get(code)
    if code is None or name is None:
        return None
    cells = getattr(mask_function, "__closure__", None) or ()
    closure = {variable: cell.cell_contents for variable, cell in zip(code.co_freevars, cells, strict=True)}
    try:
        match name:
            case "causal_mask_function":
                return Pattern(right=0)
            case "bidirectional_mask_function":
                return Pattern()
            case "sliding_window_overlay":
                return Pattern(left=int(closure["sliding_window"]) - 1)
            case "sliding_window_bidirectional_overlay":
                return Pattern(left=int(closure["sliding_window"]), right=int(closure["sliding_window"]))
            case "chunked_overlay":
                return Pattern(chunks=((int(closure["chunk_size"]), closure["left_padding"]),))
            case "packed_sequence_mask_function":
                return Pattern(documents=(closure["packed_sequence_mask"],))
            case "padding_mask_function":
                return Pattern(padding=(closure["padding_mask"],))
            case _:
                patterns = [read_pattern(part) for part in closure["mask_functions"]]
    except KeyError:  # other versions of transformers use different variable names
        return None
    return _combine_patterns([pattern for pattern in patterns if pattern is not None]) if None not in patterns else None


def _combine_patterns(patterns: list[Pattern]) -> Pattern:
    lefts = [pattern.left for pattern in patterns if pattern.left is not None]
    rights = [pattern.right for pattern in patterns if pattern.right is not None]
    return Pattern(
        left=min(lefts) if lefts else None,
        right=min(rights) if rights else None,
        chunks=tuple(term for pattern in patterns for term in pattern.chunks),
        documents=tuple(term for pattern in patterns for term in pattern.documents),
        padding=tuple(term for pattern in patterns for term in pattern.padding),
    )


def describe(
    pattern: Pattern, positions: CallPositions, attention_mask: Tensor | None, *, keeps_rows: bool = False
) -> Mask | None:
    """Combine pattern and padding into a `Mask`; None if it cannot be expressed.

    Args:
        pattern: constraints of the mask function.
        positions: sizes and positions of the call.
        attention_mask: padding mask of the call.
        keeps_rows: whether padding queries attend to what the mask function shows them, as a session must let them.
    """
    if pattern.left is not None and pattern.left < 0:
        return None  # an empty window
    mask = Mask(left=pattern.left, right=pattern.right)
    has_positions = not positions.is_end_aligned and (mask.left is not None or mask.right is not None)
    for ids in pattern.documents:
        if not positions.same_tokens or positions.key_offset or ids.shape[-1] != positions.keys:
            return None
        mask = mask & Mask.documents(ids)
    starts: list[tuple[Tensor, Tensor]] = []  # of the chunks of queries and keys
    for size, left_padding in pattern.chunks:
        first = left_padding[:, None].to(positions.device)
        query_ids, key_ids = ((x - first) // size for x in (positions.query_index(), positions.key_index()))
        starts.append((first + query_ids * size, first + key_ids * size))
        if positions.same_tokens:
            mask = mask & Mask.documents(key_ids)
        else:
            mask = mask & Mask.documents(query_ids, key_ids)
            has_positions = has_positions or not positions.is_end_aligned
    non_padding = None
    for term in (attention_mask, *pattern.padding):
        if term is not None:
            local = _local_padding(term.to(device=positions.device, dtype=torch.bool), positions)
            non_padding = local if non_padding is None else non_padding & local
    if has_positions:
        return mask & _positions_mask(positions, non_padding, starts)
    if non_padding is None:
        return mask
    return mask & _padding(non_padding, positions, masks_queries=mask.right == 0 and not keeps_rows)


def _local_padding(non_padding: Tensor, positions: CallPositions) -> Tensor:
    """Return the part of a 2-D padding mask for the keys of this call; keys beyond its end are masked."""
    missing = positions.key_offset + positions.keys - non_padding.shape[-1]
    non_padding = F.pad(non_padding, (0, missing)) if missing > 0 else non_padding
    return non_padding[:, positions.key_offset : positions.key_offset + positions.keys]


def _positions_mask(
    positions: CallPositions, non_padding: Tensor | None, starts: Sequence[tuple[Tensor, Tensor]]
) -> Mask:
    """Return a mask with explicit positions; -1 for masked keys.

    They count from the first non-padding token, or from the start of the chunk, as `sink_mass` is of its first key.
    """
    queries, keys = positions.query_index()[None], positions.key_index()[None]
    first = torch.zeros_like(keys[:, :1])
    if non_padding is not None:
        first = torch.where(non_padding, keys, keys[:, -1:] + 1).amin(-1, keepdim=True)
    first_query, first_key = first, first
    for of_queries, of_keys in starts:
        first_query, first_key = torch.maximum(first_query, of_queries), torch.maximum(first_key, of_keys)
    queries, keys = queries - first_query, keys - first_key
    return Mask.positions(queries, keys if non_padding is None else torch.where(non_padding, keys, -1))


def _padding(non_padding: Tensor, positions: CallPositions, *, masks_queries: bool) -> Mask:
    """Return padding in its cheapest form; reads the mask once per forward, as transformers does for sdpa."""
    no_padding, right, left = _padding_sides(non_padding)
    if no_padding:
        return Mask()
    lengths = non_padding.sum(-1)
    if right and masks_queries and positions.same_tokens:
        # Padding queries are masked too: no other token of a causal model attends to their outputs.
        return Mask.lengths(lengths)
    if left:
        # Queries are not masked: a convolution in an encoder may read padding rows, which must match eager.
        queries = torch.full(lengths.shape, positions.queries, dtype=lengths.dtype, device=lengths.device)
        return Mask.lengths(lengths, queries=queries, side="left")
    return Mask.dense(non_padding[:, None, None, :])


def _padding_sides(non_padding: Tensor) -> tuple[bool, bool, bool]:
    """Return whether there is no padding, whether all of it is on the right, and whether all is on the left."""
    if non_padding.is_meta or (non_padding.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False, False, False  # no values to read, or synchronising is not allowed
    step = non_padding[:, 1:].to(torch.int8) - non_padding[:, :-1].to(torch.int8)
    no_padding, right, left = torch.stack([non_padding.all(), (step <= 0).all(), (step >= 0).all()]).tolist()
    return no_padding, right, left
