"""Loading saved models: bit for bit, in any form and dtype, and never from a damaged file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import polyhead
from polyhead.errors import CheckpointError, OptionError
from polyhead.surgery import (
    GroupQueries,
    PruneHeads,
    ReorderHeads,
    apply,
    find_layers,
    fingerprint,
    load_record,
    save,
    undo,
)
from polyhead.surgery.storage import manifest
from polyhead.workflows.model_loading import load_model
from tests.forked import Bystander
from tests.inspection.small_models import model_folder, tokenizer
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, build, generated, result_of

EDITS = {
    "llama": [PruneHeads(0, (1,)), ReorderHeads(1, (0, 2, 1, 3))],
    "bert": [PruneHeads(0, (1, 3)), GroupQueries(1, ((0, 1, 2), (3,)))],
    "gpt2": [PruneHeads(1, (0, 2, 3))],
    "qwen3": [PruneHeads(0, (0, 1)), PruneHeads(1, (2,))],
}
FORMS = ("uneven", "padded")


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Bystander]:
    """Another process, started before any of these models was saved."""
    build(FAMILIES["llama"])  # what it takes to import is imported for both
    made = Bystander()
    yield made
    made.end()


@pytest.fixture(scope="module")
def place(tmp_path_factory, elsewhere) -> Path:
    """Edited models by family, in each form except uniform."""
    folder = tmp_path_factory.mktemp("saved")
    for name, edits in EDITS.items():
        build(FAMILIES[name], dtype=torch.float32).save_pretrained(folder / f"{name}-whole")
        model = polyhead.load(folder / f"{name}-whole")
        record = apply(model, edits)
        for form in FORMS:
            save(model, folder / f"{name}-{form}", form=form, record=record, tokenizer=tokenizer())
    return folder


def edited(place: Path, name: str):
    model = polyhead.load(place / f"{name}-whole")
    apply(model, EDITS[name])
    model.set_attn_implementation(polyhead.integrations.huggingface.register())
    return model


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("form", FORMS)
def test_an_edited_model_computes_what_it_computed(place, name, form):
    family = models.Family(name, FAMILIES[name].kind, FAMILIES[name].options)
    expected = edited(place, name)
    found = polyhead.load(place / f"{name}-{form}")
    assert [layer.layout for layer in find_layers(found)] == [layer.layout for layer in find_layers(expected)]
    assert fingerprint(found) == fingerprint(expected)
    found.set_attn_implementation(polyhead.integrations.huggingface.register())
    assert torch.equal(result_of(found, family), result_of(expected, family))
    if family.kind == "decoder":
        assert torch.equal(generated(found, family), generated(expected, family))
    assert all(p.requires_grad for p in found.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_groups_that_are_read_by_a_map_run_without_further_ado(place, form):
    model = polyhead.load(place / f"llama-{form}")
    assert find_layers(model)[0].layout.key_heads == (0, 1, 1)
    assert model.config._attn_implementation == "polyhead"
    assert torch.equal(result_of(model, FAMILIES["llama"]), result_of(edited(place, "llama"), FAMILIES["llama"]))
    assert polyhead.load(place / f"gpt2-{form}").config._attn_implementation == "sdpa"


@pytest.mark.parametrize("form", FORMS)
def test_another_dtype_changes_the_weights_and_nothing_else(place, form):
    whole = polyhead.load(place / f"llama-{form}")
    half = polyhead.load(place / f"llama-{form}", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.dtype == half.config.dtype == torch.bfloat16
    for (name, x), y in zip(whole.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(x.to(torch.bfloat16), y), name
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    double = polyhead.load(place / f"llama-{form}", dtype=torch.float64)
    expected = result_of(double, FAMILIES["llama"])
    torch.testing.assert_close(result_of(whole, FAMILIES["llama"]).double(), expected, rtol=1e-4, atol=1e-5)


def original_of(folder: Path) -> tuple[str, int]:
    """Load and undo in a process where polyhead's attention is not registered with transformers."""
    for functions in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        functions._global_mapping.pop("polyhead", None)
    model = polyhead.load(folder)
    undo(model, load_record(folder))
    return fingerprint(model), model.config.num_attention_heads


@pytest.mark.parametrize("name", EDITS)
def test_the_original_comes_back_in_another_process(place, elsewhere, name):
    expected = fingerprint(polyhead.load(place / f"{name}-whole")), 4
    for form in FORMS:
        assert elsewhere.run(original_of, place / f"{name}-{form}") == expected


def test_sources_know_edited_models_by_their_folders(place, tmp_path):
    loaded = load_model(place / "bert-uneven")
    assert [layer.layout.num_heads for layer in find_layers(loaded.model)] == [2, 4]
    assert (loaded.kind, loaded.origin) == ("encoder", f"the folder {place / 'bert-uneven'}")
    assert len(loaded.tokenizer) > 90
    assert load_model(place / "llama-padded", dtype=torch.float16).model.dtype == torch.float16
    plain = model_folder(tmp_path / "plain", "llama")
    model = polyhead.load(plain).bfloat16()
    model.save_pretrained(tmp_path / "half")
    tokenizer().save_pretrained(tmp_path / "half")
    assert load_model(tmp_path / "half").model.dtype == torch.float32
    assert load_model(tmp_path / "half", dtype="saved").model.dtype == torch.bfloat16
    assert polyhead.load(tmp_path / "half").dtype == torch.bfloat16
    assert polyhead.load(tmp_path / "half", dtype=torch.float16).dtype == torch.float16


