"""Edits of a transformers model through the module around it: config, original heads, saving, undoing."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from polyhead.errors import CheckpointError, OptionError
from polyhead.observation import observe
from polyhead.surgery import EditRecord, PruneHeads, apply, head_origins, join_records, load, save, undo
from polyhead.surgery.edits.applying import take_shape

PATHS = ("inner.layers.0.self_attn", "inner.layers.1.self_attn")
SIZES = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 2}
IDS = torch.arange(7)[None]


class Outer(nn.Module):
    def __init__(self, config: LlamaConfig | None = None) -> None:
        super().__init__()
        self.inner = LlamaModel(config or LlamaConfig(**SIZES, num_attention_heads=12, num_key_value_heads=6)).eval()
        self.head = nn.Linear(48, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(ids).last_hidden_state)


def heads_in(config: LlamaConfig) -> tuple[int, int, int]:
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim


def edits(*heads: int) -> list[PruneHeads]:
    return [PruneHeads(layer, heads) for layer in (0, 1)]


@torch.no_grad()
def test_the_config_inside_describes_the_edited_heads_and_comes_back(tmp_path):
    outer = Outer()
    whole = outer(IDS)
    record = apply(outer, edits(0, 1, 4, 5))
    assert heads_in(outer.inner.config) == (8, 4, 4)
    expected = outer.inner(IDS).last_hidden_state
    outer.inner.save_pretrained(tmp_path / "native")
    again = LlamaModel.from_pretrained(tmp_path / "native")
    torch.testing.assert_close(again(IDS).last_hidden_state, expected, rtol=0, atol=0)
    save(outer.inner, tmp_path / "saved")
    torch.testing.assert_close(load(tmp_path / "saved")(IDS).last_hidden_state, expected, rtol=0, atol=0)
    with pytest.raises(OptionError, match=r"got Outer; save model.inner \(LlamaModel\) instead, load it and assign it"):
        save(outer, tmp_path / "outer")
    record.save(tmp_path / "record")
    undo(outer, EditRecord.load(tmp_path / "record"))
    assert heads_in(outer.inner.config) == (12, 6, 4)
    assert torch.equal(outer(IDS), whole)


def test_heads_keep_their_names_when_only_the_config_has_them(tmp_path):
    outer = Outer()
    record = apply(outer, edits(0, 1, 2, 3))
    outer.inner.save_pretrained(tmp_path / "native")
    assert set(json.loads((tmp_path / "native" / "config.json").read_text())["polyhead_heads"]) == {
        "layers.0.self_attn",
        "layers.1.self_attn",
    }
    outer.inner = LlamaModel.from_pretrained(tmp_path / "native")
    assert {path: x.heads[0] for path, x in head_origins(outer).items()} == dict.fromkeys(PATHS, (4,))
    with observe(outer) as session:
        outer(IDS)
    assert [site.label(0) for site in dict.fromkeys(session.profile.sites)] == ["4", "4"]
    both = join_records(record, apply(outer, edits(0, 1, 2, 3)))
    assert heads_in(outer.inner.config) == (4, 2, 4)
    assert {path: x.heads[0] for path, x in head_origins(outer).items()} == dict.fromkeys(PATHS, (8,))
    fresh = Outer()
    take_shape(fresh, both)
    assert heads_in(fresh.inner.config) == (4, 2, 4)
    fresh.load_state_dict(outer.state_dict())
    undo(fresh, both)
    assert heads_in(fresh.inner.config) == (12, 6, 4)
    assert not hasattr(fresh.inner.config, "polyhead_heads")


def test_a_config_of_two_models_is_left_to_the_one_that_is_not_edited():
    pair = nn.Module()
    config = LlamaConfig(**SIZES, num_attention_heads=12, num_key_value_heads=6)
    pair.a, pair.b = LlamaModel(config), LlamaModel(config)
    apply(pair, [PruneHeads(layer, (0, 1), stack="a.layers.*.self_attn") for layer in (0, 1)])
    assert heads_in(config) == (12, 6, 4)
    assert not hasattr(config, "polyhead_heads")


def test_uneven_layers_leave_the_config_inside():
    outer = Outer()
    record = apply(outer, [PruneHeads(0, (0, 1))])
    assert heads_in(outer.inner.config) == (12, 6, 4)
    assert set(outer.inner.config.polyhead_heads) == {"layers.0.self_attn"}
    undo(outer, record)
    assert not hasattr(outer.inner.config, "polyhead_heads")


def test_a_record_for_a_model_that_is_elsewhere_is_refused():
    outer = Outer()
    record = apply(outer, edits(0, 1))
    other = nn.Module()
    other.model = outer.inner
    with pytest.raises(CheckpointError, match=r"whose 'inner.layers.0.self_attn' has .* no such layer"):
        undo(other, record)
