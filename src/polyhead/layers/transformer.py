"""Small transformer models built from polyhead's attention, for tests, demos and experiments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.errors import CacheError, DtypeError, OptionError, ShapeError
from polyhead.geometry import checked_integer
from polyhead.layers.base_attention import Memory
from polyhead.layers.blocks import Block, DecoderBlock, EncoderBlock, FeedForward
from polyhead.layers.checks import check_one_of
from polyhead.layers.kv_cache import GrowingCache, KVCache, PagedCache, PreallocatedCache, QuantizedCache, RollingCache
from polyhead.layers.positions import AddsToInput, Positions
from polyhead.masks import Mask, Side
from polyhead.ops.common.validation import is_autocast

__all__ = ["DecoderBlock", "Encoder", "EncoderBlock", "FeedForward", "LanguageModel", "SequenceToSequence"]

_CACHES: dict[str, type[KVCache]] = {
    "growing": GrowingCache,
    "preallocated": PreallocatedCache,
    "rolling": RollingCache,
    "paged": PagedCache,
    "quantized": QuantizedCache,
}


class _Trunk(nn.Module):
    """Token embedding, blocks, and a final norm where the blocks are pre-norm.

    A position module is shared by all blocks; a function that returns one is called for each block. Positions that
    are added to the input are added once, to the embeddings.

    Args:
        vocab_size: number of tokens.
        embed_dim: width of the model.
        num_heads: heads of every attention.
        num_layers: number of blocks.
        positions: position module, or a function that returns one for each block.
        options: options of the blocks and of `MultiHeadAttention`.
    """

    block: type[Block]

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        *,
        positions: Positions | Callable[[], Positions] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        checked_integer("num_layers", num_layers, at_least=1)
        shared = positions is None or isinstance(positions, Positions)
        modules = [positions if shared else cast(Callable[[], Positions], positions)() for _ in range(num_layers)]
        self.positions = modules[0] if isinstance(modules[0], AddsToInput) else None
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        nn.init.normal_(self.embedding.weight, std=embed_dim**-0.5)  # logits of unit variance when tied
        self.blocks = nn.ModuleList(
            self.block(embed_dim, num_heads, positions=None if self.positions is not None else module, **options)
            for module in modules
        )
        first = cast(Block, self.blocks[0])
        self.norm = type(first.attention_norm)(embed_dim) if first.norm_first else nn.Identity()

    def embed(self, tokens: Tensor, positions: int | Tensor = 0) -> Tensor:
        """Embed tokens [batch, sequence] as [batch, sequence, embed_dim], of unit variance before positions are added.

        `positions` is the position of the first token, or the positions of all tokens.

        Args:
            tokens: [batch, sequence].
            positions: position of the first token, or of all tokens.

        Returns:
            [batch, sequence, embed_dim].
        """
        _check_tokens(tokens)
        x: Tensor = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        return x if self.positions is None else cast(Tensor, self.positions(x, positions))


class Encoder(_Trunk):
    """Bidirectional encoder: tokens [batch, sequence] to vectors [batch, sequence, embed_dim]."""

    block = EncoderBlock

    def forward(self, tokens: Tensor, mask: Mask | None = None) -> Tensor:
        """Return the vectors [batch, sequence, embed_dim] of tokens.

        Args:
            tokens: [batch, sequence].
            mask: mask of every self-attention, such as `Mask.lengths`.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask=mask)
        return cast(Tensor, self.norm(x))


