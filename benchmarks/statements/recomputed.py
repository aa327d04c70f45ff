"""All numbers that the sentences of a report state, recomputed from materialised attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from benchmarks.statements import measures
from benchmarks.statements.materialised import Attention, Model, random_twin
from benchmarks.statements.measures import Measures, Tokens
from benchmarks.statements.tokens import Pronoun, Vocabulary, pronouns, rarest

DRAWS = 1000
LEVEL = 0.95
CUES = {"agreement": ("gender", "number"), "gender": ("gender",), "number": ("number",), "meaning": ("meaning",)}
# By role: the least score, whether it rises to halfway between the null and 1, and a more specific role.
RULES: dict[str, tuple[float, bool, str | None]] = {
    "positional": (0.9, True, None),
    "previous": (0.5, True, None),
    "next": (0.5, True, None),
    "self": (0.5, True, None),
    "local": (0.9, True, "positional"),
    "sink": (0.8, True, None),
    "delimiter": (0.8, True, "sink"),
    "broad": (0.95, True, None),
    "long-range": (0.5, True, None),
    "rare-token": (0.5, True, None),
    "duplicate-token": (0.5, True, None),
    "induction": (0.5, True, None),
    "pronoun": (0.75, True, None),
    "agreement": (0.75, True, "pronoun"),
    "copy": (0.75, True, None),
    "anti-copy": (0.75, True, None),
    "same-meaning": (0.1, False, None),
}


@dataclass(frozen=True, eq=False)
class Context:
    """Token ids of one text, and the number of the document (or context) by which halves and intervals are counted."""

    ids: Tensor
    document: int
    special: Tensor  # bool [tokens]


@dataclass(eq=False)
class Means:
    """Sums of a measure by document, [documents, heads], of which ratios are the means."""

    sums: Tensor
    counts: Tensor
    documents: Tensor
    squares: Tensor | None = None  # [heads], and the largest value: of measures of rows
    largest: Tensor | None = None

    @classmethod
    def of(cls, values: Sequence[tuple[Tensor, Tensor]], documents: Sequence[int], rows: bool = False) -> Means:
        """Collect values [heads, rows] with weights [heads or 1, rows] (or sums of them, [heads]) of each text."""
        numbers, index = torch.tensor(documents).unique(return_inverse=True)
        sums, counts = (
            torch.zeros(len(numbers), len(parts[0]), dtype=torch.float64).index_add(0, index, torch.stack(parts))
            for parts in zip(*(_summed(x, weight) for x, weight in values), strict=True)
        )
        means = cls(sums, counts, numbers)
        if rows:
            means.squares = sum(((x.double() ** 2 * weight).sum(-1) for x, weight in values), torch.zeros(()))
            means.largest = torch.stack(
                [torch.where(w, x, -math.inf).amax(-1) for x, w in values if bool(w.any())]
            ).amax(0)
        return means

    @property
    def mean(self) -> Tensor:
        return self.sums.sum(0) / self.counts.sum(0)

    @property
    def halves(self) -> Tensor:
        """Means of the even and of the odd documents, [2, heads]."""
        return torch.stack([self.sums[x].sum(0) / self.counts[x].sum(0) for x in (self.even, ~self.even)])

    @property
    def even(self) -> Tensor:
        return self.documents % 2 == 0

    @property
    def effects(self) -> Tensor:
        """Effect of each document on the mean, to first order, [documents, heads]."""
        used = (self.counts > 0).any(-1)
        return ((self.sums - self.mean * self.counts) / self.counts.sum(0))[used]

    @property
    def error(self) -> Tensor:
        return _error(self.effects)

    @property
    def jackknife(self) -> Tensor:
        """The standard error by leaving out one document at a time, as that of importance is."""
        without, count = (self.sums.sum(0) - self.sums) / (self.counts.sum(0) - self.counts), len(self.sums)
        return ((without - without.mean(0)).square().sum(0) * (count - 1) / count).sqrt()

    @property
    def low(self) -> Tensor:
        """The lower end of the 95% percentile bootstrap over documents."""
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(len(self.sums), (DRAWS, len(self.sums)), generator=generator)
        ratios = self.sums[drawn].sum(1) / self.counts[drawn].sum(1)
        return ratios.nanquantile((1 - LEVEL) / 2, 0)


@cache
def student_quantile(tail: float, degrees: int) -> float:
    """Return the quantile of Student's t: with t = sqrt(degrees) tan(a), the density of a is cos(a)^(degrees - 1)."""
    angle = torch.linspace(0, math.pi / 2, 1_000_001, dtype=torch.float64)
    above = (angle.cos() ** (degrees - 1)).flip(0).cumsum(0).flip(0)
    return math.sqrt(degrees) * math.tan(float(angle[int((above > 2 * tail * above[0]).sum())]))


