"""Argument checks of `profile` and conversion of its arguments to the form the backends take."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.errors import DeviceError, DtypeError, OptionError, ShapeError
from polyhead.ops.common.validation import DTYPES, cast_for_autocast, is_autocast
from polyhead.ops.common.visibility import Span
from polyhead.ops.profile.request import MAX_TOPK, BlockMap, ProfileRequest


def cast_like_attention(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Cast the tensors as `attention` does under autocast, so that the logits are the same."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor)):
        raise DtypeError(f"query and key must be tensors, got {type(query).__name__} and {type(key).__name__}")
    if is_autocast(query.device.type):
        query, key = cast_for_autocast(query.device.type, query, key)
    return query, key


def check_tensors(query: Tensor, key: Tensor, logsumexp: Tensor) -> None:
    if query.ndim != 4 or key.ndim != 4:
        raise ShapeError(
            "query and key must be [batch, heads, sequence, head_dim], "
            f"got shapes {list(query.shape)} and {list(key.shape)}"
        )
    if query.dtype is not key.dtype:
        raise DtypeError(f"query and key must have one dtype, got {query.dtype} and {key.dtype}")
    if query.dtype not in DTYPES:
        raise DtypeError(f"profile takes float16, bfloat16, float32 or float64, got {query.dtype}")
    batch, heads, queries, head_dim = query.shape
    if key.shape[0] != batch or key.shape[3] != head_dim:
        raise ShapeError(
            "query and key must have one batch size and one head_dim, "
            f"got shapes {list(query.shape)} and {list(key.shape)}"
        )
    if heads == 0 or head_dim == 0 or key.shape[1] == 0 or heads % key.shape[1]:
        raise ShapeError(f"query heads must be a multiple of KV heads, got {heads} and {key.shape[1]}")
    if not isinstance(logsumexp, Tensor):
        raise DtypeError(
            f"logsumexp must be the tensor that attention(..., logsumexp=True) returns, got {type(logsumexp).__name__}"
        )
    if logsumexp.shape != (batch, heads, queries):
        raise ShapeError(
            f"logsumexp must be [batch, heads, queries], here {[batch, heads, queries]}, got {list(logsumexp.shape)}"
        )
    if logsumexp.dtype not in (torch.float32, torch.float64):
        raise DtypeError(f"logsumexp must be float32 or float64, as attention returns it, got {logsumexp.dtype}")
    if not (query.device == key.device == logsumexp.device):
        raise DeviceError(
            f"query, key and logsumexp must be on one device, got {query.device}, {key.device} and {logsumexp.device}"
        )


def check_topk(topk: int) -> None:
    if isinstance(topk, bool) or not isinstance(topk, int) or not 0 <= topk <= MAX_TOPK:
        raise OptionError(f"topk must be an integer from 0 to {MAX_TOPK}, got {topk!r}")


def as_grid(block_map: BlockMap | tuple[int, int] | None) -> BlockMap | None:
    """Return the option `block_map` as a BlockMap; a tuple is the size of a block."""
    if block_map is None or isinstance(block_map, BlockMap):
        return block_map
    if isinstance(block_map, tuple):
        return BlockMap(block=block_map)
    raise OptionError(
        "block_map must be polyhead.ops.profile.BlockMap(...) or the height and width of a block in tokens, "
        f"got {type(block_map).__name__}"
    )


def as_window(name: str, span: Span | None, size: int) -> Span:
    """Return the option `rows` or `columns`, (first, one past the last), of `size` tokens; None is all of them."""
    if span is None:
        return 0, size
    integers = isinstance(span, tuple) and all(isinstance(x, int) and not isinstance(x, bool) for x in span)
    if not integers or len(span) != 2 or not 0 <= span[0] < span[1] <= size:
        raise OptionError(
            f"{name} must be a non-empty range (first, one past the last) within 0 to {size}, got {span!r}"
        )
    return span


def _integers(name: str, values: object) -> Tensor:
    """Return the values as an integer or boolean tensor."""
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"{name} must be integers or an integer tensor, got {values!r}") from error
    if tensor.numel() == 0 and not isinstance(values, Tensor):
        tensor = tensor.long()
    if tensor.is_floating_point() or tensor.is_complex():
        raise DtypeError(f"{name} must be integers, got {tensor.dtype}")
    return tensor


def _check_range(name: str, index: Tensor, first: int, last: int) -> None:
    """Check that indices are at least `first` and below `last`, if they are on the CPU.

    Those on a device are not checked, to avoid a synchronisation.
    """
    if index.device.type != "cpu" or not index.numel():
        return
    low, high = int(index.min()), int(index.max())
    if low < first or high >= last:
        raise OptionError(f"{name} must be {first} to {last - 1}, got {low if low < first else high}")


def as_key_set(key_set: object, batch: int, keys: int, device: torch.device) -> Tensor:
    """Return the set of keys as a boolean mask [batch or 1, keys]."""
    tensor = _integers("key_set", key_set)
    if tensor.dtype is torch.bool:
        if tensor.shape not in ((keys,), (1, keys), (batch, keys)):
            raise ShapeError(
                f"a boolean key_set must be [keys] or [batch, keys], here [{keys}] or [{batch}, {keys}], "
                f"got {list(tensor.shape)}"
            )
        return (tensor if tensor.ndim == 2 else tensor[None]).to(device)
    if tensor.ndim != 1:
        raise ShapeError(f"key_set as indices must be a list of keys, got shape {list(tensor.shape)}")
    _check_range("the keys of key_set", tensor, 0, keys)
    members = torch.zeros(keys, dtype=torch.bool, device=device)
    members[tensor.to(device=device, dtype=torch.int64)] = True
    return members[None]


def as_pairs(pairs: object, request: ProfileRequest) -> Tensor:
    """Return (query, key) indices as int64 [batch, pairs, 2]."""
    tensor = _integers("pairs", pairs)
    tensor = tensor.reshape(0, 2) if tensor.numel() == 0 and tensor.ndim == 1 else tensor
    batch = request.query.shape[0]
    if tensor.ndim not in (2, 3) or tensor.shape[-1] != 2 or (tensor.ndim == 3 and tensor.shape[0] not in (1, batch)):
        raise ShapeError(
            f"pairs must be (query, key) indices, [pairs, 2] or [{batch}, pairs, 2], got shape {list(tensor.shape)}"
        )
    _check_range("the queries of pairs", tensor[..., 0], *request.rows)
    _check_range("the keys of pairs", tensor[..., 1], *request.columns)
    tensor = tensor if tensor.ndim == 3 else tensor[None]
    return tensor.expand(batch, -1, -1).to(device=request.query.device, dtype=torch.int64)


def as_head_pairs(head_pairs: object, heads: int, device: torch.device) -> Tensor:
    """Return pairs of heads as int64 [pairs, 2]."""
    tensor = _integers("head_pairs", head_pairs)
    tensor = tensor.reshape(0, 2) if tensor.numel() == 0 and tensor.ndim == 1 else tensor
    if tensor.ndim != 2 or tensor.shape[1] != 2:
        raise ShapeError(f"head_pairs must be pairs of heads, [pairs, 2], got shape {list(tensor.shape)}")
    _check_range("the heads of head_pairs", tensor, 0, heads)
    return tensor.to(device=device, dtype=torch.int64)
