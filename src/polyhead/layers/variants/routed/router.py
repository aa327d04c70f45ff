"""Router of attention heads: selection and weights of heads per token, and auxiliary losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from polyhead.errors import DeviceError, DtypeError, OptionError, ShapeError
from polyhead.geometry import checked_integer
from polyhead.layers import checks
from polyhead.ops.common.tracing import is_traced, is_transformed

NORMALISATIONS = ("all", "chosen")


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Heads selected by each token: `slots` entries per token, of which `counts` are used.

    The auxiliary losses are means over non-padding tokens, to be added to the training loss with a small factor:

        balance_loss   h sum_i f_i P_i             Fedus et al. 2021, "Switch Transformers", section 2.2
        z_loss         mean logsumexp(logits)^2    Zoph et al. 2022, "ST-MoE", section 3.3
        budget_loss    relu(mean exp(H) / budget - 1)^2

    over the h routed heads: f_i is head i's share of all selections, P_i its mean probability, and H the entropy of a
    token's probabilities, so that exp(H) is the gate's perplexity, an effective number of heads. Balanced heads have a
    balance_loss of 1. Selections have no gradient; probabilities do. Huang et al. 2024, "Harder Tasks Need More
    Experts", minimise H itself with top-p routing; the budget is not from the paper.
    """

    heads: Tensor  # int64 [batch, tokens, slots]: always-on heads, then routed ones by decreasing probability
    weights: Tensor  # [batch, tokens, slots]: factors of the heads' outputs; 0 in unused slots
    num_heads: int
    always_on: int = 0  # heads 0 .. always_on - 1, which are not routed
    counts: Tensor | None = None  # int64 [batch, tokens]: number of used slots, the first ones; None: all
    logits: Tensor | None = None  # [batch, tokens, num_heads - always_on], noise included
    real: Tensor | None = None  # bool [batch or 1, tokens]: False for padding, which is not counted; None: no padding
    budget: float | None = None  # target for the mean effective number of routed heads per token

    @classmethod
    def every_head(cls, batch: int, tokens: int, num_heads: int, like: Tensor) -> Self:
        """Return the routing of every token to every head with weight 1, as without a gate.

        Args:
            batch: number of sequences.
            tokens: tokens per sequence.
            num_heads: heads of the layer.
            like: tensor whose dtype and device the weights have.
        """
        heads = torch.arange(num_heads, device=like.device).expand(batch, tokens, num_heads)
        return cls(heads, like.new_ones(()).expand(heads.shape), num_heads)

    def check(self, batch: int, tokens: int, num_heads: int, device: torch.device) -> None:
        """Raise unless shapes, dtypes and device match these tokens and heads.

        Args:
            batch: number of sequences.
            tokens: tokens per sequence.
            num_heads: heads of the layer.
            device: device of the layer.
        """
        tensors = {"heads": self.heads, "weights": self.weights}
        tensors |= {} if self.counts is None else {"counts": self.counts}
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise DtypeError(f"{name} of a routing must be a tensor, got {type(tensor).__name__}")
            if tensor.device != device:
                raise DeviceError(
                    f"{name} of a routing must be on the device of the query, got {tensor.device} and {device}"
                )
        if self.heads.dtype is not torch.int64:
            raise DtypeError(f"heads of a routing must be torch.int64 indices, got {self.heads.dtype}")
        if not self.weights.is_floating_point():
            raise DtypeError(f"weights of a routing must be floating point, got {self.weights.dtype}")
        shape = (batch, tokens, *self.heads.shape[-1:])
        if tuple(self.heads.shape) != shape or tuple(self.weights.shape) != shape or self.num_heads != num_heads:
            raise ShapeError(
                f"a routing must be for {batch} x {tokens} tokens and {num_heads} heads, got heads "
                f"{list(self.heads.shape)} and weights {list(self.weights.shape)} over {self.num_heads} heads"
            )
        slots = self.heads.shape[2]
        if not 1 <= slots <= num_heads:
            raise ShapeError(f"a routing must have 1 to {num_heads} slots per token, got {slots}")
        if self.counts is None:
            return
        if tuple(self.counts.shape) != (batch, tokens):
            raise ShapeError(
                f"counts of a routing must be [{batch}, {tokens}], one for each token, got {list(self.counts.shape)}"
            )
        if self.counts.dtype not in (torch.int32, torch.int64):
            raise DtypeError(f"counts of a routing must be int32 or int64, got {self.counts.dtype}")

    def check_values(self) -> None:
        """Raise an OptionError for invalid heads or counts; only on a CPU, where this needs no synchronisation."""
        heads, counts = self.heads, self.counts
        if heads.device.type != "cpu" or is_transformed() or is_traced(heads) or not heads.numel():
            return
        lowest, highest = int(heads.min()), int(heads.max())
        if lowest < 0 or highest >= self.num_heads:
            raise OptionError(
                f"heads of a routing must be 0 to {self.num_heads - 1}, also in unused slots, got {lowest} to {highest}"
            )
        slots, used = heads.shape[2], self.used
        if counts is not None and used is not None:
            lowest, highest = int(counts.min()), int(counts.max())
            if lowest < 0 or highest > slots:
                raise OptionError(f"counts of a routing must be 0 to its {slots} slots, got {lowest} to {highest}")
            # Unused slots become distinct extra heads, so that they equal no other.
            heads = torch.where(used, heads, self.num_heads + torch.arange(slots, device=heads.device))
        ordered = heads.sort(-1).values
        duplicates = (ordered[..., 1:] == ordered[..., :-1]).nonzero()
        if len(duplicates):
            sequence, token, slot = duplicates[0].tolist()
            raise OptionError(
                f"a token must not select a head twice, got head {int(ordered[sequence, token, slot])} twice for token "
                f"{token} of sequence {sequence}; use one slot with the sum of the weights"
            )

    @property
    def used(self) -> Tensor | None:
        """True for used slots, [batch, tokens, slots]; None if all are used."""
        if self.counts is None:
            return None
        return torch.arange(self.heads.shape[2], device=self.heads.device) < self.counts[..., None]

    @property
    def probabilities(self) -> Tensor:
        """Softmax of the gate over the routed heads, [batch, tokens, num_heads - always_on]."""
        return torch.softmax(self._logits, -1)

    @property
    def is_chosen(self) -> Tensor:
        """True where a token has selected a head, [batch, tokens, num_heads]."""
        # Unused slots, whose entry may equal a used one, select an extra head, which is dropped.
        used = self.used
        heads = self.heads if used is None else torch.where(used, self.heads, self.num_heads)
        chosen = torch.zeros(*heads.shape[:2], self.num_heads + 1, dtype=torch.bool, device=heads.device)
        return chosen.scatter(2, heads, True)[..., : self.num_heads]

    @property
    def load(self) -> Tensor:
        """Share of each head in all selections of non-padding tokens, [num_heads]."""
        selected = self.is_chosen
        if self.real is not None:
            selected = selected & self.real[..., None]
        count = selected.flatten(0, 1).sum(0).to(self._sum_dtype)
        return count / count.sum().clamp_min(1.0)

    @property
    def balance_loss(self) -> Tensor:
        routed_load = self.load[self.always_on :]
        share = routed_load / routed_load.sum().clamp_min(torch.finfo(routed_load.dtype).tiny)
        return routed_load.shape[0] * (share * self._mean(self.probabilities)).sum()

    @property
    def z_loss(self) -> Tensor:
        return self._mean(torch.logsumexp(self._logits, -1).square())

    @property
    def entropy(self) -> Tensor:
        """Entropy of each token's probabilities in nats, [batch, tokens]."""
        logs = torch.log_softmax(self._logits, -1)
        return -(logs.exp() * logs).sum(-1)

    @property
    def budget_loss(self) -> Tensor:
        if self.budget is None:
            raise OptionError("budget_loss requires a budget, got none; pass budget= to the layer or router")
        return (self._mean(self.entropy.exp()) / self.budget - 1).relu().square()

    @property
    def _logits(self) -> Tensor:
        if self.logits is None:
            raise OptionError("probabilities and losses require the logits of a gate, got a routing without logits")
        return self.logits

    @property
    def _sum_dtype(self) -> torch.dtype:
        return torch.float64 if self.weights.dtype is torch.float64 else torch.float32

    def _mean(self, values: Tensor) -> Tensor:
        """Return the mean of [batch, tokens, ...] over non-padding tokens; 0 if there are none."""
        if self.real is None:
            return values.flatten(0, 1).sum(0) / max(values.shape[0] * values.shape[1], 1)
        real = self.real.expand(values.shape[:2])
        masked = torch.where(real.reshape(*real.shape, *(1,) * (values.ndim - 2)), values, 0.0)
        return masked.flatten(0, 1).sum(0) / real.sum().clamp_min(1)


