"""Read models and prepare text: documents, contexts and padded batches.

`read_texts` and `default_documents` return documents, `cut_into_contexts` splits them into contexts, and `batches` pads
contexts into batches in a deterministic order; `text_contexts.read_contexts` does both for a model. Models are loaded
by `polyhead.workflows.model_loading`. transformers and pyarrow are imported lazily.
"""

from polyhead.sources.batching import Batch, Batches, batches
from polyhead.sources.contexts import Context, Contexts, SpecialTokens, cut_into_contexts, special_tokens
from polyhead.sources.models import Kind, LoadedModel
from polyhead.sources.texts import Document, Texts, default_documents, read_texts
from polyhead.sources.token_classes import TokenClass, token_classes

__all__ = [
    "Batch",
    "Batches",
    "Context",
    "Contexts",
    "Document",
    "Kind",
    "LoadedModel",
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
