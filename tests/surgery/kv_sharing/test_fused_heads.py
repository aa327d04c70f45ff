"""Fused heads: the best head of one rank, and lossless for equal QK and OV circuits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.layers.positions import Rotary
from polyhead.surgery import (
    FuseHeads,
    KeyTransform,
    MergeHeads,
    apply,
    change_key_basis,
    change_value_basis,
    edits_from_json,
    edits_to_json,
    find_layers,
    fingerprint,
    preview,
    read_heads,
    undo,
)
from polyhead.surgery.adapters.head_weights import pack_heads
from polyhead.surgery.calibration.layer_moments import centred
from polyhead.surgery.edits.applying import changed
from polyhead.surgery.kv_sharing.fused_heads import fuse
from tests.surgery.drawn_heads import allowed_map, conditioned, heads_of, inputs_of, products, root, written


def test_the_fused_head_is_the_truncated_mean_of_logits_and_sum_of_what_is_written():
    heads, inputs = heads_of(), inputs_of()
    found = fuse(heads, (1, 4), KeyTransform(), inputs)
    assert found.query.shape == (5, 6, 29)
    assert found.origins == (0, None, 2, 3, 5)
    left, right, values = root(inputs.query), root(centred(inputs.key)), root(centred(inputs.value))
    pair = written(heads)[[1, 4]]
    weights = (values @ pair).square().sum((1, 2))
    mean = torch.einsum("h,hij->ij", weights / weights.sum(), products(heads)[[1, 4]])
    off = left @ (products(found)[1] - mean) @ right
    left_over = torch.linalg.svdvals(left @ mean @ right)[6:].square().sum()
    torch.testing.assert_close(off.square().sum(), left_over, rtol=1e-7, atol=1e-10)
    off = values @ (written(found)[1] - pair.sum(0))
    left_over = torch.linalg.svdvals(values @ pair.sum(0))[6:].square().sum()
    torch.testing.assert_close(off.square().sum(), left_over, rtol=1e-7, atol=1e-10)
    means = inputs.value[:, -1]
    before, after = (torch.einsum("i,hio->o", means, written(x)) + x.output_bias for x in (heads, found))
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize(
    ("positions", "transform"),
    [
        (None, KeyTransform()),
        (Rotary(6), KeyTransform("half", 6)),
        (Rotary(6, rotary_dim=4, interleaved=True), KeyTransform("interleaved", 4)),
    ],
)
def test_heads_that_do_the_same_in_other_bases_are_fused_without_loss_and_not_by_their_mean(positions, transform):
    layer = MultiHeadAttention(29, 4, head_dim=6, positions=positions).double()
    heads = read_heads(layer, find_layers(layer)[0])
    place = [0, 1, 2, 1]
    planted = replace(
        heads,
        query=heads.query[place],
        key=heads.key[place],
        value=heads.value[place],
        query_bias=heads.query_bias[place],
        key_bias=heads.key_bias[place],
        value_bias=heads.value_bias[place],
    )
    planted = change_key_basis(planted, torch.stack([allowed_map(transform, 6, seed) for seed in range(4)]), transform)
    planted = change_value_basis(planted, torch.stack([conditioned(6, seed, 5.0) for seed in range(4)]))
    (only,) = find_layers(layer)
    with torch.no_grad():
        for name, value in pack_heads(layer, only, planted).items():
            layer.get_parameter(name).copy_(value)
    x = torch.randn(2, 11, 29, dtype=torch.float64)
    whole, before = layer(x).output, fingerprint(layer)
    merged = apply(layer, [MergeHeads(0, (1, 3))])
    assert (layer(x).output - whole).abs().max() > 1e-2
    undo(layer, merged)
    edit = FuseHeads(0, (1, 3), transform)
    assert edits_from_json(edits_to_json([edit])) == (edit,)
    counted = preview(layer, [edit])
    record = apply(layer, [edit])
    assert (layer(x).output - whole).abs().max() < 1e-9
    assert layer.layout.num_heads == counted.after.heads == 3
    undo(layer, record)
    assert fingerprint(layer) == before
    assert torch.equal(layer(x).output, whole)


def test_what_cannot_be_fused_is_refused():
    layer = MultiHeadAttention(12, 4, qk_norm="rms")
    with pytest.raises(OptionError, match="a norm of both prevents, got a layer with a rms norm"):
        apply(layer, [FuseHeads(0, (0, 1), KeyTransform("none", 0, "rms", (0, 0, 0)))])
    with pytest.raises(OptionError, match="heads 0 to 3, got"):
        apply(layer, [FuseHeads(0, (0, 9))])
    with pytest.raises(OptionError, match="at least two heads"):
        FuseHeads(0, (1,))
    grouped = MultiHeadAttention(12, 4, num_kv_heads=2)
    (found,) = find_layers(grouped)
    with pytest.raises(OptionError, match="which read KV heads"):
        changed(found, read_heads(grouped, found), [FuseHeads(0, (1, 2))])


def test_heads_of_one_key_head_leave_it_to_its_other_readers():
    layer = MultiHeadAttention(24, 6, num_kv_heads=2).double()
    heads = read_heads(layer, find_layers(layer)[0])
    found, merged = FuseHeads(0, (0, 2)).change(heads), MergeHeads(0, (0, 2)).change(heads)
    assert torch.equal(found.key, heads.key)
    assert torch.equal(found.value, heads.value)
    assert torch.equal(found.query, merged.query)
    assert torch.equal(found.output, merged.output)
