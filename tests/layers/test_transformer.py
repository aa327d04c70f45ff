"""Blocks are what they say, and a model generates the same tokens with any cache, any positions and any padding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import Mask, MultiHeadAttention
from polyhead.errors import CacheError, DtypeError, OptionError, ShapeError
from polyhead.layers import LatentAttention, config_of
from polyhead.layers.kv_cache import GrowingCache, LatentCache
from polyhead.layers.positions import ALiBi, Learned, Positions, Rotary, Sinusoidal, T5Bias
from polyhead.layers.transformer import (
    DecoderBlock,
    Encoder,
    EncoderBlock,
    FeedForward,
    LanguageModel,
    SequenceToSequence,
)
from polyhead.layers.variants import HeadMix, RoutedHeads

BATCH, LENGTH, SOURCE, EMBED, HEADS, LAYERS, VOCAB = 3, 11, 13, 24, 4, 2, 97
HEAD_DIM = EMBED // HEADS
DOUBLE = torch.float64

POSITIONS: dict[str, Positions | Callable[[], Positions] | None] = {
    "none": None,
    "rotary, shared": Rotary(HEAD_DIM),
    "rotary, one a block": lambda: Rotary(HEAD_DIM),
    "ALiBi": lambda: ALiBi(HEADS),
    "T5": lambda: T5Bias(HEADS, num_buckets=8, max_distance=7, bidirectional=False),
    "sinusoidal": lambda: Sinusoidal(EMBED),
    "learned": lambda: Learned(41, EMBED),
}
CACHES = ["growing", "preallocated", "paged"]


def language_model(positions: str = "rotary, shared", **options: Any) -> LanguageModel:
    model = LanguageModel(VOCAB, EMBED, HEADS, LAYERS, positions=POSITIONS[positions], **options).double().eval()
    return sharpened(model)


def sharpened(model: nn.Module) -> Any:
    """Larger weights, so that greedy tokens differ from place to place and no two logits are nearly alike."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.5)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCAB, shape)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


# ---- blocks


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
def test_the_feed_forward_network_is_its_formula(activation: str) -> None:
    layer = FeedForward(EMBED, 31, activation=activation).double()
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    up = x @ layer.up.weight.T + layer.up.bias
    if activation == "swiglu":
        assert layer.gate is not None
        gate = x @ layer.gate.weight.T + layer.gate.bias
        hidden = up * gate / (1 + torch.exp(-gate))
    else:
        hidden = up.clamp(min=0) if activation == "relu" else up * (1 + torch.erf(up / math.sqrt(2))) / 2
    close(layer(x), hidden @ layer.down.weight.T + layer.down.bias)


def test_the_feed_forward_network_is_equally_large_with_and_without_a_gate() -> None:
    sizes = [
        sum(p.numel() for p in FeedForward(48, activation=a).parameters() if p.ndim > 1) for a in ("gelu", "swiglu")
    ]
    assert sizes == [8 * 48**2, 8 * 48**2]


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_stand_before_or_after_the_parts(norm: str) -> None:
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    for norm_first in (True, False):
        block = EncoderBlock(EMBED, HEADS, norm=norm, norm_first=norm_first).double()
        attend, feed = lambda y, b=block: b.attention(y).output, block.feed_forward
        first, second = block.attention_norm, block.feed_forward_norm
        assert isinstance(first, nn.LayerNorm if norm == "layer" else nn.RMSNorm)
        if norm_first:
            middle = x + attend(first(x))
            expected = middle + feed(second(middle))
        else:
            middle = first(x + attend(x))
            expected = second(middle + feed(middle))
        close(block(x), expected)


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_block_is_that_of_torch(norm_first: bool) -> None:
    theirs = nn.TransformerEncoderLayer(
        EMBED, HEADS, 31, dropout=0.0, activation="relu", batch_first=True, norm_first=norm_first, dtype=DOUBLE
    )
    ours = EncoderBlock(EMBED, HEADS, hidden_dim=31, activation="relu", norm_first=norm_first).double()
    ours.attention = MultiHeadAttention.from_torch(theirs.self_attn)
    for mine, other in (
        (ours.attention_norm, theirs.norm1),
        (ours.feed_forward_norm, theirs.norm2),
        (ours.feed_forward.up, theirs.linear1),
        (ours.feed_forward.down, theirs.linear2),
    ):
        mine.load_state_dict(other.state_dict())
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=DOUBLE)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    close(ours(x), theirs(x))
    close(ours(x, mask=Mask.causal()), theirs(x, src_mask=later))


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_decoder_block_is_that_of_torch(norm_first: bool) -> None:
    theirs = nn.TransformerDecoderLayer(
        EMBED, HEADS, 31, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first, dtype=DOUBLE
    )
    ours = DecoderBlock(EMBED, HEADS, source_dim=EMBED, hidden_dim=31, norm_first=norm_first).double()
    ours.attention = MultiHeadAttention.from_torch(theirs.self_attn, causal=True)
    ours.cross_attention = MultiHeadAttention.from_torch(theirs.multihead_attn)
    for mine, other in (
        (ours.attention_norm, theirs.norm1),
        (ours.cross_attention_norm, theirs.norm2),
        (ours.feed_forward_norm, theirs.norm3),
        (ours.feed_forward.up, theirs.linear1),
        (ours.feed_forward.down, theirs.linear2),
    ):
        mine.load_state_dict(other.state_dict())
    x, source = (torch.randn(BATCH, n, EMBED, dtype=DOUBLE) for n in (LENGTH, SOURCE))
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    expected = theirs(x, source, tgt_mask=later)
    close(ours(x, source), expected)
    close(ours(x, ours.cross_attention.remember(source)), expected)


