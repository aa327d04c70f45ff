"""Loggers of a monitor: a few scalars and one picture of layers and heads per step, for TensorBoard and W&B."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.geometry import checked_integer
from polyhead.training.head_history import HeadLocation, StepRecord, index_of
from polyhead.training.monitor import MonitorCallback
from polyhead.training.run_directory import is_first_process

MOST_SCALARS = 10
# What is logged of a statistic: the head in which training goes wrong first. Of others the mean over all heads.
EXTREMES = {
    "max_logit": "highest",
    "max_abs_logit": "highest",
    "entropy": "lowest",
    "normalized_entropy": "lowest",
    "sink_mass": "highest",
    "output_norm_share": "lowest",
    "output_cosine": "strongest",  # by magnitude: heads whose outputs are opposite are duplicates as well
    "gradient_norm": "highest",
}
NEVER_ABSENT = ("max_logit", "max_abs_logit", "entropy")  # NaN is the result of a NaN; elsewhere it may be not measured
LIMITS = {"normalized_entropy": (0.0, 1.0), "sink_mass": (0.0, 1.0), "confidence": (0.0, 1.0)}  # of a picture's colours
_COLOURS = ((13, 8, 135), (204, 71, 120), (240, 249, 33))  # from low to high, of equal steps in lightness
_ABSENT = (128, 128, 128)  # no such head, NaN or Inf
_CELL = 12  # pixels


def summarize(record: StepRecord) -> tuple[dict[str, float], dict[str, HeadLocation]]:
    """Return at most ten numbers of a step, and the head that has the number where it is that of one head.

    They are the loss and at most nine statistics: those of `EXTREMES`, each with its most extreme head, then the means
    of other columns over the heads that have them. The selection depends on the columns, not on their values, so each
    scalar is logged in every step in which it was measured.

    Args:
        record: values of every head.
    """
    heads = {}
    scalars = {"loss": record.loss} if record.has_loss else {}
    for column in sorted(record.columns, key=lambda name: name not in EXTREMES)[: MOST_SCALARS - 1]:
        values = record[column]
        defined = ~values.isnan()
        if not defined.any():  # not measured in this step
            continue
        if column not in EXTREMES:
            scalars[f"mean {column}"] = float(values[defined].mean())
            continue
        name = f"{EXTREMES[column]} {column}"
        sort_key = {"highest": values, "lowest": -values, "strongest": values.abs()}[EXTREMES[column]]
        nan = torch.inf if column in NEVER_ABSENT else -torch.inf
        worst = int(torch.where(defined, sort_key, nan).argmax())
        scalars[name], heads[name] = float(values[worst]), record.heads[worst]
    return scalars, heads


def draw_heads(record: StepRecord, column: str) -> Tensor:
    """Return a picture of a statistic, [height, width, 3] in bytes: a row of cells per layer, a cell per head.

    Colours are from dark blue to yellow over [0, 1] for statistics in this range, and over the values of the step for
    others. Grey cells have no finite value.

    Args:
        record: values of every head.
        column: the statistic.
    """
    values = record[column].double()
    layers = {place: row for row, place in enumerate(dict.fromkeys((head.site, head.kind) for head in record.heads))}
    grid = torch.full((len(layers), 1 + max(head.head for head in record.heads)), torch.nan, dtype=torch.float64)
    rows, columns = zip(*((layers[head.site, head.kind], head.head) for head in record.heads), strict=True)
    grid[list(rows), list(columns)] = values
    finite = values[values.isfinite()]
    low, high = LIMITS.get(column, (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0))
    place = ((grid - low) / ((high - low) or 1.0)).clamp(0, 1) * (len(_COLOURS) - 1)
    colours, below = torch.tensor(_COLOURS, dtype=torch.float64), place.nan_to_num().long().clamp(max=len(_COLOURS) - 2)
    share = (place.nan_to_num() - below)[..., None]
    picture = colours[below] * (1 - share) + colours[below + 1] * share
    picture = torch.where(grid.isfinite()[..., None], picture, torch.tensor(_ABSENT, dtype=torch.float64))
    return picture.round().to(torch.uint8).repeat_interleave(_CELL, 0).repeat_interleave(_CELL, 1)


class _Logger(MonitorCallback, ABC):
    """Pass a summary of every k-th step of the first process to `_log`."""

    def __init__(self, every: int, picture: str) -> None:
        self.every = checked_integer("every", every, at_least=1, error=OptionError)
        self.picture, self._next = picture, 0

    def on_record(self, record: StepRecord) -> None:
        """Log a step.

        Args:
            record: values of every head.
        """
        index_of(self.picture, record.columns)
        if record.step % self.every == 0 and is_first_process():
            self._log(record, *summarize(record), draw_heads(record, self.picture))
            self._next = record.step + 1

    @abstractmethod
    def _log(
        self, record: StepRecord, scalars: dict[str, float], heads: dict[str, HeadLocation], picture: Tensor
    ) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next step."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last step that was logged.

        Args:
            state: what `state_dict` returned.
        """
        self._next = int(state["next"])


