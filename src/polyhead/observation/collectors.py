"""Protocol of collectors, which receive each attention call in full, beyond the per-row statistics of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.accumulators import NamedTensors
from polyhead.observation.statistics import AttentionSite
from polyhead.ops.attended import Attended
from polyhead.ops.profile.request import AttentionProfile


@dataclass(frozen=True, slots=True, eq=False)
class BatchMetadata:
    """Batch metadata that the model itself does not receive; set `session.metadata` before calling the model."""

    documents: Tensor | None = None  # [batch]: document index of each row
    pieces: Tensor | None = None  # [batch]: index of the piece within its document, where documents were split
    tokens: Tensor | None = None  # [batch, tokens]: token ids
    classes: Tensor | None = None  # [batch, tokens]: token class (word, punctuation, ...), as small integers


class CollectorState(Protocol):
    """State of a collector at one site: a mergeable value, like those of `accumulators`.

    A state that calls `profile_rows` has the arguments as a mapping `profiled`, so that one profile serves all states.
    """

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        """Add one attention call; `non_padding` is [batch or 1, queries], None without padding.

        Must not synchronise with the device.

        Args:
            attended: the attention call: queries, keys, values, mask and output.
            non_padding: rows to count.
            metadata: documents and tokens of the batch.

        Returns:
            The new state.
        """

    def merge(self, other: Self) -> Self:
        """Return the state of both runs.

        Args:
            other: state of the same collector at the same site.
        """

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the state by name, for a file."""

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        """Return a copy with the saved tensors, on the device of those tensors.

        Args:
            state: tensors that `state` returned.
        """


class Collector(Protocol):
    """Protocol of `observe(collect=[...])`: creates the state for each attention site."""

    @property
    def name(self) -> str: ...

    def empty(self, site: AttentionSite, device: torch.device) -> CollectorState | None:
        """Return an empty state; None if this site is not collected.

        Args:
            site: the attention site.
            device: device of the state.
        """


def check_collectors(collect: Sequence[Collector]) -> tuple[Collector, ...]:
    """Return the collectors; raise for other objects and for equal names."""

    def refusal(got: object) -> OptionError:
        name = f"the class {got.__name__}; pass an instance" if isinstance(got, type) else type(got).__name__
        return OptionError(
            "collect must be a list of collectors, objects with a `name` and a method `empty(site, device)` "
            f"(polyhead.observation.Collector), got {name}"
        )

    try:
        listed = tuple(collect)
    except TypeError:
        raise refusal(collect) from None
    for one in listed:
        is_collector = isinstance(getattr(one, "name", None), str) and callable(getattr(one, "empty", None))
        if isinstance(one, type) or not is_collector:
            raise refusal(one)
    names = [collector.name for collector in listed]
    if len(set(names)) < len(names):
        raise OptionError(f"collectors must have distinct names, got {', '.join(names)}")
    return listed


def empty_state(collector: Collector, site: AttentionSite, device: torch.device) -> CollectorState | None:
    """Return the collector's empty state for a site; raise if it lacks a method of `CollectorState`."""
    state = collector.empty(site, device)
    methods = ("update", "merge", "state", "with_state")
    missing = [] if state is None else [name for name in methods if not callable(getattr(state, name, None))]
    if missing:
        raise OptionError(
            f"`empty` of the collector {collector.name!r} must return a state with the methods {', '.join(methods)} "
            f"(polyhead.observation.CollectorState), got {type(state).__name__} without {', '.join(missing)}"
        )
    return state


def updated_state(
    name: str, state: CollectorState, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata
) -> CollectorState:
    """Return the state with one more call; raise if `update` returns something else, such as None."""
    new = state.update(attended, non_padding, metadata)
    if type(new) is not type(state):
        raise OptionError(
            f"`update` of the collector {name!r} must return the new state, a {type(state).__name__}, "
            f"got {type(new).__name__}"
        )
    return new


