"""Metrics for serving: quantiles over the heads of each layer, and their OpenMetrics text."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import polyhead
from polyhead.errors import OptionError
from polyhead.observation import AttentionSite, HeadMetrics, HeadProfile

NAN = math.nan


def a_profile(names: tuple[str, ...] = ("entropy", "max_logit", "sink_mass")) -> HeadProfile:
    """Two layers of self-attention with 3 and 2 heads, and a cross-attention with 2."""
    sites = [AttentionSite(f"h.{n}", "self", "h.*", n, heads) for n, heads in ((0, 3), (1, 2))]
    rows = [sites[0]] * 3 + [sites[1]] * 2 + [AttentionSite("h.1.x", "cross", "h.*.x", 0, 2)] * 2
    values = {
        "tokens": [19, 19, 19, 19, 19, 23, 23],
        "entropy": [2.0, 7, 3, 5, NAN, 11, 13],
        "max_logit": [0.0] * 7,  # mean over tokens; the metric is the maximum
        "max_logit_max": [17.0, 29, 31, math.inf, 1, -2, -5],
        "sink_mass": [0.25, 0.5, 0, 1, 0.75, NAN, NAN],
    }
    columns = {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}
    collected = {name: columns[name] for name in columns if name == "tokens" or name.removesuffix("_max") in names}
    return HeadProfile(tuple(rows), (0, 1, 2, 0, 1, 0, 1), names, collected)


def test_quantiles_are_over_the_heads_of_a_layer_and_show_nan():
    rows = list(HeadMetrics.of(a_profile(), quantiles=(0, 0.5, 1)).rows())
    values: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        values.setdefault((row["metric"], row["stack"], row["layer"]), []).append(row["value"])
    expected = {
        ("entropy", "h.*", 0): [2.0, 3.0, 7.0],
        ("entropy", "h.*", 1): [NAN, NAN, NAN],
        ("entropy", "h.*.x", 0): [11.0, 11.0, 13.0],
        ("max_logit", "h.*", 0): [17.0, 29.0, 31.0],
        ("max_logit", "h.*", 1): [1.0, 1.0, math.inf],
        ("max_logit", "h.*.x", 0): [-5.0, -5.0, -2.0],
        ("sink_mass", "h.*", 0): [0.0, 0.25, 0.5],
        ("sink_mass", "h.*", 1): [0.75, 0.75, 1.0],
        ("sink_mass", "h.*.x", 0): [NAN, NAN, NAN],
    }
    assert repr(values) == repr(expected)  # NaN does not equal itself
    assert [row["tokens"] for row in rows if row["stack"] == "h.*.x"] == [23] * 9


def test_open_metrics_text_is_read_by_the_parser_of_prometheus():
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    profile = a_profile()
    strange = 'h."\\\n*'
    renamed = [dataclasses.replace(site, stack=site.stack.replace("h.*", strange)) for site in profile.sites]
    metrics = HeadMetrics.of(dataclasses.replace(profile, sites=tuple(renamed)), quantiles=(0, 0.5, 1))
    text = metrics.to_open_metrics()
    assert text.endswith("\n# EOF\n")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert set(families) == {"polyhead_entropy", "polyhead_max_logit", "polyhead_sink_mass", "polyhead_tokens"}
    assert {family.type for family in families.values()} == {"gauge"}
    parsed = []
    for name in ("entropy", "max_logit", "sink_mass"):
        for sample in families[f"polyhead_{name}"].samples:
            place = (sample.labels["stack"], sample.labels["kind"], int(sample.labels["layer"]))
            parsed.append((name, *place, float(sample.labels["quantile"]), float(sample.value)))
    expected = [
        (row["metric"], row["stack"], row["kind"], row["layer"], float(row["quantile"]), row["value"])
        for row in metrics.rows()
    ]
    assert repr(parsed) == repr(expected)
    tokens = {(x.labels["stack"], x.labels["layer"]): x.value for x in families["polyhead_tokens"].samples}
    assert tokens == {(strange, "0"): 19, (strange, "1"): 19, (f"{strange}.x", "0"): 23}


def test_quantiles_that_are_close_have_labels_of_their_own():
    quantiles = (0, 0.1, 0.99999, 0.9999999, 1)
    text = HeadMetrics.of(a_profile(), quantiles=quantiles).to_open_metrics()
    labels = [line.split('quantile="')[1].split('"')[0] for line in text.splitlines() if "quantile=" in line]
    assert labels[:5] == ["0", "0.1", "0.99999", "0.9999999", "1"]
    assert len(labels) == 9 * 5


def test_a_metric_that_was_not_collected_is_left_out():
    text = HeadMetrics.of(a_profile(("sink_mass",))).to_open_metrics()
    assert "polyhead_sink_mass{" in text
    assert "entropy" not in text
    with pytest.raises(OptionError, match=r"one of the statistics entropy, max_logit, sink_mass, got none"):
        HeadMetrics.of(a_profile(()))


@pytest.mark.parametrize("quantile", [-0.1, 1.5, NAN, True, "0.5"])
def test_a_quantile_that_is_not_a_number_from_0_to_1_is_refused(quantile):
    with pytest.raises(OptionError, match="quantiles must be numbers from 0 to 1"):
        HeadMetrics.of(a_profile(), quantiles=(0.5, quantile))


def test_a_callback_gets_the_session_after_each_observed_forward():
    layer = polyhead.MultiHeadAttention(8, 2, causal=True)
    texts: list[str] = []
    with pytest.raises(OptionError, match="callback must be a function of the session, got int"):
        polyhead.observe(layer, callback=3)
    session = polyhead.observe(
        layer, every=2, callback=lambda session: texts.append(HeadMetrics.of(session.take().profile).to_open_metrics())
    )
    with torch.no_grad(), session:
        for length in (3, 5, 7):
            layer(torch.randn(1, length, 8))
    assert [line for text in texts for line in text.splitlines() if line.startswith("polyhead_tokens")] == [
        'polyhead_tokens{stack="MultiHeadAttention",kind="self",layer="0"} 3',
        'polyhead_tokens{stack="MultiHeadAttention",kind="self",layer="0"} 7',
    ]


def test_take_is_refused_while_a_forward_runs():
    layer = polyhead.MultiHeadAttention(8, 2)
    with torch.no_grad(), polyhead.observe(layer, statistics="entropy") as session:
        handle = layer.register_forward_hook(lambda *_: session.take())
        with pytest.raises(OptionError, match="would be counted twice"):
            layer(torch.randn(1, 3, 8))
        handle.remove()
        layer(torch.randn(1, 5, 8))
        assert session.take().profile["tokens"].tolist() == [5, 5]
    assert len(session.profile) == 0
