"""Calibrating: every kind of work is timed through what layers use, and what comes out predicts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import polyhead
from polyhead.costs import Workload, calibration
from polyhead.costs.calibration import calls, compiling, host, timed_pieces, timing
from polyhead.costs.cost import layer_work
from polyhead.costs.timing.limits import route
from polyhead.costs.timing.machine import HostCost, Machine
from polyhead.costs.timing.predict import predict
from polyhead.costs.work import AttentionCore, Product, Traffic
from polyhead.errors import OptionError
from polyhead.layers import MultiHeadConfig

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
TINY = timed_pieces.Grid(
    rows=(3, 64),
    columns=(16,),
    inner=(32,),
    deep=(128,),
    copies=(4096, 65_536),
    tokens=(24,),
    batch_heads=((1, 1), (2, 4)),
    dims=(16,),
    cached=((2, 40),),
    kv_heads=2,
    middle=(20,),
    cached_windows=(16,),
    max_flops=1e8,
    max_bytes=1e8,
)


def pieces(grid, dtype=F32, device="cpu"):
    return [piece for group in timed_pieces.groups(grid, dtype, device) for piece in group.pieces]


def gpu_pieces():
    return pieces(timed_pieces.GPU, BF16, "cuda")


def hurry(patch):
    patch.setattr(timing, "SAMPLE_SECONDS", {"cpu": 1e-5})
    patch.setattr(timing, "SAMPLES", {"cpu": 2})
    patch.setattr(timing, "HOST_CALLS", {"cpu": 2})
    patch.setattr(timing, "HOST_SAMPLES", {"cpu": 2})


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture(scope="module")
def machine():
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        return calibration.calibrate("cpu", name="toy", grid=TINY)


def test_every_kind_of_work_is_timed(machine):
    kinds = {(x.piece.direction, x.route) for x in machine.samples if isinstance(x.piece, AttentionCore)}
    assert kinds == {
        ("forward", "plain"),
        ("forward", "masked"),
        ("backward", "plain"),
        ("backward", "masked"),
        ("decode", "plain"),
    }
    assert sum(isinstance(s.piece, Product) for s in machine.samples) == 3
    assert sum(isinstance(s.piece, Traffic) for s in machine.samples) == 2
    assert all(sample.seconds > 0 for sample in machine.samples)


def test_calls_of_small_layers_are_timed_in_every_phase(machine):
    assert {(cost.phase, cost.route) for cost in machine.host} == {
        ("prefill", "plain"),
        ("prefill", "masked"),
        ("training", "plain"),
        ("training", "masked"),
        ("decode", "plain"),
    }
    assert machine.launch_seconds > 0


def test_it_says_what_it_is_and_goes_into_a_file(machine, tmp_path):
    assert (machine.name, machine.device, machine.dtypes) == ("toy", "cpu", (F32,))
    assert machine.facts["versions"]["torch"] == torch.__version__
    assert machine.memory_bytes > 1 << 28
    assert Machine.load(machine.save(tmp_path / "toy.json")).to_dict() == machine.to_dict()


def test_what_it_measured_predicts_a_layer(machine):
    work = layer_work(MultiHeadConfig(64, 4, causal=True), Workload.training_step(24, batch=2), dtype=F32)
    found = predict(work, machine)
    assert 1e-6 < found.seconds < 1
    assert found.seconds == pytest.approx(found.device_seconds + found.host_seconds)


def test_progress_is_reported_before_each_measurement():
    reported = []
    calibration.calibrate("cpu", grid=TINY, progress=lambda x: reported.append((x.done, x.total, x.detail)))
    assert [done for done, _, _ in reported] == [0, *range(len(reported) - 1)]
    assert {total for _, total, _ in reported} == {len(reported) - 1}
    groups = len(calibration.planned(CPU, (F32,), TINY))
    assert sum("small layer" in what for _, _, what in reported) == 5 * (1 + math.ceil(groups / calibration.EVERY))
    assert {what.split()[0] for _, _, what in reported} == {
        "compiling",
        "a",
        "copy",
        "product",
        "forward",
        "backward",
        "decode",
    }


def test_other_dtypes_are_measured_briefly():
    *full, brief = calibration.planned(torch.device("cuda"), (BF16, F32))
    assert full == calibration.planned(torch.device("cuda"), (BF16,))
    assert {piece.dtype for piece in brief.pieces} == {F32}
    assert len(brief.pieces) <= 20 <= sum(len(group.pieces) for group in full) / 20


def test_a_device_without_kernels_is_refused():
    with pytest.raises(OptionError, match="a CUDA device or the CPU can be calibrated, got meta"):
        calibration.calibrate("meta")


def test_what_is_too_large_is_not_timed():
    small = dataclasses.replace(TINY, max_flops=2 * 3 * 16 * 32)
    assert [(x.rows, x.inner) for x in pieces(small) if isinstance(x, Product)] == [(3, 32)]
    windows = [x for x in gpu_pieces() if isinstance(x, AttentionCore) and x.left is not None]
    assert max(timed_pieces.held_bytes(x, "cuda") for x in windows) <= timed_pieces.GPU.max_bytes
    assert max(timed_pieces.computed_flops(x, "cuda") for x in windows) <= timed_pieces.GPU.max_windowed_flops


def test_windows_on_a_gpu_are_timed_as_they_are_served_there():
    """Mask tensors where there is little to compute; tiles from 2,048 tokens up, by window, heads and width."""
    groups = {group.name: group.pieces for group in timed_pieces.groups(timed_pieces.GPU, BF16, "cuda")}
    for name, direction in itertools.product(("masked", "tiled"), ("forward", "backward")):
        found = groups[name if direction == "forward" else f"{name} backward"]
        assert {(x.direction, route(x, "cuda")) for x in found} == {(direction, name)}
        assert {x.head_dim for x in found} == {64, 128, 256}
        assert {x.kv_heads < x.heads for x in found} == {True, False}
    tiled = groups["tiled"]
    assert {x.left + 1 for x in tiled} == {64, 512, 4096, 65_536}
    assert {2048, 131_072} <= {x.queries for x in tiled}
    assert {(x.batch, x.heads) for x in tiled} > set(timed_pieces.GPU.batch_heads)
    assert all(2 * (x.left + 1) <= x.queries for x in tiled)
    assert {x.left + 1 for x in groups["tiled backward"]} == {64, 512, 4096, 65_536}
    assert all(route(x, "cpu") == "masked" for x in pieces(timed_pieces.CPU) if getattr(x, "left", None) is not None)


def test_small_gradients_of_a_gpu_are_not_timed():
    backward = [x for x in gpu_pieces() if isinstance(x, AttentionCore) and x.direction == "backward"]
    tiled = [x for x in backward if route(x, "cuda") == "tiled"]
    assert min(timed_pieces.computed_flops(x, "cuda") for x in backward) >= timed_pieces.GPU.min_backward_flops
    assert min(timed_pieces.computed_flops(x, "cuda") for x in tiled) >= timed_pieces.GPU.min_tiled_backward_flops


def test_the_largest_and_the_smallest_of_a_group_come_first():
    for group in timed_pieces.groups(timed_pieces.GPU, BF16, "cuda"):
        sizes = [timed_pieces.computed_flops(piece, "cuda") or piece.bytes for piece in group.pieces]
        assert sizes[:2] == [max(sizes), min(sizes)]
        assert len(set(group.pieces)) == len(group.pieces)


def test_a_host_costs_what_it_does_at_the_fastest_of_all_visits(monkeypatch):
    moments = iter([[9.0], [7.0], [2.0], [8.0], [3.0], [1.0]])  # of an operator and of a layer, in turns
    monkeypatch.setattr(host, "host_samples", lambda call, device: next(moments))
    visited = host.Host([next(host.small_layers(CPU))], CPU, F32)
    reported = []
    for _ in range(3):
        visited.visit(reported.append)
    assert reported == ["a call of a small layer, prefill"] * 3
    (cost,) = visited.costs
    assert cost == HostCost("prefill", "plain", 1.0, 3)
    assert visited.launch_seconds == 2.0


def test_time_is_shared_and_what_is_left_over_is_for_those_after():
    groups = [timed_pieces.Group(name, share, ()) for name, share in (("a", 1), ("b", 3), ("c", 2))]
    assert calibration._part(12.0, groups) == 2.0
    assert calibration._part(11.0, groups[1:]) == 11 * 3 / 5
    assert calibration._part(2.0, groups[2:]) == 2.0
    assert calibration._part(-1.0, groups) == 0.0


def test_what_there_is_no_time_for_is_left_out_and_what_is_known_is_kept(tmp_path):
    machine = calibration.calibrate("cpu", grid=TINY, seconds=0, keep=tmp_path / "kept.json")
    expected = [
        piece for group in timed_pieces.groups(TINY, F32, "cpu") for piece in group.pieces[: timed_pieces.ALWAYS]
    ]
    assert [sample.piece for sample in machine.samples] == expected
    assert Machine.load(tmp_path / "kept.json").to_dict() == machine.to_dict()


def test_kernels_of_ours_are_compiled_once_each():
    tasks = compiling.piece_tasks(gpu_pieces())
    kinds = {(x.direction, x.head_dim, x.heads // x.kv_heads) for _, (group,) in tasks for x in group}
    assert len(tasks) == len(kinds) == 18
    assert max(x.bytes for _, (group,) in tasks for x in group) <= compiling.MAX_BYTES
    assert compiling.compile_ahead(tasks, CPU) == 0


def _well(number):
    assert number


def test_what_fails_to_compile_is_left_to_who_meets_it(monkeypatch):
    monkeypatch.setattr(compiling, "usable_cores", lambda: 4)
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    assert compiling.compile_ahead([(_well, (1,)), (_well, (0,)), (_well, (2,))], GPU) == 2


def test_a_program_that_was_piped_in_compiles_ahead_too(monkeypatch):
    program = types.ModuleType("__main__")  # as `python -` has it
    program.__file__, program.__spec__ = "<stdin>", None
    monkeypatch.setitem(sys.modules, "__main__", program)
    monkeypatch.setattr(compiling, "usable_cores", lambda: 4)
    assert compiling.compile_ahead([(divmod, (7, number)) for number in (1, 0, 2)], GPU) == 2
    assert program.__file__ == "<stdin>"


def test_hidden_pairs_of_a_mask_are_counted_as_computed():
    windowed = AttentionCore("forward", 2, 3, 3, 40, 40, 16, 16, F32, 4, 0)
    assert timed_pieces.computed_flops(windowed, "cpu") == 2 * 2 * 3 * 40 * 40 * 32
    far = AttentionCore("forward", 2, 3, 3, 65_536, 65_536, 16, 16, F32, 4, 0)
    assert timed_pieces.computed_flops(far, "cpu") == far.flops


CORE = AttentionCore("forward", 2, 4, 2, 24, 24, 16, 16, F32, right=0)


def test_a_call_of_attention_is_that_of_the_piece(monkeypatch):
    requested = {}
    true = polyhead.attention

    def watched(query, key, value, **options):
        requested.update(query=query, key=key, **options)
        return true(query, key, value, **options)

    monkeypatch.setattr(calls, "attention", watched)
    (call,) = calls.timed_calls(CORE, CPU)
    assert call().shape == (2, 4, 24, 16)
    assert requested["key"].shape == (2, 2, 24, 16)
    assert requested["query"].stride(1) == 16  # tokens before heads, as a projection leaves them
    assert requested["mask"].is_just_causal


def test_a_backward_gives_every_gradient_and_can_be_repeated():
    (call,) = calls.timed_calls(dataclasses.replace(CORE, direction="backward", left=5), CPU)
    first, again = call(), call()
    assert [x.shape for x in first] == [(2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_decode_sees_all_keys():
    (call,) = calls.timed_calls(dataclasses.replace(CORE, direction="decode", queries=1, keys=31), CPU)
    assert call().shape == (2, 4, 1, 16)


def test_a_product_and_a_copy_have_their_sizes():
    (call,) = calls.timed_calls(Product("output", 5, 7, 3, F32), CPU)
    assert call().shape == (5, 7)
    (call,) = calls.timed_calls(Traffic("output", 8 * 100), CPU)
    assert call().nbytes == 400  # read and written


@pytest.mark.parametrize("window", [None, 9])
def test_a_decoding_layer_gives_the_same_token_again_and_again(window):
    config = MultiHeadConfig(32, 4, num_kv_heads=2, causal=True, window=window)
    call = calls.layer_call(config, Workload.decode(past=20, batch=3), device=CPU, dtype=F32)
    first = call()
    assert first.shape == (3, 1, 32)
    assert torch.equal(first, call())


def test_a_cache_is_filled_in_pieces(monkeypatch):
    monkeypatch.setattr(calls, "MAX_FILLED", 2 * 2 * 8 * 3)
    appended = []
    true = polyhead.layers.PreallocatedCache.append
    monkeypatch.setattr(
        polyhead.layers.PreallocatedCache,
        "append",
        lambda self, key, value, **options: (appended.append(key.shape[2]), true(self, key, value, **options))[1],
    )
    config = MultiHeadConfig(32, 4, num_kv_heads=2, causal=True)
    calls.layer_call(config, Workload.decode(past=8, batch=2), device=CPU, dtype=F32)
    assert appended == [3, 3, 2]


def test_a_training_step_leaves_gradients_of_everything(monkeypatch):
    made = []
    true = MultiHeadConfig.build
    monkeypatch.setattr(MultiHeadConfig, "build", lambda self, **options: made.append(true(self, **options)) or made[0])
    config = MultiHeadConfig(32, 4, causal=True)
    calls.layer_call(config, Workload.training_step(7, batch=2), device=CPU, dtype=F32)()
    assert all(parameter.grad is not None for parameter in made[0].parameters())


def test_small_layers_of_a_gpu_go_by_every_route():
    found = {}
    for small in host.small_layers(torch.device("cuda")):
        work = small.work(BF16)
        served = {route(piece, "cuda") for piece in work.pieces if isinstance(piece, AttentionCore)}
        found.setdefault(work.phase, set()).update(served)
    assert found["prefill"] == {"plain", "masked", "tiled"} == found["training"]
    assert found["decode"] == {"plain"}


def test_small_layers_of_a_gpu_are_of_several_kinds_and_as_many_launches():
    layers = {}
    for small in host.small_layers(torch.device("cuda")):
        layers.setdefault(small.work(BF16).phase, []).append(small)
    assert {len({small.work(BF16).launches for small in of}) for of in layers.values()} == {1}
    decoding = layers["decode"]
    assert len({(small.config.num_heads, small.config.num_kv_heads, small.workload.batch) for small in decoding}) == 3
    assert {small.config.window is None for small in decoding} == {True, False}


GPU = torch.device("cuda")


@pytest.fixture
def clock(monkeypatch):
    """A GPU on which everything takes 0.1 ms, and what is put into graphs."""
    graphs = []
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", {"cuda": 1e-5})
    monkeypatch.setattr(timing, "SAMPLES", {"cuda": 2})
    monkeypatch.setattr(timing, "seconds_of", lambda call, times, device: 1e-4 * times)
    monkeypatch.setattr(timing, "replayed", lambda calls, device: graphs.append(list(calls)) or (lambda: None))
    return graphs


def test_short_calls_on_a_gpu_are_replayed_in_turns(clock):
    first, second = (lambda: 1), (lambda: 2)
    assert timing.device_seconds([first, second], GPU) == pytest.approx(1e-5)  # ten in one graph
    assert clock == [[first, second] * 5]


def test_caches_in_turn_all_have_theirs(clock):
    calls = [lambda i=i: i for i in range(24)]
    assert timing.device_seconds(calls, GPU) == pytest.approx(1e-4 / 24)
    assert clock == [calls]


@pytest.mark.parametrize(("issued", "expected"), [(5e-5, 1e-4), (9e-5, None)])
def test_what_is_not_captured_counts_where_the_host_is_quicker(clock, monkeypatch, issued, expected):
    monkeypatch.setattr(timing, "_issue_seconds", lambda call, device: issued)
    assert timing.device_seconds([lambda: None], GPU, graphs=False) == expected
    assert clock == []
