"""Every command refuses invalid input with a message, before it reads weights and before it writes anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.app import app as benchmarks
from polyhead.cli import app
from polyhead.errors import OptionError
from polyhead.sources.models import check_layers
from polyhead.workflows import model_loading
from tests.inspection.small_models import model_folder, text_folder

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    model_folder(folder / "MODEL", "bert")
    text_folder(folder / "TEXT", documents=2)
    (folder / "FILE").write_text("a file")
    (folder / "FULL").mkdir()
    (folder / "FULL" / "mine.txt").write_text("mine")
    (folder / "RUN").mkdir()
    (folder / "RUN" / "observations.safetensors").write_bytes(b"a run")
    (folder / "OLD").mkdir()
    (folder / "OLD" / "inspection.json").write_text("{}")
    (folder / "bank.conllu").write_text("1\ta\ta\tX\t_\t_\t0\troot\t_\t_\n\n")
    return folder


@pytest.fixture
def place(made, monkeypatch) -> Path:
    """Files behind the names below; reading weights there fails."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(model_loading, "read_model", read)
    monkeypatch.chdir(made)
    return made


INSPECT = ["inspect", "MODEL", "--text", "TEXT"]
PRUNE = ["prune", "MODEL", "--share", "30%", "--output", "new", "--form", "uneven"]
PRUNE_HEADS = ["prune", "MODEL", "--heads", "L0H1", "--output", "new", "--form", "uneven"]
SHRINK = ["shrink", "MODEL", "--target", "30%-heads", "--text", "TEXT", "--output", "new", "--form", "uneven"]
CONVERT = ["convert", "MODEL", "--kv-heads", "2", "--output", "new", "--form", "uneven"]
MERGE = ["merge", "MODEL", "--heads", "L0H1+L0H2", "--output", "new", "--form", "uneven"]
SYNTAX = ["syntax", "MODEL", "--treebank", "bank.conllu"]
SURGERY = ["bench", "surgery", "--model", "MODEL", "--text", "TEXT", "--output", "points"]
EDITS = {"prune": PRUNE, "shrink": SHRINK, "convert": CONVERT, "merge": MERGE}
READING = {"prune": PRUNE, "shrink": SHRINK, "convert": CONVERT}

