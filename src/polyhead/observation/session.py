"""`observe`: collect statistics of a model's heads while it runs, without changing the model."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadId, HeadOrigins, checked_integer
from polyhead.integrations.huggingface.registration import OBSERVED, register
from polyhead.integrations.transformer_lens import original_attention, wrapped_models
from polyhead.masks import Mask
from polyhead.observation import adapters as adapting
from polyhead.observation import (
    intercepted_calls,
    nested_sessions,
    torch_modules,
    transformers_models,
)
from polyhead.observation.cache_positions import (
    CACHES,
    SequenceStart,
    has_only_dense_terms,
    locate_sinks,
    locate_tokens_in_cache,
    sequence_start,
)
from polyhead.observation.calling_modules import calling_modules
from polyhead.observation.calls import Call, Plan
from polyhead.observation.collectors import (
    BatchMetadata,
    CollectedCall,
    Collector,
    CollectorState,
    check_collectors,
    empty_state,
    updated_state,
)
from polyhead.observation.compiled import CompiledModules, GradientHook, TracedModule
from polyhead.observation.continuous_batching import Managers
from polyhead.observation.forward_statistics import NOT_REQUESTED, ForwardRecorder, ForwardStatistics
from polyhead.observation.gates import Gates
from polyhead.observation.head_profile import HeadProfile
from polyhead.observation.intercepted_calls import Interceptor, SkippedCall
from polyhead.observation.observations import Observations
from polyhead.observation.origins import origins_of
from polyhead.observation.recomputation import hidden_operators, is_recomputed
from polyhead.observation.rows import Tokens, matching_tokens, with_documents
from polyhead.observation.session_limits import (
    OneThread,
    check_heads_exist,
    check_heads_unchanged,
    check_module_paths,
    check_modules_unchanged,
    check_numbers,
    check_paths,
    chosen_heads,
    chosen_layers,
    stack_of,
)
from polyhead.observation.staging import Staging, Tally, enclosing_modules
from polyhead.observation.statistics import AttentionSite, SiteStatistics, StatisticsRequest
from polyhead.ops.attended import Attended
from polyhead.ops.attention import AttentionOutput, RowStatistics, Statistics

_NO_CONTEXT = transformers_models.CallContext()


def observe(
    model: nn.Module,
    *,
    layers: Iterable[int | str] | None = None,
    heads: Iterable[int | HeadId] | None = None,
    statistics: bool | str | Sequence[str] | Statistics | None = None,
    collect: Sequence[Collector] = (),
    every: int = 1,
    adapters: adapting.Adapters | None = None,
    keep_statistics: bool = False,
    callback: Callable[[Session], None] | None = None,
) -> Session:
    """Collect statistics of every head of `model` while it runs inside a `with` block.

    Args:
        model: a Hugging Face transformers model that uses the attention interface, any module that contains
            `polyhead.MultiHeadAttention` or `torch.nn.MultiheadAttention`, one that calls
            `F.scaled_dot_product_attention` or `flex_attention`, or one that computes a softmax of queries and keys by
            hand, which is slow, with memory quadratic in the context length.
        layers: layers to observe, by index (within each stack: encoder, decoder, cross-attention) or module path; all
            by default.
        heads: heads to observe, by index (in every layer) or `HeadId(layer, head)`; all by default.
        statistics: names, or `polyhead.Statistics(...)` to set `sink_keys` and `window` (1 and 8 by default); False for
            none.
        collect: additional collectors (`polyhead.observation.Collector`) for all heads of the observed layers.
        every: observe every k-th call of each layer, starting with the first. Skipped calls have no overhead unless
            gradients are enabled.
        adapters: adapters for custom attention modules, by path or class; see `polyhead.observation.Adapter`.
        keep_statistics: keep the differentiable per-row statistics and head outputs of each forward in
            `session.statistics` until the next forward begins, for use in a loss. Everything else that a session
            collects is detached.
        callback: called with the session after each forward that was observed, in the thread that ran it.

    Returns:
        A session: a context manager whose `profile` is the table of heads.

    Raises:
        OptionError: the model has no attention that can be observed, or has no such layers, heads or statistics. If it
            may call an attention function directly, this is known after its first forward, and on exit.

    Padding tokens and rows without visible keys are excluded. A call of the model is counted when it finishes; one that
    raises or is interrupted is not counted at all. The model's weights, mode, configuration and hooks are restored
    afterwards, also after an exception. Inside the block, compiled code runs in eager mode.

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
        adapters=adapters,
        keep_statistics=keep_statistics,
        callback=callback,
    )


