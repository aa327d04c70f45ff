"""Read head layouts from known models, configs (polyhead's or Hugging Face's), files, folders and hub names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyhead.costs.layouts.hf_config import read_hf_config
from polyhead.costs.layouts.known_models import KNOWN, known_model
from polyhead.costs.layouts.model_layout import ModelLayout, grouped
from polyhead.errors import OptionError
from polyhead.files import read_json, refusing
from polyhead.geometry import HeadLayout
from polyhead.layers import AttentionConfig, MultiHeadConfig
from polyhead.layers.positions.config import RotaryConfig
from polyhead.names import suggestion
from polyhead.sources import packaged
from polyhead.sources.config_sizes import CONFIG_BYTES

EDITS_FILE = "polyhead.json"  # next to the config.json of a model with edited heads
# An edited layer without these fields has as many KV heads as query heads, whatever the config has.
_MULTI_HEAD = dict.fromkeys(("num_kv_heads", "key_heads"))


def read_layout(
    source: AttentionConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    layers: int | None = None,
    causal: bool | None = None,
) -> ModelLayout:
    """Read the head layout of a model; only its config is read, and no remote code is run.

    Args:
        source: an `AttentionConfig`; a dictionary or JSON file of one, of a Hugging Face config or of a `ModelLayout`;
            a folder with a config.json; a GGUF file; a name in `KNOWN`, tiny, minilm or smollm2; a model on the hub or
            in its cache.
        layers: number of layers, for a polyhead config, which describes a single layer; default 1.
        causal: whether attention is causal; required if a Hugging Face config does not imply it. A value other than
            that of the config overrides it, with a note.

    Returns:
        The layout: groups of layers with one config each, the context length and notes on what was assumed.

    >>> read_layout("gpt3-175b").config.layout.head_dim
    128
    """
    if isinstance(source, AttentionConfig):
        return ModelLayout.of(source, 1 if layers is None else layers, name=type(source).__name__).with_causal(causal)
    if isinstance(source, Mapping):
        return _of_fields(source, "", layers, causal)
    packaged.check_unique(source)
    text = os.fspath(source)
    path = Path(text).expanduser()
    if text and path.is_file() and path.suffix != ".gguf":
        name = path.stem if path.stem != "config" else path.parent.name
        return _of_file(path, name, layers, causal)
    if text and path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise OptionError(f"a model folder must contain a config.json, got {path} without one")
        has_edits = (path / EDITS_FILE).is_file()
        model = _of_file(file, path.resolve().name, layers, causal, by_layer=has_edits)
        return _with_edits(model, path / EDITS_FILE) if has_edits else model
    if text in KNOWN:
        _refuse_layers(layers, text)
        return known_model(text).with_causal(causal)
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
    """Return multi-head attention of these sizes; `rotary` adds memory traffic and launches, but no matrix FLOPs.

    Args:
        d_model: width of the model.
        heads: query heads per layer.
        kv_heads: KV heads per layer; as many as query heads by default.
        head_dim: channels per head; d_model / heads by default.
        layers: number of layers.
        causal: whether a token sees only earlier ones.
        window: sliding window in keys; None is unbounded.
        bias: whether projections have biases.
        rotary: whether queries and keys are rotated.

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
    kv_heads_suffix = "" if config.num_kv_heads == heads else f"/{config.num_kv_heads}"
    return ModelLayout.of(config, layers, name=f"{heads}{kv_heads_suffix}x{config.head_dim} at {d_model}")


def _of_fields(
    content: Mapping[str, Any], name: str, layers: int | None, causal: bool | None, *, by_layer: bool = False
) -> ModelLayout:
    if "kind" in content:  # polyhead's configs have a kind, Hugging Face's a model_type
        config, kind = AttentionConfig.from_dict(content), str(content["kind"])
        return ModelLayout.of(config, 1 if layers is None else layers, name=name or kind).with_causal(causal)
    if "groups" in content and "name" in content:
        _refuse_layers(layers, name)
        return ModelLayout.from_dict(content).with_causal(causal)
    _refuse_layers(layers, name or "the config")
    return read_hf_config(content, name=name, causal=causal, by_layer=by_layer)


