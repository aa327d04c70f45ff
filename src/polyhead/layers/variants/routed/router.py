"""The gate of routed heads: which heads each token takes, with what weight, and what keeps that balanced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from polyhead.errors import DeviceError, DtypeError, OptionError, ShapeError
from polyhead.layers import checks
from polyhead.ops.common.tracing import is_traced, is_transformed

NORMALISATIONS = ("all", "chosen")


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which heads each token has taken. Every token has `slots` places for heads; `counts` says how many are used.

    The losses are means over real tokens, to be added to a model's own with a small factor:

        balance_loss   h sum_i f_i P_i             Fedus et al. 2021, "Switch Transformers", section 2.2
        z_loss         mean logsumexp(logits)^2    Zoph et al. 2022, "ST-MoE", section 3.3
        budget_loss    relu(mean exp(H) / budget - 1)^2

    over the h heads that are routed: f_i is head i's share of all choices, P_i its mean probability, and H the entropy
    of a token's probabilities, so that exp(H) is how many heads the gate hesitates between. Balanced heads have a
    balance_loss of 1. Choices have no gradient; probabilities do. Lowering H where heads are chosen by a share of the
    probability is from Huang et al. 2024, "Harder Tasks Need More Experts"; a budget for it is ours.
    """

    heads: Tensor  # int64 [batch, tokens, slots]: those that are always on, then the others from the likeliest on
    weights: Tensor  # [batch, tokens, slots]: what each head's output is multiplied by; 0 in slots that are not used
    num_heads: int
    always_on: int = 0  # heads 0 .. always_on - 1, which no gate chooses
    counts: Tensor | None = None  # int64 [batch, tokens]: slots that are used, the first ones; None: all
    logits: Tensor | None = None  # [batch, tokens, num_heads - always_on], noise included
    real: Tensor | None = None  # bool [batch or 1, tokens]: False for padding, which nothing counts; None: all real
    budget: float | None = None  # chosen heads that a token should need on average

    @classmethod
    def every_head(cls, batch: int, tokens: int, num_heads: int, like: Tensor) -> Self:
        """Every head for every token, each with weight 1: what the layer without a gate would do."""
        heads = torch.arange(num_heads, device=like.device).expand(batch, tokens, num_heads)
        return cls(heads, like.new_ones(()).expand(heads.shape), num_heads)

    def check(self, batch: int, tokens: int, num_heads: int, device: torch.device) -> None:
        """Raise an error if it was made for other tokens or other heads, as far as sizes and dtypes tell."""
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
            raise DtypeError(f"heads of a routing are indices, torch.int64, got {self.heads.dtype}")
        if not self.weights.is_floating_point():
            raise DtypeError(f"weights of a routing must be floating point, got {self.weights.dtype}")
        shape = (batch, tokens, *self.heads.shape[-1:])
        if tuple(self.heads.shape) != shape or tuple(self.weights.shape) != shape or self.num_heads != num_heads:
            raise ShapeError(
                f"a routing must be of {batch} x {tokens} tokens over {num_heads} heads, got heads "
                f"{list(self.heads.shape)} and weights {list(self.weights.shape)} over {self.num_heads} heads"
            )
        slots = self.heads.shape[2]
        if not 1 <= slots <= num_heads:
            raise ShapeError(f"a token has slots for 1 to {num_heads} heads, got a routing of {slots} slots")
        if self.counts is None:
            return
        if tuple(self.counts.shape) != (batch, tokens):
            raise ShapeError(
                f"counts of a routing must be [{batch}, {tokens}], one for each token, got {list(self.counts.shape)}"
            )
        if self.counts.dtype not in (torch.int32, torch.int64):
            raise DtypeError(f"counts of a routing must be int32 or int64, got {self.counts.dtype}")

    def check_values(self) -> None:
        """Raise an OptionError for heads or counts that cannot be; asked where nobody need wait for a device."""
        heads, counts = self.heads, self.counts
        if heads.device.type != "cpu" or is_transformed() or is_traced(heads) or not heads.numel():
            return
        least, most = int(heads.min()), int(heads.max())
        if least < 0 or most >= self.num_heads:
            raise OptionError(
                f"heads of a routing must be 0 to {self.num_heads - 1}, also in slots that are not used, "
                f"got {least} to {most}"
            )
        slots, used = heads.shape[2], self.used
        if counts is not None and used is not None:
            least, most = int(counts.min()), int(counts.max())
            if least < 0 or most > slots:
                raise OptionError(f"counts of a routing must be 0 to its {slots} slots, got {least} to {most}")
            # Slots that are not used become heads of their own, so that they equal no other.
            heads = torch.where(used, heads, self.num_heads + torch.arange(slots, device=heads.device))
        ordered = heads.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]).nonzero()
        if len(twice):
            sequence, token, slot = twice[0].tolist()
            raise OptionError(
                f"a token takes a head once, got head {int(ordered[sequence, token, slot])} twice for token {token} "
                f"of sequence {sequence}; give it one slot with the sum of the weights"
            )

    @property
    def used(self) -> Tensor | None:
        """Which slots are used, [batch, tokens, slots]; None where all are."""
        if self.counts is None:
            return None
        return torch.arange(self.heads.shape[2], device=self.heads.device) < self.counts[..., None]

    @property
    def probabilities(self) -> Tensor:
        """The softmax of the gate over the heads that it chooses among, [batch, tokens, num_heads - always_on]."""
        return torch.softmax(self._logits, -1)

    @property
    def is_chosen(self) -> Tensor:
        """[batch, tokens, num_heads], True where a token has taken a head."""
        # One place more than there are heads, for slots that are not used: those may name a head that is.
        used = self.used
        heads = self.heads if used is None else torch.where(used, self.heads, self.num_heads)
        chosen = torch.zeros(*heads.shape[:2], self.num_heads + 1, dtype=torch.bool, device=heads.device)
        return chosen.scatter(2, heads, True)[..., : self.num_heads]

    @property
    def load(self) -> Tensor:
        """Each head's share of all choices of real tokens, [num_heads]."""
        taken = self.is_chosen
        if self.real is not None:
            taken = taken & self.real[..., None]
        count = taken.flatten(0, 1).sum(0).to(self._wide)
        return count / count.sum().clamp_min(1.0)

    @property
    def balance_loss(self) -> Tensor:
        taken = self.load[self.always_on :]
        share = taken / taken.sum().clamp_min(torch.finfo(taken.dtype).tiny)
        return taken.shape[0] * (share * self._mean(self.probabilities)).sum()

    @property
    def z_loss(self) -> Tensor:
        return self._mean(torch.logsumexp(self._logits, -1).square())

    @property
    def entropy(self) -> Tensor:
        """Of each token's probabilities, in nats: [batch, tokens]."""
        logs = torch.log_softmax(self._logits, -1)
        return -(logs.exp() * logs).sum(-1)

    @property
    def budget_loss(self) -> Tensor:
        if self.budget is None:
            raise OptionError("a budget loss needs the heads that a token should need on average; give budget=")
        return (self._mean(self.entropy.exp()) / self.budget - 1).relu().square()

    @property
    def _logits(self) -> Tensor:
        if self.logits is None:
            raise OptionError("this routing was made without a gate, so it has no probabilities and no losses")
        return self.logits

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.weights.dtype is torch.float64 else torch.float32

    def _mean(self, values: Tensor) -> Tensor:
        """Over real tokens, of [batch, tokens, ...]; 0 where there are none."""
        if self.real is None:
            return values.flatten(0, 1).sum(0) / max(values.shape[0] * values.shape[1], 1)
        real = self.real.expand(values.shape[:2])
        kept = torch.where(real.reshape(*real.shape, *(1,) * (values.ndim - 2)), values, 0.0)
        return kept.flatten(0, 1).sum(0) / real.sum().clamp_min(1)


