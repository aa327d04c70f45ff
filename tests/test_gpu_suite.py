"""What `make test-gpu` collects and records, and when `make lint` warns; none of it needs a GPU."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import gpu_record, gpu_suite
from tests.gpu_record import RECORD, ROOT, sources, sources_hash, warning


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with a kernel, its caller, and a file that is neither."""
    files = {
        "ops/attention/kernels/forward.py": "x = 1\n",
        "ops/attention/sdpa.py": "y = 1\n",
        "cli/main.py": "import os\n",
    }
    for name, text in files.items():
        path = tmp_path / "src/polyhead" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def write(tree: Path, **changes: Any) -> None:
    record = {"commit": "abc", "sources": sources_hash(tree), "full": True, "green": True, "counts": {"passed": 7}}
    path = tree / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record | changes))


def test_the_sources_are_kernels_and_their_callers(tree: Path) -> None:
    names = [path.relative_to(tree / "src/polyhead").as_posix() for path in sources(tree)]
    assert names == ["ops/attention/kernels/forward.py", "ops/attention/sdpa.py"]
    in_this_tree = {path.relative_to(ROOT / "src/polyhead").as_posix() for path in sources()}
    assert {"ops/attention/kernels/forward.py", "ops/attention/sdpa.py", "ops/decode/fused.py"} < in_this_tree
    assert "cli/main.py" not in in_this_tree


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("ops/attention/kernels/forward.py", "x = 2\n", True),
        ("ops/attention/kernels/new.py", "", True),
        ("ops/attention/sdpa.py", "y = '# 1'\n", True),
        ("ops/attention/sdpa.py", "if True:\n    y = 1\n", True),
        ("ops/attention/sdpa.py", "y = 1\n\n", False),
        ("ops/attention/sdpa.py", "y = 1\r\n", False),
        ("ops/attention/sdpa.py", '"""A docstring."""\n\ny = 1  # and a comment\n', False),
        ("cli/main.py", "", False),
    ],
)
def test_the_hash_changes_with_the_code_of_the_sources_alone(tree: Path, name: str, text: str, counts: bool) -> None:
    before = sources_hash(tree)
    (tree / "src/polyhead" / name).write_bytes(text.encode())
    assert (sources_hash(tree) != before) is counts


def test_a_full_green_record_of_the_same_sources_gives_no_warning(tree: Path) -> None:
    write(tree)
    assert warning(tree) is None


def test_every_other_record_gives_a_warning(tree: Path) -> None:
    assert "is missing" in str(warning(tree))
    write(tree, green=False, counts={"passed": 5, "failed": 2})
    assert str(warning(tree)).startswith("5 passed, 2 failed in")
    write(tree, full=False, counts={"passed": 5, "not run": 2})
    assert "not run to their end (5 passed, 2 not run)" in str(warning(tree))
    write(tree)
    (tree / "src/polyhead/ops/attention/kernels/forward.py").write_text("x = 3\n")
    assert "have changed since" in str(warning(tree))


def test_lint_only_warns(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_record, "warning", lambda: "it is not known")
    assert gpu_record.main() == 0
    assert capsys.readouterr().err == "warning: it is not known\n"


def test_only_files_with_gpu_tests_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "ROOT", tmp_path)
    tests = tmp_path / "tests"
    (tests / "some").mkdir(parents=True)
    (tests / "none").mkdir()
    marked, plain, page = tests / "some/test_a.py", tests / "none/test_b.py", tests / "none/page.md"
    marked.write_text("@pytest.mark.gpu\ndef test_a(): ...\n")
    plain.write_text("def test_b(): ...\n")
    page.write_text("pytest.mark.gpu\n")
    ignored = [path for path in (marked, plain, page, marked.parent, plain.parent) if ignores(path)]
    assert ignored == [plain, page, plain.parent]


def ignores(path: Path) -> bool:
    return gpu_suite.pytest_ignore_collect(path) is True


def reported(name: str, outcome: str, when: str = "call", reason: str = "") -> Any:
    longrepr = ("file", 1, f"Skipped: {reason}") if reason else None
    flags = {"failed": outcome == "failed", "skipped": outcome == "skipped"}
    return SimpleNamespace(nodeid=name, duration=1.0, when=when, longrepr=longrepr, **flags)


