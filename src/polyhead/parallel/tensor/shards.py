"""Parameters of a layer as DTensors, and the tensors of this rank's heads in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from polyhead.errors import CheckpointError, OptionError
from polyhead.layers.base_attention import BaseAttention
from polyhead.parallel.tensor.collectives import MeshRanks
from polyhead.parallel.tensor.head_split import HeadSplit, kv_heads_read, kv_split
from polyhead.parallel.tensor.rules import rule_of

OUTPUT_BIAS, GATE = "out_proj.bias", "head_gate"


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """One parameter over the ranks.

    A split parameter is sharded along `dim` in whole heads, after zero heads as padding; others are replicated, and
    `selected` are the heads (or KV heads, or maps) of this rank. Without either, all heads share the parameter.
    """

    name: str
    dim: int
    length: int  # size along `dim`, without padding
    split: HeadSplit | None = None
    selected: tuple[int, ...] | None = None
    units: int = 1  # heads, KV heads or maps along `dim`

    @property
    def placement(self) -> Placement:
        return Replicate() if self.split is None else Shard(self.dim)

    @property
    def padding(self) -> int:
        """Rows (or columns) of zeros after those of the heads."""
        return 0 if self.split is None else self.split.padding * (self.length // self.units)

    @property
    def is_summed(self) -> bool:
        """Whether its gradient is summed over the ranks, besides that of the output bias and of gates."""
        return self.split is None and self.name not in (OUTPUT_BIAS, GATE)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what a rank stores of a parameter of this shape."""
        if self.split is None:
            return tuple(shape)
        stored = (self.length + self.padding) // self.split.ranks
        return *shape[: self.dim], stored, *shape[self.dim + 1 :]

    def distribute(self, parameter: Tensor, ranks: MeshRanks, source: int | None) -> nn.Parameter:
        """Return the parameter as a DTensor, with the values of rank `source` of the group, or of every rank itself."""
        if isinstance(parameter, DTensor):
            if parameter.device_mesh == ranks.mesh and parameter.placements == (self.placement,):
                return parameter  # type: ignore[return-value]  # of a module that another layer shares
            raise OptionError(
                f"parameters must not be distributed yet, got {self.name} as a DTensor over "
                f"{parameter.device_mesh} with {parameter.placements}; apply HeadParallel first and once"
            )
        whole = padded(parameter.detach(), self.dim, self.padding)
        value = distribute_tensor(whole, ranks.mesh, [self.placement], src_data_rank=source)
        return nn.Parameter(value, requires_grad=parameter.requires_grad)

    def local(self, parameter: Tensor, rank: int) -> Tensor:
        """Return what this rank computes with; of a replicated parameter, before `select`."""
        if not isinstance(parameter, DTensor):
            return parameter  # a gate that was set after the layer was distributed
        if parameter.device_mesh.ndim != 1:
            raise OptionError(
                f"a parameter must be gathered over all but the dimension of the heads, got {self.name} over "
                f"{parameter.device_mesh}; apply fully_shard to the layer or to modules around it, not to its parts"
            )
        local = parameter.to_local()
        if self.split is None:
            return local
        size, heads = self.length // self.units, self.split.heads(rank)
        if not len(heads):  # a zero head, whatever an initialisation wrote into the padding
            zero_head = local.narrow(self.dim, 0, size)
            return zero_head.masked_fill(torch.ones((), dtype=torch.bool, device=local.device), 0)
        return local.narrow(self.dim, 0, len(heads) * size)

    def select(self, local: Tensor) -> Tensor:
        """Return the rows of this rank's heads from a replicated parameter; others unchanged."""
        if self.selected is None:
            return local
        first, count = self.selected[0], len(self.selected)
        if self.selected == tuple(range(first, first + count)):
            size = self.length // self.units
            return local.narrow(self.dim, first * size, count * size)
        index = torch.tensor(self.selected, device=local.device)
        by_unit = local.unflatten(self.dim, (self.units, -1)).index_select(self.dim, index)
        return by_unit.flatten(self.dim, self.dim + 1)

    # ---- checkpoints

    def unpadded(self, saved: Tensor) -> Tensor:
        """Return a DTensor without the zero heads, sharded evenly, for a checkpoint; gathers it."""
        if not self.padding or not isinstance(saved, DTensor):
            return saved
        whole = saved.full_tensor().detach().narrow(self.dim, 0, self.length)
        placements = [Replicate() if x.is_replicate() else Shard(self.dim) for x in saved.placements]
        return distribute_tensor(whole, saved.device_mesh, placements, src_data_rank=None)

    def padded_like(self, saved: Tensor, parameter: Tensor) -> Tensor:
        """Return a value of a checkpoint, whole or distributed, as the parameter stores it."""
        if not isinstance(parameter, DTensor) or (isinstance(saved, DTensor) and not self.padding):
            return saved
        whole = saved.full_tensor() if isinstance(saved, DTensor) else saved
        expected = [*parameter.shape]
        expected[self.dim] -= self.padding
        if [*whole.shape] != expected:
            raise CheckpointError(f"{self.name} must have shape {expected}, got {[*whole.shape]} in the checkpoint")
        mesh = parameter.device_mesh
        whole = padded(whole if parameter.is_meta else whole.to(parameter.device), self.dim, self.padding)
        replicated = distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        return replicated.redistribute(placements=parameter.placements)


def padded(x: Tensor, dim: int, count: int) -> Tensor:
    """Return a tensor with `count` zeros after its last entry along `dim`."""
    if not count:
        return x
    sizes = [0] * (2 * x.ndim)
    sizes[2 * (x.ndim - 1 - dim) + 1] = count
    return F.pad(x, sizes)


def shards_of(layer: BaseAttention, ranks: int, rank: int) -> dict[str, ParameterShard]:
    """Return the shards of the parameters of a layer by name, as one of the ranks sees them."""
    parameters = layer.named_parameters(remove_duplicate=False)
    return {name: _shard(name, x, layer, ranks, rank) for name, x in parameters}


def _shard(name: str, parameter: Tensor, layer: BaseAttention, ranks: int, rank: int) -> ParameterShard:
    rule, layout = rule_of(type(layer), name), layer.layout
    split = HeadSplit(layout.num_heads, ranks)
    length = parameter.shape[rule.dim]
    if rule.unit is None:
        return ParameterShard(name, 0, length)
    if rule.unit == "maps":
        starts = range(0, layer.num_maps, layout.num_heads)
        maps = tuple(start + head for start in starts for head in split.computed(rank))
        return ParameterShard(name, rule.dim, length, selected=maps, units=layer.num_maps)
    units, by_unit = layout.num_heads, split
    if rule.unit == "kv_heads":
        units, by_kv_head = layout.num_kv_heads, kv_split(layout, ranks)
        if by_kv_head is None:
            read = tuple(kv_heads_read(layout, split.computed(rank)))
            return ParameterShard(name, rule.dim, length, selected=read, units=units)
        by_unit = by_kv_head
    if isinstance(parameter, DTensor):  # of a module that another layer shares, with its padding
        length = length // (units + by_unit.padding) * units
    return ParameterShard(name, rule.dim, length, by_unit, units=units)
