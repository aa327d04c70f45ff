"""Token samples are the same at every site, independent of batching, and mergeable."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import polyhead
from polyhead.errors import OptionError
from polyhead.observation import BatchMetadata
from polyhead.observation.token_sample import TokenSample

TEXTS = [torch.randn(length, 16, generator=torch.Generator().manual_seed(length)) for length in (5, 9, 7, 12, 6, 11)]


def sampled(batches, tokens: int = 20, **options):
    torch.manual_seed(0)
    layers = nn.ModuleList([polyhead.MultiHeadAttention(16, 2) for _ in range(2)])
    same = {(str(index), "self"): torch.eye(8).expand(2, 8, 8) for index in range(2)}
    session = polyhead.observe(layers, statistics=False, collect=[TokenSample(same, tokens, **options)])
    with torch.no_grad(), session:
        for texts, side in batches:
            longest = max(len(TEXTS[text]) for text in texts)
            lengths = torch.tensor([len(TEXTS[text]) for text in texts])
            x = torch.full((len(texts), longest, 16), torch.nan)
            for row, text in enumerate(texts):
                length = len(TEXTS[text])
                x[row, longest - length :] = TEXTS[text] if side == "left" else x[row, longest - length :]
                if side == "right":
                    x[row, :length] = TEXTS[text]
            session.metadata = BatchMetadata(documents=torch.tensor(texts))
            for layer in layers:
                layer(x, mask=polyhead.Mask.lengths(lengths, side=side))
    return [values["token_sample"] for values in session.observations.collected.values()]


def test_the_same_tokens_whatever_the_batches():
    one = sampled([([0, 1], "right"), ([2], "right"), ([3, 4, 5], "right")])
    other = sampled([([5], "left"), ([4, 0, 2], "left"), ([3, 1], "left")])
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine.hashes, theirs.hashes)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-5)
    assert torch.equal(one[0].hashes, one[1].hashes)
    assert len(one[0].hashes) == 20
    assert one[0].values.isfinite().all()


def test_two_samples_merge_into_that_of_both():
    whole = sampled([([0, 1, 2], "right"), ([3, 4, 5], "right")])[0]
    parts = [sampled([(texts, "right")])[0] for texts in ([0, 1, 2], [3, 4, 5])]
    for merged in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        assert torch.equal(merged.hashes, whole.hashes)
        torch.testing.assert_close(merged.values, whole.values)


def test_fewer_tokens_than_wanted_are_all_there():
    sample = sampled([([0, 1], "right")], tokens=100)[0]
    assert len(sample.rows()) == 5 + 9
    assert len(sample.hashes[:14].unique()) == 14


def test_another_seed_is_another_sample():
    one, other = (sampled([([0, 1, 2, 3], "right")], tokens=8, seed=seed)[0] for seed in (0, 1))
    assert not torch.equal(one.hashes, other.hashes)


def test_every_token_is_as_likely_as_another():
    from polyhead.observation.token_sample import token_hashes

    hashes = token_hashes(BatchMetadata(documents=torch.arange(500)), torch.ones(500, 64, dtype=torch.bool), 0)
    assert hashes.min() >= 0
    assert len(hashes.unique()) == hashes.numel()
    share = hashes.double() / 2**63
    assert abs(float(share.mean()) - 0.5) < 0.01
    assert abs(float(share.mean(0).std()) - 1 / (12 * 500) ** 0.5) < 0.004


def test_documents_must_be_known():
    layer = polyhead.MultiHeadAttention(16, 2)
    same = {("MultiHeadAttention", "self"): torch.eye(8).expand(2, 8, 8)}
    session = polyhead.observe(layer, statistics=False, collect=[TokenSample(same)])
    with torch.no_grad(), session, pytest.raises(OptionError, match="the document index of each of the 1 texts"):
        layer(torch.randn(1, 3, 16))


@pytest.mark.parametrize(
    "metadata", [{"documents": torch.tensor([4])}, {"documents": torch.arange(3), "pieces": torch.tensor([1])}]
)
def test_an_index_for_each_text(metadata):
    layer = polyhead.MultiHeadAttention(16, 2)
    same = {("MultiHeadAttention", "self"): torch.eye(8).expand(2, 8, 8)}
    session = polyhead.observe(layer, statistics=False, collect=[TokenSample(same)])
    session.metadata = BatchMetadata(**metadata)
    with torch.no_grad(), session, pytest.raises(OptionError, match=r"3 texts|here \[3\]"):
        layer(torch.randn(3, 5, 16))
