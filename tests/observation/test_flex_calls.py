"""Models that call FlexAttention are observed where its functions are understood, and run as they are elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

import polyhead
from tests.observation.direct_models import DIM, HEADS, WIDTH, join_heads, split_heads, weights_of
from tests.observation.from_weights import Expected, assert_table

BATCH, TOKENS = 2, 150
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class FlexSelfAttention(nn.Module):
    def __init__(self, kv_heads: int = HEADS, compiled: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.kv_heads, self.options = kv_heads, {}
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * DIM).double().requires_grad_(False)
        self.attend = torch.compile(flex_attention, backend="eager") if compiled else flex_attention

    def heads(self, x):
        sizes = [HEADS * DIM, self.kv_heads * DIM, self.kv_heads * DIM]
        counts = (HEADS, self.kv_heads, self.kv_heads)
        return [split_heads(part, count) for part, count in zip(self.qkv(x).split(sizes, -1), counts, strict=True)]

    def forward(self, x):
        output = self.attend(*self.heads(x), enable_gqa=self.kv_heads != HEADS, **self.options)
        return output if isinstance(output, tuple) else join_heads(output)


def tokens():
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).double()


LENGTHS, STARTS = torch.tensor([TOKENS, 101]), torch.tensor([0, 20])
DOCUMENTS = torch.arange(TOKENS) // 64
MASKS = {
    "none": None,
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 9),
    "padding": lambda b, h, q, k: k < LENGTHS[b],
    "left padding": lambda b, h, q, k: (q >= k) & (k >= STARTS[b]),
    "heads": lambda b, h, q, k: (q >= k) & ((h > 0) | (q - k < 5)),
}


def dense(name):
    if MASKS[name] is None:
        return None
    index = [torch.arange(size) for size in (BATCH, HEADS, TOKENS, TOKENS)]
    return MASKS[name](*torch.meshgrid(*index, indexing="ij"))


def block_mask(name):
    batch = BATCH if "padding" in name else None
    heads = HEADS if name == "heads" else None
    return None if MASKS[name] is None else create_block_mask(MASKS[name], batch, heads, TOKENS, TOKENS, device="cpu")


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("kv_heads", "compiled"), [(HEADS, False), (1, False), (HEADS, True)])
def test_mask_functions_are_evaluated_exactly(name, kv_heads, compiled):
    model, x = FlexSelfAttention(kv_heads, compiled), tokens()
    model.options["block_mask"] = block_mask(name)
    real = {"padding": torch.arange(TOKENS) < LENGTHS[:, None], "left padding": torch.arange(TOKENS) >= STARTS[:, None]}
    rows = real.get(name, torch.ones(BATCH, TOKENS, dtype=torch.bool))
    query, key, value = model.heads(x)
    weights = weights_of(query, key, dense(name))
    expected = Expected()
    expected.add([weights], rows, rows.to(torch.uint8).argmax(-1))
    with torch.no_grad(), polyhead.observe(model) as session:
        output = model(x)
    assert session.skipped == []
    assert_table(session.profile, {"self": expected})
    exact = weights @ value.repeat_interleave(HEADS // kv_heads, 1)
    torch.testing.assert_close(output, join_heads(exact), rtol=1e-9, atol=1e-9)


def test_the_log_sum_exp_is_that_of_the_function():
    model, x = FlexSelfAttention(), tokens()
    model.options = {"return_aux": AuxRequest(lse=True), "scale": 0.7, "block_mask": block_mask("causal")}
    with torch.no_grad():
        expected, aux = model(x)
        with polyhead.observe(model) as session:
            output, observed = model(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(observed.lse, aux.lse)
    assert len(session.profile) == HEADS


def test_gates_multiply_the_outputs():
    model, x = FlexSelfAttention(), tokens()
    gate = torch.tensor([1.0, 0.0, 0.5]).double()
    with torch.no_grad(), polyhead.observe(model) as session:
        before = model(x)
        session.gates["FlexSelfAttention", "self"] = gate
        torch.testing.assert_close(model(x), before * gate.repeat_interleave(DIM))


def blocks_without_function():
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    return BlockMask.from_kv_blocks(
        counts, torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32), seq_lengths=(TOKENS, TOKENS)
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"score_mod": lambda score, b, h, q, k: score + 0.1 * (k - q)}, "score_mod '<lambda>'"),
        ({"block_mask": blocks_without_function()}, "the blocks of its block mask differ from its mask_mod"),
    ],
)
def test_what_is_not_understood_runs_as_it_is_and_is_listed(options, reason):
    model, x = FlexSelfAttention(), tokens()
    model.options = options
    with torch.no_grad():
        before = model(x)
        with polyhead.observe(model) as session:
            after = model(x)
    assert torch.equal(before, after)
    (skipped,) = session.skipped
    assert skipped.site == "FlexSelfAttention"
    assert reason in skipped.reason
    assert len(session.profile) == 0
