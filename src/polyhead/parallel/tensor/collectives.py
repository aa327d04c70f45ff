"""Collectives over the ranks of a mesh dimension, with gradients, and errors that name the rank and the rule.

The backward of an all-gather is a reduce-scatter, and the reverse. Every rank computes the same loss, so that a
replicated tensor has the same gradient on each: the backward of an all-reduce needs no communication, and the gradient
of a replicated tensor from which ranks compute different heads is all-reduced.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead.errors import CommunicationError, OptionError


@dataclass(frozen=True, eq=False)
class MeshRanks:
    """The ranks of one mesh dimension, of which this process is one.

    Args:
        mesh: one-dimensional mesh.
    """

    mesh: DeviceMesh

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """Index of this process in the mesh dimension."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def __repr__(self) -> str:
        names = self.mesh.mesh_dim_names
        dimension = f"mesh dimension {names[0]!r}" if names else "the mesh"
        return f"{dimension} of ranks {', '.join(map(str, self.mesh.mesh.tolist()))}"

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Raise a `CommunicationError` that names this rank and the collective, in place of the error of a backend."""
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                f"every rank must call the same layers with inputs of the same shapes: rank {dist.get_rank()} failed "
                f"in {what} over {self!r}, got {error}; another rank raised, stopped or was called differently"
            ) from error

    # ---- without gradients

    def summed(self, x: Tensor, what: str) -> Tensor:
        """Return the sum of x over the ranks."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        with self.collective(what):
            dist.all_reduce(total, group=self.group)
        return total

    def gathered(self, x: Tensor, dim: int, what: str) -> Tensor:
        """Return the x of all ranks, concatenated along `dim`; all have the same shape."""
        x = x.detach().contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self.collective(what):
            dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, dim)

    def scattered_sum(self, x: Tensor, dim: int, what: str) -> Tensor:
        """Return this rank's part along `dim` of the sum of x over the ranks."""
        parts = [part.contiguous() for part in x.detach().chunk(self.size, dim)]
        total = torch.empty_like(parts[0])
        with self.collective(what):
            dist.reduce_scatter(total, parts, group=self.group)
        return total


