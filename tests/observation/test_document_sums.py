"""`DocumentSums`: every document has the statistics that it has alone, and all together those of the session."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import polyhead
from polyhead.errors import OptionError
from polyhead.observation import BatchMetadata, load, save
from polyhead.observation.document_sums import MAX_DOCUMENTS, DocumentSums, SiteDocumentSums

HEADS, LENGTHS, DOCUMENTS = 3, (11, 7, 1, 5), (4, 2, 9, 2)
NAMES = ("entropy", "normalized_entropy", "max_logit", "mean_distance", "previous_mass")


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    return polyhead.MultiHeadAttention(24, HEADS, causal=True)


def texts() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(length, 24, generator=draw) for length in LENGTHS]


def observed(layer, numbers: tuple[int, ...], documents: tuple[int, ...] = DOCUMENTS):
    """A session over some of the texts, padded to one batch."""
    chosen = [texts()[number] for number in numbers]
    lengths = torch.tensor([len(x) for x in chosen])
    batch = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=torch.nan)
    with torch.no_grad(), polyhead.observe(layer, statistics=NAMES, collect=[DocumentSums()]) as session:
        session.metadata = BatchMetadata(documents=torch.tensor([documents[number] for number in numbers]))
        is_token = torch.arange(batch.shape[1]) < lengths[:, None]
        # A mask of keys, with which padding attends as a query, as in transformers.
        layer(batch.nan_to_num(), mask=polyhead.Mask.dense(is_token[:, None, None]))
    return session.observations


def state_of(observations) -> SiteDocumentSums:
    (states,) = observations.collected.values()
    return states["documents"]


def test_each_document_has_the_statistics_that_it_has_alone(layer):
    found = observed(layer, (0, 1, 2, 3))
    state = state_of(found)
    assert state.documents.tolist() == [2, 4, 9]
    assert set(state.totals) == set(NAMES)
    for name in NAMES:
        count, total = state.totals[name].unbind(-1)
        torch.testing.assert_close(total.sum(0) / count.sum(0), found.profile[name], rtol=1e-12, atol=1e-12)
        for row, numbers in enumerate([(1, 3), (0,), (2,)]):
            alone = observed(layer, numbers).profile[name]
            torch.testing.assert_close(total[row] / count[row], alone, rtol=1e-5, atol=1e-6, equal_nan=True)
    # A row with a single key has no normalized entropy.
    assert state.totals["normalized_entropy"][..., 0].tolist() == [[6 + 4] * HEADS, [10] * HEADS, [0] * HEADS]
    assert state.totals["entropy"][..., 0].tolist() == [[12] * HEADS, [11] * HEADS, [1] * HEADS]


def test_parts_are_merged_and_kept_in_a_file(layer, tmp_path):
    whole, one, two = (state_of(observed(layer, numbers)) for numbers in ((0, 1, 2, 3), (0, 1), (2, 3)))
    save(tmp_path / "one.safetensors", observed(layer, (0, 1)))
    again = state_of(load(tmp_path / "one.safetensors", [DocumentSums()]))
    for merged in (one.merge(two), two.merge(one), again.merge(two)):
        assert merged.documents.tolist() == whole.documents.tolist()
        for name, totals in whole.totals.items():
            torch.testing.assert_close(merged.totals[name], totals, rtol=1e-5, atol=1e-6)


def test_many_documents_are_pooled(layer):
    state = state_of(observed(layer, (0, 1, 3), (5, 5 + MAX_DOCUMENTS, 0, 6)))
    assert state.documents.tolist() == [5, 6]
    assert state.totals["entropy"][:, 0, 0].tolist() == [18, 5]


def test_documents_are_required(layer):
    with polyhead.observe(layer, collect=[DocumentSums()]), pytest.raises(OptionError, match="each of the 2 texts"):
        layer(torch.randn(2, 5, 24))
