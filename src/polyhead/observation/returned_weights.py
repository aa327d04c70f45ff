"""`via_weights`: models that compute attention by themselves, read from the weights that they return.

Most models of transformers can be asked for `output_attentions`. They then hold all weights of a call at once: that is
slow, and the memory grows with the square of the context, but it reaches models that have no attention interface.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.masks import Mask
from polyhead.observation import transformers_models
from polyhead.observation.statistics import Wanted
from polyhead.observation.watcher import Place, Watcher
from polyhead.ops.attended import Attended
from polyhead.ops.attention import Statistics, attention

COST = "read from the model's own weights: slow, memory grows with the square of the context"
LISTS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
LOGITS = ("max_logit", "max_abs_logit")  # which weights do not tell
SITE = re.compile(r"(?:.+\.)?(?:\w+_)?attentions\.\d+")
# The logit of a key that a head does not look at at all: its weight is exactly 0, its share of an entropy as well.
_NEVER = -1e4
_WIDTH = 8  # of queries and keys that are nothing but zeros
_ROUNDING = 1e-2  # how far the sum of a row may be from 1; bfloat16 moves it by 0.004 at most


def returning_models(model: nn.Module) -> dict[nn.Module, str]:
    """The models of transformers inside, each with what goes before the names of its lists.

    What a model returns goes by the same names whether the whole of it is called, its body or its encoder alone.
    """
    if "transformers" not in sys.modules:
        return {}
    from transformers import PreTrainedModel

    found: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        around = [outer for outer in found if any(inner is module for inner in outer.modules())]
        own = f"{path}." if path else ""
        found[module] = _within(around[0], found[around[0]], module, own) if len(around) else own
    return found


def _within(outer: Any, label: str, module: nn.Module, own: str) -> str:
    if module is outer.base_model:
        return label
    if outer.config.is_encoder_decoder and module is outer.get_encoder():
        return f"{label}encoder_"
    return own


def why_not(model: nn.Module) -> str:
    return (
        "via_weights reads the weights that a model of transformers returns, "
        f"got {type(model).__name__}, which holds none of its models"
    )


def without_logits(wanted: Wanted, requested: object) -> Wanted:
    """What can be told from weights; what was asked for by name and cannot be is refused."""
    unknown = [name for name in wanted.names if name in LOGITS]
    if len(unknown) and requested is not None and requested is not True:
        raise OptionError(f"weights do not tell the logits they came from, got a request for {', '.join(unknown)}")
    return replace(wanted, names=tuple(name for name in wanted.names if name not in LOGITS))


@contextmanager
def read(model: nn.Module, models: Mapping[nn.Module, str], watcher: Watcher) -> Iterator[None]:
    """Ask for the weights with every call, show them to `watcher`, and leave the model as it was."""
    reader = _Reader(watcher, models)
    with ExitStack() as undo:
        undo.enter_context(transformers_models.watching(model, watcher))  # one session at a time
        undo.enter_context(transformers_models.switched(model, tuple(model.modules()), "eager"))
        undo.enter_context(_recorders_removed(model))
        for module in models:
            undo.callback(module.register_forward_pre_hook(reader.before, with_kwargs=True).remove)
            after = module.register_forward_hook(reader.after, with_kwargs=True, prepend=True, always_call=True)
            undo.callback(after.remove)
        yield


@contextmanager
def _recorders_removed(model: nn.Module) -> Iterator[None]:
    """transformers hooks itself into a model the first time that more than the result is asked for, and stays there."""
    mark = "_output_capturing_hooks_installed"
    before = [(module, set(module._forward_hooks), mark in vars(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, hooks, marked in before:
            for number in [number for number in module._forward_hooks if number not in hooks]:
                if module._forward_hooks[number].__module__ == "transformers.utils.output_capturing":
                    del module._forward_hooks[number]
            if not marked:
                vars(module).pop(mark, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A call that was asked for its weights."""

    module: nn.Module
    given: dict[str, Any]
    by_caller: bool  # whether its caller wants them too


