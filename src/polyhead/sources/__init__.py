"""What is looked at: a model by its name, and text cut into contexts that it can read.

Text comes as documents (`read_texts`, `default_documents`), documents become contexts (`cut_into_contexts`), contexts
become padded batches in an order that never changes (`batches`). A model and its tokenizer come from `load_model`.
transformers and pyarrow are imported by the functions that need them and not before.
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
