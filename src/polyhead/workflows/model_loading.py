"""Load models by name, edited ones included, and accept models that are in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyhead.errors import OptionError
from polyhead.sources.load_errors import describe_failure, quiet
from polyhead.sources.model_source import find_source
from polyhead.sources.models import (
    LoadedModel,
    checked_device,
    kind_of,
    load_tokenizer,
    read_native,
    trained_context,
)
from polyhead.surgery.native.fitting import is_transformers_model
from polyhead.surgery.storage.loading import load_saved

# A name or folder for `load_model`, a transformers model, the result of `load_model`, or a function that returns one,
# which is called after the other arguments of a workflow were checked.
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

    `name` is "minilm" (the default) or "smollm2" for packaged models, a folder, a `.gguf` file, or a name on the hub.
    Local paths take precedence over the hub; write `./minilm` for a folder called minilm. A folder may contain a model
    with edited heads, in any saved form. The default dtype is float32 on the CPU and bfloat16 on a GPU; "saved" keeps
    that of the files. `progress` shows the progress bars of transformers.
    """
    source = find_source(name)
    device = checked_device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if dtype != "saved" and not dtype.is_floating_point:
        raise OptionError(f"the dtype of a model must be floating point, got {dtype}")
    load_dtype = None if dtype == "saved" else dtype
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if source.gguf_file is not None:
        options["gguf_file"] = source.gguf_file
    with quiet(progress=progress), describe_failure(source.name, source.location, local=source.is_local):
        is_folder = source.gguf_file is None and source.is_local
        model = load_saved(Path(source.location), load_dtype) if is_folder else None
        if model is None:
            model = read_native(source, load_dtype, options, allow_pickle=allow_pickle)
        reads_text = model.main_input_name == "input_ids" or model.config.is_encoder_decoder
        tokenizer = load_tokenizer(source, options) if reads_text else None
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
    model: Model, tokenizer: Any = None, *, dtype: torch.dtype | Literal["saved"] | None = None
) -> LoadedModel:
    """Return a model for a workflow: load it by name with `dtype`, or wrap one that is in memory.

    `tokenizer` belongs to a transformers model in memory; other models have their own.
    """
    if not isinstance(model, nn.Module):
        if tokenizer is not None:
            raise OptionError("a tokenizer is passed with a model in memory, got one with a model that has its own")
        if isinstance(model, LoadedModel):
            return model
        return model() if callable(model) else load_model(model, dtype=dtype)
    if not is_transformers_model(model):
        raise OptionError(
            f"a model must be a name, a folder or a transformers model, got a {type(model).__name__}; observe other "
            "modules with polyhead.observe, and edit them with polyhead.surgery.apply"
        )
    if model.training:
        raise OptionError("a model must be in evaluation mode, got one in training mode; call model.eval() first")
    wrapped: Any = model
    return LoadedModel(
        model=wrapped,
        tokenizer=tokenizer,
        name=Path(wrapped.config.name_or_path or type(model).__name__).name,
        kind=kind_of(model),
        origin="in memory",
        main_input=wrapped.main_input_name,
        trained_context=trained_context(wrapped, tokenizer),
    )
