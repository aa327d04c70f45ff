"""Journal of a long head selection: results stored in a folder, so that it can be resumed.

The same command computes the same results in the same order. A stored result is read instead of recomputed; one that
was in progress when the process ended is computed again from its start. The outcome is identical, bit for bit on a
CPU.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation.run_folder import check_origin, remove_leftovers
from polyhead.observation.saving import write_atomically

FORMAT = 2
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
        self.resumed = folder is not None and (folder / NUMBERS).exists()
        if folder is None:
            return
        remove_leftovers(folder, NUMBERS)
        path = folder / NUMBERS
        if self.resumed:
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
            raise OptionError(
                f"this version resumes runs of format {FORMAT}, got {version!r} in {path}, of a version with another "
                "compensation; start in a new folder"
            )
        check_origin(path, origin, self.origin)
        return parsed

    def _write(self) -> None:
        assert self.folder is not None
        content = {"format": FORMAT, "origin": self.origin, "numbers": self._numbers}
        write_atomically(self.folder / NUMBERS, json.dumps(content).encode())

    def stored(self, name: str) -> int:
        """Return how many results of this name are stored: measurements, or 1 for tensors."""
        tensors = self.folder is not None and (self.folder / f"{name}.safetensors").exists()
        return len(self._numbers.get(name, ())) + tensors

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

    def by_layer(
        self,
        name: str,
        compute: Callable[[], Mapping[str, Mapping[str, Tensor]]],
        generator: torch.Generator | None = None,
    ) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the tensors of this name, by layer and part: stored, or computed and stored.

        The state of the random `generator` that the computation advances is stored and restored with them.
        """
        if self.folder is None:
            return compute()

        def flattened() -> dict[str, Tensor]:
            tensors = {f"{path}/{part}": x for path, parts in compute().items() for part, x in parts.items()}
            return tensors if generator is None else {**tensors, "random/state": generator.get_state()}

        stored = self._tensors(self.folder / f"{name}.safetensors", flattened)
        state = stored.pop("random/state", None)
        if generator is not None and state is not None:
            generator.set_state(state)
        layers: dict[str, dict[str, Tensor]] = {}
        for key, tensor in stored.items():
            path, _, part = key.rpartition("/")
            layers.setdefault(path, {})[part] = tensor
        return layers

    def _tensors(self, path: Path, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save

        remove_leftovers(path.parent, path.name)
        if path.exists():
            try:
                return load_file(path)
            except (SafetensorError, OSError) as error:
                raise OptionError(f"{path} must be a file that a run wrote, got an unreadable one: {error}") from None
        # Return them as they will be read: a tensor's memory layout can change the last bit of a result.
        computed = {key: x.detach().cpu().contiguous() for key, x in compute().items()}
        write_atomically(path, save(computed))
        return computed
