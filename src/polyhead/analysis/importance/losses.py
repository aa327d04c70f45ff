"""What a model is worth on a batch: losses by name, row by row, so that they can be told apart by document.

| name | the loss | a row weighs |
|---|---|---|
| "language" | of the next token, by a causal model | as many tokens as are predicted |
| `Masked(mask_token)` | of tokens that were hidden | as many tokens as were hidden |
| "classification" | of given labels, of rows or of tokens | as many labels as it has |
| "representation" | 1 - cosine between what the model says of a text and what the intact model said | 1 |

Padding and special tokens are never predicted. A function `loss(model, batch)` of one's own gives [rows], or one
number for the whole batch, which then counts as one document.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.analysis.importance.examples import ID_NAMES, Examples
from polyhead.errors import OptionError, ShapeError

NAMES = ("language", "masked", "classification", "representation")
IGNORED = -100  # the label of what is not to be predicted, as PyTorch and transformers have it


@dataclass(frozen=True, slots=True, eq=False)
class RowLosses:
    """The loss of each row, summed over what it predicts, and how much that is; the mean is the ratio of their sums."""

    totals: Tensor  # [rows], or [1] for the whole batch
    weights: Tensor  # [rows]
    by_row: bool = True


Question = Callable[[], RowLosses]


class Loss(Protocol):
    """A loss, and what it needs to know of a batch before any head is taken out."""

    @property
    def name(self) -> str: ...

    @property
    def flat(self) -> str | None:
        """Why its gradient says nothing where the model is intact; None where it does say something."""

    def ask(self, model: nn.Module, batch: Any) -> Question:
        """The losses of one batch as a function of the model's present state. Called while the model is intact."""

    def shape(self, batch: Any) -> Hashable | None:
        """Equal for batches that run through the model in the same shapes; None where that is not known."""


class _Named:
    """What the losses that are known by name share: they know what a batch is."""

    flat: str | None = None

    def shape(self, batch: Any) -> Hashable | None:
        inputs = Examples.of(batch).inputs
        return tuple((name, tuple(x.shape) if isinstance(x, Tensor) else None) for name, x in sorted(inputs.items()))


@dataclass(frozen=True)
class Language(_Named):
    """Cross-entropy of the next token, in nats, of a causal model or of the decoder of an encoder-decoder."""

    name: str = "language"

    def ask(self, model: nn.Module, batch: Any) -> Question:
        generates = getattr(model, "can_generate", None)
        if generates is not None and not generates():
            raise OptionError(
                f"the next token is predicted by a causal model, got {type(model).__name__}, which generates nothing; "
                "use a masked language model with Masked(mask_token), any encoder with 'representation'"
            )
        examples = _placed(batch, model)
        ids, text, real = examples.ids, examples.text, examples.real
        # What padding predicts counts as little as what predicts padding.
        targets = torch.where(text[:, 1:] & real[:, :-1], ids[:, 1:], IGNORED)
        return lambda: _cross_entropy(_logits(model, examples, self.name)[:, :-1], targets)


@dataclass(frozen=True)
class Masked(_Named):
    """Cross-entropy, in nats, of tokens that a masked language model has to guess.

    `share` of each row's text, at least one token, is replaced by `mask_token`. Which ones is drawn from `seed` and the
    row's own tokens: the same with every head out, in any batch and with any padding.
    """

    mask_token: int
    share: float = 0.15
    seed: int = 0
    name: str = "masked"

    def __post_init__(self) -> None:
        if isinstance(self.mask_token, bool) or not isinstance(self.mask_token, int) or self.mask_token < 0:
            raise OptionError(
                f"mask_token is the id of the tokenizer's mask token, a number from 0 on, got {self.mask_token!r}; "
                "a tokenizer without one belongs to a model that was not trained on masked tokens"
            )
        if not 0 < self.share <= 1:
            raise OptionError(f"the share of hidden tokens must be over 0 and at most 1, got {self.share}")

    def hidden(self, examples: Examples) -> Tensor:
        """Which tokens are to be guessed, [rows, tokens]."""
        ids, text, real = (x.cpu() for x in (examples.ids, examples.text, examples.real))
        chosen = torch.zeros_like(text)
        for row in range(ids.shape[0]):
            places = text[row].nonzero()[:, 0]
            content = ids[row][real[row]].to(torch.int64).numpy().tobytes()
            # PyTorch's generator on the CPU reads 32 bits of a seed, so both have to be in them.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} ".encode() + content))
            count = min(len(places), max(1, round(self.share * len(places))))
            chosen[row, places[torch.randperm(len(places), generator=generator)[:count]]] = True
        return chosen.to(examples.ids.device)

    def ask(self, model: nn.Module, batch: Any) -> Question:
        examples = _placed(batch, model)
        hidden, ids = self.hidden(examples), examples.ids
        name = next(name for name in ID_NAMES if examples.inputs.get(name) is ids)
        inputs = {**examples.inputs, name: torch.where(hidden, self.mask_token, ids)}
        requested, targets = replace(examples, inputs=inputs), torch.where(hidden, ids, IGNORED)
        return lambda: _cross_entropy(_logits(model, requested, self.name), targets)


