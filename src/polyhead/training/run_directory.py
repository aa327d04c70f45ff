"""`RunDirectory`: the table of every step in Parquet files, from which a run can be read, resumed and compared."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import ExitStack, suppress
from itertools import count, repeat
from pathlib import Path
from typing import Any

import torch

from polyhead.errors import OptionError
from polyhead.files import MAX_TABLE_ROWS, as_type, check_pyarrow, check_regular, parquet_bytes, refusing, short
from polyhead.geometry import checked_integer
from polyhead.inspection import Inspection, Settings
from polyhead.inspection.run_files import STEPS
from polyhead.observation import AttentionSite, HeadProfile
from polyhead.observation.run_folder import check_folder, lock_folder
from polyhead.observation.saving import write_atomically
from polyhead.observation.statistics import LOCATION
from polyhead.sources.packaged import run_folder
from polyhead.training.head_history import HeadHistory, HeadLocation, StepRecord
from polyhead.training.monitor import MonitorCallback

FORMAT = 1
PART_ROWS = 1 << 17  # rows from which a new file is begun; one row per step and head
SAVE_SECONDS = 30.0  # between two writes; a process that is killed loses as much
NOISE_STEPS = 40  # steps nearest to the inspected one, whose differences estimate the noise of its values
_KEY = b"polyhead.training"
_RULE = "the steps of a run are read as `RunDirectory` wrote them"


class RunDirectory(MonitorCallback):
    """Write the values of every head in every observed step to a folder.

    `folder/steps` has Parquet files with one row per step and head. Their columns are `step`, `loss`, those that name a
    head in the table of `polyhead inspect --save`, and one per statistic. Each file is complete at any time; a process
    that is killed loses the last 30 seconds. A monitor that continues from a checkpoint replaces the steps after it.
    `load_run` reads the folder, `polyhead view` shows it, `polyhead report` writes it as a page, and `polyhead compare`
    takes two of its steps. In a process group the first process writes.

    Args:
        folder: folder of the run; it is created.
        every: write every k-th step.
        overwrite: remove the steps of an earlier run that is not continued, instead of raising an error.

    Raises:
        OptionError: the folder has steps of a run that is not continued, or another process writes to it.

    >>> import tempfile, torch, polyhead
    >>> from polyhead.training import HeadMonitor, RunDirectory, load_run
    >>> layer = polyhead.MultiHeadAttention(16, 2, causal=True).train()
    >>> folder = tempfile.mkdtemp()
    >>> with HeadMonitor(layer, statistics=("max_logit", "entropy"), callbacks=[RunDirectory(folder)]) as monitor:
    ...     for _ in range(3):
    ...         _ = layer(torch.randn(3, 5, 16))
    ...         monitor.step()
    >>> load_run(folder)
    HeadHistory(3 steps of 2 heads: entropy, max_logit)
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 1, overwrite: bool = False) -> None:
        self.every = checked_integer("every", every, at_least=1, error=OptionError)
        self.folder, self.overwrite = Path(folder), overwrite
        check_folder(self.folder, "the folder of a run")
        check_pyarrow(self.folder)
        self._lock = ExitStack()
        self._is_open = self._continues = False
        self._part: list[StepRecord] = []  # of the file that is being written
        self._shape: tuple[tuple[HeadLocation, ...], tuple[str, ...]] | None = None  # heads and columns of the run
        self._unwritten = 0
        self._last = -1  # step
        self._saved = 0.0  # time of the last write

    def on_record(self, record: StepRecord) -> None:
        """Add a step, and write the file if it was not written for 30 seconds.

        Args:
            record: values of every head.
        """
        if record.step % self.every or not is_first_process():
            return
        self._open()
        self._shape = self._shape or (record.heads, record.columns)
        if (record.heads, record.columns) != self._shape:
            raise OptionError(
                "all steps of a run must have the same heads and statistics, got others at step "
                f"{record.step} in {self.folder}; write them to another folder"
            )
        if record.step <= self._last:
            raise OptionError(
                f"the steps of a run increase, got step {record.step} after {self._last}; write a new run to a new "
                "folder, with a `RunDirectory` of its own"
            )
        self._part.append(record)
        self._unwritten += 1
        self._last = record.step
        is_full = len(self._part) * len(record.heads) >= PART_ROWS
        if is_full or time.monotonic() - self._saved >= SAVE_SECONDS:
            self._write()
        if is_full:
            self._part = []

    def on_exit(self) -> None:
        """Write what is left, and release the folder."""
        try:
            self._write()
        finally:
            self._lock.close()
            self._is_open = False

    def state_dict(self) -> dict[str, Any]:
        """Return the last step, after writing it."""
        self._write()
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remove the steps after a checkpoint.

        Args:
            state: what `state_dict` returned.
        """
        self._last = int(state["last"])
        if not is_first_process():
            return
        parts = _parts(self.folder)
        finished = [part for part in parts if int(part.stem) <= self._last]
        history = _read(finished[-1]) if finished else HeadHistory()
        if self._last >= 0 and self._last not in history.steps:
            raise OptionError(
                f"a run continues in the folder of its checkpoint, got {self.folder} without step {self._last}"
            )
        self._continues = True
        self._open()
        for part in reversed(parts[len(finished) :]):
            part.unlink()
        self._part = [record for record in history.records() if record.step <= self._last]
        self._shape = (history.heads, history.columns) if self._part else None
        if len(self._part) < len(history):
            self._unwritten = 1
            self._write()
        if len(self._part) * len(history.heads) >= PART_ROWS:
            self._part = []

    def _open(self) -> None:
        """Lock the folder, and check that it has no steps of another run."""
        if self._is_open:
            return
        self._lock.enter_context(lock_folder(self.folder))
        self._is_open, self._saved = True, time.monotonic()
        parts = _parts(self.folder)
        if parts and not self._continues and not self.overwrite:
            self._lock.close()
            self._is_open = False
            raise OptionError(
                f"a new run is written to a folder without steps, got {self.folder}; continue its run with the state "
                "of the monitor, choose another folder, or pass overwrite=True"
            )
        if not self._continues:
            for part in parts:
                part.unlink()
        self._continues = True  # when the monitor is entered again
        for leftover in (self.folder / STEPS).glob(".*.parquet.*"):
            with suppress(OSError):
                leftover.unlink()

    def _write(self) -> None:
        if not self._unwritten:
            return
        import pyarrow

        heads, columns = self._part[0].heads, self._part[0].columns
        history = HeadHistory(heads, columns)
        history.extend(self._part)
        header = {"format": FORMAT, "heads": [list(head) for head in heads], "columns": columns}
        table = pyarrow.table(history.arrays()).replace_schema_metadata({_KEY: json.dumps(header)})
        content = parquet_bytes(table, use_dictionary=["step", "loss", *LOCATION])  # values hardly repeat
        write_atomically(self.folder / STEPS / f"{self._part[0].step:012d}.parquet", content)
        self._unwritten, self._saved = 0, time.monotonic()


def load_run(folder: str | os.PathLike[str]) -> HeadHistory:
    """Return the steps that `RunDirectory` wrote to a folder.

    Args:
        folder: folder of the run; it may be written to at the same time. "tiny-run", unless there is a folder of that
            name, is the training run that comes with polyhead.

    Raises:
        OptionError: the folder is not that of a run, or a file is damaged.
    """
    check_pyarrow(folder)
    parts = _parts(run_folder(folder))
    if not parts:
        raise OptionError(
            f"a training run is a folder that `RunDirectory` wrote, or tiny-run, got {folder} without steps"
        )
    whole = HeadHistory()
    for part in parts:
        history = _read(part)
        with refusing(part, _RULE):
            whole.check(history.heads, history.columns)
            if whole.steps and history.steps[0] <= whole.steps[-1]:
                raise ValueError(f"step {history.steps[0]} follows step {whole.steps[-1]}")
        whole.extend(history.records())
    return whole


def inspect_step(history: HeadHistory, step: int, name: str = "training run") -> Inspection:
    """Return a step as an inspection, for `polyhead.compare` and `save_inspection`.

    Values of a step vary with its batch. Their noise is estimated from the differences of neighbouring steps, 40 at
    most, in disjoint pairs, so that `polyhead.compare` reports differences of two steps beyond it.

    Args:
        history: steps of a run.
        step: one of them.
        name: name of the model.

    Raises:
        OptionError: a step that was not recorded.

    >>> import torch, polyhead
    >>> from polyhead.training import HeadMonitor, inspect_step
    >>> _ = torch.manual_seed(0)
    >>> layer = polyhead.MultiHeadAttention(16, 2, causal=True).train()
    >>> with HeadMonitor(layer) as monitor:
    ...     for _ in range(40):
    ...         _ = layer(torch.randn(3, 5, 16))
    ...         monitor.step()
    >>> before, after = (inspect_step(monitor.history, step) for step in (0, 39))
    >>> polyhead.compare(before, after).significant()  # the weights have not changed
    ()
    """
    steps = history.steps
    if step not in steps:
        nearest = min(steps, key=lambda x: abs(x - step), default=None)
        raise OptionError(f"the step must be one that was recorded, the nearest is {nearest}; got {step}")
    index = steps.index(step)
    sites = _sites(history.heads)
    columns = {column: history[column].double() for column in history.columns}
    influence: dict[AttentionSite, dict[str, torch.Tensor]] = {}
    for column, values in columns.items():
        measured = (~values.isnan().all(1)).nonzero().flatten()
        closest = (measured - index).abs().argsort(stable=True)[:NOISE_STEPS]
        near = values[measured[closest[: len(closest) // 2 * 2]].sort().values]
        # Each pair estimates twice the variance of a step; `compare` sums the squares of effects.
        effects = (near[1::2] - near[::2]) / math.sqrt(2 * max(1, len(near) // 2))
        for site in dict.fromkeys(sites):
            influence.setdefault(site, {})[column] = effects[:, [x == site for x in sites]]
    at_step = {column: values[index] for column, values in columns.items()}
    heads = tuple(head.head for head in history.heads)
    table = HeadProfile(sites, heads, history.columns, {"tokens": torch.zeros(len(heads)), **at_step})
    is_edited = any(site.origins is not None for site in sites)
    facts = {"model": name, "tokens": 0, "step": step, "step_loss": history.losses[index]}
    facts |= {"intervals_over": "pairs of steps", "edited": is_edited}
    return Inspection(Settings(), facts, table, influence=influence)


def _sites(heads: tuple[HeadLocation, ...]) -> tuple[AttentionSite, ...]:
    """Return the attention site of each head."""
    by_site: dict[tuple[str, str], list[HeadLocation]] = {}
    for head in heads:
        by_site.setdefault((head.site, head.kind), []).append(head)
    sites = {}
    for (name, kind), of_site in by_site.items():
        first, labels = of_site[0], [head.original_head for head in of_site]
        fields = {"name": name, "kind": kind, "stack": first.stack, "layer": first.layer, "num_heads": len(of_site)}
        if first.original_heads and labels != [str(index) for index in range(first.original_heads)]:
            fields["origins"] = {"heads": _origins(labels), "total": first.original_heads}
        sites[name, kind] = AttentionSite.from_dict(fields)
    return tuple(sites[head.site, head.kind] for head in heads)


def _origins(labels: list[str]) -> list[list[int]]:
    """Return the original heads of each head, from labels such as 5, 2+7, new and padding."""
    new = count(1)
    parts = [[] if label == "padding" else label.split("+") for label in labels]
    return [[-next(new) if part == "new" else int(part) for part in of_head] for of_head in parts]


def is_first_process() -> bool:
    """Return whether this process writes: the first of a process group, or the only one."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _parts(folder: Path) -> list[Path]:
    """Return the files of a run in the order of their steps."""
    return sorted(x for x in (folder / STEPS).glob("*.parquet") if x.stem.isdecimal())


