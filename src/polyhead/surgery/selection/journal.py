"""What a long choice of heads has computed, kept piece by piece in a folder, so that it can go on from there.

The same command computes the same pieces in the same order. A piece that is kept is read instead; one that was being
computed when the process ended is computed again, from its start. So the end is the same, bit for bit on a CPU.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.run_folder import check_origin, sweep
from polyhead.observation.saving import write_whole
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.calibration.sensitivity import Sensitivity
from polyhead.surgery.compensation.masked_trial import Outputs
from polyhead.surgery.selection.measurements import Evidence
from polyhead.surgery.selection.quality import Quality, Worth

FORMAT = 1
NUMBERS = "journal.json"


class Journal:
    """Pieces by their names, in a folder; without one everything is computed and nothing is kept.

    Args:
        folder: where they are kept; made where it is not there.
        origin: what they are computed from, as JSON can say it. Another one is refused.
    """

    def __init__(self, folder: Path | None = None, origin: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.origin = json.loads(json.dumps(origin or {}))
        self._numbers: dict[str, list[list[float]]] = {}
        self._read: Counter[str] = Counter()
        if folder is None:
            return
        sweep(folder, NUMBERS)
        path = folder / NUMBERS
        if path.exists():
            self._numbers = self._opened(path)
        elif any(folder.iterdir()):
            raise OptionError(f"--resume names a new folder or that of a run, got {folder} with other files in it")
        else:
            self._write()

    def _opened(self, path: Path) -> dict[str, list[list[float]]]:
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            form, origin, numbers = kept["format"], dict(kept["origin"]), dict(kept["numbers"])
            if origin.get("criterion") == "repaired":  # its earlier name
                origin["criterion"] = "compensated"
            found = {str(name): [[float(x) for x in row] for row in rows] for name, rows in numbers.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{path} must be what a run wrote, got one that cannot be read: {error!r}") from None
        if form != FORMAT:
            raise OptionError(f"this version goes on with runs of format {FORMAT}, got {form!r} in {path}")
        check_origin(path, origin, self.origin)
        return found

    def _write(self) -> None:
        assert self.folder is not None
        content = {"format": FORMAT, "origin": self.origin, "numbers": self._numbers}
        write_whole(self.folder / NUMBERS, json.dumps(content).encode())

    def numbers(self, name: str, measure: Callable[[], Sequence[float]]) -> list[float]:
        """The next numbers of this name: those that are kept, or measured and kept."""
        rows, place = self._numbers.setdefault(name, []), self._read[name]
        self._read[name] += 1
        if place < len(rows):
            return rows[place]
        found = [float(x) for x in measure()]
        rows.append(found)
        if self.folder is not None:
            self._write()
        return found

    def tensors(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors of this name: those that are kept, or computed and kept."""
        if self.folder is None:
            return compute()
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save

        path = self.folder / f"{name}.safetensors"
        sweep(self.folder, path.name)
        if path.exists():
            try:
                return load_file(path)
            except (SafetensorError, OSError) as error:
                raise OptionError(f"{path} must be what a run wrote, got one that cannot be read: {error}") from None
        # As they will be read: the layout of a tensor can change the last bit of what is computed with it.
        found = {key: x.detach().cpu().contiguous() for key, x in compute().items()}
        write_whole(path, save(found))
        return found

    def outputs(self, name: str, compute: Callable[[], dict[str, Outputs]]) -> dict[str, Outputs]:
        """The output matrices of this name, by layer."""

        def packed() -> dict[str, Tensor]:
            return {
                f"{path}/{part}": x
                for path, own in compute().items()
                for part, x in (("heads", torch.tensor(own.heads)), ("matrix", own.matrix), ("bias", own.bias))
            }

        if self.folder is None:
            return compute()
        kept = self.tensors(name, packed)
        paths = dict.fromkeys(key.rpartition("/")[0] for key in kept)
        return {
            path: Outputs(tuple(kept[f"{path}/heads"].tolist()), kept[f"{path}/matrix"], kept[f"{path}/bias"])
            for path in paths
        }