class _SumGradients(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks: for replicated inputs of different heads."""

    @staticmethod
    def forward(ctx: Any, ranks: MeshRanks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.set_materialize_grads(True)  # a rank that does not use a tensor still takes part in its sum
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        return None, *(
            sum_over_ranks(ctx.ranks, x, "the sum of gradients") if wanted else None
            for x, wanted in zip(gradients, needed, strict=True)
        )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: MeshRanks, x: Tensor, what: str) -> Tensor:
        ctx.ranks = ranks
        return ranks.summed(x, what)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (gradient,) = sum_gradients(ctx.ranks, gradient)
        return None, gradient, None


class _Gather(torch.autograd.Function):
    """All-gather; with `same`, all ranks compute the same with its result, whose gradient is then not summed."""

    @staticmethod
    def forward(ctx: Any, ranks: MeshRanks, x: Tensor, dim: int, same: bool, what: str) -> Tensor:
        ctx.ranks, ctx.dim, ctx.same = ranks, dim, same
        return ranks.gathered(x, dim, what)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ranks: MeshRanks = ctx.ranks
        if ctx.same:
            return None, _Part.apply(ranks, gradient, ctx.dim), None, None, None
        part = _ScatterSum.apply(ranks, gradient, ctx.dim, "the sum of gradients of a gathered sequence")
        return None, part, None, None, None


class _Part(torch.autograd.Function):
    """This rank's part of a tensor that all ranks hold."""

    @staticmethod
    def forward(ctx: Any, ranks: MeshRanks, x: Tensor, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return x.chunk(ranks.size, dim)[ranks.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, _Gather.apply(ctx.ranks, gradient, ctx.dim, True, "the gather of gradients"), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: MeshRanks, x: Tensor, dim: int, what: str) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return ranks.scattered_sum(x, dim, what)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, _Gather.apply(ctx.ranks, gradient, ctx.dim, False, "the gather of gradients"), None, None


def sum_gradients(ranks: MeshRanks, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors unchanged; their gradients are summed over the ranks."""
    apply: Callable[..., tuple[Tensor, ...]] = _SumGradients.apply
    return apply(ranks, *tensors)


def sum_over_ranks(ranks: MeshRanks, x: Tensor, what: str) -> Tensor:
    """Return the sum of x over the ranks, with which all ranks compute the same."""
    apply: Callable[..., Tensor] = _Sum.apply
    return apply(ranks, x, what)


def gather(ranks: MeshRanks, x: Tensor, dim: int, what: str, *, same_use: bool) -> Tensor:
    """Return the x of all ranks along `dim`.

    `same_use`: all ranks compute the same with the result, so that its gradient is the same on all of them; otherwise
    the gradients of the ranks are summed.
    """
    apply: Callable[..., Tensor] = _Gather.apply
    return apply(ranks, x, dim, same_use, what)


def scatter_sum(ranks: MeshRanks, x: Tensor, dim: int, what: str) -> Tensor:
    """Return this rank's part along `dim` of the sum of x over the ranks."""
    apply: Callable[..., Tensor] = _ScatterSum.apply
    return apply(ranks, x, dim, what)


# ---- agreement of the ranks


def exchange(ranks: MeshRanks, text: str, what: str) -> list[str]:
    """Return the texts of all ranks, in order; raise a `CommunicationError` naming ranks that do not answer in time.

    The default store is used, because it can report which ranks are missing. Its time limit is that of
    `init_process_group`, unless a store with another was passed there.
    """
    group, members = ranks.group, ranks.mesh.mesh.tolist()
    store: Any = dist.distributed_c10d._get_default_store()
    path = f"polyhead/{group.group_name}"
    number = store.add(f"{path}/exchanges/{dist.get_rank()}", 1)  # counted there: a new store begins with none
    keys = [f"{path}/{number}/{member}" for member in members]
    store.set(keys[ranks.rank], text)
    answers = []
    for key, member in zip(keys, members, strict=True):
        try:
            store.wait([key], store.timeout)
        except RuntimeError as error:
            missing = [m for m, k in zip(members, keys, strict=True) if m == member or not store.check([k])]
            raise CommunicationError(
                f"every rank of {ranks!r} must take part in {what}: rank {dist.get_rank()} waited "
                f"{store.timeout.total_seconds():g} seconds, got no answer of rank {', '.join(map(str, missing))}; run "
                "the same program on every rank"
            ) from error
        answers.append(str(store.get(key), "utf-8"))
    return answers


def check_same_call(ranks: MeshRanks, facts: dict[str, str], what: str) -> None:
    """Raise as `check_same` does if the facts of a call on the CPU differ between ranks; one small gather if not.

    A backend would stop the process, or wait, where the shapes of ranks differ.
    """
    number = torch.tensor([zlib.crc32(json.dumps(facts).encode())])
    if len({*ranks.gathered(number, 0, f"the comparison of {what}").tolist()}) > 1:
        check_same(ranks, facts, None, what)


def check_same(ranks: MeshRanks, facts: dict[str, str], issue: str | None, what: str) -> None:
    """Raise the same `OptionError` on every rank if one of them has an issue, or facts that differ from the others'.

    Args:
        ranks: the ranks to compare.
        facts: what must be the same on all ranks, by name.
        issue: error message of this rank, or None.
        what: name of the step, for error messages.
    """
    answers = [json.loads(x) for x in exchange(ranks, json.dumps([issue, facts]), what)]
    members = ranks.mesh.mesh.tolist()
    for member, (other_issue, _) in zip(members, answers, strict=True):
        if other_issue is not None:
            raise OptionError(f"{other_issue} (on rank {member})")
    _, first = answers[0]
    for member, (_, other) in zip(members, answers, strict=True):
        different = [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]
        if different:
            got = ", ".join(f"{name} {other.get(name)} instead of {first.get(name)}" for name in different)
            raise OptionError(
                f"the ranks of {ranks!r} must agree on {what}, got rank {member} with {got} of rank {members[0]}; "
                "run the same program on every rank"
            )
