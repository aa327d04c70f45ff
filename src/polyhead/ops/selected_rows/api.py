"""`ragged_attention`: attention of selected query rows, different ones in every head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.errors import BackendUnsupported, DeviceError, DtypeError, OptionError, ShapeError
from polyhead.masks import Mask
from polyhead.ops.attention.validation import checked_request
from polyhead.ops.common.request import AttentionOutput
from polyhead.ops.common.statistics import Statistics
from polyhead.ops.common.validation import check_backend, without_autocast
from polyhead.ops.selected_rows import blockwise, fused
from polyhead.ops.selected_rows.request import RaggedRequest
from polyhead.ops.selected_rows.rows import SelectedRows

if TYPE_CHECKING:
    from jaxtyping import Float, Int

BACKENDS = ("fused", "blockwise", "reference")


@dataclass(frozen=True, slots=True, eq=False)
class RaggedRows:
    """Selected query rows, packed by (batch, head) pair without gaps.

    `positions` [total] is the query index of each row, 0 to num_queries - 1, strictly ascending within a pair. Rows
    `offsets[i]` to `offsets[i + 1]` belong to pair i, which is `batch index * heads + head`, or
    `head * batch + batch index` with `by_head=True`, the order of a product grouped by head. Rows from `offsets[-1]` on
    are padding, whose content is never read. `num_queries` is the number of queries of the full attention, to which a
    causal mask is aligned; None: as many as keys. `num_heads` is the number of query heads; None: the pairs divided by
    the batch size of the keys, so that keys of another batch size are not always detected.
    """

    positions: Int[Tensor, " total"]
    offsets: Int[Tensor, " pairs_and_one"]
    num_queries: int | None = None
    by_head: bool = False
    num_heads: int | None = None


def ragged_attention(
    query: Float[Tensor, "total head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    rows: RaggedRows,
    *,
    mask: Mask | None = None,
    scale: float | Float[Tensor, " heads"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    statistics: bool | str | Sequence[str] | Statistics | None = None,
    finite: bool = False,
    backend: str = "auto",
) -> AttentionOutput:
    """Compute the selected rows of `attention` only; the cost is proportional to their number.

    Row r of the result equals `polyhead.attention(full, key, value, mask=...)` at (batch, head, `rows.positions[r]`),
    where `full` is a query [batch, heads, num_queries, head_dim] with `query[r]` at that index:
    softmax(scale * q_r K^T) V over the keys visible to that query.

    Args:
        query: [total, head_dim], in the order of `rows`.
        key: [batch, kv_heads, keys, head_dim]; head i reads KV head `i // (heads // kv_heads)`.
        value: [batch, kv_heads, keys, value_dim].
        rows: sequence, head and query index of each row.
        mask, scale, softcap, sinks, statistics, finite: as in `attention` for the full query.
        backend: "auto", "fused" (polyhead's kernels), "blockwise" (tiles of plain PyTorch) or "reference" (the
            formula). A named backend never falls back. The last two read the offsets on the host and so synchronise
            with the device.

    Returns:
        Output [total, value_dim], log-sum-exp [total] and statistics [total] each. Padding rows have an output of zero,
        a log-sum-exp and a max logit of -inf, zero for every other statistic, and no gradient.

    >>> import torch
    >>> query, key = torch.randn(5, 16), torch.randn(1, 2, 7, 16)
    >>> rows = RaggedRows(torch.tensor([0, 3, 6, 1, 2]), torch.tensor([0, 3, 5]))  # 3 rows for head 0, 2 for head 1
    >>> ragged_attention(query, key, key, rows, mask=Mask.causal()).output.shape
    torch.Size([5, 16])
    """
    options: dict[str, Any] = {"mask": mask, "scale": scale, "softcap": softcap, "sinks": sinks, "finite": finite}
    request = _checked(query, key, value, rows, statistics=statistics, **options)
    with without_autocast(query.device.type):
        return _run(request, backend)


def _run(request: RaggedRequest, backend: str) -> AttentionOutput:
    check_backend(backend, BACKENDS)
    if backend in ("auto", "fused"):
        reasons = fused.unsupported_reasons(request)
        if not reasons:
            return fused.run(request) if request.full_request.sizes[0] else blockwise.run_empty_batch(request, "fused")
        if backend == "fused":
            raise BackendUnsupported("fused", reasons)
    run = blockwise.run if request.full_request.sizes[0] else blockwise.run_empty_batch
    return run(request, "blockwise" if backend == "auto" else backend)


def _checked(query: Tensor, key: Tensor, value: Tensor, rows: RaggedRows, **options: Any) -> RaggedRequest:
    """Return the validated request; all but the rows is checked as in `attention`."""
    if not isinstance(rows, RaggedRows):
        raise OptionError(f"rows must be a RaggedRows(positions, offsets), got {type(rows).__name__}")
    if not (isinstance(query, Tensor) and isinstance(key, Tensor)):
        raise DtypeError(f"query and key must be tensors, got {type(query).__name__} and {type(key).__name__}")
    if query.ndim != 2 or key.ndim != 4:
        raise ShapeError(
            "query must be [total, head_dim] and key [batch, kv_heads, keys, head_dim], "
            f"got shapes {list(query.shape)} and {list(key.shape)}"
        )
    positions, offsets = rows.positions, rows.offsets
    for name, tensor in (("positions", positions), ("offsets", offsets)):
        if not isinstance(tensor, Tensor) or tensor.ndim != 1 or tensor.dtype not in (torch.int32, torch.int64):
            got = f"{tensor.dtype} of shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
            raise ShapeError(f"{name} must be a 1-D tensor of int32 or int64, got {got}")
        if tensor.device != query.device:
            raise DeviceError(f"{name} must be on the device of the query, got {tensor.device} and {query.device}")
    if positions.shape[0] != query.shape[0]:
        raise ShapeError(f"every row needs a position, got {query.shape[0]} rows and {positions.shape[0]} positions")
    heads = _heads(rows, key)
    num_queries = key.shape[2] if rows.num_queries is None else rows.num_queries
    # An expanded query of the full size that takes no memory, for checks and masks that only need sizes.
    full = query.new_empty(1).expand(key.shape[0], heads, num_queries, query.shape[1])
    full_request = checked_request(full, key, value, logsumexp=True, **options)
    _check_values(positions, offsets, num_queries)
    positions, offsets = (x.to(torch.int32).contiguous() for x in (positions, offsets))
    selected = SelectedRows(positions, offsets, num_queries, rows.by_head)
    return RaggedRequest(query.to(full_request.query.dtype), selected, full_request)


def _heads(rows: RaggedRows, key: Tensor) -> int:
    """Return the number of query heads, after checking that the pairs match the batch size of the keys."""
    batch, kv_heads, *_ = key.shape
    heads, pairs = rows.num_heads, rows.offsets.shape[0] - 1
    if heads is None:
        if (pairs == 0) if batch == 0 else (pairs >= 1 and pairs % batch == 0):
            return pairs // batch if batch else kv_heads
    elif isinstance(heads, bool) or not isinstance(heads, int | torch.SymInt) or heads < 1:
        raise ShapeError(f"num_heads must be a positive integer, got {heads!r}")
    elif pairs == batch * heads:
        return heads
    raise ShapeError(
        "offsets must have batch * heads + 1 numbers with at least one head, "
        f"got {pairs + 1} for a batch of {batch}{'' if heads is None else f' and {heads} heads'}; "
        "query rows and keys must have the same batch size"
    )


def _check_values(positions: Tensor, offsets: Tensor, num_queries: int) -> None:
    """Check positions and offsets on the CPU.

    On a device they are not checked, to avoid a synchronisation.
    """
    if offsets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    total = positions.shape[0]
    if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()) or int(offsets[-1]) > total:
        raise OptionError(
            f"offsets must start at 0, not decrease and end at {total} rows or before, got {_format_some(offsets)}"
        )
    valid = positions[: int(offsets[-1])]
    if valid.numel() and not 0 <= int(valid.min()) <= int(valid.max()) < num_queries:
        raise OptionError(
            f"positions must be query indices, 0 to {num_queries - 1}, got {int(valid.min())} to {int(valid.max())}"
        )
    is_descending = valid.diff() <= 0
    inner = offsets[1:-1].long()
    is_descending[inner[(inner > 0) & (inner < valid.numel())] - 1] = False
    if bool(is_descending.any()):
        index = int(is_descending.nonzero()[0])
        raise OptionError(
            "positions must ascend within a (batch, head) pair, "
            f"got {int(valid[index])} before {int(valid[index + 1])} at row {index}"
        )


def _format_some(numbers: Tensor) -> str:
    head = numbers[:8].tolist()
    return f"{head}" if numbers.numel() <= 8 else f"{str(head)[:-1]}, ...]"