def copied(place: Path, name: str, target: Path) -> Path:
    target.mkdir()
    for file in (place / name).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize(("form", "file"), [("uneven", "polyhead.safetensors"), ("padded", "model.safetensors")])
def test_weights_that_are_damaged_truncated_or_missing_are_refused(place, form, file, tmp_path):
    folder = copied(place, f"llama-{form}", tmp_path / "model")
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(CheckpointError, match=r"must be those that were saved, .* they are damaged"):
        polyhead.load(folder)
    for length in (len(whole) - 9, 100, 7, 0):
        (folder / file).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"must be (whole|complete) \.safetensors files, got"):
            polyhead.load(folder)
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=r"without it|its weights as \.safetensors, got .* without any"):
        polyhead.load(folder)


def test_weights_of_another_model_are_refused(place, tmp_path):
    folder = copied(place, "llama-uneven", tmp_path / "model")
    file = folder / "polyhead.safetensors"
    own = load_file(file)
    save_file(load_file(place / "gpt2-uneven" / "polyhead.safetensors"), file)
    with pytest.raises(CheckpointError, match=r"must match polyhead\.json and config\.json, got .* missing"):
        polyhead.load(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**own, name: own[name][:-1].contiguous()}, file)
    with pytest.raises(CheckpointError, match=rf"got {name} \[23, 32\] instead of \[24, 32\]"):
        polyhead.load(folder)
    save_file({**own, "stray": own[name].clone()}, file)
    with pytest.raises(CheckpointError, match=r"got stray \[24, 32\] instead of nothing"):
        polyhead.load(folder)
    save_file({key: x + 1 for key, x in own.items()}, file)
    with pytest.raises(CheckpointError, match="they are damaged or another model's"):
        polyhead.load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.pop("layers"), "a damaged one .*KeyError"),
        (lambda x: x.update(format=99), "reads polyhead.json of format 1, got 99"),
        (lambda x: x.update(form="flat"), "a form of uniform, uneven, padded, got 'flat'"),
        (lambda x: x.update(architecture="NoSuchModel"), "no model class 'NoSuchModel' in transformers"),
        (lambda x: x["layers"].update({"layers.7": {"embed_dim": 32, "num_heads": 4}}), "no such layer"),
        (lambda x: x["layers"]["model.layers.0.self_attn"].update(num_heads=0), "a damaged one"),
        (lambda x: x["layers"]["model.layers.0.self_attn"].update(num_heads="x"), "a damaged one"),
    ],
)
def test_a_manifest_that_is_damaged_or_another_models_is_refused(place, change, words, tmp_path):
    folder = copied(place, "llama-uneven", tmp_path / "model")
    found = json.loads((folder / "polyhead.json").read_text())
    del found["digest"]
    change(found)
    (folder / "polyhead.json").write_text(json.dumps({**found, "digest": manifest._digest(found)}))
    with pytest.raises((CheckpointError, OptionError), match=words):
        polyhead.load(folder)
    (folder / "polyhead.json").write_text("{")
    with pytest.raises(CheckpointError, match="must be undamaged"):
        polyhead.load(folder)


def test_a_map_that_was_changed_is_refused_although_every_tensor_fits(place, tmp_path):
    folder = copied(place, "llama-uneven", tmp_path / "model")
    found = json.loads((folder / "polyhead.json").read_text())
    assert found["layers"]["model.layers.0.self_attn"]["key_heads"] == [0, 1, 1]
    found["layers"]["model.layers.0.self_attn"]["key_heads"] = [0, 0, 1]
    (folder / "polyhead.json").write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match=r"must be unmodified, got one in .* that was changed"):
        polyhead.load(folder)


def test_a_padding_that_places_other_heads_is_refused(place, tmp_path):
    folder = copied(place, "llama-padded", tmp_path / "model")
    text = (folder / "polyhead.json").read_text()
    path = "model.layers.0.self_attn"
    for wrong in ({"heads": [0, 1], "key_heads": [0, 1]}, {"heads": [0, None, 1, 1], "key_heads": [0, 1]}, {}):
        found = json.loads(text)
        del found["digest"]
        found["paddings"][path] = wrong
        (folder / "polyhead.json").write_text(json.dumps({**found, "digest": manifest._digest(found)}))
        with pytest.raises(CheckpointError, match=r"must match its heads|a Padding has the fields heads, key_heads"):
            polyhead.load(folder)


def test_models_are_loaded_by_name_and_pickles_on_request(place, tmp_path):
    tiny = polyhead.load("tiny", dtype=torch.float64)
    assert (tiny.dtype, tiny.training, type(tiny).__name__) == (torch.float64, False, "LlamaForCausalLM")
    model = polyhead.load(place / "gpt2-whole")
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle, which can run code"):
        polyhead.load(tmp_path)
    pickled = polyhead.load(tmp_path, allow_pickle=True)
    assert torch.equal(pickled.transformer.wte.weight, model.transformer.wte.weight)


def test_a_folder_that_is_none_and_one_without_a_model_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"a folder, .* got '.*nowhere', which is neither an existing folder nor"):
        polyhead.load(tmp_path / "nowhere")
    with pytest.raises(OptionError, match=r"must (hold|contain) a config\.json"):
        polyhead.load(tmp_path)


def test_undoing_in_place_leaves_a_stock_model(place):
    model = polyhead.load(place / "qwen3-uneven")
    undo(model, load_record(place / "qwen3-uneven"))
    whole = polyhead.load(place / "qwen3-whole")
    model.set_attn_implementation("sdpa")
    assert torch.equal(result_of(model, FAMILIES["qwen3"]), result_of(whole, FAMILIES["qwen3"]))
