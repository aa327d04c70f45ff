"""Saving an edited model: in a form that plain transformers loads where there is one, whole or not at all."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import CheckpointError, OptionError
from polyhead.files import in_one_line
from polyhead.geometry import HeadOrigins
from polyhead.observation.origins import IN_CONFIG, config_entry
from polyhead.sources.loading import quiet
from polyhead.sources.models import read_weights
from polyhead.surgery.adapters.attention_layer import AttentionLayer, layer_origins
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.fingerprint import fingerprint
from polyhead.surgery.edits.records import EditRecord
from polyhead.surgery.native.configs import ConfigChange, join_changes
from polyhead.surgery.native.fitting import NativeFit, fit_uniform, is_transformers_model
from polyhead.surgery.native.padding import PaddedFit, fit_padded
from polyhead.surgery.storage.folders import check_free, check_not_source, written_whole
from polyhead.surgery.storage.loading import load_saved
from polyhead.surgery.storage.manifest import FORMS, RECORD, WEIGHTS, Form, Manifest


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A folder that `save` wrote: its form, what plain transformers does with it in words, and its size."""

    folder: Path
    form: Form
    native: str
    num_bytes: int

    @property
    def loads_natively(self) -> bool:
        return self.form != "uneven"


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    form: Form | None = None,
    record: EditRecord | None = None,
    tokenizer: Any = None,
    replace: bool = False,
) -> SavedModel:
    """Write a model of transformers, edited or not, to a new folder; `polyhead.load(folder)` reads every form.

    The folder appears in one step, when all of it is on the disk and was read back, number for number. It is never the
    one that the model came from.

    Args:
        form: "uniform", for which a native config must describe the heads; "padded", where heads of zeros fill what a
            native config describes, so that it loads anywhere and saves no time; "uneven", any heads, read by
            `polyhead.load` alone. None takes uniform where it holds, else uneven. Whether plain transformers can load
            a form is found out by building its class and comparing every tensor.
        record: what undoes the edits, kept beside the model for `polyhead undo`.
        tokenizer: what is saved along with its `save_pretrained(folder)`: a tokenizer, a processor, or `SideFiles` of
            the folder that the model came from.
        replace: whether an existing folder may be replaced: one that `save` wrote, with nothing else in it.
    """
    folder = Path(folder).expanduser()
    if form is not None and form not in FORMS:
        raise OptionError(f"a model is saved in one of the forms {', '.join(FORMS)}, got {form!r}")
    check_savable(model, folder)
    check_free(folder, replace=replace)
    known = fingerprint(model)
    if record is not None and record.after != known:
        raise OptionError(
            f"a record is kept with the model that its edits made, of fingerprint {record.after}, got one of {known}"
        )
    layers = find_layers(model)
    made = _make(model, layers, known, form)

    def write() -> SavedModel:
        with quiet(progress=False), written_whole(folder, replace=replace) as beside:
            _write_native(model, beside, made) if made.built is not None else _write_uneven(
                model, beside, made.manifest
            )
            _read_back(model, beside)
            if record is not None:
                _with_config(record, made.changes).save(beside / RECORD)
            if tokenizer is not None:
                tokenizer.save_pretrained(beside)
        num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return SavedModel(folder, made.manifest.form, made.native, num_bytes)

    with _explain_write_errors(folder):
        try:
            return write()
        except CheckpointError as error:
            if form is not None or made.built is None:
                raise
            made = _own(model, made.manifest, f": {error}")
            return write()


@contextmanager
def _explain_write_errors(folder: Path) -> Iterator[None]:
    """A full disk, and whatever else keeps a folder from being written; a library fails in its own way."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, OptionError) as error:
        reason = error.__cause__ if isinstance(error, OptionError) else error
        if not isinstance(reason, OSError | SafetensorError):
            raise
        raise OptionError(
            f"a model is written where there is room and permission, got {folder}: {in_one_line(reason)}; what was "
            "there is as it was"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What is to be written: a native class on the meta device with the tensors that differ, or nothing but a model."""

    manifest: Manifest
    native: str
    built: Any = None
    changes: tuple[ConfigChange, ...] = ()
    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def _make(model: nn.Module, layers: Sequence[AttentionLayer], known: str, form: Form | None) -> _Plan:
    layouts = {layer.path: layer.layout for layer in layers if layer.layout is not None}
    origins = {layer.path: layer_origins(model, layer) for layer in layers if layer.layout is not None}
    origins = {path: one for path, one in origins.items() if not one.is_unedited}
    name = type(model).__name__
    uniform = NativeFit(rule="not asked for") if form == "padded" else fit_uniform(model, layers)
    if form == "padded":
        padded: PaddedFit = fit_padded(model, layers)
        if padded.built is None:
            raise OptionError(
                f"padded, a model must fit into a native config, got one that does not: {padded.rule}; save it uneven"
            )
        return _Plan(
            Manifest("padded", name, known, layouts, padded.paddings, origins=origins),
            f"plain transformers loads it as {name}{padded.in_words}",
            padded.built,
            padded.changes,
            padded.tensors(model, layers),
        )
    if uniform.built is not None and form != "uneven":
        return _Plan(
            Manifest("uniform", name, known, layouts, origins=origins),
            f"plain transformers loads it as {name}",
            uniform.built,
            uniform.changes,
        )
    if form == "uniform":
        raise OptionError(
            f"uniform, a model must be one that a native config describes, got one that is not: {uniform.rule}; "
            "save it uneven, or padded"
        )
    manifest = Manifest("uneven", name, known, layouts, origins=origins)
    return _own(model, manifest, f": {uniform.rule}" if uniform.rule else ", in this form")


