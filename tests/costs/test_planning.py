"""Plans: phases, totals over different layers, the crossover, the identity, curves, and refused input."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math

import pytest
import torch

from polyhead.costs import (
    LayerGroup,
    ModelLayout,
    Workload,
    estimate_cost,
    estimate_memory,
    layer_work,
    planning,
    read_layout,
)
from polyhead.costs.curves import over_context, over_heads, with_heads
from polyhead.costs.layout_warnings import warnings_of
from polyhead.costs.parameters import count_parameters, four_squares
from polyhead.costs.phases import USABLE, Need, PhaseSizes, largest_fitting, need
from polyhead.costs.plan_wording import below, facts, layout_words, requested, rows, title
from polyhead.costs.planning import crossover
from polyhead.costs.quantities import count, decimal_size, parse_count, parse_seconds, seconds, size
from polyhead.costs.timing.machine import Machine
from polyhead.errors import DtypeError, OptionError, ShapeError
from polyhead.layers import MultiHeadConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.positions.config import RotaryConfig
from polyhead.layers.variants import GroupedHeadsConfig
from polyhead.layers.variants.collaborative.layer import CollaborativeConfig
from polyhead.layers.variants.routed.config import RoutedConfig

WINDOWED = MultiHeadConfig(24, 6, num_kv_heads=2, causal=True, window=4, bias=False)
FULL = MultiHeadConfig(24, 6, num_kv_heads=2, causal=True, bias=False)
MIXED = ModelLayout("mixed", (LayerGroup(WINDOWED, 3), LayerGroup(FULL, 2)), context=64)


def test_phases_are_the_sums_of_their_layers():
    plan = planning.plan(MIXED, context=19, batch=3)
    requested = {
        "training": (Workload.training_step(19, batch=3), False),
        "prefill": (Workload.prefill(19, batch=3), True),
        "decode": (Workload.decode(18, batch=3), True),
    }
    assert [phase.phase for phase in plan.phases] == list(requested)
    for name, (work, cached) in requested.items():
        found = plan[name]
        costs = [estimate_cost(config, work) for config in (WINDOWED, FULL)]
        works = [layer_work(config, work, cached=cached) for config in (WINDOWED, FULL)]
        assert found.flops.total == 3 * costs[0].matrix_flops + 2 * costs[1].matrix_flops
        assert found.exponentials == 3 * costs[0].exponentials + 2 * costs[1].exponentials
        assert found.total_bytes == 3 * works[0].bytes + 2 * works[1].bytes
        assert found.launches == 3 * works[0].launches + 2 * works[1].launches
        assert found.intensity == found.flops.total / found.total_bytes
        assert found.timing is None
        memory = [estimate_memory(x, work, cached=cached, layers=count) for x, count in ((WINDOWED, 3), (FULL, 2))]
        assert found.fused == memory[0] + memory[1]
    assert plan.cache_bytes_per_token == 5 * 2 * 2 * 4 * 2
    assert plan.cache_bytes == 3 * 19 * plan.cache_bytes_per_token
    assert plan.parameters.total == 5 * estimate_cost(FULL, Workload.forward(1)).parameters
    assert any("rolling cache" in note for note in plan.notes)


def test_a_config_s_own_numbers_are_taken_unless_others_are_requested():
    model = dataclasses.replace(MIXED, dtype=torch.float32, cache_dtype=torch.int8)
    plan = planning.plan(model, context=19)
    assert (plan.dtype, plan.cache_dtype) == (torch.float32, torch.int8)
    assert plan.cache_bytes_per_token == 5 * 2 * 2 * (4 + 4)  # int8, and a float32 scale for each head's key and value
    requested = planning.plan(model, context=19, dtype=torch.float16, cache_dtype=torch.float16)
    assert requested.cache_bytes_per_token == 5 * 2 * 2 * 4 * 2


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64])
def test_dtypes_in_which_no_layer_computes_are_refused_and_a_config_s_own_gives_way(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(DtypeError, match=f"dtype must be bfloat16, float16, float32 or float64, got {name}; "):
        planning.plan(MIXED, context=19, dtype=dtype)
    plan = planning.plan(dataclasses.replace(MIXED, dtype=dtype), context=19)
    assert plan.dtype is torch.bfloat16
    assert f"layers cannot compute in {name}: planned in bfloat16 instead" in plan.notes


def test_rolling_caches_hold_the_window_in_windowed_layers_and_every_token_in_others():
    plan = planning.plan(MIXED, context=19, batch=3)
    per_token = 2 * 2 * 4 * 2
    assert plan.rolling_cache_bytes == 3 * (3 * 4 + 2 * 19) * per_token < plan.cache_bytes
    assert [phase.rolling_cache for phase in plan.phases] == [0, plan.rolling_cache_bytes, plan.rolling_cache_bytes]
    for phase in plan.phases:
        assert phase.fused.total - phase.rolling_total == phase.fused.cache - phase.rolling_cache
    found = plan.to_dict()
    assert found["rolling_cache_bytes"] == found["phases"][2]["rolling_cache"] == plan.rolling_cache_bytes
    assert found["phases"][2]["rolling_total"] == plan["decode"].rolling_total
    short = planning.plan(MIXED, context=4)  # no longer than the window: there is nothing to drop
    assert short.rolling_cache_bytes == short.cache_bytes
    assert "roll" not in dict(facts(short))["cache"]
    for other in (dataclasses.replace(MIXED, cache_dtype=torch.int8), ModelLayout.of(FULL)):
        full = planning.plan(other, context=19)
        assert full.rolling_cache_bytes == full.cache_bytes
    assert any(
        "latent and int8 caches cannot roll" in note
        for note in planning.plan(dataclasses.replace(MIXED, cache_dtype=torch.int8), context=19).notes
    )
    encoder = planning.plan(read_layout("bert-base"), context=512)
    assert (encoder.rolling_cache_bytes, encoder["prefill"].rolling_cache) == (0, 0)


def test_a_plan_has_the_warnings_of_each_kind_of_layer_once():
    wide = MultiHeadConfig(512, 8, causal=True, bias=False)
    model = ModelLayout(
        "mixed", (LayerGroup(wide, 3), LayerGroup(dataclasses.replace(wide, window=512), 2), LayerGroup(wide, 1))
    )
    plan = planning.plan(model, context=131072)
    assert plan.warnings == warnings_of(wide, context=131072)
    assert [warned.kind for warned in plan.warnings] == ["rank"]
    assert plan.to_dict()["warnings"] == [plan.warnings[0]._asdict()]
    assert planning.plan(model, context=512).warnings == ()
    ends = [planning.plan(ModelLayout.of(MultiHeadConfig(512, heads, causal=True)), context=64) for heads in (1, 512)]
    assert [[warned.kind for warned in end.warnings] for end in ends] == [
        ["one head"],
        ["one channel", "narrow", "rank"],
    ]


def test_idle_multiprocessors_are_warned_of_in_each_phase_that_has_them():
    gpu = dataclasses.replace(Machine.load("cpu-2-cores"), name="gpu", device="cuda", processors=132)
    model = ModelLayout.of(MultiHeadConfig(512, 8, num_kv_heads=2, causal=True))
    assert planning.plan(model, context=256).warnings == ()
    idle = planning.plan(model, context=256, machine=gpu).warnings
    assert [warned.kind for warned in idle] == ["idle"] * 3
    assert [warned.words.split(" have work in the attention of ") for warned in idle] == [
        ["16 of 132 multiprocessors", "a training step"],
        ["16 of 132 multiprocessors", "the prefill"],
        ["8 of 132 multiprocessors", "a decode step"],
    ]
    windowed = ModelLayout.of(MultiHeadConfig(512, 8, num_kv_heads=2, causal=True, window=65))
    (decoding,) = planning.plan(windowed, context=256, machine=gpu, phases=["decode"]).warnings
    assert decoding.words.endswith(" of a decode step under a window of 65")


def test_an_encoder_has_no_cache_and_decodes_nothing():
    plan = planning.plan(read_layout("bert-base"), context=512)
    assert [phase.phase for phase in plan.phases] == ["training", "prefill"]
    assert (plan.cache_bytes_per_token, plan.cache_bytes, plan["prefill"].fused.cache) == (0, 0, 0)
    assert title(plan, plan["prefill"]) == "forward over the full context"
    with pytest.raises(OptionError, match="decode needs causal layers, got bert-base"):
        planning.plan(read_layout("bert-base"), context=512, phases=["decode"])


def test_the_crossover_is_where_squares_overtake():
    for width, heads in ((64, 4), (48, 1), (48, 48)):
        # 4 n² d of scores and values against 8 n d² of projections
        model = ModelLayout.of(MultiHeadConfig(width, heads))
        assert crossover(model) == 2 * width + 1
        causal = ModelLayout.of(MultiHeadConfig(width, heads, causal=True))
        assert crossover(causal) == 4 * width  # n (n + 1) / 2 pairs

    def squared_and_linear(n: int) -> tuple[int, int]:
        flops = [estimate_cost(config, Workload.forward(n)).forward for config in (WINDOWED, FULL)]
        squared = [x.scores + x.values for x in flops]
        linear = [x.projection + x.output for x in flops]
        return 3 * squared[0] + 2 * squared[1], 3 * linear[0] + 2 * linear[1]

    found = crossover(MIXED)
    assert found is not None
    squared, linear = squared_and_linear(found)
    assert squared > linear
    squared, linear = squared_and_linear(found - 1)
    assert squared <= linear
    assert crossover(ModelLayout.of(MultiHeadConfig(64, 4, causal=True, window=8))) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MultiHeadConfig(24, 6), None),
        (MultiHeadConfig(24, 1, bias=False), None),
        (GroupedHeadsConfig(24, 6, num_groups=3), None),
        (MultiHeadConfig(24, 6, num_kv_heads=2), "6 heads share 2 KV heads"),
        (MultiHeadConfig(24, 6, head_dim=5), "6 heads x 5 channels are 30 wide, d_model is 24"),
        (MultiHeadConfig(24, 6, value_dim=7), "6 heads x 7 value channels are 42 wide, d_model is 24"),
        (MultiHeadConfig(24, 6, key_input_dim=11), "key and value inputs have 11 and 11 channels"),
        (LatentConfig(24, 6, kv_lora_rank=10), "one latent of 10 channels"),
        (CollaborativeConfig(24, 6, shared_dim=10), "share 10 channels"),
        (RoutedConfig(24, 6, top_k=2), "6 routed heads share"),
    ],
)
def test_where_four_squares_stop_holding_there_is_a_reason(config, reason):
    identity = four_squares(config)
    assert identity.expected == 4 * 24**2
    assert identity.holds == (reason is None)
    assert (reason is None) == (identity.reasons == ())
    if reason is not None:
        assert reason in " ".join(identity.reasons)
    parameters = count_parameters(config)
    assert parameters.total == estimate_cost(config, Workload.cross(1, 1)).parameters
    assert min(dataclasses.astuple(parameters)) >= 0
    assert parameters.projections == identity.found


def test_parameters_of_heads_by_their_matrices():
    config = MultiHeadConfig(24, 6, num_kv_heads=2, value_dim=7, key_input_dim=11, value_input_dim=13, bias=False)
    found = count_parameters(config)
    assert (found.query, found.key, found.value) == (24 * 6 * 4, 11 * 2 * 4, 13 * 2 * 7)
    assert (found.output, found.other) == (6 * 7 * 24, 0)


def test_parameters_of_latent_heads_by_their_matrices():
    config = LatentConfig(
        24,
        6,
        kv_lora_rank=10,
        q_lora_rank=9,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        value_head_dim=5,
        positions=RotaryConfig(),
        bias=False,
    )
    found = count_parameters(config)
    assert found.query == 24 * 9 + 9 * 6 * 10
    assert found.key == 24 * 14 + 10 * 6 * (6 + 5)
    assert (found.value, found.output, found.other) == (0, 6 * 5 * 24, 9 + 10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 65}, "at most 64 tokens for mixed, got 65"),
        ({"context": 0}, "context must be a positive integer, got 0"),
        ({"context": -3}, "context must be a positive integer, got -3"),
        ({"context": 5, "batch": 0}, "batch must be a positive integer, got 0"),
        ({"context": 5, "phases": ["rest"]}, "phase must be one of training, prefill, decode; got 'rest'"),
        ({"context": 5, "phases": []}, "phase must be one of training, prefill, decode; got none"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, words):
    with pytest.raises(OptionError, match=words):
        planning.plan(MIXED, **options)


def test_beyond_its_context_only_on_request():
    assert planning.plan(MIXED, context=65, beyond=True).context == 65
    plan = planning.plan(MIXED, context=5, phases=["prefill"])
    with pytest.raises(OptionError, match="one of this plan's, prefill; got 'decode'"):
        plan["decode"]


def test_times_are_of_the_machine_that_was_named():
    machine = Machine.load("cpu-2-cores")
    plan = planning.plan(MIXED, context=64, dtype=torch.float32, machine=machine)
    assert plan.machine == machine.summary
    found = plan.to_dict()["machine"]
    assert (found["name"], found["kind"], found["error"]["worst"]) == ("cpu-2-cores", "measured", 0.31)
    for phase in plan.phases:
        assert phase.timing is not None
        assert phase.timing.seconds > 0
        assert set(phase.timing.stages) == {*phase.bytes, "launch"}
        assert sum(phase.timing.stages.values()) == pytest.approx(phase.timing.seconds)
        assert phase.timing.device_seconds == pytest.approx(phase.timing.seconds - phase.timing.stages["launch"])
    assert not [note for note in plan.notes if "memory" in note or "calibrated" in note]
    unsaid = planning.plan(MIXED, context=64, machine=machine)
    assert unsaid.dtype is torch.float32
    assert any("cpu-2-cores was not calibrated in bfloat16" in note for note in unsaid.notes)


def test_memory_is_planned_on_a_machine_that_has_no_rates_in_the_dtype():
    machine = Machine.load("cpu-2-cores")
    plan = planning.plan(MIXED, context=64, dtype=torch.float16, machine=machine)
    assert not plan.is_timed
    assert [fit.needed_bytes for fit in plan.fits] == [phase.fused.total for phase in plan.phases]
    assert "cpu-2-cores was not calibrated in float16: memory is planned, times are not predicted" in plan.notes
    assert " float16 on cpu-2-cores (times not measured); " in requested(plan)
    server = planning.plan(MIXED, context=64, dtype=torch.float16, machine="amd-epyc-9554")
    assert "amd-epyc-9554 has no rate in float16: memory is planned, times are not predicted" in server.notes
    assert planning.plan(MIXED, context=64).fits == ()


def test_the_weights_of_the_whole_model_must_fit():
    sizes = {"context": 32768, "batch": 4, "phases": ["training", "decode"], "machine": "nvidia-l4"}
    plan = planning.plan("llama3.1-8b", **sizes)
    weights, cache = 2 * 8_030_261_248, 4 * 32768 * 2 * 8 * 128 * 32 * 2
    decode = plan.fits[1]
    assert 0 < decode.needed_bytes - weights - cache < 0.01 * weights  # the activations of one token
    assert decode.max_batch == 0
    assert plan["decode"].needed - plan["decode"].fused.total == 2 * plan.model.other_parameters
    training = plan["training"]
    assert training.optimizer_state == 8 * 8_030_261_248  # AdamW, of the whole model
    assert training.needed - training.fused.total == 4 * plan.model.other_parameters + training.optimizer_state
    lines = [text for _, text in facts(plan)]
    assert any(" for all weights, gradients, AdamW's state (8 bytes per parameter) and attention's" in x for x in lines)
    assert any("decode does not fit: 33.3 GB of 24 GB for all weights, cache and attention's" in x for x in lines)
    scope = "fits: at most 80% of the memory, since other activations, logits and the CUDA context come on top"
    assert f"{scope}; GB are 10⁹ bytes, GiB are 2³⁰" in lines
    alone = planning.plan(dataclasses.replace(plan.model, other_parameters=None), **sizes)
    assert [fit.needed_bytes for fit in alone.fits] == [phase.fused.total for phase in alone.phases]
    lines = [text for _, text in facts(alone)]
    assert any("since all other weights, optimizer state, other activations" in line for line in lines)


@pytest.mark.parametrize(
    ("machine", "layer", "phase", "sizes"),
    [
        # The mask tensor of a window, which batches of 8 do without; tiles that become lower with the tokens.
        (
            "nvidia-l4",
            {"window": 200, "head_dim": 128, "num_kv_heads": 8},
            "prefill",
            [(x, 1024) for x in range(1, 41)],
        ),
        (
            "nvidia-l4",
            {"window": 200, "head_dim": 128, "num_kv_heads": 8},
            "training",
            [(x, 1024) for x in range(1, 41)],
        ),
        ("cpu-2-cores", {"sinks": True}, "prefill", [(1, x) for x in range(1, 320)]),
        ("cpu-2-cores", {"sinks": True}, "training", [(1, x) for x in range(1, 320)]),
    ],
)
def test_the_largest_that_fits_is_the_largest_of_all_sizes(machine, layer, phase, sizes):
    model = ModelLayout.of(MultiHeadConfig(512, 32, causal=True, bias=False, **layer))
    place = Machine.load(machine)
    dtype = place.dtypes[0]

    @functools.cache
    def at(size: int) -> Need:
        return need(model, phase, PhaseSizes(*sizes[size - 1], dtype, dtype), place)

    needs = [at(size).bytes for size in range(1, len(sizes) + 1)]
    assert any(before > after for before, after in itertools.pairwise(needs))
    for each in needs[::3]:
        for bytes_ in (each, each - 1):
            memory = dataclasses.replace(place, memory_bytes=math.ceil(bytes_ / USABLE))
            usable = USABLE * memory.memory_bytes
            largest = max((size for size, x in enumerate(needs, 1) if x <= usable), default=0)
            assert largest_fitting(at, memory, len(sizes)) == largest


def test_a_plan_whose_phase_fits_has_no_smaller_largest_context():
    # At 2,896 tokens a window is left to a kernel that needs no mask tensor: 2,880 tokens need more memory than 2,912.
    sizes = [PhaseSizes(1, context, torch.bfloat16, torch.bfloat16) for context in (2880, 2912)]
    model, machine = read_layout("mistral-7b"), Machine.load("nvidia-l4")
    shorter, longer = (need(model, "prefill", each, machine).bytes for each in sizes)
    assert longer < shorter
    between = dataclasses.replace(machine, memory_bytes=math.ceil((shorter + longer) / 2 / USABLE))
    (fit,) = planning.plan(model, context=2912, phases=["prefill"], machine=between).fits
    assert (fit.verdict, fit.max_context) == ("fits", 2912)


def test_a_plan_without_a_margin_is_tight_and_says_what_would_fit():
    sizes = {"context": 8192, "phases": ["prefill", "decode"], "machine": "nvidia-l4"}
    plan = planning.plan("llama3.1-8b", batch=4, **sizes)
    prefill, decode = plan.fits
    for fit in plan.fits:
        assert fit.verdict == "tight"
        assert 0.8 * 24e9 < fit.needed_bytes <= 24e9
        largest = planning.plan("llama3.1-8b", batch=fit.max_batch, **sizes)[fit.phase]
        assert largest.verdict(fit.machine_bytes) == "fits"
        one_more = planning.plan("llama3.1-8b", batch=fit.max_batch + 1, **sizes)[fit.phase]
        assert one_more.verdict(fit.machine_bytes) != "fits"
        for tokens, fits in ((fit.max_context, True), (fit.max_context + 1, False)):
            shorter = planning.plan("llama3.1-8b", batch=4, **{**sizes, "context": tokens})[fit.phase]
            assert (shorter.verdict(fit.machine_bytes) == "fits") is fits
    in_int8 = planning.plan("llama3.1-8b", batch=4, cache_dtype=torch.int8, **sizes)
    assert [fit.int8_bytes for fit in plan.fits] == [fit.needed_bytes for fit in in_int8.fits]
    assert [fit.int8_bytes for fit in in_int8.fits] == [None, None]
    lines = [text.strip() for _, text in facts(plan)]
    assert lines[0] == "prefill is tight: 22.4 GB of 24 GB for all weights, cache and attention's activations"
    assert lines[3] == (
        f"to fit: --batch {decode.max_batch}, or --context {decode.max_context}, or --cache-dtype int8 (18.3 GB, fits)"
    )
    assert f"--context {prefill.max_context}, or --cache-dtype int8 (20.3 GB, tight)" in lines[1]
    latents = planning.plan("deepseek-v2-lite", batch=300, **{**sizes, "machine": "nvidia-a100-80gb"})
    assert [fit.int8_bytes for fit in latents.fits] == [None, None]  # there is no int8 cache of latents
    assert latents.to_dict()["fits"][1]["verdict"] == "does not fit"


def test_a_plan_says_what_fits_and_up_to_which_batch():
    machine = Machine.load("cpu-2-cores")

    def fit_lines(memory_bytes, **options):
        small = dataclasses.replace(machine, memory_bytes=memory_bytes)
        plan = planning.plan(MIXED, context=64, dtype=torch.float32, machine=small, **options)
        return plan.fits, [words.strip() for _, words in facts(plan)]

    sizes = {"context": 64, "dtype": torch.float32, "machine": machine}
    (five, six) = (planning.plan(MIXED, batch=batch, **sizes)["training"].fused.total for batch in (5, 6))
    for memory, most in ((math.ceil(six / 0.8), 6), (math.ceil(six / 0.8) - 2, 5), (math.ceil(five / 0.8), 5)):
        (fit,), (words, *_) = fit_lines(memory, batch=2, phases=["training"])
        assert fit.max_batch == most
        assert words.startswith("training fits: ")
        assert words.endswith(f" of {decimal_size(memory)} for attention alone; the largest batch is {most}")
    (fit,), (words, *_) = fit_lines(six, batch=6, phases=["training"])
    assert words == f"training is tight: {decimal_size(six)} of {decimal_size(six)} for attention alone"
    (fit,), (words, helps, *_) = fit_lines(six - 1, batch=6, phases=["training"])
    assert words.startswith("training does not fit: ")
    assert helps == f"to fit: --batch {fit.max_batch}, or --context {fit.max_context}"
    _, lines = fit_lines(1)
    assert lines[1] == "to fit: more memory; not even batch 1 fits, nor a context of one token"
    decode = planning.plan(MIXED, batch=9, **sizes)["decode"]
    _, (_, helps, *_) = fit_lines(decode.needed - 1, batch=9, phases=["decode"])
    rolling = decode.needed - decode.fused.cache + decode.rolling_cache
    assert f"or rolling caches ({decimal_size(rolling)}, " in helps


def test_a_plan_as_json_has_every_total():
    found = json.loads(json.dumps(planning.plan(MIXED, context=19).to_dict()))
    assert found["model"]["groups"][0]["config"]["window"] == 4
    assert found["parameters"]["total"] == sum(
        found["parameters"][x] for x in ("query", "key", "value", "output", "other")
    )
    phase = found["phases"][0]
    assert phase["flops"]["total"] == sum(value for name, value in phase["flops"].items() if name != "total")
    assert phase["total_bytes"] == sum(phase["bytes"].values())
    assert phase["fused"]["total"] < phase["materialised"]["total"]
    assert 0 == phase["fused"]["weights"] < phase["materialised"]["weights"] < phase["materialised"]["activations"]
    assert not found["identity"]["holds"]


def test_a_phase_that_waits_for_its_host_says_what_it_would_take_without():
    machine = Machine.load("cpu-2-cores")
    slow = dataclasses.replace(
        machine, host=tuple(dataclasses.replace(cost, seconds=10.0) for cost in machine.host), device="cuda"
    )
    found = planning.plan(MIXED, context=64, dtype=torch.float32, machine=slow, phases=["decode"])["decode"]
    assert found.timing is not None
    assert found.timing.bound == "launch"
    assert found.timing.device_seconds < 1 < found.timing.stages["launch"]
    device, waiting = seconds(found.timing.device_seconds), seconds(found.timing.stages["launch"])
    assert f", {device} of running and {waiting} of waiting for launches" in dict(below(found))["bound by"]
    assert ("waiting for launches", waiting) in [(row.name, row.time) for row in rows(found)]


def test_weights_that_are_written_down_are_a_part_of_the_memory():
    plan = planning.plan(read_layout("gemma2-9b"), context=8192)
    assert plan["prefill"].materialised.weights == 3 * 4 * 16 * 8192**2  # of one layer, whatever kind it is
    for phase in plan.phases:
        assert 0 < phase.materialised.weights < phase.materialised.activations


# ---- curves


def test_a_curve_over_the_context_goes_from_short_to_the_model_s_end():
    plan = planning.plan(MIXED, context=19, phases=["prefill"])
    points = over_context(plan)
    assert [point.context for point in points] == [19, 64]
    assert points[0].phases[0] == plan["prefill"]
    unlimited = planning.plan(dataclasses.replace(MIXED, context=None), context=1000, phases=["decode"])
    lengths = [point.context for point in over_context(unlimited)]
    assert lengths == [128, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]


def test_a_curve_over_heads_has_flops_that_stay_and_exponentials_that_grow():
    model = ModelLayout.of(MultiHeadConfig(48, 4, causal=True, positions=RotaryConfig()), 3)
    points = over_heads(planning.plan(model, context=19))
    assert [(point.heads, point.head_dim) for point in points] == [(1, 48), (2, 24), (4, 12), (8, 6)]
    assert len({point.phase.flops.total for point in points}) == 1
    assert [point.phase.exponentials // points[0].phase.exponentials for point in points] == [1, 2, 4, 8]
    grouped = over_heads(planning.plan(MIXED, context=19, phases=["decode"]))
    assert [(point.heads, point.head_dim) for point in grouped] == [(3, 8), (6, 4), (12, 2), (24, 1)]  # groups of three
    latent = ModelLayout.of(LatentConfig(24, 6, kv_lora_rank=10, causal=True))
    assert over_heads(planning.plan(latent, context=19)) == ()


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "found"),
    [
        (96, 6, 2, [3, 6, 12, 24, 48]),
        (3584, 28, 4, [7, 14, 28, 56, 112, 224, 448, 896, 1792]),
        (768, 12, 2, [6, 12, 24, 48, 96, 192, 384]),
        (64, 6, 2, []),  # 64 channels are no whole number for three heads
    ],
)
def test_a_curve_over_heads_keeps_groups_as_large_as_they_are(width, heads, kv_heads, found):
    config = MultiHeadConfig(
        width, heads, num_kv_heads=kv_heads, head_dim=16, causal=True, positions=RotaryConfig(), bias=False
    )
    model = ModelLayout.of(config)
    plan = planning.plan(model, context=19, phases=["prefill"])
    points = over_heads(plan)
    assert [point.heads for point in points] == found
    for point in points:
        made = with_heads(model, point.heads).config
        assert made.layout.group_size == heads // kv_heads
        assert point.heads * point.head_dim == made.num_heads * made.head_dim == width
        assert point.phase == planning.plan(with_heads(model, point.heads), context=19)["prefill"]
    with pytest.raises(ShapeError, match=f"a multiple of the group size {heads // kv_heads} and .*; got 16"):
        with_heads(model, 16)


# ---- words


def test_other_numbers_of_heads_rotate_the_same_share_of_the_channels():
    model = ModelLayout.of(MultiHeadConfig(256, 4, causal=True, positions=RotaryConfig(rotary_dim=16)))
    for heads, rotated in ((4, 16), (8, 8), (32, 2), (128, 2)):
        assert with_heads(model, heads).config.positions.rotary_dim == rotated
    whole = ModelLayout.of(MultiHeadConfig(256, 4, causal=True, positions=RotaryConfig()))
    assert with_heads(whole, 8).config.positions.rotary_dim == 32


def test_words_of_a_plan():
    plan = planning.plan(MIXED, context=19, phases=["decode"])
    windowed, full = (
        "3 layers of 6 heads x 4 over 2 KV heads and a window of 4",
        "2 layers of 6 heads x 4 over 2 KV heads",
    )
    assert layout_words(MIXED) == f"{windowed}; {full}, d_model 24"
    reported = dict(facts(plan))
    assert reported["cache"] == "160 B per token, 2.97 KiB in total, 1.56 KiB with rolling caches"
    assert ("", f"{size(plan['decode'].rolling_total)} with rolling caches of 1.56 KiB") in below(plan["decode"])
    assert reported["identity"] == "0.667 of 4 d_model², because 6 heads share 2 KV heads"
    shown = {row.name: row for row in rows(plan["decode"])}
    assert list(shown) == [
        "projection",
        "cache writes",
        "attention",
        "scores",
        "softmax",
        "values",
        "output",
        "total",
    ]
    assert shown["softmax"].exponentials == count(plan["decode"].exponentials) == "300"
    assert shown["total"].bytes == size(plan["decode"].total_bytes)
    assert crossover(ModelLayout.of(WINDOWED)) is None
    windows = dict(facts(planning.plan(ModelLayout.of(WINDOWED), context=19)))
    assert windows["crossover"].startswith("none")


@pytest.mark.parametrize("text", ["", "12x", "KiB", "-5", "1.5 GiB"])
def test_numbers_that_nobody_writes_are_refused(text):
    with pytest.raises(ValueError, match="must be a number such as 1000000, 500M"):
        parse_count(text)
    with pytest.raises(ValueError, match="must be a time such as 2s, 20ms"):
        parse_seconds(text)


def test_bytes_are_read_by_the_unit_that_they_are_printed_in():
    for number in (7e3, 64e6, 150e9, 1.5e12):
        assert parse_count(decimal_size(number), of_bytes=True) == number
    units = {"2B": 2, "2kB": 2000, "2KiB": 2048, "2Ki": 2048, "2K": 2048, "1.5GB": 1.5e9, "1.5GiB": 1.5 * 2**30}
    assert {text: parse_count(text, of_bytes=True) for text in units} == units
    for text in ("2iB", "2i"):
        with pytest.raises(OptionError, match="must be a number such as 65536, 64KiB"):
            parse_count(text, of_bytes=True)


def test_numbers_come_back_as_they_were_written():
    for number in (0, 7, 999, 1024, 65536, 3 * 2**30):
        assert parse_count(size(number).replace(" ", ""), of_bytes=True) == number
    assert [seconds(x) for x in (0, 1e-7, 0.05, 1, 3600)] == ["0 s", "0.1 µs", "50 ms", "1 s", "3,600 s"]
    assert [count(x) for x in (0, 12345, 999999, 2.5e21)] == ["0", "12.3 K", "1 M", "2,500 E"]
