"""Refit shared keys and their queries to the original logits by alternating least squares.

The objective is Σ a (δ - Σ a δ)² over the keys of each row, with a the original attention weights and δ the error of
the logits: to second order, twice the KL divergence of the new attention from the original. It is quadratic in the
query matrices for fixed keys and in the key matrices for fixed queries; each is solved by conjugate gradients. The
rotation of each token is measured, so rotary positions need no other treatment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.adapters.head_weights import HeadWeights, sum_over_readers
from polyhead.surgery.calibration.key_transforms import KeyTransform
from polyhead.surgery.calibration.streams import AttentionCapture, Piece, attention_weights
from polyhead.surgery.kv_sharing.conjugate_gradients import TINY, conjugate_gradients

Side = Literal["query", "key"]
SAMPLE_BYTES = 192 << 20  # of logits and weights, independent of the text length
STEPS = 10  # of conjugate gradients per solve


@dataclass(frozen=True, slots=True, eq=False)
class LogitSample:
    """Inputs, rotations and attention of a layer's heads for one batch."""

    inputs: Mapping[Side, Tensor]  # [batch, tokens, width + 1]
    rotations: Mapping[Side, Tensor]  # [batch, 1, tokens, pairs], complex
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
    transform: KeyTransform,
    text: Iterable[Piece],
    swapped: Mapping[str, Tensor],
) -> list[LogitSample]:
    """Sample a layer's logits in the model with the `swapped` parameters in place; a long text is thinned evenly."""
    every = 1
    numbered: list[tuple[int, LogitSample]] = []
    for number, piece in enumerate(text):
        if number % every:
            continue
        capture = piece.capture_attention(model, layer, swapped=swapped)
        if capture is None:
            continue
        numbered.append((number, _sample(heads, transform, capture)))
        while len(numbered) > 1 and sum(sample.num_bytes for _, sample in numbered) > SAMPLE_BYTES:
            every *= 2  # halve the sample when it exceeds its budget
            numbered = [(number, sample) for number, sample in numbered if number % every == 0]
    return [sample for _, sample in numbered]


def _sample(heads: HeadWeights, transform: KeyTransform, capture: AttentionCapture) -> LogitSample:
    attended, inputs = capture.attended, capture.capture.inputs
    weights = attention_weights(attended).float()
    if capture.non_padding is not None:
        weights = weights * capture.non_padding[:, None, :, None].to(weights)
    readers = list(heads.key_heads)
    key = attended.key if attended.key.shape[1] == heads.num_heads else attended.key[:, readers]
    attended_by: dict[Side, Tensor] = {"query": attended.query.float(), "key": key.float()}
    augmented: dict[Side, Tensor] = {}
    rotations: dict[Side, Tensor] = {}
    size = 1.0
    for side, target in attended_by.items():
        x = inputs[side]
        augmented[side] = torch.cat((x, torch.ones_like(x[..., :1])), -1).float()
        source = torch.einsum("bni,hdi->bhnd", augmented[side], heads.augmented(side).float())
        source = source if side == "query" else source[:, readers]
        size *= float(target.norm() / source.norm().clamp_min(TINY))
        correlation = (_pairs(source, transform).conj() * _pairs(target, transform)).sum(1, keepdim=True)
        rotations[side] = correlation / correlation.abs().clamp_min(TINY)
    scale = attended.query.shape[-1] ** -0.5 if attended.scale is None else float(attended.scale)
    logits = attended_by["query"] @ attended_by["key"].mT
    return LogitSample(augmented, rotations, weights, _centred(logits * scale, weights), scale * size)


def refined_logits(
    heads: HeadWeights, transform: KeyTransform, samples: list[LogitSample], *, rounds: int
) -> HeadWeights:
    """Fit heads to the sampled logits: queries first, then keys and queries alternately."""
    if transform.norm != "none" or not samples:
        return heads
    problem = _LogitRegression(transform, samples, heads.key_heads)
    query, key = heads.augmented("query").float(), heads.augmented("key").float()
    query_bias, key_bias = heads.query_bias is not None, heads.key_bias is not None
    query = problem.solve("query", query, key, bias=query_bias)
    for _ in range(rounds):
        key = problem.solve("key", key, query, bias=key_bias)
        query = problem.solve("query", query, key, bias=query_bias)
    return heads.with_augmented(query=query, key=key)


