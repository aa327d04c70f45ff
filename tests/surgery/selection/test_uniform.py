"""Uniform pruning: the cheapest of all sets, and the layouts that a native class supports."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
from transformers import LlamaForCausalLM

from polyhead.errors import OptionError
from polyhead.surgery import PruneHeads, apply, find_layers, save
from polyhead.surgery.compensation.least_squares import OutputRegression, PrecomputedProjections, swapped_projections
from polyhead.surgery.options import Target
from polyhead.surgery.selection import curve, uniform
from polyhead.surgery.selection.budgets import prune_edits
from polyhead.surgery.selection.criteria import pruning_order
from polyhead.surgery.selection.curve import choices_of, measure_curve
from polyhead.surgery.selection.evidence import Evidence, Objectives
from polyhead.surgery.selection.measured_speed import stages
from polyhead.surgery.selection.quality import Fidelity, language_slope
from polyhead.surgery.selection.search import refined_sets, search_heads
from polyhead.surgery.selection.uniform import (
    RankedSet,
    UniformLayout,
    UniformSelection,
    fits_native,
    heads_for_target,
    ranked_sets,
    uniform_layouts,
    uniform_sets,
)
from tests.surgery.blocks import grouped, loss_without, of_layer, text
from tests.surgery.gated import FAMILIES, batches_of_tokens, build, decoder


@pytest.mark.parametrize(("heads_left", "keys_left", "options"), [(3, 3, 8), (4, 2, 3), (2, 2, 12), (2, 1, 3)])
def test_heads_that_go_are_the_cheapest_of_all_sets_in_equal_groups(heads_left, keys_left, options):
    model = grouped()
    moments, heads = of_layer(model, text())
    problem = OutputRegression.of(moments, heads, 1e-10)
    found = ranked_sets(moments, heads, heads_left, keys_left, ridge=1e-10)[0].heads
    size = heads_left // keys_left
    sets = []
    for removed in itertools.combinations(range(6), 6 - heads_left):
        left = [sum(heads.key_heads[head] == key for head in range(6) if head not in removed) for key in range(3)]
        if sorted(left) == [0] * (3 - keys_left) + [size] * keys_left:
            sets.append(removed)
    assert len(sets) == options
    assert found == min(sets, key=lambda removed: loss_without(problem, removed))


def test_heads_of_many_sets_go_one_after_the_other(monkeypatch):
    monkeypatch.setattr(uniform, "MAX_SETS", 0)
    moments, heads = of_layer(grouped(), text())
    for left, keys in ((3, 3), (4, 2), (2, 2)):
        removed = ranked_sets(moments, heads, left, keys)[0].heads
        counts = [sum(heads.key_heads[head] == key for head in range(6) if head not in removed) for key in range(3)]
        assert sorted(counts) == [0] * (3 - keys) + [left // keys] * keys
    with pytest.raises(OptionError, match=r"6 heads over 3 KV heads can be reduced to fewer of both.*got 5 over 3"):
        ranked_sets(moments, heads, 5, 3)


def test_heads_without_output_are_pruned_to_the_layout_too():
    model = grouped()
    moments, heads = of_layer(model, text())
    moments.total.zero_()
    moments.products.zero_()
    for left, keys in ((3, 3), (4, 2), (2, 2)):
        removed = ranked_sets(moments, heads, left, keys)[0].heads
        counts = [sum(heads.key_heads[head] == key for head in range(6) if head not in removed) for key in range(3)]
        assert sorted(counts) == [0] * (3 - keys) + [left // keys] * keys
    order = pruning_order(moments, heads)
    assert (len(order.heads), set(order.losses)) == (5, {0.0})


def test_what_a_stock_class_holds_is_known_before_a_weight_is_touched():
    llama, bert = build(FAMILIES["llama"]), build(FAMILIES["bert"])
    for model, even in ((llama, True), (bert, False)):
        layers = [layer for layer in find_layers(model) if not layer.refusals]
        count = layers[0].layout.num_heads
        assert count == 4
        groups = [[layer.layout.key_head(head) for head in range(count)] for layer in layers]
        removed = {
            layer.path: tuple(keys.index(key) for key in set(keys)) for layer, keys in zip(layers, groups, strict=True)
        }
        removed = removed if even else {layer.path: (0, 1) for layer in layers}
        assert fits_native(model, removed) == even
        assert not fits_native(model, {layers[0].path: removed[layers[0].path]})
        assert fits_native(model, {})


def uniform_selection(**options) -> UniformSelection:
    model = decoder(heads=6, kv_heads=3, hidden=48, head_dim=8, **options)
    evidence = Evidence(model, batches_of_tokens(), Objectives(slope=language_slope))
    return UniformSelection(evidence)


def test_layouts_are_those_that_a_stock_class_holds():
    # Heads of Llama must divide the width of the model, as 3 and 4 do not divide 50; those of Qwen3 need not.
    assert [str(x) for x in uniform_layouts(decoder(6, 3, 48, 8))] == ["4/2", "3/3", "2/2", "2/1", "1/1"]
    assert [str(x) for x in uniform_layouts(decoder(5, 5, 50, 10))] == ["2/2", "1/1"]
    assert [str(x) for x in uniform_layouts(decoder(5, 5, 50, 10, name="qwen3"))] == ["4/4", "3/3", "2/2", "1/1"]
    uneven = decoder(6, 3, 48, 8)
    apply(uneven, [PruneHeads(0, (0,))])
    assert [str(x) for x in uniform_layouts(uneven)] == ["3/3", "2/2", "1/1"]
    with pytest.raises(OptionError, match=r"got a BertModel, which has none.*--form padded .*or --form uneven"):
        list(uniform_layouts(build(FAMILIES["bert"])))
    stack = "model.layers.*.self_attn"
    assert [str(x) for x in uniform_layouts(decoder(6, 3, 48, 8), stack)] == ["4/2", "3/3", "2/2", "2/1", "1/1"]
    with pytest.raises(OptionError, match=r"stack must be one of model\.layers\.\*\.self_attn, got 'decoder'"):
        list(uniform_layouts(decoder(6, 3, 48, 8), "decoder"))


def test_the_largest_layout_that_reaches_a_target_is_taken():
    selection = uniform_selection()
    for target, layout, words in (
        ("30%-heads", (4, 2), "4 of 12 heads are pruned, 4/2 heads/KV heads remain in every layer"),
        ("50%-heads", (3, 3), "6 of 12 heads are pruned, 3/3 heads/KV heads remain in every layer"),
        ("60%-heads", (2, 2), "8 of 12 heads are pruned, 2/2 heads/KV heads remain in every layer"),
        ("3x-cache", (2, 1), "8 of 12 heads are pruned, 2/1 heads/KV heads remain in every layer"),
    ):
        removed = selection.for_target(Target.parse(target))
        assert selection.summary(removed) == words
        assert selection.size(removed).reaches(Target.parse(target))
        assert fits_native(selection.evidence.model, removed)
        sets = uniform_sets(selection.evidence, *layout)
        assert removed == {path: own[0].heads for path, own in sets.items()}
    with pytest.raises(OptionError, match=r"can have heads/KV heads 4/2, 3/3, 2/2, 2/1, 1/1, of which 1/1 "):
        selection.for_target(Target("cache", 4.0))
    assert [sum(map(len, removed.values())) for removed in stages(selection)] == [4, 6, 8, 8, 10]


@pytest.mark.parametrize(
    ("sizes", "target", "words"),
    [
        (
            (5, 5, 50, 10),
            "45%-heads",
            r"2/2 leaves 40% of the heads, .*; use --target 60%-heads \(2/2\), --form padded",
        ),
        (
            (8, 8, 64, 8),
            "30%-heads",
            r"4/4 leaves 50% of the heads, .*; use --target 50%-heads \(4/4\), --form padded",
        ),
        ((5, 5, 50, 10), "65%-heads", r"use --target 60%-heads \(2/2\), --target 80%-heads \(1/1\), --form padded"),
        ((6, 3, 48, 8), "1.2x-cache", r"1.2 times less cache, for which 4/2 leaves .*; use --target 1.5x-cache \("),
        ((9, 9, 72, 8), "45%-heads", r"use --target 33.3%-heads \(6/6\), --target 55.5%-heads \(4/4\), "),
    ],
)
def test_a_layout_far_beyond_the_target_is_refused_with_those_around_it(sizes, target, words):
    model = decoder(*sizes)
    with pytest.raises(OptionError, match=rf"exceeded by at most 10 percentage points, got .*{words}") as raised:
        heads_for_target(model, Target.parse(target), option="--target")
    for choice in re.findall(r"--target (\S+) ", str(raised.value)):
        heads_for_target(model, Target.parse(choice), option="--target")


def test_a_layout_that_transformers_refuses_is_named_with_its_reason():
    reason = r"4/4, 2/2, 1/1 \(not 5/5: LlamaForCausalLM cannot be built: .*hidden size \(64\) .* heads \(5\)\)"
    with pytest.raises(
        OptionError,
        match=rf"can have heads/KV heads {reason}, and a target is exceeded by at most 10 percentage points",
    ):
        heads_for_target(decoder(8, 8, 64, 8), Target("heads", 0.3), option="--target")
    with pytest.raises(OptionError, match=r"can have heads/KV heads 4/2, .*1/1, and a target") as raised:
        heads_for_target(decoder(6, 3, 48, 8), Target("cache", 1.2), option="--target")
    assert "(not" not in str(raised.value)  # no other layout would do


def test_the_curve_of_layouts_has_its_controls(monkeypatch):
    selection = uniform_selection()
    quality = Fidelity(selection.evidence.model, batches_of_tokens()[:1])
    choices = choices_of(selection, seeds=(0, 1))
    for choice in choices:
        assert choice.random[0] != choice.random[1]
        assert all(fits_native(selection.evidence.model, removed) for removed in (choice.removed, *choice.random))
        assert {len(own) for removed in choice.random for own in removed.values()} == {
            len(x) for x in choice.removed.values()
        }
    points = measure_curve(selection, choices, quality)
    assert [point.layout for point in points] == ["4/2", "3/3", "2/2", "2/1", "1/1"]
    assert [point.removed for point in points] == [4, 6, 8, 8, 10]
    monkeypatch.setattr(curve, "MAX_LAYOUTS", 3)
    assert [choice.layout for choice in choices_of(selection)] == ["4/2", "2/2", "1/1"]


def test_sets_are_all_that_end_in_a_layout_the_cheapest_first():
    selection = uniform_selection()
    sets = selection.sets(UniformLayout(3, 3))
    for path, own in sets.items():
        groups = selection.evidence.heads[path].readers
        assert len(own) == math.prod(map(len, groups)) == len({x.heads for x in own})
        assert [x.cost for x in own] == sorted(x.cost for x in own)
        assert all(len(set(group) - set(x.heads)) == 1 for x in own for group in groups)


def test_a_search_exchanges_heads_within_layers_while_that_helps():
    selection, target = uniform_selection(), Target("heads", 0.5)
    quality = Fidelity(selection.evidence.model, batches_of_tokens()[:1])
    reported = []
    found = search_heads(selection, target, quality, tries=16, progress=reported.append)
    assert reported[-1].done == found.measured == 1 + 2 * 7
    assert found.first == selection.for_target(target)
    assert found.loss < found.first_loss
    assert found.moved > 0
    assert {path: len(own) for path, own in found.removed.items()} == {
        path: len(own) for path, own in found.first.items()
    }
    assert fits_native(selection.evidence.model, found.removed)
    assert quality.loss(selection.evidence.compensated(found.removed)) == pytest.approx(found.loss, abs=1e-9)


def test_a_search_of_sets_takes_what_measures_best_whatever_the_evidence_says():
    """Two layers of two sets each; the evidence prefers the wrong one in the first."""
    ranked = {"a": [RankedSet(1.0, (0,)), RankedSet(1.2, (1,))], "b": [RankedSet(1.0, (2,)), RankedSet(1.1, (3,))]}
    losses = {(0,): 3.0, (1,): 1.0, (2,): 1.0, (3,): 2.0}

    def measure(outputs):
        return sum(losses[heads] for heads in outputs.values())

    found = refined_sets(ranked, lambda path, heads: heads, measure)
    assert found == ({"a": (1,), "b": (2,)}, 2.0, 4.0)
    assert refined_sets(ranked, lambda path, heads: heads, measure, tries=1)[0] == {"a": (0,), "b": (2,)}
    with pytest.raises(OptionError, match="tries must be at least 1, got 0"):
        refined_sets(ranked, lambda path, heads: heads, measure, tries=0)


def test_a_model_of_one_layout_is_stock_and_gives_the_same(tmp_path):
    selection = uniform_selection(dtype=torch.float32)
    removed = selection.for_target(Target("heads", 0.5))
    outputs, ids = selection.evidence.compensated(removed), batches_of_tokens()[0]["input_ids"]
    with torch.no_grad():
        with swapped_projections(selection.evidence.model, selection.evidence.layers, outputs):
            wanted = selection.evidence.model(ids).logits
        apply(
            selection.evidence.model,
            prune_edits(selection.evidence.layers, removed),
            compensation=PrecomputedProjections(outputs),
        )
        assert save(selection.evidence.model, tmp_path / "saved", form="uniform").loads_natively
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved").eval()
        found = loaded(ids).logits
    assert (loaded.config.num_attention_heads, loaded.config.num_key_value_heads) == (3, 3)
    torch.testing.assert_close(found, selection.evidence.model(ids).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
