"""The merging benchmark finds planted groups and reports the held-out loss of each method."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import polyhead.integrations.huggingface
from benchmarks import merging
from benchmarks.app import app
from benchmarks.surgery_quality.language import LanguageTask
from polyhead.surgery import KeyTransform, change_key_basis, change_value_basis, find_layers, fingerprint, read_heads
from polyhead.surgery.adapters.head_weights import pack_heads
from tests.surgery.drawn_heads import allowed_map, conditioned, heads_of

VOCABULARY = 61


def planted(place: list[int], kv_heads: int, *, change_bases: bool = False) -> Any:
    """A small causal model; head i of its last layer computes what head place[i] did, in any basis."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=len(place),
        num_key_value_heads=kv_heads,
        head_dim=8,
        vocab_size=VOCABULARY,
        initializer_range=0.3,
        attn_implementation=polyhead.integrations.huggingface.register(),
    )
    model = LlamaForCausalLM(config).eval()
    layer = find_layers(model)[1]
    heads = read_heads(model, layer)
    own = place if kv_heads == len(place) else list(range(kv_heads))
    heads = replace(
        heads, query=heads.query[place], output=heads.output[place], key=heads.key[own], value=heads.value[own]
    )
    if change_bases:
        transform = KeyTransform("half", 8)
        heads = change_key_basis(
            heads, torch.stack([allowed_map(transform, 8, seed) for seed in range(len(place))]), transform
        )
        heads = change_value_basis(heads, torch.stack([conditioned(8, seed, 5.0) for seed in range(len(place))]))
    with torch.no_grad():
        for name, value in pack_heads(model, layer, heads).items():
            model.get_parameter(name).copy_(value)
    return model


def task_of(model: Any) -> LanguageTask:
    tokens = torch.randint(VOCABULARY, (4096,), generator=torch.Generator().manual_seed(1))
    return LanguageTask(model, tokens, context=64, batch=8)


def test_a_chain_is_no_group_and_a_silent_head_is_in_none():
    angles = torch.tensor([0.0, 0.3, 0.6, 0.9, 1.2])
    assert merging.complete_groups(torch.cos(angles[:, None] - angles), 0.9) == [(0, 1), (2, 3)]
    cosines = torch.full((3, 3), torch.nan)
    cosines[:2, :2] = 1.0
    assert merging.complete_groups(cosines, 0.5) == [(0, 1)]


def test_a_group_in_other_bases_is_fused_and_pruned_without_loss_and_merged_with_some():
    model = planted([0, 1, 0, 3, 0, 5], 6, change_bases=True)
    before = fingerprint(model)
    found, row = merging.judged(task_of(model))
    assert found["groups"] == 1
    assert found["in_part"] == found["not_at_all"] == 0
    assert found["calibrated_tokens"] == 38 * 64
    assert found["held_out_tokens"] == 12 * 64
    assert row["heads"] == (0, 2, 4)
    assert row["cosine"] == pytest.approx(1, abs=1e-3)
    for split in ("calibrated", "held_out"):
        assert row[split]["fused"] < 1e-4
        assert row[split]["pruned"] < 1e-4
        assert row[split]["merged"] > 1e-2
    assert row["whole"]["fused"]["ratio"][0] == pytest.approx(1, abs=1e-3)
    assert fingerprint(model) == before


def test_heads_of_one_key_head_are_merged_and_the_rest_of_their_group_is_left():
    model = planted([0, 0, 2, 3, 4, 5], 2)
    found, row = merging.judged(task_of(model), whole=False)
    assert (found["groups"], row["heads"], row["key_heads"]) == (1, (0, 1), 1)
    assert row["held_out"]["merged"] < 1e-4
    assert row["held_out"]["fused"] == row["held_out"]["merged"]
    assert "whole" not in row
    heads = heads_of(6, 3)  # heads 0 and 1 read KV head 0, 2 and 3 KV head 1, 4 and 5 KV head 2
    assert merging.parts_to_merge(heads, (0, 1, 2)) == [(0, 1)]
    assert merging.parts_to_merge(heads, (0, 1, 4, 5)) == [(0, 1), (4, 5)]
    assert merging.parts_to_merge(heads, (0, 2, 4)) == []
    assert merging.parts_to_merge(heads_of(6, 6), (0, 2, 4)) == [(0, 2, 4)]


def test_what_is_lost_is_what_the_layer_with_the_edit_misses():
    model = planted([0, 1, 0, 3, 0, 5], 6, change_bases=True)
    task = task_of(model)
    layer = find_layers(model)[1]
    held_out = merging.held_out_batches(task)
    seen: list[torch.Tensor] = []
    hook = model.get_submodule(layer.output).register_forward_hook(lambda _, given, gave: seen.append(gave.double()))
    moments = [merging.collect_moments(model, text)[layer.path] for text in (task.calibration, held_out)]
    pieces = [merging.Streams(model, text).before(layer, {}) for text in (task.calibration, held_out)]
    trial = merging.Trial(model, layer, read_heads(model, layer), *pieces, *moments)
    ways = trial.ways((0, 2, 4), merging.find_key_transforms(model, task.calibration[0])[layer.path])
    for outcome in ways.values():
        wrote = []
        for parameters in ({}, pack_heads(model, layer, outcome.heads)):
            seen.clear()
            with merging.swapped_parameters(model, parameters), torch.no_grad():
                for batch in held_out:
                    model(**batch)
            wrote.append(torch.cat(seen))
        share = (wrote[1] - wrote[0]).square().sum() / wrote[0].square().sum()
        assert outcome.held_out == pytest.approx(float(share), rel=1e-3, abs=1e-6)
    hook.remove()


def test_without_groups_pairs_are_tried_and_everything_is_written_and_summed_up(tmp_path, monkeypatch):
    model = planted([0, 1, 2, 3], 4)

    def read(text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCABULARY for letter in text]}

    loaded = SimpleNamespace(model=model, tokenizer=read, name="small", kind="causal")
    monkeypatch.setattr("polyhead.workflows.model_loading.load_model", lambda *given, **options: loaded)
    draw = torch.Generator().manual_seed(2)
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + int(x)) for x in torch.randint(26, (6000,), generator=draw)), encoding="utf-8")
    output = tmp_path / "rows.jsonl"
    arguments = ["merging", "--text", text, "--pairs", "1", "--output", output, "--device", "cpu"]
    done = CliRunner().invoke(app, [str(x) for x in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert rows[0]["kind"] == "found"
    assert {row["kind"] for row in rows[1:]} == {"pair"}
    assert {row["layer"] for row in rows[1:]} == {layer.path for layer in find_layers(model)}
    assert all(row["machine"]["versions"]["torch"] == torch.__version__ for row in rows)
    shown = done.output
    assert "groups of similar heads: 0 (" in shown
    assert f"pairs that were tried: {len(rows) - 1}\n" in shown
    assert "| fused: made one in closed form |" in shown
