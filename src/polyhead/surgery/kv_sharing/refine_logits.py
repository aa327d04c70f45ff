"""Shared keys and their queries refitted to the logits that there were, by alternating least squares on a sample.

What counts is Σ a (δ - Σ a δ)² over the keys of each row, a the weights that a head had and δ what its logits are off:
to second order, twice the divergence of the old weights from the new. It is linear in the queries' matrices with keys
given, and in the keys' with queries given; each is solved by conjugate gradients. Positions stand as they were seen to
turn each token, so that rotary ones need nothing else.
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
from polyhead.surgery.calibration.key_transforms import KeyForm
from polyhead.surgery.calibration.layer_capture import attention_weights
from polyhead.surgery.calibration.streams import AttentionCapture, Piece
from polyhead.surgery.kv_sharing.conjugate_gradients import TINY, conjugate_gradients

SAMPLE_BYTES = 192 << 20  # of logits and weights, whatever the text's length
STEPS = 10  # of conjugate gradients, each time


@dataclass(frozen=True, slots=True, eq=False)
class LogitSample:
    """One batch: what queries and keys were made of, how each token is turned, and how a layer's heads attended."""

    query_inputs: Tensor  # [batch, queries, width + 1]
    key_inputs: Tensor  # [batch, keys, width + 1]
    query_rotations: Tensor  # [batch, 1, queries, pairs], complex
    key_rotations: Tensor  # [batch, 1, keys, pairs], complex
    weights: Tensor  # [batch, heads, queries, keys], zero in rows of padding
    logits: Tensor  # the same, less the mean of each row by its weights
    scale: float  # of a query times a key as they are projected

    @property
    def num_bytes(self) -> int:
        return self.weights.nbytes + self.logits.nbytes


def sample_logits(
    model: nn.Module,
    layer: AttentionLayer,
    heads: HeadWeights,
    form: KeyForm,
    text: Iterable[Piece],
    lending: Mapping[str, Tensor],
) -> list[LogitSample]:
    """What the heads of a layer attend to in the model with these parameters lent; every so many-th batch of a text."""
    every = 1
    numbered: list[tuple[int, LogitSample]] = []
    for number, piece in enumerate(text):
        if number % every:
            continue
        looked = piece.capture_attention(model, layer, lending=lending)
        if looked is None:
            continue
        numbered.append((number, _seen(heads, form, looked)))
        while len(numbered) > 1 and sum(one.num_bytes for _, one in numbered) > SAMPLE_BYTES:
            every *= 2  # a text of any length is thinned as it is read
            numbered = [(place, one) for place, one in numbered if place % every == 0]
    return [one for _, one in numbered]


def _seen(heads: HeadWeights, form: KeyForm, looked: AttentionCapture) -> LogitSample:
    attended, inputs = looked.attended, looked.capture.inputs
    weights = attention_weights(attended).float()
    if looked.real is not None:
        weights = weights * looked.real[:, None, :, None].to(weights)
    ones = [torch.cat((x, torch.ones_like(x[..., :1])), -1).float() for x in (inputs["query"], inputs["key"])]
    projected = [
        torch.einsum("bni,hdi->bhnd", x, with_bias(*held).float())
        for x, held in zip(ones, ((heads.query, heads.query_bias), (heads.key, heads.key_bias)), strict=True)
    ]
    readers = list(heads.key_heads)
    key = attended.key if attended.key.shape[1] == heads.num_heads else attended.key[:, readers]
    given = [attended.query.float(), key.float()]
    projected[1] = projected[1][:, readers]
    logits = given[0] @ given[1].mT
    turns, size = [], 1.0
    for was, now in zip(projected, given, strict=True):
        size *= float(now.norm() / was.norm().clamp_min(TINY))
        along = (_pairs(was, form).conj() * _pairs(now, form)).sum(1, keepdim=True)
        turns.append(along / along.abs().clamp_min(TINY))
    scale = attended.query.shape[-1] ** -0.5 if attended.scale is None else float(attended.scale)
    return LogitSample(
        query_inputs=ones[0],
        key_inputs=ones[1],
        query_rotations=turns[0],
        key_rotations=turns[1],
        weights=weights,
        logits=_centred(logits * scale, weights),
        scale=scale * size,
    )


