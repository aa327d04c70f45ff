"""Decoding attention over a KV cache read in place: contiguous, rolling, paged or int8.

The keys are split over as many programs as fill the device (split-KV, as in Flash-Decoding). The number of splits
depends on sizes alone, so a call never synchronises with the device and can be captured in a CUDA graph. Lengths stay
on the device and may change between replays.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported, OptionError, ShapeError
from polyhead.ops.common.kernels.availability import device_reasons, multiprocessors
from polyhead.ops.common.kernels.sizes import blocks_of, padded_dim, power_of_two, tile_dims
from polyhead.ops.common.statistics import NAMES, WINDOW
from polyhead.ops.common.tracing import TRANSFORMED, is_traced, is_transformed
from polyhead.ops.decode.kernels.latent_tiles import LatentBlocks, Latents, SoftmaxOptions, latent_reasons

if TYPE_CHECKING:
    from polyhead.ops.common.kernels.mask_arguments import MaskArguments

MOST_QUERIES = 16
_MAX_SPLITS = 128
_MAX_ROWS = 64  # of one tile; more rows are split into blocks, each of which reads the keys again
# Start-up cost of a program and cost of the final reduction, in units of one tile's time.
_STARTUP_TILES = 1.0
_REDUCTION_TILES = 1.5


class CacheArguments(NamedTuple):
    """A KV cache in its own memory layout; nothing of it is copied. Positions and block tables are int32.

    Contiguous: `key` and `value` are [batch, kv_heads, slots, dim], sequence b has its tokens in the first `lengths[b]`
    slots, and the queries are the last of them. Rolling: the same with a position for each slot and each query. Paged:
    `key` and `value` are [pages, page_size, kv_heads, dim]. Quantised: both are int8, with a scale for each token and
    head. Latents: `value` is a view of the first channels of `key`, and `shared` is set. Slots and pages without a
    token are never read.
    """

    key: Tensor
    value: Tensor
    lengths: Tensor | None = None  # [batch]: tokens of each sequence, the new ones included; None: every slot
    new_lengths: Tensor | None = None  # [batch]: non-padding queries, padded on the right; None: all
    key_position: Tensor | None = None  # [batch or 1, slots]: position of the token in a slot, -1 for an empty slot
    query_position: Tensor | None = None  # [batch or 1, queries], with `key_position`
    block_table: Tensor | None = None  # [batch, pages of the longest sequence]; needs `lengths`
    key_scale: Tensor | None = None  # float32 [batch, kv_heads, slots]
    value_scale: Tensor | None = None  # the same
    shared: bool = False  # the cache holds latents, from which both keys and values are read

    @property
    def holds_latents(self) -> bool:
        """True if the cache holds latents that the latent kernels support; else the kernels for keys and values run.

        The latent kernels take lengths, but no pages, positions or scales.
        """
        unsupported = (self.block_table, self.key_position, self.key_scale)
        is_plain = self.shared and all(x is None for x in unsupported)
        return is_plain and not latent_reasons(self.key.shape[3], self.value.shape[3])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(kv_heads, slots per sequence, page size), with page size 0 if the cache is not paged."""
        if self.block_table is None:
            return self.key.shape[1], self.key.shape[2], 0
        return self.key.shape[2], self.block_table.shape[1] * self.key.shape[1], self.key.shape[1]


class DecodeOptions(NamedTuple):
    """Options of one call of `decode`, whose docstring explains them."""

    head_scale: Tensor | None
    sinks: Tensor | None
    table: Tensor | None
    scale: float
    softcap: float | None
    left: int | None
    right: int | None
    first_keys: int
    table_zero: int
    statistics: Sequence[int]  # indices in `NAMES`
    sink_keys: int
    window: int
    splits: int | None


def decode_runs_on(query: Tensor) -> bool:
    """Return True if there are kernels for this device; a cheap check before `decode_reasons`."""
    return not device_reasons(query.device)


