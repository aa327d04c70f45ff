"""`session.statistics`: differentiable per-row statistics of the model's last forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from polyhead.errors import GradientError, OptionError
from polyhead.observation.recomputation import is_recomputed
from polyhead.observation.rows import corrected, hidden_by_bias, non_padding_rows
from polyhead.observation.statistics import NAMES, AttentionSite, StatisticsRequest, stack_order
from polyhead.ops.attended import Attended
from polyhead.ops.attention import RowStatistics
from polyhead.ops.common.row_reduction import SHARE

if TYPE_CHECKING:
    from polyhead.observation.calls import Call

Key = tuple[str, str]  # the path and the kind of a site, as in `Session.gates`
NOT_REQUESTED = (
    "per-row statistics are kept only when requested; create the session with observe(model, keep_statistics=True)"
)
_COUNT = "visible_keys"


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One attention call of a site: its raw row statistics, head outputs and the data to correct them on access.

    They are not corrected in the call, since inside a checkpointed layer that would add autograd operations that the
    recomputation does not have.
    """

    rows: RowStatistics
    output: Tensor | None  # [batch, heads, queries, value_dim]; None if the attention was recomputed without values
    non_padding: Tensor | None  # [batch or 1, queries], False for padding
    hidden: Tensor | None  # `hidden_by_bias`: keys counted in `visible_keys`, but masked
    sinks_in_view: Tensor | None  # [batch]
    learned_sinks: bool

    @classmethod
    def of(cls, call: Call, attended: Attended) -> _Call:
        result, hidden = attended.result, hidden_by_bias(call.mask, attended.result.output.shape[:3])
        assert result.statistics is not None
        output = result.output if 0 < result.output.shape[-1] == attended.value.shape[-1] else None
        return cls(
            result.statistics, output, non_padding_rows(call.tokens), hidden, call.sinks_in_view, call.learned_sinks
        )

    def values(self, name: str) -> Tensor:
        """Return a statistic, [batch, heads, queries]."""
        if name == SHARE:
            return self.values("entropy") / (self.values(_COUNT) + int(self.learned_sinks)).clamp_min(2.0).log()
        tensor: Tensor = getattr(corrected(self.rows, self.hidden, self.sinks_in_view), name)
        return tensor

    def counted(self, name: str) -> Tensor:
        """Return the rows to average, boolean [batch, heads, queries].

        These are non-padding tokens with a visible key. Normalized entropy needs two, of which a learned sink is one.
        """
        keys = self.values(_COUNT)
        counted = keys > 0
        if name == SHARE:
            counted = counted & (keys + int(self.learned_sinks) > 1)
        return counted if self.non_padding is None else counted & self.non_padding[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class SiteRows:
    """Statistics of one site in the last forward, one attribute each, [batch, heads, queries].

    The names are those of `observe(statistics=...)` and `visible_keys`; `output` are the head outputs. All but
    `visible_keys` are differentiable; access raises if gradients are enabled but the tensor has none. `heads` lists the
    indices of the observed heads.
    """

    site: AttentionSite
    heads: tuple[int, ...]
    columns: tuple[str, ...]
    _calls: list[_Call]  # cleared on release
    _index: int | None = None  # of a single call; None for all

    @property
    def calls(self) -> tuple[SiteRows, ...]:
        """The calls of the site in this forward, in order; most sites have one."""
        if self._index is not None:
            return (self,)
        return tuple(
            SiteRows(self.site, self.heads, self.columns, self._calls, index) for index in range(len(self._read()))
        )

    @property
    def tokens(self) -> Tensor:
        """Rows that count, boolean [batch, heads, queries]: non-padding tokens with a visible key."""
        return self._of_heads(self._only("tokens").counted("entropy"))

    @property
    def learned_sinks(self) -> bool:
        """Whether a learned sink takes a part of the weights."""
        return any(call.learned_sinks for call in self._read())

    @property
    def output(self) -> Tensor:
        """Head outputs before the output projection, [batch, heads, queries, value_dim]."""
        output = self._only("output").output
        if output is None:
            raise OptionError(
                "head outputs are kept of attention that runs inside the session, as in layers of polyhead and "
                f"transformers, got {self.site.name!r}, whose weights alone are recomputed; "
                "polyhead.MultiHeadAttention.from_torch(layer) has its outputs"
            )
        return self._of_heads(self._with_gradient(output, "output"))

    def mean(self, name: str) -> Tensor:
        """Return the mean of a statistic over the counted rows of all calls, [heads]; NaN where there are none.

        Args:
            name: name of a statistic.
        """
        values = [self._of_heads(self._checked(call, name)) for call in self._read()]
        counted = [self._of_heads(call.counted(name)) for call in self._read()]
        sums = [torch.where(rows, x, 0.0).sum((0, 2)) for x, rows in zip(values, counted, strict=True)]
        total, count = torch.stack(sums).sum(0), torch.stack([rows.sum((0, 2)) for rows in counted]).sum(0)
        # Divide by at least 1: a NaN in the branch that `where` discards would still propagate to the gradient.
        return torch.where(count > 0, total / count.clamp_min(1), torch.nan)

    def __getattr__(self, name: str) -> Tensor:
        if name not in (*NAMES, _COUNT):
            raise AttributeError(f"SiteRows has no attribute {name!r}; the statistics are {', '.join(NAMES)}")
        return self._of_heads(self._checked(self._only(name), name))

    def _read(self) -> list[_Call]:
        if not len(self._calls):
            raise OptionError(
                "statistics are released when the model's next forward begins and when the session exits, "
                f"got an access to {self.site.name!r} afterwards; read session.statistics right after the forward"
            )
        return self._calls if self._index is None else [self._calls[self._index]]

    def _only(self, name: str) -> _Call:
        calls = self._read()
        if len(calls) > 1:
            raise OptionError(
                f"{name} is defined per call of a site, got {self.site.name!r}, which was called {len(calls)} times "
                "in this forward; use .calls for each of them or .mean(name) for all"
            )
        return calls[0]

    def _checked(self, call: _Call, name: str) -> Tensor:
        """Return a statistic of a call; raise if gradients are enabled and it has none."""
        if name not in (*self.columns, _COUNT):
            raise OptionError(
                f"the statistics of {self.site.name!r} are {', '.join(self.columns)}, got {name!r}; "
                "select them with observe(model, statistics=...); cross-attention has no positional statistics"
            )
        values = call.values(name)
        return values if name == _COUNT else self._with_gradient(values, name)

    def _with_gradient(self, values: Tensor, name: str) -> Tensor:
        if torch.is_grad_enabled() and not values.requires_grad:
            raise GradientError(
                f"a statistic that is read with gradients enabled must require grad, got {name} of {self.site.name!r}, "
                "which does not: its forward ran under torch.no_grad() or reentrant checkpointing "
                "(use_reentrant=False keeps gradients), or no input or parameter before it requires grad; "
                "to read only the values, use torch.no_grad()"
            )
        return values

    def _of_heads(self, rows: Tensor) -> Tensor:
        is_all = self.heads == tuple(range(self.site.num_heads))
        return rows if is_all else torch.stack([rows[:, head] for head in self.heads], 1)

    def __repr__(self) -> str:
        return f"SiteRows({self.site.name}, {self.site.kind}: {', '.join(self.columns)}; {len(self._calls)} calls)"


class ForwardStatistics(Mapping[Key, SiteRows]):
    """Statistics of the last forward, keyed by path or (path, kind) of a site; the path is usually enough.

    Args:
        sites: rows of each site.

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

    def __getitem__(self, key: Key | str) -> SiteRows:
        matches = [site for site in self._sites if key in (site, site[0])]
        if len(matches) != 1:
            rule = "a site is selected by its path, or by (path, kind) if it has self- and cross-attention"
            raise OptionError(f"{rule}; got {key!r} for the sites {', '.join(map(str, self._sites)) or 'none'}")
        return self._sites[matches[0]]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __contains__(self, key: object) -> bool:
        return key in self._sites or key in [name for name, _ in self._sites]

    def mean(self, name: str) -> Tensor:
        """Return one mean per head over the counted rows, in the row order of `session.profile`.

        Args:
            name: name of a statistic.
        """
        means = [rows.mean(name) for rows in self._sites.values()]
        if not len(means):
            raise OptionError(f"a mean needs at least one observed head, got a forward without any for {name!r}")
        return torch.cat([x.to(means[0].device) for x in means])

    def __repr__(self) -> str:
        return f"ForwardStatistics({', '.join(name for name, _ in self._sites)})"


class ForwardRecorder:
    """Stores the row statistics of the model's last forward, and releases them when the next one begins."""

    def __init__(self) -> None:
        self._sites: dict[AttentionSite, SiteRows] = {}
        self._running: list[object] = []  # stack of nested forwards in progress
        self._latest: object = None  # the forward that the stored rows belong to
        self._missing = "no forward of the model has finished yet"

    @classmethod
    def from_option(cls, keep: object, wanted: StatisticsRequest) -> Self | None:
        """Return the recorder for a value of `keep_statistics`, which is checked; None if nothing is kept."""
        if not isinstance(keep, bool) or (keep and not len(wanted.names)):
            named = ", ".join(wanted.names) or "none"
            raise OptionError(
                "keep_statistics must be True or False, and True needs at least one statistic, "
                f"got {keep!r} with the statistics {named}"
            )
        return cls() if keep else None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Hook the start and end of the model's forward; must be entered before all other hooks of a session."""
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
        self._release("the last forward of the model did not finish")

    def _succeed(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not is_recomputed() and self._running[-1:] == [self._latest]:
            self._missing = ""

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if is_recomputed():
            return
        ended = self._running.pop() if len(self._running) else None
        if ended is not self._latest:
            self._release("the model was called inside its own forward, and only the rows of one call can be kept")
        elif self._missing:  # the forward raised
            self._release(self._missing)

    def _leave(self) -> None:
        self._running.clear()
        self._release("they were released when the session exited; read them inside the `with` block")

    def _release(self, reason: str) -> None:
        for rows in self._sites.values():
            rows._calls.clear()  # in place, so that references held by callers are released too
        self._sites = {}
        self._missing = reason

    def add(self, call: Call, heads: tuple[int, ...], columns: tuple[str, ...], attended: Attended) -> None:
        """Store the rows and outputs of a call without recording any autograd operation."""
        if not len(self._running):
            self._release(
                f"{call.site.name!r} was called outside a forward of the observed model; observe the module that you "
                "call, and call the module itself, not its forward method"
            )
            return
        if self._running[-1] is not self._latest:
            return  # an outer forward continues after a nested one; `_end` rejects it
        if call.site not in self._sites:
            self._sites[call.site] = SiteRows(call.site, heads, columns, [])
        with torch.no_grad():
            self._sites[call.site]._calls.append(_Call.of(call, attended))

    def read(self) -> ForwardStatistics:
        if self._missing:
            raise OptionError(f"session.statistics needs a finished forward of the model, got none: {self._missing}")
        order = stack_order(self._sites)
        sites = sorted(self._sites, key=order.__getitem__)
        return ForwardStatistics({(site.name, site.kind): self._sites[site] for site in sites})
