"""The table of docs/surgery.md, family by family: each entry is tried."""

from __future__ import annotations

import pytest
import torch
import transformers

from polyhead.surgery import find_layers
from tests.surgery.gated import FAMILIES, REFUSED
from tests.surgery.storage.saved_forms import EDITS, END, PAGE, START, forms_of


def listed() -> tuple[str, dict[str, str]]:
    """Return the transformers version of the page, and its rows."""
    page = PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]
    rows = [row for row in page.splitlines() if row.startswith("| ")]
    return page.split()[1].rstrip(":"), {row.split(" | ")[0].removeprefix("| "): row for row in rows[1:]}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_page_says_what_loads_an_edited_model(name, tmp_path):
    """One edit per family, all edits in turn; the script that writes the page tries all of them."""
    version, rows = listed()
    place = list(FAMILIES).index(name) % len(EDITS)
    found = forms_of(FAMILIES[name], tmp_path, list(EDITS)[place : place + 1])
    if version != transformers.__version__:
        pytest.skip(f"the page speaks of transformers {version}, installed is {transformers.__version__}: {found}")
    assert rows[name].strip("| ").split(" | ")[1:][place : place + 1] == found


def test_the_page_lists_every_family_and_every_word_is_used():
    _, rows = listed()
    assert list(rows) == list(FAMILIES)
    words = {name: row.strip("| ").split(" | ")[1:] for name, row in rows.items()}
    assert {len(row) for row in words.values()} == {len(EDITS)}
    assert {word for row in words.values() for word in row} == {"native", "padded", "own", "no"}
    assert {name for name, row in words.items() if set(row) == {"no"}} == set(REFUSED)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(REFUSED) - {"clip"}))
def test_no_family_builds_layers_of_different_heads_from_a_config_by_layer(name):
    """If one starts to, `save` can write uneven heads for plain transformers."""
    family = FAMILIES[name]
    by_layer = {0: {"num_attention_heads": 2, "num_key_value_heads": 1}}
    try:
        config = transformers.AutoConfig.for_model(name, **family.options, per_layer_config=by_layer)
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = transformers.AutoModel.from_config(config)
    except (ValueError, RuntimeError) as error:
        assert "attributes are missing" in str(error) or "may vary across layers" in str(error)  # noqa: PT017
        return
    stacks: dict[str, set[int]] = {}
    for layer in find_layers(model):
        stacks.setdefault(layer.stack, set()).add(layer.layout.num_heads)
    assert {len(sizes) for sizes in stacks.values()} == {1}
