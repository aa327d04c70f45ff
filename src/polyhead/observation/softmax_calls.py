"""Read a softmax and its product with the values as an attention call of [batch, heads, queries, keys]."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.masks import Mask
from polyhead.observation.attention_calls import (
    AttentionCall,
    HeadAxes,
    NotUnderstood,
    RunningModule,
    as_mask,
    head_counts,
    is_cross,
    unreadable,
)
from polyhead.observation.followed_tensors import FollowedTensors, HeadViews, Scores, Softmax, Weights, version_of
from polyhead.observation.forward_arguments import parameters_of
from polyhead.observation.matrix_products import Axis, MatrixProduct
from polyhead.observation.rows import MASKING_BIAS
from polyhead.observation.transformers_models import is_pretrained

WIDTH = 8  # head dimension of all-zero queries and keys


def softmax_of(
    running: RunningModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, followed: FollowedTensors
) -> None:
    """Follow the result of a softmax, if it may be attention."""
    logits = args[0] if len(args) else kwargs.get("input", kwargs.get("self"))
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(logits, Tensor) or not isinstance(result, Tensor) or not logits.is_floating_point():
        return
    if axis is None:
        axis = 0 if logits.ndim in (0, 1, 3) else 1  # PyTorch's, which is deprecated
    if not isinstance(axis, int) or logits.ndim < 2 or logits.shape != result.shape:
        return
    axis = axis % logits.ndim
    origin = followed.get(logits)
    scores = origin if isinstance(origin, Scores) else None
    if logits.ndim == 2 and scores is None:
        return
    softmax = Softmax(logits, version_of(logits), scores, running, unreadable("logits", logits))
    if kwargs.get("out") is not None or result is logits:
        softmax.reason = "its softmax overwrites the logits"
    if scores is not None:
        followed.softmaxes.append((running.path, softmax.products))
    followed.has_softmax = True
    followed.set(result, Weights(softmax, axis))


@dataclass(frozen=True, slots=True, eq=False)
class SoftmaxCall:
    """A softmax whose weights are multiplied with values, with the axes of `polyhead.attention`."""

    call: AttentionCall  # its logits are a bias of its mask; its queries and keys, where known, have a scale of 0
    bias: Callable[[], Tensor]  # recomputes that bias with gradients
    sinks: Tensor | None  # learned, [heads]


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Axes of a product of weights and values."""

    batch: tuple[Axis, ...]
    head: Axis | None
    query: Axis
    parts: tuple[Axis, int, int, bool] | None = None  # an axis of batch and heads: outer and inner size, heads outside

    def split(self, x: Tensor, axes: tuple[Axis, ...], last: Axis) -> Tensor:
        """Return a tensor with these axes as [batch, heads, queries or keys, last]; axes that it lacks have size 1."""
        others = (*self.batch, self.head, last, None if self.parts is None else self.parts[0])
        third = self.query if self.query in axes else next(a for a in axes if a not in others)
        if self.parts is None:
            order = (*self.batch, self.head, third, last)
            x = x.permute([axes.index(a) for a in order if a in axes])
            for index, a in enumerate(order):
                if a not in axes:
                    x = x.unsqueeze(index)
            return x.flatten(0, len(self.batch) - 1) if len(self.batch) else x[None]
        axis, outer, inner, heads_outside = self.parts
        x = x.permute([axes.index(a) for a in (axis, third, last)])
        x = x.unflatten(0, (outer, inner)) if x.shape[0] != 1 else x[None]
        return x.transpose(0, 1) if heads_outside else x

    def join(self, heads: Tensor, sizes: Mapping[Axis, int], axes: tuple[Axis, ...], last: Axis) -> Tensor:
        """Invert `split` for the output of the product."""
        if self.parts is not None:
            axis, *_, heads_outside = self.parts
            x = (heads.transpose(0, 1) if heads_outside else heads).flatten(0, 1)
            order: tuple[Axis | None, ...] = (axis, self.query, last)
        else:
            x = heads.unflatten(0, [sizes[a] for a in self.batch]) if len(self.batch) else heads[0]
            order = (*self.batch, self.head, self.query, last)
            if self.head is None:
                x, order = x.squeeze(len(self.batch)), (*self.batch, self.query, last)
        return x.permute([order.index(a) for a in axes])


