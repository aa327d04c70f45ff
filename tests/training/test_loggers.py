"""TensorBoard and W&B receive few scalars with the names of their heads, and one picture per step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from polyhead.errors import OptionError
from polyhead.training import HeadLocation, HeadMonitor, StepRecord, TensorBoardLogger, WandbLogger
from polyhead.training.loggers import MOST_SCALARS, draw_heads, summarize
from tests.training.test_run_directory import model, train

CELL = 12


def record(values: dict[str, list[float]], layers: tuple[int, ...] = (3, 2)) -> StepRecord:
    """Return a record of layers with these numbers of heads."""
    heads = [HeadLocation(f"layers.{i}", "self", i, j, str(j)) for i, n in enumerate(layers) for j in range(n)]
    tensor = torch.tensor(list(values.values()), dtype=torch.float64)
    return StepRecord(7, 1.5, tuple(heads), tuple(values), tensor)


def test_a_summary_names_the_head_of_each_extreme():
    scalars, heads = summarize(
        record({
            "mean_distance": [1.0, 2.0, torch.nan, 4.0, 5.0],
            "entropy": [0.5, 0.1, 0.3, 0.4, 0.2],
            "max_logit": [1.0, 2.0, 3.0, 50.0, 4.0],
        })
    )  # fmt: skip
    assert scalars == {"loss": 1.5, "lowest entropy": 0.1, "highest max_logit": 50.0, "mean mean_distance": 3.0}
    assert {name: str(head) for name, head in heads.items()} == {
        "lowest entropy": "L0H1 (layers.0)",
        "highest max_logit": "L1H0 (layers.1)",
    }


def test_a_nan_is_the_worst_value():
    values = {
        "max_logit": [1.0, 2.0, torch.nan, 4.0, torch.inf],
        "gradient_norm": [torch.nan, 2.0, 5.0, 3.0, torch.nan],
    }
    scalars, heads = summarize(record(values))
    assert (scalars["highest gradient_norm"], heads["highest gradient_norm"].head) == (5.0, 2)  # not measured in others
    assert scalars["highest max_logit"] != scalars["highest max_logit"]
    assert heads["highest max_logit"].head == 2


def test_heads_whose_outputs_are_opposite_are_the_strongest_duplicates():
    scalars, heads = summarize(record({"output_cosine": [0.4, -0.995, -0.995, 0.2, torch.nan]}))
    assert scalars["strongest output_cosine"] == pytest.approx(-0.995)
    assert str(heads["strongest output_cosine"]) == "L0H1 (layers.0)"


def test_a_step_without_a_loss_has_no_scalar_of_it():
    scalars, _ = summarize(dataclasses.replace(record({"entropy": [0.5] * 5}), loss=torch.nan, has_loss=False))
    assert [*scalars] == ["lowest entropy"]


def test_at_most_ten_scalars_are_logged_whatever_is_recorded():
    columns = {f"column_{index}": [1.0] * 5 for index in range(40)} | {"entropy": [1.0] * 5}
    scalars, _ = summarize(record(columns))
    assert len(scalars) == MOST_SCALARS == 10
    assert "lowest entropy" in scalars
    columns["column_3"] = [torch.nan] * 5  # in a step in which it is not measured, no other one takes its place
    assert set(summarize(record(columns))[0]) == set(scalars) - {"mean column_3"}


def test_a_picture_has_a_cell_per_head_and_grey_where_there_is_none():
    picture = draw_heads(record({"normalized_entropy": [0.0, 1.0, 0.5, torch.nan, 0.25]}), "normalized_entropy")
    assert picture.shape == (2 * CELL, 3 * CELL, 3)
    cells = picture[CELL // 2 :: CELL, CELL // 2 :: CELL].tolist()
    assert cells[0] == [[13, 8, 135], [240, 249, 33], [204, 71, 120]]
    assert cells[1][0] == cells[1][2] == [128, 128, 128]
    assert len(picture[:CELL, :CELL].flatten(0, 1).unique(dim=0)) == 1
    # Without limits of its own, a statistic is drawn from its lowest to its highest finite value.
    picture = draw_heads(record({"max_logit": [10.0, 30.0, 20.0, torch.inf, 15.0]}), "max_logit")
    assert picture[CELL // 2 :: CELL, CELL // 2 :: CELL].tolist()[0] == cells[0]


def events(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    return [(x.step, x.value) for x in found.Scalars(tag)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard
def test_tensorboard_has_scalars_text_and_one_picture_per_step(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'polyhead[train]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = HeadMonitor(model(), callbacks=[TensorBoardLogger(tmp_path, every=2)])
    train(monitor, 5)
    found = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    found.Reload()
    assert len(found.Tags()["scalars"]) <= MOST_SCALARS
    history = monitor.history
    scalars = events(tmp_path, "heads/highest max_logit")
    assert scalars == [(step, pytest.approx(float(history["max_logit"][step].max()))) for step in (0, 2, 4)]
    assert events(tmp_path, "heads/loss") == [(step, pytest.approx(history.losses[step])) for step in (0, 2, 4)]
    assert [x.step for x in found.Images("heads/normalized_entropy")] == [0, 2, 4]
    image = found.Images("heads/normalized_entropy")[0]
    assert (image.height, image.width) == (2 * CELL, 3 * CELL)
    text = found.Tensors("heads/text_summary")[0].tensor_proto.string_val[0].decode()
    worst = int(history["max_logit"][0].argmax())
    assert f"highest max_logit: {history.heads[worst]}" in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'polyhead[train]'")
    first = HeadMonitor(model(), callbacks=[TensorBoardLogger(tmp_path)])
    train(first, 3)
    state = first.state_dict()
    continued = HeadMonitor(first.model, callbacks=[TensorBoardLogger(tmp_path)])
    continued.load_state_dict(state)
    train(continued, 6)  # two steps of which are lost with their process
    again = HeadMonitor(first.model, callbacks=[TensorBoardLogger(tmp_path)])
    again.load_state_dict(state)
    train(again, 5)
    assert [step for step, _ in events(tmp_path, "heads/loss")] == [0, 1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_each_step_once_after_a_resume_without_a_state(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'polyhead[train]'")
    first = HeadMonitor(model(), callbacks=[TensorBoardLogger(tmp_path)])
    train(first, 5)
    again = HeadMonitor(first.model, callbacks=[TensorBoardLogger(tmp_path)])
    again.start_at(3)
    train(again, 6)
    assert [step for step, _ in events(tmp_path, "heads/loss")] == [0, 1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_writer_of_a_trainer_is_used_and_left_open(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'polyhead[train]'")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    train(HeadMonitor(model(), callbacks=[TensorBoardLogger(writer)]), 2)
    writer.add_scalar("mine", 1.0, 1)
    writer.close()
    assert events(tmp_path, "mine") == [(1, 1.0)]
    assert len(events(tmp_path, "heads/loss")) == 2


def test_wandb_has_scalars_names_and_one_picture_per_step_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb: pip install 'polyhead[train]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    quick = wandb.Settings(x_save_requirements=False)  # the list of all installed packages
    with wandb.init(mode="offline", dir=tmp_path, project="heads", settings=quick) as run:
        logged = []
        log = run.log
        monkeypatch.setattr(run, "log", lambda values: (logged.append(values), log(values)))
        monitor = HeadMonitor(model(), callbacks=[WandbLogger(every=2)])
        run.log({"mine": 1.0})
        train(monitor, 5)
        summary = dict(run.summary)
        folder = Path(run.dir).parent
    steps = [values for values in logged if "heads/step" in values]
    assert [values["heads/step"] for values in steps] == [0, 2, 4]
    numbers = [name for name, value in steps[0].items() if isinstance(value, float)]
    assert len(numbers) <= MOST_SCALARS
    assert sum(isinstance(value, wandb.Image) for value in steps[0].values()) == 1
    assert summary["heads/step"] == 4
    worst = int(monitor.history["max_logit"][4].argmax())
    assert summary["heads/highest max_logit"] == float(monitor.history["max_logit"][4, worst])
    assert summary["heads/highest max_logit, head"] == str(monitor.history.heads[worst])
    assert list(folder.glob("*.wandb"))
    assert len(list((folder / "files").rglob("*.png"))) == 3


def test_bad_options_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(OptionError, match="needs tensorboard; install it with"):
        TensorBoardLogger(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(OptionError, match="needs wandb; install it with"):
        WandbLogger()
    with pytest.raises(OptionError, match="every must be at least 1, got 0"):
        WandbLogger(every=0)


def test_a_picture_of_a_statistic_that_is_not_recorded_is_refused(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'polyhead[train]'")
    logger = TensorBoardLogger(tmp_path, picture="confidence")
    with pytest.raises(OptionError, match=r"the columns are entropy, .* got 'confidence'"):
        train(HeadMonitor(model(), callbacks=[logger]), 1)


def test_wandb_without_a_run_is_refused():
    pytest.importorskip("wandb", reason="needs wandb: pip install 'polyhead[train]'")
    with pytest.raises(OptionError, match=r"call wandb\.init"):
        WandbLogger()