class LanguageModel(_Trunk):
    """Decoder-only language model: tokens [batch, sequence] to logits [batch, sequence, vocab_size].

    Args:
        vocab_size: number of tokens.
        embed_dim: width of the model.
        num_heads: query heads of every attention.
        num_layers: number of blocks.
        tie_embeddings: whether the token embedding is also the output projection.
        options: of the attention, as in `MultiHeadAttention`: `positions` (a module of `polyhead.layers.positions`, or
            a function that returns one for each block), `num_kv_heads`, `head_dim`, `window`, `qk_norm`, `bias`,
            `sinks`, `softcap`, `backend`, ...; of the blocks, as in `DecoderBlock`: `hidden_dim`, `activation`,
            `norm`, `norm_first`, `dropout`, `attention_dropout`, and `source_dim` for cross-attention to a source.

    >>> from polyhead.layers.positions import Rotary
    >>> model = LanguageModel(97, 32, 4, 2, num_kv_heads=2, positions=Rotary(8)).eval()
    >>> prompts = torch.tensor([[5, 7, 11], [13, 17, 0]])
    >>> model.generate(prompts, max_new_tokens=4, lengths=[3, 2]).shape
    torch.Size([2, 4])
    """

    block = DecoderBlock

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        *,
        tie_embeddings: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(vocab_size, embed_dim, num_heads, num_layers, **options)
        self.output = None if tie_embeddings else nn.Linear(embed_dim, vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        mask: Mask | None = None,
        caches: Sequence[KVCache] | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        token_positions: Tensor | None = None,
        source: Tensor | Sequence[Memory] | None = None,
        source_lengths: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Return next-token logits, [batch, sequence, vocab_size].

        Args:
            tokens: [batch, sequence]; with caches, the tokens that follow the cached ones.
            mask: combined with the causal mask, as in `MultiHeadAttention`.
            caches: one for each block, from `new_caches`.
            lengths: number of non-padding tokens of each sequence; padding is on the right.
            token_positions: as in `MultiHeadAttention`; left padding needs them where positions are absolute.
            source: [batch, keys, source_dim], or the memories returned by `remember`.
            source_lengths: number of non-padding keys of each source.
        """
        if caches is not None and len(caches) != len(self.blocks):
            raise OptionError(f"caches must have one cache per block, got {len(caches)} for {len(self.blocks)} blocks")
        batch, count = tokens.shape[0], tokens.shape[-1]
        if lengths is not None and caches is None:
            padding = Mask.lengths(lengths).to(tokens.device)
            mask, lengths = padding if mask is None else mask & padding, None
        source_mask = None
        if source_lengths is not None:
            # Explicit query lengths: without them, Mask.lengths pads the queries like the keys if there are as many.
            source_mask = Mask.lengths(source_lengths, queries=torch.full((batch,), count)).to(tokens.device)
        start: int | Tensor = 0
        if token_positions is not None:
            start = token_positions
        elif self.positions is not None and caches:
            start = caches[0].next_positions(count, device=tokens.device) if caches[0].lengths else 0
        x = self.embed(tokens, start)
        sources = [
            source if source is None or isinstance(source, Tensor) else source[i] for i in range(len(self.blocks))
        ]
        options = {"mask": mask, "source_mask": source_mask, "lengths": lengths, "token_positions": token_positions}
        if caches is None:
            for block, block_source in zip(self.blocks, sources, strict=True):
                x = block(x, block_source, **options)
        else:
            with ExitStack() as restore:  # if a block raises, the caches of earlier blocks are restored
                for cache in caches:
                    restore.enter_context(cache.unchanged_on_failure())
                for block, block_source, cache in zip(self.blocks, sources, caches, strict=True):
                    x = block(x, block_source, cache=cache, **options)
        return F.linear(self.norm(x), self.embedding.weight if self.output is None else self.output.weight)

    def remember(self, source: Tensor) -> list[Memory]:
        """Project a source once for every block, for repeated use in `forward`.

        Args:
            source: [batch, keys, source_dim].

        Returns:
            Keys and values of each block.
        """
        layers = [cast(DecoderBlock, block).cross_attention for block in self.blocks]
        if None in layers:
            raise OptionError("remember requires a model built with source_dim, got one built without it")
        return [layer.remember(source) for layer in layers if layer is not None]

    def new_caches(
        self, kind: str | type[KVCache], batch_size: int, *, capacity: int | None = None, **options: Any
    ) -> list[KVCache]:
        """Return a cache per block: "growing", "preallocated", "rolling", "paged", "quantized" or a class.

        `capacity` is in tokens per sequence, for the kinds that need one; a rolling cache takes the blocks' window
        unless `window` is given. `options` are passed to the cache's constructor.

        Args:
            kind: name or class of the caches.
            batch_size: number of sequences.
            capacity: tokens per sequence.
            options: options of the class.
        """
        build = _CACHES.get(kind) if isinstance(kind, str) else kind
        if build is None:
            raise OptionError(f"kind must be one of {', '.join(map(repr, _CACHES))} or a class, got {kind!r}")
        if capacity is not None and issubclass(build, PagedCache):
            pages = -(-capacity // options.setdefault("page_size", 16))
            options.setdefault("num_pages", pages * batch_size)
        elif capacity is not None and issubclass(build, PreallocatedCache):
            options["capacity"] = capacity
        caches = []
        for block in self.blocks:
            attention = cast(DecoderBlock, block).attention
            weight, mask = attention.k_proj.weight, attention.mask
            cache_options = {"dtype": _projected_dtype(weight), "device": weight.device, **options}
            if issubclass(build, RollingCache) and mask is not None and mask.left is not None:
                cache_options.setdefault("window", mask.left + 1)
            caches.append(build.for_layout(attention.cache_layout, batch_size=batch_size, **cache_options))
        return caches

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        caches: Sequence[KVCache] | str | None = "growing",
        lengths: Sequence[int] | None = None,
        side: Side = "right",
        temperature: float = 0.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        eos: int | None = None,
        **source: Any,
    ) -> Tensor:
        """Generate a continuation of each prompt, [batch, at most max_new_tokens].

        Args:
            tokens: prompts [batch, sequence].
            lengths: number of non-padding tokens of each prompt; padding is on `side`.
            caches: a kind of cache, caches that may contain earlier tokens, or None to recompute at every step.
            temperature: 0 is greedy decoding; otherwise tokens are sampled from the softmax of logits / temperature.
            top_k: sample from the top_k most likely tokens only.
            eos: end-of-sequence token, repeated once a sequence has ended; generation stops when all have ended.
            source: `source` and `source_lengths`, as in `forward`.
            max_new_tokens: tokens to generate; preallocated caches need room for all, even if `eos` ends earlier.
            side: padding side of the prompts.
            generator: random numbers of the sampling.

        Returns:
            The new tokens, without the prompts.
        """
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise OptionError(f"temperature must be at least 0 and top_k at least 1, got {temperature} and {top_k}")
        check_one_of("side", side, ("left", "right"))
        _check_tokens(tokens)
        batch, width = tokens.shape
        prompt_lengths = [width] * batch if lengths is None else list(lengths)
        if len(prompt_lengths) != batch or not all(1 <= length <= width for length in prompt_lengths):
            raise OptionError(f"lengths must be 1 to {width} for each of {batch} prompts, got {prompt_lengths}")
        rows = torch.arange(batch, device=tokens.device)
        ends = torch.tensor(prompt_lengths, dtype=torch.long, device=tokens.device)
        if side == "left":
            column = torch.arange(width, device=tokens.device) + (width - ends)[:, None]
            tokens = tokens.gather(1, column % max(width, 1))  # left padding becomes right padding
        if isinstance(caches, str):
            caches = self.new_caches(caches, batch, capacity=width + max_new_tokens)
        for cache in caches or ():
            totals = map(sum, zip(prompt_lengths, cache.lengths or [0] * batch, strict=False))
            needed = max(totals, default=0) + max_new_tokens - 1  # the last token is not appended
            if isinstance(cache, PreallocatedCache) and max_new_tokens and needed > cache.capacity:
                raise CacheError(
                    f"the prompts and {max_new_tokens} new tokens need a capacity of {needed} tokens per sequence, "
                    f"got caches of {cache.capacity}; use model.new_caches(..., capacity={needed})"
                )
        step_tokens, step_lengths = tokens, None if lengths is None else prompt_lengths
        done = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
        new: list[Tensor] = []
        for _ in range(max_new_tokens):
            logits = self(step_tokens, caches=caches, lengths=step_lengths, **source)[rows, ends - 1]
            token = _sample(logits, temperature, top_k, generator)
            if eos is not None:
                token = torch.where(done, eos, token)
                done = done | (token == eos)
            new.append(token)
            if eos is not None and bool(done.all()):
                break
            if caches is not None:
                step_tokens, ends, step_lengths = token[:, None], torch.ones_like(ends), None
            else:
                step_tokens = F.pad(step_tokens, (0, 1)).index_put((rows, ends), token)
                ends = ends + 1
                step_lengths = None if step_lengths is None else [length + 1 for length in step_lengths]
        return torch.stack(new, 1) if new else tokens[:, :0]


def _projected_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of a projection's outputs, which is autocast's while that is enabled."""
    device = weight.device.type
    if is_autocast(device) and weight.dtype is not torch.float64:  # which autocast leaves as it is
        return torch.get_autocast_dtype(device)
    return weight.dtype


def _check_tokens(tokens: Tensor) -> None:
    if tokens.ndim != 2:
        raise ShapeError(f"tokens must be [batch, sequence], got shape {list(tokens.shape)}")
    if tokens.is_floating_point() or tokens.dtype is torch.bool:
        raise DtypeError(f"tokens must be integers, got {tokens.dtype}")


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Sample a token from each row of logits [batch, vocab_size]."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = logits.topk(top_k).values[:, -1:]
        logits = torch.where(logits < threshold, -torch.inf, logits)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


class SequenceToSequence(nn.Module):
    """Encoder-decoder model: an `Encoder`, and a `LanguageModel` with cross-attention to its output.

    Options are those of `Encoder` and `LanguageModel`; `target_positions` are the decoder's where they differ.

    Args:
        source_vocab_size: vocabulary of the source.
        target_vocab_size: vocabulary of the target.
        embed_dim: width of both stacks.
        num_heads: heads of every attention.
        num_layers: blocks of each stack.
        positions: position module, or a function that returns one for each block.
        target_positions: those of the decoder, where they differ.
        tie_embeddings: whether the target embedding is also the output projection.
        options: options of the blocks.

    >>> model = SequenceToSequence(97, 89, 32, 4, 2).eval()
    >>> source = torch.randint(97, (3, 7))
    >>> model(source, torch.randint(89, (3, 5)), source_lengths=[7, 2, 5]).shape
    torch.Size([3, 5, 89])
    >>> model.generate(source, max_new_tokens=6, start=1, source_lengths=[7, 2, 5]).shape
    torch.Size([3, 6])
    """

    def __init__(
        self,
        source_vocab_size: int,
        target_vocab_size: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        *,
        positions: Positions | Callable[[], Positions] | None = None,
        target_positions: Positions | Callable[[], Positions] | None = None,
        tie_embeddings: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        sizes = embed_dim, num_heads, num_layers
        target_positions = positions if target_positions is None else target_positions
        self.encoder = Encoder(source_vocab_size, *sizes, positions=positions, **options)
        self.decoder = LanguageModel(
            target_vocab_size,
            *sizes,
            positions=target_positions,
            tie_embeddings=tie_embeddings,
            source_dim=embed_dim,
            **options,
        )

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lengths: Sequence[int] | Tensor | None = None,
        target_lengths: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Return next-token logits [batch, targets, target_vocab_size]; padding is on the right.

        Args:
            source: source tokens [batch, keys].
            target: target tokens [batch, targets].
            source_lengths: number of non-padding tokens of each source.
            target_lengths: number of non-padding tokens of each target.
        """
        logits: Tensor = self.decoder(
            target, lengths=target_lengths, source=self.encode(source, source_lengths), source_lengths=source_lengths
        )
        return logits

    def encode(self, source: Tensor, lengths: Sequence[int] | Tensor | None = None) -> Tensor:
        """Encode source tokens [batch, keys] as [batch, keys, embed_dim].

        Args:
            source: tokens [batch, keys].
            lengths: number of non-padding tokens of each sequence; padding is on the right.

        Returns:
            The vectors of the source.
        """
        mask = None if lengths is None else Mask.lengths(lengths).to(source.device)
        return cast(Tensor, self.encoder(source, mask))

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        max_new_tokens: int,
        *,
        start: int,
        source_lengths: Sequence[int] | Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Generate target tokens from the token `start`; see `LanguageModel.generate`.

        Args:
            source: source tokens [batch, keys].
            max_new_tokens: tokens to generate.
            start: first token of every target.
            source_lengths: number of non-padding tokens of each source.
            options: options of `LanguageModel.generate`.

        Returns:
            The new tokens [batch, at most max_new_tokens].
        """
        memories = self.decoder.remember(self.encode(source, source_lengths))
        first = torch.full((source.shape[0], 1), start, device=source.device)
        return self.decoder.generate(first, max_new_tokens, source=memories, source_lengths=source_lengths, **options)
