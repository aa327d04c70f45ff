"""Run the model over the text and the probes, and assemble the result."""

from __future__ import annotations

import dataclasses
import gc
import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.importance import Importance
from polyhead.analysis.pronouns import PronounTable
from polyhead.analysis.roles import HeadRoles, evidence_of, head_roles
from polyhead.analysis.roles_rules import RULES
from polyhead.errors import NonFiniteError, OptionError
from polyhead.inspection import cross_layer_similarity, layer_similarity
from polyhead.inspection.document_influence import halves_of, influence_of
from polyhead.inspection.findings import findings
from polyhead.inspection.head_maps import head_maps_of
from polyhead.inspection.most_attended import most_frequent, top_keys_of
from polyhead.inspection.probing import Probes, embedding_of
from polyhead.inspection.result import Inspection
from polyhead.inspection.run_files import OBSERVATIONS
from polyhead.inspection.settings import Settings
from polyhead.inspection.text_reader import Reader
from polyhead.inspection.wording import Reason
from polyhead.observation import (
    AttentionMaps,
    AttentionSite,
    Collector,
    Contributions,
    HeadProjections,
    Observations,
    Session,
    load,
    observe,
    read_facts,
    save,
)
from polyhead.observation.direct_logits import DirectLogits
from polyhead.observation.document_sums import DocumentSums
from polyhead.observation.origins import is_edited
from polyhead.observation.role_evidence import EvidenceCollector
from polyhead.observation.role_evidence_tokens import TokenVectors, rare_tokens
from polyhead.observation.token_sample import TokenSample
from polyhead.progress import Progress, ProgressCallback, ignore_progress
from polyhead.sources import LoadedModel
from polyhead.sources.fingerprint import model_digest
from polyhead.sources.segments import Segments
from polyhead.sources.text_contexts import Text
from polyhead.version import VERSION

SAVE_SECONDS = 30.0
# Settings on which the collected data depends; a run is resumed only if they are unchanged.
COLLECTED_BY = (
    "context", "tokens", "batch_tokens", "layers", "statistics", "via_weights", "seed", "device", "dtype"
)  # fmt: skip


def run_inspection(
    settings: Settings,
    loaded: LoadedModel,
    *,
    text: Text = None,
    folder: Path | None = None,
    resume: bool = False,
    progress: ProgressCallback = ignore_progress,
    save_seconds: float = SAVE_SECONDS,
) -> Inspection:
    """Inspect a loaded model; `polyhead.inspect` documents the arguments. The caller holds the lock of `folder`."""
    began = time.perf_counter()
    if settings.importance in ("gradient", "both") and loaded.kind not in ("causal", "masked"):
        raise OptionError(
            "importance by gradient needs a model with a language modelling head, for its loss, got "
            f"{type(loaded.model).__name__}; use importance ablation"
        )
    probes = Probes(settings, loaded, Reader.of(loaded, settings, text), progress)
    run = _Run(settings, loaded, probes.reader, probes, folder, progress, save_seconds)
    return run.run(resume, began)


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Observations of the complete batches so far; one immutable value, so that an interrupt never splits it."""

    observations: Observations
    batches: int = 0
    digest: str | None = None  # of these batches
    tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Probed:
    """Results of the probes: fields of the inspection, and what extends its table and its matrices."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    distances: Mapping[AttentionSite, Tensor] = field(default_factory=dict)
    pronouns: Mapping[str, PronounTable] = field(default_factory=dict)


