"""Synthetic pages of known numbers, with sizes that all differ."""

from __future__ import annotations

import base64
import copy
import math
from typing import Any

import torch

from polyhead.report.packing import packed_floats, packed_weights

Payload = dict[str, Any]

LAYERS, HEADS, CROSS_LAYERS, CROSS_HEADS = 3, 5, 2, 4
GRID = 7
SENTENCE = ("[CLS]", "the", "cat", "saw", "its", "own", "tail", ".")
ANSWER = ("le", "chat", "voit", "sa", "queue")
ROLES = ("induction", "previous", "sink")
EDGES = [-16, -8, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 9, 17]
COLUMNS = ("entropy", "mean_distance", "sink_mass", "output_norm", "copying", "ablation")
INFINITE = (1, 1)  # site and head with an infinite output norm
COMPANIONS = {"entropy_std": 0.25, "ablation_error": 0.03, "sink_mass_chance": 0.0625}
GROUPS = {"output_norm": "output", "copying": "output", "ablation": "importance"}
FORMATS = {"entropy": "nats", "mean_distance": "tokens", "sink_mass": "share"}


def bilingual(english: str) -> dict[str, str]:
    return {"en": english, "zh": f"中文：{english}"}


def synthetic() -> Payload:
    """Return a page with all its parts, of a model with self- and cross-attention."""
    draw = torch.Generator().manual_seed(20_231)
    sites = [_site("encoder", "self", layer, HEADS) for layer in range(LAYERS)]
    sites += [_site("decoder", "cross", layer, CROSS_HEADS) for layer in range(CROSS_LAYERS)]
    self_sites, cross_sites = list(range(LAYERS)), list(range(LAYERS, LAYERS + CROSS_LAYERS))
    heads = [_head(site, head, draw) for site, where in enumerate(sites) for head in range(where["heads"])]
    page = {
        "format": 3,
        "lang": "en",
        "title": "polyhead: small",
        "facts": _facts(),
        "stacks": [
            {"label": bilingual("Encoder"), "kind": "self", "sites": self_sites},
            {"label": bilingual("Decoder to encoder"), "kind": "cross", "sites": cross_sites},
        ],
        "sites": sites,
        "columns": [_column(name) for name in (*COLUMNS, *COMPANIONS)],
        "roles": [
            {
                "name": name,
                "letters": name[:2],
                "label": bilingual(f"{name} role"),
                "about": bilingual(f"What {name} does."),
            }
            for name in ROLES
        ],
        "heads": heads,
        "maps": {str(site): packed_weights(_map(sites[site]["heads"])) for site in range(len(sites))},
        "map_block": 16,
        "offsets": {"edges": EDGES, "sites": {str(site): packed_weights(_offsets()) for site in self_sites}},
        "relations": {
            str(site): {
                "cosine": packed_floats(_relation(sites[site]["heads"], site)),
                "attention_distance": packed_floats(1 - _relation(sites[site]["heads"], site)),
            }
            for site in range(len(sites))
        },
        "relation_names": [
            {
                "name": "attention_distance",
                "label": bilingual("look differently"),
                "about": bilingual("0 is the same places."),
            },
            {
                "name": "cosine",
                "label": bilingual("cosine similarity of outputs"),
                "about": bilingual("1 is the same."),
            },
        ],
        "redundancy": 0.75,
        "redundant": [{"head": [1, 0], "share": 0.86, "other": [1, 3], "alone": 0.77, "cosine": -0.61}],
        "pairs": [{"one": [0, 2], "other": [2, 4], "cosine": 0.61}],
        "importance": {
            "column": "ablation",
            "label": bilingual("loss without it"),
            "about": bilingual("How much worse."),
        },
        "syntax": {
            "treebank": "small.conllu",
            "rows": [_syntax("obj", "head", 0.7), _syntax("nsubj", "dependent", 0.4)],
        },
        "examples": [_self_example(self_sites), _cross_example(cross_sites)],
        "findings": _findings(),
    }
    return with_table(page)


def with_table(page: Payload) -> Payload:
    """Return the page with the table of the values of its heads, which the page itself does not read."""
    columns = {
        name: torch.tensor(
            [math.nan if head["values"][name] is None else head["values"][name] for head in page["heads"]],
            dtype=torch.float64,
        )
        for name in (column["name"] for column in page["columns"])
    }
    return {**page, "table": {name: packed_floats(column, bits=64) for name, column in columns.items()}}


