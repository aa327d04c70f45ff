"""The monitor's values are those of each step, whatever else happens around them."""

from __future__ import annotations

import contextlib
import csv
import math

import pytest
import torch
import transformers
from torch import nn

import polyhead
from polyhead import MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.integrations.huggingface.attention import WATCHERS
from polyhead.training import DropHead, HeadGates, HeadMonitor, MonitorCallback, QKClip, StepRecord
from polyhead.training.monitor import STATISTICS, _Pending
from tests.observation.direct_models import GPT, VOCABULARY

WIDTH, HEADS = 32, 4
HF = {"vocab_size": 61, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**HF, num_attention_heads=HEADS, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).train()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 61, (2, 9), generator=generator) for _ in range(count)]


def train(model: nn.Module, data: list[torch.Tensor], monitor: HeadMonitor | None = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for ids in data:
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step(loss)
    return losses


def profile_of(model: nn.Module, *data: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad(), polyhead.observe(model, statistics=STATISTICS) as session:
        for ids in data:
            model(ids)
    columns = {name: session.profile[name] for name in STATISTICS}
    return {**columns, "max_logit": session.profile["max_logit_max"]}


def test_every_step_has_the_values_of_its_own_forward_and_weights():
    model, data = llama(), batches(4)
    with HeadMonitor(model) as monitor:
        losses = train(model, data, monitor)
    model, optimizer_free = llama(), []
    for index, ids in enumerate(data):
        optimizer_free.append(profile_of(model, ids))
        train(model, data[index : index + 1])
    history = monitor.history
    assert history.steps == (0, 1, 2, 3)
    assert history.losses == pytest.approx(losses)
    assert [(head.layer, head.head) for head in history.heads] == [(i, j) for i in range(2) for j in range(HEADS)]
    for name in STATISTICS:
        expected = torch.stack([columns[name] for columns in optimizer_free])
        torch.testing.assert_close(history[name], expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(history["max_logit"][0], history["max_logit"][3], rtol=1e-2)


def test_micro_batches_of_a_step_are_counted_together_and_evaluation_is_not():
    model, (first, second, other) = llama(), batches(3)
    expected = profile_of(model, first, second)
    with HeadMonitor(model) as monitor:
        model(first)
        model.eval()
        model(other)
        model.train()
        model(second)
        monitor.step()
        model(other)  # of a step that does not end
    for name in STATISTICS:
        torch.testing.assert_close(monitor.history[name][0], expected[name])
    assert math.isnan(monitor.history.losses[0])
    assert len(monitor.history) == 1


def test_between_observed_steps_the_model_runs_its_own_code():
    model, data = llama(), batches(7)
    seen = []

    def look(*_: object) -> None:
        hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
        seen.append((model.config._attn_implementation, len(WATCHERS), "_call_impl" in vars(model), hooks))

    model.register_forward_pre_hook(look)
    own = (model.config._attn_implementation, 0, False, 1)
    with HeadMonitor(model, every=3) as monitor:
        losses = train(model, data, monitor)
    assert [x == own for x in seen] == [False, True, True, False, True, True, False]
    assert monitor.history.steps == (0, 3, 6)
    assert monitor.history.losses == pytest.approx([losses[step] for step in (0, 3, 6)])
    assert train(llama(), data) == pytest.approx(losses, rel=1e-6)


def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(tmp_path):
    data = batches(6)
    model = llama()
    with HeadMonitor(model, every=2) as whole:
        train(model, data, whole)
    model = llama()
    with HeadMonitor(model, every=2) as first:
        train(model, data[:3], first)
    torch.save(first.state_dict(), tmp_path / "monitor.pt")
    second = HeadMonitor(model, every=2)
    second.load_state_dict(torch.load(tmp_path / "monitor.pt", weights_only=True))
    with second:
        train(model, data[3:], second)
    assert second.history.steps == whole.history.steps == (0, 2, 4)
    assert second.history.losses == whole.history.losses
    for name in STATISTICS:
        assert torch.equal(second.history[name], whole.history[name])
    with pytest.raises(OptionError, match="has steps already"):
        second.load_state_dict(first.state_dict())
    with pytest.raises(OptionError, match=r"the same model, got a state with heads of 'model\.layers\.0"):
        HeadMonitor(MultiHeadAttention(WIDTH, HEADS)).load_state_dict(first.state_dict())


def test_the_first_nonfinite_number_is_named():
    layer = MultiHeadAttention(WIDTH, HEADS).train()
    with HeadMonitor(layer) as monitor:
        for step in range(3):
            if step == 1:
                with torch.no_grad():
                    layer.q_proj.weight[2 * 8] = torch.inf  # of head 2
            layer(torch.randn(2, 5, WIDTH))
            monitor.step()
    step, head, _ = monitor.history.first_nonfinite()
    assert (step, head.head, head.site) == (1, 2, "MultiHeadAttention")
    assert str(head) == "L0H2 (MultiHeadAttention)"
    with HeadMonitor(MultiHeadAttention(WIDTH, HEADS).train()) as healthy:
        healthy.model(torch.randn(2, 5, WIDTH))
        healthy.step()
    assert healthy.history.first_nonfinite() is None


def test_cross_attention_has_no_distance_and_is_not_taken_for_nan():
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
    both = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()}
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=61, d_model=16, **both)
    ).train()
    with HeadMonitor(model) as monitor:
        model(input_ids=batches(1)[0], labels=batches(1)[0])
        monitor.step()
    kinds = [head.kind for head in monitor.history.heads]
    assert kinds.count("cross") == 2
    distance = monitor.history["mean_distance"][0]
    assert [x.isnan().item() for x in distance] == [kind == "cross" for kind in kinds]
    assert monitor.history.first_nonfinite() is None


