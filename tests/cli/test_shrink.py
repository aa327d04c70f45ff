"""`polyhead shrink` and `python -m benchmarks surgery`: printed and written results, and error messages."""

from __future__ import annotations

import inspect
import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import polyhead
from benchmarks.app import app as benchmarks
from benchmarks.surgery_quality.points import read_results
from polyhead.cli import app
from polyhead.cli.line_plot import line_plot
from polyhead.cli.shrink_curve import show_curve
from polyhead.surgery import find_layers
from polyhead.surgery.selection.budgets import Size
from polyhead.surgery.selection.curve import CurvePoint
from polyhead.surgery.selection.quality import Fidelity, Measurement
from polyhead.surgery.selection.search import SearchResult
from polyhead.workflows import shrinking
from tests.inspection.small_models import model_folder, text_folder


def invoke(*arguments: object, code: int = 0):
    environment = {"COLUMNS": "250", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [str(x) for x in arguments], env=environment)
    assert result.exit_code == code, result.output
    return result


def measure(*arguments: object, code: int = 0):
    environment = {"COLUMNS": "250", "NO_COLOR": "1"}
    result = CliRunner().invoke(benchmarks, ["surgery", *map(str, arguments)], env=environment)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for name in ("bert", "llama"):
        model_folder(folder / name, name)
    text_folder(folder / "text")
    return folder


def layouts(folder: Path) -> list[tuple[int, int]]:
    return layouts_of(polyhead.load(folder))


def layouts_of(model: nn.Module) -> list[tuple[int, int]]:
    found = [layer.layout for layer in find_layers(model)]
    return [(layout.num_heads, layout.num_kv_heads) for layout in found]


def test_an_encoder_is_shrunk_by_its_fidelity(place, tmp_path):
    options = ["--text", place / "text", "--context", "16", "--device", "cpu", "--form", "uneven"]
    shown = invoke(
        "shrink", place / "bert", "--target", "25%-heads", *options, "--curve", "-o", tmp_path / "small"
    ).stdout
    (contexts,) = re.findall(r"tokens of text in (\d+) contexts$", shown, re.M)
    assert "those of the unpruned model, on the test set; original model 1" in " ".join(shown.split())
    shares = re.findall(r"^ *(\d+)% +\d+% +(\S+) ± ", shown, re.MULTILINE)
    assert [share for share, _ in shares] == ["12", "25", "38", "50", "62", "75"]
    assert all(0 < float(value) <= 1 for _, value in shares)
    assert "L least squares   N not compensated   R random, least squares" in shown
    assert "The curve compensates by least squares alone; the result is distilled as well, and differs" in shown
    assert "For 25% fewer heads: 2 of 8 heads are pruned, compensated" in shown
    (count,) = re.findall(
        r"^Fidelity on held-out text \(\d+ tokens, (\d+) contexts\), .*: 0\.\d+ ± \S+ after", shown, re.M
    )
    assert int(count) == pytest.approx(int(contexts) / 4, abs=3)
    assert "are held out" not in shown
    assert re.search(
        r"^On other text of this kind and length, expect 0\.\d+ to [01]\.\d+ \(95% prediction", shown, re.M
    )
    assert sum(heads for heads, _ in layouts(tmp_path / "small")) == 6


@pytest.mark.parametrize(("metric", "worse"), [("perplexity", "12%"), ("fidelity", "25%")])
def test_sizes_at_which_compensation_is_worse_than_none_are_named(metric, worse):
    def point(share: float, compensated: float, not_compensated: float) -> CurvePoint:
        measured = [Measurement(value, 0.1) for value in (compensated, not_compensated, 0.5)]
        return CurvePoint(1, Size(1 - share, None, 0.9), *measured[:2], (measured[2],))

    curve = (point(0.12, 0.9, 0.7), point(0.25, 0.6, 0.8), point(0.38, 0.4, 0.4))
    shrunk = SimpleNamespace(curve=curve, metric=metric, metric_description=metric, original=1.0)
    with Console(width=200, record=True, file=io.StringIO()) as console:
        show_curve(shrunk, console)
    assert f"\nAt {worse} compensation is worse than none: " in console.export_text()


