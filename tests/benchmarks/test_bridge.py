"""The record of a long text through TransformerLens' bridge, and what the guide says of it."""

from __future__ import annotations

import json

import pytest

from benchmarks import bridge
from benchmarks.bridge import LENGTHS, cache_bytes


@pytest.fixture(scope="module")
def record(project_root):
    text = (project_root / "benchmarks/results/bridge-cpu-xeon-2-cores.jsonl").read_text(encoding="utf-8")
    _, *rows = map(json.loads, text.splitlines())
    return {(row["what"], row["tokens"]): row for row in rows}


def test_the_size_of_a_cache_follows_from_that_of_a_shorter_text(record):
    for length in LENGTHS[1:]:
        assert (
            cache_bytes(record["run_with_cache", LENGTHS[0]], length) == record["run_with_cache", length]["cache_bytes"]
        )


def test_the_statistics_are_those_of_the_patterns_in_the_cache(record):
    expected = record["run_with_cache", LENGTHS[-1]]["entropy"]
    assert record["observe", LENGTHS[-1]]["entropy"] == pytest.approx(expected, abs=1e-6)


def test_the_guide_has_the_figures_of_the_record(record, project_root):
    guide = (project_root / "docs/switching_transformerlens.md").read_text(encoding="utf-8")
    longest = record["observe", 100_000]
    for figure in (
        f"{record['cache, computed', 100_000]['cache_bytes'] / 1e9:.0f} GB",
        f"{record['run_with_cache', 2048]['cache_bytes'] / 1e6:.0f} MB at 2,048",
        f"{longest['peak_bytes'] / 1e6:.0f} MB",
        f"{longest['cpu_seconds']:.0f} seconds",
    ):
        assert figure in " ".join(guide.split())


def test_a_run_writes_its_rows_and_the_version_of_transformer_lens(tmp_path, monkeypatch, capsys):
    found = [{"what": "observe", "tokens": 2048}]
    monkeypatch.setattr(bridge, "rows", lambda tokens: found)
    monkeypatch.setattr(bridge, "version", lambda name: "4.3.0")
    bridge.run(2048, tmp_path / "record", "abc")
    facts, *rows = map(json.loads, (tmp_path / "record").read_text().splitlines())
    assert (facts["facts"]["commit"], facts["facts"]["versions"]["transformer-lens"], rows) == ("abc", "4.3.0", found)
    assert capsys.readouterr().out == "what observe, tokens 2048\n"
