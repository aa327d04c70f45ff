"""Budgets: read, reached with the fewest heads, and the whole curve beside its controls."""

from __future__ import annotations

import pytest

from polyhead.errors import OptionError
from polyhead.surgery import fingerprint
from polyhead.surgery.choosing.evidence import Evidence, Judge
from polyhead.surgery.choosing.quality import Fidelity, Probe, language_slope
from polyhead.surgery.choosing.shrinking import Shrinker, Size, Target, other_flops
from tests.huggingface import models
from tests.surgery.gated import FAMILIES, build


def test_targets_are_read_and_refused():
    assert Target.parse("2x-cache") == Target("cache", 2.0)
    assert [str(Target.parse(x)) for x in ("12.5%-heads", "2x-cache", "1.2x-faster")] == [
        "12.5% fewer heads",
        "2 times less cache",
        "1.2 times fewer FLOPs",
    ]
    for text in ("30%", "0%-heads", "100%-heads", "1x-cache", "2x-smaller", "fast"):
        with pytest.raises(OptionError, match="a target is a share of the heads"):
            Target.parse(text)
    assert Size(0.7, 1.0, 0.9).reaches(Target("heads", 0.3))
    assert not Size(0.7, 1.0, 0.9).reaches(Target("cache", 1.1))


def test_a_budget_takes_the_fewest_heads_that_reach_it(batches):
    model = build(FAMILIES["llama"])
    model.set_attn_implementation("sdpa")
    evidence = Evidence(model, batches, Judge(slope=language_slope))
    shrinker = Shrinker(evidence)
    for text in ("30%-heads", "1.1x-faster"):
        target = Target.parse(text)
        gone = shrinker.reach(target)
        count = sum(map(len, gone.values()))
        assert shrinker.size(gone).reaches(target)
        assert not shrinker.size(shrinker.gone(count - 1)).reaches(target)
    with pytest.raises(OptionError, match="a layer keeps a head at least, which leaves 25% of the heads"):
        shrinker.reach(Target("heads", 0.9))
    by_keys = Shrinker(evidence, by_key_heads=True)
    gone = by_keys.reach(Target("cache", 1.3))
    assert by_keys.size(gone).cache == 0.75
    assert {len(heads) for heads in gone.values()} == {2}
    with pytest.raises(OptionError, match="key heads go by the criterion repaired"):
        Shrinker(evidence, by_key_heads=True, criterion="plain")


def test_flops_outside_of_attention_are_those_of_its_linear_layers():
    model = build(FAMILIES["llama"])
    shrinker_work = Shrinker(
        Evidence(model, [{"input_ids": models.tokens()}], Judge(slope=language_slope)), weighting="none"
    ).work
    body = sum(p.numel() for name, p in model.named_parameters() if "mlp" in name and p.ndim == 2)
    assert other_flops(model, shrinker_work) == 2 * 512 * (body + model.lm_head.weight.numel())


def test_a_curve_has_its_controls(batches):
    model = build(FAMILIES["bert"])
    before = fingerprint(model)
    shrinker = Shrinker(Evidence(model, batches, Judge(slope=Probe())))
    told = []
    found = shrinker.curve(
        Fidelity(model, batches), shares=(0.25, 0.26, 0.5, 0.99), seeds=(0, 1), progress=lambda *x: told.append(x)
    )
    assert [point.gone for point in found] == [2, 4]
    assert told[-1] == (8, 8)
    assert all(len(point.random) == 2 for point in found)
    assert all(point.repaired.value > point.not_repaired.value for point in found)
    assert found[0].repaired.value > found[1].repaired.value
    assert fingerprint(model) == before
