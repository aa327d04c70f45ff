"""What watching a whole model costs: every contender is the same model, and what is timed is held to float64 first."""

from __future__ import annotations

import pytest
import torch

from benchmarks import inspection_speed as speed
from benchmarks.measuring.cases import Run
from benchmarks.measuring.runner import rows_of

EVERYBODY = (speed.PLAIN, speed.ROWS, speed.DEFAULT, speed.MAPS, speed.EAGER)


@pytest.fixture
def small(monkeypatch):
    for name, size in {"LAYERS": 2, "WIDTH": 64, "INTERMEDIATE": 64, "VOCABULARY": 90, "CHECKED": 48}.items():
        monkeypatch.setattr(speed, name, size)
    return Run(torch.device("cpu"), torch.float32, 3, 0, 0.2, 3, repetitions=0)


@pytest.mark.parametrize("kind", ["causal", "left-padded", "sliding window"])
def test_a_small_model_is_measured_by_everybody(small, kind):
    place = speed.Place(4, 16, 64, 1.08, kind, EVERYBODY, batch=2)
    (row,) = rows_of(speed.measure(small, place), small)
    assert row.failed == ""
    assert dict(row.timings.absent) == {}
    assert set(row.timings.samples_ms) == set(EVERYBODY)
    compared = {(x.subject, x.against): x.bound for x in row.comparisons}
    assert compared == {
        (speed.ROWS, speed.PLAIN): 1.08,
        (speed.DEFAULT, speed.PLAIN): 1.08,
        (speed.MAPS, speed.PLAIN): 2.0,
        (speed.ROWS, speed.EAGER): None,
    }


def test_one_that_computes_something_else_is_not_timed(small, monkeypatch):
    true = speed._forward

    def wrong(model, inputs, *, eager=False):
        states = true(model, inputs, eager=eager)
        return states * 1.5 if model.config._attn_implementation == "polyhead" else states

    monkeypatch.setattr(speed, "_forward", wrong)
    place = speed.Place(4, 16, 64, contenders=(speed.PLAIN, speed.ROWS))
    (row,) = rows_of(speed.measure(small, place), small)
    assert speed.ROWS not in row.timings.samples_ms
    assert "not timed" in row.failed


def test_twins_share_their_weights_and_nothing_else(small):
    model = speed._model(small, speed.Place(4, 16, 64))
    twin = speed.twin_of(model)
    assert all(one is other for one, other in zip(model.parameters(), twin.parameters(), strict=True))
    twin.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.gpu
def test_the_first_place_runs_on_a_gpu(small):
    run = Run(torch.device("cuda"), torch.bfloat16, 3, 0, 0.2, 3, repetitions=0)
    for kind in ("causal", "left-padded", "sliding window"):
        (row,) = rows_of(speed.measure(run, speed.Place(4, 128, 512, 1.08, kind, EVERYBODY, batch=2)), run)
        assert row.failed == ""
        assert dict(row.timings.absent) == {}
