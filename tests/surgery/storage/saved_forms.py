"""Forms that load each family after each kind of edit, found by saving, loading and comparing outputs.

python -m tests.surgery.storage.saved_forms writes the table into docs/surgery.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

import polyhead
from polyhead.errors import OptionError
from polyhead.integrations.huggingface import register
from polyhead.sources.load_errors import quiet
from polyhead.surgery import (
    AddHeads,
    AttentionLayer,
    GroupQueries,
    HeadEdit,
    MergeHeads,
    PruneHeads,
    ReorderHeads,
    apply,
    find_layers,
    save,
    undo,
)
from tests.integrations.huggingface import models
from tests.surgery.gated import FAMILIES, REFUSED, build, result_of, some_heads

PAGE = Path(__file__).parents[3] / "docs" / "surgery.md"
START, END = "<!-- forms: written by python -m tests.surgery.storage.saved_forms -->", "<!-- forms end -->"


def prune_evenly(layer: AttentionLayer) -> list[HeadEdit]:
    return [PruneHeads(layer.number, some_heads(layer), stack=layer.stack)]


def prune_unevenly(layer: AttentionLayer) -> list[HeadEdit]:
    return [PruneHeads(layer.number, (1,), stack=layer.stack)] if layer.number == 0 else []


def merge_in_pairs(layer: AttentionLayer) -> list[HeadEdit]:
    """Merge neighbours, which share a KV head in grouped layers; the second pair has moved up by then."""
    pairs = layer.layout.num_heads // 2
    return [MergeHeads(layer.number, (first, first + 1), stack=layer.stack) for first in range(pairs)]


def group_in_pairs(layer: AttentionLayer) -> list[HeadEdit]:
    keys = layer.layout.num_kv_heads
    return [GroupQueries(layer.number, [(key, key + 1) for key in range(0, keys, 2)], stack=layer.stack)]


def add_one(layer: AttentionLayer) -> list[HeadEdit]:
    return [AddHeads(layer.number, 1, stack=layer.stack)]


def reverse(layer: AttentionLayer) -> list[HeadEdit]:
    return [ReorderHeads(layer.number, tuple(reversed(range(layer.layout.num_heads))), stack=layer.stack)]


EDITS: Mapping[str, Callable[[AttentionLayer], list[HeadEdit]]] = {
    "prune evenly": prune_evenly,
    "prune unevenly": prune_unevenly,
    "merge": merge_in_pairs,
    "group queries": group_in_pairs,
    "add": add_one,
    "reorder": reverse,
}


def forms_of(family: models.Family, folder: Path, edits: Sequence[str] = tuple(EDITS)) -> list[str]:
    """Return one word per edit: what loads the edited model, "no" if the edit itself raises."""
    if family.name in REFUSED:
        return ["no"] * len(edits)
    # Read from files first: some tables are computed anew by whoever reads them, in float32.
    build(family).save_pretrained(folder / "whole")
    model = ready(polyhead.load(folder / "whole"))
    found = []
    for name in edits:
        layers = [layer for layer in find_layers(model) if not layer.refusals]
        try:
            record = apply(model, [edit for layer in layers for edit in EDITS[name](layer)])
        except OptionError:
            found.append("no")
            continue
        found.append(loaded_by(model, family, folder / name))
        undo(model, record)
    return found


def loaded_by(model: nn.Module, family: models.Family, folder: Path) -> str:
    """Return the plainest loader that works: native, padded, or polyhead alone; each is tried."""
    expected = result_of(ready(model), family)
    for form, word in (("uniform", "native"), ("padded", "padded")):
        try:
            save(model, folder, form=form)
        except OptionError:
            continue
        with quiet(progress=False):
            native = type(model).from_pretrained(folder, dtype="auto").eval()
        native = ready(native, name=None if family.name == "gemma2" else "sdpa")  # which has no sdpa with a softcap
        # Sums over more heads, some of them zero, may be taken in another order.
        torch.testing.assert_close(result_of(native, family), expected, rtol=1e-9, atol=1e-9)
        return word
    save(model, folder, form="uneven")
    own = ready(polyhead.load(folder))
    torch.testing.assert_close(result_of(own, family), expected, rtol=0, atol=0)
    return "own"


def ready(model: nn.Module, name: str | None = None) -> nn.Module:
    """Use an attention, and experts, that compute in float64 throughout."""
    model.set_attn_implementation(register() if name is None else name)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def render(rows: Mapping[str, Sequence[str]], version: str) -> str:
    """Return the table as Markdown."""
    lines = [f"transformers {version}:", "", f"| family | {' | '.join(EDITS)} |", "|---" * (len(EDITS) + 1) + "|"]
    return "\n".join([*lines, *(line(name, words) for name, words in rows.items())])


def line(name: str, words: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(words)} |"


def main() -> None:
    import transformers

    rows = {}
    for name, family in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = forms_of(family, Path(folder))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    table = render(rows, transformers.__version__)
    PAGE.write_text(f"{before}{START}\n\n{table}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
