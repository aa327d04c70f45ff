"""The data of a page as a JSON-compatible value, with all texts in both languages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from polyhead.analysis.redundancy import PREDICTABLE, THRESHOLD
from polyhead.analysis.roles import HeadRoles
from polyhead.inspection import Inspection
from polyhead.inspection.findings import findings
from polyhead.inspection.heads import Head
from polyhead.inspection.identity import edits_of, originally
from polyhead.inspection.vocabulary import RELATIONS, ROLE_ORDER, Language, Term, Text, column_of, relation_of, role_of
from polyhead.inspection.wording import Finding, kind_of_model, loss_in_words, words_of
from polyhead.observation import AttentionSite
from polyhead.report import pictures
from polyhead.report.packing import clipped, packed_floats, plain
from polyhead.report.syntax_results import Syntax

FORMAT = 3
FINDINGS = 8  # more than a terminal shows: a page has room
MAX_SIMILAR = 5
MAX_FACT_LENGTH = 1000
IMPORTANCE = ("ablation", "gradient")  # in order of preference
_FACTS = (
    "model", "tokens", "documents", "contexts", "context", "seconds", "unknown", "intervals_over",
    "versions",
)  # fmt: skip
_VIEWS = {"role": "head", "redundant": "similar", "importance": "importance", "extreme": "head"}


def page_of(inspection: Inspection, *, language: Language = "en", syntax: Syntax | None = None) -> dict[str, Any]:
    """Return the data of a page, ready for JSON; `frontend/src/data.ts` documents its parts.

    Args:
        inspection: the result of `polyhead.inspect`.
        language: language in which the page opens, "en" or "zh".
        syntax: result of `polyhead.syntax` for the same model, shown beside it.
    """
    sites = sites_of(inspection)
    index = {site: number for number, site in enumerate(sites)}
    edits = edits_of(sites)
    requested_roles = {score.role for head in inspection.roles for score in head.scores}
    page = {
        "format": FORMAT,
        "lang": language,
        "title": clipped(f"polyhead: {inspection.facts['model']}"),
        "facts": {**_facts(inspection.facts), "edits": _clipped(edits)},
        "stacks": _stacks(sites),
        "sites": [_site(site) for site in sites],
        "columns": [column_of(name, inspection.facts.get("loss")) for name in _column_names(inspection)],
        "roles": [role_of(name) for name in ROLE_ORDER if name in requested_roles],
        "heads": list(_heads(inspection, index)),
        "table": {name: packed_floats(column, bits=64) for name, column in inspection.table.columns.items()},
        **pictures.pictures_of(inspection, index),
        "relations": {
            str(index[site]): {name: packed_floats(matrix) for name, matrix in matrices.items()}
            for site, matrices in inspection.relations.items()
        },
        "relation_names": _relation_names(inspection),
        "redundancy": THRESHOLD if PREDICTABLE in inspection.table.columns else None,
        "redundant": [
            {
                "head": _head_id(index, x.head),
                "share": x.share,
                "other": _head_id(index, x.other),
                "alone": x.share_of_other,
                "cosine": x.cosine,
            }
            for x in inspection.redundant
        ],
        "pairs": [
            {"one": _head_id(index, x.one), "other": _head_id(index, x.other), "cosine": x.cosine}
            for x in inspection.pairs
        ],
        "importance": _importance(inspection),
        "syntax": None if syntax is None else syntax.to_dict(sites),
        # A run of an earlier format has no halves, and only the findings that were saved.
        "findings": [
            _finding(finding, index)
            for finding in (findings(inspection, FINDINGS) if inspection.halves else inspection.findings)
        ],
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
        {"label": _stack_label(stack, kind, several=len(stacks) > 1), "kind": kind, "sites": numbers}
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
    """Return all columns of the table: statistics first, then their deviations, maxima, errors and chance levels."""
    statistics = ["tokens", *(name for name in inspection.table.names if name != "tokens")]
    return [*statistics, *(name for name in inspection.table.columns if name not in statistics)]


def _relation_names(inspection: Inspection) -> list[Term]:
    present = {name for matrices in inspection.relations.values() for name in matrices}
    names = [name for name in RELATIONS if name in present]
    return [relation_of(name) for name in [*names, *sorted(present - set(names))]]


def _importance(inspection: Inspection) -> dict[str, Any] | None:
    for name in IMPORTANCE:
        if name in inspection.table.names:
            column = column_of(name, inspection.facts.get("loss"))
            return {"column": name, "label": column.label, "about": column.about}
    return None


def _facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run, with texts in both languages."""
    loss, pairs_by = facts.get("loss"), facts.get("pairs_by")
    model, name = facts.get("model"), facts.get("name")
    return {
        **{name: facts.get(name) for name in _FACTS},
        "interrupted": bool(facts.get("interrupted")) and not facts.get("read"),  # before the end of the text
        "model": None if model is None else clipped(str(model), MAX_FACT_LENGTH),
        # A truncated name would name another model.
        "name": None if name is None or len(str(name)) > MAX_FACT_LENGTH else clipped(str(name), MAX_FACT_LENGTH),
        "kind": _clipped(kind_of_model(str(facts.get("kind", "")))),
        "loss": None if loss is None else _clipped(loss_in_words(str(loss), facts.get("importance_tokens"))),
        "pairs_by": None if pairs_by is None else _clipped(pairs_by.text),
        "left_out": [_clipped(reason.text) for reason in facts.get("left_out", ())],
    }


def _clipped(text: Text | None) -> Text | None:
    return None if text is None else Text(clipped(text.en, MAX_FACT_LENGTH), clipped(text.zh, MAX_FACT_LENGTH))


# ---- heads


def _heads(inspection: Inspection, index: Mapping[AttentionSite, int]) -> Iterator[dict[str, Any]]:
    roles = {(x.site, x.head): x for x in inspection.roles}
    similar = _similar(inspection, index)
    for head in zip(inspection.table.sites, inspection.table.heads, strict=True):
        yield {
            "site": index[head[0]],
            "head": head[1],
            "origin": originally(head),
            "roles": [] if head not in roles else _scores(roles[head]),
            "similar": similar.get(head, [])[:MAX_SIMILAR],
            "top_keys": _top_keys(inspection, head),
        }


def _scores(head: HeadRoles) -> list[dict[str, Any]]:
    names = ("role", "score", "null", "low", "high", "holds")
    scores = sorted(head.scores, key=lambda x: ROLE_ORDER.index(x.role))
    return [{**{name: getattr(score, name) for name in names}, "evidence": score.text} for score in scores]


def _similar(inspection: Inspection, index: Mapping[AttentionSite, int]) -> dict[Head, list[dict[str, Any]]]:
    """Return the heads of the largest |cosine| to each head: those of its layer, and the pairs of other layers."""
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
            {"head": _head_id(index, other), "cosine": cosine, "across": across}
            for cosine, other, across in sorted(others, key=lambda x: -abs(x[0]))
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
        "heads": [_head_id(index, head) for head in finding.heads],
        "view": _VIEWS.get(finding.kind, "overview"),
        "column": finding.column,
    }


def _head_id(index: Mapping[AttentionSite, int], head: Head) -> list[int]:
    return [index[head[0]], head[1]]
