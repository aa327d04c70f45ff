"""A monitor in a `Trainer` or in Lightning: steps, losses, checkpoints, requests, and equal numbers after a resume."""

from __future__ import annotations

import itertools
import logging
import sys
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from polyhead.errors import OptionError
from polyhead.training import HeadHistory, HeadMonitor, MonitorCallback, StepRecord
from polyhead.training.trainer_callbacks import LATE, Requests

COLUMNS = ("entropy", "max_logit")


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3
    )
    return transformers.LlamaForCausalLM(config).train()


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 61, (count, 9), generator=generator)
    return [{"input_ids": x, "labels": x} for x in ids]


class Requesting(MonitorCallback):
    """Ask for a checkpoint and an end at given steps, and count records in its state."""

    def __init__(self, save: int = -1, stop: int = -1) -> None:
        self.save, self.stop, self.count = save, stop, 0

    def on_record(self, record: StepRecord) -> None:
        self.count += 1
        self.should_save |= record.step == self.save
        self.should_stop |= record.step == self.stop

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def assert_same(history: HeadHistory, expected: HeadHistory) -> None:
    assert history.steps == expected.steps
    assert history.losses == expected.losses
    assert history.heads == expected.heads
    for name in COLUMNS:
        assert torch.equal(history[name], expected[name])


def trained(folder: Path, monitor: HeadMonitor, resume: str | None = None, **options: Any) -> transformers.Trainer:
    defaults = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 7, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no",
        "dataloader_pin_memory": False,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **{**defaults, **options})
    trainer = transformers.Trainer(monitor.model, arguments, train_dataset=sequences(28))
    trainer.add_callback(monitor.trainer_callback())
    with monitor:
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_a_resumed_trainer_has_the_history_of_an_uninterrupted_one(tmp_path):
    options = {"every": 2, "statistics": COLUMNS}
    whole = HeadMonitor(llama(), callbacks=[Requesting()], **options)
    trained(tmp_path / "whole", whole)
    first = HeadMonitor(llama(), callbacks=[Requesting(stop=2)], **options)
    trained(tmp_path, first, save_strategy="steps", save_steps=3)
    checkpoint = str(tmp_path / "checkpoint-3")
    for restore in (False, True):
        counted = Requesting()
        second = HeadMonitor(llama(), callbacks=[counted], **options)
        trained(tmp_path, second, checkpoint, restore_callback_states_from_checkpoint=restore)
        assert second.steps == 7
        assert_same(second.history, whole.history)
        assert counted.count == 4


def test_the_loss_of_a_step_is_that_of_all_its_micro_batches(tmp_path):
    monitor = HeadMonitor(llama(), every=2)
    trainer = trained(tmp_path, monitor, logging_strategy="steps", logging_steps=1)
    logged = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    assert monitor.history.losses == pytest.approx(logged[::2], rel=1e-3)
    assert not monitor.model._forward_hooks