def bare() -> Payload:
    """Return the page of a minimal run: one layer and one statistic, of some heads only."""
    page = synthetic()
    page |= {"importance": None, "syntax": None, "redundancy": None, "redundant": [], "pairs": [], "findings": []}
    page |= {"maps": {}, "relations": {}, "relation_names": [], "examples": [], "roles": []}
    page |= {"offsets": {"edges": [], "sites": {}}, "stacks": page["stacks"][:1], "columns": page["columns"][:1]}
    page["stacks"][0]["sites"] = [0]
    page["sites"] = page["sites"][:1]
    page["heads"] = [
        {**head, "roles": [], "similar": [], "top_keys": [], "values": {"entropy": 1.5 if head["head"] % 2 else None}}
        for head in page["heads"]
        if head["site"] == 0
    ]
    return with_table(page)


def few_heads() -> Payload:
    """Return the same page with eight heads: those of its findings and one of each other layer."""
    page = synthetic()
    places = {(0, 2), (0, 4), (1, 0), (1, 3), (2, 1), (2, 4), (3, 1), (4, 0)}
    page["heads"] = [head for head in page["heads"] if (head["site"], head["head"]) in places]
    return with_table(page)


def weights(page: Payload, example: int, site: int) -> torch.Tensor:
    """Return the unpacked weights of an example, [heads, queries, keys]."""
    packed = page["examples"][example]["sites"][str(site)]
    data = torch.frombuffer(bytearray(base64.b64decode(packed["data"])), dtype=torch.uint8)
    scale = torch.tensor(packed["scale"]).reshape(-1, 1, 1)
    return data.reshape(packed["shape"]).double() / 255 * scale


def with_tokens(page: Payload, tokens: list[str]) -> Payload:
    """Return the same page with other texts wherever a corpus provides them."""
    found = copy.deepcopy(page)
    count = len(tokens)
    for site in range(LAYERS):
        even = torch.full((HEADS, count, count), 1 / count)
        found["examples"][0]["sites"][str(site)] = packed_weights(even)
    found["examples"][0] |= {"queries": tokens, "keys": tokens, "title": tokens[0]}
    found["facts"] |= {
        "model": " ".join(tokens[:-1]),
        "left_out": [{"en": token, "zh": token} for token in tokens[:-1]],
        "pairs_by": {"en": tokens[0], "zh": tokens[1]},
    }
    found["syntax"]["treebank"] = tokens[0]
    for head in found["heads"]:
        head["top_keys"] = [{"text": token, "share": 1 / count} for token in tokens]
        for score in head["roles"]:
            score["evidence"] = {"en": tokens[0], "zh": tokens[1]}
    for finding in found["findings"]:
        finding["text"] = {"en": tokens[0], "zh": tokens[1]}
    return found


def _site(stack: str, kind: str, layer: int, heads: int) -> Payload:
    return {
        "name": f"{stack}.{layer}",
        "kind": kind,
        "stack": f"{stack}.*",
        "layer": layer,
        "heads": heads,
        "originals": [str(head) for head in range(heads)],
    }


def _facts() -> Payload:
    return {
        "model": "small: a model of known numbers",
        "name": "small",
        "kind": bilingual("encoder-decoder"),
        "tokens": 12_345,
        "documents": 17,
        "contexts": 19,
        "context": 112,
        "seconds": 2.5,
        "interrupted": False,
        "unknown": 0.013,
        "intervals_over": "documents",
        "pairs_by": bilingual("every pair is measured"),
        "left_out": [bilingual("pronouns: no sentence could be read")],
        "versions": {"polyhead": "0.1.0", "torch": "2.13.0"},
        "loss": bilingual("next token"),
    }


def _column(name: str) -> Payload:
    shares = name == "sink_mass"
    return {
        "name": name,
        "label": bilingual(name.replace("_", " ")),
        "about": bilingual(f"What {name} means."),
        "group": "companion" if name in COMPANIONS else GROUPS.get(name, "attention"),
        "format": FORMATS.get(name, "number"),
        "low": 0.0 if shares else None,
        "high": 1.0 if shares else None,
    }


