"""A plan beside other machines, contexts and layouts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from polyhead.costs import LayerGroup, ModelLayout, planning
from polyhead.costs.comparison import LayoutPoint, compare, over_kv_heads
from polyhead.costs.planning import Plan
from polyhead.costs.timing.machine import Machine
from polyhead.costs.timing.machine_files import list_machines
from polyhead.errors import OptionError
from polyhead.layers import LatentConfig, MultiHeadConfig
from polyhead.layers.positions.config import RotaryConfig
from polyhead.layers.variants import DifferentialConfig

GROUPED = MultiHeadConfig(192, 12, num_kv_heads=6, causal=True)


def planned(config, **options) -> Plan:
    model = dataclasses.replace(ModelLayout.of(config, 5), context=1000)
    return planning.plan(model, **{"batch": 3, "dtype": torch.bfloat16, **options})


def layouts_of(config, **options) -> tuple[LayoutPoint, ...]:
    return over_kv_heads(planned(config, **options))


def test_every_machine_with_the_dtype_of_the_plan_has_times_and_memory():
    plan = planned(GROUPED)
    found = compare(plan)
    assert {point.machine.name for point in found.machines} == set(list_machines())
    lengths = [point.context for point in found.contexts]
    for point in found.machines:
        machine = Machine.load(point.machine.name)
        assert point.memory_bytes == machine.memory_bytes
        alone = planned(GROUPED, machine=machine, dtype=torch.bfloat16)
        assert point.phases == alone.phases
        assert alone.is_timed == (torch.bfloat16 in machine.dtypes) == bool(point.curves)
        at = lengths.index(1000)
        times = [x.timing.device_seconds for x in alone.phases if x.timing is not None]
        assert [curve[at] for curve in point.curves] == pytest.approx(times)
    assert not next(point for point in found.machines if point.machine.name == "amd-epyc-9554").curves


def test_the_machine_of_the_plan_replaces_one_of_its_name():
    machine = dataclasses.replace(Machine.load("cpu-2-cores"), memory_bytes=123)
    found = compare(planned(GROUPED, dtype=torch.float32, machine=machine), machine)
    assert [point.memory_bytes for point in found.machines if point.machine.name == "cpu-2-cores"] == [123]
    own = dataclasses.replace(machine, name="mine")
    found = compare(planned(GROUPED, dtype=torch.float32, machine=own), own)
    assert "mine" in {point.machine.name for point in found.machines}


def test_layouts_go_from_one_key_per_head_to_one_for_all():
    plan = planned(GROUPED)
    layouts = over_kv_heads(plan)
    assert [(x.name, x.kv_heads, x.is_planned) for x in layouts] == [
        ("MHA", 12, False), ("GQA-6", 6, True), ("GQA-3", 3, False), ("MQA", 1, False),
    ]  # fmt: skip
    for point in layouts:
        config = dataclasses.replace(GROUPED, num_kv_heads=point.kv_heads)
        alone = planned(config)
        assert point.parameters == alone.parameters.total
        assert point.cache_bytes_per_token == alone.cache_bytes_per_token
        assert point.phases == alone.phases
    assert layouts[1].phases == plan.phases


def test_layers_with_rotary_positions_are_compared_with_latents():
    rotary = dataclasses.replace(GROUPED, positions=RotaryConfig())
    latents = [point for point in layouts_of(rotary) if point.kv_heads is None]
    assert [point.name for point in latents] == ["MLA-128", "MLA-256", "MLA-512"]
    assert [point.cache_bytes_per_token for point in latents] == [5 * 2 * (rank + 64) for rank in (128, 256, 512)]
    assert all(point.kv_heads for point in layouts_of(dataclasses.replace(rotary, window=64)))
    assert all(point.kv_heads for point in layouts_of(rotary, cache_dtype=torch.int8))


def test_a_model_with_latents_is_compared_with_its_heads_as_multi_head_attention():
    sizes = {"kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    plan = planned(LatentConfig(192, 12, **sizes, positions=RotaryConfig(interleaved=True), causal=True))
    *others, own = over_kv_heads(plan)
    assert [point.name for point in others] == ["MHA", "GQA-6", "GQA-3", "MQA"]
    assert (own.name, own.is_planned, own.parameters) == ("MLA-48", True, plan.parameters.total)
    assert not any(point.is_planned for point in others)


def test_other_variants_and_layers_that_differ_in_their_heads_are_not_compared():
    assert layouts_of(DifferentialConfig(192, 6, causal=True)) == ()
    few = dataclasses.replace(GROUPED, num_heads=6, num_kv_heads=6, head_dim=32)
    plan = planning.plan(ModelLayout("mixed", (LayerGroup(GROUPED, 1), LayerGroup(few, 1))), context=64)
    assert over_kv_heads(plan) == ()


def test_choices_have_the_width_of_the_plan_and_at_most_its_cache():
    plan = planned(GROUPED)
    choices = compare(plan).choices
    assert choices.found
    for choice in choices.found:
        assert choice.config.layout.embed_dim == 192
        assert choice.cache_bytes_per_token <= plan.cache_bytes_per_token
    assert compare(planned(MultiHeadConfig(192, 12))).choices is None  # bidirectional: there is no cache
    assert compare(planned(MultiHeadConfig(100, 10, causal=True))).choices is None  # no head_dim of `choose` divides it


def test_a_plan_is_compared_on_its_own_machine():
    own, other = (Machine.load(name) for name in list_machines()[:2])
    timed = planned(GROUPED, machine=own)
    for plan, machine, message in (
        (timed, None, f"it is for {own.name}, got none"),
        (timed, other, f"it is for {own.name}, got {other.name}"),
        (planned(GROUPED), own, f"it is for no machine, got {own.name}"),
    ):
        with pytest.raises(OptionError, match=message):
            compare(plan, machine)
    assert compare(timed, own).layouts
