"""Columns of attention to classes of tokens, and within the word and the sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.analysis.intervals import Z, ratio_of_sums
from polyhead.observation.role_evidence import HeadEvidence

# By column of the table: the evidence columns of its numerator (summed weight) and denominator (number of rows).
SHARES = {
    "special_mass": ("special_mass", "key_set_rows"),
    "punctuation_mass": ("punctuation_mass", "key_set_rows"),
    "word_share": ("word_mass", "word_rows"),
    "sentence_share": ("sentence_mass", "sentence_rows"),
}


def text_shares(evidence: HeadEvidence) -> dict[str, Tensor]:
    """Return each of `SHARES` as a mean over rows, with its standard error and chance level, [heads] each.

    The latter two are named `..._error` (over documents) and `..._chance` (uniform attention over the visible tokens).
    Columns without rows are absent: `sentence_share` needs texts of several sentences, `word_share` multi-token words.
    """
    columns: dict[str, Tensor] = {}
    for name, (part, total) in SHARES.items():
        sums, rows = evidence.column(part).cpu(), evidence.column(total).cpu()
        if not bool(rows.sum() > 0):
            continue
        share, low, high = ratio_of_sums(sums, rows)  # the last entry is uniform attention
        columns |= {
            name: share[:-1],
            f"{name}_error": ((high - low) / (2 * Z))[:-1],
            f"{name}_chance": torch.full_like(share[:-1], float(share[-1])),
        }
    return columns
