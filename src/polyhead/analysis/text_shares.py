"""Which share of a head's attention goes to some kind of token, or stays in some part of the text, as columns."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhead.analysis.intervals import Z, ratio_of_sums
from polyhead.observation.role_evidence import HeadEvidence

# Each column, what it sums, and the rows it is the mean of.
SHARES = {
    "special_mass": ("special", "key_set_rows"),
    "punctuation_mass": ("punctuation", "key_set_rows"),
    "word_share": ("word", "word_rows"),
    "sentence_share": ("sentence", "sentence_rows"),
}


def text_shares(evidence: HeadEvidence) -> dict[str, Tensor]:
    """Of each of `SHARES` the mean over rows, its standard error over documents and what chance shows, [heads] each.

    The latter two are named `..._error` and `..._chance`. Chance is a head that looks alike at all it may see. What no
    row could show is not there: a text of one sentence has no share inside the sentence.
    """
    found: dict[str, Tensor] = {}
    for name, (part, whole) in SHARES.items():
        sums, rows = evidence.column(part).cpu(), evidence.column(whole).cpu()
        if not bool(rows.sum() > 0):
            continue
        share, low, high = ratio_of_sums(sums, rows)
        found |= {
            name: share[:-1],
            f"{name}_error": ((high - low) / (2 * Z))[:-1],
            f"{name}_chance": torch.full_like(share[:-1], float(share[-1])),
        }
    return found
