"""A whole inspection: the text is read, the model is asked its questions, and what was found is put together."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhead.analysis.importance import Importance
from polyhead.analysis.roles import HeadRoles, evidence_of, head_roles
from polyhead.errors import OptionError
from polyhead.inspection import cross_layer_similarity, layer_similarity
from polyhead.inspection.files import OBSERVATIONS
from polyhead.inspection.findings import findings
from polyhead.inspection.head_maps import looks_of
from polyhead.inspection.probing import Questions, embedding_of
from polyhead.inspection.reading import Reader
from polyhead.inspection.result import Inspection
from polyhead.inspection.settings import Progress, Report, Settings
from polyhead.inspection.top_keys import most_frequent, top_keys_of
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
from polyhead.observation.origins import is_edited
from polyhead.observation.role_evidence import EvidenceCollector
from polyhead.observation.role_evidence_tokens import Meaning, rare_tokens
from polyhead.observation.run_folder import held, sweep
from polyhead.observation.token_sample import TokenSample
from polyhead.sources import LoadedModel, load_model
from polyhead.sources.fingerprint import model_digest
from polyhead.sources.models import check_layers
from polyhead.sources.segments import Segments
from polyhead.version import VERSION

SAVE_SECONDS = 30.0
# The settings that decide what is gathered; with others a run does not go on.
COLLECTED_BY = (
    "context", "tokens", "batch_tokens", "layers", "statistics", "via_weights", "seed", "device", "dtype"
)  # fmt: skip
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

    An interrupt (Ctrl-C) ends the reading: what was gathered until then is the result, and it says so. A batch counts
    as a whole or not at all, whatever ends the reading, so that a run that goes on equals one that was never stopped.
    """
    if loaded is None and settings.layers is not None:
        check_layers(settings.model, settings.layers, trust_remote_code=trust_remote_code)
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(held(folder))
            sweep(folder, OBSERVATIONS)
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


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Observations of the batches read so far, all of them whole; one value, so that no interrupt finds half of it."""

    observations: Observations
    batches: int = 0
    digest: str | None = None  # of these batches
    tokens: int = 0


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
        head_projections = self.questions.head_projections(self.loaded.model)
        sample = cross_layer_similarity.sample_of(head_projections, self.settings.seed)
        observations = self.text(sample, resume)
        table = observations.profile
        found: dict[str, Any] = {}
        matrices, said = layer_similarity.relations_of(observations.collected, head_projections)
        spectra = layer_similarity.spectra_of(head_projections)
        columns = [
            layer_similarity.text_columns(observations.collected),
            layer_similarity.circuit_columns(spectra),
            said,
        ]
        roles: tuple[HeadRoles, ...] = ()
        if not self.interrupted:
            try:
                found, roles = self.rest(observations, head_projections, sample, matrices)
            except KeyboardInterrupt:
                self.interrupted = True
        importance: Importance | None = found.pop("importance", None)
        matrices = layer_similarity.with_more(matrices, found.pop("distances", {}), importance)
        inspection = Inspection(
            self.settings,
            {**self.facts(observations, began), "loss": None if importance is None else importance.loss},
            layer_similarity.widened(table, columns, importance),
            roles,
            relations=matrices,
            looks=looks_of(observations.collected),
            top_keys=top_keys_of(observations.collected, self.loaded.tokenizer, self.reader.counts),
            spectra=spectra,
            **found,
        )
        return dataclasses.replace(inspection, findings=findings(inspection))

    def rest(
        self,
        observations: Observations,
        head_projections: Mapping[AttentionSite, HeadProjections],
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
            found |= layer_similarity.groups_of(matrices, null)
        roles = head_roles(
            evidence_of(observations.collected),
            repeated,
            copying=ask.copying(head_projections),
            pronouns=ask.pronouns(),
            reference=reference,
            seed=self.settings.seed,
        )
        if sample is not None:
            found["pairs"] = cross_layer_similarity.pairs(
                observations.collected, sample, head_projections, ask.watched_sample
            )
            self.across = cross_layer_similarity.rule(sample)
        found["importance"] = ask.importance()
        return found, roles

    # ---- reading

    def text(self, sample: TokenSample | None, resume: bool) -> Observations:
        collectors: list[Collector] = [AttentionMaps(self.reader.context), Contributions(), self.evidence()]
        collectors += [most_frequent(self.reader.counts), *([] if sample is None else [sample])]
        if self.settings.via_weights:
            self.questions.left_out.append(UNSEEN)
        session = observe(
            self.loaded.model,
            layers=self.settings.layers,
            statistics=self.settings.statistics,
            collect=collectors,
            via_weights=self.settings.via_weights,
        )
        if self.folder is not None:
            _ = self.origin  # computed now, while there is memory for it
        read = self.go_on(session, collectors) if resume else _Read(session.observations)
        kept, report, total = read.batches, self.report, self.reader.tokens
        report(Progress("read the text", read.tokens, total))
        saved = time.monotonic()
        with session:
            try:
                for batch in self.reader.batches(read.batches, read.digest):
                    session.metadata = self.reader.metadata(batch)
                    self.reader.call(batch)
                    read = _Read(session.observations, batch.index + 1, batch.digest, read.tokens + batch.tokens)
                    report(Progress("read the text", read.tokens, total))
                    if self.folder is not None and time.monotonic() - saved >= self.save_seconds:
                        self.keep(read)
                        kept, saved = read.batches, time.monotonic()
            except KeyboardInterrupt:
                self.interrupted = True
            except BaseException:  # an error of the model, no memory left, an end from outside
                if self.folder is not None and read.batches > kept:
                    self.keep(read)
                raise
        if not read.batches:
            raise OptionError("an inspection needs one batch at least, and was interrupted before the first was read")
        if self.folder is not None:
            self.keep(read)
        return read.observations

    def keep(self, read: _Read) -> None:
        assert self.folder is not None
        facts = {"batches": read.batches, "digest": read.digest, "tokens": read.tokens, **self.origin}
        save(self.folder / OBSERVATIONS, read.observations, {"settings": self.settings.to_dict(), **facts})

    @cached_property
    def origin(self) -> dict[str, str]:
        """The model and all of the text, in short."""
        return {"model": model_digest(self.loaded.model), "text": self.reader.digest}

    def go_on(self, session: Session, collectors: list[Collector]) -> _Read:
        assert self.folder is not None
        path = self.folder / OBSERVATIONS
        if not path.exists():
            return _Read(session.observations)  # it was killed before it had written anything
        facts = read_facts(path)
        if any(name not in facts for name in self.origin):
            raise OptionError(
                f"a run goes on that says which model and text it is of, got {path} of an older version, which may "
                "have counted a batch twice; begin again in another folder"
            )
        now = json.loads(json.dumps(self.settings.to_dict()))
        changed = [name for name in COLLECTED_BY if facts["settings"].get(name) != now[name]]
        if changed:
            got = ", ".join(f"{name} {now[name]} for {facts['settings'].get(name)}" for name in changed)
            raise OptionError(f"a run goes on with the settings it began with, got {got}")
        if facts["model"] != self.origin["model"]:
            raise OptionError(
                f"a run goes on only with the model it began with, got {self.loaded.name} with other weights or "
                "another configuration; begin again in another folder"
            )
        if facts["text"] != self.origin["text"]:
            raise OptionError(
                "a run goes on only with the text, tokenizer and batch size it began with, got another text; begin "
                "again in another folder"
            )
        session.go_on_from(load(path, collectors))
        return _Read(session.observations, facts["batches"], facts["digest"], facts["tokens"])

    def evidence(self) -> EvidenceCollector:
        embedding = embedding_of(self.loaded.model)
        meaning = None if embedding is None else Meaning.of(embedding, seed=self.settings.seed)
        return EvidenceCollector(
            rare=rare_tokens(self.reader.counts), meaning=meaning, segments=Segments.of(self.loaded.tokenizer)
        )

    # ---- what is said of the run

    def facts(self, observations: Observations, began: float) -> dict[str, Any]:
        tokens = max((int(x.compute()["tokens"].max()) for x in observations.sites), default=0)
        return {
            "model": str(self.loaded),
            "name": self.settings.model or self.loaded.name,
            "kind": self.loaded.kind,
            **_sizes(self.loaded.model),
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


def _sizes(model: Any) -> dict[str, Any]:
    """By what another run is known to be of the same heads."""
    config = model.config.get_text_config()
    sizes = {name: getattr(config, name, None) for name in ("model_type", "hidden_size", "num_hidden_layers")}
    return {**sizes, "edited": is_edited(model)}
