"""The curves of surgery: splits, figures, points kept and taken up again, and what is chosen on which split."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from scipy.stats import spearmanr
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from benchmarks import tables
from benchmarks.measuring.cases import Run
from benchmarks.measuring.json_lines import append_result
from benchmarks.measuring.runner import rows_of
from benchmarks.surgery_quality import timing
from benchmarks.surgery_quality.language import LanguageTask
from benchmarks.surgery_quality.measuring import Bench
from benchmarks.surgery_quality.points import (
    Point,
    Result,
    check_alike,
    curves,
    is_done,
    parse_native,
    read_results,
    tuned,
)
from benchmarks.surgery_quality.sentences import Pairs, SentenceTask, paired_error
from benchmarks.surgery_quality.standings import best_by_place, curves_of, rows
from benchmarks.surgery_quality.tasks import Figure, spearman
from polyhead.costs import Workload
from polyhead.costs.measuring import machine_facts
from polyhead.errors import OptionError
from polyhead.layers import MultiHeadConfig
from polyhead.surgery import PruneHeads, apply, fingerprint, undo
from polyhead.surgery.options import CRITERIA


def drawing():
    """The script beside the pictures, as a module."""
    path = Path(__file__).resolve().parents[2] / "docs" / "images" / "draw_surgery.py"
    spec = importlib.util.spec_from_file_location("draw_surgery", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


DRAWN = drawing()


@pytest.fixture(scope="module")
def language() -> LanguageTask:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=36,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=4,
        vocab_size=61,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # weights of a size at which heads matter
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim == 2 else 1)
    return LanguageTask(model, torch.randint(61, (3100,)), context=31, batch=7)


class Words:
    """A tokenizer of a few words, as transformers' are called."""

    def __call__(self, sentences, **options):
        ids = [[1, *(int(word) for word in sentence.split()), 2] for sentence in sentences]
        longest = max(map(len, ids))
        return {
            "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in ids]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids]),
        }


def pairs(count: int, seed: int) -> Pairs:
    drawn = random.Random(seed)
    sides = [[" ".join(str(drawn.randrange(3, 41)) for _ in range(drawn.randrange(2, 9))) for _ in range(count)]] * 2
    one, other = sides[0], [" ".join(reversed(x.split()[1:] or ["3"])) for x in sides[1]]
    return Pairs(tuple(one), tuple(other), torch.tensor([drawn.random() * 5 for _ in range(count)]).double())


@pytest.fixture(scope="module")
def sentences() -> SentenceTask:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=28,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=7,
        vocab_size=41,
        attn_implementation="sdpa",
    )
    splits = {"choose": pairs(23, 1), "report": pairs(19, 2)}
    return SentenceTask(BertModel(config).eval(), Words(), pairs(37, 0), splits, calibration=64, batch=11)


def test_rank_correlation_is_that_of_scipy():
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randint(0, 9, (2, 101), generator=generator).double()
    assert spearman(one, other) == pytest.approx(spearmanr(one, other).statistic, abs=1e-12)
    assert paired_error(one, one, other) == 0
    assert paired_error(one, other, other) > 0


def test_a_text_is_cut_into_three_parts_that_share_no_token(language):
    held = torch.cat([batch["input_ids"] for batch in language.calibration])
    assert held.shape == (60, 31)
    assert language.splits["choose"].shape == language.splits["report"].shape == (20, 31)
    fewer = LanguageTask(language.model, torch.randint(61, (3100,)), context=31, calibration=5, rows=3)
    assert sum(len(batch["input_ids"]) for batch in fewer.calibration) == 5
    assert fewer.splits["choose"].shape == fewer.splits["report"].shape == (3, 31)
    with pytest.raises(OptionError, match="two rows of 31 tokens, got one of 60 tokens"):
        LanguageTask(language.model, torch.zeros(100, dtype=torch.long), context=31)


def test_perplexity_is_the_exponential_of_the_mean_loss_with_its_paired_error(language):
    model, held = language.model, language.splits["report"]
    whole = language.figures("report")
    with torch.no_grad():
        losses = torch.stack([model(input_ids=row[None], labels=row[None]).loss for row in held]).double()
        record = apply(model, [PruneHeads(0, (0, 3, 6))])
        fewer = torch.stack([model(input_ids=row[None], labels=row[None]).loss for row in held]).double()
    found = language.figures("report")
    undo(model, record)
    assert whole["perplexity"].value == pytest.approx(math.exp(losses.mean()), rel=1e-6)
    assert (whole["ratio"].value, whole["ratio"].error) == (1, 0)
    off = fewer - losses
    assert found["ratio"].value == pytest.approx(math.exp(off.mean()), rel=1e-5)
    assert found["ratio"].error == pytest.approx(math.exp(off.mean()) * float(off.std()) / math.sqrt(20), rel=1e-3)


