"""Public names of `polyhead.sources`."""

from polyhead.sources.batching import Batch as Batch
from polyhead.sources.batching import Batches as Batches
from polyhead.sources.batching import batches as batches
from polyhead.sources.contexts import Context as Context
from polyhead.sources.contexts import Contexts as Contexts
from polyhead.sources.contexts import SpecialTokens as SpecialTokens
from polyhead.sources.contexts import cut_into_contexts as cut_into_contexts
from polyhead.sources.contexts import special_tokens as special_tokens
from polyhead.sources.models import Kind as Kind
from polyhead.sources.models import LoadedModel as LoadedModel
from polyhead.sources.shards import Shard as Shard
from polyhead.sources.texts import Document as Document
from polyhead.sources.texts import Texts as Texts
from polyhead.sources.texts import default_documents as default_documents
from polyhead.sources.texts import read_texts as read_texts
from polyhead.sources.token_class import TokenClass as TokenClass
from polyhead.sources.token_class import token_classes as token_classes
