"""Tables with one row per position, cached per device and shared by layers of equal parameters.

They are not module buffers, because a buffer would follow `.half()`, be lost by `to_empty()` after construction on the
meta device, be copied by `deepcopy`, and be stored once per layer instead of once per process.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.ops.common.tracing import is_exporting

FIRST_CAPACITY = 256
# Rows beyond this are computed when used and not kept in a table, whose memory would outweigh the time saved.
MAX_CAPACITY = 1 << 16


@dataclass(frozen=True)
class Recipe:
    """Parameters of tables by position, such as cos and sin. Equal recipes share one `RowTable`."""

    def build(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the rows [..., width] of each table at integer `positions` [...]."""
        raise NotImplementedError


class RowTable:
    """Cached tables of one recipe, one for each device and dtype."""

    __slots__ = ("__weakref__", "_grown", "_recent", "recipe")

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        # With each tensor its version: one that a caller has changed in place is built again.
        self._grown: dict[tuple[torch.device, torch.dtype], tuple[Tensor, int]] = {}
        # Key and value in one attribute, so that another thread never reads one without the other.
        self._recent: tuple[object, tuple[Tensor, ...], list[int]] = (None, (), [])

    def rows(self, start: int, count: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return rows start .. start + count - 1 of each table, [count, width]; the last result is cached as well.

        A compiled or exported graph computes them, for any length.
        """
        if torch.compiler.is_compiling():
            return materialise_rows(self.recipe.build(torch.arange(start, start + count, device=device), dtype))
        key = (start, count, device, dtype)
        recent = self._recent
        # A table cached under a dispatch mode (e.g. fake tensors) would be invalid outside it, and vice versa.
        in_dispatch_mode = torch._C._len_torch_dispatch_stack()
        if recent[0] == key and not in_dispatch_mode and _versions(recent[1]) == recent[2]:
            return recent[1]
        stop = start + count
        # An inference tensor could not be saved for the backward of a later training step.
        with torch.inference_mode(False), torch.no_grad():
            if in_dispatch_mode or start < 0 or stop > MAX_CAPACITY:
                rows = self.recipe.build(torch.arange(start, stop, device=device), dtype)
            else:
                rows = self._grown_to(stop, device, dtype)[:, start:stop].unbind(0)
        if _is_cacheable(rows[0]):
            self._recent = (key, rows, _versions(rows))
        return rows

    def _grown_to(self, stop: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the stacked tables, [tables, at least `stop`, width]; grows by powers of two."""
        full, version = self._grown.get((device, dtype), (None, 0))
        if full is None or full.shape[1] < stop or full._version != version:
            capacity = max(FIRST_CAPACITY, 1 << (stop - 1).bit_length())
            full = torch.stack(self.recipe.build(torch.arange(capacity, device=device), dtype))
            if _is_cacheable(full):
                self._grown[device, dtype] = full, full._version
        return full

    def __deepcopy__(self, memo: dict[int, object]) -> RowTable:
        return self

    def __reduce__(self) -> tuple[object, tuple[Recipe]]:
        return row_table, (self.recipe,)


_tables: weakref.WeakValueDictionary[Recipe, RowTable] = weakref.WeakValueDictionary()


def row_table(recipe: Recipe) -> RowTable:
    """Return the process-wide table of a recipe; it is freed with the last module that uses it."""
    table = _tables.get(recipe)
    if table is None:
        table = _tables[recipe] = RowTable(recipe)
    return table


def materialise_rows(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Materialise rows in a compiled graph, which would otherwise recompute sines per batch and head."""
    if torch.compiler.is_compiling() and not is_exporting():
        # Inductor fuses a formula into each of its users, but as_strided requires a buffer.
        return tuple(row.as_strided(row.size(), row.stride()) for row in rows)
    return rows


def _versions(rows: tuple[Tensor, ...]) -> list[int]:
    return [row._version for row in rows]


def _is_cacheable(table: Tensor) -> bool:
    """Return True if the table stays valid after the current trace, transform or capture."""
    if type(table) is not Tensor or torch._C._functorch.is_functorch_wrapped_tensor(table):
        return False
    return not (table.is_cuda and torch.cuda.is_current_stream_capturing())


def angle_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of position * frequency: float64, since float32 loses the phase of large positions.

    MPS has no float64, so float32 is used there.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def powers(base: float, count: int, dim: int, device: torch.device) -> Tensor:
    """Return base ** (-2 i / dim) for i = 0 .. count - 1, in radians per token."""
    pair = torch.arange(count, device=device).to(angle_dtype(device))
    return torch.exp(times(pair, -2.0 * math.log(base) / dim))


def times(x: Tensor, number: float) -> Tensor:
    """Return x * number as two products of parts with at most 24 bits, since ONNX stores floats in float32."""
    shifted = number * (2**29 + 1)
    coarse = shifted - (shifted - number)
    return x * coarse + x * (number - coarse)


def sine_and_cosine(angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return sin and cos in `dtype` of an angle, first reduced to [-pi, pi] in its own precision."""
    if angle.dtype != dtype:
        turns = (angle * (0.5 / math.pi)).round()
        angle = (angle - times(turns, 2.0 * math.pi)).to(dtype)
    return angle.sin(), angle.cos()
