"""A check for every kind of sentence: it parses the sentence, and compares it with recomputed numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

import torch
from torch import Tensor

from benchmarks.statements.columns import recomputed_column
from benchmarks.statements.recomputed import RULES, Recomputed, Score, student_quantile
from benchmarks.statements.sentences import Statement

SLACK = 0.002  # of scores that decide about a role: float32, and bootstrap intervals of other draws
PREDICTABLE = 0.75
MOSTLY = 0.5
SAME = 0.5


@dataclass(frozen=True)
class Verdict:
    """Whether a sentence's numbers agree with the recomputed ones, and whether what it claims follows from them."""

    agrees: bool
    holds: bool
    recomputed: str

    @property
    def passed(self) -> bool:
        return self.agrees and self.holds


Check = Callable[[Recomputed, "re.Match[str]", Statement], Verdict]
CHECKS: list[tuple[re.Pattern[str], Check]] = []
HEAD = r"L\d+H\d+"
BASIS = (
    r"(?:, in both halves of (?P<text>the repeated random words|.+? \((?P<tokens>[\d,]+) tokens in contexts of up to "
    r"(?P<context>[\d,]+)\)))?"
)


def checks(pattern: str) -> Callable[[Check], Check]:
    """Register the check of all sentences that match a pattern."""

    def register(check: Check) -> Check:
        CHECKS.append((re.compile(pattern), check))
        return check

    return register


def verdict_of(numbers: Recomputed, statement: Statement) -> Verdict | None:
    """Return the verdict on a sentence; None if there is no check for it."""
    for pattern, check in CHECKS:
        if match := pattern.fullmatch(statement.sentence):
            return check(numbers, match, statement)
    return None


def same(printed: str, value: float | Tensor, scale: float = 1.0, slack: float = 0.0) -> bool:
    """Return whether a printed number is a value, to its last digit."""
    number = Decimal(printed.replace(",", ""))
    unit = 10.0 ** int(number.as_tuple().exponent)
    return abs(float(number) - scale * float(value)) <= 0.55 * unit + slack


def row(numbers: Recomputed, name: str) -> int:
    """Return the index of a head among those of all layers."""
    layer, head = map(int, name[1:].split("H"))
    return layer * numbers.model.heads + head


def named(numbers: Recomputed, head: int) -> str:
    return "L{}H{}".format(*divmod(head, numbers.model.heads))


def percent(x: float) -> str:
    return f"{100 * float(x):.2f}%"


def same_basis(numbers: Recomputed, match: re.Match[str], *, importance: bool = False) -> bool:
    """Return whether the text that a finding names has the size that it states."""
    if match["tokens"] is None:
        return True
    contexts = numbers.importance_contexts if importance else numbers.contexts
    sizes = [len(x.ids) for x in contexts]
    longest = max(sizes) if importance else numbers.longest
    return same(match["tokens"], sum(sizes)) and same(match["context"], longest)


# ---- roles

