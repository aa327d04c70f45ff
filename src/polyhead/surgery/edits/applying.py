"""Apply edits to a model and undo them: all or nothing, bit for bit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from polyhead.errors import CheckpointError, OptionError, PolyheadError
from polyhead.files import in_one_line
from polyhead.geometry import HeadLayout, HeadOrigins
from polyhead.integrations.huggingface.attention import KEY_HEADS
from polyhead.integrations.huggingface.registration import NAME
from polyhead.layers import MultiHeadAttention, MultiHeadConfig
from polyhead.observation.origins import ATTRIBUTE, IN_CONFIG, config_entry
from polyhead.observation.transformers_models import is_inside, pretrained_models
from polyhead.sources.fingerprint import fingerprint
from polyhead.surgery.adapters.attention_layer import (
    AttentionLayer,
    choose_layer,
    is_conv1d,
    key_map_of,
    layer_origins,
    sizes_of,
)
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import HeadWeights, pack_heads, read_heads
from polyhead.surgery.edits.head_edits import HeadEdit, PruneHeads, checked_edits
from polyhead.surgery.edits.records import EditRecord, LayerRecord
from polyhead.surgery.edits.stale_caches import CACHED_HEADS, cached_heads, model_around, refuse_stale_cache
from polyhead.surgery.native.configs import ConfigChange, config_at
from polyhead.surgery.native.fitting import fit_edited

Value = TypeVar("Value")


class Compensation(Protocol):
    """Changes the output matrices of an edited layer to compensate for removed heads."""

    def __call__(self, path: str, before: HeadWeights, after: HeadWeights) -> HeadWeights: ...


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes to a model: parameters by name, layouts and origins by layer, and config values."""

    parameters: Mapping[str, Tensor]
    layouts: Mapping[str, HeadLayout]
    config: Sequence[ConfigChange] = ()
    origins: Mapping[str, HeadOrigins] = field(default_factory=dict)


