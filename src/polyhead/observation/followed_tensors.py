"""Follow hand-written attention through tensors: logits, their softmax, and the weights on their way to the values.

Nothing is kept of a tensor but a weak reference, apart from the logits of a softmax, which its weights keep.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyhead.observation.attention_calls import RunningModule
from polyhead.observation.matrix_products import MATRIX_PRODUCTS, VIEWS, MatrixProduct, MovedAxis, moved_axes

if TYPE_CHECKING:
    from polyhead.observation.materialised_calls import MaterialisedCall

SOFTMAX = ("softmax", "_softmax")
# Functions that leave weights as they are; dropout counts as one, since statistics are of the weights before it.
_SAME = (
    "dropout", "dropout_", "native_dropout", "to", "type", "type_as", "float", "half", "bfloat16", "double",
    "contiguous", "clone", "detach", "nan_to_num", "nan_to_num_", "requires_grad_", "cpu", "cuda", "alias", "_to_copy",
)  # fmt: skip
_PRODUCTS_BY_ELEMENT = (
    "mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__", "__itruediv__",
)  # fmt: skip
_FILLS = ("masked_fill", "masked_fill_")
# Functions through which logits remain products of queries and keys.
_LOGITS = (
    *_SAME, *_PRODUCTS_BY_ELEMENT, *_FILLS, "add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__",
    "__rsub__", "__isub__", "rsub", "true_divide", "neg", "where", "clamp", "clamp_", "clip",
    "clamp_min", "maximum", "minimum", "tanh", "cat", "concat", "__setitem__", "tril", "addcmul",
    "clamp_max", "max", "min",
)  # fmt: skip
# Functions whose results are features, whatever they are computed from.
_LAYERS = (
    "linear", "layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm", "conv1d", "conv2d", "conv3d",
)  # fmt: skip
_READS = (
    "__get__", "size", "dim", "stride", "numel", "is_floating_point", "is_contiguous", "data_ptr", "element_size",
    "ndimension", "__len__", "is_complex", "get_device", "storage_offset", "__repr__", "__hash__", "register_hook",
    "retain_grad", "requires_grad_",
)  # fmt: skip


@cache
def name_of(function: Any) -> str:
    """Return the name of a function or operator, without its overload."""
    name = str(getattr(function, "__name__", ""))
    if isinstance(function, torch._ops.OpOverload):
        name = function._schema.name.partition("::")[2]
    if name == "__get__":  # of a property, such as `x.mT`
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        return attribute if attribute in VIEWS else name
    return name


FOLLOWED = frozenset((*SOFTMAX, *MATRIX_PRODUCTS, *VIEWS, "stack", "cat", "concat", "concatenate"))
CARRYING = frozenset((*FOLLOWED, *_LOGITS))


@dataclass(slots=True, eq=False)
class Scores:
    """Logits that come from products of queries and keys."""

    products: tuple[MatrixProduct, ...]
    has_leading_axes: bool = True  # the last two axes are those of the product, the others were only split or merged


@dataclass(slots=True, eq=False)
class Softmax:
    """One softmax: its input, and what was done with its result."""

    logits: Tensor
    version: int | None
    scores: Scores | None
    running: RunningModule  # the module that computed it
    reason: str = ""  # why it cannot be read; empty if it can
    # What its products with values were read as; None for one that is not observed.
    products: list[MaterialisedCall | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of a softmax, in any shape."""

    softmax: Softmax
    axis: int  # of the keys
    views: tuple[Callable[[Tensor], Tensor], ...] = ()  # which take the logits to this shape
    sink: int | None = None  # index of the view that cut off the last column, the learned sinks
    reason: str = ""
    has_leading_axes: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class FeatureAxes:
    """Axes of projected queries, keys or values: those into which their features were split, one of them the heads."""

    split: tuple[int, ...] = ()
    merged: tuple[int, int, int] | None = None  # an axis, the size of its outer part, and that of its inner part
    is_outer: bool | None = None  # whether the heads are the outer part of it


