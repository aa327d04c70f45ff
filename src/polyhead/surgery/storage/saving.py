"""Save an edited model atomically, by default in a form that plain transformers loads."""

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
from polyhead.observation.transformers_models import is_pretrained, pretrained_models
from polyhead.sources.fingerprint import fingerprint
from polyhead.sources.load_errors import quiet
from polyhead.sources.models import read_weights
from polyhead.surgery.adapters.attention_layer import AttentionLayer, layer_origins
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.edits.records import EditRecord
from polyhead.surgery.native.configs import ConfigChange, join_changes
from polyhead.surgery.native.fitting import fit_uniform
from polyhead.surgery.native.padding import fit_padded
from polyhead.surgery.options import OTHER_FORMS, Form, check_form
from polyhead.surgery.storage.folders import check_free, check_not_source, written_atomically
from polyhead.surgery.storage.loading import load_saved
from polyhead.surgery.storage.manifest import WEIGHTS, Manifest
from polyhead.surgery.storage.side_files import mark_model_card
from polyhead.surgery.storage.undo_folder import new_record


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A folder that `save` wrote: its form, how plain transformers loads it, its size, and the folder of its record."""

    folder: Path
    form: Form
    native: str
    num_bytes: int
    undo_folder: Path | None = None

    @property
    def loads_natively(self) -> bool:
        return self.form != "uneven"


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    form: Form = "uniform",
    record: EditRecord | None = None,
    tokenizer: Any = None,
    replace: bool = False,
) -> SavedModel:
    """Write a transformers model, edited or not, to a new folder that `polyhead.load(folder)` reads.

    The folder appears atomically, after all of it was written to disk, read back and verified. It is never the folder
    that the model came from.

    Args:
        form: "uniform": a native config describes the heads; "padded": zero heads fill up a native config, so that it
            loads anywhere but saves nothing; "uneven": any heads, loaded by `polyhead.load` alone. Whether plain
            transformers can load a form is checked by building its class and comparing every tensor.
        record: the edit record for `polyhead undo`, written to a second folder beside the first, `folder` with .undo
            added to its name.
        tokenizer: saved too, by its `save_pretrained(folder)`: a tokenizer, a processor, or `SideFiles` of the folder
            that the model came from.
        replace: whether to replace an existing folder: one that `save` wrote, with nothing else in it.
        model: the model.
        folder: folder to create.

    Returns:
        Where the model was saved, in which form, and what can load it.

    Raises:
        OptionError: the model does not fit the form, or the folder exists.

    >>> import torch, polyhead
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> import tempfile
    >>> from polyhead.surgery import PruneHeads, apply, save
    >>> record = apply(model, [PruneHeads(layer=0, heads=(2, 3)), PruneHeads(layer=1, heads=(2, 3))])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save(model, f"{folder}/pruned", record=record)  # the record is for `polyhead.undo`
    >>> saved.folder.name
    'pruned'
    """
    folder = Path(folder).expanduser()
    check_form(form)
    check_savable(model, folder)
    check_free(folder, replace=replace)
    model_fingerprint = fingerprint(model)
    if record is not None and record.after != model_fingerprint:
        raise OptionError(
            f"a record is saved with the model that its edits produced, of fingerprint {record.after}, got one of "
            f"{model_fingerprint}"
        )
    plan = _make_plan(model, find_layers(model), model_fingerprint, form)
    write = None
    if record is not None:
        # With the config changes of the written model, so that `undo` reverts them.
        write = dataclasses.replace(record, config=join_changes(record.config, plan.changes)).save
    with quiet(progress=False), _explain_write_errors(folder), new_record(folder, write) as undo:
        manifest = dataclasses.replace(plan.manifest, undo=undo.digest)
        steps = {"before_rename": undo.place, "after_rename": undo.remove_others}
        with written_atomically(folder, replace=replace, **steps) as temporary:
            if plan.built is None:
                _write_uneven(model, temporary, manifest)
            else:
                _write_native(model, temporary, plan, manifest)
            _read_back(model, temporary)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
                mark_model_card(temporary, () if record is None else record.edits)
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return SavedModel(folder, form, plan.native, num_bytes, None if undo.digest is None else undo.folder)


@contextmanager
def _explain_write_errors(folder: Path) -> Iterator[None]:
    """Raise `OptionError` for a full disk and other I/O errors, however a library reports them."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, OptionError) as error:
        reason = error.__cause__ if isinstance(error, OptionError) else error
        if not isinstance(reason, OSError | SafetensorError):
            raise
        raise OptionError(
            f"a model is written where there is space and permission, got {folder}: {in_one_line(reason)}; the folder "
            "is unchanged"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Planned write: a native class on the meta device with changed tensors, or the model itself."""

    manifest: Manifest
    native: str
    built: Any = None
    changes: tuple[ConfigChange, ...] = ()
    tensors: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def _make_plan(model: nn.Module, layers: Sequence[AttentionLayer], model_fingerprint: str, form: Form) -> _Plan:
    layouts = {layer.path: layer.layout for layer in layers if layer.layout is not None}
    origins = {layer.path: layer_origins(model, layer) for layer in layers if layer.layout is not None}
    origins = {path: heads for path, heads in origins.items() if not heads.is_unedited}
    name = type(model).__name__
    manifest = Manifest(form, name, model_fingerprint, layouts, origins=origins)
    loads = f"plain transformers loads it as {name}"
    if form == "padded":
        padded = fit_padded(model, layers)
        if padded.built is None:
            raise OptionError(
                f"the padded form must fit into a native config, got a model that does not: {padded.rule}; use --form "
                "uneven, which loads with polyhead.load"
            )
        manifest = dataclasses.replace(manifest, paddings=padded.paddings)
        tensors = padded.tensors(model, layers)
        return _Plan(manifest, f"{loads}{padded.summary}", padded.built, padded.changes, tensors)
    uniform = fit_uniform(model, layers)
    if form == "uneven":
        why = f": {uniform.rule}" if uniform.rule else ", in this form"
        loads = f"plain transformers does not load it{why}; polyhead.load does"
        return _Plan(dataclasses.replace(manifest, shared=_shared(model)), loads)
    if uniform.built is None:
        raise OptionError(f"plain transformers must load the uniform form: {uniform.rule}; {OTHER_FORMS}")
    return _Plan(manifest, loads, uniform.built, uniform.changes)


def _write_native(model: Any, folder: Path, plan: _Plan, manifest: Manifest) -> None:
    """Write by the native class itself, which sets names, shards and tied weights."""
    native = plan.built
    native.load_state_dict({**model.state_dict(), **plan.tensors}, strict=True, assign=True)
    native.tie_weights()
    if model.can_generate():
        native.generation_config = copy.deepcopy(model.generation_config)
    _write_origins(native.config, manifest)
    native.save_pretrained(folder)
    manifest.write(folder)


def _write_uneven(model: Any, folder: Path, manifest: Manifest) -> None:
    from safetensors.torch import save_file

    tensors = {name: x.detach().cpu().contiguous() for name, x in model.state_dict().items()}
    # Clone views, so that only their part of a larger storage is written.
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
    """Write the original heads into a config, with zero heads at their padded positions."""
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
    """Check that the folder reads back as the model: some classes omit weights they consider redundant."""
    try:
        load_saved(folder)
    except CheckpointError:
        manifest = Manifest.read(folder)
        if manifest is None or manifest.form == "uneven":
            raise
        stored = read_weights(folder, type(model)).state_dict()
        expected = model.state_dict()
        lost = [
            name
            for name, x in expected.items()
            if x.shape == stored[name].shape and not torch.equal(x.cpu(), stored[name])
        ]
        if not lost:
            raise
        raise CheckpointError(
            f"the files of a {type(model).__name__} must keep every tensor, but {lost[0]} is not read as it was "
            "written; use --form uneven, which loads with polyhead.load"
        ) from None


def _shared(model: nn.Module) -> dict[str, str]:
    """Return the state dict's tied tensors, mapped to the name of the first."""
    first: dict[tuple[Any, ...], str] = {}
    shared = {}
    for name, x in model.state_dict().items():
        storage = (x.device, x.data_ptr(), x.shape, x.stride(), x.dtype)
        if x.numel() and storage in first:
            shared[name] = first[storage]
        first.setdefault(storage, name)
    return shared


def check_savable(model: nn.Module, folder: Path | None = None) -> None:
    """Check that `save` can write this model, and that the folder is not the one it came from."""
    if not is_pretrained(model):
        inner = ", ".join(f"model.{path} ({type(x).__name__})" for path, x in pretrained_models(model).items())
        ours = "store a polyhead layer as polyhead.layers.config_of(layer) and layer.state_dict()"
        hint = f"save {inner} instead, load it and assign it to the same attribute" if inner else ours
        raise OptionError(f"only transformers models can be saved, got {type(model).__name__}; {hint}")
    import transformers

    if getattr(transformers, type(model).__name__, None) is not type(model):
        raise OptionError(
            f"only transformers' own classes can be saved, got {type(model).__name__} of {type(model).__module__}, "
            "which another process would not find"
        )
    traced = [layer.path for layer in find_layers(model) if layer.traced is not None and not layer.refusals]
    if len(traced):
        raise OptionError(
            f"a saved model must have layers that another process finds by their names, got {traced[0]!r}, found by "
            "trace_layers; store model.state_dict() and record.save(file), and load them into a traced model"
        )
    if folder is not None:
        check_not_source(folder, str(getattr(model.config, "name_or_path", "") or ""))
    meta_tensors = [name for name, x in model.state_dict().items() if x.is_meta]
    if meta_tensors:
        raise OptionError(f"a saved model must have weights, got {meta_tensors[0]} on the meta device")
