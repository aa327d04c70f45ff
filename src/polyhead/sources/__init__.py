"""Load models by name and prepare text: documents, contexts and padded batches.

`read_texts` and `default_documents` return documents, `cut_into_contexts` splits them into contexts, and `batches` pads
contexts into batches in a deterministic order. `load_model` returns a model and its tokenizer. transformers and pyarrow
are imported lazily.
"""

from polyhead.sources.batching import Batch, Batches, batches
from polyhead.sources.contexts import Context, Contexts, SpecialTokens, cut_into_contexts, special_tokens
from polyhead.sources.models import Kind, LoadedModel, load_model
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
    "load_model",
    "read_texts",
    "special_tokens",
    "token_classes",
]
