"""Pack a resolved mask into the numbers and tensors that kernels read, without synchronising."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.visibility import Visibility


def mask_reasons(visibility: Visibility | None) -> list[str]:
    """Return the reasons why kernels cannot read this mask; empty if they can."""
    if visibility is None:
        return []
    reasons = []
    if len(visibility.documents) > 1:
        reasons.append(f"our kernels read one document mask, got {len(visibility.documents)}")
    if len(visibility.biases) > 1:
        reasons.append(f"our kernels read one bias tensor, got {len(visibility.biases)}")
    if len(visibility.relative_biases) > 1:
        reasons.append(f"our kernels read one relative bias, got {len(visibility.relative_biases)}")
    return reasons


def pack(visibility: Visibility, *, poison: Tensor | None = None, for_columns: bool = False) -> MaskArguments:
    """Return the kernel arguments of a mask.

    The mask must have no `mask_reasons`; `for_columns` adds what a loop over the queries of a key block needs.
    """
    queries, keys = visibility.num_queries, visibility.num_keys
    query_document, key_document = _documents(visibility)
    per_token = {
        "query_position": visibility.query_positions,
        "key_position": visibility.key_positions,
        "key_ordinal": visibility.key_ordinals,
        "query_document": query_document,
        "key_document": key_document,
    }
    if query_document is not None and key_document is not None:
        per_token["first_key"], per_token["last_key"] = _interval(query_document, key_document)
        if for_columns:
            per_token["first_query"], per_token["last_query"] = _interval(key_document, query_document)
    present = {name: x for name, x in per_token.items() if x is not None}
    batch = max([1, *(x.shape[0] for x in present.values())])  # Dynamo does not support `max(..., default=)`
    present = {name: x.to(torch.int32).expand(batch, -1).contiguous() for name, x in present.items()}
    arguments = MaskArguments(
        left=visibility.left,
        right=visibility.right,
        sinks=visibility.sinks or None,
        offset=visibility.offset,
        stride_query=queries if batch > 1 else 0,
        stride_key=keys if batch > 1 else 0,
        poison=poison,
        **present,  # type: ignore[arg-type]
    )
    if visibility.allowed is not None:
        batch_step, head_step, query_step, key_step = shared_strides(visibility.allowed)
        arguments = arguments._replace(
            allowed=visibility.allowed,
            allowed_batch=batch_step,
            allowed_head=head_step,
            allowed_query=query_step,
            allowed_key=key_step,
        )
    if len(visibility.biases):
        bias = visibility.biases[0].detach()
        batch_step, head_step, query_step, key_step = shared_strides(bias)
        arguments = arguments._replace(
            bias=bias, bias_batch=batch_step, bias_head=head_step, bias_query=query_step, bias_key=key_step
        )
    if len(visibility.relative_biases):
        term = visibility.relative_biases[0]
        table = term.table.detach().contiguous()
        arguments = arguments._replace(
            table=table,
            table_head=table.shape[1] if table.shape[0] > 1 else 0,
            table_zero=term.zero,
            table_width=table.shape[1],
        )
    return arguments


def _documents(visibility: Visibility) -> tuple[Tensor | None, Tensor | None]:
    """Encode documents and padding as one pair of small ids, equal where a query may see a key."""
    if not len(visibility.documents) and visibility.query_real is None and visibility.key_real is None:
        return None, None
    shared = torch.zeros((1, 1), dtype=torch.int64, device=visibility.device)
    query_ids, key_ids = shared.expand(1, visibility.num_queries), shared.expand(1, visibility.num_keys)
    if len(visibility.documents):
        query_ids, key_ids = visibility.documents[0]
    if visibility.query_real is not None:
        query_ids = torch.where(visibility.query_real, query_ids, -1)
    if visibility.key_real is not None:
        key_ids = torch.where(visibility.key_real, key_ids, -2)
    if not len(visibility.documents) or not visibility.num_keys:
        return query_ids, key_ids
    # Replace each id by its rank among the sorted ids of its row, which fits into 32 bits.
    return _compact_ids(query_ids, key_ids)


def _compact_ids(query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    batch = max(query_ids.shape[0], key_ids.shape[0])
    query_ids, key_ids = (ids.expand(batch, -1).contiguous() for ids in (query_ids, key_ids))
    ordered = key_ids.sort(dim=-1).values
    start, stop = (torch.searchsorted(ordered, query_ids, right=right) for right in (False, True))
    renamed = torch.searchsorted(ordered, key_ids)
    return torch.where((stop > start) & (query_ids >= 0), start, -1), torch.where(key_ids >= 0, renamed, -2)


def _interval(ids: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each id its first and last index in `others`; an empty interval if it does not occur."""
    count = others.shape[1]
    batch = max(ids.shape[0], others.shape[0])
    ids, others = ids.expand(batch, -1).contiguous(), others.expand(batch, -1)
    if not count:
        return torch.zeros_like(ids), torch.full_like(ids, -1)
    ordered, order = others.sort(dim=-1, stable=True)
    ordered = ordered.contiguous()
    start = torch.searchsorted(ordered, ids)
    stop = torch.searchsorted(ordered, ids, right=True)
    first = order.gather(-1, start.clamp_max(count - 1))
    last = order.gather(-1, (stop - 1).clamp_min(0))
    occurs = stop > start
    return torch.where(occurs, first, count), torch.where(occurs, last, -1)


def shared_strides(tensor: Tensor) -> list[int]:
    """Return the strides, with 0 for broadcast axes, which have one element."""
    return [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