@pytest.mark.parametrize(
    "option",
    [
        {"softcap": 0.3},
        {"scale": 1.7},
        {"sinks": True},
        {"output_gate": "head"},
        {"qk_norm": "rms"},
        {"num_kv_heads": 2, "value_dim": 5},
        {"finite": True},
        {"backend": "reference"},
        {"bias": False, "output_bias": True},
        {"dtype": DOUBLE, "attention_dropout": 0.25},
    ],
    ids=lambda option: "-".join(option),
)
def test_cross_attention_has_the_options_of_the_self_attention(option: dict[str, Any]) -> None:
    options = {"positions": Rotary(HEAD_DIM), "window": 3, "hidden_dim": 31, "norm": "rms", "dropout": 0.125}
    block = DecoderBlock(EMBED, HEADS, source_dim=17, **options, **option)
    config = config_of(block.attention)
    expected = dataclasses.replace(
        config, positions=None, causal=False, window=None, key_input_dim=17, value_input_dim=17
    )
    assert config_of(block.cross_attention) == expected
    assert block.cross_attention.q_proj.weight.dtype is block.attention.q_proj.weight.dtype


def test_cross_attention_combines_its_heads_with_parameters_of_its_own() -> None:
    combine = HeadMix(EMBED, HEADS).combine
    block = DecoderBlock(EMBED, HEADS, source_dim=17, combine=combine)
    assert block.attention.combine is combine
    assert type(block.cross_attention.combine) is type(combine)
    own, others = (list(layer.combine.parameters()) for layer in (block.cross_attention, block.attention))
    assert len(own) == len(others) > 0
    assert not {id(x) for x in own} & {id(x) for x in others}


def test_dropout_is_for_training() -> None:
    block = EncoderBlock(EMBED, HEADS, dropout=0.3, attention_dropout=0.2)
    assert (block.attention.dropout, block.feed_forward.dropout.p, block.dropout.p) == (0.2, 0.3, 0.3)
    x = torch.randn(BATCH, LENGTH, EMBED)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_blocks_refuse_what_they_cannot_be() -> None:
    with pytest.raises(OptionError, match="activation must be 'gelu', 'relu' or 'swiglu', got 'tanh'"):
        EncoderBlock(EMBED, HEADS, activation="tanh")
    with pytest.raises(OptionError, match="norm must be 'layer' or 'rms', got 'batch'"):
        EncoderBlock(EMBED, HEADS, norm="batch")  # type: ignore[arg-type]
    x = torch.randn(BATCH, LENGTH, EMBED)
    with pytest.raises(OptionError, match="got one for a block built without it"):
        DecoderBlock(EMBED, HEADS)(x, x)
    with pytest.raises(OptionError, match="got none for a block built with it"):
        DecoderBlock(EMBED, HEADS, source_dim=EMBED)(x)


# ---- the language model


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_language_model_never_looks_ahead(positions: str) -> None:
    model, prompt = language_model(positions), tokens(BATCH, LENGTH)
    logits = model(prompt)
    assert logits.shape == (BATCH, LENGTH, VOCAB)
    changed = prompt.clone()
    changed[:, 7:] = tokens(BATCH, 4)
    assert torch.equal(model(changed)[:, :7], logits[:, :7])


