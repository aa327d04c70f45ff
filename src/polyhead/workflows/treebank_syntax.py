"""`polyhead.syntax`: match heads to the dependency relations of a treebank."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyhead.analysis.alignment import Aligned, align, observe_contexts
from polyhead.analysis.dependency_accuracy import syntax_table
from polyhead.analysis.shares import Shares, inner_shares
from polyhead.analysis.syntax_table import SyntaxTable
from polyhead.errors import OptionError
from polyhead.inspection.run_files import OBSERVATIONS
from polyhead.observation.run_folder import lock_folder
from polyhead.observation.word_attention import WordAttention
from polyhead.progress import Progress, ProgressCallback, Step, ignore_progress
from polyhead.sources import LoadedModel
from polyhead.sources.treebank import read_treebank
from polyhead.version import VERSION
from polyhead.workflows.model_loading import Model, as_loaded


@dataclass(frozen=True, slots=True, eq=False)
class HeadSyntax:
    """Relations that heads track, and the heads with the most attention inside the word, phrase and sentence."""

    loaded: LoadedModel
    treebank: str
    aligned: Aligned
    table: SyntaxTable
    shares: Shares

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the table to a .json or .parquet file, for `polyhead report --syntax`."""
        self.table.save(
            Path(file),
            model=self.loaded.name,
            treebank=self.treebank,
            sentences=self.aligned.sentences,
            words=self.aligned.words,
            shares=list(self.shares.rows()),
        )


def syntax(
    model: Model,
    treebank: str | os.PathLike[str],
    *,
    sentences: int | None = None,
    together: int = 1,
    batch_tokens: int = 2048,
    minimum: int = 30,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    progress: ProgressCallback = ignore_progress,
) -> HeadSyntax:
    """Find the dependency relation that each head tracks, next to the best fixed offset as a baseline.

    One half of the texts selects heads and offsets, the other half evaluates them.

    Args:
        model: as in `polyhead.inspect`.
        treebank: a file in CoNLL-U format, .conllu or .conllu.gz, e.g. from universaldependencies.org.
        sentences: read only the first sentences; default: all.
        together: join this many consecutive sentences into one text.
        batch_tokens: maximum number of tokens per batch, padding included.
        minimum: skip relations with fewer words in either half.
        seed: seed of the random split into two halves.
        resume: a folder in which progress is saved; repeat the same call to continue an interrupted one.
        tokenizer: as in `polyhead.inspect`.
        progress: called with the progress of each step.

    Returns:
        The table of heads and relations.
    """
    folder = None if resume is None else Path(resume)
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(lock_folder(folder))
        parsed = list(read_treebank(Path(treebank), sentences))  # raises before a model is loaded
        progress(Progress("load the model"))
        loaded = as_loaded(model, tokenizer)
        aligned = align(parsed, loaded.tokenizer, together=together, longest=loaded.trained_context)
        if len(aligned) < 2:
            raise OptionError(
                f"at least two texts are needed, one to select and one to evaluate, got {len(aligned)} "
                f"from {len(parsed)} sentences ({aligned})"
            )
        step = Step(progress, "read the treebank", len(aligned), "texts")
        observations = observe_contexts(
            loaded,
            aligned.contexts,
            [WordAttention(aligned.maps)],
            batch_tokens=batch_tokens,
            progress=step.advance,
            file=None if folder is None else folder / OBSERVATIONS,
            origin={
                "words": aligned.digest,
                "device": str(next(loaded.model.parameters()).device),
                "polyhead": VERSION,
            },
        )
    table = syntax_table(observations, minimum=minimum, seed=seed)
    return HeadSyntax(loaded, Path(treebank).name, aligned, table, inner_shares(observations, seed=seed))
