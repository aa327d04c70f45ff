"""Checks in the interpreter process: arguments, failures, and isolation from each other."""

from __future__ import annotations

import ctypes
import os
import random
import time
from unittest import mock

import numpy as np
import pytest
import torch

from tests.ops.interpreter import interpreted
from tests.ops.interpreter.bare_checks import check_sum, end_the_process_that_serves
from tests.ops.interpreter.interpreted import Interpreter, in_the_interpreter


def failure_of(check, *arguments) -> str:
    with pytest.raises(pytest.fail.Exception) as failure:
        in_the_interpreter(check, *arguments)
    return str(failure.value)


def test_a_check_is_given_what_it_was_called_with() -> None:
    in_the_interpreter(check_sum, 2, second=3)


def check_wrong_sum() -> None:
    check_sum(2, second=2)


def test_a_failing_check_reports_its_output_and_full_traceback() -> None:
    told = failure_of(check_wrong_sum)
    for words in ("check_wrong_sum in the interpreter, exit code 1", "4\n", "in check_sum", "the sum is not 5"):
        assert words in told
    in_the_interpreter(check_sum, 2, second=3)


def crash() -> None:
    ctypes.string_at(0)


def test_a_check_that_crashes_is_reported_and_the_next_one_runs() -> None:
    assert "in crash" in failure_of(crash)
    in_the_interpreter(check_sum, 2, second=3)


def test_an_interpreter_that_dies_is_reported_and_replaced() -> None:
    with mock.patch.object(interpreted, "_interpreter", Interpreter(imports=False)) as own:
        assert "exit code -9" in failure_of(end_the_process_that_serves)
        in_the_interpreter(check_sum, 2, second=3)
        own.close()


def wait() -> None:
    time.sleep(60)


def test_a_check_that_takes_too_long_is_ended_and_reports_its_traceback() -> None:
    with mock.patch.object(interpreted, "TIME_LIMIT", 0.2):
        told = failure_of(wait)
    assert "Timeout" in told
    assert "in wait" in told


def leave_everything_changed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    os.environ["POLYHEAD_LEFT"] = "1"
    mock.patch.object(torch, "empty", None).start()


def check_nothing_is_changed(drawn: list[float]) -> None:
    assert [random.random(), np.random.rand(), float(torch.rand(()))] == drawn
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert "POLYHEAD_LEFT" not in os.environ
    assert torch.empty is not None


def test_a_check_sees_nothing_of_the_one_before_and_draws_what_its_test_would() -> None:
    drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
    in_the_interpreter(leave_everything_changed)
    in_the_interpreter(check_nothing_is_changed, drawn)


def check_environment(value: str) -> None:
    assert os.environ["POLYHEAD_GIVEN"] == value
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_a_check_has_the_environment_of_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "another"):
        monkeypatch.setenv("POLYHEAD_GIVEN", value)
        in_the_interpreter(check_environment, value)
