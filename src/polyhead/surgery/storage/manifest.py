"""Manifest of a saved model's folder, polyhead.json: its form, its heads, and a fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyhead.errors import CheckpointError, ShapeError
from polyhead.files import as_type, build, read_json
from polyhead.geometry import HeadLayout, HeadOrigins
from polyhead.surgery.native.padding import Padding
from polyhead.surgery.options import FORMS, Form
from polyhead.surgery.storage.undo_folder import MANIFEST, MANIFEST_BYTES

# Not a name that transformers reads: it would load heads with a KV map as if they were in order.
WEIGHTS = "polyhead.safetensors"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a saved model: its class, the layout of each layer, and the padding of their heads.

    `shared` maps tied tensors to the name they are stored under. `origins` are the original heads of edited layers,
    None in folders written before they were stored. The fingerprint is that of the model without padding, `undo` the
    digest of the undo record beside the folder.
    """

    form: Form
    architecture: str
    fingerprint: str
    layers: Mapping[str, HeadLayout]
    paddings: Mapping[str, Padding] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, HeadOrigins] | None = None
    undo: str | None = None

    def write(self, folder: Path) -> None:
        content: dict[str, Any] = {
            "format": FORMAT,
            "form": self.form,
            "architecture": self.architecture,
            "fingerprint": self.fingerprint,
            "layers": {path: layout.to_dict() for path, layout in self.layers.items()},
            "paddings": {path: asdict(padding) for path, padding in self.paddings.items()},
            "shared": dict(self.shared),
        }
        if self.origins is not None:
            content["origins"] = {path: origins.to_dict() for path, origins in self.origins.items()}
        if self.undo is not None:
            content["undo"] = self.undo
        content["digest"] = _digest(content)
        (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a folder; None if it has none, as any model that polyhead did not save."""
        path = folder / MANIFEST
        if not path.is_file():
            return None
        content = read_json(
            path, f"{MANIFEST} describes a saved model and must be undamaged", CheckpointError, MANIFEST_BYTES
        )
        try:
            if content["format"] != FORMAT:
                raise CheckpointError(
                    f"this version reads {MANIFEST} of format {FORMAT}, got {content['format']} in {path}"
                )
            if content.pop("digest") != _digest(content):
                raise CheckpointError(f"{MANIFEST} must be unmodified, got one in {folder} that was changed")
            if content["form"] not in FORMS:
                raise CheckpointError(f"a saved model must have a form of {', '.join(FORMS)}, got {content['form']!r}")
            origins = content.get("origins")
            return cls(
                form=content["form"],
                architecture=as_type(content["architecture"], str, "architecture"),
                fingerprint=as_type(content["fingerprint"], str, "fingerprint"),
                layers={path: HeadLayout.from_dict(one) for path, one in content["layers"].items()},
                paddings={path: build(Padding, one) for path, one in content["paddings"].items()},
                shared=as_type(content["shared"], Mapping[str, str], "shared"),
                origins=None if origins is None else {path: HeadOrigins.from_dict(x) for path, x in origins.items()},
                undo=as_type(content.get("undo"), str | None, "undo"),
            )
        except (ValueError, KeyError, TypeError, AttributeError, ShapeError, RecursionError) as error:
            raise CheckpointError(
                f"{MANIFEST} describes a saved model, got a damaged one in {folder}: {error!r}"
            ) from error


def _digest(content: Mapping[str, Any]) -> str:
    """Return a digest of the content: a damaged map from heads to KV heads could still be consistent."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
