"""The viewed model: runs texts, optionally with ablated heads, and generates tokens."""

from __future__ import annotations

import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation import AttentionSite, observe
from polyhead.observation.collectors import CallRecorder
from polyhead.ops.attended import Attended
from polyhead.report.viewer.failures import RequestError, invalid
from polyhead.report.viewer.output import Output, OutputKind
from polyhead.report.viewer.token_texts import TokenisedText, axis_of_ids, text_after, tokenise_text
from polyhead.report.viewer.trace import AxisName, Layer, RecordedAttention, Trace, TraceInputs
from polyhead.sources import LoadedModel, special_tokens

DEFAULT_CONTEXT = 131_072  # tokens, for a model whose config states no maximum
# Each text may use a quarter of the memory: two are stored, and a third exists while one of them is run again.
MEMORY_DIVISOR = 4

Head = tuple[int, int]  # index into `ViewedModel.layers`, head
Progress = Callable[[int, int], None]  # attention calls done, and their total


def _quietly(done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class Context:
    """Maximum number of tokens of a text, and the reason for that limit."""

    tokens: int
    reason: str  # "trained" (the model's own maximum, or `DEFAULT_CONTEXT` without one), "requested" or "memory"


class ViewedModel:
    """A loaded model and its attention calls (`layers`), found by running it on a few tokens once.

    An encoder-decoder reads the text with its encoder and generates the target, which begins with the start token of
    the decoder; a causal model extends the text itself.

    Args:
        loaded: a model of text with observable attention.
        context: maximum number of tokens of a text; the model's own maximum if None.
        memory: bytes that the stored attention of one text may take; a quarter of the available memory if None.
    """

    def __init__(self, loaded: LoadedModel, *, context: int | None = None, memory: int | None = None) -> None:
        if loaded.tokenizer is None or loaded.main_input != "input_ids":
            raise OptionError(
                f"the viewer needs a model of text, got {loaded.name}, whose input is {loaded.main_input}"
            )
        max_context = loaded.trained_context
        if context is not None and not 2 <= context <= (max_context or context):
            raise OptionError(
                f"context must be at least 2 tokens and at most {max_context or 'any number'}, the maximum of "
                f"{loaded.name}, got {context}"
            )
        self.loaded = loaded
        self.model: Any = loaded.model
        self.tokenizer: Any = loaded.tokenizer
        self.layers: tuple[Layer, ...] = ()  # unknown until the probe below has run
        self._numbers = itertools.count(1)
        parameter = next(self.model.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.writes_target = loaded.kind == "encoder-decoder"
        self.generates = loaded.kind == "causal" or (self.writes_target and bool(self.model.can_generate()))
        self.output_kind: OutputKind = (
            "next-token" if self.generates else "masked-token" if loaded.kind == "masked" else "vector"
        )
        self._encoder = self._path_of_encoder() if self.writes_target else ""
        self._target_start = self._find_target_start() if self.writes_target else None
        probe = self._inputs("", tokenise_text(self.tokenizer, "a 0", 16, closed=True))
        calls = self._forward(probe, records=True)[1]
        self.layers = tuple(
            Layer(site, call, *self._axes(site)) for site, recorded in calls.items() for call in range(len(recorded))
        )
        probe_bytes = sum(x.bytes for recorded in calls.values() for x in recorded)
        self.bytes_per_token = -(-probe_bytes // len(probe.ids))
        max_bytes = memory if memory is not None else _memory_of(self.device) // MEMORY_DIVISOR
        max_tokens = context or max_context or DEFAULT_CONTEXT
        self.context = Context(max_tokens, "trained" if context is None else "requested")
        if max_bytes // self.bytes_per_token < max_tokens:
            self.context = Context(max(2, max_bytes // self.bytes_per_token), "memory")

    # ---- running and generating

    def trace(self, slot: str, text: str, ablated: Iterable[Head], progress: Progress = _quietly) -> Trace:
        """Run the model on a text with some heads ablated.

        A text longer than the context is truncated, which the trace records.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise invalid(f"a text must be valid Unicode, got a lone surrogate at {error.start}") from error
        tokenised = self._tokenised(text)
        if tokenised.is_empty:
            raise invalid(
                f"a text must have at least one token, got {len(text)} characters without one; type a few words"
            )
        return self.retrace(self._inputs(slot, tokenised), ablated, progress)

    def knows_words(self, text: str) -> bool:
        """Return whether the vocabulary has a token of this text, other than special ones."""
        return not self._tokenised(text).is_empty

    def _tokenised(self, text: str) -> TokenisedText:
        # `closed` adds the trailing special tokens, after which a causal model would not continue the text.
        closed = not self.generates or self.writes_target
        return tokenise_text(self.tokenizer, text, self.context.tokens, closed=closed)

    def retrace(self, inputs: TraceInputs, ablated: Iterable[Head], progress: Progress = _quietly) -> Trace:
        """Run the same tokens, including generated ones, with other heads ablated."""
        inputs = replace(inputs, ablated=frozenset(ablated))
        began = time.perf_counter()
        model_output, calls = self._forward(inputs, records=True, progress=progress)
        return Trace(
            **{field.name: getattr(inputs, field.name) for field in fields(TraceInputs)},
            number=next(self._numbers),
            output=self._output(model_output, inputs),
            attentions=tuple(calls[layer.site][layer.call] for layer in self.layers),
            seconds=time.perf_counter() - began,
        )

    def step(self, trace: Trace, token: int | None, progress: Progress) -> Trace:
        """Run the text again with one more token: `token`, or the most likely one if None."""
        self._check_generates()
        token = trace.output.greedy if token is None else token
        vocabulary = len(trace.output.values)
        if not 0 <= token < vocabulary:
            raise invalid(f"token must be from 0 to {vocabulary - 1}, got {token}")
        ids, axis = trace.extended
        if len(ids) >= self.context.tokens:
            raise RequestError(
                413, "too-large", f"A text must have at most {self.context.tokens} tokens, got {len(ids)}."
            )
        special = token in special_tokens(self.tokenizer).ids
        axis = axis.with_token(text_after(self.tokenizer, ids, token), special=special)
        return self.retrace(trace.extended_to((*ids, token), axis, trace.generated + 1), trace.ablated, progress)

    def undo(self, trace: Trace, progress: Progress) -> Trace:
        """Run the text again without the last generated token."""
        self._check_generates()
        if trace.generated < 1:
            raise invalid("only generated tokens can be removed, got a text without any")
        ids, axis = trace.extended
        shorter = trace.extended_to(ids[:-1], axis.without_last(), trace.generated - 1)
        return self.retrace(shorter, trace.ablated, progress)

    def output_without(self, trace: Trace, ablated: Iterable[Head], progress: Progress) -> Output:
        """Return the output for the same text with some heads ablated as well."""
        inputs = replace(trace, ablated=trace.ablated | frozenset(ablated))
        return self._output(self._forward(inputs, records=False, progress=progress)[0], inputs)

    def _check_generates(self) -> None:
        if not self.generates:
            raise invalid(
                f"only a model that predicts the next token can generate, got {self.loaded.name}, {self.loaded.kind}"
            )

    def _inputs(self, slot: str, tokenised: TokenisedText) -> TraceInputs:
        target = None if self._target_start is None else axis_of_ids(self.tokenizer, self._target_start)
        return TraceInputs(slot, tokenised.ids, tokenised.axis, self._target_start, target, tokenised.total)

    # ---- calling the model

    @torch.no_grad()
    def _forward(
        self, inputs: TraceInputs, *, records: bool, progress: Progress = _quietly
    ) -> tuple[Any, dict[AttentionSite, list[RecordedAttention]]]:
        """Return the output of the model, and its attention calls if `records`."""
        done = itertools.count(1)
        total = len(self.layers)
        calls: dict[AttentionSite, list[RecordedAttention]] = {}

        def record(site: AttentionSite, attended: Attended, *_: Any) -> None:
            if records:
                calls.setdefault(site, []).append(RecordedAttention.of(attended))
            progress(next(done), total)

        session = observe(self.model, statistics=False, collect=[CallRecorder(record)])
        for layer, head in inputs.ablated:
            site = self.layers[layer].site
            gate = session.gates.setdefault(
                (site.name, site.kind), torch.ones(site.num_heads, device=self.device, dtype=self.dtype)
            )
            gate[head] = 0.0
        ids = self._batch(inputs.ids)
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if inputs.target_ids is not None:
            arguments["decoder_input_ids"] = self._batch(inputs.target_ids)
        if self.loaded.kind not in ("encoder", "masked"):
            arguments["use_cache"] = False
        if self.loaded.kind == "causal" and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            arguments["logits_to_keep"] = 1  # the logits of all tokens would be by far the largest tensor
        with session:
            model_output = self.model(**arguments)
        return model_output, calls

    def _batch(self, ids: tuple[int, ...]) -> Tensor:
        return torch.tensor([ids], dtype=torch.int64, device=self.device)

    def _output(self, model_output: Any, inputs: TraceInputs) -> Output:
        tokenizer, ids, extended = self.tokenizer, inputs.ids, inputs.extended[0]
        if self.output_kind == "vector":
            states = model_output.last_hidden_state[0].float()
            is_mean = self.loaded.kind == "encoder"
            vector = states.mean(0) if is_mean else states[-1]
            return Output("vector", vector.cpu(), len(extended) - 1, str, "mean" if is_mean else "last")
        position = len(extended)
        if self.output_kind == "masked-token":
            # The first mask token, else the last token of the text itself.
            wrapping = special_tokens(tokenizer)
            masked = [index for index, token in enumerate(ids) if token == tokenizer.mask_token_id]
            position = masked[0] if masked else len(ids) - len(wrapping.after) - 1
            logits = model_output.logits[0, position]
        else:
            logits = model_output.logits[0, -1]
        before = extended[:position]
        values = logits.float().log_softmax(-1).cpu()
        return Output(self.output_kind, values, position, lambda token: text_after(tokenizer, before, token))

    # ---- properties of the model

    def _path_of_encoder(self) -> str:
        encoder = self.model.get_encoder()
        return next((name for name, module in self.model.named_modules() if module is encoder), "")

    def _find_target_start(self) -> tuple[int, ...]:
        """Return the ids with which the target of an encoder-decoder begins."""
        for config in (getattr(self.model, "generation_config", None), self.model.config):
            for name in ("decoder_start_token_id", "bos_token_id"):
                token = getattr(config, name, None)
                if isinstance(token, int):
                    return (token,)
        raise OptionError(
            f"an encoder-decoder must have a decoder_start_token_id in its config.json, got {self.loaded.name} "
            "without one"
        )

    def _axes(self, site: AttentionSite) -> tuple[AxisName, AxisName]:
        """Return what the queries and the keys of a site are tokens of."""
        if not self.writes_target or (self._encoder and site.name.startswith(self._encoder + ".")):
            return "text", "text"
        return "target", "text" if site.kind == "cross" else "target"


def _memory_of(device: torch.device) -> int:
    """Return the available memory: free memory of a GPU, total memory of the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