def refined_logits(heads: HeadWeights, form: KeyForm, seen: list[LogitSample], *, rounds: int) -> HeadWeights:
    """Heads whose logits are nearer to those that were seen: queries, then keys and queries in turn."""
    if form.norm != "none" or not seen:
        return heads
    problem = _Logits(form, seen, heads.key_heads)
    query, key = (with_bias(*x).float() for x in ((heads.query, heads.query_bias), (heads.key, heads.key_bias)))
    free = (heads.query_bias is not None, heads.key_bias is not None)
    query = problem.solve_query(query, key, bias=free[0])
    for _ in range(rounds):
        key = problem.solve_key(query, key, bias=free[1])
        query = problem.solve_query(query, key, bias=free[0])
    return replace(
        heads,
        query=query[..., :-1].to(heads.query),
        query_bias=None if heads.query_bias is None else query[..., -1].to(heads.query),
        key=key[..., :-1].to(heads.key),
        key_bias=None if heads.key_bias is None else key[..., -1].to(heads.key),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Logits:
    form: KeyForm
    seen: list[LogitSample]
    key_heads: tuple[int, ...]

    def solve_query(self, query: Tensor, key: Tensor, *, bias: bool) -> Tensor:
        projected = (torch.einsum("bni,hdi->bhnd", one.key_inputs, key) for one in self.seen)
        turned = (_rotate(x, one.key_rotations, self.form) for x, one in zip(projected, self.seen, strict=True))
        keys = [x[:, list(self.key_heads)] for x in turned]

        def logits(matrix: Tensor) -> list[Tensor]:
            made = (torch.einsum("bni,hdi->bhnd", one.query_inputs, matrix) for one in self.seen)
            turned = (_rotate(x, one.query_rotations, self.form) for x, one in zip(made, self.seen, strict=True))
            return [one.scale * q @ k.mT for q, k, one in zip(turned, keys, self.seen, strict=True)]

        def back(off: list[Tensor]) -> Tensor:
            parts = (
                _rotate(one.scale * x @ k, one.query_rotations.conj(), self.form)
                for x, k, one in zip(off, keys, self.seen, strict=True)
            )
            sums = (torch.einsum("bhnd,bni->hdi", x, one.query_inputs) for x, one in zip(parts, self.seen, strict=True))
            return torch.stack(list(sums)).sum(0)

        sizes = self._sizes([x.square() for x in keys], [one.weights.sum(2) for one in self.seen])
        metric = sum(torch.einsum("bni,bnj->ij", one.query_inputs, one.query_inputs) for one in self.seen)
        return self._solve(query, logits, back, sizes, metric, bias)

    def solve_key(self, query: Tensor, key: Tensor, *, bias: bool) -> Tensor:
        made = (torch.einsum("bni,hdi->bhnd", one.query_inputs, query) for one in self.seen)
        queries = [_rotate(x, one.query_rotations, self.form) for x, one in zip(made, self.seen, strict=True)]
        readers = list(self.key_heads)

        def logits(matrix: Tensor) -> list[Tensor]:
            made = (torch.einsum("bni,hdi->bhnd", one.key_inputs, matrix) for one in self.seen)
            turned = (_rotate(x, one.key_rotations, self.form) for x, one in zip(made, self.seen, strict=True))
            return [one.scale * q @ k[:, readers].mT for q, k, one in zip(queries, turned, self.seen, strict=True)]

        def back(off: list[Tensor]) -> Tensor:
            parts = (
                _rotate(one.scale * x.mT @ q, one.key_rotations.conj(), self.form)
                for x, q, one in zip(off, queries, self.seen, strict=True)
            )
            sums = (torch.einsum("bhnd,bni->hdi", x, one.key_inputs) for x, one in zip(parts, self.seen, strict=True))
            return sum_over_readers(torch.stack(list(sums)).sum(0), readers, len(key))

        sizes = self._sizes([x.square() for x in queries], [one.weights.sum(3) for one in self.seen])
        sizes = sum_over_readers(sizes, readers, len(key))
        metric = sum(torch.einsum("bni,bnj->ij", one.key_inputs, one.key_inputs) for one in self.seen)
        return self._solve(key, logits, back, sizes, metric, bias)

    def _sizes(self, squares: list[Tensor], weights: list[Tensor]) -> Tensor:
        """How much each channel of the other side weighs, [heads, dim], the two of a pair alike."""
        found = sum(torch.einsum("bhnd,bhn->hd", x, w) for x, w in zip(squares, weights, strict=True))
        assert isinstance(found, Tensor)
        for one, two in self.form.pairs:
            found[:, one] = found[:, two] = (found[:, one] + found[:, two]) / 2
        return found

    def _solve(
        self,
        matrix: Tensor,
        logits: Callable[[Tensor], list[Tensor]],
        back: Callable[[list[Tensor]], Tensor],
        sizes: Tensor,
        metric: Any,
        bias: bool,
    ) -> Tensor:
        """Conjugate gradients from this matrix; a column that no bias can hold stays."""
        metric = metric.double()
        ridge = 1e-3 * metric.diagonal().mean() * torch.eye(len(metric), dtype=metric.dtype, device=metric.device)
        inverse = torch.linalg.inv(metric + ridge).float()
        floor = 1e-3 * sizes.mean(1, keepdim=True).clamp_min(TINY)

        def scaled(x: Tensor) -> Tensor:
            if not bias:
                x = torch.cat((x[..., :-1], torch.zeros_like(x[..., -1:])), -1)
            step = (x @ inverse) / (sizes + floor)[..., None]
            return step if bias else torch.cat((step[..., :-1], torch.zeros_like(step[..., -1:])), -1)

        def centred(x: Tensor) -> list[Tensor]:
            return [_centred(made, one.weights) for made, one in zip(logits(x), self.seen, strict=True)]

        def energy(change: list[Tensor]) -> Tensor:
            among = sum((x.square() * one.weights).sum() for x, one in zip(change, self.seen, strict=True))
            return torch.as_tensor(among)

        return conjugate_gradients(
            matrix,
            [one.logits - x for x, one in zip(centred(matrix), self.seen, strict=True)],
            change=centred,
            energy=energy,
            gradient=lambda off: back([x * one.weights for x, one in zip(off, self.seen, strict=True)]),
            scaled=scaled,
            steps=STEPS,
        )


def _pairs(x: Tensor, form: KeyForm) -> Tensor:
    first, second = form.halves
    return torch.complex(x[..., first], x[..., second])


def _rotate(x: Tensor, turns: Tensor, form: KeyForm) -> Tensor:
    """Vectors [batch, heads, tokens, dim] turned by each token's turns, those channels that positions turn."""
    if not form.rotary_dim:
        return x
    turned, (first, second) = _pairs(x, form) * turns, form.halves
    found = x.clone()
    found[..., first], found[..., second] = turned.real, turned.imag
    return found


def _centred(logits: Tensor, weights: Tensor) -> Tensor:
    """Less the mean of each row; what is the same for all keys changes no softmax."""
    finite = torch.where(weights > 0, logits, 0.0)
    total = weights.sum(-1, keepdim=True).clamp_min(TINY)
    return torch.where(weights > 0, finite - (finite * weights).sum(-1, keepdim=True) / total, 0.0)
