"""Alarms name the head that goes wrong, once, and are silent about heads that learn."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from polyhead import MultiHeadAttention
from polyhead.errors import OptionError
from polyhead.training import Alarm, HeadAlarms, HeadLocation, HeadMonitor, StepRecord
from polyhead.training.alarms import KINDS, REMEDIES

HEADS = tuple(HeadLocation(f"layers.{i}", "self", i, j, str(j)) for i in range(2) for j in range(3))
PLANTED = 4  # L1H1
STEPS = 120
WINDOW = 30


def table(steps: int, **columns: Tensor | float) -> tuple[tuple[str, ...], Tensor]:
    """Columns of healthy heads, [steps, columns, heads]; a given column is that of the planted head."""
    generator = torch.Generator().manual_seed(0)
    healthy = {
        "max_logit": 8.0,
        "entropy": 1.5,
        "normalized_entropy": 0.5,
        "sink_mass": 0.1,
        "output_norm_share": 1 / 3,
    }
    healthy |= {name: 0.2 for name in columns if name not in healthy}
    values = torch.tensor(list(healthy.values()))[None, :, None].repeat(steps, 1, len(HEADS))
    values *= 1 + 0.02 * torch.randn(values.shape, generator=generator)
    for name, value in columns.items():
        values[:, list(healthy).index(name), PLANTED] = torch.as_tensor(value, dtype=torch.float32)
    return tuple(healthy), values


def replay(
    alarms: HeadAlarms,
    losses: Tensor | float | None,
    columns: tuple[str, ...],
    values: Tensor,
    first: int = 0,
    loss_every: int = 1,
) -> None:
    """Pass records to the alarms; with a loss in every k-th step, or in none."""
    numbers = torch.as_tensor(math.nan if losses is None else losses).expand(len(values))
    for index, (loss, each) in enumerate(zip(numbers.tolist(), values, strict=True)):
        has_loss = losses is not None and index % loss_every == 0
        loss = loss if has_loss else math.nan
        alarms.on_record(StepRecord(first + index, loss, HEADS, columns, each, has_loss=has_loss))


def raised(
    losses: Tensor | float | None = 2.0,
    steps: int = STEPS,
    *,
    first: int = 0,
    loss_every: int = 1,
    **columns: Tensor | float,
) -> list[Alarm]:
    alarms = HeadAlarms(action=(), window=WINDOW)
    replay(alarms, losses, *table(steps, **columns), first=first, loss_every=loss_every)
    return list(alarms.alarms)


def growing(steps: int = STEPS, rate: float = 1.05, start: int = 60) -> Tensor:
    return 8.0 * rate ** (torch.arange(steps) - start).clamp(min=0)


def test_logits_that_grow_name_the_head_and_the_step_at_which_the_limit_is_crossed():
    logits = growing()
    crossed = int((logits >= 100).nonzero()[0])
    (alarm,) = raised(losses=4 - torch.arange(STEPS) / 40, steps=STEPS, max_logit=logits)  # also while the loss falls
    assert (alarm.kind, alarm.head) == ("logit growth", HEADS[PLANTED])
    assert alarm.step < crossed - 10
    assert alarm.evidence["predicted_step"] == pytest.approx(crossed, abs=3)
    assert alarm.evidence["max_logit"] > 30 > alarm.evidence["max_logit_before"]
    assert alarm.message.startswith("L1H1 (layers.1): the largest logit grew from ")
    assert f"predicted to cross 100 at step {alarm.evidence['predicted_step']:.0f}" in alarm.message
    assert str(alarm).endswith(REMEDIES["logit growth"])


def test_linear_growth_is_extrapolated_linearly():
    logits = 40 + 0.5 * torch.arange(100)
    alarm = raised(steps=100, max_logit=logits, losses=None)[0]
    assert alarm.kind == "logit growth"
    assert alarm.evidence["predicted_step"] == pytest.approx(120, abs=2)


def test_steps_between_records_count():
    alarms = HeadAlarms(action=(), window=WINDOW)
    columns, values = table(100, max_logit=40 + 0.5 * torch.arange(100))
    for index, each in enumerate(values):
        alarms.on_record(StepRecord(10 * index, 2.0, HEADS, columns, each))
    alarm = next(alarm for alarm in alarms.alarms if alarm.kind == "logit growth")
    assert alarm.evidence["predicted_step"] == pytest.approx(1200, abs=20)


def test_low_logits_that_grow_are_an_alarm_only_if_the_loss_does_not_improve():
    logits = growing(rate=1.018)  # 23 at the end
    (alarm,) = raised(max_logit=logits)
    assert (alarm.kind, alarm.head) == ("loss spike ahead", HEADS[PLANTED])
    assert alarm.evidence["loss"] == alarm.evidence["loss_before"] == 2.0
    assert not raised(losses=4 - torch.arange(STEPS) / 40, max_logit=logits)
    assert not raised(losses=None, max_logit=logits)  # no loss was recorded
    (alarm,) = raised(loss_every=4, max_logit=logits)
    assert (alarm.kind, alarm.head) == ("loss spike ahead", HEADS[PLANTED])


def test_a_head_that_learns_to_attend_to_one_token_is_not_a_collapse():
    entropy = 0.5 - 0.48 * ((torch.arange(STEPS) - 60) / 10).clamp(0, 1)
    (alarm,) = raised(normalized_entropy=entropy)
    assert (alarm.kind, alarm.head, alarm.step) == ("entropy collapse", HEADS[PLANTED], alarm.step)
    assert alarm.evidence["normalized_entropy"] < 0.05 < 0.15 < alarm.evidence["normalized_entropy_before"]
    assert not raised(losses=4 - torch.arange(STEPS) / 40, normalized_entropy=entropy)  # as an induction head does
    assert not raised(normalized_entropy=0.01)  # has always been low
    assert alarm.evidence["loss"] == alarm.evidence["loss_before"] == 2.0
    assert alarm.message.endswith(" steps, while the loss did not improve (2 to 2)")
    for losses in (None, 4 - torch.arange(STEPS) / 40):  # no claim about a loss that fell, or was not recorded
        with_logits = raised(losses=losses, normalized_entropy=entropy, max_logit=growing(rate=1.2))
        assert {alarm.kind for alarm in with_logits} == {"logit growth", "entropy collapse"}
        alarm = next(alarm for alarm in with_logits if alarm.kind == "entropy collapse")
        assert "loss" not in alarm.message
        before, now = (alarm.evidence[name] for name in ("max_logit_before", "max_logit"))
        assert alarm.message.endswith(f", while the largest logit grew from {before:.3g} to {now:.3g}")


def test_the_onset_of_a_sink_is_an_alarm_and_a_sink_is_not():
    sink = 0.1 + 0.88 * ((torch.arange(STEPS) - 60) / 10).clamp(0, 1)
    (alarm,) = raised(sink_mass=sink)
    assert (alarm.kind, alarm.head) == ("sink onset", HEADS[PLANTED])
    assert not raised(sink_mass=0.98)
    assert not raised(losses=4 - torch.arange(STEPS) / 40, sink_mass=sink)


def test_dead_heads_write_nothing_for_a_whole_window():
    share = torch.full((STEPS,), 0.3)
    share[40:] = 1e-6
    (alarm,) = raised(output_norm_share=share)
    assert (alarm.kind, alarm.head) == ("dead head", HEADS[PLANTED])
    assert 40 + WINDOW * 5 // 6 - 1 <= alarm.step <= 40 + WINDOW
    share[55:] = 0.3  # for half of a window only
    assert not raised(output_norm_share=share)


def test_duplicates_are_measured_twice_and_columns_may_be_nan_or_absent():
    cosine = torch.full((STEPS,), torch.nan)
    cosine[[10, 20, 30, 40]] = torch.tensor([0.995, 0.5, 0.995, -0.995])
    (alarm,) = raised(output_cosine=cosine)
    assert (alarm.kind, alarm.head, alarm.step) == ("duplicate heads", HEADS[PLANTED], 40)
    assert alarm.evidence["output_cosine"] == pytest.approx(-0.995)
    alarms = HeadAlarms(action="stop", window=WINDOW)
    replay(alarms, 2.0, ("mean_distance",), torch.full((40, 1, len(HEADS)), torch.nan))
    assert not alarms.alarms


def test_the_first_nonfinite_number_names_step_layer_and_head():
    logits = torch.full((20,), 8.0)
    logits[7] = torch.inf
    (alarm,) = raised(steps=20, first=100, max_logit=logits)
    assert (alarm.kind, alarm.step, alarm.head) == ("non-finite", 107, HEADS[PLANTED])
    assert alarm.evidence == {"max_logit": math.inf}
    columns, values = table(20)
    values[5:, :, 3:] = torch.nan  # a whole layer: its first head is named first
    alarms = HeadAlarms(action=())
    replay(alarms, 2.0, columns, values)
    assert (alarms.alarms[0].step, str(alarms.alarms[0].head)) == (5, "L1H0 (layers.1)")
    assert len(alarms.alarms) == 3
    alarms = HeadAlarms(action=())
    replay(alarms, 2.0, columns, values[5:])  # NaN in the very first record
    assert alarms.alarms[0].step == 0


def test_nan_where_outputs_were_not_measured_is_no_alarm_and_inf_is():
    norms = torch.full((20,), 0.2)
    norms[7:] = torch.nan
    assert not raised(steps=20, output_norm=norms)
    norms[9] = torch.inf
    (alarm,) = raised(steps=20, output_norm=norms)
    assert (alarm.kind, alarm.step, alarm.evidence) == ("non-finite", 9, {"output_norm": math.inf})


def test_a_head_that_is_not_finite_is_named_and_its_neighbours_are_not():
    """Its NaN is in their shares of the layer's output."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(64, 4, causal=True).train()
    alarms = HeadAlarms(action=())
    with HeadMonitor(layer, callbacks=[alarms]) as monitor:
        for step in range(4):
            if step == 3:
                with torch.no_grad():
                    layer.q_proj.weight[32, 0] = torch.nan  # head 2
            loss = layer(torch.randn(2, 16, 64)).output.square().mean()
            loss.backward()
            monitor.step(loss)
    assert monitor.history["output_norm_share"][3].isnan().all()
    assert [(alarm.step, alarm.head.head) for alarm in alarms.alarms if alarm.head is not None] == [(3, 2)]


