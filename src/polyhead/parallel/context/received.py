"""`context_received`: the attention that the keys of this rank receive from the queries of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead.masks import Mask
from polyhead.ops.common.validation import check_backend, check_softcap, checked_scale, without_autocast
from polyhead.ops.common.visibility import Span, Visibility
from polyhead.ops.profile import validation as checks
from polyhead.ops.profile.api import BACKENDS, run
from polyhead.ops.profile.request import ProfileRequest
from polyhead.parallel.agreement import agreed, check_local
from polyhead.parallel.context.api import whole_visibility
from polyhead.parallel.context.crop import crop
from polyhead.parallel.context.layout import Layout, check_layout, chunk_spans, sum_of_shards
from polyhead.parallel.context.parts import ContextCall, of_span
from polyhead.parallel.context.ring import circulate, parts
from polyhead.parallel.groups import rank_group

if TYPE_CHECKING:
    from jaxtyping import Float


def context_received(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    logsumexp: Float[Tensor, "batch heads queries"],
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    dimension: str | None = None,
    layout: Layout = "zigzag",
    mask: Mask | None = None,
    scale: float | Float[Tensor, " heads"] | None = None,
    softcap: float | None = None,
    backend: str = "auto",
    check: bool = True,
) -> Tensor:
    """Return the weight that each key of this rank receives, summed over the queries of all ranks, per head.

    It is `polyhead.profile(..., received=True)` of the whole sequence. Keys travel from rank to rank, so that each rank
    stores its own.

    Args:
        query, key, mesh, dimension, layout, mask, scale, softcap, check: as in `context_attention`.
        logsumexp: that of this rank's queries, from `context_attention(..., logsumexp=True)`.
        backend: as in `polyhead.profile`.

    Returns:
        [batch, heads, keys] in float32 (float64 for float64 input), without a gradient.

    Raises:
        ShapeError, DtypeError, DeviceError, MaskError, OptionError: arguments do not fit together, or differ between
            ranks; raised on every rank.
        CommunicationError: a rank did not answer within the time-out of the group.
    """
    group = rank_group(mesh, dimension)

    def prepare() -> tuple[tuple[ContextCall, Tensor, Tensor], Mapping[str, str], list[Tensor]]:
        check_layout(layout)
        check_local(query, key, logsumexp)
        check_backend(backend, BACKENDS)
        q, k = checks.cast_like_attention(query, key)
        checks.check_tensors(q, k, logsumexp)
        if softcap is not None:
            check_softcap(softcap)
        factor = checked_scale(scale, q.shape[1], q)
        for tokens in (q.shape[2], k.shape[2]):
            chunk_spans(tokens, group.rank, group.size, layout)
        visibility = whole_visibility(mask, group, q, k.shape[2])
        call = ContextCall(group, layout, q.shape[2], k.shape[2], visibility, factor, softcap, False, backend)
        tensors = [x for x in (scale, *([] if mask is None else mask.tensors)) if isinstance(x, Tensor)]
        fields = {
            "function": "context_received",
            "shapes of query and key": f"{list(q.shape)} and {list(k.shape)}",
            "dtype": str(q.dtype),
            "layout, mask and softcap": f"{layout}, {mask!r} and {softcap}",
            "scale": "one per head" if isinstance(factor, Tensor) else repr(factor),
            "shapes and dtypes of mask and scale": str([(list(x.shape), str(x.dtype)) for x in tensors]),
        }
        return (call, q, k), fields, tensors

    call, query, key = agreed(group, query, prepare, check=check)
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    shape = (group.size, *query.shape[:2], key.shape[2])
    with torch.no_grad(), without_autocast(query.device.type):
        received = torch.zeros(shape, dtype=dtype, device=query.device)
        for source, (keys,) in circulate(group, (key,)):
            key_spans = call.key_spans(source)
            for i_query, rows, i_key, columns in parts(call, source):
                tensors = (query, logsumexp)
                q, lse = (of_span(x, call.query_spans, i_query, rows) for x in tensors)
                k = of_span(keys, key_spans, i_key, columns)
                of_span(received[source], key_spans, i_key, columns).add_(_received(call, q, k, lse, rows, columns))
        return sum_of_shards(received, group)


def _received(call: ContextCall, query: Tensor, key: Tensor, logsumexp: Tensor, rows: Span, columns: Span) -> Tensor:
    """Return the weight that the keys of `columns` receive from the queries of `rows`, [batch, heads, keys]."""
    visibility = crop(call.visibility, rows, columns, positions=False, ordinals=False)
    sizes = query.shape[2], key.shape[2]
    request = ProfileRequest(
        query=query,
        key=key,
        logsumexp=logsumexp,
        visibility=visibility,
        positions=visibility or Visibility(*sizes, query.device, offset=sizes[1] - sizes[0]),
        scale=call.scale,
        softcap=call.softcap,
        rows=(0, sizes[0]),
        columns=(0, sizes[1]),
        received=True,
        block=None,
        pool="sum",
        offsets=False,
        argmax=False,
        topk=0,
        key_set=None,
        head_pairs=None,
    )
    return run(request, call.backend)[1]["received"]
