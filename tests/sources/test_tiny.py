"""The model that comes with polyhead: small, plain transformers, and with the heads that its card names."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyhead import inspect
from polyhead.sources import packaged
from polyhead.workflows.model_loading import load_model

transformers = pytest.importorskip("transformers")

PREVIOUS_TOKEN = (0, 4)
INDUCTION_LAYER = 1


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    """The model with eager attention, and its tokenizer, loaded without polyhead."""
    folder = packaged.tiny()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def weights(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Materialised attention weights, [batch, heads, queries, keys] of each layer."""
    return list(model(input_ids=ids, output_attentions=True).attentions)


def test_the_package_stays_small() -> None:
    folder = packaged.tiny()
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8_000_000


def test_it_computes_in_float32_by_default() -> None:
    model = load_model("tiny", dtype="saved").model
    assert {x.dtype for x in model.parameters()} == {torch.float32}


def test_every_byte_is_a_token(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    text = bytes(range(256)).decode("latin1") + "Zürich, 天"
    ids = tokenizer(text)["input_ids"]
    assert ids == [3 + byte for byte in text.encode()]
    assert tokenizer.decode(ids) == text


def test_materialised_attention_shows_the_previous_token_head(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    text = "The ferry was late again, and nobody on the pier had expected anything else of it that winter. " * 2
    layers = weights(model, torch.tensor([tokenizer(text)["input_ids"]]))
    scores = torch.stack([layer.diagonal(-1, 2, 3).mean((0, 2)) for layer in layers])
    layer, head = PREVIOUS_TOKEN
    assert scores[layer, head] > 0.9
    assert scores.flatten().topk(2).values[1] < 0.6


def test_materialised_attention_shows_the_induction_heads(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    period = 100
    ids = torch.randint(3, 259, (4, period), generator=torch.Generator().manual_seed(7)).repeat(1, 2)
    scores = torch.stack([layer[:, :, period:].diagonal(1, 2, 3).mean((0, 2)) for layer in weights(model, ids)])
    assert (scores[INDUCTION_LAYER] > 0.5).all()
    others = torch.cat([scores[:INDUCTION_LAYER], scores[INDUCTION_LAYER + 1 :]])
    assert others.max() < 0.05
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, period:-1]
    assert (logits.argmax(-1) == ids[:, period + 1 :]).float().mean() > 0.98


def test_inspection_finds_the_same_heads(leave_out: Callable[..., None]) -> None:
    leave_out("examples", "distances", "pronouns")
    found = inspect("tiny", tokens=512, context=128, importance="none", chance=False)
    heads = {
        role: {(head.site.layer, head.head) for head in found.roles if role in head.roles}
        for role in ("previous", "induction")
    }
    assert heads["previous"] == {PREVIOUS_TOKEN}
    assert heads["induction"]
    assert {layer for layer, _ in heads["induction"]} == {INDUCTION_LAYER}
    assert found.facts["documents"] == 1
    printed = repr(found)
    assert printed.startswith("Inspection of tiny: LlamaForCausalLM")
    assert "40 heads; " in printed
    assert len(printed.splitlines()) == 1 + len(found.findings) < 20
    with pytest.raises(TypeError, match="not iterable"):
        _ = "induction" in found.roles[0]  # type: ignore[operator]
    with pytest.raises(KeyError, match="'inductive'; measured: "):
        found.roles[0]["inductive"]


def test_the_card_says_what_the_record_of_the_training_says() -> None:
    folder = packaged.tiny()
    card, record = (folder / "README.md").read_text(), json.loads((folder / "training.json").read_text())
    scores = record["scores"]
    induction = scores["induction"][INDUCTION_LAYER]
    sources = record["sources"]
    for words in (
        f"{scores['previous_token'][0][4]:.0%} of its weight",
        f"{min(induction):.0%} to {max(induction):.0%}",
        f"{sources['wikipedia']['held_out_bits_per_byte']:.2f} bits per byte",
        f"{sources['plays']['held_out_bits_per_byte']:.2f} on held-out plays",
        f"{record['seconds']} seconds",
        record["commit"][:7],
    ):
        assert words in card