def test_a_nan_of_an_output_is_an_alarm_if_it_was_measured():
    columns, values = table(20, output_norm=torch.full((20,), 0.2))
    values[7:, columns.index("output_norm"), PLANTED] = torch.nan
    for is_measured in (True, False):
        alarms, measured = HeadAlarms(action=()), torch.ones(values.shape[1:], dtype=torch.bool)
        measured[columns.index("output_norm"), PLANTED] = is_measured
        for step, row in enumerate(values):
            alarms.on_record(StepRecord(step, 2.0, HEADS, columns, row, measured if step >= 7 else None))
        assert [(alarm.kind, alarm.step) for alarm in alarms.alarms] == [("non-finite", 7)] * is_measured


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_alarm_once_an_episode(value):
    losses = torch.full((STEPS,), 2.0)
    losses[50:] = value
    (alarm,) = raised(losses=losses)
    assert (alarm.kind, alarm.step, alarm.head) == ("non-finite", 50, None)
    losses[:] = value
    assert [alarm.step for alarm in raised(losses=losses)] == [0]
    losses[:] = 2.0
    losses[[20, 40, 40 + WINDOW, 41 + 2 * WINDOW]] = value  # the second and the third within a window
    assert [alarm.step for alarm in raised(losses=losses)] == [20, 41 + 2 * WINDOW]


