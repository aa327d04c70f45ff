"""Token ids that a model read in an inspection; nothing else but sentences is taken from polyhead."""

from __future__ import annotations

import copy
from typing import Any

import torch

from benchmarks.statements.materialised import Model
from benchmarks.statements.recomputed import Context, Recomputed
from benchmarks.statements.tokens import Vocabulary
from polyhead.errors import OptionError
from polyhead.inspection import Inspection
from polyhead.inspection.probing import ABLATION_TOKENS, CHANCE_TOKENS, GRADIENT_TOKENS, QUICK_ABLATION_TOKENS
from polyhead.inspection.settings import Settings
from polyhead.inspection.text_reader import Reader
from polyhead.sources import Batch, LoadedModel, special_tokens
from polyhead.sources.probes import BLOCKS, ordinary_words, repeated_batches
from polyhead.sources.pronoun_sentences import pronoun_sentences
from polyhead.sources.text_contexts import Text, knows


def recomputed_of(loaded: LoadedModel, found: Inspection, text: Text = None, other: str | None = None) -> Recomputed:
    """Return the numbers of a model on the text of an inspection (in memory if `text`), or on another one."""
    if loaded.kind == "encoder-decoder":
        raise OptionError(f"sentences are tested for models of one stack of self-attention, got {loaded.name}")
    settings = found.settings
    reader = Reader.of(loaded, settings, text if other is None else other)
    special, loss = special_tokens(loaded.tokenizer), found.facts.get("loss")
    room = (reader.text.length - len(special.before) - len(special.after)) // 2
    repeats: list[Batch] = []
    if min(room, len(ordinary_words(reader.classes))) >= min(BLOCKS):
        repeats = list(
            repeated_batches(loaded.tokenizer, reader.classes, seed=settings.seed, context=reader.text.length)
        )
    sentences = [[x for x in pronoun_sentences() if x.language == language] for language in ("en", "zh")]
    known = [some for some in sentences if knows(loaded.tokenizer, "\n".join(x.text for x in some))]
    return Recomputed(
        Model(copy.deepcopy(loaded.model)),
        Vocabulary(loaded.tokenizer, special.ids),
        [
            Context(torch.tensor(x.ids), _number(reader, x.document, x.piece), torch.tensor(x.special))
            for x in reader.contexts
        ],
        _contexts(reader, repeats, probe=True),
        _contexts(reader, reader.whole_batches(CHANCE_TOKENS)) if settings.chance else [],
        [] if loss is None else _contexts(reader, reader.some_batches(_importance_tokens(settings, loss))),
        loss,
        [x for some in known for x in some],
        reader.text.length,
        settings.seed,
    )


def _importance_tokens(settings: Settings, loss: str) -> int:
    if settings.importance_tokens is not None:
        return settings.importance_tokens
    if loss != "representation":
        return GRADIENT_TOKENS
    return QUICK_ABLATION_TOKENS if settings.importance == "auto" else ABLATION_TOKENS


def _number(reader: Reader, document: int, piece: int) -> int:
    """Return the number of the unit of halves and intervals: the document, or the context if documents are few."""
    return document + 11 * piece if reader.counts_contexts else document


def _contexts(reader: Reader, batches: list[Batch], probe: bool = False) -> list[Context]:
    found = []
    for batch in batches:
        rows: Any = zip(batch.ids, batch.mask.bool(), batch.special, batch.documents, batch.pieces, strict=True)
        for ids, mask, special, document, piece in rows:
            number = int(document) if probe else _number(reader, int(document), int(piece))
            found.append(Context(ids[mask], number, special[mask]))
    return found
