"""A whole inspection: the text is read, the model is asked its questions, and what was found is put together."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.importance import Importance
from polyhead.analysis.roles import HeadRoles, evidence_of, head_roles
from polyhead.errors import OptionError
from polyhead.inspection import across, within
from polyhead.inspection.files import OBSERVATIONS
from polyhead.inspection.findings import findings
from polyhead.inspection.looks import looks_of
from polyhead.inspection.questions import Questions, embedding_of
from polyhead.inspection.reading import Reader
from polyhead.inspection.result import Inspection
from polyhead.inspection.settings import Progress, Report, Settings
from polyhead.inspection.top_keys import most_frequent, top_keys_of
from polyhead.observatory import (
    AttentionMaps,
    AttentionSite,
    Contributions,
    Gatherer,
    Observations,
    Session,
    Wiring,
    load,
    observe,
    read_facts,
    save,
)
from polyhead.observatory.evidence import EvidenceGatherer
from polyhead.observatory.evidence_tokens import Meaning, rare_tokens
from polyhead.observatory.token_sample import TokenSample
from polyhead.sources import LoadedModel, load_model
from polyhead.sources.segments import Segments
from polyhead.version import VERSION

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
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
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
        allow_pickle: read weights from pickles, which can run code.
        trust_remote_code: run code that comes with the model.

    An interrupt (Ctrl-C) ends the reading: what was gathered until then is the result, and it says so.
    """
    began = time.perf_counter()
    report(Progress("load the model", 0, None))
    loaded = loaded or load_model(
        settings.model,
        device=settings.device,
        dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    questions = Questions(settings, loaded, Reader.of(loaded, settings), report)
    run = _Run(settings, loaded, questions.reader, questions, folder, report, save_seconds)
    return run.run(resume, began)


@dataclass(eq=False)
class _Run:
    settings: Settings
    loaded: LoadedModel
    reader: Reader
    questions: Questions
    folder: Path | None
    report: Report
    save_seconds: float
    interrupted: bool = False
    across: str | None = None  # how pairs of different layers were found

    def run(self, resume: bool, began: float) -> Inspection:
        wiring = self.questions.wiring(self.loaded.model)
        sample = across.sample_of(wiring, self.settings.seed)
        observations = self.text(sample, resume)
        table = observations.profile
        found: dict[str, Any] = {}
        matrices, said = within.relations_of(observations.gathered, wiring)
        spectra = within.spectra_of(wiring)
        columns = [within.text_columns(observations.gathered), within.circuit_columns(spectra), said]
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
            looks=looks_of(observations.gathered),
            top_keys=top_keys_of(observations.gathered, self.loaded.tokenizer, self.reader.counts),
            spectra=spectra,
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
        ask = self.questions
        found["examples"] = ask.examples()
        found["distances"] = ask.distances()
        repeated = ask.repeated(self.loaded.model)
        reference: tuple[HeadRoles, ...] = ()
        if self.settings.chance:
            reference, null = ask.chance()
            found |= within.groups_of(matrices, null)
        roles = head_roles(
            evidence_of(observations.gathered),
            repeated,
            copying=ask.copying(wiring),
            pronouns=ask.pronouns(),
            reference=reference,
            seed=self.settings.seed,
        )
        if sample is not None:
            found["pairs"] = across.pairs(observations.gathered, sample, wiring, ask.watched_sample)
            self.across = across.rule(sample)
        found["importance"] = ask.importance()
        return found, roles

    # ---- reading

    def text(self, sample: TokenSample | None, resume: bool) -> Observations:
        gatherers: list[Gatherer] = [AttentionMaps(self.reader.context), Contributions(), self.evidence()]
        gatherers += [most_frequent(self.reader.counts), *([] if sample is None else [sample])]
        if self.settings.via_weights:
            self.questions.left_out.append(UNSEEN)
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
        embedding = embedding_of(self.loaded.model)
        meaning = None if embedding is None else Meaning.of(embedding, seed=self.settings.seed)
        return EvidenceGatherer(
            rare=rare_tokens(self.reader.counts), meaning=meaning, segments=Segments.of(self.loaded.tokenizer)
        )

    # ---- what is said of the run

    def facts(self, observations: Observations, began: float) -> dict[str, Any]:
        tokens = max((int(x.compute()["tokens"].max()) for x in observations.sites), default=0)
        return {
            "model": str(self.loaded),
            "name": self.settings.model or self.loaded.name,
            "kind": self.loaded.kind,
            "documents": len(self.reader.documents),
            "contexts": len(self.reader.contexts),
            "context": self.reader.context,
            "tokens": tokens,
            "unknown": self.reader.unknown,
            "intervals_over": "contexts" if self.reader.counts_contexts else "documents",
            "pairs_by": self.across,
            "interrupted": self.interrupted,
            "left_out": list(self.questions.left_out),
            "seconds": round(time.perf_counter() - began, 1),
            "versions": {
                "polyhead": VERSION,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