def test_a_step_without_a_loss_is_not_one_whose_loss_is_nan():
    losses = torch.full((STEPS,), 2.0)
    assert not raised(losses=losses, loss_every=10)
    losses[60] = torch.nan
    (alarm,) = raised(losses=losses, loss_every=10)
    assert (alarm.kind, alarm.step, alarm.head) == ("non-finite", 60, None)
    losses[:] = torch.nan  # steps without a loss do not end an episode
    assert [alarm.step for alarm in raised(losses=losses, loss_every=2 * WINDOW)] == [0]


def test_a_monitor_passes_on_whether_a_step_had_a_loss():
    layer, alarms = MultiHeadAttention(16, 2, causal=True).train(), HeadAlarms(action=())
    with HeadMonitor(layer, callbacks=[alarms]) as monitor:
        for loss in (torch.tensor(1.0), None, 2.0, None, torch.tensor(torch.nan)):
            layer(torch.randn(2, 5, 16))
            monitor.step(loss)
    assert [(alarm.kind, alarm.step, alarm.head) for alarm in alarms.alarms] == [("non-finite", 4, None)]
    resumed = HeadMonitor(layer, callbacks=[HeadAlarms(action=())])
    resumed.load_state_dict(monitor.state_dict())
    for history in (monitor.history, resumed.history):
        assert [record.has_loss for record in history.records()] == [True, False, True, False, True]
        assert history.rows()["loss"][:4] == [1.0, 1.0, None, None]
        assert [math.isnan(x) for x in history.rows()["loss"][-2:]] == [True, True]