torch.export.register_dataclass(Routing, serialized_type_name="polyhead.Routing")


class HeadRouter(nn.Module):
    """Linear gate over heads, logits = x W_g, and the selection of heads for each token.

    Args:
        embed_dim: width of a token.
        num_heads: total number of heads.
        top_k: select this many heads per token. Exactly one of top_k, top_p and threshold must be given.
        top_p: select the smallest set of heads with at least this total probability (Huang et al. 2024).
        threshold: select heads with at least this probability.
        k_min, k_max: minimum and maximum number of selected heads per token with top_p or threshold; 1 and all routed
            heads by default.
        budget: target for the mean effective number of heads per token, for `Routing.budget_loss`. It may exceed k_max:
            the loss uses the perplexity of the gate, not the number of selected heads.
        normalise: "all" weights a selected head by its probability among all heads, "chosen" among the selected ones.
        always_on: number of first heads that every token uses with weight 1, in addition to the selected ones.
        noise: standard deviation of Gaussian noise on the logits in training (Shazeer et al. 2017, "Outrageously Large
            Neural Networks", section 2.1, with one standard deviation for all heads).
        device: device of the parameters.
        dtype: dtype of the parameters.

    >>> router = HeadRouter(16, 8, top_k=2)
    >>> router(torch.randn(3, 5, 16)).heads.shape
    torch.Size([3, 5, 2])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        threshold: float | None = None,
        k_min: int = 1,
        k_max: int | None = None,
        budget: float | None = None,
        normalise: Literal["all", "chosen"] = "all",
        always_on: int = 0,
        noise: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.check_one_of("normalise", normalise, NORMALISATIONS)
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("k_min", k_min)):
            checked_integer(name, size, at_least=1)
        if isinstance(always_on, bool) or not isinstance(always_on, int) or not 0 <= always_on < num_heads:
            raise ShapeError(f"always_on must be 0 to num_heads - 1 = {num_heads - 1}, got {always_on!r}")
        routed = num_heads - always_on
        rules = {"top_k": top_k, "top_p": top_p, "threshold": threshold}
        given_rules = [name for name, value in rules.items() if value is not None]
        if len(given_rules) != 1:
            raise OptionError(
                "exactly one of top_k, top_p and threshold must be given, "
                f"got {' and '.join(given_rules) if given_rules else 'none of them'}"
            )
        if top_k is not None:
            checks.check_size("top_k", top_k)
            if top_k > routed:
                raise ShapeError(f"top_k must be at most the number of routed heads, {routed}, got {top_k}")
            if (k_min, k_max, budget) != (1, None, None):
                raise OptionError(
                    f"k_min, k_max and budget have no effect with top_k, which fixes the number of heads; got k_min "
                    f"{k_min}, k_max {k_max} and budget {budget}; use top_p or threshold"
                )
        else:
            checks.check_size("k_max", k_max)
            if not k_min <= (routed if k_max is None else k_max) <= routed:
                raise ShapeError(f"k_min <= k_max <= {routed} must hold, got k_min {k_min} and k_max {k_max}")
            checks.check_positive("budget", budget)
            if budget is not None and budget > routed:
                raise OptionError(f"budget must be at most the number of routed heads, {routed}, got {budget}")
            _check_probability(*next((name, value) for name, value in rules.items() if value is not None))
        checks.check_finite("noise", noise)
        if noise is None or noise < 0:
            raise OptionError(f"noise must be a standard deviation of at least 0, got {noise}")
        self.num_heads = num_heads
        self.always_on = always_on
        self.top_k = top_k
        self.top_p = top_p
        self.threshold = threshold
        self.k_min = k_min
        self.k_max = None if top_k is not None else routed if k_max is None else k_max
        self.budget = budget
        self.normalise = normalise
        self.noise = noise
        self.gate = nn.Linear(embed_dim, routed, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the gate Glorot-uniformly."""
        nn.init.xavier_uniform_(self.gate.weight)

    @property
    def max_heads(self) -> int:
        """Maximum number of heads per token, including those that are always on."""
        return self.always_on + (self.top_k or self.k_max or 0)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Routing:
        """Route the tokens of x [batch, tokens, embed_dim]; `real` is True for non-padding tokens.

        Args:
            x: tokens [batch, tokens, embed_dim].
            real: [batch, tokens]; all tokens are non-padding by default.

        Returns:
            Selected heads and their weights.
        """
        logits = self.gate(x)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        if self.training and self.noise:
            logits = logits + self.noise * torch.randn_like(logits)
        top_logits, chosen = torch.topk(logits, self.top_k or self.k_max or 1, dim=-1)
        counts, used, top_probabilities = None, None, None
        if self.top_k is None or self.normalise == "all":
            top_probabilities = torch.softmax(logits, -1).gather(-1, chosen)
        if self.top_k is None:
            assert top_probabilities is not None
            counts = self._count_heads(top_probabilities.detach())
            used = torch.arange(chosen.shape[-1], device=x.device) < counts[..., None]
        if top_probabilities is not None and self.normalise == "all":
            weights = top_probabilities
        else:
            weights = torch.softmax(top_logits if used is None else top_logits.masked_fill(~used, -torch.inf), -1)
        weights = (weights if used is None else torch.where(used, weights, 0.0)).to(x.dtype)
        if self.always_on:
            always_on = torch.arange(self.always_on, device=x.device).expand(*chosen.shape[:2], -1)
            chosen = torch.cat((always_on, chosen + self.always_on), -1)
            weights = torch.cat((torch.ones_like(chosen[..., : self.always_on], dtype=weights.dtype), weights), -1)
            counts = None if counts is None else counts + self.always_on
        return Routing(chosen, weights, self.num_heads, self.always_on, counts, logits, real, self.budget)

    def _count_heads(self, top_probabilities: Tensor) -> Tensor:
        """Return the number of heads that each token selects, from its probabilities in decreasing order."""
        if self.top_p is not None:
            # A head is selected if the more probable ones together have not reached top_p.
            is_selected = top_probabilities.cumsum(-1) - top_probabilities < self.top_p
        else:
            assert self.threshold is not None
            is_selected = top_probabilities >= self.threshold
        return is_selected.sum(-1).clamp(self.k_min, self.k_max)

    def extra_repr(self) -> str:
        rules = {"top_k": self.top_k, "top_p": self.top_p, "threshold": self.threshold}
        parts = [f"{self.num_heads} heads", *(f"{name}={value}" for name, value in rules.items() if value is not None)]
        if self.top_k is None:
            parts.append(f"k from {self.k_min} to {self.k_max}")
        parts += [f"always_on={self.always_on}"] if self.always_on else []
        return ", ".join([*parts, f"normalise={self.normalise!r}"])


def _check_probability(name: str, probability: float | None) -> None:
    if isinstance(probability, bool) or not isinstance(probability, int | float) or not 0 < probability <= 1:
        raise OptionError(f"{name} must be a probability, more than 0 and at most 1, got {probability!r}")
