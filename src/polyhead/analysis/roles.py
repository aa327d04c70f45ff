"""Roles of heads, with their evidence, the chance level, and a bootstrap interval over documents.

A head may have several roles or none. A score is a mean over the documents of a text, weighted by their tokens. Its
interval over documents contains two: a bootstrap percentile interval (1,000 resamples, fixed seed) and Student's t.
`roles_rules.RULES` has the threshold of each role and the reason for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.intervals import (
    expanded_tail,
    halves,
    normal_quantile,
    ratio_of_sums,
    student_quantile,
    wilson_of_ties,
)
from polyhead.analysis.languages import Text
from polyhead.analysis.pronouns import CUES, PronounTable
from polyhead.analysis.roles_evidence import EVIDENCE, evidence_text
from polyhead.analysis.roles_rules import RULES
from polyhead.errors import OptionError
from polyhead.geometry import HeadId
from polyhead.observation import AttentionSite
from polyhead.observation.collectors import Collected, states_of
from polyhead.observation.role_evidence import HeadEvidence
from polyhead.observation.role_evidence_rows import COLUMNS, COSINES
from polyhead.observation.role_evidence_tokens import NEAR

DRAWS = 1000
_LEVEL = 0.95
_OFFSETS = {"previous": -1, "self": 0, "next": 1}
_MIN_AVAILABLE = 0.5  # of all rows: an offset that exists in few rows is weak evidence
_MIN_DIFFERENT = 0.05  # of all attention: a head that attends to its own token only has too little on other tokens


@dataclass(frozen=True, slots=True)
class RoleScore:
    """Score of one role of one head, with its interval, the chance level and the other numbers of its evidence."""

    role: str
    score: float
    low: float  # 95% interval; NaN for fewer than two documents. Of all heads together where the null is one half
    high: float
    null: float  # the chance level
    threshold: float
    holds: bool
    offset: int | None = None  # of a positional head: that of the key from the query
    weight: float | None = None  # of an agreement or pronoun head: mean attention weight on the antecedent
    gender: float | None = None  # of these: the score by the cue that decides
    number: float | None = None
    meaning: float | None = None
    saved_evidence: str | None = None  # in English, of a run whose format has only the text
    halves: tuple[float, float] | None = None  # score on the even and on the odd documents; None if not of documents

    def __repr__(self) -> str:
        numbers = f"{self.score:.3g} [{self.low:.3g}, {self.high:.3g}], chance {self.null:.3g}"
        evidence = self.evidence if self.holds else "does not hold"
        return f"RoleScore({self.role} {numbers}, threshold {self.threshold:.3g}: {evidence})"

    @property
    def holds_in_halves(self) -> bool:
        """Whether the role holds, and its score reaches the threshold on both halves of the documents it is from."""
        of_documents = RULES[self.role].source in ("text", "repeated")
        halves = self.halves or ((-math.inf,) if of_documents else ())
        return self.holds and all(x >= self.threshold and x > self.null for x in halves)

    @property
    def text(self) -> Text:
        """Evidence as a phrase in both languages."""
        return evidence_text(**{name: getattr(self, name) for name in EVIDENCE})

    @property
    def evidence(self) -> str:
        """Evidence as an English phrase."""
        return self.text.en


@dataclass(frozen=True, slots=True)
class HeadRoles:
    """All scores of one head; a role that could not be measured is absent."""

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
        raise KeyError(f"{role!r}; measured: {', '.join(score.role for score in self.scores)}")

    __iter__ = None  # `role in head` would be true of every measured role: use `head.roles` or `head.scores`

    def __str__(self) -> str:
        roles = [f"{score.role}: {score.evidence}" for score in self.scores if score.holds]
        return f"{HeadId(self.site.layer, self.head)} of {self.site.name}: {'; '.join(roles) or 'no role'}"


def head_roles(
    text: Mapping[AttentionSite, HeadEvidence],
    repeated: Mapping[AttentionSite, HeadEvidence] | None = None,
    *,
    pronouns: Mapping[str, PronounTable] | None = None,
    reference: Sequence[HeadRoles] = (),
    seed: int = 0,
) -> tuple[HeadRoles, ...]:
    """Return the roles of every head.

    Args:
        text: evidence from a text, by site (`evidence_of(session.observations.collected)`). Copy and anti-copy need
            that of a collector with `direct_logits`; their intervals are simultaneous over all heads.
        repeated: evidence from repeated random tokens (`sources.probes`), for duplicate-token and induction.
        pronouns: `pronouns.pronoun_table` of sentences decided by "gender", "number", "agreement" (both) and "meaning",
            for agreement and pronoun; their intervals are simultaneous over all heads, because the best of many heads
            is above the null by chance.
        reference: roles of a model of the same layout with random weights. The largest score of any of its heads
            becomes part of the null.
        seed: of the bootstrap over documents.
    """
    reference_max = _max_scores(reference)
    roles = []
    for site, evidence in text.items():
        scores = _text_scores(evidence, seed) | _copy_scores(evidence, sum(x.num_heads for x in text))
        if repeated is not None:
            if site not in repeated:
                raise OptionError(f"repeated must have evidence of the same sites as text, got none for {site.name}")
            scores |= _repeated_scores(repeated[site], seed)
        if pronouns is not None:
            scores |= _pronoun_scores(pronouns, site)
        roles += [HeadRoles(site, head, _role_scores(scores, head, reference_max)) for head in range(site.num_heads)]
    return tuple(roles)


def evidence_of(collected: Collected, name: str = "evidence") -> dict[AttentionSite, HeadEvidence]:
    """Return the evidence that a session collected: `evidence_of(session.observations.collected)`."""
    return states_of(collected, name, HeadEvidence)


# ---- scores of all heads of a site


@dataclass(frozen=True, slots=True, eq=False)
class _Scores:
    """Scores of one role for all heads of a site, [heads] each."""

    score: Tensor
    low: Tensor
    high: Tensor
    null: Tensor
    enough: tuple[bool, ...] = ()  # by head: whether the weight is large enough for the role, where that is required
    more: Mapping[str, Tensor] = field(default_factory=dict)  # other fields of `RoleScore`
    halves: Tensor | None = None  # [2, heads]


class _Documents:
    """The documents of one evidence, with bootstrap resamples of them."""

    def __init__(self, evidence: HeadEvidence, seed: int) -> None:
        self.evidence = evidence
        self.heads = evidence.site.num_heads
        count = len(evidence.documents)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(max(count, 1), (DRAWS, count), generator=generator)
        weights = torch.zeros(DRAWS, count, dtype=torch.float64)
        self.weights = weights.scatter_add_(1, drawn, torch.ones(DRAWS, count, dtype=torch.float64))
        self.sums = {name: evidence.column(name).cpu() for name in COLUMNS}
        # NaN for heads with NaN weights, of which counts of rows are 0.
        self.nan = 0.0 * self.sums["sink_mass"][:, :-1].sum(0)

    def of(self, part: str, total: str) -> _Scores | None:
        """Return the ratio of two columns as the score; the last entry of each is the chance level."""
        numerator, denominator = self.sums[part], self.sums[total]
        null = numerator[:, -1].sum() / denominator[:, -1].sum()
        return self.ratio(numerator[:, :-1], denominator[:, :-1], null.expand(self.heads))

    def ratio(self, numerator: Tensor, denominator: Tensor, null: Tensor, *, is_share: bool = True) -> _Scores | None:
        """Return the ratio of two sums of [documents, heads] with its interval; None if the denominator is 0.

        The interval of a share is within [0, 1].
        """
        total = denominator.sum(0)
        if not bool((total > 0).any()):
            return None
        low, high = self._interval(numerator, denominator)
        if is_share:
            low, high = low.clamp_min(0.0), high.clamp_max(1.0)
        score = numerator.sum(0) / total + self.nan
        return _Scores(score, low, high, null, halves=halves(numerator, denominator, self.evidence.documents))

    def _interval(self, numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest interval that contains the bootstrap's and Student's t; NaN for fewer than two documents.

        The bootstrap follows the skewness of the documents but never exceeds their range, which contains the true value
        in about half of all cases for two documents, and in 75% for three.
        """
        drawn = (self.weights @ numerator) / (self.weights @ denominator)
        score, below, _ = ratio_of_sums(numerator, denominator, 1.0)
        documents, tail = (denominator > 0).sum(0), (1 - _LEVEL) / 2
        low, high = torch.full_like(score, math.nan), torch.full_like(score, math.nan)
        for count in documents.unique().tolist():
            if count < 2:
                continue
            heads, percentile = documents == count, expanded_tail(tail, count)
            half_width = student_quantile(tail, count - 1) * (score - below)[heads]
            bounds = torch.tensor([percentile, 1 - percentile], dtype=torch.float64)
            # A resample may contain no row in which the role could occur.
            least, most = drawn[:, heads].nanquantile(bounds, 0)
            low[heads] = torch.minimum(least, score[heads] - half_width)
            high[heads] = torch.maximum(most, score[heads] + half_width)
        return low, high