def _summed(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if values.ndim == 1:
        return values.double(), weights.double().expand_as(values)
    return (values.double() * weights).sum(-1), weights.double().sum(-1).expand(len(values))


def _error(effects: Tensor) -> Tensor:
    count = len(effects)
    return (effects.square().sum(0) * count / (count - 1)).sqrt() if count > 1 else effects.sum(0) * math.nan


@dataclass(frozen=True, eq=False)
class Score:
    """Scores of a role, [heads] each."""

    score: Tensor
    low: Tensor
    null: Tensor
    threshold: Tensor
    halves: Tensor | None  # [2, heads]; None of sentences about pronouns
    more: dict[str, Tensor] = field(default_factory=dict)
    enough: Tensor | bool = True


@dataclass(eq=False)
class Recomputed:
    """A model and what it reads; every number is computed at its first use."""

    model: Model
    vocabulary: Vocabulary
    contexts: list[Context]
    repeated: list[Context]
    random_contexts: list[Context]  # which the model with random weights reads
    importance_contexts: list[Context]
    loss: str | None
    sentences: list[Any]  # about pronouns, with spans of characters
    longest: int
    seed: int = 0

    # ---- the pass over the text

    @cached_property
    def rare(self) -> set[int]:
        return rarest([x.ids for x in self.contexts])

    def tokens(self, context: Context) -> Tokens:
        def which(test: Any) -> Tensor:
            return torch.tensor([test(token) for token in context.ids.tolist()])

        return Tokens(
            context.ids,
            which(lambda token: token in self.vocabulary.special),
            which(self.vocabulary.is_punctuation),
            which(lambda token: token in self.rare and token not in self.vocabulary.special),
            self.vocabulary.words(context.ids),
            self.vocabulary.sentences(context.ids),
        )

    @cached_property
    def text(self) -> _Read:
        return _Read.of(self, self.model, self.contexts, outputs=True)

    @cached_property
    def random(self) -> _Read:
        """The text as a model with random weights reads it: part of the null."""
        return _Read.of(self, random_twin(self.model.model, self.seed), self.random_contexts)

    @cached_property
    def repeats(self) -> dict[str, tuple[Means, Means]]:
        """Means of heads and of uniform attention on repeated random words."""
        found: dict[str, list[Any]] = {}
        for context in self.repeated:
            read = self.model.read(context.ids)
            tokens = self.tokens(context)
            for weights, part in ((read.weights, 0), (measures.uniform(read.visible), 1)):
                for role, values in measures.repeated_measures(weights, read.visible, tokens).items():
                    found.setdefault(role, [[], []])[part].append(values)
        documents = [x.document for x in self.repeated]
        return {role: (Means.of(own, documents), Means.of(null, documents)) for role, (own, null) in found.items()}

    # ---- roles

    @cached_property
    def roles(self) -> dict[str, Score]:
        """The scores of every role that can be measured."""
        found = {"positional": self._positional()}
        chance = self.random.positional if len(self.random_contexts) else None
        found["positional"] = self._above(found["positional"], chance)
        for role in ("previous", "self", "next", "local", "sink", "delimiter", "broad", "long-range", "rare-token"):
            own, null = self.text.means.get(role), self.text.null.get(role)
            if own is None or null is None or not bool((own.counts > 0).any()):
                continue
            score = Score(own.mean, own.low, null.mean.expand(len(own.mean)), null.mean, own.halves)
            random = self.random.means[role].mean if len(self.random_contexts) else None
            found[role] = self._above(score, random)
        for role, (own, null) in self.repeats.items() if self.repeated else ():
            score = Score(own.mean, own.low, null.mean.expand(len(own.mean)), null.mean, own.halves)
            found[role] = self._above(score, None)
        return {
            role: _with_threshold(role, score)
            for role, score in {**found, **self._pronouns(), **self._copying(), **self._same_meaning()}.items()
        }

    def holds(self, role: str, slack: float = 0.0) -> Tensor:
        """Return which heads have a role, bool [heads]; with a score so much above or below what it needs."""
        if role not in self.roles:
            return torch.zeros(self.model.layers * self.model.heads, dtype=torch.bool)
        score, unless = self.roles[role], RULES[role][2]
        reached = (score.score >= score.threshold + slack) & (score.low > score.null + slack) & score.enough
        return reached if unless is None else reached & ~self.holds(unless, -slack)

    def _above(self, score: Score, random: Tensor | None) -> Score:
        null = score.null if random is None else score.null.clamp_min(float(random.nan_to_num(nan=-math.inf).max()))
        return replace(score, null=null)

    def _positional(self) -> Score:
        means, step, null = self.text.at_best_offset
        return Score(means.mean, means.low, null, null, means.halves, {"offset": step})

    def _pronouns(self) -> dict[str, Score]:
        found: dict[str, Score] = {}
        shares = {cue: x.mean for cue, x in self.pronoun_means.items() if cue != "agreement"}
        enough: Tensor | bool = True
        for role, cue in (("agreement", "agreement"), ("pronoun", "meaning")):
            if cue not in self.pronoun_means:
                break
            means, chosen = self.pronoun_means[cue], [x.cue in CUES[cue] for x in self.pronoun_texts]
            weight, expected = (x[chosen].mean(0) for x in self.pronoun_weights[1:])
            enough = (weight >= 2 * expected) & enough
            null = torch.full_like(means.mean, 0.5)
            low = self._simultaneous(means, sum(chosen))
            found[role] = Score(means.mean, low, null, null, None, {"weight": weight, **shares}, enough)
            enough = (means.mean >= RULES[role][0]) & (low > null) & enough
        return found

    def _simultaneous(self, means: Means, rows: Tensor | int) -> Tensor:
        """Return the lower of Student's bound over documents and Wilson's over rows, for all heads together."""
        tail = (1 - LEVEL) / 2 / means.sums.shape[1]
        documents = (means.counts > 0).sum(0)
        student = torch.tensor([student_quantile(tail, max(1, n - 1)) for n in documents.tolist()])
        centre = means.mean.nan_to_num(nan=0.0)
        rows = torch.as_tensor(rows).expand_as(centre).double()
        z = NormalDist().inv_cdf(1 - tail) ** 2 / rows
        wilson = (centre + z / 2 - (z * centre * (1 - centre) + z**2 / 4).sqrt()) / (1 + z)
        over = centre - student * _error(means.effects)
        return torch.minimum(over.nan_to_num(nan=math.inf), wilson)

    @cached_property
    def pronoun_texts(self) -> list[Pronoun]:
        return pronouns(self.vocabulary.tokenizer, self.sentences, self.longest)

    @cached_property
    def pronoun_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """By sentence and head: 1 if the antecedent is preferred; its weight; that of uniform attention."""
        points, weights, expected = [], [], []
        for text in self.pronoun_texts:
            read = self.model.read(text.ids)
            here, antecedent, distractor = text.spans
            to, away = (read.weights[:, here][..., x].sum(-1).mean(-1) for x in (antecedent, distractor))
            points.append((torch.sign(to - away) + 1) / 2)
            weights.append(to)
            expected.append(measures.uniform(read.visible)[:, here][..., antecedent].sum(-1).mean(-1).expand_as(to))
        return torch.stack(points), torch.stack(weights), torch.stack(expected)

    @cached_property
    def pronoun_means(self) -> dict[str, Means]:
        if not self.pronoun_texts:
            return {}
        points, found = self.pronoun_weights[0], {}
        for name, cues in CUES.items():
            rows = [row for row, text in enumerate(self.pronoun_texts) if text.cue in cues]
            if len({self.pronoun_texts[row].template for row in rows}) > 1:
                values = [(points[row], torch.ones(())) for row in rows]
                found[name] = Means.of(values, [self.pronoun_texts[row].template for row in rows])
        return found

    def _copying(self) -> dict[str, Score]:
        copied = self.text.copied
        if copied is None:
            return {}
        means, rows = copied
        null, more = torch.full_like(means.mean, 0.5), torch.where(rows > 0, 0.0, math.nan)
        opposite = Means(means.counts - means.sums, means.counts, means.documents)
        return {
            role: Score(x.mean + more, self._simultaneous(x, rows), null, null, x.halves)
            for role, x in (("copy", means), ("anti-copy", opposite))
        }

    def _same_meaning(self) -> dict[str, Score]:
        found = self.text.similar
        if found is None:
            return {}
        means, null = found
        score = torch.where(means.counts.sum(0) > 0.05 * self.text.rows, means.mean, math.nan)
        return {"same-meaning": Score(score, means.low, null, null, means.halves)}

    # ---- outputs

    @cached_property
    def outputs(self) -> Tensor:
        """Head outputs of all tokens of the text, [tokens, layers, heads, dim]."""
        return torch.cat(self.text.outputs).double()

    @cached_property
    def half(self) -> Tensor:
        """The half of the text of each token, 0 or 1."""
        return torch.cat([torch.full((len(x.ids),), x.document % 2) for x in self.contexts])

    def written(self, head: int) -> Tensor:
        """Return the contribution of a head to the residual stream at every token, centred, [tokens, width]."""
        layer, number = divmod(head, self.model.heads)
        written = self.outputs[:, layer, number] @ self.model.output_weights[layer, number]
        return written - written.mean(0)

    def cosine(self, one: int, other: int) -> float:
        first, second = self.written(one), self.written(other)
        return float((first * second).sum() / (first.norm() * second.norm()))

    @cached_property
    def cosines(self) -> Tensor:
        """Cosines of the heads of each layer, [layers, heads, heads]."""
        found = []
        for layer, weights in enumerate(self.model.output_weights):
            centred = self.outputs[:, layer] - self.outputs[:, layer].mean(0)
            written = torch.einsum("thd,hdw->htw", centred, weights).flatten(1)
            products = written @ written.T
            found.append(products / products.diagonal().sqrt().outer(products.diagonal().sqrt()))
        return torch.stack(found)

    @cached_property
    def predictable(self) -> tuple[Tensor, Tensor] | None:
        """Shares predicted by all others, [3, all heads], and by one head, [3, layers, heads, heads]; None if the text
        is too short."""
        needed = 4 * (self.model.heads - 1) * self.outputs.shape[-1]
        if min(int((self.half == x).sum()) for x in (0, 1)) < needed:
            return None
        layers = [
            measures.predictable(self.outputs[:, layer], self.model.output_weights[layer], self.half)
            for layer in range(self.model.layers)
        ]
        return torch.cat([x for x, _ in layers], 1), torch.stack([x for _, x in layers], 1)

    # ---- importance

    @cached_property
    def importance(self) -> dict[str, Means]:
        if self.loss is None:
            return {}
        documents = [x.document for x in self.importance_contexts]
        if self.loss == "representation":
            changes = [self._change_of_embedding(x.ids) for x in self.importance_contexts]
            return {"ablation": Means.of([(x, torch.ones(())) for x in changes], documents)}
        found = [self.model.gradients(x.ids, ~x.special) for x in self.importance_contexts]
        gradients = [(x, torch.tensor(count)) for x, count in found]
        return {
            "gradient": Means.of([(x.abs(), count) for x, count in gradients], documents),
            "taylor": Means.of([(-x, count) for x, count in gradients], documents),
        }

    def _change_of_embedding(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            intact = self.model.embedding(ids)
        return self.model.ablated(ids, lambda x: 1 - self.model.embedding(x) @ intact)


def _with_threshold(role: str, score: Score) -> Score:
    least, rises, _ = RULES[role]
    threshold = torch.full_like(score.score, least)
    threshold = torch.maximum(threshold, (1 + score.null) / 2) if rises else threshold
    return replace(score, threshold=threshold)


@dataclass(eq=False)
class _Read:
    """The measures of a text, as one model reads it."""

    means: dict[str, Means]
    null: dict[str, Means]  # of uniform attention; broad: of random logits
    outputs: list[Tensor]
    rows: int
    received: Tensor  # [heads, vocabulary]: attention by token id
    copied: tuple[Means, Tensor] | None
    similar: tuple[Means, Tensor] | None
    at_best_offset: tuple[Means, Tensor, Tensor]

    @property
    def positional(self) -> Tensor:
        return self.at_best_offset[0].mean

    @classmethod
    def of(cls, whole: Recomputed, model: Model, contexts: Iterable[Context], outputs: bool = False) -> _Read:
        contexts = list(contexts)
        own: dict[str, list[Any]] = {}
        null: dict[str, list[Any]] = {}
        offsets, copied, similar, kept = [], [], [], []
        received = torch.zeros(model.layers * model.heads, 1 + max(int(x.ids.max()) for x in contexts)).double()
        directions = _directions(model.model) if outputs else None
        vectors = _embedding_vectors(model.model, whole.seed) if outputs else None
        for context in contexts:
            read, tokens = model.read(context.ids), whole.tokens(context)
            found: Measures = measures.row_measures(read.weights, read.visible, tokens)
            found["max_logit"] = read.largest_logits, torch.ones(1, len(context.ids), dtype=torch.bool)
            for name, values in found.items():
                own.setdefault(name, []).append(values)
            for name, values in measures.row_measures(measures.uniform(read.visible), read.visible, tokens).items():
                null.setdefault(name, []).append(values)
            null["broad"][-1] = measures.entropy_of_random_logits(read.visible)
            offsets.append(measures.hits_by_offset(read.weights, read.visible))
            received.index_add_(1, context.ids, read.weights.sum(1))
            if outputs:
                kept.append(read.outputs)
                if directions is not None:
                    copied.append(measures.copied(read.weights, _written(model, read), directions[context.ids], tokens))
                if vectors is not None:
                    similar.append([measures.similarity(read.weights, x[context.ids], tokens) for x in vectors])
        documents = [x.document for x in contexts]
        means = {name: Means.of(x, documents, name in measures.ROW_STATISTICS) for name, x in own.items()}
        return cls(
            means,
            {name: Means.of(x, documents) for name, x in null.items()},
            kept,
            sum(len(x.ids) for x in contexts),
            received,
            _copied(copied, documents) if copied else None,
            _similar(similar, documents) if similar else None,
            _at_best_offset(offsets, documents, means["entropy"]),
        )


def _at_best_offset(
    offsets: list[tuple[Tensor, Tensor, Tensor]], documents: list[int], rows: Means
) -> tuple[Means, Tensor, Tensor]:
    hits, available, chance = (sum(x, torch.zeros(())) for x in zip(*offsets, strict=True))
    common = available >= rows.counts[:, 0].sum() / 2
    best = torch.where(common, hits / available.clamp_min(1), -1.0).argmax(-1)
    values = [(x[torch.arange(len(best)), best] / a[best].clamp_min(1), a[best]) for x, a, _ in offsets]
    return Means.of(_weighted(values), documents), best - measures.NEAR, (chance / available)[best]


def _weighted(values: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return means with their weights as values of one row: a sum over documents needs both."""
    return [(mean[:, None], weight[:, None]) for mean, weight in values]


def _copied(copied: list[tuple[Tensor, Tensor, Tensor]], documents: list[int]) -> tuple[Means, Tensor]:
    values = _weighted([(wins / pairs.clamp_min(1), pairs) for wins, pairs, _ in copied])
    return Means.of(values, documents), sum((rows for _, _, rows in copied), torch.zeros(()))


def _similar(similar: list[list[tuple[Tensor, Tensor]]], documents: list[int]) -> tuple[Means, Tensor]:
    """Return the similarity above that of permuted embeddings, and the difference of two permutations."""
    own, first, second = (
        Means.of(_weighted([(x / w.clamp_min(1e-300), w) for x, w in part]), documents)
        for part in zip(*similar, strict=True)
    )
    above = Means(own.sums - (first.sums + second.sums) / 2, own.counts, own.documents)
    return above, (first.mean - second.mean).abs()


def _written(model: Model, read: Attention) -> Tensor:
    """Return what every head adds to the stream at every token, [heads of all layers, tokens, width]."""
    return torch.einsum("tlhd,lhdw->lhtw", read.outputs.double(), model.output_weights).flatten(0, 1)


def _directions(model: Any) -> Tensor | None:
    """Return the directions of the stream that raise the logits of tokens, through the final norm held fixed."""
    unembedding = model.get_output_embeddings()
    if unembedding is None or not model.can_generate():
        return None
    norms = [x for name, x in model.named_modules() if name in ("model.norm", "model.decoder.layer_norm")]
    rows = unembedding.weight.detach().double() * norms[0].weight.detach().double()
    return rows - rows.mean(-1, keepdim=True) if isinstance(norms[0], torch.nn.LayerNorm) else rows


def _embedding_vectors(model: Any, seed: int) -> list[Tensor]:
    """Return a unit vector per token, and the same in two permutations, as controls."""
    vectors = measures.unit_vectors(model.get_input_embeddings().weight)
    generator = torch.Generator().manual_seed(seed)
    return [vectors, *(vectors[torch.randperm(len(vectors), generator=generator)] for _ in range(2))]
