"""`HeadMonitor`: statistics of every head in every step of training, without waiting for the device."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import checked_integer
from polyhead.observation.accumulators import accumulator_dtype
from polyhead.observation.compiled import CompiledModules
from polyhead.observation.nested_sessions import is_shared
from polyhead.observation.session import observe
from polyhead.observation.statistics import NAMES, SiteStatistics, stack_order
from polyhead.training.head_history import COSINES, HeadHistory, HeadLocation, StepRecord
from polyhead.training.head_signals import COLUMNS, LOW_ENTROPY, HeadSignals, SignalSums, columns_of, for_each
from polyhead.training.rank_sums import RankSums, ReducedStep, has_ranks

STATISTICS = ("max_logit", "entropy", "normalized_entropy", "sink_mass", "mean_distance")
LARGEST = frozenset(("max_logit", "max_abs_logit"))  # reported as the largest value of a step; others as the mean
LATE = 2  # steps after which a record is read at the latest


class _Pending(NamedTuple):
    """A record on its way from the device."""

    step: int
    values: Tensor  # [columns, heads]; its last rows are the loss, and 1 if there is one
    measured: Tensor  # [columns, heads], boolean, without these rows
    pairs: Tensor | None  # [2, elements of the matrices of all sites]
    event: Any  # recorded after the copies; None on a CPU

    @property
    def is_done(self) -> bool:
        return self.event is None or bool(self.event.query())


class MonitorCallback:
    """Base class of readers of a monitor's records, such as alarms and loggers. Each method may be overridden.

    `should_stop` requests the end of the training loop, and is reset when the next one starts: when the monitor is
    entered, or `Trainer.train` or Lightning's `fit` begins. `should_save` requests a checkpoint, after which it is
    reset. The callbacks of `Trainer` and Lightning obey both; other loops read them, and reset `should_save`. An error
    in one callback is raised after the others have read the record.
    """

    should_stop: bool = False
    should_save: bool = False

    def on_record(self, record: StepRecord) -> None:
        """Read the record of an observed step, in order and at most two steps late.

        Args:
            record: values of every head.
        """

    def on_exit(self) -> None:
        """Called after the last record, at the end of the monitor's `with` block."""

    def state_dict(self) -> dict[str, Any]:
        """Return what has to be saved with a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Args:
            state: the dictionary.
        """