def _text_scores(evidence: HeadEvidence, seed: int) -> dict[str, _Scores]:
    documents = _Documents(evidence, seed)
    scores: dict[str, _Scores | None] = {"positional": _positional(documents)}
    for role, offset in _OFFSETS.items():
        scores[role] = _at_offset(documents, torch.full((documents.heads,), offset + NEAR + 1))
    for role, part, total in (
        ("local", "window_mass", "rows"),
        ("sink", "sink_mass", "rows"),
        ("delimiter", "delimiter_mass", "key_set_rows"),
        ("broad", "normalized_entropy", "entropy_rows"),
        ("long-range", "long_range", "long_range_rows"),
        ("rare-token", "rare_mass", "key_set_rows"),
    ):
        scores[role] = documents.of(part, total)
    if scores["rare-token"] is not None and not bool(scores["rare-token"].null.sum() > 0):
        del scores["rare-token"]  # no rare tokens were passed
    scores["same-meaning"] = _same_meaning(documents)
    return {role: score for role, score in scores.items() if score is not None}


def _repeated_scores(evidence: HeadEvidence, seed: int) -> dict[str, _Scores]:
    documents = _Documents(evidence, seed)
    scores = {
        "duplicate-token": documents.of("duplicate_mass", "duplicate_rows"),
        "induction": documents.of("induction_mass", "induction_rows"),
    }
    return {role: score for role, score in scores.items() if score is not None}


