"""Refit shared keys and their queries to the original logits by alternating least squares.

The objective is Σ a (δ - Σ a δ)² over the keys of each row, with a the original attention weights and δ the error of
the logits: to second order, twice the KL divergence of the new attention from the original. It is quadratic in the
query matrices for fixed keys and in the key matrices for fixed queries; each is solved by conjugate gradients. The
rotation of each token is measured, so rotary positions need no other treatment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.head_weights import HeadWeights, sum_over_readers
from polyhead.surgery.calibration.input_moments import with_bias
from polyhead.surgery.calibration.key_transforms import KeyTransform
from polyhead.surgery.calibration.layer_capture import attention_weights
from polyhead.surgery.calibration.streams import AttentionCapture, Piece
from polyhead.surgery.kv_sharing.conjugate_gradients import TINY, conjugate_gradients

SAMPLE_BYTES = 192 << 20  # of logits and weights, independent of the text length
STEPS = 10  # of conjugate gradients per solve


@dataclass(frozen=True, slots=True, eq=False)
class LogitSample:
    """Inputs, rotations and attention of a layer's heads for one batch."""

    query_inputs: Tensor  # [batch, queries, width + 1]
    key_inputs: Tensor  # [batch, keys, width + 1]
    query_rotations: Tensor  # [batch, 1, queries, pairs], complex
    key_rotations: Tensor  # [batch, 1, keys, pairs], complex
    weights: Tensor  # [batch, heads, queries, keys], zero in rows of padding tokens
    logits: Tensor  # same shape, minus the attention-weighted mean of each row
    scale: float  # of the product of projected queries and keys

    @property
    def num_bytes(self) -> int:
        return self.weights.nbytes + self.logits.nbytes


def sample_logits(
    model: nn.Module,
    layer: AttentionLayer,
    heads: HeadWeights,
    form: KeyTransform,
    text: Iterable[Piece],
    lending: Mapping[str, Tensor],
) -> list[LogitSample]:
    """Sample a layer's logits in the model with `lending` parameters; a long text is thinned evenly."""
    every = 1
    numbered: list[tuple[int, LogitSample]] = []
    for number, piece in enumerate(text):
        if number % every:
            continue
        capture = piece.capture_attention(model, layer, lending=lending)
        if capture is None:
            continue
        numbered.append((number, _sample(heads, form, capture)))
        while len(numbered) > 1 and sum(sample.num_bytes for _, sample in numbered) > SAMPLE_BYTES:
            every *= 2  # halve the sample when it exceeds its budget
            numbered = [(number, sample) for number, sample in numbered if number % every == 0]
    return [sample for _, sample in numbered]


def _sample(heads: HeadWeights, form: KeyTransform, capture: AttentionCapture) -> LogitSample:
    attended, inputs = capture.attended, capture.capture.inputs
    weights = attention_weights(attended).float()
    if capture.real is not None:
        weights = weights * capture.real[:, None, :, None].to(weights)
    augmented = [torch.cat((x, torch.ones_like(x[..., :1])), -1).float() for x in (inputs["query"], inputs["key"])]
    projected = [
        torch.einsum("bni,hdi->bhnd", x, with_bias(*weight_and_bias).float())
        for x, weight_and_bias in zip(
            augmented, ((heads.query, heads.query_bias), (heads.key, heads.key_bias)), strict=True
        )
    ]
    readers = list(heads.key_heads)
    key = attended.key if attended.key.shape[1] == heads.num_heads else attended.key[:, readers]
    rotated = [attended.query.float(), key.float()]
    projected[1] = projected[1][:, readers]
    logits = rotated[0] @ rotated[1].mT
    rotations, size = [], 1.0
    for source, target in zip(projected, rotated, strict=True):
        size *= float(target.norm() / source.norm().clamp_min(TINY))
        correlation = (_pairs(source, form).conj() * _pairs(target, form)).sum(1, keepdim=True)
        rotations.append(correlation / correlation.abs().clamp_min(TINY))
    scale = attended.query.shape[-1] ** -0.5 if attended.scale is None else float(attended.scale)
    return LogitSample(
        query_inputs=augmented[0],
        key_inputs=augmented[1],
        query_rotations=rotations[0],
        key_rotations=rotations[1],
        weights=weights,
        logits=_centred(logits * scale, weights),
        scale=scale * size,
    )


