"""Contexts of a text for a model: the one place where commands and workflows cut text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyhead.errors import OptionError
from polyhead.sources.batching import digest_of
from polyhead.sources.contexts import MINIMUM_TOKENS, Context, cut_into_contexts, tokenise, unknown_token
from polyhead.sources.datasets import PREFIX, DatasetTexts, read_dataset
from polyhead.sources.models import LoadedModel
from polyhead.sources.text_sampling import NEIGHBOURS, count_tokens, sample_contexts
from polyhead.sources.texts import TOKENS, Document, default_documents, read_texts

CONTEXT = 512  # tokens, or the model's maximum if that is less
MAX_TOKENS_PER_CHARACTER = 1.25  # in a text that a tokenizer knows
MAX_UNKNOWN = 0.05  # share of its tokens
MIN_DOCUMENTS = 16  # from which on a document is a group
MIN_GROUPS = 32  # of fewer documents, if there are as many contexts

# A file, a folder, "-" (standard input) or "datasets:PATH"; documents in memory, or rows of a dataset; None is the
# built-in text.
Text = str | os.PathLike[str] | Iterable[str | Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True, eq=False)
class TextContexts:
    """Contexts of at most `length` tokens, and the names of the documents they were cut from."""

    contexts: tuple[Context, ...]
    documents: tuple[str, ...]
    length: int

    @property
    def tokens(self) -> int:
        return count_tokens(self.contexts)

    @property
    def digest(self) -> str:
        """Fingerprint of the token ids of all contexts."""
        return digest_of(self.contexts)

    @property
    def groups(self) -> tuple[int, ...]:
        """Group of each context, from 0: contexts of different groups count as independent.

        A group is a document if at least 16 have contexts; otherwise neighbouring contexts of a document, up to 4 but
        so few that there are about 32 groups, or as many as contexts.
        """
        if len({context.document for context in self.contexts}) >= MIN_DOCUMENTS:
            keys = [(context.document, 0) for context in self.contexts]
        else:
            pieces = max(1, min(NEIGHBOURS, len(self.contexts) // MIN_GROUPS))
            keys = [(context.document, context.piece // pieces) for context in self.contexts]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return tuple(numbers[key] for key in keys)


def read_contexts(
    loaded: LoadedModel,
    text: Text = None,
    *,
    field: str = "text",
    context: int | None = None,
    tokens: int = TOKENS,
    sampled: bool = False,
    purpose: str = "reading text",
) -> TextContexts:
    """Cut a text into contexts for a model.

    Args:
        text: a file or folder, "-" for standard input, "datasets:PATH", documents in memory, or the rows of a dataset,
            which are streamed; None is a short built-in text, in the languages that the tokenizer knows.
        field: the text field of .jsonl files, or the text column of .parquet files.
        context: tokens per context; default: 512, or the model's maximum if smaller.
        tokens: maximum number of tokens to read.
        sampled: of a longer text, read contexts that are evenly spaced over all of it instead of its beginning; over
            its first 64 million characters, or 16 per token if that is more. No randomness.
        purpose: named in errors.
    """
    if loaded.tokenizer is None and loaded.main_input == "input_ids":
        raise OptionError(f"{purpose} needs the model's tokenizer, got {loaded.name} without one; pass it as tokenizer")
    if loaded.main_input != "input_ids":
        raise OptionError(
            f"{purpose} needs a model of text, got {loaded.name}, whose input is {loaded.main_input}; in Python, "
            "polyhead.observe and polyhead.surgery take batches of any inputs"
        )
    max_context = loaded.trained_context
    length = min(CONTEXT, max_context or CONTEXT) if context is None else context
    if max_context is not None and length > max_context:
        raise OptionError(f"context must be at most {max_context} tokens, the maximum of {loaded.name}, got {length}")
    documents = documents_of(text, field=field) if text is not None else known_default_documents(loaded.tokenizer)
    names, contexts = (sample_contexts if sampled else _first_contexts)(documents, loaded.tokenizer, length, tokens)
    if (count := sum(context.special.count(False) for context in contexts)) < MINIMUM_TOKENS:
        raise OptionError(
            f"{purpose} needs a text of at least {MINIMUM_TOKENS} tokens, got {count} in {len(names)} documents"
        )
    # Without documents that are too short, and the one that would exceed `tokens`.
    number = {document: index for index, document in enumerate(dict.fromkeys(x.document for x in contexts))}
    contexts = [replace(x, document=number[x.document]) for x in contexts]
    return TextContexts(tuple(contexts), tuple(names[document] for document in number), length)


def known_default_documents(tokenizer: Any) -> list[Document]:
    """Return the documents of the built-in text that a tokenizer knows, or all of them if it knows none."""
    documents = list(default_documents())
    return [document for document in documents if knows(tokenizer, document.text)] or documents


def knows(tokenizer: Any, text: str) -> bool:
    """Return whether a tokenizer has tokens for a text: few are unknown, and most characters are not split.

    A tokenizer of bytes knows English, of which each character is a byte, but not Chinese.
    """
    ids, unknown = tokenise(tokenizer, text), unknown_token(tokenizer)
    if len(ids) > MAX_TOKENS_PER_CHARACTER * len(text):
        return False
    return unknown is None or ids.count(unknown) <= MAX_UNKNOWN * len(ids)


def documents_of(
    text: str | os.PathLike[str] | Iterable[str | Mapping[str, Any]], *, field: str = "text"
) -> Iterable[Document]:
    """Return the documents of a text; raises at once if a path or a column does not exist."""
    if isinstance(text, (str, os.PathLike)):
        name = os.fspath(text)
        return read_dataset(name, field=field) if name.startswith(PREFIX) else read_texts(name, field=field)
    if isinstance(text, (list, tuple)) and not all(isinstance(document, (str, Mapping)) for document in text):
        raise OptionError(f"a text in memory must be a sequence of strings, got {[type(x).__name__ for x in text][:3]}")
    return DatasetTexts(text, field)


def _first_contexts(
    documents: Iterable[Document], tokenizer: Any, length: int, tokens: int
) -> tuple[list[str], list[Context]]:
    names: list[str] = []
    contexts: list[Context] = []
    total = 0
    for piece in cut_into_contexts(_record_names(documents, names), tokenizer, length):
        if total and total + len(piece.ids) > tokens:
            break
        contexts.append(piece)
        total += len(piece.ids)
    return names, contexts


def _record_names(documents: Iterable[Document], names: list[str]) -> Iterator[Document]:
    for document in documents:
        names.append(document.name)
        yield document
