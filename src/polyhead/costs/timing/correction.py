"""A smooth curve through measurements: how far from physics a machine was, between the sizes that were timed.

A Gaussian process over logarithms of sizes. Close to a measurement it gives what was measured; between two it goes over
smoothly; outside of all it stays at the nearest edge, so that sizes never seen get the efficiency of the largest or
smallest that were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
NOISE = 0.03  # the relative spread of a timing
LENGTHS = (1.5, 3.0, 6.0, 12.0)  # octaves over which efficiency changes; the one that tells left-out samples best


@dataclass(frozen=True, eq=False)
class Correction:
    """log(seconds / seconds by physics) as a function of the logarithms of sizes."""

    places: Numbers  # [samples, axes]
    weights: Numbers  # [samples]
    mean: float
    length: float
    left_out_error: float  # typical |log ratio| of samples predicted from the others

    @classmethod
    def fit(cls, places: Sequence[Sequence[float]], ratios: Sequence[float]) -> Correction:
        """Through samples at these places, whose seconds are so many times those of physics."""
        points = np.asarray(places, dtype=np.float64)
        logs = np.log(np.asarray(ratios, dtype=np.float64))
        mean = float(np.median(logs))
        rest = logs - mean
        spread = max(float(np.mean(rest**2)), 1e-4)
        best: Correction | None = None
        for length in LENGTHS:
            covariance = spread * _similarity(points, points, length) + NOISE**2 * np.eye(len(points))
            inverse = np.linalg.inv(covariance)
            weights = inverse @ rest
            left_out = weights / np.diag(inverse)  # what each sample differs from the curve through all others
            error = float(np.sqrt(np.mean(left_out**2)))
            if best is None or error < best.left_out_error:
                best = cls(points, spread * weights, mean, length, error)
        assert best is not None
        return best

    def __call__(self, place: Sequence[float]) -> float:
        """The factor by which physics is to be multiplied."""
        low, high = self.places.min(0), self.places.max(0)
        inside = np.clip(np.asarray(place, dtype=np.float64), low, high)
        return math.exp(self.mean + float(_similarity(inside[None], self.places, self.length)[0] @ self.weights))


def _similarity(left: Numbers, right: Numbers, length: float) -> Numbers:
    """Matérn 3/2: once differentiable, as smooth as efficiencies are."""
    distance = np.sqrt(((left[:, None] - right[None]) ** 2).sum(-1)) * (math.sqrt(3) / length)
    return (1 + distance) * np.exp(-distance)
