"""`observe`: watch the heads of a model while it runs, and leave it as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadId, HeadOrigins
from polyhead.masks import Mask
from polyhead.observation import adapters as adapting
from polyhead.observation import returned_weights, torch_modules, transformers_models
from polyhead.observation.collectors import BatchMetadata, Collector, CollectorState
from polyhead.observation.forward_statistics import NOT_REQUESTED, ForwardStatistics, ForwardRecorder
from polyhead.observation.head_profile import HeadProfile
from polyhead.observation.observations import Observations
from polyhead.observation.origins import is_edited, origins_of
from polyhead.observation.rows import Tokens, corrected, hidden_by_bias
from polyhead.observation.session_limits import (
    OneThread,
    check_chosen,
    check_heads,
    check_numbers,
    check_paths,
    stack_of,
    with_the_same_modules,
)
from polyhead.observation.staging import Staging, Tally, around
from polyhead.observation.statistics import AttentionSite, SiteStatistics, Wanted
from polyhead.observation.watcher import Place, is_recomputed
from polyhead.ops.attended import Attended
from polyhead.ops.attention import RowStatistics, Statistics

_UNANNOUNCED = transformers_models.Arrival()


def observe(
    model: nn.Module,
    *,
    layers: Iterable[int | str] | None = None,
    heads: Iterable[int | HeadId] | None = None,
    statistics: bool | str | Sequence[str] | Statistics | None = None,
    collect: Sequence[Collector] = (),
    every: int = 1,
    via_weights: bool = False,
    adapters: adapting.Adapters | None = None,
    keep_statistics: bool = False,
) -> Session:
    """Gather statistics of every head of `model` while it runs inside a `with` block.

    Args:
        model: a model of Hugging Face transformers that uses its attention interface, or any module with
            `polyhead.MultiHeadAttention` or `torch.nn.MultiheadAttention` inside.
        layers: only these: numbers (in every stack: an encoder's, a decoder's, its cross-attention's) or module paths.
        heads: only these: numbers (in every layer) or `HeadId(layer, head)`.
        statistics: names, or `polyhead.Statistics(...)` to set `sink_keys` and `window` (1 and 8 by default); False for
            none.
        gather: what to gather besides (`polyhead.observation.Collector`), of all heads of the chosen layers.
        every: gather from every k-th call of each layer, from the first on. The others cost nothing where no gradient
            is taken.
        via_weights: read the weights that a model of transformers returns when it is asked for `output_attentions`,
            for models that compute attention by themselves. Slow, and the memory grows with the square of the context;
            logits, and what heads write, are not known then.
        adapters: for attention modules of your own, by path or class; see `polyhead.observation.Adapter`.
        keep_statistics: keep the rows of each forward, with their gradients, as `session.statistics` until the next
            forward begins: to train on them. All else that a session gathers is detached.

    Only real tokens count: no padding, no row that sees no key. A call of the model counts as a whole, when it has
    ended: one that raises or is interrupted counts nowhere, whichever layers it had reached. The model's weights, mode,
    configuration and hooks are afterwards what they were, also after an exception. Inside the block nothing runs
    compiled.

    >>> import torch, polyhead
    >>> layer = polyhead.MultiHeadAttention(16, 2, causal=True)
    >>> with polyhead.observe(layer, statistics=("entropy", "mean_distance")) as session:
    ...     output = layer(torch.randn(3, 5, 16)).output
    >>> session.profile
    HeadProfile(2 heads, 15 tokens: entropy, mean_distance)
    """
    return Session(
        model,
        layers=layers,
        heads=heads,
        statistics=statistics,
        collect=collect,
        every=every,
        via_weights=via_weights,
        adapters=adapters,
        keep_statistics=keep_statistics,
    )


@dataclass(slots=True, eq=False)
class Call:
    """One attention that is being watched."""

    session: Session
    site: AttentionSite
    columns: tuple[str, ...]
    requested: Statistics | None
    tokens: Tokens | Tensor | None  # whose rows are real, or which
    counts: bool = True
    whole: bool = False  # whether somebody takes a second look
    gate: Tensor | None = None  # [heads], [batch, heads] or [batch, heads, queries]
    learned_sinks: bool = False
    mask: Mask | None = None
    sinks_in_view: Tensor | None = None  # [batch]; False where the first keys of the sequence are no longer there
    differentiable: bool = False
    keeper: ForwardRecorder | None = None

    def notify(self, attended: Attended) -> None:
        if self.keeper is not None and attended.result.statistics is not None and len(self.columns):
            heads = self.session._heads_of(self.site)
            self.keeper.add(self, heads, self.columns, attended.result.statistics)
        if self.counts:
            with torch.no_grad():
                self._told(attended)

    def _told(self, attended: Attended) -> None:
        real = self.tokens.real() if isinstance(self.tokens, Tokens) else self.tokens
        rows = attended.result.statistics
        if rows is not None and len(self.columns):
            self.session.add(self, corrected(rows, hidden_by_bias(self.mask), self.sinks_in_view), real)
        if self.whole:
            self.session.collect(self.site, attended, real)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is the same for all calls of a module: where it stands, and what is wanted there."""

    site: AttentionSite
    root: str  # the layers around it, whose self-attention and cross-attention have the same queries
    columns: tuple[str, ...]
    requested: Statistics | None
    chosen: bool


class Session:
    """Statistics of a model's heads, gathered while it is entered; made by `observe`.

    It can be entered again, and goes on gathering. `observations` is what was gathered, as a value that can be merged
    with another session's. `metadata` is passed to collectors with every attention. `gates` holds
    a factor for each head, by the path and the kind of a site: [heads], [batch, heads] or [batch, heads, queries]. 0
    takes a head out, and a gradient with respect to a gate says what a little less of that head would do. Statistics
    are of the heads before their gates.

    `observations` and `profile` are sums over many forwards, detached as they are added: a loss made of them trains
    nothing. `statistics` are those of one forward, with their gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: Iterable[int | str] | None = None,
        heads: Iterable[int | HeadId] | None = None,
        statistics: bool | str | Sequence[str] | Statistics | None = None,
        collect: Sequence[Collector] = (),
        every: int = 1,
        via_weights: bool = False,
        adapters: adapting.Adapters | None = None,
        keep_statistics: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"observe takes a torch.nn.Module, got {type(model).__name__}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise OptionError(f"every must be an integer of at least 1, got {every!r}")
        self.model = model
        if via_weights and adapters is not None:
            raise OptionError("via_weights reads all from what the model returns, got adapters as well")
        self.wanted = Wanted.of(statistics)
        if via_weights:
            self.wanted = returned_weights.without_logits(self.wanted, statistics)
        self.via_weights = via_weights
        self._keeper = ForwardRecorder.requested(keep_statistics, self.wanted)
        self.adapters = {} if adapters is None else dict(adapters)
        self.collectors = _distinct(collect)
        self.every = every
        self.layers = None if layers is None else _chosen_layers(layers)
        self.heads = None if heads is None else _chosen_heads(heads)
        for layer in self.layers or ():
            if via_weights and isinstance(layer, str):
                if not returned_weights.SITE.fullmatch(layer):
                    raise OptionError(f"layers are numbers or places in what a model returns, got {layer!r}")
            elif isinstance(layer, str) and layer not in dict(model.named_modules()):
                raise OptionError(f"layers are numbers or paths of the model's modules, got {layer!r}")
        self._find_modules()
        attending = [self._names[id(module)] for module in (*self._asking, *self._layers, *self._adapted)]
        check_numbers(self.layers or (), attending)
        check_paths(() if via_weights else self.layers or (), attending)
        self._staging = Staging(dropped=self._drop)
        self._plans: dict[tuple[int, int, bool, bool], Plan] = {}
        self.metadata = BatchMetadata()
        self.gates: dict[tuple[str, str], Tensor] = {}
        self._starts: dict[int, Tokens] = {}
        self._latest: dict[str, Tokens | Tensor | None] = {}
        self._arrivals: dict[int, transformers_models.Arrival] = {}
        self._undo: ExitStack | None = None
        self._thread = OneThread()

    def _find_modules(self) -> None:
        modules = self.model.named_modules()
        self._names = {id(module): name or type(module).__name__ for name, module in modules}
        self._asking: tuple[nn.Module, ...] = ()
        self._layers: tuple[nn.Module, ...] = ()
        self._adapted: dict[nn.Module, adapting.Adapter] = {}
        self._returning: dict[nn.Module, str] = {}
        if self.via_weights:
            self._returning = returned_weights.returning_models(self.model)
            if not len(self._returning):
                raise OptionError(returned_weights.why_not(self.model))
            if is_edited(self.model):
                raise OptionError(
                    "via_weights does not know which module a weight is of, and the heads of this model were edited, "
                    "so that their numbers say nothing; observe it without via_weights"
                )
            return
        self._asking = transformers_models.asking_modules(self.model)
        self._adapted = adapting.adapted_modules(self.model, self.adapters, self._asking)
        self._layers = tuple(x for x in torch_modules.attention_layers(self.model) if x not in self._adapted)
        if not len(self._asking) and not len(self._layers) and not len(self._adapted):
            raise OptionError(transformers_models.why_unobservable(self.model))

    # ---- entering and leaving

    def __enter__(self) -> Self:
        if self._undo is not None:
            raise OptionError("this session is entered already; make another with polyhead.observe(model)")
        self._find_modules()  # the model may have been changed since
        with ExitStack() as undo:
            # A compiled graph has no place for what is told beside its result.
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            undo.callback(self._forget)
            if self._keeper is not None:
                undo.enter_context(self._keeper.watching(self.model))
            if len(self._asking):
                undo.enter_context(transformers_models.switched(self.model, self._asking))
                for module in self._asking:
                    undo.callback(transformers_models.announce(module, self._arrivals).remove)
                undo.enter_context(transformers_models.watching(self.model, self))
            undo.enter_context(torch_modules.without_shortcuts(self._layers))
            for layer in self._layers:
                undo.enter_context(torch_modules.watched(layer, self))
            for module, adapter in self._adapted.items():
                undo.enter_context(adapting.watched(module, adapter, self))
            if len(self._returning):
                undo.enter_context(returned_weights.read(self.model, self._returning, self))
            else:
                attending = (*self._asking, *self._layers, *self._adapted)
                undo.enter_context(with_the_same_modules(self.model, attending))
            watched = (*self._asking, *self._layers, *self._adapted, *self._returning)
            undo.enter_context(self._staging.watching(around(self.model, watched)))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.__exit__(kind, error, trace)
        if kind is None and self.heads is not None:
            attending = (*self._asking, *self._layers, *self._adapted, *self._returning)
            check_chosen(self.heads, self.observations.calls, [self._names[id(module)] for module in attending])

    def _forget(self) -> None:
        self._latest.clear()
        self._starts.clear()
        self._arrivals.clear()
        self._thread.forget()
        self._plans.clear()  # by modules, which may be others when it is entered again

    def _drop(self) -> None:
        """Forget what a call has left that raised: the sites that it was the first to reach are not known."""
        self._plans.clear()
        self._arrivals.clear()

    # ---- what the watched modules call

    def begin(
        self, module: nn.Module, query: Tensor, key: Tensor, mask: Mask | None, *, learned_sinks: bool
    ) -> Call | None:
        """A call of a model of transformers is about to be computed; None where it is not watched."""
        arrival = self._arrivals.pop(id(module), _UNANNOUNCED)
        cross = arrival.cross or transformers_models.looks_cross(module, query, key, mask)
        tokens = Tokens.of(mask, query, key)
        call = self.call(module, query.shape[1], tokens, cross=cross, learned_sinks=learned_sinks)
        if call is not None:
            call.mask = mask
        if arrival.first_key == 0:
            self._starts[id(module)] = tokens
        elif arrival.first_key is not None and call is not None and not cross:
            # A windowed cache has let go of the first keys, unless what it let go of was padding before them.
            start = self._starts.get(id(module), tokens).first_real()
            call.sinks_in_view = (start >= arrival.first_key).expand(query.shape[0])
        return call

    def call(
        self,
        module: nn.Module | Place,
        num_heads: int,
        tokens: Tokens | Tensor | None,
        *,
        cross: bool,
        learned_sinks: bool = False,
    ) -> Call | None:
        """How to watch one call of a module; None where it is not one of those asked for."""
        self._thread.check()
        plan = self._plans.get((id(module), num_heads, cross, learned_sinks))
        if plan is None:
            plan = self._plan(module, num_heads, cross=cross, learned_sinks=learned_sinks)
        site, columns = plan.site, plan.columns
        if cross:
            # The queries are the tokens of the self-attention that went before, in the same layers.
            tokens = _fitting(self._latest.get(plan.root), tokens)
        else:
            self._latest[plan.root] = tokens
        gate = self.gates.get((site.name, site.kind)) if len(self.gates) else None
        if not plan.chosen or not (len(columns) or len(self.collectors)):
            return None if gate is None else Call(self, site, (), None, None, counts=False, gate=gate)
        # A checkpointed layer is computed again for the backward, in just the steps of the first time. Nobody says
        # which call that was, so where gradients are taken every call has the same steps, and counts once at most.
        again = is_recomputed()
        calls = self._staging.current.calls
        counts = not again and calls[site] % self.every == 0
        calls[site] += not again
        if not counts and not torch.is_grad_enabled() and self._keeper is None:
            return None if gate is None else Call(self, site, (), None, None, counts=False, gate=gate)
        whole = len(self.collectors) > 0
        call = Call(self, site, columns, plan.requested, tokens, counts, whole, gate, learned_sinks)
        call.differentiable, call.keeper = self._keeper is not None, None if again else self._keeper
        return call

    def _plan(self, module: nn.Module | Place, num_heads: int, *, cross: bool, learned_sinks: bool) -> Plan:
        name = module.name if isinstance(module, Place) else self._names[id(module)]
        origins = None if isinstance(module, Place) else origins_of(self.model, name, module, num_heads)
        site = self._site(name, num_heads, origins, cross=cross)
        root = site.stack.partition(".*")[0] if "*" in site.stack else site.stack.rpartition(".")[0]
        columns = self.wanted.columns(cross=cross, learned_sinks=learned_sinks)
        requested = self.wanted.of_rows(columns, cross=cross) if len(columns) else None
        plan = Plan(site, root, columns, requested, self._is_chosen(site))
        self._plans[id(module), num_heads, cross, learned_sinks] = plan
        return plan

    def add(self, call: Call, rows: RowStatistics, real: Tensor | None) -> None:
        """Reduce the rows of a call, where they lie, and add them to what its site has gathered."""
        statistics = self._staging.current.statistics
        there = statistics.get(call.site)
        if there is None:
            assert rows.visible_keys is not None
            device = rows.visible_keys.device
            there = SiteStatistics.empty(call.site, self._heads_of(call.site), call.columns, device)
        statistics[call.site] = there.update(rows, real, learned_sinks=call.learned_sinks)

    def collect(self, site: AttentionSite, attended: Attended, real: Tensor | None) -> None:
        """Show one attention to all that gather."""
        tally = self._staging.current
        there, device = tally.collected.get(site), attended.query.device
        if there is None or site in tally.taken_up:
            made = {collector.name: collector.empty(site, device) for collector in self.collectors}
            empty = {name: value for name, value in made.items() if value is not None}
            there = empty if there is None else {name: _moved(there[name], empty[name], device) for name in there}
            tally.taken_up.discard(site)
        tally.collected[site] = {name: value.update(attended, real, self.metadata) for name, value in there.items()}

    def _site(self, name: str, num_heads: int, origins: HeadOrigins | None, *, cross: bool) -> AttentionSite:
        kind: Literal["self", "cross"] = "cross" if cross else "self"
        sites = self._staging.current.sites
        found = sites.get((name, kind))
        if found is None:
            stack = stack_of(name)
            layer = sum((site.stack, site.kind) == (stack, kind) for site in sites.values())
            found = sites[name, kind] = AttentionSite(name, kind, stack, layer, num_heads, origins)
        check_heads(found, num_heads, origins)
        return found

    def _is_chosen(self, site: AttentionSite) -> bool:
        chosen = self.layers is None or site.layer in self.layers or site.name in self.layers
        return chosen and len(self._heads_of(site)) > 0

    def _heads_of(self, site: AttentionSite) -> tuple[int, ...]:
        every = range(site.num_heads)
        if self.heads is None:
            return tuple(every)
        return tuple(head for head in every if head in self.heads or HeadId(site.layer, head) in self.heads)

    # ---- what was gathered

    @property
    def observations(self) -> Observations:
        """All calls of the model that have ended; not what a running call adds."""
        found = self._staging.counted
        calls = {site: found.calls[site] for site in found.sites.values()}
        return Observations(self.wanted, tuple(found.statistics.values()), dict(found.collected), calls)

    def go_on_from(self, observations: Observations) -> None:
        """Take up what an earlier session of the same model had gathered, as if this one had gathered it itself."""
        if observations.wanted != self.wanted:
            raise OptionError(
                f"a session goes on with the statistics it began with, got {observations.wanted} for {self.wanted}"
            )
        sites = dict(self._staging.counted.sites)
        for site in observations.calls:
            if sites.setdefault((site.name, site.kind), site) != site:
                raise OptionError(f"a session goes on with the same model, got one in which {site.name!r} is another")
        if len(self._staging.counted.sites):
            raise OptionError("a session takes up others' observations before it has its own, got one that has some")
        names = {collector.name for collector in self.collectors}
        if others := {name for values in observations.collected.values() for name in values} - names:
            raise OptionError(
                f"a session goes on with the gatherers it began with, got {', '.join(sorted(names)) or 'none'} "
                f"for values of {', '.join(sorted(others))}"
            )
        self._plans.clear()
        collected = {site: dict(values) for site, values in observations.collected.items()}
        statistics = {x.site: x for x in observations.sites}
        self._staging.counted = Tally(sites, Counter(observations.calls), statistics, collected, set(collected))

    @property
    def statistics(self) -> ForwardStatistics:
        """The rows of the last forward with their gradients, site by site; for `observe(keep_statistics=True)`."""
        if self._keeper is None:
            raise OptionError(NOT_REQUESTED)
        return self._keeper.read()

    @property
    def profile(self) -> HeadProfile:
        """One row a head: its site, layer and number, and the mean, spread and maximum of each statistic.

        Its numbers are detached; `statistics` has those that can be differentiated.
        """
        return self.observations.profile

    def __repr__(self) -> str:
        heads = sum(site.num_heads for site in self._staging.counted.sites.values() if self._is_chosen(site))
        how = f"; {returned_weights.COST}" if self.via_weights else ""
        return f"Session({type(self.model).__name__}, {heads} heads seen{how})"


def _moved(value: CollectorState, empty: CollectorState, device: torch.device) -> CollectorState:
    """What `value` has gathered, in one that was made for another device."""
    return empty.with_state({name: tensor.to(device) for name, tensor in value.state().items()})


def _distinct(collect: Sequence[Collector]) -> tuple[Collector, ...]:
    names = [collector.name for collector in collect]
    if len(set(names)) < len(names):
        raise OptionError(f"what gathers goes by different names, got {', '.join(names)}")
    return tuple(collect)


def _chosen_layers(layers: Iterable[int | str]) -> frozenset[int | str]:
    chosen = frozenset([layers] if isinstance(layers, int | str) else layers)
    for layer in chosen:
        if isinstance(layer, bool) or not isinstance(layer, int | str) or (isinstance(layer, int) and layer < 0):
            raise OptionError(f"layers are numbers from 0 on or paths of modules, got {layer!r}")
    return chosen


def _chosen_heads(heads: Iterable[int | HeadId]) -> frozenset[int | HeadId]:
    chosen = frozenset([heads] if isinstance(heads, int | HeadId) else heads)
    for head in chosen:
        number = head.head if isinstance(head, HeadId) else head
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise OptionError(f"heads are numbers from 0 on or polyhead.HeadId(layer, head), got {head!r}")
    return chosen


def _fitting(tokens: Tokens | Tensor | None, queries: Tokens | Tensor | None) -> Tokens | Tensor | None:
    """The tokens of an earlier call, where they can be the queries of this one."""
    if tokens is None or not isinstance(queries, Tokens):
        return None
    sizes = (tokens.batch, tokens.queries) if isinstance(tokens, Tokens) else tuple(tokens.shape)
    return tokens if sizes == (queries.batch, queries.queries) else None
