"""Measure a model without some of its heads, by swapping output projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyhead.surgery.compensation.least_squares import OutputRegression, swapped_projections
from polyhead.surgery.selection.evidence import Evidence, Weighting
from polyhead.surgery.selection.quality import Measurement, Quality
from polyhead.surgery.selection.search import Projections


class PrunedModel:
    """A model of which any heads can be pruned: their compensation, and the quality without them.

    Args:
        evidence: measurements of the model on calibration text.
        weighting: how errors of the layer outputs are weighted, one of `evidence.WEIGHTINGS`; see `criteria`.
    """

    def __init__(self, evidence: Evidence, *, weighting: Weighting = "token") -> None:
        self.evidence = evidence
        self.model = evidence.model
        self.weighting = weighting
        self._regressions: dict[str, OutputRegression] = {}

    def compensated(self, removed: Mapping[str, Sequence[int]]) -> Projections:
        """Return W_O of layers without these heads by least squares, calibrated on the unpruned model."""
        moments, heads = self.evidence.moments_for(self.weighting), self.evidence.heads
        for path in removed:
            if path not in self._regressions:
                self._regressions[path] = OutputRegression.of(moments[path], heads[path], self.evidence.ridge, path)
        return {path: self._regressions[path].without(pruned) for path, pruned in removed.items() if len(pruned)}

    def measure(self, projections: Projections, quality: Quality) -> Measurement:
        """Measure the model with these output projections."""
        with swapped_projections(self.model, self.evidence.layers, projections):
            return quality.measure()

    def loss(self, projections: Projections, quality: Quality) -> float:
        """Return the loss of the model with these output projections."""
        with swapped_projections(self.model, self.evidence.layers, projections):
            return quality.loss()
