"""Row statistics of attention: their names, definitions and the options to request them.

A row is one query of one head. With logits s_j over its visible keys (after scale, softcap and bias), weights
p_j = exp(s_j - L) where L is the log-sum-exp, and distance d_j (key position minus query position):

    max_logit              max_j s_j               confidence     max_j p_j, the max attention weight
    max_abs_logit          max_j |s_j|             entropy        -sum_j p_j log p_j, in nats
    mean_distance          sum_j p_j |d_j|         sink_mass      p on the first `sink_keys` keys of the sequence
    mean_offset            sum_j p_j d_j           self_mass      p at d = 0
    mean_squared_distance  sum_j p_j d_j^2         previous_mass  p at d = -1
    visible_keys           number of visible keys  next_mass      p at d = 1
    learned_sink_mass      exp(sink - L)           window_mass    p at |d| <= `window`

A learned sink is one more term of L and of the entropy, and of nothing else. A row without visible keys has -inf for
max_logit and 0 for the rest; with a learned sink, its learned_sink_mass is 1. Weights are those before dropout.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError

WINDOW = 8  # the default of `window_mass`, here and in `observe`
# These compare positions, and are undefined in cross-attention.
POSITIONAL = (
    "mean_distance",
    "mean_offset",
    "mean_squared_distance",
    "self_mass",
    "previous_mass",
    "next_mass",
    "window_mass",
)
# Sums over keys of the weight times a known factor of the key: their gradients share one rule.
LINEAR = (*POSITIONAL, "sink_mass")
# The value at one key per row, the argmax, at which their gradient has a term of its own.
MAXIMA = ("max_logit", "max_abs_logit", "confidence")


@dataclass(frozen=True, slots=True, eq=False)
class RowStatistics:
    """Statistics of every row, each [batch, heads, queries] and float32 (float64 for float64 input).

    Statistics that were not requested are None. All but `visible_keys` are differentiable. These fields are the one
    list of all statistics: `NAMES` and the tuples of pointers that kernels take are derived from it.
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
        """Yield (name, tensor) of each statistic that was computed."""
        for name in NAMES:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def __repr__(self) -> str:
        present = dict(self.items())
        shape = list(next(iter(present.values())).shape) if len(present) else []
        return f"RowStatistics({', '.join(present)}; each {shape})"


NAMES = tuple(field.name for field in fields(RowStatistics))
torch.export.register_dataclass(RowStatistics, serialized_type_name="polyhead.RowStatistics")

_IN_ALL_KERNELS = frozenset(
    [
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
    ]
)
# Names that the kernels of each operation write; selected rows share those of attention. Written out, not derived from
# `NAMES`: a kernel leaves the memory of a statistic that it lacks uninitialised.
IN_KERNELS = {
    "attention": _IN_ALL_KERNELS,
    "decode": _IN_ALL_KERNELS,
    "talking heads": _IN_ALL_KERNELS - {"learned_sink_mass"},
}


def kernel_reasons(operation: str, names: Iterable[str]) -> list[str]:
    """Return the reason why the kernels of an operation of `IN_KERNELS` do not support these statistics, if any."""
    if IN_KERNELS[operation].issuperset(names):
        return []
    missing = [name for name in names if name not in IN_KERNELS[operation]]
    return [f"the kernels of {operation} do not compute {', '.join(missing)}"]


def row_tuple(name: str, names: tuple[str, ...], module: str) -> Any:
    """Return a class of named tuples by which a kernel takes one optional value, such as a pointer, per statistic."""
    return namedtuple(name, names, defaults=(None,) * len(names), module=module)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics to compute and their parameters, as passed to `attention(..., statistics=)`.

    >>> Statistics("entropy", "sink_mass", sink_keys=4)
    Statistics('entropy', 'sink_mass', sink_keys=4)

    Without names, all applicable statistics are computed. `sink_keys` is the number of first keys of each sequence (or
    document) that count as attention sinks, `window` the largest distance, on either side, that counts for
    `window_mass`. `cross` marks cross-attention: statistics that compare positions are then left out, and requesting
    one by name is an error.
    """

    names: tuple[str, ...]
    sink_keys: int
    window: int
    cross: bool

    def __init__(self, *names: str, sink_keys: int = 1, window: int = WINDOW, cross: bool = False) -> None:
        for name in names:
            if not isinstance(name, str) or name not in NAMES:
                raise OptionError(f"a statistic must be one of {', '.join(NAMES)}; got {name!r}")
        for option, number, minimum in (("sink_keys", sink_keys, 1), ("window", window, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < minimum:
                raise OptionError(f"{option} must be an integer of at least {minimum}, got {number!r}")
        positional = [name for name in names if name in POSITIONAL]
        if cross and len(positional):
            raise OptionError(
                "queries and keys of a cross-attention have no common positions, "
                f"got a request for {', '.join(positional)}; remove these names"
            )
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "sink_keys", sink_keys)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "cross", cross)

    def wanted(self, *, learned_sinks: bool) -> tuple[str, ...]:
        """Return the names to compute, each once, in the order of `NAMES`.

        Args:
            learned_sinks: the attention has learned sinks.
        """
        if len(self.names):
            if "learned_sink_mass" in self.names and not learned_sinks:
                raise OptionError("learned_sink_mass is the weight of learned sinks, got an attention without sinks")
            return tuple([name for name in NAMES if name in self.names])
        absent = (POSITIONAL if self.cross else ()) + (() if learned_sinks else ("learned_sink_mass",))
        return tuple([name for name in NAMES if name not in absent])

    def __repr__(self) -> str:
        options = [repr(name) for name in self.names]
        options += [f"sink_keys={self.sink_keys}"] if self.sink_keys != 1 else []
        options += [f"window={self.window}"] if self.window != WINDOW else []
        options += ["cross=True"] if self.cross else []
        return f"Statistics({', '.join(options)})"


_ALL = Statistics()


def as_statistics(requested: object) -> Statistics | None:
    """Convert the `statistics` argument of `attention`; None if no statistics are requested."""
    if requested is None or requested is False:
        return None
    if isinstance(requested, Statistics):
        return requested
    if requested is True:
        return _ALL
    if isinstance(requested, str):
        return Statistics(requested)
    if isinstance(requested, tuple | list | set | frozenset):
        return Statistics(*requested) if len(requested) else None
    raise OptionError(
        f"statistics must be True, a name, a list of names or polyhead.Statistics(...), got {type(requested).__name__}"
    )