class KeptQuality:
    """A quality whose measurements go through a journal, under a name of their own."""

    def __init__(self, quality: Quality, journal: Journal, role: str) -> None:
        self._quality = quality
        self._journal = journal
        self._role = role

    @property
    def name(self) -> str:
        return self._quality.name

    @property
    def words(self) -> str:
        return self._quality.words

    @property
    def whole(self) -> float:
        return self._quality.whole

    def measure(self) -> Worth:
        def measured() -> tuple[float, float]:
            found = self._quality.measure()
            return found.value, found.error

        return Worth(*self._journal.numbers(f"{self._role} measure", measured))

    def loss(self) -> float:
        (found,) = self._journal.numbers(f"{self._role} loss", lambda: (self._quality.loss(),))
        return found


class KeptEvidence(Evidence):
    """Evidence whose parts go through a journal, with the state of the random numbers that a part has drawn."""

    journal: Journal

    def _kept(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        generator = getattr(self.judge.slope, "generator", None)

        def computed() -> dict[str, Tensor]:
            found = compute()
            return found if generator is None else {**found, "random/state": generator.get_state()}

        kept = dict(self.journal.tensors(name, computed))
        state = kept.pop("random/state", None)
        if generator is not None and state is not None:
            generator.set_state(state)
        return kept

    def _moments(self, name: str, compute: Callable[[], dict[str, OutputMoments]]) -> dict[str, OutputMoments]:
        def packed() -> dict[str, Tensor]:
            return {
                f"{path}/{part}": x
                for path, own in compute().items()
                for part, x in (
                    ("count", torch.tensor(own.count, dtype=torch.float64)),
                    ("total", own.total),
                    ("products", own.products),
                    ("signature", own.signature),
                )
                if x is not None
            }

        kept = self._kept(name, packed)
        return {
            path: OutputMoments(
                int(kept[f"{path}/count"]),
                kept[f"{path}/total"],
                kept[f"{path}/products"],
                kept.get(f"{path}/signature"),
            )
            for path in self._in_order(kept)
        }

    def _in_order(self, kept: Mapping[str, Tensor]) -> list[str]:
        """The layers in the order of the model: a file lists its tensors in another one."""
        there = {key.rpartition("/")[0] for key in kept}
        return [path for path in self.layers if path in there]

    @cached_property
    def moments(self) -> dict[str, OutputMoments]:
        return self._moments("moments", lambda: super(KeptEvidence, self).moments)

    @cached_property
    def weighed_moments(self) -> dict[str, OutputMoments]:
        return self._moments("weighed_moments", lambda: super(KeptEvidence, self).weighed_moments)

    @cached_property
    def sensitivities(self) -> dict[str, Sensitivity]:
        def packed() -> dict[str, Tensor]:
            return {f"{path}/products": x.products for path, x in super(KeptEvidence, self).sensitivities.items()}

        kept = self._kept("sensitivities", packed)
        return {path: Sensitivity(kept[f"{path}/products"]) for path in self._in_order(kept)}

    @cached_property
    def ablation(self) -> dict[str, list[float]]:
        return self._scores("ablation", lambda: super(KeptEvidence, self).ablation)

    def slopes(self, measure: Literal["gradient", "taylor"]) -> dict[str, list[float]]:
        return self._scores(measure, lambda: super(KeptEvidence, self).slopes(measure))

    def _scores(self, name: str, compute: Callable[[], dict[str, list[float]]]) -> dict[str, list[float]]:
        def packed() -> dict[str, Tensor]:
            return {f"{path}/scores": torch.tensor(x, dtype=torch.float64) for path, x in compute().items()}

        kept = self._kept(name, packed)
        return {path: kept[f"{path}/scores"].tolist() for path in self._in_order(kept)}
