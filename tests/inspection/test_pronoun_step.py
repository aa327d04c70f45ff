"""A whole inspection asks after pronouns: a planted head is named, no other is, and who cannot read them is told so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from polyhead.analysis.pronouns import CUES, PronounTexts
from polyhead.inspection import Inspection, Settings
from polyhead.inspection.probing import Probes
from polyhead.sources.pronoun_sentences import pronoun_sentences
from polyhead.workflows.inspecting import inspect_model
from tests.inspection.small_models import model_folder, text_folder

pytest.importorskip("pyarrow")
# What a name and a pronoun have in common, by which the planted head finds the one from the other.
KINDS = (
    ({"anna", "mary", "laura", "sarah", "mother", "queen"}, "she"),
    ({"peter", "john", "robert", "david", "father", "king"}, "he"),
    ({"dog", "piano", "bus", "van"}, "it"),
    ({"children", "chairs", "cyclists", "bikes"}, "they"),
)
HEADS, WIDTH = 4, 32


def words() -> list[str]:
    found = (word for sentence in pronoun_sentences("en") for word in re.findall(r"\w+|[.,]", sentence.text.lower()))
    return ["[PAD]", "[UNK]", "a", *dict.fromkeys(found)]


def model_that_agrees(folder: Path, *, planted: bool) -> Path:
    """Head 1.2 looks from a pronoun at names of its gender and number; the others are random."""
    names = words()
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(dict.fromkeys(names))}, "[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(3)
    model = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=len(tokenizer), hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
            intermediate_size=8, max_position_embeddings=64,
        )
    )  # fmt: skip
    dim = WIDTH // HEADS
    with torch.no_grad():
        embedding = model.embeddings.word_embeddings.weight
        for axis, (nouns, pronoun) in enumerate(KINDS):
            for noun in nouns:
                embedding[tokenizer.convert_tokens_to_ids(noun), axis] += 4.0
            embedding[tokenizer.convert_tokens_to_ids(pronoun), len(KINDS) + axis] += 4.0
        if planted:
            for part, first in (("query", len(KINDS)), ("key", 0)):
                projection = getattr(model.encoder.layer[1].attention.self, part)
                rows = projection.weight[2 * dim : 3 * dim]
                rows.zero_()
                rows[torch.arange(len(KINDS)), first + torch.arange(len(KINDS))] = 2.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def inspected(folder: Path, tmp_path: Path) -> Inspection:
    text = tmp_path / "text"
    text.mkdir(exist_ok=True)
    for number in range(3):
        (text / f"{number}.txt").write_text(" ".join(x.text for x in pronoun_sentences("en")[number::3]))
    return inspect_model(Settings(str(folder), str(text), context=60, importance="none", chance=False))


def test_a_planted_head_is_named_and_no_other(tmp_path):
    found = inspected(model_that_agrees(tmp_path / "model", planted=True), tmp_path)
    named = [(x.site.layer, x.head) for x in found.roles if x.roles & {"agreement", "pronoun"}]
    assert named == [(1, 2)]
    (head,) = (x for x in found.roles if (x.site.layer, x.head) == (1, 2))
    assert "pronoun" not in head.roles  # it does not know what the sentences mean
    assert head["agreement"].score == pytest.approx(1.0)
    assert head["pronoun"].score == head["agreement"].meaning == pytest.approx(0.5)
    sentence = next(str(x) for x in found.findings if "L1H2 attends from a pronoun" in str(x))
    assert "(chance 50%; by gender 100%, by number 100%, by meaning alone 50%)" in sentence
    assert sentence.endswith(": a pronoun agreement head")
    row = list(zip(found.table.sites, found.table.heads, strict=True)).index((head.site, 2))
    columns = {name: float(x[row]) for name, x in found.table.columns.items() if name.startswith("pronoun_")}
    assert columns.pop("pronoun_score") == pytest.approx(0.5)
    names = [
        f"pronoun_{cue}_score{end}" for cue in ("gender", "number", "meaning") for end in ("", "_error", "_chance")
    ]
    assert sorted(columns) == sorted(names)
    assert [columns[name] for name in names] == pytest.approx([1, 0, 0.5, 1, 0, 0.5, 0.5, 0, 0.5])


def test_the_same_model_without_it_has_none(tmp_path):
    found = inspected(model_that_agrees(tmp_path / "model", planted=False), tmp_path)
    assert all(not x.roles & {"agreement", "pronoun"} for x in found.roles)
    assert all(0 <= x["pronoun"].low <= x["pronoun"].score <= x["pronoun"].high <= 1 for x in found.roles)


def test_who_cannot_read_the_sentences_is_told_so(tmp_path):
    text = text_folder(tmp_path / "text", documents=2, words=40)
    model = model_folder(tmp_path / "bert", "bert")
    found = inspect_model(Settings(str(model), str(text), context=64, importance="none", chance=False))
    few_tokens, reason = found.facts["left_out"]
    assert few_tokens.kind == "few_tokens"
    assert (
        str(reason)
        == "agreement and pronoun: of 160 sentences with pronouns the tokenizer can read 0 in a context of 64 tokens"
    )
    assert all(score.role != "pronoun" for head in found.roles for score in head.scores)


def test_a_causal_model_reads_sentences_until_their_pronoun(tmp_path, monkeypatch, leave_out):
    text = text_folder(tmp_path / "text", documents=2, words=40)
    settings = Settings("tiny", str(text), context=128, layers=(0, 2), importance="none", chance=False)
    tokens = []

    def record(progress):
        if progress.step == "read sentences with pronouns" and not progress.done:
            tokens.append(progress.total)

    leave_out("repeated", "distances", "examples")
    frames = {cue: sorted({x.frame for x in pronoun_sentences("en") if x.cue == cue})[:2] for cue in CUES}
    few = [x for x in pronoun_sentences("en") if x.frame in frames[x.cue]]  # two templates of each cue
    monkeypatch.setattr(
        "polyhead.inspection.probing.pronoun_sentences", lambda language: few if language == "en" else ()
    )
    cut = inspect_model(settings, progress=record)
    monkeypatch.setattr(PronounTexts, "without_endings", lambda texts: texts)
    whole = inspect_model(settings, progress=record)
    assert tokens[0] < 0.9 * tokens[1]
    names = [name for name in whole.table.columns if name.startswith(("pronoun", "agreement"))]
    assert len(names) == 11
    for name in names:
        torch.testing.assert_close(cut.table[name], whole.table[name])
    for role in ("agreement", "pronoun"):
        weights = [[head[role].weight for head in found.roles] for found in (cut, whole)]
        assert weights[0] == pytest.approx(weights[1], rel=1e-4)


def test_only_sentences_in_languages_that_the_tokenizer_knows_are_read(tmp_path, monkeypatch):
    text = text_folder(tmp_path / "text", documents=2, words=40)
    languages = []

    def texts(sentences, *rest, **options):
        languages.extend(sentence.language for sentence in sentences)
        raise InterruptedError

    monkeypatch.setattr("polyhead.inspection.probing.pronoun_texts", texts)
    monkeypatch.setattr(Probes, "repeated", lambda *_: None)
    with pytest.raises(InterruptedError):
        inspect_model(Settings("tiny", str(text), context=128, layers=(0,), importance="none", chance=False))
    assert languages == ["en"] * 80  # to a tokenizer of bytes, a Chinese character is three tokens