def _at_offset(documents: _Documents, bins: Tensor) -> _Scores | None:
    """Score the share of rows whose max attention weight is at an offset, one offset per head."""
    evidence = documents.evidence
    hits, available, chance = (x.cpu().double() for x in (evidence.hits, evidence.available, evidence.chance))
    hits_there = hits.gather(2, bins[None, :, None].expand(len(hits), -1, 1))[..., 0]
    null = chance.sum(0)[bins] / available.sum(0)[bins]
    return documents.ratio(hits_there, available[:, bins], null)


def _positional(documents: _Documents) -> _Scores | None:
    """Score each head at its best offset, among those that exist in half of all rows."""
    evidence = documents.evidence
    hits, available = evidence.hits.sum(0).cpu().double(), evidence.available.sum(0).cpu().double()
    enough = available >= _MIN_AVAILABLE * documents.sums["rows"][:, -1].sum()
    enough[[0, -1]] = False  # the outermost bins collect all farther offsets
    if not bool(enough.any()):
        return None
    best = torch.where(enough, hits / available.clamp_min(1.0), -1.0).argmax(-1)
    scores = _at_offset(documents, best)
    return None if scores is None else replace(scores, more={"offset": best - NEAR - 1})


def _same_meaning(documents: _Documents) -> _Scores | None:
    sums = {name: documents.sums[name][:, :-1] for name in documents.sums}
    weight = sums["other_token_mass"].sum(0)
    if not bool((weight > 0).any()):
        return None
    enough = weight > _MIN_DIFFERENT * sums["rows"].sum(0)
    similarity, shuffled, reshuffled = (sums[name] - sums[f"{name}_expected"] for name in COSINES)
    scores = documents.ratio(
        similarity - (shuffled + reshuffled) / 2,
        sums["other_token_mass"],
        ((shuffled - reshuffled).sum(0) / weight).abs(),
        is_share=False,
    )
    return None if scores is None else replace(scores, score=torch.where(enough, scores.score, torch.nan))


