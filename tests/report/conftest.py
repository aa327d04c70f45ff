"""Fixtures of the page: inspections of small models, and minimal assets."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyhead.inspection import Inspection, Settings
from polyhead.report.page import Assets
from polyhead.workflows.inspecting import inspect_model
from tests.inspection.small_models import model_folder, text_folder


@pytest.fixture(scope="session")
def inspections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Inspection]:
    """Inspections of an encoder (ablation), a causal model (gradients) and an encoder-decoder."""
    folder = tmp_path_factory.mktemp("inspections")
    text = str(text_folder(folder / "text", documents=3, words=60))
    return {
        name: inspect_model(Settings(str(model_folder(folder / name, name)), text, context=64, batch_tokens=400))
        for name in ("bert", "llama", "t5")
    }


@pytest.fixture
def assets(tmp_path: Path) -> Assets:
    """Minimal assets: a script that counts the heads, and a style sheet."""
    folder = tmp_path / "assets"
    folder.mkdir()
    (folder / "page.js").write_text(
        '"use strict";(()=>{const d=JSON.parse(document.getElementById("polyhead-data").textContent);'
        'document.getElementById("polyhead-page").textContent=d.heads.length+" heads"})();\n'
    )
    (folder / "page.css").write_text("body{margin:0}\n")
    return Assets.load(folder)
