"""Options of `plan` and `choose`, checked without PyTorch: the command line refuses bad ones at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from polyhead.costs.quantities import check_count, parse_bandwidth
from polyhead.errors import OptionError

Phase = Literal["training", "prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Dimension = Literal["tensor", "context", "fsdp"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Number of ranks over which layers are distributed, by dimension of their mesh.

    Args:
        tensor: ranks of `polyhead.parallel.HeadParallel`, each with some heads of every layer.
        context: ranks of `polyhead.parallel.context_parallel`, each with some tokens of every sequence.
        fsdp: ranks of FSDP2's `fully_shard`, each with a part of every parameter and with sequences of its own.
        sequence_parallel: in training, inputs and outputs of head-parallel layers are shards of the sequence.
        method: of context parallel: "ring", "all_gather", or "auto" by size.
        bandwidth: bytes that a rank can send per second, over all links or by dimension; without it no time is
            predicted.

    >>> Ranks(tensor=4, fsdp=2).total
    8
    """

    tensor: int = 1
    context: int = 1
    fsdp: int = 1
    sequence_parallel: bool = False
    method: Literal["auto", "ring", "all_gather"] = "auto"
    bandwidth: float | Mapping[Dimension, float] | None = None

    def __post_init__(self) -> None:
        check_sizes(tensor=self.tensor, context=self.context, fsdp=self.fsdp)
        if self.method not in ("auto", "ring", "all_gather"):
            raise OptionError(f"method must be 'auto', 'ring' or 'all_gather', got {self.method!r}")
        if self.sequence_parallel and self.tensor == 1:
            raise OptionError("sequence_parallel needs tensor parallelism over at least 2 ranks, got tensor=1")
        named = self.bandwidth if isinstance(self.bandwidth, Mapping) else {"tensor": self.bandwidth}
        for dimension, bandwidth in named.items():
            if dimension not in get_args(Dimension):
                raise OptionError(
                    f"the keys of bandwidth must be among {', '.join(get_args(Dimension))}; got {dimension!r}"
                )
            if bandwidth is not None and not 0 < bandwidth < float("inf"):
                raise OptionError(f"bandwidth must be a positive number of bytes per second, got {bandwidth!r}")

    @property
    def total(self) -> int:
        return self.tensor * self.context * self.fsdp

    def bandwidth_of(self, dimension: Dimension) -> float | None:
        """Return the bytes that a rank can send per second in a dimension, None if unknown.

        Args:
            dimension: dimension of the mesh.
        """
        return self.bandwidth.get(dimension) if isinstance(self.bandwidth, Mapping) else self.bandwidth


def parse_ranks(
    counts: Mapping[str, int | None], sequence_parallel: bool, method: str, bandwidth: str | None
) -> Ranks | None:
    """Return the ranks of the options of `polyhead plan`, None without several ranks.

    >>> parse_ranks({"tensor": 4, "fsdp": 2}, False, "auto", "tensor=450GB/s").bandwidth
    {'tensor': 450000000000.0}
    """
    named: dict[str, Any] = {name: number for name, number in counts.items() if number is not None}
    if not len(named):
        if sequence_parallel or method != "auto" or bandwidth is not None:
            raise OptionError(
                "--sequence-parallel, --context-method and --link-bandwidth need ranks, got none; add "
                "--tensor-parallel, --context-parallel or --fsdp"
            )
        return None
    links: Any = bandwidth
    if bandwidth is not None and "=" in bandwidth:
        pairs = [part.partition("=") for part in bandwidth.split(",")]
        links = {name.strip(): parse_bandwidth(text, name="--link-bandwidth") for name, _, text in pairs}
    elif bandwidth is not None:
        links = parse_bandwidth(bandwidth, name="--link-bandwidth")
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "method": method, "bandwidth": links}
    return Ranks(**{**named, **options})


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
