"""Shared by the tests of memory: track every storage that operators allocate on a CPU until it is freed."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyhead.costs import Workload
from polyhead.costs.memory import MemoryEstimate
from polyhead.layers.config import AttentionConfig, build_attention
from polyhead.layers.positions.config import RotaryConfig


class Storages(TorchDispatchMode):
    """Bytes of all storages that operators have given out, now and at the peak."""

    def __init__(self, *held: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        for tensor in held:
            self._enter(tensor)

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._leave, key)

    def _leave(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._enter(leaf)
        return result


def table_growth(found: MemoryEstimate, config: AttentionConfig, work: Workload) -> int:
    """Bytes of the tables of RoPE that `Storages` does not see: in a dispatch mode they have the new rows alone."""
    positions = getattr(config, "positions", None)
    if not isinstance(positions, RotaryConfig):
        return 0
    return dict(found.tables)[repr(positions)] - 2 * 4 * max(work.queries, work.new_keys) * positions.rotary_dim


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes at the peak of a call, and what a forward keeps for its backward beside its input and parameters."""

    peak: int
    kept: int


def measured(
    config: AttentionConfig, work: Workload, *, dtype: torch.dtype = torch.float32, cache: Any = None
) -> Measured:
    """One call of a built layer on the CPU; the tokens behind which it stands go into the cache first."""
    layer = build_attention(config, dtype=dtype)
    layout: Any = config.layout  # type: ignore[attr-defined]

    def tokens(count: int, width: int = layout.embed_dim) -> Tensor:
        return torch.randn(work.batch, count, width, dtype=dtype)

    x, gradient = tokens(work.queries).requires_grad_(work.training), None
    source: list[Any] = []
    if work.source is not None:
        widths = [getattr(layout, name, layout.embed_dim) for name in ("key_input_dim", "value_input_dim")]
        source = [tokens(work.source, width).requires_grad_(work.training) for width in dict.fromkeys(widths)]
    inputs = [x, *source]
    if work.remembered:
        with torch.no_grad():
            memory = layer.remember(*source)
        source, inputs = [memory], [x, *(each.requires_grad_(work.training) for each in (memory.key, memory.value))]
    with torch.set_grad_enabled(work.training):
        if work.past:
            layer(tokens(work.past), cache=cache)
        if work.training:
            gradient = tokens(work.queries)
            for parameter in layer.parameters():  # as after the step before
                parameter.grad = torch.zeros_like(parameter)
        held = [*inputs, *layer.parameters(), *(p.grad for p in layer.parameters() if p.grad is not None)]
        held += [gradient] if gradient is not None else []
        stored = [] if cache is None else list(cache._buffers)
        kept: dict[int, torch.UntypedStorage] = {}
        own = {tensor.untyped_storage()._cdata for tensor in held}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage
            return tensor

        with Storages(*held, *stored) as storages:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = layer(x, *source, cache=cache).output
            size = sum(storage.nbytes() for storage in kept.values())
            kept.clear()
            if gradient is not None:
                output.backward(gradient)
    return Measured(storages.peak, size)
