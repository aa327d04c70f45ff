"""Shared values refitted by alternating least squares, on a sample of tokens: each step is linear and solved as such.

Head h writes z_h A B_h, z_h what its attention makes of the layer's inputs, A the value matrix that its group shares
and B_h its own output matrix. With A given, B is one solution of least squares; with B given, A is another, found by
conjugate gradients, since its system is as large as the matrix squared. What the heads of a layer attend to is alike,
so that together they can write what each alone could not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.head_weights import HeadWeights, sum_over_readers
from polyhead.surgery.calibration.layer_capture import attention_weights, unpadded_rows
from polyhead.surgery.calibration.streams import Piece
from polyhead.surgery.kv_sharing.conjugate_gradients import TINY, conjugate_gradients

SAMPLE_BYTES = 192 << 20  # of what is kept of a text, whatever its length
STEPS = 8  # of conjugate gradients, each time; more would fit the sample and not the text


@dataclass(frozen=True, slots=True, eq=False)
class AttendedInputs:
    """For a sample of tokens: what each head's attention makes of the layer's inputs, and what should be written."""

    inputs: Tensor  # [tokens, heads, width]
    targets: Tensor  # [tokens, embed_dim]


def sample_attended(
    model: nn.Module,
    layer: AttentionLayer,
    text: Iterable[Piece],
    lending: Mapping[str, Tensor],
    tokens: int,
) -> AttendedInputs:
    """A sample of a text that has so many tokens; heads attend as with the parameters that are lent."""
    assert layer.layout is not None
    row_bytes = layer.layout.num_heads * layer.layout.value_input_dim * 4
    share = min(1.0, SAMPLE_BYTES / (tokens * row_bytes))
    generator = torch.Generator().manual_seed(0)
    inputs, targets = [], []
    for piece in text:
        seen, wanted = piece.capture_attention(model, layer, lending=lending), piece.capture(model, layer, lending=None)
        if seen is None or wanted is None:
            continue
        x = seen.capture.inputs["value"]  # [batch, keys, width], of which heads make [batch, queries, heads, width]
        made = torch.einsum("bhnm,bmw->bnhw", attention_weights(seen.attended).to(x.dtype), x)
        rows = unpadded_rows(model, layer, piece.batch, made.flatten(2))
        chosen = (torch.rand(len(rows), generator=generator) < share).to(rows.device)
        inputs.append(rows[chosen].unflatten(1, made.shape[2:]).float())
        targets.append(unpadded_rows(model, layer, piece.batch, wanted.written)[chosen].float())
    return AttendedInputs(torch.cat(inputs), torch.cat(targets))


def refined(heads: HeadWeights, sample: AttendedInputs, *, ridge: float, rounds: int) -> HeadWeights:
    """Heads whose values and outputs together write what should be written, on this sample, nearer than before."""
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
    inputs: Tensor  # [heads, tokens, width], with a column of ones where values have a bias that counts
    targets: Tensor  # [tokens, embed_dim]
    value: Tensor  # [kv_heads, value_dim, width]
    output: Tensor  # [heads, value_dim, embed_dim]
    key_heads: tuple[int, ...]
    ridge: float
    has_bias: bool

    @classmethod
    def of(cls, heads: HeadWeights, sample: AttendedInputs, ridge: float) -> _Alternating:
        inputs, targets, value = sample.inputs.transpose(0, 1), sample.targets, heads.value.float()
        # Where there is an output bias it takes the means, and a bias of values could say no more.
        has_bias = heads.value_bias is not None and heads.output_bias is None
        if heads.output_bias is not None:
            inputs, targets = inputs - inputs.mean(1, keepdim=True), targets - targets.mean(0)
        elif heads.value_bias is not None:
            inputs = torch.cat((inputs, torch.ones_like(inputs[..., :1])), -1)
            value = torch.cat((value, heads.value_bias.float()[..., None]), -1)
        return cls(inputs, targets, value, heads.output.float(), heads.key_heads, ridge, has_bias)

    def solve_output(self, value: Tensor) -> Tensor:
        """The best output matrices, near to what they were."""
        made = (self.inputs @ value[list(self.key_heads)].mT).transpose(0, 1).flatten(1).double()
        products = made.T @ made
        weight = self.ridge * products.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        system = products + weight * torch.eye(len(products), dtype=products.dtype, device=products.device)
        wanted = made.T @ self.targets.double() + weight * self.output.flatten(0, 1).double()
        return torch.linalg.solve(system, wanted).float().view(self.output.shape)

    def solve_value(self, value: Tensor, output: Tensor) -> Tensor:
        """Better value matrices by conjugate gradients from these, in the metric of inputs and outputs."""
        before = self._before(output)
        return conjugate_gradients(
            value,
            [self.targets - self._written(value, output)],
            change=lambda direction: [self._written(direction, output)],
            energy=lambda change: change[0].square().sum(),
            gradient=lambda left: self._gradient(left[0], output),
            scaled=lambda gradient: before[1] @ gradient @ before[0],
            steps=STEPS,
        )

    def _written(self, value: Tensor, output: Tensor) -> Tensor:
        made = self.inputs @ value[list(self.key_heads)].mT
        return made.transpose(0, 1).flatten(1) @ output.flatten(0, 1)

    def _gradient(self, left: Tensor, output: Tensor) -> Tensor:
        by_head = (left @ output.mT).mT @ self.inputs  # [heads, value_dim, width]
        return self._summed(by_head)

    def _summed(self, by_head: Tensor) -> Tensor:
        return sum_over_readers(by_head, self.key_heads, len(self.value))

    def _before(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The inverses of both sides of the system as if heads had nothing to do with each other."""
        sides = (self._summed(self.inputs.mT @ self.inputs), self._summed(output @ output.mT))
        return _inverse(sides[0], self.ridge), _inverse(sides[1], 1e-6)


def _inverse(symmetric: Tensor, ridge: float) -> Tensor:
    symmetric = symmetric.double()
    size = symmetric.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]
    identity = torch.eye(symmetric.shape[1], dtype=symmetric.dtype, device=symmetric.device)
    return torch.linalg.inv(symmetric + ridge * size * identity).float()


def _balanced(value: Tensor, output: Tensor, heads: HeadWeights) -> tuple[Tensor, Tensor]:
    """The same function with values whose channels are as long as the outputs that read them, in the mean."""
    sizes = torch.stack([output[readers].square().sum(-1).mean(0) for readers in heads.readers])
    scale = (sizes.sqrt() / value.norm(dim=-1).clamp_min(TINY)).clamp_min(TINY).sqrt()[..., None]
    return value * scale, output / scale[list(heads.key_heads)]
