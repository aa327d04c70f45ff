"""Find a model's attention layers and which rows and columns of which weights belong to head i.

Layers are recognised by structure, in this module only. Everything in an attention module must be accounted for: a
parameter, submodule or argument that may be per-head in an unknown way (learned sinks, relative position tables,
gates) makes the layer non-editable, with the reason, before any weight is changed.
"""

from __future__ import annotations

import dis
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from polyhead.geometry import HeadLayout, HeadOrigins
from polyhead.integrations.huggingface.attention import KEY_HEADS
from polyhead.layers import MultiHeadAttention
from polyhead.layers.multi_head.projected import ProjectedHeads
from polyhead.layers.positions import BiasesLogits
from polyhead.observation.session_limits import stack_of
from polyhead.observation.transformers_models import interface_modules
from polyhead.surgery.adapters.attention_layer import (
    TRACED,
    AttentionLayer,
    TracedHeads,
    absolute_path,
    is_conv1d,
    key_map_of,
    layer_origins,
    linear_axis,
    modules_around,
    sizes_of,
)
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
    """Return every attention layer of a model in module order, including those that cannot be edited.

    Args:
        model: a transformers model, or a module with layers of polyhead, or after `trace_layers` any model.

    >>> import torch, polyhead
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> from polyhead.surgery import find_layers
    >>> for layer in find_layers(model):
    ...     print(layer.path, layer.layout.num_heads, layer.layout.num_kv_heads)
    model.layers.0.self_attn 4 4
    model.layers.1.self_attn 4 4
    """
    attention_modules = {id(module) for module in interface_modules(model)}
    shared = {id(p) for p, n in Counter(p for _, p in model.named_parameters(remove_duplicate=False)).items() if n > 1}
    counts: Counter[str] = Counter()
    layers = []
    for path, module in model.named_modules():
        if isinstance(module, ProjectedHeads):
            fields = _inspect_polyhead(path, module)
        elif isinstance(module, nn.MultiheadAttention):
            fields = _refuse(
                "its heads must fill embed_dim, so none can be removed; polyhead.MultiHeadAttention.from_torch(layer) "
                "is the same layer with editable heads"
            )
        elif id(module) in attention_modules:
            fields = _inspect_transformers(model, path, module)
        elif TRACED in vars(module):
            fields = _inspect_traced(model, path, vars(module)[TRACED])
        else:
            continue
        stack = stack_of(path)
        layer = AttentionLayer(path, stack, counts[stack], module, **fields)
        if not layer.refusals:
            layer = _checked(model, layer, shared)
        layers.append(layer)
        counts[stack] += 1
    return tuple(layers)


def head_origins(model: nn.Module) -> dict[str, HeadOrigins]:
    """Return, by layer path, the original heads of every layer with a known layout.

    Args:
        model: the model, edited or not.

    >>> from polyhead.surgery import PruneHeads, apply
    >>> layer = MultiHeadAttention(12, 4)
    >>> record = apply(layer, [PruneHeads(0, (1,))])
    >>> head_origins(layer)[""]
    HeadOrigins(heads=((0,), (2,), (3,)), total=4)
    """
    return {layer.path: layer_origins(model, layer) for layer in find_layers(model) if layer.layout is not None}


def has_key_maps(model: nn.Module) -> bool:
    """Return whether heads of some layer read their KV heads by a map, which only polyhead's attention supports."""
    return any(key_map_of(layer, layer.layout) for layer in find_layers(model) if layer.layout is not None)


def _refuse(*reasons: str) -> dict[str, Any]:
    return {"refusals": reasons}


def _inspect_polyhead(path: str, layer: ProjectedHeads) -> dict[str, Any]:
    per_head_parts = {
        "a combine module between heads and output": layer.combine,
        "a per-head gate_proj": layer.gate_proj,
        "sinks, a per-head parameter": layer.sinks,
        "a head_gate; fold it into out_proj or remove it first": layer.head_gate,
        "positions with a per-head bias": (layer.positions if isinstance(layer.positions, BiasesLogits) else None),
    }
    if layer.is_head_parallel:
        return _refuse("its heads are distributed over ranks; edit heads before the model is distributed")
    reasons = [f"it has {what}" for what, part in per_head_parts.items() if part is not None]
    if type(layer) is not MultiHeadAttention:
        reasons.append(f"{type(layer).__name__} is a variant with its own head layout")
    reasons += _not_plain({name: getattr(layer, name) for name in ("q_proj", "k_proj", "v_proj", "out_proj")})
    if reasons:
        return _refuse(*reasons)
    sources = separate("q_proj", "k_proj", "v_proj")
    return {"layout": layer.layout, "sources": _under(path, sources), "output": absolute_path(path, "out_proj")}


