"""Attention of the next tokens over a cache, read where it lies: contiguous, rolling, paged or int8, with statistics.

The keys are split over as many programs as fill the device; how many is decided from sizes alone, so that no call waits
for a device and a CUDA graph may hold it. Lengths stay on the device, and may change between replays.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported, OptionError, ShapeError
from polyhead.ops.common.kernels.availability import HAS_TRITON, IS_INTERPRETED, capability, multiprocessors
from polyhead.ops.common.kernels.sizes import power_of_two
from polyhead.ops.common.statistics import NAMES
from polyhead.ops.common.tracing import TRANSFORMED, is_traced, is_transformed
from polyhead.ops.decode.kernels.latent_tiles import LatentBlocks, Latents, Numbers, latent_reasons

if TYPE_CHECKING:
    from polyhead.ops.common.kernels.mask_arguments import MaskArguments
    from polyhead.ops.decode.kernels.parts import Places

MOST_QUERIES = 16
_MOST_SPLITS = 128
_MOST_ROWS = 64  # of one tile; more are cut into blocks, each of which reads the keys again
# What a program costs before its first tile and after its last, and what the join costs, in steps of one tile.
_STEPS_TO_START = 1.0
_STEPS_TO_JOIN = 1.5


class CacheArguments(NamedTuple):
    """A key/value cache as it lies in memory; nothing of it is copied. Positions and tables are int32.

    Contiguous: `key` and `value` are [batch, kv_heads, slots, dim], sequence b has its tokens in the first `lengths[b]`
    slots, and the queries are the last of them. Rolling: the same with a position for each slot and each query. Paged:
    `key` and `value` are [pages, page_size, kv_heads, dim]. Quantised: both are int8, with a scale for each token and
    head. Latents: `value` is the first channels of `key`, in the same memory, which `shared` says. Slots and pages that
    hold no token are never read.
    """

    key: Tensor
    value: Tensor
    lengths: Tensor | None = None  # [batch]: tokens of each sequence, the new ones included; None: every slot
    new_lengths: Tensor | None = None  # [batch]: how many of the queries are real, padded on the right; None: all
    key_position: Tensor | None = None  # [batch or 1, slots]: where the token of a slot stands, -1 for an empty slot
    query_position: Tensor | None = None  # [batch or 1, queries], with `key_position`
    block_table: Tensor | None = None  # [batch, pages of the longest sequence]; needs `lengths`
    key_scale: Tensor | None = None  # float32 [batch, kv_heads, slots]
    value_scale: Tensor | None = None
    shared: bool = False

    @property
    def holds_latents(self) -> bool:
        """Whether the kernels for latents read it: they know lengths, no pages, positions or scales."""
        elsewhere = (self.block_table, self.key_position, self.key_scale)
        is_plain = self.shared and all(x is None for x in elsewhere)
        return is_plain and not latent_reasons(self.key.shape[3], self.value.shape[3])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """kv_heads, slots of a sequence, page size (0 where there are no pages)"""
        if self.block_table is None:
            return self.key.shape[1], self.key.shape[2], 0
        return self.key.shape[2], self.block_table.shape[1] * self.key.shape[1], self.key.shape[1]


def decode_runs_on(query: Tensor) -> bool:
    """Whether there are kernels for this device at all; asked first, so that others pay nothing for the reasons."""
    if query.is_cuda:
        return HAS_TRITON and torch.version.cuda is not None
    return IS_INTERPRETED and query.is_cpu


def decode_reasons(query: Tensor, cache: CacheArguments) -> list[str]:
    """Why the decode kernels cannot serve these tensors, whose shapes fit together."""
    reasons = []
    if query.shape[2] > MOST_QUERIES:
        reasons.append(f"decode takes up to {MOST_QUERIES} new tokens a sequence, got {query.shape[2]}")
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"decode computes in float16, bfloat16 or float32, got {query.dtype}")
    held = torch.int8 if cache.key_scale is not None else query.dtype
    if cache.key.dtype is not held or cache.value.dtype is not held:
        reasons.append(f"the cache must hold {held} here, got {cache.key.dtype} and {cache.value.dtype}")
    reasons += width_reasons(cache)
    tensors = [query, *(x for x in cache if isinstance(x, Tensor))]
    device, is_strewn, is_elsewhere, is_learned = query.device, False, False, False
    for x in tensors:  # once: this is asked before every token
        is_strewn |= x.stride(-1) != 1 and x.shape[-1] > 1 and x is not cache.key_scale
        is_elsewhere |= x.device != device
        is_learned |= x.requires_grad
    if is_strewn:
        reasons.append("the last axis of query, keys, values, tables and positions must lie together in memory")
    if is_elsewhere:
        reasons.append(f"query and cache must be on one device, got {sorted({str(x.device) for x in tensors})}")
    if is_learned and torch.is_grad_enabled():
        reasons.append("decode has no gradient")
    if is_transformed():
        reasons.append(TRANSFORMED)
    kind = device.type
    if kind != "meta" and not decode_runs_on(query):
        missing = "" if HAS_TRITON else ", and Triton is not installed"
        reasons.append(f"the kernels run on CUDA devices, got tensors on {kind}{missing}")
    elif kind == "cuda" and not torch.compiler.is_compiling() and capability(device.index) < (8, 0):
        major, minor = capability(device.index)
        reasons.append(f"the kernels need compute capability 8.0, got {major}.{minor}")
    return reasons


def width_reasons(cache: CacheArguments) -> list[str]:
    """Why no kernel reads keys and values of so many channels."""
    if cache.holds_latents:
        return []
    reasons = [
        f"{name} must be a multiple of 8 up to 256, got {tensor.shape[3]}"
        for name, tensor in (("head_dim", cache.key), ("value_dim", cache.value))
        if tensor.shape[3] % 8 or not 8 <= tensor.shape[3] <= 256
    ]
    if cache.shared and len(reasons):
        return latent_reasons(cache.key.shape[3], cache.value.shape[3]) or reasons
    return reasons


def decode(
    query: Tensor,
    cache: CacheArguments,
    *,
    scale: float,
    head_scale: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    left: int | None = None,
    right: int | None = None,
    kept: int = 0,
    table: Tensor | None = None,
    table_zero: int = 0,
    names: Sequence[str] = (),
    sink_keys: int = 1,
    window: int = 64,
    splits: int | None = None,
    is_served: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output [batch, heads, queries, value_dim], log-sum-exp [batch, heads, queries], and each statistic the same.

    Args:
        query: [batch, heads, queries, head_dim], the new tokens, whose keys and values the cache already holds.
        scale, head_scale: multiply the dot products; the second has one number a head.
        sinks: a learned logit a head.
        left, right, kept: how far before and after itself a query sees, and how many first keys it sees anyway; `right`
            is 0 for causal attention.
        table, table_zero: a bias by distance, [heads or 1, distances], as `Mask.relative` has it.
        names, sink_keys, window: the statistics, as in `polyhead.Statistics`.
        splits: over how many programs the keys of a sequence are spread; chosen from the sizes by default.
        is_served: the caller has asked for `decode_reasons`, and there are none.
    """
    _check_shapes(query, cache, head_scale, sinks, table)
    if kept and left is None:
        raise OptionError(f"kept first keys are those that a left edge would hide, got kept {kept} and no left edge")
    if "learned_sink_mass" in names and sinks is None:
        raise OptionError("learned_sink_mass is the share of learned sinks, got a decode without sinks")
    if splits is not None and not 1 <= splits <= _MOST_SPLITS:
        raise OptionError(f"splits must be between 1 and {_MOST_SPLITS}, got {splits}")
    if not is_served and len(reasons := decode_reasons(query, cache)):
        raise BackendUnsupported("decode", reasons)
    if query.shape[2] == 1 and cache.key_position is None:
        right = None  # a single query is the last token, and nothing stands after it
    # Calling an operator costs as much Python as launching the kernels, so only who traces meets one.
    run = _decode if is_traced(query) else _decode_at_once
    output, logsumexp, statistics = run(
        query,
        *cache,
        head_scale,
        sinks,
        table,
        scale,
        softcap,
        left,
        right,
        kept,
        table_zero,
        [NAMES.index(name) for name in names],
        sink_keys,
        window,
        splits,
    )
    return output, logsumexp, dict(zip(names, statistics.unbind(0), strict=True))