def test_noise_and_single_outliers_raise_nothing():
    logits = torch.full((STEPS,), 8.0)
    logits[20::10] = 500.0
    entropy = torch.full((STEPS,), 0.5)
    entropy[25::10] = 0.001
    assert not raised(max_logit=logits, normalized_entropy=entropy)


def test_an_alarm_is_raised_once_an_episode():
    assert len([alarm for alarm in raised(max_logit=growing()) if alarm.kind == "logit growth"]) == 1
    twice = torch.cat([growing(), growing()])
    steps = [alarm.step for alarm in raised(steps=2 * STEPS, max_logit=twice) if alarm.kind == "logit growth"]
    assert len(steps) == 2
    assert steps[1] - steps[0] == STEPS


def test_actions(recwarn):
    columns, values = table(STEPS, max_logit=growing())
    called: list[Alarm] = []
    alarms = HeadAlarms(action=["save", called.append], window=WINDOW)
    replay(alarms, 2.0, columns, values)
    assert alarms.should_save
    assert not alarms.should_stop
    assert called == list(alarms.alarms)
    assert not len(recwarn)
    values[:, :, :3] = values[:, :, PLANTED : PLANTED + 1]  # four heads
    alarms = HeadAlarms(window=WINDOW, kinds=["logit growth"])
    with pytest.warns(RuntimeWarning, match=r"logit growth: L\dH\d .* \(and 3 other heads\)"):
        replay(alarms, 2.0, columns, values)
    assert not alarms.should_save
    stopping = HeadAlarms("stop", window=WINDOW, logit_limit=1e6, kinds=["logit growth"])
    replay(stopping, 2.0, columns, values)
    assert not stopping.should_stop
    stopping = HeadAlarms("stop", window=WINDOW)
    replay(stopping, 2.0, columns, values)
    assert stopping.should_stop


@pytest.mark.parametrize("split", [3, 70, 94])
def test_a_resumed_run_raises_the_alarms_of_an_uninterrupted_one(tmp_path, split):
    cosine = torch.full((STEPS,), torch.nan)
    cosine[[30, 90]] = 0.999
    logits = growing()
    logits[110] = torch.nan
    columns, values = table(STEPS, max_logit=logits, output_cosine=cosine)
    whole = HeadAlarms(action=(), window=WINDOW)
    replay(whole, 2.0, columns, values)
    assert {alarm.kind for alarm in whole.alarms} >= {"logit growth", "duplicate heads", "non-finite"}
    first = HeadAlarms(action=(), window=WINDOW)
    replay(first, 2.0, columns, values[:split])
    torch.save(first.state_dict(), tmp_path / "alarms.pt")
    replay(first, 2.0, columns, values[split:], first=split)  # what was saved does not change with it
    second = HeadAlarms(action=(), window=WINDOW)
    second.load_state_dict(torch.load(tmp_path / "alarms.pt", weights_only=True))
    replay(second, 2.0, columns, values[split:], first=split)
    assert str(list(second.alarms)) == str(list(whole.alarms)) == str(list(first.alarms))
    with pytest.raises(OptionError, match="the same window, got 15 after 30"):
        HeadAlarms(window=15).load_state_dict(first.state_dict())


