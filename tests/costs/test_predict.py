"""Predicted times: roofline limits, equal to measurements at measured sizes, smooth in between."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import polyhead
from benchmarks.plan_accuracy.shapes import Shape, roofline
from polyhead.costs import Workload, estimate_memory
from polyhead.costs.choosing import latent_layout
from polyhead.costs.cost import layer_work
from polyhead.costs.timing.correction import Correction
from polyhead.costs.timing.limits import EDGE_KEYS, MASK_TRAFFIC, copy_seconds, limits, route
from polyhead.costs.timing.machine import HostCost, Machine, Sample
from polyhead.costs.timing.machine_files import list_machines
from polyhead.costs.timing.predict import host_cost, predict, predict_piece
from polyhead.costs.work import AttentionCore, Product, Traffic, Work
from polyhead.errors import OptionError
from polyhead.layers import MultiHeadConfig
from polyhead.layers.positions.config import ALiBiConfig
from polyhead.ops.attention import sdpa
from polyhead.ops.common.kernels import availability

BF16, F32 = torch.bfloat16, torch.float32
ROOT = Path(__file__).resolve().parents[2]
RATE, BANDWIDTH, EXPONENTIALS = 800e12, 4e12, 2e12
GAP = 2e-6
ROUTES = ("tiled", "masked")
COPIES, CEILINGS = 4, 9  # samples of the machine below that are copies, and that set what it reaches and pays at least


def product(rows, columns, inner, dtype=BF16):
    return Product("projection", rows, columns, inner, dtype)


def core(direction="forward", batch=2, heads=8, kv_heads=8, queries=4096, keys=None, dim=128, **options):
    keys = queries if keys is None else keys
    return AttentionCore(direction, batch, heads, kv_heads, queries, keys, dim, dim, BF16, **options)


def efficiency(product):
    """A kernel that is bad at few rows and at a short inner axis, smoothly."""
    return 1.2 + 2.0 / math.log2(product.rows + 2) + 1.0 / math.log2(product.inner + 2)


@pytest.fixture(scope="module")
def machine():
    """One whose kernels are off from physics by known factors."""
    copies = [Sample(Traffic("output", size), GAP + size / BANDWIDTH) for size in (1 << 12, 1 << 20, 1 << 28, 1 << 32)]
    fastest = product(1 << 14, 1 << 14, 1 << 14)
    fixed = [*copies, Sample(fastest, fastest.flops / RATE)]
    exponential = core(queries=8192, dim=16)
    fixed.append(Sample(exponential, exponential.exponentials / EXPONENTIALS))
    nothing = {"batch": 1, "heads": 1, "kv_heads": 1, "keys": 16, "dim": 16}
    fixed += [Sample(product(8, 8, 8), GAP), Sample(core(queries=16, **nothing), 3 * GAP)]
    fixed.append(Sample(core("decode", queries=1, **nothing), 2 * GAP))
    bare = Machine("bare", "cuda", 132, 1 << 37, 7e-6, tuple(fixed), ())
    sizes = (16, 64, 256, 1024, 4096, 16_384)
    made = [product(*size) for size in itertools.product(sizes, (256, 4096), sizes[1:])]
    samples = [Sample(piece, efficiency(piece) * limits(piece, bare).seconds) for piece in made]
    for direction, queries, heads in itertools.product(("forward", "backward"), (256, 2048, 16_384), (1, 16)):
        piece = core(direction, heads=heads, kv_heads=heads, queries=queries, right=0)
        samples.append(Sample(piece, 1.5 * limits(piece, bare).seconds))
    for batch, keys in itertools.product((1, 64), (1024, 65_536)):
        piece = core("decode", batch=batch, queries=1, keys=keys, right=0)
        samples.append(Sample(piece, 1.25 * limits(piece, bare).seconds))
    host = (HostCost("prefill", "plain", 90e-6, 3), HostCost("decode", "plain", 240e-6, 6))
    return dataclasses.replace(bare, samples=(*fixed, *samples), host=host)


def test_what_was_measured_is_predicted(machine):
    for sample in machine.samples[:COPIES]:
        assert predict_piece(sample.piece, machine).seconds == pytest.approx(sample.seconds, rel=0.05)
    for sample in machine.samples[CEILINGS:]:
        assert predict_piece(sample.piece, machine).seconds == pytest.approx(sample.seconds, rel=0.12)


@pytest.mark.parametrize("size", [(37, 1111, 777), (500, 300, 3000), (9001, 2049, 129)])
def test_between_what_was_measured_it_goes_over_smoothly(machine, size):
    piece = product(*size)
    expected = efficiency(piece) * limits(piece, machine).seconds
    assert predict_piece(piece, machine).seconds == pytest.approx(expected, rel=0.12)


def test_the_correction_never_jumps():
    places = [(x, y) for x in range(0, 12, 3) for y in range(0, 12, 3)]
    curve = Correction.fit(places, [1 + (x + 2 * y) / 10 for x, y in places])
    steps = [curve((x / 50, 4.4)) for x in range(-100, 700)]
    assert max(abs(a / b - 1) for a, b in itertools.pairwise(steps)) < 0.01
    assert len({round(step, 12) for step in steps[:100]}) == 1  # outside it stays at the edge


def test_the_correction_follows_what_it_was_fitted_to():
    places = [(x, y) for x in range(0, 12, 2) for y in range(0, 12, 2)]
    curve = Correction.fit(places, [math.exp(0.1 * x - 0.05 * y) for x, y in places])
    assert curve((5, 5)) == pytest.approx(math.exp(0.25), rel=0.03)
    assert curve.left_out_error < 0.05


@pytest.mark.parametrize("heads", [1, 8])
def test_time_grows_with_the_square_of_tokens_far_beyond_the_samples(machine, heads):
    one, two = (
        predict_piece(core(heads=heads, kv_heads=heads, queries=n, right=0), machine).seconds for n in (65_536, 131_072)
    )
    assert two / one == pytest.approx(4, rel=0.05)


def test_one_head_leaves_processors_idle(machine):
    """16 tiles of queries keep 16 of 132 processors busy: eight heads take hardly longer than one."""
    one, eight = (limits(core(batch=1, heads=h, kv_heads=h, queries=2048), machine).seconds for h in (1, 8))
    assert eight < 1.2 * one
    assert limits(core(batch=64, queries=2048), machine).seconds > 6 * eight


def test_whole_rounds_are_paid_for(machine):
    """132 equal tiles are one round and 133 are two."""
    full, more = (limits(core(batch=1, heads=h, kv_heads=h, queries=128, keys=65_536), machine) for h in (132, 133))
    assert more.matrix == pytest.approx(2 * full.matrix)


def test_a_long_inner_axis_is_split_among_processors(machine):
    """The gradient of a small weight over a million tokens: one tile, many partial sums."""
    piece = product(128, 128, 1 << 20)
    alone = 132 * piece.flops / machine.matrix_rate(BF16)
    assert limits(piece, machine).matrix < alone / 10


@pytest.mark.parametrize(
    ("piece", "bound"),
    [
        (product(8192, 8192, 8192), "matrix"),
        (product(1, 8192, 8192), "bandwidth"),
        (product(8, 8, 8), "launch"),
        (core(dim=16, queries=8192), "exponentials"),
        (core(dim=256, queries=8192), "matrix"),
        (core("decode", batch=64, queries=1, keys=65_536), "bandwidth"),
        (Traffic("cache", 1 << 30), "bandwidth"),
    ],
)
def test_the_scarcest_resource_is_named(machine, piece, bound):
    assert predict_piece(piece, machine).bound == bound


def test_a_copy_between_two_that_were_timed_lies_between_them(machine):
    sizes = [1 << power for power in range(10, 36)]
    seconds = [copy_seconds(size, machine) for size in sizes]
    assert seconds == sorted(seconds)
    assert copy_seconds(1 << 34, machine) == pytest.approx((1 << 34) / BANDWIDTH, rel=0.01)
    assert copy_seconds(1, machine) == copy_seconds(1 << 12, machine)


def test_making_a_mask_comes_on_top_of_the_kernel(machine):
    """One that was timed is reported; one with more heads has the same mask and a longer kernel."""
    small, large = (core(batch=1, heads=heads, kv_heads=heads, queries=2048, left=99, right=0) for heads in (4, 32))
    least = limits(small, machine)
    sample = Sample(small, least.before + 3 * least.kernel_seconds, "masked")
    known = dataclasses.replace(machine, samples=(*machine.samples, sample))
    assert predict_piece(small, known).seconds == pytest.approx(sample.seconds, rel=1e-6)
    most = limits(large, machine)
    assert predict_piece(large, known).seconds == pytest.approx(most.before + 3 * most.kernel_seconds, rel=1e-6)


def layer(tokens, batch=1, **options):
    return layer_work(
        MultiHeadConfig(1024, 8, causal=True, finite=True), Workload.forward(tokens, batch=batch), **options
    )


def test_a_gpu_waits_for_its_host_or_the_host_for_it(machine):
    small, large = predict(layer(16), machine), predict(layer(8192, batch=8), machine)
    assert (small.bound, small.seconds) == ("launch", pytest.approx(90e-6))
    assert small.device_seconds < small.seconds
    assert large.seconds == large.device_seconds > large.host_seconds
    assert large.bound == "matrix"


def test_a_cpu_does_its_calls_and_its_work_in_turns(machine):
    found = predict(layer(16), dataclasses.replace(machine, device="cpu"))
    assert found.seconds == pytest.approx(found.device_seconds + found.host_seconds)


def test_more_launches_cost_the_host_more(machine):
    work = layer(16)
    more = dataclasses.replace(work, pieces=(*work.pieces, Traffic("positions", 64, launches=5)))
    assert predict(more, machine).host_seconds - predict(work, machine).host_seconds == pytest.approx(5 * 7e-6)


def test_layers_and_pieces_add_up(machine):
    one, ten = predict(layer(8192), machine), predict(layer(8192, layers=10), machine)
    assert ten.seconds == pytest.approx(10 * one.seconds)
    assert sum(part.seconds for part in one.parts) == pytest.approx(one.device_seconds)
    assert sum(ten.stages.values()) == pytest.approx(ten.device_seconds)
    assert list(one.stages) == ["projection", "attention", "output"]


def test_nothing_takes_no_time(machine):
    assert predict(Work("prefill", ()), machine).seconds == 0


def test_a_form_that_was_not_timed_is_as_far_from_physics_as_the_plain_one(machine):
    windowed = core(queries=2048, left=99, right=0)
    assert route(windowed, "cuda") == "masked"
    least = limits(windowed, machine)
    expected = least.before + 1.5 * least.kernel_seconds
    assert predict_piece(windowed, machine).seconds == pytest.approx(expected, rel=0.1)


def test_a_dtype_that_was_not_calibrated_is_refused(machine):
    with pytest.raises(OptionError, match="calibrated in bfloat16, got float32"):
        predict_piece(product(8, 8, 8, F32), machine)


def test_a_roofline_is_the_longer_of_two(machine):
    work = layer(4096)
    assert roofline(work, 1e12, 1e30) == work.flops / 1e12
    assert roofline(work, 1e30, 1e12) == work.bytes / 1e12


@pytest.mark.parametrize(
    ("tokens", "mask", "expected"),
    [
        (64, None, "plain"),
        (64, polyhead.Mask.causal(), "plain"),
        (64, polyhead.Mask.window(16), "masked"),
        (32_768, polyhead.Mask.window(16), "masked"),
        (32_776, polyhead.Mask.window(16), "tiled"),
    ],
)
def test_the_route_is_the_one_that_attention_takes(tokens, mask, expected):
    x = torch.zeros(1, 1, tokens, 8)
    explanation = polyhead.explain(x, x, x, mask=mask)
    left, right = (None, None) if mask is None else (mask.left, mask.right)
    assert route(AttentionCore("forward", 1, 1, 1, tokens, tokens, 8, 8, F32, left, right), "cpu") == expected
    assert (explanation.chosen == "sdpa") == (expected != "tiled")
    assert bool(explanation["sdpa"].avoided) == (expected == "tiled")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("dim", [64, 320])
@pytest.mark.parametrize("tokens", [4096, 8184, 8192, 33_024])
@pytest.mark.parametrize("band", [(None, None), (None, 0), (255, 0), (255, 7), (None, 7)])
def test_the_route_on_a_gpu_is_the_one_that_attention_takes_there(monkeypatch, tokens, band, dim, dtype):
    """As `auto` says of tensors that claim to lie on a GPU whose kernels all serve."""
    monkeypatch.setattr(sdpa, "kernel", lambda request: "efficient")
    monkeypatch.setattr(availability, "capability", lambda device: (9, 0))
    monkeypatch.setattr(availability, "HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    mask = None if band == (None, None) else polyhead.Mask.causal()
    mask = mask if band in ((None, None), (None, 0)) else polyhead.Mask.window(left=band[0], right=band[1])
    with FakeTensorMode():
        x = torch.empty(2, 4, tokens, dim, device="cuda", dtype=dtype)
        explanation = polyhead.explain(x, x, x, mask=mask)
    served = route(AttentionCore("forward", 2, 4, 4, tokens, tokens, dim, dim, dtype, *band), "cuda")
    assert bool(explanation["sdpa"].avoided) == (served == "tiled")
    assert (served == "plain") == (band in ((None, None), (None, 0)))


@pytest.mark.parametrize(("heads", "expected"), [(16, True), (32, False)])
def test_memory_has_a_mask_tensor_where_attention_is_handed_one(heads, expected):
    """4,096 tokens of 64 channels are 2^35 products with 32 heads."""
    config = MultiHeadConfig(heads * 64, heads, causal=True, window=64, finite=True)
    plain = dataclasses.replace(config, window=None)
    work = Workload.forward(4096)
    (core,) = (piece for piece in layer_work(config, work).pieces if isinstance(piece, AttentionCore))
    assert (route(core, "cuda") == "masked") == expected
    assert (estimate_memory(config, work).total > estimate_memory(plain, work).total) == expected
    assert estimate_memory(config, work, device="cpu").total > estimate_memory(plain, work, device="cpu").total


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("dim", [64, 320])
def test_memory_has_a_bias_of_every_pair_where_attention_is_handed_one(monkeypatch, dim, dtype):
    monkeypatch.setattr(sdpa, "kernel", lambda request: "efficient")
    monkeypatch.setattr(availability, "capability", lambda device: (9, 0))
    monkeypatch.setattr(availability, "HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with FakeTensorMode():
        x, table = torch.empty(2, 4, 4096, dim, device="cuda", dtype=dtype), torch.empty(4, 8191, device="cuda")
        explanation = polyhead.explain(x, x, x, mask=polyhead.Mask.relative(table, 4095))
    assert (explanation.chosen == "sdpa") == (dtype is F32 or dim == 320)
    config = MultiHeadConfig(4 * dim, 4, positions=ALiBiConfig(), finite=True)
    plain, work = dataclasses.replace(config, positions=None), Workload(4096, batch=2)
    biased, without = (estimate_memory(x, work, dtype=dtype).activations for x in (config, plain))
    of_pairs = 4 * 4096**2 * dtype.itemsize
    assert (biased - without > 0.5 * of_pairs) == (explanation.chosen == "sdpa")


def test_a_window_that_would_be_served_otherwise_now_is_no_sample_of_how_it_is(machine):
    """A mask tensor was timed where our kernel is taken now; the prediction is as if there were no such sample."""
    windowed = core(queries=16_384, left=255, right=0)
    assert route(windowed, "cuda") == "tiled"
    known = dataclasses.replace(machine, samples=(*machine.samples, Sample(windowed, 1.0, "masked")))
    assert predict_piece(windowed, known).seconds == predict_piece(windowed, machine).seconds
    assert predict_piece(windowed, dataclasses.replace(known, device="cpu")).seconds > 0.5


def test_hidden_pairs_cost_time_where_a_mask_is_handed_over(machine):
    windowed, whole = core(queries=2048, left=127, right=0), core(queries=2048, right=None)
    assert limits(windowed, machine).matrix == pytest.approx(limits(whole, machine).matrix)
    assert limits(windowed, machine).before > MASK_TRAFFIC * 2048**2 / BANDWIDTH
    backward = core("backward", queries=2048, left=127, right=0)
    assert limits(whole, machine).before == limits(backward, machine).before == 0
    far = core(batch=1, heads=1, kv_heads=1, queries=65_536, left=127, right=0)
    assert limits(far, machine).before == 0
    assert limits(far, machine).matrix < limits(core(batch=1, heads=1, kv_heads=1, queries=65_536), machine).matrix / 50


def test_a_band_in_tiles_takes_time_for_its_edges(machine):
    """A window of 64 keys is far from half as long as one of 128; one of 32,768 nearly is half of one of 65,536."""
    short, double, long, longest = (
        limits(core(queries=131_072, left=window - 1, right=0), machine).matrix for window in (64, 128, 32_768, 65_536)
    )
    assert double / short == pytest.approx((128 + EDGE_KEYS) / (64 + EDGE_KEYS), rel=0.01)
    assert 1.6 < longest / long < 2


def test_a_gradient_in_tiles_walks_over_its_pairs_twice(machine):
    """Seven products where one walk has five, and every weight computed in both."""
    tiled, masked = (limits(core("backward", queries=16_384, left=4095, right=0), machine, by) for by in ROUTES)
    forward = limits(core(queries=16_384, left=4095, right=0), machine, "tiled")
    assert tiled.matrix == pytest.approx(7 / 2 * forward.matrix)
    assert tiled.exponentials == pytest.approx(2 * forward.exponentials)
    assert masked.matrix > tiled.matrix


@pytest.mark.parametrize(("seconds", "expected"), [((3,), 3), ((5, 3, 4), 4), ((9, 3, 5, 4), 4)])
def test_of_several_small_layers_the_one_in_the_middle_counts(seconds, expected):
    costs = [HostCost("decode", "plain", x, 6) for x in seconds] + [HostCost("decode", "tiled", 99, 6)]
    found = host_cost("decode", "plain", [HostCost("prefill", "plain", 1, 3), *costs])
    assert found == HostCost("decode", "plain", expected, 6)
    assert host_cost("decode", "masked", costs) == found
    assert host_cost("training", "masked", costs) is None


def layers_of_another_day(project_root):
    """Layers that `make bench` timed on an H200 before anything was calibrated, with their milliseconds."""
    content = json.loads(
        (project_root / "benchmarks" / "results" / "cuda-nvidia-h200.json").read_text(encoding="utf-8")
    )
    for row in content["rows"]:
        bench, _, mode = row["bench"].partition(", ")
        taken = row["median_ms"].get("polyhead, finite=True" if bench == "causal" else "polyhead")
        if bench in ("layer", "causal") and taken is not None:
            batch, tokens, width, heads = map(int, row["shape"].split("x"))
            config = MultiHeadConfig(width, heads, causal=bench == "causal", finite=True)
            work = Workload(tokens, batch, training=mode == "forward + backward")
            yield row["bench"], row["shape"], layer_work(config, work), taken / 1e3


def test_layers_of_another_day_are_predicted(project_root):
    machine = Machine.load("nvidia-h200")
    errors = {
        (bench, shape): predict(work, machine).seconds / taken - 1
        for bench, shape, work, taken in layers_of_another_day(project_root)
    }
    assert len(errors) == 16
    assert max(map(abs, errors.values())) < 0.35, errors
    assert statistics.median(map(abs, errors.values())) < 0.15, errors


def test_one_token_of_a_cpu_is_bound_by_what_it_reads():
    """A product of one row is not charged as a tile of many."""
    config = MultiHeadConfig(4096, 32, causal=True, bias=False)
    work = layer_work(config, Workload.decode(past=4095), dtype=torch.float32)
    found = predict(work, Machine.load("cpu-2-cores"))
    assert found.bound == "bandwidth"
    assert {part.bound for part in found.parts if isinstance(part.piece, Product)} == {"bandwidth"}


def test_a_datasheet_is_predicted_from_its_rates_and_the_correction_of_the_measured_machine_at_the_same_sizes():
    measured, sheet = Machine.load("nvidia-h200"), Machine.load("nvidia-h100-sxm")
    factors = set()
    for rows in (16, 512, 8192):
        product = Product("projection", rows, 4096, 4096, torch.bfloat16)
        factor = predict_piece(product, measured).seconds / limits(product, measured).kernel_seconds
        assert predict_piece(product, sheet).seconds == pytest.approx(limits(product, sheet).kernel_seconds * factor)
        factors.add(round(factor, 2))
    assert len(factors) == 3
    # Half of the bandwidth, twice the time of a large copy.
    traffic = Traffic("output", 1 << 33)
    faster, slower = (
        dataclasses.replace(sheet, sheet=dataclasses.replace(sheet.sheet, bandwidth=bandwidth))
        for bandwidth in (4e12, 2e12)
    )
    assert predict_piece(traffic, slower).seconds == pytest.approx(2 * predict_piece(traffic, faster).seconds, rel=1e-3)


def test_no_machine_with_lower_figures_is_predicted_faster_than_the_measured_one():
    measured = Machine.load("nvidia-h200")
    slower = [other for name in list_machines() if is_outdone(other := Machine.load(name), measured)]
    assert [other.name for other in slower] == ["nvidia-a100-80gb", "nvidia-h100-sxm", "nvidia-l4"]
    configs = (
        MultiHeadConfig(256, 4, causal=True),
        MultiHeadConfig(1024, 16),
        MultiHeadConfig(4096, 32, num_kv_heads=8, causal=True, window=1024),
        latent_layout(4096, 32, 128, rank=512, layers=1).config,
    )
    for config, tokens, dtype in itertools.product(configs, (37, 512, 4096, 65536), (BF16, torch.float16, F32)):
        workloads = [Workload.training_step(tokens), Workload.prefill(tokens, batch=3)]
        workloads += [Workload.decode(tokens - 1, batch=7)] if config.causal else []
        for workload in workloads:
            work = layer_work(config, workload, dtype=dtype)
            least = predict(work, measured)
            for other in slower:
                found = predict(work, other)
                assert found.seconds >= 0.999999 * least.seconds, (other.name, config, workload, dtype)
                assert found.device_seconds >= 0.999999 * least.device_seconds, (other.name, config, workload, dtype)


def is_outdone(machine: Machine, other: Machine) -> bool:
    """Whether every figure of a machine's datasheet is at most that of the other's."""
    if machine.kind == "measured" or machine.device != other.device:
        return False
    ours, theirs = machine.sheet, other.sheet
    rates = all(rate <= theirs.flops[name] for name, rate in ours.flops.items())
    return rates and ours.bandwidth <= theirs.bandwidth and machine.processors <= other.processors


def test_the_datasheet_of_the_measured_machine_predicts_as_its_calibration():
    found = json.loads((ROOT / "benchmarks/results/plan-cuda-nvidia-h200.json").read_text(encoding="utf-8"))
    measured = Machine.load("nvidia-h200")
    sheet = dataclasses.replace(measured, samples=())
    assert sheet.kind == "datasheet"
    works = [Shape(**row["shape"]).work(BF16) for row in found["rows"]]
    assert len(works) == 52
    assert [predict(work, sheet).seconds for work in works] == pytest.approx(
        [predict(work, measured).seconds for work in works]
    )
