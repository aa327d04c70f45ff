"""Journal of a long head selection: results stored in a folder, so that it can be resumed.

The same command computes the same results in the same order. A stored result is read instead of recomputed; one that
was in progress when the process ended is computed again from its start. The outcome is identical, bit for bit on a
CPU.
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
from polyhead.observation.run_folder import check_origin, remove_leftovers
from polyhead.observation.saving import write_atomically
from polyhead.surgery.calibration.moments import OutputMoments
from polyhead.surgery.calibration.sensitivity import Sensitivity
from polyhead.surgery.compensation.masked_trial import Outputs
from polyhead.surgery.selection.measurements import Evidence
from polyhead.surgery.selection.quality import Measurement, Quality

FORMAT = 1
NUMBERS = "journal.json"


class Journal:
    """Named results stored in a folder; without a folder everything is computed and nothing stored.

    Args:
        folder: created if it does not exist.
        origin: JSON-serialisable inputs of the computation; a folder with another origin is rejected.
    """

    def __init__(self, folder: Path | None = None, origin: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.origin = json.loads(json.dumps(origin or {}))
        self._numbers: dict[str, list[list[float]]] = {}
        self._read: Counter[str] = Counter()
        if folder is None:
            return
        remove_leftovers(folder, NUMBERS)
        path = folder / NUMBERS
        if path.exists():
            self._numbers = self._read_numbers(path)
        elif any(folder.iterdir()):
            raise OptionError(f"--resume must name a new folder or that of a run, got {folder} with other files in it")
        else:
            self._write()

    def _read_numbers(self, path: Path) -> dict[str, list[list[float]]]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version, origin, numbers = content["format"], dict(content["origin"]), dict(content["numbers"])
            if origin.get("criterion") == "repaired":  # its earlier name
                origin["criterion"] = "compensated"
            parsed = {str(name): [[float(x) for x in row] for row in rows] for name, rows in numbers.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{path} must be a file that a run wrote, got an unreadable one: {error!r}") from None
        if version != FORMAT:
            raise OptionError(f"this version resumes runs of format {FORMAT}, got {version!r} in {path}")
        check_origin(path, origin, self.origin)
        return parsed

    def _write(self) -> None:
        assert self.folder is not None
        content = {"format": FORMAT, "origin": self.origin, "numbers": self._numbers}
        write_atomically(self.folder / NUMBERS, json.dumps(content).encode())

    def numbers(self, name: str, measure: Callable[[], Sequence[float]]) -> list[float]:
        """Return the next numbers of this name: stored, or measured and stored."""
        rows, index = self._numbers.setdefault(name, []), self._read[name]
        self._read[name] += 1
        if index < len(rows):
            return rows[index]
        row = [float(x) for x in measure()]
        rows.append(row)
        if self.folder is not None:
            self._write()
        return row

    def tensors(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors of this name: stored, or computed and stored."""
        if self.folder is None:
            return compute()
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save

        path = self.folder / f"{name}.safetensors"
        remove_leftovers(self.folder, path.name)
        if path.exists():
            try:
                return load_file(path)
            except (SafetensorError, OSError) as error:
                raise OptionError(f"{path} must be a file that a run wrote, got an unreadable one: {error}") from None
        # Return them as they will be read: a tensor's memory layout can change the last bit of a result.
        computed = {key: x.detach().cpu().contiguous() for key, x in compute().items()}
        write_atomically(path, save(computed))
        return computed

    def outputs(self, name: str, compute: Callable[[], dict[str, Outputs]]) -> dict[str, Outputs]:
        """Return the output matrices of this name, by layer."""

        def packed() -> dict[str, Tensor]:
            return {
                f"{path}/{part}": x
                for path, layer_outputs in compute().items()
                for part, x in (
                    ("heads", torch.tensor(layer_outputs.heads)),
                    ("matrix", layer_outputs.matrix),
                    ("bias", layer_outputs.bias),
                )
            }

        if self.folder is None:
            return compute()
        stored = self.tensors(name, packed)
        paths = dict.fromkeys(key.rpartition("/")[0] for key in stored)
        return {
            path: Outputs(tuple(stored[f"{path}/heads"].tolist()), stored[f"{path}/matrix"], stored[f"{path}/bias"])
            for path in paths
        }


