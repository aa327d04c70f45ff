"""A comparison of the arguments of all ranks, so that a disagreement is an error on each of them and not a hang.

Each rank sends every other a digest of its arguments and of the values of its mask. Results are not cached: if a rank
skipped the comparison of arguments that it had compared before, a rank with new arguments would wait for it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from polyhead.errors import OptionError, PolyheadError
from polyhead.parallel.groups import RankGroup

Result = TypeVar("Result")
DIGEST_BYTES = 24  # three int64: a hash of the arguments (two) and one of the values of the tensors
# Odd factors of a multiplicative hash (those of SplitMix64), as int64.
_FACTORS = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def agreed(
    group: RankGroup,
    like: Tensor,
    prepare: Callable[[], tuple[Result, Mapping[str, str], Iterable[Tensor]]],
    *,
    check: bool = True,
) -> Result:
    """Return the result of `prepare`, once the ranks have compared what else it returns.

    Args:
        group: the ranks.
        like: a tensor on the device from which digests are sent; `prepare` must raise if it is none.
        prepare: validates the arguments; returns (result, arguments as text by name, tensors): text and the values of
            tensors must be equal on all ranks.
        check: compare; otherwise `prepare` is called and nothing is sent.

    Raises:
        OptionError: the ranks disagree, or another rank refused its arguments; raised on every rank.
    """
    if not check or group.size == 1:
        return prepare()[0]
    device = like.device if isinstance(like, Tensor) else torch.get_default_device()
    error: PolyheadError | None = None
    fields: Mapping[str, str]
    try:
        result, fields, tensors = prepare()
        values = checksum(tensors, device)
    except PolyheadError as refused:
        error, fields, values = refused, {"error": f"{type(refused).__name__}: {refused}"}, torch.zeros(1).long()
    digests = _exchange(group, _digest(fields, values, device))
    if all(torch.equal(digests[0], digest) for digest in digests):
        if error is not None:
            raise error
        return result
    everyone: list[Any] = [None] * group.size
    dist.all_gather_object(everyone, (dict(fields), digests[group.rank][2].item()), group.process_group)
    if error is not None:
        raise error
    raise OptionError(_disagreement(everyone))


def check_local(*tensors: Tensor) -> None:
    """Raise `OptionError` if a tensor is a DTensor: context parallel functions take the tokens of a rank."""
    module = sys.modules.get("torch.distributed.tensor")  # imported if there is any
    if module is not None and any(isinstance(x, module.DTensor) for x in tensors):
        raise OptionError("a rank passes the tokens that it holds as plain tensors, got a DTensor; use x.to_local()")


def _disagreement(everyone: list[tuple[dict[str, str], int]]) -> str:
    """Return a message that names a rank and the argument in which it differs from rank 0, or which it refused."""
    size = len(everyone)
    for rank, (fields, _) in enumerate(everyone):
        if "error" in fields:
            return f"every rank must pass valid arguments; rank {rank} of {size} refused its own: {fields['error']}"
    first, first_values = everyone[0]
    for rank, (fields, values) in enumerate(everyone):
        for name, text in fields.items():
            if first.get(name) != text:
                return (
                    f"every rank must pass the same {name}, got {text} on rank {rank} and {first.get(name)} on rank 0 "
                    f"of {size}"
                )
        if values != first_values:
            return (
                f"every rank must pass the same mask, scale and sinks, got other values on rank {rank} than on "
                f"rank 0 of {size}; a mask is that of the whole sequence on each rank"
            )
    raise AssertionError("digests differ, but what they are made of does not")


def _digest(fields: Mapping[str, str], values: Tensor, device: torch.device) -> Tensor:
    text = hashlib.blake2b(repr(sorted(fields.items())).encode(), digest_size=16).digest()
    numbers = [int.from_bytes(half, "little", signed=True) for half in (text[:8], text[8:])]
    return torch.cat([torch.tensor(numbers, device=device), values.to(device)])


def checksum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a hash of the values and the order of all elements, int64 [1].

    Args:
        tensors: real tensors of at least 16 bits, integers or booleans.
        device: device of the result.
    """
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for tensor in tensors:
        x = tensor.detach()
        if x.is_floating_point():
            x = x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
        x = x.reshape(-1).to(device=device, dtype=torch.int64)
        mixed = x * _FACTORS[0] + torch.arange(x.numel(), device=device) * _FACTORS[1]  # int64 wraps around
        total = total * 31 + ((mixed ^ (mixed >> 29)) * _FACTORS[2]).bitwise_xor_(mixed >> 32).sum()
    return total


def _exchange(group: RankGroup, digest: Tensor) -> list[Tensor]:
    """Return the digests of all ranks, on the CPU."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    digests = [digest if rank == group.rank else torch.empty_like(digest) for rank in range(group.size)]
    # One message per pair of ranks rather than an all-gather: one that does not arrive names its rank.
    operations = [group.receive(digests[rank], rank) for rank in others] + [group.send(digest, rank) for rank in others]
    group.start(operations).wait()
    return list(torch.stack(digests).cpu())
