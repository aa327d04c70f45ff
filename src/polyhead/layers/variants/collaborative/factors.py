"""Shared query and key factors of trained heads, by canonical polyadic (CP) decomposition."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import ShapeError

# Minimum relative decrease of the error for another round.
_MIN_IMPROVEMENT = 1e-6
_RIDGE = 1e-12
_START_STEPS = 4  # starts use 0, 1/4, .. 4/4 of the channels as common channels


Factors = tuple[Tensor, Tensor, Tensor]  # shared queries, shared keys, mixing


@dataclass(frozen=True, slots=True, eq=False)
class SharedFactors:
    """Factors with W_Q_i W_K_i^T ~ query diag(mixing_i) key^T for every head i, in float64.

    `error` is the relative error of the heads' matrices (Frobenius norm over all heads).
    """

    query: Tensor  # [query inputs, shared_dim]
    key: Tensor  # [key inputs, shared_dim]
    mixing: Tensor  # [heads, shared_dim]
    error: float


@torch.no_grad()
def shared_factors(query: Tensor, key: Tensor, shared_dim: int, *, rounds: int = 100) -> SharedFactors:
    """Return the CP decomposition of the heads' matrices W_Q_i W_K_i^T, by alternating least squares.

    As Cordonnier, Loukas, Jaggi 2020, "Multi-Head Attention: Collaborate Instead of Concatenate", section 3.2. Several
    starts are tried, from channels common to all heads to the largest singular values of single heads, so that the
    result is no worse than truncating the heads. No [inputs, inputs] matrix is formed.

    Args:
        query, key: [heads, inputs, head_dim], the heads' projection matrices; a bias is one more input.
        shared_dim: number of shared channels; with num_heads * head_dim the decomposition is exact.
        rounds: maximum number of rounds; stops earlier when the error no longer decreases.
    """
    if query.ndim != 3 or key.ndim != 3 or query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2]:
        raise ShapeError(
            "query and key must be [heads, inputs, head_dim] of the same heads, "
            f"got {list(query.shape)} and {list(key.shape)}"
        )
    heads, _, head_dim = query.shape
    if not 1 <= shared_dim <= heads * head_dim:
        raise ShapeError(f"shared_dim must be 1 to num_heads * head_dim = {heads * head_dim}, got {shared_dim}")
    q, k = query.double(), key.double()
    common = min(shared_dim, q.shape[1], k.shape[1])
    starts = sorted({common * share // _START_STEPS for share in range(_START_STEPS + 1)})
    # A few rounds from every start; the best one is continued.
    trials = [
        _alternating_least_squares(q, k, _start(q, k, shared_dim, count), max(1, rounds // 10)) for count in starts
    ]
    best = min(trials, key=lambda trial: trial.error)
    return _alternating_least_squares(q, k, (best.query, best.key, best.mixing), rounds)


def _alternating_least_squares(q: Tensor, k: Tensor, start: Factors, rounds: int) -> SharedFactors:
    shared_q, shared_k, mixing = start
    size = ((q.mT @ q) * (k.mT @ k)).sum()  # squared Frobenius norm of all W_Q_i W_K_i^T
    error = math.inf
    for _ in range(rounds):
        # Each factor is the least-squares solution given the other two.
        shared_q = _solve(_products(q, k.mT @ shared_k, mixing), (mixing.mT @ mixing) * (shared_k.mT @ shared_k))
        shared_q, mixing = _normalise_columns(shared_q, mixing)
        shared_k = _solve(_products(k, q.mT @ shared_q, mixing), (mixing.mT @ mixing) * (shared_q.mT @ shared_q))
        shared_k, mixing = _normalise_columns(shared_k, mixing)
        inner, gram = _inner_products(q, k, shared_q, shared_k), (shared_q.mT @ shared_q) * (shared_k.mT @ shared_k)
        mixing = _solve(inner, gram)
        left = size - 2 * (inner * mixing).sum() + ((mixing @ gram) * mixing).sum()
        before, error = error, float((left / size).clamp_min(0).sqrt())
        if before - error <= _MIN_IMPROVEMENT * before:
            break
    return SharedFactors(shared_q, shared_k, mixing, error)


def _start(q: Tensor, k: Tensor, shared_dim: int, common: int) -> Factors:
    """Return a start: `common` channels shared by all heads, the rest from single heads' residuals."""
    if not common:
        return _largest_singular(q, k, shared_dim)
    shared_q, shared_k, mixing = _simultaneous_diagonalisation(q, k, common)
    if common == shared_dim:
        return shared_q, shared_k, mixing
    # W_Q_i W_K_i^T - Q diag(m_i) K^T is [W_Q_i, -Q diag(m_i)] [W_K_i, K]^T.
    left_q = torch.cat((q, -shared_q * mixing[:, None]), -1)
    left_k = torch.cat((k, shared_k.expand(len(k), -1, -1)), -1)
    rest_q, rest_k, rest = _largest_singular(left_q, left_k, shared_dim - common)
    return torch.cat((shared_q, rest_q), 1), torch.cat((shared_k, rest_k), 1), torch.cat((mixing, rest), 1)


