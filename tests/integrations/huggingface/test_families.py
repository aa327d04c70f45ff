"""The list of families is read from the sources of the installed transformers, and agrees with transformers itself."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the list is read from transformers")

from polyhead.integrations.huggingface import families
from tests.integrations.huggingface.models import DECODERS, ENCODERS, SEQ2SEQ


def test_families_of_both_kinds_are_told_apart():
    found = {family.name: family for family in families()}
    folders = {"gemma3_text": "gemma3", "llama4_text": "llama4"}
    for family in (*DECODERS, *ENCODERS, *SEQ2SEQ):
        assert found[folders.get(family.name, family.name)].uses_interface, family.name
    for name in ("bloom", "falcon", "deberta", "xlnet"):
        assert not found[name].uses_interface, name
        assert found[name].own, name


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "bloom", "falcon", "xlnet"])
def test_the_list_agrees_with_what_a_model_says_of_itself(name):
    import transformers

    config = transformers.CONFIG_MAPPING[name]
    model = transformers.MODEL_MAPPING[config]
    found = {family.name: family for family in families()}
    assert model._can_set_attn_implementation() == found[name].uses_interface


def test_the_page_lists_what_the_script_finds(project_root):
    import runpy

    import transformers

    script = runpy.run_path(str(project_root / "docs" / "list_families.py"))
    page = (project_root / "docs" / "huggingface.md").read_text(encoding="utf-8")
    listed = page.partition(script["START"])[2].partition(script["END"])[0].strip()
    version = listed.split()[1].rstrip(",")
    if version != transformers.__version__:
        pytest.skip(f"the page lists transformers {version}, installed is {transformers.__version__}")
    assert listed == script["render"](families(), version)