def test_a_causal_model_is_shrunk_by_its_perplexity_and_its_cache(place, tmp_path):
    options = ["--text", place / "text", "--context", "16", "--device", "cpu", "--form", "uneven"]
    shown = invoke("shrink", place / "llama", "--target", "1.3x-cache", *options, "--output", tmp_path / "s").stdout
    assert re.search(
        r"^Perplexity on held-out text \(\d+ tokens, \d+ contexts\): \S+ before, \S+ ± \S+ after", shown, re.M
    )
    assert [line.split()[-3:] for line in shown.splitlines() if line.startswith("KV heads ")] == [["4", "3", "0.75"]]
    assert sum(keys for _, keys in layouts(tmp_path / "s")) == 3
    shown = invoke("shrink", place / "llama", "--target", "1.05x-faster", *options, "--preview").stdout
    assert "For 1.05 times fewer FLOPs: " in shown
    assert "Saved" not in shown
    assert "random" not in shown  # the curve is measured on request


def test_a_time_is_asked_of_the_machine_until_it_is_reached(place, monkeypatch):
    """Timings are faked for the original model and for one with fewer and fewer heads."""
    gone = []

    class Found:
        def median_ms(self, name: str) -> float:
            return {"original": 1 + 0.02 * gone[-1], "pruned": 1.0}[name]

    def alternate(calls, **options):
        whole, fewer = (inspect.getclosurevars(calls[name]).nonlocals[name] for name in ("original", "pruned"))
        assert calls["original"]().logits.shape == calls["pruned"]().logits.shape
        gone.append(sum(heads for heads, _ in layouts_of(whole)) - sum(heads for heads, _ in layouts_of(fewer)))
        return Found()

    monkeypatch.setattr("polyhead.costs.measuring.runner.alternate", alternate)
    options = ["--text", place / "text", "--context", "16", "--device", "cpu", "--preview", "--measured"]
    uneven = [*options, "--form", "uneven"]
    shown = invoke("shrink", place / "llama", "--target", "1.05x-faster", *uneven).stdout
    assert gone == [1, 2, 3]
    assert "For 1.05 times less time on this machine: 3 of 8 heads are pruned" in shown
    said = invoke("shrink", place / "llama", "--target", "1.15x-faster", *uneven, code=2).stderr
    assert (
        f"at most {1 + 0.02 * gone[-1]:.2f}x-faster, measured here without all removable heads, got 1.15x-faster"
        in said
    )
    gone.clear()
    shown = invoke("shrink", place / "llama", "--target", "1.1x-faster", *options).stdout
    assert gone == [4, 4, 6]
    assert "less time on this machine: 6 of 8 heads are pruned, 1/1 heads/KV heads remain in every layer" in shown


def test_heads_are_moved_between_layers_by_what_is_measured(place, tmp_path, monkeypatch):
    options = ["--text", place / "text", "--context", "16", "--device", "cpu", "--target", "25%-heads"]
    options += ["--form", "uneven"]
    plain = invoke("shrink", place / "bert", *options, "--curve", "--preview").stdout
    result = invoke("shrink", place / "bert", *options, "--curve", "--search", "--output", tmp_path / "small")
    curve = [line for line in plain.splitlines() if re.match(r" *\d+% ", line)]
    assert len(curve) > 2
    assert [line for line in result.stdout.splitlines() if re.match(r" *\d+% ", line)] == curve
    assert "Search heads, up to 89 measurements of the fidelity" in result.stderr  # 1 + 6 + 2 + 80
    assert "For 25% fewer heads: 2 of 8 heads are pruned, compensated" in result.stdout
    (told,) = re.findall(r"^Search, (\d+) measurements: ", result.stdout, re.MULTILINE)
    assert 9 < int(told) <= 89
    assert sum(heads for heads, _ in layouts(tmp_path / "small")) == 6

    seen = {}  # what is found and what it is worth are the test's own from here on

    def search_heads(selection, target, quality, *, progress):
        seen["rows"] = sum(len(batch["input_ids"]) for batch in quality.batches)
        first = selection.for_target(target)
        other = min(selection.evidence.layers, key=lambda path: len(first.get(path, ())))
        gone = {other: (0, 1)}
        return SearchResult(gone, first, 0.1, 0.2, 50)

    monkeypatch.setattr(shrinking, "search_heads", search_heads)
    # Of each run: before and after the search.
    measured = iter([Measurement(x, 0) for x in (0.8, 0.9, 0.9, 0.8)])
    measure = Fidelity.measure
    monkeypatch.setattr(
        Fidelity, "measure", lambda self, x: next(measured) if self.role == "searched" else measure(self, x)
    )
    shown = invoke("shrink", place / "bert", *options, "--search", "--preview").stdout
    gained = "on the text that selects the compensation fidelity 0.9 instead of 0.8, original model 1"
    assert re.search(rf"Search, 50 measurements: [12] heads? moved between layers; {gained}", shown)
    assert 4 <= seen["rows"] <= 16
    shown = invoke("shrink", place / "bert", *options, "--search", "--preview").stdout
    assert (
        "heads moved between layers gained nothing on the text that selects the compensation, and were reverted"
        in shown
    )


