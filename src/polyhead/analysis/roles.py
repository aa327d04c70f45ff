"""What each head is: roles with their evidence, beside what chance would show, and an interval over documents.

A head may have several roles or none. A score is a mean over the documents of a text, weighted by their tokens; its
interval is that of 1,000 texts made of the same documents, drawn anew with a fixed seed (the bootstrap's percentiles).
`roles_rules.RULES` says of each role from when on a head has it, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.analysis.pronouns import PronounTable
from polyhead.analysis.roles_copying import Copying
from polyhead.analysis.roles_rules import RULES
from polyhead.errors import OptionError
from polyhead.observation import AttentionSite
from polyhead.observation.role_evidence import HeadEvidence
from polyhead.observation.role_evidence_rows import WINDOW
from polyhead.observation.role_evidence_tokens import NEAR

DRAWS = 1000
_LEVEL = 0.95
_OFFSETS = {"previous": -1, "self": 0, "next": 1}
_LEAST_AVAILABLE = 0.5  # of all rows: an offset that few rows have says little
_LEAST_DIFFERENT = 0.05  # of all weight: what is left of a head that looks at its own token alone says nothing


@dataclass(frozen=True, slots=True)
class RoleScore:
    """How far a head has one role."""

    role: str
    score: float
    low: float  # the interval of 95%; NaN where there are fewer than two documents. Of a pronoun, for all heads at once
    high: float
    null: float  # what chance shows
    threshold: float
    holds: bool
    evidence: str  # in plain words


@dataclass(frozen=True, slots=True)
class HeadRoles:
    """All scores of one head; a role that could not be asked after is absent."""

    site: AttentionSite
    head: int
    scores: tuple[RoleScore, ...]

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(score.role for score in self.scores if score.holds)

    def __getitem__(self, role: str) -> RoleScore:
        for score in self.scores:
            if score.role == role:
                return score
        raise KeyError(role)

    def __str__(self) -> str:
        found = [f"{score.role}: {score.evidence}" for score in self.scores if score.holds]
        return f"{self.site.name} head {self.head}: {'; '.join(found) or 'no role'}"


def head_roles(
    text: Mapping[AttentionSite, HeadEvidence],
    repeated: Mapping[AttentionSite, HeadEvidence] | None = None,
    *,
    copying: Mapping[AttentionSite, Copying] | None = None,
    pronouns: PronounTable | None = None,
    reference: Sequence[HeadRoles] = (),
    seed: int = 0,
) -> tuple[HeadRoles, ...]:
    """The roles of every head.

    Args:
        text: evidence of a text, site by site (`evidence_of(session.observations)`).
        repeated: evidence of repeated random tokens (`sources.probes`), for duplicate-token and induction.
        copying: `roles_copying.copying_scores` of each site, for copy and anti-copy.
        pronouns: `pronouns.pronoun_table` of sentences with pronouns, for pronoun; its interval is for all heads at
            once, because the best of many is above the null by chance.
        reference: the roles of a model of the same layout with random weights. The largest score that one of its heads
            has is then part of the null.
        seed: of the draws of documents.
    """
    beyond = _largest(reference)
    found = []
    for site, evidence in text.items():
        scores = _text_scores(evidence, seed)
        if repeated is not None:
            if site not in repeated:
                raise OptionError(f"repeated tokens must have been shown to the same model, got nothing of {site.name}")
            scores |= _repeated_scores(repeated[site], seed)
        if copying is not None and site in copying:
            scores |= _copying_scores(copying[site])
        if pronouns is not None:
            scores |= _pronoun_scores(pronouns, site)
        found += [HeadRoles(site, head, _judged(scores, head, beyond)) for head in range(site.num_heads)]
    return tuple(found)


def evidence_of(
    collected: Mapping[AttentionSite, Mapping[str, object]], name: str = "evidence"
) -> dict[AttentionSite, HeadEvidence]:
    """The evidence among what a session gathered: `evidence_of(session.observations.collected)`."""
    found = {site: values[name] for site, values in collected.items() if name in values}
    return {site: value for site, value in found.items() if isinstance(value, HeadEvidence)}


# ---- scores of all heads of a site


@dataclass(frozen=True, slots=True, eq=False)
class _Scores:
    """One role of all heads of a site, [heads] each."""

    score: Tensor
    low: Tensor
    high: Tensor
    null: Tensor
    words: Callable[[int, float, float], str]  # of a head, its score and its null
    enough: tuple[bool, ...] = ()  # whether there is enough of it to speak of, where that is asked


class _Documents:
    """The documents of one evidence, and draws of as many of them."""

    def __init__(self, evidence: HeadEvidence, seed: int) -> None:
        self.evidence = evidence
        self.heads = evidence.site.num_heads
        count = len(evidence.documents)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(max(count, 1), (DRAWS, count), generator=generator)
        weights = torch.zeros(DRAWS, count, dtype=torch.float64)
        self.weights = weights.scatter_add_(1, drawn, torch.ones(DRAWS, count, dtype=torch.float64))
        self.sums = {name: evidence.column(name).cpu() for name in _COLUMNS_USED}

    def of(self, part: str, whole: str, words: Callable[[int, float, float], str]) -> _Scores | None:
        """The score that is one column over another; chance is the last row's."""
        one, other = self.sums[part], self.sums[whole]
        null = one[:, -1].sum() / other[:, -1].sum()
        return self.ratio(one[:, :-1], other[:, :-1], null.expand(self.heads), words)

    def ratio(
        self, part: Tensor, whole: Tensor, null: Tensor, words: Callable[[int, float, float], str]
    ) -> _Scores | None:
        """The sum of one [documents, heads] over that of another, with its interval; None where there is nothing."""
        total = whole.sum(0)
        if not bool((total > 0).any()):
            return None
        low = high = torch.full((self.heads,), math.nan, dtype=torch.float64)
        if len(part) > 1:
            drawn = (self.weights @ part) / (self.weights @ whole)
            # A draw may hold no row that could show the role.
            bounds = torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2], dtype=torch.float64)
            low, high = drawn.nanquantile(bounds, 0)
        return _Scores(part.sum(0) / total, low, high, null, words)


