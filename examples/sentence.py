"""A real sentence on its way through one attention layer: tokens, ids, embeddings, positions, heads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import polyhead
from polyhead.errors import OptionError
from polyhead.layers.positions import Sinusoidal
from polyhead.ops.attention import Explanation

SENTENCES = (
    "那只动物没有过马路，因为它太累了。",
    "The animal didn't cross the street because it was too tired.",
)
EMBED_DIM = 512
NUM_HEADS = 8

# One token a Chinese character, a word of any other script, or a punctuation mark.
_TOKEN = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]|[^\W\u3400-\u9fff\uf900-\ufaff]+(?:['’][^\W]+)*|[^\w\s]")


@dataclass(frozen=True, slots=True, eq=False)
class SentenceTrace:
    """Intermediate results of every step. The layer is untrained: its pattern shows the machinery, not a language."""

    text: str
    tokens: tuple[str, ...]
    vocabulary: tuple[str, ...]
    ids: Tensor  # [1, tokens]
    embedded: Tensor  # [1, tokens, embed_dim]
    positioned: Tensor  # [1, tokens, embed_dim]
    queries: Tensor  # [1, heads, tokens, head_dim]
    weights: Tensor  # [1, heads, tokens, tokens]
    output: Tensor  # [1, tokens, embed_dim]
    backend: str
    explanation: Explanation
    weights_explanation: Explanation  # for the call that also returned the weights


def tokenize(text: str) -> tuple[str, ...]:
    """Words, Chinese characters and punctuation marks.

    >>> tokenize("It didn't. 它没有。")
    ('It', "didn't", '.', '它', '没', '有', '。')
    """
    tokens = tuple(_TOKEN.findall(text))
    if not tokens:
        raise OptionError(f"a sentence needs at least one word, character or punctuation mark, got {text!r}")
    return tokens


def trace(text: str, *, seed: int = 0) -> SentenceTrace:
    """Send `text` through embedding, sinusoidal positions and a layer of 512 channels and 8 heads.

    >>> seen = trace("它太累了。")
    >>> seen.tokens, tuple(seen.output.shape)
    (('它', '太', '累', '了', '。'), (1, 5, 512))
    """
    tokens = tokenize(text)
    vocabulary = tuple(dict.fromkeys(token.lower() for token in tokens))
    ids = torch.tensor([[vocabulary.index(token.lower()) for token in tokens]])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        embedding, positions = nn.Embedding(len(vocabulary), EMBED_DIM), Sinusoidal(EMBED_DIM)
        layer = polyhead.MultiHeadAttention(EMBED_DIM, NUM_HEADS).eval()
        embedded = embedding(ids)
        positioned = positions(embedded)
        result = layer(positioned)
        watched = layer(positioned, weights=True)
        queries, keys, values = _heads(layer, positioned)
    assert watched.weights is not None
    return SentenceTrace(
        text, tokens, vocabulary, ids, embedded, positioned, queries, watched.weights, result.output, result.backend,
        polyhead.explain(queries, keys, values), polyhead.explain(queries, keys, values, weights=True),
    )  # fmt: skip


def _heads(layer: polyhead.MultiHeadAttention, x: Tensor) -> Sequence[Tensor]:
    """Queries, keys and values as the layer hands them to attention, each [1, heads, tokens, head_dim]."""
    projected = (linear(x) for linear in (layer.q_proj, layer.k_proj, layer.v_proj))
    return [y.view(*y.shape[:2], NUM_HEADS, -1).transpose(1, 2) for y in projected]
