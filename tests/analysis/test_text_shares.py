"""Shares are means over rows, their errors are over documents, and chance is the head that looks alike at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyhead.analysis.text_shares import SHARES, text_shares
from polyhead.observation import AttentionSite
from polyhead.observation.role_evidence import EvidenceCollector, HeadEvidence
from polyhead.observation.role_evidence_rows import COLUMNS

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
    found = text_shares(evidence(**{part: sums, whole: rows}))
    told = [other for other, (_, rows_of) in SHARES.items() if rows_of == whole]
    assert set(found) == {f"{other}{end}" for other in told for end in ("", "_error", "_chance")}
    each = sums / rows
    torch.testing.assert_close(found[name], each[:, :3].mean(0))
    torch.testing.assert_close(found[f"{name}_error"], each[:, :3].std(0) / DOCUMENTS**0.5)
    assert found[f"{name}_chance"].tolist() == pytest.approx([float(each[:, 3].mean())] * 3)


def test_what_no_row_could_show_is_not_there() -> None:
    assert text_shares(evidence()) == {}
