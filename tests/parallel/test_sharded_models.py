"""Layers of polyhead in sharded models: outputs, statistics, checkpoints of other numbers of ranks, and edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import polyhead
from polyhead import surgery
from polyhead.errors import OptionError
from polyhead.layers.positions import Rotary
from polyhead.layers.transformer import LanguageModel
from polyhead.sources.fingerprint import fingerprint
from polyhead.training import edit_heads
from tests.ranks import Ranks

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def language_model(seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(31, 24, 4, 2, num_kv_heads=2, positions=Rotary(6), hidden_dim=32).double()


def sharded(model: LanguageModel) -> LanguageModel:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def tokens(step: int = 0) -> Tensor:
    return torch.randint(31, (3, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    logits = model(tokens(step))
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens(step)[:, 1:].flatten())


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    model = sharded(language_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = stepped(model, optimizer, range(2))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    with polyhead.observe(model) as session:
        model(tokens())
    return losses, {name: session.profile[name] for name in session.profile.columns}


def load(folder: str) -> list[float]:
    model = sharded(language_model(seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return stepped(model, optimizer, range(2, 4))


def test_a_checkpoint_of_four_ranks_is_loaded_by_two(ranks: Ranks, tmp_path: Path) -> None:
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = stepped(model, optimizer, range(2))
    with polyhead.observe(model) as session:
        model(tokens())
    for losses, profile in ranks.run(save, str(tmp_path / "checkpoint"), world=4):
        assert losses == pytest.approx(expected, rel=1e-12)
        for name, values in profile.items():
            torch.testing.assert_close(values, session.profile[name], rtol=1e-10, atol=1e-12, equal_nan=True)
    expected = stepped(model, optimizer, range(2, 4))
    for losses in ranks.run(load, str(tmp_path / "checkpoint"), world=2):
        assert losses == pytest.approx(expected, rel=1e-12)


def edit() -> list[Any]:
    """Edit a sharded model as the guide says: the full state dict, an edit, and sharding again."""
    model, edits = sharded(language_model()), [surgery.PruneHeads(0, (0, 1))]
    messages = []
    assert fingerprint(model) == fingerprint(language_model())
    for attempt in (
        lambda: surgery.apply(model, edits),
        lambda: edit_heads(model, torch.optim.AdamW(model.parameters()), edits),
    ):
        with pytest.raises(OptionError, match="heads are edited in whole weights") as error:
            attempt()
        messages.append(str(error.value))
    whole = language_model(seed=1 + dist.get_rank())
    set_model_state_dict(whole, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    surgery.apply(whole, edits)
    return [*messages, loss_of(sharded(whole)).item()]


def test_a_sharded_model_is_edited_in_whole_weights(ranks: Ranks) -> None:
    model = language_model()
    surgery.apply(model, [surgery.PruneHeads(0, (0, 1))])
    expected = loss_of(model).item()
    for *messages, loss in ranks.run(edit, world=2):
        assert all("before fully_shard" in message for message in messages)
        assert loss == pytest.approx(expected, rel=1e-12)
