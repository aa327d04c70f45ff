"""Comparison of two inspections, with the differences beyond sampling error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.intervals import adjusted, influence, influence_error, student_tail
from polyhead.inspection.heads import Head
from polyhead.inspection.matching import Matching, Unmatched, match_heads
from polyhead.inspection.result import Inspection
from polyhead.inspection.vocabulary import IMPORTANCE
from polyhead.observation import AttentionSite
from polyhead.observation.document_sums import MAX_DOCUMENTS

FALSE_DISCOVERIES = 0.05  # expected share of the changes that are beyond sampling error but are none
EXACT = ("qk_top_share", "ov_top_share")  # computed from the weights: any difference is one of the weights
OF_LAYER = ("total_correlation",)  # one value for all heads of a layer
ROUNDING = 1e-4  # relative difference of an exact value that rounding does not explain
MIN_CHANGE = 0.01  # relative to the larger value: with much text even tiny differences are beyond sampling error
TOKENS_ALIKE = 8  # of a run without effects of documents, one token in this many counts as independent


@dataclass(frozen=True, slots=True)
class Change:
    """One statistic of one head in both inspections, with the head's position in each."""

    head: Head
    head_after: Head
    name: str
    before: float
    after: float
    error: float  # standard error of the difference; NaN if unknown
    degrees: float = math.inf  # of freedom of the error
    q: float = math.nan  # p-value adjusted for the number of tests (Benjamini and Hochberg, 1995); NaN if not tested

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def relative(self) -> float:
        """Absolute difference over the larger magnitude, in [0, 2]; of infinite values 0 if they are equal, else 1."""
        if math.isinf(self.before) or math.isinf(self.after):
            return 0.0 if self.before == self.after else 1.0
        return abs(self.difference) / (max(abs(self.before), abs(self.after)) or 1.0)

    @property
    def p(self) -> float:
        """Two-sided p-value of the difference, by Student's t distribution; NaN without an error estimate."""
        if self.error > 0:
            return max(0.0, 2 * student_tail(abs(self.difference) / self.error, self.degrees))
        return math.nan if math.isnan(self.error) else float(self.difference == 0)

    @property
    def significant(self) -> bool:
        """True if the difference exceeds both the sampling error of all tests and the minimum relative size.

        An exact value has no sampling error.
        """
        if self.name in EXACT:
            return self.relative > ROUNDING
        return self.q <= FALSE_DISCOVERIES and self.relative > MIN_CHANGE