def editable_model(model: nn.Module) -> nn.Module:
    """Return the model inside a `torch.compile` wrapper, or the model itself; raise for data-parallel wrappers."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise OptionError(
            f"the model must not be wrapped in {type(model).__name__} while its parameters are replaced, got a wrapped "
            "one; edit model.module, then wrap it again"
        )
    compiled = getattr(model, "_orig_mod", None)
    return compiled if isinstance(compiled, nn.Module) else model


@torch.inference_mode(False)  # inference tensors could not be trained
def apply(
    model: nn.Module, edits: Sequence[HeadEdit], *, expect: str | None = None, compensation: Compensation | None = None
) -> EditRecord:
    """Apply edits to a model in order and return a record that undoes them all.

    If an edit is rejected, the model is unchanged. Changed parameters are replaced by new ones, so create the optimizer
    after the surgery. Where the groups of a grouped layer become uneven, a transformers model needs polyhead's
    attention: `set_attention(model, register())` of `polyhead.integrations.huggingface`.

    A model compiled by `torch.compile(model)` is edited as the model itself, and compiled again at its next call.

    Args:
        expect: the `fingerprint` of the model that the edits were made for; raises for any other model.
        compensation: changes the outputs of the remaining heads, as `OutputCompensation` does.
        model: the model, which is edited in place.
        edits: edits, applied in order.

    Returns:
        A record for `undo`.

    Raises:
        OptionError: an edit refers to layers or heads that do not exist, or is not possible; nothing is changed then.

    >>> model = MultiHeadAttention(12, 4)
    >>> from polyhead.surgery import PruneHeads
    >>> record = apply(model, [PruneHeads(layer=0, heads=(1,))])
    >>> model.layout.num_heads, model.q_proj.weight.shape
    (3, torch.Size([9, 12]))
    >>> undo(model, record)
    >>> model.layout.num_heads
    4
    """
    model, edits = editable_model(model), checked_edits(edits)
    before = fingerprint(model)
    check_expected(expect, before)
    layers = find_layers(model)
    changes, records = _changes_of(model, layers, edits, compensation)
    tensors = {name: model.get_parameter(name).detach().cpu().clone() for name in changes.parameters}
    with committed(model, {layer.path: layer for layer in layers}, changes):
        after = fingerprint(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in changes.parameters.items()}
    return EditRecord(edits, before, after, records, tuple(changes.config), tensors, shapes)


@contextmanager
def edited(model: nn.Module, edits: Sequence[HeadEdit]) -> Iterator[None]:
    """Apply edits to a model within the context; on exit it has its own parameters again."""
    layers = find_layers(model)
    changes, _ = _changes_of(model, layers, checked_edits(edits))
    with ExitStack() as back:
        _write(model, {layer.path: layer for layer in layers}, changes, back)
        yield


def _changes_of(
    model: nn.Module,
    layers: tuple[AttentionLayer, ...],
    edits: Sequence[HeadEdit],
    compensation: Compensation | None = None,
) -> tuple[Changes, tuple[LayerRecord, ...]]:
    parameters, layouts, origins, records = {}, {}, {}, []
    for layer, layer_edits in edits_by_layer(layers, edits):
        assert layer.layout is not None
        original, origins_before = read_heads(model, layer), layer_origins(model, layer)
        heads = changed(layer, original, layer_edits)
        origins[layer.path] = origins_before.then(heads.made_of)
        if compensation is not None:
            heads = compensation(layer.path, original, heads)
        layouts[layer.path] = heads.layout
        records.append(LayerRecord(layer.path, layer.layout, heads.layout, origins_before))
        for name, tensor in pack_heads(model, layer, heads).items():
            if not torch.equal(tensor, model.get_parameter(name)):
                parameters[name] = tensor
    changes = Changes(parameters, layouts, _config_changes(model, layers, layouts, parameters), origins)
    _check_config(layers, changes)
    return changes, tuple(records)


def _config_changes(
    model: nn.Module,
    layers: tuple[AttentionLayer, ...],
    layouts: Mapping[str, HeadLayout],
    parameters: Mapping[str, Tensor],
) -> tuple[ConfigChange, ...]:
    """Return the changes of the configs of a transformers model, or of those inside a module of another kind."""
    traced = [x.path for x in layers if x.traced is not None and x.path in layouts]
    changes: list[ConfigChange] = []
    for path, inner in _configured_models(model).items():
        of_inner = _inside(layouts, path)
        if of_inner and not any(is_inside(x, path) for x in traced):
            fit = fit_edited(inner, find_layers(inner) if path else layers, of_inner, _inside(parameters, path))
            changes += [replace(change, model=path) for change in fit.changes]
    return tuple(changes)


def _configured_models(model: nn.Module) -> dict[str, Any]:
    """Return the transformers models in a module by path, without those whose config others of them use as well."""
    models = pretrained_models(model)
    counts = Counter(id(x.config) for x in models.values())
    return {path: x for path, x in models.items() if counts[id(x.config)] == 1}


def _inside(values: Mapping[str, Value], outer: str) -> dict[str, Value]:
    """Return the values of the modules inside `outer`, by their paths from there."""
    start = f"{outer}." if outer else ""
    return {path.removeprefix(start): value for path, value in values.items() if is_inside(path, outer)}


def check_expected(expect: str | None, actual: str) -> None:
    """Raise `OptionError` if the model's fingerprint is not the expected one; None accepts any."""
    if expect is not None and expect != actual:
        raise OptionError(f"these edits are for the model with fingerprint {expect}, got one with {actual}")