REFUSED: list[tuple[list[str], str]] = [
    ([*INSPECT, "--layers", "99"], "has layers 0 to 1, got layer 99"),
    ([*INSPECT, "--layers", "0,99"], "has layers 0 to 1, got layer 99"),
    ([*INSPECT, "--layers", "0,2,7"], "has layers 0 to 1, got layers 2, 7"),
    ([*INSPECT, "--layers", "-1"], "must be layer numbers"),
    ([*INSPECT, "--layers", ""], "must be layer numbers"),
    ([*INSPECT, "--tokens", "0"], "tokens must be at least 1, got 0"),
    ([*INSPECT, "--batch", "-5"], "batch_tokens must be at least 1, got -5"),
    ([*INSPECT, "--context", "0"], "context must be at least 1, got 0"),
    ([*INSPECT, "--seed", "-1"], "seed must be an integer of at least 0 and below 2^60, got -1"),
    ([*INSPECT, "--statistics", "magic"], "statistics must be among"),
    ([*INSPECT, "--statistics", "entropy,"], "statistics must be among"),
    ([*INSPECT, "--importance", "magic"], "importance must be one of auto, none, gradient, ablation, both"),
    ([*INSPECT, "--dtype", "int8"], "must be float32"),
    ([*INSPECT, "--device", "abacus"], "a device must be of the form"),
    ([*INSPECT, "--lang", "fr"], "must be one of en, zh"),
    ([*INSPECT, "--save", "FILE/x"], "is a file; choose another path"),
    ([*INSPECT, "--save", "FILE"], "--save must be a folder, got FILE"),
    ([*INSPECT, "--save", "RUN"], "contains a run already"),
    ([*INSPECT, "--save", "OLD"], "contains a run already"),
    ([*INSPECT, "--save-seconds", "-1"], "--save-seconds must be at least 0, got -1"),
    ([*INSPECT, "--save-seconds", "nan"], "--save-seconds must be at least 0"),
    ([*INSPECT, "--html", "TEXT"], "must be a file, got the folder TEXT"),
    ([*INSPECT, "--html", "none/page.html"], "there is no folder none"),
    ([*INSPECT, "--html", "FILE/page.html"], "FILE is a file"),
    (["inspect", "MODEL", "--text", "none.txt"], "there is no such file"),
    (["inspect", "FILE"], "a model must be a folder or a .gguf file, got the file FILE"),
    (["inspect", "--resume", "none"], "the folder of a saved run"),
    (["inspect", "--resume", "none", "--batch", "7"], "got batch as well"),
    ([*INSPECT, "--shard", "1/2"], "--shard needs --save DIR"),
    ([*INSPECT, "--shard", "0/2", "--save", "new"], "a part must be I/N with I from 1 to N"),
    ([*INSPECT, "--shard", "3/2", "--save", "new"], "a part must be I/N with I from 1 to N"),
    ([*INSPECT, "--shard", "1/2", "--save", "new", "--html", "page.html"], "merge the shards first"),
    ([*INSPECT, "--shard", "1/2", "--save", "new", "--table"], "merge the shards first"),
    ([*INSPECT, "--shard", "1/2", "--save", "RUN"], "contains a run already"),
    (["inspect", "MODEL", "--shard", "1/2", "--save", "new", "--text", "-"], "got - for standard input"),
    ([*INSPECT, "--worker-timeout", "0"], "--worker-timeout must be greater than 0, got 0"),
    (["inspect", "--resume", "none", "--shard", "1/2"], "got shard as well"),
    ([*INSPECT, "--ray-workers", "2"], "--ray-workers needs --ray, got --ray-workers 2 alone"),
    ([*INSPECT, "--ray", "local", "--ray-workers", "0"], "--ray-workers must be greater than 0, got 0"),
    ([*INSPECT, "--ray", "local", "--shard", "1/2", "--save", "new"], "got --shard 1/2 as well; omit one"),
    (["merge-runs"], "RUN... is required, got none"),
    (["merge-runs", "RUN"], "--output is required, got none"),
    (["merge-runs", "none", "--output", "new"], "a shard is a folder that"),
    (["merge-runs", "RUN", "--output", "FILE"], "--output must be a folder, got FILE"),
    (["merge-runs", "RUN", "--output", "OLD"], "--output must be a new run, got OLD"),
    (["merge-runs", "RUN", "--output", "new"], "observations must be a safetensors file, got RUN"),
    (["merge-runs", "RUN", "--output", "new", "--lang", "fr"], "must be one of en, zh"),
    (["report", "none"], "an inspection is a folder"),
    (["report", "none", "--lang", "fr"], "must be one of en, zh"),
    (["report", "none", "--output", "none/x.html"], "there is no folder none"),
    (["view", "MODEL", "--port", "70000"], "must be from 0 to 65535, got 70000"),
    (["view", "MODEL", "--port", "-1"], "must be from 0 to 65535"),
    (["view", "MODEL", "--context", "0"], "--context must be greater than 0, got 0"),
    (["view", "MODEL", "--cache", "-1"], "must be at least 0 MiB"),
    (["view", "MODEL", "--text", "none.txt"], "--text must be a UTF-8 text file, got none.txt"),
    (["view", "MODEL", "--lang", "fr"], "must be one of en, zh"),
    (["view", "MODEL", "--dtype", "int8"], "must be float32"),
    (["view", "MODEL", "--device", "abacus"], "a device must be of the form"),
    (["compare", "none", "none"], "an inspection is a folder"),
    (["compare", "none", "none", "--most", "0"], "must be at least 1, got 0"),
    (["syntax", "MODEL"], "required: a file in CoNLL-U format"),
    (["syntax", "MODEL", "--treebank", "none.conllu"], "none.conllu"),
    ([*SYNTAX, "--sentences", "0"], "--sentences must be greater than or equal to 1, got '0'"),
    ([*SYNTAX, "--together", "0"], "--together must be"),
    ([*SYNTAX, "--batch", "0"], "--batch must be"),
    ([*SYNTAX, "--minimum", "0"], "--minimum must be"),
    ([*SYNTAX, "--seed", "-1"], "--seed must be"),
    ([*SYNTAX, "--device", "abacus"], "a device must be of the form"),
    ([*SYNTAX, "--output", "table.txt"], "must end in .json or .parquet"),
    ([*SYNTAX, "--output", "none/table.json"], "there is no folder none"),
    ([*SYNTAX, "--output", "FILE/table.json"], "FILE is a file"),
    ([*SYNTAX, "--resume", "FILE"], "got FILE, which is a file"),
    ([*SYNTAX, "--resume", "FILE/x"], "FILE is a file"),
    (["prune", "MODEL", "--output", "new"], "got both or neither"),
    (["prune", "MODEL", "--output", "new", "--heads", "L0H1", "--share", "30%"], "got both or neither"),
    (["prune", "MODEL", "--output", "new", "--heads", "L0H1,x"], "'x'"),
    (["prune", "MODEL", "--output", "new", "--heads", "L9H1"], "has layers 0 to 1, got layer 9"),
    (["prune", "MODEL", "--output", "new", "--share", "0%"], "a percentage between 0% and 100%"),
    (["prune", "MODEL", "--output", "new", "--share", "100%"], "a percentage between 0% and 100%"),
    ([*PRUNE, "--criterion", "magic"], "criterion must be one of"),
    ([*PRUNE_HEADS, "--criterion", "plain"], "a criterion selects the heads of a share, got 'plain' and heads by name"),
    ([*PRUNE_HEADS, "--seed", "1"], "seed is that of the criterion 'random', got seed 1 with 'compensated'"),
    (["merge", "MODEL", "--heads", "L0H1", "--output", "new"], "two or more heads of one layer"),
    (["merge", "MODEL", "--heads", "L0H1+L1H1", "--output", "new"], "two or more heads of one layer"),
    (["merge", "MODEL", "--heads", "L0H1+L0H1", "--output", "new"], "a head may occur only once"),
    (["merge", "MODEL", "--heads", "L7H1+L7H2", "--output", "new"], "has layers 0 to 1, got layer 7"),
    (["convert", "MODEL", "--kv-heads", "0", "--output", "new"], "kv_heads must be greater than 0, got 0"),
    ([*CONVERT, "--grouping", "magic"], "grouping must be one of"),
    ([*CONVERT, "--rounds", "-1"], "rounds must be at least 0, got -1"),
    (["shrink", "MODEL", "--target", "30%-heads", "--output", "new"], "text is required"),
    (["shrink", "MODEL", "--target", "half", "--output", "new", "--text", "TEXT"], "a target must be a share of heads"),
    (["shrink", "MODEL", "--target", "0.5x-cache", "--output", "new", "--text", "TEXT"], "a target must be a share"),
    ([*SHRINK, "--metric", "magic"], "metric must be perplexity or fidelity"),
    ([*SHRINK, "--criterion", "magic"], "criterion must be one of"),
    ([*SHRINK, "--measured"], "a measured target must be a speed, such as"),
    (
        ["shrink", "MODEL", "--target", "1.2x-faster", "--text", "TEXT", "--preview", "--measured", "--search"],
        "omit one of them",
    ),
    ([*SHRINK, "--form", "uniform", "--criterion", "plain"], "the uniform form needs the criterion compensated"),
    ([*PRUNE, "--form", "uniform", "--criterion", "plain"], "the uniform form needs the criterion compensated"),
    (
        ["prune", "MODEL", "--output", "new", "--heads", "L0H1"],
        "--form padded (loads anywhere, saves nothing) or --form",
    ),
    (["undo", "MODEL", "--output", "new", "--form", "magic"], "form must be one of uniform"),
    ([*SHRINK, "--resume", "FILE/x"], "FILE is a file"),
    (["undo", "MODEL", "--output", "new"], "without one"),
    (["undo", "none", "--output", "new"], "undo needs the folder of an edited model, got none"),
    (["undo", "MODEL", "--output", "FULL"], "which holds files"),
    (["plan", "llama3.1-8b", "--output", "none/x.html"], "a file in an existing folder"),
    (["plan", "llama3.1-8b", "--output", "FILE/x.html"], "a file in an existing folder"),
    (["choose", "--d-model", "512", "--most", "0"], "--most must be at least 1, got 0"),
    (["bench", "statistics", "--quick", "--output", "none/x.json"], "there is no folder none"),
    (["bench", "inspection", "--quick", "--output", "FILE/x.json"], "FILE is a file"),
    (["inspct"], "there is no command inspct; did you mean inspect?"),
    (["abacus"], "there is no command abacus; use inspect, report,"),
    (["--versoin"], "there is no option --versoin; did you mean --version?"),
    (["prune"], "MODEL is required, got none; see polyhead prune --help"),
    (["prune", "MODEL", "more"], "unexpected extra argument"),
    (["shrink", "MODEL"], "--target is required, got none; see polyhead shrink --help"),
    ([*INSPECT, "--tokns", "5"], "there is no option --tokns; did you mean --tokens?"),
    ([*INSPECT, "--zzz"], "there is no option --zzz; see polyhead inspect --help"),
    ([*INSPECT, "--tokens", "x"], "--tokens must be a valid integer, got 'x'; see polyhead inspect --help"),
    ([*INSPECT, "--tokens"], "option '--tokens' requires an argument; see polyhead inspect --help"),
    (["bench", "layrs"], "there is no command layrs; did you mean layers?"),
    (["bench", "layers", "--only", "magic"], "--only must be one of layer"),
    (["bench", "layers", "--shapes", "3"], "--shapes: a shape is BATCHxTOKENSxWIDTHxHEADS"),
    (["bench", "layers", "--seed", "x"], "--seed must be a valid integer, got 'x'; see python -m benchmarks layers"),
    (["bench", "plan", "--machine", "abacus"], "machine must be one of"),
    (["bench", "surgery", "--model", "MODEL"], "got no --text or no --output"),
    ([*SURGERY, "--part", "magic"], "a part is tuned or curves"),
    ([*SURGERY, "--shares", "120%"], "over 0% and under 100%"),
    ([*SURGERY, "--share", "3/2"], "a part must be I/N"),
    ([*SURGERY, "--rows", "0"], "--rows must be greater than 0"),
    (["bench", "surgery", "--model", "MODEL", "--text", "TEXT", "--output", "none/x"], "there is no folder none"),
]
REFUSED += [
    ([*command, *more], words)
    for command in READING.values()
    for more, words in (
        (["--tokens", "0"], "--tokens must be greater than 0, got 0"),
        (["--context", "-3"], "--context must be greater than 0, got -3"),
        (["--text", "none.txt"], "there is no such file"),
    )
]
REFUSED += [
    ([*command, *more], words)
    for command in EDITS.values()
    for more, words in (
        (["--form", "magic"], "must be one of uniform"),
        (["--form", "uniform"], "or --form uneven (smaller, loads with polyhead.load)"),  # it is a BERT
        (["--output", "FULL"], "which holds files"),
        (["--output", "FILE"], "got FILE, which is a file"),
        (["--output", "FILE/x"], "FILE is a file"),
        (["--device", "abacus"], "a device must be of the form"),
        (["--dtype", "int8"], "must be float32"),
    )
]


