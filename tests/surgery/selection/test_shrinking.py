"""Budgets: parsed, met with the fewest heads, and the curve with its controls."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from polyhead.costs import Workload
from polyhead.errors import OptionError
from polyhead.surgery import fingerprint, preview
from polyhead.surgery.options import Target
from polyhead.surgery.selection.budgets import COUNTED_CALL, Size, other_flops, prune_edits
from polyhead.surgery.selection.curve import free_choices, measure_curve
from polyhead.surgery.selection.evidence import Evidence, Objectives
from polyhead.surgery.selection.free import FreeSelection
from polyhead.surgery.selection.quality import Fidelity, Probe, language_slope
from polyhead.surgery.selection.search import max_measurements, search_heads
from tests.surgery.gated import FAMILIES, batches_of_tokens, build, decoder


def test_targets_are_read_and_refused():
    assert Target.parse("2x-cache") == Target("cache", 2.0)
    assert [str(Target.parse(x)) for x in ("12.5%-heads", "2x-cache", "1.2x-faster")] == [
        "12.5% fewer heads",
        "2 times less cache",
        "1.2 times fewer FLOPs",
    ]
    for text in ("30%", "0%-heads", "100%-heads", "1x-cache", "2x-smaller", "fast"):
        with pytest.raises(OptionError, match="a target must be a share of heads"):
            Target.parse(text)
    assert Size(0.7, 1.0, 0.9).reaches(Target("heads", 0.3))
    assert not Size(0.7, 1.0, 0.9).reaches(Target("cache", 1.1))


def test_a_budget_takes_the_fewest_heads_that_reach_it(batches):
    model = build(FAMILIES["llama"])
    model.set_attn_implementation("sdpa")
    evidence = Evidence(model, batches, Objectives(slope=language_slope))
    selection = FreeSelection(evidence)
    for text in ("30%-heads", "1.1x-faster"):
        target = Target.parse(text)
        removed = selection.for_target(target)
        count = sum(map(len, removed.values()))
        assert selection.size(removed).reaches(target)
        assert not selection.size(selection.removed(count - 1, selection.orders)).reaches(target)
    with pytest.raises(OptionError, match="every layer keeps at least one head, which leaves 25% of the heads"):
        selection.for_target(Target("heads", 0.9))
    by_keys = FreeSelection(evidence, by_kv_heads=True)
    removed = by_keys.for_target(Target("cache", 1.3))
    assert by_keys.size(removed).cache == 0.75
    assert {len(heads) for heads in removed.values()} == {2}
    with pytest.raises(OptionError, match="pruning KV heads needs the criterion compensated"):
        FreeSelection(evidence, by_kv_heads=True, criterion="plain")


def test_flops_outside_of_attention_are_those_of_its_linear_layers():
    model = build(FAMILIES["llama"])
    body = sum(p.numel() for name, p in model.named_parameters() if "mlp" in name and p.ndim == 2)
    assert other_flops(model, COUNTED_CALL) == 2 * 512 * (body + model.lm_head.weight.numel())


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "aria_text"])
def test_flops_outside_of_attention_include_the_experts_that_a_token_passes_through(name):
    experts = {"num_local_experts": 5, "num_experts": 5, "moe_num_experts": 5, "num_experts_per_tok": 3, "moe_topk": 3}
    sizes = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 31, "moe_intermediate_size": 29}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 14}
    config = transformers.AutoConfig.for_model(name, **sizes, **heads, **experts, pad_token_id=0)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **options).eval()
    tokens = torch.arange(1, 14)[None]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    counted = counter.get_flop_counts()
    attention = sum(sum(flops.values()) for path, flops in counted.items() if path.endswith("self_attn"))
    assert other_flops(model, Workload.forward(13)) == counter.get_total_flops() - attention


def test_a_curve_has_its_controls(batches):
    model = build(FAMILIES["bert"])
    before = fingerprint(model)
    selection = FreeSelection(Evidence(model, batches, Objectives(slope=Probe())))
    reported = []
    choices = free_choices(selection, shares=(0.25, 0.26, 0.5, 0.99), seeds=(0, 1))
    found = measure_curve(selection, choices, Fidelity(model, batches), progress=reported.append)
    assert [point.removed for point in found] == [2, 4]
    assert reported[-1].done == sum(choice.measurements for choice in choices) == 8
    assert all(len(point.random) == 2 for point in found)
    assert all(point.compensated.value > point.not_compensated.value for point in found)
    assert found[0].compensated.value > found[1].compensated.value
    assert fingerprint(model) == before


def test_sizes_are_those_that_edits_leave(batches):
    selection = FreeSelection(Evidence(build(FAMILIES["llama"]), batches, Objectives(slope=language_slope)))
    for steps in (1, 4, 5, 2):
        removed = selection.removed(steps, selection.orders)
        counted = preview(selection.evidence.model, prune_edits(selection.evidence.layers, removed))
        rest = other_flops(selection.evidence.model, COUNTED_CALL)
        assert selection.size(removed) == Size(
            counted.after.heads / counted.before.heads,
            counted.after.cache_bytes_per_token / counted.before.cache_bytes_per_token,
            (counted.after.flops + rest) / (counted.before.flops + rest),
        )
    assert selection.size({}) == selection.size(dict.fromkeys(removed, ())) == Size(1.0, 1.0, 1.0)


def misleading():
    """A model whose last layer has the largest weights but almost no output.

    Its values read a channel with large weights that the preceding norm removes.
    """
    model = decoder(heads=6, kv_heads=3, hidden=48, head_dim=8)
    last = model.model.layers[-1]
    with torch.no_grad():
        last.self_attn.o_proj.weight.mul_(0.01)
        last.input_layernorm.weight[0] = 0
        last.self_attn.v_proj.weight[:, 0] = 1e4
    return model


def test_a_search_finds_where_heads_matter_less():
    model, text = misleading(), batches_of_tokens()
    before = fingerprint(model)
    selection = FreeSelection(Evidence(model, text, Objectives(slope=language_slope)), criterion="magnitude")
    first_layer, last_layer = selection.evidence.layers
    target, quality, reported = Target("heads", 0.5), Fidelity(model, text[:2]), []
    found = search_heads(selection, target, quality, progress=reported.append)
    assert found.first == selection.for_target(target)
    assert {path: len(own) for path, own in found.first.items()} == {first_layer: 5, last_layer: 1}
    assert {path: len(own) for path, own in found.removed.items()} == {first_layer: 1, last_layer: 5}
    assert found.moved == 4
    assert found.loss < 0.5 * found.first_loss
    assert 1 - quality.measure(selection.evidence.compensated(found.removed)).value == pytest.approx(found.loss)
    assert 1 - quality.measure(selection.evidence.compensated(found.first)).value == pytest.approx(found.first_loss)
    assert reported[-1].done == found.measured <= max_measurements(selection)
    assert fingerprint(model) == before
    # The losses that are measured say where to begin; without moves that is where it ends.
    assert search_heads(selection, target, quality, tries=1).removed == found.removed


@pytest.mark.parametrize(
    ("text", "by_kv_heads"),
    [("1.8x-faster", False), ("1.15x-cache", False), ("1.3x-cache", True), ("40%-heads", False)],
)
def test_a_search_keeps_to_its_target(text, by_kv_heads):
    """The loss is the number of KV heads without a reader, so an unconstrained search would restore them."""
    model, batches = decoder(heads=6, kv_heads=3, hidden=48, head_dim=8), batches_of_tokens()
    selection = FreeSelection(Evidence(model, batches, Objectives(slope=language_slope)), by_kv_heads=by_kv_heads)
    target = Target.parse(text)

    class KeyHeads(Fidelity):
        def _loss(self) -> float:
            rows = [layer.self_attn.o_proj.weight.T.reshape(3, -1) for layer in model.model.layers]
            return float(sum((own == 0).all(1).sum() for own in rows))

    found = search_heads(selection, target, KeyHeads(model, batches[:1]))
    assert selection.size(found.first).reaches(target)
    assert selection.size(found.removed).reaches(target)
    assert found.loss <= found.first_loss
    if target.kind == "heads":
        assert sum(map(len, found.removed.values())) == sum(map(len, found.first.values())) == 5
        assert found.loss < found.first_loss
    for path, own in found.removed.items() if by_kv_heads else ():
        readers = selection.evidence.heads[path].readers
        assert set(own) == {head for group in readers if set(group) & set(own) for head in group}
