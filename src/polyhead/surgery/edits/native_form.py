"""Whether a native transformers class can hold the heads that edits leave, before a weight is touched."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadLayout
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.adapters.head_weights import pack_heads, read_heads
from polyhead.surgery.edits.applying import changed, edits_by_layer
from polyhead.surgery.edits.head_edits import HeadEdit, checked_edits
from polyhead.surgery.native.fitting import NativeFit, fit_edited
from polyhead.surgery.options import OTHER_FORMS


def fit_after(model: nn.Module, edits: Sequence[HeadEdit]) -> NativeFit:
    """Fit the native class to the heads that a transformers model would have after these edits."""
    layers = find_layers(model)
    layouts: dict[str, HeadLayout] = {}
    parameters: dict[str, Tensor] = {}
    for layer, layer_edits in edits_by_layer(layers, checked_edits(edits)):
        heads = changed(layer, read_heads(model, layer, device="meta"), layer_edits)
        layouts[layer.path] = heads.layout
        parameters |= pack_heads(model, layer, heads)
    return fit_edited(model, layers, layouts, parameters)


def check_form_after(model: nn.Module, edits: Sequence[HeadEdit], form: str) -> None:
    """Raise `OptionError` if the uniform form is requested and no native config describes the edited model."""
    if form == "uniform" and (rule := fit_after(model, edits).rule):
        raise OptionError(f"plain transformers must load the uniform form: {rule}; {OTHER_FORMS}")