class _Reader:
    """The hooks. Of models inside each other, the one that was called answers for all."""

    def __init__(self, watcher: Watcher, models: Mapping[nn.Module, str]) -> None:
        self.watcher = watcher
        self.models = models
        self.places: dict[str, Place] = {}
        self.requested: _Request | None = None

    def before(
        self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.requested is not None and self.requested.module is not module:
            return None
        self.requested = None  # what a call that was interrupted has left
        parameters = inspect.signature(module.forward).parameters
        names = tuple(parameters)
        given = {**dict(zip(names, positional, strict=False)), **keywords}
        _check_call(module, parameters, given)
        config: Any = module.config
        callers = given.get("output_attentions")
        self.requested = _Request(module, given, bool(config.output_attentions if callers is None else callers))
        if "output_attentions" in names[: len(positional)]:
            at = names.index("output_attentions")
            return (*positional[:at], True, *positional[at + 1 :]), keywords
        return positional, {**keywords, "output_attentions": True}

    def after(self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        requested = self.requested
        if requested is None or requested.module is not module:
            return None
        self.requested = None
        if output is None:
            return None  # it has raised
        self._read(requested, output)
        if requested.by_caller:
            return None
        return type(output)(**{name: x for name, x in output.items() if not name.endswith("attentions")})

    def _read(self, requested: _Request, output: Any) -> None:
        name, given = type(requested.module).__name__, requested.given
        there = output if isinstance(output, dict) else {}
        lists = {kind: there[kind] for kind in LISTS if there.get(kind) is not None}
        if not len(lists):
            raise OptionError(
                f"via_weights reads {', '.join(LISTS)} from what a model returns, got {type(output).__name__} of "
                f"{name} with {', '.join(there) or 'no names'}; observe one of the models inside it"
            )
        if any(kind.endswith("global_attentions") for kind in output):
            raise OptionError(
                f"via_weights reads one weight for every query and key, got {name}, whose weights are a band beside "
                "those of its global tokens"
            )
        own, target = given.get("attention_mask"), given.get("decoder_attention_mask")
        of_two = getattr(requested.module.config, "is_encoder_decoder", False) and "decoder_attentions" in lists
        masks = {
            "attentions": (own, own),
            "encoder_attentions": (own, own),
            "decoder_attentions": (target, target),
            "cross_attentions": (target, own) if of_two else (own, given.get("encoder_attention_mask")),
        }
        cache = given.get("past_key_values")
        cache = output.get("past_key_values") if cache is None else cache
        for kind, layers in lists.items():
            if kind == "encoder_attentions" and given.get("encoder_outputs") is not None:
                continue  # they are of another call, in which they were counted
            cross = kind == "cross_attentions"
            held = None if kind == "encoder_attentions" else cache
            for index, weights in enumerate(layers):
                if weights is not None:  # not every layer attends
                    place = self._place(f"{self.models[requested.module]}{kind}.{index}")
                    self._tell(place, weights, *masks[kind], held, cross=cross)

    def _place(self, name: str) -> Place:
        if name not in self.places:
            self.places[name] = Place(name)
        return self.places[name]

    def _tell(self, place: Place, weights: Any, rows: Any, columns: Any, cache: Any, *, cross: bool) -> None:
        """Show the weights of one layer; `rows` and `columns` say which tokens among its queries and keys are real."""
        if not isinstance(weights, Tensor) or weights.ndim != 4:
            got = f"shape {list(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
            raise OptionError(f"weights are [batch, heads, queries, keys], got {got} at {place.name!r}")
        batch, heads, queries, keys = weights.shape
        seen = getattr(cache, "get_seq_length", None)
        tokens = queries if seen is None else int(seen())
        if tokens < queries or (seen is None and not cross and keys != queries):
            held = "without a cache" if seen is None else f"with a cache of {tokens} tokens"
            raise OptionError(
                "via_weights reads one weight for every query and key of a sequence, "
                f"got {queries} queries and {keys} keys at {place.name!r} {held}"
            )
        if not cross:
            weights = weights[..., :tokens]  # the slots of a preallocated cache that are written
            keys = weights.shape[3]
        # A windowed cache has let go of the first keys.
        gone = 0 if cross else tokens - keys
        real = None if rows is None else _known(place, rows, batch, tokens)[:, tokens - queries :]
        first = None  # the first key that is a token, [batch]; negative where it is gone
        if columns is not None:
            first = _known(place, columns, batch, gone + keys).to(torch.uint8).argmax(-1) - gone
        call = self.watcher.call(place, heads, real, cross=cross)
        if call is None or not (call.counts or call.differentiable or call.gate is not None):
            return
        if call.gate is not None:
            raise OptionError(
                f"a head is gated where its output is computed, which via_weights does not see, got {call.site.name!r}"
            )
        call.tokens = real
        if gone:
            call.sinks_in_view = weights.new_zeros(batch, dtype=torch.bool) if first is None else first >= 0
        with torch.set_grad_enabled(call.differentiable and torch.is_grad_enabled()):
            attended = _attended(place, weights, real, first, call.requested, cross=cross)
        call.notify(attended)


def _check_call(module: nn.Module, parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> None:
    name = type(module).__name__
    takes_all = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
    if "output_attentions" not in parameters and not takes_all:
        raise OptionError(
            f"via_weights asks a model for output_attentions, got {name}, which has no such argument; "
            "hand in its attention modules with observe(model, adapters=...)"
        )
    if any(inner.training for inner in module.modules()):
        raise OptionError(f"in training a model returns its weights after dropout, got {name}; call model.eval()")
    config: Any = module.config
    as_dict = given.get("return_dict")
    if not (config.return_dict if as_dict is None else as_dict):
        raise OptionError(f"via_weights finds the weights by their names, got {name} with return_dict=False")


def _known(place: Place, mask: Any, batch: int, tokens: int) -> Tensor:
    """Which tokens are real, [batch, tokens]."""
    if not isinstance(mask, Tensor) or mask.shape != (batch, tokens):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise OptionError(
            "via_weights tells padding by a mask of the tokens that are attended to, "
            f"here [{batch}, {tokens}] at {place.name!r}, got {got}"
        )
    return mask != 0


def _attended(
    place: Place,
    weights: Tensor,
    real: Tensor | None,
    first: Tensor | None,
    requested: Statistics | None,
    *,
    cross: bool,
) -> Attended:
    """An attention that has these weights: queries and keys say nothing, the weights' logarithms are added to that."""
    weights = weights.to(torch.float64 if weights.dtype is torch.float64 else torch.float32)
    batch, heads, queries, keys = weights.shape
    plain = weights.detach()
    sums = plain.sum(-1)
    wrong = ~((sums - 1).abs() <= _ROUNDING) & (sums != 0) | (plain.amin(-1) < 0)  # [batch, heads, queries]
    later = plain.triu(keys - queries + 1).amax((1, 3)) > 0
    if real is not None:
        wrong, later = wrong & real[:, None], later & real
    is_wrong, is_later = torch.stack([wrong.any(), later.any()]).tolist()
    if is_wrong:
        raise OptionError(
            "the weights of a row are a share of 1 for each key, "
            f"got a row that sums to {float(sums[wrong][0]):.3g} at {place.name!r}; "
            "learned sinks and approximations of attention are not told from weights"
        )
    # Keys that no head looks at count as hidden. Some are only too far below the others to have a weight.
    seen = plain > 0
    mask = Mask.dense(seen.any(1, keepdim=True))
    if first is not None:
        mask = mask & Mask.lengths(keys - first.clamp_min(0), side="left")
    if not cross and queries > 1 and not is_later:
        mask = mask & Mask.causal()  # hides nothing more, and half of the work can be skipped
    # A weight of 0 has a logarithm without a gradient, so the logarithm is taken of the others alone.
    logits = torch.where(seen, torch.where(seen, weights, 1.0).log(), _NEVER)
    mask = mask & Mask.bias(logits, zero_one=True)
    query, key = weights.new_zeros(batch, heads, queries, _WIDTH), weights.new_zeros(batch, 1, keys, _WIDTH)
    result = attention(query, key, key, mask=mask, scale=1.0, statistics=requested, logsumexp=True, finite=True)
    result = replace(result, output=result.output[..., :0])
    return Attended(query, key, key[..., :0], result, mask, 1.0)