def decode_reasons(query: Tensor, cache: CacheArguments) -> list[str]:
    """Return the reasons why the decode kernels do not support these tensors, whose shapes must be valid."""
    reasons = []
    if query.shape[2] > MOST_QUERIES:
        reasons.append(f"decode takes up to {MOST_QUERIES} new tokens per sequence, got {query.shape[2]}")
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(f"decode computes in float16, bfloat16 or float32, got {query.dtype}")
    cache_dtype = torch.int8 if cache.key_scale is not None else query.dtype
    if cache.key.dtype is not cache_dtype or cache.value.dtype is not cache_dtype:
        reasons.append(f"the cache must be {cache_dtype} here, got {cache.key.dtype} and {cache.value.dtype}")
    reasons += width_reasons(cache)
    tensors = [query, *(x for x in cache if isinstance(x, Tensor))]
    device, is_strided, is_on_other_device, requires_grad = query.device, False, False, False
    for x in tensors:  # a single loop, because this runs for every new token
        is_strided |= x.stride(-1) != 1 and x.shape[-1] > 1 and x is not cache.key_scale and x is not cache.value_scale
        is_on_other_device |= x.device != device
        requires_grad |= x.requires_grad
    if is_strided:
        reasons.append("the last axis of query, keys, values, tables and positions must be contiguous")
    if is_on_other_device:
        reasons.append(f"query and cache must be on one device, got {sorted({str(x.device) for x in tensors})}")
    if requires_grad and torch.is_grad_enabled():
        reasons.append("decode has no gradient")
    if is_transformed():
        reasons.append(TRANSFORMED)
    return reasons if device.type == "meta" else reasons + device_reasons(device)