@pytest.mark.parametrize("positions", [name for name in POSITIONS if name != "none"])
def test_a_language_model_knows_where_tokens_stand(positions: str) -> None:
    """Without positions two swapped earlier tokens are the same to the last one; with them they are not."""
    prompt = tokens(BATCH, LENGTH)
    swapped = prompt[:, [0, 9, 2, 3, 4, 5, 6, 7, 8, 1, 10]]
    one = {"num_kv_heads": 2}
    model = LanguageModel(VOCAB, EMBED, HEADS, 1, positions=POSITIONS[positions], **one).double()
    assert not torch.allclose(model(prompt)[:, -1], model(swapped)[:, -1], atol=1e-9)
    without = LanguageModel(VOCAB, EMBED, HEADS, 1, **one).double()
    close(without(prompt)[:, -1], without(swapped)[:, -1])


def test_added_positions_are_added_once_and_others_go_to_every_block() -> None:
    learned = language_model("learned")
    assert isinstance(learned.positions, Learned)
    assert all(block.attention.positions is None for block in learned.blocks)
    own = [block.attention.positions for block in language_model("T5").blocks]
    assert own[0] is not own[1]
    shared = [block.attention.positions for block in language_model("rotary, shared").blocks]
    assert shared[0] is shared[1]


def test_tied_embeddings_are_the_output_map() -> None:
    tied, free = language_model(tie_embeddings=True), language_model()
    assert sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters()) == VOCAB * EMBED
    tied(tokens(BATCH, LENGTH)).sum().backward()
    assert tied.embedding.weight.grad is not None
    assert int(tied.embedding.weight.grad.abs().sum(1).count_nonzero()) == VOCAB  # also tokens that were not read


