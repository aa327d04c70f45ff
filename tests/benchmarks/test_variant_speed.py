"""What other arrangements are measured with: who is timed computes the same, and the bounds stand where they are."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend
from typer.testing import CliRunner

from benchmarks import variant_speed as arrangement_speed
from benchmarks.app import app
from benchmarks.measuring.calls import WITH_PYTHON
from benchmarks.measuring.cases import Run
from benchmarks.measuring.runner import rows_of
from benchmarks.variant_speed import floors, latent, routed, talking
from polyhead.costs.measuring import runner

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """Samples of one call: no test here reads a time."""
    monkeypatch.setattr(runner, "SAMPLE_SECONDS", 1e-6)
    return Run(CPU, torch.float32, 3, 0, 0.1, 3, repetitions=0)


@pytest.mark.parametrize("causal", [True, False])
def test_routed_layers_are_held_to_all_heads(small, causal):
    place = routed.Place(tokens=33, width=64, heads=32, head_dim=8)
    rows = list(rows_of(routed.layers(small, place, causal), small))
    assert [(row.failed, row.timings.absent) for row in rows] == [("", {})] * 4
    bounds = [[c.bound for c in row.comparisons] for row in rows]
    assert bounds == [[0.45, 0.70], [None, None], [0.50, 0.75], [None, None]]


def test_a_routed_layer_that_is_wrong_is_refused(small, monkeypatch):
    true = routed.RoutedHeads.forward

    def wrong(self, x, *, backend=None, **options):
        result = true(self, x, backend=backend, **options)
        if backend is None:
            result.output.mul_(1.01)
        return result

    monkeypatch.setattr(routed.RoutedHeads, "forward", wrong)
    place = routed.Place(tokens=33, width=64, heads=32, head_dim=8)
    (row, *_) = rows_of(routed.layers(small, place, True), small)
    assert "8 of 32 heads" in row.failed


@pytest.mark.parametrize("causal", [True, False])
def test_chosen_rows_are_those_of_all_rows(small, causal):
    (row,) = rows_of(routed.chosen_rows(small, routed.Place(tokens=40, heads=16, head_dim=16), causal), small)
    assert row.failed == ""
    (compared,) = row.comparisons  # our kernels need a GPU
    assert (compared.subject, compared.bound) == ("polyhead, 8 of 16 heads", routed.ROWS_BOUND)


@pytest.mark.parametrize("name", floors.VARIANTS)
def test_every_floor_computes_what_the_layer_does(small, name, monkeypatch):
    monkeypatch.setattr(floors, "TOKENS", 40)
    monkeypatch.setattr(floors, "WIDTH", 64)
    monkeypatch.setattr(floors, "HEADS", 8)
    monkeypatch.setattr(floors, "CORES", {"by hand": SDPBackend.MATH})
    rows = list(rows_of(floors.layer(small, name), small))
    assert [(row.failed, row.timings.absent) for row in rows] == [("", {})] * 4
    assert [row.bench.endswith(WITH_PYTHON) for row in rows] == [False, True] * 2
    bounds = [comparison.bound for row in rows for comparison in row.comparisons]
    assert bounds == ([] if floors.VARIANTS[name].floor is None else [floors.BOUND, None] * 2)


def test_talking_heads_are_held_to_the_formula(small, monkeypatch):
    true = talking.talking_attention

    def on_a_cpu(*tensors, backend, **options):
        return true(*tensors, backend="blockwise" if backend == "fused" else backend, **options)

    monkeypatch.setattr(talking, "talking_attention", on_a_cpu)
    rows = list(rows_of(talking.talking(small, 96), small))
    assert [row.failed for row in rows] == [""] * 4
    assert {row.comparisons[0].against for row in rows} == {talking.MATERIALISED}
    assert all("fused" in next(iter(row.timings.absent)) for row in rows)


def test_one_token_over_a_latent_cache_is_timed_by_cache(small, monkeypatch):
    def by_formula(query, cache, *, scale, names):
        return (query @ cache.key.transpose(-1, -2) * scale).softmax(-1) @ cache.value, None, {}

    monkeypatch.setattr(latent, "decode", by_formula)
    monkeypatch.setattr(latent, "SIDE", 8)
    monkeypatch.setattr(latent, "l2_bytes", lambda device: 20_000)
    monkeypatch.setattr(latent, "replayed", lambda calls, device: lambda: [call() for call in calls])
    place = latent.Place(16, batch=2, tokens=24, rank=16, rope_dim=4)
    (row,) = rows_of(latent.one_token(small, place), small)
    size = 2 * 24 * 20 * 4
    assert row.notes == {"caches": latent.caches_beyond(20_000, size), "bytes": size}
    assert {c.against: c.bound for c in row.comparisons} == {latent.COPY: 1 / 0.60, latent.PRODUCT: None}
    bandwidth, _ = row.figures
    assert bandwidth.value == pytest.approx(size / (row.timings.median_ms(latent.OURS) * 1e-3) / 1e12)
    assert row.failed == ""


def test_a_plan_is_of_a_gpu():
    assert arrangement_speed.plan(gpu=None) == []
    places = [step.place for step in arrangement_speed.plan(gpu=torch.device("cuda"))]
    assert places[0] == "8192 tokens of 4096, 32 heads of 128"
    assert "32 x 32768 tokens, rank 512 + 64, 128 heads" in places
    assert len(places) == len(set(places)) + 2  # routed layers and chosen rows go by the same places


def test_the_command_says_what_it_needs():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app, ["variants"])
    assert done.exit_code == 0
    assert "no CUDA GPU was found" in done.output
    assert CliRunner().invoke(app, ["variants", "--only", "nothing"]).exit_code == 2
