"""Refit shared values and outputs by alternating least squares on a sample of tokens.

Head h writes z_h A B_h, with z_h its attention-weighted inputs, A the value matrix its group shares and B_h its own
output matrix. For fixed A, B is solved directly; for fixed B, A is improved by conjugate gradients, since its normal
matrix has a row for every entry of A. All heads are fitted together: as they attend similarly, one can write what the
shared values of another lose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.head_weights import HeadWeights, sum_over_readers
from polyhead.surgery.calibration.streams import Piece, attention_weights, unpadded_rows
from polyhead.surgery.kv_sharing.conjugate_gradients import TINY, conjugate_gradients

SAMPLE_BYTES = 192 << 20  # independent of the text length
STEPS = 8  # of conjugate gradients per solve; more would overfit the sample


@dataclass(frozen=True, slots=True, eq=False)
class AttendedInputs:
    """Attention-weighted inputs of each head and target outputs of a layer, for a sample of tokens."""

    inputs: Tensor  # [tokens, heads, width]
    targets: Tensor  # [tokens, embed_dim]


def sample_attended(
    model: nn.Module, layer: AttentionLayer, text: Iterable[Piece], swapped: Mapping[str, Tensor], tokens: int
) -> AttendedInputs:
    """Sample inputs of `tokens` tokens with the `swapped` parameters in place, and targets of the original model."""
    assert layer.layout is not None
    row_bytes = layer.layout.num_heads * layer.layout.value_input_dim * 4
    share = min(1.0, SAMPLE_BYTES / (tokens * row_bytes))
    generator = torch.Generator().manual_seed(0)
    inputs, targets = [], []
    for piece in text:
        current, original = (
            piece.capture_attention(model, layer, swapped=swapped),
            piece.capture(model, layer, swapped=None),
        )
        if current is None or original is None:
            continue
        x = current.capture.inputs["value"]  # [batch, keys, width]; attended below is [batch, queries, heads, width]
        attended = torch.einsum("bhnm,bmw->bnhw", attention_weights(current.attended).to(x.dtype), x)
        rows = unpadded_rows(model, layer, piece.batch, attended.flatten(2))
        chosen = (torch.rand(len(rows), generator=generator) < share).to(rows.device)
        inputs.append(rows[chosen].unflatten(1, attended.shape[2:]).float())
        targets.append(unpadded_rows(model, layer, piece.batch, original.written)[chosen].float())
    return AttendedInputs(torch.cat(inputs), torch.cat(targets))


def refined(heads: HeadWeights, sample: AttendedInputs, *, ridge: float, rounds: int) -> HeadWeights:
    """Return heads whose values and outputs fit the targets of this sample more closely.

    With an output bias, the fit is to centred targets and the value bias becomes 0; the output bias is unchanged and
    must be solved afterwards.
    """
    problem = _Alternating.of(heads, sample, ridge)
    value, output = problem.value, problem.solve_output(problem.value)
    for _ in range(rounds):
        value = problem.solve_value(value, output)
        output = problem.solve_output(value)
    value, output = _balanced(value, output, heads)
    bias = heads.value_bias if problem.has_bias else None if heads.value_bias is None else heads.value_bias * 0
    if problem.has_bias:
        value, bias = value[..., :-1], value[..., -1]
    return replace(
        heads,
        value=value.to(heads.value),
        value_bias=None if bias is None else bias.to(heads.value),
        output=output.to(heads.output),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Alternating:
    """Least squares of the layer's output for fixed values or fixed outputs."""

    inputs: Tensor  # [heads, tokens, width], with a column of ones if the value bias is solved for
    targets: Tensor  # [tokens, embed_dim]
    value: Tensor  # [kv_heads, value_dim, width]
    output: Tensor  # [heads, value_dim, embed_dim]
    key_heads: tuple[int, ...]
    ridge: float
    has_bias: bool

    @classmethod
    def of(cls, heads: HeadWeights, sample: AttendedInputs, ridge: float) -> _Alternating:
        inputs, targets, value = sample.inputs.transpose(0, 1), sample.targets, heads.value.float()
        # An output bias absorbs the means, which makes the value bias redundant.
        has_bias = heads.value_bias is not None and heads.output_bias is None
        if heads.output_bias is not None:
            inputs, targets = inputs - inputs.mean(1, keepdim=True), targets - targets.mean(0)
        elif heads.value_bias is not None:
            inputs = torch.cat((inputs, torch.ones_like(inputs[..., :1])), -1)
            value = torch.cat((value, heads.value_bias.float()[..., None]), -1)
        return cls(inputs, targets, value, heads.output.float(), heads.key_heads, ridge, has_bias)

    def solve_output(self, value: Tensor) -> Tensor:
        """Solve for the output matrices, regularised towards those before refitting."""
        features = (self.inputs @ value[list(self.key_heads)].mT).transpose(0, 1).flatten(1).double()
        products = features.T @ features
        weight = self.ridge * products.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        system = products + weight * torch.eye(len(products), dtype=products.dtype, device=products.device)
        rhs = features.T @ self.targets.double() + weight * self.output.flatten(0, 1).double()
        return torch.linalg.solve(system, rhs).float().view(self.output.shape)

    def solve_value(self, value: Tensor, output: Tensor) -> Tensor:
        """Improve the value matrices by conjugate gradients, preconditioned by inputs and outputs."""
        inverses = self._preconditioner(output)
        return conjugate_gradients(
            value,
            [self.targets - self._written(value, output)],
            forward=lambda direction: [self._written(direction, output)],
            energy=lambda change: change[0].square().sum(),
            adjoint=lambda residual: self._gradient(residual[0], output),
            precondition=lambda gradient: inverses[1] @ gradient @ inverses[0],
            steps=STEPS,
        )

    def _written(self, value: Tensor, output: Tensor) -> Tensor:
        features = self.inputs @ value[list(self.key_heads)].mT
        return features.transpose(0, 1).flatten(1) @ output.flatten(0, 1)

    def _gradient(self, residual: Tensor, output: Tensor) -> Tensor:
        by_head = (residual @ output.mT).mT @ self.inputs  # [heads, value_dim, width]
        return self._sum_over_readers(by_head)

    def _sum_over_readers(self, by_head: Tensor) -> Tensor:
        return sum_over_readers(by_head, self.key_heads, len(self.value))

    def _preconditioner(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inverses of both Kronecker factors of the normal matrix, ignoring cross-head terms."""
        sides = (self._sum_over_readers(self.inputs.mT @ self.inputs), self._sum_over_readers(output @ output.mT))
        return _inverse(sides[0], self.ridge), _inverse(sides[1], 1e-6)


def _inverse(symmetric: Tensor, ridge: float) -> Tensor:
    symmetric = symmetric.double()
    size = symmetric.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]
    identity = torch.eye(symmetric.shape[1], dtype=symmetric.dtype, device=symmetric.device)
    return torch.linalg.inv(symmetric + ridge * size * identity).float()


def _balanced(value: Tensor, output: Tensor, heads: HeadWeights) -> tuple[Tensor, Tensor]:
    """Rescale value channels and output rows to equal norms; the layer's output is unchanged."""
    sizes = torch.stack([output[readers].square().sum(-1).mean(0) for readers in heads.readers])
    scale = (sizes.sqrt() / value.norm(dim=-1).clamp_min(TINY)).clamp_min(TINY).sqrt()[..., None]
    return value * scale, output / scale[list(heads.key_heads)]
