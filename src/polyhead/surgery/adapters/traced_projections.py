"""Find the projections of attention that no list of names describes, by gradients of head outputs.

A head depends on its own channels of the projections alone. The gradient of one row of its output shows which they are:
a channel of the queries has one in a single token, one of the keys and values in several; of the values a single
channel has one for each output channel, of the keys all have. The gradient of an output projection's input shows which
columns a head has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.geometry import HeadLayout
from polyhead.observation.evaluation_mode import frozen
from polyhead.observation.session import observe
from polyhead.observation.statistics import AttentionSite
from polyhead.surgery.adapters.attention_layer import TracedHeads, is_conv1d, relative_path
from polyhead.surgery.adapters.projection_formats import PARTS, Part, Source


@dataclass(frozen=True, slots=True, eq=False)
class _Linear:
    """One call of a linear module."""

    path: str
    module: nn.Module
    input: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """Head outputs of each attention site, [batch, heads, queries, dim], and all calls of linear modules."""

    heads: Mapping[AttentionSite, list[Tensor]]
    linears: Sequence[_Linear]

    def near(self, path: str) -> Iterator[list[_Linear]]:
        """Yield the linear modules in a module, then those in the module around it."""
        for around in dict.fromkeys((path, path.rpartition(".")[0])):
            prefix = f"{around}." if around else ""
            yield [x for x in self.linears if x.path.startswith(prefix)]


def flows_of(model: nn.Module, batch: Mapping[str, Any]) -> Flows:
    """Run a model on a batch, in evaluation mode."""
    heads: dict[AttentionSite, list[Tensor]] = {}
    linears: list[_Linear] = []

    def hook_of(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> Tensor:
            if not output.requires_grad:
                output = output.requires_grad_().clone()  # no leaf, which nothing may overwrite
            linears.append(_Linear(path, module, args[0] if len(args) else kwargs["input"], output))
            return output

        return hook

    with ExitStack() as undo_hooks, torch.inference_mode(False), torch.enable_grad(), frozen(model):
        for path, module in model.named_modules():
            if type(module) is nn.Linear or is_conv1d(module):
                undo_hooks.callback(module.register_forward_hook(hook_of(path), with_kwargs=True).remove)
        session = observe(model, statistics="entropy")
        session.listener = lambda call, result, _: heads.setdefault(call.site, []).append(result.output)
        with session:
            model(**batch)
    return Flows(heads, linears)


# ---- channels of each head


def traced_heads(path: str, module: nn.Module, flows: Flows, output: Tensor) -> TracedHeads:
    """Return the projections of a site, or why they are not known."""
    if output.grad_fn is None:
        return refused("its heads do not depend on the output of a linear module")
    out_proj = _output_projection(path, flows, output)
    if isinstance(out_proj, str):
        return refused(out_proj)
    for linears in flows.near(path):
        channels = _channels(output, [x for x in linears if x is not out_proj])
        if {part for parts in channels.values() for part in parts} == {*PARTS}:
            break
    else:
        return refused("its queries, keys and values are not the outputs of linear modules nearby")
    by_part = {part: [x for x, parts in channels.items() if part in parts] for part in PARTS}
    for part, linears in by_part.items():
        if len(linears) > 1:
            return refused(f"its {part} channels come from {', '.join(x.path for x in linears)}")
    source_of = {part: linears[0] for part, linears in by_part.items()}
    layout = _layout(out_proj, source_of, channels, output.shape[1])
    if isinstance(layout, str):
        return refused(layout)
    sources = []
    for linear, parts in channels.items():
        source = _ordered(linear, parts, layout)
        if source is None:
            return refused(f"the channels of its heads are in an unknown order in {linear.path}")
        sources.append(replace(source, path=relative_path(path, source.path)))
    if reason := _per_head_tensor(module, {out_proj.module, *(x.module for x in channels)}, layout):
        return refused(reason)
    return TracedHeads(tuple(sources), relative_path(path, out_proj.path), layout.head_dim, layout.value_dim)


def refused(*reasons: str) -> TracedHeads:
    return TracedHeads((), "", 0, 0, refusals=reasons)


def _gradients(of: Tensor, at: Sequence[Tensor], weights: Tensor) -> list[Tensor | None]:
    if not len(at):
        return []
    return list(torch.autograd.grad(of, list(at), weights, retain_graph=True, allow_unused=True))


def _output_projection(path: str, flows: Flows, heads: Tensor) -> _Linear | str:
    """Return the first linear module whose input is the outputs of all heads, one after the other."""
    _, count, _, dim = heads.shape
    expected = torch.arange(1, count * dim + 1, device=heads.device).view(1, count, 1, dim).expand_as(heads)
    for linears in flows.near(path):
        for linear in linears:
            if linear.input.grad_fn is None:
                continue
            columns = torch.arange(1, linear.input.shape[-1] + 1, dtype=heads.dtype, device=heads.device)
            (gradient,) = _gradients(linear.input, [heads], columns.expand_as(linear.input))
            if gradient is None:
                continue
            if columns.numel() == count * dim and torch.equal(gradient, expected.to(gradient.dtype)):
                return linear
            return f"its head outputs reach {linear.path} in another order, or changed"
    return "the outputs of its heads do not reach a linear module nearby"


def _channels(heads: Tensor, linears: Sequence[_Linear]) -> dict[_Linear, dict[Part, Tensor]]:
    """Return which output channels of linear modules each head reads, boolean [heads, channels] by module and part.

    Modules before another of them, such as the first of two factors, are no projections.
    """
    outputs = [x.output for x in linears]
    count, dim = heads.shape[1], heads.shape[-1]
    every = torch.linspace(1, 2, dim, dtype=heads.dtype, device=heads.device)
    first, second = torch.eye(2, dim, dtype=heads.dtype, device=heads.device)
    num_tokens: dict[_Linear, list[list[Tensor]]] = {}
    for head in range(count):
        rows = []
        for channels in (every, first, second):
            weights = torch.zeros_like(heads)
            weights[0, head, -1] = channels  # a single row, the last of a sequence
            rows.append(_gradients(heads, outputs, weights))
        for linear, *gradients in zip(linears, *rows, strict=True):
            if gradients[0] is not None:
                is_read = [(x != 0).flatten(0, -2) for x in gradients if x is not None]  # [tokens, channels]
                num_tokens.setdefault(linear, []).append([x.sum(0) for x in is_read])
    last = [x for x in num_tokens if not any(_is_before(x, y) for y in num_tokens if y is not x)]
    return {linear: parts for linear in last if len(parts := _parts(num_tokens[linear]))}


def _is_before(linear: _Linear, other: _Linear) -> bool:
    if other.input.grad_fn is None:
        return False
    (gradient,) = _gradients(other.input, [linear.output], torch.ones_like(other.input))
    return gradient is not None


def _parts(tokens: Sequence[Sequence[Tensor]]) -> dict[Part, Tensor]:
    """Return the channels of each part, from the number of tokens in which a head depends on each channel."""
    every, first, second = (torch.stack([head[probe] for head in tokens]) for probe in range(3))
    query = every == 1
    key = (every > 1) & (first > 0) & (second > 0)
    parts: dict[Part, Tensor] = {"query": query, "key": key, "value": (every > 0) & ~query & ~key}
    return {part: x for part, x in parts.items() if bool(x.any())}


def _layout(
    out_proj: _Linear, source_of: Mapping[Part, _Linear], channels: Mapping[_Linear, Mapping[Part, Tensor]], heads: int
) -> HeadLayout | str:
    """Return the head layout that the channels of all heads imply, or the reason why there is none."""
    read = {part: channels[linear][part] for part, linear in source_of.items()}
    sizes = {part: {int(x) for x in of_part.sum(1)} for part, of_part in read.items()}
    if any(len(x) > 1 for x in sizes.values()) or sizes["query"] != sizes["key"]:
        return f"its heads have different numbers of channels, {sizes}"
    readers = [tuple(row) for row in (read["key"].double() @ read["key"].double().T > 0).tolist()]
    values = [tuple(row) for row in (read["value"].double() @ read["value"].double().T > 0).tolist()]
    groups = list(dict.fromkeys(readers))
    if bool((read["query"].sum(0) > 1).any()) or values != readers or any(sum(x) != readers.count(x) for x in groups):
        return "its heads share channels of their queries, or of keys but not of values"
    width = out_proj.output.shape[-1]
    inputs = {part: linear.input.shape[-1] for part, linear in source_of.items()}
    key_heads = tuple(groups.index(x) for x in readers)
    (head_dim,), (value_dim,) = sizes["query"], sizes["value"]
    if inputs["query"] != width:
        return f"its queries have {inputs['query']} inputs, its output projection {width} outputs"
    layout = HeadLayout(
        width, heads, len(groups), head_dim, value_dim, inputs["key"], inputs["value"], key_heads=key_heads
    )
    return "its KV heads do not have the same number of query heads" if layout.key_heads is not None else layout


def _ordered(linear: _Linear, parts: Mapping[Part, Tensor], layout: HeadLayout) -> Source | None:
    """Return the order of parts and heads in a linear module, if it is a known one."""
    for order in permutations(parts):
        for by_head in (False, True)[: len(order)]:
            source = Source(linear.path, order, by_head)
            rows = source.rows(layout)
            if sum(x.numel() for x in rows.values()) != linear.output.shape[-1]:
                continue
            if all(_is_order(parts[part], rows[part], part, layout) for part in order):
                return source
    return None


def _is_order(read: Tensor, rows: Tensor, part: Part, layout: HeadLayout) -> bool:
    expected = torch.zeros_like(read)
    for head in range(layout.num_heads):
        expected[head, rows[head if part == "query" else layout.key_head(head)]] = True
    return torch.equal(read, expected)


def _per_head_tensor(module: nn.Module, projections: set[nn.Module], layout: HeadLayout) -> str:
    """Return the first other tensor of a module that may have an axis of heads; empty without any."""
    known = {id(x) for linear in projections for x in linear.parameters()}
    sizes = {layout.num_heads, layout.num_kv_heads} - {1, layout.head_dim}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) not in known and sizes & {*tensor.shape}:
            return f"it has {name} of shape {[*tensor.shape]}, which may be per head"
    return ""