CHANCE = r" \(chance (?P<null>-?[\d.]+)%?\)"
SHARE = r"(?P<score>\d+)%"
ROLE_SENTENCES = {
    "positional": rf"attends most (?P<distance>\d+) tokens? (?P<side>back|ahead) in {SHARE} of positions{CHANCE}",
    "previous": rf"attends most to the previous token in {SHARE} of positions{CHANCE}",
    "self": rf"attends most to the token itself in {SHARE} of positions{CHANCE}",
    "next": rf"attends most to the next token in {SHARE} of positions{CHANCE}",
    "long-range": rf"has over half of its attention on one token more than 8 away in {SHARE} of positions{CHANCE}",
    "local": rf"has {SHARE} of its attention within 8 tokens{CHANCE}",
    "sink": rf"has {SHARE} of its attention on the first token{CHANCE}",
    "delimiter": rf"has {SHARE} of its attention on special tokens and punctuation{CHANCE}",
    "rare-token": rf"has {SHARE} of its attention on rare tokens{CHANCE}",
    "induction": rf"has {SHARE} of its attention on the token after the other occurrence of its token{CHANCE}",
    "duplicate-token": rf"has {SHARE} of its attention on the other occurrence of its token{CHANCE}",
    "broad": rf"has {SHARE} of the maximum entropy{CHANCE}",
    "copy": r"directly raises the logit of the token it attends to more than that of a token it attends to elsewhere "
    rf"in {SHARE} of pairs{CHANCE}",
    "anti-copy": r"directly lowers the logit of the token it attends to more than that of a token it attends to "
    rf"elsewhere in {SHARE} of pairs{CHANCE}",
    "same-meaning": r"attends to tokens whose cosine similarity is (?P<score>-?[\d.]+) above what offsets explain"
    + CHANCE,
    "agreement": r"attends from a pronoun to the name that agrees with it more than to another in "
    rf"{SHARE} of sentences decided by gender or number \(chance (?P<null>\d+)%; (?P<cues>.+?)\), with "
    r"(?P<weight>\d+)% of its attention",
    "pronoun": r"attends from a pronoun to its antecedent more than to another in "
    rf"{SHARE} of sentences where only the meaning decides \(chance (?P<null>\d+)%; (?P<cues>.+?)\), with "
    r"(?P<weight>\d+)% of its attention",
}
LABELS = {
    "positional": "positional head",
    "previous": "previous-token head",
    "self": "self-token head",
    "next": "next-token head",
    "long-range": "long-range head",
    "local": "local head",
    "sink": "attention-sink head",
    "delimiter": "delimiter head",
    "rare-token": "rare-token head",
    "induction": "induction head",
    "duplicate-token": "duplicate-token head",
    "broad": r"broad \(uniform\) head",
    "copy": "copying head",
    "anti-copy": "anti-copying head",
    "same-meaning": "semantic-similarity head",
    "agreement": "pronoun agreement head",
    "pronoun": r"pronoun \(coreference\) head",
}