_COLUMNS_USED = (
    "rows", "first", "near", "delimiter", "rare", "key_set_rows", "normalized_entropy", "entropy_rows",
    "far", "far_rows",
    "duplicate", "duplicate_rows", "induction", "induction_rows", "alike", "alike_expected", "shuffled",
    "shuffled_expected", "reshuffled", "reshuffled_expected", "different",
)  # fmt: skip


def _share(words: str) -> Callable[[int, float, float], str]:
    return lambda head, score, null: f"{words.format(f'{score:.0%}')} (chance {null:.0%})"


def _text_scores(evidence: HeadEvidence, seed: int) -> dict[str, _Scores]:
    documents = _Documents(evidence, seed)
    scores: dict[str, _Scores | None] = {"positional": _positional(documents)}
    for role, offset in _OFFSETS.items():
        place = {"previous": "at the previous token", "self": "at the token itself", "next": "at the next token"}[role]
        bins = torch.full((documents.heads,), offset + NEAR + 1)
        scores[role] = _at_offset(documents, bins, _share(f"looks {place} in {{}} of positions"))
    for role, part, whole, words in (
        ("local", "near", "rows", f"has {{}} of its weight within {WINDOW} tokens"),
        ("sink", "first", "rows", "has {} of its weight on the first token"),
        ("delimiter", "delimiter", "key_set_rows", "has {} of its weight on special tokens and punctuation"),
        ("broad", "normalized_entropy", "entropy_rows", "has {} of the largest possible entropy"),
        ("long-range", "far", "far_rows", f"looks at one token more than {WINDOW} away in {{}} of positions"),
        ("rare-token", "rare", "key_set_rows", "has {} of its weight on rare tokens"),
    ):
        scores[role] = documents.of(part, whole, _share(words))
    if scores["rare-token"] is not None and not bool(scores["rare-token"].null.sum() > 0):
        del scores["rare-token"]  # no rare token was named
    scores["same-meaning"] = _same_meaning(documents)
    return {role: found for role, found in scores.items() if found is not None}


def _repeated_scores(evidence: HeadEvidence, seed: int) -> dict[str, _Scores]:
    documents = _Documents(evidence, seed)
    scores = {
        "duplicate-token": documents.of(
            "duplicate", "duplicate_rows", _share("where its token occurs twice, has {} of its weight on the other one")
        ),
        "induction": documents.of(
            "induction", "induction_rows", _share("has {} of its weight on what followed its token the other time")
        ),
    }
    return {role: found for role, found in scores.items() if found is not None}


def _at_offset(documents: _Documents, bins: Tensor, words: Callable[[int, float, float], str]) -> _Scores | None:
    """The share of the rows with a key at an offset, one a head, that look there most."""
    evidence = documents.evidence
    hits, available, chance = (x.cpu().double() for x in (evidence.hits, evidence.available, evidence.chance))
    there = hits.gather(2, bins[None, :, None].expand(len(hits), -1, 1))[..., 0]
    null = chance.sum(0)[bins] / available.sum(0)[bins]
    return documents.ratio(there, available[:, bins], null, words)


