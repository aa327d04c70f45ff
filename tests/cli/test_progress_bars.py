"""Progress of commands whose stderr is no terminal: lines."""

from __future__ import annotations

from polyhead.cli import progress_bars
from polyhead.progress import Progress, Step


def test_a_long_step_in_a_pipe_prints_its_count_every_few_seconds(capsys, monkeypatch):
    clock = iter(range(100, 200, 2))  # two seconds between two calls
    monkeypatch.setattr(progress_bars.time, "monotonic", lambda: float(next(clock)))
    with progress_bars.ProgressBars() as progress:
        step = Step(progress, "Merge KV heads", 1_300, "layers")
        for _ in range(7):
            step.advance(11)
        progress(Progress("Write"))
    assert capsys.readouterr().err.splitlines() == [
        "Merge KV heads",
        "Merge KV heads: 33 of 1,300 layers",
        "Merge KV heads: 66 of 1,300 layers",
        "Write",
    ]
