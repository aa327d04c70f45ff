"""Attention that a model computed, from the operators that it ran; nothing here uses polyhead.

A dispatch mode receives every softmax of a forward: those of eager attention of transformers, of PyTorch's functions
(their math kernel runs operator by operator), and softmax by hand. A softmax is attention over keys if its
logits are a product of two activations and its result is multiplied with a third. Routers, samplers of deformable
attention, pooling by a linear layer and state spaces get their logits from a product with a parameter, or with a copy
of one, which broadcasting makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten.linear: 0}  # position of the first operand
_SOFTMAXES = (aten._softmax, aten._safe_softmax)
# Operators whose results are no longer logits or weights.
_NORMS = (aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm)
_ENDS = (*_NORMS, aten.convolution, aten.embedding, aten.sum, aten.mean)
_COPIES = (aten.clone, aten._to_copy, aten.repeat)


@dataclass(slots=True, eq=False)
class Softmax:
    """One softmax, or exponential of logits, of a forward.

    `modules` are the running modules, innermost last; `ordinals` numbers the softmaxes of each by path, in the order in
    which their weights are multiplied.
    """

    kind: str
    logits: Tensor  # float64, the softmax over the last axis
    modules: list[_Running]
    is_product: bool  # whether its logits are a product of activations
    lowest: float = 0.0  # the lowest value of that product, or 0
    keys: set[int] = field(default_factory=set)  # sizes over which products contract it
    ordinals: dict[str, int] = field(default_factory=dict)
    multiplied: int = 0  # number of products before that with its values

    @property
    def is_attention(self) -> bool:
        return self.is_product and len(self.keys) > 0 and self.logits.shape[-1] > 0

    @property
    def path(self) -> str:
        return self.modules[-1].path if len(self.modules) else ""

    @property
    def masked(self) -> float:
        """Logits of masked keys are lower."""
        return _MASKED + self.lowest

    def has_sink(self) -> bool:
        """Return whether the last column is a learned sink, which no value belongs to."""
        return self.keys == {self.logits.shape[-1] - 1}


@dataclass(slots=True, eq=False)
class _Running:
    path: str
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Gate:
    """A factor of the weights of one head; `axis` is that of the heads, as in `rows_of`."""

    axis: int
    heads: int
    head: int
    factor: float

    def multiply(self, weights: Tensor) -> None:
        """Multiply this head of weights [..., queries, keys] in place."""
        leading = weights.shape[:-2]
        factors = weights.new_ones(leading)
        if self.axis == len(leading):  # innermost of all leading axes
            factors.view(-1, self.heads)[:, self.head] = self.factor
        else:
            factors.select(self.axis, self.head).fill_(self.factor)
        weights.mul_(factors[..., None, None])


class _Recorder(TorchDispatchMode):
    """Records softmaxes; follows logits and weights through the storage of tensors, which it keeps alive."""

    def __init__(self, model: nn.Module, stack: list[_Running], gated: Mapping[int, Gate]) -> None:
        super().__init__()
        self.stack, self.gated = stack, gated
        self.softmaxes: list[Softmax] = []
        self.count = 0  # of products
        self.scaled: set[str] = set()  # modules that take the logsumexp of their logits, to scale outputs by a sink
        # By storage, with their copies, which broadcasting makes: neither is an activation.
        self.parameters: dict[int, Any] = {_address(x): x.untyped_storage() for x in model.parameters()}
        self.products: dict[int, tuple[Any, float]] = {}  # with the lowest value
        self.weights: dict[int, tuple[Any, set[int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():  # operators that consist of others arrive whole
            with self:
                if (parts := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                    return parts
        packet, inputs = func.overloadpacket, [x for x in _flat(args) if isinstance(x, Tensor)]
        logits = args[0].double() if packet in _SOFTMAXES or packet in (aten.exp, aten.exp_) else None
        result = func(*args, **(kwargs or {}))
        outputs = [x for x in _flat((result,)) if isinstance(x, Tensor)]
        self._parameters(packet, inputs, outputs)
        if packet in _PRODUCTS:
            first = _PRODUCTS[packet]
            self._product(args[first], args[first + 1], result, is_plain=first == 0)
        elif packet in _SOFTMAXES:
            if gate := self.gated.get(len(self.softmaxes)):
                gate.multiply(result.movedim(args[1], -1))
            self._softmax("softmax", logits.movedim(args[1], -1), args[0], result)  # type: ignore[union-attr]
        elif logits is not None and _address(args[0]) in self.products:
            self._softmax("exp", logits, args[0], result)
        elif packet is aten.logsumexp and _address(args[0]) in self.products and len(self.stack):
            self.scaled.add(self.stack[-1].path)
        elif packet not in _ENDS:
            if lows := [self.products[_address(x)][1] for x in inputs if _address(x) in self.products]:
                for output in outputs:
                    self.products[_address(output)] = output.untyped_storage(), min(lows)
            if numbers := {n for x in inputs for n in self._numbers(x)}:
                for output in outputs:
                    self._mark(output, numbers)
        return result

    def _numbers(self, x: Tensor) -> set[int]:
        return self.weights.get(_address(x), (None, set()))[1]

    def _mark(self, x: Tensor, numbers: set[int]) -> None:
        self.weights[_address(x)] = x.untyped_storage(), self._numbers(x) | numbers

    def _parameters(self, packet: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        is_parameter = all(_address(x) in self.parameters for x in inputs)
        for output in outputs:
            if is_parameter and packet in _COPIES:
                self.parameters[_address(output)] = output.untyped_storage()
            elif not is_parameter:
                self.parameters.pop(_address(output), None)  # a copy that activations were written to

    def _product(self, first: Tensor, second: Tensor, result: Tensor, *, is_plain: bool) -> None:
        if _address(first) in self.parameters or _address(second) in self.parameters:
            return
        self.count += 1
        for operand, contracted in ((first, first.shape[-1]), (second, second.shape[-2])):
            for softmax in (self.softmaxes[number] for number in self._numbers(operand)):
                softmax.multiplied = softmax.multiplied or self.count
                softmax.keys.add(contracted)
        lowest = min(0.0, float(result.min())) if is_plain and result.numel() else 0.0  # else a mask may be added
        self.products[_address(result)] = result.untyped_storage(), lowest

    def _softmax(self, kind: str, logits: Tensor, source: Tensor, result: Tensor) -> None:
        self._mark(result, {len(self.softmaxes)})
        is_product = _address(source) in self.products
        lowest = self.products[_address(source)][1] if is_product else 0.0
        self.softmaxes.append(Softmax(kind, logits, [*self.stack], is_product, lowest))


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (tuple, list)):
        for part in x:
            yield from _flat(part)
    else:
        yield x


def softmaxes_of(
    model: nn.Module, call: Callable[[], Any], gated: Mapping[int, Gate] | None = None
) -> tuple[list[Softmax], Any]:
    """Run `call`, which calls the model, and return its softmaxes in order, and what it returned.

    Args:
        model: a model.
        call: runs it.
        gated: gates of softmaxes, by their place in the order.
    """
    stack: list[_Running] = []
    recorder = _Recorder(model, stack, gated or {})
    with ExitStack() as undo:
        undo.enter_context(_named(model, stack))
        undo.enter_context(sdpa_kernel(SDPBackend.MATH))
        undo.enter_context(_operators_of_mha())
        undo.enter_context(torch.no_grad())
        undo.enter_context(recorder)
        output = call()
    for softmax in sorted(recorder.softmaxes, key=lambda x: x.multiplied):
        if softmax.is_attention:
            if softmax.path in recorder.scaled:
                _add_sink(softmax, model.get_submodule(softmax.path))
            for running in softmax.modules:
                running.calls += 1
                softmax.ordinals[running.path] = running.calls
    return recorder.softmaxes, output


def _add_sink(softmax: Softmax, module: nn.Module) -> None:
    """Append the learned sink of a module that scales its outputs by sigmoid(logsumexp - sink) instead."""
    sinks = getattr(module, "sinks", None)
    if isinstance(sinks, Tensor) and not softmax.has_sink() and softmax.logits.shape[-3] == sinks.numel():
        column = sinks.detach().double().reshape(-1, 1, 1).expand(*softmax.logits.shape[:-1], 1)
        softmax.logits = torch.cat([softmax.logits, column], -1)


@contextmanager
def _named(model: nn.Module, stack: list[_Running]) -> Iterator[None]:
    """Keep the paths of the running modules on a stack."""
    with ExitStack() as undo:
        for path, module in model.named_modules():
            name = path or type(model).__name__

            def enter(*_: Any, name: str = name) -> None:
                stack.append(_Running(name))

            def leave(*_: Any) -> None:
                stack.pop()

            undo.callback(module.register_forward_pre_hook(enter).remove)
            undo.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def _operators_of_mha() -> Iterator[None]:
    """Let `nn.MultiheadAttention` run operator by operator."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_MASKED = -5e3  # logits that are lower by this than every product of queries and keys are of masked keys
