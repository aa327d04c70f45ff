"""Copy tokenizers and other files beside the weights from one model folder to another."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polyhead.errors import CheckpointError
from polyhead.surgery.storage.undo_folder import FILES

_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
    ".tflite",
    ".ot",
)
_LARGE = 1 << 26  # bytes; larger files are assumed to be weights under another name
_MAX_BYTES, _MAX_FILES = 1 << 30, 4096
_REWRITTEN = ("config.json", "generation_config.json", "polyhead.json", "model.safetensors.index.json", FILES)


@dataclass(frozen=True, slots=True)
class SideFiles:
    """Files beside the weights in a model's folder: tokenizer, processor, sentence pooling.

    Passed to `save` in place of a tokenizer, they are copied byte for byte. Only regular files are copied, and a link
    must stay within the folder, or within the blobs of the hub cache that the folder is a snapshot of.
    """

    folder: str | os.PathLike[str]

    def check(self) -> None:
        """Check every file that would be copied, before expensive work starts."""
        for _ in self._files():
            pass

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Copy the files into a folder, as a tokenizer would write them.

        Args:
            folder: the folder to write to.
        """
        for inside, source in self._files():
            place = Path(folder) / inside
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(_read(source))

    def _files(self) -> Iterator[tuple[Path, Path]]:
        """Yield every file to copy: its path within the folder, and its resolved path."""
        count = size = 0
        for parent, below, files in os.walk(self.folder, onerror=_refuse):
            below[:] = [name for name in below if not name.startswith(".")]
            inside = Path(parent).relative_to(self.folder)
            for name in below:
                if (Path(parent) / name).is_symlink():
                    self._resolved(Path(parent) / name)
                    raise CheckpointError(
                        f"folders in a model's folder must not be links, got {Path(parent) / name}; replace it by a "
                        "folder"
                    )
            for name in files:
                rewritten = not inside.parts and name in _REWRITTEN
                if name.startswith(".") or rewritten or name.lower().endswith(_WEIGHTS):
                    continue
                source = self._resolved(Path(parent) / name)
                info = source.stat()
                if not stat.S_ISREG(info.st_mode):
                    raise CheckpointError(
                        f"the files beside a model's weights must be regular files, got {Path(parent) / name}; "
                        "remove it"
                    )
                if info.st_size > _LARGE:
                    continue
                count, size = count + 1, size + info.st_size
                if count > _MAX_FILES or size > _MAX_BYTES:
                    raise CheckpointError(
                        f"at most {_MAX_FILES:,} files and {_MAX_BYTES:,} bytes are copied beside a model's weights, "
                        f"got more in {self.folder}; move what does not belong to the model elsewhere"
                    )
                yield inside / name, source

    def _resolved(self, path: Path) -> Path:
        """Return the real path of a file, which must be in the folder or in the blobs of the hub cache."""
        root = Path(self.folder).resolve()
        roots = [root]
        if root.parent.name == "snapshots":
            roots.append(root.parent.parent / "blobs")
        try:
            resolved = path.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"the files beside a model's weights must be readable, got {path}: {getattr(error, 'strerror', error)}"
            ) from None
        if not any(place in resolved.parents for place in roots):
            raise CheckpointError(
                f"the files beside a model's weights must be in its folder, got {path}, a link to {resolved}; copy the "
                "file there, or remove the link"
            )
        return resolved


def _refuse(error: OSError) -> None:
    raise CheckpointError(f"a model's folder must be readable, got {error.filename}: {error.strerror}") from None


def _read(path: Path) -> bytes:
    """Read a checked file that may have been swapped since: never a device, never more than allowed."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        content = file.read(_LARGE + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b"\0" * (_LARGE + 1)
    if len(content) > _LARGE:
        raise CheckpointError(f"a file must not change while it is copied, got {path}, which changed")
    return content
