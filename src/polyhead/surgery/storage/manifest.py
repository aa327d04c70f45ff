"""What a saved model's folder says of itself, in polyhead.json: its form, its heads, and a fingerprint of it all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from polyhead.errors import CheckpointError, ShapeError
from polyhead.files import as_type, read_json
from polyhead.geometry import HeadLayout, HeadOrigins
from polyhead.surgery.native.padding import Padding

Form = Literal["uniform", "uneven", "padded"]
FORMS: tuple[Form, ...] = get_args(Form)

MANIFEST = "polyhead.json"
# Not under the name that transformers looks for: it would read heads by a map as if they were in order.
WEIGHTS = "polyhead.safetensors"
RECORD = "polyhead-record.safetensors"
FORMAT = 1
_MAX_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Manifest:
    """How a folder's model is read: the class it is of, the layout of each layer, and where padding put their heads.

    `shared` names tensors that are kept under another name. `origins` are the original heads of the layers that were
    edited, None in folders of before they were kept. The fingerprint is that of the model without padding.
    """

    form: Form
    architecture: str
    fingerprint: str
    layers: Mapping[str, HeadLayout]
    paddings: Mapping[str, Padding] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, HeadOrigins] | None = None

    def write(self, folder: Path) -> None:
        content: dict[str, Any] = {
            "format": FORMAT,
            "form": self.form,
            "architecture": self.architecture,
            "fingerprint": self.fingerprint,
            "layers": {path: layout.to_dict() for path, layout in self.layers.items()},
            "paddings": {path: padding.to_dict() for path, padding in self.paddings.items()},
            "shared": dict(self.shared),
        }
        if self.origins is not None:
            content["origins"] = {path: origins.to_dict() for path, origins in self.origins.items()}
        content["digest"] = _digest(content)
        (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """What the folder says; None where it says nothing, as any model's that was not saved here."""
        path = folder / MANIFEST
        if not path.is_file():
            return None
        found = read_json(
            path,
            f"{MANIFEST} says how a saved model is read, and one that is damaged is refused",
            CheckpointError,
            _MAX_BYTES,
        )
        try:
            if found["format"] != FORMAT:
                raise CheckpointError(
                    f"this version reads {MANIFEST} of format {FORMAT}, got {found['format']} in {path}"
                )
            if found.pop("digest") != _digest(found):
                raise CheckpointError(f"{MANIFEST} must be as it was written, got one in {folder} that was changed")
            if found["form"] not in FORMS:
                raise CheckpointError(f"a saved model has one of the forms {', '.join(FORMS)}, got {found['form']!r}")
            return cls(
                form=found["form"],
                architecture=as_type(found["architecture"], str, "architecture"),
                fingerprint=as_type(found["fingerprint"], str, "fingerprint"),
                layers={path: HeadLayout.from_dict(_with_map(one)) for path, one in found["layers"].items()},
                paddings={path: Padding.from_dict(one) for path, one in found["paddings"].items()},
                shared=as_type(found["shared"], Mapping[str, str], "shared"),
                origins=_origins(found["origins"]) if "origins" in found else None,
            )
        except (ValueError, KeyError, TypeError, AttributeError, ShapeError, RecursionError) as error:
            raise CheckpointError(
                f"{MANIFEST} says how a saved model is read, got one that is damaged in {folder}: {error!r}"
            ) from error


def _digest(content: Mapping[str, Any]) -> str:
    """A map from heads to KV heads could be damaged and fit all the same."""
    written = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(written.encode(), digest_size=16).hexdigest()


def _origins(found: Mapping[str, Any]) -> dict[str, HeadOrigins]:
    return {path: HeadOrigins.from_dict(one) for path, one in found.items()}


def _with_map(sizes: Mapping[str, Any]) -> dict[str, Any]:
    key_heads = sizes.get("key_heads")
    return dict(sizes) if key_heads is None else {**sizes, "key_heads": tuple(key_heads)}