@torch.inference_mode(False)
def undo(model: nn.Module, record: EditRecord) -> None:
    """Undo edits bit for bit, in the edited model or in one loaded from its shrunk checkpoint.

    Args:
        model: the edited model.
        record: what `apply` returned.

    Raises:
        CheckpointError: the model is not the edited one, for instance because it was trained since.

    >>> import torch, polyhead
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> from polyhead.surgery import PruneHeads, apply, undo
    >>> before = model.model.layers[0].self_attn.q_proj.weight.clone()
    >>> record = apply(model, [PruneHeads(layer=0, heads=(1,))])
    >>> undo(model, record)
    >>> torch.equal(model.model.layers[0].self_attn.q_proj.weight, before)
    True
    """
    model = editable_model(model)
    by_path = _layers_of(model, record, edited=True)
    actual = fingerprint(model)
    if actual != record.after:
        raise CheckpointError(
            f"this record undoes the edits of the model with fingerprint {record.after}, got one with {actual}; "
            "edits cannot be undone after the weights were trained or edited again"
        )
    back = [replace(x, before=x.after, after=x.before) for x in record.config]
    layouts = {layer.path: layer.before for layer in record.layers}
    origins = {layer.path: layer.origins for layer in record.layers}
    _check_names(model, record.tensors)
    with _as_checkpoint_error(), committed(model, by_path, Changes(record.tensors, layouts, back, origins)):
        actual = fingerprint(model)
        if actual != record.before:
            raise CheckpointError(
                f"the tensors of this record would give a model with fingerprint {actual} instead of {record.before}: "
                "the record is damaged; the model is unchanged"
            )


@torch.inference_mode(False)
def take_shape(model: nn.Module, record: EditRecord) -> None:
    """Give an unedited model the shapes of the edited one, filled with zeros, for a shrunk checkpoint.

    Followed by `model.load_state_dict(...)` and `undo(model, record)`, this undoes edits in another process.

    Args:
        model: the unedited model.
        record: record of the edits.
    """
    model = editable_model(model)
    by_path = _layers_of(model, record, edited=False)
    _check_names(model, record.shapes)
    for name, shape in record.shapes.items():
        size = model.get_parameter(name).numel()
        if any(side < 0 for side in shape) or math.prod(shape) > 64 * size:
            raise CheckpointError(f"a record must give {name} of {size:,} values a valid shape, got {list(shape)[:8]}")
    parameters = {name: model.get_parameter(name).new_zeros(shape) for name, shape in record.shapes.items()}
    layouts = {layer.path: layer.after for layer in record.layers}
    changes = Changes(parameters, layouts, record.config, origins_after(tuple(by_path.values()), record))
    with _as_checkpoint_error(), committed(model, by_path, changes):
        pass


def edits_by_layer(
    layers: tuple[AttentionLayer, ...], edits: Sequence[HeadEdit]
) -> list[tuple[AttentionLayer, list[HeadEdit]]]:
    """Return each edited layer with its edits in order."""
    by_layer: dict[str, tuple[AttentionLayer, list[HeadEdit]]] = {}
    for edit in edits:
        layer = choose_layer(layers, edit.layer, edit.stack)
        by_layer.setdefault(layer.path, (layer, []))[1].append(edit)
    return list(by_layer.values())


def changed(layer: AttentionLayer, heads: HeadWeights, edits: Sequence[HeadEdit]) -> HeadWeights:
    """Return a layer's heads after its edits; raises if its module does not support them."""
    for edit in edits:
        if layer.traced is not None and not isinstance(edit, PruneHeads):
            raise OptionError(
                f"the heads of {layer.path!r} were found by trace_layers, which checks that they can be pruned, got "
                f"{type(edit).__name__}"
            )
        heads = edit.change(heads)
    layout = heads.layout
    if layer.traced is not None and layout.key_heads is not None:
        raise OptionError(
            f"{layer.path!r} ({type(layer.module).__name__}) supports only groups of one size, got query heads that "
            f"read the KV heads {layout.key_heads}; prune as many of each group, or whole groups"
        )
    if layout.num_kv_heads != layout.num_heads and not layer.can_group:
        raise OptionError(
            f"{layer.path!r} ({type(layer.module).__name__}) supports only one KV head per head, got "
            f"{layout.num_heads} heads over {layout.num_kv_heads}"
        )
    return heads


def origins_after(layers: tuple[AttentionLayer, ...], record: EditRecord) -> dict[str, HeadOrigins]:
    """Return the original heads of each edited layer after a record's edits, without reading weights."""
    layer_records = {layer.path: layer for layer in record.layers}
    origins = {}
    for layer, layer_edits in edits_by_layer(layers, record.edits):
        if layer.path not in layer_records:
            raise CheckpointError(f"the edits of this record refer to {layer.path!r}, got a record without this layer")
        heads = HeadWeights.blank(layer_records[layer.path].before)
        for edit in layer_edits:
            heads = edit.change(heads)
        origins[layer.path] = layer_records[layer.path].origins.then(heads.made_of)
    return origins