def _largest_singular(q: Tensor, k: Tensor, shared_dim: int) -> Factors:
    """Return the largest singular triplets over all heads, each used by its own head only."""
    own_q, triangle_q = torch.linalg.qr(q)
    own_k, triangle_k = torch.linalg.qr(k)
    left, values, right = torch.linalg.svd(triangle_q @ triangle_k.mT)
    left, right = own_q @ left, own_k @ right.mT  # [heads, inputs, head_dim]
    place = values.flatten().topk(shared_dim).indices
    head, channel = place // values.shape[1], place % values.shape[1]
    mixing = torch.zeros(q.shape[0], shared_dim, dtype=q.dtype, device=q.device)
    mixing[head, torch.arange(shared_dim, device=q.device)] = values[head, channel]
    return left[head, :, channel].mT, right[head, :, channel].mT, mixing


def _simultaneous_diagonalisation(q: Tensor, k: Tensor, shared_dim: int) -> Factors:
    """Return common factors by simultaneous diagonalisation of two random sums of heads (Jennrich).

    With S_a = Q diag(a) K^T and S_b = Q diag(b) K^T, the columns of Q are eigenvectors of S_a S_b^-1. Exact if the
    heads do share that many channels.
    """
    space_q, space_k = _principal(q, k, shared_dim), _principal(k, q, shared_dim)
    cores = (space_q.mT @ q) @ (space_k.mT @ k).mT  # [heads, shared_dim, shared_dim]
    weights = torch.randn(2, len(q), generator=torch.Generator().manual_seed(0), dtype=q.dtype).to(q.device)
    sum_a, sum_b = torch.einsum("sh,hab->sab", weights, cores)
    shared_q = torch.linalg.eig(sum_a @ torch.linalg.pinv(sum_b)).eigenvectors.real
    shared_k = (torch.linalg.pinv(shared_q) @ sum_a).mT
    (shared_q, _), (shared_k, _) = (_normalise_columns(x, x[:1]) for x in (space_q @ shared_q, space_k @ shared_k))
    gram = (shared_q.mT @ shared_q) * (shared_k.mT @ shared_k)
    return shared_q, shared_k, _solve(_inner_products(q, k, shared_q, shared_k), gram)


def _principal(left: Tensor, right: Tensor, count: int) -> Tensor:
    """Return the leading left singular vectors of the stacked heads' matrices, [inputs, count]."""
    triangle = torch.linalg.qr(right).R
    return torch.linalg.svd((left @ triangle.mT).transpose(0, 1).flatten(1), full_matrices=False).U[:, :count]


def _inner_products(q: Tensor, k: Tensor, shared_q: Tensor, shared_k: Tensor) -> Tensor:
    """Return inner products of every W_Q_i W_K_i^T with each shared channel, [heads, shared_dim]."""
    return ((q.mT @ shared_q) * (k.mT @ shared_k)).sum(1)


def _products(left: Tensor, right: Tensor, mixing: Tensor) -> Tensor:
    """Return sum_i left_i right_i diag(mixing_i), [inputs, shared_dim]."""
    return left.transpose(0, 1).flatten(1) @ (right * mixing[:, None]).flatten(0, 1)


def _solve(right: Tensor, gram: Tensor) -> Tensor:
    """Return right gram^-1, with a tiny ridge for channels that have become collinear."""
    ridge = _RIDGE * gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny)
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), right.mT).mT


def _normalise_columns(factor: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise the columns of a factor, moving their norms into the mixing."""
    length = factor.norm(dim=0).clamp_min(torch.finfo(factor.dtype).tiny)
    return factor / length, mixing * length
