"""Planted models: heads of known roles at drawn places among random ones, in a language model of our own layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadId
from polyhead.layers.head_matrices import HeadMatrices
from polyhead.layers.multi_head.layer import MultiHeadAttention
from polyhead.layers.positions import Learned
from polyhead.layers.transformer import DecoderBlock, LanguageModel
from tests.planted.circuits import PLANTED_ROLES, Drawer, Sharpness
from tests.planted.matrices import matrices_of, random_head
from tests.planted.spaces import Sizes, draw_spaces, gaussian
from tests.planted.texts import random_tokens

_RANDOM, _INSIDE, _ACROSS = "random", "inside a layer", "across two layers"
_MAX_PER_LAYER = 4  # one of the induction pair, one of the pair across layers, both of the pair inside a layer
_LEAST_WEIGHT = 0.95  # of a planted key


@dataclass(frozen=True, slots=True, eq=False)
class Planted:
    """A model, the roles of every one of its heads (an empty set for those without), and which say the same thing."""

    model: LanguageModel
    roles: dict[HeadId, frozenset[str]]
    duplicates: tuple[tuple[HeadId, HeadId], ...]

    def having(self, role: str) -> tuple[HeadId, ...]:
        """The heads of a role, in order."""
        return tuple(head for head, roles in self.roles.items() if role in roles)


def planted_model(
    seed: int, *, causal: bool = True, sizes: Sizes | None = None, sharpness: Sharpness | None = None
) -> Planted:
    """A model whose heads are known by construction; the package's own text tells how.

    A causal model has every planted head but "next"; one that sees both ways has "next" in place of "induction", whose
    match would be its own neighbour.

    >>> planted = planted_model(3)
    >>> len(planted.roles), len(planted.having("previous")), len(planted.duplicates)
    (20, 1, 2)
    """
    sizes, sharpness = sizes or Sizes(), sharpness or Sharpness()
    _check_sharpness(sizes, sharpness)
    generator = torch.Generator().manual_seed(seed)
    names = _draw_places(sizes, causal, generator)
    spaces = draw_spaces(sizes, generator)
    drawer = Drawer(sizes, sharpness, generator)
    twins = {pair: drawer.draw("content") for pair in (_INSIDE, _ACROSS)}

    model = _empty_model(sizes)
    _write_embeddings(model, spaces.words @ spaces.token, spaces.position)
    text = random_tokens(seed, batch=4, length=sizes.max_length, vocab_size=sizes.vocab_size)
    with torch.no_grad():
        stream = model.embed(text)
        for block, layer in zip(model.blocks, names, strict=True):
            length, heads = _length(stream), []
            for name in layer:
                if name == _RANDOM:
                    heads.append(random_head(sizes, sharpness, target=spaces.spare, generator=generator))
                    continue
                circuit = twins[name] if name in twins else drawer.draw(name)
                heads.append(matrices_of(circuit, spaces, sharpness, length=length, generator=generator))
            block.attention = _attention(heads, causal)
            stream = block(stream)
        # Half of a word's vector, made as long as the whole, has sqrt(1 / 2) of its length along the word.
        along = sharpness.write * math.sqrt(sizes.write_dim / sizes.token_dim)
        gain = sharpness.gap / along * _length(stream) / math.sqrt(sizes.embed_dim)
        _write_output(model, gain * spaces.words @ spaces.output)
    places = {HeadId(i, j): name for i, layer in enumerate(names) for j, name in enumerate(layer)}
    pairs = [tuple(head for head, name in places.items() if name == pair) for pair in (_INSIDE, _ACROSS)]
    return Planted(
        model,
        roles={head: PLANTED_ROLES.get(name, frozenset()) for head, name in places.items()},
        duplicates=tuple((first, second) for first, second in pairs),
    )


def random_model(
    seed: int, *, causal: bool = True, sizes: Sizes | None = None, sharpness: Sharpness | None = None
) -> LanguageModel:
    """The null: a model of the same layout, the same lengths and logits as spread out, and no structure at all.

    >>> random_model(3).blocks[0].attention.layout == planted_model(3).model.blocks[0].attention.layout
    True
    """
    sizes, sharpness = sizes or Sizes(), sharpness or Sharpness()
    generator = torch.Generator().manual_seed(seed)
    model = _empty_model(sizes)
    embeddings, positions = (
        gaussian(count, sizes.embed_dim, generator=generator) for count in (sizes.vocab_size, sizes.max_length)
    )
    _write_embeddings(model, *(x / x.norm(dim=-1, keepdim=True) for x in (embeddings, positions)))
    for block in model.blocks:
        heads = [random_head(sizes, sharpness, target=None, generator=generator) for _ in range(sizes.num_heads)]
        block.attention = _attention(heads, causal)
    unembedding = gaussian(sizes.vocab_size, sizes.embed_dim, generator=generator)
    _write_output(model, unembedding / math.sqrt(sizes.embed_dim))
    return model


def _check_sharpness(sizes: Sizes, sharpness: Sharpness) -> None:
    if sharpness.offset >= sizes.max_length:
        raise OptionError(
            f"the long-range offset must be less than max_length, got {sharpness.offset} and {sizes.max_length}"
        )
    # The planted key's weight is exp(gap) against at most max_length - 1 others of weight 1. What an induction head
    # finds in the note of the previous token is worth as much less as that head looked elsewhere.
    least = math.log(_LEAST_WEIGHT / (1 - _LEAST_WEIGHT) * (sizes.max_length - 1))
    if sharpness.gap < least:
        raise OptionError(
            f"gap must be at least {least:.2f} to give a planted key {_LEAST_WEIGHT:.0%} of the weight among "
            f"{sizes.max_length} keys, got {sharpness.gap}"
        )


def _draw_places(sizes: Sizes, causal: bool, generator: torch.Generator) -> list[list[str]]:
    """The name planted at each head of each layer."""
    left_out = "next" if causal else "induction"
    single = [name for name in PLANTED_ROLES if name != left_out]
    needed, slots = len(single) + 4, sizes.num_layers * sizes.num_heads
    if slots < needed or sizes.num_heads < _MAX_PER_LAYER:
        raise OptionError(
            f"a planted model needs {needed} heads in all and {_MAX_PER_LAYER} a layer, "
            f"got {sizes.num_layers} layers of {sizes.num_heads}"
        )

    def draw(count: int, of: int) -> list[int]:
        return sorted(torch.randperm(of, generator=generator)[:count].tolist())

    layers: list[list[str]] = [[] for _ in range(sizes.num_layers)]
    early, late = draw(2, sizes.num_layers)
    layers[early].append("previous")
    layers[late].append("induction" if causal else "next")
    for index in draw(2, sizes.num_layers):
        layers[index].append(_ACROSS)
    layers[draw(1, sizes.num_layers)[0]] += [_INSIDE, _INSIDE]

    others = [name for name in single if name not in ("previous", "induction", "next")]
    free = [index for index, layer in enumerate(layers) for _ in range(sizes.num_heads - len(layer))]
    others += [_RANDOM] * (len(free) - len(others))
    order = torch.randperm(len(free), generator=generator).tolist()
    for index, place in zip(free, order, strict=True):
        layers[index].append(others[place])
    return [[layer[i] for i in torch.randperm(len(layer), generator=generator).tolist()] for layer in layers]


def _empty_model(sizes: Sizes) -> LanguageModel:
    """A model of the right layout, whose weights are still to be written; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        model = LanguageModel(
            sizes.vocab_size,
            sizes.embed_dim,
            sizes.num_heads,
            sizes.num_layers,
            positions=Learned(sizes.max_length, sizes.embed_dim),
            norm="rms",
            head_dim=sizes.head_dim,
            hidden_dim=sizes.token_dim,
            bias=False,
        ).eval()
    for block in model.blocks:
        for parameter in cast(DecoderBlock, block).feed_forward.down.parameters():
            nn.init.zeros_(parameter)
    return model


def _attention(heads: Sequence[HeadMatrices], causal: bool) -> MultiHeadAttention:
    with torch.random.fork_rng(devices=[]):
        return MultiHeadAttention.from_heads(heads, causal=causal).eval()


@torch.no_grad()
def _write_embeddings(model: LanguageModel, tokens: Tensor, positions: Tensor) -> None:
    model.embedding.weight.copy_(tokens / math.sqrt(tokens.shape[1]))  # which `embed` multiplies by
    assert isinstance(model.positions, Learned)
    model.positions.weight.copy_(positions)


@torch.no_grad()
def _write_output(model: LanguageModel, unembedding: Tensor) -> None:
    assert model.output is not None
    model.output.weight.copy_(unembedding)


def _length(stream: Tensor) -> float:
    """Root of the mean square length of the stream's vectors."""
    return float(stream.double().square().sum(-1).mean().sqrt())
