"""Undo records: one file in the folder MODEL.undo beside MODEL, named by its digest, which is in MODEL/polyhead.json.

A model and its record are replaced together, although they are in two folders:

1. the new record is added to MODEL.undo, beside the old one;
2. the new model is renamed to MODEL or exchanged with it, atomically: from then on the new record is the current one;
3. the old record is removed, then the old model, which has a temporary name since the exchange.

A process that is killed in between leaves one of the two models under its temporary name. The next write to MODEL
removes it, with its record. One process at a time does this (`locked`).
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
_OLD_RECORD = "polyhead-record.safetensors"  # name of the record in the model's own folder, in earlier versions


def undo_folder(folder: Path) -> Path:
    """Return the folder of a model's undo record, beside the model; if `folder` is a link, beside its target.

    >>> undo_folder(Path("/models/pruned/")).name
    'pruned.undo'
    """
    real = folder.resolve()
    return real.parent / f"{real.name}.undo"


def check_undo_folder(folder: Path, *, replace: bool = False) -> None:
    """Check that writing a model's undo record overwrites no other model's.

    The undo folder may contain records that killed writes of this model left and, with `replace`, its current record.
    """
    records = undo_folder(folder)
    rule = f"the undo record of {folder} is written to the new folder {records}"
    if records.is_symlink() or (records.exists() and not records.is_dir()):
        raise OptionError(f"{rule}, got a file or a link there; choose another folder for the model")
    if not records.is_dir():
        return
    digests = [*leftovers(folder).values(), recorded_digest(folder) if replace else None]
    own = [_file_name(digest) for digest in digests if digest is not None]
    foreign = [path.name for path in records.iterdir() if path.name not in own]
    if foreign:
        raise OptionError(
            f"{rule}, got one that holds {min(foreign)}, which is not of the model in {folder}; choose another folder "
            "for the model, or move this one beside the model that it belongs to, or delete it"
        )


def leftovers(folder: Path) -> dict[Path, str | None]:
    """Return the temporary folders of killed writes of this model, with the digests of their undo records.

    The digest is None for a model without a record. Folders that a running process writes are left out.
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
    """Raise if a folder does not contain an edited model that was saved with its undo record."""
    if not folder.is_dir():
        raise OptionError(f"undo needs the folder of an edited model, got {folder}, which is no folder")
    if find_record(folder) is None:
        raise OptionError(f"undo needs the record saved with an edited model, got {folder} without one")


def find_record(folder: Path) -> Path | None:
    """Return the file of a model's undo record, after checking its digest; None if the model was saved without one."""
    digest = recorded_digest(folder)
    if digest is None:
        inside = folder / _OLD_RECORD
        return inside if inside.is_file() else None
    records = undo_folder(folder)
    path = records / _file_name(digest)
    if not path.is_file():
        others = sorted(x.name for x in records.glob("*.safetensors")) if records.is_dir() else []
        raise CheckpointError(
            f"the undo record of {folder} is {path}, got "
            + (f"{others[0]}, which is another model's" if others else "none")
            + f"; if {folder} was moved or copied, put its undo folder beside it, as {records.name}"
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
    """Return the digest of a model's undo record, from polyhead.json; None if there is no record in an undo folder."""
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
    """Undo record of a model that is being written, under a temporary name; without a digest the model has none."""

    model: Path
    temporary: Path
    digest: str | None = None
    _old_digests: tuple[str | None, ...] = ()  # records of the replaced model and of `leftovers`

    @property
    def folder(self) -> Path:
        return undo_folder(self.model)

    def place(self) -> None:
        """Move the record into the undo folder, beside the old one; called under `locked`, right before the rename."""
        self._old_digests = recorded_digest(self.model), *leftovers(self.model).values()
        if self.digest is not None:
            self.folder.mkdir(exist_ok=True)
            os.replace(self.temporary, self.folder / _file_name(self.digest))
            for changed in (self.folder, self.folder.parent):
                fsync(changed)

    def remove_others(self) -> None:
        """Remove all records but that of the model which is in the folder now; called under `locked`."""
        current = recorded_digest(self.model)
        for digest in (*self._old_digests, self.digest):
            if digest is not None and digest != current:
                (self.folder / _file_name(digest)).unlink(missing_ok=True)
        with suppress(OSError):  # it is not there, or not empty
            self.folder.rmdir()


@contextmanager
def new_record(folder: Path, write: Callable[[Path], object] | None) -> Iterator[NewRecord]:
    """Write the undo record of a model that the body saves to `folder`, with `write`; None saves it without a record.

    The body calls `place` and `remove_others`. On exit only the record of the model in the folder remains: the new one,
    or the old one if the body raised before the rename.
    """
    records = undo_folder(folder)
    new = NewRecord(folder, records.parent / f".{records.name}.{secrets.token_hex(8)}")
    try:
        if write is not None:
            write(new.temporary)
            new.digest = _digest(new.temporary)
        yield new
    finally:
        new.temporary.unlink(missing_ok=True)
        if records.parent.is_dir():
            with locked(records.parent):
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
