"""Probes of a model beyond its text: repeated words, pronouns, examples, the random-weights baseline, importance."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.analysis.importance import Importance, Masked, ablate, gradient_scores
from polyhead.analysis.languages import LANGUAGES
from polyhead.analysis.pronouns import AGREEMENT, CUES, PronounTable, pronoun_table, pronoun_texts
from polyhead.analysis.roles import HeadRoles, evidence_of, head_roles
from polyhead.analysis.roles_copying import Words, copying_scores
from polyhead.errors import OptionError, PolyheadError
from polyhead.inspection.example_weights import Example, ExampleWeights, example_batches, examples_of
from polyhead.inspection.settings import Settings
from polyhead.inspection.text_reader import Reader
from polyhead.inspection.wording import Reason
from polyhead.observation import (
    AttentionDistances,
    AttentionSite,
    Collector,
    HeadProjections,
    Observations,
    find_projections,
    observe,
)
from polyhead.observation.collectors import CallRecorder, states_of
from polyhead.observation.direct_logits import DirectLogits, find_direct_logits
from polyhead.observation.head_distances import SiteDistances
from polyhead.observation.origins import IN_CONFIG
from polyhead.observation.role_evidence import EvidenceCollector, HeadEvidence
from polyhead.observation.role_evidence_rows import ROW_STATISTICS
from polyhead.observation.role_evidence_tokens import rare_tokens
from polyhead.observation.token_sample import TokenSample, token_hashes
from polyhead.progress import Progress, ProgressCallback
from polyhead.sources import Batch, LoadedModel, special_tokens
from polyhead.sources.probes import BLOCKS, ordinary_words, repeated_batches
from polyhead.sources.pronoun_sentences import Cue, pronoun_sentences
from polyhead.sources.text_contexts import knows

CHANCE_TOKENS = 1024  # of the baseline with random weights
DISTANCE_TOKENS = 512
GRADIENT_TOKENS = 8192
GRADIENT_BATCH_TOKENS = 256  # few, as activations and logits of a batch are in memory until its backward pass
ABLATION_TOKENS = 2048  # each head costs one more forward pass over these
QUICK_ABLATION_TOKENS = 256  # where importance is "auto", so that ablation was not requested by name


@dataclass(frozen=True, slots=True, eq=False)
class Probes:
    """The probes of one model; `left_out` collects the reason for each probe that was not possible."""

    settings: Settings
    loaded: LoadedModel
    reader: Reader
    report: ProgressCallback
    left_out: list[Reason] = field(default_factory=list)

    def head_projections(self, model: nn.Module) -> dict[AttentionSite, HeadProjections]:
        batch = next(iter(self.reader.batches()))
        short_batch = dataclasses.replace(batch, ids=batch.ids[:1, :16], mask=batch.mask[:1, :16])
        projections = find_projections(model, lambda: self.reader.call(short_batch, model))
        layers = self.settings.layers
        return {site: x for site, x in projections.items() if layers is None or site.layer in layers}

    def watched(
        self, model: nn.Module, batches: list[Batch], collector: Collector, step: str, statistics: Any = False
    ) -> Observations:
        """Run a model over some batches with a collector, and report progress."""
        total = sum(batch.tokens for batch in batches)
        session = observe(model, layers=self.settings.layers, statistics=statistics, collect=[collector])
        done = 0
        self.report(Progress(step, done, total, "tokens"))
        with session:
            for batch in batches:
                session.metadata = self.reader.metadata(batch)
                self.reader.call(batch, model)
                done += batch.tokens
                self.report(Progress(step, done, total, "tokens"))
        return session.observations

    def watched_sample(self, sample: TokenSample, hashes: Tensor | None) -> Observations:
        """Run the model with a token sample, over the batches that contain one of the tokens with these hashes.

        `hashes` are those of `token_hashes`; None runs all batches.
        """
        batches = [batch for batch in self.reader.batches() if hashes is None or self._has(batch, sample.seed, hashes)]
        return self.watched(self.loaded.model, batches, sample, "compare heads across layers")

    def _has(self, batch: Batch, seed: int, hashes: Tensor) -> bool:
        non_padding = batch.mask.bool()
        batch_hashes = token_hashes(self.reader.metadata(batch), non_padding, seed)[non_padding]
        return bool(torch.isin(batch_hashes, hashes).any())

    def examples(self) -> tuple[Example, ...]:
        """Return all attention weights of a few short excerpts."""
        batches, weights = example_batches(self.reader), ExampleWeights()
        self.watched(self.loaded.model, batches, CallRecorder(weights.record), "collect examples")
        return examples_of(self.reader, batches, weights)

    def distances(self) -> dict[AttentionSite, Tensor]:
        """Return the attention distance of every pair of heads of each site, over few tokens: every pair costs time."""
        batches = self.reader.some_batches(DISTANCE_TOKENS)
        observations = self.watched(self.loaded.model, batches, AttentionDistances(), "compare attention of heads")
        states = states_of(observations.collected, "distances", SiteDistances)
        return {site: state.compute() for site, state in states.items()}

    def repeated(self, model: nn.Module) -> dict[AttentionSite, HeadEvidence] | None:
        tokenizer, context = self.loaded.tokenizer, self.reader.text.length
        special, words = special_tokens(tokenizer), len(ordinary_words(self.reader.classes))
        room = (context - len(special.before) - len(special.after)) // 2
        if min(room, words) < min(BLOCKS):
            self.left_out.append(Reason("repeated_words", {"least": min(BLOCKS), "room": room, "words": words}))
            return None
        batches = list(repeated_batches(tokenizer, self.reader.classes, seed=self.settings.seed, context=context))
        observations = self.watched(model, batches, EvidenceCollector(only="pairs"), "read repeated words")
        return evidence_of(observations.collected)

    def pronouns(self) -> dict[str, PronounTable]:
        """Return the pronoun scores, from sentences in the languages that the tokenizer knows.

        There is one table for each cue by which a sentence can be understood ("gender", "number", "meaning"), and one,
        "agreement", for gender and number together; cues with fewer than two sentence templates have none. There is no
        baseline with random weights, as chance is known exactly here.
        """
        tokenizer = self.loaded.tokenizer
        by_language = [pronoun_sentences(language) for language in LANGUAGES]
        known = [listed for listed in by_language if knows(tokenizer, "\n".join(x.text for x in listed))]
        sentences = [sentence for listed in known for sentence in listed]
        try:
            texts = pronoun_texts(sentences, tokenizer, longest=self.reader.text.length)
        except PolyheadError as error:
            self.left_out.append(Reason("pronoun_error", {"error": str(error)}))
            return {}
        if len(set(texts.frames)) < 2:
            sizes = {"sentences": sum(map(len, by_language)), "readable": len(texts.contexts)}
            self.left_out.append(Reason("pronoun_sentences", {**sizes, "context": self.reader.text.length}))
            return {}
        if self.loaded.kind in ("causal", "decoder"):
            texts = texts.without_endings()
        batches, step = self.reader.batches_of(texts.contexts), "read sentences with pronouns"
        observations = self.watched(self.loaded.model, batches, texts.collector(), step)
        tables: dict[str, PronounTable] = {}
        cues_of: dict[str, tuple[Cue, ...]] = {"agreement": AGREEMENT, **{cue: (cue,) for cue in CUES}}
        for name, cues in cues_of.items():
            frames = {frame for frame, cue in zip(texts.frames, texts.cues, strict=True) if cue in cues}
            if len(frames) > 1:
                tables[name] = pronoun_table(observations, texts, cues)
        return tables

    def chance(self) -> tuple[HeadRoles, ...]:
        """Return roles in a model of the same config with random weights: the baseline for the roles of the model."""
        model = random_twin(self.loaded.model, self.settings.seed)
        # Whole contexts, as the weight on a position depends on the length.
        batches = self.reader.whole_batches(CHANCE_TOKENS)
        collector = EvidenceCollector(rare=rare_tokens(self.reader.counts), only="rows")
        observations = self.watched(model, batches, collector, "observe a model with random weights", ROW_STATISTICS)
        model.to("meta")  # its sessions are reference cycles, which would keep its weights in memory for a while
        return head_roles(evidence_of(observations.collected), seed=self.settings.seed)

    def direct_logits(self, head_projections: Mapping[AttentionSite, HeadProjections]) -> DirectLogits | None:
        """Return the path from head outputs to logits, for the roles copy and anti-copy."""
        if self.loaded.kind != "causal" or not head_projections:
            return None
        model, batch = self.loaded.model, next(iter(self.reader.batches()))
        inputs = {"input_ids": batch.ids[:1, :16], "attention_mask": batch.mask[:1, :16]}
        inputs = {name: x.to(next(model.parameters()).device) for name, x in inputs.items()}
        direct_logits = find_direct_logits(model, lambda: model(**inputs, use_cache=False), head_projections)
        if direct_logits is None or not direct_logits.outputs:
            self.left_out.append(Reason("direct_logits"))
        return direct_logits

    def copying_circuits(
        self, head_projections: Mapping[AttentionSite, HeadProjections]
    ) -> dict[AttentionSite, dict[str, Tensor]]:
        """Return the copying scores of a causal model's OV circuits; none if embedding and unembedding do not match."""
        embedding, unembedding = embedding_of(self.loaded.model), _unembedding(self.loaded.model)
        if self.loaded.kind != "causal" or embedding is None or unembedding is None:
            return {}
        if embedding.shape != unembedding.shape:
            return {}
        columns, words = {}, Words(embedding, unembedding, seed=self.settings.seed)
        for site, matrices in head_projections.items():
            if matrices.value is None or matrices.output is None or matrices.value.shape[1] != words.width:
                continue
            copying = copying_scores(matrices.value, matrices.output, words)
            columns[site] = {
                "copying_circuit_score": copying.score,
                "copying_circuit_score_error": copying.error,
                "copying_circuit_score_chance": torch.full_like(copying.score, copying.null),
            }
        return columns

    def importance(self) -> tuple[Importance | None, dict[str, int]]:
        """Return the importance of every head, and the number of tokens and the context length it was measured on."""
        method, kind = self.settings.importance, self.loaded.kind
        loss = {"causal": "language", "masked": "masked"}.get(kind, "representation")
        if method == "none":
            return None, {}
        if method == "auto":
            if kind == "encoder-decoder":
                self.left_out.append(Reason("two_stacks"))
                return None, {}
            if loss == "masked" and self.loaded.tokenizer.mask_token_id is None:
                self.left_out.append(Reason("no_mask_token"))
                return None, {}
            method = "ablation" if loss == "representation" else "gradient"
        device = next(self.loaded.model.parameters()).device
        ablation_tokens = QUICK_ABLATION_TOKENS if self.settings.importance == "auto" else ABLATION_TOKENS
        tokens = self.settings.importance_tokens or (GRADIENT_TOKENS if method == "gradient" else ablation_tokens)
        batches = [
            dataclasses.replace(batch, documents=self.reader.documents_of(batch)).to(device)
            for batch in self.reader.some_batches(
                tokens, batch_tokens=None if method == "ablation" else GRADIENT_BATCH_TOKENS
            )
        ]
        measures: dict[str, tuple[Callable[..., Importance], str]] = {
            "gradient": (gradient_scores, "compute the gradient of every head"),
            "ablation": (ablate, "ablate every head in turn"),
        }
        by_method = []
        for measure, step in measures.values() if method == "both" else (measures[method],):
            self.report(Progress(step, unit="runs"))
            importance = measure(
                self.loaded.model,
                batches,
                Masked(self.loaded.tokenizer.mask_token_id, seed=self.settings.seed) if loss == "masked" else loss,
                layers=self.settings.layers,
                progress=lambda done, total, step=step: self.report(Progress(step, done, total, "runs")),
            )
            by_method.append(importance)
        longest = max(batch.ids.shape[1] for batch in batches)  # `some_batches` may cut contexts
        measured = {"importance_tokens": sum(batch.tokens for batch in batches), "importance_context": longest}
        return functools.reduce(Importance.beside, by_method), measured


