"""Pruning that compensates: W_O of the heads that stay is solved for what the whole layer wrote before.

Least squares over the moments of calibration text, in closed form. With X the outputs of all heads side by side, W
their output matrix and S the channels that stay, the new matrix minimises |X W - X_S W_S|² + λ |W_S - W_S before|²,
λ being `ridge` times the mean square of a channel: the weaker the evidence, the nearer W_S stays to what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.surgery.anatomy import find_layers
from polyhead.surgery.apply import apply, edits_by_layer, undo
from polyhead.surgery.edits import HeadEdit, checked_edits
from polyhead.surgery.head_weights import HeadWeights
from polyhead.surgery.moments import OutputMoments, gather_moments
from polyhead.surgery.records import EditRecord

RIDGE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class OutputRepair:
    """Solves the output matrices of edited layers; for `apply(model, edits, repair=OutputRepair(moments))`.

    The output bias takes its part where a layer has one; a layer without is given none, since no config could say it.
    """

    moments: Mapping[str, OutputMoments]
    ridge: float = RIDGE

    def __post_init__(self) -> None:
        check_ridge(self.ridge)

    def __call__(self, path: str, before: HeadWeights, after: HeadWeights) -> HeadWeights:
        if path not in self.moments:
            raise OptionError(f"repair needs the moments of every edited layer, got none of {path!r}")
        if None in after.origins:
            raise OptionError(
                "repair solves for heads that give what they gave before, got heads of "
                f"{path!r} that were merged, regrouped or new"
            )
        kept = [head for head in after.origins if head is not None]
        problem = Problem.of(self.moments[path], before, self.ridge, path)
        matrix, bias = problem.solve(kept)
        return replace(
            after,
            output=matrix.view(after.output.shape).to(after.output),
            output_bias=None if after.output_bias is None else bias.to(after.output_bias),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """The least squares of one layer."""

    products: Tensor  # [channels, channels], centred where a bias can take the mean
    mean: Tensor  # [channels]
    matrix: Tensor  # [channels, embed_dim], W_O as it is
    bias: Tensor  # [embed_dim], zero where there is none
    head_width: int
    ridge: float
    centred: bool

    @classmethod
    def of(cls, moments: OutputMoments, heads: HeadWeights, ridge: float, path: str = "the layer") -> Problem:
        channels = heads.output.shape[0] * heads.output.shape[1]
        if len(moments.total) != channels:
            raise OptionError(
                f"the heads of {path} have {channels} channels, got moments of {len(moments.total)}; gather them anew"
            )
        if moments.count < channels:
            raise OptionError(
                f"calibration text must have at least as many tokens as the heads of {path} have channels, {channels}, "
                f"got {moments.count}"
            )
        centred = heads.output_bias is not None
        mean, products = moments.compute(centred=centred)
        matrix = heads.output.flatten(0, 1).to("cpu", torch.float64)
        zero = matrix.new_zeros(matrix.shape[1])
        bias = zero if heads.output_bias is None else heads.output_bias.to("cpu", torch.float64)
        return cls(products, mean, matrix, bias, heads.output.shape[1], ridge, centred)

    @property
    def scale(self) -> float:
        """What `ridge` is multiplied by: the mean square of a channel."""
        return float(self.products.diagonal().mean())

    def channels(self, heads: Sequence[int]) -> Tensor:
        """The channels of these heads, in their order."""
        return (torch.tensor(heads)[:, None] * self.head_width + torch.arange(self.head_width)).flatten()

    def factor(self, channels: Tensor) -> Tensor:
        """The Cholesky factor of the system over these channels, ridge included."""
        ridge = self.ridge * self.scale * torch.eye(len(channels), dtype=torch.float64)
        factor, failed = torch.linalg.cholesky_ex(self.products[channels][:, channels] + ridge)
        if int(failed):
            raise OptionError(
                f"the outputs of the heads must not be linear in each other, got a singular system with ridge "
                f"{self.ridge}; give more text or a larger ridge"
            )
        return factor

    def solve(self, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """W_O of the heads that stay, [their channels, embed_dim], and the output bias."""
        kept = self.channels(heads)
        old, ridge = self.matrix[kept], self.ridge * self.scale
        if self.scale == 0:  # heads that write nothing have nothing to be repaired
            return old, self.bias
        wanted = self.products[kept] @ self.matrix + ridge * old
        factor = self.factor(kept)
        new = torch.cholesky_solve(wanted, factor)
        return new, self.bias + self.mean @ self.matrix - self.mean[kept] @ new if self.centred else self.bias

    def loss(self, heads: Sequence[int], matrix: Tensor | None = None) -> float:
        """The mean square of what the layer's output is off with these heads alone, as a share of its own mean square.

        `matrix` is their W_O, as it was by default; the mean counts as taken by the bias where there is one.
        """
        kept = self.channels(heads)
        off = self.matrix.clone()
        off[kept] -= self.matrix[kept] if matrix is None else matrix
        return float((off * (self.products @ off)).sum() / (self.matrix * (self.products @ self.matrix)).sum())


def apply_in_order(
    model: nn.Module,
    edits: Sequence[HeadEdit],
    batches: Callable[[], Iterable[Mapping[str, Any]]],
    *,
    ridge: float = RIDGE,
    expect: str | None = None,
) -> EditRecord:
    """Edit layer by layer, each repaired on what the edited layers before it feed it; one record undoes all.

    Args:
        batches: called once for each edited layer, gives the calibration text as `gather_moments` takes it.
        ridge, expect: as in `OutputRepair` and `apply`.
    """
    check_ridge(ridge)
    grouped = edits_by_layer(find_layers(model), checked_edits(edits))
    order = {layer.path: place for place, layer in enumerate(find_layers(model))}
    records: list[EditRecord] = []
    try:
        for layer, own in sorted(grouped, key=lambda pair: order[pair[0].path]):
            moments = gather_moments(model, batches(), paths=[layer.path])
            known = expect if not records else None
            records.append(apply(model, own, expect=known, repair=OutputRepair(moments, ridge)))
    except BaseException:
        for record in reversed(records):
            undo(model, record)
        raise
    return EditRecord(
        edits=tuple(edit for record in records for edit in record.edits),
        before=records[0].before,
        after=records[-1].after,
        layers=tuple(layer for record in records for layer in record.layers),
        config=tuple(change for record in records for change in record.config),
        tensors={name: x for record in records for name, x in record.tensors.items()},
        shapes={name: shape for record in records for name, shape in record.shapes.items()},
    )


def check_ridge(ridge: object) -> None:
    if isinstance(ridge, bool) or not isinstance(ridge, int | float) or not 0 <= ridge < float("inf"):
        raise OptionError(f"ridge must be a number of at least 0, got {ridge!r}")
