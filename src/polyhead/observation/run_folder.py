"""The folder that a run is kept in: one process at a time writes there."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from polyhead.errors import OptionError

# What a file system without locks says, as some over a network.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


def check_place(folder: Path, option: str) -> None:
    """Refuse a path where no folder can be made or written to; nothing is made yet."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise OptionError(f"{option} names a folder, got {folder}, which is a file or a link to nothing")
    above = folder.absolute()
    while not above.is_dir():
        if os.path.lexists(above):
            raise OptionError(f"{option} names a folder, got {folder}, but {above} is a file; name another place")
        above = above.parent
    if not os.access(above, os.W_OK | os.X_OK):
        raise OptionError(f"{option} names a folder that can be written to, got {folder}, and {above} cannot be")


def check_file(file: Path, option: str) -> None:
    """Refuse a path where no file can be written: a folder, a missing or closed folder around it."""
    if file.is_dir():
        raise OptionError(f"{option} names a file, got the folder {file}; name a file in it")
    parent = file.absolute().parent
    if not parent.is_dir():
        if os.path.lexists(parent):
            raise OptionError(f"{option} names a file in a folder, got {file}, but {parent} is a file")
        raise OptionError(f"there is no folder {file.parent}; make it first, got {option} {file}")
    if not os.access(file if file.exists() else parent, os.W_OK):
        raise OptionError(f"{option} names a file that can be written, got {file}, which cannot be")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder and let no other process keep a run there meanwhile; a process that is killed lets go."""
    check_place(folder, "the folder of a run")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"a run is kept in a folder, got {folder}, which cannot be made: {error.strerror}") from None
    with ExitStack() as stack:
        stack.callback(_remove_if_empty, folder)
        stack.enter_context(_locked(folder))
        yield


def _remove_if_empty(folder: Path) -> None:
    """A run that has kept nothing leaves no folder behind."""
    with suppress(OSError):  # there is something in it
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
                f"one process at a time keeps a run in a folder, got {folder}, where another one is at work; wait for "
                "it, or name another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)


def sweep(folder: Path, name: str) -> None:
    """Remove what a process that was killed while it wrote the file `name` has left of it; for who holds the folder."""
    for left in folder.glob(f".{name}.*"):
        if len(left.name) == len(name) + 18:  # as `saving.write_whole` names it
            with suppress(OSError):
                left.unlink()


def check_origin(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with another model, another text or other options than a run began with."""
    changed = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    if changed:
        got = ", ".join(f"{name} {now.get(name)!r} for {before.get(name)!r}" for name in changed)
        raise OptionError(
            f"a run goes on with the model, text and options it began with, got {got} in {path}; begin again in "
            "another folder"
        )