def _inspect_transformers(model: nn.Module, path: str, module: nn.Module) -> dict[str, Any]:
    match = _find_format(model, path, module)
    if match is None:
        names = ", ".join(name for name, _ in module.named_children())
        return _refuse(f"its projections have no known names and order, among {names}")
    fmt, output = match
    linears = {source.path: module.get_submodule(source.path) for source in fmt.sources}
    reasons = _not_plain({**linears, output: model.get_submodule(output)})
    widths = [getattr(module, name) for name in HEAD_WIDTHS if isinstance(getattr(module, name, None), int)]
    if not widths:
        reasons.append(f"it has no head width under any of the names {', '.join(HEAD_WIDTHS)}")
    if reasons:
        return _refuse(*reasons)
    layout = _layout(module, fmt, linears, model.get_submodule(output), widths[0])
    if isinstance(layout, str):
        return _refuse(layout)
    reasons = list(_unknown(module, {*linears, output.removeprefix(f"{path}.")}, layout))
    if reasons:
        return _refuse(*reasons)
    counts = _head_counts_of(type(module))
    around = list(modules_around(model, path))
    biases = [name for x in reversed(around) for name, child in x.named_children() if "position_bias" in name]
    if biases:
        return _refuse(f"a module around it has {biases[0]}, which may be per head in an unknown way")
    return {
        "layout": layout,
        "sources": _under(path, fmt.sources),
        "output": output,
        "can_group": not fmt.equal and (any(hasattr(module, name) for name in GROUP_SIZES) or not counts),
        "reads_config": any(name not in vars(module) for name in counts)
        or any(_head_counts_of(type(x)) for x in around),  # such as one that builds masks
    }


