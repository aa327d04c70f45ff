"""Files of machines, shipped and calibrated by the user. Imports no PyTorch: unknown names are refused at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

from polyhead.errors import OptionError
from polyhead.files import read_json
from polyhead.names import suggestion

MachineKind = Literal["measured", "datasheet"]
SHIPPED = Path(__file__).parent / "machines"
RULE = "a machine file must contain a machine"
ELSEWHERE = "set POLYHEAD_MACHINES to another folder"


def list_machines() -> tuple[str, ...]:
    """Return the names of all machines: those shipped with the library, and those calibrated by the user."""
    return tuple(_files())


def machine_kinds() -> dict[str, str]:
    """Return the kind of every machine by name: measured, or predicted from its datasheet."""
    kinds = {}
    for name, path in _files().items():
        try:
            kinds[name] = str(read_json(path, RULE).get("kind", "measured"))
        except OptionError:
            kinds[name] = "unreadable"
    return kinds


def machine_names() -> str:
    """Return the names of all machines in one line, each with its kind."""
    return ", ".join(f"{name} ({kind})" for name, kind in machine_kinds().items())


def find_machine(name: str | os.PathLike[str]) -> Path:
    """Return the file of a machine by a name from `list_machines`, or of a path to a .json file."""
    path = Path(name)
    if path.suffix != ".json":
        known = _files()
        if str(name) not in known:
            hint = suggestion(str(name), known) or "`polyhead plan calibrate` adds this machine"
            raise OptionError(f"machine must be one of {machine_names()}, or a .json file; got {str(name)!r}; {hint}")
        path = known[str(name)]
    if not path.exists():
        raise OptionError(f"a machine file must exist, got {str(path)!r}")
    return path


def own_folder() -> Path:
    """Return the folder of machines calibrated by the user: $POLYHEAD_MACHINES, or the XDG data folder."""
    if folder := os.environ.get("POLYHEAD_MACHINES"):
        return Path(folder)
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "polyhead" / "machines"


def check_own_folder() -> None:
    """Raise if a machine could not be saved, before minutes are spent on calibration."""
    folder = own_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(f"machines are saved to a writable folder, got {folder}: {error}; {ELSEWHERE}") from error


def _files() -> dict[str, Path]:
    """Return the files of all machines by name; the user's take precedence over shipped ones."""
    files = {path.stem: path for folder in (SHIPPED, own_folder()) for path in folder.glob("*.json")}
    return dict(sorted(files.items()))
