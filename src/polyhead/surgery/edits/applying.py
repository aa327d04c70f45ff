"""Making edits in a model and taking them back: all of them or none, and bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyhead.errors import CheckpointError, OptionError, PolyheadError
from polyhead.files import in_one_line
from polyhead.geometry import HeadLayout, HeadOrigins
from polyhead.integrations.huggingface.attention import KEY_HEADS
from polyhead.integrations.huggingface.registration import NAME
from polyhead.layers import MultiHeadAttention, MultiHeadConfig
from polyhead.observation.origins import ATTRIBUTE, IN_CONFIG, config_entry
from polyhead.surgery.adapters.attention_layer import (
    AttentionLayer,
    choose_layer,
    is_conv1d,
    key_map_of,
    layer_origins,
    sizes_of,
)
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.fingerprint import check_expected, fingerprint
from polyhead.surgery.adapters.head_weights import HeadWeights, pack_heads, read_heads
from polyhead.surgery.edits.head_edits import HeadEdit, checked_edits
from polyhead.surgery.edits.records import EditRecord, LayerRecord
from polyhead.surgery.native.configs import ConfigChange, config_at
from polyhead.surgery.native.fitting import config_changes, is_transformers_model


class Compensation(Protocol):
    """Who changes the output matrices of an edited layer so that less is lost."""

    def __call__(self, path: str, before: HeadWeights, after: HeadWeights) -> HeadWeights: ...


@dataclass(frozen=True, slots=True)
class Changes:
    """All that is to be different in a model: parameters by name, layouts and origins by layer, and the config."""

    parameters: Mapping[str, Tensor]
    layouts: Mapping[str, HeadLayout]
    config: Sequence[ConfigChange] = ()
    origins: Mapping[str, HeadOrigins] = field(default_factory=dict)


def apply(
    model: nn.Module, edits: Sequence[HeadEdit], *, expect: str | None = None, compensation: Compensation | None = None
) -> EditRecord:
    """Make edits in a model, in their order; what comes back undoes them all.

    If anything is refused, the model is as it was. Parameters that change are replaced by new ones, so that an
    optimizer is to be made after the surgery. Where the groups of a grouped layer become uneven, a model of
    transformers runs on polyhead's attention alone:
    `model.set_attn_implementation(polyhead.integrations.huggingface.register())`.

    Args:
        expect: the `fingerprint` of the model that the edits were made for; another model is refused.
        repair: changes what the remaining heads write, as `OutputCompensation` does.

    >>> model = MultiHeadAttention(12, 4)
    >>> from polyhead.surgery import PruneHeads
    >>> record = apply(model, [PruneHeads(layer=0, heads=(1,))])
    >>> model.layout.num_heads, model.q_proj.weight.shape
    (3, torch.Size([9, 12]))
    >>> undo(model, record)
    >>> model.layout.num_heads
    4
    """
    edits = checked_edits(edits)
    before = fingerprint(model)
    check_expected(expect, before)
    layers = find_layers(model)
    parameters, layouts, origins = {}, {}, {}
    for layer, own in edits_by_layer(layers, edits):
        first = read_heads(model, layer)
        heads = changed(layer, first, own)
        origins[layer.path] = layer_origins(model, layer).then(heads.made_of)
        if compensation is not None:
            heads = compensation(layer.path, first, heads)
        layouts[layer.path] = heads.layout
        for name, tensor in pack_heads(model, layer, heads).items():
            if not torch.equal(tensor, model.get_parameter(name)):
                parameters[name] = tensor
    config = config_changes(model, layers, layouts, parameters)
    changes = Changes(parameters, layouts, config, origins)
    _check_config(layers, changes)
    tensors = {name: model.get_parameter(name).detach().cpu().clone() for name in parameters}
    by_path = {layer.path: layer for layer in layers}
    records = [
        LayerRecord(path, _layout(by_path[path]), layout, layer_origins(model, by_path[path]))
        for path, layout in layouts.items()
    ]
    with committed(model, by_path, changes):
        after = fingerprint(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    return EditRecord(edits, before, after, tuple(records), config, tensors, shapes)


def undo(model: nn.Module, record: EditRecord) -> None:
    """Give back what edits took, bit for bit: to the model that was edited, or to one with its shrunk checkpoint."""
    by_path = _layers_of(model, record, edited=True)
    found = fingerprint(model)
    if found != record.after:
        raise CheckpointError(
            f"this record undoes the edits of the model with fingerprint {record.after}, got one with {found}; "
            "weights that were trained or edited since cannot be taken back"
        )
    back = [ConfigChange(x.path, x.name, x.after, x.before, x.was_there) for x in record.config]
    layouts = {layer.path: layer.before for layer in record.layers}
    origins = {layer.path: layer.origins for layer in record.layers}
    _check_names(model, record.tensors)
    with _as_checkpoint_error(), committed(model, by_path, Changes(record.tensors, layouts, back, origins)):
        found = fingerprint(model)
        if found != record.before:
            raise CheckpointError(
                f"the tensors of this record would make a model with fingerprint {found} instead of {record.before}: "
                "it is damaged; the model is as it was"
            )


def take_shape(model: nn.Module, record: EditRecord) -> None:
    """Give a model that was not edited the shapes of the edited one, zeros in them, for a shrunk checkpoint to fill.

    With `model.load_state_dict(...)` and `undo(model, record)` after it, edits are undone in another process.
    """
    by_path = _layers_of(model, record, edited=False)
    _check_names(model, record.shapes)
    for name, shape in record.shapes.items():
        size = model.get_parameter(name).numel()
        if any(side < 0 for side in shape) or math.prod(shape) > 64 * size:
            raise CheckpointError(f"a record gives {name} of {size:,} numbers another shape, got {list(shape)[:8]}")
    parameters = {name: model.get_parameter(name).new_zeros(shape) for name, shape in record.shapes.items()}
    layouts = {layer.path: layer.after for layer in record.layers}
    changes = Changes(parameters, layouts, record.config, origins_after(tuple(by_path.values()), record))
    with _as_checkpoint_error(), committed(model, by_path, changes):
        pass


def edits_by_layer(
    layers: tuple[AttentionLayer, ...], edits: Sequence[HeadEdit]
) -> list[tuple[AttentionLayer, list[HeadEdit]]]:
    """Each layer that is edited, with its edits in their order."""
    found: dict[str, tuple[AttentionLayer, list[HeadEdit]]] = {}
    for edit in edits:
        layer = choose_layer(layers, edit.layer, edit.stack)
        found.setdefault(layer.path, (layer, []))[1].append(edit)
    return list(found.values())


def changed(layer: AttentionLayer, heads: HeadWeights, edits: Sequence[HeadEdit]) -> HeadWeights:
    """The heads of a layer after its edits; refused where its module has no room for them."""
    for edit in edits:
        heads = edit.change(heads)
    layout = heads.layout
    if layout.num_kv_heads != layout.num_heads and not layer.can_group:
        raise OptionError(
            f"{layer.path!r} ({type(layer.module).__name__}) gives every head a KV head of its own, got "
            f"{layout.num_heads} heads over {layout.num_kv_heads}"
        )
    return heads


def origins_after(layers: tuple[AttentionLayer, ...], record: EditRecord) -> dict[str, HeadOrigins]:
    """The original heads of each edited layer after the edits of a record, from these alone."""
    began = {layer.path: layer for layer in record.layers}
    found = {}
    for layer, own in edits_by_layer(layers, record.edits):
        if layer.path not in began:
            raise CheckpointError(f"the edits of this record speak of {layer.path!r}, got a record without this layer")
        heads = HeadWeights.blank(began[layer.path].before)
        for edit in own:
            heads = edit.change(heads)
        found[layer.path] = began[layer.path].origins.then(heads.made_of)
    return found


@contextmanager
def committed(model: nn.Module, layers: Mapping[str, AttentionLayer], changes: Changes) -> Iterator[None]:
    """Write the changes; if the body, or the writing itself, raises, the model is as it was."""
    with ExitStack() as back:
        for path in changes.layouts:
            if isinstance(module := layers[path].module, MultiHeadAttention):
                back.callback(_repack_projections, module)
        for name, tensor in changes.parameters.items():
            _put_parameter(model, name, tensor, back)
        for path, layout in changes.layouts.items():
            if layers[path].is_ours:
                _set_ours(layers[path], layout, back)
            else:
                _set_transformers(layers[path], layout, back)
        _set_origins(model, layers, changes.origins, back)
        for change in changes.config:
            config = config_at(model.config, change.path)
            # What was not there before an edit is taken away when it is undone.
            gone = not change.was_there and change.after is None
            _set(config, change.name, None if gone else change.after, back, remove=gone)
        yield
        back.pop_all()


def require_polyhead_attention(module: nn.Module, given: object) -> None:
    """Run before a module whose groups are uneven: only polyhead's attention knows them."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name != NAME:
        raise OptionError(
            f"the query heads of this layer read KV heads {getattr(module, KEY_HEADS)}, which is known to polyhead's "
            f"attention alone, got {name!r}; call model.set_attn_implementation("
            "polyhead.integrations.huggingface.register())"
        )


