"""Bytes that context-parallel attention sends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polyhead.errors import OptionError
from polyhead.geometry import checked_integer
from polyhead.parallel.agreement import DIGEST_BYTES
from polyhead.parallel.context.api import Method, check_method, method_by_size


@dataclass(frozen=True, slots=True)
class ContextBytes:
    """Bytes that each rank sends, and as many that it receives, in one call of `context_attention`.

    `check` is sent with `check=True` alone. `backward` is sent if there is a backward: of the ring for any input that
    requires a gradient, of the all-gather for keys or values alone.
    """

    method: str  # "ring" or "all_gather"
    check: int
    forward: int
    backward: int


def context_bytes(
    *,
    batch: int,
    kv_heads: int,
    tokens: int,
    head_dim: int,
    ranks: int,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    method: Method = "auto",
) -> ContextBytes:
    """Return the bytes that each rank sends in one call of `context_attention`.

    All-gather: the shard of keys and values is sent to each of the other ranks, and the gradients as much in the other
    direction. Ring: the shards travel past all ranks, once in the forward and once more in the backward, in which their
    gradients travel with them in float32 (float64 for float64).

    Args:
        batch: number of sequences.
        kv_heads: KV heads of each rank.
        tokens: tokens of the whole sequence.
        head_dim: channels of a key.
        ranks: number of ranks over which the sequence is split.
        value_dim: channels of a value; `head_dim` by default.
        dtype: dtype of keys and values.
        method: as in `context_attention`; "auto" is resolved by size.

    >>> context_bytes(batch=1, kv_heads=8, tokens=131072, head_dim=128, ranks=8)
    ContextBytes(method='ring', check=168, forward=469762048, backward=1409286144)
    """
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"batch": batch, "kv_heads": kv_heads, "tokens": tokens, "ranks": ranks}
    sizes |= {"head_dim": head_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        checked_integer(name, size, at_least=1, error=OptionError)
    if tokens % ranks:
        raise OptionError(f"every rank has equally many tokens, got {tokens} tokens for {ranks} ranks")
    check_method(method)
    elements = batch * kv_heads * (tokens // ranks) * (head_dim + value_dim)
    shard = elements * dtype.itemsize
    if method == "auto":
        method = method_by_size(shard * ranks)
    gradients = elements * max(dtype.itemsize, 4)
    backward = shard if method == "all_gather" else shard + gradients
    hops = ranks - 1
    return ContextBytes(method, hops * DIGEST_BYTES, hops * shard, hops * backward)
