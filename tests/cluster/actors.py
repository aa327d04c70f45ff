"""Workers that import nothing large, with faults that are chosen by the name of a task."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from polyhead.errors import OptionError
from polyhead.parallel.ray_workers import RayActor


class Squares(RayActor):
    """Returns squares. A task `killed` ends its process the first time, `mortal` always.

    Args:
        folder: records who ran what.
        fault: fault of `start`.
    """

    def __init__(self, folder: Path, fault: str = "") -> None:
        self.folder, self.fault, self.now = folder, fault, 0

    def start(self) -> dict[str, object]:
        if self.fault == "mortal":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "fails":
            raise OptionError("there must be a number, got none")
        return {"version": os.getpid() if self.fault == "differs" else 1}

    def progress(self) -> int:
        return self.now

    def square(self, name: str, number: int) -> int:
        with (self.folder / name).open("a") as file:
            file.write(f"{os.getpid()}\n")
        if name == "mortal" or (name == "killed" and len((self.folder / name).read_text().split()) == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "fails":
            raise OptionError("a square must be large, got a small one")
        if name == "ends":
            raise ZeroDivisionError("by zero")
        if name == "hangs":
            time.sleep(600)
        for _ in range(60 * (name == "slow")):
            self.now += 1
            time.sleep(0.2)
        return number**2