def test_every_way_is_measured_and_leaves_the_model_as_it_was(language, tmp_path):
    before, path = fingerprint(language.model), tmp_path / "points.jsonl"
    bench = Bench(language, facts={"text": "random"}, tries=3)
    points = tuned([0.3], ["6/3"]) + tuned([], ["6/2"])[::4] + curves([0.3])  # every way but of a second native form
    for point in points:
        append_result(path, bench.measure(point))
    assert fingerprint(language.model) == before
    with path.open("a") as file:
        file.write('{"point": ')  # a process that was ended while it wrote
    results = read_results(path)
    assert [result.point for result in results] == points
    gone = {result.point: sum(result.gone.values()) for result in results}
    assert {gone[point] for point in points if point.native is None} == {round(0.3 * 18)}
    assert {gone[point] for point in points if point.native is not None} == {6}
    assert all((result.form == "native") == (result.point.native is not None) for result in results)
    assert {result.point.criterion for result in results} == set(CRITERIA)
    compensated = next(r for r in results if r.point == Point("random", 0.3, "once", seed=3))
    plain = next(r for r in results if r.point == Point("random", 0.3, "no", seed=3))
    assert compensated.gone == plain.gone
    assert compensated.figures != plain.figures


def test_what_is_measured_is_what_the_pruned_and_repaired_model_gives(language):
    from polyhead.surgery import OutputCompensation, find_layers

    point = Point("compensated", 0.3, "once", native="6/3")
    bench = Bench(language)
    found, gone = bench.measure(point), bench.choose(point)
    edits = [PruneHeads(layer.number, gone[layer.path]) for layer in find_layers(language.model)]
    record = apply(language.model, edits, compensation=OutputCompensation(bench.evidence.moments))
    for split in ("choose", "report"):
        for name, figure in language.figures(split).items():
            assert figure.value == pytest.approx(found.figures[split][name].value, rel=1e-5)
    undo(language.model, record)


def test_sentences_are_measured_by_every_criterion(sentences):
    whole = sentences.figures("report")
    assert whole["cosine"].value == pytest.approx(1, abs=1e-6)
    assert whole["spearman"].error == 0
    bench = Bench(sentences, tries=3)
    for name in CRITERIA:
        result = bench.measure(Point(name, 0.5, "once"))
        assert sum(result.gone.values()) == 7
        assert result.figures["report"]["cosine"].value < 1
    stream = bench.measure(Point("compensated", 0.5, "stream", "direction", 1e-3, searched=True))
    assert stream.form == "own"
    assert sentences.loss() == pytest.approx(0, abs=1e-6)


def test_some_pairs_are_from_all_over():
    assert pairs(10, 0).some(3).one == tuple(pairs(10, 0).one[place] for place in (0, 3, 6))
    assert pairs(3, 0).some(None).one == pairs(3, 0).some(9).one == pairs(3, 0).one


def test_a_point_is_done_when_it_was_measured_on_what_is_requested(sentences):
    found = Bench(sentences).measure(Point("magnitude", 0.5), ("report",))
    assert set(found.figures) == {"report"}
    assert is_done(Point("magnitude", 0.5), [found], ("report",))
    assert not is_done(Point("magnitude", 0.5), [found], ("choose", "report"))
    assert not is_done(Point("magnitude", 0.4), [found], ("report",))
    assert best_by_place([found]) == {}


def test_a_file_holds_points_of_one_model_and_text():
    held = result(Point("plain", 0.3), 31.0, 30.0)
    check_alike([held], {})
    with pytest.raises(OptionError, match=r"points of one model, text and number of rows.*got .*'rows': 300"):
        check_alike([held], {"rows": 300})


def test_reading_sts_says_what_is_missing(tmp_path, sentences):
    (tmp_path / "sts-train.csv").write_text("a\tb\tc\td\t2.5\tone\tother\n")
    assert Pairs.read(tmp_path / "sts-train.csv") == Pairs(("one",), ("other",), torch.tensor([2.5]).double())
    with pytest.raises(OptionError, match=r"without sts-dev\.csv, sts-test\.csv"):
        SentenceTask.read(sentences.model, Words(), tmp_path)
    (tmp_path / "sts-dev.csv").write_text("a\tb\n")
    with pytest.raises(OptionError, match="seven columns"):
        Pairs.read(tmp_path / "sts-dev.csv")


def result(point: Point, choose: float, report: float) -> Result:
    figures = {"choose": {"perplexity": Figure(choose, 0.1)}, "report": {"perplexity": Figure(report, 0.2)}}
    return Result(point, {"a": 3}, 10, "own", figures, 1.0)


