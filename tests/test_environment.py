"""The environment that `make` installs: whole after a kill at any time, and made once by runs that start together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "environment"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="the scripts of make are in a checkout only")

# In the place of Python: `-m venv` makes a folder, and the python in it logs what it is told to install. Both wait
# while there is a file `wait`, half done.
PYTHON = """#!/usr/bin/env bash
set -euo pipefail
mkdir -p "$3/bin"
while [[ -e wait-venv ]]; do touch venv-waits; sleep 0.05; done
cat >"$3/bin/python" <<'END'
#!/usr/bin/env bash
set -euo pipefail
echo "begin $* by $PIP_CONSTRAINT and $PIP_BUILD_CONSTRAINT" >>log
while [[ -e wait-pip ]]; do touch pip-waits; sleep 0.05; done
touch "$(dirname "$0")/whole"
echo "end $*" >>log
END
chmod +x "$3/bin/python"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    return tmp_path


def start(place: Path, extra: str = "dev") -> subprocess.Popen[bytes]:
    command = [str(SCRIPT), ".venv", "./python", extra]
    return subprocess.Popen(command, cwd=place, start_new_session=True, stdout=subprocess.DEVNULL)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines(place: Path, word: str) -> list[str]:
    return [line for line in (place / "log").read_text().splitlines() if line.startswith(word)]


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_a_killed_installation_is_started_over(place, step):
    (place / f"wait-{step}").touch()
    killed = start(place)
    wait_for(place / f"{step}-waits")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (place / ".venv" / ".installed-dev").exists()
    (place / f"wait-{step}").unlink()
    (place / ".venv" / "half").touch()  # what the killed one may have left

    assert start(place).wait(60) == 0
    assert (place / ".venv" / "bin" / "whole").exists()
    assert not (place / ".venv" / "half").exists()
    assert sorted(path.name for path in (place / ".venv").glob(".*")) == [
        ".created",
        ".installed-demo",
        ".installed-dev",
    ]


def test_an_environment_that_is_up_to_date_is_left_alone(place):
    assert start(place).wait(60) == 0
    assert start(place).wait(60) == 0
    assert start(place, "demo").wait(60) == 0
    (begun,) = lines(place, "begin")
    assert begun.endswith("-m pip install --quiet --quiet --editable .[dev] by constraints.txt and constraints.txt")

    later = time.time() + 60
    os.utime(place / "constraints.txt", (later, later))
    assert start(place).wait(60) == 0
    assert len(lines(place, "begin")) == 2


@pytest.mark.skipif(shutil.which("flock") is None, reason="there is no flock on this system")
def test_two_that_start_together_take_turns(place):
    (place / "wait-pip").touch()
    one = start(place)
    wait_for(place / "pip-waits")
    other = start(place)
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.5)
    (place / "wait-pip").unlink()
    assert (one.wait(60), other.wait(60)) == (0, 0)
    assert len(lines(place, "begin")) == len(lines(place, "end")) == 1
