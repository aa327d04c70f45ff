"""Correction of the roofline limits, interpolated between measured sizes.

A Gaussian process over logarithms of sizes. It reproduces the measurements, interpolates smoothly between them, and is
constant outside their range, so that larger or smaller sizes get the efficiency at the nearest edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
NOISE = 0.03  # relative standard deviation of a timing
LENGTHS = (1.5, 3.0, 6.0, 12.0)  # length scales in octaves; selected by leave-one-out error


@dataclass(frozen=True, eq=False)
class Correction:
    """log(measured seconds / roofline seconds) as a function of the logarithms of sizes."""

    places: Numbers  # [samples, axes]
    weights: Numbers  # [samples]
    mean: float
    length: float
    left_out_error: float  # leave-one-out RMS error of the log ratio

    @classmethod
    def fit(cls, places: Sequence[Sequence[float]], ratios: Sequence[float]) -> Correction:
        """Fit samples at these places, with ratios of measured to roofline seconds."""
        points = np.asarray(places, dtype=np.float64)
        logs = np.log(np.asarray(ratios, dtype=np.float64))
        mean = float(np.median(logs))
        rest = logs - mean
        variance = max(float(np.mean(rest**2)), 1e-4)
        best: Correction | None = None
        for length in LENGTHS:
            covariance = variance * _similarity(points, points, length) + NOISE**2 * np.eye(len(points))
            inverse = np.linalg.inv(covariance)
            weights = inverse @ rest
            left_out = weights / np.diag(inverse)  # leave-one-out residuals in closed form
            error = float(np.sqrt(np.mean(left_out**2)))
            if best is None or error < best.left_out_error:
                best = cls(points, variance * weights, mean, length, error)
        assert best is not None
        return best

    def __call__(self, place: Sequence[float]) -> float:
        """Return the factor by which to multiply the roofline seconds."""
        low, high = self.places.min(0), self.places.max(0)
        inside = np.clip(np.asarray(place, dtype=np.float64), low, high)
        return math.exp(self.mean + float(_similarity(inside[None], self.places, self.length)[0] @ self.weights))


def _similarity(left: Numbers, right: Numbers, length: float) -> Numbers:
    """Return the Matérn 3/2 kernel."""
    distance = np.sqrt(((left[:, None] - right[None]) ** 2).sum(-1)) * (math.sqrt(3) / length)
    return (1 + distance) * np.exp(-distance)
