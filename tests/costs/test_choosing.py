"""Layouts within a budget form a Pareto front, and carry warnings."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from polyhead.costs import Workload, estimate_cost
from polyhead.costs.choosing import choose
from polyhead.costs.layout_warnings import KINDS, channels_for, warnings_of
from polyhead.costs.layouts.known_models import KNOWN
from polyhead.costs.options import Budget
from polyhead.costs.timing.machine import Machine
from polyhead.errors import DtypeError, OptionError
from polyhead.layers import MultiHeadConfig
from polyhead.layers.latent.config import LatentConfig
from polyhead.layers.variants.collaborative.layer import CollaborativeConfig
from polyhead.layers.variants.differential.layer import DifferentialConfig


def kinds(config: object, **options: object) -> list[str]:
    return [warned.kind for warned in warnings_of(config, **{"context": 256, **options})]


@pytest.fixture(scope="module")
def gpu() -> Machine:
    """A GPU of 132 multiprocessors, as far as the warnings ask."""
    return dataclasses.replace(Machine.load("cpu-2-cores"), name="gpu", device="cuda", processors=132)


def test_every_layout_is_within_the_budget_and_priced_as_it_is_counted():
    budget = Budget(parameters=60_000_000, cache_bytes_per_token=8192)
    choices = choose(budget, d_model=1024, layers=12, context=2048)
    assert choices.found
    for choice in choices.found:
        cost = estimate_cost(choice.config, Workload.forward(1))
        assert choice.parameters == 12 * cost.parameters <= 60_000_000
        assert choice.cache_bytes_per_token == 12 * cost.cache_bytes_per_token <= 8192
        assert choice.seconds is None


def test_no_layout_is_outdone_and_each_that_is_left_out_is():
    budget = Budget(cache_bytes_per_token=16384)
    found = [choice.capacity for choice in choose(budget, d_model=512, layers=8, context=512).found]
    within = set()
    for dim in (32, 64, 128, 256):
        heads = 512 // dim
        for kv_heads in (x for x in range(1, heads + 1) if heads % x == 0):
            if 8 * 2 * 2 * kv_heads * dim <= 16384:
                within.add((512, heads, dim, kv_heads))

    def outdone(one: tuple[int, ...]) -> bool:
        return any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in within)

    assert set(found) == {one for one in within if not outdone(one)}
    assert len(found) == len(set(found)) > 1


def test_widths_are_tried_where_parameters_are_limited():
    choices = choose(Budget(parameters=30_000_000), layers=12, context=512)
    widths = {choice.capacity[0] for choice in choices.found}
    assert {512, 768} <= widths
    assert max(widths) < 4096


def test_latent_heads_stand_beside_the_others():
    choices = choose(Budget(cache_bytes_per_token=4096), d_model=1024, layers=4, context=512, latents=True)
    latent = [choice for choice in choices.found if isinstance(choice.config, LatentConfig)]
    assert latent
    assert all(choice.cache_bytes_per_token == 4 * 2 * choice.config.layout.cache_width <= 4096 for choice in latent)
    assert len(latent) < len(choices.found)
    assert all("over a latent of" in choice.name for choice in latent)


def test_time_is_limited_on_a_machine():
    machine = Machine.load("cpu-2-cores")
    options = {"d_model": 512, "layers": 4, "context": 512, "dtype": torch.float32, "machine": machine}
    free = choose(Budget(cache_bytes_per_token=1 << 20), **options)
    times = sorted(choice.seconds for choice in free.found)
    limit = (times[0] + times[-1]) / 2
    limited = choose(Budget(seconds=limit), **options)
    assert times[0] < limit < times[-1]
    assert limited.found
    assert all(choice.seconds <= limit for choice in limited.found)


def test_time_on_a_gpu_is_device_time_and_ranks_layouts_of_one_width():
    options = {"d_model": 512, "layers": 4, "context": 4096, "machine": "nvidia-h200"}
    free = choose(Budget(cache_bytes_per_token=1 << 20), **options)
    assert len({choice.seconds for choice in free.found}) == 1  # launch overhead hides every difference
    by_warnings = {}
    for choice in free.found:
        assert choice.device_seconds < 0.5 * choice.seconds
        by_warnings.setdefault(len(choice.warnings), []).append(choice.device_seconds)
    assert list(by_warnings) == sorted(by_warnings)
    assert all(times == sorted(times) for times in by_warnings.values())
    assert any(len(set(times)) > 1 for times in by_warnings.values())
    times = sorted(choice.device_seconds for choice in free.found)
    limit = (times[0] + times[-1]) / 2
    assert limit < min(choice.seconds for choice in free.found)
    limited = choose(Budget(seconds=limit), **options).found
    assert limited
    assert all(choice.device_seconds <= limit for choice in limited)


def test_a_head_dim_without_a_layout_is_excluded_with_its_reason():
    choices = choose(Budget(cache_bytes_per_token=1 << 20), d_model=1536, context=512)
    assert choices.head_dims == (32, 64, 96, 128, 192, 256)
    assert choices.excluded == {}
    choices = choose(Budget(cache_bytes_per_token=400), d_model=1024, context=512)
    over = "every layout with it exceeds the budget"
    divides = "d_model 1024 is no multiple of it"
    assert choices.excluded == {96: divides, 128: over, 192: divides, 256: over}
    assert {choice.capacity[2] for choice in choices.found} == {32, 64}
    wide = choose(Budget(parameters=10**9), d_model=160, context=512).excluded
    assert wide[96] == "d_model 160 and twice that are no multiples of it"
    narrow = choose(Budget(parameters=2_400_000, cache_bytes_per_token=512), context=512)
    assert narrow.excluded[96].startswith("other layouts have at least as many heads")


def test_a_search_estimates_no_memory(monkeypatch):
    monkeypatch.setattr("polyhead.costs.phases.estimate_memory", None)
    options = {"d_model": 256, "context": 512, "machine": "cpu-2-cores"}
    assert choose(Budget(cache_bytes_per_token=4096), **options).found


def test_known_models_are_points_of_reference():
    references = choose(Budget(cache_bytes_per_token=4096), d_model=512, context=512).references
    assert tuple(choice.name for choice in references) == KNOWN
    found = {choice.name: choice for choice in references}
    assert found["transformer-base"].capacity == (512, 8, 64, 8)
    assert found["bert-base"].capacity == (768, 12, 64, 12)
    assert found["bert-large"].capacity == (1024, 16, 64, 16)
    assert found["gpt3-175b"].capacity == (12288, 96, 128, 96)
    assert found["llama3.1-8b"].cache_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert found["deepseek-v3"].cache_bytes_per_token == 61 * 576 * 2
    assert found["bert-base"].cache_bytes_per_token == 0


def test_models_of_latents_have_no_int8_cache_and_are_shown_with_the_one_they_have():
    budget = Budget(cache_bytes_per_token=4096)
    choices = choose(budget, d_model=512, context=512, cache_dtype=torch.int8)
    found = {choice.name: choice for choice in choices.references}
    assert tuple(found) == KNOWN
    assert {choice.cache_dtype for choice in choices.found} == {"int8"}
    assert (found["llama3.1-8b"].cache_dtype, found["deepseek-v3"].cache_dtype) == ("int8", "bfloat16")
    assert found["llama3.1-8b"].cache_bytes_per_token == 32 * (2 * 8 * 128 + 2 * 8 * 4)
    assert found["deepseek-v3"].cache_bytes_per_token == 61 * 576 * 2
    assert choices.notes == (
        "latent attention has no int8 cache: deepseek-v2-lite, deepseek-v2, deepseek-v3 cached in bfloat16",
    )
    assert choose(budget, d_model=512, context=512).notes == ()


def test_a_machine_that_was_not_calibrated_in_bfloat16_is_used_in_the_dtype_it_was():
    machine, budget = Machine.load("cpu-2-cores"), Budget(cache_bytes_per_token=1 << 20)
    options = {"d_model": 512, "layers": 4, "context": 512, "machine": machine}
    unsaid = choose(budget, **options)
    requested = choose(budget, **options, dtype=torch.float32)
    assert (unsaid.found, unsaid.references) == (requested.found, requested.references)
    assert unsaid.notes == ("cpu-2-cores was not calibrated in bfloat16: planned in float32 instead",)
    assert requested.notes == ()
    with pytest.raises(OptionError, match="was calibrated in float32, got bfloat16"):
        choose(budget, **options, dtype=torch.bfloat16)
    with pytest.raises(DtypeError, match=r"dtype must be bfloat16, .* got int8"):
        choose(budget, d_model=512, dtype=torch.int8)


def test_a_choice_as_a_dictionary_has_its_config_and_its_warnings():
    choice = choose(Budget(cache_bytes_per_token=2048), d_model=64, context=512).found[-1]
    found = choice.to_dict()
    assert found["config"]["kind"] == "multi_head"
    assert set(found["warnings"][0]) == {"kind", "words"}


@pytest.mark.parametrize(
    ("budget", "options", "words"),
    [
        ({}, {"d_model": 512}, "got no limit"),
        ({"parameters": 0}, {"d_model": 512}, "parameters of a budget must be positive, got 0"),
        ({"seconds": -1.0}, {"d_model": 512}, "seconds of a budget must be positive, got -1.0"),
        ({"seconds": 0.01}, {"d_model": 512}, "needs a machine for its predictions"),
        ({"cache_bytes_per_token": 4096}, {}, "without d_model the budget must limit parameters"),
        ({"parameters": 10**6}, {"d_model": -512}, "d_model must be a positive integer, got -512"),
        ({"parameters": 10**6}, {"d_model": 512, "layers": 0}, "layers must be a positive integer, got 0"),
        ({"parameters": 10**6}, {"d_model": 512, "phase": "rest"}, "phase must be one of training, prefill, decode"),
        (
            {"cache_bytes_per_token": 4096},
            {"d_model": 512, "latents": True, "cache_dtype": torch.int8},
            "no int8 cache",
        ),
        (
            {"cache_bytes_per_token": 2**17},
            {"d_model": 100},
            r"head_dim is 32, 64, 96, 128, 192 or 256 and num_heads \* head_dim is d_model, got d_model 100, "
            "which no head_dim divides; use a multiple of 32",
        ),
        ({"parameters": 10**9}, {"d_model": 100}, "half or twice that, got d_model 100"),
        (
            {"parameters": 10},
            {"layers": 3},
            "the smallest, 4/1x32 at 256, has 245,760 parameters in 3 layers, got .* 10;",
        ),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(budget, options, words):
    with pytest.raises(OptionError, match=words):
        choose(Budget(**budget), **options)


# ---- warnings


def test_heads_at_both_ends_and_narrow_ones_are_warned_of(gpu):
    assert kinds(MultiHeadConfig(512, 8)) == []
    assert kinds(MultiHeadConfig(512, 1)) == ["one head"]
    assert kinds(MultiHeadConfig(512, 512)) == ["one channel", "narrow", "rank"]
    assert kinds(MultiHeadConfig(64, 64, head_dim=64)) == []  # as many heads as channels, each as wide as the model
    assert kinds(MultiHeadConfig(512, 16), context=32) == ["narrow"]
    assert kinds(MultiHeadConfig(512, 16), context=256) == ["narrow", "rank"]
    assert set(KINDS) == {"one head", "one channel", "narrow", "rank", "idle"}


def test_channels_are_those_that_a_map_is_made_of():
    assert kinds(DifferentialConfig(512, 4)) == []  # two maps of 64 channels a head
    assert kinds(DifferentialConfig(512, 8)) == ["narrow", "rank"]
    assert kinds(CollaborativeConfig(512, 16)) == []  # each head reads all 512
    assert kinds(CollaborativeConfig(512, 8, shared_dim=32)) == ["narrow", "rank"]


def test_a_head_needs_channels_to_tell_keys_apart_and_a_window_has_fewer():
    wide, narrow = MultiHeadConfig(512, 4, causal=True), MultiHeadConfig(512, 8, causal=True)
    assert kinds(wide, context=131072) == []
    assert kinds(narrow, context=131072) == ["rank"]
    assert kinds(MultiHeadConfig(512, 8, causal=True, window=1024), context=131072) == []
    for context in (2, 100, 4096, 10**6):
        assert channels_for(context) == math.ceil(8 * math.log(context))


def test_random_keys_overlap_as_the_rule_says():
    """The largest cosine of one direction with n others stays below one half where the rule's width is given."""
    torch.manual_seed(0)
    for keys in (512, 4096):
        width = channels_for(keys)
        directions = torch.nn.functional.normalize(torch.randn(32, keys, width), dim=-1)
        query = torch.nn.functional.normalize(torch.randn(32, 1, width), dim=-1)
        largest = (directions * query).sum(-1).amax(-1)
        assert largest.mean() < 0.5
        halved = torch.nn.functional.normalize(torch.randn(32, keys, width // 4), dim=-1)
        query = torch.nn.functional.normalize(torch.randn(32, 1, width // 4), dim=-1)
        assert (halved * query).sum(-1).amax(-1).mean() > 0.5


def test_idle_multiprocessors_are_warned_of_on_a_gpu_alone(gpu):
    config = MultiHeadConfig(1024, 8, num_kv_heads=2, causal=True)
    cpu = Machine.load("cpu-2-cores")
    assert kinds(config, context=256, phase="prefill", machine=cpu) == []
    assert kinds(config, context=256, phase="prefill", machine=gpu) == ["idle"]  # 8 heads, 2 tiles each: 16 of 132
    assert kinds(config, context=256, batch=9, phase="prefill", machine=gpu) == []
    assert kinds(config, context=1024, phase="decode", machine=gpu) == ["idle"]  # 2 KV heads, 16 tiles each
    assert kinds(config, context=4224, phase="decode", machine=gpu) == []
    assert kinds(config, context=4161, phase="decode", machine=gpu) == []  # 66 tiles each, the last of one key
    assert kinds(config, context=4160, phase="decode", machine=gpu) == ["idle"]
    latent = LatentConfig(1024, 8, kv_lora_rank=64, causal=True)
    assert kinds(latent, context=4224, phase="decode", machine=gpu) == ["idle"]  # one latent for all heads
