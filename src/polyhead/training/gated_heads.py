"""Gates on heads in training: DropHead, and gates that learn which heads to keep."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.geometry import HeadId
from polyhead.observation.rows import Tokens
from polyhead.observation.session import Session, observe
from polyhead.observation.statistics import AttentionSite
from polyhead.surgery.adapters.attention_layer import AttentionLayer, linear_axis
from polyhead.surgery.adapters.discovery import find_layers
from polyhead.training.rank_sums import has_ranks

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1  # beta, gamma and zeta of Louizos et al. 2018
_SHIFT = TEMPERATURE * math.log(-LOW / HIGH)


class _GatedHeads(nn.Module, ABC):
    """Context manager in which the output of every head of a model is multiplied by a gate."""

    _model: nn.Module
    _session: Session

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._is_entered = False
        session = observe(model, statistics=False)
        session.gates.create = self._gate
        # Not registered as submodules: the model's parameters are not those of its gates.
        self.__dict__["_model"], self.__dict__["_session"] = model, session

    @abstractmethod
    def _gate(self, site: AttentionSite, tokens: Tokens | Tensor | None) -> Tensor:
        """Return the gates of one attention call, [heads] or [batch, heads]."""

    def __enter__(self) -> Self:
        self._session.__enter__()
        self._is_entered = True
        return self

    def __exit__(self, *exception: Any) -> None:
        self._session.__exit__(*exception)
        self._is_entered = False


class DropHead(_GatedHeads):
    """Drop whole heads at random in training (Zhou et al. 2020, arXiv:2004.13342).

    Inside the `with` block every head of every sequence is dropped with probability `rate`, and the remaining heads of
    its layer are scaled up so that the mean of all gates is 1; a sequence whose heads would all be dropped keeps them
    all. In evaluation mode nothing is dropped and no random number is drawn. Checkpointed layers drop the same heads
    when they are recomputed. `state_dict` has the step of the schedule.

    Args:
        model: the model, as for `polyhead.observe`.
        rate: probability, or a function of the step that returns it; `step` advances the step.

    Raises:
        OptionError: a rate that is not at least 0 and below 1.

    >>> import torch, polyhead
    >>> from polyhead.training import DropHead
    >>> layer = polyhead.MultiHeadAttention(16, 4).train()
    >>> drop = DropHead(layer, rate=lambda step: 0.2 * abs(step - 500) / 500)  # falls to 0, then rises again
    >>> with drop:
    ...     output = layer(torch.randn(3, 5, 16)).output
    ...     drop.step()
    """

    def __init__(self, model: nn.Module, rate: float | Callable[[int], float]) -> None:
        super().__init__(model)
        self.rate, self.steps = rate, 0
        self._checked_rate()

    def step(self) -> None:
        """Advance the schedule by one step, after a step of the optimizer."""
        self.steps += 1
        self._checked_rate()

    def _checked_rate(self) -> float:
        rate = self.rate(self.steps) if callable(self.rate) else self.rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise OptionError(f"the rate of DropHead must be at least 0 and below 1, got {rate!r} at step {self.steps}")
        return float(rate)

    def get_extra_state(self) -> dict[str, int]:
        """Return the step of the schedule, for `state_dict`."""
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Continue the schedule from the step that `get_extra_state` returned.

        Args:
            state: the dictionary.
        """
        self.steps = state["steps"]
        self._checked_rate()

    def _gate(self, site: AttentionSite, tokens: Tokens | Tensor | None) -> Tensor:
        rate = self._checked_rate()
        if not self._model.training or rate == 0:
            return torch.ones(site.num_heads, device=_device(tokens, self._model))
        remaining = (_uniform(site, tokens, self._model) >= rate).float()
        count = remaining.sum(-1, keepdim=True)
        return torch.where(count > 0, remaining * (site.num_heads / count.clamp_min(1)), 1.0)


