"""Channels that heads share are found where they are there, and are no worse than heads cut down where they are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhead import MultiHeadAttention
from polyhead.errors import ShapeError
from polyhead.layers.variants import CollaborativeAttention, shared_factors

HEADS, INPUTS, KEY_INPUTS, SHARED = 5, 23, 19, 8
DOUBLE = torch.float64


def planted(noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Heads whose queries and keys are those of a few shared channels, each head weighing them in its own way."""
    query, key, mixing = (torch.randn(n, SHARED, dtype=DOUBLE) for n in (INPUTS, KEY_INPUTS, HEADS))
    own_query = query * mixing[:, None] + noise * torch.randn(HEADS, INPUTS, SHARED, dtype=DOUBLE)
    return own_query, key + noise * torch.randn(HEADS, KEY_INPUTS, SHARED, dtype=DOUBLE)


def left_over(query: Tensor, key: Tensor, shared_dim: int) -> tuple[float, float]:
    """The error as it is told, and as it is."""
    found = shared_factors(query, key, shared_dim)
    whole = query @ key.mT
    product = torch.einsum("er,hr,fr->hef", found.query, found.mixing, found.key)
    return found.error, float((product - whole).norm() / whole.norm())


def cut_down(query: Tensor, key: Tensor, shared_dim: int) -> float:
    """What is lost where so many channels are kept, each for one head."""
    values = torch.linalg.svdvals(query @ key.mT).flatten().sort(descending=True).values
    return float(values[shared_dim:].norm() / values.norm())


@pytest.mark.parametrize("seed", range(5))
def test_channels_that_heads_share_are_found(seed: int) -> None:
    torch.manual_seed(seed)
    query, key = planted()
    _, error = left_over(query, key, SHARED)
    assert error < 1e-6
    assert cut_down(query, key, SHARED) > 0.1


def test_what_is_told_of_the_error_is_the_error() -> None:
    query, key = planted(noise=0.2)
    for shared_dim in (1, 5, 12, 23):
        told, error = left_over(query, key, shared_dim)
        assert told == pytest.approx(error, abs=1e-7)


@pytest.mark.parametrize("shared_dim", [1, 6, 13, 24, 31])
def test_it_is_no_worse_than_heads_that_are_cut_down(shared_dim: int) -> None:
    for query, key in (planted(noise=0.2), (torch.randn(6, 29, 7, dtype=DOUBLE), torch.randn(6, 31, 7, dtype=DOUBLE))):
        assert left_over(query, key, shared_dim)[0] <= cut_down(query, key, shared_dim) + 1e-9


def test_all_channels_lose_nothing() -> None:
    query, key = torch.randn(3, 29, 4, dtype=DOUBLE), torch.randn(3, 17, 4, dtype=DOUBLE)
    assert left_over(query, key, 12)[1] < 1e-6


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_whose_heads_share_is_compressed_without_loss(bias: bool) -> None:
    """A layer of SHARED channels a head, made of one with SHARED channels in all, and brought back to those."""
    options = {"head_dim": SHARED, "value_dim": 7, "bias": bias, "causal": True, "dtype": DOUBLE}
    made = CollaborativeAttention(INPUTS, HEADS, shared_dim=SHARED, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    plain = MultiHeadAttention(INPUTS, HEADS, **options)
    with torch.no_grad():
        for name in ("v_proj", "out_proj"):
            getattr(plain, name).load_state_dict(getattr(made, name).state_dict())
        for part in ("weight", "bias") if bias else ("weight",):
            query, key = (getattr(getattr(made, name), part) for name in ("q_proj", "k_proj"))
            mixing = made.mixing[..., None] if part == "weight" else made.mixing
            getattr(plain.q_proj, part).copy_((query * mixing).flatten(0, 1))
            getattr(plain.k_proj, part).copy_(key.expand(HEADS, *key.shape).flatten(0, 1))
    again = CollaborativeAttention.from_multi_head(plain, shared_dim=SHARED)
    assert again.mixing.shape == (HEADS, SHARED)
    x = torch.randn(3, 13, INPUTS, dtype=DOUBLE)
    torch.testing.assert_close(plain(x).output, made(x).output, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(again(x).output, made(x).output, rtol=1e-4, atol=1e-4)
    narrow = CollaborativeAttention.from_multi_head(plain, shared_dim=3)
    assert (narrow(x).output - made(x).output).abs().max() > 1e-3


def test_wrong_sizes_are_refused() -> None:
    query, key = planted()
    with pytest.raises(ShapeError, match="shared_dim must be 1 to num_heads \\* head_dim = 40, got 41"):
        shared_factors(query, key, 41)
    with pytest.raises(ShapeError, match=r"got \[5, 23, 8\] and \[4, 19, 8\]"):
        shared_factors(query, key[:4], 8)
