"""State of the viewer for the page: the model, its attention calls, limits and loaded texts."""

from __future__ import annotations

from typing import Any

from polyhead.inspection.heads import Head
from polyhead.inspection.identity import edits_of, originally
from polyhead.report.viewer import tiles
from polyhead.report.viewer.viewing import ALL_WEIGHTS_TOKENS, WINDOW_TOKENS, WORD_CELLS, Viewer
from polyhead.version import VERSION


def state_of(viewer: Viewer, **limits: int) -> dict[str, Any]:
    """Return the state as a JSON-compatible value; `limits` are those of the server."""
    model, loaded = viewer.model, viewer.model.loaded
    stacks: dict[tuple[str, str], list[int]] = {}
    for number, place in enumerate(model.places):
        stacks.setdefault((place.site.stack, place.site.kind), []).append(number)
    return {
        "format": 1,
        "lang": viewer.lang,
        "version": VERSION,
        "model": {
            "name": loaded.name,
            "kind": loaded.kind,
            "class": type(loaded.model).__name__,
            "origin": loaded.origin,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "parameters": sum(x.numel() for x in loaded.model.parameters()),
        },
        "context": model.context.tokens,
        "context_reason": model.context.reason,
        "output": model.output_kind,
        "generates": model.generates,
        "stacks": [{"name": name, "kind": kind, "places": members} for (name, kind), members in stacks.items()],
        "places": _places(viewer, stacks),
        "limits": {
            "all_weights_tokens": ALL_WEIGHTS_TOKENS,
            "window_tokens": WINDOW_TOKENS,
            "tile_cells": tiles.TILE_CELLS,
            "picture_cells": tiles.PICTURE_CELLS,
            "word_cells": WORD_CELLS,
            **limits,
        },
        "readings": {slot: None if x is None else x.to_dict() for slot, x in viewer.readings.items()},
        "edits": None if (edits := edits_of(place.site for place in model.places)) is None else edits.to_dict(),
        "run": viewer.run is not None,
    }


def _origin(head: Head) -> dict[str, str] | None:
    """Return a description of a head's origin; None if it has its original number."""
    origin = originally(head)
    return None if origin is None else origin.to_dict()


def _places(viewer: Viewer, stacks: dict[tuple[str, str], list[int]]) -> list[dict[str, Any]]:
    sites = () if viewer.run is None else viewer.run["sites"]
    of_run = {(site["name"], site["kind"]): number for number, site in enumerate(sites)}
    return [
        {
            "name": place.site.name,
            "kind": place.site.kind,
            "stack": place.site.stack,
            "layer": stacks[place.site.stack, place.site.kind].index(number),
            "heads": place.site.num_heads,
            "origins": [_origin((place.site, head)) for head in range(place.site.num_heads)],
            "call": place.call,
            "queries": place.queries,
            "keys": place.keys,
            "run_site": of_run.get((place.site.name, place.site.kind)),
        }
        for number, place in enumerate(viewer.model.places)
    ]
