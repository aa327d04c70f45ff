"""`HeadHistory`: statistics of every head over the steps of training."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.files import check_pyarrow
from polyhead.observation.session_limits import stack_of
from polyhead.observation.statistics import LOCATION, AttentionSite

COSINES = ("output_cosine", "gradient_cosine")
FINITE = ("output_norm", "output_norm_share", "gradient_norm", *COSINES)  # columns that are finite wherever measured
KEPT_VALUES, KEPT_STEPS = 1 << 23, 1 << 16  # of which a history keeps the latest: 64 MiB in float64
SiteKey = tuple[str, str]  # path and kind of an attention site


class HeadLocation(NamedTuple):
    """A head of a model: the path of its attention module, its kind, its layer within the stack, and its index.

    `original_head` is its index in the unedited model, as text, which edits do not change; `original_heads` is the
    number of heads that its layer had there.
    """

    site: str
    kind: str
    layer: int
    head: int
    original_head: str
    original_heads: int = 0

    @property
    def stack(self) -> str:
        """Path of the module with `*` for its numbers, the same for all layers of a stack."""
        return stack_of(self.site)

    @classmethod
    def of(cls, site: AttentionSite, head: int) -> HeadLocation:
        """Return the location of a head of a site.

        Args:
            site: an attention site of the model.
            head: index of the head.
        """
        total = site.num_heads if site.origins is None else site.origins.total
        return cls(site.name, site.kind, site.layer, head, site.label(head), total)

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head} ({self.site})"


@dataclass(frozen=True)
class StepRecord:
    """Values of every head in one observed step: `record["max_logit"]` has one number per head.

    `loss` is NaN if none was passed; then `has_loss` is False. `heads` are in the order of the last axis of `values`,
    [columns, heads], which are on the CPU, with NaN where a column was not measured: where `measured`, [columns,
    heads], is False, if it is not None. `pairs` has the matrices of `cosines` one after the other, [2, elements], in
    steps with pairs.
    """

    step: int
    loss: float
    heads: tuple[HeadLocation, ...]
    columns: tuple[str, ...]
    values: Tensor
    measured: Tensor | None = None
    pairs: Tensor | None = None
    has_loss: bool = True

    def __getitem__(self, column: str) -> Tensor:
        return self.values[index_of(column, self.columns)]

    @property
    def cosines(self) -> Mapping[str, Mapping[SiteKey, Tensor]]:
        """Cosines between the heads of a site, by column, then by path and kind; empty in steps without pairs."""
        if self.pairs is None:
            return {}
        counts = {key: len(list(group)) for key, group in groupby(self.heads, lambda head: (head.site, head.kind))}
        matrices = {}
        for name, values in zip(COSINES, self.pairs, strict=True):
            parts = values.split([count**2 for count in counts.values()])
            matrices[name] = {key: x.view(counts[key], counts[key]) for key, x in zip(counts, parts, strict=True)}
        return matrices


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

    `steps` has the number of each observed step, `losses` the loss that was passed to `HeadMonitor.step` (NaN for a
    step without one), and `heads` the heads in the order of the last axis. Only the latest 8 million values are kept;
    `dropped` is the number of steps that were removed. `RunDirectory` writes all of them.
    """

    heads: tuple[HeadLocation, ...] = ()
    columns: tuple[str, ...] = ()
    dropped: int = 0
    _records: list[StepRecord] = field(default_factory=list)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(record.step for record in self._records)

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self._records]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, column: str) -> Tensor:
        index = index_of(column, self.columns)
        values = [record.values[index] for record in self._records]
        return torch.stack(values) if values else torch.empty(0, len(self.heads))

    def cosines(self, column: str) -> dict[int, Mapping[SiteKey, Tensor]]:
        """Return the cosines between the heads of each site, [heads, heads], by step and then by path and kind.

        Args:
            column: `output_cosine` or `gradient_cosine`.
        """
        if column not in COSINES:
            raise OptionError(f"cosines are those of {' and '.join(COSINES)}, got {column!r}")
        return {record.step: record.cosines[column] for record in self._records if record.pairs is not None}

    def first_nonfinite(self) -> tuple[int, HeadLocation, str] | None:
        """Return step, head and column of the first NaN or Inf in the steps that are kept; None if there is none.

        Ignored are steps in which a column was not measured, and heads that never have a finite value of a row
        statistic, such as the normalized entropy of a head that always sees a single key.
        """
        if not self._records:
            return None
        finite = torch.stack([record.values for record in self._records]).isfinite()  # [steps, columns, heads]
        wrong = ~finite & self._measured()
        is_defined = torch.tensor([name in FINITE for name in self.columns])
        bad = wrong & (finite.any(0) | is_defined[:, None])
        if not bad.any():
            # Heads without a single finite value went wrong before the first step.
            bad = wrong & ~finite.any((0, 1))
        places = bad.nonzero()
        if not len(places):
            return None
        step, column, head = places[0].tolist()
        return self.steps[step], self.heads[head], self.columns[column]

    def _measured(self) -> Tensor:
        """Return where columns were measured, [steps, columns, heads]."""
        shape = (len(self.columns), len(self.heads))
        every = torch.ones(shape, dtype=torch.bool)
        measured = [every if record.measured is None else record.measured for record in self._records]
        return torch.stack(measured) if measured else torch.empty(0, *shape, dtype=torch.bool)

    def append(
        self, step: int, values: Tensor, loss: float | None, measured: Tensor | None = None, pairs: Tensor | None = None
    ) -> StepRecord:
        """Return the record of a step, which is added; the first steps are dropped if there are too many.

        Args:
            step: number of the step.
            values: [columns, heads].
            loss: loss of the step; None if none was passed.
            measured: [columns, heads], False where a column was not measured; all were by default.
            pairs: [2, elements], the cosines of all sites by column, or None.
        """
        number, has_loss = math.nan if loss is None else loss, loss is not None
        record = StepRecord(step, number, self.heads, self.columns, values, measured, pairs, has_loss)
        self.extend([record])
        excess = len(self) - max(1, min(KEPT_STEPS, KEPT_VALUES // max(1, values.numel())))
        if excess > 0:
            del self._records[:excess]
            self.dropped += excess
        return record

    def extend(self, records: Iterable[StepRecord]) -> None:
        """Add steps.

        Args:
            records: values of every head of this history.
        """
        self._records.extend(records)

    def records(self) -> Iterator[StepRecord]:
        """Return the steps one by one."""
        return iter(self._records)

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
        """Return a table with one row per step and head, by column; None where a column or loss is missing."""
        return {name: column if isinstance(column, list) else column.tolist() for name, column in self.arrays().items()}

    def arrays(self) -> dict[str, Any]:
        """Return the table of `rows` with numbers as NumPy arrays, masked where a column or loss is missing."""
        from numpy import ma

        count, measured = len(self.heads), self._measured()
        has_loss = torch.tensor([record.has_loss for record in self._records], dtype=torch.bool)
        absences = {"loss": ~has_loss.repeat_interleave(count)}
        absences |= {name: ~measured[:, index].flatten() for index, name in enumerate(self.columns)}
        table: dict[str, Any] = {
            "step": torch.tensor(self.steps, dtype=torch.int64).repeat_interleave(count).numpy(),
            "loss": torch.tensor(self.losses, dtype=torch.float64).repeat_interleave(count).numpy(),
        }
        for name in LOCATION:
            table[name] = [getattr(head, name) for head in self.heads] * len(self)
        table |= {name: self[name].flatten().numpy() for name in self.columns}
        return table | {name: ma.masked_array(table[name], x.numpy()) for name, x in absences.items() if x.any()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table of `rows` as .parquet or .csv.

        Args:
            path: name of the file.

        Raises:
            OptionError: another ending.
        """
        name = os.fspath(path)
        if name.endswith(".parquet"):
            check_pyarrow(path)
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.table(self.arrays()), name)
        elif name.endswith(".csv"):
            table = self.rows()
            with open(name, "w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(table)
                writer.writerows(zip(*table.values(), strict=True))
        else:
            raise OptionError(f"a history is saved as .parquet or .csv, got {name}")

    def state_dict(self) -> dict[str, Any]:
        """Return the history as tensors, numbers and strings."""
        empty = torch.empty(0, len(self.columns), len(self.heads))
        history = {
            "steps": list(self.steps),
            "losses": self.losses,
            "has_loss": [record.has_loss for record in self._records],
            "values": torch.stack([record.values for record in self._records]) if self._records else empty,
            "measured": self._measured(),
            "pairs": {record.step: record.pairs for record in self._records if record.pairs is not None},
        }
        heads = [tuple(head) for head in self.heads]
        return {"heads": heads, "columns": list(self.columns), "history": history, "dropped": self.dropped}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """Return the history that `state_dict` returned.

        Args:
            state: the dictionary.
        """
        heads, columns = tuple(HeadLocation(*head) for head in state["heads"]), tuple(state["columns"])
        saved, result = state["history"], cls(heads, columns, state["dropped"])
        has_loss = saved.get("has_loss", [not math.isnan(loss) for loss in saved["losses"]])
        for row, (step, loss) in enumerate(zip(saved["steps"], saved["losses"], strict=True)):
            arrays = saved["values"][row], saved["measured"][row], saved["pairs"].get(step)
            result.extend([StepRecord(step, loss, heads, columns, *arrays, has_loss[row])])
        return result

    def __repr__(self) -> str:
        columns = ", ".join(self.columns) or "no columns"
        dropped = f", {self.dropped} before them dropped" if self.dropped else ""
        return f"HeadHistory({len(self)} steps of {len(self.heads)} heads{dropped}: {columns})"