def _read(part: Path) -> HeadHistory:
    """Return the steps of one file."""
    from pyarrow import parquet, types

    with refusing(part, _RULE):
        check_regular(part)
        with parquet.ParquetFile(part) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            header = json.loads((schema.metadata or {})[_KEY])
            if header["format"] != FORMAT:
                raise ValueError(f"its format is {short(header['format'])}, and this version reads {FORMAT}")
            columns = as_type(header["columns"], tuple[str, ...], "columns")
            integers, floats = ("step", "layer", "head"), ("loss", *columns)
            wrong = [name for name in integers if not types.is_int64(schema.field(name).type)]
            wrong += [name for name in floats if not types.is_floating(schema.field(name).type)]
            if rows > MAX_TABLE_ROWS:
                raise ValueError(f"it has {rows:,} rows, and at most {MAX_TABLE_ROWS:,} are read")
            if wrong:
                raise ValueError(f"it must have integers or floats in the columns {', '.join(wrong)}")
            stored = file.read([*integers, *floats])
        heads = tuple(HeadLocation(*as_type(x, tuple[str, str, int, int, str, int], "a head")) for x in header["heads"])
        _sites(heads)
        table = {name: torch.tensor(stored[name].to_numpy()).reshape(-1, len(heads)) for name in (*integers, *floats)}
        steps, losses = table["step"][:, 0].tolist(), table["loss"][:, 0].tolist()
        if int(part.stem) != steps[0] or sorted(set(steps)) != steps:
            raise ValueError(f"its steps must increase from {int(part.stem)}")
        same = [(table["step"], table["step"][:, :1])]
        same += [(table[name], torch.tensor([getattr(head, name) for head in heads])) for name in ("layer", "head")]
        if not all(bool((one == other).all()) for one, other in same):
            raise ValueError("its rows must be in the order of steps and heads")
        # Null where a column was not measured, and for the loss of a step without one.
        is_valid = {name: torch.tensor(stored[name].is_valid().to_numpy()).reshape(-1, len(heads)) for name in floats}
        values, measured = (torch.stack([x[name] for name in columns], 1) for x in (table, is_valid))
        has_loss = is_valid["loss"][:, 0].tolist()
        history = HeadHistory(heads, columns)
        fields = (steps, losses, repeat(heads), repeat(columns), values, measured, repeat(None), has_loss)
        history.extend(map(StepRecord, *fields))
        return history
