"""What travels from one model's folder to another's: tokenizers and all else that is no weight."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polyhead.errors import CheckpointError
from polyhead.surgery.storage.folders import FILES

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
_LARGE = 1 << 26  # bytes; what is larger is taken for weights under a name of its own
_MAX_BYTES, _MAX_FILES = 1 << 30, 4096
_REWRITTEN = ("config.json", "generation_config.json", "polyhead.json", "model.safetensors.index.json", FILES)


@dataclass(frozen=True, slots=True)
class SideFiles:
    """The files beside the weights in a model's folder: its tokenizer, its processor, how sentences are pooled.

    Passed to `save` in the place of a tokenizer, they are copied byte for byte. Only regular files are, and a link
    must stay within the folder, or within the blobs of the hub's cache that the folder is a snapshot of.
    """

    folder: Path

    def check(self) -> None:
        """Check every file that would be copied, before anything costs time."""
        for _ in self._files():
            pass

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        for inside, source in self._files():
            place = Path(folder) / inside
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(_read(source))

    def _files(self) -> Iterator[tuple[Path, Path]]:
        """Every file to copy: its path within the folder, and its real path."""
        count = size = 0
        for parent, below, files in os.walk(self.folder, onerror=_refuse):
            below[:] = [name for name in below if not name.startswith(".")]
            inside = Path(parent).relative_to(self.folder)
            for name in below:
                if (Path(parent) / name).is_symlink():
                    self._resolved(Path(parent) / name)
                    raise CheckpointError(
                        f"a model's folder holds folders of its own, got the link {Path(parent) / name}; put a folder "
                        "in its place"
                    )
            for name in files:
                written_anew = not inside.parts and name in _REWRITTEN
                if name.startswith(".") or written_anew or name.lower().endswith(_WEIGHTS):
                    continue
                source = self._resolved(Path(parent) / name)
                found = source.stat()
                if not stat.S_ISREG(found.st_mode):
                    raise CheckpointError(
                        f"the files beside a model's weights are regular files, got {Path(parent) / name}, which is "
                        "none; remove it"
                    )
                if found.st_size > _LARGE:
                    continue
                count, size = count + 1, size + found.st_size
                if count > _MAX_FILES or size > _MAX_BYTES:
                    raise CheckpointError(
                        f"at most {_MAX_FILES:,} files and {_MAX_BYTES:,} bytes are copied beside a model's weights, "
                        f"got more in {self.folder}; move what does not belong to the model elsewhere"
                    )
                yield inside / name, source

    def _resolved(self, path: Path) -> Path:
        """Where a file really is: in the folder, or in the blobs of the hub's cache."""
        home = self.folder.resolve()
        homes = [home]
        if home.parent.name == "snapshots":
            homes.append(home.parent.parent / "blobs")
        try:
            found = path.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"the files beside a model's weights can be read, got {path}: {getattr(error, 'strerror', error)}"
            ) from None
        if not any(place in found.parents for place in homes):
            raise CheckpointError(
                f"the files beside a model's weights are in its folder, got {path}, a link to {found}; copy the file "
                "there, or remove the link"
            )
        return found


def _refuse(error: OSError) -> None:
    raise CheckpointError(f"a model's folder can be read, got {error.filename}: {error.strerror}") from None


def _read(path: Path) -> bytes:
    """A file that was checked, and may have been exchanged since: never a device, and never more than was allowed."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        content = file.read(_LARGE + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b"\0" * (_LARGE + 1)
    if len(content) > _LARGE:
        raise CheckpointError(f"a file must stay as it is while it is copied, got {path}, which changed")
    return content