@contextmanager
def committed(model: nn.Module, layers: Mapping[str, AttentionLayer], changes: Changes) -> Iterator[None]:
    """Write the changes; if the body or the writing raises, the model is restored."""
    with ExitStack() as back:
        _write(model, layers, changes, back)
        yield
        back.pop_all()


def _write(model: nn.Module, layers: Mapping[str, AttentionLayer], changes: Changes, back: ExitStack) -> None:
    for path in changes.layouts:
        if isinstance(module := layers[path].module, MultiHeadAttention):
            back.callback(_repack_projections, module)
    for name, tensor in changes.parameters.items():
        _put_parameter(model, name, tensor, back)
    for path, layout in changes.layouts.items():
        if layers[path].is_ours:
            _set_ours(layers[path], layout, back)
            _mark_caches_stale(layers[path], changes.parameters, back)
        else:
            _set_transformers(layers[path], layout, back)
            _set_cached_heads(model, layers[path], layout, back)
    _set_origins(model, layers, changes.origins, back)
    for change in changes.config:
        config = config_at(model.get_submodule(change.model).config, change.path)
        # A value that an edit added is deleted when the edit is undone.
        removed = not change.was_there and change.after is None
        _set(config, change.name, None if removed else change.after, back, remove=removed)


def require_polyhead_attention(module: nn.Module, args: object) -> None:
    """Forward pre-hook of modules with uneven groups, which only polyhead's attention supports."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name != NAME:
        raise OptionError(
            f"the query heads of this layer read KV heads {getattr(module, KEY_HEADS)}, which only polyhead's "
            f"attention supports, got {name!r}; call set_attention(model, register()) of "
            "polyhead.integrations.huggingface"
        )


def _check_config(layers: Sequence[AttentionLayer], changes: Changes) -> None:
    for layer in layers:
        layout = changes.layouts.get(layer.path, layer.layout)
        described = any(is_inside(layer.path, change.model) for change in changes.config)
        if layer.reads_config and layout != layer.layout and not described:
            raise OptionError(
                f"{type(layer.module).__name__} or a module around it reads the number of heads from the config of all "
                "layers, and no config describes these edits; edit every layer alike, and in groups of one size"
            )


def _layers_of(model: nn.Module, record: EditRecord, *, edited: bool) -> dict[str, AttentionLayer]:
    """Return the layers of a model by path, checked against those of a record."""
    by_path = {layer.path: layer for layer in find_layers(model)}
    for layer_record in record.layers:
        expected, layer = layer_record.after if edited else layer_record.before, by_path.get(layer_record.path)
        if layer is None or layer.layout != expected:
            missing = "no such layer; one that trace_layers found must be traced in this model as well"
            actual = missing if layer is None else f"{layer.layout}" if layer.layout else layer.refusals[0]
            raise CheckpointError(
                f"this record is of a model whose {layer_record.path!r} has {expected}, got {actual}"
                + ("; give it the shapes of the edited model first, with take_shape" if edited else "")
            )
    return by_path


def _check_names(model: nn.Module, names: Mapping[str, Any]) -> None:
    parameters = dict(model.named_parameters())
    unknown = sorted(name for name in names if name not in parameters)
    if unknown:
        raise CheckpointError(f"a record must name parameters of this model, got {unknown[0]!r}")


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Turn the various errors of an inconsistent record into `CheckpointError`; the model is unchanged."""
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, PolyheadError):
            raise
        raise CheckpointError(
            f"the parts of a record must fit each other, got one that does not: {in_one_line(error)}; the model is "
            "unchanged"
        ) from error


