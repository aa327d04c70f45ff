"""What is told of each row of attention weights: the names, what each means, and how they are asked for.

A row is one query of one head. With logits s_j over the keys it sees (after scale, softcap and bias), weights
p_j = exp(s_j - L) where L is the log-sum-exp, and distance d_j (key position minus query position):

    max_logit              max_j s_j               confidence     max_j p_j, the max attention weight
    max_abs_logit          max_j |s_j|             entropy        -sum_j p_j log p_j, in nats
    mean_distance          sum_j p_j |d_j|         sink_mass      p on the first `sink_keys` keys of the sequence
    mean_offset            sum_j p_j d_j           self_mass      p at d = 0
    mean_squared_distance  sum_j p_j d_j^2         previous_mass  p at d = -1
    visible_keys           number of visible keys  next_mass      p at d = 1
    learned_sink_mass      exp(sink - L)           window_mass    p at |d| <= `window`

A learned sink is one more term of L and of the entropy, and of nothing else. A row that sees no key has -inf for
max_logit and 0 for the rest; where there is a learned sink, all its attention is there. Weights are those before
dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.errors import OptionError

NAMES = (
    "max_logit",
    "max_abs_logit",
    "entropy",
    "confidence",
    "mean_distance",
    "mean_offset",
    "mean_squared_distance",
    "sink_mass",
    "self_mass",
    "previous_mass",
    "next_mass",
    "window_mass",
    "visible_keys",
    "learned_sink_mass",
)
WINDOW = 8  # the default of `window_mass`, here and in `observe`
# Those that compare positions, and so mean nothing where queries and keys are different sequences.
POSITIONAL = (
    "mean_distance",
    "mean_offset",
    "mean_squared_distance",
    "self_mass",
    "previous_mass",
    "next_mass",
    "window_mass",
)
# Sums of the weights times something known of each key: all are differentiated by one rule.
LINEAR = (*POSITIONAL, "sink_mass")


@dataclass(frozen=True, slots=True, eq=False)
class RowStatistics:
    """Statistics of every row, each [batch, heads, queries] and float32 (float64 for float64 input).

    What was not asked for is None. All but `visible_keys` can be differentiated.
    """

    max_logit: Tensor | None = None
    max_abs_logit: Tensor | None = None
    entropy: Tensor | None = None
    confidence: Tensor | None = None
    mean_distance: Tensor | None = None
    mean_offset: Tensor | None = None
    mean_squared_distance: Tensor | None = None
    sink_mass: Tensor | None = None
    self_mass: Tensor | None = None
    previous_mass: Tensor | None = None
    next_mass: Tensor | None = None
    window_mass: Tensor | None = None
    visible_keys: Tensor | None = None
    learned_sink_mass: Tensor | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """The statistics that are there, with their names."""
        for name in NAMES:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def __repr__(self) -> str:
        there = dict(self.items())
        shape = list(next(iter(there.values())).shape) if len(there) else []
        return f"RowStatistics({', '.join(there)}; each {shape})"


torch.export.register_dataclass(RowStatistics, serialized_type_name="polyhead.RowStatistics")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Which statistics to take, and their parameters: what `attention(..., statistics=)` means, spelt out.

    >>> Statistics("entropy", "sink_mass", sink_keys=4)
    Statistics('entropy', 'sink_mass', sink_keys=4)

    No names means all that apply. `sink_keys` is how many first keys of each sequence (or document) count as sinks,
    `window` how far away, on either side, a key may be to count as near. `cross` says that queries and keys are
    different sequences: what compares their positions is then absent, and asking for it by name is an error.
    """

    names: tuple[str, ...]
    sink_keys: int
    window: int
    cross: bool

    def __init__(self, *names: str, sink_keys: int = 1, window: int = WINDOW, cross: bool = False) -> None:
        for name in names:
            if not isinstance(name, str) or name not in NAMES:
                raise OptionError(f"a statistic is one of {', '.join(NAMES)}; got {name!r}")
        for option, number, least in (("sink_keys", sink_keys, 1), ("window", window, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise OptionError(f"{option} must be an integer of at least {least}, got {number!r}")
        positional = [name for name in names if name in POSITIONAL]
        if cross and len(positional):
            raise OptionError(
                "queries and keys of a cross-attention have no common positions, "
                f"got a request for {', '.join(positional)}; leave them out"
            )
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "sink_keys", sink_keys)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "cross", cross)

    def wanted(self, *, learned_sinks: bool) -> tuple[str, ...]:
        """The names to compute, each once, in the order of `NAMES`."""
        if len(self.names):
            if "learned_sink_mass" in self.names and not learned_sinks:
                raise OptionError("learned_sink_mass is the share of learned sinks, got an attention without sinks")
            return tuple(name for name in NAMES if name in self.names)
        absent = (POSITIONAL if self.cross else ()) + (() if learned_sinks else ("learned_sink_mass",))
        return tuple(name for name in NAMES if name not in absent)

    def __repr__(self) -> str:
        options = [repr(name) for name in self.names]
        options += [f"sink_keys={self.sink_keys}"] if self.sink_keys != 1 else []
        options += [f"window={self.window}"] if self.window != WINDOW else []
        options += ["cross=True"] if self.cross else []
        return f"Statistics({', '.join(options)})"


def as_statistics(requested: object) -> Statistics | None:
    """What the `statistics` argument of `attention` means; None where nothing is asked for."""
    if requested is None or requested is False:
        return None
    if isinstance(requested, Statistics):
        return requested
    if requested is True:
        return Statistics()
    if isinstance(requested, str):
        return Statistics(requested)
    if isinstance(requested, tuple | list | set | frozenset):
        return Statistics(*requested) if len(requested) else None
    raise OptionError(
        f"statistics must be True, a name, several names or polyhead.Statistics(...), got {type(requested).__name__}"
    )
