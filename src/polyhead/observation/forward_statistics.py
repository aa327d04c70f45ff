"""`session.statistics`: the statistics of a model's last forward, row by row and with their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyhead.errors import GradientError, OptionError
from polyhead.observation.rows import corrected, hidden_by_bias
from polyhead.observation.statistics import NAMES, AttentionSite, Wanted, stack_order
from polyhead.observation.watcher import WatchedCall, is_recomputed
from polyhead.ops.attention import RowStatistics
from polyhead.ops.common.row_reduction import SHARE

Key = tuple[str, str]  # the path and the kind of a site, as `Session.gates` has it
NOT_REQUESTED = (
    "statistics are kept only when requested, got a session without; make it with observe(model, keep_statistics=True)"
)
_COUNT = "visible_keys"


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One attention of a site: its rows as they were computed, and all that is needed to correct them when read.

    The correction is made by the reader and not here: a step of autograd inside a checkpointed layer would be missing
    from the layer's recomputation.
    """

    rows: RowStatistics
    real: Tensor | None  # [batch or 1, queries], False for padding
    hidden: Tensor | None  # keys that a bias hides and `visible_keys` counts, [batch or 1, 1, queries or 1]
    sinks_in_view: Tensor | None  # [batch]
    learned_sinks: bool

    @classmethod
    def of(cls, call: WatchedCall, rows: RowStatistics) -> _Call:
        real = call.tokens if call.tokens is None or isinstance(call.tokens, Tensor) else call.tokens.real()
        return cls(rows, real, hidden_by_bias(call.mask), call.sinks_in_view, call.learned_sinks)

    def values(self, name: str) -> Tensor:
        """[batch, heads, queries]."""
        if name == SHARE:
            return self.values("entropy") / (self.values(_COUNT) + int(self.learned_sinks)).clamp_min(2.0).log()
        tensor: Tensor = getattr(corrected(self.rows, self.hidden, self.sinks_in_view), name)
        return tensor

    def counted(self, name: str) -> Tensor:
        """The rows of a mean, [batch, heads, queries]: tokens that see a key, or several for a share of an entropy."""
        keys = self.values(_COUNT)
        counted = keys + int(self.learned_sinks) > 1 if name == SHARE else keys > 0
        counted = counted & (keys > 0)
        return counted if self.real is None else counted & self.real[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class SiteRows:
    """The statistics of one site in the last forward: an attribute each, [batch, heads, queries].

    The names are those of `observe(statistics=...)`, and `visible_keys`. All but that one can be differentiated; where
    gradients are enabled and there is none, reading raises. `heads` are the numbers of the heads that were chosen.
    """

    site: AttentionSite
    heads: tuple[int, ...]
    columns: tuple[str, ...]
    _calls: list[_Call]  # emptied when it is released
    _which: int | None = None  # one of the calls; None for all of them

    @property
    def calls(self) -> tuple[SiteRows, ...]:
        """Each call of the site in this forward, in their order; most sites have one."""
        if self._which is not None:
            return (self,)
        return tuple(
            SiteRows(self.site, self.heads, self.columns, self._calls, index) for index in range(len(self._read()))
        )

    @property
    def tokens(self) -> Tensor:
        """The rows that count, boolean [batch, heads, queries]: no padding, and none that sees no key."""
        return self._of_heads(self._only("tokens").counted("entropy"))

    def mean(self, name: str) -> Tensor:
        """The mean of a statistic over the rows that count, of all calls, [heads]; NaN for a head without any."""
        values = [self._of_heads(self._checked(call, name)) for call in self._read()]
        counted = [self._of_heads(call.counted(name)) for call in self._read()]
        sums = [torch.where(real, x, 0.0).sum((0, 2)) for x, real in zip(values, counted, strict=True)]
        total, count = torch.stack(sums).sum(0), torch.stack([real.sum((0, 2)) for real in counted]).sum(0)
        # The division is one by 1 where nothing counts: a NaN that is selected away would still reach the gradient.
        return torch.where(count > 0, total / count.clamp_min(1), torch.nan)

    def __getattr__(self, name: str) -> Tensor:
        if name not in (*NAMES, _COUNT):
            raise AttributeError(f"SiteRows has no attribute {name!r}; the statistics are {', '.join(NAMES)}")
        return self._of_heads(self._checked(self._only(name), name))

    def _read(self) -> list[_Call]:
        if not len(self._calls):
            raise OptionError(
                "statistics are released when the model's next forward begins and when the session is left, "
                f"got a read of {self.site.name!r} afterwards; read session.statistics right after the forward"
            )
        return self._calls if self._which is None else [self._calls[self._which]]

    def _only(self, name: str) -> _Call:
        calls = self._read()
        if len(calls) > 1:
            raise OptionError(
                f"one call of a site has one {name} a row, got {self.site.name!r}, which was called {len(calls)} times "
                "in this forward; take .calls, which has each of them, or .mean(name), which is over all"
            )
        return calls[0]

    def _checked(self, call: _Call, name: str) -> Tensor:
        """A statistic of a call, which can be differentiated where gradients are enabled."""
        if name not in (*self.columns, _COUNT):
            raise OptionError(
                f"the statistics of {self.site.name!r} are {', '.join(self.columns)}, got {name!r}; "
                "observe(model, statistics=...) names those to keep, and a cross-attention has no positions"
            )
        values = call.values(name)
        if name != _COUNT and torch.is_grad_enabled() and not values.requires_grad:
            raise GradientError(
                f"a statistic that is read with gradients enabled must have one, got {name} of {self.site.name!r}, "
                "which has none: its forward ran under torch.no_grad() or reentrant checkpointing "
                "(use_reentrant=False keeps gradients), or nothing before it requires a gradient; "
                "to look at it, read it under torch.no_grad()"
            )
        return values

    def _of_heads(self, rows: Tensor) -> Tensor:
        everyone = self.heads == tuple(range(self.site.num_heads))
        return rows if everyone else torch.stack([rows[:, head] for head in self.heads], 1)

    def __repr__(self) -> str:
        return f"SiteRows({self.site.name}, {self.site.kind}: {', '.join(self.columns)}; {len(self._calls)} calls)"


class ForwardStatistics(Mapping[Key, SiteRows]):
    """The statistics of the last forward, by the path and the kind of a site; the path alone is enough for most.

    >>> import torch, polyhead
    >>> layer = polyhead.MultiHeadAttention(16, 2, causal=True)
    >>> with polyhead.observe(layer, statistics="entropy", keep_statistics=True) as session:
    ...     output = layer(torch.randn(3, 5, 16)).output
    ...     session.statistics["MultiHeadAttention"].entropy.shape
    ...     session.statistics.mean("entropy").sum().backward()
    torch.Size([3, 2, 5])
    """

    def __init__(self, sites: Mapping[Key, SiteRows]) -> None:
        self._sites = dict(sites)

    def __getitem__(self, where: Key | str) -> SiteRows:
        if not isinstance(where, str):
            fitting = [key for key in self._sites if key == where]
        else:
            fitting = [key for key in self._sites if key[0] == where]
        if len(fitting) != 1:
            rule = "a site is named by its path, and by (path, kind) where it attends in both ways"
            raise OptionError(f"{rule}; got {where!r} for the sites {', '.join(map(str, self._sites)) or 'none'}")
        return self._sites[fitting[0]]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __contains__(self, where: object) -> bool:
        return where in self._sites or where in [name for name, _ in self._sites]

    def mean(self, name: str) -> Tensor:
        """One mean a head over the rows that count, in the order of the rows of `session.profile`."""
        means = [rows.mean(name) for rows in self._sites.values()]
        if not len(means):
            raise OptionError(
                f"a mean is over the heads that were watched, got a forward in which none was, for {name!r}"
            )
        return torch.cat([x.to(means[0].device) for x in means])

    def __repr__(self) -> str:
        return f"KeptStatistics({', '.join(name for name, _ in self._sites)})"


class Keeper:
    """Keeps the rows of the model's latest forward, and lets go of them when the next begins."""

    def __init__(self) -> None:
        self._sites: dict[AttentionSite, SiteRows] = {}
        self._running: list[object] = []  # the forwards that have begun, one inside the other
        self._latest: object = None  # the forward that the rows are of
        self._missing = "no forward of the model has ended yet"

    @classmethod
    def requested(cls, keep: object, wanted: Wanted) -> Self | None:
        """The meaning of the `keep_statistics` argument of `observe`; None where nothing is kept."""
        if not isinstance(keep, bool) or (keep and not len(wanted.names)):
            named = ", ".join(wanted.names) or "none"
            raise OptionError(
                "keep_statistics is True or False, and True keeps the statistics that are named, "
                f"got {keep!r} with the statistics {named}"
            )
        return cls() if keep else None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Hooks at both ends of the model's forward. Entered before all other hooks of a session."""
        with ExitStack() as undo:
            undo.callback(self._leave)
            undo.callback(model.register_forward_pre_hook(self._begin, prepend=True).remove)
            undo.callback(model.register_forward_hook(self._succeed).remove)
            undo.callback(model.register_forward_hook(self._end, always_call=True).remove)
            yield

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if is_recomputed():
            return
        self._latest = object()
        self._running.append(self._latest)
        self._release("the last forward of the model did not reach its end")

    def _succeed(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not is_recomputed() and self._running[-1:] == [self._latest]:
            self._missing = ""

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if is_recomputed():
            return
        ended = self._running.pop() if len(self._running) else None
        if ended is not self._latest:
            self._release("the model was called inside its own forward, and rows of one call only can be kept")
        elif self._missing:  # it has raised
            self._release(self._missing)

    def _leave(self) -> None:
        self._running.clear()
        self._release("they were released when the session was left: read them inside the `with` block")

    def _release(self, why: str) -> None:
        for rows in self._sites.values():
            rows._calls.clear()  # also of those who still hold it
        self._sites = {}
        self._missing = why

    def add(self, call: WatchedCall, heads: tuple[int, ...], columns: tuple[str, ...], rows: RowStatistics) -> None:
        """Keep the rows of a call, of which nothing is computed that autograd would record."""
        if not len(self._running):
            self._release(
                f"{call.site.name!r} was called outside a forward of the observed model: observe the module that you "
                "call, and call the module itself, not its forward method"
            )
            return
        if self._running[-1] is not self._latest:
            return  # an outer forward goes on after an inner one, and is refused at its end
        if call.site not in self._sites:
            self._sites[call.site] = SiteRows(call.site, heads, columns, [])
        with torch.no_grad():
            self._sites[call.site]._calls.append(_Call.of(call, rows))

    def read(self) -> ForwardStatistics:
        if self._missing:
            raise OptionError(f"session.statistics are those of the model's last forward, got none: {self._missing}")
        order = stack_order(self._sites)
        sites = sorted(self._sites, key=order.__getitem__)
        return ForwardStatistics({(site.name, site.kind): self._sites[site] for site in sites})