def _head_counts_of(kind: type[nn.Module]) -> set[str]:
    """Return the names of numbers of heads that a module's forward reads."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return set() if code is None else {*code.co_names} & {*NUM_HEADS, *NUM_KEY_HEADS}


def _inspect_traced(model: nn.Module, path: str, traced: TracedHeads) -> dict[str, Any]:
    """Return the layout that the shapes of traced projections imply now, after the last edit."""
    if len(traced.refusals):
        return _refuse(*traced.refusals)
    sources, output = _under(path, traced.sources), absolute_path(path, traced.output)
    linears = {name: model.get_submodule(name) for name in (*(source.path for source in sources), output)}
    if reasons := _not_plain(linears):
        return _refuse(*reasons)
    source_of = {part: source for source in sources for part in source.holds}
    heads, fused = _size(linears[output], outputs=False) // traced.value_dim, source_of["key"]
    dims = {"key": traced.head_dim, "value": traced.value_dim}
    rows = _size(linears[fused.path], outputs=True) - ("query" in fused.holds) * heads * traced.head_dim
    layout = HeadLayout(
        _size(linears[output], outputs=True),
        heads,
        rows // sum(dims[part] for part in fused.holds if part in dims),
        traced.head_dim,
        traced.value_dim,
        _size(linears[fused.path], outputs=False),
        _size(linears[source_of["value"].path], outputs=False),
    )
    return {"layout": layout, "sources": sources, "output": output}


def _find_format(model: nn.Module, path: str, module: nn.Module) -> tuple[ProjectionFormat, str] | None:
    """Return the projection format that matches a module, and the path of its output projection."""
    family = type(module).__module__.split(".")[-2] if "." in type(module).__module__ else ""
    children = dict(module.named_children())
    for fmt in PROJECTION_FORMATS:
        if fmt.families and family not in fmt.families:
            continue
        if not all(source.path in children for source in fmt.sources):
            continue
        for name in fmt.outputs:
            output = absolute_path(path, name)  # BERT's output projection is a sibling of its attention
            try:
                model.get_submodule(output)
            except AttributeError:
                continue
            return fmt, output
    return None


def _size(linear: nn.Module, *, outputs: bool) -> int:
    """Return the number of outputs (or inputs) of a linear module."""
    return linear.get_parameter("weight").shape[linear_axis(linear, outputs=outputs)]


def _not_plain(linears: dict[str, nn.Module]) -> list[str]:
    """Return a reason for each projection that is not a plain linear layer: adapters, quantisation, ..."""
    return [
        f"{name} is a {type(linear).__module__}.{type(linear).__qualname__}, and heads can only be edited in plain "
        "linear layers; merge adapters and undo quantisation first"
        for name, linear in linears.items()
        if not (type(linear) is nn.Linear or is_conv1d(linear))
        or {name for name, _ in linear.named_parameters()} - {"weight", "bias"}
    ]


def _layout(
    module: nn.Module, fmt: ProjectionFormat, linears: dict[str, nn.Module], output: nn.Module, head_dim: int
) -> HeadLayout | str:
    """Return the head layout implied by the shapes of the projections, or the reason why there is none."""
    output_inputs, width = _size(output, outputs=False), _size(output, outputs=True)
    heads, rest = divmod(output_inputs, head_dim)
    out_sizes = {source.path: _size(linears[source.path], outputs=True) for source in fmt.sources}
    key_heads = getattr(module, KEY_HEADS, None)
    groups = getattr(module, "num_key_value_groups", 1)
    if key_heads is None and groups < 1:  # of a config with fewer heads than KV heads
        return f"its num_key_value_groups is {groups}"
    kv_heads = max(key_heads) + 1 if key_heads is not None else heads // groups
    in_sizes = {source.holds[0]: _size(linears[source.path], outputs=False) for source in fmt.sources}
    query_input = in_sizes["query"]
    key_input = in_sizes.get("key", query_input)
    if rest or not heads or kv_heads < 1 or query_input != width:
        return (
            f"its output projection has {output_inputs} inputs and {width} outputs, which do not split into heads of "
            f"{head_dim} channels"
        )
    try:
        layout = HeadLayout(
            width, heads, kv_heads, head_dim, head_dim, key_input, in_sizes.get("value", key_input), key_heads=key_heads
        )
    except ValueError as error:
        return str(error)
    for source in fmt.sources:
        expected = sum(heads * dim for heads, dim in (size_of(part, layout) for part in source.holds))
        if out_sizes[source.path] != expected:
            return (
                f"{source.path} has {out_sizes[source.path]} output channels, but {heads} heads over {kv_heads} KV "
                f"heads of {head_dim} channels need {expected}"
            )
    return layout


def _unknown(module: nn.Module, known: set[str], layout: HeadLayout) -> Iterator[str]:
    """Yield a reason for each part of a module that is not known to be the same for every head."""
    for name, child in module.named_children():
        if name in known or isinstance(child, nn.Dropout | nn.Identity) or "rotary" in name:
            continue
        is_leaf = not any(child.children())  # StableLM has a list of norms, one per head
        if name in NORMS and is_leaf and {tuple(p.shape) for p in child.parameters()} == {(layout.head_dim,)}:
            continue
        shapes = {key: list(p.shape) for key, p in child.named_parameters(name)} or type(child).__name__
        yield f"it has {name} ({shapes}), which may be per head in an unknown way"
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield f"it has {name} of shape {list(tensor.shape)}, which may be per head in an unknown way"
    arguments, names = _used_by(inspect.unwrap(type(module).forward))
    if arguments - ARGUMENTS:
        yield f"its forward takes {', '.join(sorted(arguments - ARGUMENTS))}, which may be per head"
    if read := names & MODEL_WIDTHS:
        yield f"it shapes its heads by {', '.join(sorted(read))}, which is the model width"


@lru_cache(maxsize=256)  # all layers of a kind have one forward, and every edit looks for the layers again
def _used_by(forward: FunctionType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the arguments of a function, and the names and local variables that it reads."""
    code = forward.__code__
    return frozenset(inspect.signature(forward).parameters), frozenset((*code.co_names, *_locals_read(code)))


def _locals_read(code: CodeType) -> Iterator[str]:
    """Yield the local variables that code reads; it may unpack a shape of which it needs only a part."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_FAST"):
            yield from instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def _checked(model: nn.Module, layer: AttentionLayer, shared: set[int]) -> AttentionLayer:
    """Return the layer, made non-editable if its parameters are tied or its size attributes disagree."""
    projections = {
        path: model.get_submodule(path) for path in (*(source.path for source in layer.sources), layer.output)
    }
    tied = [f"{path}.{name}" for path, x in projections.items() for name, p in x.named_parameters() if id(p) in shared]
    reasons = [f"{', '.join(tied)} is shared with another module"] if tied else []
    if not layer.is_ours:
        assert layer.layout is not None
        attributes = vars(layer.module)
        reasons += [
            f"its {name} is {attributes[name]}, but its projections imply {value}"
            for name, value in sizes_of(layer, layer.layout).items()
            if attributes[name] != value
        ]
    if not reasons:
        return layer
    return AttentionLayer(layer.path, layer.stack, layer.number, layer.module, refusals=tuple(reasons))


def _under(path: str, sources: tuple[Source, ...]) -> tuple[Source, ...]:
    return tuple(replace(source, path=absolute_path(path, source.path)) for source in sources)