def _head(site: int, head: int, draw: torch.Generator) -> Payload:
    drawn = torch.rand(len(COLUMNS), generator=draw, dtype=torch.float64).tolist()
    values = dict(zip(COLUMNS, drawn, strict=True))
    values["copying"] = 2 * values["copying"] - 1
    values["mean_distance"] *= 40
    if site >= LAYERS:
        values["output_norm"] = None  # not computed in cross-attention
    elif (site, head) == INFINITE:
        values["output_norm"] = math.inf
    holds = {"induction": (site, head) == (2, 1), "previous": head == 1, "sink": (site + head) % 3 == 2}
    return {
        "site": site,
        "head": head,
        "values": values | COMPANIONS,
        "roles": [_score(role, holds[role], computed=(site, head, role) != (2, 1, "sink")) for role in ROLES],
        "similar": [{"head": [0, (head + 1) % HEADS], "cosine": 0.44, "across": site != 0}],
        "top_keys": [{"text": "the", "share": 0.31}, {"text": ".", "share": 0.11}],
    }


def _score(role: str, holds: bool, *, computed: bool) -> Payload:
    numbers = {"score": 0.75 if holds else 0.25, "null": 0.125, "low": 0.6875 if holds else 0.1875}
    numbers["high"] = 0.8125 if holds else 0.3125
    evidence = f"{role} in {75 if holds else 25}% of positions (chance 12%)" if computed else "no text"
    return {
        "role": role,
        **(numbers if computed else dict.fromkeys(numbers)),
        "holds": holds and computed,
        "evidence": bilingual(evidence),
    }


def _map(heads: int) -> torch.Tensor:
    """Return maps in which head h attends h blocks back, and the first block to itself."""
    found = torch.zeros(heads, GRID, GRID)
    for head in range(heads):
        for row in range(GRID):
            found[head, row, max(0, row - head)] = 0.5
    return found


def _offsets() -> torch.Tensor:
    found = torch.zeros(HEADS, len(EDGES) - 1)
    for head in range(HEADS):
        found[head, EDGES.index(-head)] = 0.75  # a fifth of it is a whole number of bytes
        found[head, -1] = 0.15
    return found


def _relation(heads: int, site: int) -> torch.Tensor:
    found = torch.eye(heads) + 0.01 * site
    found[0, heads - 2] = found[heads - 2, 0] = 0.81 if site == 1 else 0.2
    return found


def _syntax(relation: str, direction: str, accuracy: float) -> Payload:
    return {
        "relation": relation,
        "direction": direction,
        "head": [1, 2],
        "accuracy": accuracy,
        "low": accuracy - 0.1,
        "high": accuracy + 0.1,
        "baseline": 0.35,
        "offset": -2,
        "words": 97,
        "verdict": "better",
    }


def _self_example(sites: list[int]) -> Payload:
    """Return weights with which head h mostly attends h words back."""
    n = len(SENTENCE)
    each = torch.full((HEADS, n, n), 0.02)
    for head in range(HEADS):
        for query in range(n):
            each[head, query, max(0, query - head)] += 0.6
            each[head, query, 0] += 0.24
    packed = packed_weights(each)
    return {
        "title": "cats.txt",
        "queries": list(SENTENCE),
        "keys": list(SENTENCE),
        "sites": {str(site): packed for site in sites},
    }


def _cross_example(sites: list[int]) -> Payload:
    n, m = len(ANSWER), len(SENTENCE)
    each = torch.full((CROSS_HEADS, n, m), 0.03)
    for head in range(CROSS_HEADS):
        for query in range(n):
            each[head, query, min(m - 1, query + head)] += 0.7
    packed = packed_weights(each)
    return {
        "title": "cats.fr.txt",
        "queries": list(ANSWER),
        "keys": list(SENTENCE),
        "sites": {str(site): packed for site in sites},
    }


def _findings() -> list[Payload]:
    def finding(text: str, view: str, heads: list[list[int]], column: str | None = None) -> Payload:
        return {"text": bilingual(text), "kind": view, "heads": heads, "view": view, "column": column}

    return [
        finding("L2H1 repeats", "head", [[2, 1]]),
        finding("two say the same", "similar", [[1, 0], [1, 3]]),
        finding("one matters most", "importance", [[0, 4]], "ablation"),
        finding("some rest", "overview", [[0, 2]], "sink_mass"),
    ]
