"""Where heads look, as pictures, and pieces of text with every weight: equal to the weights that the model holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import polyhead
from polyhead.inspection import Settings, most_attended
from polyhead.inspection.example_weights import ExampleWeights, example_batches, token_texts
from polyhead.inspection.head_maps import bin_edges, head_maps_of
from polyhead.inspection.text_reader import Reader
from polyhead.integrations.huggingface import set_attention
from polyhead.observation import AttentionMaps, BatchMetadata
from polyhead.observation.collectors import CallRecorder
from polyhead.workflows.inspecting import inspect_model
from polyhead.workflows.model_loading import load_model
from tests.inspection.small_models import NAMES, model_folder, text_folder, tokenizer

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return text_folder(tmp_path_factory.mktemp("text"), documents=5, words=60)


def weights_of(model, ids: torch.Tensor, **more) -> dict[str, tuple[torch.Tensor, ...]]:
    """The weights that the model itself computes and returns, by stack."""
    set_attention(model, "eager")
    with torch.no_grad():
        found = model(input_ids=ids, output_attentions=True, **more)
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return {name: found[name] for name in names if found.get(name) is not None}


# ---- looks


def test_a_map_and_its_offsets_are_the_mean_weights_of_blocks_and_distances(tmp_path):
    model = load_model(model_folder(tmp_path, "llama")).model
    ids = torch.randint(7, len(NAMES), (3, 19))
    session = polyhead.observe(model, statistics=False, collect=[AttentionMaps(23, resolution=6)])
    with torch.no_grad(), session:
        model(input_ids=ids, use_cache=False)
    looks = head_maps_of(session.observations.collected)
    expected = weights_of(model, ids, use_cache=False)["attentions"]
    edges = bin_edges()
    for site, found in looks.items():
        assert found.block == 4
        assert found.map.shape == (4, 5, 5)  # what no sequence reached is cut off
        assert found.tokens == 20
        weights = expected[site.layer].mean(0)
        for row in range(5):
            for column in range(5):
                block = weights[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
                torch.testing.assert_close(found.map[:, row, column], block.sum(-1).mean(-1), atol=1e-6, rtol=1e-5)
        for offset in (-18, -7, -1, 0):
            place = edges.index(offset)
            diagonal = weights.diagonal(offset, 1, 2).sum(-1) / 19
            torch.testing.assert_close(found.offsets[:, place], diagonal, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found.offsets.sum(-1), torch.ones(4))
        assert found.offsets[:, edges.index(1)].eq(0).all()


def test_the_edges_of_bins_meet():
    edges = bin_edges()
    assert len(edges) == polyhead.ops.profile.offset_bins().shape[0] + 1
    assert edges == sorted(set(edges))
    for offset, (first, last) in zip(edges, polyhead.ops.profile.offset_bins().tolist(), strict=False):
        assert offset == first <= last


# ---- examples


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_examples_are_the_beginnings_of_three_documents_with_the_weights_the_model_holds(
    text, tmp_path, name, leave_out
):
    leave_out("repeated", "distances", "pronouns")
    loaded = load_model(model_folder(tmp_path, name))
    loaded.model.double()
    settings = Settings(str(tmp_path), str(text), context=64, importance="none", chance=False)
    found = inspect_model(settings, loaded=loaded).examples
    assert [example.title for example in found] == ["0.txt", "1.txt", "2.txt"]
    for example in found:
        words = (text / example.title).read_text().split()
        assert list(example.queries) == ["[CLS]", *words[:30], "[SEP]"]
        assert example.keys == example.queries
        ids = torch.tensor([[NAMES.index(word) for word in example.queries]])
        more = {"decoder_input_ids": ids} if name == "t5" else {} if name == "bert" else {"use_cache": False}
        expected = weights_of(loaded.model, ids, **more)
        assert len(example.weights) == sum(len(layers) for layers in expected.values())
        for site, weights in example.weights.items():
            stack = "attentions" if name != "t5" else f"{'cross' if site.kind == 'cross' else site.name[:7]}_attentions"
            torch.testing.assert_close(weights, expected[stack][site.layer][0].float(), atol=1e-7, rtol=1e-6)


def test_queries_and_keys_of_a_cross_attention_may_be_of_different_numbers(tmp_path):
    model = load_model(model_folder(tmp_path, "t5")).model.double()
    requested, told = torch.randint(7, len(NAMES), (1, 11)), torch.randint(7, len(NAMES), (1, 13))
    found = ExampleWeights()
    session = polyhead.observe(model, statistics=False, collect=[CallRecorder(found.record)])
    session.metadata = BatchMetadata(documents=torch.tensor([3]))
    with torch.no_grad(), session:
        model(input_ids=told, decoder_input_ids=requested, use_cache=False)
    expected = weights_of(model, told, decoder_input_ids=requested, use_cache=False)["cross_attentions"]
    cross = {site: x for site, x in found.of(3).items() if site.kind == "cross"}
    assert len(cross) == 2
    for site, weights in cross.items():
        assert weights.shape == (4, 11, 13)
        torch.testing.assert_close(weights, expected[site.layer][0].float(), atol=1e-7, rtol=1e-6)


def test_a_module_that_serves_several_layers_shows_their_mean(tmp_path):
    config = transformers.AlbertConfig(
        vocab_size=len(NAMES), embedding_size=16, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=32, max_position_embeddings=40,
    )  # fmt: skip
    model = transformers.AlbertModel(config).eval()
    ids = torch.randint(7, len(NAMES), (1, 11))
    found = ExampleWeights()
    session = polyhead.observe(model, statistics=False, collect=[CallRecorder(found.record)])
    session.metadata = BatchMetadata(documents=torch.tensor([0]))
    with torch.no_grad(), session:
        model(input_ids=ids)
    (weights,) = found.of(0).values()
    expected = torch.stack(weights_of(model, ids)["attentions"])[:, 0].mean(0)
    torch.testing.assert_close(weights, expected, atol=2e-6, rtol=1e-4)


def test_a_short_text_is_taken_whole(tmp_path):
    folder = model_folder(tmp_path / "model", "bert")
    (tmp_path / "short.txt").write_text("a w1 w2 w3 . w4 w5 w6 w7 w8")
    settings = Settings(str(folder), str(tmp_path / "short.txt"))
    reader = Reader.of(load_model(folder), settings)
    (batch,) = example_batches(reader)
    assert token_texts(reader.loaded.tokenizer, batch.ids[0].tolist())[1:-1] == (
        "a", "w1", "w2", "w3", ".", "w4", "w5", "w6", "w7", "w8"
    )  # fmt: skip


# ---- what tokens stand for


def test_hostile_names_in_a_vocabulary_are_told_as_they_are():
    names = ["<script>alert(1)</script>", "\u202eback", "a\u200bb", "x" * 1000]
    made = tokenizer()
    made.add_tokens(names)
    ids = made.convert_tokens_to_ids(names)
    assert token_texts(made, ids) == tuple(names)


def test_pieces_of_characters_go_by_the_name_that_the_vocabulary_has_for_them():
    class Bytes:
        """A vocabulary of bytes, of which some are no character."""

        def decode(self, ids, **options):
            return {0: "\ufffd", 1: "好", 2: ""}[ids[0]]

        def convert_ids_to_tokens(self, token):
            return {0: "å¥", 1: "å¥½", 2: "<pad>"}[token]

    assert token_texts(Bytes(), [0, 1, 2]) == ("å¥", "好", "<pad>")


def test_white_space_is_printed_as_text_and_not_by_its_name_in_the_vocabulary(monkeypatch):
    class Tokenizer:
        texts = (" the", " ", "\n\n", "\ufffd", "")

        def decode(self, ids, skip_special_tokens):
            return self.texts[ids[0]]

        def convert_ids_to_tokens(self, token):
            return ("Ġthe", "Ġ", "ĊĊ", "âĢ", "<unused>")[token]

    class State:
        def compute(self, most):
            return torch.arange(5)[None], torch.full((1, 5), 0.2)

    monkeypatch.setattr(most_attended, "states_of", lambda *_: {"site": State()})
    (keys,) = most_attended.top_keys_of({}, Tokenizer(), torch.ones(5))["site"]
    assert [key.text for key in keys] == ["the", "␣", "\\n\\n", "âĢ", "<unused>"]
