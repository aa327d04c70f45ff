"""`HeadMetrics`: quantiles over the heads of each layer, for dashboards and alerts, and as OpenMetrics text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyhead.errors import OptionError
from polyhead.observation.head_profile import HeadProfile
from polyhead.observation.statistics import AttentionSite

# The column of each metric, and its help text.
METRICS = {
    "entropy": ("entropy", "Entropy of attention in nats, mean over tokens"),
    "max_logit": ("max_logit_max", "Largest attention logit"),
    "sink_mass": ("sink_mass", "Attention to the first keys of a sequence, mean over tokens"),
}


@dataclass(frozen=True, slots=True)
class LayerQuantiles:
    """One metric of one layer: its quantiles over the heads.

    `values` are NaN if the statistic of any head is NaN.
    """

    site: AttentionSite
    metric: str
    tokens: int
    values: dict[float, float]


@dataclass(frozen=True, slots=True)
class HeadMetrics:
    """Quantiles over the heads of each layer of entropy, max logit and sink mass.

    >>> import torch, polyhead
    >>> layer = polyhead.MultiHeadAttention(16, 4)
    >>> with torch.no_grad(), polyhead.observe(layer) as session:
    ...     output = layer(torch.randn(1, 5, 16))
    >>> metrics = HeadMetrics.of(session.profile, quantiles=(0, 0.5, 1))
    >>> [row.metric for row in metrics.layers]
    ['entropy', 'max_logit', 'sink_mass']
    >>> entropy = metrics.layers[0]
    >>> entropy.values[1] == session.profile["entropy"].max()
    tensor(True)
    """

    layers: tuple[LayerQuantiles, ...]

    @classmethod
    def of(cls, profile: HeadProfile, quantiles: Sequence[float] = (0, 0.25, 0.5, 0.75, 1)) -> HeadMetrics:
        """Return the metrics of a profile; a quantile is the value of the nearest head.

        Args:
            profile: table of heads with entropy, max_logit and sink_mass; a metric that was not collected is left out.
            quantiles: numbers from 0, the minimum over the heads, to 1, the maximum.

        Returns:
            The metrics, by statistic and layer.

        Raises:
            OptionError: a quantile is outside of [0, 1], or the profile has none of the statistics.
        """
        for quantile in quantiles:
            if isinstance(quantile, bool) or not isinstance(quantile, int | float) or not 0 <= quantile <= 1:
                raise OptionError(f"quantiles must be numbers from 0 to 1, got {quantile!r}")
        names = [name for name, (column, _) in METRICS.items() if column in profile.columns]
        if not len(names):
            raise OptionError(
                f"metrics need one of the statistics {', '.join(METRICS)}, got {', '.join(profile.names) or 'none'}"
            )
        rows: dict[AttentionSite, list[int]] = {}
        for row, site in enumerate(profile.sites):
            rows.setdefault(site, []).append(row)
        points = torch.tensor(quantiles, dtype=torch.float64)
        layers = []
        for name in names:
            for site, heads in rows.items():
                # The nearest head, since interpolation between a finite and an infinite value is NaN.
                values = profile[METRICS[name][0]][heads].quantile(points, interpolation="nearest").tolist()
                tokens = int(profile["tokens"][heads].max())
                layers.append(LayerQuantiles(site, name, tokens, dict(zip(quantiles, values, strict=True))))
        return cls(tuple(layers))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one dict per metric, layer and quantile, e.g. for a logger or `pandas.DataFrame(metrics.rows())`."""
        for layer in self.layers:
            location = {"stack": layer.site.stack, "kind": layer.site.kind, "layer": layer.site.layer}
            for quantile, value in layer.values.items():
                yield {**location, "metric": layer.metric, "tokens": layer.tokens, "quantile": quantile, "value": value}

    def to_open_metrics(self) -> str:
        """Return the metrics as OpenMetrics text, one gauge per statistic, as Prometheus scrapes it."""
        lines = []
        for name, (_, text) in METRICS.items():
            layers = [layer for layer in self.layers if layer.metric == name]
            if len(layers):
                lines += [f"# TYPE polyhead_{name} gauge", f"# HELP polyhead_{name} {text}: quantile over heads."]
            for layer in layers:
                labels = _labels(layer.site)
                for quantile, value in layer.values.items():
                    lines.append(f'polyhead_{name}{{{labels},quantile="{_quantile(quantile)}"}} {_number(value)}')
        tokens = {_labels(layer.site): layer.tokens for layer in self.layers}
        lines += ["# TYPE polyhead_tokens gauge", "# HELP polyhead_tokens Tokens in the other metrics."]
        lines += [f"polyhead_tokens{{{labels}}} {count}" for labels, count in tokens.items()]
        return "\n".join([*lines, "# EOF", ""])


def _labels(site: AttentionSite) -> str:
    values = {"stack": site.stack, "kind": site.kind, "layer": str(site.layer)}
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, value in values.items()
    }
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))


def _quantile(value: float) -> str:
    return repr(float(value)).removesuffix(".0")
