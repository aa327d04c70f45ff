"""`context_attention`: attention over a sequence whose tokens are spread over several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead.errors import OptionError
from polyhead.masks import Mask
from polyhead.ops.attention.dispatch import BACKENDS
from polyhead.ops.attention.validation import checked_request
from polyhead.ops.common.request import AttentionOutput, AttentionRequest
from polyhead.ops.common.statistics import Statistics, as_statistics
from polyhead.ops.common.validation import check_backend, check_mask, without_autocast
from polyhead.ops.common.visibility import Visibility, resolve
from polyhead.parallel.agreement import agreed, check_local
from polyhead.parallel.context import all_gather, ring
from polyhead.parallel.context.layout import Layout, check_layout, chunk_spans
from polyhead.parallel.context.parts import ContextCall
from polyhead.parallel.groups import RankGroup, rank_group

if TYPE_CHECKING:
    from jaxtyping import Float

Method = Literal["auto", "ring", "all_gather"]
MOST_GATHERED = 1 << 28  # bytes of all keys and values up to which "auto" gathers them: 256 MiB


def context_attention(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    dimension: str | None = None,
    layout: Layout = "zigzag",
    method: Method = "auto",
    mask: Mask | None = None,
    scale: float | Float[Tensor, " heads"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    backend: str = "auto",
    statistics: bool | str | Sequence[str] | Statistics | None = None,
    logsumexp: bool = False,
    finite: bool = False,
    check: bool = True,
) -> AttentionOutput:
    """Compute `polyhead.attention` over a sequence that is spread over ranks; every rank passes its own tokens.

    Output, log-sum-exp and all row statistics are those of the whole sequence, and so are their gradients. Every rank
    of the group must make the call, with shards of the same shapes, and run the backward if one rank does.

    Args:
        query: [batch, heads, queries, head_dim], the queries of this rank's tokens (`shard_sequence`).
        key: [batch, kv_heads, keys, head_dim], the keys of this rank's tokens.
        value: [batch, kv_heads, keys, value_dim].
        mesh: the ranks: a `DeviceMesh`, a `ProcessGroup`, or None for all ranks.
        dimension: name of the mesh's dimension over which sequences are split, required if it has several.
        layout: "zigzag", which is balanced under a causal mask, or "contiguous"; as in `shard_sequence`.
        method: "all_gather" (each rank stores the keys and values of the whole sequence), "ring" (each rank stores its
            own; the backward computes the parts again) or "auto": all_gather up to 256 MiB of keys and values, or where
            ring does not support the call.
        mask: the mask of the whole sequence, the same on every rank; lengths, document ids and positions are those of
            all tokens, in the order of the sequence, whatever the layout.
        scale, softcap, sinks, backend, statistics, logsumexp, finite: as in `polyhead.attention`. The gradient that a
            rank computes of `sinks`, of `scale` and of biases is that of its own queries: sum it over the ranks, as
            that of every other replicated parameter.
        check: compare the arguments of all ranks first, with one message of 24 bytes between any two ranks, for which
            the process waits. Without it a disagreement may hang until the time-out, or return wrong numbers.

    Returns:
        The output of this rank's queries, [batch, heads, queries, value_dim], and what was requested besides.
        `backend` is the method and the backend of its parts, such as "ring/fused".

    Raises:
        ShapeError, DtypeError, DeviceError, MaskError, OptionError: arguments do not fit together, or differ between
            ranks; raised on every rank.
        CommunicationError: a rank did not answer within the time-out of the group.
        BackendUnsupported: the named backend cannot compute a part of the call.
    """
    group = rank_group(mesh, dimension)

    def prepare() -> tuple[tuple[ContextCall, AttentionRequest, str], Mapping[str, str], list[Tensor]]:
        check_layout(layout)
        check_local(query, key, value)
        check_method(method)
        check_backend(backend, BACKENDS)
        options = {"scale": scale, "softcap": softcap, "sinks": sinks, "logsumexp": logsumexp, "finite": finite}
        request = checked_request(query, key, value, statistics=statistics, **options)  # type: ignore[arg-type]
        call = _context_call(request, group, layout, mask, backend, as_statistics(statistics))
        chosen = _method(method, call, request)
        tensors = [x for x in (scale, sinks, *([] if mask is None else mask.tensors)) if isinstance(x, Tensor)]
        fields = _fields(request, call, mask, tensors, chosen)
        return (call, request, chosen), fields, tensors

    call, request, chosen = agreed(group, query, prepare, check=check)
    tensors = (request.query, request.key, request.value, request.sinks)
    with without_autocast(query.device.type):
        if chosen == "ring":
            return ring.attend(call, *tensors)
        return all_gather.attend(call, *tensors, logsumexp=logsumexp)


def check_method(method: str) -> None:
    if method not in ("auto", "ring", "all_gather"):
        raise OptionError(f"method must be 'auto', 'ring' or 'all_gather', got {method!r}")


def method_by_size(gathered: int) -> Method:
    """Return the method of "auto" for keys and values of so many bytes on all ranks together."""
    return "all_gather" if gathered <= MOST_GATHERED else "ring"


def whole_visibility(
    mask: Mask | None, group: RankGroup, query: Tensor, num_keys: int, *, ordinals: bool = False
) -> Visibility:
    """Return the mask of the whole sequence, resolved; one that hides nothing is not None here.

    Args:
        mask: the mask of the whole sequence.
        group: the ranks.
        query: the queries of this rank.
        num_keys: the number of keys of this rank.
        ordinals: as in `resolve`.
    """
    batch, heads, queries, _ = query.shape
    queries, keys = queries * group.size, num_keys * group.size
    visibility = None
    if mask is not None:
        check_mask(mask)
        sizes = {"batch": batch, "heads": heads, "queries": queries, "keys": keys}
        visibility = resolve(mask, **sizes, device=query.device, ordinals=ordinals)
    return visibility or Visibility(queries, keys, query.device, offset=keys - queries)


def _context_call(
    request: AttentionRequest,
    group: RankGroup,
    layout: Layout,
    mask: Mask | None,
    backend: str,
    statistics: Statistics | None,
) -> ContextCall:
    query, key, requested = request.query, request.key, request.statistics
    for tokens in (query.shape[2], key.shape[2]):
        chunk_spans(tokens, group.rank, group.size, layout)
    names = () if requested is None else requested.names
    visibility = whole_visibility(mask, group, query, key.shape[2], ordinals="sink_mass" in names)
    call = (group, layout, query.shape[2], key.shape[2], visibility, request.scale, request.softcap, request.finite)
    if statistics is None:
        return ContextCall(*call, backend)
    return ContextCall(*call, backend, names, statistics.sink_keys, statistics.window)


def _method(method: str, call: ContextCall, request: AttentionRequest) -> str:
    """Return the method to use; raise OptionError if it is "ring" and cannot serve the call."""
    learned = [*call.visibility.bias_tensors, *([call.scale] if isinstance(call.scale, Tensor) else [])]
    reason = ""
    if torch.is_grad_enabled() and any(x.requires_grad for x in learned):
        reason = "the ring has no gradient of a scale or a bias, got one that requires a gradient"
    if method == "ring" and reason:
        raise OptionError(f"{reason}; use method='all_gather'")
    if method != "auto":
        return method
    gathered = (request.key.nbytes + request.value.nbytes) * call.group.size
    return "all_gather" if reason else method_by_size(gathered)


def _fields(
    request: AttentionRequest, call: ContextCall, mask: Mask | None, tensors: Sequence[Tensor], method: str
) -> dict[str, str]:
    """Return the arguments in which ranks must agree, by name."""
    inputs = {"query": request.query, "key": request.key, "value": request.value}
    learned = inputs if request.sinks is None else {**inputs, "sinks": request.sinks}
    records = torch.is_grad_enabled()
    fields = {f"shape of the {name}": str(list(x.shape)) for name, x in inputs.items()}
    return fields | {
        "dtype": str(request.query.dtype),
        "kind of device": request.query.device.type,
        "layout": call.layout,
        "method": method,
        "backend": call.backend,
        "mask": repr(mask),
        "scale": "one per head" if isinstance(call.scale, Tensor) else repr(call.scale),
        "softcap": repr(call.softcap),
        "sinks": "none" if request.sinks is None else "one per head",
        "shapes and dtypes of mask, scale and sinks": str([(list(x.shape), str(x.dtype)) for x in tensors]),
        "statistics": f"{', '.join(call.names) or 'none'} (sink_keys {call.sink_keys}, window {call.window})",
        "logsumexp and finite": f"{request.logsumexp} and {request.finite}",
        "inputs with a gradient": ", ".join(name for name, x in learned.items() if records and x.requires_grad)
        or "none",
    }