@pytest.mark.parametrize("options", [{"norm_first": False}, {"norm": "rms", "activation": "swiglu", "num_kv_heads": 1}])
def test_a_language_model_learns_a_rule(options: dict[str, Any]) -> None:
    """Each token is the one three before it plus one: a single head can find that."""
    model = LanguageModel(17, EMBED, HEADS, LAYERS, positions=Rotary(HEAD_DIM), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.tensor(math.inf)
    for _ in range(60):
        data = torch.cat([(start := torch.randint(17, (32, 3))), (start + 1) % 17, (start + 2) % 17], 1)
        logits = model(data[:, :-1])
        loss = F.cross_entropy(logits[:, 2:].flatten(0, 1), data[:, 3:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.5  # chance is log 17 = 2.8


# ---- generation


@torch.no_grad()
def by_hand(model: LanguageModel, prompt: Tensor, count: int) -> Tensor:
    """The likeliest next token of one sequence, again and again, with nothing but the forward."""
    sequence = prompt
    for _ in range(count):
        sequence = torch.cat([sequence, model(sequence[None])[0, -1].argmax()[None]])
    return sequence[len(prompt) :]


@pytest.mark.parametrize("positions", POSITIONS)
def test_generation_is_the_forward_again_and_again(positions: str) -> None:
    model, prompt = language_model(positions, num_kv_heads=2), tokens(BATCH, LENGTH)
    expected = torch.stack([by_hand(model, row, 9) for row in prompt])
    assert len(expected.unique()) > 5  # a model that repeats itself would prove little
    for caches in (*CACHES, None):
        assert torch.equal(model.generate(prompt, 9, caches=caches), expected), caches


@pytest.mark.parametrize("positions", POSITIONS)
def test_ragged_prompts_generate_as_each_would_alone(positions: str) -> None:
    model = language_model(positions, num_kv_heads=2)
    lengths = [5, LENGTH, 1]
    prompts = [tokens(length) for length in lengths]
    expected = torch.stack([by_hand(model, prompt, 7) for prompt in prompts])
    for side in ("right", "left"):
        padded = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            padded[row, slice(None, len(prompt)) if side == "right" else slice(LENGTH - len(prompt), None)] = prompt
        for caches in (*CACHES, None):
            generated = model.generate(padded, 7, caches=caches, lengths=lengths, side=side)  # type: ignore[arg-type]
            assert torch.equal(generated, expected), (side, caches)


@pytest.mark.parametrize("positions", POSITIONS)
def test_cached_logits_are_those_of_the_full_forward(positions: str) -> None:
    model, prompt = language_model(positions), tokens(BATCH, LENGTH)
    whole = model(prompt)
    for kind in CACHES:
        caches = model.new_caches(kind, BATCH, capacity=LENGTH)
        with torch.no_grad():
            pieces = [model(piece, caches=caches) for piece in prompt.split([4, 1, 1, 5], 1)]
        close(torch.cat(pieces, 1), whole)


def test_a_windowed_model_generates_with_rolling_caches() -> None:
    model, prompt = language_model(window=5, num_kv_heads=1), tokens(BATCH, LENGTH)
    caches = model.new_caches("rolling", BATCH)
    assert [cache.window for cache in caches] == [5, 5]  # type: ignore[attr-defined]
    expected = torch.stack([by_hand(model, row, 13) for row in prompt])
    assert torch.equal(model.generate(prompt, 13, caches=caches), expected)
    assert torch.equal(model.generate(prompt, 13, caches="rolling"), expected)
    assert torch.equal(model.generate(prompt, 13, caches=None), expected)


def test_int8_caches_generate_nearly_the_same_logits() -> None:
    model = LanguageModel(VOCAB, EMBED, HEADS, LAYERS, positions=Rotary(HEAD_DIM)).double().eval()
    prompt = tokens(BATCH, LENGTH)
    caches = model.new_caches("quantized", BATCH, capacity=LENGTH)
    with torch.no_grad():
        approximate = torch.cat([model(piece, caches=caches) for piece in prompt.split(1, 1)], 1)
        exact = model(prompt)
    # One rounding is at most 1/254 of a token's largest number; two layers of an untrained model add little to it.
    assert 0 < float((approximate - exact).std() / exact.std()) < 1 / 254
    assert model.generate(prompt, 5, caches="quantized").shape == (BATCH, 5)


def test_generation_goes_on_from_caches_that_hold_a_prefix() -> None:
    model, prompt = language_model("learned"), tokens(BATCH, LENGTH)
    caches = model.new_caches(GrowingCache, BATCH)
    with torch.no_grad():
        model(prompt[:, :6], caches=caches)
    assert torch.equal(model.generate(prompt[:, 6:], 5, caches=caches), model.generate(prompt, 5))


def test_sampling_follows_the_generator_and_top_k() -> None:
    model, prompt = language_model(), tokens(1, LENGTH).expand(4000, -1)
    draw = lambda seed, **o: model.generate(prompt[:5], 7, generator=torch.Generator().manual_seed(seed), **o)  # noqa: E731
    assert torch.equal(draw(3, temperature=0.9), draw(3, temperature=0.9))
    assert torch.equal(draw(3, temperature=0.9), draw(3, temperature=0.9, caches=None))
    assert not torch.equal(draw(3, temperature=0.9), draw(4, temperature=0.9))
    greedy = model.generate(prompt[:5], 7)
    assert torch.equal(draw(3, temperature=5.0, top_k=1), greedy)
    assert torch.equal(draw(3, temperature=1e-9), greedy)
    logits = model(prompt[:1])[0, -1].detach()
    drawn = model.generate(prompt, 1, temperature=2.0, top_k=5)[:, 0]
    best = logits.topk(5).indices
    assert set(drawn.tolist()) <= set(best.tolist())
    expected = (logits[best] / 2.0).softmax(0) * len(drawn)
    counts = torch.bincount(drawn, minlength=VOCAB)[best]
    assert float(((counts - expected).square() / expected).sum()) < 24  # chi-squared of 4 degrees: 1 in 10,000


def test_a_sequence_says_nothing_after_eos_and_generation_ends_when_all_have_said_it() -> None:
    model, prompt = language_model(), tokens(BATCH, LENGTH)
    free = model.generate(prompt, 9)
    eos = int(free[0, 4])
    stopped = model.generate(prompt, 9, eos=eos)
    for row in range(BATCH):
        said = free[row].tolist()
        until = said.index(eos) + 1 if eos in said else 9
        width = stopped.shape[1]
        assert stopped[row].tolist() == (said[:until] + [eos] * 9)[:width]
    alone = model.generate(prompt[:1], 9, eos=eos)
    assert alone[0].tolist() == free[0, : free[0].tolist().index(eos) + 1].tolist()


@pytest.mark.parametrize("kind", ["growing", "preallocated", "paged", "rolling", "quantized"])
def test_generation_under_autocast_caches_in_its_dtype(kind: str) -> None:
    model = sharpened(LanguageModel(VOCAB, EMBED, HEADS, LAYERS, positions=Rotary(HEAD_DIM), qk_norm="rms", window=7))
    prompt = tokens(BATCH, LENGTH)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        caches = model.new_caches(kind, BATCH, capacity=LENGTH)
        pieces = torch.cat([model(piece, caches=caches) for piece in prompt.split([4, 1, 1, 5], 1)], 1)
        assert caches[0].view().key.dtype is torch.bfloat16
        assert model.generate(prompt, 5, caches=kind).shape == (BATCH, 5)
        whole = model(prompt)
        double = model.double()  # which autocast leaves in its dtype
        assert double.generate(prompt, 5, caches=kind).shape == (BATCH, 5)
        exact = double(prompt)
    assert 0 < (pieces - exact).norm() < 2 * (whole - exact).norm()


def test_generation_of_nothing_and_for_nobody() -> None:
    model = language_model()
    assert model.generate(tokens(BATCH, LENGTH), 0).shape == (BATCH, 0)
    for caches in ("growing", "preallocated", None):
        assert model.generate(tokens(0, LENGTH), 3, caches=caches).shape == (0, 3)


def test_generation_leaves_no_gradient_and_works_in_inference_mode() -> None:
    model, prompt = language_model(), tokens(BATCH, LENGTH)
    with torch.inference_mode():
        inside = model.generate(prompt, 5, caches="preallocated")
    assert torch.equal(inside, model.generate(prompt, 5))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_layer_refuses_padding_in_the_mask_beside_a_cache() -> None:
    model, x, padding = language_model(), torch.randn(BATCH, LENGTH, EMBED), Mask.lengths([LENGTH, 4, 7])
    caches = model.new_caches("growing", BATCH)
    with torch.no_grad(), pytest.raises(OptionError, match="padding of a call with a cache is passed as lengths="):
        model(tokens(BATCH, LENGTH), padding, caches)
    assert caches[0].lengths == (0,) * BATCH
    latent, routed = LatentAttention(EMBED, HEADS, kv_lora_rank=8), RoutedHeads(EMBED, HEADS, top_k=2)
    for layer, cache in ((latent, LatentCache()), (routed, GrowingCache())):
        with torch.no_grad(), pytest.raises(OptionError, match="padding of a call with a cache is passed as lengths="):
            layer(x, cache=cache, mask=padding)


@pytest.mark.parametrize("kind", ["preallocated", "quantized"])
def test_caches_too_small_for_the_new_tokens_are_refused_before_the_first_step(kind: str) -> None:
    model, prompt = language_model("rotary, shared"), tokens(BATCH, LENGTH)
    caches = model.new_caches(kind, BATCH, capacity=LENGTH + 8)
    assert model.generate(prompt[:, 4:], 13, caches=caches, lengths=[7, 2, 5]).shape == (BATCH, 13)  # exactly full
    assert caches[0].lengths == (LENGTH + 8, 14, 17)
    for cache in caches:
        cache.crop(4)
    with pytest.raises(CacheError, match="14 new tokens need a capacity of 20 tokens per sequence, got caches of 19"):
        model.generate(prompt[:, 4:], 14, caches=caches, lengths=[3, 2, 1])
    assert caches[0].lengths == (4, 4, 4)


def test_a_model_refuses_what_it_cannot_do() -> None:
    model, prompt = language_model(), tokens(BATCH, LENGTH)
    with pytest.raises(ShapeError, match=r"tokens must be \[batch, sequence\], got shape \[11\]"):
        model(prompt[0])
    with pytest.raises(ShapeError, match=r"tokens must be \[batch, sequence\], got shape \[11\]"):
        model.generate(prompt[0], 3)
    with pytest.raises(DtypeError, match=r"tokens must be integers, got torch.float32"):
        model(prompt.float())
    with pytest.raises(ShapeError, match="num_layers must be at least 1, got 0"):
        LanguageModel(VOCAB, EMBED, HEADS, 0)
    with pytest.raises(OptionError, match="one cache per block, got 1 for 2 blocks"):
        model(prompt, caches=[GrowingCache()])
    with pytest.raises(OptionError, match=r"lengths must be 1 to 11 for each of 3 prompts, got \[1, 0, 2\]"):
        model.generate(prompt, 3, lengths=[1, 0, 2])
    with pytest.raises(OptionError, match=r"temperature must be at least 0 and top_k at least 1, got -1.0 and None"):
        model.generate(prompt, 3, temperature=-1.0)
    with pytest.raises(OptionError, match="side must be 'left' or 'right', got 'top'"):
        model.generate(prompt, 3, side="top")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"kind must be one of 'growing', .* or a class, got 'endless'"):
        model.new_caches("endless", BATCH)
    with pytest.raises(OptionError, match="requires a model built with source_dim, got one built without it"):
        model.remember(torch.randn(BATCH, SOURCE, EMBED))


# ---- encoder and decoder


def sequence_model(**options: Any) -> SequenceToSequence:
    model = SequenceToSequence(89, VOCAB, EMBED, HEADS, LAYERS, **{"positions": lambda: Rotary(HEAD_DIM), **options})
    return sharpened(model.double().eval())


def test_padding_in_a_source_is_never_seen() -> None:
    for length in (LENGTH, SOURCE):  # also where source and target are equally long
        model, source, target = sequence_model(), tokens(BATCH, SOURCE) % 89, tokens(BATCH, length)
        lengths = [SOURCE, 1, 6]
        logits = model(source, target, source_lengths=lengths)
        assert logits.shape == (BATCH, length, VOCAB)
        for row, real in enumerate(lengths):
            close(logits[row], model(source[row : row + 1, :real], target[row : row + 1])[0])


def test_padding_in_a_target_changes_nothing_before_it() -> None:
    model, source, target = sequence_model(), tokens(BATCH, SOURCE) % 89, tokens(BATCH, LENGTH)
    lengths = [4, LENGTH, 7]
    logits = model(source, target, target_lengths=lengths)
    for row, real in enumerate(lengths):
        close(logits[row, :real], model(source[row : row + 1], target[row : row + 1, :real])[0])


POSITION_PAIRS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "T5, two-sided and one-sided": {
        "positions": lambda: T5Bias(HEADS, num_buckets=8, max_distance=7),
        "target_positions": lambda: T5Bias(HEADS, num_buckets=8, max_distance=7, bidirectional=False),
    },
    "learned": {"positions": lambda: Learned(29, EMBED)},
    "grouped heads, tied, post-norm": {"num_kv_heads": 2, "tie_embeddings": True, "norm_first": False},
}


@pytest.mark.parametrize("options", POSITION_PAIRS)
def test_a_sequence_model_generates_what_its_forward_says(options: str) -> None:
    model, source = sequence_model(**POSITION_PAIRS[options]), tokens(BATCH, SOURCE) % 89
    lengths, start = [SOURCE, 1, 6], 3
    target = torch.full((BATCH, 1), start)
    with torch.no_grad():
        for _ in range(9):
            best = model(source, target, source_lengths=lengths)[:, -1].argmax(-1)
            target = torch.cat([target, best[:, None]], 1)
    for caches in (*CACHES, None):
        generated = model.generate(source, 9, start=start, source_lengths=lengths, caches=caches)
        assert torch.equal(generated, target[:, 1:]), caches


def test_a_source_is_projected_once_for_all_steps() -> None:
    model, source = sequence_model(), tokens(BATCH, SOURCE) % 89
    projected: list[torch.Size] = []
    for block in model.decoder.blocks:
        block.cross_attention.k_proj.register_forward_hook(lambda module, args, out: projected.append(args[0].shape))
    model.generate(source, 9, start=1)
    assert projected == [torch.Size((BATCH, SOURCE, EMBED))] * LAYERS


def test_every_parameter_of_a_sequence_model_learns() -> None:
    model = sequence_model().train()
    model(tokens(BATCH, SOURCE) % 89, tokens(BATCH, LENGTH), source_lengths=[3, 13, 5]).square().mean().backward()
    assert all(
        p.grad is not None and bool(p.grad.any()) for name, p in model.named_parameters() if "k_proj.bias" not in name
    )


def test_an_encoder_looks_both_ways() -> None:
    encoder, source = Encoder(VOCAB, EMBED, HEADS, LAYERS).double(), tokens(BATCH, SOURCE)
    changed = source.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCAB
    assert not torch.allclose(encoder(changed)[:, 0], encoder(source)[:, 0])
