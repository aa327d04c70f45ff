"""Losses for importance scores, by row, so that they can be summed by document.

| name | loss | weight of a row |
|---|---|---|
| "language" | next-token cross-entropy of a causal model | number of predicted tokens |
| `Masked(mask_token)` | cross-entropy of masked tokens | number of masked tokens |
| "classification" | cross-entropy of labels of rows or tokens | number of labels |
| "representation" | 1 - cosine similarity between the text embeddings of the model and the intact model | 1 |

Padding and special tokens are never predicted. A custom function `loss(model, batch)` returns [rows], or a scalar for
the batch, which then counts as one document.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead.analysis.importance.examples import ID_NAMES, Examples
from polyhead.errors import OptionError, ShapeError

NAMES = ("language", "masked", "classification", "representation")
IGNORED = -100  # ignore_index of PyTorch and transformers


@dataclass(frozen=True, slots=True, eq=False)
class RowLosses:
    """Loss of each row, summed over its predictions, and their number; the mean is the ratio of the sums."""

    totals: Tensor  # [rows], or [1] for the whole batch
    weights: Tensor  # [rows]
    by_row: bool = True


ComputeLosses = Callable[[], RowLosses]


class Loss(Protocol):
    """A loss that may precompute values of a batch with the intact model."""

    flat: str | None = None  # reason for which the gradient is 0 at the intact model; None if it is not

    @property
    def name(self) -> str: ...

    def prepare(self, model: nn.Module, batch: Any) -> ComputeLosses:
        """Return a function that computes the losses of a batch with the model's current state.

        Called while the model is intact.
        """


@dataclass(frozen=True)
class Language(Loss):
    """Next-token cross-entropy, in nats, of a causal model or the decoder of an encoder-decoder."""

    name: str = "language"

    def prepare(self, model: nn.Module, batch: Any) -> ComputeLosses:
        generates = getattr(model, "can_generate", None)
        if generates is not None and not generates():
            raise OptionError(
                f"the loss 'language' needs a causal model, got {type(model).__name__}, which cannot generate; "
                "use Masked(mask_token) for a masked language model, 'representation' for any encoder"
            )
        examples = _placed(batch, model)
        ids, text, non_padding = examples.ids, examples.text, examples.non_padding
        # Neither predictions of padding nor predictions made at padding count.
        targets = torch.where(text[:, 1:] & non_padding[:, :-1], ids[:, 1:], IGNORED)
        targets = F.pad(targets, (0, 1), value=IGNORED)  # a slice of the logits would be a copy of them
        return lambda: _cross_entropy(_logits(model, examples, self.name), targets)


@dataclass(frozen=True)
class Masked(Loss):
    """Cross-entropy, in nats, of masked tokens.

    `share` of each row's text, at least one token, is replaced by `mask_token`. The choice depends on `seed` and the
    row's own tokens only, so it is the same for every ablated head, in any batch and with any padding.
    """

    mask_token: int
    share: float = 0.15
    seed: int = 0
    name: str = "masked"

    def __post_init__(self) -> None:
        if isinstance(self.mask_token, bool) or not isinstance(self.mask_token, int) or self.mask_token < 0:
            raise OptionError(
                f"mask_token must be the id of the tokenizer's mask token, an integer of at least 0, got "
                f"{self.mask_token!r}; a model whose tokenizer has none was not trained on masked tokens"
            )
        if not 0 < self.share <= 1:
            raise OptionError(f"share must be over 0 and at most 1, got {self.share}")

    def hidden(self, examples: Examples) -> Tensor:
        """Return the mask of tokens to predict, [rows, tokens]."""
        ids, text, non_padding = (x.cpu() for x in (examples.ids, examples.text, examples.non_padding))
        chosen = torch.zeros_like(text)
        for row in range(ids.shape[0]):
            places = text[row].nonzero()[:, 0]
            content = ids[row][non_padding[row]].to(torch.int64).numpy().tobytes()
            # PyTorch's CPU generator uses 32 bits of a seed, so both must be hashed into them.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} ".encode() + content))
            count = min(len(places), max(1, round(self.share * len(places))))
            chosen[row, places[torch.randperm(len(places), generator=generator)[:count]]] = True
        return chosen.to(examples.ids.device)

    def prepare(self, model: nn.Module, batch: Any) -> ComputeLosses:
        examples = _placed(batch, model)
        hidden, ids = self.hidden(examples), examples.ids
        name = next(name for name in ID_NAMES if examples.inputs.get(name) is ids)
        inputs = {**examples.inputs, name: torch.where(hidden, self.mask_token, ids)}
        requested, targets = replace(examples, inputs=inputs), torch.where(hidden, ids, IGNORED)
        return lambda: _cross_entropy(_logits(model, requested, self.name), targets)


@dataclass(frozen=True)
class Classification(Loss):
    """Cross-entropy, in nats, of labels.

    Integer labels are classes, one for each row of logits, -100 to ignore. Floating-point labels of the shape of the
    logits are multi-label targets; the loss is then the binary cross-entropy, averaged over classes.
    """

    name: str = "classification"

    def prepare(self, model: nn.Module, batch: Any) -> ComputeLosses:
        examples = _placed(batch, model)
        labels = examples.labels
        if labels is None:
            raise OptionError(
                "the loss 'classification' needs labels, got a batch without; pass Examples(..., labels=)"
            )

        def losses() -> RowLosses:
            logits = _logits(model, examples, self.name)
            if labels.is_floating_point() and labels.shape == logits.shape:
                each = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
                totals = each.flatten(1).mean(1)
                return RowLosses(totals, torch.ones_like(totals))
            if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
                raise ShapeError(
                    f"labels must be classes of shape {list(logits.shape[:-1])} or floating-point zeros and ones of "
                    f"shape {list(logits.shape)}, got {labels.dtype} of shape {list(labels.shape)}"
                )
            if labels.ndim == 1:
                return _cross_entropy(logits[:, None], labels[:, None])
            return _cross_entropy(logits, labels)

        return losses


@dataclass(frozen=True)
class Representation(Loss):
    """1 - cosine similarity between the mean of a text's last hidden states and that of the intact model.

    For encoders, such as sentence encoders; the task head of a classifier is not run. The mean is over all tokens but
    padding, including special tokens, as in sentence encoders. The loss has its minimum, 0, at the intact model: it
    measures how much a head changes the embedding, not whether for better or worse, and its gradient there is 0, so
    that there are no gradient scores.
    """

    name: str = "representation"
    flat = (
        "1 - cosine to the intact model has its minimum at the intact model, so its gradient is 0 for every head; use "
        "ablate, or a loss with labels"
    )

    def prepare(self, model: nn.Module, batch: Any) -> ComputeLosses:
        examples = _placed(batch, model)

        def directions() -> Tensor:
            pooled = _pooled(model, examples)
            return pooled / pooled.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(pooled.dtype).tiny)

        with torch.no_grad():
            intact = directions()

        def losses() -> RowLosses:
            # |a - b|² / 2 of unit vectors equals 1 - cosine without its cancellation error.
            totals = (directions() - intact).square().sum(-1) / 2
            return RowLosses(totals, torch.ones_like(totals))

        return losses


@dataclass(frozen=True, eq=False)
class CustomLoss(Loss):
    """A custom loss function."""

    function: Callable[[nn.Module, Any], Tensor | RowLosses]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def prepare(self, model: nn.Module, batch: Any) -> ComputeLosses:
        def losses() -> RowLosses:
            loss = self.function(model, batch)
            if isinstance(loss, RowLosses):
                return loss
            if not isinstance(loss, Tensor) or loss.ndim > 1 or not loss.is_floating_point():
                got = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
                raise ShapeError(
                    f"a loss must be a floating-point tensor [rows] or a scalar, got {got} from {self.name!r}"
                )
            totals = loss.reshape(-1)
            return RowLosses(totals, torch.ones_like(totals).detach(), by_row=loss.ndim == 1)

        return losses


def as_loss(loss: str | Loss | Callable[[nn.Module, Any], Tensor | RowLosses]) -> Loss:
    """Return a loss from its name, a value of this module, or a function."""
    if loss == "masked":
        raise OptionError(
            "the loss 'masked' needs a tokenizer with a mask token, got none; "
            "pass Masked(mask_token=tokenizer.mask_token_id)"
        )
    for kind in (Language, Classification, Representation):
        if loss == kind.name:
            return kind()
    if callable(getattr(loss, "prepare", None)):
        return loss  # type: ignore[return-value]
    if callable(loss):
        return CustomLoss(loss)
    raise OptionError(f"loss must be one of {', '.join(NAMES)} or a function loss(model, batch), got {loss!r}")


def _placed(batch: Any, model: nn.Module) -> Examples:
    first = next(model.parameters(), None)
    examples = Examples.of(batch)
    return examples if first is None else examples.to(first.device)


def _logits(model: nn.Module, examples: Examples, name: str) -> Tensor:
    output = model(**examples.inputs)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise OptionError(
            f"the loss {name!r} needs logits, got {type(output).__name__} from {type(model).__name__}; load the model "
            "with its task head (AutoModelForCausalLM, AutoModelForMaskedLM, ...), or use 'representation'"
        )
    return _wide(logits)


def _pooled(model: nn.Module, examples: Examples) -> Tensor:
    body: nn.Module = getattr(model, "base_model", model)  # without its task head
    output = body(**examples.inputs)
    states = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
    if not isinstance(states, Tensor) or states.ndim != 3:
        raise OptionError(
            "the loss 'representation' needs the last hidden states [rows, tokens, width], "
            f"got {type(output).__name__} from {type(body).__name__}; use the model without its task head"
        )
    states = _wide(states)
    if not any(name in examples.inputs for name in ID_NAMES):
        return states.mean(1)
    non_padding = examples.non_padding[..., None]
    return torch.where(non_padding, states, 0.0).sum(1) / non_padding.sum(1).clamp_min(1)


def _cross_entropy(logits: Tensor, targets: Tensor) -> RowLosses:
    """Return the cross-entropy of logits [rows, tokens, classes], summed over each row's tokens."""
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        raise ShapeError(
            f"logits must be [rows, tokens, classes] for {list(targets.shape)} targets, got {list(logits.shape)}"
        )
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return RowLosses(each.view(targets.shape).sum(1), (targets != IGNORED).sum(1))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()
