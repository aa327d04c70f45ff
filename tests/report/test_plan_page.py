"""The page of a plan: what it says besides its tables, and for which layouts there is one."""

from __future__ import annotations

import pytest

from polyhead.costs import LayerGroup, ModelLayout, planning
from polyhead.costs.curves import over_context, over_heads
from polyhead.costs.layout_warnings import KINDS
from polyhead.layers import MultiHeadConfig
from polyhead.report.plan_page import plan_html


def page_of(model: ModelLayout, context: int) -> str:
    plan = planning.plan(model, context=context, phases=["decode"])
    return plan_html(plan, over_context(plan), over_heads(plan))


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(96, 6, 2), (3584, 28, 4), (768, 12, 2)])
def test_groups_of_any_size_have_a_page_with_a_curve_over_heads(width, heads, kv_heads):
    size = heads // kv_heads
    text = page_of(ModelLayout.of(MultiHeadConfig(width, heads, num_kv_heads=kv_heads, causal=True)), 512)
    assert "<h2>By number of heads</h2>" in text
    assert f"relative to {size} x {width // size}, at d_model {width:,}" in text


def test_heads_that_cannot_be_as_wide_as_the_model_leave_the_curve_out():
    text = page_of(ModelLayout.of(MultiHeadConfig(64, 6, num_kv_heads=2, head_dim=16, causal=True)), 512)
    assert "By number of heads" not in text


def test_warnings_are_told_with_their_reasons_where_there_are_some():
    text = page_of(ModelLayout.of(MultiHeadConfig(48, 48, causal=True)), 64)
    assert "<h2>Warnings</h2>" in text
    for kind in ("one channel", "narrow", "rank"):
        assert f"<li>{kind}: " in text
        assert KINDS[kind] in text
    assert "Warnings" not in page_of(ModelLayout.of(MultiHeadConfig(128, 2, causal=True)), 64)


def test_rolling_caches_stand_beside_those_of_every_token():
    full, windowed = (MultiHeadConfig(24, 6, num_kv_heads=2, causal=True, window=window) for window in (None, 4))
    text = page_of(ModelLayout("mixed", (LayerGroup(windowed, 3), LayerGroup(full, 2))), 19)
    assert "1.56 KiB with rolling caches" in text
    assert "with rolling caches of 1.56 KiB" in text
    assert "rolling" not in page_of(ModelLayout.of(full), 19)