def _check_config(layers: Sequence[AttentionLayer], changes: Changes) -> None:
    for layer in layers:
        layout = changes.layouts.get(layer.path, layer.layout)
        if layer.reads_config and layout != layer.layout and not changes.config:
            raise OptionError(
                f"{type(layer.module).__name__} reads the number of its heads from the config that all its layers "
                "share, and no config says what these edits make; edit every layer alike, and in groups of one size"
            )


def _layers_of(model: nn.Module, record: EditRecord, *, edited: bool) -> dict[str, AttentionLayer]:
    """The layers of a model, held against those that a record speaks of."""
    by_path = {layer.path: layer for layer in find_layers(model)}
    for one in record.layers:
        expected, layer = one.after if edited else one.before, by_path.get(one.path)
        if layer is None or layer.layout != expected:
            found = "no such layer" if layer is None else f"{layer.layout}" if layer.layout else layer.refusals[0]
            raise CheckpointError(
                f"this record speaks of a model whose {one.path!r} has {expected}, got {found}"
                + ("; give it the shapes of the edited model first, with take_shape" if edited else "")
            )
    return by_path


def _check_names(model: nn.Module, names: Mapping[str, Any]) -> None:
    own = dict(model.named_parameters())
    unknown = sorted(name for name in names if name not in own)
    if unknown:
        raise CheckpointError(f"a record speaks of parameters of its model, got {unknown[0]!r}, which is none of this")


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """A record whose parts do not fit each other breaks in many ways; the model is as it was in all of them."""
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, PolyheadError):
            raise
        raise CheckpointError(
            f"the parts of a record fit each other, got one that does not: {in_one_line(error)}; the model is as it was"
        ) from error


