"""Where a model's heads live: for each attention layer, which rows and columns of which weights are head i's.

Found by structure, once, here and nowhere else. Everything in an attention module must be known: a parameter, a module
or an argument that may belong to single heads in a way we do not know (learned sinks, tables of relative positions,
gates) makes the layer one that is refused, by name, before a weight is touched.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from polyhead.geometry import HeadLayout, HeadOrigins
from polyhead.integrations.huggingface.attention import KEY_HEADS
from polyhead.layers import MultiHeadAttention
from polyhead.layers.positions import BiasesLogits
from polyhead.observation.transformers_models import asking_modules
from polyhead.surgery.adapters.attention_layer import AttentionLayer, is_conv1d, layer_origins, linear_axis, sizes_of
from polyhead.surgery.adapters.projection_formats import (
    ARGUMENTS,
    GROUP_SIZES,
    HEAD_WIDTHS,
    MODEL_WIDTHS,
    NORMS,
    NUM_HEADS,
    NUM_KEY_HEADS,
    PROJECTION_FORMATS,
    ProjectionFormat,
    Source,
    separate,
    size_of,
)


def find_layers(model: nn.Module) -> tuple[AttentionLayer, ...]:
    """Every attention layer of a model in the order of its modules, those that are refused included."""
    asking = {id(module) for module in asking_modules(model)}
    shared = {id(p) for p, n in Counter(p for _, p in model.named_parameters(remove_duplicate=False)).items() if n > 1}
    counts: Counter[str] = Counter()
    layers = []
    for path, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            looked = _inspect_polyhead(path, module)
        elif isinstance(module, nn.MultiheadAttention):
            looked = _refuse(
                "its heads must fill embed_dim, so that none can go; polyhead.MultiHeadAttention.from_torch(layer) "
                "is the same layer with heads that can be edited"
            )
        elif id(module) in asking:
            looked = _inspect_transformers(model, path, module)
        else:
            continue
        stack = ".".join("*" if part.isdecimal() else part for part in path.split("."))
        layer = AttentionLayer(path, stack, counts[stack], module, **looked)
        if not layer.refusals:
            layer = _checked(model, layer, shared)
        layers.append(layer)
        counts[stack] += 1
    return tuple(layers)


def head_origins(model: nn.Module) -> dict[str, HeadOrigins]:
    """The original heads that the heads of each layer are, by its path, for every layer whose heads are known.

    >>> from polyhead.surgery import PruneHeads, apply
    >>> layer = MultiHeadAttention(12, 4)
    >>> record = apply(layer, [PruneHeads(0, (1,))])
    >>> head_origins(layer)[""]
    HeadOrigins(heads=((0,), (2,), (3,)), total=4)
    """
    return {layer.path: layer_origins(model, layer) for layer in find_layers(model) if layer.layout is not None}


def _refuse(*reasons: str) -> dict[str, Any]:
    return {"refusals": reasons}


def _inspect_polyhead(path: str, layer: MultiHeadAttention) -> dict[str, Any]:
    by_head = {
        "a combine module between heads and output": layer.combine,
        "a gate_proj by head": layer.gate_proj,
        "sinks, a parameter by head": layer.sinks,
        "a head_gate; fold it into out_proj or take it away first": layer.head_gate,
        "positions that give every head a bias of its own": (
            layer.positions if isinstance(layer.positions, BiasesLogits) else None
        ),
    }
    reasons = [f"it has {what}" for what, found in by_head.items() if found is not None]
    if type(layer) is not MultiHeadAttention:
        reasons.append(f"{type(layer).__name__} arranges its heads in a way of its own")
    reasons += _not_plain({name: getattr(layer, name) for name in ("q_proj", "k_proj", "v_proj", "out_proj")})
    if reasons:
        return _refuse(*reasons)
    sources = separate("q_proj", "k_proj", "v_proj")
    return {"layout": layer.layout, "sources": _under(path, sources), "output": _join(path, "out_proj")}


def _inspect_transformers(model: nn.Module, path: str, module: nn.Module) -> dict[str, Any]:
    found = _find_format(model, path, module)
    if found is None:
        names = ", ".join(name for name, _ in module.named_children())
        return _refuse(f"its projections have no names and order that we know, among {names}")
    form, output = found
    linears = {source.path: module.get_submodule(source.path) for source in form.sources}
    reasons = _not_plain({**linears, output: model.get_submodule(output)})
    widths = [getattr(module, name) for name in HEAD_WIDTHS if isinstance(getattr(module, name, None), int)]
    if not widths:
        reasons.append(f"it does not say how wide a head is under any of {', '.join(HEAD_WIDTHS)}")
    if reasons:
        return _refuse(*reasons)
    layout = _layout(module, form, linears, model.get_submodule(output), widths[0])
    if isinstance(layout, str):
        return _refuse(layout)
    reasons = list(_unknown(module, {*linears, output.removeprefix(f"{path}.")}, layout))
    if reasons:
        return _refuse(*reasons)
    counts = set(inspect.unwrap(type(module).forward).__code__.co_names) & {*NUM_HEADS, *NUM_KEY_HEADS}
    return {
        "layout": layout,
        "sources": _under(path, form.sources),
        "output": output,
        "can_group": not form.equal and (any(hasattr(module, name) for name in GROUP_SIZES) or not counts),
        "reads_config": any(name not in vars(module) for name in counts),
    }


def _find_format(model: nn.Module, path: str, module: nn.Module) -> tuple[ProjectionFormat, str] | None:
    """The form whose modules are there, and where its output projection lies."""
    family = type(module).__module__.split(".")[-2] if "." in type(module).__module__ else ""
    there = dict(module.named_children())
    for form in PROJECTION_FORMATS:
        if form.families and family not in form.families:
            continue
        if not all(source.path in there for source in form.sources):
            continue
        for name in form.outputs:
            # "^" is the module around this one: BERT keeps the output projection beside its attention.
            around = path.rpartition(".")[0]
            output = _join(around, name.removeprefix("^.")) if name.startswith("^") else _join(path, name)
            try:
                model.get_submodule(output)
            except AttributeError:
                continue
            return form, output
    return None


def _not_plain(linears: dict[str, nn.Module]) -> list[str]:
    """Adapters, quantised layers, parametrisations: what is more than a weight and a bias."""
    return [
        f"{name} is a {type(linear).__name__}, and heads are cut out of plain linear layers; merge adapters and undo "
        "quantisation first"
        for name, linear in linears.items()
        if not (type(linear) is nn.Linear or is_conv1d(linear))
        or {name for name, _ in linear.named_parameters()} - {"weight", "bias"}
    ]


def _layout(
    module: nn.Module, form: ProjectionFormat, linears: dict[str, nn.Module], output: nn.Module, head_dim: int
) -> HeadLayout | str:
    """The layout that the shapes of the projections have in common, or why there is none."""

    def size(linear: nn.Module, *, outputs: bool) -> int:
        weight: Tensor = linear.get_parameter("weight")
        return weight.shape[linear_axis(linear, outputs=outputs)]

    wide, width = size(output, outputs=False), size(output, outputs=True)
    heads, rest = divmod(wide, head_dim)
    made = {source.path: size(linears[source.path], outputs=True) for source in form.sources}
    key_heads = getattr(module, KEY_HEADS, None)
    groups = getattr(module, "num_key_value_groups", 1)
    kv_heads = max(key_heads) + 1 if key_heads is not None else heads // groups
    taken = {source.holds[0]: size(linears[source.path], outputs=False) for source in form.sources}
    first = taken["query"]
    key_input = taken.get("key", first)
    if rest or not heads or kv_heads < 1 or first != width:
        return (
            f"its output projection has {wide} inputs and {width} outputs, which are not heads of {head_dim} channels"
        )
    try:
        layout = HeadLayout(
            width, heads, kv_heads, head_dim, head_dim, key_input, taken.get("value", key_input), key_heads=key_heads
        )
    except ValueError as error:
        return str(error)
    for source in form.sources:
        expected = sum(heads * dim for heads, dim in (size_of(part, layout) for part in source.holds))
        if made[source.path] != expected:
            return (
                f"{source.path} makes {made[source.path]} channels, and {heads} heads over {kv_heads} KV heads of "
                f"{head_dim} channels would need {expected}"
            )
    return layout


def _unknown(module: nn.Module, known: set[str], layout: HeadLayout) -> Iterator[str]:
    """Whatever of a module is not known to be the same for every head."""
    for name, child in module.named_children():
        if name in known or isinstance(child, nn.Dropout | nn.Identity) or "rotary" in name:
            continue
        alone = not any(child.children())  # StableLM has a list of norms, one a head
        if name in NORMS and alone and {tuple(p.shape) for p in child.parameters()} == {(layout.head_dim,)}:
            continue
        shapes = {key: list(p.shape) for key, p in child.named_parameters(name)} or type(child).__name__
        yield f"it has {name} ({shapes}), of which we do not know what belongs to which head"
    for name, held in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield f"it has {name} of shape {list(held.shape)}, of which we do not know what belongs to which head"
    forward = inspect.unwrap(type(module).forward)
    given = set(inspect.signature(forward).parameters) - ARGUMENTS
    if given:
        yield f"it is given {', '.join(sorted(given))}, which may be by head"
    read = set(forward.__code__.co_names) & MODEL_WIDTHS
    if read:
        yield f"it shapes its heads by {', '.join(sorted(read))}, the width of the model"


def _checked(model: nn.Module, layer: AttentionLayer, shared: set[int]) -> AttentionLayer:
    """The layer, or one that is refused: for parameters tied to others, for sizes that mean something else."""
    held = {path: model.get_submodule(path) for path in (*(source.path for source in layer.sources), layer.output)}
    tied = [f"{path}.{name}" for path, x in held.items() for name, p in x.named_parameters() if id(p) in shared]
    reasons = [f"{', '.join(tied)} is shared with another module"] if tied else []
    if not layer.is_ours:
        assert layer.layout is not None
        there = vars(layer.module)
        reasons += [
            f"its {name} is {there[name]}, and {value} was expected of its projections"
            for name, value in sizes_of(layer, layer.layout).items()
            if there[name] != value
        ]
    if not reasons:
        return layer
    return AttentionLayer(layer.path, layer.stack, layer.number, layer.module, refusals=tuple(reasons))


def _under(path: str, sources: tuple[Source, ...]) -> tuple[Source, ...]:
    return tuple(Source(_join(path, source.path), source.holds, source.by_head) for source in sources)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
