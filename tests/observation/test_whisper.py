"""Whisper: its three kinds of attention are distinguished, and the statistics match its returned weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import pytest
import torch
from torch import Tensor, nn

import polyhead
from polyhead.observation import AttentionSite, BatchMetadata
from polyhead.ops.attended import Attended
from tests.observation.from_weights import Expected, assert_table
from tests.observation.whisper_tiny import NO_TIMESTAMPS, START, chirps, mel, speech, whisper_tiny

# "ask not what your country can do for you", in the vocabulary of GPT-2, which this model shares.
ASK_NOT = [1265, 407, 644, 534, 1499, 460, 466, 329, 345]
# The cross-attention heads by which OpenAI's own program finds when each word of tiny.en was said.
ALIGNING = {(1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return whisper_tiny()


@dataclass(frozen=True)
class MostAttended:
    """Gathers the frame that each token looks at most, of one call."""

    name: str = "most_attended"

    def empty(self, site: AttentionSite, device: torch.device) -> Frames | None:
        return Frames() if site.kind == "cross" else None


@dataclass(frozen=True, eq=False)
class Frames:
    frames: Tensor | None = None  # [heads, tokens]

    def update(self, attended: Attended, real: Tensor | None, metadata: BatchMetadata) -> Self:
        found = attended.profile(argmax=True).argmax
        assert found is not None
        return replace(self, frames=found[0])

    def merge(self, other: Self) -> Self:
        return other

    def state(self) -> dict[str, Tensor]:
        return {} if self.frames is None else {"frames": self.frames}

    def with_state(self, state: Mapping[str, Tensor]) -> Self:
        return replace(self, frames=state.get("frames"))


def test_the_statistics_of_every_head_are_those_of_the_weights_it_returns(model: nn.Module) -> None:
    """In float64, where no weight is lost: 8 of the 30 seconds, and some tokens that lead the decoder."""
    frames = 400
    model = copy.deepcopy(model).double()
    model.config.max_source_positions = frames
    encoder = model.get_encoder()
    encoder.embed_positions = nn.Embedding.from_pretrained(encoder.embed_positions.weight[:frames])
    tokens = torch.tensor([[START, NO_TIMESTAMPS, 843, 523, *ASK_NOT]])
    sound = mel(chirps())[..., : 2 * frames].double()
    inputs = {"input_features": sound, "decoder_input_ids": tokens, "use_cache": False}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(**inputs, output_attentions=True)
        with polyhead.observe(model) as session:
            watched = model(**inputs)
    torch.testing.assert_close(watched.logits, eager.logits, rtol=1e-9, atol=1e-9)
    table = session.profile
    stacks = {"encoder": Expected(), "decoder": Expected(), "cross": Expected(cross=True)}
    heard, every, zero = torch.ones(1, frames).bool(), torch.ones(1, 13).bool(), torch.zeros(1).long()
    stacks["encoder"].add(eager.encoder_attentions, heard, zero)
    stacks["decoder"].add(eager.decoder_attentions, every, zero)
    stacks["cross"].add(eager.cross_attentions, every, zero)
    assert_table(table, stacks)
    told = {(site.stack, site.kind): site.num_heads for site in table.sites}
    assert told == {
        ("model.encoder.layers.*.self_attn", "self"): 6,
        ("model.decoder.layers.*.self_attn", "self"): 6,
        ("model.decoder.layers.*.encoder_attn", "cross"): 6,
    }
    assert len(table) == 3 * 4 * 6


@pytest.mark.data
def test_it_understands_speech_while_it_is_watched_and_its_aligning_heads_follow_the_voice(data_dir, model) -> None:
    heard = mel(speech(data_dir))
    tokens = torch.tensor([[START, NO_TIMESTAMPS]])
    with torch.no_grad(), polyhead.observe(model, statistics=False, collect=[MostAttended()]) as session:
        encoded = model.get_encoder()(heard)
        for _ in range(40):
            logits = model(encoder_outputs=encoded, decoder_input_ids=tokens, use_cache=False).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
            if tokens[0, -len(ASK_NOT) :].tolist() == ASK_NOT:
                break
        model(encoder_outputs=encoded, decoder_input_ids=tokens, use_cache=False)
    assert tokens[0, -len(ASK_NOT) :].tolist() == ASK_NOT
    follows = {}
    for site, values in session.observations.collected.items():
        if site.kind == "self":
            assert values == {}
            continue
        frames = values["most_attended"].frames[:, 2:].double()  # of the tokens that were said
        order = torch.arange(frames.shape[1]).double().expand_as(frames)
        for head in range(site.num_heads):
            follows[site.layer, head] = float(torch.corrcoef(torch.stack([order[head], frames[head]]))[0, 1])
    assert len(follows) == 24
    assert all(follows[place] > 0.95 for place in ALIGNING)
    assert sum(found < 0.9 for found in follows.values()) >= 8  # and others listen to something else