class Session:
    """Context manager that observes a model; created by `observe`.

    It can be entered repeatedly and accumulates. `observations` is the accumulated result, which can be merged with
    that of another session. `metadata` is passed to collectors with every attention call. `gates` maps the (path, kind)
    of a site to factors for its head outputs: [heads], [batch, heads] or [batch, heads, queries]. A factor of 0 ablates
    a head; the gradient with respect to a gate is the head's first-order importance. Statistics are computed before
    gates are applied. A path that is not that of an attention module is refused.

    `observations` and `profile` accumulate over forwards and are detached, so a loss computed from them has no
    gradient. `statistics` belong to one forward and are differentiable.

    Args:
        model, layers, heads, statistics, collect, every, adapters, keep_statistics, callback: those of `observe`.
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
        adapters: adapting.Adapters | None = None,
        keep_statistics: bool = False,
        callback: Callable[[Session], None] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"observe takes a torch.nn.Module, got {type(model).__name__}")
        checked_integer("every", every, at_least=1, error=OptionError)
        self.model = model
        self.wanted = StatisticsRequest.of(statistics)
        self._recorder = ForwardRecorder.from_option(keep_statistics, self.wanted)
        self.adapters = {} if adapters is None else dict(adapters)
        self.collectors = check_collectors(collect)
        self.every = every
        self.layers = None if layers is None else chosen_layers(layers)
        self.heads = None if heads is None else chosen_heads(heads)
        self._find_modules()
        self._interceptor = Interceptor(self, lambda: self._check_called(is_running=True))
        if not len(self._calling):
            self._check_layers()
        else:
            check_module_paths((x for x in self.layers or () if isinstance(x, str)), self._names.values())
        if callback is not None and not callable(callback):
            raise OptionError(f"callback must be a function of the session, got {type(callback).__name__}")
        self.callback = callback
        self._staging = Staging(on_abort=self._drop, on_commit=self._call_back)
        self._unchecked: dict[str, None] = {}
        self._plans: dict[tuple[nn.Module | str, int, bool, bool], Plan] = {}
        self.metadata = BatchMetadata()
        self.gates = Gates(self._gate_paths, self._are_sites_known)
        self._starts: dict[nn.Module, deque[SequenceStart]] = {}  # of sliding-window caches
        self._latest_tokens: dict[str, Tokens | Tensor | None] = {}
        self._empty: dict[tuple[AttentionSite, tuple[str, ...], torch.device], SiteStatistics] = {}
        self._call_contexts: dict[int, transformers_models.CallContext] = {}
        self._undo: ExitStack | None = None
        self._thread = OneThread()
        is_plain = not len(self.collectors) and self._recorder is None
        self._managers = Managers(self._thread.forget, is_supported=is_plain)
        self.only_training = False  # count forwards of the model in training mode alone
        # Called with every call, its attention and its non-padding rows, also in recomputations; in evaluation unless
        # `only_training`.
        self.listener: Callable[[Call, AttentionOutput, Tensor | None], None] | None = None
        self.compiled: CompiledModules | None = None  # set before entering, to observe compiled code
        # Calls of modules in training: heads, cross, learned_sinks, whether keys are the tokens of the queries, packed.
        self._called: dict[nn.Module, set[tuple[int, bool, bool, bool, bool]]] = {}

    def _find_modules(self) -> None:
        modules = self.model.named_modules()
        self._names = {id(module): name or type(module).__name__ for name, module in modules}
        self._interface_modules = transformers_models.interface_modules(self.model)
        self._adapted = adapting.adapted_modules(self.model, self.adapters, self._interface_modules)
        self._layers = tuple(x for x in torch_modules.attention_layers(self.model) if x not in self._adapted)
        # Modules that may call attention functions by themselves.
        self._calling = calling_modules(self.model, self.attention_modules)
        if not len(self.attention_modules) and not len(self._calling):
            raise OptionError(transformers_models.why_unobservable(self.model))

    def _site_names(self) -> list[str]:
        """Return the names of all known sites; those of intercepted calls are known once they were called."""
        modules = [self._names[id(module)] for module in self.attention_modules]
        return list(dict.fromkeys((*modules, *self._interceptor.called)))

    def _are_sites_known(self) -> bool:
        return not len(self._calling) or len(self._interceptor.called) > 0

    def _gate_paths(self) -> list[str]:
        return self._site_names() if self._are_sites_known() else [*self._names.values()]

    def _check_layers(self) -> None:
        names = self._site_names()
        check_numbers(self.layers or (), names)
        check_paths(self.layers or (), names)

    def _check_called(self, *, is_running: bool) -> None:
        """Raise if no attention was called in a forward, or if there is a gate for a site that was not called."""
        if not len(self._calling):
            return
        names = self._site_names()
        if not len(names):
            raise OptionError(intercepted_calls.why_nothing_called(self.model))
        if is_running:
            sites = self._staging.current.sites
            for path, kind in self.gates:
                if (path, kind) not in sites and path not in {self._names[id(x)] for x in self.attention_modules}:
                    raise OptionError(
                        f"a gate needs an attention site of the model, got {(path, kind)!r}, which was not called; the "
                        f"sites are {', '.join(map(str, sites)) or 'none'}"
                    )

    @property
    def attention_modules(self) -> tuple[nn.Module, ...]:
        """Modules whose attention is observed."""
        return *self._interface_modules, *self._layers, *self._adapted

    @property
    def possible_modules(self) -> tuple[nn.Module, ...]:
        """Modules whose attention is observed, and those that may call attention functions by themselves."""
        return *self.attention_modules, *self._calling

    # ---- entering and leaving

    def __enter__(self) -> Self:
        if self._undo is not None:
            raise OptionError("this session is already entered; create another with polyhead.observe(model)")
        self._find_modules()  # the model may have changed since
        if self.compiled is not None and self.compiled.traced.keys() != {*self._interface_modules}:
            self.compiled = None
        with ExitStack() as undo:
            if self.compiled is None:
                undo.enter_context(nested_sessions.EAGER.held())
            undo.callback(self._forget)
            undo.enter_context(nested_sessions.entered(self, self.model))
            if self.compiled is not None:
                self._watch_compiled(self.compiled, undo)
                self._undo = undo.pop_all()
                return self
            if self._recorder is not None:
                undo.enter_context(self._recorder.watching(self.model))
            if len(self._interface_modules):
                modules, check = self._interface_modules, self._managers.check_call
                undo.enter_context(original_attention(self.model))
                switch = undo.enter_context(transformers_models.switched(self.model, modules))
                for module in modules:
                    undo.callback(transformers_models.record_context(module, self._call_contexts, check).remove)
                undo.enter_context(transformers_models.watching(self.model, self))
                undo.enter_context(self._managers.watching(self.model, modules, switch))
            undo.enter_context(torch_modules.without_shortcuts(self.model))
            for layer in self._layers:
                undo.enter_context(torch_modules.watched(layer, self))
            if len(self._calling):
                self._interceptor.names = self._names
                reported = (*self._layers, *self._adapted)
                undo.enter_context(self._interceptor.watching(self.model, self._calling, reported))
            for module, adapter in self._adapted.items():
                notifier = adapting.AttentionNotifier(module, adapter, self, self._unchecked)
                undo.enter_context(adapter.watch(module, notifier))
            undo.enter_context(check_modules_unchanged(self.model, self.attention_modules))
            enclosing = [*enclosing_modules(self.model, self.possible_modules), *wrapped_models(self.model)]
            undo.enter_context(self._staging.watching(enclosing))
            self._undo = undo.pop_all()
        return self

    def _watch_compiled(self, compiled: CompiledModules, undo: ExitStack) -> None:
        """Hook nothing that a compiler traces: the attention implementation alone selects the version of the code."""
        register()
        undo.enter_context(transformers_models.switched(self.model, self._interface_modules, OBSERVED))
        undo.enter_context(transformers_models.watching(self.model, self))  # for what is not compiled
        undo.enter_context(compiled.entered())
        undo.enter_context(check_modules_unchanged(self.model, self.attention_modules))
        staged = compiled.outside(enclosing_modules(self.model, self.attention_modules))
        undo.enter_context(self._staging.watching(staged))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._undo is not None:
            nested_sessions.check_innermost(self)
        undo, self._undo = self._undo, None
        if undo is not None:
            with self._managers.paused():
                undo.__exit__(kind, error, trace)
        if kind is None and self._interceptor.has_run:
            self._check_called(is_running=False)
            self._check_layers()
        if kind is None and self.heads is not None:
            names = [self._names[id(module)] for module in self.attention_modules]
            check_heads_exist(self.heads, self.observations.calls, [*names, *self._interceptor.called])

    def _forget(self) -> None:
        self._called.clear()
        self._latest_tokens.clear()
        self._starts.clear()
        self._call_contexts.clear()
        self._thread.forget()
        self._plans.clear()  # keyed by module, and modules may change before the session is entered again

    def _drop(self) -> None:
        """Discard the state of a call that raised, including the sites that it was the first to reach."""
        self._plans.clear()
        self._call_contexts.clear()

    def _call_back(self) -> None:
        if self.callback is not None:
            self.callback(self)

    # ---- called by the observed modules

    def begin(
        self, module: nn.Module, query: Tensor, key: Tensor, mask: Mask | None, *, learned_sinks: bool
    ) -> Call | None:
        """Prepare an attention call of a transformers model; None if it is not observed.

        Args:
            module: attention module of the model.
            query: queries of the call.
            key: keys of the call.
            mask: mask of the call.
            learned_sinks: whether the call has learned sinks.

        Returns:
            The call, or None.
        """
        context = self._call_contexts.pop(id(module), _NO_CONTEXT)
        cross = context.cross or transformers_models.infer_cross(module, query, key, mask)
        tokens = Tokens.of(mask, query, key)
        call = self.call(module, query.shape[1], tokens, cross=cross, learned_sinks=learned_sinks)
        if call is not None:
            is_marked = not cross and call.requested is not None and (call.counts or call.differentiable)
            with hidden_operators():
                masks = with_documents(mask, query.shape[2], key.shape[2]) if is_marked else (mask, None)
            call.mask, call.statistics_mask = masks
        is_same = query.shape[2] == key.shape[2]
        if self.compiled is not None:
            self._check_traced(module, is_same)
        elif self.model.training:
            used = mask if call is None else call.mask
            way = (query.shape[1], cross, learned_sinks, is_same, used is not None and len(used.packed) > 0)
            self._called.setdefault(module, set()).add(way)
        is_chunked = mask is not None and len(mask.packed) > 0  # a chunk is in the cache as a whole
        if context.first_key is not None and not cross and not is_chunked:
            is_cached, dropped, first_query = query.shape[2] < key.shape[2], context.first_key, context.first_query
            starts = self._starts.setdefault(module, deque(maxlen=CACHES))
            if mask is not None and has_only_dense_terms(mask):
                if not is_cached:
                    starts.append(sequence_start(mask, key))
                elif call is not None:
                    offset = first_query - dropped
                    located = locate_tokens_in_cache(mask, query, key, starts, offset=offset, dropped=dropped)
                    call.mask, call.tokens = located
                    latest = {root: located[1] for root, x in self._latest_tokens.items() if x is tokens}
                    self._latest_tokens.update(latest)
            elif is_cached and dropped and call is not None and call.requested is not None:
                locate_sinks(call, tokens, dropped, context.first_tokens)
        return call

    def call(
        self,
        module: nn.Module | str,
        num_heads: int,
        tokens: Tokens | Tensor | None,
        *,
        cross: bool,
        learned_sinks: bool = False,
    ) -> Call | None:
        """Prepare the observation of one call of a module; None if it is not observed.

        Args:
            module: attention module, or the name of a further attention call of one, e.g. `blocks.3.attn#2`.
            num_heads: heads of the module.
            tokens: non-padding tokens of the call; None for all.
            cross: whether it is cross-attention.
            learned_sinks: whether the call has learned sinks.

        Returns:
            The call, or None.
        """
        self._thread.check()
        plan = self._plans.get((module, num_heads, cross, learned_sinks))
        if plan is None:
            plan = self._plan(module, num_heads, cross=cross, learned_sinks=learned_sinks)
        site, columns = plan.site, plan.columns
        gate = self.gates.get((site.name, site.kind))
        if gate is None and self.gates.create is not None and plan.chosen:
            gate = self.gates.create(site, tokens)
        if cross:
            # The queries are the tokens of the preceding self-attention in the same stack.
            tokens = matching_tokens(self._latest_tokens.get(plan.root), tokens)
        else:
            self._latest_tokens[plan.root] = tokens
        gate_alone = None if gate is None else Call(self, site, (), None, None, counts=False, gate=gate)
        if not plan.chosen or not (len(columns) or len(self.collectors)):
            return gate_alone
        # A checkpointed layer is recomputed in the backward and must run the same operations as before. The
        # recomputation cannot be matched to its call, so with gradients enabled every call runs the same operations.
        is_recomputation = is_recomputed()
        tally = self._staging.current
        is_due = tally.begun[site] % self.every == 0
        counts = not is_recomputation and is_due and (self.model.training or not self.only_training)
        for counter in (tally.calls, tally.begun):
            counter[site] += not is_recomputation
        if not counts and not torch.is_grad_enabled() and self._recorder is None:
            return gate_alone
        call = Call(self, site, columns, plan.requested, tokens, counts, len(self.collectors) > 0, gate, learned_sinks)
        call.differentiable, call.recorder = self._recorder is not None, None if is_recomputation else self._recorder
        return call

    def withdraw(self, call: Call) -> None:
        """Undo `call` for a call that turns out not to be observed.

        Args:
            call: what `call` returned.
        """
        tally, site = self._staging.current, call.site
        tally.calls[site] -= 1
        if tally.calls[site] <= 0:
            del tally.calls[site]
            tally.sites.pop((site.name, site.kind), None)
            self._plans.clear()

    def heads_at(self, name: str, *, cross: bool) -> int | None:
        """Return the number of heads of a site; None before its first call.

        Args:
            name: name of the site.
            cross: whether it is cross-attention.
        """
        site = self._staging.current.sites.get((name, "cross" if cross else "self"))
        return None if site is None else site.num_heads

    def traced_modules(self, compiled: Iterable[nn.Module]) -> tuple[CompiledModules | None, str]:
        """Return the value of `compiled` for the next entry of this session, or None and why it has to be None.

        Args:
            compiled: modules that are compiled, of the model or around it.
        """
        if others := [*self._layers, *self._adapted]:
            return None, f"its {type(others[0]).__name__} does not use the attention interface of transformers"
        for name in self._interceptor.called:
            return None, f"{name} does not use the attention interface of transformers"
        traced: dict[nn.Module, TracedModule] = {}
        for module in self._interface_modules:
            ways, name = self._called.get(module, set()), self._names[id(module)]
            if len(ways) != 1:
                return None, f"{name} was called in {len(ways)} ways in the first observed step"
            (heads, cross, learned_sinks, is_same, packed), *_ = ways
            if packed:
                reason = "attends within packed documents or chunks, whose beginnings a dense mask does not show"
                return None, f"{name} {reason}"
            if cross or not is_same:
                return None, f"{name} attends to other tokens than those of its queries"
            if getattr(module, "is_causal", None) is None:
                return None, f"{name} does not set is_causal, by which compiled code masks later tokens"
            plan = self._plan(module, heads, cross=False, learned_sinks=learned_sinks)
            assert plan.requested is not None
            record = partial(self._record_compiled, module, learned_sinks)
            traced[module] = TracedModule(plan.requested, record, learned_sinks=learned_sinks)
        return CompiledModules(traced, compiled), ""

    def _check_traced(self, module: nn.Module, is_supported: bool) -> None:
        if not is_supported and self.model.training and not is_recomputed():
            raise OptionError(
                "compiled code is observed where queries and keys are the same tokens, got a cache in "
                f"{self._names[id(module)]!r}, which the first observed step had not; train without torch.compile"
            )

    def _record_compiled(
        self,
        module: nn.Module,
        learned_sinks: bool,
        result: AttentionOutput,
        non_padding: Tensor | None,
        is_supported: bool,
        half_autocast: bool,
    ) -> GradientHook | None:
        """Record an attention call of compiled code."""
        self._check_traced(module, is_supported)
        if not is_supported:
            return None
        with torch.enable_grad():  # of a compiled forward nothing is recorded; a recomputation has gradients as well
            call = self.call(module, result.output.shape[1], non_padding, cross=False, learned_sinks=learned_sinks)
        if call is None:
            return None
        call.is_compiled, call.half_autocast = True, half_autocast
        with torch.no_grad():
            call.record(result, non_padding)
        return call.gradient_hook

    def _plan(self, module: nn.Module | str, num_heads: int, *, cross: bool, learned_sinks: bool) -> Plan:
        path = module if isinstance(module, str) else self._names[id(module)]
        origins = None if isinstance(module, str) else origins_of(self.model, path, module, num_heads)
        site = self._site(path, num_heads, origins, cross=cross)
        root = site.stack.partition(".*")[0] if "*" in site.stack else site.stack.rpartition(".")[0]
        columns = self.wanted.columns(cross=cross, learned_sinks=learned_sinks)
        requested = self.wanted.of_rows(columns, cross=cross) if len(columns) else None
        plan = Plan(site, root, columns, requested, self._is_chosen(site))
        self._plans[module, num_heads, cross, learned_sinks] = plan
        return plan

    def add(self, call: Call, rows: RowStatistics, non_padding: Tensor | None) -> None:
        """Reduce the row statistics of a call on their device and add them to those of its site.

        Args:
            call: what `call` or `begin` returned.
            rows: statistics of each row.
            non_padding: rows to count; None for all.
        """
        statistics = self._staging.current.statistics
        site_statistics = statistics.get(call.site)
        if site_statistics is None:
            assert rows.visible_keys is not None
            site_statistics = self._empty_statistics(call.site, call.columns, rows.visible_keys.device)
        statistics[call.site] = site_statistics.update(rows, non_padding, learned_sinks=call.learned_sinks)
        self._staging.is_updated = True

    def _empty_statistics(self, site: AttentionSite, columns: tuple[str, ...], device: torch.device) -> SiteStatistics:
        key = site, columns, device
        if key not in self._empty:  # never written in place, so that every step of a monitor can start from it
            self._empty[key] = SiteStatistics.empty(site, self.heads_of(site), columns, device)
        return self._empty[key]

    def collect(self, site: AttentionSite, attended: Attended, non_padding: Tensor | None) -> None:
        """Pass one attention call to all collectors.

        Args:
            site: attention site of the call.
            attended: the attention call.
            non_padding: rows to count; None for all.
        """
        tally = self._staging.current
        states, device = tally.collected.get(site), attended.query.device
        if states is None or site in tally.resumed:
            created = {collector.name: empty_state(collector, site, device) for collector in self.collectors}
            empty = {name: value for name, value in created.items() if value is not None}
            states = (
                empty if states is None else {name: _to_device(states[name], empty[name], device) for name in states}
            )
            tally.resumed.discard(site)
        attended = CollectedCall.of(attended, states.values())
        tally.collected[site] = {
            name: updated_state(name, state, attended, non_padding, self.metadata) for name, state in states.items()
        }
        self._staging.is_updated = True

    def add_state(self, site: AttentionSite, name: str, state: Any) -> None:
        """Merge a mergeable value into that of a site; it is counted when the call of the model finishes.

        Args:
            site: attention site of the state.
            name: name of the value, beside those of collectors.
            state: what is added.
        """
        collected = self._staging.current.collected
        states = collected.get(site, {})
        collected[site] = {**states, name: states[name].merge(state) if name in states else state}

    def _site(self, name: str, num_heads: int, origins: HeadOrigins | None, *, cross: bool) -> AttentionSite:
        kind: Literal["self", "cross"] = "cross" if cross else "self"
        sites = self._staging.current.sites
        site = sites.get((name, kind))
        if site is None:
            stack = stack_of(name)
            layer = sum((known_site.stack, known_site.kind) == (stack, kind) for known_site in sites.values())
            site = sites[name, kind] = AttentionSite(name, kind, stack, layer, num_heads, origins)
        check_heads_unchanged(site, num_heads, origins)
        return site

    def _is_chosen(self, site: AttentionSite) -> bool:
        chosen = self.layers is None or site.layer in self.layers or site.name in self.layers
        return chosen and len(self.heads_of(site)) > 0

    def heads_of(self, site: AttentionSite) -> tuple[int, ...]:
        """Return the observed heads of a site.

        Args:
            site: an attention site of the model.
        """
        all_heads = range(site.num_heads)
        if self.heads is None:
            return tuple(all_heads)
        return tuple(head for head in all_heads if head in self.heads or HeadId(site.layer, head) in self.heads)

    # ---- results

    @property
    def observations(self) -> Observations:
        """Observations of all finished calls of the model, excluding a running call."""
        self._managers.synchronize()
        counted = self._staging.counted
        calls = {site: counted.calls[site] for site in counted.sites.values()}
        return Observations(self.wanted, tuple(counted.statistics.values()), dict(counted.collected), calls)

    def take(self) -> Observations:
        """Return the observations so far and start again without any; does not wait for the device."""
        taken = self.observations
        self._staging.take()
        if self.compiled is not None:
            self.compiled.hooks.clear()
        return taken

    def resume_from(self, observations: Observations) -> None:
        """Resume from the observations of an earlier session of the same model.

        Args:
            observations: what an earlier session counted, as `polyhead.observation.load` returns it.
        """
        if observations.wanted != self.wanted:
            raise OptionError(
                f"a session can only resume observations of the same statistics, got {observations.wanted} for "
                f"{self.wanted}"
            )
        sites = dict(self._staging.counted.sites)
        for site in observations.calls:
            if sites.setdefault((site.name, site.kind), site) != site:
                raise OptionError(
                    f"a session can only resume observations of the same model, got another site at {site.name!r}"
                )
        if len(self._staging.counted.sites):
            raise OptionError("a session can only resume before its first call, got one with observations of its own")
        names = {collector.name for collector in self.collectors}
        if missing := {name for values in observations.collected.values() for name in values} - names:
            raise OptionError(
                f"a session can only resume with the same collectors, got {', '.join(sorted(names)) or 'none'} "
                f"for states of {', '.join(sorted(missing))}"
            )
        self._plans.clear()
        collected = {site: dict(values) for site, values in observations.collected.items()}
        statistics = {x.site: x for x in observations.sites}
        calls = Counter(observations.calls)
        self._staging.counted = Tally(sites, calls, statistics, collected, set(collected), calls.copy())

    @property
    def statistics(self) -> ForwardStatistics:
        """Differentiable per-row statistics of the last forward, by site; needs `observe(keep_statistics=True)`."""
        if self._recorder is None:
            raise OptionError(NOT_REQUESTED)
        return self._recorder.read()

    @property
    def profile(self) -> HeadProfile:
        """Table with one row per head: site, layer, index, and mean, std and maximum of each statistic.

        Its values are detached; see `statistics` for differentiable ones.
        """
        notes = (
            adapting.unchecked_note(self._unchecked),
            intercepted_calls.materialised_note(self.materialised),
            intercepted_calls.skipped_note(self.skipped),
        )
        return replace(self.observations.profile, note="; ".join(note for note in notes if note))

    @property
    def skipped(self) -> list[SkippedCall]:
        """Attention calls that were not observed, and why; the model continued with its own results."""
        return list(self._interceptor.skipped)

    @property
    def materialised(self) -> list[str]:
        """Sites whose weights the model itself materialises, a softmax by hand: slow, and O(n²) in memory."""
        return list(self._interceptor.materialised)

    def __repr__(self) -> str:
        heads = sum(site.num_heads for site in self._staging.counted.sites.values() if self._is_chosen(site))
        note = f"; {intercepted_calls.MATERIALISED}" if len(self.materialised) else ""
        return f"Session({type(self.model).__name__}, {heads} heads observed{note})"


def _to_device(value: CollectorState, empty: CollectorState, device: torch.device) -> CollectorState:
    """Return the state of `value` on a device, in a copy of `empty`."""
    return empty.with_state({name: tensor.to(device) for name, tensor in value.state().items()})
