"""The data of a page as a JSON-compatible value, with all texts in both languages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from polyhead.analysis.roles import HeadRoles, RoleScore
from polyhead.inspection import Inspection
from polyhead.inspection.findings import findings
from polyhead.inspection.heads import Head
from polyhead.inspection.identity import edits_of, originally
from polyhead.inspection.vocabulary import RELATIONS, ROLE_ORDER, Language, Text, column_of, relation_of, role_of
from polyhead.inspection.wording import Finding, kind_of_model, loss_in_words, words_of
from polyhead.observation import AttentionSite
from polyhead.report import pictures
from polyhead.report.packing import clipped, packed_floats, plain
from polyhead.report.syntax_results import Syntax

FORMAT = 1
FINDINGS = 8  # more than a terminal shows: a page has room
MOST_ALIKE = 5
LONGEST_FACT = 1000
IMPORTANCE = ("ablation", "gradient")  # in order of preference
_FACTS = (
    "model", "tokens", "documents", "contexts", "context", "seconds", "interrupted", "unknown", "intervals_over",
    "versions",
)  # fmt: skip
_VIEWS = {"role": "head", "alike": "alike", "matters": "matters", "extreme": "head"}


def page_of(inspection: Inspection, *, language: Language = "en", syntax: Syntax | None = None) -> dict[str, Any]:
    """Return the data of a page, ready for JSON; `frontend/src/data.ts` documents its parts."""
    sites = sites_of(inspection)
    index = {site: number for number, site in enumerate(sites)}
    edits = edits_of(sites)
    page = {
        "format": FORMAT,
        "lang": language,
        "title": clipped(f"polyhead: {inspection.facts['model']}"),
        "facts": {**_facts(inspection.facts), "edits": None if edits is None else _clipped(edits)},
        "stacks": _stacks(sites),
        "sites": [_site(site) for site in sites],
        "columns": [_column(name, inspection.facts.get("loss")) for name in _column_names(inspection)],
        "roles": [_role(name) for name in ROLE_ORDER if name in _requested_roles(inspection)],
        "heads": list(_heads(inspection, index)),
        **pictures.pictures_of(inspection, index),
        "relations": {
            str(index[site]): {name: packed_floats(matrix) for name, matrix in matrices.items()}
            for site, matrices in inspection.relations.items()
        },
        "relation_names": _relation_names(inspection),
        "likeness": None
        if inspection.redundancy is None
        else {"threshold": inspection.redundancy.threshold, "null": inspection.redundancy.null},
        "groups": [{"heads": _places(index, group.heads), "least": group.least} for group in inspection.groups],
        "pairs": [
            {"one": _place(index, x.one), "other": _place(index, x.other), "cosine": x.cosine, "guess": x.guess}
            for x in inspection.pairs
        ],
        "importance": _importance(inspection),
        "syntax": None if syntax is None else syntax.to_dict(sites),
        "findings": [_finding(finding, index) for finding in findings(inspection, FINDINGS)],
    }
    json_page: dict[str, Any] = plain(page)
    return json_page


def sites_of(inspection: Inspection) -> list[AttentionSite]:
    """Return the sites of a page in the order of the table; `[site, head]` in a page indexes this list."""
    return list(dict.fromkeys([*inspection.table.sites, *inspection.relations, *inspection.head_maps]))


# ---- labels


def _site(site: AttentionSite) -> dict[str, Any]:
    return {
        "name": site.name,
        "kind": site.kind,
        "stack": site.stack,
        "layer": site.layer,
        "heads": site.num_heads,
        "originals": [site.label(head) for head in range(site.num_heads)],
    }


def _stacks(sites: list[AttentionSite]) -> list[dict[str, Any]]:
    stacks: dict[tuple[str, str], list[int]] = {}
    for number, site in enumerate(sites):
        stacks.setdefault((site.stack, site.kind), []).append(number)
    return [
        {"label": _stack_label(stack, kind, several=len(stacks) > 1).to_dict(), "kind": kind, "sites": numbers}
        for (stack, kind), numbers in stacks.items()
    ]


def _stack_label(stack: str, kind: str, *, several: bool) -> Text:
    parts = stack.lower()
    side = next((side for side in ("decoder", "encoder") if side in parts), None) if several else None
    what = Text("cross-attention", "交叉注意力") if kind == "cross" else Text("self-attention", "自注意力")
    if side is not None:
        return Text(f"{side.capitalize()} {what.en}", f"{'解码器' if side == 'decoder' else '编码器'}{what.zh}")
    if several:
        return Text(f"{stack}, {what.en}", f"{stack}，{what.zh}")
    return Text(what.en.capitalize(), what.zh)


def _column_names(inspection: Inspection) -> list[str]:
    return ["tokens", *(name for name in inspection.table.names if name != "tokens")]


def _column(name: str, loss: str | None) -> dict[str, Any]:
    column = column_of(name, loss)
    return {
        "name": name,
        "label": column.label.to_dict(),
        "about": column.about.to_dict(),
        "group": column.group,
        "format": column.format,
        "low": column.low,
        "high": column.high,
    }


def _requested_roles(inspection: Inspection) -> set[str]:
    return {score.role for head in inspection.roles for score in head.scores}


def _role(name: str) -> dict[str, Any]:
    role = role_of(name)
    return {
        "name": name,
        "letters": role.letters,
        "label": role.label.to_dict(),
        "about": role.about.to_dict(),
    }


def _relation_names(inspection: Inspection) -> list[dict[str, Any]]:
    present = {name for matrices in inspection.relations.values() for name in matrices}
    names = [name for name in RELATIONS if name in present]
    terms = [relation_of(name) for name in [*names, *sorted(present - set(names))]]
    return [{"name": x.name, "label": x.label.to_dict(), "about": x.about.to_dict()} for x in terms]


def _importance(inspection: Inspection) -> dict[str, Any] | None:
    for name in IMPORTANCE:
        if name in inspection.table.names:
            column = column_of(name, inspection.facts.get("loss"))
            return {"column": name, "label": column.label.to_dict(), "about": column.about.to_dict()}
    return None


def _facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run, with texts in both languages."""
    loss, pairs_by = facts.get("loss"), facts.get("pairs_by")
    model, name = facts.get("model"), facts.get("name")
    return {
        **{name: facts.get(name) for name in _FACTS},
        "model": None if model is None else clipped(str(model), LONGEST_FACT),
        # A truncated name would name another model.
        "name": None if name is None or len(str(name)) > LONGEST_FACT else clipped(str(name), LONGEST_FACT),
        "kind": _clipped(kind_of_model(str(facts.get("kind", "")))),
        "loss": None if loss is None else _clipped(loss_in_words(str(loss))),
        "pairs_by": None if pairs_by is None else _clipped(pairs_by.text),
        "left_out": [_clipped(reason.text) for reason in facts.get("left_out", ())],
    }


