"""Undo records: MODEL.undo beside the folder MODEL, one file named by its digest, which polyhead.json of MODEL states.

A model and its record change together, although they are two folders: a new record is added to MODEL.undo first, then
MODEL is renamed or exchanged atomically, which decides the record that counts, then the other record is removed, and
the other model last. A process that is killed in between leaves the other model under a temporary name, by which the
next write to MODEL knows that the other record is nobody's. One process at a time does this (`locked`).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from polyhead.errors import CheckpointError, OptionError
from polyhead.files import check_regular, read_json, refusing

MANIFEST = "polyhead.json"
MANIFEST_BYTES = 1 << 26
FILES = "polyhead-files.json"  # lists the files written to the folder, with their sizes
# Errors of flock where it is not supported: network file systems may not lock folders.
NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_INSIDE = "polyhead-record.safetensors"  # where earlier versions wrote the record: into the model's folder


def undo_folder(folder: Path) -> Path:
    """Return the folder of a model's undo record: beside the model, or beside what a link to it leads to.

    >>> undo_folder(Path("/models/pruned/")).name
    'pruned.undo'
    """
    real = folder.resolve()
    return real.parent / f"{real.name}.undo"


def check_undo_folder(folder: Path, *, replace: bool = False) -> None:
    """Check that a model's undo record may be written: nothing is there but, with `replace`, that model's own."""
    beside = undo_folder(folder)
    rule = f"the undo record of {folder} is written to the new folder {beside}"
    if beside.is_symlink() or (beside.exists() and not beside.is_dir()):
        raise OptionError(f"{rule}, got a file or a link there; choose another folder for the model")
    if not beside.is_dir():
        return
    digests = [*leftovers(folder).values(), recorded_digest(folder) if replace else None]
    own = [_file_name(digest) for digest in digests if digest is not None]
    foreign = [path.name for path in beside.iterdir() if path.name not in own]
    if foreign:
        raise OptionError(
            f"{rule}, got one that holds {min(foreign)}, which is not of the model in {folder}; choose another folder "
            "for the model, or move this one beside the model that it belongs to, or delete it"
        )


def leftovers(folder: Path) -> dict[Path, str | None]:
    """Return the models that killed writes of this folder left under temporary names, with their records' digests.

    The digest is None for a model without a record. Folders that another process is writing are left out.
    """
    real = folder.resolve()
    digests: dict[Path, str | None] = {}
    for path in real.parent.iterdir() if real.parent.is_dir() else ():
        is_temporary = re.fullmatch(rf"\.{re.escape(real.name)}\.[0-9a-f]{{16}}", path.name) is not None
        is_whole = is_temporary and not path.is_symlink() and (path / FILES).is_file()
        with suppress(CheckpointError, FileNotFoundError):  # its process may end now
            if is_whole and not _is_locked(path):
                digests[path] = recorded_digest(path)
    return digests


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait for a lock on a folder and hold it; it is released also if the process is killed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)


def _is_locked(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        return not _lock(handle, wait=False)
    finally:
        os.close(handle)


def _lock(handle: int, *, wait: bool = True) -> bool:
    """Lock an open folder; return False if another process holds the lock. Where locks are unsupported, do nothing."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    return True


def check_edited(folder: Path) -> None:
    """Raise if a folder is not that of an edited model, saved with the record of its edits."""
    if not folder.is_dir():
        raise OptionError(f"undo needs the folder of an edited model, got {folder}, which is no folder")
    if find_record(folder) is None:
        raise OptionError(f"undo needs the record saved with an edited model, got {folder} without one")


def find_record(folder: Path) -> Path | None:
    """Return the file of a model's undo record, with the content it was saved with; None if it was saved without."""
    digest = recorded_digest(folder)
    if digest is None:
        inside = folder / _INSIDE
        return inside if inside.is_file() else None
    beside = undo_folder(folder)
    path = beside / _file_name(digest)
    if not path.is_file():
        others = sorted(x.name for x in beside.glob("*.safetensors")) if beside.is_dir() else []
        raise CheckpointError(
            f"the undo record of {folder} is {path}, got "
            + (f"{others[0]}, which is another model's" if others else "none")
            + f"; if {folder} was moved or copied, put its undo folder beside it, as {beside.name}"
        )
    with refusing(path, f"the undo record of {folder} must be readable", CheckpointError):
        check_regular(path)
        actual = _digest(path)
    if actual != digest:
        raise CheckpointError(
            f"the undo record of {folder} must be as it was saved, got {path}, which was changed or damaged since"
        )
    return path


def recorded_digest(folder: Path) -> str | None:
    """Return the digest of the undo record that a model was saved with; None if it has none beside it."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    rule = f"{MANIFEST} describes a saved model and must be undamaged"
    digest = read_json(path, rule, CheckpointError, MANIFEST_BYTES).get("undo")
    if digest is not None and not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{32}", digest)):
        raise CheckpointError(f"{rule}, got {path} with the undo record {digest!r:.80}, which is no digest")
    return digest


@dataclass(slots=True)
class NewRecord:
    """An undo record under a temporary name, of a model that is being written; without a digest there is none."""

    model: Path
    temporary: Path
    digest: str | None = None
    _others: tuple[str | None, ...] = ()

    @property
    def folder(self) -> Path:
        return undo_folder(self.model)

    def place(self) -> None:
        """Put the record into its folder, beside one that is to be replaced; `locked`, right before the model."""
        self._others = recorded_digest(self.model), *leftovers(self.model).values()
        if self.digest is not None:
            self.folder.mkdir(exist_ok=True)
            os.replace(self.temporary, self.folder / _file_name(self.digest))
            for changed in (self.folder, self.folder.parent):
                fsync(changed)

    def remove_others(self) -> None:
        """Remove the records of models that the folder does not have, or no longer; `locked`."""
        current = recorded_digest(self.model)
        for digest in (*self._others, self.digest):
            if digest is not None and digest != current:
                (self.folder / _file_name(digest)).unlink(missing_ok=True)
        with suppress(OSError):  # it is not there, or not empty
            self.folder.rmdir()


@contextmanager
def new_record(folder: Path, write: Callable[[Path], object] | None) -> Iterator[NewRecord]:
    """Let `write` write the undo record of a model that the body saves to `folder`; None saves it without one.

    Afterwards, also if the body raised, the record of the model in the folder is there, and the other one is not.
    """
    beside = undo_folder(folder)
    new = NewRecord(folder, beside.parent / f".{beside.name}.{secrets.token_hex(8)}")
    try:
        if write is not None:
            write(new.temporary)
            new.digest = _digest(new.temporary)
        yield new
    finally:
        new.temporary.unlink(missing_ok=True)
        if beside.parent.is_dir():
            with locked(beside.parent):
                new.remove_others()


def fsync(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _file_name(digest: str) -> str:
    return f"{digest}.safetensors"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
