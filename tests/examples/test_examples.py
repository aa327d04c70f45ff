"""Every script of examples/ keeps the promise that it prints, in a short form of the same code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import examples.__main__ as runner
import polyhead
from examples import (
    compare_checkpoints,
    convert_to_gqa,
    custom_model,
    entropy_regulariser,
    inspect_heads,
    kv_cache,
    monitor_loop,
    monitor_trainer,
    observe,
    plan_layout,
    prune_and_reload,
    qk_clip,
)

pytestmark = pytest.mark.usefixtures("transformers_settings")
FOLDER = Path(runner.__file__).parent
EARLIER = {"demo", "drawing", "sentence", "worked_example"}  # parts of `python -m examples.demo`


def test_all_scripts_are_run_and_listed_and_can_be_read_in_one_go():
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "__main__"} - EARLIER
    assert scripts == set(runner.EXAMPLES)
    listed = re.findall(r"^\| \[(\w+)\.py\]\((\w+)\.py\) \|", (FOLDER / "README.md").read_text("utf-8"), re.MULTILINE)
    assert listed == [(name, name) for name in runner.EXAMPLES]
    for name in runner.EXAMPLES:
        text = (FOLDER / f"{name}.py").read_text("utf-8")
        assert 30 <= text.count("\n") <= 80, name
        assert text.startswith('"""'), name
        assert "polyhead.ops" not in text, name


def test_observing_finds_the_extremes_and_leaves_outputs_alone(capsys):
    table, difference = observe.main(documents=1)
    assert difference < 1e-4
    assert len(table) == 72
    lowest = table["entropy"].argmin()
    assert f"most focused: L{table.sites[lowest].layer}H{table.heads[lowest]} " in re.sub(
        " +", " ", capsys.readouterr().out
    )


def test_inspecting_prints_every_finding_and_the_most_important_head(capsys):
    found = inspect_heads.main(tokens=256, layers=(1,))
    shown = capsys.readouterr().out
    assert len(found.table) == 12
    assert len(found.findings) > 0
    assert all(f"- {finding}\n" in shown for finding in found.findings)
    importance = found.table["ablation"]
    assert bool((importance > 0).any())
    assert re.findall(r"ablating L1H(\d+)", shown)[0] == str(int(importance.argmax()))


def test_two_checkpoints_of_a_training_run_differ_beyond_sampling_error(capsys):
    comparison, losses = compare_checkpoints.main(early=1, steps=12, tokens=1024)
    assert losses[1] < losses[0] - 0.5
    changed = [change for change in comparison.tested() if change.significant]
    assert 0 < len(changed) < len(comparison.tested()) < len(comparison.changes)
    assert f"{len(changed)} of {len(comparison.tested())} statistics of 8 heads changed" in capsys.readouterr().out


def test_the_entropy_bonus_raises_the_entropy():
    results = entropy_regulariser.main(steps=12, bonus=1.0)
    assert results[1.0][1] > results[0.0][1] + 0.02


def test_qk_clip_bounds_the_logits():
    results = qk_clip.main(steps=20, threshold=2.0, seeds=1)
    assert results[None][1] > 40
    assert results[2.0][1] < 10  # the next step's logits are near the threshold, not below it
    assert results[2.0][2] > results[None][2]


def test_a_cache_gives_what_the_full_pass_gives_in_less_memory_where_promised():
    results = kv_cache.main(prompt=40, new=24, window=16)
    for name, (_, difference) in results.items():
        assert difference < (2e-2 if name == "int8" else 1e-5), name
    assert results["int8"][1] > 1e-5
    sizes = {name: size for name, (size, _) in results.items()}
    assert sizes["preallocated"] == 2 * 2 * 2 * 64 * 32 * 4  # keys and values, batch, KV heads, tokens, head_dim, bytes
    assert sizes["int8"] < 0.3 * sizes["preallocated"]
    assert sizes["rolling"] == sizes["preallocated"] // 4


def test_a_pruned_model_is_the_same_once_loaded_and_can_be_undone(capsys):
    result = prune_and_reload.main(share=0.05, tokens=1024)
    sizes = [int(x.replace(",", "")) for x in re.findall(r"([\d,]+) bytes", capsys.readouterr().out)]
    assert len(sizes) == 2
    assert 0 < sizes[1] < sizes[0]
    assert result["heads"] == (72, 68)
    assert result["difference"] == 0
    assert result["restored"]
    removed = sum(len(edit.heads) for edit in result["edited"].edits)
    assert removed == 4


