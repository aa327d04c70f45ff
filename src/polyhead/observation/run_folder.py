"""Output folder of a run, locked so that only one process at a time writes to it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from polyhead.errors import OptionError

# Error codes of file systems without locks, such as some network file systems.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


def check_folder(folder: Path, option: str) -> None:
    """Raise if no folder can be created or written to at a path; creates nothing."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise OptionError(f"{option} must be a folder, got {folder}, which is a file or a broken link")
    parent = folder.absolute()
    while not parent.is_dir():
        if os.path.lexists(parent):
            raise OptionError(f"{option} must be a folder, got {folder}, but {parent} is a file; choose another path")
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OptionError(f"{option} must be a writable folder, got {folder}, but {parent} is not writable")


def check_file(file: Path, option: str) -> None:
    """Raise if no file can be written at a path: it is a folder, or its parent is missing or not writable."""
    if file.is_dir():
        raise OptionError(f"{option} must be a file, got the folder {file}; name a file in it")
    parent = file.absolute().parent
    if not parent.is_dir():
        if os.path.lexists(parent):
            raise OptionError(f"{option} must be a file in a folder, got {file}, but {parent} is a file")
        raise OptionError(f"there is no folder {file.parent}; create it first, got {option} {file}")
    if not os.access(file if file.exists() else parent, os.W_OK):
        raise OptionError(f"{option} must be a writable file, got {file}, which is not writable")


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder and lock it for this process; the lock is released even if the process is killed."""
    check_folder(folder, "the folder of a run")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"the folder of a run must be creatable, got {folder}: {error.strerror}") from None
    with ExitStack() as stack:
        stack.callback(_remove_if_empty, folder)
        stack.enter_context(_locked(folder))
        yield


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that wrote nothing."""
    with suppress(OSError):  # it is not empty
        folder.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(
                f"only one process at a time can write to the folder of a run, got {folder}, which another process is "
                "using; wait for it, or choose another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove temporary files left by a process killed while writing the file `name`; the caller holds the lock."""
    for leftover in folder.glob(f".{name}.*"):
        if len(leftover.name) == len(name) + 18:  # named by `saving.write_atomically`
            with suppress(OSError):
                leftover.unlink()


def check_origin(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise if a run would be resumed with another model, text or options than it was started with."""
    changed = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    if changed:
        digests = {"model": "another model", "text": "another text (or other contexts of it)"}
        got = ", ".join(
            digests.get(name, f"{name} {now.get(name)!r} instead of {before.get(name)!r}") for name in changed
        )
        raise OptionError(
            f"a run can only be resumed with the model, text and options it was started with, got {got}, for {path}; "
            "repeat the command it was started with, or start again in another folder"
        )
