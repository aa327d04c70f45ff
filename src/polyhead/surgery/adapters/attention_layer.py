"""An attention layer as a value: its head layout, projection modules and size attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout, HeadOrigins
from polyhead.layers import MultiHeadAttention
from polyhead.observation.origins import origins_of
from polyhead.surgery.adapters.projection_formats import GROUP_SIZES, HEADS_WIDTHS, NUM_HEADS, NUM_KEY_HEADS, Source

TRACED = "polyhead_traced"  # attribute of a module whose projections were traced

# Sizes of a layout that a module may keep in an attribute.
SIZES: Mapping[str, Callable[[HeadLayout], int]] = {
    "heads": lambda layout: layout.num_heads,
    "kv_heads": lambda layout: layout.num_kv_heads,
    "group_size": lambda layout: layout.num_heads // layout.num_kv_heads,
    "width": lambda layout: layout.num_heads * layout.head_dim,
    "kv_width": lambda layout: layout.num_kv_heads * layout.head_dim,
}


@dataclass(frozen=True, slots=True, eq=False)
class TracedHeads:
    """Projections of a module, found by `trace_layers`; paths are those of `relative_path`."""

    sources: tuple[Source, ...]
    output: str
    head_dim: int
    value_dim: int
    sizes: Mapping[str, str] = field(default_factory=dict)  # names in `SIZES`, by attribute of the module
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """An attention layer: its head layout and its projection modules, as paths from the model.

    Layers whose paths differ only in numbers form one `stack`, and `number` is the index within it. `refusals` are the
    reasons why the heads of this layer cannot be edited; `layout` is None then.
    """

    path: str
    stack: str
    number: int
    module: nn.Module
    layout: HeadLayout | None = None
    sources: tuple[Source, ...] = ()
    output: str = ""
    can_group: bool = True  # whether its forward supports fewer KV heads than heads
    reads_config: bool = False  # whether its forward reads the number of heads from the config
    refusals: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return isinstance(self.module, MultiHeadAttention)

    @property
    def traced(self) -> TracedHeads | None:
        """Projections that `trace_layers` has found; None for a layer that is known by its names."""
        return vars(self.module).get(TRACED)

    @property
    def site(self) -> str:
        """Name under which this layer's attention is observed."""
        return self.path or type(self.module).__name__


def choose_layer(layers: tuple[AttentionLayer, ...], number: int, stack: str | None) -> AttentionLayer:
    """Return the layer an edit refers to; raises if it is missing, ambiguous or not editable."""
    if not layers:
        raise OptionError(
            "heads can be edited in polyhead.MultiHeadAttention layers, in transformers models that use its attention "
            "interface, and in layers that polyhead.surgery.trace_layers has found, got a model without any"
        )
    stacks = list(dict.fromkeys(layer.stack for layer in layers))
    editable = list(dict.fromkeys(layer.stack for layer in layers if not layer.refusals)) or stacks
    if stack is None and len(editable) > 1:
        raise OptionError(f"this model has several stacks of layers, pass stack as one of {', '.join(editable)}")
    if stack is not None and stack not in stacks:
        raise OptionError(f"stack must be one of {', '.join(stacks)}, got {stack!r}")
    stack_layers = [layer for layer in layers if layer.stack == (editable[0] if stack is None else stack)]
    if number >= len(stack_layers):
        raise OptionError(f"{stack_layers[0].stack!r} has layers 0 to {len(stack_layers) - 1}, got layer {number}")
    layer = stack_layers[number]
    if layer.refusals:
        raise OptionError(
            f"the heads of {layer.path!r} ({type(layer.module).__name__}) cannot be edited: {'; '.join(layer.refusals)}"
        )
    if any(hasattr(parameter, "device_mesh") for parameter in layer.module.parameters()):
        raise OptionError(
            f"heads are edited in whole weights, got sharded ones in {layer.path!r}; edit the model before fully_shard "
            "or parallelize_module, with the full state dict of the sharded one"
        )
    return layer


def layer_origins(model: nn.Module, layer: AttentionLayer) -> HeadOrigins:
    """Return the original heads of a layer with a known layout, edited or not."""
    assert layer.layout is not None
    count = layer.layout.num_heads
    return origins_of(model, layer.path, layer.module, count) or HeadOrigins.unedited(count)


def relative_path(path: str, name: str) -> str:
    """Return the path of a module from another; "^" is the module around it. Inverse of `absolute_path`."""
    prefix, around = (f"{x}." if x else "" for x in (path, path.rpartition(".")[0]))
    return name.removeprefix(prefix) if name.startswith(prefix) else f"^.{name.removeprefix(around)}"


def absolute_path(path: str, name: str) -> str:
    """Return the path of a module from the model, given its path from the module at `path`."""
    if name.startswith("^."):
        path, name = path.rpartition(".")[0], name.removeprefix("^.")
    return f"{path}.{name}" if path else name


def modules_around(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the modules that contain the one at a path, the innermost first and the model last."""
    parts = path.split(".")
    for length in reversed(range(len(parts))):
        yield model.get_submodule(".".join(parts[:length]))


def linear_axis(linear: nn.Module, *, outputs: bool) -> int:
    """Return the axis of a linear module's weight that indexes its outputs (or inputs).

    Conv1D has them swapped.
    """
    return int(is_conv1d(linear)) if outputs else 1 - int(is_conv1d(linear))


def is_conv1d(linear: nn.Module) -> bool:
    """Return whether this is GPT-2's `Conv1D`, whose weight is the transpose of `nn.Linear`'s."""
    return type(linear).__name__ == "Conv1D" and type(linear).__module__ == "transformers.pytorch_utils"


def sizes_of(layer: AttentionLayer, layout: HeadLayout) -> dict[str, int]:
    """Return the size attributes that a transformers module has, by name, for this layout."""
    if layer.traced is not None:
        return {name: SIZES[size](layout) for name, size in layer.traced.sizes.items()}
    values = dict.fromkeys(NUM_HEADS, layout.num_heads)
    values |= dict.fromkeys(NUM_KEY_HEADS, layout.num_kv_heads)
    values |= dict.fromkeys(GROUP_SIZES, layout.num_heads // layout.num_kv_heads)
    values |= dict.fromkeys(HEADS_WIDTHS, layout.num_heads * layout.head_dim)
    return {name: value for name, value in values.items() if name in vars(layer.module)}


def key_map_of(layer: AttentionLayer, layout: HeadLayout) -> tuple[int, ...] | None:
    """Return each query head's KV head, or None if a transformers module derives it from its group size."""
    if layout.key_heads is not None:
        return layout.key_heads
    is_even = layer.traced is not None or layout.num_heads == layout.num_kv_heads
    if is_even or any(hasattr(layer.module, name) for name in GROUP_SIZES):
        return None
    return tuple(layout.key_head(head) for head in range(layout.num_heads))
