"""The ranks over which a call is split: a process group, or one dimension of a device mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead.errors import CommunicationError, OptionError


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """A process group, its size, and the rank of this process in it; ranks are those of the group, not global ones."""

    process_group: dist.ProcessGroup
    rank: int
    size: int

    def send(self, tensor: Tensor, rank: int) -> dist.P2POp:
        """Return the operation that sends a tensor to a rank, for `start`."""
        return dist.P2POp(dist.isend, tensor, self._global_rank(rank), self.process_group)

    def receive(self, tensor: Tensor, rank: int) -> dist.P2POp:
        """Return the operation that fills a tensor with what a rank sends, for `start`."""
        return dist.P2POp(dist.irecv, tensor, self._global_rank(rank), self.process_group)

    def start(self, operations: list[dist.P2POp]) -> Transfer:
        """Start to send and to receive; the tensors must not be used until the transfer has finished."""
        if not operations:
            return Transfer(self, [], [])
        try:
            return Transfer(self, operations, dist.batch_isend_irecv(operations))
        except RuntimeError as error:
            self.fail(error)

    def fail(self, error: RuntimeError, peer: str = "another rank") -> NoReturn:
        """Raise `CommunicationError` from an error of torch.distributed.

        Args:
            error: what torch.distributed raised.
            peer: the rank that did not answer.
        """
        raise CommunicationError(
            f"every rank of the group must make the same calls, forward and backward, within its time-out; "
            f"rank {self.rank} of {self.size} got no answer from {peer}, which may have failed, "
            f"made another call or none ({str(error).splitlines()[0]})"
        ) from error

    def peer_of(self, operation: dist.P2POp) -> str:
        return f"rank {dist.get_group_rank(self.process_group, operation.peer)}"

    def _global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.process_group, rank)


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """Pending sends and receives of a rank."""

    group: RankGroup
    operations: list[dist.P2POp]
    works: list[dist.Work]

    def wait(self) -> None:
        """Wait until all tensors were sent and received.

        Raises:
            CommunicationError: a rank did not answer.
        """
        is_separate = len(self.works) == len(self.operations)  # NCCL has one work for all of them
        for i, work in enumerate(self.works):
            try:
                work.wait()
            except RuntimeError as error:
                self.group.fail(error, self.group.peer_of(self.operations[i]) if is_separate else "another rank")


def rank_group(mesh: DeviceMesh | dist.ProcessGroup | None, dimension: str | None) -> RankGroup:
    """Return the ranks of a mesh's dimension, of a process group, or all ranks.

    Args:
        mesh: a device mesh, a process group, or None for all ranks.
        dimension: name of the dimension of a mesh, required unless it has just one.

    Raises:
        OptionError: torch.distributed is not initialised, the mesh has no such dimension, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise OptionError(
            "ranks need torch.distributed, got a process in which it is not initialised; call "
            "torch.distributed.init_process_group() or torch.distributed.device_mesh.init_device_mesh(...) first"
        )
    group: dist.ProcessGroup | None
    if isinstance(mesh, DeviceMesh):
        group = _mesh_group(mesh, dimension)
    elif dimension is not None:
        raise OptionError(f"dimension names a dimension of a DeviceMesh, got {dimension!r} without a mesh")
    elif mesh is None:
        group = dist.group.WORLD
    elif isinstance(mesh, dist.ProcessGroup):
        group = mesh
    elif mesh is dist.GroupMember.NON_GROUP_MEMBER:  # what `new_group` returns to the ranks outside of the group
        group = None
    else:
        raise OptionError(f"mesh must be a DeviceMesh, a ProcessGroup or None, got {type(mesh).__name__}")
    rank = -1 if group is None else dist.get_rank(group)
    if group is None or rank < 0:
        raise OptionError(f"a rank must be a member of the group it calls, got rank {dist.get_rank()} outside of it")
    return RankGroup(group, rank, dist.get_world_size(group))


def _mesh_group(mesh: DeviceMesh, dimension: str | None) -> dist.ProcessGroup:
    names = mesh.mesh_dim_names or ()
    if dimension is None:
        if mesh.ndim != 1:
            raise OptionError(
                f"a mesh of several dimensions needs dimension=, the name of one of them, got {mesh.ndim} dimensions "
                f"{names or '(without names)'} and no name"
            )
    elif dimension not in names:
        raise OptionError(f"dimension must be one of the mesh's, {names or '(without names)'}, got {dimension!r}")
    if mesh.get_coordinate() is None:
        raise OptionError(f"a rank must be a member of the mesh, got rank {dist.get_rank()} outside of it")
    return mesh.get_group(dimension)