def read_product(
    running: RunningModule, product: MatrixProduct, index: int, weights: Weights, followed: FollowedTensors
) -> SoftmaxCall:
    """Read the product of the weights of a softmax, the operand `index`, with values; raise if that is unclear."""
    operand, values = product.operands[index], product.operands[1 - index]
    softmax = weights.softmax
    _check(product, index, weights, followed)
    key = product.axes[index][weights.axis]
    (channels,) = _channels(product, index)
    layout = _layout(running, product, index, key, followed)
    if softmax.version != version_of(softmax.logits):
        raise NotUnderstood("its logits are overwritten after the softmax")
    axes = product.axes[index]

    logits, sinks = _logits(weights)
    if logits.shape != operand.shape:
        raise NotUnderstood(f"its weights have the shape {[*operand.shape]}, its logits {[*logits.shape]}")
    logits = layout.split(logits, axes, key)
    batch, heads, queries, keys = logits.shape
    sinks = None if sinks is None else _constant_sinks(layout.split(sinks, axes, key))
    value = layout.split(values, product.axes[1 - index], channels)
    dtype = torch.float64 if torch.float64 in (logits.dtype, values.dtype) else torch.float32
    if value.shape[0] != batch or value.shape[1] not in (1, heads):
        raise NotUnderstood(f"its values must be those of the same batch, got {[*value.shape]} for {[*logits.shape]}")
    logits, value = logits.to(dtype), value.to(dtype)
    operands = _queries_and_keys(product, index, weights, layout, (batch, heads, queries, keys))
    _check_tokens(running, batch, queries, keys, operands)
    query, key_heads = operands or (
        logits.new_zeros(batch, heads, queries, WIDTH),
        logits.new_zeros(batch, value.shape[1], keys, WIDTH),
    )
    if key_heads.shape[1] != value.shape[1]:
        more = max(key_heads.shape[1], value.shape[1])
        key_heads, value = key_heads.expand(-1, more, -1, -1), value.expand(-1, more, -1, -1)
    visible = _without_padding(running, ~(logits <= MASKING_BIAS))
    mask = as_mask(visible.any(1, keepdim=True), queries, keys)
    bias = Mask.bias(torch.where(visible, logits, -torch.inf), zero_one=True)
    mask = bias if mask is None else mask & bias
    sizes = {**product.sizes(1 - index), **product.sizes(index)}
    output = product.output
    head_axes = HeadAxes(lambda x: layout.split(x, output, channels), lambda x: layout.join(x, sizes, output, channels))
    cross = is_cross(running, query.to(operand.dtype), key_heads, mask)
    call = AttentionCall(query.to(dtype), key_heads.to(dtype), value, mask, 0.0, cross=cross, axes=head_axes)
    if cross:  # the first token that any query sees is the first of its sequence
        shown = visible.any(1).any(1)
        first = torch.where(shown.any(-1), shown.to(torch.uint8).argmax(-1), 0)
        call = replace(call, mask=mask & Mask.lengths(keys - first, side="left"))
    elif queries > keys:  # neither the tokens of the queries nor those of a cache before them
        raise NotUnderstood(f"the positions of {queries} queries in {keys} keys are unknown")

    def bias_of() -> Tensor:
        logits = layout.split(_logits(weights)[0], axes, key).to(dtype)
        return torch.where(visible, logits, -torch.inf)

    return SoftmaxCall(call, bias_of, sinks)


def _check(product: MatrixProduct, index: int, weights: Weights, followed: FollowedTensors) -> None:
    operand, values, softmax = product.operands[index], product.operands[1 - index], weights.softmax
    reason = softmax.reason or weights.reason
    if not len(reason) and not followed.is_unchanged(operand):
        reason = "its weights are changed in place after the softmax"
    if len(reason):
        raise NotUnderstood(reason)
    if isinstance(followed.get(values), Weights):
        raise NotUnderstood("its weights are multiplied with weights")
    if type(values) not in (Tensor, nn.Parameter) or values.is_nested:
        raise NotUnderstood(f"values must be plain tensors, got a {type(values).__name__}")
    if not product.is_plain or not product.is_complete():
        raise NotUnderstood("something is added to the product with the values, or a sum taken of it")
    if product.contracted() != [product.axes[index][weights.axis]]:
        raise NotUnderstood("its weights are multiplied along another axis than that of the softmax")
    if softmax.scores is None:
        raise NotUnderstood("its logits are no products of queries and keys (matmul, bmm, einsum)")
    if not len(product.shared(index)):
        raise NotUnderstood("its values are the same for the whole batch and all heads")
    if len(_channels(product, index)) != 1:
        raise NotUnderstood("its values must have one axis of channels")
    if any(product.sizes(index)[x] == 1 for x in product.own(index) if x in product.axes[1 - index]):
        raise NotUnderstood("its weights are the same for several values")


def _channels(product: MatrixProduct, index: int) -> list[Axis]:
    return [x for x in product.own(1 - index) if x not in product.axes[index]]


