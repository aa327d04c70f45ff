"""`polyhead syntax` and `polyhead shrink` with --resume: interrupted runs end with the same results."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from polyhead.cli import app
from polyhead.observation.calls import Call
from polyhead.surgery.selection.journal import NUMBERS, Journal
from tests.forked import stopped_when
from tests.inspection.small_models import model_folder, text_folder
from tests.sources.small_tokenizers import WORDPIECE, wordpiece

SMALL = Path(__file__).parents[1] / "sources" / "small.conllu"


def invoke(*arguments: object, code: int = 0):
    environment = {"COLUMNS": "250", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [str(x) for x in arguments], env=environment)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for name in ("bert", "llama"):
        model_folder(folder / name, name)
    text_folder(folder / "text")
    return folder


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    config = transformers.BertConfig(
        vocab_size=len(WORDPIECE), hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=37,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return folder


# ---- syntax


def syntax_of(reader: Path, output: Path, *more: object) -> list[object]:
    return ["syntax", reader, "--treebank", SMALL, "--minimum", 2, "--batch", 20, "--output", output, *more]


def test_a_syntax_table_stopped_at_every_attention_goes_on_bit_for_bit(reader, tmp_path, monkeypatch):
    whole = invoke(*syntax_of(reader, tmp_path / "whole.json", "--resume", tmp_path / "whole"))
    tell, calls = Call.notify, []

    def told(call: Call, attended: object) -> None:
        calls.append(call)
        tell(call, attended)
        if len(calls) == stop:
            raise error

    errors = (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError)
    codes = (130, 1, 1)
    for place in range(2 * 3):  # the layers of the first three batches
        stop, error = place + 1, errors[place % 3]
        calls.clear()
        folder, output = tmp_path / str(place), tmp_path / f"{place}.json"
        with monkeypatch.context() as patch:
            patch.setattr(Call, "notify", told)
            said = invoke(*syntax_of(reader, output, "--resume", folder), code=codes[place % 3]).stderr
        assert ("interrupted" if error is KeyboardInterrupt else "out of memory") in said
        assert (f"continue by repeating the command with --resume {folder}" in said) == (
            place >= 2
        )  # from the second batch on there is something
        assert not output.exists()
        again = invoke(*syntax_of(reader, output, "--resume", folder))
        assert again.stdout.replace(str(output), "") == whole.stdout.replace(str(tmp_path / "whole.json"), "")
        assert output.read_bytes() == (tmp_path / "whole.json").read_bytes()
        kept = "observations.safetensors"
        assert (folder / kept).read_bytes() == (tmp_path / "whole" / kept).read_bytes()


@pytest.mark.parametrize(
    ("change", "words"), [(["--batch", 30], "got batch 30 instead of 20"), (["--together", 2], "got another text")]
)
def test_a_syntax_table_goes_on_with_what_it_began_with(reader, tmp_path, change, words):
    invoke(*syntax_of(reader, tmp_path / "a.json", "--resume", tmp_path / "run"))
    before = (tmp_path / "run" / "observations.safetensors").read_bytes()
    said = invoke(*syntax_of(reader, tmp_path / "b.json", "--resume", tmp_path / "run", *change), code=2).stderr
    assert words in said
    assert (tmp_path / "run" / "observations.safetensors").read_bytes() == before
    other = tmp_path / "other"
    shutil.copytree(reader, other)
    weights = transformers.BertModel.from_pretrained(other)
    with torch.no_grad():
        weights.encoder.layer[1].attention.self.query.weight[0, 0] += 1
    weights.save_pretrained(other)
    assert (
        "got another model"
        in invoke(*syntax_of(other, tmp_path / "b.json", "--resume", tmp_path / "run"), code=2).stderr
    )


# ---- shrink


def shrink_of(place: Path, name: str, output: Path, *more: object) -> list[object]:
    options = ["--text", place / "text", "--context", "16", "--tokens", "500", "--device", "cpu"]
    options += ["--target", "25%-heads", "--form", "uneven"] if name == "bert" else ["--target", "50%-heads"]
    return ["shrink", place / name, *options, "--output", output, *more]


def shown_by(result, output: Path) -> str:
    return result.stdout.replace(str(output), "OUTPUT")


@pytest.mark.parametrize(("name", "more"), [("bert", ["--search", "--curve"]), ("llama", ["--curve"])])
def test_a_shrunk_model_stopped_again_and_again_is_the_same(place, tmp_path, monkeypatch, name, more):
    kind = {"bert": transformers.BertModel, "llama": transformers.LlamaModel}[name]
    plain = invoke(*shrink_of(place, name, tmp_path / "plain", *more))
    calls, forward = [0], kind.forward
    stops = [1, 2, 3, 4, 6, 9, 14, 22, 45, 110, 400]
    errors = (KeyboardInterrupt, MemoryError)

    def stopped(self, *positional, **keywords):
        calls[0] += 1
        if calls[0] == stops[number]:
            raise errors[number % 2]
        return forward(self, *positional, **keywords)

    times = 0
    for number in range(len(stops)):
        calls[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", stopped)
            arguments = shrink_of(place, name, tmp_path / "again", "--resume", tmp_path / "run", *more)
            result = CliRunner().invoke(app, [str(x) for x in arguments], env={"COLUMNS": "250", "NO_COLOR": "1"})
        if result.exit_code == 0:
            break
        assert result.exit_code == (130, 1)[number % 2], result.output
        assert not (tmp_path / "again").exists()
        assert not (tmp_path / "again.undo").exists()
        times += 1
    assert result.exit_code == 0, result.output
    assert times >= 6
    assert shown_by(result, tmp_path / "again") == shown_by(plain, tmp_path / "plain")
    assert len(list((tmp_path / "again.undo").iterdir())) == 1
    (file,) = (file.name for file in (tmp_path / "plain").glob("*.safetensors"))
    (record,) = (file.name for file in (tmp_path / "plain.undo").iterdir())
    for path in (file, f"../OUTPUT.undo/{record}"):
        one, other = (load_file(tmp_path / x / path.replace("OUTPUT", x)) for x in ("plain", "again"))
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key]), key


def test_a_shrinking_goes_on_with_what_it_began_with(place, tmp_path):
    run = ["--resume", tmp_path / "run", "--preview", "--curve"]
    first = invoke(*shrink_of(place, "bert", tmp_path / "o", *run))
    assert "Resume" not in first.stderr
    stored = "30 of 30 measurements of the curve, the distilled output projections"
    again = invoke(*shrink_of(place, "bert", tmp_path / "o", *run))
    assert again.stdout == first.stdout
    assert f"Resume: stored are the statistics of the text, {stored}" in " ".join(again.stderr.split())
    (tmp_path / "run" / "distilled.safetensors").unlink()
    numbers = json.loads((tmp_path / "run" / NUMBERS).read_text())
    del numbers["numbers"]["report measure"][12:]
    (tmp_path / "run" / NUMBERS).write_text(json.dumps(numbers))
    again = invoke(*shrink_of(place, "bert", tmp_path / "o", *run))
    assert again.stdout == first.stdout
    assert "12 of 30 measurements of the curve Measure" in " ".join(again.stderr.split())
    for change, words in (
        (["--tokens", "400"], "got another text (or other contexts of it), for "),
        (["--criterion", "plain"], "got criterion 'plain' instead of 'compensated', for "),
        (["--target", "50%-heads"], "got target '50% fewer heads' instead of '25% fewer heads', for "),
        (["--form", "uniform"], "BertModel, which has none"),
    ):
        said = invoke(*shrink_of(place, "bert", tmp_path / "o", *run, *change), code=2).stderr
        assert words in said
    said = invoke(*shrink_of(place, "bert", tmp_path / "o", *run[:-1]), code=2).stderr  # without --curve
    assert "got curve False instead of None" in said
    assert "got another model" in invoke(*shrink_of(place, "llama", tmp_path / "o", *run), code=2).stderr
    (tmp_path / "run" / NUMBERS).write_text("{")
    said = invoke(*shrink_of(place, "bert", tmp_path / "o", *run), code=2).stderr
    assert f"{NUMBERS} must be a file that a run wrote, got an unreadable one" in said
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    said = invoke(*shrink_of(place, "bert", tmp_path / "o", "--resume", foreign, "--preview"), code=2).stderr
    assert "with other files in it" in said
    assert [file.name for file in foreign.iterdir()] == ["notes.txt"]


def test_no_permission_is_read_from_a_kept_run(place, tmp_path):
    """Code and pickles are allowed by the command line alone, so nothing that is kept may speak of them."""
    invoke(*shrink_of(place, "bert", tmp_path / "o", "--resume", tmp_path / "run", "--preview", "--allow-pickle"))
    kept = json.loads((tmp_path / "run" / NUMBERS).read_text())
    assert not re.search("pickle|trust", json.dumps(kept["origin"]))


def test_numbers_are_replayed_in_their_order(tmp_path):
    (tmp_path / "run").mkdir()
    first = Journal(tmp_path / "run", {"text": "a"})
    third = 1 / 3
    assert first.numbers("loss", lambda: (third,)) == [third]
    assert first.numbers("other", lambda: (2.0, 3.0)) == [2.0, 3.0]
    with pytest.raises(KeyboardInterrupt):
        first.numbers("loss", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    again = Journal(tmp_path / "run", {"text": "a"})
    assert again.numbers("loss", lambda: pytest.fail("it is kept")) == [third]
    assert again.numbers("loss", lambda: (4.0,)) == [4.0]
    assert again.numbers("other", lambda: pytest.fail("it is kept")) == [2.0, 3.0]


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]


@pytest.fixture(scope="module")
def never_stopped(place, tmp_path_factory) -> str:
    folder, threads = tmp_path_factory.mktemp("fresh"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return invoke(*shrink_of(place, "bert", folder / "o", "--resume", folder / "run", "--preview")).stdout
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("sent", "code"), SIGNALS)
def test_a_signal_ends_a_shrinking_in_one_line_and_it_goes_on(place, tmp_path, never_stopped, sent, code):
    run = shrink_of(place, "bert", tmp_path / "o", "--resume", tmp_path / "run", "--preview")
    found, _, said = stopped_when(tmp_path / "run" / "gradient_statistics.safetensors", sent, run)
    assert found == code, said
    assert "Traceback" not in said
    if sent != signal.SIGKILL:
        assert said.splitlines()[-1].endswith(f"continue by repeating the command with --resume {tmp_path / 'run'}")
    assert invoke(*run).stdout == never_stopped


@pytest.fixture(scope="module")
def syntax_never_stopped(reader, tmp_path_factory) -> Path:
    folder, threads = tmp_path_factory.mktemp("fresh"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        invoke(*syntax_of(reader, folder / "b.json", "--resume", folder / "run"))
    finally:
        torch.set_num_threads(threads)
    return folder


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("sent", "code"), SIGNALS)
def test_a_signal_ends_a_syntax_table_in_one_line_and_it_goes_on(reader, tmp_path, syntax_never_stopped, sent, code):
    run, kept = tmp_path / "run", "observations.safetensors"
    found, _, said = stopped_when(run / kept, sent, syntax_of(reader, tmp_path / "a.json", "--resume", run))
    assert found == code, said
    assert "Traceback" not in said
    assert not (tmp_path / "a.json").exists()
    if sent != signal.SIGKILL:
        assert said.splitlines()[-1].endswith(f"continue by repeating the command with --resume {run}")
    invoke(*syntax_of(reader, tmp_path / "a.json", "--resume", run))
    assert (tmp_path / "a.json").read_bytes() == (syntax_never_stopped / "b.json").read_bytes()
    assert (run / kept).read_bytes() == (syntax_never_stopped / "run" / kept).read_bytes()
