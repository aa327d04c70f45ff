"""Recompute a column of the table of heads, by its name; no code of polyhead."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.statements import measures
from benchmarks.statements.recomputed import RULES, Means, Recomputed

QUERY = ("self_attn.q_proj", "attention.self.query")
KEY = ("self_attn.k_proj", "attention.self.key")
VALUE = ("self_attn.v_proj", "attention.self.value")
GROUPS = 10


def recomputed_column(numbers: Recomputed, name: str) -> Tensor | None:
    """Return the values of all heads; None for a column without a definition here."""
    for end in ("_std", "_max", "_error", "_chance"):
        base = name.removesuffix(end)
        if base == "copying_circuit_score" != name:
            return _of_outputs(numbers, name)
        if base != name:
            means = _means(numbers, base)
            return None if means is None else _companion(numbers, base, means, end)
    if name == "tokens":
        return torch.full((numbers.model.layers * numbers.model.heads,), float(numbers.text.rows))
    role = name.removesuffix("_score").replace("_", "-")
    if name.endswith("_score") and role in RULES:
        return numbers.roles[role].score if role in numbers.roles else None
    if (means := _means(numbers, name)) is not None:
        return means.mean
    if name == "predictable_share":
        return None if numbers.predictable is None else numbers.predictable[0][0]
    return _of_outputs(numbers, name) if name in OUTPUTS else None


def _means(numbers: Recomputed, name: str) -> Means | None:
    if name.startswith("pronoun_") and name.endswith("_score"):
        return numbers.pronoun_means.get(name.removeprefix("pronoun_").removesuffix("_score"))
    return numbers.importance.get(name) or numbers.text.means.get(name)


def _companion(numbers: Recomputed, name: str, means: Means, end: str) -> Tensor | None:
    if end == "_error":
        return means.jackknife if name in numbers.importance else means.error
    if end == "_chance":
        if f"{name}_chance" in numbers.text.means:
            return numbers.text.means[f"{name}_chance"].mean
        if name not in numbers.text.null:
            return torch.full_like(means.mean, 0.5)
        return numbers.text.null[name].mean.expand_as(means.mean)
    if means.squares is None or end == "_max":
        return means.largest
    return (means.squares / means.counts.sum(0) - means.mean**2).clamp_min(0).sqrt()


# ---- outputs and weights


def _of_outputs(numbers: Recomputed, name: str) -> Tensor:
    model, values = numbers.model, []
    for layer, weights in enumerate(model.output_weights):
        outputs = numbers.outputs[:, layer]
        values.append(OUTPUTS[name](model, layer, outputs, weights))
    return torch.cat(values)


def _norm(model: Any, layer: int, outputs: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("thd,hdw->thw", outputs, weights).square().sum(-1).mean(0).sqrt()


def _norm_share(model: Any, layer: int, outputs: Tensor, weights: Tensor) -> Tensor:
    squares = _norm(model, layer, outputs, weights).square()
    return squares / squares.sum()


def _rank(model: Any, layer: int, outputs: Tensor, weights: Tensor) -> Tensor:
    ranks = [measures.effective_rank(outputs[:, head], weights[head]) for head in range(len(weights))]
    return torch.tensor(ranks, dtype=torch.float64)


def _total_correlation(model: Any, layer: int, outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of the entropies of the heads minus their joint one, Gaussian, without the bias of a sample."""
    tokens, heads, dim = outputs.shape
    covariance = torch.cov(outputs.flatten(1).T)
    blocks = [covariance[i : i + dim, i : i + dim] for i in range(0, heads * dim, dim)]
    information = (sum(torch.logdet(x) for x in blocks) - torch.logdet(covariance)) / 2

    def gamma(size: int) -> float:
        return float(torch.digamma((tokens - 1 - torch.arange(size, dtype=torch.float64)) / 2).sum())

    return (information - (heads * gamma(dim) - gamma(heads * dim)) / 2).expand(heads)


def _qk_top_share(model: Any, layer: int, outputs: Tensor, weights: Tensor) -> Tensor:
    query, key = (_read_by(model, layer, names) for names in (QUERY, KEY))
    return measures.top_share(query, key.mT)


def _ov_top_share(model: Any, layer: int, outputs: Tensor, weights: Tensor) -> Tensor:
    return measures.top_share(_read_by(model, layer, VALUE), weights)


class _Copying:
    """The eigenvalue summary of E W_V W_O U^T, over the whole vocabulary, centred, with its error and null."""

    def __init__(self, model: Any) -> None:
        self.model, generator = model, torch.Generator().manual_seed(1)
        embedding, unembedding = (
            x.weight.detach().double()
            for x in (model.model.get_input_embeddings(), model.model.get_output_embeddings())
        )
        embedding, unembedding = embedding - embedding.mean(0), unembedding - unembedding.mean(0)
        count = max(8192, 2**34 // embedding.shape[1] ** 2)  # of a larger vocabulary a sample is taken
        groups = torch.randperm(len(embedding), generator=generator)[:count].chunk(GROUPS)
        self.parts = [unembedding[x].T @ embedding[x] for x in groups]
        self.whole = unembedding.T @ embedding
        self.generator = generator

    def score(self, layer: int, weights: Tensor) -> Tensor:
        return self._summary(self.whole, layer, weights)

    def error(self, layer: int, weights: Tensor) -> Tensor:
        """Return the standard error over words of a sample, by a delete-a-group jackknife."""
        total = torch.stack(self.parts).sum(0)
        without = torch.stack([self._summary(total - part, layer, weights) for part in self.parts])
        return (without - without.mean(0)).square().sum(0).mul((GROUPS - 1) / GROUPS).sqrt()

    def null(self, layer: int, weights: Tensor) -> Tensor:
        """Return |mean| plus 1.96 standard deviations of random heads."""
        heads, dim, width = 32, *weights.shape[1:]
        value = torch.randn(heads, width, dim, generator=self.generator, dtype=torch.float64)
        output = torch.randn(heads, dim, width, generator=self.generator, dtype=torch.float64)
        scores = torch.tensor([measures.eigenvalue_share(output[h] @ self.whole @ value[h]) for h in range(heads)])
        return (scores.mean().abs() + 1.96 * scores.std()).expand(len(weights))

    def _summary(self, product: Tensor, layer: int, weights: Tensor) -> Tensor:
        value = _read_by(self.model, layer, VALUE)
        scores = [measures.eigenvalue_share(weights[h] @ product @ value[h]) for h in range(len(weights))]
        return torch.tensor(scores, dtype=torch.float64)


@functools.lru_cache(1)
def _copying(model: Any) -> _Copying:
    return _Copying(model)


def _read_by(model: Any, layer: int, names: tuple[str, ...]) -> Tensor:
    """Return a projection of the residual stream to each head, [heads, width, dim]; KV heads are repeated."""
    modules = [x for name, x in model.model.named_modules() if name.endswith(names)]
    dim = model.output_weights.shape[2]
    matrices = modules[layer].weight.detach().double().unflatten(0, (-1, dim)).mT
    return matrices.repeat_interleave(model.heads // len(matrices), 0)


OUTPUTS = {
    "output_norm": _norm,
    "output_norm_share": _norm_share,
    "effective_rank": _rank,
    "total_correlation": _total_correlation,
    "qk_top_share": _qk_top_share,
    "ov_top_share": _ov_top_share,
    "copying_circuit_score": lambda model, layer, _, weights: _copying(model).score(layer, weights),
    "copying_circuit_score_error": lambda model, layer, _, weights: _copying(model).error(layer, weights),
    "copying_circuit_score_chance": lambda model, layer, _, weights: _copying(model).null(layer, weights),
}
