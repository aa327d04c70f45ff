"""The pass of an inspection over its text: batches are counted atomically, saved periodically, and resumed."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from polyhead.errors import OptionError
from polyhead.files import as_type, refusing
from polyhead.inspection.run_files import OBSERVATIONS
from polyhead.inspection.settings import Settings
from polyhead.inspection.text_reader import Reader
from polyhead.observation import Collector, Observations, load, observe, read_facts, save
from polyhead.progress import Progress, ProgressCallback, ignore_progress
from polyhead.sources import LoadedModel, Shard
from polyhead.sources.fingerprint import model_digest
from polyhead.sources.shards import WHOLE
from polyhead.version import VERSION

SAVE_SECONDS = 30.0
STEP = "read the text"
# Settings on which the collected data depends; a run is resumed only if they are unchanged.
COLLECTED_BY = ("context", "tokens", "batch_tokens", "layers", "statistics", "seed", "device", "dtype")


@dataclass(frozen=True, slots=True, eq=False)
class TextRead:
    """Observations of complete batches; one immutable value, so that an interrupt never splits it."""

    observations: Observations
    batches: int = 0  # index of the last batch + 1, among those of the whole text
    digest: str | None = None  # of the batches of the text until then
    tokens: int = 0  # in the batches that were read
    complete: bool = False  # no batch is left

    def merge(self, other: TextRead) -> TextRead:
        """Return what was read of two shards of a text."""
        last = max(self, other, key=lambda read: read.batches)
        return TextRead(
            self.observations.merge(other.observations),
            last.batches,
            last.digest,
            self.tokens + other.tokens,
            self.complete and other.complete,
        )


@dataclass(eq=False)
class TextPass:
    """A model, its text, and what is collected of it."""

    settings: Settings
    loaded: LoadedModel
    reader: Reader
    collectors: Sequence[Collector]
    materialised: list[str] = dataclasses.field(default_factory=list)  # sites whose weights the model materialises

    def run(
        self,
        shard: Shard = WHOLE,
        *,
        folder: Path | None = None,
        resume: bool = False,
        report: ProgressCallback = ignore_progress,
        save_seconds: float = SAVE_SECONDS,
    ) -> TextRead:
        """Read the text, or the rest of it; save the observations periodically, and after an error or an interrupt.

        After an interrupt (Ctrl-C) the result is of the batches so far, and not complete.

        Args:
            shard: the batches to read.
            folder: folder of the run, whose lock the caller holds.
            resume: continue from the observations in `folder`.
            report: called with the tokens of the shard.
            save_seconds: time between two writes to the folder.
        """
        statistics, layers = self.settings.statistics, self.settings.layers
        session = observe(self.loaded.model, layers=layers, statistics=statistics, collect=self.collectors)
        if folder is not None:
            _ = self.origin  # computed now, while memory is available
        resumed = self.saved(folder, shard) if resume and folder is not None else None
        if resumed is not None:
            session.resume_from(resumed.observations)
        read = resumed or TextRead(session.observations)
        saved_batches, saved_at, total = read.batches, time.monotonic(), self.reader.batches(shard=shard).tokens
        report(Progress(STEP, read.tokens, total, "tokens"))
        interrupted = False
        with session:
            try:
                for batch in self.reader.batches(read.batches, read.digest, shard):
                    session.metadata = self.reader.metadata(batch)
                    self.reader.call(batch)
                    read = TextRead(session.observations, batch.index + 1, batch.digest, read.tokens + batch.tokens)
                    report(Progress(STEP, read.tokens, total, "tokens"))
                    if folder is not None and time.monotonic() - saved_at >= save_seconds:
                        self.keep(folder, read, shard)
                        saved_batches, saved_at = read.batches, time.monotonic()
            except KeyboardInterrupt:
                interrupted = True
            except BaseException:  # an error of the model, out of memory, termination from outside
                if folder is not None and read.batches > saved_batches:
                    self.keep(folder, read, shard)
                raise
        self.materialised = session.materialised
        if interrupted and not read.batches:
            raise OptionError("an inspection needs at least one batch, got an interrupt before the first was complete")
        read = dataclasses.replace(read, complete=not interrupted)
        if folder is not None:
            self.keep(folder, read, shard)
        return read

    def keep(self, folder: Path, read: TextRead, shard: Shard = WHOLE) -> None:
        """Write the observations, with what is needed to resume or to merge them."""
        write_read(folder / OBSERVATIONS, read, self.settings, self.origin, shard)

    @cached_property
    def origin(self) -> dict[str, str]:
        """Fingerprints of the model and the text."""
        return {"model": model_digest(self.loaded.model), "text": self.reader.text.digest}

    def saved(self, folder: Path, shard: Shard = WHOLE) -> TextRead | None:
        """Return what was read before; None if the run was killed before its first write, or raise if it is another."""
        path = folder / OBSERVATIONS
        if not path.exists():
            return None
        facts = read_facts(path)
        if any(name not in facts for name in self.origin):
            raise OptionError(
                f"a run is resumed if it recorded its model and text, got {path} of an older version, which may have "
                "counted a batch twice; start again in another folder"
            )
        now = json.loads(json.dumps(self.settings.to_dict()))
        changed = [name for name in COLLECTED_BY if facts["settings"].get(name) != now[name]]
        if facts["settings"].get("via_weights"):
            raise OptionError(
                f"a run must be resumed with the version that started it, got {path}, of attention weights that the "
                "model returned, which this version does not read; start again in another folder"
            )
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
        if not facts.get("complete") and (before := facts.get("versions", versions())) != versions():
            raise OptionError(
                f"a run must be continued with the versions it was started with, got {_listed(versions())} for "
                f"{_listed(before)}; install these, or start again in another folder"
            )
        if (before := shard_of(path, facts)) != shard:
            raise OptionError(f"a run must be resumed with its own shard, got shard {shard} for {before} in {folder}")
        return self.loaded_from(path, facts)

    def loaded_from(self, path: Path, facts: Mapping[str, Any]) -> TextRead:
        """Return what a file contains, whose facts were checked."""
        complete = bool(facts.get("complete"))
        return TextRead(load(path, self.collectors), facts["batches"], facts["digest"], facts["tokens"], complete)


def write_read(path: Path, read: TextRead, settings: Settings, origin: Mapping[str, str], shard: Shard) -> None:
    """Write the observations of a shard, with what is needed to resume or to merge them."""
    facts: dict[str, Any] = {"batches": read.batches, "digest": read.digest, "tokens": read.tokens, **origin}
    facts |= {"complete": read.complete, "versions": versions(), "shard": [shard.index, shard.count]}
    save(path, read.observations, {"settings": settings.to_dict(), **facts})


def shard_of(path: Path, facts: Mapping[str, Any]) -> Shard:
    """Return the shard that a file of observations is of; earlier versions had none."""
    with refusing(path, "observations must record their shard"):
        return Shard(*as_type(facts.get("shard", [0, 1]), tuple[int, int], "shard"))


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def versions() -> dict[str, str]:
    """Return the versions on which observations depend."""
    return {"polyhead": VERSION, "torch": torch.__version__}
