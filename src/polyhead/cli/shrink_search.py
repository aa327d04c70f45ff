"""`polyhead shrink --search`: how many heads of each layer go, by what the model measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyhead.cli.calibration_text import CalibrationText
from polyhead.cli.progress import bar

if TYPE_CHECKING:
    from polyhead.sources import Context, LoadedModel
    from polyhead.surgery.selection.budgets import Target
    from polyhead.surgery.selection.quality import Quality
    from polyhead.surgery.selection.shrinking import Shrinker
    from polyhead.surgery.selection.uniform import UniformShrinker

SEARCH_CONTEXTS = 16


def search_batches(loaded: LoadedModel, contexts: Sequence[Context]) -> list[Mapping[str, Any]]:
    """A few contexts from all over a part of the text: a search measures some hundred times."""
    every = -(-len(contexts) // SEARCH_CONTEXTS)
    return list(CalibrationText(loaded, tuple(contexts[::every])).batches())


def search_heads(
    shrinker: Shrinker | UniformShrinker, target: Target, few: Quality, quality: Quality
) -> tuple[dict[str, tuple[int, ...]], str]:
    """Heads searched by a quality of a few rows, and what that gained on all of them, in words."""
    total = shrinker.search_measurements()
    with bar(f"Search for heads by up to {total:,} measurements of the {few.name}", total) as step:
        found = shrinker.searched(target, few, progress=step)
    told = f"Searched by {found.measured:,} measurements: "
    if not found.moved:
        return found.first, told + f"no head {shrinker.searches}"
    before, after = (shrinker.worth(gone, quality).value for gone in (found.first, found.gone))
    text = "on the text that repair is chosen on"
    if (after <= before) if quality.name == "fidelity" else (after >= before):
        return found.first, f"{told}heads {shrinker.searches} gained nothing {text}, and none was"
    heads = "head" if found.moved == 1 else "heads"
    return found.gone, (
        f"{told}{found.moved} {heads} {shrinker.searches}; {text} {quality.name} {after:.4g} instead of {before:.4g}, "
        f"of the whole model {quality.whole:.4g}"
    )