def _layout(layer: AttentionLayer) -> HeadLayout:
    assert layer.layout is not None
    return layer.layout


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
    model: Any, layers: Mapping[str, AttentionLayer], origins: Mapping[str, HeadOrigins], back: ExitStack
) -> None:
    """Origins of edited layers on their modules, and of all layers in the config; an unedited layer has none."""
    if not origins:
        return
    known = {layer.path: layer_origins(model, layer) for layer in layers.values() if layer.layout is not None}
    for path, found in origins.items():
        _set(layers[path].module, ATTRIBUTE, found, back, remove=found.is_unedited)
    if is_transformers_model(model):
        entry = config_entry({**known, **origins})
        _set(model.config, IN_CONFIG, entry, back, remove=entry is None)


def _set_ours(layer: AttentionLayer, layout: HeadLayout, back: ExitStack) -> None:
    module = layer.module
    assert isinstance(module, MultiHeadAttention)
    options = {**vars(MultiHeadConfig.of(module)), **dict.fromkeys(("key_heads", "num_kv_heads")), **layout.to_dict()}
    built = MultiHeadConfig(**options).build(device="meta")
    _set(module, "layout", built.layout, back)
    _repack_projections(module)


def _repack_projections(module: MultiHeadAttention) -> None:
    """Projections that were replaced are laid side by side again, as after any move."""
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
