"""HeadMonitor and QKClip with data parallel and sharded models, held against one process with all of the data."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from polyhead.errors import OptionError
from polyhead.layers.positions import Rotary
from polyhead.layers.transformer import LanguageModel
from polyhead.parallel import head_parallel_plan
from polyhead.training import ClippedHeads, HeadMonitor, MonitorCallback, QKClip, StepRecord
from polyhead.training.trainer_callbacks import LATE
from tests.ranks import Failure, Ranks

STEPS, VOCABULARY = 3, 40


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, attn_implementation="sdpa", **sizes)
    return LlamaForCausalLM(config).train()


def batch(rank: int, step: int) -> dict[str, Tensor]:
    """Return a batch of a rank; the sizes and the padding of ranks differ."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    tokens = torch.randint(VOCABULARY, (2 + rank, 7 + step), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, : 1 + rank] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def sharded(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def history_of(monitor: HeadMonitor) -> dict[str, Any]:
    history = monitor.history
    columns = {name: history[name] for name in history.columns}
    pairs = monitor.state_dict()["history"]["pairs"]
    return {"steps": history.steps, "losses": torch.tensor(history.losses), "pairs": pairs, **columns}


def trained(model: nn.Module, inner: nn.Module, ranks: list[int]) -> dict[str, Any]:
    """Train a model on the data of ranks, one micro-batch each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with HeadMonitor(inner, pairs_every=2) as monitor:
        for step in range(STEPS):
            losses = [model(**batch(rank, step)).loss for rank in ranks]
            for loss in losses:
                (loss / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(torch.stack(losses).mean().detach())
    return history_of(monitor)


def train_rank(kind: str) -> dict[str, Any]:
    model = llama()
    if kind == "replicated":
        return trained(DistributedDataParallel(model), model, [dist.get_rank()])
    if kind == "sharded and checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sharded(model)
    return trained(model, model, [dist.get_rank()])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["replicated", "sharded", "sharded and checkpointed"])
def test_a_monitor_has_the_values_of_one_process_with_all_the_data(ranks: Ranks, kind: str, world: int) -> None:
    model = llama()
    expected = trained(model, model, list(range(world)))
    for found in ranks.run(train_rank, kind, world=world):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(
                found[name], values, rtol=1e-4, atol=1e-6, equal_nan=True, msg=lambda x, name=name: f"{name}: {x}"
            )


def in_half_precision() -> dict[str, Any]:
    model = sharded(llama(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return trained(model, model, [dist.get_rank()])


def test_mixed_precision_is_that_of_the_sharded_model(ranks: Ranks) -> None:
    model = llama()
    expected = trained(model, model, [0, 1])
    for found in ranks.run(in_half_precision, world=2):
        for name in ("losses", "entropy", "output_norm", "gradient_norm"):
            torch.testing.assert_close(found[name], expected[name], rtol=0.03, atol=0.01)


def with_counted_collectives() -> tuple[list[int], int, dict[str, Any]]:
    """Count the collectives of each step; in the second one rank 1 has no forward, and rank 0 no loss."""
    model, calls = llama(), []
    reduce = dist.all_reduce

    def counted(values: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(values.numel())
        return reduce(values, *args, **kwargs)

    counts, rank = [], dist.get_rank()
    with mock.patch.object(dist, "all_reduce", counted), HeadMonitor(model, pairs_every=2, every=2) as monitor:
        for step in range(4):
            before = len(calls)
            if rank == 0 or step != 2:
                loss = model(**batch(rank, step)).loss
                loss.backward()
            monitor.step(None if step == 2 and rank == 0 else 2.0 + rank)
            counts.append(len(calls) - before)
    return counts, calls[-1], history_of(monitor)


def test_a_step_is_one_all_reduce_and_a_rank_may_have_no_data(ranks: Ranks) -> None:
    (counts, size, found), (_, _, others) = ranks.run(with_counted_collectives, world=2)
    assert counts == [1, 0, 1, 0]
    heads, sites, rows = 8, 2, 5
    sums = 2 * rows * heads + 257 * heads + sites + 2 * heads + 1  # rows, histogram, tokens, outputs, gradients, loss
    flags = sites * (3 + 4) + 1
    assert size == flags + sums + 2 * rows * heads  # the maxima of both ranks
    assert found["losses"].tolist() == [2.5, 3.0]
    for name, values in found.items():
        torch.testing.assert_close(others[name], values, rtol=0, atol=0, equal_nan=True)
    with HeadMonitor(model := llama(), pairs_every=2, every=2) as monitor:
        for step in range(4):
            if step < 2:
                (model(**batch(1, step)).loss / 2).backward()
            (model(**batch(0, step)).loss / 2).backward()
            monitor.step()
    expected = history_of(monitor)
    for name in ("max_logit", "entropy", "output_norm", "gradient_norm"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def with_losses_of_some_ranks() -> list[tuple[bool, float]]:
    """Pass no loss in the first step, and in the others that of rank 1 alone, at last a NaN."""
    model = llama()
    with HeadMonitor(model, statistics="entropy") as monitor:
        for step, loss in enumerate((None, 2.0, torch.nan)):
            model(**batch(dist.get_rank(), step))
            monitor.step(loss if dist.get_rank() == 1 else None)
    return [(record.has_loss, record.loss) for record in monitor.history.records()]


def test_a_step_without_a_loss_on_any_rank_has_none(ranks: Ranks) -> None:
    for first, second, third in ranks.run(with_losses_of_some_ranks, world=2):
        assert (first[0], second, third[0]) == (False, (True, 2.0), True)
        assert first[1] != first[1]
        assert third[1] != third[1]


def with_a_difference(kind: str) -> None:
    rank = dist.get_rank()
    model = llama()
    if kind == "heads" and rank == 1:
        model.model.layers = model.model.layers[:1]
    options = {"every": 1 + rank} if kind == "every" else {}
    with HeadMonitor(model, **options) as monitor:
        if kind != "forward" or rank == 0:
            model(**batch(rank, 0)).loss.backward()
        monitor.step()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("heads", r"every rank must pass the same heads, got .* on rank 1 and .* on rank 0 of 2"),
        ("every", r"every rank must pass the same every, got 2 on rank 1 and 1 on rank 0 of 2"),
        ("forward", r"a rank must have a forward of the model in training mode"),
    ],
)
def test_ranks_that_disagree_are_refused_by_every_rank(ranks: Ranks, kind: str, words: str) -> None:
    for outcome in ranks.outcomes(with_a_difference, kind, world=2):
        assert isinstance(outcome, Failure)
        assert outcome.error == "OptionError"
        assert re.search(words, outcome.message), outcome.message


def clipped(model: nn.Module, ranks: list[int], threshold: float) -> ClippedHeads:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with QKClip(model, optimizer, threshold) as clip:
        for rank in ranks:
            model(**batch(rank, 0)).loss.backward()
        optimizer.step()
    return clip.latest


def clip_rank(threshold: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = sharded(llama())
    factors = dict(clipped(model, [dist.get_rank()], threshold).factor)
    return factors, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def test_qk_clip_scales_sharded_weights(ranks: Ranks) -> None:
    model = llama()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    logits = torch.cat(list(clipped(model, [0, 1, 2], 100.0).max_logit.values()))
    threshold = float(logits.sort().values[3:5].mean())  # half of the heads are above it
    factors = dict(clipped(model, [0, 1, 2], threshold).factor)
    assert sum(int((x < 1).sum()) for x in factors.values()) == 4
    results = ranks.run(clip_rank, threshold, world=3)
    for found, _ in results:
        torch.testing.assert_close(found, factors, rtol=1e-5, atol=0)
    _, weights = results[0]  # the others have none
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {name for name in weights if "q_proj" in name}
    for name, x in model.state_dict().items():
        torch.testing.assert_close(weights[name], x, rtol=1e-5, atol=0)
        same = (x == before[name]) == (weights[name] == before[name])
        assert same.all(), name


# ---- trainers


class Stopping(MonitorCallback):
    """Ask to stop at a step, in one rank."""

    def on_record(self, record: StepRecord) -> None:
        self.should_stop |= record.step == 4 and dist.get_rank() == 1


def sequences(count: int) -> list[dict[str, Tensor]]:
    tokens = torch.randint(1, VOCABULARY, (count, 9), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": x, "labels": x} for x in tokens]


def as_launched_by_torchrun() -> Any:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": "1",
    }
    values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GROUP_RANK": "0"}
    return mock.patch.dict(os.environ, values)


def trained_by_transformers(folder: str, monitor: HeadMonitor, batch_size: int) -> dict[str, Any]:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=batch_size, max_steps=10, gradient_accumulation_steps=2, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
        optim="sgd",
    )  # fmt: skip
    trainer = Trainer(monitor.model, arguments, train_dataset=sequences(64))
    trainer.add_callback(monitor.trainer_callback())
    with monitor:
        trainer.train()
    return history_of(monitor)


def trainer_rank(folder: str) -> dict[str, Any]:
    with as_launched_by_torchrun():
        return trained_by_transformers(folder, HeadMonitor(llama(), callbacks=[Stopping()]), 2)


def test_a_trainer_with_several_ranks(ranks: Ranks, tmp_path: Path) -> None:
    found, other = ranks.run(trainer_rank, str(tmp_path), world=2)
    assert found["steps"] == other["steps"] == tuple(range(5 + LATE))  # a request is read two steps later
    expected = trained_by_transformers(str(tmp_path / "one"), HeadMonitor(llama()), 4)
    for name in ("losses", "entropy", "max_logit", "gradient_norm"):
        assert torch.equal(found[name], other[name])
        torch.testing.assert_close(found[name], expected[name][: 5 + LATE], rtol=1e-4, atol=1e-6)


def fitted_by_lightning(monitor: HeadMonitor, batch_size: int, **options: Any) -> dict[str, Any]:
    from lightning import pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = monitor.model

        def training_step(self, inputs: dict[str, Tensor]) -> Tensor:
            return self.model(**inputs).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": False, "use_distributed_sampler": False}  # its own shuffles
    trainer = lightning.Trainer(callbacks=[monitor.lightning_callback()], max_steps=4, **quiet, **options)
    with monitor:
        data, replicas = sequences(32), 4 // batch_size
        sampler = DistributedSampler(data, replicas, dist.get_rank() if replicas > 1 else 0, shuffle=False)
        trainer.fit(Module(), DataLoader(data, batch_size, sampler=sampler))
    return history_of(monitor)


def lightning_rank() -> dict[str, Any]:
    with as_launched_by_torchrun():
        return fitted_by_lightning(HeadMonitor(llama()), 2, strategy="ddp", devices=dist.get_world_size())


def lightning_alone() -> dict[str, Any]:
    return fitted_by_lightning(HeadMonitor(llama()), 4)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_lightning_with_several_ranks(ranks: Ranks) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs Lightning: pip install 'polyhead[train]'")
    found, other = ranks.run(lightning_rank, world=2)
    (expected,) = ranks.run(lightning_alone, world=1)  # by a rank that has imported Lightning
    for name in ("losses", "entropy", "max_logit", "gradient_norm"):
        assert torch.equal(found[name], other[name])
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


# ---- heads over ranks


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(31, 24, 3, 2, positions=lambda: Rotary(8)).double().train()


def monitored_rows(model: nn.Module, replicas: list[int], **options: Any) -> dict[str, Any]:
    with HeadMonitor(model, **options) as monitor:
        for replica in replicas:
            model(torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(replica)))
        monitor.step(1.0)
    return history_of(monitor)


def two_by_two() -> tuple[str, dict[str, Any]]:
    """Two replicas of a model whose three heads are distributed over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = language_model()
    parallelize_module(model, mesh["tp"], head_parallel_plan(model))
    with pytest.raises(OptionError) as refused, HeadMonitor(model):
        pass
    found = monitored_rows(model, [mesh.get_local_rank("dp")], process_group=mesh["dp"].get_group())
    return str(refused.value), found


def test_ranks_that_share_the_heads_of_a_layer_count_their_data_once(ranks: Ranks) -> None:
    expected = monitored_rows(language_model(), [0, 1])
    for message, found in ranks.run(two_by_two):
        assert "pass the ranks with other data as process_group" in message
        for name in ("entropy", "max_logit", "normalized_entropy_p10", "sink_mass"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)
