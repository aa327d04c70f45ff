"""Public names of `polyhead.sources`."""

from polyhead.sources.batching import Batch, Batches, batches
from polyhead.sources.contexts import Context, Contexts, SpecialTokens, cut_into_contexts, special_tokens
from polyhead.sources.models import Kind, LoadedModel
from polyhead.sources.shards import Shard
from polyhead.sources.texts import Document, Texts, default_documents, read_texts
from polyhead.sources.token_class import TokenClass, token_classes

__all__ = [
    "Batch",
    "Batches",
    "Context",
    "Contexts",
    "Document",
    "Kind",
    "LoadedModel",
    "Shard",
    "SpecialTokens",
    "Texts",
    "TokenClass",
    "batches",
    "cut_into_contexts",
    "default_documents",
    "read_texts",
    "special_tokens",
    "token_classes",
]
