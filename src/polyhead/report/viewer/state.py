"""State of the viewer for the page: the model, its attention layers, limits and loaded texts."""

from __future__ import annotations

from typing import Any

from polyhead.inspection.identity import edits_of, originally
from polyhead.report.viewer import tiles
from polyhead.report.viewer.viewing import WORD_CELLS, Viewer
from polyhead.version import VERSION


def state_of(viewer: Viewer) -> dict[str, Any]:
    """Return the state as a JSON-compatible value; `frontend/src/view/types.ts` documents its parts."""
    model, loaded = viewer.model, viewer.model.loaded
    stacks: dict[tuple[str, str], list[int]] = {}
    for number, layer in enumerate(model.layers):
        stacks.setdefault((layer.site.stack, layer.site.kind), []).append(number)
    return {
        "lang": viewer.lang,
        "version": VERSION,
        "model": {
            "name": loaded.name,
            "kind": loaded.kind,
            "class": type(loaded.model).__name__,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "parameters": sum(x.numel() for x in loaded.model.parameters()),
        },
        "context": model.context.tokens,
        "context_reason": model.context.reason,
        "generates": model.generates,
        "stacks": [{"name": name, "kind": kind, "layers": members} for (name, kind), members in stacks.items()],
        "layers": _layers(viewer, stacks),
        "limits": {"tile_cells": tiles.TILE_CELLS, "picture_cells": tiles.PICTURE_CELLS, "word_cells": WORD_CELLS},
        "traces": {slot: None if x is None else x.to_dict() for slot, x in viewer.traces.items()},
        "edits": None if (edits := edits_of(layer.site for layer in model.layers)) is None else edits.to_dict(),
        "run": viewer.run is not None,
    }


def _layers(viewer: Viewer, stacks: dict[tuple[str, str], list[int]]) -> list[dict[str, Any]]:
    sites = () if viewer.run is None else viewer.run["sites"]
    of_run = {(site["name"], site["kind"]): number for number, site in enumerate(sites)}
    layers = []
    for number, layer in enumerate(viewer.model.layers):
        site = layer.site
        origins = [originally((site, head)) for head in range(site.num_heads)]
        layers.append(
            {
                "stack": site.stack,
                "depth": stacks[site.stack, site.kind].index(number),
                "heads": site.num_heads,
                "origins": [None if origin is None else origin.to_dict() for origin in origins],
                "queries": layer.queries,
                "keys": layer.keys,
                "run_site": of_run.get((site.name, site.kind)),
            }
        )
    return layers
