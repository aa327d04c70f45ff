"""`via_weights`: observe models through the attention weights that they return.

Most transformers models accept `output_attentions=True` and then materialise all attention weights of a call. That is
slow and needs memory quadratic in the context length, but supports models that do not use the attention interface.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.errors import OptionError
from polyhead.masks import Mask
from polyhead.observation import transformers_models
from polyhead.observation.statistics import StatisticsRequest
from polyhead.observation.watcher import OutputSite, Watcher
from polyhead.ops.attended import Attended
from polyhead.ops.attention import Statistics, attention

COST = "read from returned attention weights: slow, memory quadratic in the context length"
LISTS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
LOGITS = ("max_logit", "max_abs_logit")  # cannot be recovered from weights
SITE = re.compile(r"(?:.+\.)?(?:\w+_)?attentions\.\d+")
# Logit of a key with a weight of 0: its weight and its contribution to the entropy are exactly 0.
_MASKED_LOGIT = -1e4
_WIDTH = 8  # head dimension of the all-zero queries and keys
_ROUNDING = 1e-2  # tolerated deviation of a row sum from 1; bfloat16 rounding gives at most 0.004


def returning_models(model: nn.Module) -> dict[nn.Module, str]:
    """Return the transformers models inside `model`, each with the prefix for the names of its outputs.

    Outputs have the same names whether the full model, its base model or only its encoder is called.
    """
    prefixes: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        if not transformers_models.is_pretrained(module):
            continue
        enclosing = [outer for outer in prefixes if any(inner is module for inner in outer.modules())]
        prefix = f"{path}." if path else ""
        prefixes[module] = (
            _prefix_inside(enclosing[0], prefixes[enclosing[0]], module, prefix) if len(enclosing) else prefix
        )
    if not prefixes:
        raise OptionError(
            "via_weights reads the attention weights that a transformers model returns, "
            f"got {type(model).__name__}, which contains no transformers model"
        )
    return prefixes


def _prefix_inside(outer: Any, label: str, module: nn.Module, prefix: str) -> str:
    if module is outer.base_model:
        return label
    if outer.config.is_encoder_decoder and module is outer.get_encoder():
        return f"{label}encoder_"
    return prefix


def without_logits(wanted: StatisticsRequest, requested: object) -> StatisticsRequest:
    """Remove logit statistics, which weights do not determine; raise if they were requested by name."""
    logit_names = [name for name in wanted.names if name in LOGITS]
    if len(logit_names) and requested is not None and requested is not True:
        raise OptionError(
            f"logits cannot be recovered from attention weights, got a request for {', '.join(logit_names)}"
        )
    return replace(wanted, names=tuple(name for name in wanted.names if name not in LOGITS))


@contextmanager
def read(model: nn.Module, models: Mapping[nn.Module, str], watcher: Watcher) -> Iterator[None]:
    """Request the weights with every call and report them to `watcher`; restores the model on exit."""
    reader = _Reader(watcher, models)
    with ExitStack() as undo:
        undo.enter_context(transformers_models.watching(model, watcher, alone=True))
        undo.enter_context(transformers_models.switched(model, tuple(model.modules()), "eager"))
        undo.enter_context(_recorders_removed(model))
        for module in models:
            undo.callback(module.register_forward_pre_hook(reader.before, with_kwargs=True).remove)
            after = module.register_forward_hook(reader.after, with_kwargs=True, prepend=True, always_call=True)
            undo.callback(after.remove)
        yield


@contextmanager
def _recorders_removed(model: nn.Module) -> Iterator[None]:
    """Remove on exit the output-capturing hooks that transformers installs on first use and never removes."""
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
    """A call for which the weights were requested."""

    module: nn.Module
    arguments: dict[str, Any]
    by_caller: bool  # whether the caller requested them too


class _Reader:
    """Forward hooks; of nested models, only the outermost called one is read."""

    def __init__(self, watcher: Watcher, models: Mapping[nn.Module, str]) -> None:
        self.watcher = watcher
        self.models = models
        self.requested: _Request | None = None

    def before(
        self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.requested is not None and self.requested.module is not module:
            return None
        self.requested = None  # left over from an interrupted call
        parameters = inspect.signature(module.forward).parameters
        names = tuple(parameters)
        arguments = {**dict(zip(names, positional, strict=False)), **keywords}
        _check_call(module, parameters, arguments)
        config: Any = module.config
        callers_flag = arguments.get("output_attentions")
        self.requested = _Request(
            module, arguments, bool(config.output_attentions if callers_flag is None else callers_flag)
        )
        if "output_attentions" in names[: len(positional)]:
            index = names.index("output_attentions")
            return (*positional[:index], True, *positional[index + 1 :]), keywords
        return positional, {**keywords, "output_attentions": True}

    def after(self, module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        requested = self.requested
        if requested is None or requested.module is not module:
            return None
        self.requested = None
        if output is None:
            return None  # the call raised
        self._read(requested, output)
        if requested.by_caller:
            return None
        return type(output)(**{name: x for name, x in output.items() if not name.endswith("attentions")})

    def _read(self, requested: _Request, output: Any) -> None:
        name, arguments = type(requested.module).__name__, requested.arguments
        fields = output if isinstance(output, dict) else {}
        lists = {kind: fields[kind] for kind in LISTS if fields.get(kind) is not None}
        if not len(lists):
            raise OptionError(
                f"via_weights reads {', '.join(LISTS)} from the model output, got {type(output).__name__} of "
                f"{name} with {', '.join(fields) or 'no named fields'}; observe one of the models inside it"
            )
        if any(kind.endswith("global_attentions") for kind in output):
            raise OptionError(
                f"via_weights needs one weight per query and key, got {name}, which returns local and global attention "
                "separately"
            )
        source, target_mask = arguments.get("attention_mask"), arguments.get("decoder_attention_mask")
        has_decoder = getattr(requested.module.config, "is_encoder_decoder", False) and "decoder_attentions" in lists
        masks = {
            "attentions": (source, source),
            "encoder_attentions": (source, source),
            "decoder_attentions": (target_mask, target_mask),
            "cross_attentions": (target_mask, source)
            if has_decoder
            else (source, arguments.get("encoder_attention_mask")),
        }
        cache = arguments.get("past_key_values")
        cache = output.get("past_key_values") if cache is None else cache
        for kind, layers in lists.items():
            if kind == "encoder_attentions" and arguments.get("encoder_outputs") is not None:
                continue  # computed, and counted, in an earlier call
            cross = kind == "cross_attentions"
            layer_cache = None if kind == "encoder_attentions" else cache
            for index, weights in enumerate(layers):
                if weights is not None:  # not every layer has attention
                    output_site = OutputSite(f"{self.models[requested.module]}{kind}.{index}")
                    self._report(output_site, weights, *masks[kind], layer_cache, cross=cross)

    def _report(
        self, output_site: OutputSite, weights: Any, rows: Any, columns: Any, cache: Any, *, cross: bool
    ) -> None:
        """Report the weights of one layer; `rows` and `columns` are the padding masks of queries and keys."""
        if not isinstance(weights, Tensor) or weights.ndim != 4:
            got = f"shape {list(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
            raise OptionError(f"weights must be [batch, heads, queries, keys], got {got} at {output_site.name!r}")
        batch, heads, queries, keys = weights.shape
        get_length = getattr(cache, "get_seq_length", None)
        tokens = queries if get_length is None else int(get_length())
        if tokens < queries or (get_length is None and not cross and keys != queries):
            cache_text = "without a cache" if get_length is None else f"with a cache of {tokens} tokens"
            raise OptionError(
                "via_weights needs one weight per query and key of a sequence, "
                f"got {queries} queries and {keys} keys at {output_site.name!r} {cache_text}"
            )
        if not cross:
            weights = weights[..., :tokens]  # the filled slots of a preallocated cache
            keys = weights.shape[3]
        # A sliding-window cache has dropped the first keys.
        dropped = 0 if cross else tokens - keys
        non_padding = None if rows is None else _padding_mask(output_site, rows, batch, tokens)[:, tokens - queries :]
        first = None  # index of the first non-padding key, [batch]; negative if it was dropped
        if columns is not None:
            first = _padding_mask(output_site, columns, batch, dropped + keys).to(torch.uint8).argmax(-1) - dropped
        call = self.watcher.call(output_site, heads, non_padding, cross=cross)
        if call is None or not (call.counts or call.differentiable or call.gate is not None):
            return
        if call.gate is not None:
            raise OptionError(
                f"gates apply to head outputs, which via_weights does not observe, got a gate for {call.site.name!r}"
            )
        call.tokens = non_padding
        if dropped:
            call.sinks_in_view = weights.new_zeros(batch, dtype=torch.bool) if first is None else first >= 0
        with torch.set_grad_enabled(call.differentiable and torch.is_grad_enabled()):
            attended = _attended(output_site, weights, non_padding, first, call.requested, cross=cross)
        call.notify(attended)


def _check_call(module: nn.Module, parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> None:
    name = type(module).__name__
    takes_all = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
    if "output_attentions" not in parameters and not takes_all:
        raise OptionError(
            f"via_weights needs a model that takes output_attentions, got {name}, which has no such argument; "
            "pass adapters for its attention modules: observe(model, adapters=...)"
        )
    if any(inner.training for inner in module.modules()):
        raise OptionError(
            "via_weights needs evaluation mode, since models return weights after dropout, "
            f"got {name} in training mode; call model.eval()"
        )
    config: Any = module.config
    as_dict = arguments.get("return_dict")
    if not (config.return_dict if as_dict is None else as_dict):
        raise OptionError(f"via_weights needs a model output with named fields, got {name} with return_dict=False")


def _padding_mask(output_site: OutputSite, mask: Any, batch: int, tokens: int) -> Tensor:
    """Return the padding mask, boolean [batch, tokens], False for padding."""
    if not isinstance(mask, Tensor) or mask.shape != (batch, tokens):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise OptionError(
            "via_weights needs a 2-D attention mask to identify padding, "
            f"here [{batch}, {tokens}] at {output_site.name!r}, got {got}"
        )
    return mask != 0


def _attended(
    output_site: OutputSite,
    weights: Tensor,
    non_padding: Tensor | None,
    first: Tensor | None,
    requested: Statistics | None,
    *,
    cross: bool,
) -> Attended:
    """Build an attention with these weights: zero queries and keys, and the log weights as an additive bias."""
    weights = weights.to(torch.float64 if weights.dtype is torch.float64 else torch.float32)
    batch, heads, queries, keys = weights.shape
    detached = weights.detach()
    sums = detached.sum(-1)
    invalid = ~((sums - 1).abs() <= _ROUNDING) & (sums != 0) | (detached.amin(-1) < 0)  # [batch, heads, queries]
    above_diagonal = detached.triu(keys - queries + 1).amax((1, 3)) > 0
    if non_padding is not None:
        invalid, above_diagonal = invalid & non_padding[:, None], above_diagonal & non_padding
    is_invalid, is_acausal = torch.stack([invalid.any(), above_diagonal.any()]).tolist()
    if is_invalid:
        raise OptionError(
            "the weights of a row must be non-negative and sum to 1, "
            f"got a row that sums to {float(sums[invalid][0]):.3g} at {output_site.name!r}; "
            "learned sinks and approximate attention are not supported by via_weights"
        )
    # Keys with zero weight in all heads count as masked, although some weights may only have underflowed.
    nonzero = detached > 0
    mask = Mask.dense(nonzero.any(1, keepdim=True))
    if first is not None:
        mask = mask & Mask.lengths(keys - first.clamp_min(0), side="left")
    if not cross and queries > 1 and not is_acausal:
        mask = mask & Mask.causal()  # masks nothing more, but lets kernels skip half of the work
    # log(0) has no finite gradient, so the logarithm is taken of non-zero weights only.
    logits = torch.where(nonzero, torch.where(nonzero, weights, 1.0).log(), _MASKED_LOGIT)
    mask = mask & Mask.bias(logits, zero_one=True)
    query, key = weights.new_zeros(batch, heads, queries, _WIDTH), weights.new_zeros(batch, 1, keys, _WIDTH)
    result = attention(query, key, key, mask=mask, scale=1.0, statistics=requested, logsumexp=True, finite=True)
    result = replace(result, output=result.output[..., :0])
    return Attended(query, key, key[..., :0], result, mask, 1.0)
