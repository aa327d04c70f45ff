"""Record of applied edits, as a value and as a file: enough to undo them, in this process or another."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from polyhead.errors import CheckpointError, OptionError
from polyhead.files import as_type, build, read_tensors, refusing
from polyhead.geometry import HeadLayout, HeadOrigins
from polyhead.observation.saving import write_atomically
from polyhead.surgery.edits.head_edits import HeadEdit, edits_from_json, edits_to_json
from polyhead.surgery.native.configs import ConfigChange, join_changes

FORMAT = 1
_KEY = "polyhead.edit_record"


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """Layouts of one edited layer before and after; `origins` are those of its heads before the edit."""

    path: str
    before: HeadLayout
    after: HeadLayout
    origins: HeadOrigins


@dataclass(frozen=True, slots=True, eq=False)
class EditRecord:
    """Applied edits, the model's fingerprints before and after, and the tensors as they were before.

    `before` and `after` are the fingerprints, `config` the changed config values. `tensors` contains the parameters
    that were cut or overwritten, in full and on the CPU, and no others; `shapes` are their shapes after the edit.
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
        """Bytes of the stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file atomically: a reader sees the complete old or new file.

        Args:
            path: the file.
        """
        from safetensors.torch import save as serialise

        header = {
            "format": FORMAT,
            "edits": json.loads(edits_to_json(self.edits)),
            "before": self.before,
            "after": self.after,
            "layers": [
                {
                    "path": layer.path,
                    "before": layer.before.to_dict(),
                    "after": layer.after.to_dict(),
                    "origins": layer.origins.to_dict(),
                }
                for layer in self.layers
            ],
            "config": [dataclasses.asdict(change) for change in self.config],
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        write_atomically(Path(path), serialise(tensors, {_KEY: json.dumps(header)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EditRecord:
        """Read a record that `save` wrote; damage is detected here, or by `undo`, which checks the weights.

        Args:
            path: the file.

        Returns:
            The record.
        """
        tensors, metadata = read_tensors(path, "an edit record is a whole safetensors file", CheckpointError)
        header = metadata.get(_KEY)
        if header is None:
            raise CheckpointError(f"an edit record must be a file that EditRecord.save wrote, got {str(path)!r}")
        with refusing(path, "an edit record is read as EditRecord.save wrote it", CheckpointError):
            content = json.loads(header)
            if content["format"] != FORMAT:
                raise CheckpointError(
                    f"this version reads edit records of format {FORMAT}, got format {content['format']} in "
                    f"{str(path)!r}"
                )
            return cls._from_header(content, tensors)

    @classmethod
    def _from_header(cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> EditRecord:
        return cls(
            edits=edits_from_json(json.dumps(content["edits"])),
            before=as_type(content["before"], str, "before"),
            after=as_type(content["after"], str, "after"),
            layers=tuple(_read_layer(layer) for layer in content["layers"]),
            config=tuple(build(ConfigChange, change) for change in content["config"]),
            tensors=tensors,
            shapes=as_type(content["shapes"], Mapping[str, tuple[int, ...]], "shapes"),
        )


def _read_layer(content: dict[str, Any]) -> LayerRecord:
    before, after = (HeadLayout.from_dict(content[name]) for name in ("before", "after"))
    # Records of older versions have no origins: the model before the edit is taken as unedited.
    origins = (
        HeadOrigins.from_dict(content["origins"]) if "origins" in content else HeadOrigins.unedited(before.num_heads)
    )
    return LayerRecord(as_type(content["path"], str, "path"), before, after, origins)


def join_records(first: EditRecord, second: EditRecord) -> EditRecord:
    """Join two consecutive records into one that undoes both.

    Args:
        first: record of the edits made first.
        second: record of the edits made after them, of the same model.

    Returns:
        The joint record.

    >>> from polyhead.layers import MultiHeadAttention
    >>> from polyhead.surgery import PruneHeads, apply, undo
    >>> layer = MultiHeadAttention(12, 4)
    >>> both = join_records(apply(layer, [PruneHeads(0, (1,))]), apply(layer, [PruneHeads(0, (0,))]))
    >>> undo(layer, both)
    >>> layer.layout.num_heads
    4
    """
    if second.before != first.after:
        raise OptionError(
            "joined records must be of consecutive edits, got one that ended with the model of fingerprint "
            f"{first.after} and one that began with {second.before}"
        )
    layers = {layer.path: layer for layer in first.layers}
    for layer in second.layers:
        earlier = layers.get(layer.path, layer)
        layers[layer.path] = LayerRecord(layer.path, earlier.before, layer.after, earlier.origins)
    return EditRecord(
        edits=(*first.edits, *second.edits),
        before=first.before,
        after=second.after,
        layers=tuple(layers.values()),
        config=join_changes(first.config, second.config),
        tensors={**second.tensors, **first.tensors},  # as before the first edit
        shapes={**first.shapes, **second.shapes},  # as after the second
    )