Collected = Mapping[AttentionSite, Mapping[str, CollectorState]]  # the states of a session, by site and collector name
T = TypeVar("T")


def states_of(collected: Collected, name: str, kind: type[T]) -> dict[AttentionSite, T]:
    """Return the states of the collector `name` by site, where they are of a type."""
    states = {site: values.get(name) for site, values in collected.items()}
    return {site: state for site, state in states.items() if isinstance(state, kind)}


@dataclass(frozen=True, slots=True, eq=False)
class CallRecorder:
    """Collector that passes every attention call to a function, and has no state of its own.

    `record` is called with the site and the arguments of `CollectorState.update`.
    """

    record: Callable[[AttentionSite, Attended, Tensor | None, BatchMetadata], object]
    name: str = "calls"

    def empty(self, site: AttentionSite, device: torch.device) -> _RecordedSite:
        return _RecordedSite(self.record, site)


@dataclass(frozen=True, slots=True, eq=False)
class _RecordedSite(NamedTensors):
    record: Callable[[AttentionSite, Attended, Tensor | None, BatchMetadata], object]
    site: AttentionSite

    def update(self, attended: Attended, non_padding: Tensor | None, metadata: BatchMetadata) -> Self:
        self.record(self.site, attended, non_padding, metadata)
        return self

    def merge(self, other: Self) -> Self:
        return self


@dataclass(frozen=True, slots=True, eq=False)
class CollectedCall(Attended):
    """An attention call with what all collectors together request of its profile; see `profile_rows`."""

    requested: Mapping[str, Any] = field(default_factory=dict)
    summary: list[AttentionProfile] = field(default_factory=list, init=False)  # once computed; not that of a `replace`

    @classmethod
    def of(cls, attended: Attended, states: Iterable[CollectorState]) -> Attended:
        """Return the call for these states; one of another class, which some collectors read, remains of that class."""
        if attended.key.is_cpu:  # a product with keys that are stored by channel takes a third of the time
            attended = replace(attended, key=attended.key.mT.contiguous().mT)
        if type(attended) is not Attended:
            return attended
        requested = {name: x for state in states for name, x in getattr(state, "profiled", {}).items()}
        return cls(**{x.name: getattr(attended, x.name) for x in fields(Attended)}, requested=requested)


def profile_rows(
    attended: Attended, non_padding: Tensor | None, requested: Mapping[str, Any], pairs: Tensor | None = None
) -> AttentionProfile:
    """Return the profile of the non-padding rows with a visible key, computed once for all collectors of a call.

    `pairs` are (query, key) pairs, [batch, pairs, 2], whose weights only this collector needs.
    """
    if not isinstance(attended, CollectedCall) or not requested.items() <= attended.requested.items():
        return exclude_padding(attended, non_padding).profile(**requested, pairs=pairs)
    if not len(attended.summary):
        unpadded = exclude_padding(attended, non_padding)
        attended.summary.append(unpadded.profile(**attended.requested, pairs=pairs))
    elif pairs is not None:
        weights = exclude_padding(attended, non_padding).profile(pairs=pairs).pair_weights
        return replace(attended.summary[0], pair_weights=weights)
    return attended.summary[0]


def exclude_padding(attended: Attended, non_padding: Tensor | None) -> Attended:
    """Return the attention with a log-sum-exp of -inf in padding rows, so that their weights are 0 in every sum."""
    logsumexp = attended.result.logsumexp
    assert logsumexp is not None
    if non_padding is None:
        return attended
    logsumexp = torch.where(non_padding[:, None], logsumexp, -torch.inf)
    return replace(attended, result=replace(attended.result, logsumexp=logsumexp))


def counted_rows(attended: Attended) -> Tensor:
    """Return the rows with a visible key in any head, boolean [batch, queries]."""
    assert attended.result.logsumexp is not None
    return torch.isfinite(attended.result.logsumexp).any(1)