def test_a_converted_model_has_a_quarter_of_the_cache_and_a_smaller_loss_than_mean_pooling():
    results = convert_to_gqa.main(steps=24, tokens=2048)
    kv_heads, losses, sizes = ({name: row[i] for name, row in results.items()} for i in range(3))
    assert kv_heads == {"multi-head": 8, "mean-pooled": 2, "converted": 2}
    assert sizes["converted"] * 4 == sizes["multi-head"]
    assert losses["converted"] < losses["mean-pooled"]
    assert losses["converted"] < losses["multi-head"] + 0.1


def test_a_plan_counts_the_parameters_of_the_built_model():
    results = plan_layout.main(layers=3, hidden=96, heads=8, context=512)
    assert set(results) == {8, 2, 1}
    for planned, built, _ in results.values():
        assert planned == built
    assert results[8][0] == 3 * 4 * 96 * 96
    assert results[8][2] == 8 * results[1][2] == 3 * 2 * 512 * 96 * 2


def test_an_adapter_observes_what_the_weights_say_and_applies_gates():
    observed, by_hand, change = custom_model.main(batch=3, length=23)
    assert observed == pytest.approx(by_hand, rel=2e-6)
    assert max(observed) - min(observed) > 0.01
    assert 0.01 < change < 1
    layer = custom_model.HandWrittenAttention(12, 3)
    with polyhead.observe(layer, adapters={type(layer): custom_model.Adapter()}) as session:
        layer(torch.randn(2, 5, 12))
    assert session.profile.note == ""  # compared with the module's own output


def test_the_figure_has_a_cell_for_each_head_and_named_axes(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is in the dev extra")
    from examples import paper_figure

    values, (svg, pdf) = paper_figure.main(tmp_path / "figures", documents=1)
    assert values.shape == (6, 12)
    assert bool(((values >= 0) & (values <= 1)).all())
    texts = [element.text for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"head", "layer", "normalised entropy", "11", "5"} <= set(texts)
    assert pdf.read_bytes().startswith(b"%PDF")


def test_the_runner_records_outputs_and_seconds_and_stops_at_a_failure(tmp_path, monkeypatch, capsys):
    for name, line in (("one", "print('é', sum(range(10_000_000)) > 0)"), ("two", "raise SystemExit(3)")):
        (tmp_path / f"{name}.py").write_text(line, "utf-8")
    monkeypatch.setattr(runner, "__file__", str(tmp_path / "__main__.py"))
    monkeypatch.setattr(runner, "EXAMPLES", ("one",))
    monkeypatch.setattr(runner, "NOTEBOOKS", ())
    record = tmp_path / "build" / "examples.json"
    runner.main(str(record))
    (entry,) = json.loads(record.read_text("utf-8"))
    assert (entry["name"], entry["output"]) == ("one", "é True\n")
    assert 0 < entry["seconds"] < 60
    assert "== one\né True\n" in capsys.readouterr().out
    monkeypatch.setattr(runner, "EXAMPLES", ("two",))
    with pytest.raises(runner.subprocess.CalledProcessError, match="exit status 3"):
        runner.main(str(record))


def test_a_monitored_loop_continues_with_each_step_once(capsys):
    pytest.importorskip("pyarrow")
    history, found = monitor_loop.main(steps=12)
    assert history.steps == tuple(range(12))
    assert history.losses[-1] < history.losses[0]
    assert f"of {len(found.tested())} values changed" in capsys.readouterr().out


def test_a_monitored_trainer_resumes_its_history(capsys):
    history = monitor_trainer.main(steps=4)
    assert history.steps == (0, 1, 2, 3)
    assert all(0 < loss < 6 for loss in history.losses)
    assert "resumed after step 1; the history has all 4 steps" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # Lightning's
def test_a_monitored_lightning_trainer_saves_the_monitor(capsys):
    for name in ("lightning", "tensorboard"):
        pytest.importorskip(name, reason="needs Lightning and TensorBoard: pip install 'polyhead[train]'")
    from examples import monitor_lightning

    history, saved = monitor_lightning.main(steps=3)
    assert history.steps == (0, 1, 2)
    assert saved == 3
    assert "state of the monitor after 3 steps" in capsys.readouterr().out