def refined_logits(heads: HeadWeights, form: KeyTransform, samples: list[LogitSample], *, rounds: int) -> HeadWeights:
    """Fit heads to the sampled logits: queries first, then keys and queries alternately."""
    if form.norm != "none" or not samples:
        return heads
    problem = _Logits(form, samples, heads.key_heads)
    query, key = (with_bias(*x).float() for x in ((heads.query, heads.query_bias), (heads.key, heads.key_bias)))
    has_bias = (heads.query_bias is not None, heads.key_bias is not None)
    query = problem.solve_query(query, key, bias=has_bias[0])
    for _ in range(rounds):
        key = problem.solve_key(query, key, bias=has_bias[1])
        query = problem.solve_query(query, key, bias=has_bias[0])
    return replace(
        heads,
        query=query[..., :-1].to(heads.query),
        query_bias=None if heads.query_bias is None else query[..., -1].to(heads.query),
        key=key[..., :-1].to(heads.key),
        key_bias=None if heads.key_bias is None else key[..., -1].to(heads.key),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Logits:
    """Weighted least squares of the logits for fixed keys or fixed queries."""

    form: KeyTransform
    samples: list[LogitSample]
    key_heads: tuple[int, ...]

    def solve_query(self, query: Tensor, key: Tensor, *, bias: bool) -> Tensor:
        projected = (torch.einsum("bni,hdi->bhnd", sample.key_inputs, key) for sample in self.samples)
        rotated = (
            _rotate(x, sample.key_rotations, self.form) for x, sample in zip(projected, self.samples, strict=True)
        )
        keys = [x[:, list(self.key_heads)] for x in rotated]

        def logits(matrix: Tensor) -> list[Tensor]:
            projected = (torch.einsum("bni,hdi->bhnd", sample.query_inputs, matrix) for sample in self.samples)
            rotated = (
                _rotate(x, sample.query_rotations, self.form) for x, sample in zip(projected, self.samples, strict=True)
            )
            return [sample.scale * q @ k.mT for q, k, sample in zip(rotated, keys, self.samples, strict=True)]

        def adjoint(residual: list[Tensor]) -> Tensor:
            head_gradients = (
                _rotate(sample.scale * x @ k, sample.query_rotations.conj(), self.form)
                for x, k, sample in zip(residual, keys, self.samples, strict=True)
            )
            sums = (
                torch.einsum("bhnd,bni->hdi", x, sample.query_inputs)
                for x, sample in zip(head_gradients, self.samples, strict=True)
            )
            return torch.stack(list(sums)).sum(0)

        channel_weights = self._sizes([x.square() for x in keys], [sample.weights.sum(2) for sample in self.samples])
        input_moments = sum(
            torch.einsum("bni,bnj->ij", sample.query_inputs, sample.query_inputs) for sample in self.samples
        )
        return self._solve(query, logits, adjoint, channel_weights, input_moments, bias)

    def solve_key(self, query: Tensor, key: Tensor, *, bias: bool) -> Tensor:
        projected = (torch.einsum("bni,hdi->bhnd", sample.query_inputs, query) for sample in self.samples)
        queries = [
            _rotate(x, sample.query_rotations, self.form) for x, sample in zip(projected, self.samples, strict=True)
        ]
        readers = list(self.key_heads)

        def logits(matrix: Tensor) -> list[Tensor]:
            projected = (torch.einsum("bni,hdi->bhnd", sample.key_inputs, matrix) for sample in self.samples)
            rotated = (
                _rotate(x, sample.key_rotations, self.form) for x, sample in zip(projected, self.samples, strict=True)
            )
            return [
                sample.scale * q @ k[:, readers].mT for q, k, sample in zip(queries, rotated, self.samples, strict=True)
            ]

        def adjoint(residual: list[Tensor]) -> Tensor:
            head_gradients = (
                _rotate(sample.scale * x.mT @ q, sample.key_rotations.conj(), self.form)
                for x, q, sample in zip(residual, queries, self.samples, strict=True)
            )
            sums = (
                torch.einsum("bhnd,bni->hdi", x, sample.key_inputs)
                for x, sample in zip(head_gradients, self.samples, strict=True)
            )
            return sum_over_readers(torch.stack(list(sums)).sum(0), readers, len(key))

        channel_weights = self._sizes([x.square() for x in queries], [sample.weights.sum(3) for sample in self.samples])
        channel_weights = sum_over_readers(channel_weights, readers, len(key))
        input_moments = sum(
            torch.einsum("bni,bnj->ij", sample.key_inputs, sample.key_inputs) for sample in self.samples
        )
        return self._solve(key, logits, adjoint, channel_weights, input_moments, bias)

    def _sizes(self, squares: list[Tensor], weights: list[Tensor]) -> Tensor:
        """Return the weighted energy of each channel of the fixed side, [heads, dim], equal within a pair."""
        sizes = sum(torch.einsum("bhnd,bhn->hd", x, w) for x, w in zip(squares, weights, strict=True))
        assert isinstance(sizes, Tensor)
        for i, j in self.form.pairs:
            sizes[:, i] = sizes[:, j] = (sizes[:, i] + sizes[:, j]) / 2
        return sizes

    def _solve(
        self,
        matrix: Tensor,
        logits: Callable[[Tensor], list[Tensor]],
        adjoint: Callable[[list[Tensor]], Tensor],
        channel_weights: Tensor,
        input_moments: Any,
        bias: bool,
    ) -> Tensor:
        """Run conjugate gradients from this matrix; without a bias its last column stays fixed.

        The preconditioner is the Kronecker product of the input moments and the channel weights.
        """
        input_moments = input_moments.double()
        ridge = (
            1e-3
            * input_moments.diagonal().mean()
            * torch.eye(len(input_moments), dtype=input_moments.dtype, device=input_moments.device)
        )
        inverse = torch.linalg.inv(input_moments + ridge).float()
        floor = 1e-3 * channel_weights.mean(1, keepdim=True).clamp_min(TINY)

        def precondition(x: Tensor) -> Tensor:
            if not bias:
                x = torch.cat((x[..., :-1], torch.zeros_like(x[..., -1:])), -1)
            preconditioned = (x @ inverse) / (channel_weights + floor)[..., None]
            return (
                preconditioned
                if bias
                else torch.cat((preconditioned[..., :-1], torch.zeros_like(preconditioned[..., -1:])), -1)
            )

        def centred(x: Tensor) -> list[Tensor]:
            return [
                _centred(projected, sample.weights) for projected, sample in zip(logits(x), self.samples, strict=True)
            ]

        def energy(change: list[Tensor]) -> Tensor:
            total = sum((x.square() * sample.weights).sum() for x, sample in zip(change, self.samples, strict=True))
            return torch.as_tensor(total)

        return conjugate_gradients(
            matrix,
            [sample.logits - x for x, sample in zip(centred(matrix), self.samples, strict=True)],
            forward=centred,
            energy=energy,
            adjoint=lambda r: adjoint([x * sample.weights for x, sample in zip(r, self.samples, strict=True)]),
            precondition=precondition,
            steps=STEPS,
        )


def _pairs(x: Tensor, form: KeyTransform) -> Tensor:
    first, second = form.halves
    return torch.complex(x[..., first], x[..., second])


def _rotate(x: Tensor, rotations: Tensor, form: KeyTransform) -> Tensor:
    """Apply each token's rotations to the rotary channels of [batch, heads, tokens, dim]."""
    if not form.rotary_dim:
        return x
    rotated, (first, second) = _pairs(x, form) * rotations, form.halves
    result = x.clone()
    result[..., first], result[..., second] = rotated.real, rotated.imag
    return result


def _centred(logits: Tensor, weights: Tensor) -> Tensor:
    """Subtract the weighted mean of each row: the softmax is invariant to a constant."""
    finite = torch.where(weights > 0, logits, 0.0)
    total = weights.sum(-1, keepdim=True).clamp_min(TINY)
    return torch.where(weights > 0, finite - (finite * weights).sum(-1, keepdim=True) / total, 0.0)