@dataclass(frozen=True, slots=True, eq=False)
class _LogitRegression:
    """Weighted least squares of the logits for fixed keys or fixed queries."""

    transform: KeyTransform
    samples: list[LogitSample]
    key_heads: tuple[int, ...]

    def solve(self, side: Side, matrix: Tensor, other_matrix: Tensor, *, bias: bool) -> Tensor:
        """Run conjugate gradients from the matrix of a side; without a bias its last column stays fixed.

        The preconditioner is the Kronecker product of the input moments and the channel weights.
        """
        fixed = self._rotated("key" if side == "query" else "query", other_matrix)
        weights = [sample.weights for sample in self.samples]

        def logits(matrix: Tensor) -> list[Tensor]:
            solved = self._rotated(side, matrix)
            queries, keys = (solved, fixed) if side == "query" else (fixed, solved)
            products = (sample.scale * q @ k.mT for q, k, sample in zip(queries, keys, self.samples, strict=True))
            return [_centred(x, w) for x, w in zip(products, weights, strict=True)]

        def energy(change: list[Tensor]) -> Tensor:
            return torch.as_tensor(sum((x.square() * w).sum() for x, w in zip(change, weights, strict=True)))

        def adjoint(residual: list[Tensor]) -> Tensor:
            gradients = []
            for x, other, sample in zip(residual, fixed, self.samples, strict=True):
                weighted = x * sample.weights
                weighted = weighted if side == "query" else weighted.mT
                by_head = _rotate(sample.scale * weighted @ other, sample.rotations[side].conj(), self.transform)
                gradients.append(torch.einsum("bhnd,bni->hdi", by_head, sample.inputs[side]))
            return self._by_matrix(side, torch.stack(gradients).sum(0), len(matrix))

        sums = [w.sum(2 if side == "query" else 3) for w in weights]
        channel_weights = self._by_matrix(side, self._sizes([x.square() for x in fixed], sums), len(matrix))
        precondition = self._preconditioner(side, channel_weights, bias=bias)
        residual = [sample.logits - x for x, sample in zip(logits(matrix), self.samples, strict=True)]
        return conjugate_gradients(
            matrix, residual, forward=logits, energy=energy, adjoint=adjoint, precondition=precondition, steps=STEPS
        )

    def _rotated(self, side: Side, matrix: Tensor) -> list[Tensor]:
        """Return the rotated queries or keys of every query head, [batch, heads, tokens, dim] for each sample."""
        projected = (torch.einsum("bni,hdi->bhnd", sample.inputs[side], matrix) for sample in self.samples)
        rotated = (
            _rotate(x, sample.rotations[side], self.transform)
            for x, sample in zip(projected, self.samples, strict=True)
        )
        return [x if side == "query" else x[:, list(self.key_heads)] for x in rotated]

    def _by_matrix(self, side: Side, by_head: Tensor, count: int) -> Tensor:
        """Sum values of query heads over the readers of each KV head, if keys are solved for."""
        return by_head if side == "query" else sum_over_readers(by_head, self.key_heads, count)

    def _sizes(self, squares: list[Tensor], weights: list[Tensor]) -> Tensor:
        """Return the weighted energy of each channel of the fixed side, [heads, dim], equal within a pair."""
        sizes = sum(torch.einsum("bhnd,bhn->hd", x, w) for x, w in zip(squares, weights, strict=True))
        assert isinstance(sizes, Tensor)
        for i, j in self.transform.pairs:
            sizes[:, i] = sizes[:, j] = (sizes[:, i] + sizes[:, j]) / 2
        return sizes

    def _preconditioner(self, side: Side, channel_weights: Tensor, *, bias: bool) -> Callable[[Tensor], Tensor]:
        moments: Any = sum(torch.einsum("bni,bnj->ij", x.inputs[side], x.inputs[side]) for x in self.samples)
        moments = moments.double()
        ridge = 1e-3 * moments.diagonal().mean() * torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
        inverse = torch.linalg.inv(moments + ridge).float()
        floor = 1e-3 * channel_weights.mean(1, keepdim=True).clamp_min(TINY)

        def without_bias(x: Tensor) -> Tensor:
            return x if bias else torch.cat((x[..., :-1], torch.zeros_like(x[..., -1:])), -1)

        return lambda x: without_bias((without_bias(x) @ inverse) / (channel_weights + floor)[..., None])


def _pairs(x: Tensor, transform: KeyTransform) -> Tensor:
    first, second = transform.halves
    return torch.complex(x[..., first], x[..., second])


def _rotate(x: Tensor, rotations: Tensor, transform: KeyTransform) -> Tensor:
    """Apply each token's rotations to the rotary channels of [batch, heads, tokens, dim]."""
    if not transform.rotary_dim:
        return x
    rotated, (first, second) = _pairs(x, transform) * rotations, transform.halves
    result = x.clone()
    result[..., first], result[..., second] = rotated.real, rotated.imag
    return result


def _centred(logits: Tensor, weights: Tensor) -> Tensor:
    """Subtract the weighted mean of each row: the softmax is invariant to a constant."""
    finite = torch.where(weights > 0, logits, 0.0)
    total = weights.sum(-1, keepdim=True).clamp_min(TINY)
    return torch.where(weights > 0, finite - (finite * weights).sum(-1, keepdim=True) / total, 0.0)
