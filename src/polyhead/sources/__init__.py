"""Read models and prepare text: documents, contexts and padded batches.

`read_texts` and `default_documents` return documents, `cut_into_contexts` splits them into contexts, and `batches` pads
contexts into batches in a deterministic order; `text_contexts.read_contexts` does both for a model. Models are loaded
by `polyhead.workflows.model_loading`. transformers and pyarrow are imported lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhead.lazy import lazy_exports

if TYPE_CHECKING:
    from polyhead.sources.exports import *

__getattr__, __dir__ = lazy_exports(__name__)
