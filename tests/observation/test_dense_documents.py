"""Sequences that a dense mask separates have first keys of their own, however the mask is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import polyhead
from polyhead.masks import Mask
from polyhead.observation import AttentionMaps, attention_calls, calls, torch_modules
from polyhead.observation import rows as rows_module
from polyhead.observation.rows import hidden_by_bias, with_documents
from polyhead.ops.attention import attention
from tests.observation.direct_models import WIDTH as DIRECT_WIDTH
from tests.observation.direct_models import MaskedAttention

LENGTHS, TOKENS, WIDTH = (5, 1, 7), 13, 24
IDS = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
BLOCKS = IDS[:, None] == IDS
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
FORMS = {"booleans": None, "infinities": -torch.inf, "least numbers": torch.finfo(torch.float32).min, "-1e4": -1e4}


class Softmax(nn.Module):
    """A softmax by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv = 3, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        logits = query @ key.transpose(-2, -1)
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask
        return (logits.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Torch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attention(x, x, x, attn_mask=~mask if mask.dtype is torch.bool else mask)[0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = polyhead.MultiHeadAttention(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        is_bool = mask.dtype is torch.bool
        return self.attention(x, mask=Mask.dense(mask[None, None]) if is_bool else Mask.bias(mask[None, None])).output


def profile(model: nn.Module, x: Tensor, mask: Tensor):
    with torch.no_grad():
        expected = model(x, mask)
        with polyhead.observe(model) as session:
            torch.testing.assert_close(model(x, mask), expected, rtol=1e-5, atol=1e-6)
    return session.profile


def written(allowed: Tensor, form: str) -> Tensor:
    value = FORMS[form]
    return allowed if value is None else torch.where(allowed, 0.0, value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("allowed", [BLOCKS, BLOCKS & CAUSAL], ids=["both ways", "causal"])
@pytest.mark.parametrize("create", [MaskedAttention, Softmax, Torch])
@pytest.mark.parametrize("is_readable", [True, False])
def test_documents_of_a_dense_mask_are_observed_like_sequences(create, allowed, form, is_readable, monkeypatch):
    if not is_readable:  # as on a device
        for module in (rows_module, attention_calls):
            monkeypatch.setattr(module, "is_readable", lambda x: False)
    torch.manual_seed(0)
    width = DIRECT_WIDTH if create is MaskedAttention else WIDTH
    model, x = create().eval(), torch.randn(2, TOKENS, width)
    found = profile(model, x, written(allowed, form))
    total = torch.zeros_like(found["sink_mass"])
    for part, rows in zip(x.split(LENGTHS, 1), allowed.split(LENGTHS), strict=True):
        size = part.shape[1]
        alone = profile(model, part, rows[:, rows.any(0).nonzero()[0, 0] :][:, :size])
        total += alone["sink_mass"] * size / TOKENS
    torch.testing.assert_close(found["sink_mass"], total, rtol=0, atol=2e-6)
    given = profile(model, x, allowed)
    for name in given.columns:
        torch.testing.assert_close(found[name], given[name], rtol=1e-5, atol=2e-6, msg=name)


def test_finite_numbers_hide_keys_from_the_statistics_of_a_layer():
    torch.manual_seed(0)
    model, x = Layer().eval(), torch.randn(2, TOKENS, WIDTH)
    hidden, masked = (profile(model, x, written(CAUSAL, form)) for form in ("-1e4", "booleans"))
    torch.testing.assert_close(hidden["normalized_entropy"], masked["normalized_entropy"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (BLOCKS, IDS.tolist()),
        (BLOCKS & CAUSAL, IDS.tolist()),
        (CAUSAL, None),
        (CAUSAL & CAUSAL.T.roll(-3, 1), None),  # a window
        ((BLOCKS & CAUSAL) | (torch.arange(TOKENS) == 0), None),  # all see the first token
        (torch.ones(TOKENS, TOKENS, dtype=torch.bool), None),
        (CAUSAL & (torch.arange(TOKENS) >= 3), [0, 1, 2] + [3] * 10),  # padding on the left
        (CAUSAL & (torch.arange(TOKENS) < 9), None),  # padding on the right
    ],
)
def test_documents_begin_where_nobody_looks_across(allowed, expected):
    mask, _ = with_documents(Mask.dense(allowed[None, None]), TOKENS, TOKENS)
    assert mask is not None
    assert (mask.packed[0].queries[0].tolist() if len(mask.packed) else None) == expected


def test_a_row_that_finite_numbers_hide_keeps_all_keys():
    bias = Mask.bias(torch.where(BLOCKS & CAUSAL & (torch.arange(TOKENS) > 0), 0.0, -1e9)[None, None])
    of_call, of_statistics = with_documents(bias, TOKENS, TOKENS)
    assert of_call is bias
    assert of_statistics is not None
    assert of_statistics.packed[0].queries[0].tolist() == [0, *(IDS[1:] + 1).tolist()]


@pytest.mark.parametrize("create", [Mask.dense, lambda x: Mask.bias(torch.where(x, 0.0, -1e9))])
@pytest.mark.parametrize("queries", [1, TOKENS])
def test_padding_whose_queries_see_tokens_is_cut_off_for_the_statistics_alone(create, queries):
    mask = create((torch.arange(TOKENS) >= 3).expand(1, 1, queries, TOKENS))
    of_call, of_statistics = with_documents(mask, TOKENS, TOKENS)
    assert of_call is mask
    assert of_statistics is not None
    assert of_statistics.packed[0].queries[0].tolist() == [0] * 3 + [1] * 10


@pytest.mark.parametrize("is_readable", [True, False])
def test_statistics_alone_of_torchs_layer_take_one_pass(is_readable, monkeypatch):
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(WIDTH, 3, batch_first=True).eval(), torch.randn(2, TOKENS, WIDTH)
    padding, passes, tables = torch.arange(TOKENS) < torch.tensor([4, 0])[:, None], [], []
    for module in (torch_modules, calls):
        monkeypatch.setattr(module, "attention", lambda *x, **options: (passes.append(1), attention(*x, **options))[1])
    monkeypatch.setattr(rows_module, "is_readable", lambda x: is_readable)
    with torch.no_grad():
        for collect in ((), [AttentionMaps(TOKENS)]):
            passes.append(0)
            with polyhead.observe(layer, collect=collect) as session:
                layer(x, x, x, key_padding_mask=padding)
            tables.append(session.profile)
    assert passes == [0, 1, 0, 1, 1]
    for name in tables[0].columns:
        torch.testing.assert_close(tables[0][name], tables[1][name], rtol=0, atol=0, msg=name)


def test_keys_of_other_documents_are_not_hidden_a_second_time():
    bias = Mask.bias(torch.where(BLOCKS & CAUSAL, 0.0, -1e9)[None, None])
    hidden = hidden_by_bias(with_documents(bias, TOKENS, TOKENS)[0], (2, 3, TOKENS))
    assert hidden is not None
    assert torch.equal(hidden[0, 0], (BLOCKS & ~CAUSAL).sum(-1))


SHOWN_LENGTH = 9
PADDING_BIAS = Mask.bias(torch.where(torch.arange(TOKENS) < SHOWN_LENGTH, 0.0, -1e9)[None, None, None])


@pytest.mark.parametrize(
    ("hiding", "hidden_once"),
    [
        (PADDING_BIAS, Mask.lengths(torch.tensor([SHOWN_LENGTH] * 2))),
        (PADDING_BIAS & PADDING_BIAS, Mask.lengths(torch.tensor([SHOWN_LENGTH] * 2))),
        (PADDING_BIAS & Mask.lengths(torch.tensor([SHOWN_LENGTH] * 2)), Mask.lengths(torch.tensor([SHOWN_LENGTH] * 2))),
        (Mask.bias(torch.where(CAUSAL, 0.0, -1e9)[None, None]), None),
        (PADDING_BIAS & Mask.dense(BLOCKS[None, None]), PADDING_BIAS & Mask.documents(IDS[None])),
    ],
    ids=["causal", "two biases", "lengths", "twice causal", "dense"],
)
def test_keys_that_the_rest_of_the_mask_hides_are_not_hidden_a_second_time(hiding, hidden_once):
    torch.manual_seed(0)
    layer, x = polyhead.MultiHeadAttention(WIDTH, 3, causal=True), torch.randn(2, TOKENS, WIDTH)
    tables = []
    for mask in (hiding, hidden_once):
        with torch.no_grad(), polyhead.observe(layer, statistics=("entropy", "normalized_entropy")) as session:
            layer(x, mask=mask)
        tables.append(session.profile)
    for name in tables[0].columns:
        torch.testing.assert_close(tables[0][name], tables[1][name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("also", [None, Mask.causal()], ids=["alone", "causal"])
def test_a_number_that_hides_keys_of_one_head_hides_them_as_infinity_does(also):
    torch.manual_seed(0)
    layer, x = polyhead.MultiHeadAttention(WIDTH, 3), torch.randn(2, TOKENS, WIDTH)
    index = torch.arange(TOKENS)
    near = (index - index[:, None]).abs() <= 1
    shown = torch.stack([near, torch.ones_like(near), near & (index[:, None] > 4)])[
        None
    ]  # of the last head no row below
    tables = []
    for low in (-1e9, -torch.inf):
        mask = Mask.bias(torch.where(shown, 0.0, low))
        with torch.no_grad(), polyhead.observe(layer, statistics=("entropy", "normalized_entropy")) as session:
            layer(x, mask=mask if also is None else mask & also)
        tables.append(session.profile)
    assert tables[1]["tokens"].tolist() == [2 * TOKENS, 2 * TOKENS, 2 * (TOKENS - 5)]
    for name in tables[0].columns:
        torch.testing.assert_close(tables[0][name], tables[1][name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_padding_on_the_left_is_found_however_the_mask_is_written(form):
    allowed = (torch.arange(TOKENS) >= 4)[None, None, None]
    mask = Mask.dense(allowed) if FORMS[form] is None else Mask.bias(written(allowed, form))
    tokens = rows_module.Tokens(mask, 1, 5, TOKENS, torch.device("cpu"))
    assert tokens.first_token().tolist() == [4]


def test_hidden_keys_are_counted_in_parts_of_the_rows(monkeypatch):
    mask = PADDING_BIAS & Mask.causal()
    whole = hidden_by_bias(mask, (2, 3, TOKENS))
    monkeypatch.setattr(rows_module, "_STORED_PAIRS", 5 * TOKENS * 2)
    parts = hidden_by_bias(mask, (2, 3, TOKENS))
    assert whole is not None
    assert parts is not None
    assert torch.equal(whole, parts)
    assert whole[0, 0].tolist() == [0] * SHOWN_LENGTH + [*range(1, TOKENS - SHOWN_LENGTH + 1)]


class TwoSequences(nn.Module):
    """Text attends to an image, the first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.query, self.key = 3, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        query, key = (x.unflatten(-1, (3, 8)).transpose(1, 2) for x in (self.query(text), self.key(image)))
        return ((query @ key.mT + torch.zeros(text.shape[1], 1)).softmax(-1) @ key).transpose(1, 2).flatten(2)


def test_the_second_of_two_sequences_attends_across_to_the_first():
    model, image, text = TwoSequences(), torch.randn(2, 17, WIDTH), torch.randn(2, 5, WIDTH)
    with torch.no_grad(), polyhead.observe(model) as session:
        model(image, text)
    assert [site.kind for site in session.profile.sites] == ["cross"] * 3