def _own(model: nn.Module, manifest: Manifest, why: str) -> _Plan:
    return _Plan(
        dataclasses.replace(manifest, form="uneven", shared=_shared(model)),
        f"plain transformers does not load it{why}; polyhead.load does",
    )


def _write_native(model: Any, folder: Path, made: _Plan) -> None:
    """By the native class itself, so that names, shards and tied weights are as it wants them."""
    built = made.built
    built.load_state_dict({**model.state_dict(), **made.tensors}, strict=True, assign=True)
    built.tie_weights()
    if model.can_generate():
        built.generation_config = copy.deepcopy(model.generation_config)
    _write_origins(built.config, made.manifest)
    built.save_pretrained(folder)
    made.manifest.write(folder)


def _write_uneven(model: Any, folder: Path, manifest: Manifest) -> None:
    from safetensors.torch import save_file

    tensors = {name: x.detach().cpu().contiguous() for name, x in model.state_dict().items()}
    # A part of a larger tensor is written by itself.
    tensors = {name: x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for name, x in tensors.items()}
    save_file({name: x for name, x in tensors.items() if name not in manifest.shared}, folder / WEIGHTS)
    config = copy.deepcopy(model.config)
    config.architectures = [manifest.architecture]
    config.dtype = model.dtype
    _write_origins(config, manifest)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    manifest.write(folder)


def _write_origins(config: Any, manifest: Manifest) -> None:
    """Write the original heads into a config as its class has them, heads of zeros at their places."""
    origins = {path: HeadOrigins.unedited(layout.num_heads) for path, layout in manifest.layers.items()}
    origins |= dict(manifest.origins or {})
    for path, padding in manifest.paddings.items():
        origins[path] = origins[path].then([() if head is None else (head,) for head in padding.heads])
    entry = config_entry(origins)
    if entry is not None:
        setattr(config, IN_CONFIG, entry)
    elif hasattr(config, IN_CONFIG):
        delattr(config, IN_CONFIG)


def _read_back(model: nn.Module, folder: Path) -> None:
    """That what was written is what was meant: some classes leave weights out that they believe to know."""
    try:
        load_saved(folder)
    except CheckpointError:
        manifest = Manifest.read(folder)
        if manifest is None or manifest.form == "uneven":
            raise
        read = read_weights(folder, model_class=type(model)).state_dict()
        held = model.state_dict()
        lost = [
            name for name, x in held.items() if x.shape == read[name].shape and not torch.equal(x.cpu(), read[name])
        ]
        if not lost:
            raise
        raise CheckpointError(
            f"the files of a {type(model).__name__} must keep every tensor, and {lost[0]} is not read as it was written"
        ) from None


def _shared(model: nn.Module) -> dict[str, str]:
    """Tensors of the state that are others under a second name: tied embeddings."""
    first: dict[tuple[Any, ...], str] = {}
    shared = {}
    for name, x in model.state_dict().items():
        place = (x.device, x.data_ptr(), x.shape, x.stride(), x.dtype)
        if x.numel() and place in first:
            shared[name] = first[place]
        first.setdefault(place, name)
    return shared


def _with_config(record: EditRecord, changes: Sequence[ConfigChange]) -> EditRecord:
    """A record that takes back as well what was changed in the config that is written."""
    config = join_changes(record.config, changes)
    return record if config == record.config else dataclasses.replace(record, config=config)


def check_savable(model: nn.Module, folder: Path | None = None) -> None:
    """That `save` can write such a model, and that the folder is not the one it came from."""
    if not is_transformers_model(model):
        raise OptionError(
            f"models of transformers are saved, got {type(model).__name__}; a layer of polyhead is kept as "
            "polyhead.config_of(layer) and layer.state_dict()"
        )
    import transformers

    if getattr(transformers, type(model).__name__, None) is not type(model):
        raise OptionError(
            f"models of transformers' own classes are saved, got {type(model).__name__} of {type(model).__module__}, "
            "which no other process would find"
        )
    if folder is not None:
        check_not_source(folder, str(getattr(model.config, "name_or_path", "") or ""))
    held = [name for name, x in model.state_dict().items() if x.is_meta]
    if held:
        raise OptionError(f"a model is saved with its weights, got {held[0]} without any, on the meta device")
