"""Copy tokenizers and other files beside the weights from one model folder to another."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhead.errors import CheckpointError
from polyhead.surgery.storage.undo_folder import FILES
from polyhead.version import VERSION

if TYPE_CHECKING:
    from polyhead.surgery.edits.head_edits import HeadEdit

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
_OF_TOKENIZERS = frozenset(
    (
        "added_tokens.json",
        "merges.txt",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    )
)
_REWRITTEN = ("config.json", "generation_config.json", "polyhead.json", "model.safetensors.index.json", FILES)
_METADATA = re.compile(rb"---\r?\n.*?\n---[ \t]*\r?\n", re.DOTALL)  # of a model card, in YAML
_NOTE = re.compile(rb"<!-- polyhead -->\n.*?\n<!-- /polyhead -->\n\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SideFiles:
    """Files beside the weights in a model's folder: tokenizer, processor, sentence pooling.

    Passed to `save` in place of a tokenizer, they are copied byte for byte, except that README.md
    gets a note on the edits. Only regular files are copied, and a link
    must stay within the folder, or within the blobs of the hub cache that the folder is a snapshot of. A `tokenizer` is
    saved instead of the one in the folder.
    """

    folder: str | os.PathLike[str]
    tokenizer: Any = None

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
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

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
                replaced = self.tokenizer is not None and not inside.parts and name in _OF_TOKENIZERS
                if name.startswith(".") or rewritten or replaced or name.lower().endswith(_WEIGHTS):
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


def mark_model_card(folder: Path, edits: Sequence[HeadEdit]) -> None:
    """Begin a copied README.md with a note on the edits, below its metadata; without edits, remove such a note."""
    card = folder / "README.md"
    if not card.is_file():
        return
    content, note = _NOTE.sub(b"", card.read_bytes(), count=1), b""
    if edits:
        kinds = Counter(type(edit).__name__ for edit in edits)
        counts = ", ".join(f"{count} {name}" for name, count in kinds.items())
        note = (
            f"<!-- polyhead -->\n> **Heads of this model were edited** with polyhead {VERSION} ({counts}). The card "
            "below describes the original model: sizes and results are not those of this one. `config.json` and "
            "`polyhead.json` have the heads that are left.\n<!-- /polyhead -->\n\n"
        ).encode()
    metadata = _METADATA.match(content)
    place = 0 if metadata is None else metadata.end()
    card.write_bytes(content[:place] + note + content[place:])


def _refuse(error: OSError) -> None:
    raise CheckpointError(f"a model's folder must be readable, got {error.filename}: {error.strerror}") from None


def _read(path: Path) -> bytes:
    """Read a checked file that may have been swapped since: never a device, never more than allowed."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        content = file.read(_LARGE + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b"\0" * (_LARGE + 1)
    if len(content) > _LARGE:
        raise CheckpointError(f"a file must not change while it is copied, got {path}, which changed")
    return content