def _decode_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    new_lengths: Tensor | None,
    key_position: Tensor | None,
    query_position: Tensor | None,
    block_table: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    shared: bool,
    head_scale: Tensor | None,
    sinks: Tensor | None,
    table: Tensor | None,
    scale: float,
    softcap: float | None,
    left: int | None,
    right: int | None,
    kept: int,
    table_zero: int,
    statistics: Sequence[int],
    sink_keys: int,
    window: int,
    splits: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from polyhead.ops.decode.kernels.parts import join_kernel
    from polyhead.ops.decode.kernels.split_keys import CachePointers, decode_kernel

    cache = CacheArguments(
        key, value, lengths, new_lengths, key_position, query_position, block_table, key_scale, value_scale, shared
    )
    batch, heads, queries, dim_key = query.shape
    dim_value = value.shape[3]
    kv_heads, slots, page_size = cache.sizes
    output, logsumexp, found = _outputs(query, value, statistics)
    rows = batch * heads * queries
    if not rows:
        return output, logsumexp, found

    group_rows = heads // kv_heads * queries
    paged = block_table is not None
    pointers = CachePointers(
        key,
        value,
        *_row_head_token(key, paged),
        *_row_head_token(value, paged),
        lengths,
        new_lengths,
        block_table,
        key_scale,
        value_scale,
        *_row_head_token(key_scale, paged),
        *_row_head_token(value_scale, paged),
    )
    mask = _edges(left, right, kept)
    if key_position is not None and query_position is not None:
        both = max(key_position.shape[0], query_position.shape[0])
        key_position, query_position = (x.expand(both, -1).contiguous() for x in (key_position, query_position))
        mask = mask._replace(
            query_position=query_position,
            key_position=key_position,
            key_ordinal=key_position,
            stride_query=queries if both > 1 else 0,
            stride_key=slots if both > 1 else 0,
        )
    if table is not None:
        table = table.contiguous()
        mask = mask._replace(
            table=table,
            table_head=table.shape[1] if table.shape[0] > 1 else 0,
            table_zero=table_zero,
            table_width=table.shape[1],
        )
    places = _places(tuple(statistics))

    indirect = block_table is not None or key_position is not None
    blocks: Blocks | LatentBlocks
    if cache.holds_latents:
        from polyhead.ops.decode.kernels import latent

        latents = Latents(key, *_row_head_token(key, False), lengths, new_lengths)
        numbers = Numbers(scale, softcap, sink_keys, window)
        blocks = latent.plan_parts(query, latents, dim_value, mask, places, head_scale, numbers)
    else:
        blocks = plan_blocks(group_rows, dim_key, dim_value, key.element_size(), len(statistics), indirect)
    pairs = batch * kv_heads * -(-group_rows // blocks.rows)
    if splits is None:
        reachable = slots if left is None or key_position is not None else min(slots, left + queries + kept)
        splits = plan_splits(pairs, -(-reachable // blocks.keys), blocks.resident * multiprocessors(query.get_device()))
    # Where one program sees all keys it leaves no parts; that of latents always does.
    in_parts = splits > 1 or isinstance(blocks, LatentBlocks)
    sums, parts = None, None
    if in_parts:
        sums = query.new_empty((len(statistics) + 2, splits, rows), dtype=torch.float32)
        parts = query.new_empty((splits, rows, dim_value), dtype=torch.float32)
    with torch.cuda.device_of(query):
        if isinstance(blocks, LatentBlocks):
            assert sums is not None and parts is not None
            latent.leave_parts(query, latents, dim_value, sums, parts, mask, places, head_scale, numbers, blocks)
        else:
            decode_kernel[(pairs, splits)](
                query,
                output,
                logsumexp,
                found,
                sums,
                parts,
                head_scale,
                sinks,
                pointers,
                mask,
                places,
                *query.stride()[:3],
                scale,
                softcap,
                sink_keys,
                window,
                slots,
                splits,
                rows,
                KV_HEADS=kv_heads,
                GROUP=heads // kv_heads,
                QUERIES=queries,
                DIM_KEY=dim_key,
                DIM_VALUE=dim_value,
                PAGE_SIZE=page_size,
                ONE_SPLIT=splits == 1,
                BLOCK_M=blocks.rows,
                BLOCK_N=blocks.keys,
                BLOCK_KEY=blocks.dim_key,
                BLOCK_VALUE=blocks.dim_value,
                STAGES=blocks.stages,
                num_warps=blocks.warps,
            )
        if in_parts:
            block_splits, block_value = max(16, power_of_two(splits)), max(16, power_of_two(dim_value))
            join_kernel[(rows,)](
                output,
                logsumexp,
                found,
                sums,
                parts,
                sinks,
                places,
                splits,
                rows,
                HEADS=heads,
                QUERIES=queries,
                DIM_VALUE=dim_value,
                BLOCK_SPLITS=block_splits,
                BLOCK_PARTS=min(block_splits, 8192 // block_value),
                BLOCK_VALUE=block_value,
                num_warps=4,
            )
    return output, logsumexp, found


_decode = torch.library.custom_op("polyhead::decode", mutates_args=())(_decode_at_once)


@_decode.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    statistics = rest[17]
    assert isinstance(statistics, Sequence)
    return _outputs(query, value, statistics)


def _outputs(query: Tensor, value: Tensor, statistics: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    # Tokens before heads in memory, so that a layer flattens the heads of a token without a copy.
    output = query.new_empty((batch, queries, heads, value.shape[3])).transpose(1, 2)
    logsumexp = query.new_empty((batch, heads, queries), dtype=torch.float32)
    return output, logsumexp, query.new_empty((len(statistics), batch, heads, queries), dtype=torch.float32)


@functools.lru_cache(maxsize=256)
def _edges(left: int | None, right: int | None, kept: int) -> MaskArguments:
    """A mask of edges alone; remembered, since a tuple of twenty takes as long as a tensor."""
    from polyhead.ops.common.kernels.mask_arguments import MaskArguments

    return MaskArguments(left=left, right=right, sinks=kept or None)


@functools.lru_cache(maxsize=256)
def _places(statistics: tuple[int, ...]) -> Places:
    """Where each statistic that was asked for is stored."""
    from polyhead.ops.decode.kernels.parts import Places

    return Places(**{NAMES[name]: place for place, name in enumerate(statistics)})


class Blocks(NamedTuple):
    """The tiles of a program, and how many programs an SM holds at once."""

    rows: int
    keys: int
    dim_key: int
    dim_value: int
    stages: int
    warps: int
    resident: int


@functools.lru_cache(maxsize=256)
def plan_blocks(rows: int, dim_key: int, dim_value: int, itemsize: int, statistics: int, indirect: bool) -> Blocks:
    """Tiles that fit into registers and shared memory by what the compiler reports for sm_90.

    For plain 16-bit caches they were chosen by time on an H200 as well, and there two programs an SM did best: long
    tiles for few rows, three short ones in flight for more. The others are not timed.

    `rows` is the query heads of a group times the new tokens; `indirect` says that pages or positions are loaded before
    it is known which keys to load.
    """
    block_m = min(max(16, power_of_two(rows)), _MOST_ROWS)
    block_key, block_value = max(16, power_of_two(dim_key)), max(16, power_of_two(dim_value))
    quantised = itemsize == 1
    is_plain = itemsize == 2 and not indirect
    room = 16 if quantised else 64 if is_plain and block_m == 16 else 32  # KiB of keys and values in one tile
    block_n = min(max(16, power_of_two(room * 1024 // ((block_key + block_value) * itemsize) + 1) // 2), 128)
    many = statistics > 4
    warps = 8 if itemsize == 4 or block_m == _MOST_ROWS or (many and block_m > 16) else 4
    # A load whose address is loaded before it takes two stages more to be as far ahead.
    is_long = block_n * (block_key + block_value) * itemsize >= 64 * 1024
    stages = 5 if quantised or indirect else 2 if is_long else 3
    resident = 1 if warps == 8 else 2
    return Blocks(block_m, block_n, block_key, block_value, stages, warps, resident)


@functools.lru_cache(maxsize=4096)
def plan_splits(pairs: int, tiles: int, room: int) -> int:
    """Over how many programs to spread the `tiles` of a sequence, where `pairs` of sequence and KV head are at work.

    Counted in the time of one tile: rounds of the programs that the device has `room` for, each as long as its tiles
    and its start, and the join. The fewest splits win a tie.

    >>> plan_splits(8, 512, 264), plan_splits(512, 64, 264)
    (32, 1)
    """

    def steps(splits: int) -> float:
        rounds = -(-pairs * splits // room)
        return rounds * (-(-tiles // splits) + _STEPS_TO_START) + (_STEPS_TO_JOIN if splits > 1 else 0.0)

    return min(range(1, max(1, min(tiles, _MOST_SPLITS)) + 1), key=steps)


def _row_head_token(x: Tensor | None, paged: bool) -> tuple[int, int, int]:
    """Strides; a row is a sequence of the batch or a page."""
    if x is None:
        return 0, 0, 0
    row, first, second = x.stride()[:3]
    return (row, second, first) if paged else (row, first, second)


def _check_shapes(
    query: Tensor, cache: CacheArguments, head_scale: Tensor | None, sinks: Tensor | None, table: Tensor | None
) -> None:
    if query.ndim != 4 or cache.key.ndim != 4 or cache.value.ndim != 4:
        raise ShapeError(
            "query, keys and values must have four axes, "
            f"got shapes {list(query.shape)}, {list(cache.key.shape)} and {list(cache.value.shape)}"
        )
    batch, heads, queries, dim_key = query.shape
    kv_heads, slots, _ = cache.sizes
    if cache.key.shape[:3] != cache.value.shape[:3] or cache.key.shape[3] != dim_key:
        raise ShapeError(
            "keys and values must agree in all but their last axis, and keys with the query in that, "
            f"got {list(query.shape)}, {list(cache.key.shape)} and {list(cache.value.shape)}"
        )
    if heads % max(kv_heads, 1) or not kv_heads:
        raise ShapeError(f"query heads must be a multiple of KV heads, got {heads} and {kv_heads}")
    for names in (("key_position", "query_position"), ("key_scale", "value_scale")):
        there = [name for name in names if getattr(cache, name) is not None]
        if len(there) == 1:
            raise OptionError(f"{names[0]} and {names[1]} come together, got {there[0]} alone")
    if cache.block_table is not None and (cache.lengths is None or cache.key_position is not None):
        raise OptionError("a block table needs lengths and takes no positions, got otherwise")
    if cache.block_table is not None and cache.key_scale is not None:
        raise OptionError("pages hold keys and values as they are, got scales for int8 beside a block table")
    _expect("lengths", cache.lengths, (batch,))
    _expect("new_lengths", cache.new_lengths, (batch,))
    _expect("key_position", cache.key_position, (batch, slots), (1, slots))
    _expect("query_position", cache.query_position, (batch, queries), (1, queries))
    _expect("key_scale", cache.key_scale, (batch, kv_heads, slots))
    _expect("value_scale", cache.value_scale, (batch, kv_heads, slots))
    _expect("head_scale", head_scale, (heads,))
    _expect("sinks", sinks, (heads,))
    if cache.block_table is None:
        _expect("key", cache.key, (batch, kv_heads, slots, dim_key))
    else:
        _expect("block_table", cache.block_table, (batch, cache.block_table.shape[1]))
    if table is not None:
        _expect("table", table, (heads, table.shape[1]), (1, table.shape[1]))


def _expect(name: str, tensor: Tensor | None, *allowed: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) not in allowed:
        raise ShapeError(
            f"{name} must be {' or '.join(str(list(shape)) for shape in allowed)}, got {list(tensor.shape)}"
        )