def test_other_heads_start_anew():
    alarms = HeadAlarms(action=(), window=WINDOW)
    columns, values = table(STEPS, max_logit=growing())
    replay(alarms, 2.0, columns, values[:60])
    fewer = tuple(head for index, head in enumerate(HEADS) if index != 0)
    for step, each in enumerate(values[60:], start=60):
        alarms.on_record(StepRecord(step, 2.0, fewer, columns, each[:, 1:]))
    assert {alarm.head for alarm in alarms.alarms} == {HEADS[PLANTED]}
    assert alarms.alarms[0].step >= 60 + WINDOW - 1


def train(alarms: HeadAlarms, steps: int, growth: float) -> HeadMonitor:
    torch.manual_seed(0)
    model = nn.ModuleList(MultiHeadAttention(16, 2, causal=True) for _ in range(2)).train()
    x = torch.randn(4, 9, 16)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x).output
            return x

    whole = Model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=1e-3)
    with HeadMonitor(whole, callbacks=[alarms]) as monitor:
        for step in range(steps):
            if step > 40:
                with torch.no_grad():
                    model[1].q_proj.weight[8:] *= growth  # head 1
            loss = whole(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
            if alarms.should_stop:
                break
    return monitor


def test_a_real_run_stops_at_the_head_whose_weights_grow():
    alarms = HeadAlarms(action="stop", window=WINDOW)
    monitor = train(alarms, 120, growth=1.1)
    assert monitor.steps < 80
    assert {(alarm.head.layer, alarm.head.head) for alarm in alarms.alarms} == {(1, 1)}
    assert monitor.history["max_logit"][-1, 3] < 100
    healthy = HeadAlarms(action="stop", window=WINDOW)
    assert train(healthy, 45, growth=1.0).steps == 45
    assert not healthy.alarms


def test_a_monitor_that_is_entered_again_runs_until_the_next_alarm():
    alarms = HeadAlarms(action="stop", window=WINDOW)
    monitor = train(alarms, 120, growth=1.1)
    assert alarms.should_stop
    raised, first = len(alarms.alarms), monitor.steps
    with monitor:
        while not alarms.should_stop and monitor.steps < first + 5:
            loss = monitor.model(torch.randn(4, 9, 16)).square().mean()
            monitor.step(loss)
    assert monitor.steps == first + 5
    assert len(alarms.alarms) == raised


def test_misuse_is_an_error():
    for action in ("explode", ["warn", 3]):
        with pytest.raises(OptionError, match="an action must be 'warn', 'stop', 'save' or a function"):
            HeadAlarms(action)
    with pytest.raises(OptionError, match=r"kinds must be a sequence of 'non-finite', .* got 'collapse'"):
        HeadAlarms(kinds=["collapse"])
    with pytest.raises(OptionError, match="got 'dead head'"):
        HeadAlarms(kinds="dead head")
    for limit in (0, -1.0, math.nan, math.inf):
        with pytest.raises(OptionError, match="logit_limit must be a positive number"):
            HeadAlarms(logit_limit=limit)
    for window in (0, 10, True, 6.0):
        with pytest.raises(OptionError, match="window must be a multiple of 3"):
            HeadAlarms(window=window)
    assert set(REMEDIES) == set(KINDS)


def test_a_record_costs_little_time_and_no_more_memory_with_every_step():
    alarms = HeadAlarms(action=(), window=60)
    columns, values = table(130)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay(alarms, 2.0, columns, values)
    before = sum(x.numel() for x in alarms.state_dict()["tensors"].values())
    replay(alarms, 2.0, columns, values, first=130)
    assert sum(x.numel() for x in alarms.state_dict()["tensors"].values()) == before
