"""Build the sdist, the wheel from the sdist, and use the wheel without extras in a fresh environment: `make package`.

    python -m tests.clean_install FOLDER

FOLDER keeps the sdist and the wheel. The environment is made outside the source tree with the pins of constraints.txt,
and removed afterwards. There, every command shows its help, and then either runs or says in one line which extra it
needs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
SAVED = ROOT / "tests" / "formats" / "saved"  # a run, models and edited models, copied to where the commands run
TREEBANK = ROOT / "tests" / "sources" / "small.conllu"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the command line in a base install; `extra` is the one that it must ask for, None if it runs."""

    arguments: str
    extra: str | None = None
    prints: str = ""


CALLS = (
    Call("inspect", "demo"),
    Call("inspect decoder --text text", "hf"),
    Call("inspect decoder --text text --ray local", "ray"),
    Call("report run-decoder --output page.html", "hf"),
    Call("view decoder --no-open", "hf"),
    Call("view run-decoder --no-open", "report"),
    Call("view tiny-run --no-open", "report"),
    Call("report tiny-run --output run.html", "hf"),
    Call("compare run-decoder run-encoder", "hf"),
    Call("merge-runs run-decoder --output merged-run", "hf"),
    Call("plan llama3.1-8b --machine cpu-2-cores --output plan.html", prints="plan.html"),
    Call("plan decoder", prints="cache"),
    Call("choose --d-model 4096 --layers 32 --cache 128KiB", prints="head_dim"),
    Call("syntax reader --treebank small.conllu", "hf"),
    Call("prune decoder --heads L0H3 --output pruned", "hf"),
    Call("merge decoder --heads L0H1+L0H2 --output merged", "hf"),
    Call("convert decoder --kv-heads 1 --text text --output grouped", "hf"),
    Call("shrink decoder --target 50%-heads --text text --output smaller", "hf"),
    Call("undo model-uniform --output original", "hf"),
)

# The library itself, as far as the base install goes.
PROGRAM = """
import torch, polyhead
layer = polyhead.MultiHeadAttention(24, 4, num_kv_heads=2, causal=True)
x = torch.randn(2, 7, 24, requires_grad=True)
with polyhead.observe(layer, statistics="entropy") as session:
    layer(x).output.sum().backward()
assert session.profile["entropy"].shape == (4,), session.profile
assert x.grad.isfinite().all()
assert "site-packages" in polyhead.__file__, polyhead.__file__
"""


def fault(call: Call, code: int, stdout: str, stderr: str) -> str | None:
    """Return why the end of a call is not what it should be, or None."""
    if call.extra is None:
        return (
            None if code == 0 and call.prints in stdout else f"exit code {code} must be 0, with {call.prints!r} printed"
        )
    if code != 2 or stdout:
        return f"exit code {code} must be 2, with nothing on stdout"
    command = call.arguments.split()[0]
    line = rf"polyhead {command}: [^\n]*pip install 'polyhead\[{call.extra}\]'\n"
    return None if re.fullmatch(line, stderr) else f"one line on stderr must name polyhead[{call.extra}]"


def build(folder: Path, environment: Mapping[str, str]) -> Path:
    """Build the sdist, and the wheel from it; return the wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], environment, ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    _run([*pip, str(sdist)], environment, folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_wheel(wheel: Path) -> None:
    """Check the metadata, and that the wheel has every file of the package that the source tree has."""
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        found = Metadata.from_email(packed.read(metadata))  # raises for fields that the index would reject
    missing = {name for name in files - set(names) if "__pycache__" not in name}
    if missing or not found.description:
        raise SystemExit(f"{wheel.name} lacks {', '.join(sorted(missing)) or 'a description'}")


def install(wheel: Path, place: Path, environment: Mapping[str, str]) -> Path:
    """Install the wheel without extras into a fresh virtual environment; return its folder of programs."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(place)], environment, place.parent)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python")]
    # What is imported is compiled on its first import; that is a small part of torch.
    _run([*pip, "install", "--quiet", "--quiet", "--no-compile", str(wheel)], environment, place.parent)
    _run([*pip, "check"], environment, place.parent)
    return place / "bin"


def use(programs: Path, place: Path, environment: Mapping[str, str]) -> None:
    """Run the library, the help of every command, and every call of `CALLS`, in a folder with saved models and runs."""
    shutil.copytree(SAVED, place)
    shutil.copy(TREEBANK, place)
    _run([str(programs / "python"), "-c", PROGRAM], environment, place)
    polyhead = str(programs / "polyhead")
    overview = _run([polyhead, "--help"], environment, place)
    commands = {call.arguments.split()[0] for call in CALLS}
    if commands != (listed := set(re.findall(r"^│ ([a-z][a-z-]*) ", overview, re.MULTILINE))):
        raise SystemExit(
            f"CALLS must have every command, got {sorted(commands)}; polyhead --help lists {sorted(listed)}"
        )

    def called(call: Call) -> subprocess.CompletedProcess[str]:
        command = [polyhead, *call.arguments.split()]
        return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: _run([polyhead, command, "--help"], environment, place), sorted(commands)))
        ends = list(pool.map(called, CALLS))
    for call, done in zip(CALLS, ends, strict=True):
        if reason := fault(call, done.returncode, done.stdout, done.stderr):
            raise SystemExit(f"polyhead {call.arguments}: {reason}; got\n{done.stdout}{done.stderr}")
        print(f"polyhead {call.arguments}: {'runs' if call.extra is None else f'asks for polyhead[{call.extra}]'}")


def _run(command: list[str], environment: Mapping[str, str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode} of: {' '.join(command)}\n{done.stdout}")
    return done.stdout


def main(folder: str) -> None:
    started = time.monotonic()
    pins = str(ROOT / "constraints.txt")
    dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "POLYHEAD_DATA")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"PIP_CONSTRAINT": pins, "PIP_BUILD_CONSTRAINT": pins, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment |= {"COLUMNS": "120", "NO_COLOR": "1", "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    wheel = build(Path(folder).resolve(), environment)
    check_wheel(wheel)
    with tempfile.TemporaryDirectory(prefix="polyhead-install-") as outside:
        programs = install(wheel, Path(outside, "venv"), environment)
        print(f"installed {wheel.name} without extras after {time.monotonic() - started:.0f} s", flush=True)
        use(programs, Path(outside, "work"), environment)
    print(f"{len(CALLS)} calls of {len({call.arguments.split()[0] for call in CALLS})} commands, "
          f"{time.monotonic() - started:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