@pytest.mark.parametrize("target", ["1.3x-cache", "1.05x-faster"])
def test_a_search_of_grouped_keys_keeps_to_the_target(place, target):
    options = ["--text", place / "text", "--context", "16", "--device", "cpu", "--target", target, "--preview"]
    options += ["--form", "padded"]
    shown = invoke("shrink", place / "llama", *options, "--search").stdout
    assert "Search, " in shown
    if target == "1.3x-cache":
        (line,) = [line for line in shown.splitlines() if line.startswith("cache bytes per token")]
        assert float(line.split()[-1]) <= 1 / 1.3
    else:
        (left,) = re.findall(r"^(\d+)% of the original model's FLOPs", shown, re.MULTILINE)
        assert int(left) <= 95


def test_every_layer_keeps_as_many_heads_in_a_form_that_stock_loads(place, tmp_path):
    options = ["--text", place / "text", "--context", "16", "--tokens", "400", "--device", "cpu"]
    shown = invoke(
        "shrink", place / "llama", "--target", "40%-heads", *options, "--curve", "-o", tmp_path / "small"
    ).stdout
    found = re.findall(r"^ *(\d/\d) +(\d+)% +(\d+)% +\d+% ", shown, re.MULTILINE)
    assert found == [("2/2", "50", "100"), ("2/1", "50", "50"), ("1/1", "75", "50")]
    assert "heads/KV heads left in every layer; ± is" in shown
    done = "For 40% fewer heads: 4 of 8 heads are pruned, 2/2 heads/KV heads remain in every layer, (.*)"
    assert re.search(done, shown)[1].startswith(("compensated by ", "not compensated: compensation was worse"))
    assert "uniform: plain transformers loads it as LlamaForCausalLM" in shown
    assert layouts(tmp_path / "small") == [(2, 2), (2, 2)]
    assert sorted(x.name for x in tmp_path.iterdir()) == ["small", "small.undo"]
    ids = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    native, ours = LlamaForCausalLM.from_pretrained(tmp_path / "small").eval(), polyhead.load(tmp_path / "small")
    assert (native.config.num_attention_heads, native.config.num_key_value_heads) == (2, 2)
    with torch.no_grad():
        torch.testing.assert_close(native(ids).logits, ours(ids).logits, rtol=0, atol=1e-5)
    shown = invoke("shrink", place / "llama", "--target", "40%-heads", *options, "--search", "--preview").stdout
    assert "4 of 8 heads are pruned, 2/2 heads/KV heads remain in every layer" in shown
    assert re.search(r"Search, \d+ measurements: (\d heads? exchanged|no head exchanged|heads exchanged) within", shown)
    shown = invoke("shrink", place / "llama", "--target", "2x-cache", *options, "--preview").stdout
    assert "4 of 8 heads are pruned, 2/1 heads/KV heads remain in every layer" in shown
    said = invoke("shrink", place / "llama", "--target", "4x-cache", *options, "--preview", code=2).stderr
    assert "can have heads/KV heads 2/2, 2/1, 1/1, of which 1/1 leaves 25% of the heads, 50% of the" in said


def test_a_family_that_has_no_fewer_heads_is_refused_before_its_text_is_read(place, tmp_path):
    (tmp_path / "unreadable.txt").write_bytes(b"\xff\xfe\x00\xd8")
    options = ["--target", "25%-heads", "--text", tmp_path / "unreadable.txt", "--device", "cpu"]
    said = invoke("shrink", place / "bert", *options, "--preview", code=2).stderr
    assert "got a BertModel, which has none: a config of BertModel gives 1 head of 24 channels " in said
    assert "has 1 head of 6 channels over 1 KV heads; use --form padded" in said