@dataclass(frozen=True, slots=True, eq=False)
class HeadViews:
    """Views of projected tokens, whose axes are computed only where an attention needs them."""

    start: FeatureAxes
    views: tuple[tuple[torch.Size, Callable[..., Any], tuple[Any, ...], dict[str, Any], int], ...] = ()

    def axes(self) -> FeatureAxes | None:
        """Return where the axes of the heads are; None if that is unknown."""
        axes: FeatureAxes | None = self.start
        for shape, function, args, kwargs, index in self.views:
            moved = moved_axes(shape, function, (None, *args), kwargs)
            axes = None if axes is None or moved is None else _viewed_heads(axes, shape, moved[index][0])
        return axes


Origin = Scores | Weights | HeadViews


@dataclass(slots=True, eq=False)
class FollowedTensors:
    """Origins of followed tensors, by identity."""

    entries: dict[int, tuple[weakref.ref[Tensor], int | None, Origin]] = field(default_factory=dict)
    # Softmaxes of products of queries and keys: the module, and what their products with values were read as.
    softmaxes: list[tuple[str, list[MaterialisedCall | None]]] = field(default_factory=list)

    has_softmax: bool = False  # whether any weights were followed
    orders: dict[str, bool] = field(default_factory=dict)  # of merged batch and heads, by module: heads outside

    def get(self, tensor: Any) -> Origin | None:
        entry = self.entries.get(id(tensor))
        return None if entry is None or entry[0]() is not tensor else entry[2]

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Return whether nothing has written to a followed tensor, or to one that shares its memory, by other names."""
        entry = self.entries.get(id(tensor))
        return entry is None or entry[1] == version_of(tensor)

    def set(self, tensor: Tensor, origin: Origin) -> None:
        entries, number = self.entries, id(tensor)

        def forget(reference: weakref.ref[Tensor]) -> None:
            if number in entries and entries[number][0] is reference:
                del entries[number]

        entries[number] = weakref.ref(tensor, forget), version_of(tensor), origin

    def clear(self) -> None:
        self.entries.clear()
        self.has_softmax = False
        self.softmaxes.clear()

    # ---- functions other than a product with values

    def follow(
        self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Record the origins of the results of a function."""
        if name in VIEWS:
            first = args[0] if len(args) else None
            if isinstance(first, Tensor):
                self._view(function, name, first, args, kwargs, result)
                return
        if name in ("stack", "cat", "concat", "concatenate") and self._joined(name, args, kwargs, result):
            return
        tensors = tensors_of(args, kwargs)
        inputs = [(x, origin) for x in tensors if (origin := self.get(x)) is not None]
        if not len(inputs) or name in _READS:
            return
        results = [x for x in (result if isinstance(result, list | tuple) else (result,)) if isinstance(x, Tensor)]
        if name == "__setitem__" or (kwargs.get("out") is not None):
            results = [x for x in (*args[:1], kwargs.get("out")) if isinstance(x, Tensor)]
        weights = next(((x, origin) for x, origin in inputs if isinstance(origin, Weights)), None)
        if weights is not None:
            if name in _LAYERS:
                return
            origin = self._of_weights(name, *weights, args, kwargs)
            for x in results[:1] if name == "native_dropout" else results:
                if x.is_floating_point():
                    self.set(x, origin)
            return
        scores = [origin for _, origin in inputs if isinstance(origin, Scores)]
        if len(scores) and name in _LOGITS:
            shapes = [x.shape for x, origin in inputs if isinstance(origin, Scores)]
            for x in results:
                if x.ndim > 1 and any(x.shape[-2] == shape[-2] for shape in shapes):
                    products = tuple(dict.fromkeys(product for origin in scores for product in origin.products))
                    is_same = all(origin.has_leading_axes for origin in scores) and all(x.shape == y for y in shapes)
                    self.set(x, Scores(products, is_same))
            return
        heads = next(((x, origin) for x, origin in inputs if isinstance(origin, HeadViews)), None)
        if heads is not None and (name in _SAME or name in _PRODUCTS_BY_ELEMENT or name in ("cat", "concat")):
            for x in results:
                if x.shape[0] == heads[0].shape[0] and x.ndim == heads[0].ndim:
                    self.set(x, heads[1])

    def _view(
        self,
        function: Callable[..., Any],
        name: str,
        first: Tensor,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        origin = self.get(first)
        if origin is None:
            if name in ("view", "reshape", "unflatten") and isinstance(result, Tensor) and first.is_floating_point():
                self._split_features(first, result)
            is_merged = isinstance(result, Tensor) and (first.ndim, result.ndim) == (4, 3)
            if is_merged and result.shape[1:] == first.shape[2:] and first.is_floating_point():
                self.set(result, HeadViews(FeatureAxes((), (0, first.shape[0], first.shape[1]))))
            return
        results = result if isinstance(result, list | tuple) else (result,)
        if isinstance(origin, HeadViews):
            if not len(tensors_of(args[1:], kwargs)):
                for index, x in enumerate(results):
                    view = (first.shape, function, args[1:], dict(kwargs), index)
                    self.set(x, replace(origin, views=(*origin.views, view)))
            return
        moved = moved_axes(first.shape, function, args, kwargs)
        for index, x in enumerate(results):
            if not isinstance(x, Tensor):
                continue
            of_result = None if moved is None or len(moved) != len(results) else moved[index]
            if isinstance(origin, Weights):
                self.set(x, _viewed(origin, first, of_result, function, name, args, kwargs))
            elif of_result is not None:
                leads = origin.has_leading_axes and _has_leading_axes(of_result, first)
                self.set(x, replace(origin, has_leading_axes=leads))

    def _split_features(self, first: Tensor, result: Tensor) -> None:
        """Record that a view splits the last axis, of features, into heads and their channels, if it does."""
        features, size = first.shape[-1] if first.ndim > 1 else 0, 1
        for count, part in enumerate(reversed(result.shape), 1):
            size *= part
            if size == features and count == 1:
                break
            if size == features:
                self.set(result, HeadViews(FeatureAxes(tuple(range(result.ndim - count, result.ndim)))))
                return
        if (
            result.ndim == first.ndim == 3
            and result.shape[0] == first.shape[0]
            and first.shape[1]
            and result.shape[1] % first.shape[1] == 0
            and result.shape[1] != first.shape[1]
        ):  # [tokens, batch, features] -> [tokens, batch * heads, channels]
            merged = (1, first.shape[1], result.shape[1] // first.shape[1])
            self.set(result, HeadViews(FeatureAxes((), merged, is_outer=False)))

    def _joined(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Record heads that were split into a list and joined along the first axis; return whether they were."""
        parts = args[0] if len(args) else kwargs.get("tensors")
        axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
        if axis != 0 or not isinstance(parts, list | tuple) or len(parts) < 2 or not isinstance(result, Tensor):
            return False
        origins = [self.get(x) for x in parts]
        are_known = [x.axes() if isinstance(x, HeadViews) else x for x in origins]
        if any(x is not None for x in are_known) or not result.is_floating_point() or result.ndim > 4:
            return False
        if name == "stack" and result.ndim == 4:
            self.set(result, HeadViews(FeatureAxes((0, 3))))
        elif name != "stack" and result.ndim == 3 and len({x.shape for x in parts}) == 1:
            self.set(result, HeadViews(FeatureAxes((), (0, len(parts), parts[0].shape[0]), is_outer=True)))
        return True

    def _of_weights(
        self, name: str, first: Tensor, origin: Weights, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Weights:
        """Return what is known of weights after a function that is no view."""
        if len(origin.reason):
            return origin
        if not self.is_unchanged(first) and not name.endswith("_") and not name.startswith("__i"):
            return replace(origin, reason="its weights are changed in place after the softmax")
        if name in _SAME:
            return origin
        if name in _PRODUCTS_BY_ELEMENT and not ("div" in name and args and args[0] is not first):
            others = [x for x in (*args, *kwargs.values()) if x is not first]
            if all(isinstance(x, int | float) or _is_constant_along(x, first, origin.axis) for x in others):
                return origin
        if name in _FILLS:
            fill = _fill_of(first, origin.axis, args, kwargs)
            if fill is not None:
                return replace(origin, views=(*origin.views, fill))
        return replace(origin, reason=f"its weights are changed by {name!r} between the softmax and the values")


def version_of(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def tensors_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    tensors = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, list | tuple):
            tensors += [y for y in x if isinstance(y, Tensor)]
    return tensors


def _has_leading_axes(moved: tuple[list[MovedAxis], int], first: Tensor) -> bool:
    """Return whether a view has the last two axes of the tensor, all its elements, and others only split or merged."""
    axes, offset = moved
    order = [axis for x in axes for axis in x.sources]
    if offset != 0 or order != sorted(order):
        return False
    sizes, sources = [axis.size for axis in axes[-2:]], [axis.sources for axis in axes[-2:]]
    allowed = [{(axis,), ()} if first.shape[axis] == 1 else {(axis,)} for axis in (first.ndim - 2, first.ndim - 1)]
    return sizes == [*first.shape[-2:]] and all(x in y for x, y in zip(sources, allowed, strict=True))


def _viewed(
    origin: Weights,
    first: Tensor,
    moved: tuple[list[MovedAxis], int] | None,
    function: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Weights:
    if len(origin.reason):
        return origin
    if moved is None:
        return replace(origin, reason=f"its weights are rearranged by {name!r}")
    axes, offset = moved
    keys = first.shape[origin.axis]
    key_axes = [index for index, axis in enumerate(axes) if axis.sources == (origin.axis,)]
    if keys == 1 and origin.axis == first.ndim - 1 and not key_axes and axes[-1].size == 1:
        key_axes = [len(axes) - 1]  # a view does not show which axis of size 1 it was
    size = axes[key_axes[0]].size if len(key_axes) == 1 else -1
    if size < 0 or math.prod(axis.size for axis in axes) != first.numel() // max(keys, 1) * size:
        return replace(origin, reason="only a part of its weights is multiplied with values")
    if size != keys and not (size == keys - 1 and offset == 0 and origin.sink is None and len(axes) == first.ndim):
        return replace(origin, reason="only a part of its weights is multiplied with values")

    def view(x: Tensor) -> Tensor:
        result = function(x, *args[1:], **kwargs)
        assert isinstance(result, Tensor)
        return result

    return replace(
        origin,
        axis=key_axes[0],
        views=(*origin.views, view),
        sink=len(origin.views) if size != keys else origin.sink,
        has_leading_axes=origin.has_leading_axes and _has_leading_axes(moved, first),
    )


def _viewed_heads(origin: FeatureAxes, shape: torch.Size, axes: list[MovedAxis]) -> FeatureAxes | None:
    split = tuple(index for index, axis in enumerate(axes) if axis.is_whole and {*axis.sources} <= {*origin.split})
    merged, is_outer = None, None
    for index, axis in enumerate(axes):
        if not axis.is_whole:
            continue
        if origin.merged is not None and axis.sources == (origin.merged[0],):
            merged, is_outer = (index, *origin.merged[1:]), origin.is_outer
        elif len(axis.sources) == 2 and len({*axis.sources} & {*origin.split}) == 1:
            outer, inner = (shape[source] for source in axis.sources)
            merged, is_outer = (index, outer, inner), axis.sources[0] in origin.split
    if origin.merged is not None and merged is None:
        return None
    return FeatureAxes(split, merged, is_outer) if len(split) or merged is not None else None


def _is_constant_along(x: Any, weights: Tensor, axis: int) -> bool:
    """Return whether a factor is the same for all keys, such as a head mask."""
    if not isinstance(x, Tensor) or x.ndim > weights.ndim:
        return False
    index = axis - (weights.ndim - x.ndim)
    return index < 0 or x.shape[index] == 1


def _fill_of(
    weights: Tensor, axis: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[Tensor], Tensor] | None:
    """Return the fill of the logits for weights that are set to 0; None where that changes more than whole rows.

    Reads values of the device. The weights are those before the call, or after it, in place: their rows must have a sum
    of 1, or be masked as a whole.
    """
    arguments = dict(zip(("input", "mask", "value"), args, strict=False)) | dict(kwargs)
    value, mask = arguments.get("value"), arguments.get("mask")
    if not isinstance(mask, Tensor) or value is None or bool(value != 0):
        return None
    with torch.no_grad():
        sums = torch.where(mask, 0.0, weights.double()).sum(axis)
        empty = mask.expand(weights.shape).all(axis)
        tolerance = max(1e-5, 2 * torch.finfo(weights.dtype).eps)
        if not bool((((sums - 1).abs() <= tolerance) | empty).all()):
            return None
    return lambda logits: logits.masked_fill(mask, -torch.inf)
