"""Merge the observations of several workers on the first, along a binary tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from polyhead.observation.collectors import Collector
from polyhead.observation.observations import Observations
from polyhead.observation.saving import from_tensors, on_cpu, to_tensors
from polyhead.parallel.workers import Workers


def reduce_observations(
    observations: Observations, collect: Sequence[Collector], workers: Workers
) -> Observations | None:
    """Return the merged observations of all ranks on rank 0, and None on the others.

    In step k, each rank whose index is an odd multiple of 2^k sends its observations to the rank 2^k below it: for n
    ranks there are log2(n) steps. They are sent site by site, so that a rank stores those of one site more than its
    own.

    The result is on the CPU, as that of a file.

    Args:
        observations: those of this rank.
        collect: collectors of the session, the same on every rank.
        workers: the ranks.
    """
    workers.connect()
    observations = on_cpu(observations, collect)
    distance = 1
    while distance < workers.world:
        if workers.rank % (2 * distance):
            _send(observations, workers.rank - distance, workers)
            return None
        if workers.rank + distance < workers.world:
            observations = _merged(observations, workers.rank + distance, collect, workers)
        distance *= 2
    return observations


def _send(observations: Observations, to: int, workers: Workers) -> None:
    parts = list(_by_site(observations))
    workers.send(to, {"parts": len(parts)}, {})
    for part in parts:
        header, tensors = to_tensors(part)
        workers.send(to, header, tensors)


def _merged(observations: Observations, sender: int, collect: Sequence[Collector], workers: Workers) -> Observations:
    start, _ = workers.receive(sender)
    for _ in range(start["parts"]):
        header, tensors = workers.receive(sender)
        observations = observations.merge(from_tensors(f"rank {sender}", header, tensors, collect))
    return observations


def _by_site(observations: Observations) -> Iterator[Observations]:
    """Yield the observations of each site, in the order of the model; none if no call was observed."""
    statistics = {x.site: x for x in observations.sites}
    for site in dict.fromkeys([*observations.calls, *statistics, *observations.collected]):
        yield replace(
            observations,
            sites=(statistics[site],) if site in statistics else (),
            collected={site: observations.collected[site]} if site in observations.collected else {},
            calls={site: observations.calls[site]} if site in observations.calls else {},
        )
