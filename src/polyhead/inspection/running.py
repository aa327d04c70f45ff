"""Run the model over the text and the probes, and assemble the result."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.importance import Importance
from polyhead.analysis.pronouns import PronounTable
from polyhead.analysis.roles import HeadRoles, evidence_of, head_roles
from polyhead.analysis.roles_rules import RULES
from polyhead.errors import PolyheadError
from polyhead.inspection import cross_layer_similarity, layer_similarity
from polyhead.inspection.document_influence import halves_of, influence_of
from polyhead.inspection.findings import findings
from polyhead.inspection.head_maps import head_maps_of
from polyhead.inspection.matching import SIZES
from polyhead.inspection.most_attended import most_frequent, top_keys_of
from polyhead.inspection.probing import Probes, check_importance, embedding_of
from polyhead.inspection.result import Inspection
from polyhead.inspection.settings import Settings
from polyhead.inspection.text_pass import TextPass, TextRead, versions
from polyhead.inspection.text_reader import Reader
from polyhead.inspection.wording import Reason
from polyhead.observation import AttentionMaps, AttentionSite, Collector, Contributions, HeadProjections, Observations
from polyhead.observation.direct_logits import DirectLogits
from polyhead.observation.document_sums import DocumentSums
from polyhead.observation.origins import is_edited
from polyhead.observation.role_evidence import EvidenceCollector
from polyhead.observation.role_evidence_tokens import TokenVectors, rare_tokens
from polyhead.observation.token_sample import TokenSample
from polyhead.progress import ProgressCallback, ignore_progress
from polyhead.sources import LoadedModel
from polyhead.sources.segments import Segments
from polyhead.sources.text_contexts import Text


@dataclass(eq=False)
class InspectionRun:
    """One run of `inspect`: collectors for the text, the probes, and the result of both.

    `text_pass` reads the text, or a shard of it; `finish` takes the observations of the whole text.
    """

    settings: Settings
    loaded: LoadedModel
    reader: Reader
    probes: Probes
    head_projections: Mapping[AttentionSite, HeadProjections]
    sample: TokenSample | None
    text_pass: TextPass
    began: float
    interrupted: bool = False  # in the text or in the probes
    is_read: bool = True  # whether the text was read to its end
    pairs_by: Reason | None = None  # method by which pairs of heads of different layers were found
    read_digest: str | None = None  # of the text that was read

    @classmethod
    def of(
        cls, settings: Settings, loaded: LoadedModel, *, text: Text = None, progress: ProgressCallback = ignore_progress
    ) -> InspectionRun:
        """Cut the text and create the collectors; `polyhead.inspect` documents the arguments."""
        began = time.perf_counter()
        check_importance(settings.importance, loaded)
        reader = Reader.of(loaded, settings, text)
        probes = Probes(settings, loaded, reader, progress)
        head_projections = probes.head_projections(loaded.model)
        sample = cross_layer_similarity.sample_of(head_projections, settings.seed)
        collectors = _collectors(settings, loaded, reader, probes.direct_logits(head_projections), sample)
        if len(reader.contexts) == 1:
            on_text = ", ".join(role for role, rule in RULES.items() if rule.source == "text")
            probes.left_out.append(Reason("one_context", {"roles": on_text}))
        text_pass = TextPass(settings, loaded, reader, collectors)
        return cls(settings, loaded, reader, probes, head_projections, sample, text_pass, began)

    def finish(self, read: TextRead) -> Inspection:
        """Run the probes, unless the pass over the text was interrupted, and assemble the result."""
        self.interrupted, self.is_read = not read.complete, read.complete
        self.read_digest = self.reader.text.digest if self.is_read else read.digest
        observations, head_projections = read.observations, self.head_projections
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
        fields, distances = dict[str, Any](), dict[AttentionSite, Tensor]()
        importance, measured = None, dict[str, int]()
        if not self.interrupted:
            try:
                fields, distances, pronouns = self.probe(observations)
                columns.append(self.probes.copying_circuits(head_projections))
                columns.append(layer_similarity.pronoun_columns(pronouns, evidence_of(observations.collected)))
                columns.append(layer_similarity.role_columns(fields["roles"]))
                try:
                    importance, measured = self.probes.importance()
                except PolyheadError as error:  # the pass over the text is not lost
                    self.probes.left_out.append(Reason("importance_error", {"error": str(error)}))
            except KeyboardInterrupt:
                self.interrupted = True
                self.probes.left_out.append(Reason("interrupted_probes"))
        table = layer_similarity.extend_table(observations.profile, columns, importance)
        inspection = Inspection(
            self.settings,
            {**self.facts(observations), "importance_tokens": None, **measured, **_loss_facts(importance)},
            table,
            relations=layer_similarity.extend_matrices(matrices, distances, importance),
            head_maps=head_maps_of(observations.collected),
            top_keys=top_keys_of(observations.collected, self.loaded.tokenizer, self.reader.counts),
            spectra=spectra,
            influence=influence_of(observations.collected, importance, table),
            halves={
                site: {**of_site, **predictable.get(site, {})}
                for site, of_site in halves_of(observations.collected, importance, table).items()
            },
            **fields,
        )
        return dataclasses.replace(inspection, findings=findings(inspection))

    def probe(
        self, observations: Observations
    ) -> tuple[dict[str, Any], dict[AttentionSite, Tensor], dict[str, PronounTable]]:
        """Run all probes but importance; roles and pairs also use the observations of the text.

        Returns:
            Fields of the inspection, the attention distances of heads, and the pronoun scores.
        """
        probes, sample = self.probes, self.sample
        fields: dict[str, Any] = {"examples": probes.examples()}
        distances, repeated = probes.distances(), probes.repeated(self.loaded.model)
        reference: tuple[HeadRoles, ...] = probes.chance() if self.settings.chance else ()
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
                observations.collected, sample, self.head_projections, probes.watched_sample
            )
            self.pairs_by = cross_layer_similarity.method(sample)
        return fields, distances, pronouns

    def facts(self, observations: Observations) -> dict[str, Any]:
        """Return `Inspection.facts`, but those of importance."""
        tokens = max((int(x.compute()["tokens"].max()) for x in observations.sites), default=0)
        return {
            "model": str(self.loaded),
            "name": self.settings.model or self.loaded.name,
            "kind": self.loaded.kind,
            **_model_facts(self.loaded.model),
            "documents": len(self.reader.text.documents),
            "contexts": len(self.reader.contexts),
            "context": self.reader.text.length,
            "tokens": tokens,
            "text": self.read_digest,
            "unknown": self.reader.unknown,
            "intervals_over": "contexts" if self.reader.counts_contexts else "documents",
            "pairs_by": self.pairs_by,
            "chance": self.settings.chance,
            "materialised": len(self.text_pass.materialised),
            "interrupted": self.interrupted,
            "read": self.is_read,
            "left_out": list(self.probes.left_out),
            "seconds": round(time.perf_counter() - self.began, 1),
            "versions": {**versions(), "python": platform.python_version()},
        }


def _collectors(
    settings: Settings,
    loaded: LoadedModel,
    reader: Reader,
    direct_logits: DirectLogits | None,
    sample: TokenSample | None,
) -> list[Collector]:
    counts, embedding, meaning = reader.counts, embedding_of(loaded.model), None
    if embedding is not None and bool(embedding.isfinite().all()):
        meaning = TokenVectors.of(embedding, seed=settings.seed)
    segments = Segments.of(loaded.tokenizer, reader.classes)
    evidence = EvidenceCollector(
        rare=rare_tokens(counts), meaning=meaning, segments=segments, direct_logits=direct_logits
    )
    collectors: list[Collector] = [AttentionMaps(reader.text.length), Contributions(), evidence]
    return [*collectors, DocumentSums(), most_frequent(counts), *([] if sample is None else [sample])]


def _loss_facts(importance: Importance | None) -> dict[str, Any]:
    """Return the loss by which importance was measured, with its mean and its sums by document.

    "representation" has neither: it compares with the intact model, whose own loss is therefore 0.
    """
    if importance is None or importance.loss == "representation":
        return {"loss": importance and importance.loss}
    sums = torch.stack([importance.intact, importance.weights], -1)
    return {"loss": importance.loss, "mean_loss": importance.intact_loss, "document_losses": sums.tolist()}


def _model_facts(model: Any) -> dict[str, Any]:
    """Return the sizes that must agree in a comparison of two runs, and whether heads were edited."""
    config = model.config.get_text_config()
    return {**{name: getattr(config, name, None) for name in SIZES}, "edited": is_edited(model)}
