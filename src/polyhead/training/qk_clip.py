"""QK-clip: attention logits of a model in training stay below a threshold, head by head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.observation.accumulators import Maximum
from polyhead.observation.session import Session, observe
from polyhead.training.query_key_weights import QueryKeyWeights, find_query_key_weights


@dataclass(frozen=True, slots=True, eq=False)
class ClippedHeads:
    """Largest logits and factors of one step of the optimizer, by path of the layer; on the device of the logits.

    `max_logit` is the largest logit of each head in the forwards since the step before, [heads]. `factor` is what its
    logits were scaled by, [heads]: 1 for heads below the threshold, and for heads with a logit that is NaN or Inf.
    """

    max_logit: Mapping[str, Tensor]
    factor: Mapping[str, Tensor]

    def heads(self) -> dict[tuple[str, int], float]:
        """Return the factor of each clipped head, by path of its layer and index; waits for the device."""
        return {
            (path, head): factor
            for path, factors in self.factor.items()
            for head, factor in enumerate(factors.tolist())
            if factor < 1
        }


class QKClip:
    """Keep the attention logits of a model in training below a threshold, head by head, after each optimizer step.

    QK-clip of MuonClip (Kimi Team 2025, arXiv:2507.20534, section 2.1): if the largest logit of a head in the forwards
    of a step was above the threshold, W_Q and W_K of this head are scaled so that these logits would have been at most
    the threshold; other heads are unchanged. A head with a key of its own takes the square root of the factor in W_Q
    and in W_K. Grouped-query heads share their key and take all of it in W_Q. In latent attention the parts that a head
    has for itself take the square root each, and its rotary query takes all of it. Biases are scaled as their weights.

    Inside the `with` block forwards of the model in training mode are observed, and the step of the optimizer is
    followed by the scaling. Nothing waits for the device. Gradient accumulation and activation checkpointing are
    supported. In a process group the largest logit is that over all ranks, so that replicas stay equal. A compiled
    model runs in eager mode inside the block.

    Args:
        model: the model, as for `polyhead.observe`.
        optimizer: the optimizer that owns W_Q and W_K; biases may belong to another.
        threshold: largest logit allowed, after the scale of the dot products and with the mask's biases.
        absolute: bound the largest absolute value instead of the largest value.
        master_weights: tensors from which the optimizer overwrites 16-bit parameters, by parameter; they are scaled
            too.
        process_group: group of the replicas of the model; all processes by default.

    Raises:
        OptionError: a threshold that is not positive, a model without attention that can be observed, layers whose
            logits do not scale with W_Q and W_K (QK-norm, soft caps), LoRA or quantised projections, heads distributed
            over ranks, and an optimizer without these weights.

    >>> import torch, polyhead
    >>> from polyhead.training import QKClip
    >>> layer = polyhead.MultiHeadAttention(16, 2, causal=True)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> with QKClip(layer, optimizer, threshold=0.5) as clip:
    ...     layer(10 * torch.randn(3, 5, 16)).output.square().mean().backward()
    ...     optimizer.step()
    >>> len(clip.latest.heads())
    2
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        threshold: float = 100.0,
        *,
        absolute: bool = False,
        master_weights: Mapping[nn.Parameter, Tensor] | None = None,
        process_group: Any = None,
    ) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < math.inf:
            raise OptionError(f"threshold must be a positive number, got {threshold!r}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptionError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; pass the optimizer "
                "itself, not a wrapper around it"
            )
        self.model, self.optimizer, self.threshold = model, optimizer, float(threshold)
        self.process_group = process_group
        self._statistic = "max_abs_logit" if absolute else "max_logit"
        self._layers: tuple[QueryKeyWeights, ...] = find_query_key_weights(model)
        self._masters = {} if master_weights is None else dict(master_weights)
        self._check_owned()
        self._session: Session = observe(model, statistics=self._statistic)
        self._session.only_training = True
        self._undo: ExitStack | None = None
        self._latest: ClippedHeads | None = None

    def _check_owned(self) -> None:
        owned = {id(x) for group in self.optimizer.param_groups for x in group["params"]}
        owned |= {id(x) for x, master in self._masters.items() if id(master) in owned}
        names = {id(x): name for name, x in self.model.named_parameters()}
        # Biases may belong to another optimizer, as beside Muon.
        weights = [x for layer in self._layers for x in layer.parameters() if x.ndim > 1]
        missing = [names[id(x)] for x in weights if id(x) not in owned]
        if missing:
            raise OptionError(
                "the optimizer must own the weights of queries and keys, which are scaled after its step, got one "
                f"without {', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}"
            )

    def __enter__(self) -> Self:
        if self._undo is not None:
            raise OptionError("this QKClip is already entered; create another for another model")
        self._layers = find_query_key_weights(self.model)  # heads may have been edited since
        self._check_owned()
        with ExitStack() as undo:
            undo.enter_context(self._session)
            undo.callback(self.optimizer.register_step_post_hook(self._after_step).remove)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.__exit__(*exception)

    @property
    def latest(self) -> ClippedHeads:
        """Largest logits and factors of the last step of the optimizer."""
        if self._latest is None:
            raise OptionError("no step of the optimizer was made inside the `with` block yet")
        return self._latest

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        largest = self._largest_logits()
        factors = {}
        for layer in self._layers:
            max_logit = largest[layer.site]
            is_above = (max_logit > self.threshold) & max_logit.isfinite()
            factors[layer.site] = torch.where(is_above, self.threshold / max_logit, 1.0)
            layer.scale_logits(factors[layer.site], self._masters)
        self._latest = ClippedHeads(largest, factors)

    def _largest_logits(self) -> dict[str, Tensor]:
        """Return the largest logit of each head since the last step, [heads] by site; -Inf if a layer did not run."""
        largest: dict[str, Tensor] = {}
        for statistics in self._session.take().sites:
            values, site = statistics.largest.largest[0], statistics.site.name
            largest[site] = torch.maximum(largest[site], values) if site in largest else values
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not largest and not is_distributed:
            raise OptionError(
                "a step of the optimizer must follow a forward of the model in training mode inside the `with` block, "
                f"got none since the last step; call model.train(), and call this {type(self.model).__name__} itself"
            )
        device = next(iter(largest.values())).device if largest else next(self._layers[0].parameters()).device
        absent = Maximum.empty((1,), device).largest  # -Inf
        sizes = [layer.num_heads for layer in self._layers]
        values = torch.cat(
            [
                largest[layer.site].to(absent) if layer.site in largest else absent.expand(layer.num_heads)
                for layer in self._layers
            ]
        )
        if is_distributed:  # also in a process without forwards: the others wait for it
            values = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)  # NaN has no maximum there
            torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self.process_group)
        return {layer.site: x for layer, x in zip(self._layers, values.split(sizes), strict=True)}
