"""Groups of KV heads: planted similarity is found, and no other grouping loses less."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyhead.surgery import KeyTransform, change_key_basis, change_value_basis, share
from polyhead.surgery.kv_sharing.grouping import group_loss, neighbours, similar_groups
from tests.surgery.drawn_heads import allowed_map, conditioned, heads_of, inputs_of, products


@pytest.mark.parametrize(
    "transform", [KeyTransform(), KeyTransform("half", 6), KeyTransform("interleaved", 4)], ids=str
)
def test_heads_that_are_images_of_one_another_are_found_and_share_without_loss(transform):
    heads, groups = heads_of(), ((0, 3), (1, 4), (2, 5))
    place = [0, 1, 2, 0, 1, 2]
    planted = replace(
        heads,
        key=heads.key[place],
        key_bias=heads.key_bias[place],
        value=heads.value[place],
        value_bias=heads.value_bias[place],
    )
    maps = torch.stack([allowed_map(transform, 6, seed) for seed in range(6)])
    planted = change_key_basis(planted, maps, transform)
    planted = change_value_basis(planted, torch.stack([conditioned(6, seed, 5.0) for seed in range(6)]))
    inputs = inputs_of()
    assert similar_groups(planted, 3, transform, inputs) == groups
    loss = group_loss(planted, transform, inputs)
    assert loss((0, 3)) < 1e-12 < 1e-3 < loss((0, 1))
    found = share(planted, groups, transform, inputs)
    assert found.key_heads == (0, 1, 2, 0, 1, 2)
    x, y = (torch.cat((torch.randn(7, 29), torch.ones(7, 1)), 1).double() for _ in "xy")
    before, after = (torch.einsum("ti,hij,sj->hts", x, products(one), y) for one in (planted, found))
    # Without positions, what is the same for every key changes no softmax.
    centre = (lambda z: z - z.mean(-1, keepdim=True)) if transform.rotary_dim < 6 else (lambda z: z)
    torch.testing.assert_close(centre(after), centre(before), rtol=1e-8, atol=1e-8)


def test_the_best_groups_of_all_are_found():
    heads, inputs = heads_of(), inputs_of()
    loss = group_loss(heads, KeyTransform(), inputs)
    found = similar_groups(heads, 3, KeyTransform(), inputs)

    def pairings(left: list[int]):
        if not left:
            yield ()
        for other in left[1:]:
            rest = [head for head in left[1:] if head != other]
            for others in pairings(rest):
                yield ((left[0], other), *others)

    best = min(pairings(list(range(6))), key=lambda groups: sum(map(loss, groups)))
    assert sum(map(loss, found)) <= 1.02 * sum(map(loss, best))
    assert sum(map(loss, found)) < sum(map(loss, neighbours(6, 3)))
