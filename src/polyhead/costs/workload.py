"""Workload of one attention call: token counts and the number of visible (query, key) pairs."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.costs.quantities import check_count
from polyhead.errors import MaskError, OptionError
from polyhead.masks import Mask


@dataclass(frozen=True, slots=True)
class Workload:
    """One call of a layer: `queries` new tokens in each of `batch` sequences.

    Self-attention also sees `past` earlier tokens in a cache. Cross-attention sees the `source` tokens of another
    sequence, whose keys and values are projected in the call unless they are `remembered` from an earlier one.
    `training` adds the backward, with gradients of the input and of the parameters.

    Args:
        queries: new tokens per sequence.
        batch: sequences.
        past: earlier tokens in a cache.
        source: tokens of another sequence, for cross-attention.
        remembered: whether keys and values of the source were projected by an earlier call.
        training: whether the backward is included.

    >>> Workload.decode(past=1000, batch=4).keys
    1001
    """

    queries: int
    batch: int = 1
    past: int = 0
    source: int | None = None
    remembered: bool = False
    training: bool = False

    def __post_init__(self) -> None:
        for name in ("queries", "batch", "past"):
            check_count(name, getattr(self, name))
        if self.source is not None:
            check_count("source", self.source)
        if self.source is not None and self.past:
            raise OptionError(
                "past (self-attention over a cache) and source (cross-attention) are exclusive, "
                f"got past {self.past} and source {self.source}"
            )
        if self.remembered and self.source is None:
            raise OptionError("remembered needs a source, got remembered=True without one")
        if self.training and self.past:
            raise OptionError(f"a cache stores no gradients, got a training step with past {self.past}")

    @classmethod
    def forward(cls, tokens: int, *, batch: int = 1) -> Workload:
        """Return self-attention over full sequences, without gradients.

        Args:
            tokens: tokens per sequence.
            batch: sequences.
        """
        return cls(tokens, batch)

    @classmethod
    def training_step(cls, tokens: int, *, batch: int = 1) -> Workload:
        """Return self-attention over full sequences, forward and backward.

        Args:
            tokens: tokens per sequence.
            batch: sequences.
        """
        return cls(tokens, batch, training=True)

    @classmethod
    def prefill(cls, tokens: int, *, past: int = 0, batch: int = 1) -> Workload:
        """Return the prefill of a prompt, or of a chunk of one after `past` cached tokens.

        Args:
            tokens: tokens per sequence.
            past: cached tokens per sequence.
            batch: sequences.
        """
        return cls(tokens, batch, past)

    @classmethod
    def decode(cls, past: int, *, batch: int = 1) -> Workload:
        """Return one new token per sequence after `past` cached tokens.

        Args:
            past: cached tokens per sequence.
            batch: sequences.
        """
        return cls(1, batch, past)

    @classmethod
    def cross(
        cls, queries: int, source: int, *, batch: int = 1, remembered: bool = False, training: bool = False
    ) -> Workload:
        """Return cross-attention over another sequence.

        Args:
            queries: new tokens per sequence.
            source: tokens of the other sequence.
            batch: sequences.
            remembered: whether keys and values were projected by an earlier call.
            training: whether the backward is included.
        """
        return cls(queries, batch, source=source, remembered=remembered, training=training)

    @property
    def keys(self) -> int:
        """Keys per sequence, visible or not."""
        return self.past + self.queries if self.source is None else self.source

    @property
    def new_keys(self) -> int:
        """Keys per sequence that this call projects."""
        if self.source is None:
            return self.queries
        return 0 if self.remembered else self.source


def visible_pairs(queries: int, keys: int, mask: Mask | None = None) -> int:
    """Return the number of (query, key) pairs of one sequence that a causal mask or window leaves, in closed form.

    The last query is aligned with the last key.

    Args:
        queries: tokens that attend.
        keys: tokens that are attended to.
        mask: a causal mask or sliding window; None leaves all pairs.

    >>> visible_pairs(4, 4, Mask.causal()), visible_pairs(1, 1000, Mask.window(64))
    (10, 64)
    """
    if mask is None:
        return queries * keys
    if not mask.is_band:
        raise MaskError(
            f"mask must be a causal mask or a sliding window, got {mask!r}; "
            "count sequences of different lengths separately"
        )
    first = keys - queries  # position of the first query
    before_right = _sum_of_clamped(first + mask.right + 1, queries, keys) if mask.right is not None else queries * keys
    if mask.left is None:
        return before_right
    # Keys left of the window are masked, except the attention sinks at the start.
    hidden = _sum_of_clamped(first - mask.left, queries, keys)
    return before_right - hidden + _sum_of_clamped(first - mask.left, queries, mask.sinks)


def _sum_of_clamped(first: int, count: int, limit: int) -> int:
    """Return the sum of clamp(t, 0, limit) over the `count` integers t starting at `first`."""
    return _sum_up_to(first + count - 1, limit) - _sum_up_to(first - 1, limit)


def _sum_up_to(last: int, limit: int) -> int:
    """Return the sum of min(t, limit) over t = 1 .. last."""
    rising = max(min(last, limit), 0)
    return rising * (rising + 1) // 2 + max(last - limit, 0) * limit
