"""Quadratic relative positions: a Gaussian attention bias with a learned centre and width per head."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError, ShapeError
from polyhead.layers.positions.biases import BiasesByDistance, bias_device, bias_dtype, cast_bias, check_lengths
from polyhead.layers.positions.position_encoding import BiasesLogits, check_count, check_positive
from polyhead.masks import Mask


class _Gaussian(BiasesLogits):
    """Base of both encodings, with the parameters `center` [heads, axes] and `log_alpha` [heads]."""

    axes: int

    def __init__(self, num_heads: int, alpha: float, center_std: float) -> None:
        super().__init__()
        check_count("num_heads", num_heads)
        check_positive("alpha", alpha)
        if not 0 <= center_std < math.inf:
            raise OptionError(f"center_std must be at least 0 and finite, got {center_std}")
        self.num_heads = num_heads
        self._initial = (float(alpha), float(center_std))
        self.center = nn.Parameter(torch.empty(num_heads, self.axes))
        self.log_alpha = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw centres from a normal distribution around the query (Cordonnier et al. 2020); all widths are equal."""
        alpha, center_std = self._initial
        nn.init.normal_(self.center, std=center_std)
        nn.init.constant_(self.log_alpha, math.log(alpha))

    @property
    def alpha(self) -> Tensor:
        """Inverse squared width of each head, [heads]; positive, because its logarithm is learned."""
        return self.log_alpha.exp()

    @torch.no_grad()
    def attend_to(self, shifts: Sequence[float] | Sequence[Sequence[float]], *, alpha: float = 32.0) -> None:
        """Centre head h at offset `shifts[h]` from the query; a large alpha makes it nearly one-hot.

        Args:
            shifts: offset of each head, an integer or (rows, columns).
            alpha: sharpness of every head.
        """
        check_positive("alpha", alpha)
        center = torch.tensor(shifts, dtype=torch.float64).reshape(len(shifts), -1)
        if center.shape != self.center.shape:
            raise ShapeError(
                f"attend_to takes a shift of {self.axes} numbers for each of the {self.num_heads} heads, "
                f"got {len(shifts)} of {center.shape[1]}"
            )
        self.center.copy_(center)
        self.log_alpha.fill_(math.log(alpha))

    def _squares(self, axis: int, before: int, after: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return -alpha * (distance - center)**2 along an axis, [heads, distances -before .. after]."""
        distance = torch.arange(-before, after + 1, device=device).to(dtype)
        center = self.center[:, axis, None].to(device, dtype)
        return -self.alpha.to(device, dtype).unsqueeze(1) * (distance - center).square()


class QuadraticRelative1D(_Gaussian, BiasesByDistance):
    """Bias -alpha_h * (key - query - center_h)**2 on a sequence (Cordonnier et al. 2020).

    Args:
        num_heads: heads of the layer.
        alpha: initial sharpness of every head.
        center_std: standard deviation of the initial centres, in tokens.

    >>> previous = QuadraticRelative1D(1)
    >>> previous.attend_to([-1])
    >>> previous.mask(query_length=2, key_length=3).relative_biases[0].table.tolist()
    [[-32.0, -0.0, -32.0, -128.0]]
    """

    axes = 1

    def __init__(self, num_heads: int, *, alpha: float = 0.5, center_std: float = 2.0) -> None:
        super().__init__(num_heads, alpha, center_std)

    def table(self, before: int, after: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self._squares(0, before, after, device, dtype)

    def extra_repr(self) -> str:
        return f"{self.num_heads}"


class QuadraticRelative2D(_Gaussian):
    """Bias `-alpha_h * |key cell - query cell - center_h|**2` on a grid (Cordonnier et al. 2020).

    Queries and keys are the cells of one grid in row-major order; `center` is (rows down, columns right). With a large
    alpha a head attends to one cell at a fixed offset, at the border to the nearest cell, so that k**2 heads can
    compute any k x k convolution with replicated borders.

    Args:
        num_heads: heads of the layer.
        height: rows of the grid.
        width: columns of the grid.
        alpha: initial sharpness of every head.
        center_std: standard deviation of the initial centres, in cells.
    """

    axes = 2

    def __init__(self, num_heads: int, height: int, width: int, *, alpha: float = 0.5, center_std: float = 2.0) -> None:
        check_count("height", height)
        check_count("width", width)
        super().__init__(num_heads, alpha, center_std)
        self.grid = (height, width)

    def forward(
        self,
        query_length: int,
        key_length: int,
        *,
        grid: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Mask:
        """Return the bias [1, heads, cells, cells] as a Mask; `grid` (height, width) overrides the module's.

        Args:
            query_length: cells of the grid.
            key_length: cells of the grid.
            grid: (height, width) of this call.
            device: device of the bias.
            dtype: dtype of the bias.
        """
        check_lengths(query_length, key_length)
        height, width = self.grid if grid is None else grid
        cells = height * width
        if query_length != cells or key_length != cells:
            raise ShapeError(
                f"queries and keys must be the {cells} cells of the {height} x {width} grid, "
                f"got {query_length} and {key_length}; pass grid=(height, width) for another one"
            )
        target_device = bias_device(self, device)
        compute_dtype = bias_dtype(self, dtype)
        rows = self._pairwise(0, height, target_device, compute_dtype)[:, :, None, :, None]
        columns = self._pairwise(1, width, target_device, compute_dtype)[:, None, :, None, :]
        bias = (rows + columns).reshape(1, self.num_heads, cells, cells)
        # zero_one skips the check for boolean masks in a wrong dtype, which this bias cannot be.
        return Mask.bias(cast_bias(bias, dtype), zero_one=True)

    def _pairwise(self, axis: int, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the term of one axis for every pair of coordinates, [heads, queries, keys]."""
        coordinate = torch.arange(size, device=device)
        distance = coordinate[None, :] - coordinate[:, None] + (size - 1)
        return self._squares(axis, size - 1, size - 1, device, dtype)[:, distance]

    def extra_repr(self) -> str:
        return f"{self.num_heads}, height={self.grid[0]}, width={self.grid[1]}"