@dataclass(frozen=True, slots=True)
class LossChange:
    """Mean loss of the text in both inspections, with the standard error of the difference."""

    before: float
    after: float
    error: float  # NaN for a single document
    paired: bool  # whether both are of the same tokens
    samples: tuple[int, int]  # documents or contexts of each

    @property
    def difference(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between two inspections; heads that gained or lost roles are named as in the first."""

    changes: tuple[Change, ...]
    gained: tuple[tuple[Head, str], ...]  # roles
    lost: tuple[tuple[Head, str], ...]
    only_before: tuple[Unmatched, ...]  # heads that the other does not have
    only_after: tuple[Unmatched, ...]
    losses: tuple[str | None, str | None] = (None, None)  # by which importance was measured in each
    paired: bool = False  # whether both read the same tokens, so that differences were tested document by document
    samples: tuple[int, int] = (0, 0)  # in each, number of what is sampled
    over: tuple[str, str] = ("tokens", "tokens")  # what is sampled: documents, contexts, or tokens if there is only one
    loss: LossChange | None = None  # None unless both inspections measured the same loss
    undefined: tuple[Change, ...] = ()  # values that are NaN in one of the two alone, and not among the changes

    def significant(self, name: str | None = None) -> tuple[Change, ...]:
        """Return the significant changes, of one statistic or all, in decreasing order of z-score.

        Of all tested values, at most 5% of those returned are expected to be chance (false discovery rate). Exact
        values, which have no sampling error, are last, in decreasing order of relative change.

        Args:
            name: column of one statistic; None for all.
        """
        changes = [x for x in self.changes if x.significant and (name is None or x.name == name)]

        def order(x: Change) -> tuple[bool, float]:
            return x.name in EXACT, -abs(x.difference) / x.error if x.error > 0 else -x.relative

        return tuple(sorted(changes, key=order))

    def tested(self, name: str | None = None) -> tuple[Change, ...]:
        """Return the values with a sampling error, without columns that are 0 in both inspections.

        Args:
            name: column of one statistic; None for all.
        """
        names = {x.name for x in self.changes if (x.before or x.after) and (name is None or x.name == name)}
        return tuple(x for x in self.changes if x.name in names.difference(EXACT) and not math.isnan(x.error))

    def exact(self, name: str | None = None) -> tuple[Change, ...]:
        """Return the values computed from the weights alone, which are not tested: they have no sampling error.

        Args:
            name: column of one statistic; None for all.
        """
        return tuple(x for x in self.changes if x.name in EXACT and (name is None or x.name == name))

    def untested(self, name: str | None = None) -> tuple[Change, ...]:
        """Return the values without an error estimate, in decreasing order of relative change.

        A value of a whole layer is returned once, with the first of its heads.

        Args:
            name: column of one statistic; None for all.
        """
        changes = [x for x in self.changes if math.isnan(x.error) and (name is None or x.name == name)]
        once: dict[tuple[str, Head | AttentionSite], Change] = {}
        for x in changes:
            once.setdefault((x.name, x.head[0] if x.name in OF_LAYER else x.head), x)
        return tuple(sorted(once.values(), key=lambda x: -x.relative))


def compare(before: Inspection, after: Inspection) -> Comparison:
    """Compare two inspections head by head; heads are matched by their number in the unedited model.

    If both inspections read the same tokens, a difference is tested document by document (paired); else the documents
    of the two texts are independent samples (Welch's test), and must not be in both. With fewer than 10 documents,
    contexts take their place. Importance is tested over the documents it was measured on. A saved run of an earlier
    version, and a run over a single context, has no such samples: its standard errors are over tokens, as if one in
    eight were independent.

    p-values are those of Student's t distribution, adjusted for a false discovery rate of 5% over all tested values.
    Values computed from the weights alone have no sampling error: any difference beyond rounding counts. Values without
    an error estimate (head outputs) are not tested; `untested()` returns them.

    Args:
        before: inspection of the first model.
        after: inspection of the second model, if possible on the same text.

    Returns:
        Differences of every statistic, head by head, the roles that heads gained or lost, and the mean loss of both.
        Roles are not compared if only one of the runs has a model with random weights as their chance level.

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
    >>> polyhead.compare(before, before).significant()  # the same model: nothing changed
    ()
    """
    matching = match_heads(before, after)
    rows_before, rows_after = _rows(before), _rows(after)
    names = [name for name in before.table.names if name in after.table.names]
    losses = before.facts.get("loss"), after.facts.get("loss")
    if losses[0] != losses[1]:  # nats and cosines cannot be subtracted
        names = [name for name in names if name not in IMPORTANCE]
    paired = before.facts.get("text") is not None and before.facts["text"] == after.facts.get("text")
    same_batches = paired and _importance_batches(before) == _importance_batches(after)
    changes, undefined = [], []
    for head, head_after in matching.pairs:
        row_before, row_after = rows_before[head], rows_after[head_after]
        for name in names:
            values = row_before[name], row_after[name]
            if any(map(math.isnan, values)):
                if not all(map(math.isnan, values)):
                    undefined.append(Change(head, head_after, name, *values, math.nan))
                continue
            effects = _effects(before, head, name), _effects(after, head_after, name)
            same_tokens = same_batches if name in IMPORTANCE else paired
            if same_tokens and len(effects[0]) == len(effects[1]) > 1:
                error = _over_samples(effects[1] - effects[0])
            else:
                error = _independent(_error(row_before, effects[0], name), _error(row_after, effects[1], name))
            changes.append(Change(head, head_after, name, *values, *error))
    gained, lost = _roles(before, after, matching) if same_chance(before, after) else ((), ())
    (samples, over), (samples_after, over_after) = _samples(before), _samples(after)
    comparison = Comparison(
        tuple(changes),
        gained,
        lost,
        matching.only_before,
        matching.only_after,
        losses,
        paired and samples == samples_after and over == over_after != "tokens",
        (samples, samples_after),
        (over, over_after),
        _loss_change(before.facts, after.facts, same_batches),
        tuple(undefined),
    )
    tested = comparison.tested()
    q = dict(zip(map(id, tested), adjusted([change.p for change in tested]), strict=True))
    return replace(comparison, changes=tuple(replace(x, q=q.get(id(x), math.nan)) for x in comparison.changes))


def _importance_batches(inspection: Inspection) -> tuple[Any, ...]:
    """Return what selects the tokens of a text on which importance is measured, and those that are masked."""
    facts = inspection.facts
    seed = inspection.settings.seed if facts.get("loss") == "masked" else None
    return facts.get("importance_tokens"), facts.get("importance_context"), seed


def _effects(inspection: Inspection, head: Head, name: str) -> Tensor:
    """Return the effect of each document on a value, [documents]; empty if it is not known."""
    effects = inspection.influence.get(head[0], {}).get(name)
    return torch.zeros(0) if effects is None else effects[:, head[1]].double()


Error = tuple[float, float]  # standard error and its degrees of freedom


def _error(row: dict[str, Any], effects: Tensor, name: str) -> Error:
    """Return the error of a value in one run; NaN if it is not known."""
    if name in EXACT:
        return 0.0, math.inf
    if len(effects) > 1:
        return _over_samples(effects)
    if f"{name}_error" in row:
        return float(row[f"{name}_error"]), math.inf
    if f"{name}_std" in row and row["tokens"] > 0:
        return float(row[f"{name}_std"]) / math.sqrt(max(1.0, row["tokens"] / TOKENS_ALIKE)), math.inf
    return math.nan, math.inf


def _over_samples(effects: Tensor) -> Error:
    return influence_error(effects), len(effects) - 1


def _independent(one: Error, two: Error) -> Error:
    """Return the error of a difference of independent values, with Welch and Satterthwaite's degrees of freedom."""
    variance = one[0] ** 2 + two[0] ** 2
    scale = sum(error**4 / degrees for error, degrees in (one, two) if error > 0)
    return math.sqrt(variance), variance**2 / scale if scale > 0 else math.inf


def _samples(inspection: Inspection) -> tuple[int, str]:
    """Return the number of samples of the statistics, and what they are."""
    names = [name for name in inspection.table.names if name not in IMPORTANCE]
    effects = [x for of_site in inspection.influence.values() for name, x in of_site.items() if name in names]
    samples = max(map(len, effects), default=0)
    if samples < 2:
        return inspection.facts["tokens"], "tokens"
    facts = inspection.facts
    over = facts.get("intervals_over", "documents")
    pooled = facts.get("documents", 0) > MAX_DOCUMENTS if over == "documents" else facts.get("contexts", 0) > samples
    return samples, f"groups of {over}" if pooled and not facts.get("interrupted") else over


def _loss_change(before: Mapping[str, Any], after: Mapping[str, Any], paired: bool) -> LossChange | None:
    if not (before.get("document_losses") and after.get("document_losses")) or before["loss"] != after["loss"]:
        return None
    one, two = (torch.tensor(facts["document_losses"], dtype=torch.float64) for facts in (before, after))
    mean, mean_after = (float(x[:, 0].sum() / x[:, 1].sum()) for x in (one, two))
    effects, effects_after = (influence(x[:, :1], x[:, 1:])[:, 0] for x in (one, two))
    if same := paired and torch.equal(one[:, 1], two[:, 1]):
        error, _ = _over_samples(effects_after - effects)
    else:
        error, _ = _independent(_over_samples(effects), _over_samples(effects_after))
    return LossChange(mean, mean_after, error, same, (len(effects), len(effects_after)))


def _rows(inspection: Inspection) -> dict[Head, dict[str, Any]]:
    table = inspection.table
    return dict(zip(zip(table.sites, table.heads, strict=True), table.rows(), strict=True))


def same_chance(before: Inspection, after: Inspection) -> bool:
    """Return whether the thresholds of roles were derived alike; assumed of runs that did not record it."""
    one, two = before.facts.get("chance"), after.facts.get("chance")
    return one == two or None in (one, two)


def _roles(
    before: Inspection, after: Inspection, matching: Matching
) -> tuple[tuple[tuple[Head, str], ...], tuple[tuple[Head, str], ...]]:
    """Return the roles that heads gained and lost, of those that were measured in both runs."""
    # Before format 7, which has scores by meaning, pronoun was a role of all sentences.
    holds_before, holds_after = (
        {(x.site, x.head): {(y.role, y.meaning is None): y.holds for y in x.scores} for x in inspection.roles}
        for inspection in (before, after)
    )
    gained, lost = list[tuple[Head, str]](), list[tuple[Head, str]]()
    for head, head_after in matching.pairs:
        of_head, of_head_after = holds_before.get(head, {}), holds_after.get(head_after, {})
        for (role, kind), holds in of_head.items():
            if of_head_after.get((role, kind), holds) != holds:
                (lost if holds else gained).append((head, role))

    def order(entry: tuple[Head, str]) -> tuple[str, int, int, str]:
        (site, head), role = entry
        return site.stack, site.layer, head, role

    return tuple(sorted(gained, key=order)), tuple(sorted(lost, key=order))
