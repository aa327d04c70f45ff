"""Atomic folders: written under a temporary name, flushed to disk, then renamed.

A folder is replaced only if every file in it was written by polyhead and still has its size.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from polyhead.errors import CheckpointError, OptionError
from polyhead.surgery.storage.undo_folder import FILES, check_undo_folder, fsync, leftovers, locked

# AT_FDCWD and RENAME_EXCHANGE of Linux's renameat2, which swaps two names atomically.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def check_free(folder: Path, *, replace: bool = False, source: str | os.PathLike[str] | None = None) -> None:
    """Check that a folder may be written: it is missing, empty, or, with `replace`, was written by polyhead.

    The undo record beside it is checked likewise. `source` is the model that is edited: neither its folder nor a parent
    of it is ever replaced, and neither are the working directory, the home folder and their parents.
    """
    with locked(folder.parent) if folder.parent.is_dir() else nullcontext():
        _check_free(folder, replace=replace, source=source)


def _check_free(folder: Path, *, replace: bool, source: str | os.PathLike[str] | None = None) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OptionError(f"a model is written to a folder, got {folder}, which is a file or a link")
    if not folder.is_dir():
        check_undo_folder(folder)
        return
    empty = not any(folder.iterdir())
    if not empty and not replace:
        raise OptionError(
            f"a model is written to a new folder, got {folder}, which holds files; choose another one, or allow it to "
            "be replaced (replace=True, or --replace on the command line)"
        )
    if source is not None:
        check_not_source(folder, source)
    for place, label in ((Path.cwd(), "the working directory"), (Path(os.path.expanduser("~")), "the home folder")):
        if _holds(folder, place):
            raise OptionError(
                f"{label} is never replaced, nor a folder that holds it, got {folder}; choose another folder"
            )
    if not empty:
        _check_written_by_polyhead(folder, folder)
    check_undo_folder(folder, replace=replace)


def check_not_source(folder: Path, source: str | os.PathLike[str]) -> None:
    """Check that a folder is neither the edited model's own folder nor a parent of it."""
    place = Path(source).expanduser() if os.fspath(source) else None
    if place is not None and place.exists() and folder.exists() and _holds(folder, place):
        raise OptionError(
            f"an edited model is not written over the one it came from, got {folder}, which is or holds {source}; "
            "choose another folder"
        )


def _holds(folder: Path, place: Path) -> bool:
    """Return whether a folder is `place` or a parent of it."""
    return folder.resolve() in (place.resolve(), *place.resolve().parents)


@contextmanager
def written_atomically(
    folder: Path,
    *,
    replace: bool = False,
    before_rename: Callable[[], object] = lambda: None,
    after_rename: Callable[[], object] = lambda: None,
) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `folder` if the body succeeds.

    If the body raises, or the process is killed in it, `folder` is unchanged. A folder that is replaced swaps its name
    with the temporary one, and is deleted last. `before_rename` is called when all is on disk, `after_rename` when the
    folder has its name; only one process at a time does this. Temporary folders of killed processes are deleted as
    well; those of running processes are not.
    """
    check_free(folder, replace=replace)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
    os.mkdir(temporary)
    inode = temporary.stat().st_ino
    held = ExitStack()
    try:
        held.enter_context(locked(temporary))  # until the end, as a sign that this process was not killed
        yield temporary
        _list_files(temporary)
        # Some libraries create files that only the owner can read: give all files the permissions of the folder.
        file_mode = temporary.stat().st_mode & 0o666
        for parent, _, files in os.walk(temporary):
            for name in files:
                os.chmod(os.path.join(parent, name), file_mode)
                fsync(os.path.join(parent, name))
            fsync(parent)
        held.enter_context(locked(folder.parent))
        _check_free(folder, replace=replace)
        before_rename()
        if folder.is_dir() and any(folder.iterdir()):
            _exchange(temporary, folder)
            try:
                _check_written_by_polyhead(temporary, folder)  # again, now that nothing writes to it under its old name
                fsync(folder.parent)
            except BaseException:
                _exchange(temporary, folder)
                raise
        else:
            os.rename(temporary, folder)
            fsync(folder.parent)
        after_rename()
        for killed in leftovers(folder):
            _remove_written_files(killed)
    finally:
        with held:
            if temporary.is_dir():
                if temporary.stat().st_ino == inode:
                    shutil.rmtree(temporary, ignore_errors=True)
                else:  # after the exchange, this is the name of the replaced folder
                    _remove_written_files(temporary)


def _list_files(folder: Path) -> None:
    """Write the list of a folder's files into it, so that it can be recognised as written by polyhead."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = {"format": 1, "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}}
    (folder / FILES).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _check_written_by_polyhead(folder: Path, name: Path) -> None:
    """Check that a folder contains no files but those listed in it, unchanged; `name` is its path in messages."""
    rule = "only a folder that polyhead wrote, and with nothing else in it, is replaced"
    remedy = "choose another folder, or delete this one yourself"
    sizes = _listed_sizes(folder, name, rule, remedy)
    for parent, subfolders, files in os.walk(folder):
        for entry in (*subfolders, *files):
            path = Path(parent) / entry
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise OptionError(f"{rule}, got {name} with {relative}, which is no regular file; {remedy}")
            if path.is_dir() or relative == FILES:
                continue
            if relative not in sizes:
                raise OptionError(f"{rule}, got {name} with {relative}, which was not written by polyhead; {remedy}")
            if path.stat().st_size != sizes[relative]:
                raise OptionError(f"{rule}, got {name} with {relative}, which was changed since; {remedy}")


def _listed_sizes(folder: Path, name: Path, rule: str, remedy: str) -> dict[str, int]:
    """Return the sizes of the files that polyhead wrote to a folder, from its list; the strings are for messages."""
    path = folder / FILES
    if path.is_symlink() or not path.is_file():
        raise OptionError(f"{rule}, got {name} without {FILES}; {remedy}")
    try:
        if path.stat().st_size > 1 << 24:
            raise ValueError("it is too large")
        files: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))["files"]
        if not isinstance(files, dict):
            raise TypeError("'files' is no object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{rule}, got {name} with a {FILES} that is damaged: {error!r}; {remedy}") from None
    return files


def _remove_written_files(folder: Path) -> None:
    """Delete the files written to a folder and the folders left empty; never anything else."""
    listed = json.loads((folder / FILES).read_text(encoding="utf-8"))["files"]
    # Walk the folder and look names up in the list, never the reverse: a listed name may be a path outside the folder.
    for parent, _, files in os.walk(folder, topdown=False):
        for entry in files:
            path = Path(parent) / entry
            if path.relative_to(folder).as_posix() in (*listed, FILES):
                path.unlink()
        if not os.listdir(parent):
            os.rmdir(parent)


def _exchange(new: Path, old: Path) -> None:
    """Swap the names of two folders: atomically where supported, else in steps that are undone if one fails."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    if swap is not None and swap(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return
    aside = old.with_name(f"{new.name}.old")
    try:
        os.rename(old, aside)
        os.rename(new, old)
        os.rename(aside, new)
    except BaseException:
        if aside.exists():
            if old.exists():
                os.rename(old, new)
            os.rename(aside, old)
        raise