def _with_edits(model: ModelLayout, file: Path) -> ModelLayout:
    """Return an edited model with the heads that `file` lists, if it is saved uneven; `model` has a group per layer."""
    content = _read_json(file)
    form, edited = content.get("form"), content.get("layers")
    configs = [group.config for group in model.groups for _ in range(group.layers)]
    model = replace(model, groups=grouped(configs))
    if form == "padded":
        note = "counted with the zero heads that pad it, as transformers runs it"
        return replace(model, notes=(*model.notes, note))
    if form != "uneven":
        return model
    if not isinstance(edited, dict) or not all(isinstance(sizes, dict) for sizes in edited.values()):
        raise OptionError(f"{EDITS_FILE} must list the layers of an edited model, got {file} without them")
    multi_head = [config for config in configs if isinstance(config, MultiHeadConfig)]
    if not len(edited) == len(multi_head) == len(configs):
        raise OptionError(
            f"all layers of an edited model must be listed, got {model.name} with {len(configs)} layers, "
            f"{len(multi_head)} of them with heads that can be edited, and {len(edited)} in {EDITS_FILE}; count the "
            "layouts of its layers separately"
        )
    with refusing(file, f"{EDITS_FILE} must list the heads of an edited model"):
        layouts = [{**_MULTI_HEAD, **HeadLayout.from_dict(sizes).to_dict()} for sizes in edited.values()]
        edited_configs = (replace(config, **sizes) for config, sizes in zip(multi_head, layouts, strict=True))
        return replace(model, groups=grouped(edited_configs))


def _of_file(path: Path, name: str, layers: int | None, causal: bool | None, *, by_layer: bool = False) -> ModelLayout:
    content = _read_json(path)
    with refusing(path, "a config must describe the heads of a model"):
        return _of_fields(content, name, layers, causal, by_layer=by_layer)


def _refuse_layers(layers: int | None, name: str) -> None:
    if layers is not None:
        raise OptionError(f"{name} has a fixed number of layers, got layers {layers} as well; omit layers")


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, "a config must be a JSON file", max_bytes=CONFIG_BYTES)


def _from_transformers(name: str, path: Path) -> dict[str, Any]:
    """Return the config of a packaged model, a GGUF file or a model on the hub."""
    from polyhead.sources.load_errors import describe_failure, quiet

    options: dict[str, Any] = {}
    if name in ("tiny", "minilm"):
        return _read_json((packaged.tiny() if name == "tiny" else packaged.minilm()) / "config.json")
    file = packaged.smollm2() if name == "smollm2" else path
    local = file.suffix == ".gguf"
    if local:
        if not file.is_file():
            raise OptionError(f"there is no file {file}")
        name, options["gguf_file"] = str(file.parent), file.name
    elif not name or name.startswith((".", "/", "~")) or name.count("/") > 1:  # cannot be the name of a hub model
        known = ", ".join((*KNOWN, *packaged.NAMES))
        raise OptionError(
            f"a layout must be a config file, a folder with a config.json, a model on the hub (owner/model) or one of "
            f"{known}; got {name!r}, and there is no such file or folder"
        )
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise OptionError(
            f"reading the config of {name} needs transformers, which is not installed (pip install 'polyhead[hf]'); "
            f"available without it: {', '.join(KNOWN)}"
        ) from error
    try:
        with quiet(progress=False), describe_failure(name, name, local=local):
            content: dict[str, Any] = AutoConfig.from_pretrained(name, **options).to_dict()
    except OptionError as error:
        hint = "" if local else suggestion(name.rpartition("/")[2], (*KNOWN, *packaged.NAMES))
        if "cannot be reached" in str(error):  # words of `describe_failure` for a connection error
            hint = f"; {hint}" if hint else f", or one of {', '.join(KNOWN)}"
            raise OptionError(
                f"the Hugging Face hub cannot be reached and {name} is not in its cache; use a local config.json{hint}"
            ) from error
        if hint:
            raise OptionError(f"{error}; {hint}") from error
        raise
    return content
