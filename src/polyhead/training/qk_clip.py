"""QK-clip: attention logits of a model in training stay below a threshold, head by head."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.masks import Mask
from polyhead.observation.accumulators import Maximum, accumulator_dtype
from polyhead.observation.calls import Call
from polyhead.observation.rows import MASKING_BIAS
from polyhead.observation.session import Session, observe
from polyhead.training.query_key_weights import QueryKeyWeights, find_query_key_weights

_BIAS = "largest bias"  # name of a state in the session


@dataclass(frozen=True, slots=True, eq=False)
class ClippedHeads:
    """Largest logits and factors of one step of the optimizer, by path of the layer; on the device of the logits.

    `max_logit` is the largest logit of each head in the forwards since the step before, [heads]. `factor` is the number
    by which its products of queries and keys were multiplied, [heads]: 1 for heads at or below the threshold, with a
    NaN or infinite logit, or whose mask bias reaches the threshold, and for all heads in a step that GradScaler skips.
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
    the threshold; other heads are unchanged. For a head with a key of its own, W_Q and W_K are each multiplied by the
    square root of the factor. Grouped-query heads share their key, so W_Q is multiplied by the whole factor. In latent
    attention the parts of queries and keys that belong to one head are multiplied by the square root, and the rotary
    part of its query, whose key all heads share, by the whole factor. Biases are scaled as their weights.

    Biases of the mask do not scale with the weights. With b, the sum of the largest values of these biases for a head
    (each at least 0), the factor is `(threshold - b) / (max_logit - b)`, and 1 if b is not below the threshold.

    Inside the `with` block forwards of the model in training mode are observed, and the step of the optimizer is
    followed by the scaling. Nothing waits for the device. Gradient accumulation and activation checkpointing are
    supported. In a process group the largest logit is that over all ranks, so that replicas stay equal. A compiled
    model runs in eager mode inside the block.

    Args:
        model: the model, as for `polyhead.observe`.
        optimizer: the optimizer that owns W_Q and W_K; biases may belong to another.
        threshold: largest logit allowed, after the scale of the dot products and with the mask's biases.
        absolute: bound the largest absolute value instead of the largest value; for masks that add nothing to logits.
        master_weights: tensors from which the optimizer overwrites 16-bit parameters, by parameter; they are scaled
            too.
        process_group: group of the replicas of the model; all processes by default.

    Raises:
        OptionError: a threshold that is not positive, a model without attention that can be observed, layers whose
            logits do not scale with W_Q and W_K (QK-norm, soft caps), LoRA or quantised projections, heads distributed
            over ranks, and an optimizer without these weights. In a forward: a mask with biases, if `absolute`.

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
        self._session.listener = self._add_bias
        self._carried: Tensor | None = None  # what counts again after a step that a GradScaler skipped
        self._undo: ExitStack | None = None
        self._latest: ClippedHeads | None = None
        self._has_warned = False  # of attention that is observed, but not scaled

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
            self._undo, self._carried = undo.pop_all(), None
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
    def _add_bias(self, call: Call, *_: object) -> None:
        """Record the largest bias of the call's mask for each head."""
        mask = call.mask
        if not call.counts or mask is None or not (len(mask.biases) + len(mask.relative_biases)):
            return
        if self._statistic == "max_abs_logit":
            raise OptionError(
                f"absolute=True needs masks without biases, got biases in {call.site.name}; pass hidden keys as a "
                "boolean mask, or use absolute=False"
            )
        self._session.add_state(call.site, _BIAS, Maximum(_largest_bias(mask, call.site.num_heads)))

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        largest = self._largest()
        # A GradScaler leaves it to the kernel of a fused optimizer to skip a step, and calls `step` nevertheless.
        infinities = getattr(self.optimizer, "found_inf", None)
        is_skipped = None if infinities is None else infinities.to(largest.device, non_blocking=True) > 0
        if self._carried is not None:
            largest = torch.maximum(largest, self._carried)
        self._carried = None if is_skipped is None else torch.where(is_skipped, largest, -torch.inf)
        parts = [x.split([layer.num_heads for layer in self._layers]) for x in largest]
        max_logits, factors = {}, {}
        for layer, max_logit, bias in zip(self._layers, *parts, strict=True):
            added = bias.clamp_min(0.0)
            is_above = (max_logit > self.threshold) & max_logit.isfinite() & (added < self.threshold)
            if is_skipped is not None:
                is_above &= ~is_skipped
            max_logits[layer.site] = max_logit
            factors[layer.site] = torch.where(is_above, (self.threshold - added) / (max_logit - added), 1.0)
            layer.scale_logits(factors[layer.site], self._masters)
        self._latest = ClippedHeads(max_logits, factors)

    def _largest(self) -> Tensor:
        """Return the largest logit and bias of every head since the last step, [2, all heads]; -Inf without any."""
        observations = self._session.take()
        by_site: dict[str, Tensor] = {}
        scaled = {layer.site for layer in self._layers}
        for statistics in observations.sites:
            logits, name = statistics.largest.largest[0], statistics.site.name
            if name not in scaled:  # further attention calls of a module in one forward are sites `path#2`
                name = name.partition("#")[0]
            bias = observations.collected.get(statistics.site, {}).get(_BIAS)
            values = torch.stack([logits, bias.largest if isinstance(bias, Maximum) else logits.new_zeros(len(logits))])
            by_site[name] = torch.maximum(by_site[name], values) if name in by_site else values
        if (others := [name for name in by_site if name not in scaled]) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "QKClip scales layers of polyhead, of transformers and torch.nn.MultiheadAttention, and observed "
                f"attention in {', '.join(others)}, whose logits are not bounded",
                RuntimeWarning,
                stacklevel=5,
            )
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not by_site and not is_distributed:
            raise OptionError(
                "a step of the optimizer must follow a forward of the model in training mode inside the `with` block, "
                f"got none since the last step; call model.train(), and call this {type(self.model).__name__} itself"
            )
        device = next(iter(by_site.values())).device if by_site else next(self._layers[0].parameters()).device
        absent = Maximum.empty((2, 1), device).largest  # -Inf
        values = torch.cat(
            [
                by_site[layer.site].to(absent) if layer.site in by_site else absent.expand(2, layer.num_heads)
                for layer in self._layers
            ],
            1,
        )
        if is_distributed:  # also in a process without forwards: the others wait for it
            values = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)  # NaN has no maximum there
            torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self.process_group)
        return values


def _largest_bias(mask: Mask, heads: int) -> Tensor:
    """Return an upper bound of the sum of a mask's biases, [heads]; hidden keys do not count."""
    largest = [torch.where(x > MASKING_BIAS, x, -torch.inf).amax((0, 2, 3)) for x in mask.biases]
    largest += [x.table.amax(1) for x in mask.relative_biases]
    return torch.stack([x.to(accumulator_dtype(x.device)).clamp_min(0.0).expand(heads) for x in largest]).sum(0)
