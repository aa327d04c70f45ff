"""All GPU tests in a few minutes: a plugin of pytest that `make test-gpu` loads.

    python3 -m pytest -p tests.gpu_suite -o addopts=--import-mode=importlib -n 16 --dist worksteal tests

Files without a GPU test are not imported. Most of the time goes to Triton's compiler, so every worker compiles what its
own tests need, and a kernel that another worker is compiling is waited for and read from Triton's cache on disk. With
`--gpu-record FILE` a record is written for `tests.gpu_record` to read.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import hashlib
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_record import RECORD, ROOT, sources, sources_hash

MARK = "mark.gpu"
MAX_RESERVED = 2 << 30  # bytes of GPU memory that a worker keeps from one test to the next
LOGS = "POLYHEAD_GPU_SUITE_LOGS"  # the folder where workers write what they compiled
BEGAN = "POLYHEAD_GPU_SUITE_BEGAN"
OUT_OF_TIME = "out of time"
KEPT = 300  # tests whose seconds are recorded, the slowest
LONG = 10.0  # seconds; tests that take longer come first: nobody waits for one of them at the end
# Seconds of tests that the last record does not have, by the beginnings of their names.
GUESSED = {
    "tests/benchmarks/test_statistics_speed.py::test_every_part_runs_on_a_gpu": 40.0,
    "tests/ops/attention/test_fused.py::test_on_a_gpu_every_statistic_passes_its_gradient_on": 12.0,
    "tests/ops/attention/test_fused.py::test_on_a_gpu_the_rest_holds_too[check_programs]": 50.0,
    "tests/ops/attention/test_scaled_dot_product.py::test_twelve_cases_in_processes_of_their_own": 40.0,
    "tests/ops/attention/kernels/test_forward.py::test_on_a_gpu_each_statistic_can_be_asked_for_alone": 45.0,
    "tests/ops/attention/kernels/test_forward.py::test_on_a_gpu_the_rest_holds_too": 12.0,
    "tests/ops/profile/kernels/test_second_pass.py::test_on_a_gpu_every_flag_on_every_kind_of_mask": 14.0,
    "tests/ops/selected_rows/kernels/test_kernels.py::test_on_a_gpu_every_head_dim_keeps_to_the_bounds": 24.0,
    "tests/ops/selected_rows/kernels/test_kernels.py::test_on_a_gpu_other_checks_hold": 15.0,
    "tests/ops/selected_rows/kernels/test_kernels.py::test_on_hopper_the_gluon_kernel_is_within_bounds": 20.0,
    "tests/layers/test_decode.py::test_on_a_gpu_no_step_waits": 12.0,
    "tests/observation/test_role_evidence.py::test_nothing_waits_for_the_device": 12.0,
    "tests/ops/common/kernels/test_row_ends.py::test_on_a_gpu_attention_skips_hidden_tiles_and_is_the_formula": 30.0,
    "tests/ops/common/kernels/test_row_ends.py::test_on_a_gpu_a_compiled_call_is_the_formula": 30.0,
    "tests/costs/test_flops_of_kernels.py::test_on_a_gpu_layers_have_the_flops_that_are_planned": 12.0,
}


@functools.cache
def has_gpu_tests(path: Path) -> bool:
    """Whether a file marks tests for a GPU; `tests/conftest.py` sees to it that none is marked from elsewhere."""
    return path.suffix == ".py" and MARK in path.read_text()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("GPU suite")
    group.addoption("--gpu-record", type=Path, help="write a record of the run to this file")
    group.addoption("--gpu-seconds", type=float, default=None, help="start no test after so many seconds")
    group.addoption(
        "--gpu-continue", type=Path, help="run what this record of the same sources names as failed or not run, and add"
    )
    group.addoption("--gpu-commit", default=None, help="the commit that is tested, where git cannot be asked")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if not collection_path.is_relative_to(ROOT / "tests"):
        return None
    files = collection_path.rglob("*.py") if collection_path.is_dir() else [collection_path]
    return None if any(map(has_gpu_tests, files)) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if item.get_closest_marker("gpu") is None]
    chosen = [item for item in items if item.get_closest_marker("gpu") is not None]
    earlier = _earlier(config)
    if earlier is not None:
        left = {*earlier["not run"], *earlier["failures"]}
        others += [item for item in chosen if item.nodeid not in left]
        chosen = [item for item in chosen if item.nodeid in left]
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    names = [item.nodeid for item in chosen]
    items[:] = [chosen[place] for place in slow_first(names, expected_seconds(names), workers)]
    config.hook.pytest_deselected(items=others)


def _earlier(config: pytest.Config) -> dict[str, Any] | None:
    """Return the record that this run continues, or None; refuse one of other sources."""
    path = config.getoption("--gpu-continue")
    if path is None:
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    if record["sources"] != sources_hash():
        raise pytest.UsageError(f"{path} is a record of other sources; run all GPU tests again")
    return record


def expected_seconds(names: list[str], record: Path = ROOT / RECORD) -> list[float]:
    """Return the seconds each test took in the last record, or a guess; 0 for a test that was not among the slowest."""
    slowest = json.loads(record.read_text())["slowest"] if record.exists() else {}
    guess = ((seconds for start, seconds in GUESSED.items() if name.startswith(start)) for name in names)
    return [slowest.get(name, next(own, 0.0)) for name, own in zip(names, guess, strict=True)]


def slow_first(names: list[str], seconds: list[float], workers: int) -> list[int]:
    """An order of tests: cut into as many parts as there are workers, each part begins with its share of slow ones.

    With `--dist worksteal` a worker begins with a part, cut as xdist does. The others keep their order: neighbours
    share kernels.
    """
    slow = sorted((place for place in range(len(names)) if seconds[place] >= LONG), key=lambda place: -seconds[place])
    others = iter(sorted(set(range(len(names))) - set(slow)))
    order: list[int] = []
    for worker in range(workers):
        part = (len(names) - len(order)) // (workers - worker)
        first = slow[worker::workers]
        order += [*first, *itertools.islice(others, max(part - len(first), 0))]
    return [*order, *others]


def pytest_collection_finish() -> None:
    """Leave what was imported out of all later searches for garbage, which compiling makes many of."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        _compile_each_kernel_once(Path(os.environ[LOGS]))
        return
    os.environ.setdefault(LOGS, tempfile.mkdtemp(prefix="gpu-suite-"))
    os.environ[BEGAN] = str(time.time())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # nobody debugs here, and it takes time
    # Otherwise the compiler of each worker starts a process a core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # PyTorch warns, and a test fails, where two workers create the folder of its own kernels at the same time.
    kernels = os.environ.setdefault("PYTORCH_KERNEL_CACHE_PATH", str(Path(os.environ[LOGS], "torch-kernels")))
    Path(kernels).mkdir(parents=True, exist_ok=True)
    if config.getoption("numprocesses", None) is None:
        _compile_each_kernel_once(Path(os.environ[LOGS]))
    config.pluginmanager.register(Report(config), "gpu-suite-report")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--gpu-seconds")
    if limit and time.time() - float(os.environ[BEGAN]) > limit:
        pytest.skip(OUT_OF_TIME)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Give memory back after a large test: the workers share one GPU."""
    result = yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MAX_RESERVED:
        torch.cuda.empty_cache()
    return result


# --- compiling


def _compile_each_kernel_once(logs: Path) -> None:
    """Let Triton wait for the process that compiles the same kernel, and write down how long each one took."""
    import triton

    original = triton.compiler.compile
    log = logs / f"{os.getpid()}.jsonl"

    @functools.wraps(original)
    def compile_once(src: Any, target: Any = None, options: Any = None, **rest: Any) -> Any:
        told = f"{src.hash()} {sorted((options or {}).items())}" if hasattr(src, "hash") else repr(src)
        began = time.perf_counter()
        with (logs / f"{hashlib.sha256(told.encode()).hexdigest()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waited = time.perf_counter() - began
            hits: list[bool] = []
            listener = getattr(triton.knobs.compilation, "listener", None)
            triton.knobs.compilation.listener = _Hits(hits)
            try:
                kernel = original(src, target=target, options=options, **rest)
            finally:
                triton.knobs.compilation.listener = listener
        seconds = time.perf_counter() - began - waited
        function = getattr(src, "fn", None)
        name = f"{function.module}.{function.fn.__name__}" if function is not None else str(src)
        line = {"kernel": name, "seconds": seconds, "waited": waited, "cached": any(hits)}
        line["test"] = os.environ.get("PYTEST_CURRENT_TEST", "")
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return kernel

    triton.compiler.compile = compile_once


class _Hits:
    """Triton's listener: whether a kernel was found in the cache."""

    def __init__(self, hits: list[bool]) -> None:
        self.hits = hits

    def __call__(self, *, cache_hit: bool, **rest: Any) -> None:
        self.hits.append(cache_hit)