@dataclass(eq=False)
class _Run:
    """One run of `inspect`: the pass over the text, the probes, and the facts about both."""

    settings: Settings
    loaded: LoadedModel
    reader: Reader
    probes: Probes
    folder: Path | None
    report: ProgressCallback
    save_seconds: float
    interrupted: bool = False
    across: Reason | None = None  # method by which pairs of different layers were found
    read_digest: str | None = None  # of the text that was read

    def run(self, resume: bool, began: float) -> Inspection:
        head_projections = self.probes.head_projections(self.loaded.model)
        sample = cross_layer_similarity.sample_of(head_projections, self.settings.seed)
        observations = self.text(sample, self.probes.direct_logits(head_projections), resume)
        if non_finite := layer_similarity.non_finite_heads(observations.collected):
            self.probes.left_out.append(Reason("non_finite", {"heads": non_finite}))
        matrices, output_columns = layer_similarity.relations_of(observations.collected, head_projections)
        predictable, few = layer_similarity.add_predictable_shares(
            observations.collected, head_projections, matrices, output_columns
        )
        if few is not None:
            self.probes.left_out.append(few)
        spectra = layer_similarity.spectra_of(head_projections)
        columns = [
            layer_similarity.text_columns(observations.collected),
            layer_similarity.circuit_columns(spectra),
            output_columns,
        ]
        probed = _Probed()
        importance, measured = None, dict[str, int]()
        if not self.interrupted:
            try:
                probed = self.probe(observations, head_projections, sample)
                columns.append(self.probes.copying_circuits(head_projections))
                columns.append(layer_similarity.pronoun_columns(probed.pronouns, evidence_of(observations.collected)))
                columns.append(layer_similarity.role_columns(probed.fields.get("roles", ())))
                try:
                    importance, measured = self.probes.importance()
                except NonFiniteError as error:
                    self.probes.left_out.append(Reason("importance_error", {"error": str(error)}))
            except KeyboardInterrupt:
                self.interrupted = True
        table = layer_similarity.extend_table(observations.profile, columns, importance)
        inspection = Inspection(
            self.settings,
            {**self.facts(observations, began), "importance_tokens": None, **measured, **_loss_facts(importance)},
            table,
            relations=layer_similarity.extend_matrices(matrices, probed.distances, importance),
            head_maps=head_maps_of(observations.collected),
            top_keys=top_keys_of(observations.collected, self.loaded.tokenizer, self.reader.counts),
            spectra=spectra,
            influence=influence_of(observations.collected, importance, table),
            halves={
                site: {**of_site, **predictable.get(site, {})}
                for site, of_site in halves_of(observations.collected, importance, table).items()
            },
            **probed.fields,
        )
        return dataclasses.replace(inspection, findings=findings(inspection))

    def probe(
        self,
        observations: Observations,
        head_projections: Mapping[AttentionSite, HeadProjections],
        sample: TokenSample | None,
    ) -> _Probed:
        probes = self.probes
        fields: dict[str, Any] = {"examples": probes.examples()}
        distances, repeated = probes.distances(), probes.repeated(self.loaded.model)
        reference: tuple[HeadRoles, ...] = ()
        if self.settings.chance:
            reference = probes.chance()
            gc.collect()  # the sessions of the random model are reference cycles, which keep it in memory
        pronouns = probes.pronouns()
        fields["roles"] = head_roles(
            evidence_of(observations.collected),
            repeated,
            pronouns=pronouns,
            reference=reference,
            seed=self.settings.seed,
        )
        if sample is not None:
            fields["pairs"] = cross_layer_similarity.pairs(
                observations.collected, sample, head_projections, probes.watched_sample
            )
            self.across = cross_layer_similarity.method(sample)
        return _Probed(fields, distances, pronouns)

    # ---- the pass over the text

    def text(self, sample: TokenSample | None, direct_logits: DirectLogits | None, resume: bool) -> Observations:
        """Read the text, or the rest of it; save the observations periodically, and after an error or an interrupt."""
        collectors: list[Collector] = [AttentionMaps(self.reader.text.length), Contributions()]
        collectors += [
            self.evidence(direct_logits),
            DocumentSums(),
            most_frequent(self.reader.counts),
            *([] if sample is None else [sample]),
        ]
        if self.settings.via_weights:
            self.probes.left_out.append(Reason("returned_weights"))
        if len(self.reader.contexts) == 1:
            on_text = ", ".join(role for role, rule in RULES.items() if rule.source == "text")
            self.probes.left_out.append(Reason("one_context", {"roles": on_text}))
        session = observe(
            self.loaded.model,
            layers=self.settings.layers,
            statistics=self.settings.statistics,
            collect=collectors,
            via_weights=self.settings.via_weights,
        )
        if self.folder is not None:
            _ = self.origin  # computed now, while memory is available
        read = self.resumed(session, collectors) if resume else _Read(session.observations)
        saved_batches, report, total = read.batches, self.report, self.reader.text.tokens
        report(Progress("read the text", read.tokens, total, "tokens"))
        saved = time.monotonic()
        with session:
            try:
                for batch in self.reader.batches(read.batches, read.digest):
                    session.metadata = self.reader.metadata(batch)
                    self.reader.call(batch)
                    read = _Read(session.observations, batch.index + 1, batch.digest, read.tokens + batch.tokens)
                    report(Progress("read the text", read.tokens, total, "tokens"))
                    if self.folder is not None and time.monotonic() - saved >= self.save_seconds:
                        self.keep(read)
                        saved_batches, saved = read.batches, time.monotonic()
            except KeyboardInterrupt:
                self.interrupted = True
            except BaseException:  # an error of the model, out of memory, termination from outside
                if self.folder is not None and read.batches > saved_batches:
                    self.keep(read)
                raise
        if not read.batches:
            raise OptionError("an inspection needs at least one batch, got an interrupt before the first was complete")
        if self.folder is not None:
            self.keep(read)
        self.read_digest = read.digest if self.interrupted else self.reader.text.digest
        return read.observations

    def keep(self, read: _Read) -> None:
        assert self.folder is not None
        facts = {"batches": read.batches, "digest": read.digest, "tokens": read.tokens, **self.origin}
        save(self.folder / OBSERVATIONS, read.observations, {"settings": self.settings.to_dict(), **facts})

    @cached_property
    def origin(self) -> dict[str, str]:
        """Fingerprints of the model and the text."""
        return {"model": model_digest(self.loaded.model), "text": self.reader.text.digest}

    def resumed(self, session: Session, collectors: list[Collector]) -> _Read:
        assert self.folder is not None
        path = self.folder / OBSERVATIONS
        if not path.exists():
            return _Read(session.observations)  # killed before the first write
        facts = read_facts(path)
        if any(name not in facts for name in self.origin):
            raise OptionError(
                f"a run is resumed if it recorded its model and text, got {path} of an older version, which may have "
                "counted a batch twice; start again in another folder"
            )
        now = json.loads(json.dumps(self.settings.to_dict()))
        changed = [name for name in COLLECTED_BY if facts["settings"].get(name) != now[name]]
        if changed:
            got = ", ".join(f"{name} {now[name]} for {facts['settings'].get(name)}" for name in changed)
            raise OptionError(f"a run must be resumed with the settings it was started with, got {got}")
        if facts["model"] != self.origin["model"]:
            raise OptionError(
                f"a run must be resumed with the model it was started with, got {self.loaded.name} with other weights "
                "or another config; start again in another folder"
            )
        if facts["text"] != self.origin["text"]:
            raise OptionError(
                "a run must be resumed with the text, tokenizer and batch size it was started with, got another text; "
                "start again in another folder"
            )
        session.resume_from(load(path, collectors))
        return _Read(session.observations, facts["batches"], facts["digest"], facts["tokens"])

    def evidence(self, direct_logits: DirectLogits | None) -> EvidenceCollector:
        embedding = embedding_of(self.loaded.model)
        meaning = None
        if embedding is not None and bool(embedding.isfinite().all()):
            meaning = TokenVectors.of(embedding, seed=self.settings.seed)
        segments = Segments.of(self.loaded.tokenizer, self.reader.classes)
        rare = rare_tokens(self.reader.counts)
        return EvidenceCollector(rare=rare, meaning=meaning, segments=segments, direct_logits=direct_logits)

    # ---- facts of the run

    def facts(self, observations: Observations, began: float) -> dict[str, Any]:
        tokens = max((int(x.compute()["tokens"].max()) for x in observations.sites), default=0)
        return {
            "model": str(self.loaded),
            "name": self.settings.model or self.loaded.name,
            "kind": self.loaded.kind,
            **_sizes(self.loaded.model),
            "documents": len(self.reader.text.documents),
            "contexts": len(self.reader.contexts),
            "context": self.reader.text.length,
            "tokens": tokens,
            "text": self.read_digest,
            "unknown": self.reader.unknown,
            "intervals_over": "contexts" if self.reader.counts_contexts else "documents",
            "pairs_by": self.across,
            "chance": self.settings.chance,
            "interrupted": self.interrupted,
            "left_out": list(self.probes.left_out),
            "seconds": round(time.perf_counter() - began, 1),
            "versions": {
                "polyhead": VERSION,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }


def _loss_facts(importance: Importance | None) -> dict[str, Any]:
    """Return the loss by which importance was measured and, unless it is a change, its mean and sums by document."""
    if importance is None or importance.loss == "representation":
        return {"loss": importance and importance.loss}
    sums = torch.stack([importance.intact, importance.weights], -1)
    return {"loss": importance.loss, "mean_loss": importance.intact_loss, "document_losses": sums.tolist()}


def _sizes(model: Any) -> dict[str, Any]:
    """Return the facts by which two runs are known to be of the same model."""
    config = model.config.get_text_config()
    sizes = {name: getattr(config, name, None) for name in ("model_type", "hidden_size", "num_hidden_layers")}
    return {**sizes, "edited": is_edited(model)}
