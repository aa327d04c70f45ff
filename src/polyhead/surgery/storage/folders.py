"""A folder that is there whole or not at all: written beside its place, brought to the disk, then given its name.

A folder is replaced only where every file in it is one that was written here.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyhead.errors import CheckpointError, OptionError

# Of Linux's renameat2: paths from here, and two names that change places in one step.
_HERE, _EXCHANGE = -100, 2

FILES = "polyhead-files.json"  # the files that were written to the folder, with their sizes


def check_free(folder: Path, *, replace: bool = False, source: str | os.PathLike[str] | None = None) -> None:
    """Check that a folder may be written there: none, an empty one, or one written here that is to be replaced.

    `source` is the model that is edited: neither its folder nor one that holds it is ever replaced, and neither are
    the working directory, the home folder and those that hold them.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OptionError(f"a model is written to a folder, got {folder}, which is a file or a link")
    if not folder.is_dir():
        return
    empty = not any(folder.iterdir())
    if not empty and not replace:
        raise OptionError(
            f"a model is written to a new folder, got {folder}, which holds files; name another one, or allow it to be "
            "replaced (replace=True, or --replace on the command line)"
        )
    if source is not None:
        check_not_source(folder, source)
    for place, words in ((Path.cwd(), "the working directory"), (Path(os.path.expanduser("~")), "the home folder")):
        if _holds(folder, place):
            raise OptionError(f"{words} is never replaced, nor a folder that holds it, got {folder}; name another one")
    if not empty:
        _check_written_by_polyhead(folder, folder)


def check_not_source(folder: Path, source: str | os.PathLike[str]) -> None:
    """Check that a folder is neither the model that is edited nor a folder that holds it."""
    place = Path(source).expanduser() if os.fspath(source) else None
    if place is not None and place.exists() and folder.exists() and _holds(folder, place):
        raise OptionError(
            f"an edited model is not written over the one it came from, got {folder}, which is or holds {source}; name "
            "another folder"
        )


def _holds(folder: Path, place: Path) -> bool:
    return folder.resolve() in (place.resolve(), *place.resolve().parents)


@contextmanager
def written_whole(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write into, which bears the name `folder` when the body has ended well and not before.

    Whatever interrupts it, `folder` is as it was. What is replaced is moved aside, and deleted when all else is done.
    """
    check_free(folder, replace=replace)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
    os.mkdir(beside)
    made = beside.stat().st_ino
    try:
        yield beside
        _list_files(beside)
        # Some libraries write files that only their owner may read.
        readable = beside.stat().st_mode & 0o666
        for parent, _, files in os.walk(beside):
            for name in files:
                os.chmod(os.path.join(parent, name), readable)
                _fsync(os.path.join(parent, name))
            _fsync(parent)
        check_free(folder, replace=replace)
        if folder.is_dir() and any(folder.iterdir()):
            _exchange(beside, folder)
            try:
                _check_written_by_polyhead(beside, folder)  # again: nobody writes to it by this name any more
                _fsync(folder.parent)
            except BaseException:
                _exchange(beside, folder)
                raise
        else:
            os.rename(beside, folder)
            _fsync(folder.parent)
    finally:
        if beside.is_dir():
            if beside.stat().st_ino == made:
                shutil.rmtree(beside, ignore_errors=True)
            else:
                _remove_written_files(beside)


def _list_files(folder: Path) -> None:
    """Write down the files of a folder, so that it can be known again as one that was written here."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = {"format": 1, "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}}
    (folder / FILES).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _check_written_by_polyhead(folder: Path, name: Path) -> None:
    """Check that a folder holds the files that were written to it and nothing else; `name` is what it is called."""
    rule = "only a folder that polyhead wrote, and with nothing else in it, is replaced"
    todo = "name another one, or remove it yourself"
    listed = _listed(folder, name, rule, todo)
    for parent, below, files in os.walk(folder):
        inside = Path(parent).relative_to(folder)
        for entry in (*below, *files):
            path = Path(parent) / entry
            known = (inside / entry).as_posix()
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise OptionError(f"{rule}, got {name} with {known}, which is no regular file; {todo}")
            if path.is_dir() or known == FILES:
                continue
            if known not in listed:
                raise OptionError(f"{rule}, got {name} with {known}, which was not written by polyhead; {todo}")
            if path.stat().st_size != listed[known]:
                raise OptionError(f"{rule}, got {name} with {known}, which was changed since; {todo}")


def _listed(folder: Path, name: Path, rule: str, todo: str) -> dict[str, int]:
    path = folder / FILES
    if path.is_symlink() or not path.is_file():
        raise OptionError(f"{rule}, got {name} without {FILES}; {todo}")
    try:
        if path.stat().st_size > 1 << 24:
            raise ValueError("it is too large")
        files: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))["files"]
        if not isinstance(files, dict):
            raise TypeError("its files are no object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{rule}, got {name} with a {FILES} that is damaged: {error!r}; {todo}") from None
    return files


def _remove_written_files(folder: Path) -> None:
    """Delete the files that were written to a folder, and what is empty then; never anything else."""
    listed = json.loads((folder / FILES).read_text(encoding="utf-8"))["files"]
    # What is found inside is looked up in the list, never the other way round: a name of the list may lead anywhere.
    for parent, _, files in os.walk(folder, topdown=False):
        for entry in files:
            path = Path(parent) / entry
            if path.relative_to(folder).as_posix() in (*listed, FILES):
                path.unlink()
        if not os.listdir(parent):
            os.rmdir(parent)


def _fsync(path: str | Path) -> None:
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
        os.rename(aside, new)
    except BaseException:
        if aside.exists():
            if old.exists():
                os.rename(old, new)
            os.rename(aside, old)
        raise