def _layout(
    running: RunningModule, product: MatrixProduct, index: int, key: Axis, followed: FollowedTensors
) -> _Layout:
    """Return which axes are batch, heads and queries; raise where that is ambiguous."""
    axes, sizes, counts = product.axes[index], product.sizes(index), head_counts(running)
    shared, own = product.shared(index), product.own(index)
    shape = [*product.operands[index].shape]
    unknown = NotUnderstood(f"the axes of batch, heads and queries must be known, got weights of shape {shape}")
    views = followed.get(product.operands[1 - index])
    known = views.axes() if isinstance(views, HeadViews) else None
    split_axes: set[Axis] = set()
    merged = None
    if known is not None:
        split_axes = {product.axes[1 - index][axis] for axis in known.split}
        if known.merged is not None:
            axis, outer, inner = known.merged
            merged = (product.axes[1 - index][axis], outer, inner, known.is_outer)
        if key in split_axes and not any(x in split_axes for x in shared):
            raise NotUnderstood("its softmax is over the heads of a token, or over channels")
    if len(own) == 2:  # one head of values for all heads
        heads = [x for x in own if sizes[x] in counts]
        if len(heads) != 1:
            raise unknown
        (query,) = (x for x in own if x != heads[0])
        return _Layout(tuple(shared), heads[0], query)
    if len(own) != 1:
        raise unknown
    query = own[0]
    marked = [x for x in shared if x in split_axes]
    if len(marked) > 1:
        marked = [x for x in marked if sizes[x] in counts]
    if len(marked) == 1 and (not len(counts) or sizes[marked[0]] in counts):
        return _Layout(tuple(x for x in shared if x != marked[0]), marked[0], query)
    if len(shared) == 1:
        layout = _of_three_axes(running, shared[0], query, sizes, merged, counts, followed.orders)
        if layout is None:
            raise unknown
        return layout
    if len(shared) > 2 or len(marked):
        heads = [x for x in shared if sizes[x] in counts]
        if len(heads) != 1:
            raise unknown
        return _Layout(tuple(x for x in shared if x != heads[0]), heads[0], query)
    batch, head = shared
    if axes.index(batch) > axes.index(head):
        batch, head = head, batch
    if len(counts) and sizes[head] not in counts:
        raise NotUnderstood(
            f"its heads must be the second axis, num_heads {sorted(counts)} of its module, got weights of shape {shape}"
        )
    if not len(counts) and not any(
        sizes[query] == tokens and sizes[batch] == rows for rows, tokens in _tokens(running)
    ):
        raise unknown
    return _Layout((batch,), head, query)


def _of_three_axes(
    running: RunningModule,
    axis: Axis,
    query: Axis,
    sizes: Mapping[Axis, int],
    merged: tuple[Axis, int, int, bool | None] | None,
    counts: set[int],
    orders: dict[str, bool],
) -> _Layout | None:
    """Return the layout of [batch * heads, queries, keys], or [batch, queries, keys] of one head; None if unknown."""
    if merged is not None and merged[0] == axis:
        _, outer, inner, is_outer = merged
        if is_outer is None and (inner in counts) != (outer in counts):
            is_outer = outer in counts
        if is_outer is None:
            is_outer = orders.get(running.path)
        if is_outer is not None and (not len(counts) or (outer if is_outer else inner) in counts):
            orders[running.path] = is_outer
            return _Layout((), None, query, (axis, outer, inner, is_outer))
    batches = {rows for rows, tokens in _tokens(running) if tokens == sizes[query]}
    if 1 in counts or (not len(counts) and sizes[axis] in batches):
        return _Layout((axis,), None, query)
    if sizes[axis] in counts and batches == {1}:
        return _Layout((), axis, query)
    return None


def _logits(weights: Weights) -> tuple[Tensor, Tensor | None]:
    """Return the logits in the shape of the weights, and the removed column of sinks, if any."""
    logits, sinks = weights.softmax.logits, None
    for number, view in enumerate(weights.views):
        if number == weights.sink:
            column = logits
            size = logits.shape
            logits = view(logits)
            axis = next(a for a in range(len(size)) if size[a] != logits.shape[a])
            sinks = column.narrow(axis, size[axis] - 1, 1)
        else:
            logits = view(logits)
            sinks = None if sinks is None else view(sinks)
    return logits, sinks


def _constant_sinks(sinks: Tensor) -> Tensor:
    """Return a learned logit for each head, [heads]; reads values of the device."""
    first = sinks.detach()[:1, :, :1]
    if not bool((sinks.detach() == first).all()):
        raise NotUnderstood("its removed column is no learned sink: it differs between queries")
    return sinks[0, :, 0, 0].float()


