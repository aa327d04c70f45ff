"""Shares are means over rows with errors over documents, beside attention that is uniform or at the same distances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import polyhead
from polyhead.analysis.text_shares import SHARES, text_shares
from polyhead.observation import AttentionSite, BatchMetadata
from polyhead.observation.role_evidence import EvidenceCollector, HeadEvidence
from polyhead.observation.role_evidence_rows import COLUMNS
from polyhead.ops.attended import Attended

SITE = AttentionSite("layer.0", "self", "layer.*", 0, 3)
DOCUMENTS = 7


def evidence(**columns: torch.Tensor) -> HeadEvidence:
    """Seven documents of three heads and chance, with these columns [documents, heads + 1] and nothing else."""
    empty = HeadEvidence.empty(EvidenceCollector(), SITE, torch.device("cpu"))
    sums = torch.zeros(DOCUMENTS, 4, len(COLUMNS), dtype=torch.float64)
    for name, column in columns.items():
        sums[..., COLUMNS.index(name)] = column
    return replace(empty, documents=torch.arange(DOCUMENTS), sums=sums)


@pytest.mark.parametrize("name", list(SHARES))
def test_a_share_has_its_error_over_documents_and_its_chance(name: str) -> None:
    part, whole = SHARES[name]
    rows = torch.full((DOCUMENTS, 4), 11.0, dtype=torch.float64)  # documents of one length: a mean of means
    sums = rows * torch.rand(DOCUMENTS, 4, dtype=torch.float64)
    by_distance = ["word_others", "sentence_others"]
    expected = rows * torch.rand(DOCUMENTS, 4, dtype=torch.float64)
    more = {part.replace("mass", "expected"): expected} if whole in by_distance else {}
    found = text_shares(evidence(**{part: sums, whole: rows, **more}))
    told = [other for other, (_, rows_of) in SHARES.items() if rows_of == whole]
    assert set(found) == {f"{other}{end}" for other in told for end in ("", "_error", "_chance")}
    each = sums / rows
    torch.testing.assert_close(found[name], each[:, :3].mean(0))
    torch.testing.assert_close(found[f"{name}_error"], each[:, :3].std(0) / DOCUMENTS**0.5)
    chance = (expected / rows)[:, :3].mean(0) if whole in by_distance else each[:, 3].mean().expand(3)
    assert found[f"{name}_chance"].tolist() == pytest.approx(chance.tolist())


def test_what_no_row_could_show_is_not_there() -> None:
    assert text_shares(evidence()) == {}


def test_a_head_of_fixed_distances_has_the_share_of_its_distances() -> None:
    """A head that attends to its neighbours is inside words and sentences without knowing of them."""
    words = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 6, 6, 6, 6, 7, 8, 8, 9] * 11)[None]
    words = words + 10 * (torch.arange(words.shape[1]) // 18)
    size = words.shape[1]
    sentences, index = words // 7, torch.arange(size)
    local = -0.5 * (index - index[:, None]).abs().double()  # the nearer, the more
    aware = local + 3.0 * (words[0] == words[0][:, None])
    scores = torch.stack([local, local - 40.0 * torch.eye(size), aware])[None]
    key = torch.eye(size, dtype=torch.float64).expand(1, 3, -1, -1)
    result = polyhead.attention(scores, key, key, scale=1.0, logsumexp=True)
    collector = EvidenceCollector(segments=lambda tokens: (words, sentences))
    metadata = BatchMetadata(documents=torch.tensor([0]), tokens=torch.arange(size)[None])
    state = collector.empty(SITE, torch.device("cpu")).update(
        Attended(scores, key, key, result, None, 1.0), None, metadata
    )
    found = text_shares(state)
    for name, least in (("word_share", 0.3), ("sentence_share", 0.6)):
        share, chance = found[name], found[f"{name}_chance"]
        assert share[0] > least
        assert share[0] == pytest.approx(float(chance[0]), abs=0.005)
        assert share[0] == pytest.approx(float(share[1]), abs=0.001), "attention of a token to itself does not count"
        assert share[2] > chance[2] + 0.03
    assert found["word_share"][2] > found["word_share_chance"][2] + 0.3
