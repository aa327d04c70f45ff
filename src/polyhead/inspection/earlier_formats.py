"""Upgrade of inspections in formats 2 to 7 to the current one.

Up to format 7, the estimated cosine of a pair has another name. Up to format 6, copy and anti-copy are scores of the
weights, and pronoun is a score of all kinds of sentences. Groups of redundant heads, which are dropped with the
findings about them, are by a threshold on cosines; shares inside the word and the sentence, which are dropped too,
count the token itself. Findings are not required to hold on both halves of the text. Format 5 has other names for kinds
of findings, 4 also for two fields, 3 and 2 store evidence and reasons as English text instead of fields, and 2 has
other names for some statistics.
"""

from __future__ import annotations

from typing import Any

from polyhead.analysis.roles_rules import RULES
from polyhead.observation.renamed import current_name

_OF_WEIGHTS = ("copy", "anti-copy")
_WITH_SELF = ("word_share", "sentence_share")
_DROPPED = ("copy_score", "anti_copy_score", *(f"{x}{end}" for x in _WITH_SELF for end in ("", "_error", "_chance")))
_FINDING_KINDS = {"matters": "importance", "resting": "sink", "wide": "uniform"}
_OF_TEXT = ("sink", "resting", "uniform", "wide", "extreme")


def upgraded(rest: dict[str, Any]) -> dict[str, Any]:
    """Convert the JSON value of an inspection to the current format, in place.

    The English texts of formats 2 and 3 are kept and shown in both languages.
    """
    for pair in rest["pairs"]:
        pair["estimate"] = pair.pop("guess")
    if rest["format"] == 7:
        return rest
    findings = [x for x in rest["findings"] if x["kind"] not in ("similar", "alike") and _role(x) not in _OF_WEIGHTS]
    rest["roles"], rest["findings"] = _roles(rest), [_with_basis(x, rest) for x in findings]
    rest["statistics"] = [name for name in rest["statistics"] if name not in _WITH_SELF]
    if rest["format"] == 6:
        return rest
    for finding in rest["findings"]:
        finding["kind"] = _FINDING_KINDS.get(finding["kind"], finding["kind"])
        if "turned" in finding["values"]:
            finding["values"]["by_representation"] = finding["values"].pop("turned")
    if rest["format"] == 5:
        return rest
    rest["head_maps"] = rest.pop("looks")
    for finding in rest["findings"]:
        if isinstance(finding["column"], str):
            finding["column"] = current_name(finding["column"])
    if rest["format"] == 4:
        return rest
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


def upgraded_columns(cells: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the columns of the table without those of another meaning. Anti-copy was minus copy."""
    columns = {name: column for name, column in cells.items() if name not in _DROPPED}
    return columns if "copy_score" not in cells else {**columns, "copying_circuit_score": cells["copy_score"]}


def _roles(rest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the roles without those of the weights, and with the sentence that was saved for a pronoun head."""
    for head in rest["roles"]:
        head["scores"] = [score for score in head["scores"] if score["role"] not in _OF_WEIGHTS]
        for score in (x for x in head["scores"] if x["role"] == "pronoun"):
            score["saved_evidence"] = score["evidence"]
            for finding in (x for x in rest["findings"] if _role(x) == "pronoun"):
                if finding["heads"] == [[head["site"], head["head"]]]:
                    finding["values"]["saved_evidence"] = score["evidence"]
    return rest["roles"]


def _with_basis(finding: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Return a finding with the text it is about, on whose halves it was not required to hold."""
    sizes = {name: rest["facts"].get(name) for name in ("tokens", "context")}
    rule = RULES.get(str(_role(finding)))
    if None in sizes.values() or (finding["kind"] not in _OF_TEXT and (rule is None or rule.source != "text")):
        return finding
    return {"basis": {"text": rest["settings"].get("text"), **sizes, "halves": False}, **finding}


def _role(finding: dict[str, Any]) -> str | None:
    return finding["values"].get("role")


def _reason(text: str) -> dict[str, Any]:
    return {"kind": "text", "fields": {"text": text}}
