"""What an edit did to a model, as a value and as a file: enough to undo it, in this process or another."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from polyhead.errors import CheckpointError
from polyhead.geometry import HeadLayout
from polyhead.observatory.saving import write_whole
from polyhead.surgery.edits import HeadEdit, edits_from_json, edits_to_json

FORMAT = 1
_KEY = "polyhead.edit_record"


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """The heads of one edited layer, before and after."""

    path: str
    before: HeadLayout
    after: HeadLayout


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One value of a model's config. `path` is empty, or names a config inside it, as in "text_config"."""

    path: str
    name: str
    before: Any
    after: Any
    was_there: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class EditRecord:
    """Edits that were made, the fingerprints of the model before and after, and the tensors as they were before.

    `tensors` holds the parameters that were cut or overwritten, whole and on the CPU, and no other; `shapes` are theirs
    after the edit.
    """

    edits: tuple[HeadEdit, ...]
    before: str
    after: str
    layers: tuple[LayerRecord, ...]
    config: tuple[ConfigChange, ...]
    tensors: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are kept."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file in one step: whoever reads the path finds the old file or the new one, whole."""
        from safetensors.torch import save as serialise

        header = {
            "format": FORMAT,
            "edits": json.loads(edits_to_json(self.edits)),
            "before": self.before,
            "after": self.after,
            "layers": [
                {"path": layer.path, "before": layer.before.to_dict(), "after": layer.after.to_dict()}
                for layer in self.layers
            ],
            "config": [dataclasses.asdict(change) for change in self.config],
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }
        write_whole(Path(path), serialise(dict(self.tensors), {_KEY: json.dumps(header)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EditRecord:
        """The record that `save` wrote; a damaged file is refused, here or by `undo`, which checks every number."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                header = (file.metadata() or {}).get(_KEY)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, FileNotFoundError) as error:
            raise CheckpointError(f"an edit record is a whole safetensors file, got {str(path)!r}: {error}") from None
        if header is None:
            raise CheckpointError(
                f"an edit record is a file that EditRecord.save wrote, got {str(path)!r}, another one"
            )
        found = json.loads(header)
        if found["format"] != FORMAT:
            raise CheckpointError(
                f"this version reads edit records of format {FORMAT}, got format {found['format']} in {str(path)!r}"
            )
        return cls(
            edits=edits_from_json(json.dumps(found["edits"])),
            before=found["before"],
            after=found["after"],
            layers=tuple(
                LayerRecord(one["path"], HeadLayout.from_dict(one["before"]), HeadLayout.from_dict(one["after"]))
                for one in found["layers"]
            ),
            config=tuple(ConfigChange(**change) for change in found["config"]),
            tensors=tensors,
            shapes={name: tuple(shape) for name, shape in found["shapes"].items()},
        )
