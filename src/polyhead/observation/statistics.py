"""What is gathered of every head: a call's rows are reduced where they lie, and join the rest as mergeable values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.files import build
from polyhead.geometry import HeadOrigins
from polyhead.observation.accumulators import Maximum, MeanAndStd
from polyhead.ops.attention import RowStatistics, Statistics
from polyhead.ops.common.row_reduction import SHARE, RowTotals, reduce_rows
from polyhead.ops.common.statistics import NAMES as ROW_NAMES
from polyhead.ops.common.statistics import POSITIONAL, WINDOW

DEFAULT = (
    "entropy",
    SHARE,
    "confidence",
    "max_logit",
    "mean_distance",
    "sink_mass",
    "self_mass",
    "previous_mass",
    "next_mass",
    "window_mass",
)
NAMES = (*DEFAULT, *(name for name in ROW_NAMES if name not in (*DEFAULT, "visible_keys")))


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """One place of a model where heads attend.

    `name` is the path of its module. Sites whose paths differ in numbers alone are one `stack`, and `layer` counts them
    in the order in which they were first called: an encoder, a decoder and its cross-attention are three stacks.
    `origins` are the original heads where the layer was edited, None where it was not.
    """

    name: str
    kind: Literal["self", "cross"]
    stack: str
    layer: int
    num_heads: int
    origins: HeadOrigins | None = None

    def label(self, head: int) -> str:
        """The number of a head in the unedited model."""
        return str(head) if self.origins is None else self.origins.label(head)

    def original(self, head: int) -> str:
        """` (originally 5)`, for what a head is called where an edit gave it another number."""
        return "" if self.label(head) == str(head) else f" (originally {self.label(head)})"

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("name", "kind", "stack", "layer", "num_heads")}
        return found if self.origins is None else {**found, "origins": self.origins.to_dict()}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> AttentionSite:
        origins = found.get("origins")
        site = build(cls, {name: found[name] for name in ("name", "kind", "stack", "layer", "num_heads")})
        site = site if origins is None else replace(site, origins=HeadOrigins.from_dict(origins))
        if site.origins is not None and len(site.origins.heads) != site.num_heads:
            raise OptionError(f"origins are of each of the {site.num_heads} heads of {site.name!r}, got {origins!r}")
        return site


def stack_order(sites: Iterable[AttentionSite]) -> dict[AttentionSite, tuple[int, int]]:
    """Keys that sort sites stack by stack, in the order in which the stacks come, and layer by layer."""
    sites = tuple(sites)
    stacks = list(dict.fromkeys((site.stack, site.kind) for site in sites))
    return {site: (stacks.index((site.stack, site.kind)), site.layer) for site in sites}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which statistics to gather, and their parameters."""

    names: tuple[str, ...]
    sink_keys: int = 1
    window: int = WINDOW

    @classmethod
    def of(cls, requested: object) -> Wanted:
        """What the `statistics` argument of `observe` means."""
        if requested is None or requested is True:
            return cls(DEFAULT)
        if requested is False:
            return cls(())
        if isinstance(requested, Statistics):
            names = tuple(name for name in requested.names if name != "visible_keys") or DEFAULT
            return cls(names, requested.sink_keys, requested.window)
        names = (
            (requested,)
            if isinstance(requested, str)
            else tuple(requested)
            if isinstance(requested, list | tuple | set)
            else ()
        )
        if not len(names):
            raise OptionError(
                f"statistics must be a name, several names or polyhead.Statistics(...), got {requested!r}; "
                f"the names are {', '.join(NAMES)}"
            )
        for name in names:
            if name not in NAMES:
                raise OptionError(f"a statistic of a head is one of {', '.join(NAMES)}; got {name!r}")
        return cls(tuple(name for name in NAMES if name in names))

    def columns(self, *, cross: bool, learned_sinks: bool) -> tuple[str, ...]:
        """The names that mean something at a site; positions of a cross-attention are absent, not 0."""
        absent = (POSITIONAL if cross else ()) + (() if learned_sinks else ("learned_sink_mass",))
        return tuple(name for name in self.names if name not in absent)

    def of_rows(self, columns: Sequence[str], *, cross: bool) -> Statistics:
        """What to ask `attention` for. Which rows see a key at all is always asked."""
        names = {"entropy" if name == SHARE else name for name in columns} | {"visible_keys"}
        return Statistics(*sorted(names), sink_keys=self.sink_keys, window=self.window, cross=cross)


@dataclass(frozen=True, slots=True, eq=False)
class SiteStatistics:
    """What was gathered at one site: mergeable, each tensor [statistics, heads]."""

    site: AttentionSite
    heads: tuple[int, ...]
    columns: tuple[str, ...]
    moments: MeanAndStd
    largest: Maximum

    @classmethod
    def empty(
        cls, site: AttentionSite, heads: Sequence[int], columns: Sequence[str], device: torch.device | None = None
    ) -> Self:
        shape = (len(columns), len(heads))
        return cls(site, tuple(heads), tuple(columns), MeanAndStd.empty(shape, device), Maximum.empty(shape, device))

    def update(self, rows: RowStatistics, real: Tensor | None = None, *, learned_sinks: bool = False) -> Self:
        """With the rows of one call; `real` [batch or 1, queries] is False for padding. Waits for no device."""
        assert rows.visible_keys is not None
        state = RowTotals(self.moments.count, self.moments.mean, self.moments.squares, self.largest.largest)
        if state.total.device != rows.visible_keys.device:
            # What was loaded from a file goes where the rows are, once: rows that went to it would be waited for.
            state = RowTotals(*(x.to(rows.visible_keys.device) for x in state))
        *moments, largest = reduce_rows(rows, real, self.columns, self.heads, state, learned_sinks=learned_sinks)
        return type(self)(self.site, self.heads, self.columns, MeanAndStd(*moments), Maximum(largest))

    def merge(self, other: Self) -> Self:
        mine, theirs = ((x.site.name, x.site.kind, x.site.origins, x.heads, x.columns) for x in (self, other))
        if mine != theirs:
            raise OptionError(f"only the same heads and statistics of a site can be merged, got {mine} and {theirs}")
        moments, largest = self.moments.merge(other.moments), self.largest.merge(other.largest)
        return type(self)(self.site, self.heads, self.columns, moments, largest)

    def compute(self) -> dict[str, Tensor]:
        """Columns of numbers, one a head, on the CPU: `tokens`, then each statistic's mean, spread and maximum."""
        count, mean, std = (x.cpu() for x in self.moments.compute())
        largest = torch.where(count > 0, self.largest.compute().cpu(), torch.nan)
        # A row with a single key has no share of a maximum that is 0, so its column counts fewer rows than the others.
        tokens = count.amax(0) if len(self.columns) else torch.zeros(len(self.heads), dtype=torch.float64)
        found = {"tokens": tokens}
        for index, name in enumerate(self.columns):
            found[name] = mean[index]
            found[f"{name}_std"] = std[index]
            found[f"{name}_max"] = largest[index]
        return found

    def state(self) -> dict[str, Tensor]:
        return {
            **{f"moments.{name}": tensor for name, tensor in self.moments.state().items()},
            **{f"largest.{name}": tensor for name, tensor in self.largest.state().items()},
        }

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        """The same site with what was saved of it."""

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}

        moments, largest = MeanAndStd.from_state(part("moments.")), Maximum.from_state(part("largest."))
        return type(self)(self.site, self.heads, self.columns, moments, largest)