def _queries_and_keys(
    product: MatrixProduct, index: int, weights: Weights, layout: _Layout, shape: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor] | None:
    """Return the queries and keys whose products the logits are, up to scale and bias; None if they are unclear."""
    scores = weights.softmax.scores
    if scores is None or len(scores.products) != 1 or not (scores.has_leading_axes and weights.has_leading_axes):
        return None
    of_logits, axes = scores.products[0], product.axes[index]
    own = [of_logits.own(number) for number in (0, 1)]
    contracted, shared = of_logits.contracted(), of_logits.shared(0)
    if any(len(x) != 1 for x in own) or set(axes[-2:]) != {layout.query, axes[weights.axis]}:
        return None
    numbers = (0, 1) if of_logits.output[-2:] == (own[0][0], own[1][0]) else (1, 0)
    numbers = numbers if weights.axis == len(axes) - 1 else numbers[::-1]
    leading = product.operands[index].shape[:-2]
    operands = []
    for number, last in zip(numbers, (layout.query, axes[weights.axis]), strict=True):
        x = of_logits.operands[number].detach()
        x = x.permute([of_logits.axes[number].index(a) for a in (*shared, own[number][0], contracted[0])])
        if of_logits.output[:-2] != tuple(shared) or math.prod(x.shape[:-2]) != math.prod(leading):
            return None
        x = x.reshape(*leading, *x.shape[-2:])
        operands.append(layout.split(x, (*axes[:-2], last, "channels"), "channels"))
    query, key = operands
    is_fitting = (*query.shape[:3], key.shape[2]) == shape and key.shape[:2] == query.shape[:2]
    return (query, key) if is_fitting and query.shape[-1] == key.shape[-1] else None


def _without_padding(running: RunningModule, visible: Tensor) -> Tensor:
    """Hide keys that a model of transformers receives as padding, and that only padding sees; reads values.

    Some models let a padding token attend to itself, which its mask alone does not show.
    """
    batch, _, queries, keys = visible.shape
    models = (x for x in (running, *running.around()) if is_pretrained(x.module))
    inputs = next((x.inputs() for x in models if "attention_mask" in parameters_of(type(x.module).forward)), {})
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != (batch, keys) or queries != keys or bool((mask != 0).all()):
        return visible
    non_padding = (mask != 0).to(visible.device)
    is_seen = (visible & non_padding[:, None, :, None] & ~non_padding[:, None, None, :]).any()
    return visible if bool(is_seen) else visible & non_padding[:, None, None, :]


def _tokens(running: RunningModule) -> list[tuple[int, int]]:
    """Return the batch and number of tokens that the inputs of a module, and of those around it, may have."""
    sizes: list[tuple[int, int]] = []
    for module in (running, *running.around()):
        for x in module.tensors().values():
            shape = x.shape
            match x.ndim:
                case 2:
                    sizes.append((1, shape[0]))
                case 3:
                    sizes += [(shape[0], shape[1]), (shape[1], shape[0])]
                case 4:
                    sizes += [(shape[0], shape[2] * shape[3]), (shape[0], shape[1] * shape[2])]
                    sizes += [(shape[0], shape[2]), (shape[0], shape[1])]
    return sizes


def _check_tokens(
    running: RunningModule, batch: int, queries: int, keys: int, operands: tuple[Tensor, Tensor] | None
) -> None:
    """Raise unless the queries are tokens of an input of the module: of all its sequences, or windows of them."""
    tokens = _tokens(running)
    if not len(tokens):
        return
    if (batch, queries) in tokens:
        contracted = None if operands is None else operands[0].shape[-1]
        if contracted == queries == keys and operands is not None and _is_over_tokens(running, operands[0]):
            raise NotUnderstood("its logits are sums over tokens, one for each pair of channels")
        return
    windows = any(rows > 0 and batch % rows == 0 and batch * queries == rows * length for rows, length in tokens)
    if windows and queries == keys:
        return
    raise NotUnderstood(
        f"its queries must be the tokens of an input of its module, or of windows of it, got {queries} queries and "
        f"{keys} keys in {batch} rows"
    )


def _is_over_tokens(running: RunningModule, query: Tensor) -> bool:
    """Return whether the products sum over tokens rather than channels, of which there are equally many."""
    own = next(iter(running.tensors().values()), None)
    is_image = own is not None and own.ndim == 4 and own.shape[2] * own.shape[3] == query.shape[2]
    return (query.stride(-1) == 1) == is_image