@dataclass(frozen=True)
class Classification(_Named):
    """Cross-entropy, in nats, of given labels.

    Whole numbers are classes, one for each row of logits, -100 where there is none. Floating-point labels of the shape
    of the logits say of each class whether it applies; the loss is then the mean over the classes.
    """

    name: str = "classification"

    def ask(self, model: nn.Module, batch: Any) -> Question:
        examples = _placed(batch, model)
        labels = examples.labels
        if labels is None:
            raise OptionError("the loss 'classification' needs labels, got a batch without; Examples(..., labels=)")

        def losses() -> RowLosses:
            logits = _logits(model, examples, self.name)
            if labels.is_floating_point() and labels.shape == logits.shape:
                each = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
                totals = each.flatten(1).mean(1)
                return RowLosses(totals, torch.ones_like(totals))
            if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
                raise ShapeError(
                    f"labels are classes of shape {list(logits.shape[:-1])} or zeros and ones, as floating-point "
                    f"numbers, of shape {list(logits.shape)}, got {labels.dtype} of shape {list(labels.shape)}"
                )
            if labels.ndim == 1:
                return _cross_entropy(logits[:, None], labels[:, None])
            return _cross_entropy(logits, labels)

        return losses


@dataclass(frozen=True)
class Representation(_Named):
    """1 - cosine between the mean of a text's last hidden states and that of the intact model.

    For encoders without a head, such as those that embed sentences. The mean is over all tokens but padding, special
    ones included, as sentence encoders take it. It is a loss relative to the intact model and has its least value, 0,
    there: it tells how much a head changes what is said of a text, not whether for better or worse, and it has no
    slope to start from, so there are no gradient scores of it.
    """

    name: str = "representation"
    flat = (
        "1 - cosine to the intact model is 0 and has no slope where the model is intact, so its gradient is 0 for "
        "every head; use ablate, or a loss with labels"
    )

    def ask(self, model: nn.Module, batch: Any) -> Question:
        examples = _placed(batch, model)

        def directions() -> Tensor:
            pooled = _pooled(model, examples)
            return pooled / pooled.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(pooled.dtype).tiny)

        with torch.no_grad():
            intact = directions()

        def losses() -> RowLosses:
            # Of unit vectors, and without the rounding of 1 - cosine where both are almost the same.
            totals = (directions() - intact).square().sum(-1) / 2
            return RowLosses(totals, torch.ones_like(totals))

        return losses


@dataclass(frozen=True, eq=False)
class Own:
    """A function of the user's."""

    function: Callable[[nn.Module, Any], Tensor | RowLosses]
    flat = None

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def shape(self, batch: Any) -> Hashable | None:
        return None

    def ask(self, model: nn.Module, batch: Any) -> Question:
        def losses() -> RowLosses:
            found = self.function(model, batch)
            if isinstance(found, RowLosses):
                return found
            if not isinstance(found, Tensor) or found.ndim > 1 or not found.is_floating_point():
                got = f"{found.dtype} of shape {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
                raise ShapeError(
                    f"a loss is a floating-point tensor [rows], one number for each row, or a scalar, got {got} "
                    f"from {self.name!r}"
                )
            totals = found.reshape(-1)
            return RowLosses(totals, torch.ones_like(totals).detach(), by_row=found.ndim == 1)

        return losses


def as_loss(loss: str | Loss | Callable[[nn.Module, Any], Tensor | RowLosses], tokenizer: Any = None) -> Loss:
    """A loss by its name, by a value of this module, or by a function; `tokenizer` knows the mask token of "masked"."""
    match loss:
        case "language":
            return Language()
        case "classification":
            return Classification()
        case "representation":
            return Representation()
        case "masked":
            token = getattr(tokenizer, "mask_token_id", None)
            if token is None:
                raise OptionError(
                    "the loss 'masked' has to know the token that hides another, got no tokenizer that has one; "
                    "say Masked(mask_token=tokenizer.mask_token_id)"
                )
            return Masked(int(token))
    if isinstance(loss, str):
        raise OptionError(f"a loss is one of {', '.join(NAMES)} or a function loss(model, batch), got {loss!r}")
    if callable(getattr(loss, "ask", None)):
        return loss  # type: ignore[return-value]
    if callable(loss):
        return Own(loss)
    raise OptionError(f"a loss is one of {', '.join(NAMES)} or a function loss(model, batch), got {loss!r}")


def _placed(batch: Any, model: nn.Module) -> Examples:
    first = next(model.parameters(), None)
    examples = Examples.of(batch)
    return examples if first is None else examples.to(first.device)


def _logits(model: nn.Module, examples: Examples, name: str) -> Tensor:
    output = model(**examples.inputs)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise OptionError(
            f"the loss {name!r} reads logits, got {type(output).__name__} from {type(model).__name__}; load the model "
            "with its head (AutoModelForCausalLM, AutoModelForMaskedLM, ...), or use 'representation'"
        )
    return _wide(logits)


def _pooled(model: nn.Module, examples: Examples) -> Tensor:
    output = model(**examples.inputs)
    states = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
    if not isinstance(states, Tensor) or states.ndim != 3:
        raise OptionError(
            "the loss 'representation' reads the last hidden states [rows, tokens, width], "
            f"got {type(output).__name__} from {type(model).__name__}; use the model without its head"
        )
    states = _wide(states)
    if not any(name in examples.inputs for name in ID_NAMES):
        return states.mean(1)
    real = examples.real[..., None]
    return torch.where(real, states, 0.0).sum(1) / real.sum(1).clamp_min(1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> RowLosses:
    """Of logits [rows, tokens, classes], summed over each row's tokens."""
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        raise ShapeError(
            f"logits must be [rows, tokens, classes] for {list(targets.shape)} targets, got {list(logits.shape)}"
        )
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return RowLosses(each.view(targets.shape).sum(1), (targets != IGNORED).sum(1))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()
