"""Masks packed for kernels: the interval of keys that a query's document spans, and of queries for a key."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhead import Mask
from polyhead.ops.common import kernel_masks
from polyhead.ops.common.kernel_masks import pack
from polyhead.ops.common.kernels.mask_arguments import GAPS
from polyhead.ops.common.visibility import resolve

QUERIES, KEYS = 7, 11
DENSE = torch.rand(3, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(0)) < 0.2
QUERY_IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [3, -1, -1, 0, 0, 0, 9], [-1] * QUERIES])
KEY_IDS = torch.tensor([[0, 0, 0, 1, 1, 4, 4, 4, 2, 2, 2], [3, 3, -1, 0, 9, 0, 0, -1, 3, 9, 9], [-1] * KEYS])
MASKS = {
    "padding on the right": Mask.lengths([11, 7, 0]),
    "padding on the left": Mask.lengths([11, 7, 0], side="left"),
    "padding on both sides": Mask.lengths([11, 9, 5]) & Mask.lengths([11, 6, 5], side="left"),
    "padded queries": Mask.lengths([11, 7, 4], queries=[7, 3, 0]),
    "documents": Mask.documents(QUERY_IDS, KEY_IDS),
    "dense": Mask.dense(DENSE),
    "dense by key": Mask.dense(DENSE[:, :, :1]),
    "dense with a band": Mask.dense(torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(2)[None, None]),
    "bias": Mask.bias(torch.where(DENSE, 0.5, -torch.inf)),
    "padded documents": Mask.documents(QUERY_IDS, KEY_IDS) & Mask.lengths([6, 10, 3]),
}


def spans(visible: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Return the first and the last column with True of each row; the number of columns and -1 where there is none."""
    rows = [[[i for i, sees in enumerate(row) if sees] for row in sequence] for sequence in visible.tolist()]
    first = [[row[0] if row else visible.shape[-1] for row in sequence] for sequence in rows]
    return first, [[row[-1] if row else -1 for row in sequence] for sequence in rows]


def full_starts(visible: Tensor) -> list[list[int]]:
    """Return the first column of each row without gaps; a number beyond all columns for other rows."""
    rows = [[[i for i, sees in enumerate(row) if sees] for row in sequence] for sequence in visible.tolist()]
    is_full = [[len(row) > 0 and row == list(range(row[0], row[-1] + 1)) for row in sequence] for sequence in rows]
    starts = [zip(sequence, flags, strict=True) for sequence, flags in zip(rows, is_full, strict=True)]
    return [[row[0] if flag else GAPS for row, flag in sequence] for sequence in starts]


@pytest.fixture(autouse=True)
def short_masks_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_masks, "_SEARCHED_PAIRS", 0)


@pytest.mark.parametrize("name", MASKS)
def test_intervals_span_the_visible_tokens(name: str) -> None:
    visibility = resolve(MASKS[name], batch=3, heads=1, queries=QUERIES, keys=KEYS, device=torch.device("cpu"))
    assert visibility is not None
    tile = visibility.allowed_tile((0, QUERIES), (0, KEYS))
    assert tile is not None
    visible = tile.expand(3, 1, QUERIES, KEYS)[:, 0]
    packed = pack(visibility, for_columns=True)
    intervals = [x.expand(3, -1).tolist() for x in (packed.first_key, packed.last_key) if x is not None]
    assert intervals == [*spans(visible)]
    intervals = [x.expand(3, -1).tolist() for x in (packed.first_query, packed.last_query) if x is not None]
    assert intervals == [*spans(visible.transpose(1, 2))]
    if name == "bias":  # its values are added in every tile
        assert packed.full_key is None
        return
    for found, pairs in ((packed.full_key, visible), (packed.full_query, visible.transpose(1, 2))):
        assert found is not None
        assert found.expand(3, -1).tolist() == full_starts(pairs)


COMBINED = {
    "dense and documents": Mask.dense(DENSE) & Mask.documents(QUERY_IDS, KEY_IDS),
    "dense and padding": Mask.dense(DENSE) & Mask.lengths([11, 7, 0]),
    "dense and a bias": Mask.dense(DENSE) & Mask.bias(torch.where(DENSE.roll(1, -1), 0.0, -torch.inf)),
    "dense and a band": Mask.dense(DENSE) & Mask.causal(),
}


@pytest.mark.parametrize("name", COMBINED)
def test_intervals_of_several_terms_leave_no_visible_token_out(name: str) -> None:
    visibility = resolve(COMBINED[name], batch=3, heads=1, queries=QUERIES, keys=KEYS, device=torch.device("cpu"))
    assert visibility is not None
    tile = visibility.allowed_tile((0, QUERIES), (0, KEYS))
    assert tile is not None
    packed = pack(visibility, for_columns=True)
    for visible, ends in (
        (tile.expand(3, 1, QUERIES, KEYS)[:, 0], (packed.first_key, packed.last_key)),
        (tile.expand(3, 1, QUERIES, KEYS)[:, 0].transpose(1, 2), (packed.first_query, packed.last_query)),
    ):
        found = [x.expand(3, -1) for x in ends if x is not None]
        exact = [torch.tensor(x) for x in spans(visible)]
        is_seen = visible.any(-1)
        assert ((found[0] <= exact[0]) & (found[1] >= exact[1]))[is_seen].all()


def test_masks_that_differ_between_heads_and_short_masks_have_no_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_key(mask: Mask) -> Tensor | None:
        visibility = resolve(mask, batch=3, heads=2, queries=QUERIES, keys=KEYS, device=torch.device("cpu"))
        assert visibility is not None
        return pack(visibility).first_key

    assert first_key(Mask.dense(DENSE)) is not None
    assert first_key(Mask.dense(DENSE.expand(3, 2, QUERIES, KEYS))) is None
    monkeypatch.setattr(kernel_masks, "_SEARCHED_PAIRS", QUERIES * KEYS + 1)
    assert first_key(Mask.dense(DENSE)) is None
