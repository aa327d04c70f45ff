"""`HeadHistory`: statistics of every head over the steps of training."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.files import check_pyarrow
from polyhead.observation.statistics import AttentionSite

COSINES = ("output_cosine", "gradient_cosine")
FINITE = ("output_norm", "output_share", "gradient_norm", *COSINES)  # columns that are finite wherever measured
SiteKey = tuple[str, str]  # path and kind of an attention site


class HeadLocation(NamedTuple):
    """A head of a model: the path of its attention module, its kind, its layer within the stack, and its index.

    `original_head` is its index in the unedited model, as text, which edits do not change.
    """

    site: str
    kind: str
    layer: int
    head: int
    original_head: str

    @classmethod
    def of(cls, site: AttentionSite, head: int) -> HeadLocation:
        """Return the location of a head of a site.

        Args:
            site: an attention site of the model.
            head: index of the head.
        """
        return cls(site.name, site.kind, site.layer, head, site.label(head))

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head} ({self.site})"


@dataclass(frozen=True)
class StepRecord:
    """Values of every head in one observed step: `record["max_logit"]` has one number per head.

    `loss` is NaN if none was passed. `heads` are in the order of the last axis of `values`, [columns, heads], which are
    on the CPU, with NaN where a column was not measured. In steps with pairs, `cosines` has the cosines between the
    heads of each site, by column, then by path and kind: [heads, heads].
    """

    step: int
    loss: float
    heads: tuple[HeadLocation, ...]
    columns: tuple[str, ...]
    values: Tensor
    cosines: Mapping[str, Mapping[SiteKey, Tensor]] = field(default_factory=dict)

    def __getitem__(self, column: str) -> Tensor:
        return self.values[index_of(column, self.columns)]


def index_of(column: str, columns: tuple[str, ...]) -> int:
    """Return the index of a column.

    Args:
        column: name of a statistic.
        columns: names of those that were recorded.
    """
    if column not in columns:
        raise OptionError(f"the columns are {', '.join(columns) or 'not known yet'}; got {column!r}")
    return columns.index(column)


@dataclass
class HeadHistory:
    """Values of every head in every observed step: `history["max_logit"]` is [steps, heads].

    `steps` are the numbers of the observed steps, `losses` those passed to `HeadMonitor.step`, NaN where none was, and
    `heads` the heads, in the order of the last axis.
    """

    heads: tuple[HeadLocation, ...] = ()
    columns: tuple[str, ...] = ()
    losses: list[float] = field(default_factory=list)
    _steps: list[int] = field(default_factory=list)
    _values: list[Tensor] = field(default_factory=list)  # [columns, heads] for each step
    _measured: list[Tensor] = field(default_factory=list)  # the same, boolean
    _cosines: dict[int, Tensor] = field(default_factory=dict)  # by step: [2, elements of the matrices of all sites]

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, column: str) -> Tensor:
        index = index_of(column, self.columns)
        return (
            torch.stack([values[index] for values in self._values]) if self._values else torch.empty(0, len(self.heads))
        )

    def first_nonfinite(self) -> tuple[int, HeadLocation, str] | None:
        """Return the first step, head and column with NaN or Inf, or None.

        A column is not read in steps in which it was not measured, nor a row statistic for heads that never have a
        finite value of it, as the normalized entropy of a head that always sees a single key.
        """
        if not self._values:
            return None
        finite = torch.stack(self._values).isfinite()  # [steps, columns, heads]
        wrong = ~finite & torch.stack(self._measured)
        is_defined = torch.tensor([name in FINITE for name in self.columns])
        bad = wrong & (finite.any(0) | is_defined[:, None])
        if not bad.any():
            # Never finite at all, of the column that every head has.
            bad = wrong & ~finite.any((0, 1))
        found = bad.nonzero()
        if not len(found):
            return None
        step, column, head = found[0].tolist()
        return self._steps[step], self.heads[head], self.columns[column]

    def cosines(self, column: str) -> dict[int, dict[SiteKey, Tensor]]:
        """Return the cosines between the heads of each site, by step and by path and kind of the site: [heads, heads].

        Args:
            column: `output_cosine` or `gradient_cosine`.
        """
        if column not in COSINES:
            raise OptionError(f"cosines are those of {' and '.join(COSINES)}, got {column!r}")
        index = COSINES.index(column)
        return {step: self._matrices(values[index]) for step, values in self._cosines.items()}

    def _matrices(self, values: Tensor) -> dict[SiteKey, Tensor]:
        """Return the matrices of all sites, which `values` has one after the other."""
        counts = {key: len(list(group)) for key, group in groupby(self.heads, lambda head: (head.site, head.kind))}
        parts = values.split([count**2 for count in counts.values()])
        return {key: part.view(counts[key], counts[key]) for key, part in zip(counts, parts, strict=True)}

    def append(
        self,
        step: int,
        values: Tensor,
        loss: float,
        measured: Tensor | None = None,
        cosines: Tensor | None = None,
    ) -> StepRecord:
        """Return the values of a step as a record, after adding them.

        Args:
            step: number of the step.
            values: [columns, heads].
            loss: loss of the step, or NaN.
            measured: [columns, heads], False where a column was not measured; all were by default.
            cosines: [2, elements], the matrices of all sites by column, or None.
        """
        self._steps.append(step)
        self._values.append(values)
        self._measured.append(torch.ones_like(values, dtype=torch.bool) if measured is None else measured)
        self.losses.append(loss)
        matrices = {}
        if cosines is not None:
            self._cosines[step] = cosines
            matrices = {name: self._matrices(x) for name, x in zip(COSINES, cosines, strict=True)}
        return StepRecord(step, loss, self.heads, self.columns, values, matrices)

    def check(self, heads: Sequence[HeadLocation], columns: Sequence[str]) -> None:
        """Set heads and columns in the first step, and raise if they differ in another.

        Args:
            heads: heads that the step reached.
            columns: names of its statistics.
        """
        if not self.heads:
            self.heads, self.columns = tuple(heads), tuple(columns)
        if self.heads != tuple(heads):
            changed = sorted(set(self.heads) ^ set(heads))
            raise OptionError(
                "every observed step must reach the same heads, got a step with other ones: "
                f"{', '.join(map(str, changed[:3]))}; use another monitor after heads were changed"
            )
        if self.columns != tuple(columns):
            raise OptionError(
                f"a history continues with the same statistics, got {', '.join(columns)} after "
                f"{', '.join(self.columns)}"
            )

    def rows(self) -> dict[str, list[Any]]:
        """Return a table with one row per step and head, by column."""
        table: dict[str, list[Any]] = {"step": [step for step in self._steps for _ in self.heads]}
        table["loss"] = [loss for loss in self.losses for _ in self.heads]
        for name in HeadLocation._fields:
            table[name] = [getattr(head, name) for head in self.heads] * len(self)
        for name in self.columns:
            table[name] = self[name].flatten().tolist()
        return table

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table of `rows` as .parquet or .csv.

        Args:
            path: name of the file.

        Raises:
            OptionError: another ending.
        """
        name, table = os.fspath(path), self.rows()
        if name.endswith(".parquet"):
            check_pyarrow(path)
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.table(table), name)
        elif name.endswith(".csv"):
            with open(name, "w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(table)
                writer.writerows(zip(*table.values(), strict=True))
        else:
            raise OptionError(f"a history is saved as .parquet or .csv, got {name}")

    def state_dict(self) -> dict[str, Any]:
        """Return the history as tensors, numbers and strings."""
        empty = torch.empty(0, len(self.columns), len(self.heads))
        values, measured = (torch.stack(x) if x else empty for x in (self._values, self._measured))
        history = {"steps": list(self._steps), "losses": list(self.losses), "values": values}
        return {
            "heads": [tuple(head) for head in self.heads],
            "columns": list(self.columns),
            "history": {**history, "measured": measured.bool(), "cosines": dict(self._cosines)},
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """Return the history that `state_dict` returned.

        Args:
            state: the dictionary.
        """
        history = state["history"]
        heads = tuple(HeadLocation(*head) for head in state["heads"])
        values, measured = (list(history[name].unbind(0)) for name in ("values", "measured"))
        steps, losses = list(history["steps"]), list(history["losses"])
        return cls(heads, tuple(state["columns"]), losses, steps, values, measured, dict(history["cosines"]))

    def __repr__(self) -> str:
        columns = ", ".join(self.columns) or "no columns"
        return f"HeadHistory({len(self)} steps of {len(self.heads)} heads: {columns})"
