"""Refitted shared values approximate the target better than any output matrix alone."""

from __future__ import annotations

import pytest
import torch

from polyhead.surgery import HeadWeights, KeyTransform, share
from polyhead.surgery.kv_sharing.refine_values import AttendedInputs, refined
from tests.surgery.drawn_heads import heads_of


@pytest.mark.parametrize("bias", [True, False])
def test_refined_values_write_what_is_asked_nearer_than_any_output_matrix_could(bias):
    heads, width = share(heads_of(bias=bias), ((0, 1, 2), (3, 4, 5)), KeyTransform()), 29
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(6, 6, generator=generator)
    drawn = torch.einsum("hk,tkw->thw", mixing, torch.randn(600, 6, width, generator=generator))
    targets = (
        torch.randn(600, 6 * width, generator=generator) @ torch.randn(6 * width, width, generator=generator) * 0.1
    )
    targets = targets + torch.einsum("thw,hwe->te", drawn, torch.randn(6, width, width, generator=generator))
    sample = AttendedInputs(drawn, targets)

    def off(x: HeadWeights) -> float:
        value = x.augmented("value")[list(x.key_heads)].float()
        made = torch.einsum("thw,hdw->thd", torch.cat((drawn, torch.ones_like(drawn[..., :1])), -1), value)
        written = torch.einsum("thd,hde->te", made, x.output.float())
        left = targets - written
        return float((left - left.mean(0) if bias else left).square().sum())

    losses = [off(refined(heads, sample, ridge=1e-9, rounds=rounds)) for rounds in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[3] < 0.97 * losses[0]
    # Without rounds it is W_O alone, solved as any solver would.
    value = heads.value[list(heads.key_heads)].float()
    made = torch.einsum("thw,hdw->thd", drawn, value).flatten(1)
    if heads.value_bias is not None and not bias:
        made = made + heads.value_bias[list(heads.key_heads)].flatten().float()
    centre = (lambda z: z - z.mean(0)) if bias else (lambda z: z)
    solution = torch.linalg.lstsq(centre(made).double(), centre(targets).double()).solution
    best = float((centre(targets).double() - centre(made).double() @ solution).square().sum())
    assert losses[0] == pytest.approx(best, rel=1e-3)