WINDOW = 8


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Statistics of rows, [rows, heads]; NaN where undefined. Positional ones need as many queries as keys."""

    columns: dict[str, Tensor]

    def table(self) -> dict[str, Tensor]:
        """Return means and maxima per head, under the names of the columns of a profile."""
        counted = ~self.columns["entropy"].isnan()
        table = {"tokens": counted.sum(0).double()}
        for name, values in self.columns.items():
            table[name] = values.nanmean(0)
            table[f"{name}_max"] = torch.where(values.isnan(), -torch.inf, values).amax(0)
        return table


def rows_of(softmax: Softmax, heads: int, axis: int) -> Rows:
    """Return the statistics of each row of a softmax, in float64.

    Args:
        softmax: a softmax, its logits [..., queries, keys].
        heads: number of heads.
        axis: axis of the heads; all heads are in the first axis, after the batch, if this axis is larger.
    """
    logits = softmax.logits
    if logits.shape[axis] != heads:
        logits = logits.unflatten(axis, (-1, heads))
        axis += 1
    logits = logits.movedim(axis, -3)
    queries, columns = logits.shape[-2:]
    logits = logits.reshape(-1, heads, queries, columns)
    keys = columns - softmax.has_sink()
    is_visible = logits[..., :keys] > softmax.masked
    is_row = is_visible.any(-1)
    if queries == keys:  # the query of a key that no query sees is padding
        is_row &= is_visible.any((1, 2))[:, None]
    weights = logits.softmax(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    visible = is_visible.sum(-1) + softmax.has_sink()
    weights = weights[..., :keys]
    values = {
        "entropy": entropy,
        "normalized_entropy": torch.where(visible > 1, entropy / visible.clamp_min(2).double().log(), torch.nan),
        "confidence": weights.amax(-1),
        "max_logit": logits[..., :keys].amax(-1),
    }
    if queries == keys:
        index = torch.arange(keys)
        offset = index - index[:, None]
        masses = {
            "self_mass": offset == 0,
            "previous_mass": offset == -1,
            "next_mass": offset == 1,
            "window_mass": offset.abs() <= WINDOW,
            "mean_distance": offset.abs(),
        }
        values["sink_mass"] = weights.gather(-1, _first_keys(is_visible)[..., None])[..., 0]
        values |= {name: (weights * factor).sum(-1) for name, factor in masses.items()}
    return Rows(
        {name: torch.where(is_row, x, torch.nan).movedim(1, -1).reshape(-1, heads) for name, x in values.items()}
    )


def _first_keys(is_visible: Tensor) -> Tensor:
    """Return, for each row, the first key of its document: where no later query sees a key before, or the reverse."""
    seen = is_visible.any(1)
    seen = seen | seen.mT
    tokens = seen.shape[-1]
    starts = torch.zeros(len(seen), tokens, dtype=torch.long)
    for token in range(1, tokens):
        is_start = ~seen[:, token:, :token].any((1, 2)) & seen[:, token:].any((1, 2)) & seen[:, :token].any((1, 2))
        starts[:, token] = torch.where(is_start, token, starts[:, token - 1])
    return starts[:, None].expand(is_visible.shape[:-1])


def joined(parts: list[Rows]) -> Rows:
    """Return the rows of several calls; columns that one of them does not have are left out."""
    names = [name for name in parts[0].columns if all(name in part.columns for part in parts)]
    return Rows({name: torch.cat([part.columns[name] for part in parts]) for name in names})
