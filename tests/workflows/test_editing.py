"""`polyhead.prune`, `merge`, `convert`, `shrink` and `undo` as Python calls, on models in memory and in folders."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import polyhead
from polyhead.errors import OptionError
from polyhead.surgery import fingerprint
from polyhead.workflows import calibration_text
from polyhead.workflows.compensating import DISTILLED, NOT_COMPENSATED
from polyhead.workflows.model_loading import load_model
from tests.inspection.small_models import model_folder, text_folder, tokenizer
from tests.integrations.huggingface.models import FAMILIES, build

OTHER_FORMS = (
    r"use --form padded \(loads anywhere, saves nothing\) or --form uneven \(smaller, loads with polyhead.load\)"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for name in ("bert", "llama"):
        model_folder(folder / name, name)
    text_folder(folder / "text")
    return folder


def in_memory(folder: Path) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM.from_pretrained(folder).eval()


def total_heads(model: torch.nn.Module) -> int:
    return sum(layer.layout.num_heads for layer in polyhead.surgery.find_layers(model))


def documents(place: Path) -> list[str]:
    return [file.read_text() for file in sorted((place / "text").glob("*.txt"))]


def test_a_model_in_memory_is_pruned_in_place_as_the_folder_is(place, tmp_path):
    model, seen = in_memory(place / "llama"), []
    before = fingerprint(model)
    options = {"share": 0.5, "context": 40}
    edited = polyhead.prune(model, **options, text=documents(place), tokenizer=tokenizer(), progress=seen.append)
    assert edited.model is model
    assert total_heads(model) == edited.preview.after.heads == 4
    assert edited.metric == "perplexity"
    assert 0 < edited.held_out_tokens <= 40 * edited.held_out_contexts
    assert edited.compensation in (DISTILLED, NOT_COMPENSATED)  # random weights on random words: either may be better
    steps = [x for x in seen if x.step == "Distil the output projections"]
    assert [x.done for x in steps] == sorted(x.done for x in steps)
    assert steps[-1].done == steps[-1].total
    by_name = polyhead.prune(place / "llama", **options, text=place / "text")
    assert (by_name.edits, by_name.quality) == (edited.edits, edited.quality)
    assert fingerprint(by_name.model) == fingerprint(model)
    saved = edited.save(tmp_path / "pruned")
    assert (saved.form, saved.undo_folder) == ("uniform", tmp_path / "pruned.undo")
    assert fingerprint(polyhead.load(saved.folder)) == fingerprint(model)
    assert polyhead.undo(saved.folder).record.before == before
    edited.undo()
    assert fingerprint(model) == before


@pytest.mark.parametrize("criterion", ["redundancy", "ablation"])
def test_progress_never_counts_beyond_its_total(place, criterion):
    """The heads are selected and compensated for in two passes over the text, each of which is reported."""
    seen, options = [], {"text": documents(place), "tokenizer": tokenizer(), "context": 16, "tokens": 400}
    polyhead.prune(
        in_memory(place / "llama"), share=0.4, criterion=criterion, form="uneven", progress=seen.append, **options
    )
    assert {x.step for x in seen} == {"Read the text to choose heads", "Distil the output projections"}
    assert all(x.total is None or x.done <= x.total for x in seen)


def test_a_preview_changes_nothing_and_cannot_be_saved(place, tmp_path):
    model = in_memory(place / "llama")
    before = fingerprint(model)
    edited = polyhead.prune(model, [(0, 1), polyhead.HeadId(1, 2)], form="uneven", preview=True)
    assert edited.edits == polyhead.prune(model, ["L0H1", "L1H2"], form="padded", preview=True).edits
    assert (edited.record, edited.preview.before.heads, edited.preview.after.heads) == (None, 8, 6)
    for call in (lambda: edited.save(tmp_path / "never"), edited.undo):
        with pytest.raises(OptionError, match="only an edited model can be saved or reverted"):
            call()
    # The uniform layout of a share needs neither a text nor a tokenizer.
    by_share = polyhead.prune(model, share=0.45, preview=True)
    assert (by_share.edits, by_share.preview.after.heads, by_share.preview.after.kv_heads) == ((), 4, 4)
    assert fingerprint(model) == before
    assert not (tmp_path / "never").exists()


def test_merged_heads_are_those_of_the_command(place):
    by_text = polyhead.merge(place / "bert", "L1H0+L1H2,L1H1+L1H3", form="uneven")
    by_pairs = polyhead.merge(place / "bert", [[(1, 0), (1, 2)], [(1, 1), (1, 3)]], form="uneven")
    assert by_text.edits == by_pairs.edits
    assert fingerprint(by_text.model) == fingerprint(by_pairs.model)
    assert total_heads(by_text.model) == 6


def test_a_model_is_converted_to_one_kv_head_and_back(place, tmp_path):
    model = in_memory(place / "llama")
    before = fingerprint(model)
    edited = polyhead.convert(model, 1, text=documents(place), tokenizer=tokenizer(), context=40)
    assert [layer.layout.num_kv_heads for layer in polyhead.surgery.find_layers(model)] == [1, 1]
    assert edited.preview.after.cache_bytes_per_token * 2 == edited.preview.before.cache_bytes_per_token
    restored = polyhead.undo(edited.save(tmp_path / "mqa").folder)
    assert restored.save(tmp_path / "back").form == "uniform"
    assert fingerprint(polyhead.load(tmp_path / "back")) == before


@pytest.mark.parametrize(
    ("dtype", "edit"),
    [
        (torch.bfloat16, lambda model, **read: polyhead.prune(model, share=0.5, **read)),
        (torch.float16, lambda model, **read: polyhead.convert(model, 1, rounds=1, **read)),
        (torch.bfloat16, lambda model, text, **read: polyhead.shrink(model, "50%-heads", text, **read)),
    ],
)
def test_16_bit_models_are_edited_in_float32_and_saved_in_their_dtype(place, tmp_path, edit, dtype):
    in_memory(place / "llama").to(dtype).save_pretrained(tmp_path / "half")
    half = in_memory(tmp_path / "half").to(dtype)
    models = [half, copy.deepcopy(half).float()]  # with the rounded frequencies of rotary embeddings, too
    before, seen = fingerprint(models[0]), set()
    hook = models[0].model.norm.register_forward_hook(lambda module, given, output: seen.add(output.dtype))
    read = {"text": documents(place), "tokenizer": tokenizer(), "context": 16, "tokens": 600}
    edited, exact = (edit(model, **read) for model in models)
    hook.remove()
    assert seen == {torch.float32}
    assert edited.edits == exact.edits
    found = dict(edited.model.named_parameters())
    for name, x in exact.model.named_parameters():  # but for one rounding, the weights that float32 gives
        assert (found[name].float() - x).norm() <= torch.finfo(dtype).eps / 2 * x.norm(), name
    saved = edited.save(tmp_path / "saved")
    assert {x.dtype for x in load_file(saved.folder / "model.safetensors").values()} == {dtype}
    assert fingerprint(polyhead.undo(saved.folder).model) == before
    edited.undo()
    assert fingerprint(models[0]) == before


def test_undo_restores_the_attention_that_a_converted_model_had(place):
    model = in_memory(place / "llama")
    model.set_attn_implementation("eager")
    text, options = documents(place), {"tokenizer": tokenizer(), "context": 40}
    edited = polyhead.convert(model, 1, text=text, **options)
    assert model.config._attn_implementation == "polyhead"
    edited.undo()
    assert model.config._attn_implementation == "eager"
    polyhead.convert(model, 1, text=text, **options)
    model.set_attn_implementation("sdpa")
    with pytest.raises(OptionError, match="every layer has 1 KV heads already"):
        polyhead.convert(model, 1, text=text, **options)
    assert model.config._attn_implementation == "sdpa"  # set by the user since


def test_a_failed_conversion_leaves_the_attention_as_it_was(place):
    model = in_memory(place / "llama")
    with pytest.raises(OptionError, match="at least as many tokens"):
        polyhead.convert(model, 1, text=documents(place)[:1], tokenizer=tokenizer(), context=16, tokens=16)
    assert model.config._attn_implementation == "sdpa"


def test_uneven_groups_run_on_polyhead_attention_until_they_are_undone(place):
    model, options = in_memory(place / "llama"), {"tokenizer": tokenizer(), "context": 40}
    ids = torch.tensor([[5, 7, 11, 13]])
    with torch.no_grad():
        expected = model(ids).logits
        edited = polyhead.prune(model, "L0H1", form="uneven", text=documents(place), **options)
        assert edited.quality.error > 0
        assert model.config._attn_implementation == "polyhead"
        assert not torch.equal(model(ids).logits, expected)
        edited.undo()
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(model(ids).logits, expected)


def test_a_test_text_alone_evaluates_the_model(place):
    model, test_text = in_memory(place / "llama"), documents(place)
    edited = polyhead.prune(model, "L0H1", form="uneven", compensate=False, test_text=test_text, tokenizer=tokenizer())
    assert edited.quality is not None
    assert edited.quality.error > 0


def test_a_model_restored_from_a_folder_has_the_default_attention(place, tmp_path):
    edited = polyhead.prune(place / "llama", "L0H1", form="uneven", compensate=False)
    saved = edited.save(tmp_path / "uneven")
    assert saved.form == "uneven"
    assert polyhead.load(saved.folder).config._attn_implementation == "polyhead"
    assert polyhead.undo(saved.folder).model.config._attn_implementation == "sdpa"


def test_a_model_is_shrunk_to_a_target_and_the_curve_is_data(place, tmp_path):
    model = in_memory(place / "llama")
    options = {"context": 16, "tokens": 400, "form": "uneven", "curve": True}
    shrunk = polyhead.shrink(model, "25%-heads", documents(place), tokenizer=tokenizer(), **options)
    assert sum(map(len, shrunk.removed.values())) == 2
    assert (shrunk.metric, total_heads(model)) == ("perplexity", 6)
    assert shrunk.size.heads == 0.75
    assert [point.removed for point in shrunk.curve] == sorted(point.removed for point in shrunk.curve)
    for point in shrunk.curve:
        assert len(point.random) == 3
        assert min(point.compensated.value, point.not_compensated.value) > 1
    again = polyhead.shrink(
        place / "llama", "25%-heads", place / "text", preview=True, resume=tmp_path / "run", **options
    )
    assert (again.record, again.removed, again.quality) == (None, shrunk.removed, shrunk.quality)
    resumed = polyhead.shrink(
        place / "llama", "25%-heads", place / "text", preview=True, resume=tmp_path / "run", **options
    )
    assert resumed.curve == again.curve


def test_the_text_is_read_no_more_often_than_needed(place, monkeypatch):
    """To calibrate: once with gradients, which also gives the outputs to distil towards, and once to distil."""
    monkeypatch.setattr(calibration_text, "BATCH_TOKENS", 16)
    options = {"context": 16, "tokens": 400}
    model, calls = in_memory(place / "llama"), []
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: calls.append(1))
    polyhead.shrink(model, "25%-heads", documents(place), tokenizer=tokenizer(), form="uneven", **options)
    loaded = load_model(place / "llama")
    text = calibration_text.CalibrationText.of(loaded, documents(place), **options)
    calibrating, selecting, held_out = (
        len(list(calibration_text.model_inputs(loaded, x))) for x in (text.calibrating, text.selecting, text.held_out)
    )
    assert min(calibrating, selecting, held_out) > 1
    compared = 1  # batch on which the skipped blocks are checked
    assert len(calls) == 2 * calibrating + compared + 2 * selecting + 2 * held_out


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda place: polyhead.prune(place / "bert"), "either heads or share, got both or neither"),
        (lambda place: polyhead.prune(place / "bert", "L0H1", share=0.5), "either heads or share, got both"),
        (lambda place: polyhead.prune(place / "bert", share=30), "share must be between 0 and 1, got 30"),
        (lambda place: polyhead.prune(place / "bert", "L0H9"), "9"),
        (
            lambda place: polyhead.prune(in_memory(place / "llama"), "L0H1", form="uneven"),
            "needs a model that reads text and its tok",
        ),
        (lambda place: polyhead.prune(in_memory(place / "llama"), "L0H1"), OTHER_FORMS),
        (lambda place: polyhead.prune(in_memory(place / "llama"), "L0H1", preview=True), OTHER_FORMS),
        (lambda place: polyhead.prune(place / "bert", share=0.5), OTHER_FORMS),
        (lambda place: polyhead.prune(place / "llama", share=0.3, criterion="plain"), OTHER_FORMS),
        (lambda place: polyhead.prune(place / "llama", share=0.9), rf"2/2, 2/1, 1/1, .*{OTHER_FORMS}"),
        (lambda place: polyhead.merge(place / "llama", "L0H0+L0H1"), OTHER_FORMS),
        (lambda place: polyhead.convert(place / "bert", 2), OTHER_FORMS),
        (lambda place: polyhead.shrink(place / "bert", "25%-heads", ["a"]), OTHER_FORMS),
        (lambda place: polyhead.prune(place / "llama", "L0H1", form="flat"), "form must be one of uniform, uneven"),
        (lambda place: polyhead.prune(in_memory(place / "llama").train(), "L0H1"), r"call model.eval\(\) first"),
        (lambda place: polyhead.prune(torch.nn.Linear(2, 2), "L0H1"), "or a transformers model, got a Linear"),
        (lambda place: polyhead.merge(place / "bert", "L1H0+L1H2,L1H2+L1H3"), "occur only once, got L1H2"),
        (lambda place: polyhead.merge(place / "bert", [[(0, 1), (1, 1)]]), "two or more heads of one layer"),
        (lambda place: polyhead.convert(place / "llama", 0), "kv_heads must be greater than 0"),
        (lambda place: polyhead.shrink(place / "llama", "25%-heads", None), "text is required"),
        (lambda place: polyhead.shrink(place / "llama", "50%-heads", ["a w1 " * 30]), "at least 8 documents or"),
        (lambda place: polyhead.shrink(place / "llama", "50%-heads", [1, 2]), "must be a sequence of strings"),
        (lambda place: polyhead.undo(place / "llama"), "undo needs the record saved with an edited model"),
        (
            lambda place: polyhead.prune(load_model(place / "bert"), "L0H1", tokenizer=tokenizer()),
            "a model that has its own",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(place, call, words):
    with pytest.raises(OptionError, match=words):
        call(place)


def test_an_encoder_decoder_is_not_shrunk_and_one_of_audio_is_not_calibrated_on_text(place):
    bart, whisper = (build(family) for family in FAMILIES if family.name in ("bart", "whisper"))
    with pytest.raises(OptionError, match="got a BartForConditionalGeneration, an encoder-decoder; use prune, which"):
        polyhead.shrink(bart, "50%-heads", documents(place), tokenizer=tokenizer(), form="uneven")
    with pytest.raises(OptionError, match=r"whose input is input_features; in Python, .* take batches of any inputs"):
        polyhead.prune(whisper, share=0.5, tokenizer=tokenizer(), form="uneven")


def test_a_text_that_misleads_the_compensation_leaves_the_heads_uncompensated(place):
    """The heads are calibrated on one repeated word, and the compensation is selected on others."""
    words = " ".join(documents(place)).split()
    text = [" ".join(words[:1] * 38)] * 12 + [" ".join(words[i : i + 38]) for i in range(0, 8 * 38, 38)]
    model, plain = in_memory(place / "llama"), in_memory(place / "llama")
    shrunk = polyhead.shrink(model, "50%-heads", text, context=40, tokenizer=tokenizer())
    assert shrunk.compensation == "not compensated: compensation was worse"
    polyhead.surgery.apply(plain, list(shrunk.edits))
    assert fingerprint(model) == fingerprint(plain)


def test_compensation_is_the_same_whichever_way_heads_are_chosen(place):
    options = {"text": documents(place), "context": 40, "form": "uneven", "tokenizer": tokenizer()}
    chosen, named = in_memory(place / "llama"), in_memory(place / "llama")
    pruned = polyhead.prune(chosen, share=0.4, criterion="magnitude", **options)
    heads = [(edit.layer, head) for edit in pruned.edits for head in edit.heads]
    assert polyhead.prune(named, heads, **options).compensation == pruned.compensation
    assert fingerprint(chosen) == fingerprint(named)


def test_other_arguments_are_checked_before_a_model_is_loaded(place):
    def load():
        raise AssertionError("the model was loaded")

    for call in (
        lambda: polyhead.prune(load, share=0.3, criterion="magic"),
        lambda: polyhead.prune(load, share=0.3, criterion="random"),
        lambda: polyhead.prune(load, "L0H1", criterion="plain"),
        lambda: polyhead.prune(load, share=0.3, seed=1),
        lambda: polyhead.convert(load, 2, form="flat"),
        lambda: polyhead.merge(load, "L0H0+L0H1", form="flat"),
        lambda: polyhead.shrink(load, "30%-heads", place / "text", form="flat"),
        lambda: polyhead.convert(load, 2, grouping="magic"),
        lambda: polyhead.shrink(load, "half", place / "text"),
        lambda: polyhead.merge(load, "L1H0"),
    ):
        with pytest.raises(OptionError):
            call()


def test_the_tokenizer_passed_with_a_model_is_saved_instead_of_the_one_in_its_folder(place, tmp_path):
    model, extended = in_memory(place / "llama"), tokenizer()
    extended.add_tokens(["unheard"])
    model.resize_token_embeddings(len(extended))
    model.eval()  # the new head is in training mode
    edited = polyhead.prune(model, "L0H1", form="uneven", tokenizer=extended, compensate=False)
    edited.save(tmp_path / "pruned")
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "pruned")) == len(extended) == len(tokenizer()) + 1
    undone = polyhead.undo(tmp_path / "pruned")
    undone.save(tmp_path / "original")
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "original")) == len(extended)


def test_the_tokenizer_of_the_folder_is_copied_byte_for_byte(place, tmp_path):
    files = sorted((place / "llama").glob("tokenizer*"))
    assert len(files)
    passed = transformers.AutoTokenizer.from_pretrained(place / "llama")
    edited = polyhead.prune(in_memory(place / "llama"), "L0H1", form="uneven", tokenizer=passed, compensate=False)
    edited.save(tmp_path / "pruned")
    assert [(tmp_path / "pruned" / file.name).read_bytes() for file in files] == [file.read_bytes() for file in files]


def test_edits_in_memory_are_saved_with_one_record_of_all_of_them(place, tmp_path):
    model = in_memory(place / "llama")
    original = fingerprint(model)
    first = polyhead.prune(model, "L0H1", form="uneven", compensate=False)
    second = polyhead.merge(model, "L1H0+L1H1", form="uneven")
    assert first.undo_caveat == ""
    second.undo()
    third = polyhead.prune(model, "L0H0", form="uneven", compensate=False)
    assert third.undo_caveat == ""
    third.save(tmp_path / "edited")
    assert fingerprint(polyhead.undo(tmp_path / "edited").model) == original
    third.undo()
    first.undo()
    assert fingerprint(model) == original


def test_edits_in_memory_follow_those_of_a_saved_model(place, tmp_path):
    original = fingerprint(in_memory(place / "llama"))
    polyhead.prune(in_memory(place / "llama"), "L0H1", form="uneven", compensate=False).save(tmp_path / "first")
    model = polyhead.load(tmp_path / "first")
    results = [polyhead.prune(model, name, form="uneven", compensate=False) for name in ("L0H0", "L1H2")]
    assert [x.undo_caveat for x in results] == ["", ""]
    results[-1].save(tmp_path / "edited")
    assert fingerprint(polyhead.undo(tmp_path / "edited").model) == original


def test_earlier_edits_without_a_record_are_named_as_such(place, tmp_path):
    model = in_memory(place / "llama")
    polyhead.merge(model, "L1H0+L1H1", form="uneven")  # the result is not kept
    edited = polyhead.prune(model, "L0H1", form="uneven", compensate=False)
    assert edited.undo_caveat == "no record of them was saved or kept"
    polyhead.surgery.save(model, tmp_path / "without", form="uneven", tokenizer=tokenizer())
    again = polyhead.prune(tmp_path / "without", "L0H0", form="uneven", compensate=False)
    assert again.undo_caveat == edited.undo_caveat
    reordered = in_memory(place / "llama")
    polyhead.surgery.apply(reordered, [polyhead.surgery.ReorderHeads(0, (1, 0, 3, 2))])
    assert polyhead.prune(reordered, "L1H0", form="uneven", compensate=False).undo_caveat == edited.undo_caveat
