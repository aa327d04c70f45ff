"""`DynamicHeads`: prune, revive and grow heads at given steps of training, by evidence of the steps before."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import checked_integer
from polyhead.surgery.adapters.attention_layer import AttentionLayer, linear_axis
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.surgery.edits.head_edits import (
    AddHeads,
    HeadEdit,
    PruneHeads,
    ReorderHeads,
    edits_from_json,
    edits_to_json,
)
from polyhead.training.monitor import HeadMonitor
from polyhead.training.optimizer_state import (
    Optimizers,
    check_unobserved,
    check_unwrapped,
    checked_optimizers,
    edit_heads,
    states_of,
)

_IMPORTANCE = "importance"


@dataclass(frozen=True)
class HeadChange:
    """A change of `DynamicHeads`: numbers of heads of the whole model.

    Args:
        prune: remove the heads with the lowest scores; every layer keeps one.
        revive: reset those with the next lowest: random W_Q, W_K and W_V, and a W_O of 0, in the same place; the head
            with the highest score of the model is never reset.
        grow: add heads with a W_O of 0, which do not change the model's outputs, one by one to the layers whose lowest
            score is the highest.
        below: prune and revive only heads whose score is below this multiple of the mean over all heads.

    >>> HeadChange(revive=4, below=0.05)  # at most four heads, and only if they are almost dead
    HeadChange(prune=0, revive=4, grow=0, below=0.05)
    """

    prune: int = 0
    revive: int = 0
    grow: int = 0
    below: float = math.inf

    def __post_init__(self) -> None:
        for name in ("prune", "revive", "grow"):
            checked_integer(name, getattr(self, name), error=OptionError)
        if not self.prune + self.revive + self.grow:
            raise OptionError("a change must prune, revive or grow at least one head, got none")
        if isinstance(self.below, bool) or not isinstance(self.below, int | float) or not self.below > 0:
            raise OptionError(f"below must be a positive multiple of the mean score, got {self.below!r}")


class DynamicHeads:
    """Prune, revive and grow heads at given steps of training, by the evidence of the steps before.

    Inside the `with` block `step` ends a step; after a step that `changes` names, heads are changed and the state of
    the optimizer is kept, as `edit_heads` does; no other session may observe the model then. The score of a head is its
    importance, or a column of a monitor, in the mean over the steps since the last change. Only changes wait for the
    device.

    The importance of a head in a step is the magnitude of the derivative of the loss with respect to a factor on the
    head's output (Michel et al. 2019, arXiv:1905.10650, for a whole step instead of each sequence), divided by the sum
    over all heads. It is `|sum(W_O * grad(W_O))|`, which is read before the optimizer's step and needs no gates.

    Args:
        model: a model whose heads can be edited, as for `polyhead.prune`, each with a KV head of its own.
        optimizer: the optimizer, or several that share the parameters; one of them owns W_O of all layers.
        changes: changes by the number of steps after which they are made.
        monitor: `HeadMonitor`, or a function that takes the model and returns a monitor of it; called again after each
            change, since the heads of a monitor cannot change. `monitors` lists the results.
        score: "importance", or the name of a column of the monitor, e.g. "output_norm_share", of which low values are
            those of heads that are not needed.
        seed: seed of the weights of new heads.

    Raises:
        OptionError: heads that cannot be edited or share their keys (grouped-query attention), an optimizer without
            their weights, changes that leave a layer without heads, a score without a monitor.

    >>> import torch, polyhead
    >>> from polyhead.training import DynamicHeads, HeadChange
    >>> layer = polyhead.MultiHeadAttention(16, 4).train()
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> with DynamicHeads(layer, optimizer, {5: HeadChange(prune=2), 8: HeadChange(grow=1)}) as heads:
    ...     for _ in range(10):
    ...         loss = layer(torch.randn(3, 5, 16)).output.square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         heads.step(loss)
    >>> layer.layout.num_heads, [step for step, edits in heads.applied]
    (3, [5, 8])
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        changes: Mapping[int, HeadChange],
        *,
        monitor: Callable[[nn.Module], HeadMonitor] | None = None,
        score: str = _IMPORTANCE,
        seed: int = 0,
    ) -> None:
        self.model, self.optimizers, self.changes = model, checked_optimizers(optimizer), dict(changes)
        self.score, self.seed, self.steps = score, checked_integer("seed", seed, error=OptionError), 0
        self.applied: list[tuple[int, tuple[HeadEdit, ...]]] = []  # the steps and edits of changes so far
        self.monitors: list[HeadMonitor] = []
        self._create_monitor = monitor
        self._monitor_state: dict[str, Any] | None = None  # of a run that is continued
        self._undo: ExitStack | None = None
        if monitor is not None and not callable(monitor):
            raise OptionError(
                f"monitor must be HeadMonitor itself or a function that returns a monitor of the model, got {monitor!r}"
            )
        if monitor is None and score != _IMPORTANCE:
            raise OptionError(f"a score is importance, or a column of a monitor, got {score!r} and no monitor")
        for step, change in self.changes.items():
            checked_integer("the step of a change", step, at_least=1, error=OptionError)
            if not isinstance(change, HeadChange):
                raise OptionError(f"changes must be HeadChange by step, got {change!r} at step {step}")
        self._find_layers()
        self._owner = self._check_owner()
        heads = sum(len(x) for x in self._zeros())
        for step in sorted(self.changes):
            change = self.changes[step]
            if heads - change.prune < len(self._layers) and change.below == math.inf:
                raise OptionError(
                    f"every layer must keep a head, got {change.prune} of {heads} heads in {len(self._layers)} layers "
                    f"to prune at step {step}"
                )
            if change.revive and heads <= change.prune + change.revive and change.below == math.inf:
                raise OptionError(
                    f"at least one head must be neither pruned nor revived, got {change.prune} to prune and "
                    f"{change.revive} to revive of {heads} heads at step {step}; revive fewer, or set below"
                )
            heads += change.grow - (change.prune if change.below == math.inf else 0)
        self._shares, self._count = self._zeros(), 0

    def _find_layers(self) -> None:
        self._layers = find_layers(self.model)
        for layer in self._layers:
            reasons = list(layer.refusals)
            if layer.layout is not None and layer.layout.num_kv_heads != layer.layout.num_heads:
                reasons.append(f"its {layer.layout.num_heads} heads share {layer.layout.num_kv_heads} KV heads")
            if layer.reads_config:
                reasons.append("it or a module around it reads the number of heads from the config of all layers")
            if reasons:
                raise OptionError(
                    f"the heads of every layer must be changed one by one, got {layer.site}: {'; '.join(reasons)}"
                )
        if not self._layers:
            raise OptionError(
                "dynamic heads need attention layers of polyhead or transformers, got a model without any: "
                f"{type(self.model).__name__}"
            )

    def _check_owner(self) -> torch.optim.Optimizer:
        """Return the optimizer that owns W_O of all layers; raise if a change would be refused later."""
        names = [name for layer in self._layers for name in states_of(self.model, layer, self.optimizers)]
        check_unwrapped(map(self.model.get_parameter, names))
        frozen = [layer.site for layer in self._layers if not self._output_weight(layer).requires_grad]
        if frozen and self.score == _IMPORTANCE:
            raise OptionError(f"the importance of heads needs gradients of W_O, got a frozen one in {frozen[0]}")
        weights = {id(self._output_weight(layer)) for layer in self._layers}
        for each in self.optimizers:
            if weights <= {id(x) for group in each.param_groups for x in group["params"]}:
                return each
        raise OptionError(
            "one optimizer must own the output projections of all attention layers, got "
            f"{', '.join(type(each).__name__ for each in self.optimizers)}, none of which does"
        )

    def _output_weight(self, layer: AttentionLayer) -> nn.Parameter:
        return self.model.get_submodule(layer.output).get_parameter("weight")

    def _zeros(self) -> list[Tensor]:
        zeros = []
        for layer in self._layers:
            assert layer.layout is not None
            zeros.append(torch.zeros(layer.layout.num_heads, device=self._output_weight(layer).device))
        return zeros

    def __enter__(self) -> Self:
        if self._undo is not None:
            raise OptionError("these heads are already entered; create another DynamicHeads for another model")
        self._check_owner()  # the model may have been wrapped since
        check_unobserved(self.model)
        self._begin()
        return self

    def __exit__(self, *exception: Any) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.__exit__(*exception)

    def _begin(self) -> None:
        """Start to collect evidence for the next change: importances, and a monitor if there is one."""
        with ExitStack() as undo:
            undo.callback(self._owner.register_step_pre_hook(self._around_closure).remove)
            if self._create_monitor is not None:
                monitor, state = self._create_monitor(self.model), self._monitor_state
                if self.score not in (_IMPORTANCE, *monitor.statistics):
                    raise OptionError(
                        f"a score is importance, or one of {', '.join(sorted(monitor.statistics))}, got {self.score!r}"
                    )
                if state is None:
                    monitor.start_at(self.steps)
                else:
                    monitor.load_state_dict(state)
                self._monitor_state = None
                self.monitors.append(undo.enter_context(monitor))
            self._undo = undo.pop_all()

    def _around_closure(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add the importances of a step: now, or after its closure, which computes the gradients."""
        positional = next((index for index, x in enumerate(args) if index and callable(x)), None)
        closure = kwargs.get("closure") if positional is None else args[positional]
        if closure is None:
            self._before_step()
            return None
        is_read = False

        @functools.wraps(closure)
        def read() -> Any:
            nonlocal is_read
            result = closure()
            if not is_read:
                self._before_step()
            is_read = True
            return result

        if positional is None:
            return args, {**kwargs, "closure": read}
        return (*args[:positional], read, *args[positional + 1 :]), kwargs

    @torch.no_grad()
    def _before_step(self) -> None:
        """Add the importances of a step, without waiting for the device."""
        values = []
        for layer, shares in zip(self._layers, self._shares, strict=True):
            weight = self._output_weight(layer)
            if weight.grad is None:
                values.append(torch.zeros_like(shares))
                continue
            axis = linear_axis(self.model.get_submodule(layer.output), outputs=True)
            products = (weight.float() * weight.grad).sum(axis)  # [heads * value_dim]
            values.append(products.unflatten(0, (len(shares), -1)).sum(1).abs())
        total = torch.stack([x.sum().to(values[0].device) for x in values]).sum()
        counts = (total > 0) & total.isfinite()  # not a step that a GradScaler is about to skip
        for shares, value in zip(self._shares, values, strict=True):
            shares += torch.where(counts.to(value.device), value / total.to(value.device), 0.0)
        self._count += 1

    def step(self, loss: Tensor | float | None = None) -> None:
        """End a step, and change heads if it is the time: call it once after each step of the optimizer.

        Args:
            loss: loss of the step, for the monitor.

        Raises:
            OptionError: outside of the `with` block, or a change without finite scores.
        """
        if self._undo is None:
            raise OptionError("a step must end inside the `with` block of the heads")
        if self.monitors:
            self.monitors[-1].step(loss)
        self.steps += 1
        if self.steps not in self.changes:
            return
        edits = self._edits(self.changes[self.steps], self._scores())
        self.__exit__(None, None, None)
        if edits:
            edit_heads(self.model, self.optimizers, edits)
            self.applied.append((self.steps, edits))
            self._find_layers()
        self._shares, self._count = self._zeros(), 0
        callbacks = self.monitors[-1].callbacks if self.monitors else ()
        stopping = [callback for callback in callbacks if callback.should_stop]
        self._begin()
        for callback in stopping:  # the loop is the same, and has not read it yet
            callback.should_stop = True

    def _scores(self) -> list[list[float]]:
        """Return the score of every head of every layer."""
        if self.score == _IMPORTANCE:
            values = [(x / max(self._count, 1)).tolist() for x in self._shares]
            evidence = f"importance in {self._count} steps"
        else:
            history = self.monitors[-1].history
            column = history[self.score].nanmean(0).tolist() if len(history) else []
            evidence = f"{self.score} in {len(history)} observed steps"
            by_head = {(head.site, head.head): -math.inf for head in history.heads}
            for head, value in zip(history.heads, column, strict=True):
                # A module with self- and cross-attention has two values of a head; it is needed if one says so.
                by_head[head.site, head.head] = max(by_head[head.site, head.head], value)
            values = [
                [by_head.get((layer.site, head), math.nan) for head in range(len(x))]
                for layer, x in zip(self._layers, self._shares, strict=True)
            ]
        has_evidence = self._count and (self.score != _IMPORTANCE or any(map(any, values)))
        for layer, scores in zip(self._layers, values, strict=True):
            if not has_evidence or not all(map(math.isfinite, scores)):
                raise OptionError(
                    "heads are changed by finite scores of steps since the last change, got "
                    f"{', '.join(f'{x:.3g}' for x in scores)} in {layer.site} ({evidence})"
                )
        return values

    def _edits(self, change: HeadChange, scores: list[list[float]]) -> tuple[HeadEdit, ...]:
        """Return the edits that make a change, given the scores of all heads by layer."""
        ranked = sorted((x, layer, head) for layer, values in enumerate(scores) for head, x in enumerate(values))
        bound = change.below * sum(x for x, _, _ in ranked) / len(ranked) if change.below < math.inf else math.inf
        left = [len(values) for values in scores]
        pruned: list[list[int]] = [[] for _ in scores]
        revived: list[list[int]] = [[] for _ in scores]
        for x, layer, head in ranked:
            if x >= bound:
                break
            if sum(map(len, pruned)) < change.prune and left[layer] > 1:
                left[layer] -= 1
                pruned[layer].append(head)
            # Also the last head of a layer, which is not pruned; but not all heads of the model.
            elif sum(map(len, revived)) < change.revive and (x, layer, head) != ranked[-1]:
                revived[layer].append(head)
        lowest = [
            min((x for head, x in enumerate(values) if head not in pruned[layer]), default=0.0)
            for layer, values in enumerate(scores)
        ]
        order = sorted(range(len(scores)), key=lambda layer: -lowest[layer])
        edits: list[HeadEdit] = []
        for layer, values in enumerate(scores):
            number, stack = self._layers[layer].number, self._layers[layer].stack
            seed = self.seed + 10_000 * self.steps + 2 * layer
            if dead := sorted(revived[layer]):
                remaining = [head for head in range(len(values)) if head not in dead]
                in_place = {head: index for index, head in enumerate([*remaining, *dead])}
                edits += [
                    AddHeads(number, len(dead), seed, stack=stack),
                    PruneHeads(number, tuple(dead), stack=stack),
                    ReorderHeads(number, tuple(in_place[head] for head in range(len(values))), stack=stack),
                ]
            if pruned[layer]:
                edits.append(PruneHeads(number, tuple(pruned[layer]), stack=stack))
            if new := len(range(order.index(layer), change.grow, len(order))):
                edits.append(AddHeads(number, new, seed + 1, stack=stack))
        return tuple(edits)

    def state_dict(self) -> dict[str, Any]:
        """Return the changes so far and the evidence since the last, to be saved with a checkpoint."""
        return {
            "steps": self.steps,
            "applied": [(step, edits_to_json(edits)) for step, edits in self.applied],
            "shares": [x.cpu().clone() for x in self._shares],
            "count": self._count,
            "monitor": self.monitors[-1].state_dict() if self._create_monitor and self.monitors else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Repeat the changes of a saved run in a new model and continue from it.

        Call it on a new model and optimizer, and load their states afterwards. The monitor since the last change
        continues as well.

        Args:
            state: what `state_dict` returned.
        """
        if self.steps or self._undo is not None:
            raise OptionError("heads continue from a state before they are entered, got heads that have steps already")
        for step, text in state["applied"]:
            edits = edits_from_json(text)
            edit_heads(self.model, self.optimizers, edits)
            self.applied.append((step, edits))
        self._find_layers()
        self.steps, self._count, self._monitor_state = int(state["steps"]), int(state["count"]), state["monitor"]
        self._shares = [x.to(y) for x, y in zip(state["shares"], self._zeros(), strict=True)]