def refused(arguments: list[str], words: str) -> None:
    program = app
    if arguments[:1] == ["bench"]:
        program, arguments = benchmarks, arguments[1:]
    result = CliRunner().invoke(program, arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    name = "polyhead" if program is app else "python -m benchmarks"
    *progress, line = result.stderr.splitlines()
    assert line.startswith(tuple(f"{name}{command}: " for command in ("", *(f" {x}" for x in arguments[:1]))))
    assert words in line
    assert not any("Usage" in before or "Traceback" in before for before in progress)


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[" ".join(x) for x, _ in REFUSED])
def test_it_is_refused_before_a_weight_is_read(place, arguments, words):
    before = sorted(path.name for path in place.rglob("*"))
    refused(arguments, words)
    assert sorted(path.name for path in place.rglob("*")) == before


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 0)() == 0, reason="the superuser may write anywhere")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*INSPECT, "--save", "closed/run"], "closed is not writable"),
        ([*INSPECT, "--html", "closed/page.html"], "is not writable"),
        ([*SYNTAX, "--output", "closed/table.json"], "is not writable"),
        ([*PRUNE, "--output", "closed/new"], "closed is not writable"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_refused_first(place, arguments, words):
    (place / "closed").mkdir(exist_ok=True)
    (place / "closed").chmod(0o500)
    try:
        refused(arguments, words)
    finally:
        (place / "closed").chmod(0o700)
        (place / "closed").rmdir()


def test_weights_are_read_where_nothing_is_wrong(place):
    """So that the tests above can fail."""
    for arguments in ([*INSPECT, "--layers", "1"], PRUNE, SHRINK, CONVERT, MERGE, [*SYNTAX, "--output", "table.json"]):
        result = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
        assert "weights were read" in f"{result.exception} {result.output}", (arguments, result.output)


def test_layers_of_an_encoder_and_a_decoder_are_counted_by_the_longer(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "t5", "num_layers": 2, "num_decoder_layers": 5, "d_model": 8, "num_heads": 2})
    )
    check_layers(tmp_path, [4])
    with pytest.raises(OptionError, match="layers 0 to 4, got layer 5"):
        check_layers(tmp_path, [1, 5])
