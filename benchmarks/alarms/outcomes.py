"""Outcome of a run: its spike, its alarms, and whether one of them names what was planted in time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_args

from benchmarks.alarms.runs import PLANTED, Plant, Trace
from polyhead.training import Alarm, HeadAlarms

AHEAD = (20, 500)  # steps by which an alarm has to precede the spike
COUNTED = 20  # planted runs of each kind: the first that spike


def outcome(trace: Trace) -> dict[str, Any]:
    """Return the outcome of a run as plain values."""
    callback = HeadAlarms(action=())
    for record in trace.records():
        callback.on_record(record)
    spike, after = trace.spike, [alarm for alarm in callback.alarms if alarm.step >= PLANTED]
    named = [alarm for alarm in after if _names_plant(trace, alarm)]
    in_time = [alarm for alarm in named if spike is not None and AHEAD[0] <= spike - alarm.step <= AHEAD[1]]
    crossed = (trace.values[:, 0] >= callback.logit_limit).any(1).nonzero()[:, 0].tolist()
    first = after[0] if after else None
    return {
        "run": asdict(trace.run),
        "place": trace.run.place if trace.run.plant else None,
        "spike": spike,
        "alarms": [(*_brief(x), x.evidence) for x in callback.alarms][:8],
        "count": len(callback.alarms),
        "before": sum(alarm.step < PLANTED for alarm in callback.alarms),
        "first": first and _brief(first),  # alarm since the plant
        "first_names": first is not None and first in named,
        "named": named[0].step if named else None,
        "lead": spike - in_time[0].step if spike is not None and in_time else None,
        "by": in_time[0].kind if in_time else None,
        "crossed": crossed[0] if crossed else None,
    }


def _brief(alarm: Alarm) -> tuple[str, int, tuple[int, int] | None]:
    """Return the kind, the step, and layer and head."""
    return alarm.kind, alarm.step, alarm.head and (alarm.head.layer, alarm.head.head)


def _names_plant(trace: Trace, alarm: Alarm) -> bool:
    """A head's W_Q: that head. A layer's learning rate: a head of it. The whole learning rate: any head."""
    if alarm.head is None:
        return False
    layer, head = trace.run.place
    plant = trace.run.plant
    return plant == "rate" or (alarm.head.layer == layer and (plant == "layer rate" or alarm.head.head == head))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures of a study in lines of text."""
    lines = []
    for plant in get_args(Plant):
        every = [row for row in rows if row["run"]["plant"] == plant]
        spiked = [row for row in every if row["spike"] is not None and row["spike"] >= PLANTED][:COUNTED]
        leads = [row["lead"] for row in spiked if row["lead"] is not None]
        median = f", median lead {statistics.median(leads):g} steps" if leads else ""
        first = sum(row["first_names"] for row in spiked)
        lines.append(
            f"{plant}: {len(leads)} of {len(spiked)} spikes are announced {AHEAD[0]} to {AHEAD[1]} steps ahead"
            f"{median}; the first alarm names it in {first}; {sum(row['before'] > 0 for row in every)} of "
            f"{len(every)} runs have an alarm before anything is planted"
        )
    healthy = [row for row in rows if row["run"]["plant"] is None]
    quiet = [row for row in healthy if row["spike"] is None]
    lines.append(
        f"healthy: {sum(row['count'] > 0 for row in quiet)} of {len(quiet)} runs raise an alarm; "
        f"{len(healthy) - len(quiet)} others spike by themselves"
    )
    return "\n".join(lines)