def check_importance(method: str, loaded: LoadedModel) -> None:
    """Raise an OptionError if importance cannot be measured as requested; "auto" measures what is possible."""
    if method in ("none", "auto"):
        return
    name = type(loaded.model).__name__
    if loaded.kind == "encoder-decoder":
        raise OptionError(
            f"importance is measured in models of one stack, got {name}; use importance none or auto, or "
            "polyhead.analysis.importance.ablate with batches that have decoder_input_ids"
        )
    if method != "ablation" and loaded.kind not in ("causal", "masked"):
        raise OptionError(
            f"importance by gradient needs a model with a language modelling head, for its loss, got {name}; "
            "use importance ablation"
        )
    if loaded.kind == "masked" and loaded.tokenizer.mask_token_id is None:
        raise OptionError(
            f"importance in a masked language model needs a tokenizer with a mask token, for its loss, got {name} with "
            f"{type(loaded.tokenizer).__name__}, which has none; use importance none or auto"
        )


def embedding_of(model: Any) -> Tensor | None:
    """Return the input embedding, [vocabulary, width]; None if the model has none."""
    embedding = model.get_input_embeddings()
    return embedding.weight.detach() if isinstance(embedding, nn.Embedding) else None


def _unembedding(model: Any) -> Tensor | None:
    unembedding = model.get_output_embeddings()
    return None if unembedding is None else unembedding.weight.detach()


def random_twin(model: Any, seed: int) -> nn.Module:
    """Return a model of the same config with freshly initialised weights."""
    parameter = next(model.parameters())
    before = torch.get_default_dtype()
    config = copy.deepcopy(model.config)
    if hasattr(config, IN_CONFIG):  # heads of a random model have no originals
        delattr(config, IN_CONFIG)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(parameter.dtype)
        try:
            twin: nn.Module = type(model)(config)
        finally:
            torch.set_default_dtype(before)
    return twin.to(parameter.device).eval()
