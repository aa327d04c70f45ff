"""Shared keys and values against direct decompositions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyhead.surgery import HeadWeights, KeyTransform, ShareKeys, apply, find_layers, fingerprint, preview, share, undo
from polyhead.surgery.calibration.layer_moments import centred
from tests.surgery.drawn_heads import heads_of, inputs_of, products, root
from tests.surgery.gated import FAMILIES, build


@pytest.mark.parametrize("kv_heads", [6, 3])
def test_shared_keys_are_the_leading_singular_vectors_of_the_stacked_products(kv_heads):
    heads, inputs = heads_of(6, kv_heads), inputs_of()
    found = share(heads, (tuple(range(kv_heads)),), KeyTransform(), inputs)
    left, right = root(inputs.query), root(centred(inputs.key))
    stacked = torch.cat([left @ one @ right for one in products(heads)])
    left_over = torch.linalg.svdvals(stacked)[6:].square().sum()
    off = sum((left @ one @ right).square().sum() for one in products(found) - products(heads))
    torch.testing.assert_close(off, left_over, rtol=1e-8, atol=1e-10)
    assert found.key.shape == (1, 6, 29)
    assert found.key_heads == (0,) * 6


@pytest.mark.parametrize("bias", [True, False])
def test_shared_values_are_the_leading_singular_vectors_of_what_is_written(bias):
    heads, inputs = heads_of(bias=bias), inputs_of()
    found = share(heads, ((0, 2, 4), (1, 3, 5)), KeyTransform(), inputs)

    def written(x: HeadWeights) -> Tensor:
        return x.augmented("value")[list(x.key_heads)].mT @ x.output

    moments = root(centred(inputs.value) if bias else inputs.value)
    left_over = 0.0
    for group in ((0, 2, 4), (1, 3, 5)):
        stacked = torch.cat([moments @ one for one in written(heads)[list(group)]], 1)
        left_over += float(torch.linalg.svdvals(stacked)[6:].square().sum())
    off = float((moments @ (written(found) - written(heads))).square().sum())
    assert off == pytest.approx(left_over, rel=1e-8)
    if bias:  # what is written in the mean stays
        mean = inputs.value[:, -1]
        before, after = (torch.einsum("i,hio->o", mean, written(x)) + x.output_bias for x in (heads, found))
        torch.testing.assert_close(after, before)


def test_under_rotary_positions_every_pair_has_its_leading_complex_vector():
    heads, inputs = heads_of(bias=False), inputs_of()
    transform = KeyTransform("interleaved", 4)
    found = share(heads, (tuple(range(6)),), transform, inputs)
    left, right = root(inputs.query)[:-1, :-1], root(inputs.key[:-1, :-1])
    for one, two in transform.pairs:

        def complex_products(x: HeadWeights, one: int = one, two: int = two) -> Tensor:
            query, key = (torch.complex(y[:, one], y[:, two]) for y in (x.query, x.key[list(x.key_heads)]))
            return query.conj()[:, :, None] * key[:, None, :]

        left_c, right_c = left.to(torch.complex128), right.to(torch.complex128)
        stacked = torch.cat([left_c @ x @ right_c for x in complex_products(heads)])
        off = left_c @ (complex_products(found) - complex_products(heads)) @ right_c
        left_over = torch.linalg.svdvals(stacked)[1:].square().sum()
        torch.testing.assert_close(off.abs().square().sum(), left_over, rtol=1e-6, atol=1e-9)
    # Channels that do not turn have a space of their own.
    rest = replace(heads, query=heads.query[:, 4:], key=heads.key[:, 4:])
    now = replace(found, query=found.query[:, 4:], key=found.key[:, 4:])
    left, right = root(inputs.query), root(centred(inputs.key))
    stacked = torch.cat([left @ one @ right for one in products(rest)])
    off = (left @ (products(now) - products(rest)) @ right).square().sum()
    torch.testing.assert_close(off, torch.linalg.svdvals(stacked)[2:].square().sum(), rtol=1e-6, atol=1e-9)


def test_the_edit_alone_is_counted_and_made_by_weights():
    family = FAMILIES["bert"]
    model = build(family)
    edits = [ShareKeys(number, ((0, 2), (1, 3))) for number in range(2)]
    counted = preview(model, edits)
    assert (counted.before.kv_heads, counted.after.kv_heads) == (8, 4)
    before = sum(p.numel() for p in model.parameters())
    record = apply(model, edits)
    assert before - sum(p.numel() for p in model.parameters()) == counted.before.parameters - counted.after.parameters
    assert find_layers(model)[0].layout.key_heads is None  # query heads stand in the order of their groups
    undo(model, record)
    assert fingerprint(model) == record.before