def _clipped(text: Text) -> dict[str, str]:
    return {language: clipped(words, LONGEST_FACT) for language, words in text.to_dict().items()}


# ---- heads


def _heads(inspection: Inspection, index: Mapping[AttentionSite, int]) -> Iterator[dict[str, Any]]:
    roles = {(x.site, x.head): x for x in inspection.roles}
    alike = _alike(inspection, index)
    names = _column_names(inspection)
    table = inspection.table
    columns = {name: column.tolist() for name, column in table.columns.items()}
    for row, head in enumerate(zip(table.sites, table.heads, strict=True)):
        values = {name: columns[name][row] for name in names if name in columns}
        spreads = {name: columns[f"{name}_std"][row] for name in names if f"{name}_std" in columns}
        errors = {name: columns[f"{name}_error"][row] for name in names if f"{name}_error" in columns}
        yield {
            "site": index[head[0]],
            "head": head[1],
            "origin": None if (origin := originally(head)) is None else origin.to_dict(),
            "values": values,
            "spreads": spreads,
            "errors": errors,
            "chances": {name: columns[f"{name}_chance"][row] for name in names if f"{name}_chance" in columns},
            "roles": [] if head not in roles else _scores(roles[head]),
            "alike": alike.get(head, [])[:MOST_ALIKE],
            "top_keys": _top_keys(inspection, head),
        }


def _scores(head: HeadRoles) -> list[dict[str, Any]]:
    return [_score(score) for score in sorted(head.scores, key=lambda x: ROLE_ORDER.index(x.role))]


def _score(score: RoleScore) -> dict[str, Any]:
    return {
        "role": score.role,
        "score": score.score,
        "null": score.null,
        "low": score.low,
        "high": score.high,
        "holds": score.holds,
        "evidence": score.text.to_dict(),
    }


def _alike(inspection: Inspection, index: Mapping[AttentionSite, int]) -> dict[Head, list[dict[str, Any]]]:
    """Return the most similar heads of each head: those of its layer, and the measured pairs of other layers."""
    similar: dict[Head, list[tuple[float, Head, bool]]] = {}
    for site, matrices in inspection.relations.items():
        for head, row in enumerate(matrices["cosine"].tolist() if "cosine" in matrices else []):
            others = [(cosine, (site, other), False) for other, cosine in enumerate(row) if other != head]
            similar.setdefault((site, head), []).extend(others)
    for pair in inspection.pairs:
        similar.setdefault(pair.one, []).append((pair.cosine, pair.other, True))
        similar.setdefault(pair.other, []).append((pair.cosine, pair.one, True))
    return {
        head: [
            {"place": _place(index, other), "cosine": cosine, "across": across}
            for cosine, other, across in sorted(others, key=lambda x: -x[0])
            if math.isfinite(cosine)
        ]
        for head, others in similar.items()
    }


def _top_keys(inspection: Inspection, head: Head) -> list[dict[str, Any]]:
    of_site = inspection.top_keys.get(head[0], ())
    of_head = of_site[head[1]] if head[1] < len(of_site) else ()
    return [{"text": clipped(key.text), "share": key.share} for key in of_head]


# ---- findings


def _finding(finding: Finding, index: Mapping[AttentionSite, int]) -> dict[str, Any]:
    return {
        "text": _clipped(Text(words_of(finding), words_of(finding, "zh"))),
        "kind": finding.kind,
        "heads": _places(index, finding.heads),
        "view": _VIEWS.get(finding.kind, "overview"),
        "column": finding.column,
    }


def _place(index: Mapping[AttentionSite, int], head: Head) -> list[int]:
    return [index[head[0]], head[1]]


def _places(index: Mapping[AttentionSite, int], heads: tuple[Head, ...]) -> list[list[int]]:
    return [_place(index, head) for head in heads]
