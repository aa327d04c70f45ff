"""The page of a plan: answers, tables, data of the charts, and safe markup."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from polyhead.costs import LayerGroup, ModelLayout, Ranks, planning
from polyhead.costs.comparison import Comparison, compare
from polyhead.costs.layout_warnings import KINDS
from polyhead.costs.quantities import count, decimal_size, seconds
from polyhead.costs.timing.machine import Machine
from polyhead.layers import MultiHeadConfig
from polyhead.layers.variants import DifferentialConfig
from polyhead.report import plan_answers as answers
from polyhead.report.page import Assets, policy_of
from polyhead.report.plan_page import plan_html
from polyhead.report.plan_payload import plan_charts
from tests.report.test_packing import HOSTILE
from tests.report.test_page import Parts, data_of


def page_of(model: ModelLayout, context: int) -> str:
    """Return the English half of the page, up to its script."""
    plan = planning.plan(dataclasses.replace(model, context=context), context=context, phases=["decode"])
    return plan_html(plan, compare(plan)).split("<script>")[0].split('<div data-language="zh"')[0]


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(96, 6, 2), (3584, 28, 4), (768, 12, 2)])
def test_groups_of_any_size_have_a_table_over_heads(width, heads, kv_heads):
    size = heads // kv_heads
    text = page_of(ModelLayout.of(MultiHeadConfig(width, heads, num_kv_heads=kv_heads, causal=True)), 512)
    assert "by number of heads at constant total width</summary>" in text
    assert f">{size} x {width // size:,}</th>" in text


def test_no_table_over_heads_if_their_total_width_is_fixed_otherwise():
    text = page_of(ModelLayout.of(MultiHeadConfig(64, 6, num_kv_heads=2, head_dim=16, causal=True)), 512)
    assert "by number of heads" not in text


def test_warnings_are_shown_with_their_reasons():
    text = page_of(ModelLayout.of(MultiHeadConfig(48, 48, causal=True)), 64)
    assert "<h3>Warnings</h3>" in text
    for kind in ("one channel", "narrow", "rank"):
        assert f"<li>{kind}: " in text
        assert KINDS[kind] in text
    assert "Warnings" not in page_of(ModelLayout.of(MultiHeadConfig(128, 2, causal=True)), 64)


def test_captions_of_collectives_are_in_the_language_of_the_page():
    config = MultiHeadConfig(24, 6, num_kv_heads=2, causal=True)
    plan = planning.plan(ModelLayout.of(config), context=19, phases=["decode"], ranks=Ranks(tensor=2))
    text = plan_html(plan, compare(plan)).split("<script>")[0]
    assert "Decode step, last token of the context: bytes that a rank sends" in text
    assert "解码一步：上下文的最后一个词元：每个进程发送的字节" in text
    assert "Text(" not in text


def test_rolling_caches_are_shown_beside_full_ones():
    full, windowed = (MultiHeadConfig(24, 6, num_kv_heads=2, causal=True, window=window) for window in (None, 4))
    text = page_of(ModelLayout("mixed", (LayerGroup(windowed, 3), LayerGroup(full, 2))), 19)
    assert "1.56 KiB with rolling caches" in text
    assert "with rolling caches of 1.56 KiB" in text
    assert "rolling" not in page_of(ModelLayout.of(full), 19)


def compared(machine: Machine | None = None, **options: Any) -> tuple[planning.Plan, Comparison]:
    model = ModelLayout("small", (LayerGroup(MultiHeadConfig(96, 6, num_kv_heads=2, causal=True), 5),), context=4000)
    plan = planning.plan(model, batch=3, context=1000, dtype=torch.float32, machine=machine, **options)
    return plan, compare(plan, machine)


@pytest.fixture(scope="module")
def timed() -> tuple[planning.Plan, Comparison]:
    return compared(Machine.load("cpu-2-cores"))


def test_charts_contain_the_numbers_of_the_plan(timed):
    plan, comparison = timed
    charts = plan_charts(plan, comparison)
    (memory,), (layout,) = ([variant["chart"] for variant in charts[view]] for view in ("fit", "layout"))
    at = memory["x_values"].index("1,000")
    assert [series["values"][at] for series in memory["series"]] == [phase.fused.total for phase in plan.phases]
    assert {(rule["label"], rule["value"]) for rule in memory["rules"]} >= {("80 GB", 80e9), ("25.2 GB", 25234767872)}
    for variant, phase, tokens in zip(charts["speed"], plan.phases, (3000, 3000, 3), strict=True):
        series = {series["name"]["en"]: series for series in variant["chart"]["series"]}
        own = series["cpu-2-cores (measured)"]
        assert own["values"][at] == pytest.approx(phase.timing.device_seconds / tokens)
        assert (own["wide"], own["dashed"]) == (True, False)
        assert (
            series["nvidia-l4 (datasheet estimate)"]["wide"],
            series["nvidia-l4 (datasheet estimate)"]["dashed"],
        ) == (False, True)
    assert layout["x_values"] == ("MHA", "GQA-3", "GQA-2", "MQA")
    relative = {series["name"]["en"]: series["values"] for series in layout["series"]}
    assert relative["cache per token"] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 6])
    assert relative.keys() == {"cache per token", "parameters", "memory, decode step", "device time, decode step"}


def test_without_a_machine_there_are_times_of_all_machines_and_none_of_layouts():
    plan, comparison = compared(phases=["training"])
    charts = plan_charts(plan, comparison)
    assert not any(series["wide"] for variant in charts["speed"] for series in variant["chart"]["series"])
    (layout,) = charts["layout"]
    assert {series["name"]["en"] for series in layout["chart"]["series"]} == {
        "cache per token", "parameters", "memory, training step",
    }  # fmt: skip
    (sentence,) = answers.speed(plan, comparison)
    times = sorted((x.phases[0].timing.device_seconds, x.machine.name) for x in comparison.machines)
    assert f": {seconds(times[0][0])} on {times[0][1]} (" in sentence.en
    assert f" to {seconds(times[-1][0])} on {times[-1][1]} (" in sentence.en


def test_a_phase_fits_into_machines_with_more_memory_than_it_needs(timed):
    plan, comparison = timed
    training, *others, most = answers.fit(plan, comparison)
    batches = [fit.max_batch for fit in plan.fits]
    assert most.en == "Largest batch on cpu-2-cores: training step {:,}, prefill {:,}, decode step {:,}.".format(
        *batches
    )
    needs = decimal_size(plan["training"].fused.total)
    assert training.en.startswith(
        f"Training at batch 3, 1,000 tokens needs {needs} for attention alone: fits into 24 GB ("
    )
    assert ", 80 GB (nvidia-a100-80gb, nvidia-h100-sxm), " in training.en
    assert "not fit" not in training.en
    assert all(sentence.en.endswith(" for attention alone: the same machines.") for sentence in others)

    def of_memory(needed: int) -> Comparison:
        """Every machine needs so many bytes for training."""
        points = []
        for point in comparison.machines:
            phase = point.phases[0]
            fused = dataclasses.replace(phase.fused, parameters=needed - phase.fused.total + phase.fused.parameters)
            points.append(
                dataclasses.replace(point, phases=(dataclasses.replace(phase, fused=fused), *point.phases[1:]))
            )
        return dataclasses.replace(comparison, machines=tuple(points))

    lead = answers.fit(plan, of_memory(64 * 10**9))[0].en
    assert ": fits into 80 GB (nvidia-a100-80gb, nvidia-h100-sxm), 150 GB (nvidia-h200), 192 GB (amd-mi300x)" in lead
    assert "; does not fit into 24 GB (nvidia-l4, nvidia-rtx-4090), 25.2 GB (cpu-2-cores)." in lead
    tight = of_memory(80 * 10**9)
    lead = answers.fit(plan, tight)[0]
    assert ": fits into 150 GB (nvidia-h200)" in lead.en
    assert "; tight in 80 GB (nvidia-a100-80gb, nvidia-h100-sxm); does not fit into 24 GB (" in lead.en
    assert "；在 80 GB (nvidia-a100-80gb, nvidia-h100-sxm) 中紧张；放不进 24 GB (" in lead.zh
    cells = plan_html(plan, tight)
    assert all(f">{share}<small>80 GB</small>" in cells for share in ("✓ 53%", "~ 100%", "✗ 333%"))
    lead = answers.fit(plan, of_memory(80 * 10**9 + 1))[0].en
    assert "; does not fit into 24 GB (nvidia-l4, nvidia-rtx-4090), 25.2 GB (cpu-2-cores), 80 GB (" in lead
    assert ": does not fit into 24 GB (" in answers.fit(plan, of_memory(10**15))[0].en
    assert ", 80 GB (nvidia-a100-80gb, nvidia-h100-sxm), " in answers.fit(plan, of_memory(10**15))[1].en


def test_the_speed_of_a_phase_is_told_with_its_machine_and_error(timed):
    plan, comparison = timed
    lead, bounds = (sentence.en for sentence in answers.speed(plan, comparison))
    assert lead.startswith(
        "Device time of attention alone on cpu-2-cores (measured, median error 12%, worst 31%): training step "
    )
    timing = plan["decode"].timing
    decode = timing.device_seconds
    assert decode < 0.9 * timing.seconds
    assert f"decode step {seconds(decode)} ({count(3 / decode)} tokens/s; " in lead
    assert f"{seconds(timing.seconds)} with launch overhead)." in lead
    assert "bound by" in bounds


def test_a_layout_is_compared_with_one_and_with_all_key_heads(timed):
    plan, comparison = timed
    cache, time = (sentence.en for sentence in answers.layout(plan, comparison))
    assert cache == "small is GQA-2 (2 KV heads): 1.25 KiB of cache per token, 3x less than MHA, 2x as much as MQA."
    assert time.startswith("Decode step, last token of the context on cpu-2-cores: ")
    other = ModelLayout.of(DifferentialConfig(192, 6, causal=True))
    plan = planning.plan(dataclasses.replace(other, context=200), context=200)
    (sentence,) = answers.layout(plan, compare(plan))
    assert "not compared with MHA, GQA and MQA. Layouts of the same width" in sentence.en
    assert plan_charts(plan, compare(plan))["layout"] == []


def test_nothing_is_predicted_for_a_dtype_that_no_machine_has():
    plan = planning.plan(ModelLayout.of(MultiHeadConfig(96, 6, causal=True)), context=200, dtype=torch.float64)
    found = compare(plan)
    assert "No known machine has rates in float64" in answers.speed(plan, found)[0].en
    lead = f" needs {decimal_size(plan.phases[0].fused.total)} for attention alone: fits into 24 GB (nvidia-l4, "
    assert lead in answers.fit(plan, found)[0].en
    assert plan_charts(plan, found)["speed"] == []
    text = plan_html(plan, found)
    assert "no rates in float64" in text
    assert text.count(">not measured<") == 8 * len(plan.phases)


def test_layouts_are_compared_by_device_time_where_launching_takes_longer():
    machine = Machine.load("nvidia-h200")
    model = ModelLayout("small", (LayerGroup(MultiHeadConfig(96, 6, num_kv_heads=2, causal=True), 5),), context=4000)
    plan = planning.plan(model, context=1000, machine=machine, phases=["decode"])
    comparison = compare(plan, machine)
    _, device, launch = (sentence.en for sentence in answers.layout(plan, comparison))
    timing = plan["decode"].timing
    assert f": {seconds(timing.device_seconds)} of device time, against " in device
    assert launch.endswith(f"launching its kernels takes longer: {seconds(timing.seconds)}.")
    text = plan_html(plan, comparison)
    assert f">{seconds(timing.device_seconds)}<small>{seconds(timing.seconds)} eager</small>" in text


def test_machines_without_rates_in_the_dtype_of_the_plan_are_compared_by_memory():
    machine = Machine.load("cpu-2-cores")
    model = ModelLayout("small", (LayerGroup(MultiHeadConfig(96, 6, num_kv_heads=2, causal=True), 5),), context=4000)
    plan = planning.plan(model, context=1000, machine=machine, dtype=torch.bfloat16, phases=["decode"])
    comparison = compare(plan, machine)
    assert "25.2 GB (cpu-2-cores)" in answers.fit(plan, comparison)[0].en
    (speed,) = answers.speed(plan, comparison)
    assert speed.en.startswith("Decode step, last token of the context, device time of attention alone: ")
    assert comparison.choices.machine is None
    plan_html(plan, comparison)


def test_both_languages_are_complete(timed):
    text = plan_html(*timed, language="zh")
    assert '<html lang="zh-Hans">' in text
    chinese, english = text.split('<div data-language="en"')
    assert '<div data-language="zh" lang="zh-Hans">' in chinese
    assert english.startswith(' lang="en" hidden>')
    assert re.findall("<(?:table|tr|td|th|section|details)[ >]", chinese) == re.findall(
        "<(?:table|tr|td|th|section|details)[ >]", english.split("<script")[0]
    )
    for view, name in (
        ("fit", "放得下吗？"),
        ("speed", "有多快？"),
        ("layout", "选哪种布局？"),
        ("numbers", "全部数字"),
    ):
        assert f'<section data-view="{view}" id="/{view}"><h2 tabindex="-1">{name}</h2>' in chinese
    assert " id=" not in english.split("<script")[0]  # links lead to the language that is shown


def test_every_machine_is_labelled_with_what_it_is_known_from(timed):
    text = plan_html(*timed)
    assert text.count("<small>datasheet estimate, error not measured</small>") == 2 * 6  # of memory and of time
    assert text.count("<small>measured, median error 8%, worst 33%</small>") == 2
    assert "NVIDIA A100 Tensor Core GPU datasheet, 1758950 r4" in text


def test_hostile_names_add_no_element():
    config = MultiHeadConfig(24, 6, num_kv_heads=2, causal=True)
    tame, wild = (
        plan_html(plan, compare(plan))
        for name in ("tame", "".join(HOSTILE))
        for plan in [planning.plan(ModelLayout(name, (LayerGroup(config, 2),), context=19), context=19)]
    )
    wild.encode("utf-8")
    parts = Parts(wild)
    assert parts.elements == Parts(tame).elements
    assert data_of(wild) == data_of(tame)
    assets = Assets.load(name="plan")
    (policy,) = [x["content"] for _, x in parts.elements if x.get("http-equiv") == "Content-Security-Policy"]
    assert policy == policy_of(assets)
    assert (parts.texts("style"), parts.texts("script")[1]) == ([assets.style], assets.script)
