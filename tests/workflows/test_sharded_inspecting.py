"""Shards of a text, read by different processes and merged, are the run of one process."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from polyhead.errors import DeviceError, OptionError
from polyhead.inspection import load_inspection
from polyhead.inspection.run_files import OBSERVATIONS, check_saved
from polyhead.inspection.shard_files import checked_shards
from polyhead.observation import read_facts
from polyhead.observation.saving import _KEY
from polyhead.observation.session import Call
from polyhead.parallel.workers import Workers
from polyhead.sources import LoadedModel, Shard
from polyhead.workflows.inspecting import inspect_model
from polyhead.workflows.model_loading import load_model
from polyhead.workflows.sharded_inspecting import inspect_shard, merge_runs
from tests.inspection.small_models import model_folder, text_folder
from tests.workflows.merged_runs import assert_same_inspection, assert_same_observations, settings_of

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
COUNT = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for name in ("bert", "llama"):
        model_folder(folder / name, name)
    text_folder(folder / "text")
    return folder


@pytest.fixture(scope="module")
def loaded(place) -> LoadedModel:
    return load_model(str(place / "bert"), device="cpu")


@pytest.fixture(scope="module")
def shards(place, loaded, tmp_path_factory) -> list[Path]:
    """The shards of a run of BERT."""
    folder, settings = tmp_path_factory.mktemp("shards"), settings_of(place / "bert", place / "text")
    for index in range(COUNT):
        inspect_shard(settings, Shard(index, COUNT), folder / str(index), loaded=loaded)
    return [folder / str(index) for index in range(COUNT)]


@pytest.mark.parametrize(("name", "count"), [("bert", 2), ("llama", 11)])
def test_merged_shards_are_the_run_of_one_process(place, tmp_path, name, count):
    """Of 11 shards, some have no batch."""
    settings, loaded = settings_of(place / name, place / "text"), load_model(str(place / name), device="cpu")
    whole = inspect_model(settings, loaded=loaded, folder=tmp_path / "whole")
    readings = [
        inspect_shard(settings, Shard(index, count), tmp_path / str(index), loaded=loaded) for index in range(count)
    ]
    assert any(not reading.tokens for reading in readings) == (count == 11)
    assert sum(reading.tokens for reading in readings) == readings[0].of_text == whole.facts["tokens"]
    assert all(reading.complete and reading.tokens == reading.total for reading in readings)
    folders = [tmp_path / str(index) for index in reversed(range(count))]
    merged = merge_runs(folders, tmp_path / "merged", loaded=loaded)
    assert_same_observations(tmp_path / "merged", tmp_path / "whole")
    assert_same_inspection(merged, whole)
    assert_same_inspection(load_inspection(tmp_path / "merged"), load_inspection(tmp_path / "whole"))


def test_shards_of_one_layer_with_a_head_of_nan_and_a_text_with_nulls(place, tmp_path):
    loaded = load_model(str(place / "llama"), device="cpu")
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.q_proj.weight[:6] = torch.nan  # the first of four heads
    (tmp_path / "text").mkdir()
    words = [file.read_text() for file in sorted((place / "text").iterdir())]
    table = pyarrow.table({"content": [None, words[0], "", *words[1:3], None]})
    parquet.write_table(table, tmp_path / "text" / "a.parquet")
    with gzip.open(tmp_path / "text" / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"content": text}) + "\n" for text in [None, " ", *words[3:]])
    settings = replace(settings_of(place / "llama", tmp_path / "text"), layers=(1,), field="content")
    whole = inspect_model(settings, loaded=loaded, folder=tmp_path / "whole")
    assert whole.table["entropy"].isnan().tolist() == [True, False, False, False]
    for index in range(2):
        inspect_shard(settings, Shard(index, 2), tmp_path / str(index), loaded=loaded)
    merged = merge_runs([tmp_path / "0", tmp_path / "1"], tmp_path / "merged", loaded=loaded)
    assert_same_observations(tmp_path / "merged", tmp_path / "whole")
    assert_same_inspection(merged, whole)


def test_a_merged_run_is_resumed_as_any_other(place, loaded, shards, tmp_path):
    merged = merge_runs(shards, tmp_path / "merged", loaded=loaded)
    again = inspect_model(merged.settings, loaded=loaded, folder=tmp_path / "merged", resume=True)
    assert_same_inspection(again, merged)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_stopped_shard_continues_bit_for_bit_and_is_not_merged_before(
    place, loaded, shards, tmp_path, monkeypatch, error
):
    settings, folder, calls = settings_of(place / "bert", place / "text"), tmp_path / "1", []
    notify = Call.notify

    def stop(call: Call, attended: object) -> None:
        notify(call, attended)
        calls.append(any(collector.name == "maps" for collector in call.session.collectors))
        if sum(calls) == 5:  # in the third batch, whose first layer is counted
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Call, "notify", stop)
        if error is KeyboardInterrupt:
            assert not inspect_shard(settings, Shard(1, COUNT), folder, loaded=loaded).complete
        else:
            with pytest.raises(error):
                inspect_shard(settings, Shard(1, COUNT), folder, loaded=loaded)
    parts = [shards[0], folder, shards[2]]
    with pytest.raises(OptionError, match=f"must be complete, got a part of {folder}; .*inspect --resume {folder}"):
        merge_runs(parts, tmp_path / "merged", loaded=loaded)
    with pytest.raises(OptionError, match="merge all shards with `polyhead merge-runs`"):
        check_saved(folder)
    with pytest.raises(OptionError, match="got shard 1/3 for 2/3"):
        inspect_shard(settings, Shard(0, COUNT), folder, loaded=loaded, resume=True)
    inspect_shard(settings, Shard(1, COUNT), folder, loaded=loaded, resume=True)
    assert (folder / OBSERVATIONS).read_bytes() == (shards[1] / OBSERVATIONS).read_bytes()
    again = inspect_shard(settings, Shard(1, COUNT), folder, loaded=loaded, resume=True)  # nothing is left to read
    assert again.complete
    assert (folder / OBSERVATIONS).read_bytes() == (shards[1] / OBSERVATIONS).read_bytes()


def changed(folder: Path, target: Path, **facts: object) -> Path:
    """Copy a shard with other facts."""
    shutil.copytree(folder, target)
    with safe_open(target / OBSERVATIONS, framework="pt") as file:
        header = json.loads(file.metadata()[_KEY])
    header["facts"] = {**header["facts"], **facts}
    save_file(load_file(target / OBSERVATIONS), target / OBSERVATIONS, {_KEY: json.dumps(header)})
    return target


def test_shards_that_are_not_exactly_one_run_are_refused(place, loaded, shards, tmp_path):
    first, second, third = shards
    facts = read_facts(first / OBSERVATIONS)
    settings = facts["settings"]
    whole = tmp_path / "whole"
    inspect_model(settings_of(place / "bert", place / "text"), loaded=loaded, folder=whole)
    other = {
        "model": changed(second, tmp_path / "model", model="0" * 32),
        "text": changed(second, tmp_path / "text", text="0" * 32),
        "seed": changed(second, tmp_path / "seed", settings={**settings, "seed": 7}),
        "version": changed(second, tmp_path / "version", versions={**facts["versions"], "torch": "1.0"}),
        "count": changed(second, tmp_path / "count", shard=[1, 4]),
        "many": changed(second, tmp_path / "many", shard=[1, 10**12]),
        "word": changed(second, tmp_path / "word", shard="2/3"),
        "settings": changed(second, tmp_path / "settings", settings={"tokens": "many"}),
        "tokens": changed(second, tmp_path / "tokens", tokens=None),
    }
    cases: list[tuple[list[Path], str]] = [
        ([], "needs the folders of all shards of a run, got none"),
        ([first, third], "needs all 3 shards, got no shard 2/3"),
        ([third], "needs all 3 shards, got no shard 1/3, 2/3$"),
        ([other["many"]], r"needs all 10{12} shards, got no shard 1/10{12}, 3/10{12}, .* and 999999999967 more$"),
        ([first, second, third, second], f"got shard 2/3 in {second} and {second}"),
        ([first, other["model"], third], r"the same model \(weights and config\), got another in"),
        ([first, other["text"], third], "the same text, tokenizer and contexts, got another in"),
        ([first, other["seed"], third], "the same seed, got 0 in .* and 7 in"),
        ([first, other["version"], third], "the same version of torch, got .* and '1.0' in"),
        ([first, other["count"], third], "of one run, got shard 1/3 in .* and 2/4 in"),
        ([first, other["word"], third], "must record their shard, got"),
        ([first, other["settings"], third], f"as `polyhead inspect --shard` wrote it, got {other['settings']}"),
        ([first, other["tokens"], third], f"as `polyhead inspect --shard` wrote it, got {other['tokens']}"),
        ([whole], "merges shards, got .*, a run over the whole text"),
        ([place / "text"], f"without {OBSERVATIONS}"),
    ]
    for folders, words in cases:
        with pytest.raises(OptionError, match=words):
            merge_runs(folders, tmp_path / "merged", loaded=loaded)
    with pytest.raises(OptionError, match="--output must be a new run, got"):
        merge_runs(shards, whole, loaded=loaded)
    assert not (tmp_path / "merged").exists()


def test_shards_on_different_gpus_are_of_one_run(shards, tmp_path):
    """The observations name the device; here it is only compared."""
    settings = read_facts(shards[0] / OBSERVATIONS)["settings"]
    on_gpus = [
        changed(shard, tmp_path / str(index), settings={**settings, "device": f"cuda:{index}", "text": f"/{index}"})
        for index, shard in enumerate(shards)
    ]
    assert [facts["settings"]["device"] for _, facts in checked_shards(on_gpus)] == ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(OptionError, match=r"the same device, got 'cuda' in .* and 'cpu' in"):
        checked_shards([*on_gpus[:2], shards[2]])


def test_each_rank_takes_the_gpu_of_its_local_rank(monkeypatch):
    from polyhead.workflows.sharded_inspecting import _choose_device

    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for device, local_rank in (("cuda", 1), ("cuda:0", 1), ("cpu", 5)):
        _choose_device(device, Workers(dist.HashStore(), 3, 6, local_rank=local_rank))
    assert taken == [1]
    with pytest.raises(DeviceError, match="got local rank 2 for 2 GPUs; start fewer processes per node"):
        _choose_device("cuda", Workers(dist.HashStore(), 3, 6, local_rank=2))


def test_shards_are_merged_with_their_own_model_and_text_alone(place, loaded, shards, tmp_path):
    other = load_model(str(place / "bert"), device="cpu")
    with torch.no_grad():
        other.model.encoder.layer[1].attention.self.query.weight[0, 0] += 1
    with pytest.raises(OptionError, match=r"got another model: .* has changed since"):
        merge_runs(shards, tmp_path / "merged", loaded=other)
    longer = [file.read_text() + " w1 w2" for file in sorted((place / "text").iterdir())]
    with pytest.raises(OptionError, match="got another text"):
        merge_runs(shards, tmp_path / "merged", loaded=loaded, text=longer)
    assert not (tmp_path / "merged").exists()


def test_another_version_neither_continues_a_shard_nor_merges_it(place, loaded, shards, tmp_path):
    facts = read_facts(shards[0] / OBSERVATIONS)
    older = {"versions": {**facts["versions"], "torch": "1.0"}}
    all_older = [changed(shard, tmp_path / str(index), **older) for index, shard in enumerate(shards)]
    with pytest.raises(OptionError, match=r"by the version of torch that read them, 1.0, got 2"):
        merge_runs(all_older, tmp_path / "merged", loaded=loaded)
    settings = settings_of(place / "bert", place / "text")
    part = changed(shards[0], tmp_path / "part", complete=False, **older)
    with pytest.raises(
        OptionError, match=r"the versions it was started with, got polyhead .*, torch 2.* torch 1.0; inst"
    ):
        inspect_shard(settings, Shard(0, COUNT), part, loaded=loaded, resume=True)
    assert inspect_shard(settings, Shard(0, COUNT), all_older[0], loaded=loaded, resume=True).complete  # reads nothing


def test_counts_of_a_damaged_shard_do_not_pass(loaded, shards, tmp_path):
    facts = read_facts(shards[1] / OBSERVATIONS)
    damaged = changed(shards[1], tmp_path / "damaged", tokens=facts["tokens"] - 1)
    with pytest.raises(OptionError, match=r"must have all .* tokens of the text, got"):
        merge_runs([shards[0], damaged, shards[2]], tmp_path / "merged", loaded=loaded)
