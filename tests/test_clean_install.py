"""Without extras, every command runs or names the extra it needs; `make package` checks it in a clean environment."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from polyhead.cli import app
from tests.clean_install import CALLS, ROOT, SAVED, TREEBANK, Call, fault

# Runs calls with the packages of the extras absent: neither found nor imported.
PROGRAM = """
import json, os, shutil, sys
from importlib import metadata
for name in ("transformers", "huggingface_hub", "accelerate", "gguf", "pyarrow", "starlette", "uvicorn", "pandas"):
    sys.modules[name] = None
distribution = metadata.distribution
def absent(name):
    if name.startswith("gt-"):
        raise metadata.PackageNotFoundError(name)
    return distribution(name)
metadata.distribution = absent

from typer.testing import CliRunner
from polyhead.cli import app
from tests.clean_install import CALLS, SAVED, TREEBANK
shutil.copytree(SAVED, "work")
shutil.copy(TREEBANK, "work")
os.chdir("work")
ends = []
for call in CALLS:
    done = CliRunner().invoke(app, call.arguments.split(), prog_name="polyhead")
    ends.append((done.exit_code, done.stdout, done.stderr))
print(json.dumps(ends))
"""


def test_calls_cover_every_command():
    assert {call.arguments.split()[0] for call in CALLS} == {name.split()[0] for name in get_command(app).commands}


def test_a_command_without_its_extra_names_it_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    faults = {
        call.arguments: (reason, end)
        for call, end in zip(CALLS, json.loads(done.stdout), strict=True)
        if (reason := fault(call, *end))
    }
    assert faults == {}


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "reason"),
    [
        (2, "", "polyhead undo: it needs this: pip install 'polyhead[hf]'\n", None),
        (1, "", "polyhead undo: it needs this: pip install 'polyhead[hf]'\n", "exit code 1 must be 2"),
        (2, "Load the model\n", "polyhead undo: it needs this: pip install 'polyhead[hf]'\n", "nothing on stdout"),
        (2, "", "polyhead undo: it needs this: pip install 'polyhead[demo]'\n", "must name polyhead[hf]"),
        (2, "", "Traceback\npolyhead undo: it needs this: pip install 'polyhead[hf]'\n", "one line on stderr"),
        (0, "restored\n", "", "exit code 0 must be 2"),
    ],
)
def test_other_ends_of_a_call_are_faults(code, stdout, stderr, reason):
    found = fault(Call("undo edited", "hf"), code, stdout, stderr)
    assert found is None if reason is None else reason in found


def test_a_call_that_must_run_is_at_fault_if_it_fails_or_prints_nothing():
    call = Call("plan gpt2", prints="cache")
    assert fault(call, 0, "the cache\n", "") is None
    assert fault(call, 0, "", "") == fault(call, 2, "", "error\n").replace("code 2", "code 0")


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", str(SAVED / "decoder"), "--text", str(SAVED / "text"), "--save", "run"],
        ["syntax", str(SAVED / "reader"), "--treebank", str(TREEBANK), "--output", "table.parquet"],
    ],
    ids=["inspect", "syntax"],
)
def test_a_result_that_could_not_be_saved_is_refused_before_the_model_is_loaded(arguments, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, arguments, prog_name="polyhead")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith(".parquet needs pyarrow; install it with: pip install 'polyhead[hf]'\n")
    assert list(tmp_path.iterdir()) == []