class HeadGates(_GatedHeads):
    """Learn which heads to keep: one hard-concrete gate per head, with an L0 penalty.

    Louizos et al. 2018 (arXiv:1712.01312), for heads Voita et al. 2019 (arXiv:1905.09418). Inside the `with` block the
    output of a head is multiplied by its gate: in training a random number in [0, 1] for each sequence that is exactly
    0 or 1 with positive probability, in evaluation mode its deterministic value. Training on the loss plus a multiple
    of `penalty()` closes gates of heads that are not worth their cost. Then `fold` multiplies the gates into W_O, and
    `polyhead.prune(model, gates.closed(), compensate=False)` removes the closed heads; outputs stay the same.

    In a process group the gradients of the gates are averaged over the ranks at the end of each backward, as
    `DistributedDataParallel` does for those of the model; every rank must call `backward` the same number of times.

    Args:
        model: a model whose heads can be edited, as for `polyhead.prune`.
        start: probability that a gate is open before training.
        process_group: group of the replicas of the model; all processes by default.

    Raises:
        OptionError: the heads of a layer cannot be edited, or `start` is not between 0 and 1.

    >>> import torch, polyhead
    >>> from polyhead.training import HeadGates
    >>> layer = polyhead.MultiHeadAttention(16, 4).train()
    >>> gates = HeadGates(layer)
    >>> optimizer = torch.optim.Adam([{"params": layer.parameters()}, {"params": gates.parameters(), "lr": 0.1}])
    >>> with gates:
    ...     loss = layer(torch.randn(3, 5, 16)).output.square().mean() + 0.01 * gates.penalty()
    ...     loss.backward()
    >>> round(gates.penalty().item(), 2)  # expected number of open gates
    3.6
    """

    _layers: dict[str, AttentionLayer]

    def __init__(self, model: nn.Module, *, start: float = 0.9, process_group: Any = None) -> None:
        super().__init__(model)
        self.process_group = process_group
        self._averaged_backward = -1
        if not isinstance(start, float) or not 0 < start < 1:
            raise OptionError(f"start must be between 0 and 1, got {start!r}")
        layers = find_layers(model)
        for layer in layers:
            if layer.refusals:
                raise OptionError(
                    "gates are for heads that can be removed afterwards, got "
                    f"{layer.path or type(layer.module).__name__}: {'; '.join(layer.refusals)}"
                )
        self.__dict__["_layers"] = {layer.site: layer for layer in layers}
        self._is_folded = False
        logit = math.log(start / (1 - start)) + _SHIFT
        self.log_alpha = nn.ParameterDict()
        for layer in layers:
            assert layer.layout is not None
            device = model.get_submodule(layer.output).get_parameter("weight").device
            start_logits = torch.full((layer.layout.num_heads,), logit, device=device)
            self.log_alpha[self._key(layer.site)] = nn.Parameter(start_logits)
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._average_at_end)

    def gates(self) -> dict[str, Tensor]:
        """Return the deterministic gates of evaluation mode, [heads] by path of the layer."""
        return {site: _stretched(torch.sigmoid(self._logits(site))) for site in self._layers}

    def penalty(self) -> Tensor:
        """Return the expected number of open gates, differentiable."""
        open_gates = [torch.sigmoid(self._logits(site) - _SHIFT).sum() for site in self._layers]
        return torch.stack([x.to(open_gates[0].device) for x in open_gates]).sum()

    @torch.no_grad()
    def closed(self, stack: str | None = None) -> list[HeadId]:
        """Return the heads whose gates are 0, except the first of a layer in which all are: every layer keeps a head.

        Args:
            stack: the stack of layers, as for `polyhead.prune`, for models with several (encoder and decoder).

        Raises:
            OptionError: the model has several stacks and none is chosen, or the chosen one does not exist.
        """
        stacks = list(dict.fromkeys(layer.stack for layer in self._layers.values()))
        if (len(stacks) > 1 or stack is not None) and stack not in stacks:
            raise OptionError(f"stack must be one of {', '.join(stacks)}, got {stack!r}")
        heads = []
        for site, gates in self.gates().items():
            if self._layers[site].stack != (stack or stacks[0]):
                continue
            closed = [head for head, gate in enumerate(gates.tolist()) if gate == 0]
            keeps_none = len(closed) == len(gates)
            heads += [HeadId(self._layers[site].number, head) for head in closed[int(keeps_none) :]]
        return heads

    @torch.no_grad()
    def fold(self) -> None:
        """Multiply the gates of evaluation mode into W_O: the model then has the outputs that it had inside the block.

        Heads with a closed gate have no output. The gates cannot be used again.

        Raises:
            OptionError: called inside the block, where the gates would count twice, or after the heads were changed.
        """
        self._check_unfolded()
        if self._is_entered:
            raise OptionError("gates are folded after the `with` block, inside of which they would count twice")
        now = {layer.site: layer.layout for layer in find_layers(self._model)}
        if changed := [site for site, layer in self._layers.items() if now.get(site) != layer.layout]:
            raise OptionError(f"the heads must be those that the gates were made for, got other ones in {changed[0]!r}")
        for site, gates in self.gates().items():
            linear = self._model.get_submodule(self._layers[site].output)
            weight, axis = linear.get_parameter("weight"), linear_axis(linear, outputs=False)
            by_channel = gates.repeat_interleave(weight.shape[axis] // len(gates)).to(weight)
            weight.mul_(by_channel.view([-1 if i == axis else 1 for i in range(2)]))
        self._is_folded = True

    def __enter__(self) -> Self:
        self._check_unfolded()
        return super().__enter__()

    def _check_unfolded(self) -> None:
        if self._is_folded:
            raise OptionError("these gates were folded into W_O and would count twice; create HeadGates anew")

    def _gate(self, site: AttentionSite, tokens: Tokens | Tensor | None) -> Tensor:
        logits = self._logits(site.name)
        if not self._model.training:
            return _stretched(torch.sigmoid(logits))
        noise = _uniform(site, tokens, self._model).logit(eps=1e-6)
        return _stretched(torch.sigmoid((noise + logits.to(noise.device)) / TEMPERATURE))

    def _average_at_end(self, _: Tensor) -> None:
        """Average the gradients over the ranks when the running backward ends."""
        backward = torch._C._current_graph_task_id()  # a reentrant checkpoint has backwards of its own
        if has_ranks(self.process_group) and backward != self._averaged_backward:
            self._averaged_backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._average_gradients)

    @torch.no_grad()
    def _average_gradients(self) -> None:
        """Replace the gradients by their mean over the ranks, which keeps a mean of earlier micro-batches as it is."""
        parameters = [x for x in self.parameters() if x.requires_grad]
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in parameters]
        joined = torch.cat([x.to(parameters[0].device) for x in gradients])
        torch.distributed.all_reduce(joined, group=self.process_group)
        joined /= torch.distributed.get_world_size(self.process_group)
        for parameter, mean in zip(parameters, joined.split([len(x) for x in parameters]), strict=True):
            parameter.grad = mean.to(parameter)

    def _logits(self, site: str) -> Tensor:
        log_alpha: Tensor = self.log_alpha[self._key(site)]
        return log_alpha

    @staticmethod
    def _key(site: str) -> str:
        return site.replace(".", "/")  # names of parameters contain no dot


def _stretched(share: Tensor) -> Tensor:
    """Return a number in (0, 1), stretched to (LOW, HIGH) and clipped to [0, 1]."""
    return (share * (HIGH - LOW) + LOW).clamp(0.0, 1.0)


def _uniform(site: AttentionSite, tokens: Tokens | Tensor | None, model: nn.Module) -> Tensor:
    """Return uniform random numbers, [batch, heads], or [heads] if an adapter does not pass its tokens."""
    device = _device(tokens, model)
    if tokens is None:
        return torch.rand(site.num_heads, device=device)
    batch = tokens.batch if isinstance(tokens, Tokens) else len(tokens)
    return torch.rand(batch, site.num_heads, device=device)


def _device(tokens: Tokens | Tensor | None, model: nn.Module) -> torch.device:
    """Return the device of an attention call's tokens, or of the model if an adapter does not pass them."""
    return next(model.parameters()).device if tokens is None else tokens.device
