"""What is asked of an attention layer, as far as it decides the cost: how many tokens, and which pairs of them meet."""

from __future__ import annotations

from dataclasses import dataclass

from polyhead.errors import MaskError, OptionError
from polyhead.masks import Mask


@dataclass(frozen=True, slots=True)
class Workload:
    """One call of a layer: `queries` new tokens in each of `batch` sequences.

    Self-attention sees `past` earlier tokens in a cache besides. Cross-attention sees the `source` tokens of another
    sequence, whose keys and values are projected in the call unless they were `remembered`. `training` adds the
    backward, of the input as well as of the parameters.

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
        for name in ("queries", "batch", "past", "source"):
            size = getattr(self, name)
            if name == "source" and size is None:
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise OptionError(f"{name} must be an integer of at least 0, got {size!r}")
        if self.source is not None and self.past:
            raise OptionError(
                "a cache holds a layer's own earlier tokens and a source is another sequence: give one of them, "
                f"got past {self.past} and source {self.source}"
            )
        if self.remembered and self.source is None:
            raise OptionError("only a source can be remembered, got remembered=True without one")
        if self.training and self.past:
            raise OptionError(f"a cache keeps no gradients, got a training step with past {self.past}")

    @classmethod
    def forward(cls, tokens: int, *, batch: int = 1) -> Workload:
        """Self-attention over whole sequences, without gradients."""
        return cls(tokens, batch)

    @classmethod
    def training_step(cls, tokens: int, *, batch: int = 1) -> Workload:
        """Self-attention over whole sequences, forward and backward."""
        return cls(tokens, batch, training=True)

    @classmethod
    def prefill(cls, tokens: int, *, past: int = 0, batch: int = 1) -> Workload:
        """A prompt, or a piece of one behind `past` tokens that are in the cache already."""
        return cls(tokens, batch, past)

    @classmethod
    def decode(cls, past: int, *, batch: int = 1) -> Workload:
        """One new token in each sequence, behind `past` tokens in the cache."""
        return cls(1, batch, past)

    @classmethod
    def cross(
        cls, queries: int, source: int, *, batch: int = 1, remembered: bool = False, training: bool = False
    ) -> Workload:
        """Queries over another sequence."""
        return cls(queries, batch, source=source, remembered=remembered, training=training)

    @property
    def keys(self) -> int:
        """Keys that each sequence has, visible or not."""
        return self.past + self.queries if self.source is None else self.source

    @property
    def new_keys(self) -> int:
        """Keys of each sequence that are projected in this call."""
        if self.source is None:
            return self.queries
        return 0 if self.remembered else self.source


def visible_pairs(queries: int, keys: int, mask: Mask | None = None) -> int:
    """How many (query, key) pairs of one sequence a causal edge or a window leaves, counted without looking at them.

    The last query stands beside the last key, as everywhere.

    >>> visible_pairs(4, 4, Mask.causal()), visible_pairs(1, 1000, Mask.window(64))
    (10, 64)
    """
    if mask is None:
        return queries * keys
    if not mask.is_band:
        raise MaskError(
            f"pairs are counted for a causal edge or a window, got {mask!r}; "
            "count sequences of different lengths one by one"
        )
    first = keys - queries  # where the first query stands
    before_right = _sum_of_clamped(first + mask.right + 1, queries, keys) if mask.right is not None else queries * keys
    if mask.left is None:
        return before_right
    # Keys too far to the left are hidden, but for the first few that the window keeps.
    hidden = _sum_of_clamped(first - mask.left, queries, keys)
    return before_right - hidden + _sum_of_clamped(first - mask.left, queries, mask.sinks)


def _sum_of_clamped(first: int, count: int, limit: int) -> int:
    """The sum of clamp(t, 0, limit) over the `count` integers t from `first` on."""
    return _sum_up_to(first + count - 1, limit) - _sum_up_to(first - 1, limit)


def _sum_up_to(last: int, limit: int) -> int:
    """The sum of min(t, limit) over t = 1 .. last."""
    rising = max(min(last, limit), 0)
    return rising * (rising + 1) // 2 + max(last - limit, 0) * limit
