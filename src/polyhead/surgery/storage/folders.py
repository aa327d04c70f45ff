"""A folder that is there whole or not at all: written beside its place, brought to the disk, then given its name.

And what travels from one model's folder to another's: tokenizers and all else that is no weight.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polyhead.errors import OptionError

# Of Linux's renameat2: paths from here, and two names that change places in one step.
_HERE, _EXCHANGE = -100, 2

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
_REWRITTEN = ("config.json", "generation_config.json", "polyhead.json", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class SideFiles:
    """What lies beside the weights in a model's folder: its tokenizer, its processor, how sentences are pooled.

    Handed to `save` in the place of a tokenizer, they are copied byte for byte.
    """

    folder: Path

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        for parent, below, files in os.walk(self.folder):
            below[:] = [name for name in below if not name.startswith(".")]
            inside = Path(parent).relative_to(self.folder)
            for name in files:
                written_anew = not inside.parts and name in _REWRITTEN
                if name.startswith(".") or written_anew or name.lower().endswith(_WEIGHTS):
                    continue
                source, place = Path(parent) / name, Path(folder) / inside
                if source.stat().st_size <= _LARGE:
                    place.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, place / name)


def check_free(folder: Path, *, replace: bool = False) -> None:
    """That a folder may be written there: there is none, an empty one, or one that is to be replaced."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OptionError(f"a model is written to a folder, got {folder}, which is a file or a link")
    if not replace and folder.is_dir() and any(folder.iterdir()):
        raise OptionError(
            f"a model is written to a new folder, got {folder}, which holds files; name another one, or allow it to be "
            "replaced (replace=True, or --replace on the command line)"
        )


@contextmanager
def written_whole(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write into, which bears the name `folder` when the body has ended well and not before.

    Whatever interrupts it, `folder` is as it was.
    """
    check_free(folder, replace=replace)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
    os.mkdir(beside)
    try:
        yield beside
        # Some libraries write files that only their owner may read.
        readable = beside.stat().st_mode & 0o666
        for parent, _, files in os.walk(beside):
            for name in files:
                os.chmod(os.path.join(parent, name), readable)
                _bring_to_disk(os.path.join(parent, name))
            _bring_to_disk(parent)
        check_free(folder, replace=replace)
        if folder.is_dir() and any(folder.iterdir()):
            _exchange(beside, folder)
        else:
            os.rename(beside, folder)
        _bring_to_disk(folder.parent)
    finally:
        # Once renamed, this is nothing, or what was replaced.
        shutil.rmtree(beside, ignore_errors=True)


def _bring_to_disk(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(new: Path, old: Path) -> None:
    """Let two folders change their names: in one step where the system has one, else in steps that are taken back."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    if swap is not None and swap(_HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE) == 0:
        return
    aside = old.with_name(f"{new.name}.old")
    try:
        os.rename(old, aside)
        os.rename(new, old)
    except BaseException:
        if aside.exists() and not old.exists():
            os.rename(aside, old)
        raise
    shutil.rmtree(aside, ignore_errors=True)
