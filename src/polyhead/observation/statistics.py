"""Per-head statistics: the rows of each call are reduced on their device into mergeable accumulators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.files import build
from polyhead.geometry import HeadOrigins, name_with_origin, original_name
from polyhead.observation.accumulators import Maximum, MeanAndStd, NamedTensors
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

_SAVED = ("name", "kind", "stack", "layer", "num_heads")  # fields of every site in a file
LOCATION = ("site", "kind", "stack", "layer", "head", "original_head")


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """An attention module of a model, as self- or cross-attention.

    `name` is the path of the module. Sites whose paths differ only in numbers form a `stack`, and `layer` numbers them
    in the order of their first call: an encoder, a decoder and its cross-attention are three stacks. `origins` are the
    original heads of an edited layer, None if it was not edited.
    """

    name: str
    kind: Literal["self", "cross"]
    stack: str
    layer: int
    num_heads: int
    origins: HeadOrigins | None = None

    def location(self, head: int) -> dict[str, Any]:
        """Return the columns `LOCATION` of a table with one row per head.

        Args:
            head: index of a head of the site.
        """
        values = (self.name, self.kind, self.stack, self.layer, head, self.label(head))
        return dict(zip(LOCATION, values, strict=True))

    def label(self, head: int) -> str:
        """Return the index of a head in the unedited model, as text.

        Args:
            head: index of a head of the site.
        """
        return str(head) if self.origins is None else self.origins.label(head)

    def original_name(self, head: int) -> str:
        """Return the name of a head in the unedited model: `L0H5`, or `L0H2+L0H7` for a merged head.

        Args:
            head: index of a head of the site.
        """
        return original_name(self.layer, self.label(head))

    def name_with_origin(self, head: int) -> str:
        """Return the name of a head, as `L0H4 (originally L0H5)` if an edit renumbered it.

        Args:
            head: index of a head of the site.
        """
        return name_with_origin(self.layer, head, self.label(head))

    def to_dict(self) -> dict[str, Any]:
        """Return the site as a dictionary of JSON types."""
        fields = {name: getattr(self, name) for name in _SAVED}
        return fields if self.origins is None else {**fields, "origins": self.origins.to_dict()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> AttentionSite:
        """Return the site that `to_dict` wrote.

        Args:
            fields: the dictionary.
        """
        origins = fields.get("origins")
        site = build(cls, {name: fields[name] for name in _SAVED})
        site = site if origins is None else replace(site, origins=HeadOrigins.from_dict(origins))
        if site.origins is not None and len(site.origins.heads) != site.num_heads:
            raise OptionError(
                f"origins must have one entry for each of the {site.num_heads} heads of {site.name!r}, got {origins!r}"
            )
        return site


def stack_order(sites: Iterable[AttentionSite]) -> dict[AttentionSite, tuple[int, int]]:
    """Return sort keys that order sites by stack, in order of appearance, and by layer."""
    sites = tuple(sites)
    stacks = list(dict.fromkeys((site.stack, site.kind) for site in sites))
    return {site: (stacks.index((site.stack, site.kind)), site.layer) for site in sites}


@dataclass(frozen=True, slots=True)
class StatisticsRequest:
    """Statistics to collect, and their parameters."""

    names: tuple[str, ...]
    sink_keys: int = 1
    window: int = WINDOW

    @classmethod
    def of(cls, requested: object) -> StatisticsRequest:
        """Parse the `statistics` argument of `observe`."""
        if requested is None or requested is True:
            return cls(DEFAULT)
        if requested is False:
            return cls(())
        if isinstance(requested, Statistics):
            names = tuple(name for name in requested.names if name != "visible_keys") or DEFAULT
            return cls(names, requested.sink_keys, requested.window)
        chosen = [requested] if isinstance(requested, str) else requested
        if not isinstance(chosen, list | tuple | set) or not len(chosen):
            raise OptionError(
                f"statistics must be a name, several names or polyhead.Statistics(...), got {requested!r}; "
                f"the names are {', '.join(NAMES)}"
            )
        for name in chosen:
            if name not in NAMES:
                raise OptionError(f"statistics must be among {', '.join(NAMES)}; got {name!r}")
        return cls(tuple(name for name in NAMES if name in chosen))

    def columns(self, *, cross: bool, learned_sinks: bool) -> tuple[str, ...]:
        """Return the names that are defined at a site; cross-attention has no positional statistics."""
        absent = (POSITIONAL if cross else ()) + (() if learned_sinks else ("learned_sink_mass",))
        return tuple(name for name in self.names if name not in absent)

    def of_rows(self, columns: Sequence[str], *, cross: bool) -> Statistics:
        """Return the statistics to request from `attention`; always includes `visible_keys`."""
        names = {"entropy" if name == SHARE else name for name in columns} | {"visible_keys"}
        return Statistics(*sorted(names), sink_keys=self.sink_keys, window=self.window, cross=cross)


@dataclass(frozen=True, slots=True, eq=False)
class SiteStatistics(NamedTensors):
    """Accumulated statistics of one site, mergeable; each tensor is [statistics, heads]."""

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

    def update(self, rows: RowStatistics, non_padding: Tensor | None = None, *, learned_sinks: bool = False) -> Self:
        """Add the rows of one call; `non_padding` is [batch or 1, queries]. Does not synchronise."""
        assert rows.visible_keys is not None
        state = RowTotals(self.moments.count, self.moments.mean, self.moments.squares, self.largest.largest)
        if state.total.device != rows.visible_keys.device:
            # State loaded from a file is moved to the device once; moving the rows instead would synchronise each call.
            state = RowTotals(*(x.to(rows.visible_keys.device) for x in state))
        *moments, largest = reduce_rows(rows, non_padding, self.columns, self.heads, state, learned_sinks=learned_sinks)
        return type(self)(self.site, self.heads, self.columns, MeanAndStd(*moments), Maximum(largest))

    def merge(self, other: Self) -> Self:
        own_key, other_key = ((x.site.name, x.site.kind, x.site.origins, x.heads, x.columns) for x in (self, other))
        if own_key != other_key:
            raise OptionError(
                f"only the same heads and statistics of the same site can be merged, got {own_key} and {other_key}"
            )
        moments, largest = self.moments.merge(other.moments), self.largest.merge(other.largest)
        return type(self)(self.site, self.heads, self.columns, moments, largest)

    def compute(self) -> dict[str, Tensor]:
        """Return columns with one entry per head, on the CPU: `tokens`, then mean, std and max of each statistic."""
        count, mean, std = (x.cpu() for x in self.moments.compute())
        largest = torch.where(count > 0, self.largest.compute().cpu(), torch.nan)
        # Normalized entropy is undefined for rows with a single key, so its column counts fewer rows than the others.
        tokens = count.amax(0) if len(self.columns) else torch.zeros(len(self.heads), dtype=torch.float64)
        columns = {"tokens": tokens}
        for index, name in enumerate(self.columns):
            columns[name] = mean[index]
            columns[f"{name}_std"] = std[index]
            columns[f"{name}_max"] = largest[index]
        return columns
