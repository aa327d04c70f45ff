"""What every GPU test launches: kernels, what they are compiled for, and how often that is the same.

    export PYTHONOPTIMIZE=1 CUDA_VISIBLE_DEVICES= PYTHONPATH=src:.
    python -m pytest -p tests.gpu_suite -p tests.gpu_launches --launches before.jsonl -n 16 --dist worksteal \\
        --assert=plain -W ignore::pytest.PytestConfigWarning -o addopts=--import-mode=importlib -q tests
    python -m tests.gpu_launches before.jsonl after.jsonl

The first runs the GPU tests under `tests.pretend_cuda` on any machine: no kernel runs, and PYTHONOPTIMIZE keeps
assertions from being made of the numbers that are missing, so that a test goes on to its last launch. The second
compares two such lists, and fails if a variant is lost.

A *variant* is a kernel with its constexpr arguments, the sizes of its dtypes, present and absent tensors, warps and
stages. Triton also compiles anew for bfloat16 and float16, for integers that are 1 or multiples of 16 and for pointers
that are aligned: a *specialisation* is a variant with these.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests import error_budget

OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg")
HALVES = ("bf16", "fp16", "bfloat16", "float16")  # as Triton and PyTorch write them


class Launch(NamedTuple):
    kernel: str
    variant: str
    specialisation: str


def launch_of(fn: Any, compile: dict[str, Any]) -> Launch:
    """Describe what Triton's `jit_cache_hook` and `jit_post_compile_hook` are called with."""
    function = fn.jit_function
    parameters = {p.name: p for p in function.params}
    constants = compile["constants"]
    types = {name: _plain(kind, (i,), constants) for i, (name, kind) in enumerate(compile["signature"].items())}
    for (i, *path), value in constants.items():
        name = function.arg_names[i]
        if parameters[name].is_constexpr and not path:
            types[name] = str(getattr(value, "value", value))
    options = {name: compile[name] for name in OPTIONS if compile.get(name) is not None}
    variant = json.dumps([types, options], sort_keys=True)
    for half in HALVES:
        variant = variant.replace(half, "half")
    return Launch(f"{function.module}.{function.fn.__name__}", variant, str(compile["key"]))


def _plain(kind: Any, path: tuple[int, ...], constants: dict[Any, Any]) -> Any:
    """A type without what an integer or a pointer happens to be: widths, the value 1 and alignment."""
    if isinstance(kind, tuple):
        return [_plain(part, (*path, i), constants) for i, part in enumerate(kind)]
    if kind == "constexpr":
        value = constants.get(path)
        return "int" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return "int" if kind in ("i32", "i64", "u64") else str(kind)


# --- as a plugin of pytest

TIME_LIMIT = 60  # seconds of a test, most of which are some formula's


class Recorder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: set[Launch] = set()
        self.outcome = "passed"
        self.aside = False  # in a call that stands for another

    def hook(self, *, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        if not self.aside:
            self.seen.add(launch_of(fn, compile))
        return True  # neither compile nor launch

    def run_reference(self, request: Any) -> Any:
        """What the reference returns, without its numbers: from our own kernels, which compute nothing here."""
        from polyhead.ops.attention import fused

        self.aside = True
        try:
            with torch.no_grad():
                result = replace(fused.run(request), backend="reference")
        finally:
            self.aside = False
        given = [getattr(x, part.name) for x in (request, request.visibility) if x is not None for part in fields(x)]
        nothing = _nothing([x for x in given if isinstance(x, Tensor) and x.requires_grad])
        found = {name: x + nothing.to(x.dtype) for name, x in _tensors(result).items()}
        if result.statistics is not None:
            rows = {name: x + nothing.to(x.dtype) for name, x in result.statistics.items()}
            found["statistics"] = replace(result.statistics, **rows)
        return replace(result, **found)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.seen.clear()
        result = yield
        line = json.dumps({"test": item.nodeid, "launches": sorted(self.seen), "outcome": self.outcome}) + "\n"
        with self.path.open("ab", buffering=0) as file:  # several workers write to it, each a line at once
            file.write(line.encode())
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        signal.signal(signal.SIGALRM, _late)
        signal.alarm(TIME_LIMIT)
        self.outcome = "passed"
        try:
            return (yield)
        except BaseException as error:
            self.outcome = f"{type(error).__name__}: {error}"[:300]
            raise
        finally:
            signal.alarm(0)


def _tensors(result: Any) -> dict[str, Tensor]:
    named = {part.name: getattr(result, part.name) for part in fields(result)}
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}