class JournaledQuality:
    """A quality whose measurements go through a journal, under the name of its role."""

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
    def original(self) -> float:
        return self._quality.original

    def measure(self) -> Measurement:
        def measured() -> tuple[float, float]:
            quality = self._quality.measure()
            return quality.value, quality.error

        return Measurement(*self._journal.numbers(f"{self._role} measure", measured))

    def loss(self) -> float:
        (loss,) = self._journal.numbers(f"{self._role} loss", lambda: (self._quality.loss(),))
        return loss


class JournaledEvidence(Evidence):
    """Evidence whose parts go through a journal, with the state of the random generator they used."""

    journal: Journal

    def _stored(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        generator = getattr(self.objectives.slope, "generator", None)

        def computed() -> dict[str, Tensor]:
            result = compute()
            return result if generator is None else {**result, "random/state": generator.get_state()}

        stored = dict(self.journal.tensors(name, computed))
        state = stored.pop("random/state", None)
        if generator is not None and state is not None:
            generator.set_state(state)
        return stored

    def _moments(self, name: str, compute: Callable[[], dict[str, OutputMoments]]) -> dict[str, OutputMoments]:
        def packed() -> dict[str, Tensor]:
            return {
                f"{path}/{part}": x
                for path, moments in compute().items()
                for part, x in (
                    ("count", torch.tensor(moments.count, dtype=torch.float64)),
                    ("total", moments.total),
                    ("products", moments.products),
                    ("signature", moments.signature),
                )
                if x is not None
            }

        stored = self._stored(name, packed)
        return {
            path: OutputMoments(
                int(stored[f"{path}/count"]),
                stored[f"{path}/total"],
                stored[f"{path}/products"],
                stored.get(f"{path}/signature"),
            )
            for path in self._in_order(stored)
        }

    def _in_order(self, stored: Mapping[str, Tensor]) -> list[str]:
        """Return the layers in model order; a safetensors file lists its tensors in another."""
        paths = {key.rpartition("/")[0] for key in stored}
        return [path for path in self.layers if path in paths]

    @cached_property
    def moments(self) -> dict[str, OutputMoments]:
        return self._moments("moments", lambda: super(JournaledEvidence, self).moments)

    @cached_property
    def weighed_moments(self) -> dict[str, OutputMoments]:
        return self._moments("weighed_moments", lambda: super(JournaledEvidence, self).weighed_moments)

    @cached_property
    def sensitivities(self) -> dict[str, Sensitivity]:
        def packed() -> dict[str, Tensor]:
            return {f"{path}/products": x.products for path, x in super(JournaledEvidence, self).sensitivities.items()}

        stored = self._stored("sensitivities", packed)
        return {path: Sensitivity(stored[f"{path}/products"]) for path in self._in_order(stored)}

    @cached_property
    def ablation(self) -> dict[str, list[float]]:
        return self._scores("ablation", lambda: super(JournaledEvidence, self).ablation)

    def slopes(self, measure: Literal["gradient", "taylor"]) -> dict[str, list[float]]:
        return self._scores(measure, lambda: super(JournaledEvidence, self).slopes(measure))

    def _scores(self, name: str, compute: Callable[[], dict[str, list[float]]]) -> dict[str, list[float]]:
        def packed() -> dict[str, Tensor]:
            return {f"{path}/scores": torch.tensor(x, dtype=torch.float64) for path, x in compute().items()}

        stored = self._stored(name, packed)
        return {path: stored[f"{path}/scores"].tolist() for path in self._in_order(stored)}
