"""`polyhead.inspect`: analyse every attention head of a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyhead.errors import OptionError
from polyhead.files import check_pyarrow
from polyhead.inspection.inspection_files import save_inspection
from polyhead.inspection.result import Inspection
from polyhead.inspection.run_files import OBSERVATIONS, TABLE, check_new_run
from polyhead.inspection.running import InspectionRun
from polyhead.inspection.settings import IN_MEMORY, Settings
from polyhead.inspection.text_pass import SAVE_SECONDS
from polyhead.observation.run_folder import lock_folder, remove_leftovers
from polyhead.progress import Progress, ProgressCallback, ignore_progress
from polyhead.sources import LoadedModel
from polyhead.sources.models import check_layers
from polyhead.sources.text_contexts import Text
from polyhead.sources.texts import TOKENS
from polyhead.workflows.model_loading import as_loaded, load_model


def inspect(
    model: str | os.PathLike[str] | nn.Module | LoadedModel | None = None,
    text: Text = None,
    *,
    field: str = "text",
    context: int | None = None,
    tokens: int = TOKENS,
    batch_tokens: int = 4096,
    layers: Sequence[int] | None = None,
    statistics: Sequence[str] | None = None,
    importance: Literal["auto", "none", "gradient", "ablation", "both"] = "auto",
    importance_tokens: int | None = None,
    chance: bool = True,
    seed: int = 0,
    device: str = "cpu",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    tokenizer: Any = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: ProgressCallback = ignore_progress,
    save_seconds: float = SAVE_SECONDS,
) -> Inspection:
    """Analyse every attention head of a model: statistics, outputs, redundancy, importance and roles.

    An interrupt (Ctrl-C) ends the pass over the text; the result is of the text until then, and is marked as
    interrupted. Batches are counted atomically, so that a resumed run equals an uninterrupted one.

    Args:
        model: a name or folder, a transformers model in evaluation mode (with its `tokenizer`), or the result of
            `polyhead.workflows.model_loading.load_model`; default: minilm.
        text: a file or folder, documents in memory, or rows of Hugging Face `datasets`, which are streamed; default: a
            built-in text in English, and in Chinese if the tokenizer knows it.
        field: the text field of .jsonl files, or the text column of .parquet files and datasets.
        context: tokens per context; default: 512, or the model's maximum if smaller.
        tokens: maximum number of tokens to read.
        batch_tokens: maximum number of tokens per batch.
        layers: inspect only these layers, from 0.
        statistics: compute only these statistics; default: all.
        importance: "ablation" of every head in turn, "gradient", "both", "none", or "auto": gradients where the model
            predicts tokens, ablation on a short text where it does not.
        importance_tokens: number of tokens on which importance is measured; default: 8,192 for gradient, 2,048 for
            ablation and both, and 256 if "auto" selects ablation.
        chance: also inspect the model with random weights, as a baseline for roles.
        seed: of samples, random weights and repeated words.
        device: device of a model that is loaded by name; one in memory stays where it is.
        dtype: of a model that is loaded by name; default: float32 on a CPU, else bfloat16.
        folder: new folder to save the run in, as `polyhead inspect --save` does. Data are also written while the text
            is read, so that a killed run can be resumed.
        resume: continue from the data in `folder`.
        progress: called with the progress of each step.
        save_seconds: time between two writes to the folder.
        tokenizer: tokenizer of a model in memory.

    Returns:
        The table of heads with their roles, redundancy, importance and findings.

    Raises:
        OptionError: a setting is out of range, the text is too short, or the model cannot be observed.
        CheckpointError: the model's files are damaged, incomplete, or pickles.

    >>> import torch, polyhead
    >>> from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
    >>> tokenizer = ByT5Tokenizer(extra_ids=0)  # bytes
    >>> config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> text = ["the cat sat on the mat. " * 20] * 2
    >>> found = polyhead.inspect(model, text, tokenizer=tokenizer, context=64, tokens=512, chance=False)
    >>> len(found.table), found.table["entropy"].shape
    (8, torch.Size([8]))
    """
    loaded, name = None, None
    if isinstance(model, (nn.Module, LoadedModel)):
        if dtype is not None:
            raise OptionError(
                f"dtype applies only to models loaded by name, got {dtype!r} with a model in memory; convert the model "
                "with model.to(dtype)"
            )
        loaded = as_loaded(model, tokenizer)
        name, device = loaded.name, str(next(loaded.model.parameters()).device)
    elif model is not None:
        name = os.fspath(model)
    settings = Settings(
        model=name,
        text=None if text is None else os.fspath(text) if isinstance(text, (str, os.PathLike)) else IN_MEMORY,
        field=field,
        context=context,
        tokens=tokens,
        batch_tokens=batch_tokens,
        layers=None if layers is None else tuple(layers),
        statistics=None if statistics is None else tuple(statistics),
        importance=importance,
        importance_tokens=importance_tokens,
        chance=chance,
        seed=seed,
        device=device,
        dtype=dtype,
    )
    return inspect_model(
        settings,
        loaded=loaded,
        text=text,
        folder=None if folder is None else Path(folder),
        resume=resume,
        progress=progress,
        save_seconds=save_seconds,
    )


def inspect_model(
    settings: Settings,
    *,
    loaded: LoadedModel | None = None,
    text: Text = None,
    folder: Path | None = None,
    resume: bool = False,
    progress: ProgressCallback = ignore_progress,
    save_seconds: float = SAVE_SECONDS,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Inspection:
    """Inspect by the settings of a run: those of `inspect`, or those saved in the folder of a run.

    Args:
        loaded: a model that is already loaded; default: the settings' model.
        text: documents in memory; default: the settings' text.
        allow_pickle: read weights from pickles, which can run code.
        trust_remote_code: run code that comes with the model.
        folder, resume, progress, save_seconds: as in `inspect`.
    """
    check_run_folder(folder, resume)
    with ExitStack() as stack:
        if folder is not None:
            check_pyarrow(folder / TABLE)
            stack.enter_context(locked(folder))
        loaded = loaded or load_settings_model(settings, progress, allow_pickle, trust_remote_code)
        run = InspectionRun.of(settings, loaded, text=text, progress=progress)
        read = run.text_pass.run(folder=folder, resume=resume, report=progress, save_seconds=save_seconds)
        found = run.finish(read)
        if folder is not None:
            save_inspection(folder, found)
        return found


def check_run_folder(folder: Path | None, resume: bool) -> None:
    """Raise if a run would overwrite another, or if there is no folder to resume from."""
    if folder is None:
        if resume:
            raise OptionError("resume=True continues the run in a folder, got none; pass folder=")
    elif not resume:
        check_new_run(folder, "folder")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Return a context in which only this process writes to the folder of a run, without what a killed one left."""
    with lock_folder(folder):
        remove_leftovers(folder, OBSERVATIONS)
        yield


def load_settings_model(
    settings: Settings, progress: ProgressCallback, allow_pickle: bool, trust_remote_code: bool
) -> LoadedModel:
    """Load the model that the settings name, on their device."""
    if settings.layers is not None:
        check_layers(settings.model, settings.layers, trust_remote_code=trust_remote_code)
    progress(Progress("load the model"))
    return load_model(
        settings.model,
        device=settings.device,
        dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
