"""`profile`: a second pass over Q K^T for statistics of the final weights, which are never materialised.

With the log-sum-exp L of each row, the weight of a logit s is exp(s - L): each tile of Q K^T is computed once, V is
never read, and nothing of size queries x keys is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported, OptionError
from polyhead.masks import Mask
from polyhead.ops.common.kernel_masks import mask_reasons, pack
from polyhead.ops.common.kernels.availability import device_reasons
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.validation import check_backend, check_mask, check_softcap, checked_scale, without_autocast
from polyhead.ops.common.visibility import Span, Visibility, resolve
from polyhead.ops.profile import blockwise
from polyhead.ops.profile import validation as checks
from polyhead.ops.profile.pairs import pair_weights
from polyhead.ops.profile.request import AttentionProfile, BlockMap, ProfileRequest, offset_bins

if TYPE_CHECKING:
    from jaxtyping import Float

    Integers = Sequence[int] | Tensor
    IntegerPairs = Sequence[tuple[int, int]] | Tensor

BACKENDS = ("fused", "blockwise")


def profile(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    logsumexp: Float[Tensor, "batch heads queries"],
    *,
    mask: Mask | None = None,
    scale: float | Float[Tensor, " heads"] | None = None,
    softcap: float | None = None,
    received: bool = False,
    received_by_group: bool = False,
    block_map: BlockMap | tuple[int, int] | None = None,
    offsets: bool = False,
    argmax: bool = False,
    topk: int = 0,
    key_set: Integers | None = None,
    pairs: IntegerPairs | None = None,
    head_pairs: IntegerPairs | None = None,
    rows: Span | None = None,
    columns: Span | None = None,
    backend: str = "auto",
) -> AttentionProfile:
    """Return an `AttentionProfile`: statistics of the final weights, in one pass over Q K^T.

    Args:
        query, key, mask, scale, softcap: as passed to `attention`.
        logsumexp: [batch, heads, queries], from `attention(..., logsumexp=True)`; with learned sinks it includes them,
            and the weights then sum to one minus the sinks' share.
        received: the weight each key receives, per head.
        received_by_group: the same, summed over the query heads that share a KV head.
        block_map: the weights pooled over a grid: `BlockMap(...)`, or the height and width of a block whose weights are
            summed.
        offsets: the weight by relative offset, key position minus query position.
        argmax: the key with the largest weight.
        topk: the `topk` keys with the largest weights, at most 16.
        key_set: the weight of each row on these keys: boolean [keys] or [batch, keys], or the indices of keys.
        pairs: the weights of these (query, key) pairs, indices [pairs, 2] or [batch, pairs, 2]; each is computed
            separately.
        head_pairs: the Jensen-Shannon divergence and distance of these pairs of heads, indices [pairs, 2].
        rows, columns: restrict the profile to this window, (first, one past the last) of the queries and of the keys.
            All results are of the weights in the window, and the cost is that of the window.
        backend: "auto", "fused" (polyhead's kernels, on a CUDA device) or "blockwise" (plain PyTorch, any device). A
            named backend never falls back.

    Raises:
        ShapeError, MaskError, OptionError: tensors or options do not fit together.
        BackendUnsupported: the named backend cannot compute the call; the reasons are listed.

    The results are not differentiable: they require no gradient, whatever the inputs do.

    >>> import torch, polyhead
    >>> query, key = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 5, 16)
    >>> lse = polyhead.attention(query, key, key, mask=polyhead.Mask.causal(), logsumexp=True).logsumexp
    >>> polyhead.profile(query, key, lse, mask=polyhead.Mask.causal(), received=True, block_map=(2, 5))
    AttentionProfile(rows=(0, 5), columns=(0, 5), received=[2, 8, 5], block_map=[2, 8, 3, 1])
    """
    query, key = checks.cast_like_attention(query, key)
    with torch.no_grad(), without_autocast(query.device.type):
        checks.check_tensors(query, key, logsumexp)
        batch, heads, queries, _ = query.shape
        kv_heads, keys = key.shape[1:3]
        scale = checked_scale(scale, heads, query)
        if softcap is not None:
            check_softcap(softcap)
        checks.check_topk(topk)
        grid = checks.as_grid(block_map)
        row_window, column_window = checks.as_window("rows", rows, queries), checks.as_window("columns", columns, keys)
        visibility = None
        if mask is not None:
            check_mask(mask)
            visibility = resolve(mask, batch=batch, heads=heads, queries=queries, keys=keys, device=query.device)
        request = ProfileRequest(
            query=query,
            key=key,
            logsumexp=logsumexp,
            visibility=visibility,
            positions=Visibility(queries, keys, query.device, offset=keys - queries)
            if visibility is None
            else visibility,
            scale=scale,
            softcap=softcap,
            rows=row_window,
            columns=column_window,
            received=received or received_by_group,
            block=None
            if grid is None
            else grid.block_of(row_window[1] - row_window[0], column_window[1] - column_window[0]),
            pool="sum" if grid is None else grid.pool,
            offsets=offsets,
            argmax=argmax,
            topk=topk,
            key_set=None if key_set is None else checks.as_key_set(key_set, batch, keys, query.device),
            head_pairs=None if head_pairs is None else checks.as_head_pairs(head_pairs, heads, query.device),
        )
        pair_indices = None if pairs is None else checks.as_pairs(pairs, request)
        if not request.needs_tiles and pair_indices is None:
            raise OptionError(
                "profile needs at least one requested result, got none; set received, received_by_group, block_map, "
                "offsets, argmax, topk, key_set, pairs or head_pairs"
            )
        backend, results = run(request, backend)
        if received_by_group:
            results["received_by_group"] = results["received"].unflatten(1, (kv_heads, heads // kv_heads)).sum(2)
        if not received:
            results.pop("received", None)
        if request.pool == "mean":
            results["block_map"] /= _pairs_in_blocks(request)
        if offsets:
            results["offset_bins"] = offset_bins()
        if pair_indices is not None:
            results["pair_weights"] = pair_weights(request, pair_indices)
        return AttentionProfile(row_window, column_window, request.block, backend=backend, **results)


# ---- backends


def run(request: ProfileRequest, backend: str) -> tuple[str, dict[str, Tensor]]:
    """Return the backend that was chosen, and the results that need tiles, as `blockwise.run`."""
    backend = _choose(request, backend)
    if not request.needs_tiles:
        return backend, {}
    return backend, _fused(request) if backend == "fused" else blockwise.run(request)


def unsupported_reasons(request: ProfileRequest) -> list[str]:
    """Return the reasons why the kernels do not support a request; empty if they do."""
    reasons = device_reasons(request.query.device) + mask_reasons(request.visibility)
    if request.query.dtype is torch.float64:
        reasons.append("the kernels take float16, bfloat16 and float32, got float64")
    if request.query.shape[3] > 256:
        reasons.append(f"the kernels take head dims up to 256, got {request.query.shape[3]}")
    if torch.are_deterministic_algorithms_enabled() and (request.received or request.block or request.offsets):
        reasons.append("the kernels add in a nondeterministic order, but deterministic algorithms are enabled")
    if request.offsets and request.positions.query_positions is not None:
        reasons.append("the kernels compute offsets from token indices, got a mask with explicit positions")
    return reasons


def _choose(request: ProfileRequest, backend: str) -> str:
    """Return the backend to run; raise BackendUnsupported if a named one does not support the request."""
    check_backend(backend, BACKENDS)
    if backend == "blockwise":
        return backend
    reasons = unsupported_reasons(request)
    if backend == "auto":
        return "blockwise" if reasons or request.query.device.type != "cuda" else "fused"
    if reasons:
        raise BackendUnsupported(backend, reasons)
    return backend


def _fused(request: ProfileRequest) -> dict[str, Tensor]:
    """Compute the results that need tiles with the kernels; as `blockwise.run`."""
    from polyhead.ops.profile.kernels.divergence import divergences
    from polyhead.ops.profile.kernels.prepare import prepare
    from polyhead.ops.profile.kernels.second_pass import second_pass

    visibility = request.visibility
    mask = MaskArguments(offset=request.positions.offset)
    if visibility is not None:
        mask = pack(visibility, for_columns=not request.needs_rows)
    problem = prepare(
        request.query, request.key, request.logsumexp, request.scale, request.softcap, request.rows, request.columns
    )
    results: dict[str, Tensor] = {}
    if request.received or request.block is not None or request.offsets or request.needs_rows:
        results = second_pass(
            problem,
            mask,
            received=request.received,
            block=request.block,
            by_max=request.pool == "max",
            offsets=request.offsets,
            argmax=request.argmax,
            topk=request.topk,
            key_set=request.key_set,
        )
    if request.topk:
        values, keys = blockwise.sort_top_keys(results.pop("top_log2_weights"), results["top_keys"])
        results["top_keys"], results["top_weights"] = keys[..., : request.topk], values[..., : request.topk].exp2()
    if request.head_pairs is not None:
        results |= blockwise.mean_divergences(divergences(problem, mask, request.head_pairs))
    return results


def _pairs_in_blocks(request: ProfileRequest) -> Tensor:
    """Return the number of (query, key) pairs in each block of the map, [row_blocks, column_blocks]."""
    assert request.block is not None
    sides = []
    for (first, last), size, count in zip(
        (request.rows, request.columns), request.block, request.map_shape, strict=True
    ):
        starts = torch.arange(count, device=request.query.device, dtype=request.accumulation_dtype) * size
        sides.append((last - first - starts).clamp_max(size))
    return sides[0][:, None] * sides[1]
