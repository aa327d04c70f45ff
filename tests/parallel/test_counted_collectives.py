"""The bytes that `polyhead plan` counts are those that ranks pass to torch.distributed."""

from __future__ import annotations

from typing import Any

from benchmarks.collectives.runs import CASES, predicted, run
from tests.ranks import Ranks

WIDTH, TOKENS = 24, 16


def run_cases() -> dict[str, dict[str, Any]]:
    return {case.name: run(case, WIDTH, TOKENS) for case in CASES}


def test_parameters_calls_and_bytes_are_those_of_the_plan(ranks: Ranks) -> None:
    results = ranks.run(run_cases, world=4)
    for case in CASES:
        expected = predicted(case, WIDTH, TOKENS)
        assert expected["forward"]
        assert expected["backward"]
        for name, value in expected.items():
            for rank, result in enumerate(results):
                assert result[case.name][name] == value, f"{case.name}, {name}, rank {rank}"
