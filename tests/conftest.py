"""Fixtures and hooks of all tests: one seed, the folder of real text, and reasons where a test cannot run here.

PyTorch is imported where it is used: the process that only distributes tests to workers starts them without it.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.testing

from tests.budget_report import pytest_configure  # noqa: F401, a hook
from tests.gpu_suite import MARK, has_gpu_tests

# A machine that only measures may lack hypothesis; the tests that use it then fail by themselves, the others run.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # A first call compiles or warms up, so a deadline would measure the machine and not the code.
    settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile(
        "ci", parent=settings.get_profile("dev"), derandomize=True, print_blob=True, database=None
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# Every call of a runner would build all commands and their options again.
typer.testing._get_command = functools.cache(typer.testing._get_command)

SEED = 20_231
NO_DATA = "needs real text: `POLYHEAD_DATA=FOLDER make test` with a folder of it runs them"


def _data_dir() -> Path | None:
    named = os.environ.get("POLYHEAD_DATA")
    return Path(named) if named and Path(named).is_dir() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why."""
    import torch

    no_gpu = pytest.mark.skip(reason="needs a CUDA device, torch.cuda.is_available() is False")
    no_data = pytest.mark.skip(reason=NO_DATA)
    has_gpu, has_data = torch.cuda.is_available(), _data_dir() is not None
    for item in items:
        if item.get_closest_marker("gpu"):
            if not has_gpu_tests(item.path):
                raise pytest.UsageError(f"make test-gpu would miss {item.nodeid}: write its {MARK} in {item.path.name}")
            if not has_gpu:
                item.add_marker(no_gpu)
        if not has_data and item.get_closest_marker("data"):
            item.add_marker(no_data)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same random state, so that no test depends on which ran before it."""
    import numpy as np
    import torch

    random.seed(SEED)
    np.random.seed(SEED)
    torch.default_generator.manual_seed(SEED)
    if torch.cuda.is_available():  # `torch.manual_seed` keeps a seed and a stack trace for every kind of device
        torch.cuda.manual_seed_all(SEED)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sum in the order of a process that computes with one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def transformers_settings() -> Iterator[None]:
    """Restore what a script or notebook sets in transformers for the whole process: progress bars and verbosity."""
    from transformers.utils import logging as transformers_logging

    is_shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    yield
    (transformers_logging.enable_progress_bar if is_shown else transformers_logging.disable_progress_bar)()
    transformers_logging.set_verbosity(verbosity)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Capture log records as text. (pytest's logging plugin is off: it adds handlers around every phase of a test.)"""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger().addHandler(handler)
    yield text
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def data_dir() -> Path:
    """The folder of real text that POLYHEAD_DATA names."""
    folder = _data_dir()
    if folder is None:
        pytest.skip(NO_DATA)
    return folder


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The root of the source tree, where pyproject.toml lies."""
    return Path(__file__).resolve().parent.parent


# ---- inspections without the probes that a test does not need

NO_RESULT = {"examples": (), "distances": {}, "repeated": None, "pronouns": {}}  # by probe


@pytest.fixture
def leave_out(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that leaves these probes out of all inspections of a test; they take half of the time."""
    from polyhead.inspection.probing import Probes

    def left_out(*probes: str) -> None:
        for probe in probes:
            monkeypatch.setattr(Probes, probe, lambda *_, result=NO_RESULT[probe]: result)

    return left_out


@pytest.fixture
def only_roles_and_pairs(leave_out: Callable[..., None]) -> None:
    """Collect no examples, and measure no distances between the heads of a layer."""
    leave_out("examples", "distances")


@pytest.fixture
def only_chance_and_pairs(leave_out: Callable[..., None]) -> None:
    """Run only the probes of random weights and of pairs of layers."""
    leave_out(*NO_RESULT)


@pytest.fixture
def without_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inspect only the text, and the importance of heads."""
    from polyhead.inspection import running

    monkeypatch.setattr(running.InspectionRun, "probe", lambda *_: ({"roles": ()}, {}, {}))
