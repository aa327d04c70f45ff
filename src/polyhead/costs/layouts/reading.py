"""A head layout by whatever names it: a known model, a config of ours or of Hugging Face, a file, a folder, a name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyhead.costs.layouts.hf_config import read_hf_config
from polyhead.costs.layouts.known_models import KNOWN, known_model
from polyhead.costs.layouts.model import ModelLayout, grouped
from polyhead.errors import OptionError
from polyhead.files import read_json, refusing
from polyhead.geometry import HeadLayout
from polyhead.layers.config import AttentionConfig, MultiHeadConfig
from polyhead.layers.positions.config import RotaryConfig
from polyhead.sources.config_sizes import CONFIG_BYTES

PACKAGED = ("minilm", "smollm2")
EDITED = "polyhead.json"  # beside the config of a model whose heads were edited
_NO_HEADS = dict.fromkeys(("num_kv_heads", "key_heads"))


def read_layout(
    source: AttentionConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    layers: int | None = None,
    causal: bool | None = None,
) -> ModelLayout:
    """The layout of a model; nothing but its config is read, and no code that comes with it is run.

    Args:
        source: an `AttentionConfig`; a dictionary or JSON file of one or of a Hugging Face config; a folder with a
            config.json; a name of `KNOWN`, minilm, smollm2, or a model on the hub or in its cache.
        layers: how many layers there are, for a config of ours, which describes one; 1 by default.
        causal: whether tokens see no later ones: asked for where a Hugging Face config does not say, and put in the
            place of what a config says otherwise, with a note.

    >>> read_layout("gpt3-175b").config.layout.head_dim
    128
    """
    if isinstance(source, AttentionConfig):
        return ModelLayout.of(source, 1 if layers is None else layers, name=type(source).__name__).directed(causal)
    if isinstance(source, Mapping):
        return _of_fields(source, "", layers, causal)
    text = os.fspath(source)
    path = Path(text).expanduser()
    if text and path.is_file() and path.suffix != ".gguf":
        name = path.stem if path.stem != "config" else path.parent.name
        return _of_file(path, name, layers, causal)
    if text and path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise OptionError(f"a model's folder must hold a config.json, got {path} without one")
        found = _of_file(file, path.resolve().name, layers, causal)
        return _with_edits(found, path / EDITED) if (path / EDITED).is_file() else found
    if text in KNOWN:
        _refuse_layers(layers, text)
        return known_model(text).directed(causal)
    return _of_fields(_from_transformers(text, path), text, layers, causal)


def from_sizes(
    d_model: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    layers: int = 1,
    causal: bool = True,
    window: int | None = None,
    bias: bool = False,
    rotary: bool = False,
) -> ModelLayout:
    """Multi-head attention by its sizes; `rotary` positions cost no FLOPs of products, but passes and launches.

    >>> from_sizes(512, 8).config.layout.head_dim
    64
    """
    config = MultiHeadConfig(
        d_model,
        heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        positions=RotaryConfig() if rotary else None,
        causal=causal,
        window=window,
        bias=bias,
    )
    shared = "" if config.num_kv_heads == heads else f"/{config.num_kv_heads}"
    return ModelLayout.of(config, layers, name=f"{heads}{shared}x{config.head_dim} at {d_model}")


def _of_fields(found: Mapping[str, Any], name: str, layers: int | None, causal: bool | None) -> ModelLayout:
    if "kind" in found:  # a config of ours has a kind, one of Hugging Face a model_type
        config = AttentionConfig.from_dict(found)
        return ModelLayout.of(config, 1 if layers is None else layers, name=name or str(found["kind"])).directed(causal)
    if "groups" in found and "name" in found:
        _refuse_layers(layers, name)
        return ModelLayout.from_dict(found).directed(causal)
    _refuse_layers(layers, name or "the config")
    return read_hf_config(found, name=name, causal=causal)


def _with_edits(model: ModelLayout, file: Path) -> ModelLayout:
    """The heads that an edited model has, which its config cannot say where layers differ."""
    found = _read_json(file)
    form, edited = found.get("form"), found.get("layers")
    if form == "padded":
        note = "counted with the heads of zeros that fill its config, as plain transformers runs it"
        return replace(model, notes=(*model.notes, note))
    if form != "uneven":
        return model
    if not isinstance(edited, dict) or not all(isinstance(sizes, dict) for sizes in edited.values()):
        raise OptionError(f"{EDITED} says which heads an edited model has, got {file} without its layers")
    config = model.config
    if len(model.groups) > 1 or len(edited) != model.layers or not isinstance(config, MultiHeadConfig):
        raise OptionError(
            f"an edited model is counted whose layers differ in their heads alone, got {model.name}, a model of "
            f"{model.layers} layers in {len(model.groups)} kinds, {len(edited)} of them with known heads; count the "
            "layouts of its layers one by one"
        )
    with refusing(file, f"{EDITED} says which heads an edited model has"):
        own = [{**_NO_HEADS, **HeadLayout.from_dict(sizes).to_dict()} for sizes in edited.values()]
        return replace(model, groups=grouped(replace(config, **sizes) for sizes in own))


def _of_file(path: Path, name: str, layers: int | None, causal: bool | None) -> ModelLayout:
    found = _read_json(path)
    with refusing(path, "a config describes the heads of a model"):
        return _of_fields(found, name, layers, causal)


def _refuse_layers(layers: int | None, name: str) -> None:
    if layers is not None:
        raise OptionError(f"{name} says how many layers it has, got layers {layers} beside it; leave them out")


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, "a config is a JSON file", most=CONFIG_BYTES)


def _from_transformers(name: str, path: Path) -> dict[str, Any]:
    """A packaged model, a GGUF file or a name on the hub."""
    from polyhead.sources import packaged
    from polyhead.sources.loading import describe_failure, quiet

    options: dict[str, Any] = {}
    if name == "minilm":
        return _read_json(packaged.minilm() / "config.json")
    file = packaged.smollm2() if name == "smollm2" else path
    local = file.suffix == ".gguf"
    if local:
        if not file.is_file():
            raise OptionError(f"there is no file {file}")
        name, options["gguf_file"] = str(file.parent), file.name
    elif not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        known = ", ".join((*KNOWN, *PACKAGED))
        raise OptionError(
            f"a layout is a config file, a folder with a config.json, a model on the hub (owner/model) or one of "
            f"{known}; got {name!r}, and there is no such file or folder"
        )
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise OptionError(
            f"reading the config of {name} needs transformers, which is not installed (pip install 'polyhead[hf]'); "
            f"known without it are {', '.join(KNOWN)}"
        ) from error
    try:
        with quiet(progress=False), describe_failure(name, name, local=local):
            found: dict[str, Any] = AutoConfig.from_pretrained(name, **options).to_dict()
    except OptionError as error:
        if "cannot be reached" not in str(error):
            raise
        raise OptionError(
            f"the Hugging Face hub cannot be reached and {name} is not in its cache; name a config.json on this "
            f"machine, or one of {', '.join(KNOWN)}"
        ) from error
    return found