def compiled(logs: Path) -> dict[str, Any]:
    """What the workers compiled, by kernel: how many and for how many seconds."""
    lines = [json.loads(line) for file in logs.glob("*.jsonl") for line in file.read_text().splitlines()]
    fresh = [line for line in lines if not line["cached"]]
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for line in fresh:
        by_kernel[line["kernel"]].append(line["seconds"])
    return {
        "kernels": len(fresh),
        "seconds": round(sum(line["seconds"] for line in fresh)),
        "waited": round(sum(line["waited"] for line in lines)),
        "by kernel": {
            name: [len(times), round(sum(times), 1), round(max(times), 1)] for name, times in sorted(by_kernel.items())
        },
    }


# --- the record


class Report:
    """Counts what the workers report, and writes the record at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.began = time.perf_counter()
        self.first: float | None = None  # seconds until the first test was run
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.first is None:
            self.first = time.perf_counter() - self.began - report.duration
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.outcomes[report.nodeid] = "failed" if report.when == "call" else "error"
        elif report.skipped:
            reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
            self.outcomes.setdefault(report.nodeid, "not run" if reason == OUT_OF_TIME else "skipped")
            self.reasons[reason] += 1
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        path = self.config.getoption("--gpu-record")
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.record(int(exitstatus)), indent=1, ensure_ascii=False) + "\n")

    def files(self) -> Counter[str]:
        """The seconds of all tests of a file, on all workers together."""
        files: Counter[str] = Counter()
        for name, seconds in self.seconds.items():
            files[name.split("::")[0]] += seconds
        return files

    def record(self, exit_status: int) -> dict[str, Any]:
        counts = Counter(self.outcomes.values())
        chosen = any(self.config.getoption(name) for name in ("keyword", "markexpr", "deselect"))
        paths = [Path(argument).resolve() for argument in self.config.args]
        is_whole = exit_status in (0, 1) and not chosen and paths == [ROOT / "tests"]
        is_green = exit_status == 0 and bool(counts["passed"]) and not counts["failed"] and not counts["error"]
        failures = [name for name, outcome in self.outcomes.items() if outcome in ("failed", "error")]
        not_run = {name for name, outcome in self.outcomes.items() if outcome == "not run"}
        seconds, reasons = time.perf_counter() - self.began, self.reasons
        slowest, files = self.seconds, self.files()
        earlier = _earlier(self.config)
        if earlier is not None:
            # What failed before has run again, or counts as not run: its outcome is that of this run.
            counts.update({name: earlier["counts"][name] for name in ("passed", "skipped")})
            reasons = reasons + Counter({name: x for name, x in earlier["skipped"].items() if name != OUT_OF_TIME})
            is_whole, seconds = is_whole and earlier["whole"], seconds + earlier["seconds"]
            not_run |= {*earlier["not run"], *earlier["failures"]} - self.outcomes.keys()
            slowest, files = Counter(earlier["slowest"]) | slowest, Counter(earlier["by file"]) + files
        return {
            "commit": self.config.getoption("--gpu-commit") or _commit(),
            "sources": sources_hash(),
            "source files": len(sources()),
            "whole": is_whole,  # of all tests, though some may not have been run
            "full": is_whole and not not_run,
            "green": is_green,
            "counts": {name: counts[name] for name in ("passed", "failed", "error", "skipped")}
            | {"not run": len(not_run)},
            "failures": sorted(failures),
            "not run": sorted(not_run),
            "skipped": dict(reasons.most_common()),
            "seconds": round(seconds),
            "seconds before the first test": round(self.first or 0.0),
            "workers": self.config.getoption("numprocesses", None) or 0,
            "compiled": compiled(Path(os.environ[LOGS])) if earlier is None else earlier["compiled"],
            "slowest": {name: round(seconds, 1) for name, seconds in slowest.most_common(KEPT)},
            "by file": {path: round(seconds) for path, seconds in files.most_common()},
            "machine": _machine(),
        }


def _commit() -> str:
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("" if not changed.stdout.strip() else " and changes")


def _machine() -> dict[str, Any]:
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "platform": platform.platform(),
    }