def width_reasons(cache: CacheArguments) -> list[str]:
    """Return the reasons why no kernel supports these numbers of key and value channels."""
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
    first_keys: int = 0,
    table: Tensor | None = None,
    table_zero: int = 0,
    names: Sequence[str] = (),
    sink_keys: int = 1,
    window: int = WINDOW,
    splits: int | None = None,
    is_supported: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Attend over a KV cache; returns output, log-sum-exp and statistics by name.

    The output is [batch, heads, queries, value_dim]; log-sum-exp and statistics are [batch, heads, queries].

    Args:
        query: [batch, heads, queries, head_dim], the new tokens, whose keys and values are already in the cache.
        scale, head_scale: factors of the dot products; `head_scale` has one number per head and multiplies `scale`.
        sinks: one learned sink logit per head.
        left, right, first_keys: keys visible before and after the query's position, and the number of first keys
            (attention sinks) that are visible regardless of `left`; `right` is 0 for causal attention.
        table, table_zero: a relative bias [heads or 1, distances], as in `Mask.relative`.
        names, sink_keys, window: the statistics, as in `polyhead.Statistics`.
        splits: number of programs that share the keys of a sequence; chosen from the sizes by default.
        is_supported: the caller has already checked that `decode_reasons` is empty.
    """
    _check_shapes(query, cache, head_scale, sinks, table)
    if first_keys and left is None:
        raise OptionError(
            "first_keys needs a left edge, outside of which those keys stay visible, "
            f"got first_keys {first_keys} and left None"
        )
    if "learned_sink_mass" in names and sinks is None:
        raise OptionError("learned_sink_mass needs learned sinks, got sinks None")
    if splits is not None and not 1 <= splits <= _MAX_SPLITS:
        raise OptionError(f"splits must be between 1 and {_MAX_SPLITS}, got {splits}")
    if not is_supported and len(reasons := decode_reasons(query, cache)):
        raise BackendUnsupported("decode", reasons)
    if query.shape[2] == 1 and cache.key_position is None:
        right = None  # a single query is the last token: no key is after it
    statistics = [NAMES.index(name) for name in names]
    options = DecodeOptions(
        head_scale,
        sinks,
        table,
        scale,
        softcap,
        left,
        right,
        first_keys,
        table_zero,
        statistics,
        sink_keys,
        window,
        splits,
    )
    # Calling a custom operator costs as much host time as launching the kernels, so only traced calls use it.
    if is_traced(query):
        output, logsumexp, row_stats = _decode(query, *cache, *options)
    else:
        output, logsumexp, row_stats = _run_decode(query, cache, options)
    return output, logsumexp, dict(zip(names, row_stats.unbind(0), strict=True))


def _run_decode(query: Tensor, cache: CacheArguments, options: DecodeOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels; return output, log-sum-exp and the stacked statistics."""
    from polyhead.ops.decode.kernels.parts import join_kernel
    from polyhead.ops.decode.kernels.split_keys import CachePointers, decode_kernel

    key, value, lengths, new_lengths, key_position, query_position, block_table, key_scale, value_scale, _ = cache
    head_scale, sinks, table, scale, softcap, left, right, first_keys, table_zero, statistics, *_ = options
    head_scale, sinks, block_table = (None if x is None else x.contiguous() for x in (head_scale, sinks, block_table))
    sink_keys, window, splits = options.sink_keys, options.window, options.splits
    batch, heads, queries, dim_key = query.shape
    dim_value = value.shape[3]
    kv_heads, slots, page_size = cache.sizes
    output, logsumexp, row_stats = _outputs(query, value, statistics)
    rows = batch * heads * queries
    if not rows:
        return output, logsumexp, row_stats

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
    mask = _edges(left, right, first_keys)
    if key_position is not None and query_position is not None:
        batch_rows = max(key_position.shape[0], query_position.shape[0])
        key_position, query_position = (x.expand(batch_rows, -1).contiguous() for x in (key_position, query_position))
        mask = mask._replace(
            query_position=query_position,
            key_position=key_position,
            key_ordinal=key_position,
            stride_query=queries if batch_rows > 1 else 0,
            stride_key=slots if batch_rows > 1 else 0,
        )
    if table is not None:
        mask = mask.with_dense(bias=None, table=table)._replace(table_zero=table_zero)
    stat_slots = _statistic_slots(tuple(statistics))

    indirect = block_table is not None or key_position is not None
    blocks: DecodeBlocks | LatentBlocks
    if cache.holds_latents:
        from polyhead.ops.decode.kernels import latent

        latents = Latents(key, *_row_head_token(key, False), lengths, new_lengths)
        softmax = SoftmaxOptions(scale, softcap, sink_keys, window)
        blocks = latent.plan_parts(query, latents, dim_value, mask, stat_slots, head_scale, softmax)
    else:
        blocks = plan_blocks(group_rows, dim_key, dim_value, key.element_size(), len(statistics), indirect)
    pairs = batch * kv_heads * blocks_of(group_rows, blocks.rows)  # (sequence, KV head, block of rows)
    if splits is None:
        reachable = slots if left is None or key_position is not None else min(slots, left + queries + first_keys)
        programs = blocks.resident * multiprocessors(query.get_device())
        splits = plan_splits(pairs, blocks_of(reachable, blocks.keys), programs)
    # A single program per row writes its output directly; the kernel for latents always writes partial results.
    in_parts = splits > 1 or isinstance(blocks, LatentBlocks)
    sums, parts = None, None
    if in_parts:
        sums = query.new_empty((len(statistics) + 2, splits, rows), dtype=torch.float32)
        parts = query.new_empty((splits, rows, dim_value), dtype=torch.float32)
    with torch.cuda.device_of(query):
        if isinstance(blocks, LatentBlocks):
            assert sums is not None and parts is not None
            latent.leave_parts(query, latents, dim_value, sums, parts, mask, stat_slots, head_scale, softmax, blocks)
        else:
            decode_kernel[(pairs, splits)](
                query,
                output,
                logsumexp,
                row_stats,
                sums,
                parts,
                head_scale,
                sinks,
                pointers,
                mask,
                stat_slots,
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
            block_splits, block_value = padded_dim(splits), padded_dim(dim_value)
            join_kernel[(rows,)](
                output,
                logsumexp,
                row_stats,
                sums,
                parts,
                sinks,
                stat_slots,
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
    return output, logsumexp, row_stats


_CACHE = len(CacheArguments._fields)  # arguments of the operator that describe the cache
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? lengths, Tensor? new_lengths, Tensor? key_position, "
    "Tensor? query_position, Tensor? block_table, Tensor? key_scale, Tensor? value_scale, bool shared, "
    "Tensor? head_scale, Tensor? sinks, Tensor? table, float scale, float? softcap, SymInt? left, SymInt? right, "
    "SymInt first_keys, SymInt table_zero, SymInt[] statistics, SymInt sink_keys, SymInt window, SymInt? splits) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("polyhead::decode", mutates_args=(), schema=_SCHEMA)
def _decode(query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _run_decode(query, CacheArguments(*arguments[:_CACHE]), DecodeOptions(*arguments[_CACHE:]))


@_decode.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(query, value, rest[17])  # `statistics`


def _outputs(query: Tensor, value: Tensor, statistics: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate output, log-sum-exp and the stacked statistics."""
    batch, heads, queries, _ = query.shape
    # Tokens before heads in memory, so that a layer can flatten the heads of a token without a copy.
    output = query.new_empty((batch, queries, heads, value.shape[3])).transpose(1, 2)
    logsumexp = query.new_empty((batch, heads, queries), dtype=torch.float32)
    return output, logsumexp, query.new_empty((len(statistics), batch, heads, queries), dtype=torch.float32)


@functools.lru_cache(maxsize=256)
def _edges(left: int | None, right: int | None, first_keys: int) -> MaskArguments:
    """Return a mask of `left`, `right` and `first_keys` alone; cached, as building a tuple of twenty fields is slow."""
    from polyhead.ops.common.kernels.mask_arguments import MaskArguments

    return MaskArguments(left=left, right=right, sinks=first_keys or None)


@functools.lru_cache(maxsize=256)
def _statistic_slots(statistics: tuple[int, ...]) -> Any:
    """Return the index of each requested statistic in the stacked statistics."""
    from polyhead.ops.decode.kernels.parts import StatisticSlots

    return StatisticSlots(**{NAMES[name]: slot for slot, name in enumerate(statistics)})


class DecodeBlocks(NamedTuple):
    """Tile sizes of a program, and the number of programs resident on an SM."""

    rows: int
    keys: int
    dim_key: int
    dim_value: int
    stages: int
    warps: int
    resident: int


@functools.lru_cache(maxsize=256)
def plan_blocks(
    rows: int, dim_key: int, dim_value: int, itemsize: int, statistics: int, indirect: bool
) -> DecodeBlocks:
    """Choose tiles that fit into registers and shared memory, according to the compiler's report for sm_90.

    Those for contiguous 16-bit caches were also timed on an H200, where two programs per SM were fastest, with long
    tiles for few rows, and with short tiles in three stages for more rows. Those for paged, rolling, int8 and float32
    caches were not timed.

    `rows` is the number of query heads per KV head times the new tokens; `indirect` means that pages or positions are
    loaded before the addresses of the keys are known.
    """
    block_m = min(padded_dim(rows), _MAX_ROWS)
    block_key, block_value = tile_dims(dim_key, dim_value)
    quantised = itemsize == 1
    is_plain = itemsize == 2 and not indirect
    tile_kib = 16 if quantised else 64 if is_plain and block_m == 16 else 32  # keys and values of one tile
    block_n = min(max(16, power_of_two(tile_kib * 1024 // ((block_key + block_value) * itemsize) + 1) // 2), 128)
    many = statistics > 4
    warps = 8 if itemsize == 4 or block_m == _MAX_ROWS or (many and block_m > 16) else 4
    # A load whose address must itself be loaded needs two more stages to be prefetched equally early.
    is_long = block_n * (block_key + block_value) * itemsize >= 64 * 1024
    stages = 5 if quantised or indirect else 2 if is_long else 3
    resident = 1 if warps == 8 else 2
    return DecodeBlocks(block_m, block_n, block_key, block_value, stages, warps, resident)


@functools.lru_cache(maxsize=4096)
def plan_splits(pairs: int, tiles: int, resident_programs: int) -> int:
    """Return the number of programs that share the `tiles` of each (sequence, KV head, block of rows).

    `pairs` is the number of the latter, `tiles` the number of key tiles of each. Minimises the time in units of one
    tile: the number of waves of `resident_programs` times the tiles and the start-up of a program, plus the final
    reduction. Ties go to fewer splits.

    >>> plan_splits(8, 512, 264), plan_splits(512, 64, 264)
    (32, 1)
    """

    def steps(splits: int) -> float:
        waves = blocks_of(pairs * splits, resident_programs)
        return waves * (blocks_of(tiles, splits) + _STARTUP_TILES) + (_REDUCTION_TILES if splits > 1 else 0.0)

    return min(range(1, max(1, min(tiles, _MAX_SPLITS)) + 1), key=steps)


def _row_head_token(x: Tensor | None, paged: bool) -> tuple[int, int, int]:
    """Return the strides of rows, heads and tokens; a row is a sequence of the batch or a page."""
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
            "keys and values must agree in all axes but the last, and keys and query in the last, "
            f"got {list(query.shape)}, {list(cache.key.shape)} and {list(cache.value.shape)}"
        )
    if heads % max(kv_heads, 1) or not kv_heads:
        raise ShapeError(f"query heads must be a multiple of KV heads, got {heads} and {kv_heads}")
    for names in (("key_position", "query_position"), ("key_scale", "value_scale")):
        present = [name for name in names if getattr(cache, name) is not None]
        if len(present) == 1:
            raise OptionError(f"{names[0]} and {names[1]} must be passed together, got {present[0]} alone")
    if cache.block_table is not None and (cache.lengths is None or cache.key_position is not None):
        raise OptionError("a block table needs lengths and takes no positions, got no lengths or a key_position")
    if cache.block_table is not None and cache.key_scale is not None:
        raise OptionError("a paged cache cannot be int8, got scales together with a block table")
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
