"""Options of `plan` and `choose`, checked without PyTorch: the command line refuses bad ones at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from polyhead.costs.quantities import check_count
from polyhead.errors import OptionError

Phase = Literal["training", "prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits on the cost of all attention layers together; None is no limit.

    `seconds` is the predicted time of the requested phase and needs a machine; on a GPU it is device time, without
    launch overhead.
    """

    parameters: int | None = None
    cache_bytes_per_token: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            limit = getattr(self, field.name)
            if limit is not None and not limit > 0:
                raise OptionError(f"{field.name} of a budget must be positive, got {limit!r}")
        if self.parameters is None and self.cache_bytes_per_token is None and self.seconds is None:
            raise OptionError("a budget must limit parameters, cache bytes per token or time, got no limit")

    def allows(self, name: str, amount: float) -> bool:
        limit: float | None = getattr(self, name)
        return limit is None or amount <= limit


def check_sizes(**sizes: int | None) -> None:
    """Raise unless every size is a positive integer, or None."""
    for name, number in sizes.items():
        if number is not None:
            check_count(name, number, least=1)


def parse_phases(phases: Iterable[str]) -> tuple[Phase, ...]:
    """Return the phases with these names, in the order of `PHASES`.

    >>> parse_phases(["decode", "training"])
    ('training', 'decode')
    """
    requested = tuple(phases)
    unknown = [phase for phase in requested if phase not in PHASES]
    if unknown or not requested:
        raise OptionError(f"phase must be one of {', '.join(PHASES)}; got {', '.join(map(repr, unknown)) or 'none'}")
    return tuple(phase for phase in PHASES if phase in requested)


def check_choice(
    budget: Budget, *, d_model: int | None, layers: int, context: int, batch: int, has_machine: bool
) -> None:
    """Check the budget and the sizes of `choose`."""
    if budget.seconds is not None and not has_machine:
        raise OptionError("a time budget needs a machine for its predictions, got none; pass one")
    if d_model is None and budget.parameters is None:
        raise OptionError("without d_model the budget must limit parameters, got neither; pass one of them")
    check_sizes(d_model=d_model, layers=layers, context=context, batch=batch)