def test_the_loss_is_the_one_that_the_trainer_has_scaled_for_several_processes(tmp_path, monkeypatch):
    plain = transformers.Trainer.compute_loss

    def compute_loss(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = plain(self, *arguments, **options)
        loss *= 3  # as for 3 processes
        return loss

    monkeypatch.setattr(transformers.Trainer, "compute_loss", compute_loss)
    monitor = HeadMonitor(llama())
    trainer = trained(tmp_path, monitor, logging_strategy="steps", logging_steps=1, max_steps=2)
    logged = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    assert monitor.history.losses == pytest.approx(logged, rel=1e-3)


def test_the_loss_of_a_model_that_does_not_count_tokens_is_the_mean(tmp_path):
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return self.model(input_ids, labels=labels)

    monitor = HeadMonitor(Plain())
    trainer = trained(tmp_path, monitor, logging_strategy="steps", logging_steps=1)
    logged = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    assert monitor.history.losses == pytest.approx(logged, rel=1e-3)


def test_a_monitor_that_joins_a_resumed_run_counts_from_its_step(tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    plain = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **arguments)
    transformers.Trainer(llama(), plain, train_dataset=sequences(28)).train()
    monitor = HeadMonitor(llama(), every=2)
    # Saves again, which needs an entry for the monitor in the resumed state.
    options = {"max_steps": 6, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
    trained(tmp_path, monitor, str(tmp_path / "checkpoint-3"), save_strategy="steps", save_steps=3, **options)
    assert monitor.history.steps == (4,)
    with pytest.raises(OptionError, match="a monitor after 6 steps and a checkpoint of step 3"):
        trained(tmp_path, monitor, str(tmp_path / "checkpoint-3"), **options)


def test_a_trainer_takes_one_monitor(tmp_path):
    one, two = HeadMonitor(llama()), HeadMonitor(llama())
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = transformers.Trainer(one.model, arguments, train_dataset=sequences(8))
    trainer.add_callback(one.trainer_callback())
    trainer.add_callback(two.trainer_callback())
    with one, pytest.raises(OptionError, match="one monitor, got several"):
        trainer.train()


def failing(forward: int) -> nn.Module:
    """Return a model of which a given forward raises."""
    model, forwards = llama(), itertools.count(1)

    def fail(*_: object) -> None:
        if next(forwards) == forward:
            raise RuntimeError("out of memory")

    model.lm_head.register_forward_pre_hook(fail)
    return model


def test_an_error_in_training_leaves_no_hook_and_no_part_of_its_step(tmp_path):
    model = failing(4)  # the second micro-batch of the second step
    monitor = HeadMonitor(model, statistics=COLUMNS)
    with pytest.raises(RuntimeError, match="out of memory"):
        trained(tmp_path, monitor)
    assert not any(module._forward_hooks for module in model.modules())
    assert monitor.history.steps == (0,)

    model = failing(4)
    retried = HeadMonitor(model, statistics=("entropy", "output_norm"))
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
        learning_rate=0.0,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=sequences(28))
    trainer.add_callback(retried.trainer_callback())
    with retried:
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.train()
        trainer.train()
    assert retried.history.steps == (0, 1, 2)
    assert retried.history.losses[1] == pytest.approx(retried.history.losses[0])  # the same data
    torch.testing.assert_close(retried.history["entropy"][1], retried.history["entropy"][0])
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("again", ["train", "with"])
def test_a_loop_that_starts_again_after_a_stop_runs_until_the_next_request(tmp_path, again):
    requesting = Requesting(stop=2)
    monitor = HeadMonitor(llama(), callbacks=[requesting], statistics=COLUMNS)
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=4, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(monitor.model, arguments, train_dataset=sequences(28))
    trainer.add_callback(monitor.trainer_callback())
    with monitor:
        trainer.train()
        assert monitor.steps == 3
        assert requesting.should_stop
        if again == "train":
            trainer.train()
    assert again == "train" or requesting.should_stop  # after the block, too
    if again == "with":
        with monitor:
            trainer.train()
    assert monitor.steps == 3 + 4
    requesting.stop = 8
    with monitor:
        trainer.train()
    assert monitor.steps == 3 + 4 + 2


# ---- Lightning


def fitted(folder: Path, monitor: HeadMonitor, resume: Path | None = None, **options: Any) -> Any:
    """Fit in Lightning with two micro-batches per step; return its trainer."""
    lightning = pytest.importorskip(
        "lightning.pytorch", reason="needs Lightning: pip install 'polyhead[train]'", exc_type=ImportError
    )

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = monitor.model
            self.losses: list[float] = []

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    checkpoints = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    callbacks = [checkpoints, monitor.lightning_callback()]
    defaults = {"max_steps": 7, "accumulate_grad_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 1}
    trainer = lightning.Trainer(callbacks=callbacks, default_root_dir=folder, **quiet, **{**defaults, **options})
    # 5 batches per epoch: the third step of an epoch has one micro-batch.
    batches, validation = (torch.utils.data.DataLoader(sequences(n), batch_size=2) for n in (10, 2))
    module = Module()
    with monitor:
        trainer.fit(module, batches, validation, ckpt_path=resume)
    trainer.own_losses = module.losses
    return trainer


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_lightning_counts_optimizer_steps_and_resumes(tmp_path):
    options = {"every": 2, "statistics": COLUMNS}
    whole = HeadMonitor(llama(), callbacks=[Requesting()], **options)
    trainer = fitted(tmp_path / "whole", whole)
    assert trainer.global_step == whole.steps == 7
    assert whole.history.steps == (0, 2, 4, 6)
    groups = [(0, 1), (2, 3), (4,), (5, 6), (7, 8), (9,), (10, 11)]
    means = [sum(trainer.own_losses[i] for i in group) / len(group) for group in groups]
    assert whole.history.losses == pytest.approx(means[::2])
    counted = Requesting()
    second = HeadMonitor(llama(), callbacks=[counted], **options)
    fitted(tmp_path / "resumed", second, tmp_path / "whole" / "step=3.ckpt")
    assert second.steps == 7
    assert_same(second.history, whole.history)
    assert counted.count == 4


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_lightning_saves_and_stops_on_request(tmp_path):
    monitor = HeadMonitor(llama(), callbacks=[Requesting(save=1, stop=4)])
    trainer = fitted(tmp_path, monitor)
    assert trainer.global_step == 5
    saved = torch.load(tmp_path / "heads-step=2.ckpt", weights_only=False)
    assert saved["global_step"] == saved["callbacks"]["HeadMonitor"]["steps"] == 2
    assert not (tmp_path / "heads-step=3.ckpt").exists()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_lightning_continues_after_a_stop(tmp_path):
    requesting = Requesting(stop=1)
    monitor = HeadMonitor(llama(), callbacks=[requesting])
    assert fitted(tmp_path, monitor).global_step == 2
    assert requesting.should_stop
    assert fitted(tmp_path, monitor).global_step == 7
    assert monitor.steps == 2 + 7


def test_without_lightning_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(OptionError, match="pip install lightning"):
        HeadMonitor(llama()).lightning_callback()


def _process(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=2)
    callback = MonitorCallback()

    def reset_stop() -> None:
        callback.should_stop = False

    requests = Requests(SimpleNamespace(callbacks=(callback,), model=nn.Linear(2, 2), reset_stop=reset_stop))
    answers = []
    for step in range(6):
        callback.should_save |= step == 1 and rank == 0
        callback.should_stop |= step == 2 and rank == 1
        answers.append(requests.take())
    requests.start()  # of another loop
    answers += [requests.take() for _ in range(LATE + 2)]
    torch.save(answers, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_all_processes_act_on_a_request_at_the_same_step(tmp_path):
    processes = [get_context("fork").Process(target=_process, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    expected = [(step >= 2 + LATE, step == 1 + LATE) for step in range(6)]
    expected += [(False, False)] * (LATE + 2)
    assert torch.load(tmp_path / "0.pt") == torch.load(tmp_path / "1.pt") == expected
