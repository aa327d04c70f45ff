"""Mask terms: independent of order and dtype, combinable, and unchanged until the backward."""

import pytest
import torch
from torch import Tensor

from polyhead import Mask, Statistics, attention
from polyhead.ops.talking_heads.api import talking_attention

BACKENDS = ("reference", "blockwise", "sdpa")


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16])
def test_narrow_integers_mean_the_same_as_wide_ones(dtype: torch.dtype) -> None:
    query, key = drawn(1, 2, 5, 4), drawn(1, 2, 7, 4)
    places = torch.arange(7)
    lengths = torch.tensor([3])
    masks = [
        (Mask.positions(places[2:].to(dtype), places.to(dtype)), Mask.positions(places[2:], places)),
        (Mask.lengths(lengths.to(dtype)), Mask.lengths(lengths)),
        (Mask.lengths(lengths.to(dtype), side="left"), Mask.lengths(lengths, side="left")),
    ]
    for narrow, wide in masks:
        expected = attention(query, key, key, mask=Mask.causal() & wide, statistics=True)
        actual = attention(query, key, key, mask=Mask.causal() & narrow, statistics=True)
        assert torch.equal(actual.output, expected.output)
        for (_, one), (_, other) in zip(actual.statistics.items(), expected.statistics.items(), strict=True):
            assert torch.equal(one, other)


def test_two_lengths_align_the_queries_to_the_earlier_end_in_either_order() -> None:
    query, key = drawn(2, 2, 3, 4), drawn(2, 2, 7, 4)
    one, other, both = Mask.lengths([7, 4]), Mask.lengths([3, 5]), Mask.lengths([3, 4])
    expected = attention(query, key, key, mask=Mask.causal() & both).output
    for mask in (one & other, other & one):
        torch.testing.assert_close(attention(query, key, key, mask=Mask.causal() & mask).output, expected)


def test_two_document_masks_count_the_first_keys_of_what_they_share() -> None:
    tokens = drawn(1, 2, 7, 4)
    one, other = torch.tensor([0, 0, 0, 0, 5, 5, 5]), torch.tensor([9, 9, 2, 2, 2, 2, 7])
    shared = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    window = Mask.window(1, sinks=1)
    expected = attention(tokens, tokens, tokens, mask=window & Mask.documents(shared), statistics="sink_mass")
    for mask in (Mask.documents(one) & Mask.documents(other), Mask.documents(other) & Mask.documents(one)):
        actual = attention(tokens, tokens, tokens, mask=window & mask, statistics="sink_mass")
        torch.testing.assert_close(actual.output, expected.output)
        torch.testing.assert_close(actual.statistics.sink_mass, expected.statistics.sink_mass)


def test_padding_is_no_token_of_the_document_whose_id_it_carries() -> None:
    tokens = drawn(1, 2, 7, 4)
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    padded = Mask.documents(ids) & Mask.lengths([5], side="left")  # the first two tokens of document 0 are padding
    stated = Mask.documents(torch.tensor([-1, -1, 0, 0, 1, 1, 1]))
    for window in (Mask.causal(), Mask.window(1, sinks=1)):
        expected = attention(tokens, tokens, tokens, mask=window & stated, statistics="sink_mass")
        actual = attention(tokens, tokens, tokens, mask=window & padded, statistics="sink_mass")
        torch.testing.assert_close(actual.output, expected.output)
        torch.testing.assert_close(actual.statistics.sink_mass, expected.statistics.sink_mass)
    # Keys that are padded on the right move no document's end.
    keys = Mask.documents(ids, ids) & Mask.lengths([6], queries=[7])
    expected = attention(
        tokens, tokens, tokens, mask=Mask.causal() & Mask.documents(ids, torch.tensor([0, 0, 0, 0, 1, 1, -1]))
    )
    actual = attention(tokens, tokens, tokens, mask=Mask.causal() & keys)
    torch.testing.assert_close(actual.output, expected.output)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_finite_biases_hide_nothing_however_large_their_sum(backend: str, dtype: torch.dtype) -> None:
    tokens = drawn(1, 2, 3, 4, dtype=dtype)
    least = torch.full((3, 3), torch.finfo(dtype).min, dtype=dtype)
    expected = attention(tokens, tokens, tokens, mask=Mask.bias(least)).output
    assert expected.abs().amin() > 0
    actual = attention(tokens, tokens, tokens, mask=Mask.bias(least) & Mask.bias(least), backend=backend).output
    torch.testing.assert_close(actual, expected)
    table = Mask.relative(least[:1], 0)
    actual = attention(tokens, tokens, tokens, mask=Mask.bias(least) & table, backend=backend).output
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_beyond_the_range_of_the_logits_hides_nothing(backend: str) -> None:
    tokens = drawn(1, 2, 3, 4, dtype=torch.float32)
    bias = torch.zeros(3, 3, dtype=torch.float64)
    bias[1] = -1e300
    bias[2, 2] = -torch.inf
    result = attention(tokens, tokens, tokens, mask=Mask.bias(bias), backend=backend, statistics="visible_keys")
    everything = attention(tokens, tokens, tokens).output
    assert result.statistics.visible_keys[0, 0].tolist() == [3, 3, 2]
    torch.testing.assert_close(result.output[:, :, 0], everything[:, :, 0])
    torch.testing.assert_close(result.output[:, :, 1], tokens.mean(2))