torch.export.register_dataclass(Routing, serialized_type_name="polyhead.Routing")


class HeadRouter(nn.Module):
    """A linear gate over heads: logits = x W_g, and the heads that each token takes by them.

    Args:
        embed_dim: width of a token.
        num_heads: heads in all.
        top_k: how many heads each token takes; or
        top_p: as few as hold this much of the probability (Huang et al. 2024); or
        threshold: those of at least this probability. The last two give each token a number of its own.
        k_min, k_max: the least and the most heads of a token with top_p or threshold; 1 and all by default.
        budget: heads that a token should need on average, for `Routing.budget_loss`. It may be above k_max: the loss
            counts the heads that the gate hesitates between, of which k_max are taken.
        normalise: "all" weighs a chosen head by its probability among all heads, "chosen" by that among those chosen.
        always_on: how many first heads every token takes with weight 1, besides those that the gate chooses.
        noise: standard deviation of what is added to the logits in training (Shazeer et al. 2017, "Outrageously Large
            Neural Networks", section 2.1, with one spread for all).

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
            if size is None:
                raise ShapeError(f"{name} must be an integer, got None")
            checks.check_size(name, size)
        if isinstance(always_on, bool) or not isinstance(always_on, int) or not 0 <= always_on < num_heads:
            raise ShapeError(f"always_on must leave a head to choose, 0 to {num_heads - 1}, got {always_on!r}")
        routed = num_heads - always_on
        rules = {"top_k": top_k, "top_p": top_p, "threshold": threshold}
        given = [name for name, value in rules.items() if value is not None]
        if len(given) != 1:
            raise OptionError(
                "heads are chosen by one of top_k, top_p and threshold, "
                f"got {' and '.join(given) if given else 'none of them'}"
            )
        if top_k is not None:
            checks.check_size("top_k", top_k)
            if top_k > routed:
                raise ShapeError(f"top_k must be at most the {routed} heads there are to choose from, got {top_k}")
            if (k_min, k_max, budget) != (1, None, None):
                raise OptionError(
                    f"top_k gives every token as many heads, so k_min, k_max and budget have no meaning; got k_min "
                    f"{k_min}, k_max {k_max} and budget {budget}; choose by top_p or threshold"
                )
        else:
            checks.check_size("k_max", k_max)
            if not k_min <= (routed if k_max is None else k_max) <= routed:
                raise ShapeError(f"k_min <= k_max <= {routed} must hold, got k_min {k_min} and k_max {k_max}")
            checks.check_positive("budget", budget)
            if budget is not None and budget > routed:
                raise OptionError(
                    f"budget must be at most the {routed} heads there are to choose from, "
                    f"which no gate ever needs more than, got {budget}"
                )
            _check_share(*next((name, value) for name, value in rules.items() if value is not None))
        checks.check_finite("noise", noise)
        if noise is None or noise < 0:
            raise OptionError(f"noise is a standard deviation, at least 0, got {noise}")
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
        """A Glorot-uniform gate."""
        nn.init.xavier_uniform_(self.gate.weight)

    @property
    def most_heads(self) -> int:
        """Heads that a token takes at most, those included that are always on."""
        return self.always_on + (self.top_k or self.k_max or 0)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Routing:
        """The heads of every token of x [batch, tokens, embed_dim]; `real` says which are no padding."""
        logits = self.gate(x)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        if self.training and self.noise:
            logits = logits + self.noise * torch.randn_like(logits)
        found, chosen = torch.topk(logits, self.top_k or self.k_max or 1, dim=-1)
        counts, used, likely = None, None, None
        if self.top_k is None or self.normalise == "all":
            likely = torch.softmax(logits, -1).gather(-1, chosen)
        if self.top_k is None:
            assert likely is not None
            counts = self._counted(likely.detach())
            used = torch.arange(chosen.shape[-1], device=x.device) < counts[..., None]
        if likely is not None and self.normalise == "all":
            weights = likely
        else:
            weights = torch.softmax(found if used is None else found.masked_fill(~used, -torch.inf), -1)
        weights = (weights if used is None else torch.where(used, weights, 0.0)).to(x.dtype)
        if self.always_on:
            chosen = torch.cat((self._first_heads(chosen), chosen + self.always_on), -1)
            weights = torch.cat((torch.ones_like(chosen[..., : self.always_on], dtype=weights.dtype), weights), -1)
            counts = None if counts is None else counts + self.always_on
        return Routing(chosen, weights, self.num_heads, self.always_on, counts, logits, real, self.budget)

    def _counted(self, likely: Tensor) -> Tensor:
        """How many heads each token takes, by their probabilities from the likeliest on."""
        if self.top_p is not None:
            enough = likely.cumsum(-1) - likely < self.top_p  # what the likelier ones hold is not yet enough
        else:
            assert self.threshold is not None
            enough = likely >= self.threshold
        return enough.sum(-1).clamp(self.k_min, self.k_max)

    def _first_heads(self, chosen: Tensor) -> Tensor:
        return torch.arange(self.always_on, device=chosen.device).expand(*chosen.shape[:2], self.always_on)

    def extra_repr(self) -> str:
        rules = {"top_k": self.top_k, "top_p": self.top_p, "threshold": self.threshold}
        parts = [f"{self.num_heads} heads", *(f"{name}={value}" for name, value in rules.items() if value is not None)]
        if self.top_k is None:
            parts.append(f"k from {self.k_min} to {self.k_max}")
        parts += [f"always_on={self.always_on}"] if self.always_on else []
        return ", ".join([*parts, f"normalise={self.normalise!r}"])


def _check_share(name: str, share: float | None) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise OptionError(f"{name} is a probability, more than 0 and at most 1, got {share!r}")
