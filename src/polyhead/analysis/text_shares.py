"""Columns of attention to classes of tokens, and within the word and the sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.analysis.intervals import ratio_of_sums
from polyhead.observation.role_evidence import HeadEvidence

# By column of the table: the evidence columns of its numerator (summed weight) and denominator (number of rows, or
# weight on other tokens).
SHARES = {
    "special_mass": ("special_mass", "key_set_rows"),
    "punctuation_mass": ("punctuation_mass", "key_set_rows"),
    "word_share": ("word_mass", "word_others"),
    "sentence_share": ("sentence_mass", "sentence_others"),
}
_EXPECTED = {"word_share": "word_expected", "sentence_share": "sentence_expected"}  # numerator of chance, by head


def text_shares(evidence: HeadEvidence) -> dict[str, Tensor]:
    """Return each of `SHARES` as a mean over rows, with its standard error and chance level, [heads] each.

    The latter two are named `..._error` (over documents) and `..._chance`: uniform attention over the visible tokens,
    and for the word and the sentence what attention to other tokens at the same distances has inside.
    Columns without rows are absent: `sentence_share` needs texts of several sentences, `word_share` multi-token words.
    """
    columns: dict[str, Tensor] = {}
    for name, (part, total) in SHARES.items():
        sums, rows = evidence.column(part).cpu(), evidence.column(total).cpu()
        if not bool(rows.sum() > 0):
            continue
        share, below, _ = ratio_of_sums(sums, rows, 1.0)  # the last entry is uniform attention
        chance = torch.full_like(share, float(share[-1]))
        if name in _EXPECTED:
            chance, _, _ = ratio_of_sums(evidence.column(_EXPECTED[name]).cpu(), rows)
        columns |= {name: share[:-1], f"{name}_error": (share - below)[:-1], f"{name}_chance": chance[:-1]}
    return columns
