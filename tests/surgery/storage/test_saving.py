"""Saving: the requested form or the reason why it is impossible, all files of a model, atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polyhead.errors import CheckpointError, OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.sources.load_errors import quiet
from polyhead.surgery import (
    AddHeads,
    GroupQueries,
    PruneHeads,
    ReorderHeads,
    SideFiles,
    apply,
    find_layers,
    fingerprint,
    load,
    load_record,
    save,
    undo,
)
from polyhead.surgery.storage import folders, saving
from tests.inspection.small_models import tokenizer
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build, decoder, result_of


def llama(heads: int = 6, kv_heads: int = 3, hidden: int = 48, name: str = "llama"):
    return decoder(heads, kv_heads, hidden, 8, name=name, dtype=torch.float32)


def native(model, folder: Path):
    with quiet(progress=False):
        return type(model).from_pretrained(folder, dtype="auto").eval()


UNEDITED = [("uneven", name) for name in ("llama", "gpt2", "bert", "bart", "mixtral", "clip")]
# The uniform and the padded form of an unedited model are written by the same code: one of them for each family.
UNEDITED += [("uniform", name) for name in ("llama", "bert", "clip")]
UNEDITED += [("padded", name) for name in ("gpt2", "bart", "mixtral")]


@pytest.mark.parametrize(("form", "name"), UNEDITED)
def test_a_model_that_was_not_edited_is_the_same_bit_for_bit(name, form, tmp_path):
    model = build(FAMILIES[name], dtype=torch.bfloat16 if name in ("llama", "bart") else torch.float32)
    saved = save(model, tmp_path / "model", form=form)
    assert saved.form == form
    assert saved.loads_natively == (form != "uneven")
    assert saved.num_bytes == sum(file.stat().st_size for file in (tmp_path / "model").iterdir())
    back = load(tmp_path / "model")
    assert type(back) is type(model)
    assert fingerprint(back) == fingerprint(model)
    assert not back.training
    assert _without_writer_entries(back.config.to_dict()) == _without_writer_entries(model.config.to_dict())
    if form != "uneven":
        assert fingerprint(native(model, tmp_path / "model")) == fingerprint(model)


def _without_writer_entries(config):
    """Return a config without the entries that its writer adds."""
    added = ("architectures", "dtype", "transformers_version", "_name_or_path")
    plain = {name: value for name, value in config.items() if name not in added}
    return {name: _without_writer_entries(value) if isinstance(value, dict) else value for name, value in plain.items()}


def test_the_form_is_uniform_unless_another_is_requested(tmp_path):
    model = llama()
    assert save(model, tmp_path / "whole").form == "uniform"
    record = apply(model, [PruneHeads(layer, (0, 1)) for layer in range(2)])
    even = save(model, tmp_path / "even")
    assert (even.form, even.native) == ("uniform", "plain transformers loads it as LlamaForCausalLM")
    undo(model, record)
    apply(model, [PruneHeads(0, (0, 1))])
    with pytest.raises(OptionError, match=r"--form padded \(loads .*\) or --form uneven \(smaller, .*polyhead.load\)"):
        save(model, tmp_path / "uneven")
    assert not (tmp_path / "uneven").exists()
    uneven = save(model, tmp_path / "uneven", form="uneven")
    assert uneven.form == "uneven"
    assert uneven.native == (
        "plain transformers does not load it: all layers need the same number of heads, got 4 over 2 KV heads "
        "(layer 0) and 6 over 3 KV heads (the others); polyhead.load does"
    )
    padded = save(model, tmp_path / "padded", form="padded")
    assert padded.native == "plain transformers loads it as LlamaForCausalLM, with 2 heads of zeros: no time is saved"
    with quiet(progress=False), pytest.raises(OSError, match=r"no file named model\.safetensors"):
        type(model).from_pretrained(tmp_path / "uneven")


@pytest.mark.parametrize(
    ("name", "edits", "words"),
    [
        # The config in memory has 3 heads, but its class refuses them when the saved config is read.
        ("llama", [ReorderHeads(0, (2, 3, 0, 1)), PruneHeads(0, (0,)), PruneHeads(1, (0,))], r"reads \[0, 1, 1\]"),
        ("bert", [PruneHeads(layer, (0, 1)) for layer in range(2)], "gives 2 heads of 16 channels .* has 2 heads of 8"),
        ("bert", [PruneHeads(layer, (0,)) for layer in range(2)], r"cannot be built: .*multiple of"),
        (
            "bert",
            [GroupQueries(1, ((0, 1), (2, 3)))],
            "has one KV head per head, but .* has 4 heads of 8 .* over 2 KV heads",
        ),
        (
            "gpt2",
            [PruneHeads(0, (0,))],
            r"all layers need the same number of heads, got 3 \(layer 0\) and 4 \(the others\); use",
        ),
        ("llama", [PruneHeads(0, (0, 1))], r"got 2 over 1 KV heads \(layer 0\) and 4 over 2 KV heads \(the others\)"),
    ],
)
def test_a_uniform_form_that_does_not_exist_is_refused_with_the_reason(name, edits, words, tmp_path):
    model = build(FAMILIES[name], dtype=torch.float32)
    apply(model, edits)
    with pytest.raises(OptionError, match=f"plain transformers must load the uniform form: .*{words}"):
        save(model, tmp_path / "model", form="uniform")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text"])
def test_heads_that_do_not_divide_the_width_are_refused_although_their_width_is_given(name, tmp_path):
    model = llama(6, 6, name=name)
    before = model.config.to_dict()
    apply(model, [PruneHeads(layer, (0,)) for layer in range(2)])
    config = model.config.to_dict()
    assert config.pop("polyhead_heads")  # the original heads, which native classes ignore
    assert config == before  # no config describes these heads, so the rest of it is unchanged
    with pytest.raises(OptionError, match="not a multiple of the number of attention heads"):
        save(model, tmp_path / "model", form="uniform")
    padded = save(model, tmp_path / "model", form="padded")
    assert "with 2 heads of zeros" in padded.native
    assert native(model, tmp_path / "model").config.num_attention_heads == 6


@pytest.mark.parametrize("name", ["qwen3", "mistral", "cohere"])
def test_heads_that_do_not_divide_the_width_are_uniform_where_the_config_takes_them(name, tmp_path):
    model = llama(6, 6, name=name)
    apply(model, [PruneHeads(layer, (0,)) for layer in range(2)])
    save(model, tmp_path / "model", form="uniform")
    loaded = native(model, tmp_path / "model")
    assert loaded.config.num_attention_heads == 5
    family = models.Family(name, "decoder", FAMILIES[name].options)
    loaded.set_attn_implementation("eager")
    torch.testing.assert_close(result_of(loaded, family), result_of(model, family), rtol=1e-5, atol=1e-5)


def test_padding_takes_the_smallest_native_layout_that_fits(tmp_path):
    model = llama(12, 6, 96)
    record = apply(model, [PruneHeads(0, (0, 1, 2, 3, 4, 5)), PruneHeads(1, (0, 1, 2, 3, 5, 7))])
    assert [layer.layout.num_heads for layer in find_layers(model)] == [6, 6]
    assert find_layers(model)[1].layout.key_heads == (0, 1, 2, 2, 3, 3)
    expected = result_of(load(save(model, tmp_path / "uneven", form="uneven").folder), FAMILIES["llama"])
    saved = save(model, tmp_path / "padded", form="padded", record=record)
    small = native(model, saved.folder)
    # Four groups of two heads fit both layers; groups of KV heads with fewer heads are filled with zero heads.
    assert (small.config.num_attention_heads, small.config.num_key_value_heads) == (8, 4)
    torch.testing.assert_close(result_of(small, FAMILIES["llama"]), expected, rtol=1e-4, atol=1e-5)
    back = load(saved.folder)
    assert fingerprint(back) == fingerprint(model)
    undo(back, load_record(saved.folder))
    assert back.config.num_attention_heads == 12  # undo also reverts what padding changed in the config
    assert fingerprint(back) == record.before


def test_grown_heads_are_not_padded_where_the_head_dim_follows_from_the_width(tmp_path):
    model = build(FAMILIES["bert"], dtype=torch.float32)
    apply(model, [AddHeads(0, 1)])
    with pytest.raises(OptionError, match=r"holds 4 heads of 8 channels over 4 KV heads, but .* has 5 of 8"):
        save(model, tmp_path / "model", form="padded")


def test_generation_config_tokenizer_and_side_files_are_saved_too(tmp_path):
    model = llama()
    model.generation_config.max_new_tokens = 17
    record = apply(model, [PruneHeads(0, (0, 1))])
    for form in ("uneven", "padded"):
        folder = save(model, tmp_path / form, form=form, record=record, tokenizer=tokenizer()).folder
        assert load(folder).generation_config.max_new_tokens == 17
        assert (folder / "tokenizer.json").is_file()
        assert load_record(folder).after == fingerprint(load(folder))
        assert {oct(file.stat().st_mode & 0o777) for file in folder.iterdir()} == {oct(0o666 & ~_umask())}
    assert native(model, tmp_path / "padded").generation_config.max_new_tokens == 17
    (tmp_path / "uneven" / "1_Pooling").mkdir()
    (tmp_path / "uneven" / "1_Pooling" / "config.json").write_text("{}")
    (tmp_path / "uneven" / "pytorch_model.bin").write_bytes(b"old")
    (tmp_path / "uneven" / ".cache").mkdir()
    copied = save(model, tmp_path / "copied", form="uneven", tokenizer=SideFiles(tmp_path / "uneven")).folder
    files = {str(file.relative_to(copied)) for file in copied.rglob("*") if file.is_file()}
    own = {"config.json", "generation_config.json", "polyhead.json", "polyhead.safetensors", "polyhead-files.json"}
    assert files == {*own, "1_Pooling/config.json", "tokenizer.json", "tokenizer_config.json"}
    assert load_record(copied) is None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_tied_weights_are_written_once(tmp_path):
    model = build(FAMILIES["gpt2"], dtype=torch.float32)
    apply(model, [PruneHeads(0, (0,))])
    save(model, tmp_path / "model", form="uneven")
    assert "lm_head.weight" not in load_file(tmp_path / "model" / "polyhead.safetensors")
    back = load(tmp_path / "model")
    assert back.lm_head.weight is back.transformer.wte.weight


def test_a_changed_table_that_native_classes_recompute_needs_the_uneven_form(tmp_path):
    model = build(FAMILIES["marian"], dtype=torch.float32)
    with torch.no_grad():
        model.model.encoder.embed_positions.weight.add_(1)
    with pytest.raises(
        CheckpointError, match=r"encoder\.embed_positions\.weight is not read as it was .*--form uneven"
    ):
        save(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    save(model, tmp_path / "model", form="uneven")
    assert fingerprint(load(tmp_path / "model")) == fingerprint(model)


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    model = llama()
    with pytest.raises(OptionError, match="form must be one of uniform, uneven, padded, got 'flat'"):
        save(model, tmp_path / "model", form="flat")
    with pytest.raises(OptionError, match=r"only transformers models can be saved, got MultiHeadAttention.*config_of"):
        save(MultiHeadAttention(12, 4), tmp_path / "model")
    own = type("Own", (type(model),), {})(model.config)
    with pytest.raises(OptionError, match="transformers' own classes can be saved, got Own"):
        save(own, tmp_path / "model")
    with pytest.raises(OptionError, match=r"must have weights, got .* on the meta device"):
        save(llama().to("meta"), tmp_path / "model")
    record = apply(llama(), [PruneHeads(0, (1,))])
    with pytest.raises(OptionError, match=f"of fingerprint {record.after}, got one of {fingerprint(model)}"):
        save(model, tmp_path / "model", record=record)
    (tmp_path / "file").write_text("here")
    with pytest.raises(OptionError, match="which is a file or a link"):
        save(model, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_replaced_only_on_request_and_never_the_source(tmp_path):
    model = llama()
    save(model, tmp_path / "one")
    with pytest.raises(OptionError, match="which holds files; choose another one"):
        save(model, tmp_path / "one")
    (tmp_path / "empty").mkdir()
    save(model, tmp_path / "empty")
    apply(model, [PruneHeads(0, (0, 1))])
    save(model, tmp_path / "one", form="uneven", replace=True)
    assert fingerprint(load(tmp_path / "one")) == fingerprint(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "one"]
    for replace in (False, True):
        with pytest.raises(OptionError, match="not written over the one it came from"):
            save(load(tmp_path / "one"), tmp_path / "one", form="uneven", replace=replace)
    with pytest.raises(OptionError, match="not written over the one it came from"):
        save(load(tmp_path / "empty"), tmp_path / "empty", replace=True)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Interruption(BaseException):
    """Like a keyboard interrupt: not an `Exception`, so nothing may catch it as one."""


@pytest.mark.parametrize(("form", "replaced"), [("padded", False), ("uneven", True)])
def test_an_interruption_at_any_write_leaves_what_was_there(form, replaced, tmp_path, monkeypatch):
    old, new, words = llama(), llama(), tokenizer()
    record = apply(new, [PruneHeads(layer, (0, 1)) for layer in range(2)])
    place, after = tmp_path / "model", fingerprint(new)
    if replaced:
        earlier = apply(old, [PruneHeads(0, (0,))])
        save(old, place, form="uneven", record=earlier)
    before = contents(tmp_path)
    assert not replaced or fingerprint(load(place)) == earlier.after
    monkeypatch.setattr(saving, "_read_back", lambda *_: None)  # takes most of the time, and the model is loaded below
    watched = [(os, "fsync"), (os, "rename"), (os, "mkdir"), (os, "replace"), (json, "dumps"), (folders, "_exchange")]
    calls_left = 0

    def interrupting(function):
        def call(*given, **named):
            nonlocal calls_left
            calls_left -= 1
            if calls_left < 0:
                raise Interruption
            return function(*given, **named)

        return call

    for owner, name in watched:
        monkeypatch.setattr(owner, name, interrupting(getattr(owner, name)))
    for moment in range(200):
        calls_left = moment
        try:
            save(new, place, form=form, record=record, tokenizer=words, replace=replaced)
        except Interruption:
            calls_left = 10**6
            names = sorted(path.name for path in tmp_path.iterdir())
            assert names == ["model", "model.undo"] or (names == [] and not replaced)
            if contents(tmp_path) == before:
                continue
            # Interrupted after the rename, everything is there.
            assert fingerprint(load(place)) == after
            assert load_record(place).after == after
            assert len(list((tmp_path / "model.undo").iterdir())) == 1
            break
    else:
        pytest.fail("the writes did not end within 200 calls")
    assert moment > 8


def test_code_that_comes_with_a_folder_is_never_run(tmp_path):
    model = llama()
    apply(model, [PruneHeads(0, (0, 1))])
    for form in ("uneven", "padded"):
        folder = save(model, tmp_path / form, form=form).folder
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoConfig": "code.OwnConfig"}
        config["model_type"] = "own"
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        with pytest.raises(OptionError, match="requires custom code"):
            load(folder)
    assert not (tmp_path / "ran").exists()
