"""`polyhead inspect` and `polyhead compare`: printed and written results, and error messages."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import polyhead.inspection
from polyhead.cli import app
from polyhead.cli.inspect_results import show
from polyhead.errors import OptionError
from tests.inspection.small_models import NAMES, broken_folder, model_folder, text_folder

pytest.importorskip("pyarrow")


def invoke(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    model_folder(folder / "bert", "bert")
    model_folder(folder / "llama", "llama")
    text_folder(folder / "text")
    return folder


def test_a_run_is_shown_kept_and_compared(place, tmp_path, monkeypatch):
    options = ["--text", place / "text", "--context", 96, "--device", "cpu"]
    shown = invoke("inspect", place / "bert", *options, "--save", tmp_path / "one").stdout
    assert "BertModel" in shown
    assert "tokens of 6 documents, in contexts of up to 96; 8 heads" in shown
    assert "layer  head  0  1  2  3" in shown
    assert "Main findings" in shown
    assert shown.count("•") == 2  # of random weights, few hold in both halves
    lines = " ".join(shown.partition("Main findings")[2].split())
    assert lines.count("in both halves of text (939 tokens in contexts of up to 96)") == 2
    assert f"Saved to {tmp_path / 'one'}" in shown
    written = {file.name for file in (tmp_path / "one").iterdir()}
    files = {"relations.safetensors", "observations.safetensors", "pictures.safetensors"}
    assert written == {"heads.parquet", "inspection.json"} | files
    table = invoke("inspect", place / "bert", *options, "--table", "--importance", "none", "--layers", "1").stdout
    rows = [line.split()[0] for line in table.splitlines() if re.match(r" *L\d+H\d+ ", line)]
    assert rows == ["L1H0", "L1H1", "L1H2", "L1H3"]
    looked_at = [line.split() for line in table.splitlines() if re.match(r" *L1H\d: ", line)]
    assert [line[0] for line in looked_at] == ["L1H0:", "L1H1:", "L1H2:", "L1H3:"]
    for line in looked_at:
        assert len(line) == 1 + 2 * 5
        assert set(line[1::2]) <= set(NAMES)
        shares = [int(share.removesuffix("%")) for share in line[2::2]]
        assert shares == sorted(shares, reverse=True)
    invoke("inspect", place / "bert", *options, "--seed", 1, "--save", tmp_path / "two", "--importance", "none")
    runs = tmp_path / "one", tmp_path / "two"
    compared = invoke("compare", *runs).stdout
    tested = len(polyhead.inspection.compare(*map(polyhead.inspection.load_inspection, runs)).tested())
    assert (
        f"\n0 of {tested} tested values differ at a false discovery rate of 5%, 0 of them by more than 1%:\n"
        in compared
    )
    assert "\n0 of 8 common heads changed\npaired tests over the 12 contexts of the same text\n" in compared
    assert "weights" not in compared  # their spectra are the same
    assert [line.split(" (")[0] for line in compared.splitlines()[:2]] == [f"A  {runs[0]}", f"B  {runs[1]}"]
    assert "loss" not in compared  # the embedding model has none
    said = " ".join(compared.split())
    columns = "effective_rank, output_norm, output_norm_share, predictable_share, total_correlation"
    assert said.count(f" 34 values of {columns} are not tested: no error estimate") == 1
    assert not re.search(r"^L\dH\d ", compared, flags=re.MULTILINE)
    shown = invoke("compare", *runs, "--statistic", "output_norm").stdout
    assert len(re.findall(r"^L\dH\d .* not tested$", shown, flags=re.MULTILINE)) == 8
    assert "not tested" not in invoke("compare", *runs, "--statistic", "special_mass").stdout

    def far_apart(one, two, compare=polyhead.inspection.compare):
        found = compare(one, two)
        changes = [replace(change, before=0.0, after=1.0, error=0.01, q=0.01) for change in found.changes[:3]]
        return replace(found, changes=tuple(changes))

    def outputs_scaled(one, two, compare=polyhead.inspection.compare):
        """Six heads with another output norm, one of them by less than 10%."""
        found = compare(one, two)
        norms = [change for change in found.changes if change.name == "output_norm"]
        scaled = {id(x): factor for x, factor in zip(norms, (0.2, 0.3, 0.4, 0.5, 0.95, 0.6, 0.7), strict=False)}
        return replace(found, changes=tuple(replace(x, after=x.before * scaled.get(id(x), 1)) for x in found.changes))

    with monkeypatch.context() as patched:
        patched.setattr(polyhead.inspection, "compare", outputs_scaled)
        scaled = invoke("compare", *runs).stdout
    rows = re.findall(r"^(L\dH\d) +output_norm.* not tested$", scaled, flags=re.MULTILINE)
    assert rows == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H1"]  # L1H2 is the sixth, L1H0 below 10%
    monkeypatch.setattr(polyhead.inspection, "compare", far_apart)
    few = invoke("compare", *runs, "--most", 2).stdout
    assert few.count("+1") == 2
    assert "… and 1 more; show them with --most" in few


@pytest.mark.usefixtures("without_probes")
def test_redundant_heads_are_named_or_their_absence_is_stated(place, tmp_path):
    run = tmp_path / "run"
    invoke("inspect", place / "bert", "--text", place / "text", "--context", 96, "--device", "cpu", "--importance",
           "none", "--no-chance", "--save", run)  # fmt: skip
    found = polyhead.inspection.load_inspection(run)

    def shown(*shares: float) -> str:
        columns = {**found.table.columns, "predictable_share": torch.tensor(shares, dtype=torch.float64)}
        output = StringIO()
        show(replace(found, table=replace(found.table, columns=columns)), Console(file=output, width=250))
        return output.getvalue()

    none = shown(0.1, 0.2, math.nan, 0.3, 0.7, 0.74, 0.2, -0.1)
    assert (
        "\nNo redundant heads: the other heads of a layer predict less than 75% of each head's output linearly, on "
        "held-out tokens (at most 74%, of L1H1).\n"
    ) in none
    assert "redundant within its layer" not in none
    some = shown(0.1, 0.8, math.nan, 0.76, 0.95, 0.77, 0.86, -0.1)
    assert "redundant within its layer 5\n" in some
    assert (
        "\n5 of 8 heads are redundant: the other heads of their layer predict at least 75% of their output linearly, "
        "on held-out tokens: L1H0 95%, L1H2 86%, L0H1 80%, L1H1 77% and others.\nTo remove the first and "
        f"compensate with the other heads: polyhead prune {place / 'bert'} --heads L1H0 --form uneven --output FOLDER\n"
    ) in some
    assert "redundant" not in shown(*[math.nan] * 8)


@pytest.mark.usefixtures("without_probes")
def test_intervals_over_few_contexts_are_called_unreliable(place):
    options = ["--text", place / "text", "--device", "cpu", "--importance", "none", "--no-chance", "--context", 64]
    words = "Intervals and standard errors are over fewer than 8 contexts, too few to be reliable"
    assert words in invoke("inspect", place / "bert", *options, "--tokens", 5 * 64).stdout
    assert words not in invoke("inspect", place / "bert", *options, "--tokens", 12 * 64).stdout


@pytest.mark.parametrize("importance", ["auto", "ablation"])
def test_heads_that_are_not_finite_are_named_and_all_others_measured(place, tmp_path, importance):
    broken = broken_folder(tmp_path / "broken", place / "llama", 0, 2)
    run = tmp_path / "run"
    shown = invoke("inspect", broken, "--text", place / "text", "--context", 96, "--device", "cpu", "--importance",
                   importance, "--table", "--save", run, "--html", tmp_path / "page.html").stdout  # fmt: skip
    assert (
        "Skipped: values of L0H2, L1H0-H3: non-finite activations, the weights or the text give NaN or Inf\n" in shown
    )
    assert "Skipped: importance: the intact model's loss must be finite, got nan for row 0" in shown
    assert "\nMain findings\n" in shown
    table = polyhead.inspection.load_inspection(run).table
    measured = torch.tensor([True, True, False, True] + [False] * 4)
    columns = [name for name in table.columns if name in ("entropy", "sink_mass") or name.endswith("_score")]
    assert {"positional_score", "long_range_score", "induction_score"} <= set(columns)
    for name in columns:
        if name.startswith(("copy", "anti")):  # of rows that attend to a token
            assert not table[name][~measured].isfinite().any()
        else:
            assert table[name].isfinite().equal(measured), name


@pytest.mark.usefixtures("without_probes")
def test_ablation_of_a_language_model_and_chosen_statistics(place):
    shown = invoke(
        "inspect", place / "llama", "--text", place / "text", "--context", 64, "--tokens", 400, "--importance",
        "ablation", "--statistics", "entropy,mean_distance", "--no-chance", "--table", "--device", "cpu",
    ).stdout  # fmt: skip
    assert "ablation" in shown
    assert "sink_mass" not in shown
    assert re.search(r"\d other heads? do(es)? not differ significantly from the last of these, L\dH\d\.", shown)
    assert re.search(r"Importance by ablation: next-token loss, on \d+ tokens\.", shown)
    rows = [line.split() for line in shown.splitlines() if re.match(r"L\dH\d .*±", line)]
    least = sorted(rows, key=lambda row: float(row[-2]))[:4]
    (line,) = re.findall(r"^Least important by ablation: (.*); ± is the standard error\.$", shown, re.MULTILINE)
    listed = [part.split() for part in line.split(", ")]  # rounded to two digits and to one
    assert [head for head, *_ in listed] == [row[0] for row in least]
    assert [float(x[1]) for x in listed] == pytest.approx([float(row[-2]) for row in least], rel=0.06)
    assert [float(x[3]) for x in listed] == pytest.approx([float(row[-1][1:]) for row in least], rel=0.51)
    heads = ",".join(row[0] for row in least)
    command = f"polyhead prune {place / 'llama'} --heads {heads} --form uneven --output FOLDER"
    assert f"\nTo remove them: {command}\n" in shown


@pytest.mark.usefixtures("without_probes")
@pytest.mark.parametrize(
    ("importance", "columns"),
    [
        ("none", set()),
        ("auto", {"gradient", "taylor"}),
        ("gradient", {"gradient", "taylor"}),
        ("ablation", {"ablation"}),
        ("both", {"ablation", "gradient", "taylor"}),
    ],
)
def test_every_measure_of_importance_has_its_columns(place, tmp_path, importance, columns):
    options = ["--context", 64, "--tokens", 200, "--statistics", "entropy", "--no-chance", "--device", "cpu"]
    options += ["--importance", importance, "--save", tmp_path / "run"]
    shown = invoke("inspect", place / "llama", "--text", place / "text", *options).stdout
    assert ("Importance by " in shown) == bool(columns)
    both = re.search(r"Importance by ablation and gradient: next-token loss, on \d+ tokens\.", shown)
    assert (both is not None) == (importance == "both")
    least = re.findall(r"^Least important by ablation: L\dH\d ", shown, re.MULTILINE)
    assert len(least) == (importance in ("ablation", "both"))
    names = polyhead.inspection.load_inspection(tmp_path / "run").table.names
    assert set(names) & {"ablation", "gradient", "taylor"} == columns


def test_a_terminal_has_columns_that_fit_it_and_whole_findings(place, monkeypatch):
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setattr("rich.console.Console.width", 60)
    shown = invoke(
        "inspect", place / "llama", "--text", place / "text", "--context", 64, "--tokens", 400, "--importance",
        "none", "--no-chance", "--table", "--device", "cpu",
    ).stdout  # fmt: skip
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    table, _, rest = shown.partition("0 for every head: next_mass\n")
    rows = [line for line in table.splitlines() if re.match(r" *L\d+H\d+ ", line)]
    assert len(rows) > 2 * 8
    assert all(len(line) <= 60 for line in rows)
    assert "next_mass" not in table
    findings = rest.partition("Main findings\n")[2].splitlines()
    assert all(re.match(r"  • \S|    \S", line) and len(line) <= 60 for line in findings)
    assert any(line.startswith("    ") for line in findings)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "no/such/folder/here"), "no/such/folder/here"),
        (("inspect", "MODEL", "--text", "no-such-file.txt"), "no-such-file.txt"),
        (("inspect", "MODEL", "--text", "TEXT", "--context", "3"), "a context must have room"),
        (("inspect", "MODEL", "--text", "TEXT", "--layers", "one"), "must be layer numbers"),
        (("inspect", "MODEL", "--text", "TEXT", "--dtype", "int8"), "must be float32"),
        (("inspect", "MODEL", "--text", "TEXT", "--statistics", "magic"), "statistics must be among"),
        (("inspect", "--resume", "nowhere"), "the folder of a saved run"),
        (("inspect", "--save", "one", "--resume", "one"), "got save as well"),
        (("inspect", "MODEL", "--text", "TEXT", "--resume", "one"), "got model, text as well"),
        (("compare", "nowhere", "nowhere"), "a folder that `polyhead inspect --save` wrote"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(place, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    named = {"MODEL": str(place / "bert"), "TEXT": str(place / "text")}
    result = invoke(*(named.get(x, x) for x in arguments), code=2)
    assert words in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("without_probes")
def test_a_folder_that_holds_a_run_is_not_written_over(place, tmp_path):
    options = ["--text", place / "text", "--context", 96, "--device", "cpu", "--importance", "none", "--no-chance"]
    invoke("inspect", place / "bert", *options, "--save", tmp_path)
    before = (tmp_path / "observations.safetensors").read_bytes()
    assert "contains a run already" in invoke("inspect", place / "bert", *options, "--save", tmp_path, code=2).stderr
    assert (tmp_path / "observations.safetensors").read_bytes() == before
    invoke("inspect", "--resume", tmp_path)  # a run that is finished goes on with nothing, and shows it again
    assert (tmp_path / "observations.safetensors").read_bytes() == before


def test_threads_sleep_while_they_wait_unless_the_environment_says_otherwise(monkeypatch, place):
    policies = []

    def run(*arguments, **options):
        policies.append(os.environ["OMP_WAIT_POLICY"])
        raise OptionError("enough")

    monkeypatch.setattr("polyhead.workflows.inspecting.inspect_model", run)
    for given in (None, "ACTIVE"):
        monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
        if given is None:
            monkeypatch.delenv("OMP_WAIT_POLICY")
        invoke("inspect", place / "bert", "--text", place / "text", code=2)
    assert policies == ["PASSIVE", "ACTIVE"]


def test_the_help_tells_what_is_needed():
    shown = invoke("inspect", "--help").stdout
    for word in ("MODEL", "--text", "--context", "--save", "--resume", "--statistics", "--importance", "Ctrl-C"):
        assert word in shown