def _nothing(inputs: list[Tensor]) -> Tensor:
    """Zero, with all of these behind it on the tape."""
    return sum((x.flatten()[:1].sum().double() for x in inputs), torch.zeros((), dtype=torch.float64)) * 0


def _no_formula(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> error_budget.Formula:
    """The shapes of the formula, and its inputs behind them."""
    inputs = [x for x in (query, key, value, *options.values()) if isinstance(x, Tensor) and x.is_floating_point()]
    nothing, rows = _nothing(inputs).to(query.dtype), query.shape[:3]
    output, weights = ((nothing + query.new_zeros(*rows, n)) for n in (value.shape[3], key.shape[2]))
    return error_budget.Formula(output, nothing + query.new_zeros(rows), weights)


def _seen(rules: tuple[Any, ...], batch: int, queries: int, keys: int) -> Tensor:
    """Return the visibility that our own masks give, without computing it pair by pair, [batch, queries, keys]."""
    from polyhead.ops.common.visibility import resolve
    from tests.ops.oracle import Who

    sizes = {"batch": batch, "heads": 1, "queries": queries, "keys": keys}
    visibility = resolve(Who(*rules).mask(), device=torch.device("cpu"), **sizes)
    seen = None if visibility is None else visibility.allowed_tile((0, queries), (0, keys))
    everything = torch.ones(batch, queries, keys, dtype=torch.bool)
    return everything if seen is None else everything & seen[:, 0]


def _late(*signal: object) -> None:
    raise TimeoutError(f"took more than {TIME_LIMIT} s")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--launches", type=Path, help="where the launches of each test are written, as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    from triton import knobs

    from polyhead.ops.attention import dispatch
    from tests.pretend_cuda import pretend_cuda

    path = config.getoption("--launches")
    if path is None:
        raise pytest.UsageError("name the file to write with --launches")
    if not hasattr(config, "workerinput"):
        path.write_text("")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # of which Triton would warn
    recorder = Recorder(path)
    pretending = pretend_cuda()
    pretending.__enter__()
    config.add_cleanup(lambda: pretending.__exit__(None, None, None))
    knobs.runtime.jit_cache_hook = recorder.hook
    torch.library.opcheck = lambda op, args, *rest, **options: op(*args)  # which ends the process here
    # What raises by itself where a number is not the right one, and what takes most of the time.
    torch.testing.assert_close = lambda *args, **options: None
    error_budget.assert_within_error_budget = lambda *args, **options: None
    error_budget.assert_draws_within_error_budget = lambda *args, **options: None
    error_budget.plain_formula = _no_formula
    from tests.ops import oracle  # which take the above from its module
    from tests.ops.profile import oracle as profile_oracle  # which take the above from its module

    profile_oracle.assert_right = lambda *args, **options: None
    oracle._seen = _seen
    oracle._distances = lambda rules, batch, queries, keys: torch.zeros(batch, queries, keys, dtype=torch.int64)
    dispatch._RUN["reference"] = recorder.run_reference
    config.pluginmanager.register(recorder)


# --- the comparison


def read(path: Path) -> dict[str, list[Launch]]:
    lines = map(json.loads, path.read_text().splitlines())
    return {line["test"]: [Launch(*launch) for launch in line["launches"]] for line in lines}


def summary(tests: dict[str, list[Launch]]) -> dict[str, dict[str, int]]:
    """By kernel: how many variants and specialisations there are."""
    variants, specialisations = defaultdict(set), defaultdict(set)
    for launches in tests.values():
        for launch in launches:
            variants[launch.kernel].add(launch.variant)
            specialisations[launch.kernel].add(launch[1:])
    return {
        kernel: {"variants": len(variants[kernel]), "specialisations": len(specialisations[kernel])}
        for kernel in sorted(variants)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", type=Path, nargs="+", help="a list, or one from before and one from after a change")
    arguments = parser.parse_args()
    lists = [read(path) for path in arguments.lists]
    for path, tests in zip(arguments.lists, lists, strict=True):
        by_kernel = summary(tests)
        total = Counter()
        print(f"{path}: {len(tests)} tests")
        for kernel, counts in by_kernel.items():
            total.update(counts)
            print(f"  {kernel:62} {counts['variants']:5} variants {counts['specialisations']:5} specialisations")
        print(f"  {'all':62} {total['variants']:5} variants {total['specialisations']:5} specialisations")
    if len(lists) < 2:
        return 0
    before, after = ({launch[:2] for launches in tests.values() for launch in launches} for tests in lists)
    for kernel, variant in sorted(before - after):
        print(f"LOST  {kernel}  {variant}")
    print(f"{len(before - after)} variants lost, {len(after - before)} new")
    return int(bool(before - after))


if __name__ == "__main__":
    sys.exit(main())
