"""The page of a training run: no spike is lost in it, gaps are gaps, and hostile names stay text."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from polyhead.errors import OptionError
from polyhead.report.training_page import MOST_GRIDS, MOST_POINTS, merged, training_html, write_training_page
from polyhead.training import HeadHistory, HeadLocation


def history_of(steps: int, *, site: str = "model.layers.{}.attn", loss: float = 1.0) -> HeadHistory:
    heads = [
        HeadLocation(site.format(layer), "self", layer, head, str(head)) for layer in range(2) for head in range(3)
    ]
    history = HeadHistory(tuple(heads), ("entropy", "max_logit"))
    for step in range(steps):
        history.append(5 * step, torch.arange(12.0, dtype=torch.float64).reshape(2, 6) + step / 1000, loss)
    return history


def charts_of(html: str) -> dict[str, Any]:
    found = re.search(r'id="polyhead-data">(.*?)</script>', html, re.DOTALL)
    assert found
    return {view: variants[0]["chart"] for view, variants in json.loads(found[1]).items()}


def values_of(chart: dict[str, Any]) -> np.ndarray:
    packed = chart["values"]
    return np.frombuffer(base64.b64decode(packed["data"]), "<f4").reshape(packed["shape"])


def test_every_head_is_a_line_of_its_layers_panel():
    history = history_of(4)
    charts = charts_of(training_html(history, "run"))
    assert list(charts) == ["loss", "entropy", "max_logit"]
    chart = charts["max_logit"]
    assert chart["steps"] == [0, 5, 10, 15]
    assert [panel["label"]["en"] for panel in chart["panels"]] == ["Layer 0", "Layer 1"]
    assert [panel["lines"] for panel in chart["panels"]] == [[f"L{i}H{j}" for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(values_of(chart), history["max_logit"].T, rtol=1e-6)
    assert chart["grid"]["steps"] == chart["steps"]
    np.testing.assert_allclose(values_of(chart["grid"]), history["max_logit"], rtol=1e-6)
    assert charts["loss"]["grid"] is None


def test_the_slider_has_values_of_single_steps_of_a_long_run():
    history = history_of(1009)
    grid = charts_of(training_html(history, "run"))["entropy"]["grid"]
    assert (len(grid["steps"]), grid["steps"][0], grid["steps"][-1]) == (MOST_GRIDS, 0, 5 * 1008)
    rows = [step // 5 for step in grid["steps"]]
    np.testing.assert_allclose(values_of(grid), history["entropy"][rows], rtol=1e-6)


def test_a_run_without_losses_has_no_view_of_them():
    assert list(charts_of(training_html(history_of(3, loss=float("nan")), "run"))) == ["entropy", "max_logit"]


def test_long_runs_are_merged_without_losing_a_spike_or_a_gap():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 7919, generator=generator, dtype=torch.float64)
    values[0, 5000], values[1, 3], values[2, 7918] = 1e3, -1e3, torch.nan
    steps, shown = merged(torch.arange(7919), values)
    assert shown.shape == (3, len(steps))
    assert MOST_POINTS // 2 < len(steps) <= MOST_POINTS
    assert (steps.diff() > 0).all()
    for line, expected in zip(shown[:2], values[:2], strict=True):
        assert (line.amax(), line.amin()) == (expected.amax(), expected.amin())
    at = int(shown[0].argmax())
    assert abs(int(steps[at]) - 5000) <= 7919 / (MOST_POINTS // 2)
    assert shown[2].isnan().nonzero().min() >= len(steps) - 2
    assert shown[2, :-2].isfinite().all()


def test_a_statistic_of_few_steps_is_drawn_over_the_whole_run():
    history = history_of(9)
    for index, record in enumerate(history.records()):
        if index % 4:
            record.values[0] = torch.nan
    chart = charts_of(training_html(history, "run"))["entropy"]
    assert (chart["steps"], chart["domain"]) == ([0, 20, 40], [0, 40])
    assert np.isfinite(values_of(chart)).all()
    for record in history.records():
        record.values[0] = torch.nan
    assert list(charts_of(training_html(history, "run"))) == ["loss", "max_logit"]


def test_infinities_are_gaps_and_the_table_has_the_extremes():
    history = history_of(3)
    list(history.records())[1].values[0, 4] = torch.inf
    html = training_html(history, "run")
    assert np.isnan(values_of(charts_of(html)["entropy"])[4, 1])
    row = re.search(r"<tr><th scope=\"row\">L1H1 .*?</tr>", html, re.DOTALL)
    assert row
    assert re.findall(r"<td[^>]*>([^<]*)<", row[0]) == ["4", "4.002", "4", "4.002"]


def test_names_are_text(tmp_path):
    html = training_html(history_of(2, site="</script><b>{}"), "<i>run</i>")
    assert "<b>" not in html
    assert "<i>" not in html
    page = write_training_page(tmp_path / "run.html", history_of(2), "run", language="zh")
    assert page.read_text(encoding="utf-8").startswith('<!doctype html>\n<html lang="zh-Hans">')
    (tmp_path / "other.txt").write_text("mine")
    with pytest.raises(OptionError, match="something else"):
        write_training_page(tmp_path / "other.txt", history_of(2), "run")
