"""Load a model that `save` wrote, in any form and bit for bit, or any other transformers model by its name."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import CheckpointError
from polyhead.files import read_tensors
from polyhead.geometry import HeadLayout
from polyhead.integrations.huggingface.registration import register, set_attention
from polyhead.observation.origins import IN_CONFIG
from polyhead.sources.config_sizes import check_config, check_room
from polyhead.sources.fingerprint import fingerprint
from polyhead.sources.gguf_reading import reading_once
from polyhead.sources.load_errors import describe_failure, quiet
from polyhead.sources.model_source import ModelSource, find_source
from polyhead.sources.models import check_kernels, checked_device, find_class, read_native, read_weights
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.discovery import find_layers, has_key_maps
from polyhead.surgery.adapters.head_weights import HeadWeights, pack_heads, read_heads
from polyhead.surgery.edits.applying import Changes, committed, origins_after
from polyhead.surgery.edits.records import EditRecord
from polyhead.surgery.native.fitting import without_init
from polyhead.surgery.storage.manifest import WEIGHTS, Manifest
from polyhead.surgery.storage.undo_folder import MANIFEST, find_record


def load(
    name: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a transformers model by name, in evaluation mode; one with edited heads in any saved form.

    A padded model is loaded without its zero heads. Models that `save` wrote are verified by their fingerprint: damaged
    weights, or those of another model, raise `CheckpointError`. Weights keep the saved dtype unless `dtype` is passed.
    A model with uneven groups uses polyhead's attention. `AutoTokenizer.from_pretrained(model.name_or_path)` of
    transformers loads the tokenizer of a model that does not come from a `.gguf` file.

    Args:
        name: a folder, a `.gguf` file, "tiny", "minilm" or "smollm2" for packaged models, or a name on the hub. Local
            paths take precedence over the hub.
        device: device of the weights.
        dtype: dtype of the weights.
        allow_pickle: whether to load pickle files, which can run anything on your machine.
        trust_remote_code: whether to run code from the model's repository.

    Returns:
        The model.

    Raises:
        OptionError: there is no such model, or its folder has no config.json.
        DeviceError: the device is not available.
        CheckpointError: files are damaged or pickles, or the weights are not those that were saved.

    >>> import torch, polyhead
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> import tempfile
    >>> edited = polyhead.prune(model, "L0H2,L0H3,L1H2,L1H3", compensate=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = edited.save(f"{folder}/pruned")
    ...     loaded = polyhead.load(f"{folder}/pruned")
    >>> tokens = torch.arange(12)[None]
    >>> torch.equal(loaded(tokens).logits, model(tokens).logits)
    True
    """
    source, device = find_source(name), checked_device(device)
    once = nullcontext() if source.gguf_file is None else reading_once()
    with quiet(progress=False), describe_failure(source.name, source.location, local=source.is_local), once:
        model = read_model(source, dtype, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    return model.to(device).eval()


def read_model(source: ModelSource, dtype: torch.dtype | None, *, allow_pickle: bool, trust_remote_code: bool) -> Any:
    """Return the model of a source, saved by `save` or by transformers."""
    is_folder = source.gguf_file is None and source.is_local
    model = load_saved(Path(source.location), dtype) if is_folder else None
    if model is None:
        model = read_native(source, dtype, source.options(trust_remote_code), allow_pickle=allow_pickle)
    return model


def load_record(folder: str | os.PathLike[str]) -> EditRecord | None:
    """Return the edit record beside a model's folder, in FOLDER.undo; None if the model was saved without one.

    Folders of earlier versions have their record inside.

    Args:
        folder: folder of the model.

    Raises:
        CheckpointError: the record is missing, another model's, or was changed.
    """
    path = find_record(Path(folder).expanduser())
    return None if path is None else EditRecord.load(path)


def load_saved(folder: Path, dtype: torch.dtype | None = None, *, switch_attention: bool = True) -> Any:
    """Return the model that `save` wrote to a folder; None for other folders.

    A model with uneven groups is switched to polyhead's attention, which it needs to run, unless `switch_attention` is
    False, for a model of which only the weights are read.
    """
    manifest = Manifest.read(folder)
    if manifest is None:
        return None
    with quiet(progress=False), describe_failure(folder.name, str(folder), local=True):
        model = _read_uneven(folder, manifest) if manifest.form == "uneven" else _read_unpadded(folder, manifest)
    _restore_origins(model, folder, manifest)
    model = model.eval()
    actual = fingerprint(model)
    if actual != manifest.fingerprint:
        raise CheckpointError(
            f"the weights in {folder} must be those that were saved, with fingerprint {manifest.fingerprint}, got "
            f"{actual}: they are damaged or another model's. If they were trained since, remove {MANIFEST} to load "
            "them as any model"
        )
    if switch_attention and has_key_maps(model):
        set_attention(model, register())
    return model if dtype is None else _cast(model, dtype)


def _restore_origins(model: Any, folder: Path, manifest: Manifest) -> None:
    """Set the head origins of each layer, from the manifest or else from the record's edits."""
    model_layers = find_layers(model)
    layers = {layer.path: layer for layer in model_layers}
    head_origins = manifest.origins
    if head_origins is None:
        record = load_record(folder)
        head_origins = {} if record is None else origins_after(model_layers, record)
    for path, origins in head_origins.items():
        layout = _editable_layer(layers, path, folder).layout
        if layout is None or len(origins.heads) != layout.num_heads:
            raise CheckpointError(f"the head origins in {folder} must cover all heads of {path}, got {origins}")
    if hasattr(model.config, IN_CONFIG):  # the saved origins of a padded model also cover its zero heads
        delattr(model.config, IN_CONFIG)
    with committed(model, layers, Changes({}, {}, origins=head_origins)):
        pass  # entering the context writes the changes


def _read_unpadded(folder: Path, manifest: Manifest) -> Any:
    """Load a uniform or padded model with transformers, and remove the zero heads of padded layers."""
    model = read_weights(folder, find_class(manifest.architecture))
    layers = {layer.path: layer for layer in find_layers(model)}
    parameters: dict[str, Tensor] = {}
    layouts: dict[str, HeadLayout] = {}
    for path, padding in manifest.paddings.items():
        layer, layout = _editable_layer(layers, path, folder), manifest.layers[path]
        padded = read_heads(model, layer)
        if len(padding.heads) != padded.num_heads or set(range(layout.num_heads)) - set(padding.heads):
            raise CheckpointError(
                f"the padding of {path} in {MANIFEST} must match its heads, got other heads in {folder}"
            )
        layouts[path] = layout
        parameters |= pack_heads(model, layer, padding.unpad(padded, layout))
    with committed(model, layers, Changes(parameters, layouts)):
        pass
    return model


def _read_uneven(folder: Path, manifest: Manifest) -> Any:
    """Build the native class, give its layers their layouts, and load the weights."""
    import transformers

    check_config(folder)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    check_kernels(config, folder.name, False)
    tensors = _read_weight_file(folder / WEIGHTS, manifest)
    model_class = find_class(manifest.architecture)
    check_room(model_class, config, (folder / WEIGHTS).stat().st_size, str(folder))
    with torch.random.fork_rng(devices=[]), without_init():
        model = model_class._from_config(config)
    layers = {layer.path: layer for layer in find_layers(model)}
    parameters: dict[str, Tensor] = {}
    layouts: dict[str, HeadLayout] = {}
    for path, layout in manifest.layers.items():
        layer = _editable_layer(layers, path, folder)
        if layer.layout != layout:
            layouts[path] = layout
            # Parameters in the shapes of the layout; their values are loaded below.
            blank = pack_heads(model, layer, HeadWeights.blank(layout, read_heads(model, layer, device="meta")))
            for name, x in blank.items():
                if name not in tensors or tensors[name].shape != x.shape:
                    raise _tensor_mismatch(folder, name, tensors.get(name), x)
            parameters |= {name: torch.empty(x.shape, dtype=x.dtype) for name, x in blank.items()}
    with committed(model, layers, Changes(parameters, layouts)):
        pass
    expected = model.state_dict()
    for name in sorted(set(expected) | set(tensors)):
        if name not in expected or name not in tensors or expected[name].shape != tensors[name].shape:
            raise _tensor_mismatch(folder, name, tensors.get(name), expected.get(name))
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _tensor_mismatch(folder: Path, name: str, actual: Tensor | None, expected: Tensor | None) -> CheckpointError:
    return CheckpointError(
        f"{WEIGHTS} in {folder} must match {MANIFEST} and config.json, got {name} "
        f"{'missing' if actual is None else list(actual.shape)} instead of "
        f"{'nothing' if expected is None else list(expected.shape)}"
    )


def _read_weight_file(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return all tensors of a file by name, with those that are tied to another."""
    if not path.is_file():
        raise CheckpointError(f"the folder of an uneven model must contain {path.name}, got {path.parent} without it")
    tensors, _ = read_tensors(path, "weights must be whole .safetensors files", CheckpointError)
    for name, other in manifest.shared.items():
        if other not in tensors:
            raise CheckpointError(f"{path.name} must contain {other}, to which {name} is tied, got none")
        tensors[name] = tensors[other]
    return tensors


def _editable_layer(layers: dict[str, AttentionLayer], path: str, folder: Path) -> AttentionLayer:
    """Return the layer at a path of the manifest; raise if the model has none there whose heads can be edited."""
    layer = layers.get(path)
    if layer is None or layer.layout is None:
        why = "no such layer" if layer is None else layer.refusals[0]
        raise CheckpointError(
            f"{MANIFEST} in {folder} describes the heads of {path}, got {why}; is it another model's?"
        )
    return layer


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """Cast the weights; buffers outside the state dict, such as rotary frequencies, keep their dtype."""
    state = {name for name, _ in model.state_dict().items()}
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if name in state and x.is_floating_point():
            x.data = x.data.to(dtype)
    for config in (model.config, *(getattr(model.config, name, None) for name in model.config.sub_configs)):
        if config is not None:
            config.dtype = dtype
    return model
