"""Queries and keys that heads can share: the factors nearest to what the heads of a trained layer do by themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import ShapeError

# The share of its own size by which an error must fall in a round for another to be made.
_LEAST_GAIN = 1e-6
_RIDGE = 1e-12
_SHARES = 4  # the channels in common at the start are this many parts of all, from none to all


Factors = tuple[Tensor, Tensor, Tensor]  # shared queries, shared keys, mixing


@dataclass(frozen=True, slots=True, eq=False)
class SharedFactors:
    """W_Q_i W_K_i^T ~ query diag(mixing_i) key^T for every head i, in float64.

    `error` is what is left of the heads' matrices, as a share of their size (Frobenius norm, all heads together).
    """

    query: Tensor  # [query inputs, shared_dim]
    key: Tensor  # [key inputs, shared_dim]
    mixing: Tensor  # [heads, shared_dim]
    error: float


@torch.no_grad()
def shared_factors(query: Tensor, key: Tensor, shared_dim: int, *, rounds: int = 100) -> SharedFactors:
    """The canonical polyadic decomposition of the heads' matrices W_Q_i W_K_i^T, by alternating least squares.

    As Cordonnier, Loukas, Jaggi 2020, "Multi-Head Attention: Collaborate Instead of Concatenate", section 3.2. Several
    starts are tried, from channels that heads have in common to the largest singular values that each has alone, so
    that it ends no worse than cutting heads down would. No matrix of inputs by inputs is made.

    Args:
        query, key: [heads, inputs, head_dim], the heads' projections as the formula has them; a bias is one more input.
        shared_dim: channels to share; with as many as all heads have together nothing is lost.
        rounds: at most so many; fewer where the error no longer falls.
    """
    if query.ndim != 3 or key.ndim != 3 or query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2]:
        raise ShapeError(
            "query and key must be [heads, inputs, head_dim] of the same heads, "
            f"got {list(query.shape)} and {list(key.shape)}"
        )
    heads, _, head_dim = query.shape
    if not 1 <= shared_dim <= heads * head_dim:
        raise ShapeError(f"shared_dim must be 1 to {heads * head_dim}, all channels of the heads, got {shared_dim}")
    q, k = query.double(), key.double()
    common = min(shared_dim, q.shape[1], k.shape[1])
    starts = sorted({common * share // _SHARES for share in range(_SHARES + 1)})
    # A few rounds show which start leads furthest.
    trials = [_alternated(q, k, _start(q, k, shared_dim, count), max(1, rounds // 10)) for count in starts]
    best = min(trials, key=lambda found: found.error)
    return _alternated(q, k, (best.query, best.key, best.mixing), rounds)


def _alternated(q: Tensor, k: Tensor, start: Factors, rounds: int) -> SharedFactors:
    shared_q, shared_k, mixing = start
    size = ((q.mT @ q) * (k.mT @ k)).sum()  # of all W_Q_i W_K_i^T, squared
    error = math.inf
    for _ in range(rounds):
        # Each of the three is the least-squares answer to the other two.
        shared_q = _solved(_products(q, k.mT @ shared_k, mixing), (mixing.mT @ mixing) * (shared_k.mT @ shared_k))
        shared_q, mixing = _sized(shared_q, mixing)
        shared_k = _solved(_products(k, q.mT @ shared_q, mixing), (mixing.mT @ mixing) * (shared_q.mT @ shared_q))
        shared_k, mixing = _sized(shared_k, mixing)
        seen, gram = _seen(q, k, shared_q, shared_k), (shared_q.mT @ shared_q) * (shared_k.mT @ shared_k)
        mixing = _solved(seen, gram)
        left = size - 2 * (seen * mixing).sum() + ((mixing @ gram) * mixing).sum()
        before, error = error, float((left / size).clamp_min(0).sqrt())
        if before - error <= _LEAST_GAIN * before:
            break
    return SharedFactors(shared_q, shared_k, mixing, error)


def _start(q: Tensor, k: Tensor, shared_dim: int, common: int) -> Factors:
    """So many channels that heads have in common, and of what those leave the largest that heads have alone."""
    if not common:
        return _largest(q, k, shared_dim)
    shared_q, shared_k, mixing = _diagonalised(q, k, common)
    if common == shared_dim:
        return shared_q, shared_k, mixing
    # W_Q_i W_K_i^T - Q diag(m_i) K^T is [W_Q_i, -Q diag(m_i)] [W_K_i, K]^T.
    left_q = torch.cat((q, -shared_q * mixing[:, None]), -1)
    left_k = torch.cat((k, shared_k.expand(len(k), -1, -1)), -1)
    rest_q, rest_k, rest = _largest(left_q, left_k, shared_dim - common)
    return torch.cat((shared_q, rest_q), 1), torch.cat((shared_k, rest_k), 1), torch.cat((mixing, rest), 1)


def _largest(q: Tensor, k: Tensor, shared_dim: int) -> Factors:
    """The largest singular values of all heads with their vectors, and a mixing that leaves each to its own head."""
    own_q, triangle_q = torch.linalg.qr(q)
    own_k, triangle_k = torch.linalg.qr(k)
    left, values, right = torch.linalg.svd(triangle_q @ triangle_k.mT)
    left, right = own_q @ left, own_k @ right.mT  # [heads, inputs, head_dim]
    place = values.flatten().topk(shared_dim).indices
    head, channel = place // values.shape[1], place % values.shape[1]
    mixing = torch.zeros(q.shape[0], shared_dim, dtype=q.dtype, device=q.device)
    mixing[head, torch.arange(shared_dim, device=q.device)] = values[head, channel]
    return left[head, :, channel].mT, right[head, :, channel].mT, mixing


def _diagonalised(q: Tensor, k: Tensor, shared_dim: int) -> Factors:
    """The directions that two sums of heads have in common: exact where heads do share so many channels.

    With S_a = Q diag(a) K^T and S_b = Q diag(b) K^T, the columns of Q are eigenvectors of S_a S_b^-1.
    """
    space_q, space_k = _principal(q, k, shared_dim), _principal(k, q, shared_dim)
    cores = (space_q.mT @ q) @ (space_k.mT @ k).mT  # [heads, shared_dim, shared_dim]
    weights = torch.randn(2, len(q), generator=torch.Generator().manual_seed(0), dtype=q.dtype).to(q.device)
    one, other = torch.einsum("sh,hab->sab", weights, cores)
    shared_q = torch.linalg.eig(one @ torch.linalg.pinv(other)).eigenvectors.real
    shared_k = (torch.linalg.pinv(shared_q) @ one).mT
    (shared_q, _), (shared_k, _) = (_sized(x, x[:1]) for x in (space_q @ shared_q, space_k @ shared_k))
    gram = (shared_q.mT @ shared_q) * (shared_k.mT @ shared_k)
    return shared_q, shared_k, _solved(_seen(q, k, shared_q, shared_k), gram)


def _principal(one: Tensor, other: Tensor, count: int) -> Tensor:
    """The directions among the inputs of `one` along which the heads' matrices are largest, [inputs, count]."""
    triangle = torch.linalg.qr(other).R
    return torch.linalg.svd((one @ triangle.mT).transpose(0, 1).flatten(1), full_matrices=False).U[:, :count]


def _seen(q: Tensor, k: Tensor, shared_q: Tensor, shared_k: Tensor) -> Tensor:
    """How much of every W_Q_i W_K_i^T lies along each shared channel, [heads, shared_dim]."""
    return ((q.mT @ shared_q) * (k.mT @ shared_k)).sum(1)


def _products(one: Tensor, other: Tensor, mixing: Tensor) -> Tensor:
    """sum_i one_i other_i diag(mixing_i), [inputs, shared_dim]."""
    return one.transpose(0, 1).flatten(1) @ (other * mixing[:, None]).flatten(0, 1)


def _solved(right: Tensor, gram: Tensor) -> Tensor:
    """right gram^-1, with a trace of a ridge for channels that have become alike."""
    ridge = _RIDGE * gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny)
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), right.mT).mT


def _sized(factor: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of length 1, their lengths in the mixing."""
    length = factor.norm(dim=0).clamp_min(torch.finfo(factor.dtype).tiny)
    return factor / length, mixing * length
