"""One attention layer as a value: its heads, the modules that hold them, and the sizes that these keep."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout, HeadOrigins
from polyhead.layers import MultiHeadAttention
from polyhead.observation.origins import origins_of
from polyhead.surgery.adapters.projection_formats import GROUP_SIZES, HEADS_WIDTHS, NUM_HEADS, NUM_KEY_HEADS, Source


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """One attention layer: its heads, and the modules that hold them, as paths from the model.

    Layers whose paths differ in numbers alone are one `stack`, and `number` counts them there. `refusals` say why the
    heads of this one cannot be edited; its layout is None then.
    """

    path: str
    stack: str
    number: int
    module: nn.Module
    layout: HeadLayout | None = None
    sources: tuple[Source, ...] = ()
    output: str = ""
    can_group: bool = True  # whether its code has room for fewer KV heads than heads
    reads_config: bool = False  # whether its code looks into the config for the number of its heads
    refusals: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return isinstance(self.module, MultiHeadAttention)

    @property
    def site(self) -> str:
        """The name under which its attention is observed."""
        return self.path or type(self.module).__name__


def choose_layer(layers: tuple[AttentionLayer, ...], number: int, stack: str | None) -> AttentionLayer:
    """The layer that an edit speaks of; refused where there is none, several, or one whose heads are not known."""
    if not layers:
        raise OptionError(
            "heads are edited in layers of polyhead.MultiHeadAttention and in models of transformers whose attention "
            "goes through its attention interface, got a model without either"
        )
    stacks = list(dict.fromkeys(layer.stack for layer in layers))
    editable = list(dict.fromkeys(layer.stack for layer in layers if not layer.refusals)) or stacks
    if stack is None and len(editable) > 1:
        raise OptionError(f"this model has several stacks of layers, say which: stack is one of {', '.join(editable)}")
    if stack is not None and stack not in stacks:
        raise OptionError(f"stack must be one of {', '.join(stacks)}, got {stack!r}")
    found = [layer for layer in layers if layer.stack == (editable[0] if stack is None else stack)]
    if number >= len(found):
        raise OptionError(f"{found[0].stack!r} has layers 0 to {len(found) - 1}, got layer {number}")
    layer = found[number]
    if layer.refusals:
        raise OptionError(
            f"the heads of {layer.path!r} ({type(layer.module).__name__}) cannot be edited: {'; '.join(layer.refusals)}"
        )
    return layer


def layer_origins(model: nn.Module, layer: AttentionLayer) -> HeadOrigins:
    """The original heads of a layer whose heads are known, edited or not."""
    assert layer.layout is not None
    count = layer.layout.num_heads
    return origins_of(model, layer.path, layer.module, count) or HeadOrigins.unedited(count)


def linear_axis(linear: nn.Module, *, outputs: bool) -> int:
    """The axis of a linear module's weight on which its outputs (or its inputs) lie; Conv1D has them swapped."""
    return int(is_conv1d(linear)) if outputs else 1 - int(is_conv1d(linear))


def is_conv1d(linear: nn.Module) -> bool:
    """Whether this is the linear layer of GPT-2, whose weight is the other way round."""
    return type(linear).__name__ == "Conv1D" and type(linear).__module__ == "transformers.pytorch_utils"


def sizes_of(layer: AttentionLayer, layout: HeadLayout) -> dict[str, int]:
    """The sizes that a module of transformers keeps, under the names it has, for heads of this layout."""
    values = dict.fromkeys(NUM_HEADS, layout.num_heads)
    values |= dict.fromkeys(NUM_KEY_HEADS, layout.num_kv_heads)
    values |= dict.fromkeys(GROUP_SIZES, layout.num_heads // layout.num_kv_heads)
    values |= dict.fromkeys(HEADS_WIDTHS, layout.num_heads * layout.head_dim)
    return {name: value for name, value in values.items() if name in vars(layer.module)}


def key_map_of(layer: AttentionLayer, layout: HeadLayout) -> tuple[int, ...] | None:
    """Which KV head each head reads, where a module of transformers cannot tell by its group size."""
    if layout.key_heads is not None:
        return layout.key_heads
    if layout.num_heads == layout.num_kv_heads or any(hasattr(layer.module, name) for name in GROUP_SIZES):
        return None
    return tuple(layout.key_head(head) for head in range(layout.num_heads))
