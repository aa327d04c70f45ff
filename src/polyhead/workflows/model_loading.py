"""Load models by name, edited ones included, and accept models that are in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyhead.errors import OptionError
from polyhead.observation.transformers_models import is_pretrained
from polyhead.sources.gguf_reading import reading_once
from polyhead.sources.load_errors import describe_failure, quiet
from polyhead.sources.model_source import find_source
from polyhead.sources.models import (
    IN_MEMORY,
    LoadedModel,
    checked_device,
    kind_of,
    load_tokenizer,
    read_shapes,
    trained_context,
)
from polyhead.surgery.storage.loading import read_model
from polyhead.surgery.storage.undo_folder import MANIFEST


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """A function that loads the model of a name, after the other arguments of a workflow were checked."""

    name: str | os.PathLike[str]
    load: Callable[[], LoadedModel]

    def __call__(self) -> LoadedModel:
        return self.load()


# A name or folder for `load_model`, a transformers model, the result of `load_model`, or a function that returns one.
Model = str | os.PathLike[str] | nn.Module | LoadedModel | Callable[[], LoadedModel] | None


def load_model(
    name: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | Literal["saved"] | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> LoadedModel:
    """Load a model, including the language modelling or other head of its checkpoint, and its tokenizer.

    Args:
        name: "tiny", "minilm" (the default) or "smollm2" for packaged models, a folder, a `.gguf` file, or a name on
            the hub. Local paths take precedence over the hub; write `./minilm` for a folder called minilm. A folder may
            contain a model with edited heads, in any saved form.
        device: device of the model.
        dtype: of the weights, default float32 on the CPU and bfloat16 on a GPU; "saved" keeps that of the files.
        allow_pickle: whether to load pickle files, which can run anything on your machine.
        trust_remote_code: whether to run code from the model's repository.
        progress: whether to show the progress bars of transformers.

    Returns:
        The model in evaluation mode, its tokenizer and what is known about them.

    Raises:
        OptionError: there is no such model, or the dtype is not floating point.
        DeviceError: the device is not available.
        CheckpointError: the model's files are damaged, incomplete, or pickles.

    >>> loaded = load_model("tiny")
    >>> type(loaded.model).__name__, loaded.kind, loaded.model.config._name_or_path.endswith("tiny")  # its folder
    ('LlamaForCausalLM', 'causal', True)
    """
    source = find_source(name)
    device = checked_device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if dtype != "saved" and not dtype.is_floating_point:
        raise OptionError(f"the dtype of a model must be floating point, got {dtype}")
    load_dtype = None if dtype == "saved" else dtype
    once = nullcontext() if source.gguf_file is None else reading_once()
    with quiet(progress=progress), describe_failure(source.name, source.location, local=source.is_local), once:
        model = read_model(source, load_dtype, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
        reads_text = model.main_input_name == "input_ids" or model.config.is_encoder_decoder
        tokenizer = load_tokenizer(source, source.options(trust_remote_code)) if reads_text else None
    model = model.to(device).eval()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=source.name,
        kind=kind_of(model),
        origin=source.origin,
        main_input=model.main_input_name,
        trained_context=trained_context(model, tokenizer),
    )


def as_loaded(
    model: Model,
    tokenizer: Any = None,
    *,
    dtype: torch.dtype | Literal["saved"] | None = None,
    check: Callable[[nn.Module], object] | None = None,
) -> LoadedModel:
    """Return a model for a workflow: load it by name with `dtype`, or wrap one that is in memory.

    `tokenizer` belongs to a transformers model in memory; other models have their own. `check` raises for models that
    the workflow cannot edit as requested, by the shapes of their weights; it is called with the model and, before that
    is loaded, with one on the meta device where a config is enough to build it.
    """
    if check is None:
        return _loaded(model, tokenizer, dtype)
    name = model.name if isinstance(model, ModelLoader) else model
    if (name is None or isinstance(name, str | os.PathLike)) and (shapes := _shapes(name)) is not None:
        check(shapes)
    loaded = _loaded(model, tokenizer, dtype)
    check(loaded.model)
    return loaded


def _shapes(name: str | os.PathLike[str] | None) -> Any | None:
    """Return a model without its weights, by its config; None if that is not enough, as for an edited model."""
    source = find_source(name)
    return None if source.is_local and (Path(source.location) / MANIFEST).is_file() else read_shapes(name)


def _loaded(model: Model, tokenizer: Any, dtype: torch.dtype | Literal["saved"] | None) -> LoadedModel:
    if not isinstance(model, nn.Module):
        if tokenizer is not None:
            raise OptionError("a tokenizer is passed with a model in memory, got one with a model that has its own")
        if isinstance(model, LoadedModel):
            _check_evaluation_mode(model.model)
            return model
        return model() if callable(model) else load_model(model, dtype=dtype)
    if not is_pretrained(model):
        raise OptionError(
            f"a model must be a name, a folder or a transformers model, got a {type(model).__name__}; observe other "
            "modules with polyhead.observe, and edit them with polyhead.surgery.apply"
        )
    _check_evaluation_mode(model)
    wrapped: Any = model
    return LoadedModel(
        model=wrapped,
        tokenizer=tokenizer,
        name=Path(wrapped.config.name_or_path or type(model).__name__).name,
        kind=kind_of(model),
        origin=IN_MEMORY,
        main_input=wrapped.main_input_name,
        trained_context=trained_context(wrapped, tokenizer),
    )


def _check_evaluation_mode(model: nn.Module) -> None:
    """Raise if a part of the model is in training mode, where dropout makes results random."""
    training = [path for path, module in model.named_modules() if module.training]
    if training:
        part = "one" if "" in training else f"one whose {training[0]} is"
        raise OptionError(f"a model must be in evaluation mode, got {part} in training mode; call model.eval() first")