def test_histories_are_saved_as_tables(tmp_path):
    model = llama()
    with HeadMonitor(model, statistics="entropy") as monitor:
        train(model, batches(2), monitor)
    history = monitor.history
    history.save(tmp_path / "heads.csv")
    with open(tmp_path / "heads.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * HEADS
    assert rows[9]["step"] == "1"
    assert (rows[9]["site"], rows[9]["layer"], rows[9]["head"]) == ("model.layers.0.self_attn", "0", "1")
    assert float(rows[9]["entropy"]) == history["entropy"][1, 1].item()
    assert float(rows[9]["loss"]) == history.losses[1]
    parquet = pytest.importorskip("pyarrow.parquet")
    history.save(tmp_path / "heads.parquet")
    assert parquet.read_table(tmp_path / "heads.parquet").to_pydict() == history.rows()
    with pytest.raises(OptionError, match=r"\.parquet or \.csv"):
        history.save(tmp_path / "heads.txt")


def test_a_trainer_ends_the_steps(tmp_path):
    model, data = llama(), [{"input_ids": ids[0], "labels": ids[0]} for ids in batches(8)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=4, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    monitor = HeadMonitor(model)
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(monitor.trainer_callback())
    with monitor:
        trainer.train()
    assert monitor.history.steps == (0, 1, 2, 3)
    assert monitor.history["entropy"].isfinite().all()
    assert monitor.history["gradient_norm"].isfinite().all()


class Recorder(MonitorCallback):
    """Record what a monitor passes on, and ask for a checkpoint and an end at given steps."""

    def __init__(self, save: int = -1, stop: int = -1) -> None:
        self.save, self.stop = save, stop
        self.records: list[StepRecord] = []
        self.has_ended = False

    def on_record(self, record: StepRecord) -> None:
        assert not self.has_ended
        self.records.append(record)
        self.should_save |= record.step == self.save
        self.should_stop |= record.step == self.stop

    def on_exit(self) -> None:
        self.has_ended = True

    def state_dict(self) -> dict[str, int]:
        return {"count": len(self.records)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.before = state["count"]


def test_callbacks_read_every_record_once_and_their_state_is_saved():
    model, recorder = llama(), Recorder()
    with HeadMonitor(model, every=2, callbacks=[recorder]) as monitor:
        losses = train(model, batches(5), monitor)
    assert recorder.has_ended
    assert [record.step for record in recorder.records] == [0, 2, 4]
    assert [record.loss for record in recorder.records] == pytest.approx(losses[::2])
    for index, record in enumerate(recorder.records):
        assert record.heads == monitor.history.heads
        assert torch.equal(record["entropy"], monitor.history["entropy"][index])
    with pytest.raises(OptionError, match=r"the columns are entropy, .* got 'kurtosis'"):
        recorder.records[0]["kurtosis"]
    state, resumed = monitor.state_dict(), Recorder()
    HeadMonitor(model, callbacks=[resumed]).load_state_dict(state)
    assert resumed.before == 3
    with pytest.raises(OptionError, match="the same callbacks, got 0 for 1"):
        HeadMonitor(model).load_state_dict(state)


def test_the_trainer_saves_and_stops_when_a_callback_asks_for_it(tmp_path):
    model = llama()
    data = [{"input_ids": ids, "labels": ids} for batch in batches(8) for ids in batch]
    options = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=2, max_steps=8, **options)
    monitor = HeadMonitor(model, callbacks=[Recorder(save=1, stop=4)])
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(monitor.trainer_callback())
    with monitor:
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert monitor.history.steps == (0, 1, 2, 3, 4)


class Failing(MonitorCallback):
    """Raise in every record, and at the end."""

    def on_record(self, record: StepRecord) -> None:
        raise RuntimeError(f"no space left in step {record.step}")

    def on_exit(self) -> None:
        raise RuntimeError("no space left at the end")


@pytest.mark.parametrize("first", [False, True])
def test_a_callback_that_fails_costs_the_others_nothing(first):
    model, recorder = llama(), Recorder()
    callbacks = [Failing(), recorder] if first else [recorder, Failing()]
    monitor, messages = HeadMonitor(model, callbacks=callbacks), []

    def loop() -> None:
        with monitor:
            for ids in batches(3):
                model(ids)
                try:
                    monitor.step()
                except RuntimeError as error:
                    messages.append(str(error))

    with pytest.raises(RuntimeError, match="no space left at the end"):
        loop()
    assert [record.step for record in recorder.records] == [0, 1, 2]
    assert recorder.has_ended
    assert messages == [f"no space left in step {step}" for step in range(3)]
    assert monitor.history.steps == (0, 1, 2)
    assert not WATCHERS


def test_records_that_are_left_at_the_end_are_read_by_all_callbacks(monkeypatch):
    """On a GPU the last records arrive at the end of the block."""
    model, recorder = llama(), Recorder()
    monkeypatch.setattr(_Pending, "is_done", False)

    def loop() -> None:
        with HeadMonitor(model, callbacks=[Failing(), recorder]) as monitor:
            for ids in batches(2):
                model(ids)
                monitor.step()
            assert not recorder.records

    with pytest.raises(RuntimeError, match="no space left in step 0") as raised:
        loop()
    assert [record.step for record in recorder.records] == [0, 1]
    assert recorder.has_ended
    others = [f"also raised: RuntimeError: no space left {when}" for when in ("in step 1", "at the end")]
    assert raised.value.__notes__ == others


@pytest.mark.parametrize("is_entered", [False, True])
def test_a_loop_that_starts_at_a_later_step_has_every_column_and_pairs_in_its_first_step(is_entered):
    model, data = llama(), batches(6)
    monitor = HeadMonitor(model, every=2, pairs_every=2)
    with contextlib.ExitStack() as block:
        if is_entered:
            block.enter_context(monitor)
            model(data[0])  # before the loop: does not count
        monitor.start_at(5)
        if not is_entered:
            block.enter_context(monitor)
        train(model, data, monitor)
    history = monitor.history
    assert history.steps == (6, 8, 10)
    assert [*history.cosines("output_cosine")] == [6, 10]
    assert history["output_norm"].isfinite().all()
    resumed = HeadMonitor(model, every=2, pairs_every=2)
    resumed.load_state_dict(monitor.state_dict())
    with resumed:
        train(model, data, resumed)
    assert resumed.history.steps == (6, 8, 10, 12, 14, 16)
    assert [*resumed.history.cosines("output_cosine")] == [6, 10, 14]


def test_callbacks_are_a_list_of_instances():
    model = llama()
    for wrong in (Recorder(), [Recorder], {Recorder()}):
        with pytest.raises(OptionError, match="callbacks must be a list of instances of MonitorCallback, got"):
            HeadMonitor(model, callbacks=wrong)


def test_a_loop_that_ends_no_step_is_warned():
    model, (ids,) = llama(), batches(1)
    with pytest.warns(UserWarning, match=r"call monitor\.step\(loss\)"), HeadMonitor(model):
        model(ids)
    with HeadMonitor(model) as monitor:
        train(model, [ids], monitor)
        model(ids)  # of a step that does not end
    with HeadMonitor(model):
        pass


def test_a_monitor_that_skips_steps_is_entered_last():
    model, (ids, other) = llama(), batches(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        with HeadMonitor(model, every=3) as monitor, QKClip(model, optimizer):
            for batch in (ids, other):
                model(batch, labels=batch).loss.backward()
                optimizer.step()
                monitor.step()

    with pytest.raises(OptionError, match="every above 1 leaves and returns in training: enter it after the others"):
        loop()


def test_tools_work_together():
    """A monitor inside of QK-clip, gates and DropHead sees what it would see alone."""
    model, data = llama(), batches(3)
    gates, optimizer = HeadGates(model), torch.optim.SGD(model.parameters(), lr=0.5)
    with QKClip(model, optimizer, 1e-2) as clip, gates, DropHead(model, 0.2), HeadMonitor(model, every=2) as monitor:
        for ids in data:
            (model(ids, labels=ids).loss + 0.01 * gates.penalty()).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    assert monitor.history.steps == (0, 2)
    clipped = torch.cat(list(clip.latest.max_logit.values()))
    assert torch.equal(monitor.history["max_logit"][-1], clipped)


def test_an_error_in_the_loop_leaves_the_model_as_it_was():
    model = llama()
    own = model.config._attn_implementation
    monitor = HeadMonitor(model)

    def loop() -> None:
        with monitor:
            model(batches(1)[0])
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        loop()
    assert model.config._attn_implementation == own
    assert not WATCHERS
    assert len(monitor.history) == 0


def test_misuse_is_an_error():
    layer = MultiHeadAttention(WIDTH, HEADS).train()
    for every in (0, -1, True, 1.5):
        with pytest.raises(OptionError, match=r"every must be (an integer|at least 1), got"):
            HeadMonitor(layer, every=every)
    with pytest.raises(OptionError, match="statistics must be among"):
        HeadMonitor(layer, statistics="entropies")
    with pytest.raises(OptionError, match="contains none of them"):
        HeadMonitor(nn.Linear(3, 3))
    monitor = HeadMonitor(layer)
    with pytest.raises(OptionError, match="inside the `with` block"):
        monitor.step()
    with monitor:
        with pytest.raises(OptionError, match="already entered"):
            monitor.__enter__()
        with pytest.raises(OptionError, match="got none in step 0"):
            monitor.step()
        layer(torch.randn(2, 5, WIDTH))
        with pytest.raises(OptionError, match=r"one number, got a tensor of shape \[4\]"):
            monitor.step(torch.zeros(4))
        monitor.step()
    with pytest.raises(OptionError, match="the columns are entropy, normalized"):
        monitor.history["loss"]
    other = HeadMonitor(layer, statistics="entropy")
    other.load_state_dict(monitor.state_dict())
    with other:
        layer(torch.randn(2, 5, WIDTH))
        with pytest.raises(OptionError, match="same statistics"):
            other.step()


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    from tests.waiting import waiting_is_an_error

    layer = MultiHeadAttention(64, HEADS, device="cuda", dtype=torch.bfloat16).train()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(4, 128, 64, device="cuda", dtype=torch.bfloat16)
    with HeadMonitor(layer) as monitor, QKClip(layer, optimizer, 1e-3):
        for step in range(6):
            loss = layer(x).output.float().square().mean()
            loss.backward()
            if step < 2:  # kernels are compiled
                optimizer.step()
                monitor.step(loss)
                continue
            monitor._pending.clear()  # a record that is two steps late is waited for
            with waiting_is_an_error():
                optimizer.step()
                monitor.step(loss)
    assert len(monitor.history) >= 2


def test_reordered_heads_do_not_continue_the_history_of_others():
    layer, x = MultiHeadAttention(WIDTH, HEADS).train(), torch.randn(2, 5, WIDTH)
    with HeadMonitor(layer) as first:
        layer(x)
        first.step()
    polyhead.surgery.apply(layer, [polyhead.surgery.ReorderHeads(0, order=(1, 0, 2, 3))])
    second = HeadMonitor(layer)
    second.load_state_dict(first.state_dict())
    with second:
        layer(x)
        with pytest.raises(OptionError, match="must reach the same heads"):
            second.step()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_models_that_call_the_attention_function_directly_have_every_column(dropout):
    torch.manual_seed(0)
    model, ids = GPT(dropout=dropout).train(), torch.randint(VOCABULARY, (2, 9))
    heads, grads = [], []

    def read(module, inputs):  # of the output projection: the outputs of the heads, after dropout
        heads.append(inputs[0].detach().unflatten(-1, (3, -1)))
        inputs[0].register_hook(lambda grad: grads.append(grad.unflatten(-1, (3, -1))))

    for block in model.h:
        block.attn.c_proj.register_forward_pre_hook(read)
    with HeadMonitor(model) as monitor:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        monitor.step(loss)
    history = monitor.history
    assert [(head.site, head.layer, head.head) for head in history.heads] == [
        (f"h.{i}.attn", i, j) for i in range(2) for j in range(3)
    ]
    norms = torch.stack([grad.double().square().sum((0, 1, 3)).sqrt() for grad in reversed(grads)]).flatten()
    torch.testing.assert_close(history["gradient_norm"][0], norms, rtol=1e-4, atol=1e-7)
    written = []
    for block, outputs in zip(model.h, heads, strict=True):
        matrix = block.attn.c_proj.weight.detach().T.unflatten(0, (3, -1))
        written += [(outputs[:, :, head] @ matrix[head]).double().square().sum(-1).mean().sqrt() for head in range(3)]
    torch.testing.assert_close(history["output_norm"][0], torch.stack(written), rtol=1e-4, atol=1e-7)
    assert history["entropy"].isfinite().all()