def test_float16_queries_keep_a_scale_per_head_that_float16_cannot_represent() -> None:
    tokens = drawn(1, 2, 5, 8, dtype=torch.float16) * 1e-3
    for scale in (torch.tensor([1e5, 2e5]), torch.tensor([1e-9, 1e-8])):
        exact = attention(*(tokens.double(),) * 2, tokens.double(), scale=scale.double()).output
        actual = attention(tokens, tokens, tokens, scale=scale).output
        assert (actual.double() - exact).abs().max() < 2e-3 * tokens.abs().max()


@pytest.mark.parametrize("changed", ["dense", "documents", "positions", "seed"])
def test_a_mask_or_seed_written_to_before_the_backward_is_refused(changed: str) -> None:
    query = drawn(1, 2, 5, 4).requires_grad_()
    allowed, seed = torch.ones(5, 5, dtype=torch.bool).tril(), torch.tensor([3])
    ids, places = torch.tensor([[0, 0, 1, 1, 1]]), torch.arange(5)[None]
    mask = {"dense": Mask.dense(allowed), "documents": Mask.documents(ids)}.get(changed)
    mask = Mask.causal() & Mask.positions(places, places) if changed == "positions" else mask
    result = attention(query, query, query, mask=mask, seed=seed, dropout=0.5, backend="blockwise")
    {"dense": allowed, "documents": ids, "positions": places, "seed": seed}[changed].fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.output.sum().backward()


def test_a_mask_of_talking_heads_written_to_before_the_backward_is_refused() -> None:
    query = drawn(1, 2, 5, 4).requires_grad_()
    allowed, mix = torch.ones(5, 5, dtype=torch.bool).tril(), torch.eye(2, dtype=torch.float64)
    result = talking_attention(
        query, query, query, logits_mix=mix, weights_mix=mix, mask=Mask.dense(allowed), backend="blockwise"
    )
    allowed.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.output.sum().backward()


def test_masks_are_built_inside_vmap() -> None:
    tokens, bias, lengths = drawn(3, 1, 2, 5, 4), drawn(3, 5, 5), torch.tensor([[2], [5], [1]])

    def attend(x: Tensor, added: Tensor, length: Tensor) -> Tensor:
        return attention(x, x, x, mask=Mask.bias(added) & Mask.lengths(length), backend="reference").output

    expected = torch.stack([attend(*case) for case in zip(tokens, bias, lengths, strict=True)])
    torch.testing.assert_close(torch.vmap(attend)(tokens, bias, lengths), expected)


def test_sink_mass_counts_from_the_first_real_key_under_both_paddings() -> None:
    tokens = drawn(1, 2, 7, 4)
    mask = Mask.causal() & Mask.lengths([6], side="left") & Mask.lengths([5], side="left")
    result = attention(tokens, tokens, tokens, mask=mask, statistics=Statistics("sink_mass"), weights=True)
    torch.testing.assert_close(result.statistics.sink_mass, result.weights[..., 2])