class TensorBoardLogger(_Logger):
    """Write at most ten scalars, their heads and a picture of all heads to TensorBoard.

    Scalars are under `heads/`. A run that continues at a step hides the events of an earlier one from this step on, so
    that each step is shown once; a new run needs another folder, since a run that starts at step 0 hides none.

    Args:
        folder: folder for event files, or a `torch.utils.tensorboard.SummaryWriter`, as that of a trainer, which hides
            events by its own `purge_step`.
        every: log every k-th step.
        picture: statistic of the picture.

    Raises:
        OptionError: tensorboard is not installed, or the statistic of the picture is not recorded.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | Any, *, every: int = 1, picture: str = "normalized_entropy"
    ) -> None:
        super().__init__(every, picture)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise OptionError("TensorBoardLogger needs tensorboard; install it with: pip install tensorboard") from None
        self._folder = folder if isinstance(folder, str | os.PathLike) else None
        self._class = SummaryWriter
        self._writer: Any = None if self._folder is not None else folder

    def _log(
        self, record: StepRecord, scalars: dict[str, float], heads: dict[str, HeadLocation], picture: Tensor
    ) -> None:
        """Write the events of a step."""
        if self._writer is None:
            first = min(self._next or record.step, record.step)
            self._writer = self._class(self._folder, purge_step=first or None)
        for name, value in scalars.items():
            self._writer.add_scalar(f"heads/{name}", value, record.step)
        lines = [f"{name}: {head}, {scalars[name]:.4g}" for name, head in heads.items()]
        self._writer.add_text("heads", "  \n".join(lines), record.step)
        self._writer.add_image(f"heads/{self.picture}", picture, record.step, dataformats="HWC")

    def on_exit(self) -> None:
        """Write what is buffered, and close files that this logger opened."""
        if self._writer is not None:
            self._writer.flush()
            if self._folder is not None:
                self._writer.close()
                self._writer = None


class WandbLogger(_Logger):
    """Log at most ten scalars, their heads and a picture of all heads to Weights & Biases.

    Names are under `heads/` and plotted over `heads/step`, whatever else is logged to the run. A run of W&B keeps all
    that was logged: steps that a resumed training repeats are in it twice, unless it is rewound (`wandb.init` with
    `resume_from`).

    Args:
        run: what `wandb.init` returned; the current run by default.
        every: log every k-th step.
        picture: statistic of the picture.

    Raises:
        OptionError: wandb is not installed, there is no run, or the statistic of the picture is not recorded.
    """

    def __init__(self, run: Any = None, *, every: int = 1, picture: str = "normalized_entropy") -> None:
        super().__init__(every, picture)
        try:
            import wandb
        except ImportError:
            raise OptionError("WandbLogger needs wandb; install it with: pip install wandb") from None
        self._run: Any = run or wandb.run
        self._image = wandb.Image
        if self._run is None and is_first_process():
            raise OptionError("WandbLogger needs a run, got none; call wandb.init(...) first, or pass its result")
        if self._run is not None:
            self._run.define_metric("heads/step")
            self._run.define_metric("heads/*", step_metric="heads/step")

    def _log(
        self, record: StepRecord, scalars: dict[str, float], heads: dict[str, HeadLocation], picture: Tensor
    ) -> None:
        """Log a step."""
        values: dict[str, Any] = {f"heads/{name}": value for name, value in scalars.items()}
        values |= {f"heads/{name}, head": str(head) for name, head in heads.items()}
        values[f"heads/{self.picture}"] = self._image(picture.numpy())
        self._run.log({"heads/step": record.step, **values})
