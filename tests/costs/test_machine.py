"""Machines: round trip through files, measured rates and those of datasheets, lookup by name."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from polyhead.costs.timing.limits import route
from polyhead.costs.timing.machine import (
    Datasheet,
    HostCost,
    Machine,
    PredictionError,
    Sample,
    efficiency,
    shipped,
)
from polyhead.costs.timing.machine_files import (
    SHIPPED,
    check_own_folder,
    list_machines,
    machine_kinds,
    machine_names,
    own_folder,
)
from polyhead.costs.work import AttentionCore, Product, Traffic
from polyhead.errors import OptionError

BF16, F32 = torch.bfloat16, torch.float32
SHEET = dataclasses.asdict(Datasheet("X", {"float32": 1e12}, 1e11, "a document"))


def core(**options):
    sizes = {"batch": 3, "heads": 8, "kv_heads": 2, "queries": 19, "keys": 19, "head_dim": 64, "value_dim": 32}
    return AttentionCore("forward", **sizes, dtype=BF16, **options)


@pytest.fixture
def machine():
    samples = (
        Sample(Traffic("output", 1000), 1e-6),
        Sample(Traffic("output", 8_000_000), 4e-6),
        Sample(Product("projection", 64, 128, 256, BF16), 2e-6),
        Sample(Product("projection", 640, 128, 256, BF16), 4e-6),
        Sample(Product("projection", 64, 128, 256, F32), 5e-6),
        Sample(core(right=0), 3e-6),
        Sample(core(left=7, right=0), 4e-6, "masked"),
    )
    host = (HostCost("prefill", "plain", 9e-5, 3), HostCost("training", "masked", 9e-4, 9))
    return Machine("toy", "cuda", 132, 1 << 37, 7e-6, samples, host, {"processor": "NVIDIA H200", "date": "today"})


def test_a_machine_comes_back_from_its_file_as_it_was(machine, tmp_path):
    path = machine.save(tmp_path / "toy.json")
    again = Machine.load(path)
    assert again.to_dict() == machine.to_dict()
    assert again.samples == machine.samples
    assert again.host == machine.host


def test_a_sample_keeps_how_it_was_served_whatever_would_serve_it_now(machine):
    sizes = {"batch": 8, "heads": 16, "kv_heads": 16, "queries": 8192, "keys": 8192, "head_dim": 64}
    core = AttentionCore("forward", **sizes, value_dim=64, dtype=BF16, left=63, right=0)
    masked = dataclasses.replace(machine, samples=(*machine.samples, Sample(core, 1e-3, "masked")))
    assert route(core, "cuda") == "tiled"
    assert Machine.from_dict(masked.to_dict()).samples == masked.samples


def test_a_file_holds_a_line_a_sample(machine, tmp_path):
    lines = machine.save(tmp_path / "toy.json").read_text(encoding="utf-8").splitlines()
    assert sum('"seconds"' in line and '"kind"' in line for line in lines) == len(machine.samples)


def test_it_tells_the_best_that_it_reached(machine):
    assert machine.matrix_rate(BF16) == 2 * 640 * 128 * 256 / 4e-6
    assert machine.matrix_rate(F32) == 2 * 64 * 128 * 256 / 5e-6
    assert machine.bandwidth == 8_000_000 / 4e-6
    assert machine.shortest == {"traffic": 1e-6, "product": 2e-6, "forward": 3e-6}
    assert machine.exponential_rate == 3 * 8 * (19 * 20 // 2) / 3e-6
    assert machine.dtypes == (BF16, F32)


def test_the_bandwidth_is_that_of_copies_no_cache_holds(machine):
    copies = [(1 << 20, 1e-7), (1 << 28, 1e-4), (1 << 30, 2.5e-4), (1 << 32, 2e-3)]
    samples = tuple(Sample(Traffic("output", size), seconds) for size, seconds in copies)
    assert dataclasses.replace(machine, samples=samples).bandwidth == (1 << 30) / 2.5e-4


def test_a_dtype_that_was_not_measured_is_refused(machine):
    with pytest.raises(OptionError, match="calibrated in bfloat16, float32, got float16; recalibrate it"):
        machine.matrix_rate(torch.float16)
    with pytest.raises(OptionError, match="has rates in float32, got bfloat16; choose one of these"):
        Machine.load("amd-epyc-9554").matrix_rate(BF16)


def test_machines_calibrated_here_are_listed_and_hide_shipped_ones(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYHEAD_MACHINES", str(tmp_path))
    assert own_folder() == tmp_path
    assert "toy" not in list_machines()
    assert machine.save() == tmp_path / "toy.json"
    assert "toy" in list_machines()
    assert Machine.load("toy").processors == 132
    (tmp_path / "cpu-2-cores.json").write_text((tmp_path / "toy.json").read_text(encoding="utf-8"), encoding="utf-8")
    assert Machine.load("cpu-2-cores").name == "toy"


def test_without_a_folder_of_ones_own_the_data_home_is_taken(monkeypatch, tmp_path):
    monkeypatch.delenv("POLYHEAD_MACHINES", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert own_folder() == tmp_path / "polyhead" / "machines"


ALL = tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


@pytest.mark.parametrize("name", ALL)
def test_every_shipped_machine_loads_and_says_what_it_is_known_from(name):
    machine = shipped(name)
    assert machine.name == name
    assert "processor" in machine.facts
    assert {cost.phase for cost in machine.host} == {"prefill", "decode", "training"}
    assert machine.bandwidth > 0
    assert machine.exponential_rate > 0
    if machine.kind == "measured":
        assert {"versions", "date"} <= machine.facts.keys()
        assert machine.error.median < machine.error.worst < 0.35
        assert machine.summary.source is None
    else:
        assert machine.error is None
        assert machine.samples == ()
        assert len(machine.summary.source) > 40


# TFLOPS of dense bfloat16 and of float32, TB/s, GB, multiprocessors or cores.
DATASHEETS = {
    "nvidia-a100-80gb": (312, 19.5, 2.039, 80, 108),
    "nvidia-h100-sxm": (989.4, 66.9, 3.35, 80, 132),
    "nvidia-l4": (121, 30.3, 0.3, 24, 58),
    "nvidia-rtx-4090": (165.2, 82.6, 1.008, 24, 128),
    "amd-mi300x": (1307.4, 163.4, 5.3, 192, 304),
    "amd-epyc-9554": (None, 6.3488, 0.4608, 384, 64),
}


def test_datasheets_have_dense_rates_without_sparsity():
    assert {name for name, kind in machine_kinds().items() if kind == "datasheet"} == DATASHEETS.keys()
    for name, (narrow, wide, bandwidth, memory, processors) in DATASHEETS.items():
        machine = shipped(name)
        flops = machine.sheet.flops
        assert (
            flops.get("bfloat16") == flops.get("float16") == (None if narrow is None else pytest.approx(narrow * 1e12))
        )
        assert flops["float32"] == pytest.approx(wide * 1e12)
        assert machine.sheet.bandwidth == pytest.approx(bandwidth * 1e12)
        assert (machine.memory_bytes, machine.processors) == (memory * 10**9, processors)


def test_every_document_of_a_datasheet_can_be_found_by_a_number_a_version_or_an_address():
    for sheet in (shipped(name).sheet for name in (*DATASHEETS, "nvidia-h200")):
        documents = re.findall(r"(?:^|; )((?:NVIDIA|AMD) [^(]+)", sheet.source)
        assert documents
        for document in documents:
            assert re.search(r"(data ?sheet|whitepaper), (\d{7}\b|V\d\.\d+ |https://\S+ )", document), document


def test_rates_of_a_datasheet_are_scaled_by_the_efficiency_of_the_measured_machine():
    measured, sheet = shipped("nvidia-h200"), shipped("nvidia-a100-80gb")
    shares = efficiency()
    assert shares.matrix[BF16] == measured.matrix_rate(BF16) / 989.5e12
    assert shares.bandwidth == measured.bandwidth / 4.8e12
    assert sheet.matrix_rate(BF16) == 312e12 * shares.matrix[BF16]
    assert sheet.bandwidth == 2.039e12 * shares.bandwidth
    assert sheet.exponential_rate == pytest.approx(measured.exponential_rate * 19.5 / 67)
    assert sheet.shortest == measured.shortest
    assert (sheet.host, sheet.launch_seconds) == (measured.host, measured.launch_seconds)
    (small, quick), *_, (large, slow) = sheet.copies
    assert (small, quick) == (measured.copies[0][0], measured.shortest["traffic"])  # a copy is no faster than a kernel
    assert large / slow == pytest.approx(sheet.bandwidth, rel=0.01)
    # A CPU is scaled by the same shares; its fixed times are those of the measured CPU.
    server = shipped("amd-epyc-9554")
    assert server.matrix_rate(F32) == 64 * 3.1e9 * 32 * shares.matrix[F32]
    assert server.shortest == shipped("cpu-2-cores").shortest


def test_a_calibration_of_the_same_name_does_not_change_the_efficiency(machine, tmp_path, monkeypatch):
    before = Machine.load("nvidia-l4").matrix_rate(BF16)
    monkeypatch.setenv("POLYHEAD_MACHINES", str(tmp_path))
    dataclasses.replace(machine, name="nvidia-h200").save()
    efficiency.cache_clear()
    shipped.cache_clear()
    assert Machine.load("nvidia-h200").matrix_rate(BF16) == machine.matrix_rate(BF16)
    assert Machine.load("nvidia-l4").matrix_rate(BF16) == before


def test_a_machine_known_by_its_datasheet_comes_back_from_its_file(tmp_path):
    server = shipped("amd-epyc-9554")
    again = Machine.load(server.save(tmp_path / "server.json"))
    assert again.to_dict() == server.to_dict()
    assert again.summary == server.summary


def test_the_error_of_a_measured_machine_is_that_of_the_benchmark(machine):
    root = SHIPPED.parents[4]
    found = json.loads((root / "benchmarks/results/plan-cuda-nvidia-h200.json").read_text(encoding="utf-8"))
    (summary,) = [row for row in found["summary"] if row["regime"] == "all"]
    error = shipped("nvidia-h200").error
    assert error == PredictionError(round(summary["median"], 3), round(summary["worst"], 3), summary["shapes"])
    assert machine.summary.error is None


def test_an_unknown_name_is_answered_with_those_that_are_known_and_their_kinds():
    with pytest.raises(OptionError, match=r"one of .*cpu-2-cores \(measured\).*nvidia-l4 \(datasheet\).*got 'abacus'"):
        Machine.load("abacus")
    with pytest.raises(OptionError, match=r"got 'H100'; did you mean nvidia-h100-sxm\?"):
        Machine.load("H100")


def test_a_file_that_cannot_be_read_is_listed_as_such(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYHEAD_MACHINES", str(tmp_path))
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    assert "broken (unreadable)" in machine_names()


def test_a_file_that_is_missing_broken_or_old_is_refused(tmp_path):
    with pytest.raises(OptionError, match="must exist"):
        Machine.load(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(OptionError, match=r"must contain a machine, got .*Expecting"):
        Machine.load(broken)
    broken.write_text(json.dumps({"format": 0}), encoding="utf-8")
    with pytest.raises(OptionError, match="must have format 2, got 0"):
        Machine.load(broken)
    broken.write_text(json.dumps({"format": 2}), encoding="utf-8")
    with pytest.raises(OptionError, match="it has no 'name'"):
        Machine.load(broken)
    broken.write_text("[1]", encoding="utf-8")
    with pytest.raises(OptionError, match="contains a list instead of an object"):
        Machine.load(broken)
    broken.write_bytes(b"\xff\xfe{")
    with pytest.raises(OptionError, match=r"must contain a machine, got .*codec can't decode"):
        Machine.load(broken)
    folder = tmp_path / "folder.json"
    folder.mkdir()
    with pytest.raises(OptionError, match=r"must contain a machine, got .*no regular file"):
        Machine.load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": []}, "got 0 samples without product, attention, traffic; recalibrate it"),
        ({"samples": [{"kind": "abacus", "seconds": 1}]}, "it has no 'abacus'"),
        (
            {"samples": [{"kind": "traffic", "role": "output", "bytes": 8, "seconds": 1}]},
            "a Traffic has the fields stage, bytes, .*, got no stage, 'role' as well",
        ),
        ({"samples": [{"kind": "product", "dtype": "float12", "seconds": 1}]}, "dtype must be .*; got 'float12'"),
        ({"samples": 3}, "'int' object is not iterable"),
        ({"host": [3]}, "a HostCost must be an object with its fields, got 3"),
        ({"device": "tpu"}, "a device cuda or cpu, got 'toy' and 'tpu'"),
        ({"processors": 0}, "processors of a machine must be a positive number, got 0"),
        ({"memory_bytes": "all"}, "memory_bytes of a machine must be a positive number, got 'all'"),
        ({"kind": "guessed"}, "must be measured or datasheet with a device cuda or cpu, got 'guessed' and 'cuda'"),
        ({"kind": "datasheet"}, "must have samples or a datasheet, got neither"),
        ({"datasheet": {"model": "X"}}, "a Datasheet has the fields model, flops, .*, got no flops"),
        (
            {"kind": "datasheet", "datasheet": SHEET | {"flops": {"bfloat16": 1e12}}},
            "a rate in float32 on its datasheet",
        ),
        (
            {"datasheet": SHEET | {"flops": {"float32": -1.0}}},
            "flops in float32 of a machine must be a positive number",
        ),
        ({"datasheet": SHEET | {"flops": {"int8": 1e12}}}, "in bfloat16, float16 or float32, got int8"),
        ({"error": {"median": "small"}}, "a PredictionError has the fields median, worst, layers, got no worst"),
    ],
)
def test_a_file_of_another_hand_is_refused_with_what_it_lacks(machine, tmp_path, change, words):
    file = tmp_path / "toy.json"
    file.write_text(json.dumps({**machine.to_dict(), **change}), encoding="utf-8")
    with pytest.raises(OptionError, match=words):
        Machine.load(file)


def test_a_piece_that_took_no_time_is_refused(machine):
    content = machine.to_dict()
    content["samples"][0]["seconds"] = 0
    with pytest.raises(OptionError, match="seconds of a machine must be a positive number, got 0"):
        Machine.from_dict(content)


def test_a_folder_that_cannot_be_written_is_reported_before_and_after(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYHEAD_MACHINES", str(tmp_path / "own"))
    check_own_folder()
    assert list((tmp_path / "own").iterdir()) == []
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("POLYHEAD_MACHINES", str(tmp_path / "file" / "own"))
    for check in (check_own_folder, machine.save):
        with pytest.raises(OptionError, match=r"a writable folder, got .*set POLYHEAD_MACHINES"):
            check()