def test_options_say_what_they_do():
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", invoke("shrink", "--help").stdout).split())
    assert "--search" in shown
    assert (
        "swap heads within layers (with --form padded or uneven: move removals between layers) while quality" in shown
    )
    assert "All layers keep the same number of heads and KV heads" in shown
    assert "[default: uniform]" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "half"], "a target must be a share of heads to prune"),
        (["--target", "0.5x-cache"], "a target must be a share of heads to prune"),
        (["--target", "30%-heads"], "text is required: text like the model's inputs"),
        (["--target", "30%-heads", "--text", "T", "--metric", "charm"], "metric must be perplexity or fidelity"),
        (["--target", "30%-heads", "--text", "T", "--measured"], "a measured target must be a speed"),
        (
            ["--target", "1.2x-faster", "--text", "T", "--measured", "--search"],
            "search needs a target that is counted",
        ),
        (
            ["--target", "30%-heads", "--text", "T", "--form", "uniform", "--criterion", "plain"],
            "the uniform form needs the criterion compensated",
        ),
        (["--target", "30%-heads", "--text", "T", "--metric", "perplexity"], "perplexity needs a causal model"),
        (
            ["--target", "99%-heads", "--text", "T"],
            "every layer keeps at least one head, which leaves 25% of the heads",
        ),
        (
            ["--target", "30%-heads", "--text", "T", "--tokens", "85"],
            "at least 8 documents or contexts, to be split into three parts, got 5 contexts;",
        ),
        (["--target", "30%-heads", "--text", "T", "--criterion", "charm"], "criterion must be one of compensated"),
    ],
)
def test_what_cannot_be_done_is_said(place, tmp_path, arguments, words):
    arguments = [place / "text" if x == "T" else x for x in arguments]
    arguments += [] if "--context" in arguments else ["--context", "16"]
    arguments += [] if "--form" in arguments else ["--form", "uneven"]
    output = tmp_path / "never"
    said = invoke("shrink", place / "bert", *arguments, "--output", output, "--device", "cpu", code=2).stderr
    assert words in said
    assert not output.exists()


def test_the_plot_has_the_better_at_the_top_and_every_curve_in_its_column():
    drawn = line_plot(["10%", "20%"], {"ours": [30.0, 40.0], "theirs": [35.0, 50.0]}, upwards=False, height=5)
    lines = drawn.plain.split("\n")
    assert [line.split("│")[0].strip() for line in lines[:5]] == ["30", "35", "40", "45", "50"]
    assert [line.split("│")[1].split() for line in lines[:5]] == [["O"], ["T"], ["O"], [], ["T"]]
    rising = line_plot(["10%", "20%"], {"ours": [30.0, 40.0]}, upwards=True, height=5).plain.split("\n")
    assert [line.split("│")[0].strip() for line in rising[:5]] == ["40", "37.5", "35", "32.5", "30"]
    assert [line.split("│")[1].find("O") // 7 for line in rising[:5]] == [1, -1, -1, -1, 0]
    met = line_plot(["10%", "20%"], {"ours": [30.0, 40.0], "theirs": [30.0, 50.0]}, upwards=False, height=3)
    assert [line.split("│")[1].split() for line in met.plain.split("\n")[:3]] == [["OT"], ["O"], ["T"]]
    assert line_plot(["1"], {"a": [0.5]}, upwards=True).plain.count("A") == 2  # a flat curve, and its name


def test_points_of_a_small_model_are_measured_and_taken_up_again(place, tmp_path, monkeypatch):
    """Of each list of points every few: test_surgery_quality measures every way."""
    from benchmarks.surgery_quality import language, points

    monkeypatch.setattr(language, "CONTEXT", 16)
    tuned, curves = points.tuned, points.curves
    monkeypatch.setattr(points, "tuned", lambda shares, native: tuned(shares, native)[::6])
    monkeypatch.setattr(points, "curves", lambda shares: curves(shares)[::5])
    text = tmp_path / "text.txt"
    text.write_text("\n".join(path.read_text() for path in sorted((place / "text").rglob("*.txt"))) * 12)
    output = tmp_path / "points.jsonl"
    options = ["--model", place / "llama", "--text", text, "--output", output, "--device", "cpu", "--quick"]
    measure(*options, "--minutes", "0")
    assert not output.exists()
    first = measure(*options, "--part", "tuned").stdout
    results = read_results(output)
    assert {result.point.native for result in results} == {None, "2/2", "2/1"}
    assert "perplexity, report" in first
    measure(*options, "--part", "tuned", "--share", "2/2")
    assert read_results(output) == results
    assert "no --text or no --output" in measure(code=2).stderr
    assert "a part is tuned or curves" in measure(*options, "--part", "all", code=2).stderr
    (tmp_path / "other.txt").write_text(text.read_text())
    other = [*options[:2], "--text", tmp_path / "other.txt", *options[4:]]
    assert "a file holds points of one model, text" in measure(*other, code=2).stderr
    measure(*options, "--part", "curves", "--shares", "50%")
    drawn = [result for result in read_results(output) if result not in results]
    assert {result.point.share for result in drawn} == {0.5}
    assert all(set(result.figures) == {"report"} for result in drawn)
    said = measure(*options, "--shares", "half", code=2).stderr
    assert "shares of heads are written as 20%,50%" in said
    assert "a part must be I/N" in measure(*options, "--share", "3/2", code=2).stderr