def _register_role(role: str, sentence: str, label: str) -> None:
    @checks(rf"(?P<head>{HEAD}) {sentence}: (?:an? )?{label}{BASIS}")
    def check(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
        if role not in numbers.roles:
            return Verdict(False, False, "not measured")
        score, head, groups = numbers.roles[role], row(numbers, match["head"]), match.groupdict()
        unit, slack = (1.0, 0.003) if role == "same-meaning" else (100.0, 0.0)
        agrees = same(groups["score"], score.score[head], unit, slack) and same_basis(numbers, match)
        agrees &= same(groups["null"], score.null[head], unit, 2 * slack)
        if groups.get("distance"):
            step = int(groups["distance"]) * (-1 if groups["side"] == "back" else 1)
            agrees &= step == int(score.more["offset"][head])
        if groups.get("weight"):
            agrees &= same(groups["weight"], score.more["weight"][head], unit)
            for cue, share in re.findall(r"by (gender|number|meaning)(?: alone)? (\d+)%", groups["cues"]):
                agrees &= same(share, score.more[cue][head], unit)
        holds = bool(numbers.holds(role, -SLACK)[head])
        if match["text"] is not None:
            holds &= _in_halves(score, head)
        numbers_of = (f"{name} {float(x[head]):.4f}" for name, x in vars(score).items() if name in SHOWN)
        return Verdict(agrees, holds, ", ".join(numbers_of))


SHOWN = ("score", "low", "null", "threshold")


def _in_halves(score: Score, head: int) -> bool:
    if score.halves is None:
        return False
    least = torch.maximum(score.threshold[head] - SLACK, score.null[head])
    return bool((score.halves[:, head] >= least).all())


for _role, _sentence in ROLE_SENTENCES.items():
    _register_role(_role, _sentence, LABELS[_role])
# At offset 0 a positional head attends to the token itself.
_register_role("positional", ROLE_SENTENCES["self"], LABELS["positional"])


@checks(rf"(?P<head>{HEAD}): None of the roles is supported by the evidence for this head\.")
def _no_role(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    head = row(numbers, match["head"])
    roles = [role for role in RULES if bool(numbers.holds(role, SLACK)[head])]
    return Verdict(True, not roles, ", ".join(roles) or "none")


@checks(
    r"(?P<roles>(?:\w\w [\w-]+ \d+ +)*)·· +no role (?P<none>\d+)(?: +·· redundant within its layer (?P<redundant>\d+))?"
)
def _legend(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    printed = {role: int(count) for role, count in re.findall(r"\w\w ([\w-]+) (\d+)", match["roles"])}
    has = {role: (numbers.holds(role, SLACK), numbers.holds(role, -SLACK)) for role in RULES}
    agrees = all(int(sure.sum()) <= printed.get(role, 0) <= int(maybe.sum()) for role, (sure, maybe) in has.items())
    some, all_of = (torch.stack([x[i] for x in has.values()]).any(0) for i in (0, 1))
    agrees &= int((~all_of).sum()) <= int(match["none"]) <= int((~some).sum())
    redundant = 0 if numbers.predictable is None else int((numbers.predictable[0][0] >= PREDICTABLE).sum())
    agrees &= int(match["redundant"] or 0) == redundant
    counts = {role: int(numbers.holds(role).sum()) for role in RULES}
    return Verdict(agrees, True, ", ".join(f"{role} {count}" for role, count in counts.items() if count))


# ---- redundant and similar heads

OF_OUTPUT = r"of its output is linearly predictable from it, on held-out tokens\)"
RELATION = r"(?:much the same as|the opposite of|a linear map of what)"


@checks(
    rf"(?P<head>{HEAD}) (?:mostly )?writes (?P<relation>{RELATION}) (?P<other>{HEAD})(?: writes)? "
    rf"\(cosine (?P<cosine>-?[\d.]+); (?P<alone>\d+)% {OF_OUTPUT}{BASIS}"
)
def _redundant_pair(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    if numbers.predictable is None:
        return Verdict(False, False, "too few tokens")
    head, other = row(numbers, match["head"]), row(numbers, match["other"])
    shares, alone = numbers.predictable[0][:, head], _alone(numbers, head)
    layer, first = divmod(head, numbers.model.heads)
    cosine = float(numbers.cosines[layer, first, other % numbers.model.heads])
    relation = "a linear map of what" if abs(cosine) < SAME else ("much the same as", "the opposite of")[cosine < 0]
    by_other = alone[:, other % numbers.model.heads]
    agrees = same(match["alone"], by_other[0], 100) and same(match["cosine"], cosine) and same_basis(numbers, match)
    holds = bool((shares >= PREDICTABLE - SLACK).all() and (by_other >= MOSTLY - SLACK).all())
    holds &= relation == match["relation"] and int(alone[0].argmax()) == other % numbers.model.heads
    return Verdict(agrees, holds, f"{_shown(by_other)} by it, {_shown(shares)} by all, cosine {cosine:.4f}")


@checks(
    rf"the other heads of its layer predict (?P<share>\d+)% of the output of (?P<head>{HEAD}) linearly, on held-out "
    rf"tokens{BASIS}"
)
def _redundant_head(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    if numbers.predictable is None:
        return Verdict(False, False, "too few tokens")
    shares = numbers.predictable[0][:, row(numbers, match["head"])]
    agrees = same(match["share"], shares[0], 100) and same_basis(numbers, match)
    return Verdict(agrees, bool((shares >= PREDICTABLE - SLACK).all()), _shown(shares))


@checks(
    rf"Redundant: (?P<head>{HEAD}) (?P<share>[\d.]+)%; (?P<alone>-?[\d.]+)% by (?P<other>{HEAD}) alone, cosine "
    r"(?P<cosine>-?[\d.]+)"
)
def _redundant_on_page(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    if numbers.predictable is None:
        return Verdict(False, False, "too few tokens")
    head, other = row(numbers, match["head"]), row(numbers, match["other"]) % numbers.model.heads
    share, alone = float(numbers.predictable[0][0, head]), _alone(numbers, head)[0]
    cosine = float(numbers.cosines[head // numbers.model.heads, head % numbers.model.heads, other])
    agrees = (
        same(match["share"], share, 100) and same(match["alone"], alone[other], 100) and same(match["cosine"], cosine)
    )
    holds = share >= PREDICTABLE - SLACK and int(alone.argmax()) == other
    return Verdict(agrees, holds, f"{percent(share)}; {percent(float(alone[other]))}, cosine {cosine:.4f}")


@checks(
    r"No redundant heads: the other heads of a layer predict less than 75% of each head's output linearly, on held-out "
    rf"tokens \(at most (?P<most>-?\d+)%, of (?P<head>{HEAD})\)\."
)
def _none_redundant(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    if numbers.predictable is None:
        return Verdict(False, False, "too few tokens")
    shares = numbers.predictable[0][0].nan_to_num(nan=-math.inf)
    best = int(shares.argmax())
    agrees = same(match["most"], shares[best], 100) and best == row(numbers, match["head"])
    return Verdict(agrees, float(shares[best]) < PREDICTABLE, f"{named(numbers, best)} {percent(float(shares[best]))}")


@checks(
    r"(?P<count>\d+) of (?P<of>\d+) heads (?:are|is) redundant: the other heads of (?:their|its) layer predict at "
    r"least 75% of (?:their|its) output linearly, on held-out tokens: (?P<heads>.+?)(?: and others)?\."
)
def _redundant_heads(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    if numbers.predictable is None:
        return Verdict(False, False, "too few tokens")
    shares = numbers.predictable[0][0].nan_to_num(nan=-math.inf)
    count = int((shares >= PREDICTABLE).sum())
    agrees = int(match["count"]) == count and int(match["of"]) == len(shares)
    listed = re.findall(rf"({HEAD}) (\d+)%", match["heads"])
    agrees &= all(same(share, shares[row(numbers, head)], 100) for head, share in listed)
    top = [named(numbers, x) for x in shares.argsort(descending=True)[: len(listed)].tolist()]
    return Verdict(agrees, top == [head for head, _ in listed], f"{count}; {', '.join(top)}")


@checks(
    rf"(?P<head>{HEAD}): Most similar or opposite output: (?P<other>{HEAD}) (?P<cosine>-?[\d.]+) "
    r"\((?P<where>same|other) layer\)"
)
def _most_similar(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    head, other = row(numbers, match["head"]), row(numbers, match["other"])
    cosine = numbers.cosine(head, other)
    if match["where"] == "other":
        return _across(numbers, match, cosine)
    layer, first = divmod(head, numbers.model.heads)
    within = numbers.cosines[layer, first].clone().abs()
    within[first] = -1
    holds = abs(cosine) >= float(within.max()) - SLACK
    return Verdict(
        same(match["cosine"], cosine), holds, f"cosine {cosine:.4f}, largest of the layer {float(within.max()):.4f}"
    )


@checks(rf"Across layers: (?P<head>{HEAD}) and (?P<other>{HEAD}), cosine (?P<cosine>-?[\d.]+)")
def _pair_across(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    return _across(numbers, match, numbers.cosine(row(numbers, match["head"]), row(numbers, match["other"])))


def _across(numbers: Recomputed, match: re.Match[str], cosine: float) -> Verdict:
    """Compare the cosine over a sample of 1,024 tokens with that over all tokens."""
    sampled = sum(len(x.ids) for x in numbers.contexts) > 1024
    agrees = same(match["cosine"], cosine, slack=0.05 if sampled else 0.0)
    return Verdict(agrees, True, f"cosine {cosine:.4f} over all tokens")


def _alone(numbers: Recomputed, head: int) -> Tensor:
    """Return what each other head of the layer predicts of a head, [3, heads]: on the text and on its halves."""
    assert numbers.predictable is not None
    layer, first = divmod(head, numbers.model.heads)
    alone = numbers.predictable[1][:, layer, first].clone()
    alone[:, first] = -math.inf
    return alone


def _shown(shares: Tensor) -> str:
    whole, *halves = map(percent, shares.tolist())
    return f"{whole} ({', '.join(halves)} in the halves)"


# ---- importance

MEASURE = {
    "gradient": r"(?P<head>{0}) has the largest loss gradient: (?P<value>[\d.e+-]+) nats per token",
    "ablation": r"ablating (?P<head>{0}) (?:increases the loss most: (?P<value>[\d.e+-]+) nats per token"
    r"|changes the text embedding most: 1 - cosine (?P<change>[\d.e+-]+))",
}


def _register_importance(measure: str, sentence: str) -> None:
    @checks(sentence.format(HEAD) + r"(?:, at least (?P<times>[\d,.]+) times the median of all heads)?" + BASIS)
    def check(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
        means = numbers.importance.get(measure)
        if means is None:
            return Verdict(False, False, "not measured")
        head, values = row(numbers, match["head"]), torch.cat([means.mean[None], means.halves])
        printed = match.groupdict().get("value") or match.groupdict()["change"]
        agrees = same(printed, values[0, head]) and same_basis(numbers, match, importance=True)
        medians = values.nanquantile(0.5, 1)
        times = float((values[:, head] / medians).min())
        if match["times"] is not None:
            agrees &= same(match["times"], times)
        holds = bool((values.nan_to_num(nan=-math.inf).argmax(1) == head).all())
        return Verdict(agrees, holds, f"{float(values[0, head]):.4g}, {times:.2f} times the median")


for _measure, _sentence in MEASURE.items():
    _register_importance(_measure, _sentence)


@checks(rf"(?P<head>{HEAD}) ranks first on this text\. \((?P<measure>\w+)\)")
def _ranks_first(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    values = numbers.importance[match["measure"]].mean.nan_to_num(nan=-math.inf)
    first = named(numbers, int(values.argmax()))
    return Verdict(True, first == match["head"], first)


@checks(r"Importance by (?P<measures>[\w ]+): (?P<loss>.+), on (?P<tokens>[\d,]+) tokens\.")
def _importance(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    tokens = sum(len(x.ids) for x in numbers.importance_contexts)
    losses = {"next-token loss": "language", "change of the text embedding, 1 - cosine": "representation"}
    holds = losses.get(match["loss"]) == numbers.loss
    return Verdict(same(match["tokens"], tokens), holds, f"{tokens:,} tokens, {numbers.loss}")


@checks(r"Least important by (?P<measure>\w+): (?P<heads>.+?)(?:; ± is the standard error)?\.")
def _least_important(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    means = numbers.importance[match["measure"]]
    values, errors, agrees = means.mean, means.jackknife, True
    listed = re.findall(rf"({HEAD}) (-?[\d.e-]+)(?: ± ([\d.e-]+))?", match["heads"])
    for head, value, error in listed:
        index = row(numbers, head)
        agrees &= same(value, values[index], slack=1e-3 * float(values[index].abs()))
        agrees &= not error or same(error, errors[index], slack=0.02 * float(errors[index]))
    least = values.argsort()[: len(listed)].tolist()
    # Two values that print alike may be in either order.
    holds = sorted(float(values[row(numbers, head)]) for head, _, _ in listed) == sorted(
        float(values[x]) for x in least
    )
    return Verdict(agrees, holds, ", ".join(f"{named(numbers, x)} {float(values[x]):.3g}" for x in least))


@checks(r"(?P<count>\d+) other heads? do(es)? not differ significantly from the last of these, (?P<last>.+)\.")
def _among(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    (means, *_) = numbers.importance.values()
    order, effects = means.mean.argsort().tolist(), means.effects
    count, last, close, texts = 0, order[3], 0, len(effects)
    quantile = student_quantile(0.025, texts - 1)
    for head in order[4:]:
        difference = effects[:, head] - effects[:, last]
        error = float((difference.square().sum() * texts / (texts - 1)).sqrt())
        ratio = float(means.mean[head] - means.mean[last]) / error
        count += ratio <= quantile
        close += abs(ratio - quantile) < 0.02
    agrees = abs(int(match["count"]) - count) <= close and match["last"] == named(numbers, last)
    return Verdict(agrees, True, f"{count} heads, from {named(numbers, last)}")


@checks(r"Without standard errors, which need two contexts, this order may be chance\.")
def _no_errors(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    documents = {x.document for x in numbers.importance_contexts}
    return Verdict(True, len(documents) < 2, f"{len(documents)} documents")


# ---- patterns of many heads, and extremes


def _register_common(sentence: str, column: str, least: float) -> None:
    @checks(rf"(?P<count>\d+) of (?P<of>\d+) heads {sentence}{BASIS}")
    def check(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
        means = numbers.text.means[column]
        above = (torch.cat([means.mean[None], means.halves]) > least).all(0)
        agrees = (
            int(match["count"]) == int(above.sum()) and int(match["of"]) == len(above) and same_basis(numbers, match)
        )
        heads = (
            [] if statement.finding is None else [row(numbers, f"L{s.layer}H{h}") for s, h in statement.finding.heads]
        )
        return Verdict(agrees, bool(above[heads].all()), f"{int(above.sum())} of {len(above)}")


_register_common(r"(?:have|has) over half of (?:their|its) attention on the first token", "sink_mass", 0.5)
_register_common(r"attends? almost uniformly \(over 90% of the maximum entropy\)", "normalized_entropy", 0.9)


def _register_extreme(sentence: str, column: str, scale: float) -> None:
    @checks(rf"(?P<head>{HEAD}) {sentence}{BASIS}")
    def check(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
        means, head = numbers.text.means[column], row(numbers, match["head"])
        values = torch.cat([means.mean[None], means.halves])
        agrees = same(match["value"], values[0, head], scale) and same_basis(numbers, match)
        return Verdict(agrees, bool((values.argmax(1) == head).all()), f"{scale * float(values[0, head]):.3f}")


_register_extreme(
    r"has the largest max attention weight: (?P<value>\d+)% on one token(?: on average)?", "confidence", 100.0
)
_register_extreme(r"has the largest mean attention distance: (?P<value>\d+) tokens", "mean_distance", 1.0)


@checks(rf"(?P<head>{HEAD}): Tokens that receive the most attention from this head, over the whole text: (?P<keys>.+)")
def _top_keys(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    head, vocabulary = row(numbers, match["head"]), numbers.vocabulary
    shares = numbers.text.received[head] / numbers.text.rows
    printed = re.findall(r" ([\d.]+)%(?:, |$)", match["keys"])
    top = shares.sort(descending=True)
    values, tokens = top.values[: len(printed)].tolist(), top.indices[: len(printed)].tolist()
    agrees = all(same(share, value, 100) for share, value in zip(printed, values, strict=True))
    texts = [vocabulary.text(token).strip() for token in tokens]
    holds = all(not text or repr(text)[1:-1] in match["keys"] for text in texts)
    return Verdict(agrees, holds, ", ".join(f"{x!r} {percent(y)}" for x, y in zip(texts, values, strict=True)))


# ---- the run, and the columns of the table


@checks(r"(?P<name>\S+): (?P<kind>\w+), (?P<origin>.+)")
def _model(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    if statement.place == "columns":
        return _column(numbers, match, statement)
    kind = type(numbers.model.model).__name__
    return Verdict(match["kind"] == kind, True, kind)


@checks(
    r"(?P<tokens>[\d,]+) tokens of (?P<documents>\d+) documents?, in contexts of up to (?P<context>\d+); "
    r"(?P<heads>\d+) heads; \d+ s"
)
def _size(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    tokens, heads = sum(len(x.ids) for x in numbers.contexts), numbers.model.layers * numbers.model.heads
    agrees = same(match["tokens"], tokens) and same(match["heads"], heads) and same(match["context"], numbers.longest)
    return Verdict(agrees, True, f"{tokens:,} tokens, {heads} heads")


@checks(r"Intervals and standard errors are over fewer than (?P<few>\d+) contexts, too few to be reliable; .*")
def _few(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    contexts = len(numbers.contexts)
    return Verdict(contexts < int(match["few"]), True, f"{contexts} contexts")


@checks(
    r"Skipped: redundancy: the prediction of a head by the others of its layer needs (?P<needed>[\d,]+) tokens in each "
    r"half of the documents, got (?P<got>[\d,]+); .*"
)
def _few_tokens(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    needed = 4 * (numbers.model.heads - 1) * numbers.outputs.shape[-1]
    got = min(int((numbers.half == x).sum()) for x in (0, 1))
    agrees = same(match["needed"], needed) and same(match["got"], got)
    return Verdict(agrees, numbers.predictable is None, f"{needed:,} needed, {got:,} there")


@checks(
    r"Skipped: agreement and pronoun: of (?P<all>\d+) sentences with pronouns the tokenizer can read (?P<readable>\d+) "
    r"in a context of (?P<context>\d+) tokens"
)
def _no_pronouns(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    readable = len(numbers.pronoun_texts)
    return Verdict(same(match["readable"], readable), not numbers.pronoun_means, f"{readable} readable")


@checks(r"Skipped: induction and duplicate-token: a probe needs at least \d+ distinct words .*")
def _no_repeats(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    return Verdict(True, not numbers.repeated, f"{len(numbers.repeated)} texts")


@checks(r"(?P<percent>\d+)% of the tokens are unknown tokens, which the heads cannot distinguish\.")
def _unknown(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    ids = torch.cat([x.ids for x in numbers.contexts])
    share = float((ids == numbers.vocabulary.tokenizer.unk_token_id).double().mean())
    return Verdict(same(match["percent"], share, 100), True, percent(share))


@checks(r"(?P<column>\w+): (?P<about>.+)")
def _column(numbers: Recomputed, match: re.Match[str], statement: Statement) -> Verdict:
    """Compare the values of all heads."""
    name = statement.sentence.partition(":")[0]
    values, expected = statement.values, recomputed_column(numbers, name)
    if values is None or expected is None:
        return Verdict(False, False, "no definition")
    known = values.isfinite() & expected.isfinite()
    scale = float(values[known].abs().max()) if bool(known.any()) else 1.0
    allowed = torch.full_like(values, max(TOLERANCES.get(name, 0.0), 1e-3 * scale))
    if name.startswith("copying_circuit_score"):  # random heads, and samples of a large vocabulary
        error = recomputed_column(numbers, "copying_circuit_score_error")
        assert error is not None
        allowed = 4 * error + 1e-3
        allowed = allowed + 0.4 * scale * name.endswith("_chance")
    elif name.endswith("_error"):
        allowed = torch.full_like(values, 0.02 * scale)
    difference = torch.where(known, (values - expected).abs(), 0.0)
    agrees = bool((difference <= allowed).all()) and bool((values.isnan() == expected.isnan()).all())
    return Verdict(agrees, True, f"largest difference {float(difference.max()):.2g} of up to {scale:.3g}")


TOLERANCES = {"same_meaning_score": 0.008}