class Config:
    """The part of `pytest.Config` that a record reads."""

    def __init__(self, args: list[str] | None = None, **options: Any) -> None:
        self.args = args or [str(ROOT / "tests")]
        self.options = {"--gpu-commit": "abc", "numprocesses": 16, **options}

    def getoption(self, name: str, default: Any = None) -> Any:
        return self.options.get(name, default)


hash_of_this_tree = functools.cache(sources_hash)


def record_of(reports: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **options: Any) -> dict[str, Any]:
    monkeypatch.setenv(gpu_suite.LOGS, str(tmp_path))
    monkeypatch.setattr(gpu_suite, "sources_hash", hash_of_this_tree)
    report = gpu_suite.Report(Config(**options))  # type: ignore[arg-type]
    for one in reports:
        report.pytest_runtest_logreport(one)
    return report.record(int(any(x.failed for x in reports)))


def test_a_record_counts_every_test_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = {"kernel": "k", "seconds": 2.0, "waited": 0.5, "cached": False, "test": "a"}
    (tmp_path / "1.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps({**line, 'cached': True})}\n")
    reports = [
        *(reported("a", "passed", when) for when in ("setup", "call", "teardown")),
        reported("b", "failed"),
        reported("c", "passed"),
        reported("c", "failed", "teardown"),
        reported("d", "skipped", "setup", "needs a Hopper GPU"),
    ]
    record = record_of(reports, monkeypatch, tmp_path)
    assert record["counts"] == {"passed": 1, "failed": 1, "error": 1, "skipped": 1, "not run": 0}
    assert record["failures"] == ["b", "c"]
    assert record["skipped"] == {"needs a Hopper GPU": 1}
    assert (record["full"], record["green"], record["commit"]) == (True, False, "abc")
    assert record["compiled"] == {"kernels": 1, "seconds": 2, "waited": 1, "by kernel": {"k": [1, 2.0, 2.0]}}
    assert record["sources"] == hash_of_this_tree()


def test_a_record_is_full_only_if_all_tests_were_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    passed = reported("a", "passed")
    assert record_of([passed], monkeypatch, tmp_path)["full"]
    assert record_of([passed], monkeypatch, tmp_path)["green"]
    for options in ({"keyword": "decode"}, {"deselect": ["b"]}, {"args": ["tests/ops"]}):
        assert not record_of([passed], monkeypatch, tmp_path, **options)["full"], options
    late = reported("b", "skipped", "setup", gpu_suite.OUT_OF_TIME)
    partial = record_of([passed, late], monkeypatch, tmp_path)
    assert not partial["full"]
    assert partial["counts"]["not run"] == 1
    assert not record_of([], monkeypatch, tmp_path)["green"]


