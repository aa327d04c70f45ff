"""The benchmark of layers: contenders of the same function, bounds where they belong, files that replace no others."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from benchmarks import app as command
from benchmarks import layer_speed
from benchmarks.layer_speed import agreement, contenders, layer, masked
from benchmarks.layer_speed.contenders import CONTENDERS, OURS, PLAIN, TRUSTING, X_TRANSFORMERS, Setting, Shape, Weights
from benchmarks.layer_speed.decode import BytesWritten, bytes_of_step
from benchmarks.layer_speed.overhead import functions_entered
from benchmarks.measuring import results
from benchmarks.measuring.agreement import Disagreement
from benchmarks.measuring.calls import step
from benchmarks.measuring.cases import Run
from benchmarks.measuring.runner import rows_of
from polyhead.errors import BackendUnsupported

CPU = torch.device("cpu")
SMALL = Shape(2, 19, 46, 2)
# x-transformers scripts a function when it is first imported.
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script` is deprecated:DeprecationWarning")

RUN = Run(CPU, torch.float32, alternations=3, repetitions=0)

SETTINGS = {
    "plain": PLAIN,
    "causal": Setting(causal=True),
    "padded": Setting(lengths=torch.tensor([19, 11])),
}


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(command.app, ["layers", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", CONTENDERS)
def test_contenders_given_the_same_weights_compute_the_same_function(name, kind):
    if name == X_TRANSFORMERS:
        pytest.importorskip("x_transformers")
    setting = SETTINGS[kind]
    weights = Weights.random(SMALL, device=CPU, dtype=torch.float32, seed=1)
    x = RUN.inputs(2, 19, 46)
    module = CONTENDERS[name](weights, setting)
    for training in (False, True):
        agreement.check_output(name, module.train(training)(x), x, weights, setting, seed=2)
    found = agreement.check_gradients(name, CONTENDERS[name], x, weights, setting, seed=2)
    assert len(found) == 5


def test_torch_is_timed_on_its_fast_path_in_eval_and_off_it_in_training(monkeypatch):
    fast, calls = torch._native_multi_head_attention, []
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: calls.append(1) or fast(*args))
    weights = Weights.random(SMALL, device=CPU, dtype=torch.float32, seed=1)
    module = contenders.TorchLayer(weights, PLAIN)
    x = RUN.inputs(2, 19, 46)
    step(module.train(), x, x, list(module.parameters()), True)()
    assert not calls
    step(module.eval(), x, x, [], False)()
    assert calls


def test_a_contender_with_another_weight_disagrees():
    weights = Weights.random(SMALL, device=CPU, dtype=torch.float32, seed=1)
    module, x = contenders.ThreeLinear(weights, PLAIN), RUN.inputs(2, 19, 46)
    with torch.no_grad():
        module.key.weight[3, 5] += 0.5
    with pytest.raises(Disagreement, match=r"other: the output is off by .* explained by rounding"):
        agreement.check_output("other", module(x), x, weights, PLAIN, seed=0)


def test_a_contender_with_another_gradient_disagrees():
    class Detached(contenders.ThreeLinear):
        def forward(self, x):
            return super().forward(x) + 0.1 * (self.query(x) - self.query(x).detach())

    weights = Weights.random(SMALL, device=CPU, dtype=torch.float32, seed=1)
    x = RUN.inputs(2, 19, 46)
    agreement.check_output("other", Detached(weights, PLAIN)(x), x, weights, PLAIN, seed=0)
    with pytest.raises(Disagreement, match=r"other: the gradient of the input is off by"):
        agreement.check_gradients("other", Detached, x, weights, PLAIN, seed=0)


@pytest.mark.parametrize(("name", "failed"), [("tutorial", False), (OURS, True)])
def test_a_contender_that_disagrees_is_not_timed(monkeypatch, tmp_path, name, failed):
    build = CONTENDERS[name]

    def wrong(weights, setting):
        module = build(weights, setting)
        module.register_forward_hook(lambda module, inputs, output: output * 1.01)
        return module

    monkeypatch.setitem(CONTENDERS, name, wrong)
    path = tmp_path / "run.json"
    arguments = ["--device", "cpu", "--quick", "--shapes", str(SMALL), "--only", "layer", "--output", str(path)]
    shown = invoke(*arguments, code=int(failed))
    assert f"not timed: {name}: the output is off by" in " ".join(shown.split())
    for row in results.read(path)[1]:
        assert name not in row.timings.samples_ms
        assert bool(row.failed) is failed


def test_a_contender_that_is_not_installed_is_recorded_as_such(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "x_transformers" else find(name))
    row = next(rows_of(layer.layer(RUN, SMALL), RUN))
    assert row.timings.absent == {X_TRANSFORMERS: "not installed"}


def test_layer_rows_hold_bounds_against_the_faster_floor_and_against_torch():
    forward, training = rows_of(layer.layer(RUN, SMALL), RUN)
    assert (forward.bench, training.bench) == ("layer, forward", "layer, forward + backward")
    for row in (forward, training):
        floor = row.notes["floor"]
        assert row.timings.median_ms(floor) == min(map(row.timings.median_ms, contenders.FLOOR))
        bounds = {c.against: c.bound for c in row.comparisons}
        assert bounds[floor] == 1.05
        assert bounds["nn.MultiheadAttention"] == 1.0
        assert bounds["tutorial"] is None
        assert all(c.subject == OURS for c in row.comparisons)


def test_with_a_mask_the_bounds_are_on_ours_without_its_guard():
    for row in rows_of(layer.causal(RUN, SMALL), RUN):
        floor = row.notes["floor"]
        bounds = {(c.subject, c.against): c.bound for c in row.comparisons}
        assert {pair: bound for pair, bound in bounds.items() if bound is not None} == {
            (TRUSTING, floor): 1.05,
            (TRUSTING, "nn.MultiheadAttention"): 1.0,
        }
        others = {(OURS, name) for name in layer.MASKED if name != OURS}
        assert {pair for pair, bound in bounds.items() if bound is None} == others


def test_bytes_written_counts_new_memory_and_writes_but_no_views():
    x = torch.zeros(7, 11)
    with BytesWritten() as counter:
        x.view(77)[:5].reshape(5, 1).transpose(0, 1)
    assert counter.total == 0
    with BytesWritten() as counter:
        x + 1
        x[2:5].mul_(3)
    assert counter.total == 4 * (77 + 33)


def test_a_decoding_step_writes_as_much_into_a_long_cache_as_into_a_short_one():
    shape = Shape(2, 61, 46, 2)
    weights = Weights.random(shape, device=CPU, dtype=torch.float32, seed=0)
    ours = contenders.Polyhead(weights, PLAIN).eval().layer
    assert bytes_of_step(RUN, ours, shape, 13) == bytes_of_step(RUN, ours, shape, 61)


def test_functions_entered_is_a_count_without_noise():
    x = torch.ones(3)
    module = nn.Identity()
    assert functions_entered(lambda: None) < functions_entered(lambda: module(x))
    assert functions_entered(lambda: module(x)) == functions_entered(lambda: module(x))


def test_a_run_writes_what_it_was_taken_on_and_shows_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_speed, "QUICK_ALTERNATIONS", 2)
    path = tmp_path / "run.json"
    shown = invoke("--device", "cpu", "--quick", "--shapes", "2x19x46x2", "--output", str(path))
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["machine"]["cpu"]
    assert written["machine"]["cores"] >= 1
    assert set(written["versions"]) >= {"python", "torch", "triton"}
    assert {"commit", "date", "misses"} <= set(written)
    assert {row["bench"].split(",")[0] for row in written["rows"]} == {
        "layer", "causal", "padded", "NaN guard", "decode one token", "overhead",
    }  # fmt: skip
    first = written["rows"][0]
    assert first["dtype"] == "float32"
    assert all(len(samples) == 2 for samples in first["samples_ms"].values())
    assert "layer, forward" in shown
    assert str(path) in shown


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        ([], "cores.json"),
        (["--quick"], "cores-quick.json"),
        (["--only", "layer"], "cores-partial.json"),
        (["--shapes", "2x3x8x2", "--quick"], "cores-quick-partial.json"),
    ],
)
def test_a_part_of_a_run_never_replaces_the_whole(arguments, ending, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(layer_speed, "plan", lambda *given, **options: [])
    monkeypatch.setattr("benchmarks.measuring.runner.run_steps", lambda steps, device, output, **_: output.touch())
    invoke("--device", "cpu", *arguments)
    (written,) = tmp_path.iterdir()
    assert written.name.startswith("cpu-")
    assert written.name.endswith(ending)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "2x10x512"], "got '2x10x512'"),
        (["--shapes", "0x10x512x8"], "got '0x10x512x8'"),
        (["--only", "layer,speed"], "got 'speed'"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(arguments, words):
    assert words in invoke(*arguments, code=2)


def test_a_layer_too_large_for_one_path_is_still_timed_on_the_other():
    class TooLargeInEval(contenders.Tutorial):
        def forward(self, x):
            if not self.training:
                raise torch.OutOfMemoryError("too large")
            return super().forward(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONTENDERS, "tutorial", TooLargeInEval)
        forward, training = rows_of(layer.layer(RUN, SMALL), RUN)
    assert forward.timings.absent["tutorial"] == "out of memory"
    assert "tutorial" in training.timings.samples_ms


def test_a_layer_too_large_for_every_path_is_recorded_as_such(monkeypatch):
    class TooLarge(contenders.Tutorial):
        def forward(self, x):
            raise torch.OutOfMemoryError("too large")

    monkeypatch.setitem(CONTENDERS, "tutorial", TooLarge)
    assert all(row.timings.absent["tutorial"] == "out of memory" for row in rows_of(layer.layer(RUN, SMALL), RUN))


def test_a_guard_that_cannot_run_is_recorded_with_its_reasons(monkeypatch):
    def refuse(*args, **kwargs):
        raise BackendUnsupported("sdpa", ["no fused kernel serves this"])

    monkeypatch.setattr(masked.polyhead, "attention", refuse)
    for row in rows_of(masked.guard(RUN, SMALL), RUN):
        assert "no fused kernel serves this" in row.failed
        assert row.comparisons == ()
