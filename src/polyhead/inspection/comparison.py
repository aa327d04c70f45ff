"""Comparison of two inspections, with the differences beyond sampling error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polyhead.inspection.heads import Head
from polyhead.inspection.matching import Matching, Unmatched, match_heads
from polyhead.inspection.result import Inspection
from polyhead.inspection.vocabulary import IMPORTANCE

DEVIATIONS = 1.96  # standard errors beyond which a difference counts
EXACT = ("qk_top_share", "ov_top_share")  # computed from the weights: any difference is one of the weights
ROUNDING = 1e-4  # relative difference of an exact value that rounding does not explain
MIN_CHANGE = 0.01  # relative to the larger value: with many tokens even tiny differences are beyond sampling error


@dataclass(frozen=True, slots=True)
class Change:
    """One statistic of one head in both inspections, with the head's position in each."""

    head: Head
    head_after: Head
    name: str
    before: float
    after: float
    error: float  # standard error of the difference; NaN if unknown

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def relative(self) -> float:
        """Size of the difference relative to the larger value, in [0, 2]."""
        return abs(self.difference) / (max(abs(self.before), abs(self.after)) or 1.0)

    @property
    def beyond(self) -> bool:
        """True if the difference exceeds both the sampling error and the minimum relative size."""
        minimum = ROUNDING if self.name in EXACT else MIN_CHANGE
        return abs(self.difference) > DEVIATIONS * self.error and self.relative > minimum


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between two inspections; heads that gained or lost roles are named as in the first."""

    changes: tuple[Change, ...]
    gained: tuple[tuple[Head, str], ...]  # roles
    lost: tuple[tuple[Head, str], ...]
    only_before: tuple[Unmatched, ...]  # heads that the other does not have
    only_after: tuple[Unmatched, ...]
    losses: tuple[str | None, str | None] = (None, None)  # by which importance was measured in each

    def beyond(self, name: str | None = None) -> tuple[Change, ...]:
        """Return the changes beyond sampling error, of one statistic or all, in decreasing order of z-score.

        Exact values, which have no sampling error, are last, in decreasing order of relative change.

        Args:
            name: column of one statistic; None for all.
        """
        changes = [x for x in self.changes if x.beyond and (name is None or x.name == name)]
        scores = {x: abs(x.difference) / x.error if x.error > 0 else x.relative for x in changes}
        return tuple(sorted(changes, key=lambda x: (x.error == 0, -scores[x])))

    def tested(self, name: str | None = None) -> tuple[Change, ...]:
        """Return the values with an error estimate, without columns that are 0 in both inspections.

        Args:
            name: column of one statistic; None for all.
        """
        names = {x.name for x in self.changes if (x.before or x.after) and (name is None or x.name == name)}
        return tuple(x for x in self.changes if x.name in names and not math.isnan(x.error))

    def untested(self, name: str | None = None) -> tuple[Change, ...]:
        """Return the values without an error estimate, in decreasing order of relative change.

        Args:
            name: column of one statistic; None for all.
        """
        changes = [x for x in self.changes if math.isnan(x.error) and (name is None or x.name == name)]
        return tuple(sorted(changes, key=lambda x: -x.relative))


def compare(before: Inspection, after: Inspection) -> Comparison:
    """Compare two inspections head by head; heads are matched by their number in the unedited model.

    The standard error of a mean is over documents where the inspection has it (roles), and over tokens otherwise.
    Tokens of one document are correlated, so that the latter would be too small: it is computed as if only one token
    in eight were independent. Differences count from 1.96 standard errors on. Values computed from the weights alone
    have no sampling error: any difference beyond rounding counts. Values without an error estimate (head outputs) are
    not tested; `untested()` returns them.

    Args:
        before: inspection of the first model.
        after: inspection of the second model, on the same text.

    Returns:
        Differences of every statistic, head by head, and the roles that heads gained or lost.

    Raises:
        OptionError: the heads of the two runs cannot be matched.

    >>> import torch, polyhead
    >>> from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
    >>> tokenizer = ByT5Tokenizer(extra_ids=0)  # bytes
    >>> config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    ...                      num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> text, options = ["the cat sat on the mat. " * 20] * 2, {"context": 64, "tokens": 256, "chance": False}
    >>> before = polyhead.inspect(model, text, tokenizer=tokenizer, importance="none", **options)
    >>> polyhead.compare(before, before).beyond()  # the same model: nothing changed
    ()
    """
    matching = match_heads(before, after)
    rows_before, rows_after = _rows(before), _rows(after)
    names = [name for name in before.table.names if name in after.table.names]
    losses = before.facts.get("loss"), after.facts.get("loss")
    if losses[0] != losses[1]:  # nats and cosines cannot be subtracted
        names = [name for name in names if name not in IMPORTANCE]
    changes = []
    for head, head_after in matching.pairs:
        row_before, row_after = rows_before[head], rows_after[head_after]
        for name in names:
            value_before, value_after = row_before[name], row_after[name]
            if math.isnan(value_before) or math.isnan(value_after):
                continue
            error = math.hypot(_error(row_before, name), _error(row_after, name))
            changes.append(Change(head, head_after, name, value_before, value_after, error))
    gained, lost = _roles(before, after, matching)
    return Comparison(tuple(changes), gained, lost, matching.only_before, matching.only_after, losses)


TOKENS_ALIKE = 8


def _error(row: dict[str, Any], name: str) -> float:
    if name in EXACT:
        return 0.0
    if f"{name}_error" in row:
        return float(row[f"{name}_error"])
    if f"{name}_std" in row and row["tokens"] > 0:
        return float(row[f"{name}_std"]) / math.sqrt(max(1.0, row["tokens"] / TOKENS_ALIKE))
    return math.nan


def _rows(inspection: Inspection) -> dict[Head, dict[str, Any]]:
    table = inspection.table
    return dict(zip(zip(table.sites, table.heads, strict=True), table.rows(), strict=True))


def _roles(
    before: Inspection, after: Inspection, matching: Matching
) -> tuple[tuple[tuple[Head, str], ...], tuple[tuple[Head, str], ...]]:
    roles_before, roles_after = (
        {(x.site, x.head): x.roles for x in inspection.roles} for inspection in (before, after)
    )
    gained, lost = [], []
    for head, head_after in matching.pairs:
        if head in roles_before and head_after in roles_after:
            gained += [(head, role) for role in sorted(roles_after[head_after] - roles_before[head])]
            lost += [(head, role) for role in sorted(roles_before[head] - roles_after[head_after])]

    def order(entry: tuple[Head, str]) -> tuple[str, int, int, str]:
        (site, head), role = entry
        return site.stack, site.layer, head, role

    return tuple(sorted(gained, key=order)), tuple(sorted(lost, key=order))