def test_the_best_way_is_chosen_on_one_split_and_reported_on_the_other():
    found = [
        result(Point("plain", 0.3, "once"), 31.0, 30.0),
        result(Point("compensated", 0.3, "once"), 30.0, 33.0),
        result(Point("random", 0.3, "once"), 29.0, 29.0),
        result(Point("random", 0.3, "once", seed=1), 31.0, 33.0),
    ]
    assert best_by_place(found)["30% of heads"].point.criterion == "compensated"
    _, line = rows(found)
    assert line[-2:] == ("30.00 ± 0.10", "33.00 ± 0.20")
    (random_heads,) = [curve for curve in curves_of(found, "perplexity") if curve.name.startswith("random")]
    assert random_heads.figures == ((29.0, 33.0),)
    assert random_heads.medians == (31.0,)
    assert rows([]) == [("place", "heads gone", "way, chosen on the choosing split", "loads in")]


def test_layouts_are_written_as_heads_over_key_heads():
    assert parse_native("6/3") == (6, 3)
    for text in ("6", "6/4", "6/0", "a/b"):
        with pytest.raises(OptionError, match="written as 6/3"):
            parse_native(text)


def measured(tmp_path):
    """Points of both kinds, with figures that could be."""
    facts = {**machine_facts.describe(torch.device("cpu"), "abc123"), "model": "small", "text": "some.txt", "rows": 300}
    path = tmp_path / "surgery-small.jsonl"
    for place, point in enumerate(curves([0.2, 0.5]) + tuned([0.5], ["6/3"])):
        worth = 1 + point.share * (2 if point.compensation == "no" else 1) + place / 1000
        figures = {"perplexity": Figure(30 * worth, 0.5), "ratio": Figure(worth, 0.01)}
        form = "native" if point.native else "own"
        append_result(path, Result(point, {"a": 9}, 18, form, {"choose": figures, "report": figures}, 1.0, facts))
    return path


def test_curves_and_ways_are_tables_between_their_marks(tmp_path):
    measured(tmp_path)
    page = "a\n<!-- quality: begin -->old<!-- quality: end -->\n"
    reported = tables.results_page(page, tmp_path)
    assert "### small, some.txt" in reported
    assert "old" not in reported
    assert "Shares are of 18 heads." in reported
    assert "Coarse: evaluated on 300 rows or pairs of each split." in reported
    assert "| perplexity, test | 20% | 50% |" in reported
    assert len([line for line in reported.splitlines() if line.startswith("| random, ")]) == 2
    assert "| **6/3, compensated, weighted by token, compensated (once, ridge 0.01)** | native |" in reported
    assert sum(line.startswith("| **") for line in reported.splitlines()) == 3  # at 20%, at 50%, at 6/3
    assert "| random heads, compensated, 5 seeds | polyhead |  | 36" in reported
    assert tables.results_page(reported, tmp_path) == reported


def test_the_page_and_its_pictures_hold_what_was_measured(project_root):
    page = tables.PAGE.read_text(encoding="utf-8")
    for picture in DRAWN.PICTURES:
        source = tables.RESULTS / f"surgery-{picture.model}.jsonl"
        if source.exists():
            held = project_root / "docs" / "images" / DRAWN.file_name(picture)
            assert f"../docs/images/{held.name}" in page
            drawn = DRAWN.draw(picture, curves_of(read_results(source), picture.figure))
            assert held.read_text(encoding="utf-8") == drawn, "run python docs/images/draw_surgery.py"


def test_a_picture_draws_every_way_in_both_panels(tmp_path):
    found = curves_of(read_results(measured(tmp_path)), "ratio")
    drawn = DRAWN.draw(DRAWN.PICTURES[0], found)
    assert drawn.count("<polyline") == len(found) == 2 * len(DRAWN.STYLES)
    assert drawn.count("<polygon") == 2  # the spread of random heads
    root = ElementTree.fromstring(drawn)
    width, height = float(root.get("width")), float(root.get("height"))
    places = [(float(x.get("x")), float(x.get("y"))) for x in root.iter() if x.tag.endswith("text")]
    assert all(0 < x < width and 0 < y < height for x, y in places)


def test_half_of_the_heads_are_half_of_the_counted_block():
    run = Run(torch.device("cpu"), torch.float32, 3, repetitions=0)
    block = timing.Block("small", MultiHeadConfig(24, 4), ((0, 1), (1, 3)), batch=2, tokens=5)
    found = timing.chains(block, run)
    work = Workload.forward(5, batch=2)
    assert found[timing.FEWER].flops(work) * 2 == found[timing.WHOLE].flops(work)
    assert [layer.layout.num_heads for layer in found[timing.FEWER].layers] == [2, 2]
    (row,) = rows_of(timing.block_cases(block, run), run)
    assert [(c.subject, c.against, c.bound) for c in row.comparisons] == [(timing.FEWER, timing.WHOLE, 1.1 * 0.5)]
    for gpu in (None, torch.device("cuda")):  # only planned, not run
        steps = timing.plan(quick=True, seed=0, gpu=gpu)
        assert [step.place for step in steps] == [x.name for x in timing.BLOCKS["cpu" if gpu is None else "cuda"]]
    assert sum(map(len, timing.BLOCKS["cpu"][1].gone)) == 36
    whole = timing.llama().config.layout
    assert len(timing.llama().gone[0]) * 2 == whole.num_heads
