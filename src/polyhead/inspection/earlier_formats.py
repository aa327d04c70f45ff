"""Upgrade of inspections in formats 2 and 3, which store evidence and reasons as English text instead of fields."""

from __future__ import annotations

from typing import Any


def upgraded(rest: dict[str, Any]) -> dict[str, Any]:
    """Convert the JSON value of an inspection to the current format, in place.

    The English texts are kept and shown in both languages.
    """
    facts = rest["facts"]
    if facts.get("pairs_by") is not None:
        facts["pairs_by"] = _reason(facts["pairs_by"])
    if "left_out" in facts:
        facts["left_out"] = [_reason(text) for text in facts["left_out"]]
    for score in (score for head in rest["roles"] for score in head["scores"]):
        score["saved_evidence"] = score["evidence"]
    for values in (finding["values"] for finding in rest["findings"] if finding["kind"] == "role"):
        values["saved_evidence"] = values.pop("evidence")
    return rest


def _reason(text: str) -> dict[str, Any]:
    return {"kind": "text", "fields": {"text": text}}