def _positional(documents: _Documents) -> _Scores | None:
    """At each head's own best offset, of those that half of all rows have."""
    evidence = documents.evidence
    hits, available = evidence.hits.sum(0).cpu().double(), evidence.available.sum(0).cpu().double()
    enough = available >= _LEAST_AVAILABLE * documents.sums["rows"][:, -1].sum()
    enough[[0, -1]] = False  # all that lies beyond is no offset
    if not bool(enough.any()):
        return None
    best = torch.where(enough, hits / available.clamp_min(1.0), -1.0).argmax(-1)

    def words(head: int, score: float, null: float) -> str:
        offset = int(best[head]) - NEAR - 1
        place = f"{abs(offset)} token{'s' * (abs(offset) != 1)} {'back' if offset < 0 else 'ahead'}"
        return f"looks {place if offset else 'at the token itself'} in {score:.0%} of positions (chance {null:.0%})"

    return _at_offset(documents, best, words)


def _same_meaning(documents: _Documents) -> _Scores | None:
    sums = {name: documents.sums[name][:, :-1] for name in documents.sums}
    weight = sums["different"].sum(0)
    if not bool((weight > 0).any()):
        return None
    enough = weight > _LEAST_DIFFERENT * sums["rows"].sum(0)
    true, one, other = (sums[name] - sums[f"{name}_expected"] for name in ("alike", "shuffled", "reshuffled"))
    # Equal tokens that were too many to leave out are as alike in either, so that the difference is free of them.
    found = documents.ratio(
        true - (one + other) / 2,
        sums["different"],
        ((one - other).sum(0) / weight).abs(),
        lambda head, score, null: (
            f"looks at tokens whose cosine is {score:.2f} above what offsets give (chance {null:.2f})"
        ),
    )
    if found is None:
        return None
    score = torch.where(enough, found.score, torch.nan)
    return _Scores(score, found.low, found.high, found.null, found.words)


def _copying_scores(copying: Copying) -> dict[str, _Scores]:
    found = {}
    for role, sign, effect in (("copy", 1.0, "likelier"), ("anti-copy", -1.0, "less likely")):
        score, half_width = sign * copying.score, 1.96 * copying.error
        null = torch.full_like(score, copying.null)

        def words(head: int, score: float, null: float, effect: str = effect) -> str:
            return f"makes what it looks at {effect}: {score:.2f} of the OV circuit's eigenvalues (random {null:.2f})"

        found[role] = _Scores(score, score - half_width, score + half_width, null, words)
    return found


def _pronoun_scores(table: PronounTable, site: AttentionSite) -> dict[str, _Scores]:
    entries = sorted((x for x in table.entries if x.site == site.name), key=lambda x: x.head)
    if len(entries) != site.num_heads:
        return {}  # it was not asked

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(entry, name) for entry in entries], dtype=torch.float64)

    def words(head: int, score: float, null: float) -> str:
        return (
            f"looks from a pronoun at what it stands for, more than at another name, in {score:.0%} of sentences "
            f"(chance {null:.0%}), with {entries[head].weight:.0%} of its weight"
        )

    score, low, high, null = (column(name) for name in ("score", "all_low", "all_high", "null"))
    return {"pronoun": _Scores(score, low, high, null, words, tuple(entry.looks_there for entry in entries))}


# ---- the verdict


def _judged(scores: Mapping[str, _Scores], head: int, beyond: Mapping[str, float]) -> tuple[RoleScore, ...]:
    found: dict[str, RoleScore] = {}
    for role, rule in RULES.items():
        if role not in scores:
            continue
        told = scores[role]
        score, low, high, null = (float(x[head]) for x in (told.score, told.low, told.high, told.null))
        if math.isnan(score) or math.isnan(null):
            continue
        null = max(null, beyond.get(role, null))
        threshold = max(rule.threshold, (1 + null) / 2) if rule.rises else rule.threshold
        named_better = rule.unless is not None and rule.unless in found and found[rule.unless].holds
        enough = not told.enough or told.enough[head]
        holds = score >= threshold and low > null and enough and not named_better
        found[role] = RoleScore(role, score, low, high, null, threshold, holds, told.words(head, score, null))
    return tuple(found.values())


def _largest(reference: Sequence[HeadRoles]) -> dict[str, float]:
    most: dict[str, float] = {}
    for head in reference:
        for score in head.scores:
            most[score.role] = max(most.get(score.role, -math.inf), score.score)
    return most
