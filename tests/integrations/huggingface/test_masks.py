"""The mask function agrees with transformers' own for every pair, in memory linear in n."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="these tests are about masks of transformers")

from transformers import masking_utils

from polyhead.integrations.huggingface import DescribedMask
from polyhead.integrations.huggingface.mask_functions import make_mask

BATCH = 3
# (queries, keys, offset of the queries, offset of the keys)
PLACES = {
    "one forward": (13, 13, 0, 0),
    "a growing cache": (5, 13, 8, 0),
    "one more token": (1, 13, 12, 0),
    "a rolling cache": (1, 7, 19, 13),
    "a rolling cache, many tokens": (5, 11, 19, 13),
    "an empty preallocated cache": (5, 13, torch.tensor(0), 0),
    "a preallocated cache": (2, 13, torch.tensor(6), 0),
    "a preallocated rolling cache": (1, 7, 3, 0),
}
PADDING = {
    "none": None,
    "all real": [[1] * 24, [1] * 24, [1] * 24],
    "left": [[1] * 24, [0] * 3 + [1] * 21, [0] * 9 + [1] * 15],
    "right": [[1] * 24, [1] * 10 + [0] * 14, [1] * 4 + [0] * 20],
    "holes": [[1] * 24, [1, 0] * 12, [0, 1, 1, 0, 0, 1] * 4],
    "a row of nothing": [[1] * 24, [0] * 24, [1] * 24],
}


def function(kind: str, left_padding: Tensor) -> Callable[..., Tensor]:
    packed = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2])[None].expand(BATCH, -1)
    return {
        "causal": masking_utils.causal_mask_function,
        "bidirectional": masking_utils.bidirectional_mask_function,
        "window": masking_utils.sliding_window_causal_mask_function(4),
        "window on both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
        "chunks": masking_utils.chunked_causal_mask_function(5, left_padding),
        "packed": masking_utils.and_masks(
            masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(packed)
        ),
    }[kind]


KINDS = ("causal", "bidirectional", "window", "window on both sides", "chunks")
# transformers packs sequences only where there is no cache.
CASES = [*((kind, place) for kind in KINDS for place in PLACES), ("packed", "one forward")]


@pytest.mark.parametrize(("kind", "place"), CASES)
@pytest.mark.parametrize("padding", PADDING)
def test_every_pair_is_as_transformers_has_it(kind, padding, place):
    queries, keys, query_offset, key_offset = PLACES[place]
    seen = int(query_offset) + queries
    real = None if PADDING[padding] is None else torch.tensor(PADDING[padding], dtype=torch.bool)[:, :seen]
    left_padding = torch.zeros(BATCH, dtype=torch.int64) if real is None else (real.cumsum(-1) == 0).sum(-1)
    sizes = {
        "batch_size": BATCH, "q_length": queries, "kv_length": keys, "q_offset": query_offset, "kv_offset": key_offset,
        "mask_function": function(kind, left_padding), "attention_mask": real, "device": "cpu",
    }  # fmt: skip
    expected = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False).expand(BATCH, 1, queries, keys)
    mask = make_mask(**sizes, dtype=torch.float32)
    assert isinstance(mask, DescribedMask)
    assert mask.shape == expected.shape
    assert sum(x.numel() for x in mask.description.tensors) <= 2 * BATCH * (queries + keys)
    # A padded query may be hidden itself; what it would see is nobody's business.
    rows = torch.ones(BATCH, queries, dtype=torch.bool)
    if real is not None:
        rows = real[:, seen - queries : seen]
    assert torch.equal((mask.dense() == 0)[:, 0][rows], expected[:, 0][rows])
    # Nobody sees more than transformers allows.
    assert not ((mask.dense() == 0) & ~expected).any()


@pytest.mark.parametrize("padding", ["none", "left", "holes"])
def test_an_unknown_mask_function_is_evaluated_for_every_pair(padding):
    groups = torch.tensor([-1, -1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1, -1])[None].expand(BATCH, -1)
    blocks = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(groups))
    custom = masking_utils.and_masks(blocks, lambda batch, head, query, key: (query + key) % 3 != 1)
    real = None if padding == "none" else torch.tensor(PADDING[padding], dtype=torch.bool)[:, :13]
    for known in (blocks, custom):
        sizes = {"batch_size": BATCH, "q_length": 13, "kv_length": 13, "mask_function": known, "attention_mask": real}
        expected = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False)
        mask = make_mask(**sizes, allow_is_causal_skip=True, use_vmap=known is custom)
        assert torch.equal(mask.dense() == 0, expected)


def test_a_window_and_a_causal_edge_are_one_description():
    mask = make_mask(2, 9, 9, mask_function=masking_utils.sliding_window_causal_mask_function(4))
    assert repr(mask.description) == "Mask(window: 3 before, 0 after)"


@pytest.mark.parametrize("allowed", [True, False])
def test_nothing_to_hide_is_no_mask_where_the_caller_allows_it(allowed):
    arguments = {"mask_function": masking_utils.bidirectional_mask_function, "allow_is_bidirectional_skip": allowed}
    for real in (None, torch.ones(2, 9, dtype=torch.bool)):
        mask = make_mask(2, 9, 9, attention_mask=real, **arguments)
        assert (mask is None) == allowed
    assert make_mask(2, 9, 9, attention_mask=torch.arange(9).expand(2, 9) < 5, **arguments) is not None


@pytest.mark.parametrize("kind", ["causal", "left-padded", "window", "packed"])
def test_a_mask_of_131072_tokens_costs_no_matrix(kind):
    length = 131_072
    real = (torch.arange(length) >= 1000)[None] if kind == "left-padded" else None
    mask_function = {
        "window": masking_utils.sliding_window_causal_mask_function(4096),
        "packed": masking_utils.and_masks(
            masking_utils.causal_mask_function,
            masking_utils.packed_sequence_mask_function((torch.arange(length) // 5000)[None]),
        ),
    }.get(kind, masking_utils.causal_mask_function)
    mask = make_mask(1, length, length, mask_function=mask_function, attention_mask=real)
    assert mask.shape == (1, 1, length, length)
    assert mask.made is None
    assert sum(x.numel() for x in mask.description.tensors) <= 2 * length
