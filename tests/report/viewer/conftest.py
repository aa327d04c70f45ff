"""Small models of each kind for the viewer, loaded once."""

from __future__ import annotations

import pytest

from polyhead.report.viewer.model import ViewedModel
from polyhead.report.viewer.viewing import Viewer
from polyhead.workflows.model_loading import load_model
from tests.inspection import small_models

TEXT = "w1 w2 w3 . a w5 w1 w2 , w7 w8 w9 a w11 w12 . w3"


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """Load the small model of a name, once."""
    models = {}

    def load(name):
        if name not in models:
            folder = tmp_path_factory.mktemp("viewer") / name
            models[name] = load_model(small_models.model_folder(folder, name))
        return models[name]

    return load


@pytest.fixture
def viewed(loaded):
    """Return the small model of a name, ready for the viewer."""
    return lambda name, **options: ViewedModel(loaded(name), **options)


@pytest.fixture
def viewer(viewed):
    """A viewer on the small Llama, without a text."""
    return Viewer(viewed("llama"))


@pytest.fixture
def assets(tmp_path):
    """Minimal assets, beside a file that must not be served."""
    folder = tmp_path / "assets"
    folder.mkdir()
    (folder / "view.js").write_text("'the script'")
    (folder / "view.css").write_text("/* the style */")
    (folder / "page.js").write_text("'another page'")
    (tmp_path / "secret.txt").write_text("a secret")
    return folder
