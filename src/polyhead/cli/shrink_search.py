"""`polyhead shrink --search`: local search over the removed heads, by measured quality."""

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
    """Return the batches of a few evenly spaced contexts, since a search evaluates the model some hundred times."""
    stride = -(-len(contexts) // SEARCH_CONTEXTS)
    return list(CalibrationText(loaded, tuple(contexts[::stride])).batches())


def search_heads(
    shrinker: Shrinker | UniformShrinker, target: Target, few: Quality, quality: Quality
) -> tuple[dict[str, tuple[int, ...]], str]:
    """Search by the quality on a few rows; return the removed heads, and a summary of the gain on all rows."""
    total = shrinker.search_measurements()
    with bar(f"Search heads, up to {total:,} measurements of the {few.name}", total) as step:
        found = shrinker.searched(target, few, progress=step)
    head = f"Search, {found.measured:,} measurements: "
    if not found.moved:
        return found.first, head + f"no head {shrinker.searches}"
    before, after = (shrinker.worth(removed, quality).value for removed in (found.first, found.gone))
    text = "on the text that selects the compensation"
    if (after <= before) if quality.name == "fidelity" else (after >= before):
        return found.first, f"{head}heads {shrinker.searches} gained nothing {text}, and were reverted"
    heads = "head" if found.moved == 1 else "heads"
    return found.gone, (
        f"{head}{found.moved} {heads} {shrinker.searches}; {text} {quality.name} {after:.4g} instead of {before:.4g}, "
        f"original model {quality.whole:.4g}"
    )