def _set(owner: Any, name: str, value: Any, back: ExitStack, *, remove: bool = False) -> None:
    if hasattr(owner, name):
        back.callback(setattr, owner, name, getattr(owner, name))
        if remove:
            delattr(owner, name)
    elif not remove:
        back.callback(delattr, owner, name)
    if not remove:
        setattr(owner, name, value)


def _put_parameter(model: nn.Module, name: str, tensor: Tensor, back: ExitStack) -> None:
    path, _, kind = name.rpartition(".")
    linear = model.get_submodule(path)
    old = linear.get_parameter(kind)
    _set(linear, kind, nn.Parameter(tensor.to(old.device, old.dtype, copy=True), old.requires_grad), back)
    if kind == "weight" and is_conv1d(linear):
        _set(linear, "nx", tensor.shape[0], back)
        _set(linear, "nf", tensor.shape[1], back)
    elif kind == "weight":
        _set(linear, "out_features", tensor.shape[0], back)
        _set(linear, "in_features", tensor.shape[1], back)


def _set_origins(
    model: nn.Module, layers: Mapping[str, AttentionLayer], origins: Mapping[str, HeadOrigins], back: ExitStack
) -> None:
    """Set the origins on edited modules and those of all layers in the config; unedited layers have none."""
    if not origins:
        return
    current = {layer.path: layer_origins(model, layer) for layer in layers.values() if layer.layout is not None}
    for path, layer_origin in origins.items():
        _set(layers[path].module, ATTRIBUTE, layer_origin, back, remove=layer_origin.is_unedited)
    for path, inner in _configured_models(model).items():
        entry = config_entry(_inside({**current, **origins}, path))
        _set(inner.config, IN_CONFIG, entry, back, remove=entry is None)


def _set_ours(layer: AttentionLayer, layout: HeadLayout, back: ExitStack) -> None:
    module = layer.module
    assert isinstance(module, MultiHeadAttention)
    options = {**vars(MultiHeadConfig.of(module)), **dict.fromkeys(("key_heads", "num_kv_heads")), **layout.to_dict()}
    built = MultiHeadConfig(**options).build(device="meta")
    _set(module, "layout", built.layout, back)
    _repack_projections(module)


def _mark_caches_stale(layer: AttentionLayer, parameters: Mapping[str, Tensor], back: ExitStack) -> None:
    """Count an edit that changes keys or values, so that the layer refuses a cache that it filled before."""
    assert isinstance(layer.module, MultiHeadAttention)
    prefix = f"{layer.path}." if layer.path else ""
    if any(f"{prefix}{name}" in parameters for name, _ in layer.module.named_parameters() if name[0] in "kv"):
        _set(layer.module, "kv_edits", layer.module.kv_edits + 1, back)


def _set_cached_heads(model: nn.Module, layer: AttentionLayer, layout: HeadLayout, back: ExitStack) -> None:
    around = model_around(model, layer.path)
    if around is None:
        return
    if not hasattr(around, CACHED_HEADS):
        back.callback(around.register_forward_pre_hook(refuse_stale_cache, with_kwargs=True).remove)
    _set(around, CACHED_HEADS, cached_heads(around, layer.path, layer.module, layout.num_kv_heads), back)


def _repack_projections(module: MultiHeadAttention) -> None:
    """Lay replaced projections out contiguously again, as after any `_apply`."""
    unchanged: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    module._apply(unchanged)


def _set_transformers(layer: AttentionLayer, layout: HeadLayout, back: ExitStack) -> None:
    module = layer.module
    for name, size in sizes_of(layer, layout).items():
        _set(module, name, size, back)
    key_heads = key_map_of(layer, layout)
    hooks = dict(module._forward_pre_hooks)
    guarded = [number for number, hook in hooks.items() if hook is require_polyhead_attention]
    if key_heads is not None:
        _set(module, KEY_HEADS, key_heads, back)
        if not guarded:
            back.callback(module.register_forward_pre_hook(require_polyhead_attention).remove)
        return
    _set(module, KEY_HEADS, None, back, remove=True)
    for number in guarded:
        del module._forward_pre_hooks[number]
        back.callback(module._forward_pre_hooks.__setitem__, number, require_polyhead_attention)
