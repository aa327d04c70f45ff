"""The page of a plan: texts, data of the charts, and safe markup."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyhead.costs import LayerGroup, ModelLayout, planning
from polyhead.costs.curves import over_context, over_heads
from polyhead.costs.layout_warnings import KINDS
from polyhead.costs.timing.machine import Machine
from polyhead.layers import MultiHeadConfig
from polyhead.report.page import Assets, policy_of
from polyhead.report.plan_page import plan_html
from polyhead.report.plan_payload import plan_charts
from tests.report.test_packing import HOSTILE
from tests.report.test_page import Parts, data_of


def page_of(model: ModelLayout, context: int) -> str:
    """Return the page up to its script."""
    plan = planning.plan(model, context=context, phases=["decode"])
    return plan_html(plan, over_context(plan), over_heads(plan)).split("<script>")[0]


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(96, 6, 2), (3584, 28, 4), (768, 12, 2)])
def test_groups_of_any_size_have_a_page_with_a_curve_over_heads(width, heads, kv_heads):
    size = heads // kv_heads
    text = page_of(ModelLayout.of(MultiHeadConfig(width, heads, num_kv_heads=kv_heads, causal=True)), 512)
    assert "<h2>By number of heads</h2>" in text
    assert f"relative to {size} x {width // size}, at d_model {width:,}" in text


def test_no_chart_over_heads_if_their_total_width_is_fixed_otherwise():
    text = page_of(ModelLayout.of(MultiHeadConfig(64, 6, num_kv_heads=2, head_dim=16, causal=True)), 512)
    assert "By number of heads" not in text


def test_warnings_are_shown_with_their_reasons():
    text = page_of(ModelLayout.of(MultiHeadConfig(48, 48, causal=True)), 64)
    assert "<h2>Warnings</h2>" in text
    for kind in ("one channel", "narrow", "rank"):
        assert f"<li>{kind}: " in text
        assert KINDS[kind] in text
    assert "Warnings" not in page_of(ModelLayout.of(MultiHeadConfig(128, 2, causal=True)), 64)


def test_rolling_caches_are_shown_beside_full_ones():
    full, windowed = (MultiHeadConfig(24, 6, num_kv_heads=2, causal=True, window=window) for window in (None, 4))
    text = page_of(ModelLayout("mixed", (LayerGroup(windowed, 3), LayerGroup(full, 2))), 19)
    assert "1.56 KiB with rolling caches" in text
    assert "with rolling caches of 1.56 KiB" in text
    assert "rolling" not in page_of(ModelLayout.of(full), 19)


def charts_of(machine: Machine | None, context: int = 1000) -> tuple[planning.Plan, dict[str, Any]]:
    model = ModelLayout.of(MultiHeadConfig(24, 6, num_kv_heads=2, causal=True), 5)
    plan = planning.plan(model, batch=3, context=context, dtype=torch.float32, machine=machine)
    return plan, plan_charts(plan, over_context(plan, machine), over_heads(plan, machine))


@pytest.mark.parametrize("machine", [None, Machine.load("cpu-2-cores")], ids=["FLOPs", "time"])
def test_charts_contain_the_numbers_of_the_plan(machine):
    plan, charts = charts_of(machine)
    assert [chart["kind"] for chart in charts["context"]] == ["bars", "bars", "lines"] * 3
    at = charts["context"][0]["x_values"].index("1,000")
    for phase, tokens, (per_token, memory, both) in zip(
        plan.phases, (3000, 3000, 3), zip(*[iter(charts["context"])] * 3, strict=True), strict=True
    ):
        total = phase.flops.total if phase.timing is None else sum(phase.timing.stages.values())
        assert per_token["unit"] == ("count" if phase.timing is None else "seconds")
        assert sum(series["values"][at] for series in per_token["series"]) == pytest.approx(total / tokens)
        assert sum(series["values"][at] for series in memory["series"]) == phase.fused.total
        assert [series["values"][at] for series in both["series"]] == [phase.fused.total, phase.materialised.total]
    (heads,) = charts["heads"]
    assert heads["x_values"] == ("3", "6", "12", "24")
    assert {series["name"]: series["values"][1] for series in heads["series"]}["exponentials"] == 2
    assert ("predicted time" in {series["name"] for series in heads["series"]}) == (machine is not None)


def test_series_without_cost_are_omitted_and_colours_are_stable():
    _, charts = charts_of(None)
    training, prefill = (
        {series["name"]: series["colour"] for series in charts["context"][i]["series"]} for i in (1, 4)
    )
    assert training == {"parameters": 0, "gradients": 1, "activations": 3}
    assert prefill == {"parameters": 0, "cache": 2, "activations": 3}


def test_hostile_names_add_no_element():
    config = MultiHeadConfig(24, 6, num_kv_heads=2, causal=True)
    tame, wild = (
        plan_html(plan, over_context(plan), over_heads(plan))
        for name in ("tame", "".join(HOSTILE))
        for plan in [planning.plan(ModelLayout(name, (LayerGroup(config, 2),)), context=19)]
    )
    wild.encode("utf-8")
    parts = Parts(wild)
    assert parts.elements == Parts(tame).elements
    assert data_of(wild) == data_of(tame)
    assets = Assets.load(name="plan")
    (policy,) = [x["content"] for _, x in parts.elements if x.get("http-equiv") == "Content-Security-Policy"]
    assert policy == policy_of(assets)
    assert (parts.texts("style"), parts.texts("script")[1]) == ([assets.style], assets.script)