def test_a_record_is_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    late = [reported(name, "skipped", "setup", gpu_suite.OUT_OF_TIME) for name in "bc"]
    first = record_of([reported("a", "passed"), *late], monkeypatch, tmp_path)
    assert (first["not run"], first["whole"], first["full"]) == (["b", "c"], True, False)
    path = tmp_path / "first.json"
    path.write_text(json.dumps(first))
    options = {"--gpu-continue": path}

    items = [SimpleNamespace(nodeid=name, get_closest_marker=lambda name: True) for name in "abc"]
    deselected: list[Any] = []
    config: Any = Config(**options)
    config.hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    gpu_suite.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == ["b", "c"]
    assert [item.nodeid for item in deselected] == ["a"]

    both = record_of([reported("b", "passed"), reported("c", "passed")], monkeypatch, tmp_path, **options)
    assert both["counts"] == {"passed": 3, "failed": 0, "error": 0, "skipped": 0, "not run": 0}
    assert (both["full"], both["green"], both["skipped"]) == (True, True, {})
    one = record_of([reported("b", "passed"), late[1]], monkeypatch, tmp_path, **options)
    assert (one["counts"]["not run"], one["not run"], one["full"]) == (1, ["c"], False)
    unreported = record_of([reported("b", "passed")], monkeypatch, tmp_path, **options)
    assert (unreported["counts"]["not run"], unreported["not run"], unreported["full"]) == (1, ["c"], False)
    failed = record_of([reported("b", "failed"), reported("c", "passed")], monkeypatch, tmp_path, **options)
    assert (failed["full"], failed["green"], failed["failures"]) == (True, False, ["b"])

    # A test that failed is run again, after a change of the test alone.
    path.write_text(json.dumps(failed))
    items = [SimpleNamespace(nodeid=name, get_closest_marker=lambda name: True) for name in "abc"]
    gpu_suite.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == ["b"]
    fixed = record_of([reported("b", "passed")], monkeypatch, tmp_path, **options)
    assert fixed["counts"] == {"passed": 3, "failed": 0, "error": 0, "skipped": 0, "not run": 0}
    assert (fixed["full"], fixed["green"], fixed["failures"]) == (True, True, [])
    again = record_of([reported("b", "failed")], monkeypatch, tmp_path, **options)
    assert (again["counts"]["failed"], again["green"], again["failures"]) == (1, False, ["b"])
    nothing = record_of([reported("a", "passed")], monkeypatch, tmp_path, **options)
    assert (nothing["not run"], nothing["full"]) == (["b"], False)

    path.write_text(json.dumps({**first, "sources": "others"}))
    with pytest.raises(pytest.UsageError, match="a record of other sources; run all GPU tests again"):
        record_of([], monkeypatch, tmp_path, **options)


def test_a_kernel_is_compiled_once_and_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget

    from tests.gpu_sanitize import _planted_kernel

    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(triton.compiler, "compile", triton.compiler.compile)
    gpu_suite._compile_each_kernel_once(tmp_path / "logs")
    signature = {"ptr": "*fp32", "size": "i32", "BLOCK": "constexpr"}
    for _ in range(2):
        source = triton.compiler.ASTSource(_planted_kernel, signature, {"BLOCK": 64})
        triton.compiler.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    (log,) = (tmp_path / "logs").glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["cached"] for line in lines] == [False, True]
    assert {line["kernel"] for line in lines} == {"tests.gpu_sanitize._planted_kernel"}
    assert len(list((tmp_path / "logs").glob("*.lock"))) == 1
    assert gpu_suite.compiled(tmp_path / "logs")["kernels"] == 1


def test_slow_tests_come_first_for_every_worker_and_the_others_in_their_order() -> None:
    names = [f"test_{i}" for i in range(37)]
    seconds = [0.0] * 37
    for place in (5, 6, 20, 30, 36):
        names[place], seconds[place] = f"slow_{place}", 10.0 + place
    for workers in (1, 4, 16, 50):
        order = [names[place] for place in gpu_suite.slow_first(names, seconds, workers)]
        assert sorted(order) == sorted(names)
        assert order[0] == "slow_36"
        assert [x for x in order if x.startswith("test")] == [x for x in names if x.startswith("test")]
        # As xdist deals them out: each worker begins with its share of the tests that are left.
        begins, left = [0], len(names)
        for remaining_workers in range(workers, 1, -1):
            begins.append(begins[-1] + left // remaining_workers)
            left -= left // remaining_workers
        assert all(order[begin].startswith("slow") for begin in begins[:5]) or workers > len(names)


def test_expected_seconds_are_those_of_the_record_or_a_guess(tmp_path: Path) -> None:
    start, guess = next(iter(gpu_suite.GUESSED.items()))
    names = [f"{start}[a]", f"{start}[b]", "tests/quick.py::test_c"]
    assert gpu_suite.expected_seconds(names, tmp_path / "none.json") == [guess, guess, 0.0]
    (tmp_path / "record.json").write_text(json.dumps({"slowest": {names[1]: 77.5, "tests/gone.py::test": 90.0}}))
    assert gpu_suite.expected_seconds(names, tmp_path / "record.json") == [guess, 77.5, 0.0]


def test_guessed_tests_exist() -> None:
    for start in gpu_suite.GUESSED:
        path, name = start.split("::")
        assert f"def {name.split('[')[0]}(" in (gpu_record.ROOT / path).read_text(), start
