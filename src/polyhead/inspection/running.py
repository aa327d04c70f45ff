"""The steps of an inspection, one after the other: the text, repeated words, chance, pairs of layers, importance."""

from __future__ import annotations

import copy
import dataclasses
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.analysis.importance import Importance, ablate, gradient_scores
from polyhead.analysis.roles import HeadRoles, evidence_of, head_roles
from polyhead.analysis.roles_copying import Copying, copying_scores
from polyhead.errors import OptionError, PolyheadError
from polyhead.inspection import across, within
from polyhead.inspection.files import OBSERVATIONS
from polyhead.inspection.findings import findings
from polyhead.inspection.reading import Reader
from polyhead.inspection.result import Inspection
from polyhead.inspection.settings import Progress, Report, Settings
from polyhead.observatory import (
    AttentionDistances,
    AttentionMaps,
    AttentionSite,
    Contributions,
    Gatherer,
    Observations,
    Session,
    Wiring,
    find_wiring,
    load,
    observe,
    read_facts,
    save,
)
from polyhead.observatory.distances import SiteDistances
from polyhead.observatory.evidence import EvidenceGatherer
from polyhead.observatory.evidence_tokens import Meaning, rare_tokens
from polyhead.observatory.token_sample import TokenSample
from polyhead.sources import Batch, LoadedModel, load_model
from polyhead.sources.probes import repeated_batches
from polyhead.version import VERSION

CHANCE_TOKENS = 1024  # that a model with random weights reads
DISTANCE_TOKENS = 512
GRADIENT_TOKENS = 8192
ABLATION_TOKENS = 256  # every head costs one more reading of these
SAVE_SECONDS = 30.0
UNSEEN = (
    "what heads write, which say the same, copying and importance: the weights that the model itself returns do not "
    "tell what is done with them"
)


def inspect_model(
    settings: Settings,
    *,
    folder: Path | None = None,
    resume: bool = False,
    report: Report = lambda progress: None,
    save_seconds: float = SAVE_SECONDS,
    loaded: LoadedModel | None = None,
) -> Inspection:
    """Run an inspection.

    Args:
        settings: what to look at.
        folder: where to keep what was gathered, from time to time and when the text is read, so that a run that was
            killed can go on.
        resume: go on from there.
        report: called with how far each step is.
        save_seconds: how long a run gathers before it writes to the folder again.
        loaded: a model that is loaded already.

    An interrupt (Ctrl-C) ends the reading: what was gathered until then is the result, and it says so.
    """
    began = time.perf_counter()
    report(Progress("load the model", 0, None))
    loaded = loaded or load_model(
        settings.model,
        device=settings.device,
        dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
        allow_pickle=settings.allow_pickle,
        trust_remote_code=settings.trust_remote_code,
    )
    run = _Run(settings, loaded, Reader.of(loaded, settings), folder, report, save_seconds)
    return run.run(resume, began)


