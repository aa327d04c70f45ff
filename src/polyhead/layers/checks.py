"""Validation of layer options and inputs, with messages a user can act on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyhead.errors import CheckpointError, DeviceError, DtypeError, OptionError, ShapeError
from polyhead.geometry import HeadLayout, checked_integer
from polyhead.ops.attention import BACKENDS, Statistics
from polyhead.ops.common.statistics import as_statistics


def check_size(name: str, size: int | None) -> None:
    """Check an optional size; None means the layer's default."""
    if size is not None:
        checked_integer(name, size, at_least=1)


def layout_of(embed_dim: int, num_heads: int, options: Mapping[str, Any]) -> HeadLayout:
    """Return the head layout described by a layer's options; a size of None takes `HeadLayout`'s default."""
    # The optional sizes, after embed_dim and num_heads; 0 means the default.
    names = [field.name for field in fields(HeadLayout) if field.name != "key_heads"][2:]
    for name in names:
        check_size(name, options.get(name))
    sizes = {name: options.get(name) or 0 for name in names}
    return HeadLayout(embed_dim, num_heads, **sizes, key_heads=options.get("key_heads"))


def check_rate(name: str, rate: float) -> None:
    if not _is_number(rate) or not 0.0 <= rate < 1.0:
        raise OptionError(f"{name} must be at least 0 and less than 1, got {rate!r}")


def check_positive(name: str, number: float | None) -> None:
    if number is not None and not (_is_number(number) and 0 < number < math.inf):
        raise OptionError(f"{name} must be positive and finite, got {number!r}")


def check_finite(name: str, number: float | None) -> None:
    if number is not None and not (_is_number(number) and math.isfinite(number)):
        raise OptionError(f"{name} must be a finite number, got {number!r}")


def check_options(*, dropout: float, softcap: float | None, scale: float | None, backend: str) -> None:
    """Check the options that all layers and their configs have."""
    check_rate("dropout", dropout)
    check_positive("softcap", softcap)
    check_finite("scale", scale)
    check_backend(backend)


def check_one_of(name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    if not (value is None or isinstance(value, str)) or value not in choices:
        *others, last = map(repr, choices)
        raise OptionError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def check_backend(backend: str) -> None:
    check_one_of("backend", backend, ("auto", *BACKENDS))


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise DtypeError(f"dtype of a layer must be floating point, got {dtype!r}")


def check_input(name: str, x: Tensor, width: int, projection: nn.Module) -> None:
    """Check that x is [batch, sequence, width] in the projection's dtype and on its device."""
    if not isinstance(x, Tensor):
        raise DtypeError(f"{name} must be a tensor [batch, sequence, {width}], got {type(x).__name__}")
    if x.ndim != 3 or x.shape[2] != width:
        raise ShapeError(f"{name} must be [batch, sequence, {width}], got shape {list(x.shape)}")
    if not x.is_floating_point():
        raise DtypeError(f"{name} must be floating point, got {x.dtype}; embed tokens before attention")
    if type(projection) is not nn.Linear:
        return  # an adapter or a quantised module has its own requirements
    weight = projection.weight
    if x.device != weight.device:
        raise DeviceError(f"{name} must be on the device of the layer, got {x.device} and {weight.device}")
    if x.dtype is not weight.dtype and not torch._C._is_any_autocast_enabled():
        raise DtypeError(
            f"{name} must have the dtype of the layer, got {x.dtype} and {weight.dtype}; "
            f"cast one of them, or use torch.autocast"
        )


def check_padded(subject: str, name: str, x: Tensor, width: int, projection: nn.Module) -> None:
    """Check an input as `check_input` does, and that it is not nested.

    `subject` begins the error message, with its verb: "latent attention takes".
    """
    check_input(name, x, width, projection)
    if x.is_nested:
        raise OptionError(f"{subject} padded sequences, got a nested {name}; pad it and use Mask.lengths")


def resolve_statistics(requested: object, *, cross: bool) -> Statistics | None:
    """Return the requested row statistics; None if there are none.

    With `cross` (cross-attention), those that compare positions are left out, or refused if requested by name.
    """
    statistics = as_statistics(requested)
    if statistics is None or statistics.cross or not cross:
        return statistics
    return Statistics(*statistics.names, sink_keys=statistics.sink_keys, window=statistics.window, cross=True)


def check_memory(key: Tensor, value: Tensor, batch: int, layout: HeadLayout) -> None:
    """Check that projected keys and values have the layer's KV heads and the query's batch size."""
    for name, tensor, dim in (("keys", key, layout.head_dim), ("values", value, layout.value_dim)):
        heads = (tensor.shape[1], tensor.shape[3])
        if heads != (layout.num_kv_heads, dim):
            raise ShapeError(
                f"a memory must come from a layer with the same KV heads: {name} of {layout.num_kv_heads} heads of "
                f"{dim}, got {heads[0]} heads of {heads[1]}"
            )
        if tensor.shape[0] != batch:
            raise ShapeError(f"query and memory must have the same batch size, got {batch} and {tensor.shape[0]}")


class AnyLayout(Protocol):
    """Head layout of any attention layer."""

    def to_dict(self) -> dict[str, Any]: ...


def layout_integers(layout: AnyLayout) -> dict[str, int]:
    """Return a layout as named integers, as stored in checkpoints; a tuple has one integer per entry."""
    numbers: dict[str, int] = {}
    for name, size in layout.to_dict().items():
        numbers |= {name: size} if isinstance(size, int) else {f"{name}[{i}]": x for i, x in enumerate(size)}
    return numbers


def check_saved_layout(state: Any, layout: AnyLayout) -> None:
    """Raise CheckpointError unless the layout in a checkpoint, the layer's extra state, is that of the layer."""
    expected = layout_integers(layout)
    if not isinstance(state, Tensor) or state.shape != (len(expected),):
        raise CheckpointError(
            f"a layer's extra state must be its head layout, {len(expected)} integers; got {type(state).__name__}"
            + (f" of shape {list(state.shape)}" if isinstance(state, Tensor) else "")
        )
    saved = dict(zip(expected, state.tolist(), strict=True))
    different = [name for name in expected if saved[name] != expected[name]]
    if different:
        differences = ", ".join(f"{name} {saved[name]} where the layer has {expected[name]}" for name in different)
        raise CheckpointError(f"the checkpoint was saved by a layer with a different head layout: it has {differences}")


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
