"""Sums of a monitor's step over the ranks of a process group, in one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.accumulators import Maximum, MeanAndStd, accumulator_dtype
from polyhead.observation.statistics import NAMES as ROW_COLUMNS
from polyhead.observation.statistics import SiteStatistics
from polyhead.parallel.agreement import agreed
from polyhead.parallel.groups import rank_group
from polyhead.training.head_signals import GRADIENTS, SIGNALS, SignalSums

Parts = Mapping[str, Sequence[Tensor | None]]  # a tensor for each site, by name; None where a rank does not have it
_LOSS = "loss"
_ROWS = ("count", "total", "largest")


class ReducedStep(NamedTuple):
    """Observations of all ranks in a step."""

    sites: list[SiteStatistics]  # counts, means and maxima alone
    sums: SignalSums
    loss: Tensor  # mean over the ranks that passed one; NaN without any
    has_loss: Tensor  # whether any rank passed one
    measured: Mapping[str, Tensor]  # [sites] by column: whether it was measured


class RankSums:
    """Add up what the ranks of a process group have observed in a step.

    All ranks observe the same sites. After the first step a rank may have no forward, and adds nothing. A column is
    measured where all ranks that had a forward have measured it.

    Args:
        sites: observed sites of the first step of this rank.
        options: options by name, the same on all ranks.
        like: a tensor on the device of the model.
        group: the process group; all processes by default.

    Raises:
        OptionError: in every rank, if one has no forward, observes other sites than the first, or has other options.
        CommunicationError: a rank did not answer within the time-out of the group.
    """

    def __init__(
        self, sites: Sequence[SiteStatistics], options: Mapping[str, object], like: Tensor, group: Any = None
    ) -> None:
        def prepare() -> tuple[None, dict[str, str], tuple[()]]:
            if not len(sites):
                raise OptionError("a rank must have a forward of the model in training mode in the first observed step")
            observed = "; ".join(f"{x.site} ({', '.join(x.columns)})" for x in sites)
            return None, {"heads": observed, **{name: str(value) for name, value in options.items()}}, ()

        agreed(rank_group(group, None), like, prepare)
        self._sites, self._group = list(sites), group

    @property
    def heads(self) -> list[int]:
        """Number of heads of each site."""
        return [len(x.heads) for x in self._sites]

    def reduce(
        self,
        sites: Sequence[SiteStatistics],
        sums: SignalSums,
        shapes: Mapping[str, Sequence[tuple[int, ...]]],
        loss: Tensor | float | None,
    ) -> ReducedStep:
        """Return the sums of a step over all ranks, as if one rank had processed the data of all.

        The gradient of the mean of the ranks' losses, which data parallel training takes, is that of a rank's loss
        divided by the number of ranks.

        Args:
            sites: observed sites of this rank.
            sums: sums of this rank by signal, for the same sites.
            shapes: shapes of the signals that are recorded, for the sites of the first step.
            loss: loss of this rank.
        """
        device, dtype = self._sites[0].moments.mean.device, self._sites[0].moments.mean.dtype
        by_site = {x.site: index for index, x in enumerate(sites)}
        places = [by_site.get(x.site) for x in self._sites]
        own = [None if place is None else sites[place] for place in places]
        parts: dict[str, list[Tensor | None]] = {
            "count": [None if x is None else x.moments.count for x in own],
            "total": [None if x is None else x.moments.mean * x.moments.count for x in own],
        }
        parts |= {name: [None if place is None else sums[name][place] for place in places] for name in shapes}
        value = loss.detach() if isinstance(loss, Tensor) else None if loss is None else torch.tensor(float(loss))
        parts[_LOSS] = [value]
        row_shapes = [tuple(x.moments.count.shape) for x in self._sites]
        all_shapes = {**shapes, **dict.fromkeys(_ROWS, row_shapes), _LOSS: [()]}
        maxima = {"largest": [None if x is None else x.largest.largest for x in own]}
        results, lacking = reduce_over_ranks(parts, maxima, all_shapes, device, self._group)
        if len(by_site.keys() - {x.site for x in self._sites}):  # after the collective, in which the others wait
            raise OptionError("every observed step must reach the same heads, got a step that reaches other ones")
        world = dist.get_world_size(self._group)
        reduced = []
        for x, count, total, largest in zip(self._sites, *(results[name] for name in _ROWS), strict=True):
            mean = torch.where(count > 0, total / count, 0.0)
            moments = MeanAndStd(count, mean, torch.zeros_like(count))
            reduced.append(replace(x, moments=moments, largest=Maximum(largest)))
        absent = lacking["count"]
        measured = dict.fromkeys(ROW_COLUMNS, absent < world)
        measured |= {x: (absent < world) & (lacking.get(name, absent) == absent) for x, name in SIGNALS.items()}
        all_sums: SignalSums = {name: [None] * len(places) for name in sums}
        for name in shapes:  # where it is not known, NaN, also in the cosines of pairs
            scale = torch.where(lacking[name] == absent, 1 / world**2 if name in GRADIENTS else 1.0, torch.nan)
            all_sums[name] = [x * factor for x, factor in zip(results[name], scale, strict=True)]
        mean_loss = results[_LOSS][0] / (world - lacking[_LOSS][0]).to(dtype)
        return ReducedStep(reduced, all_sums, mean_loss, lacking[_LOSS][0] < world, measured)


def has_ranks(group: Any = None) -> bool:
    """Return whether this process is one of several in a process group.

    Args:
        group: the process group; all processes by default.
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def reduce_over_ranks(
    sums: Parts, maxima: Parts, shapes: Mapping[str, Sequence[tuple[int, ...]]], device: torch.device, group: Any = None
) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """Return sums and maxima over all ranks by name and site, and the number of ranks without each, [sites] by name.

    Nothing waits for the device. Where no rank has a tensor, its sum is 0 and its maximum -Inf.

    Args:
        sums: tensors of this rank that are added.
        maxima: tensors of this rank of which the largest values are taken.
        shapes: shape of each tensor, which is the same in all ranks.
        device: device of the results.
        group: the process group; all processes by default.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    dtype = accumulator_dtype(device)

    def flat(parts: Parts, absent: float) -> list[Tensor]:
        return [
            torch.full((math.prod(shape),), absent, dtype=dtype, device=device)
            if x is None
            else x.to(device, dtype).flatten()
            for name, by_site in parts.items()
            for x, shape in zip(by_site, shapes[name], strict=True)
        ]

    added = torch.cat([torch.empty(0, dtype=dtype, device=device), *flat(sums, 0.0)])
    largest = torch.cat([torch.empty(0, dtype=dtype, device=device), *flat(maxima, -torch.inf)])
    is_absent = [x is None for parts in (sums, maxima) for by_site in parts.values() for x in by_site]
    flags = torch.tensor(is_absent, dtype=dtype).to(device, non_blocking=True)
    # A sum with the zeros of all other ranks keeps what each rank has, so that maxima need no all-reduce of their own.
    slots = torch.zeros(world, len(largest), dtype=dtype, device=device)
    slots[rank] = largest
    packed = torch.cat([flags, added, slots.flatten()])
    dist.all_reduce(packed, group=group)
    flags, added, slots = packed.split([len(flags), len(added), slots.numel()])
    values = torch.cat([added, slots.view(world, -1).amax(0)])
    names = [*sums, *maxima]
    pieces = iter(values.split([math.prod(shape) for name in names for shape in shapes[name]]))
    results = {name: [next(pieces).view(shape) for shape in shapes[name]] for name in names}
    lacking = flags.split([len(shapes[name]) for name in names])
    return results, dict(zip(names, lacking, strict=True))
