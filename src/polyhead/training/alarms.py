"""`HeadAlarms`: name heads that go wrong while a model trains, with the evidence and a remedy."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.training.head_history import HeadLocation, StepRecord
from polyhead.training.monitor import MonitorCallback

Kind = Literal[
    "non-finite",
    "logit growth",
    "loss spike ahead",
    "entropy collapse",
    "sink onset",
    "dead head",
    "duplicate heads",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
REMEDIES: Mapping[Kind, str] = {
    "non-finite": "continue from the last checkpoint; skip the batch, lower the learning rate, or use bfloat16",
    "logit growth": "bound the logits with QKClip or QK-norm, or lower the learning rate",
    "loss spike ahead": "lower the learning rate, or bound the logits with QKClip",
    "entropy collapse": "add entropy_band to the loss, bound the logits with QKClip, or lower the learning rate",
    "sink onset": "inspect the head; add entropy_band to the loss if it should attend to other tokens",
    "dead head": "remove it with polyhead.prune, or initialise it again",
    "duplicate heads": "merge them with polyhead.merge, or add weight_overlap to the loss",
}
Action = Literal["warn", "stop", "save"] | Callable[["Alarm"], object]

# Chosen on tuning seeds of `python -m benchmarks alarms`; benchmarks/RESULTS.md has the results on others.
HIGH_LEVEL, HIGH_GROWTH = 0.3, 1.1  # of the limit; from here on growth by this ratio is an alarm by itself,
LOW_LEVEL, LOW_GROWTH = 0.12, 1.2  # and from here on with a loss that does not improve
HORIZON = 4  # windows, within which the limit is predicted to be crossed
COLLAPSED, SPREAD = 0.05, 0.15  # normalized entropy after a collapse, and before it
SINK, NO_SINK = 0.9, 0.3  # mass on the first token after the onset of a sink, and before it
DEAD = 1e-4  # of an equal share of the layer's output
DUPLICATE = 0.99  # magnitude of the cosine between two outputs
MAX_ALARMS = 10_000  # that are kept

_COLUMNS = (
    "max_logit",
    "normalized_entropy",
    "sink_mass",
    "output_norm_share",
    "entropy",
    "output_norm",
    "output_cosine",
)
_WINDOWED = 4  # the first columns are kept over the window
# NaN in the other columns may mean that they were not measured in this step.
_IS_MEASURED = torch.tensor([not name.startswith("output") for name in _COLUMNS])[:, None]
# A head that is not finite makes shares and cosines of the other heads of its layer so, too.
_IS_OWN = torch.tensor([name not in ("output_norm_share", "output_cosine") for name in _COLUMNS])[:, None]


class Alarm(NamedTuple):
    """An alarm of `HeadAlarms`.

    `evidence` has the numbers that raised it by name. `head` is None where the loss alone is not finite.
    """

    kind: Kind
    step: int
    head: HeadLocation | None
    evidence: dict[str, float]
    message: str

    @property
    def remedy(self) -> str:
        """The remedy to try first."""
        return REMEDIES[self.kind]

    def __str__(self) -> str:
        return f"step {self.step}, {self.kind}: {self.message}; {self.remedy}"


class _Reason(NamedTuple):
    """Heads with a reason for an alarm, [heads], and the evidence and message of one of them."""

    heads: Tensor
    describe: Callable[[int], tuple[dict[str, float], str]]


class HeadAlarms(MonitorCallback):
    """Raise an alarm when a head goes wrong: `HeadMonitor(model, callbacks=[HeadAlarms()])`.

    Medians over the three thirds of the last `window` records are compared, so that single outliers raise nothing:

    - non-finite: NaN or Inf in a statistic of a head that was finite before, or in a loss.
    - logit growth: the largest logit is above 0.3 of `logit_limit`, grows, and is predicted to cross it within four
      windows. Growth is extrapolated exponentially where it accelerates, linearly otherwise.
    - loss spike ahead: the largest logit is above 0.12 of the limit and grew by a fifth, while the loss, which
      otherwise falls while heads learn, did not improve.
    - entropy collapse, sink onset: the normalized entropy fell from above 0.15 to below 0.05, or the mass on the first
      token rose from below 0.3 to above 0.9, while the loss did not improve, or together with logit growth.
    - dead head: less than 1e-4 of an equal share of the output of its layer, over a whole window.
    - duplicate heads: a cosine of 0.99 between the outputs of two heads, in two measurements.

    What is not recorded raises nothing: without a loss there is no "loss spike ahead", and steps without one are left
    out of its medians. A head, or the loss, raises an alarm of a kind once, and again only after the reason was absent
    for a whole window.

    Args:
        action: "warn", "stop" (sets `should_stop`), "save" (sets `should_save`), a function that is called with each
            alarm, or several of these. A loop that starts again after a stop continues until the next alarm.
        kinds: the alarms to raise.
        logit_limit: limit of the largest logit.
        window: number of records that are compared, a multiple of 3.

    Attributes:
        alarms: the alarms so far, the oldest first; of a very long run the last 10,000.

    Raises:
        OptionError: an unknown action or kind, a limit that is not positive, a window that is not a multiple of 3.

    >>> import torch, polyhead
    >>> from polyhead.training import HeadAlarms, HeadMonitor
    >>> layer = polyhead.MultiHeadAttention(16, 2, causal=True).train()
    >>> alarms = HeadAlarms(action="stop")
    >>> with HeadMonitor(layer, callbacks=[alarms]) as monitor:
    ...     for _ in range(4):
    ...         loss = layer(torch.randn(3, 5, 16)).output.square().mean()
    ...         monitor.step(loss)
    >>> list(alarms.alarms), alarms.should_stop
    ([], False)
    """

    def __init__(
        self,
        action: Action | Sequence[Action] = "warn",
        *,
        kinds: Sequence[Kind] = KINDS,
        logit_limit: float = 100.0,
        window: int = 60,
    ) -> None:
        self.actions = (action,) if isinstance(action, str) or callable(action) else tuple(action)
        for each in self.actions:
            if not callable(each) and each not in ("warn", "stop", "save"):
                raise OptionError(f"an action must be 'warn', 'stop', 'save' or a function of an alarm, got {each!r}")
        unknown = [kind for kind in kinds if kind not in KINDS] if not isinstance(kinds, str) else [kinds]
        if unknown:
            raise OptionError(f"kinds must be a sequence of {', '.join(map(repr, KINDS))}; got {unknown[0]!r}")
        if not (math.isfinite(logit_limit) and logit_limit > 0):
            raise OptionError(f"logit_limit must be a positive number, got {logit_limit!r}")
        if isinstance(window, bool) or not isinstance(window, int) or window < 3 or window % 3:
            raise OptionError(f"window must be a multiple of 3, got {window!r}")
        self.kinds, self.logit_limit, self.window = tuple(kinds), logit_limit, window
        self.alarms: deque[Alarm] = deque(maxlen=MAX_ALARMS)
        self._start(())

    def _start(self, heads: tuple[HeadLocation, ...]) -> None:
        """Forget the records so far, for records of these heads."""
        count, window = len(heads), self.window
        self._heads, self._count = heads, 0
        self._columns: tuple[str, ...] | None = None
        self._index = torch.empty(0, dtype=torch.int64)  # of `_COLUMNS` in a record, -1 if not recorded
        third = window // 3
        self._values = torch.full((third, _WINDOWED, count), torch.nan)  # of the last third of the window
        self._medians = torch.full((2 * third, _WINDOWED, count), torch.nan)  # of the thirds that ended at each record
        # A record is written twice, `window` apart, so that the last ones are always contiguous.
        # Step and loss; Inf for a loss that is not finite, and NaN for a step without one.
        self._curve = torch.full((2 * window, 2), torch.nan, dtype=torch.float64)
        self._was_finite = torch.zeros(len(_COLUMNS), count, dtype=torch.bool)
        self._finite_losses = window  # since the last one that was not finite
        self._parallel = torch.zeros(count, dtype=torch.int64)  # successive measurements with a cosine near 1
        self._cosine = torch.full((count,), torch.nan)
        self._quiet = torch.full((len(KINDS), count), window)  # records since the reason of an alarm was last present
        sites = [head[:2] for head in heads]
        self._site_sizes = torch.tensor([float(sites.count(site)) for site in sites])

    def on_record(self, record: StepRecord) -> None:
        """Compare a record with those before it.

        Args:
            record: values of every head.
        """
        if record.heads != self._heads:
            self._start(record.heads)
        if record.columns != self._columns:
            self._columns = record.columns
            self._index = torch.tensor([record.columns.index(x) if x in record.columns else -1 for x in _COLUMNS])
        missing = torch.full((1, len(record.heads)), torch.nan)
        values = torch.cat([record.values.float(), missing])[self._index]  # in the order of _COLUMNS
        is_measured = _IS_MEASURED
        if record.measured is not None:
            is_measured = torch.cat([record.measured, ~missing.isnan()])[self._index]
        reasons = {
            "non-finite": self._nonfinite(values, is_measured),
            "duplicate heads": self._duplicates(values[_COLUMNS.index("output_cosine")]),
        }
        slot, third = self._count % self.window, self.window // 3
        loss = record.loss if math.isfinite(record.loss) else math.inf if record.has_loss else math.nan
        for index in (slot, slot + self.window):
            self._curve[index] = torch.tensor((record.step, loss), dtype=torch.float64)
        self._values[slot % third] = values[:_WINDOWED]
        self._count += 1
        # The medians of the earlier thirds are those of the last third, one and two thirds of a window ago.
        latest, oldest = self._values.nanmedian(0).values, self._count % (2 * third)
        medians = torch.stack([self._medians[oldest], self._medians[oldest - third], latest])
        self._medians[oldest] = latest
        if self._count >= self.window:
            reasons |= self._changes(record.step, slot + 1, medians)
        self._act(self._raise(record, reasons))

    def _raise(self, record: StepRecord, reasons: Mapping[str, _Reason]) -> list[Alarm]:
        """Return the alarms of heads for which a reason is new."""
        none = torch.zeros(len(record.heads), dtype=torch.bool)
        is_present = torch.stack([reasons[x].heads if x in reasons and x in self.kinds else none for x in KINDS])
        new = is_present & (self._quiet >= self.window)
        self._quiet = torch.where(is_present, 0, self._quiet + 1)
        raised = []
        for index, i in new.nonzero().tolist():
            kind, head = KINDS[index], record.heads[i]
            evidence, message = reasons[kind].describe(i)
            raised.append(Alarm(kind, record.step, head, evidence, f"{head}: {message}"))
        if record.has_loss and not math.isfinite(record.loss):
            is_new = self._finite_losses >= self.window
            if is_new and "non-finite" in self.kinds and not is_present[0].any():
                message = "the loss is not finite, while the statistics of all heads are"
                raised.append(Alarm("non-finite", record.step, None, {"loss": record.loss}, message))
            self._finite_losses = 0
        else:
            self._finite_losses += record.has_loss
        return raised

    def _act(self, raised: Sequence[Alarm]) -> None:
        self.alarms.extend(raised)
        for action in self.actions if raised else ():
            if action == "stop":
                self.should_stop = True
            elif action == "save":
                self.should_save = True
            elif callable(action):
                for alarm in raised:
                    action(alarm)
            else:  # one warning of each kind, since all heads of a layer often go wrong together
                for kind in dict.fromkeys(alarm.kind for alarm in raised):
                    first, *others = (alarm for alarm in raised if alarm.kind == kind)
                    more = f" (and {len(others)} other head{'s' * (len(others) > 1)})" if others else ""
                    warnings.warn(f"{first}{more}", RuntimeWarning, stacklevel=2)

    # ---- reasons

    def _nonfinite(self, values: Tensor, is_measured: Tensor) -> _Reason:
        if not self._count:
            # A head without a single finite number went wrong before the first record.
            self._was_finite |= (self._index >= 0)[:, None] & ~values.isfinite().any(0)
        wrong = self._was_finite & _IS_OWN & ((values.isnan() & is_measured) | (values == torch.inf))
        self._was_finite |= values.isfinite()

        def describe(i: int) -> tuple[dict[str, float], str]:
            row = int(wrong[:, i].int().argmax())
            return {_COLUMNS[row]: float(values[row, i])}, f"{_COLUMNS[row]} is not finite"

        return _Reason(wrong.any(0), describe)

    def _duplicates(self, cosine: Tensor) -> _Reason:
        is_measured = cosine.isfinite()
        self._cosine = torch.where(is_measured, cosine, self._cosine)
        self._parallel = torch.where(is_measured, (self._parallel + 1) * (cosine.abs() >= DUPLICATE), self._parallel)

        def describe(i: int) -> tuple[dict[str, float], str]:
            value = float(self._cosine[i])
            words = f"its outputs have a cosine of {value:.3f} to those of another head of the layer"
            return {"output_cosine": value}, words

        return _Reason(self._parallel >= 2, describe)

    def _changes(self, step: int, start: int, medians: Tensor) -> dict[str, _Reason]:
        """Return reasons in the medians [3, columns, heads] of the thirds of the window, which begins at `start`."""
        logit, entropy, sink, share = medians.unbind(1)
        steps, losses = self._curve[start : start + self.window].unflatten(0, (3, -1)).unbind(-1)
        loss, at = losses.nanmedian(1).values.tolist(), steps.mean(1).tolist()
        did_not_improve = loss[2] >= loss[0]  # False without a loss
        span = round(at[2] - at[0])

        ratio, level = logit[2] / logit[0].clamp(min=1.0), logit[2] / self.logit_limit
        crossing = _crossing(logit, at[2], span, self.logit_limit)
        is_near = crossing - step <= HORIZON * float(steps[2, -1] - steps[0, 0])
        is_rising = (logit[1] > logit[0]) & (logit[2] > logit[1])
        is_high = is_rising & (level >= HIGH_LEVEL) & (ratio >= HIGH_GROWTH)
        is_low = is_rising & (level >= LOW_LEVEL) & (ratio >= LOW_GROWTH)
        is_bad = is_high | did_not_improve

        def growth(i: int) -> tuple[dict[str, float], str]:
            before, now, when = float(logit[0, i]), float(logit[2, i]), float(crossing[i])
            evidence = {"max_logit_before": before, "max_logit": now, "predicted_step": when}
            limit = f"{self.logit_limit:g}"
            where = f"above {limit}" if now >= self.logit_limit else f"predicted to cross {limit} at step {when:.0f}"
            return evidence, f"the largest logit grew from {before:.3g} to {now:.3g} in {span} steps and is {where}"

        of_loss = {"loss_before": loss[0], "loss": loss[2]}
        no_better_loss = f"while the loss did not improve ({loss[0]:.4g} to {loss[2]:.4g})"

        def ahead(i: int) -> tuple[dict[str, float], str]:
            evidence, message = growth(i)
            return evidence | of_loss, f"{message}, {no_better_loss}"

        def changed(name: str, values: Tensor, verb: str) -> Callable[[int], tuple[dict[str, float], str]]:
            def describe(i: int) -> tuple[dict[str, float], str]:
                before, now = float(values[0, i]), float(values[2, i])
                evidence = {f"{name}_before": before, name: now}
                words = f"{name} {verb} from {before:.2f} to {now:.2f} in {span} steps"
                if did_not_improve:
                    return evidence | of_loss, f"{words}, {no_better_loss}"
                logits = {"max_logit_before": float(logit[0, i]), "max_logit": float(logit[2, i])}
                grew = "while the largest logit grew from {max_logit_before:.3g} to {max_logit:.3g}".format(**logits)
                return evidence | logits, f"{words}, {grew}"

            return describe

        def dead(i: int) -> tuple[dict[str, float], str]:
            value = float(share[2, i])
            return {"output_norm_share": value}, f"it has {value:.1g} of the output of its layer"

        collapsed = (entropy[0] >= SPREAD) & (entropy[2] <= COLLAPSED) & is_bad
        onset = (sink[0] <= NO_SINK) & (sink[2] >= SINK) & is_bad
        return {
            "logit growth": _Reason(is_high & is_near, growth),
            "loss spike ahead": _Reason(is_low & did_not_improve, ahead),
            "entropy collapse": _Reason(collapsed, changed("normalized_entropy", entropy, "fell")),
            "sink onset": _Reason(onset, changed("sink_mass", sink, "rose")),
            "dead head": _Reason((share * self._site_sizes <= DEAD).all(0), dead),
        }

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the records of the window and the alarms so far."""
        tensors = {name: getattr(self, name).clone() for name in _TENSORS}
        alarms = [(*alarm[:2], alarm.head and tuple(alarm.head), *alarm[3:]) for alarm in self.alarms]
        heads = [tuple(head) for head in self._heads]
        counts = {"window": self.window, "count": self._count, "finite_losses": self._finite_losses}
        return {**counts, "heads": heads, "tensors": tensors, "alarms": alarms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Args:
            state: the dictionary.

        Raises:
            OptionError: the window was another one.
        """
        if state["window"] != self.window:
            raise OptionError(f"alarms continue with the same window, got {self.window} after {state['window']}")
        self._start(tuple(HeadLocation(*head) for head in state["heads"]))
        self._count, self._finite_losses = state["count"], state.get("finite_losses", self.window)
        for name in _TENSORS:
            getattr(self, name).copy_(state["tensors"][name])
        self.alarms.clear()
        for kind, step, head, *others in state["alarms"]:
            self.alarms.append(Alarm(kind, step, head and HeadLocation(*head), *others))


_TENSORS = ("_values", "_medians", "_curve", "_was_finite", "_parallel", "_cosine", "_quiet")


def _crossing(logit: Tensor, at: float, span: int, limit: float) -> Tensor:
    """Return the step at which each head's largest logit crosses the limit, by its medians [3, heads].

    `at` is the step of the last median, `span` that between the first and the last.
    """
    first, middle, last = logit.clamp(min=1e-3)
    linear = (limit - last) / (last - first)
    exponential = (limit / last).log() / (last / first).log()
    windows = torch.where(last * first >= middle.square(), exponential, linear)
    return at + span * torch.where(last > first, windows.clamp(min=0.0), torch.inf)
