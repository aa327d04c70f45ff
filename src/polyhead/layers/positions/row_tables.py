"""Tables with one row a position, built once for each device and shared by every layer that asks for the same one.

A table lives here and not in a module's buffers, because a buffer would follow `.half()`, be lost by `to_empty()`
after construction on the meta device, be copied by `deepcopy`, and be kept once a layer instead of once a process.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.ops.common.tracing import is_exporting

FIRST_CAPACITY = 256
# Beyond this many rows a table is computed for the rows in use alone: the memory would outweigh the time it saves.
LARGEST_CAPACITY = 1 << 16


@dataclass(frozen=True)
class Recipe:
    """Everything a table's rows depend on besides the position. Equal recipes share one table."""

    def build(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The tables' rows [..., width] at integer `positions` [...]."""
        raise NotImplementedError


class RowTable:
    """The grown tables of one recipe, one for each device and dtype."""

    __slots__ = ("__weakref__", "_grown", "_recent", "recipe")

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._grown: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        # One attribute holds key and value, so that a second thread never sees one without the other.
        self._recent: tuple[object, tuple[Tensor, ...]] = (None, ())

    def rows(self, start: int, count: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Rows start .. start + count - 1 of each table, [count, width]; the last answer is kept."""
        key = (start, count, device, dtype)
        recent = self._recent
        # Under a dispatch mode (fake tensors among them) a kept table would be a stranger.
        strange = torch._C._len_torch_dispatch_stack()
        if recent[0] == key and not strange:
            return recent[1]
        stop = start + count
        # An inference tensor could never be saved for the backward of a later training step.
        with torch.inference_mode(False), torch.no_grad():
            if strange or start < 0 or stop > LARGEST_CAPACITY:
                rows = self.recipe.build(torch.arange(start, stop, device=device), dtype)
            else:
                rows = self._grown_to(stop, device, dtype)[:, start:stop].unbind(0)
        if _may_be_kept(rows[0]):
            self._recent = (key, rows)
        return rows

    def _grown_to(self, stop: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """All tables stacked, [tables, at least `stop`, width]; a power of two, so that growing is seldom."""
        full = self._grown.get((device, dtype))
        if full is None or full.shape[1] < stop:
            capacity = max(FIRST_CAPACITY, 1 << (stop - 1).bit_length())
            full = torch.stack(self.recipe.build(torch.arange(capacity, device=device), dtype))
            if _may_be_kept(full):
                self._grown[device, dtype] = full
        return full

    def __deepcopy__(self, memo: dict[int, object]) -> RowTable:
        return self

    def __reduce__(self) -> tuple[object, tuple[Recipe]]:
        return row_table, (self.recipe,)


_tables: weakref.WeakValueDictionary[Recipe, RowTable] = weakref.WeakValueDictionary()


def row_table(recipe: Recipe) -> RowTable:
    """The process-wide table of a recipe; it is freed with the last module that uses it."""
    table = _tables.get(recipe)
    if table is None:
        table = _tables[recipe] = RowTable(recipe)
    return table


def rows_of(table: RowTable, start: int, count: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """`table.rows` in eager mode; in a compiled or exported graph the formula itself, which knows no length limit."""
    if torch.compiler.is_compiling():
        return in_a_buffer(table.recipe.build(torch.arange(start, start + count, device=device), dtype))
    return table.rows(start, count, device, dtype)


def in_a_buffer(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same rows, of which a compiled graph does not compute the sines again for every batch and head."""
    if torch.compiler.is_compiling() and not is_exporting():
        # Inductor fuses a formula into each of its users, but an as_strided needs memory to point into.
        return tuple(row.as_strided(row.size(), row.stride()) for row in rows)
    return rows


def _may_be_kept(table: Tensor) -> bool:
    """Whether the table means the same after the current trace, transform or capture has ended."""
    if type(table) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(table):
        return False
    return not (table.is_cuda and torch.cuda.is_current_stream_capturing())


def precise(device: torch.device) -> torch.dtype:
    """The dtype in which position * frequency is computed: float32 would lose the phase of far positions."""
    return torch.float32 if device.type == "mps" else torch.float64


def powers(base: float, count: int, dim: int, device: torch.device) -> Tensor:
    """base ** (-2 i / dim) for i = 0 .. count - 1: radians a token, as rotary and sinusoidal positions share them."""
    pair = torch.arange(count, device=device).to(precise(device))
    return torch.exp(times(pair, -2.0 * math.log(base) / dim))


def times(x: Tensor, number: float) -> Tensor:
    """x * number in two steps, by numbers of few bits: an ONNX program keeps only 24 bits of a Python float."""
    shifted = number * (2**29 + 1)
    coarse = shifted - (shifted - number)
    return x * coarse + x * (number - coarse)


def sine_and_cosine(angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """sin and cos in `dtype` of an angle of any size, which is first brought into [-pi, pi] in its own precision."""
    if angle.dtype != dtype:
        turns = (angle * (0.5 / math.pi)).round()
        angle = (angle - times(turns, 2.0 * math.pi)).to(dtype)
    return angle.sin(), angle.cos()