@dataclass(eq=False)
class _Run:
    settings: Settings
    loaded: LoadedModel
    reader: Reader
    folder: Path | None
    report: Report
    save_seconds: float
    interrupted: bool = False
    left_out: list[str] = field(default_factory=list)
    across: str | None = None  # how pairs of different layers were found

    def run(self, resume: bool, began: float) -> Inspection:
        wiring = self.wiring(self.loaded.model)
        sample = across.sample_of(wiring, self.settings.seed)
        observations = self.text(sample, resume)
        table = observations.table()
        found: dict[str, Any] = {}
        matrices, columns = within.relations_of(observations.gathered, wiring)
        roles: tuple[HeadRoles, ...] = ()
        if not self.interrupted:
            try:
                found, roles = self.rest(observations, wiring, sample, matrices)
            except KeyboardInterrupt:
                self.interrupted = True
        importance: Importance | None = found.pop("importance", None)
        matrices = within.with_more(matrices, found.pop("distances", {}), importance)
        inspection = Inspection(
            self.settings,
            {**self.facts(observations, began), "loss": None if importance is None else importance.loss},
            within.widened(table, columns, importance),
            roles,
            relations=matrices,
            **found,
        )
        return dataclasses.replace(inspection, findings=findings(inspection))

    def rest(
        self,
        observations: Observations,
        wiring: Mapping[AttentionSite, Wiring],
        sample: TokenSample | None,
        matrices: Mapping[AttentionSite, Mapping[str, Tensor]],
    ) -> tuple[dict[str, Any], tuple[HeadRoles, ...]]:
        found: dict[str, Any] = {}
        found["distances"] = self.distances()
        repeated = self.repeated(self.loaded.model)
        reference: tuple[HeadRoles, ...] = ()
        if self.settings.chance:
            reference, null = self.chance()
            found |= within.groups_of(matrices, null)
        roles = head_roles(
            evidence_of(observations.gathered),
            repeated,
            copying=self.copying(wiring),
            reference=reference,
            seed=self.settings.seed,
        )
        if sample is not None:
            found["pairs"] = across.pairs(observations.gathered, sample, wiring, self.watched_sample)
            self.across = across.rule(sample)
        found["importance"] = self.importance()
        return found, roles

    # ---- what the model is made of

    def wiring(self, model: nn.Module) -> dict[AttentionSite, Wiring]:
        if self.settings.via_weights:
            return {}  # its modules are not known, only their weights
        batch = next(self.reader.batches())
        few = dataclasses.replace(batch, ids=batch.ids[:1, :16], mask=batch.mask[:1, :16])
        found = find_wiring(model, lambda: self.reader.call(few, model))
        chosen = self.settings.layers
        return {site: x for site, x in found.items() if chosen is None or site.layer in chosen}

    # ---- reading

    def text(self, sample: TokenSample | None, resume: bool) -> Observations:
        gatherers: list[Gatherer] = [AttentionMaps(self.reader.context), Contributions(), self.evidence()]
        gatherers += [] if sample is None else [sample]
        if self.settings.via_weights:
            self.left_out.append(UNSEEN)
        session = observe(
            self.loaded.model,
            layers=self.settings.layers,
            statistics=self.settings.statistics,
            gather=gatherers,
            via_weights=self.settings.via_weights,
        )
        start, digest, done = 0, None, 0
        if resume:
            start, digest, done = self.go_on(session, gatherers)
        report, total = self.report, self.reader.tokens
        report(Progress("read the text", done, total))
        saved = time.monotonic()
        with session:
            try:
                for batch in self.reader.batches(start, digest):
                    session.notes = self.reader.notes(batch)
                    self.reader.call(batch)
                    done += batch.tokens
                    start, digest = batch.index + 1, batch.digest
                    report(Progress("read the text", done, total))
                    if self.folder is not None and time.monotonic() - saved >= self.save_seconds:
                        self.keep(session.observations, start, digest, done)
                        saved = time.monotonic()
            except KeyboardInterrupt:
                self.interrupted = True
        observations = session.observations
        if self.folder is not None:
            self.keep(observations, start, digest, done)
        if not len(observations.sites) and not len(observations.gathered):
            raise OptionError("an inspection needs one batch at least, and was interrupted before the first was read")
        return observations

    def keep(self, observations: Observations, batches: int, digest: str | None, tokens: int) -> None:
        assert self.folder is not None
        facts = {"settings": self.settings.to_dict(), "batches": batches, "digest": digest, "tokens": tokens}
        save(self.folder / OBSERVATIONS, observations, facts)

    def go_on(self, session: Session, gatherers: list[Gatherer]) -> tuple[int, str | None, int]:
        assert self.folder is not None
        path = self.folder / OBSERVATIONS
        if not path.exists():
            return 0, None, 0  # it was killed before it had written anything
        facts = read_facts(path)
        session.go_on_from(load(path, gatherers))
        return facts["batches"], facts["digest"], facts["tokens"]

    def evidence(self) -> EvidenceGatherer:
        embedding = _embedding(self.loaded.model)
        meaning = None if embedding is None else Meaning.of(embedding, seed=self.settings.seed)
        return EvidenceGatherer(rare=rare_tokens(self.reader.counts), meaning=meaning)

    def watched(self, model: nn.Module, batches: list[Batch], gather: list[Gatherer], step: str) -> Observations:
        """A short step: some batches, read by a model, for some gatherers."""
        total = sum(batch.tokens for batch in batches)
        session = observe(
            model,
            layers=self.settings.layers,
            statistics=False,
            gather=gather,
            via_weights=self.settings.via_weights,
        )
        done = 0
        self.report(Progress(step, done, total))
        with session:
            for batch in batches:
                session.notes = self.reader.notes(batch)
                self.reader.call(batch, model)
                done += batch.tokens
                self.report(Progress(step, done, total))
        return session.observations

    def watched_sample(self, sample: TokenSample) -> Observations:
        return self.watched(self.loaded.model, list(self.reader.batches()), [sample], "compare heads across layers")

    def distances(self) -> dict[AttentionSite, Tensor]:
        """How differently the heads of a layer look, at the beginnings of some texts: every pair is one more look."""
        batches = self.reader.some_batches(DISTANCE_TOKENS)
        gathered = self.watched(self.loaded.model, batches, [AttentionDistances()], "compare where heads look").gathered
        found = {site: values.get("distances") for site, values in gathered.items()}
        return {site: x.compute() for site, x in found.items() if isinstance(x, SiteDistances)}

    def repeated(self, model: nn.Module) -> Any:
        try:
            batches = list(
                repeated_batches(self.loaded.tokenizer, seed=self.settings.seed, context=self.reader.context)
            )
        except PolyheadError as error:
            self.left_out.append(f"induction and duplicate-token: {error}")
            return None
        step = "read repeated words"
        return evidence_of(self.watched(model, batches, [EvidenceGatherer()], step).gathered)

    def chance(self) -> tuple[tuple[HeadRoles, ...], dict[AttentionSite, Tensor]]:
        """The same of a model of the same layout with random weights: what layout and text alone bring about."""
        model = _random_twin(self.loaded.model, self.settings.seed)
        wiring = self.wiring(model)
        batches = self.reader.some_batches(CHANCE_TOKENS)
        gather: list[Gatherer] = [Contributions(), EvidenceGatherer(rare=rare_tokens(self.reader.counts))]
        observations = self.watched(model, batches, gather, "watch a model with random weights")
        reference = head_roles(evidence_of(observations.gathered), seed=self.settings.seed)
        matrices, _ = within.relations_of(observations.gathered, wiring)
        return reference, {site: found["cosine"] for site, found in matrices.items() if "cosine" in found}

    def copying(self, wiring: Mapping[AttentionSite, Wiring]) -> dict[AttentionSite, Copying]:
        """Only where the model predicts tokens with what its heads write."""
        embedding, unembedding = _embedding(self.loaded.model), _unembedding(self.loaded.model)
        if embedding is None or unembedding is None or embedding.shape != unembedding.shape:
            return {}
        found = {}
        for site, matrices in wiring.items():
            if matrices.value is None or matrices.output is None or matrices.value.shape[1] != embedding.shape[1]:
                continue
            value = matrices.value.repeat_interleave(site.num_heads // matrices.value.shape[0], 0)
            found[site] = copying_scores(value, matrices.output, embedding, unembedding, seed=self.settings.seed)
        return found

    # ---- importance

    def importance(self) -> Importance | None:
        wanted, kind = self.settings.importance, self.loaded.kind
        loss = {"causal": "language", "masked": "masked"}.get(kind, "representation")
        if wanted == "none" or self.settings.via_weights or (kind == "encoder-decoder" and wanted == "auto"):
            return None
        if wanted == "auto":
            wanted = "ablation" if loss == "representation" else "gradient"
        step = "take out every head in turn" if wanted == "ablation" else "follow the gradient of every head"
        measure: Callable[..., Importance] = ablate if wanted == "ablation" else gradient_scores
        device = next(self.loaded.model.parameters()).device
        tokens = ABLATION_TOKENS if wanted == "ablation" else GRADIENT_TOKENS
        batches = [batch.to(device) for batch in self.reader.some_batches(tokens)]
        return measure(
            self.loaded.model,
            batches,
            _loss(loss, self.loaded.tokenizer, self.settings.seed),
            layers=self.settings.layers,
            progress=lambda done, total: self.report(Progress(step, done, total, "runs")),
        )

    # ---- what is said of the run

    def facts(self, observations: Observations, began: float) -> dict[str, Any]:
        tokens = max((int(x.compute()["tokens"].max()) for x in observations.sites), default=0)
        return {
            "model": str(self.loaded),
            "kind": self.loaded.kind,
            "documents": len(self.reader.documents),
            "contexts": len(self.reader.contexts),
            "context": self.reader.context,
            "tokens": tokens,
            "unknown": self.reader.unknown,
            "intervals_over": "contexts" if self.reader.counts_contexts else "documents",
            "pairs_by": self.across,
            "interrupted": self.interrupted,
            "left_out": list(self.left_out),
            "seconds": round(time.perf_counter() - began, 1),
            "versions": {
                "polyhead": VERSION,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }


def _loss(name: str, tokenizer: Any, seed: int) -> Any:
    from polyhead.analysis.importance import Masked

    return Masked(tokenizer.mask_token_id, seed=seed) if name == "masked" else name


def _embedding(model: Any) -> Tensor | None:
    found = model.get_input_embeddings()
    return found.weight.detach() if isinstance(found, nn.Embedding) else None


def _unembedding(model: Any) -> Tensor | None:
    found = model.get_output_embeddings()
    return None if found is None else found.weight.detach()


def _random_twin(model: Any, seed: int) -> nn.Module:
    """A model of the same configuration, as it is before any training."""
    parameter = next(model.parameters())
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(parameter.dtype)
        try:
            twin: nn.Module = type(model)(copy.deepcopy(model.config))
        finally:
            torch.set_default_dtype(before)
    return twin.to(parameter.device).eval()