class HeadMonitor:
    """Record statistics of every head in every step of training.

    Inside the `with` block forwards of the model in training mode are observed; `step` ends a step, and `history` has
    a row for every observed step. Non-padding tokens of all micro-batches of the step count; evaluation and recomputed
    layers do not. Statistics are reduced on the device, and their copy to the host is read at most two steps later, so
    that nothing waits for the device. If a loop catches an error and repeats the step, it must call `discard` first, so
    that only the second attempt counts. In a process group they are those of the data of all ranks, by one all-reduce
    in each observed step; the loss is the mean over ranks, and gradients are those of this mean.

    A compiled model of transformers stays compiled, except in the first observed step: observed steps have a second
    version of its code, without more graph breaks. One that cannot be observed like this, for instance with
    cross-attention, runs in eager mode in observed steps, and a warning names the reason.

    Args:
        model: the model, as for `polyhead.observe`, or what `torch.compile` returned for it.
        every: observe every k-th step; between them the model runs its own code. Above 1, enter the monitor after all
            other sessions on the model, since it leaves the model and enters it again.
        statistics: names, as for `polyhead.observe`, and those of the monitor's own columns below. `max_logit` is the
            largest logit of a head in the step, others are means over its tokens.
        pairs_every: record the cosines between heads in every k-th observed step, starting with the first.
        callbacks: what reads each record; see `MonitorCallback`.
        grad_scaler: the `torch.amp.GradScaler` that scales the loss; its scale is taken out of `gradient_norm`.
        process_group: group of the ranks that have the same heads and other data; all processes by default, and
            required if heads are distributed over ranks (`polyhead.parallel.HeadParallel`).

    Columns that `polyhead.observe` does not have:

    - `normalized_entropy_p10`: the lowest decile over tokens of the normalized entropy; from a histogram of 256 bins,
      so within 1/512 of the exact one.
    - `output_norm`: root mean square over tokens of the norm of what the head writes, its output times W_O, gates
      included. `output_norm_share`: its share in the sum over the heads of the layer of these squared norms.
    - `gradient_norm`: norm of the gradient of the step's loss with respect to the head's attention output, before gates
      and W_O, over all its tokens. (The gradient with respect to what a head writes is the same for all heads of a
      layer.)
    - `output_cosine`, in every `pairs_every`-th observed step: the cosine of largest magnitude, over all tokens,
      between what this head writes and what any other head of its layer writes.
    - `gradient_cosine`: the same for the gradients of `gradient_norm`, each multiplied by the W_O of its head, which
      are the directions in which gradient descent would change what the heads write. `history.cosines` has the cosines
      of all pairs.

    They are NaN where they were not measured: outputs and cosines where the layer that multiplies by W_O is not found
    or its weight is quantised, sharded or has other adapters than LoRA; gradients where no backward reached the head,
    or more than one passed through the same forward. `torch.nn.MultiheadAttention` has outputs without its dropout,
    none of these columns under gates, and no gradients in subclasses with a forward of their own. W_O is found in the
    first observed step, which waits for the device.

    Raises:
        OptionError: a model without attention that can be observed, unknown statistics, `every` or `pairs_every` below
            1.

    >>> import torch, polyhead
    >>> from polyhead.training import HeadMonitor
    >>> layer = polyhead.MultiHeadAttention(16, 2, causal=True).train()
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    >>> with HeadMonitor(layer, every=2) as monitor:
    ...     for _ in range(5):
    ...         loss = layer(torch.randn(3, 5, 16)).output.square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         monitor.step(loss)
    >>> monitor.history.steps, monitor.history["max_logit"].shape
    ((0, 2, 4), torch.Size([3, 2]))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        statistics: str | Sequence[str] = (*STATISTICS, *COLUMNS),
        pairs_every: int = 100,
        callbacks: Sequence[MonitorCallback] = (),
        grad_scaler: torch.amp.GradScaler | None = None,
        process_group: Any = None,
    ) -> None:
        for name, value in (("every", every), ("pairs_every", pairs_every)):
            checked_integer(name, value, at_least=1, error=OptionError)
        if not isinstance(callbacks, list | tuple) or not all(isinstance(x, MonitorCallback) for x in callbacks):
            raise OptionError(f"callbacks must be a list of instances of MonitorCallback, got {callbacks!r}")
        if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
            raise OptionError(f"grad_scaler must be a torch.amp.GradScaler, got {type(grad_scaler).__name__}")
        model = getattr(model, "_orig_mod", model)  # of what torch.compile returns
        self.model, self.every, self.pairs_every, self.callbacks = model, every, pairs_every, tuple(callbacks)
        self.steps = self._first_step = 0  # that have ended
        self._first_observed = 0  # index of the first observed step, in units of `every`; `pairs_every` counts from it
        self.cleanup = ExitStack()  # closed at the end of the block
        self.statistics = _checked_names(statistics)
        own = tuple(name for name in COLUMNS if name in self.statistics)
        rows = [name for name in self.statistics if name in NAMES]
        needed = ["normalized_entropy"] if LOW_ENTROPY in own else ["max_logit"] if not rows else []
        self._session = observe(model, statistics=[*rows, *needed])
        self._session.only_training = True
        self.grad_scaler, self._own_columns = grad_scaler, own
        self._signals = HeadSignals(self._session, own, self.inverse_scale)
        self._history = HeadHistory()
        self._pending: deque[_Pending] = deque()
        self._is_entered = self._is_observing = False
        self._compiled: CompiledModules | None = None  # of a compiled model, after the first observed step
        self.process_group = process_group
        self._ranks: RankSums | None = None  # after the first observed step, in a process group

    def __enter__(self) -> Self:
        if self._is_entered:
            raise OptionError("this monitor is already entered; create another for another model")
        has_split_heads = any(getattr(module, "is_head_parallel", False) for module in self.model.modules())
        if has_split_heads and self.process_group is None and has_ranks():
            raise OptionError(
                "ranks that share the heads of a layer read the same data, which counts once: pass the ranks with "
                "other data as process_group, such as mesh['dp'].get_group(), got none; without any, the group of this "
                "rank alone, torch.distributed.new_subgroups(1)[0]"
            )
        self._is_entered, self._first_step = True, self.steps
        self._compiled = None
        self.reset_stop()
        self._signals.search()
        self._switch()
        return self

    def __exit__(self, *exception: Any) -> None:
        ends = [callback.on_exit for callback in self.callbacks]
        _call_all([partial(self._leave, *exception), self.cleanup.close, partial(self._read, wait=True), *ends])

    def _leave(self, *exception: Any) -> None:
        if self._is_observing:
            self._signals.detach()
            self._session.__exit__(*exception)
        self._is_entered = self._is_observing = False
        left_over = self._session.take()  # forwards after the last step do not count
        self._signals.end_step()
        if exception[0] is None and self.steps == self._first_step and left_over.sites:
            warnings.warn("no step of the monitor has ended; call monitor.step(loss) in the loop", stacklevel=4)

    def step(self, loss: Tensor | float | None = None) -> None:
        """End a step: call it once after each step of the optimizer.

        Args:
            loss: loss of the step, which is recorded beside the statistics; detached, and not waited for.

        Raises:
            OptionError: outside of the `with` block, a loss that is not one number, no forward in training mode was
                observed in the step, or `gradient_norm` after one in float16 autocast without a `grad_scaler`.
        """
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise OptionError(f"the loss of a step must be one number, got a tensor of shape {list(loss.shape)}")
        if not self._is_entered:
            raise OptionError("a step must end inside the `with` block of the monitor")
        if self._is_observing:
            self._send(loss)
        self.steps += 1
        self._switch()
        self._read(wait=False)

    def trainer_callback(self) -> Any:
        """Return a `transformers.TrainerCallback` that ends a step after each optimizer step of a `Trainer`.

        The training runs inside the block: `trainer.add_callback(monitor.trainer_callback())`, then
        `with monitor: trainer.train()`. Checkpoints contain the state of the monitor, and
        `trainer.train(resume_from_checkpoint=...)` continues from it. The recorded loss is the one that the model
        returns.
        """
        from polyhead.training.trainer_callbacks import trainer_callback

        return trainer_callback(self)

    def lightning_callback(self) -> Any:
        """Return a `lightning.pytorch.Callback` that ends a step after each optimizer step of a Lightning `Trainer`.

        The training runs inside the block: `Trainer(callbacks=[monitor.lightning_callback()])`, then
        `with monitor: trainer.fit(module)`. Checkpoints contain the state of the monitor, and a resumed `fit` continues
        from it.
        """
        from polyhead.training.trainer_callbacks import lightning_callback

        return lightning_callback(self)

    @property
    def is_observing(self) -> bool:
        """Whether the current step is observed."""
        return self._is_observing

    @property
    def history(self) -> HeadHistory:
        """Values of all steps so far, one row per observed step; waits for the device."""
        self._read(wait=True)
        return self._history

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the history and the callbacks' states, to be saved with a checkpoint."""
        history = self.history.state_dict()
        counts = {"steps": self.steps, "first_observed": self._first_observed}
        return {**counts, **history, "callbacks": [callback.state_dict() for callback in self.callbacks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another monitor; refused after the first step.

        Args:
            state: what `state_dict` returned.
        """
        if self.steps:
            raise OptionError("a monitor continues from a state before its first step, got one that has steps already")
        states = state["callbacks"]
        if len(states) != len(self.callbacks):
            raise OptionError(
                f"a monitor continues with the same callbacks, got {len(self.callbacks)} for {len(states)} states"
            )
        history = HeadHistory.from_state_dict(state)
        names = {name or type(module).__name__ for name, module in self.model.named_modules()}
        if absent := [head.site for head in history.heads if head.site not in names]:
            raise OptionError(f"a monitor continues with the same model, got a state with heads of {absent[0]!r}")
        self._history = history
        for callback, saved in zip(self.callbacks, states, strict=True):
            callback.load_state_dict(saved)
        self._start(int(state["steps"]), int(state.get("first_observed", 0)))

    def start_at(self, step: int) -> None:
        """Number the steps from another one than 0, for a loop that was resumed without a state of the monitor.

        Args:
            step: number of the next step.
        """
        self._start(step, -(-step // self.every))

    def _start(self, step: int, first_observed: int) -> None:
        self.steps = self._first_step = step
        self._first_observed = first_observed
        if self._is_entered:
            self.discard()
            self._switch()

    def reset_stop(self) -> None:
        """Reset `should_stop` of all callbacks, which an earlier loop may have set."""
        self._read(wait=True)
        for callback in self.callbacks:
            callback.should_stop = False

    def discard(self) -> None:
        """Discard the observations of the current step, e.g. of a failed attempt or an unfinished earlier loop."""
        self._session.take()
        self._signals.discard()

    @property
    def _is_scaled(self) -> bool:
        return self.grad_scaler is not None and self.grad_scaler.is_enabled()

    def inverse_scale(self, device: torch.device) -> Tensor | float:
        """Return what takes the scale of the loss out of gradients in a backward, without waiting for the device.

        It is a tensor, or 1.0 if they are not scaled.

        Args:
            device: device of the gradients.
        """
        scale = self.grad_scaler._get_scale_async() if self._is_scaled else None  # type: ignore[union-attr]
        return 1.0 if scale is None else scale.to(device, non_blocking=True).reciprocal()

    def _switch(self) -> None:
        """Observe the next step if it is a k-th, and leave the model alone otherwise."""
        wanted = self.steps % self.every == 0
        # Beside other sessions, which force eager mode, the way of observing does not change.
        stays = self._session.compiled if self._is_observing else None
        compiled = stays if is_shared(self._session) else self._compiled
        has_cosines = any(name in self.statistics for name in COSINES)
        observed = self.steps // self.every - self._first_observed
        self._signals.with_pairs = has_cosines and observed % self.pairs_every == 0
        if self._is_observing and not (wanted and compiled is self._session.compiled):
            self._signals.detach()
            self._session.__exit__(None, None, None)
            self._is_observing = False
        if wanted and not self._is_observing:
            self._session.compiled = compiled
            self._session.__enter__()
            if compiled is not self._session.compiled:  # modules were replaced since the last observed step
                self._signals.search()
            self._signals.attach()
        self._is_observing = wanted

    @torch.no_grad()
    def _send(self, loss: Tensor | float | None) -> None:
        """Start the copy of a step's values to the host."""
        if self._signals.has_half_autocast and self.grad_scaler is None and "gradient_norm" in self.statistics:
            raise OptionError(
                "a loss that a GradScaler scales needs it in the monitor, which takes its scale out of gradient_norm, "
                "got a forward in float16 autocast: HeadMonitor(model, grad_scaler=scaler); without a scaler, "
                "torch.amp.GradScaler(enabled=False), or statistics without gradient_norm"
            )
        observations = self._session.take()
        observed = observations.sites
        is_shared = has_ranks(self.process_group)
        if not observed and not is_shared:
            raise OptionError(
                f"a step must have a forward of the model in training mode, got none in step {self.steps}; call "
                f"model.train(), and call this {type(self.model).__name__} itself"
            )
        order = stack_order(x.site for x in observed)
        sites = sorted(observed, key=lambda x: order[x.site])
        sums, is_measured = self._signals.sums_of([x.site for x in sites], observations.collected), None
        has_loss: Tensor | bool = loss is not None
        if is_shared:
            sites, sums, loss, has_loss, is_measured = self._over_ranks(sites, sums, loss)
        device = sites[0].moments.mean.device
        values_of, cosines = columns_of(sums)
        values_of |= _row_columns(sites, self._session.wanted.names)
        defined = [name for name, x in values_of.items() if any(values is not None for values in x)]
        columns = [name for name in self._session.wanted.names if name in self.statistics and name in defined]
        columns += self._own_columns
        self._history.check([HeadLocation.of(x.site, head) for x in sites for head in x.heads], columns)
        sizes = [len(x.heads) for x in sites]
        rows = [_joined(values_of[name], sizes, device) for name in columns]
        measured = torch.tensor(
            [
                [x is not None for x, size in zip(values_of[name], sizes, strict=True) for _ in range(size)]
                for name in columns
            ]
        )
        pairs = None
        if self._signals.with_pairs:
            pairs = torch.stack([_joined(cosines[name], [size**2 for size in sizes], device) for name in COSINES])
        if is_measured is not None:  # on the device
            known = torch.stack([_repeated(is_measured[name], sizes) for name in columns])
            rows = [torch.where(x, row, torch.nan) for x, row in zip(known, rows, strict=True)]
            measured = measured.to(device, non_blocking=True) & known
        last = torch.full_like(rows[0], torch.nan)
        if loss is not None:
            last = last.copy_(loss.detach().reshape(())) if isinstance(loss, Tensor) else last.fill_(loss)
        flag = torch.zeros_like(last)
        flag = flag.copy_(has_loss) if isinstance(has_loss, Tensor) else flag.fill_(has_loss)
        values, event = torch.stack([*rows, last, flag]), None
        if values.is_cuda:
            values, pairs = _to_host(values), None if pairs is None else _to_host(pairs)
            measured = _to_host(measured) if measured.is_cuda else measured
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        self._pending.append(_Pending(self.steps, values, measured, pairs, event))
        if self._signals.is_searching:
            self._compiled, reason = self._signals.compiled()
            if reason:
                warnings.warn(
                    f"{type(self.model).__name__} is compiled, but runs in eager mode in observed steps: {reason}",
                    stacklevel=3,
                )
        self._signals.end_step()

    def _over_ranks(
        self, sites: Sequence[SiteStatistics], sums: SignalSums, loss: Tensor | float | None
    ) -> ReducedStep:
        """Add up the step over all ranks; the first one waits for the device."""
        if self._signals.is_searching or self._ranks is None:
            options = {name: getattr(self, name) for name in ("steps", "every", "pairs_every")}
            options["index of the first observed step"] = self._first_observed
            options["statistics"] = ", ".join(sorted(self.statistics))
            self._ranks = RankSums(sites, options, next(self.model.parameters()), self.process_group)
        return self._ranks.reduce(sites, sums, self._signals.shapes_of(self._ranks.heads), loss)

    def _read(self, *, wait: bool) -> None:
        """Add records that have arrived to the history, and those that are late, and pass them to the callbacks."""
        arrived = []
        while self._pending:
            record = self._pending[0]
            is_late = self.steps - record.step > LATE
            if not (record.is_done or wait or is_late):
                break
            if record.event is not None:
                record.event.synchronize()
            self._pending.popleft()
            measured = record.measured
            if self._is_scaled:  # gradients that overflow are what a GradScaler looks for: it skips the step
                for row, name in enumerate(self._history.columns):
                    measured[row] &= record.values[row].isfinite() | (name not in ("gradient_norm", "gradient_cosine"))
            loss, has_loss = record.values[-2:, 0].tolist()
            of_step = loss if has_loss else None
            arrived.append(self._history.append(record.step, record.values[:-2], of_step, measured, record.pairs))
        _call_all([partial(callback.on_record, read) for read in arrived for callback in self.callbacks])


def _call_all(functions: Sequence[Callable[[], object]]) -> None:
    """Call all functions, also after one has raised; then raise the first error, with the others in its notes."""
    errors = []
    for function in functions:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - it is raised below
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"also raised: {type(other).__name__}: {other}")
        raise errors[0]


def _checked_names(statistics: str | Sequence[str]) -> frozenset[str]:
    chosen = [statistics] if isinstance(statistics, str) else statistics
    known = (*NAMES, *COLUMNS)
    if not isinstance(chosen, list | tuple | set) or not chosen or any(name not in known for name in chosen):
        raise OptionError(f"statistics must be among {', '.join(known)}; got {statistics!r}")
    return frozenset(chosen)


def _joined(parts: Sequence[Tensor | None], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Concatenate the elements of tensors, with NaN for those that are None."""
    dtype = accumulator_dtype(device)
    if all(x is None for x in parts):
        return torch.full((sum(sizes),), torch.nan, dtype=dtype, device=device)
    flat = [
        torch.full((size,), torch.nan, dtype=dtype, device=device) if x is None else x.flatten().to(device)
        for x, size in zip(parts, sizes, strict=True)
    ]
    return torch.cat(flat)


def _repeated(by_site: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the value of each site as often as it has heads, without waiting for the device."""
    return torch.cat([value.expand(size) for value, size in zip(by_site, sizes, strict=True)])


def _to_host(values: Tensor) -> Tensor:
    """Start a copy to the host, and return it."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _row_columns(sites: Sequence[SiteStatistics], names: Sequence[str]) -> dict[str, list[Tensor | None]]:
    """Return row statistics of sites, [heads] each: NaN where no token counted, None where they are not defined."""
    counts = [x.moments.count for x in sites]
    parts = ([x.moments.mean for x in sites], [x.largest.largest for x in sites])
    means, largest = (for_each(lambda n, x: torch.where(n > 0, x, torch.nan), counts, part) for part in parts)
    columns: dict[str, list[Tensor | None]] = {name: [None] * len(sites) for name in names}
    for index, site in enumerate(sites):
        for position, name in enumerate(site.columns):
            values = (largest if name in LARGEST else means)[index]
            columns[name][index] = None if values is None else values[position]
    return columns