def _copy_scores(evidence: HeadEvidence, heads: int) -> dict[str, _Scores]:
    """Score the share of pairs of rows in which the attended token wins, as wide as for the best of all heads.

    The interval is the wider of Student's t over documents and Wilson's over rows, with Bonferroni correction.
    """
    wins, pairs, rows = (evidence.column(name)[:, :-1].cpu() for name in ("copy_wins", "copy_pairs", "copy_rows"))
    if not bool((pairs.sum(0) > 0).any()):
        return {}
    tail, documents = (1 - _LEVEL) / 2 / heads, (pairs > 0).sum(0)
    score, below, _ = ratio_of_sums(wins, pairs, 1.0)
    deviations = {int(n): student_quantile(tail, n - 1) for n in documents.unique().tolist() if n > 1}
    half_width = (score - below) * torch.tensor([deviations.get(n, math.nan) for n in documents.tolist()])
    z, counts = normal_quantile(tail), rows.sum(0).nan_to_num().long().tolist()
    ends = [wilson_of_ties(x * n, n, z) for x, n in zip(score.nan_to_num().tolist(), counts, strict=True)]
    least, most = torch.tensor(ends, dtype=torch.float64).unbind(-1)
    low, high = torch.minimum(score - half_width, least), torch.maximum(score + half_width, most)
    null = torch.full_like(score, 0.5)
    of_halves = halves(wins, pairs, evidence.documents)
    return {
        "copy": _Scores(score, low, high, null, halves=of_halves),
        "anti-copy": _Scores(1 - score, 1 - high, 1 - low, null, halves=1 - of_halves),
    }


def _pronoun_scores(tables: Mapping[str, PronounTable], site: AttentionSite) -> dict[str, _Scores]:
    """Score agreement by gender and number, and pronoun where only the meaning decides, of heads that have both."""
    of_site = {
        cue: sorted((x for x in table.entries if x.site == site.name), key=lambda x: x.head)
        for cue, table in tables.items()
    }
    of_site = {cue: entries for cue, entries in of_site.items() if len(entries) == site.num_heads}

    def column(cue: str, name: str) -> Tensor:
        return torch.tensor([getattr(entry, name) for entry in of_site[cue]], dtype=torch.float64)

    cues: dict[str, Tensor] = {cue: column(cue, "score") for cue in CUES if cue in of_site}
    agrees, scores = (True,) * site.num_heads, dict[str, _Scores]()
    for role, cue in (("agreement", "agreement"), ("pronoun", "meaning")):
        if cue not in of_site:
            break
        score, low, high, null, weight = (column(cue, x) for x in ("score", "all_low", "all_high", "null", "weight"))
        enough = tuple(x.has_enough_weight and y for x, y in zip(of_site[cue], agrees, strict=True))
        scores[role] = _Scores(score + 0.0 * weight, low, high, null, enough, {"weight": weight, **cues})
        agrees = tuple(((score >= RULES[role].threshold) & (low > null) & torch.tensor(enough)).tolist())
    return scores


# ---- decisions


def _role_scores(scores: Mapping[str, _Scores], head: int, reference_max: Mapping[str, float]) -> tuple[RoleScore, ...]:
    result: dict[str, RoleScore] = {}
    for role, rule in RULES.items():
        if role not in scores:
            continue
        of_site = scores[role]
        score, low, high, null = (float(x[head]) for x in (of_site.score, of_site.low, of_site.high, of_site.null))
        if math.isnan(score) or math.isnan(null):
            continue
        null = max(null, reference_max.get(role, null))
        threshold = max(rule.threshold, (1 + null) / 2) if rule.rises else rule.threshold
        has_more_specific = rule.unless is not None and rule.unless in result and result[rule.unless].holds
        enough = not of_site.enough or of_site.enough[head]
        holds = score >= threshold and low > null and enough and not has_more_specific
        more: dict[str, Any] = {name: x[head].item() for name, x in of_site.more.items()}
        of_halves = None if of_site.halves is None else (float(of_site.halves[0, head]), float(of_site.halves[1, head]))
        result[role] = RoleScore(role, score, low, high, null, threshold, holds, **more, halves=of_halves)
    return tuple(result.values())


def _max_scores(reference: Sequence[HeadRoles]) -> dict[str, float]:
    scores: dict[str, float] = {}
    for head in reference:
        for score in head.scores:
            scores[score.role] = max(scores.get(score.role, -math.inf), score.score)
    return scores
