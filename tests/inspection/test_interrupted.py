"""A run that is stopped anywhere in a batch goes on to what it would have been, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polyhead.errors import OptionError
from polyhead.inspection import Settings, inspection_files, load_inspection, running, save_inspection, text_pass
from polyhead.inspection.run_files import OBSERVATIONS
from polyhead.observation import read_facts
from polyhead.observation.calls import Call
from polyhead.observation.run_folder import lock_folder
from polyhead.workflows.inspecting import inspect_model
from polyhead.workflows.model_loading import load_model
from tests.forked import stopped_when
from tests.inspection.small_models import model_folder, text_folder

pytest.importorskip("pyarrow")
ERRORS = {
    "SIGINT": KeyboardInterrupt,
    "SIGTERM": SystemExit,
    "an error": RuntimeError,
    "no memory": MemoryError,
    "no memory on the device": torch.OutOfMemoryError,
}
CALLS = {"bert": 2, "llama": 2, "t5": 3}  # attention calls of a batch; a layer of T5 has three kinds


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    options = {"t5": {"layers": 1}}
    return {name: model_folder(tmp_path_factory.mktemp(name), name, **options.get(name, {})) for name in CALLS}


def settings_of(model: Path, text: Path, device: str = "cpu") -> Settings:
    return Settings(
        str(model), str(text), context=48, batch_tokens=200, tokens=500, importance="none", chance=False, device=device
    )  # four batches


def read(settings: Settings, folder: Path, *, loaded=None, resume: bool = False, save_seconds: float = 1e9):
    return inspect_model(settings, folder=folder, resume=resume, loaded=loaded, save_seconds=save_seconds)


def stop_at(monkeypatch, number: int, error: type[BaseException], *, after: bool) -> None:
    """Let the attention of this number raise, before it is counted or after."""
    tell, seen = Call.notify, []

    def told(call: Call, attended: object) -> None:
        if not any(collector.name == "maps" for collector in call.session.collectors):
            return tell(call, attended)  # not of the text: the matrices of the heads are found by watching as well
        seen.append(call)
        if len(seen) == number and not after:
            raise error
        tell(call, attended)
        if len(seen) == number:
            raise error
        return None

    monkeypatch.setattr(Call, "notify", told)


def interrupted(monkeypatch, settings, folder, loaded, number, error, *, after, save_seconds):
    with monkeypatch.context() as patch:
        stop_at(patch, number, error, after=after)
        # After Ctrl-C what was read is the result, unless nothing was.
        first = number <= CALLS[loaded.model.config.model_type]
        if error is KeyboardInterrupt and not first:
            read(settings, folder, loaded=loaded, save_seconds=save_seconds)
            return
        expected = OptionError if error is KeyboardInterrupt else error
        with pytest.raises(expected, match="interrupt before the first" if expected is OptionError else None):
            read(settings, folder, loaded=loaded, save_seconds=save_seconds)


def assert_same_file(one: Path, other: Path) -> None:
    tensors = [load_file(place / OBSERVATIONS) for place in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name
    assert (one / OBSERVATIONS).read_bytes() == (other / OBSERVATIONS).read_bytes()


@pytest.mark.usefixtures("without_probes")
@pytest.mark.parametrize(("name", "after"), [("bert", True), ("llama", True), ("t5", False)])
def test_stopped_at_every_attention_of_a_batch_it_goes_on_bit_for_bit(models, text, tmp_path, monkeypatch, name, after):
    settings, loaded = settings_of(models[name], text), load_model(str(models[name]), device="cpu")
    whole = read(settings, tmp_path / "whole", loaded=loaded)
    total = read_facts(tmp_path / "whole" / OBSERVATIONS)["batches"]
    assert total == 4
    errors = list(ERRORS.items())
    for place in (0, *range(CALLS[name], 2 * CALLS[name])):  # the first, and all of the second batch
        word, error = errors[(place + after) % len(errors)]
        folder, number = tmp_path / f"{place} {word}", place + 1
        interrupted(
            monkeypatch, settings, folder, loaded, number, error, after=after, save_seconds=0.0 if place % 2 else 1e9
        )
        batches = place // CALLS[name]
        if batches:
            assert read_facts(folder / OBSERVATIONS)["batches"] == batches
        again = read(settings, folder, loaded=loaded, resume=True)
        assert_same_file(folder, tmp_path / "whole")
        for column in whole.table.columns:
            assert torch.equal(again.table[column].nan_to_num(-1), whole.table[column].nan_to_num(-1)), column


@pytest.mark.gpu
@pytest.mark.usefixtures("without_probes")
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_on_a_gpu_stopped_at_every_attention_it_goes_on(models, text, tmp_path, monkeypatch, name):
    """Counts are the same; sums are within 1e-6, since atomic additions come in another order each time."""
    settings = settings_of(models[name], text, "cuda")
    loaded = load_model(str(models[name]), device="cuda")
    read(settings, tmp_path / "whole", loaded=loaded)
    whole = load_file(tmp_path / "whole" / OBSERVATIONS)
    for place in range(2 * CALLS[name]):
        error = list(ERRORS.values())[place % len(ERRORS)]
        folder = tmp_path / str(place)
        interrupted(monkeypatch, settings, folder, loaded, place + 1, error, after=True, save_seconds=0.0)
        read(settings, folder, loaded=loaded, resume=True)
        found = load_file(folder / OBSERVATIONS)
        assert found.keys() == whole.keys()
        for key, tensor in whole.items():
            if key.endswith(".count"):
                assert torch.equal(found[key], tensor), key
            torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-9, equal_nan=True, msg=key)


@pytest.mark.usefixtures("without_probes")
def test_every_layer_counts_the_same_tokens_after_an_interrupt(models, text, tmp_path, monkeypatch):
    settings, loaded = settings_of(models["bert"], text), load_model(str(models["bert"]), device="cpu")
    with monkeypatch.context() as patch:
        stop_at(patch, 4, KeyboardInterrupt, after=False)  # the second layer of the second batch
        found = read(settings, tmp_path, loaded=loaded)
    assert found.facts["interrupted"]
    assert len(set(found.table["tokens"].tolist())) == 1


# ---- signals


def command_of(model: Path, text: Path, folder: Path) -> list[str]:
    options = ["--context", "96", "--batch", "100", "--tokens", "400", "--importance", "none", "--no-chance"]
    saved = ["--device", "cpu", "--save", str(folder), "--save-seconds", "0"]
    return ["inspect", str(model), "--text", str(text), *options, *saved]


@pytest.mark.usefixtures("without_probes", "one_thread")
@pytest.mark.parametrize(
    ("name", "sent", "code", "words"),
    [
        ("bert", signal.SIGINT, 130, "Interrupted"),
        ("t5", signal.SIGTERM, 143, "polyhead inspect: terminated"),
    ],
)
def test_a_signal_at_any_moment_leaves_whole_batches(models, text, tmp_path, name, sent, code, words):
    folder, file = tmp_path / "stopped", tmp_path / "stopped" / OBSERVATIONS
    found, out, said = stopped_when(file, sent, command_of(models[name], text, folder))
    assert found == code, said
    assert words in out + said
    assert "Traceback" not in said
    if sent == signal.SIGTERM:
        assert said.splitlines()[-1].endswith(f"continue with: polyhead inspect --resume {folder}")
    counts = {name: x.amax() for name, x in load_file(file).items() if name.endswith("statistics.moments.count")}
    tokens = read_facts(file)["tokens"]
    assert len(counts) == CALLS[name]
    assert {int(x) for x in counts.values()} == {tokens}
    settings = Settings.from_dict(read_facts(file)["settings"])
    for place, resume in ((folder, True), (tmp_path / "whole", False)):
        read(settings, place, resume=resume)
    assert_same_file(folder, tmp_path / "whole")


# ---- what a run does not go on with


@pytest.fixture(scope="module")
def begun_once(models, text, tmp_path_factory) -> tuple[Settings, Path]:
    settings, folder = settings_of(models["bert"], text), tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running.InspectionRun, "probe", lambda *_: ({"roles": ()}, {}, {}))
        stop_at(patch, 4, KeyboardInterrupt, after=False)
        read(settings, folder)
    return settings, folder


@pytest.fixture
def begun(begun_once, tmp_path, without_probes) -> tuple[Settings, Path]:
    settings, folder = begun_once
    return settings, shutil.copytree(folder, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_tokens": 100}, "got batch_tokens 100 for 200"),
        ({"tokens": 70_000}, "got tokens 70000 for 500"),
        ({"context": 64}, "got context 64 for 48"),
        ({"layers": (1,)}, "got layers"),
        ({"statistics": ("entropy",)}, "got statistics"),
        ({"seed": 1}, "got seed 1 for 0"),
        ({"dtype": "float16"}, "got dtype float16 for None"),
    ],
)
def test_a_run_goes_on_with_its_own_settings_alone(begun, change, words):
    settings, folder = begun
    before = (folder / OBSERVATIONS).read_bytes()
    with pytest.raises(OptionError, match="resumed with the settings it was started with") as error:
        read(dataclasses.replace(settings, **change), folder, resume=True)
    assert words in str(error.value)
    assert (folder / OBSERVATIONS).read_bytes() == before


def test_a_run_goes_on_with_its_own_model_alone(begun, tmp_path):
    settings, folder = begun
    other = model_folder(tmp_path / "other", "bert", seed=1)
    with pytest.raises(OptionError, match="resumed with the model it was started with"):
        read(dataclasses.replace(settings, model=str(other)), folder, resume=True)
    config = Path(settings.model) / "config.json"
    before = config.read_text()
    try:
        config.write_text(json.dumps({**json.loads(before), "layer_norm_eps": 0.1}))
        with pytest.raises(OptionError, match="or another config"):
            read(settings, folder, resume=True)
    finally:
        config.write_text(before)


def test_a_run_goes_on_with_all_of_its_text_alone(begun, text, tmp_path):
    """Also the part that was not read yet: it decides which tokens are rare."""
    settings, folder = begun
    longer = text_folder(tmp_path / "longer")
    late = longer / "3.txt"
    late.write_text("w1 " + late.read_text())
    with pytest.raises(OptionError, match="resumed with the text"):
        read(dataclasses.replace(settings, text=str(longer)), folder, resume=True)


def test_a_run_of_an_older_version_does_not_go_on(begun, monkeypatch):
    settings, folder = begun
    facts = read_facts(folder / OBSERVATIONS)
    monkeypatch.setattr(text_pass, "read_facts", lambda _: {k: v for k, v in facts.items() if k != "model"})
    with pytest.raises(OptionError, match="may have counted a batch twice"):
        read(settings, folder, resume=True)


def test_one_process_at_a_time_keeps_a_run_in_a_folder(begun):
    settings, folder = begun
    with lock_folder(folder), pytest.raises(OptionError, match="another process is using"):
        read(settings, folder, resume=True)
    (folder / f".{OBSERVATIONS}.0123456789abcdef").write_bytes(b"half")  # of a process that was killed
    read(settings, folder, resume=True)
    assert not list(folder.glob(".*"))


def test_no_table_is_read_with_the_rest_of_an_earlier_one(begun, monkeypatch):
    """The interrupted run was saved; while the finished one is written over it, the process ends."""
    settings, folder = begun
    save_inspection(folder, read(settings, folder, resume=True))
    assert load_inspection(folder).facts["interrupted"] is False
    written = inspection_files.write_atomically

    def write(path: Path, content: bytes) -> None:
        if path.name == inspection_files.INSPECTION:
            raise KeyboardInterrupt
        written(path, content)

    monkeypatch.setattr(inspection_files, "write_atomically", write)
    with pytest.raises(KeyboardInterrupt):
        save_inspection(folder, read(settings, folder, resume=True))
    with pytest.raises(OptionError, match="whose run is not finished; continue it with --resume"):
        load_inspection(folder)
