"""Edit records in files: undone in another process, written atomically, and verified."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyhead.errors import CheckpointError, OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.surgery import (
    EditRecord,
    GroupQueries,
    MergeHeads,
    PruneHeads,
    ReorderHeads,
    apply,
    fingerprint,
    join_records,
    take_shape,
    undo,
)
from tests.forked import Bystander
from tests.surgery.gated import FAMILIES, build, decoder


def undone(folder: Path, name: str) -> str:
    model = build(FAMILIES[name], seed=5, dtype=torch.bfloat16)  # other weights: what matters comes from the files
    record = EditRecord.load(folder / f"{name}.record.safetensors")
    take_shape(model, record)
    missing, unexpected = model.load_state_dict(load_file(folder / f"{name}.safetensors"), strict=False)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}  # tied to the embedding
    undo(model, record)
    return fingerprint(model)


def test_edits_are_undone_in_another_process_from_the_shrunk_checkpoint(tmp_path):
    built = {name: build(FAMILIES[name], dtype=torch.bfloat16) for name in ("gpt2", "llama")}
    elsewhere, expected = Bystander(), {}
    for name, model in built.items():
        expected[name] = fingerprint(model)
        whole = dict(model.named_parameters())
        record = apply(model, [PruneHeads(0, (1,)), ReorderHeads(0, (2, 0, 1)), PruneHeads(1, (0, 1))])
        path = tmp_path / f"{name}.record.safetensors"
        record.save(path)
        save_file({name: x.detach() for name, x in model.named_parameters()}, tmp_path / f"{name}.safetensors")
        touched = sum(whole[name].nbytes for name, p in model.named_parameters() if p is not whole[name])
        assert record.num_bytes == touched
        assert path.stat().st_size < touched + 16_384  # the header, and nothing twice
    assert {name: elsewhere.run(undone, tmp_path, name) for name in expected} == expected
    elsewhere.end()


def test_a_record_is_the_same_after_a_file(tmp_path):
    layer = MultiHeadAttention(42, 6, head_dim=5)
    record = apply(layer, [PruneHeads(0, (1,)), GroupQueries(0, ((0, 2), (1,), (3, 4)))])
    record.save(tmp_path / "record.safetensors")
    found = EditRecord.load(tmp_path / "record.safetensors")
    for name in ("edits", "before", "after", "layers", "config", "shapes"):
        assert getattr(found, name) == getattr(record, name)
    assert found.layers[0].after.key_heads == (0, 1, 0, 2, 2)
    assert all(torch.equal(found.tensors[name], x) for name, x in record.tensors.items())
    undo(layer, found)
    assert fingerprint(layer) == record.before


def test_a_record_of_tensors_that_are_not_contiguous_is_saved(tmp_path):
    layer = MultiHeadAttention(24, 4)
    layer.q_proj.weight = torch.nn.Parameter(torch.randn(24, 24).t())
    record = apply(layer, [PruneHeads(0, (1,))])
    assert not record.tensors["q_proj.weight"].is_contiguous()
    record.save(tmp_path / "record.safetensors")
    undo(layer, EditRecord.load(tmp_path / "record.safetensors"))
    assert fingerprint(layer) == record.before


def test_a_damaged_record_is_refused_and_the_model_stays_edited(tmp_path):
    layer = MultiHeadAttention(42, 6)
    record = apply(layer, [PruneHeads(0, (1,))])
    path = tmp_path / "record.safetensors"
    record.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(CheckpointError, match="a whole safetensors file, got"):
        EditRecord.load(path)
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(CheckpointError, match="the record is damaged; the model is unchanged"):
        undo(layer, EditRecord.load(path))
    assert fingerprint(layer) == record.after
    assert layer.layout.num_heads == 5
    x = torch.randn(2, 3, 42)
    assert layer._of_self.is_one_product(x)
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"that EditRecord\.save wrote, got .*"):
        EditRecord.load(path)
    with pytest.raises(CheckpointError, match=r"a whole safetensors file, got .*missing"):
        EditRecord.load(tmp_path / "missing.safetensors")


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    layer, path = MultiHeadAttention(42, 6), tmp_path / "record.safetensors"
    first = apply(layer, [PruneHeads(0, (1,))])
    first.save(path)
    second = apply(layer, [PruneHeads(0, (1,))])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        second.save(path)
    assert [x.name for x in tmp_path.iterdir()] == ["record.safetensors"]
    assert EditRecord.load(path).after == first.after


def test_records_are_undone_from_the_last_to_the_first():
    layer = MultiHeadAttention(42, 6)
    first, second = apply(layer, [PruneHeads(0, (1,))]), apply(layer, [PruneHeads(0, (0,))])
    with pytest.raises(CheckpointError, match="num_heads=5"):
        undo(layer, first)
    undo(layer, second)
    undo(layer, first)
    assert fingerprint(layer) == first.before
    with pytest.raises(CheckpointError, match="first, with take_shape"):
        undo(layer, first)


def test_a_shape_is_taken_by_the_model_it_was_made_for():
    layer = MultiHeadAttention(42, 6)
    record = apply(layer, [PruneHeads(0, (1, 2))])
    with pytest.raises(CheckpointError, match=r"num_heads=6.*got .*num_heads=3"):
        take_shape(MultiHeadAttention(42, 3), record)
    fresh = MultiHeadAttention(42, 6)
    take_shape(fresh, record)
    fresh.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 42)
    assert torch.equal(fresh(x).output, layer(x).output)


def test_records_of_edits_that_followed_each_other_are_undone_as_one(tmp_path):
    model = decoder(6, 3, 48, 8, dtype=torch.float32)
    before, config = fingerprint(model), model.config.to_dict()
    first = apply(model, [PruneHeads(layer, (0, 1)) for layer in range(2)])
    second = apply(model, [MergeHeads(0, (0, 1)), PruneHeads(1, (3,))])
    third = apply(model, [PruneHeads(0, (0,))])
    with pytest.raises(OptionError, match=f"ended with the model of fingerprint {first.after}"):
        join_records(first, third)
    both = join_records(join_records(first, second), third)
    both.save(tmp_path / "record.safetensors")
    undo(model, EditRecord.load(tmp_path / "record.safetensors"))
    assert fingerprint(model) == before
    assert model.config.to_dict() == config
