"""Masks are descriptions with one polarity: what each kind lets through, written out by hand, and how they combine."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import Tensor, nn

from polyhead import Mask, attention
from polyhead.errors import DtypeError, MaskError, OptionError
from tests.ops.oracle import ON_THE_CPU


def visible(mask: Mask, queries: int, keys: int, batch: int = 1, heads: int = 1) -> Tensor:
    """Which weights are not zero where all logits are equal, [batch, heads, queries, keys]."""
    query, key = torch.zeros(batch, heads, queries, 1), torch.zeros(batch, heads, keys, 1)
    return attention(query, key, key, mask=mask, weights=True).weights > 0


def drawn(picture: str) -> Tensor:
    """A mask as it is drawn: x may attend, . may not; rows are queries."""
    return torch.tensor([[cell == "x" for cell in row] for row in picture.split()])


def assert_drawn(mask: Mask, *pictures: str) -> None:
    """Each picture is one sequence of the batch; every backend agrees with it, row by row."""
    expected = torch.stack([drawn(picture) for picture in pictures])[:, None]
    batch, _, queries, keys = expected.shape
    assert torch.equal(visible(mask, queries, keys, batch), expected)
    query, key = torch.randn(batch, 2, queries, 3), torch.randn(batch, 1, keys, 3)
    exact = attention(query, key, key, mask=Mask.dense(expected), backend="reference").output
    for backend in ON_THE_CPU:
        torch.testing.assert_close(attention(query, key, key, mask=mask, backend=backend).output, exact)


# ---- bands


def test_causal_lets_everyone_see_itself_and_what_is_before() -> None:
    assert_drawn(Mask.causal(), "x... xx.. xxx. xxxx")


def test_causal_puts_the_last_query_beside_the_last_key() -> None:
    assert_drawn(Mask.causal(), "xxxx. xxxxx")
    assert_drawn(Mask.causal(), "... ... x.. xx. xxx")


def test_a_window_of_n_is_n_keys_with_oneself() -> None:
    assert_drawn(Mask.window(1), "x.. .x. ..x")
    assert_drawn(Mask.window(3), "x.... xx... xxx.. .xxx. ..xxx")


def test_a_window_has_the_sides_it_is_given() -> None:
    assert_drawn(Mask.window(left=1, right=2), "xxx.. xxxx. .xxxx ..xxx ...xx")
    assert_drawn(Mask.window(left=1), "xxxxx xxxxx .xxxx ..xxx ...xx")
    assert_drawn(Mask.window(right=1), "xx... xxx.. xxxx. xxxxx xxxxx")
    assert_drawn(Mask.window(left=0, right=0), "x.. .x. ..x")


def test_a_window_keeps_the_first_keys_in_sight() -> None:
    assert_drawn(Mask.window(2, sinks=2), "x..... xx.... xxx... xxxx.. xx.xx. xx..xx")
    assert_drawn(Mask.window(left=1, right=1, sinks=1), "xx.... xxx... xxxx.. x.xxx. x..xxx x...xx")


def test_first_keys_are_those_of_each_sequence() -> None:
    left = Mask.lengths([4, 6], side="left")
    assert_drawn(
        Mask.window(2, sinks=1) & left,
        "...... ...... ..x... ..xx.. ..xxx. ..x.xx",
        "x..... xx.... xxx... x.xx.. x..xx. x...xx",
    )
    assert_drawn(
        Mask.window(1, sinks=1) & Mask.documents([0, 0, 0, 1, 1, 1]), "x..... xx.... x.x... ...x.. ...xx. ...x.x"
    )
    assert_drawn(
        Mask.window(1, sinks=1) & Mask.positions(torch.tensor([2, 3]), torch.tensor([3, -1, 0, 2])), "..xx x.x."
    )


# ---- padding


def test_lengths_pad_on_the_right_by_default_and_queries_like_keys() -> None:
    assert_drawn(Mask.lengths([2, 3]), "xx. xx. ...", "xxx xxx xxx")
    assert_drawn(Mask.lengths([2, 0], side="left"), "... .xx .xx", "... ... ...")


def test_every_query_of_a_cross_attention_is_real_unless_said_otherwise() -> None:
    assert_drawn(Mask.lengths([2, 4]), "xx.. xx..", "xxxx xxxx")
    assert_drawn(Mask.lengths([2, 4], queries=[2, 1]), "xx.. xx..", "xxxx ....")
    assert_drawn(Mask.lengths([2, 4], queries=[2, 1], side="left"), "..xx ..xx", ".... xxxx")
    assert_drawn(Mask.lengths([2, 2], queries=[3, 1]), "xx. xx. xx.", "xx. ... ...")


def test_causal_aligns_to_the_real_end_of_each_sequence() -> None:
    assert_drawn(Mask.causal() & Mask.lengths([2, 4]), "x... xx.. .... ....", "x... xx.. xxx. xxxx")
    assert_drawn(Mask.causal() & Mask.lengths([2, 4], side="left"), ".... .... ..x. ..xx", "x... xx.. xxx. xxxx")
    # Two new queries over caches of 3 and 5 tokens: the last one stands beside the last real key.
    assert_drawn(Mask.causal() & Mask.lengths([3, 5]), "xx... xxx..", "xxxx. xxxxx")
    # Of the first sequence only one of two new queries is real.
    assert_drawn(Mask.causal() & Mask.lengths([3, 5], queries=[1, 2]), "xxx.. .....", "xxxx. xxxxx")
    assert_drawn(Mask.window(2) & Mask.lengths([3, 5]), "xx... .xx..", "..xx. ...xx")


# ---- documents and positions


def test_documents_see_themselves_and_padding_sees_nothing() -> None:
    assert_drawn(Mask.documents([0, 0, 7, 7, -1]), "xx... xx... ..xx. ..xx. .....")
    assert_drawn(Mask.documents(torch.tensor([[0, 1, 1], [5, 5, -2]])), "x.. .xx .xx", "xx. xx. ...")


def test_causal_documents_start_over() -> None:
    assert_drawn(Mask.causal() & Mask.documents([0, 0, 1, 1, 1]), "x.... xx... ..x.. ..xx. ..xxx")


def test_separate_key_documents_align_each_at_its_own_end() -> None:
    queries, keys = [0, 1, 1, 2], [0, 0, 1, 1, 1, 3, -1]
    assert_drawn(Mask.documents(queries, keys), "xx..... ..xxx.. ..xxx.. .......")
    assert_drawn(Mask.causal() & Mask.documents(queries, keys), "xx..... ..xx... ..xxx.. .......")
    assert_drawn(Mask.window(1) & Mask.documents(queries, keys), ".x..... ...x... ....x.. .......")


def test_stated_positions_decide_alone() -> None:
    mask = Mask.positions(torch.tensor([3, 5]), torch.tensor([5, 4, 0, 3, -1, 6]))
    assert_drawn(mask, "xxxx.x xxxx.x")
    assert_drawn(mask & Mask.causal(), "..xx.. xxxx..")
    assert_drawn(mask & Mask.window(2), "...x.. xx....")
    two = Mask.positions(torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 1, 2]))
    assert_drawn(two & Mask.causal(), "x.. xx.", "xx. xxx")


def test_a_relative_bias_reads_its_table_by_distance() -> None:
    table = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    query = torch.zeros(1, 1, 4, 1)
    weights = attention(query, query, query, mask=Mask.relative(table, 1), weights=True).weights[0, 0]
    distance = torch.tensor([[2.0, 3.0, 4.0, 4.0], [1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 2.0]])
    torch.testing.assert_close(weights, distance.softmax(-1))


# ---- combining


ANY = {
    "causal": Mask.causal(),
    "window": Mask.window(4),
    "two sides": Mask.window(left=2, right=3),
    "lengths": Mask.lengths([5, 7]),
    "documents": Mask.documents([0, 0, 0, 1, 1, 1, 1]),
    "dense": Mask.dense(torch.rand(7, 7, generator=torch.Generator().manual_seed(1)) < 0.7),
    "bias": Mask.bias(torch.where(torch.eye(7, dtype=torch.bool), -torch.inf, 0.5)),
    "everything": Mask(),
}


@pytest.mark.parametrize("one", ANY)
@pytest.mark.parametrize("other", ANY)
def test_both_masks_must_allow_a_key(one: str, other: str) -> None:
    expected = visible(ANY[one], 7, 7, 2) & visible(ANY[other], 7, 7, 2)
    assert torch.equal(visible(ANY[one] & ANY[other], 7, 7, 2), expected)
    assert torch.equal(visible(ANY[other] & ANY[one], 7, 7, 2), expected)


@pytest.mark.parametrize("first", [(3, 0), (3, 2), (5, 0), (5, 2), (5, 3)])
@pytest.mark.parametrize("second", [(3, 0), (3, 2), (5, 0), (5, 2), (5, 3)])
def test_windows_with_first_keys_combine_exactly_or_not_at_all(first: tuple[int, int], second: tuple[int, int]) -> None:
    one, other = (Mask.window(size, sinks=sinks) for size, sinks in (first, second))
    narrow, wide = sorted([first, second])
    if narrow[0] < wide[0] and narrow[1] > wide[1]:
        with pytest.raises(MaskError, match="the narrower has no more sinks than the wider"):
            one & other
        return
    assert torch.equal(visible(one & other, 11, 11), visible(one, 11, 11) & visible(other, 11, 11))


def test_biases_add_up() -> None:
    one, other = torch.randn(5, 7), torch.randn(2, 1, 5, 7)
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    both = attention(query, key, key, mask=Mask.bias(one) & Mask.bias(other)).output
    torch.testing.assert_close(both, attention(query, key, key, mask=Mask.bias(one + other)).output)


def test_two_masks_that_state_positions_do_not_combine() -> None:
    placed = Mask.positions(torch.arange(3), torch.arange(3))
    with pytest.raises(MaskError, match="two masks with explicit positions"):
        placed & placed


def test_a_mask_combines_with_masks_alone() -> None:
    with pytest.raises(MaskError, match=r"got a tensor; use Mask.dense\(tensor\)"):
        Mask.causal() & torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match="unsupported operand"):
        Mask.causal() & 3


def test_the_mask_of_nothing_hides_nothing() -> None:
    assert Mask().is_everything
    assert Mask.from_torch().is_everything
    assert (Mask() & Mask()).is_everything
    assert not any(mask.is_everything for name, mask in ANY.items() if name != "everything")


# ---- a float 0/1 mask


@pytest.mark.parametrize("values", [torch.tensor([[0.0, 1.0]]), torch.ones(3, 5), torch.eye(4).half()])
def test_zeros_and_ones_are_no_bias_unless_said_so(values: Tensor) -> None:
    with pytest.raises(
        MaskError, match=r"a tensor of zeros and ones, which masks nothing; .*Mask.dense\(mask.bool\(\)\)"
    ):
        Mask.bias(values)
    assert len(Mask.bias(values, zero_one=True).biases) == 1
    assert len(Mask.bias(values * 0).biases) == 1  # a bias that starts at zero is a bias
    assert len(Mask.bias(values + 0.5).biases) == 1


# ---- torch's conventions

HIDE = torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) < 0.4
HIDE_EACH = torch.rand(2 * 3, 5, 7, generator=torch.Generator().manual_seed(4)) < 0.4
HIDE_KEYS = torch.arange(7) >= torch.tensor([[6], [4]])
ADD = torch.randn(5, 7, generator=torch.Generator().manual_seed(5))
HIDE[:, 0] = HIDE_EACH[..., 0] = False


@pytest.mark.parametrize(
    ("attn_mask", "key_padding_mask"),
    [
        (HIDE, None),
        (HIDE_EACH, None),
        (ADD, None),
        (torch.zeros(6, 5, 7).masked_fill(HIDE_EACH, -torch.inf), None),
        (None, HIDE_KEYS),
        (None, torch.zeros(2, 7).masked_fill(HIDE_KEYS, -torch.inf)),
        (None, torch.randn(2, 7)),
        (HIDE, HIDE_KEYS),
        (HIDE_EACH, HIDE_KEYS),
        (ADD, torch.zeros(2, 7).masked_fill(HIDE_KEYS, -torch.inf)),
        (torch.eye(5, 7), None),  # floats are added there, zeros and ones included
    ],
)
@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_masks_of_torchs_layer_mean_what_they_mean_there(
    backend: str, attn_mask: Tensor | None, key_padding_mask: Tensor | None
) -> None:
    layer = nn.MultiheadAttention(12, 3, batch_first=True, bias=False)
    query, source = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    theirs, _ = layer(query, source, source, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
    weights = layer.in_proj_weight.chunk(3)
    q, k, v = (
        (x @ w.T).unflatten(-1, (3, 4)).transpose(1, 2) for x, w in zip((query, source, source), weights, strict=True)
    )
    mask = Mask.from_torch(attn_mask, key_padding_mask, num_heads=3)
    ours = attention(q, k, v, mask=mask, backend=backend).output.transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer.out_proj(ours), theirs)


def test_a_key_padding_mask_may_be_unbatched() -> None:
    assert torch.equal(visible(Mask.from_torch(None, HIDE_KEYS[0]), 5, 7)[0, 0], ~HIDE_KEYS[0].expand(5, 7))


def test_masks_of_torchs_layer_are_checked() -> None:
    with pytest.raises(MaskError, match=r"requires num_heads, got shape \[6, 5, 7\] without it"):
        Mask.from_torch(HIDE_EACH)
    with pytest.raises(MaskError, match="got 6 rows and num_heads 4"):
        Mask.from_torch(HIDE_EACH, num_heads=4)
    with pytest.raises(OptionError, match="num_heads must be at least 1, got 0"):
        Mask.from_torch(HIDE_EACH, num_heads=0)
    with pytest.raises(MaskError, match=r"got shape \[1, 1, 5, 7\]"):
        Mask.from_torch(HIDE[None, None])
    with pytest.raises(MaskError, match=r"\[batch, keys\] or \[keys\], got shape \[1, 2, 7\]"):
        Mask.from_torch(None, HIDE_KEYS[None])
    with pytest.raises(DtypeError, match=r"boolean \(True = masked\) or floating point \(added\), got torch.int64"):
        Mask.from_torch(HIDE.long())
    with pytest.raises(MaskError, match="attn_mask must be a tensor, got list"):
        Mask.from_torch([[True]])


# ---- the value itself

KINDS = {
    "Mask(everything)": Mask(),
    "Mask(causal)": Mask.causal(),
    "Mask(window: 4 before, 0 after)": Mask.window(5),
    "Mask(window: 4 before, 0 after, first 2 kept)": Mask.window(5, sinks=2),
    "Mask(window: all before, 3 after)": Mask.window(right=3),
    "Mask(window: 3 before, all after)": Mask.window(left=3),
    "Mask(lengths of 2 sequences, padding on the left)": Mask.lengths([3, 5], side="left"),
    "Mask(documents [1, 7])": Mask.documents([0, 0, 0, 1, 1, 2, -1]),
    "Mask(explicit positions)": Mask.positions(torch.arange(5), torch.arange(7)),
    "Mask(dense [1, 1, 5, 7])": Mask.dense(torch.ones(5, 7, dtype=torch.bool)),
    "Mask(bias [2, 3, 1, 7])": Mask.bias(torch.randn(2, 3, 1, 7)),
    "Mask(relative bias [3, 9])": Mask.relative(torch.randn(3, 9), 4),
    "Mask(causal & lengths of 2 sequences, padding on the right & dense [1, 1, 5, 7])": (
        Mask.causal() & Mask.lengths([3, 5]) & Mask.dense(torch.ones(5, 7, dtype=torch.bool))
    ),
}


@pytest.mark.parametrize("text", KINDS)
def test_a_mask_says_what_it_is(text: str) -> None:
    assert repr(KINDS[text]) == text


@pytest.mark.parametrize("text", KINDS)
def test_a_mask_moves_with_every_tensor_it_holds(text: str) -> None:
    mask = KINDS[text]
    moved = mask.to("meta")
    assert repr(moved) == text
    assert [x.shape for x in moved.tensors] == [x.shape for x in mask.tensors]
    assert all(x.device.type == "meta" for x in moved.tensors)
    assert all(x.device.type == "cpu" for x in mask.tensors)
    stayed = mask.to("cpu")
    assert all(a is b for a, b in zip(stayed.tensors, mask.tensors, strict=True))


@pytest.mark.parametrize("text", KINDS)
def test_a_mask_can_be_copied_and_pickled_and_not_changed(text: str) -> None:
    mask = KINDS[text]
    for twin in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert repr(twin) == text
        assert all(torch.equal(a, b) for a, b in zip(twin.tensors, mask.tensors, strict=True))
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.left = 3


def test_a_mask_that_would_be_ambiguous_gets_a_hint() -> None:
    with pytest.raises(MaskError, match=r"got shape \[2, 5, 7\]; a 3-D mask is ambiguous: insert .* mask\[:, None\]"):
        Mask.dense(torch.ones(2, 5, 7, dtype=torch.bool))
    with pytest.raises(MaskError, match=r"got shape \[7\]$"):
        Mask.bias(torch.randn(7))


def test_building_a_mask_materialises_nothing() -> None:
    mask = Mask.causal() & Mask.window(1000) & Mask.lengths([1 << 40]) & Mask.relative(torch.randn(3, 9), 4)
    assert sum(x.numel() for x in mask.tensors) == 1 + 27
