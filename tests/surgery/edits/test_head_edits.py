"""Edits as values: JSON round trips and validation."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.layers import MultiHeadAttention
from polyhead.surgery import (
    AddHeads,
    GroupQueries,
    MergeHeads,
    PruneHeads,
    ReorderHeads,
    apply,
    edits_from_json,
    edits_to_json,
    find_layers,
    fingerprint,
)
from polyhead.surgery.adapters.head_weights import read_heads

EDITS = (
    PruneHeads(3, (1, 7)),
    ReorderHeads(0, (2, 0, 1), stack="encoder.*.attn"),
    MergeHeads(5, (0, 2)),
    GroupQueries(1, ((0, 2), (1,))),
    AddHeads(2, 3, seed=7),
)


def layer_of(heads: int = 5, **options) -> MultiHeadAttention:
    return MultiHeadAttention(7 * heads, heads, **options).double()


def test_edits_go_through_json_unchanged():
    assert edits_from_json(edits_to_json(EDITS)) == EDITS
    with pytest.raises(dataclasses.FrozenInstanceError):
        EDITS[0].layer = 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PruneHeads(0, ()), "must name at least one head, got none"),
        (lambda: PruneHeads(0, (1, 2, 1)), r"must be distinct, got \[1\] more than once"),
        (lambda: PruneHeads(0, (-1,)), r"indices of at least 0, got \[-1\]"),
        (lambda: PruneHeads(0, "12"), "a sequence of indices, got '12'"),
        (lambda: PruneHeads(-1, (0,)), "layer must be at least 0, got -1"),
        (lambda: PruneHeads(0, (0,), stack=3), "stack must be the name of a stack of layers, got 3"),
        (lambda: MergeHeads(0, (1,)), r"at least two heads, got \[1\]"),
        (lambda: GroupQueries(0, ((0, 1), (1, 2))), r"must be distinct, got \[1\]"),
        (lambda: GroupQueries(0, 2), "KV heads of each group, got 2"),
        (lambda: AddHeads(0, 0), "count must be at least 1, got 0"),
        (lambda: edits_from_json("[]"), "at least one edit, got none"),
        (lambda: edits_from_json('[{"kind": "prune", "layer": 1}]'), "of kind 'prune' needs heads"),
        (lambda: edits_from_json('[{"kind": "shave", "layer": 1}]'), "got 'shave'"),
        (lambda: edits_from_json("{"), "a JSON list, got '{'"),
    ],
)
def test_a_bad_edit_says_why(make, words):
    with pytest.raises(OptionError, match=words):
        make()


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ([PruneHeads(0, (5,))], r"heads 0 to 4, got \[5\]"),
        ([PruneHeads(0, (0, 1, 2, 3, 4))], "must keep at least one head, got all 5 heads of layer 0"),
        ([PruneHeads(0, (4,)), PruneHeads(0, (4,))], r"heads 0 to 3, got \[4\]"),
        ([PruneHeads(1, (0,))], "has layers 0 to 0, got layer 1"),
        ([PruneHeads(0, (0,), stack="decoder")], "stack must be one of .*, got 'decoder'"),
        ([ReorderHeads(0, (1, 0))], r"each of the 5 heads once, got none of \[2, 3, 4\]"),
        ([GroupQueries(0, ((0, 1), (2, 3)))], r"every one of the 5 KV heads must be in a group, got none with \[4\]"),
        ([], "at least one edit, got none"),
        ("prune", "a sequence of PruneHeads"),
    ],
)
def test_an_edit_that_does_not_fit_leaves_the_model_alone(edits, words):
    layer = layer_of()
    before = fingerprint(layer)
    with pytest.raises(OptionError, match=words):
        apply(layer, edits)
    assert fingerprint(layer) == before
    assert layer.layout.num_heads == 5


def test_edits_compose_in_their_order():
    layer, twin = layer_of(), layer_of()
    twin.load_state_dict(layer.state_dict())
    apply(layer, [ReorderHeads(0, (4, 3, 2, 1, 0)), PruneHeads(0, (0, 1))])
    apply(twin, [PruneHeads(0, (4, 3)), ReorderHeads(0, (2, 1, 0))])
    assert fingerprint(layer) == fingerprint(twin)


@pytest.mark.parametrize("grouped", [False, True])
def test_merging_a_planted_duplicate_changes_nothing(grouped):
    layer = layer_of(4, num_kv_heads=2) if grouped else layer_of(4)
    x = torch.randn(2, 11, 28, dtype=torch.float64)
    with torch.no_grad():
        names = ("q_proj",) if grouped else ("q_proj", "k_proj", "v_proj")
        for name in names:
            linear = getattr(layer, name)
            linear.weight[21:28] = linear.weight[14:21]
            linear.bias[21:28] = linear.bias[14:21]
    whole = layer(x).output
    apply(layer, [MergeHeads(0, (2, 3))])
    assert layer.layout.num_heads == 3
    assert layer.layout.key_heads == ((0, 0, 1) if grouped else None)
    torch.testing.assert_close(layer(x).output, whole, rtol=0, atol=1e-12)


def test_heads_that_share_key_heads_with_others_are_not_merged_across_them():
    layer = layer_of(4, num_kv_heads=2)
    with pytest.raises(OptionError, match=r"which read KV heads \[0, 1\] shared with other heads"):
        apply(layer, [MergeHeads(0, (0, 2))])


def test_grouping_key_heads_that_are_equal_changes_nothing():
    layer = layer_of(4)
    x = torch.randn(2, 11, 28, dtype=torch.float64)
    with torch.no_grad():
        for linear in (layer.k_proj, layer.v_proj):
            linear.weight[7:14] = linear.weight[0:7]
            linear.weight[21:28] = linear.weight[14:21]
            linear.bias[7:14] = linear.bias[0:7]
            linear.bias[21:28] = linear.bias[14:21]
    whole = layer(x).output
    apply(layer, [GroupQueries(0, ((0, 1), (2, 3)))])
    assert (layer.layout.num_kv_heads, layer.layout.group_size) == (2, 2)
    torch.testing.assert_close(layer(x).output, whole, rtol=0, atol=1e-12)


def test_a_new_head_changes_nothing_reads_new_directions_and_can_learn():
    layer = MultiHeadAttention(28, 3, head_dim=7).double()
    x = torch.randn(2, 11, 28, dtype=torch.float64)
    whole = layer(x).output
    apply(layer, [AddHeads(0, 1, seed=3)])
    assert layer.layout.num_heads == 4
    torch.testing.assert_close(layer(x).output, whole, rtol=0, atol=1e-12)
    (found,) = find_layers(layer)
    heads = read_heads(layer, found)
    for matrices in (heads.query, heads.key, heads.value):
        old, new = matrices[:3].flatten(0, 1), matrices[3]
        assert (old @ new.T).abs().max() < 1e-10
        torch.testing.assert_close(new.norm(dim=1), old.norm(dim=1).mean().expand(7))
    layer(x).output.square().sum().backward()
    assert layer.out_proj.weight.grad[:, 21:].abs().max() > 0


def test_new_heads_beside_grouped_ones_are_refused():
    with pytest.raises(OptionError, match="got 4 heads over 2 KV heads in layer 0"):
        apply(layer_of(4, num_kv_heads=2), [AddHeads(0, 1)])
