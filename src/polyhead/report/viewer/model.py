"""The viewed model: runs texts, optionally with ablated heads, and generates tokens."""

from __future__ import annotations

import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyhead.errors import OptionError
from polyhead.observation import AttentionSite, observe
from polyhead.report.viewer.failures import Refused, invalid
from polyhead.report.viewer.output import Output, OutputKind
from polyhead.report.viewer.reading import AxisName, Keeper, KeptAttention, Place, Reading
from polyhead.report.viewer.token_texts import Axis, axis_of_ids, text_after, tokenise_text
from polyhead.sources import LoadedModel, special_tokens

DEFAULT_CONTEXT = 131_072  # tokens, for a model whose config states no maximum
# Each text may use a quarter of the memory: two are stored, and a third exists while one of them is run again.
MEMORY_DIVISOR = 4

Head = tuple[int, int]  # index into `ViewedModel.places`, head
Progress = Callable[[int, int], None]  # attention calls done, and their total


def _quietly(done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True)
class Context:
    """Maximum number of tokens of a text, and the reason for that limit."""

    tokens: int
    reason: str  # "trained", "requested" or "memory"


class ViewedModel:
    """A loaded model and its attention calls (`places`), found by running it on a few tokens once.

    An encoder-decoder reads the text with its encoder and generates the target, which begins with the start token of
    the decoder; a causal model extends the text itself.

    Args:
        loaded: a model of text with observable attention.
        context: maximum number of tokens of a text; the model's own maximum if None.
        memory: bytes that the stored attention of one text may take; a quarter of the device's memory if None.
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
        self.places: tuple[Place, ...] = ()  # unknown until the probe below has run
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
        probe = tuple(tokenise_text(self.tokenizer, "a 0", 16, closed=True).ids)
        calls = self._forward(probe, self._target_start, frozenset(), keep=True)[1]
        self.places = tuple(
            Place(site, call, *self._axes(site)) for site, kept in calls.items() for call in range(len(kept))
        )
        probe_bytes = sum(x.bytes for kept in calls.values() for x in kept)
        self.bytes_per_token = -(-probe_bytes // len(probe))
        max_bytes = memory if memory is not None else _memory_of(self.device) // MEMORY_DIVISOR
        max_tokens = context or max_context or DEFAULT_CONTEXT
        self.context = Context(max_tokens, "trained" if context is None else "requested")
        if max_bytes // self.bytes_per_token < max_tokens:
            self.context = Context(max(2, max_bytes // self.bytes_per_token), "memory")

    # ---- running and generating

    def read(self, slot: str, text: str, off: Iterable[Head], progress: Progress = _quietly) -> Reading:
        """Run the model on a text with the heads `off` ablated.

        A text longer than the context is truncated, which the reading records.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise invalid(f"a text must be valid Unicode, got a lone surrogate at {error.start}") from error
        # A causal model generates after the text, so no trailing special tokens may end it.
        tokenised = tokenise_text(
            self.tokenizer, text, self.context.tokens, closed=not self.generates or self.writes_target
        )
        if len(tokenised.axis.special) == len(tokenised.ids):
            raise invalid(
                f"a text must have at least one token, got {len(text)} characters without one; type a few words"
            )
        target = None if self._target_start is None else axis_of_ids(self.tokenizer, self._target_start)
        return self._reading(
            slot,
            tokenised.ids,
            tokenised.axis,
            self._target_start,
            target,
            tokenised.total,
            frozenset(off),
            0,
            progress,
        )

    def again(self, reading: Reading, off: Iterable[Head], progress: Progress = _quietly) -> Reading:
        """Run the same tokens again, including generated ones, with other heads ablated."""
        return self._reading(
            reading.slot,
            reading.ids,
            reading.text,
            reading.target_ids,
            reading.target,
            reading.tokens_in_text,
            frozenset(off),
            reading.generated,
            progress,
        )

    def step(self, reading: Reading, token: int | None, progress: Progress) -> Reading:
        """Run the text again with one more token: `token`, or the most likely one if None."""
        self._check_generates()
        token = reading.output.greedy if token is None else token
        vocabulary = len(reading.output.values)
        if not 0 <= token < vocabulary:
            raise invalid(f"token must be from 0 to {vocabulary - 1}, got {token}")
        ids, axis = self._extended_sequence(reading)
        if len(ids) >= self.context.tokens:
            raise Refused(413, "too-large", f"A text must have at most {self.context.tokens} tokens, got {len(ids)}.")
        special = token in special_tokens(self.tokenizer).ids
        axis = axis.with_token(text_after(self.tokenizer, ids, token), special=special)
        return self._run_with(reading, (*ids, token), axis, reading.generated + 1, progress)

    def back(self, reading: Reading, progress: Progress) -> Reading:
        """Run the text again without the last generated token."""
        self._check_generates()
        if reading.generated < 1:
            raise invalid("only generated tokens can be removed, got a text without any")
        ids, axis = self._extended_sequence(reading)
        last = len(ids) - 1
        special = tuple(place for place in axis.special if place < last)
        axis = Axis(axis.tokens[:last], special, axis.starts[:last], axis.ends[:last])
        return self._run_with(reading, ids[:last], axis, reading.generated - 1, progress)

    def output_without(self, reading: Reading, off: Iterable[Head], progress: Progress) -> Output:
        """Return the output for the same text with the heads `off` ablated as well."""
        model_output, _ = self._forward(
            reading.ids, reading.target_ids, reading.off | frozenset(off), keep=False, progress=progress
        )
        return self._output(model_output, reading.ids, reading.target_ids)

    def _check_generates(self) -> None:
        if not self.generates:
            raise invalid(
                f"only a model that predicts the next token can generate, got {self.loaded.name}, {self.loaded.kind}"
            )

    def _extended_sequence(self, reading: Reading) -> tuple[tuple[int, ...], Axis]:
        """Return the sequence that generation extends: the target of an encoder-decoder, else the text itself."""
        if reading.target_ids is not None and reading.target is not None:
            return reading.target_ids, reading.target
        return reading.ids, reading.text

    def _run_with(
        self, reading: Reading, ids: tuple[int, ...], axis: Axis, generated: int, progress: Progress
    ) -> Reading:
        """Run the reading again with another sequence in place of the one that generation extends."""
        if reading.target_ids is None:
            changed = replace(reading, ids=ids, text=axis, generated=generated)
        else:
            changed = replace(reading, target_ids=ids, target=axis, generated=generated)
        return self.again(changed, reading.off, progress)

    def _reading(
        self,
        slot: str,
        ids: tuple[int, ...],
        text: Axis,
        target_ids: tuple[int, ...] | None,
        target: Axis | None,
        tokens_in_text: int,
        off: frozenset[Head],
        generated: int,
        progress: Progress,
    ) -> Reading:
        began = time.perf_counter()
        model_output, calls = self._forward(ids, target_ids, off, keep=True, progress=progress)
        attentions = tuple(calls[place.site][place.call] for place in self.places)
        output = self._output(model_output, ids, target_ids)
        seconds = time.perf_counter() - began
        return Reading(
            next(self._numbers), slot, ids, text, target_ids, target, tokens_in_text, off, generated, output,
            attentions, seconds,
        )  # fmt: skip

    # ---- calling the model

    @torch.no_grad()
    def _forward(
        self,
        ids: tuple[int, ...],
        target_ids: tuple[int, ...] | None,
        off: frozenset[Head],
        *,
        keep: bool,
        progress: Progress = _quietly,
    ) -> tuple[Any, dict[AttentionSite, tuple[KeptAttention, ...]]]:
        """Return the output of the model with the heads `off` ablated, and its attention calls if `keep`."""
        done = itertools.count(1)
        total = len(self.places)
        session = observe(self.model, statistics=False, collect=[Keeper(lambda: progress(next(done), total), keep)])
        for place, head in off:
            site = self.places[place].site
            gate = session.gates.setdefault(
                (site.name, site.kind), torch.ones(site.num_heads, device=self.device, dtype=self.dtype)
            )
            gate[head] = 0.0
        inputs: dict[str, Any] = {"input_ids": self._batch(ids)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if target_ids is not None:
            inputs["decoder_input_ids"] = self._batch(target_ids)
        if self.loaded.kind not in ("encoder", "masked"):
            inputs["use_cache"] = False
        if self.loaded.kind == "causal" and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            inputs["logits_to_keep"] = 1  # the logits of all tokens would be by far the largest tensor
        with session:
            model_output = self.model(**inputs)
        return model_output, {site: values["kept"].calls for site, values in session.observations.collected.items()}  # type: ignore[attr-defined]

    def _batch(self, ids: tuple[int, ...]) -> Tensor:
        return torch.tensor([ids], dtype=torch.int64, device=self.device)

    def _output(self, model_output: Any, ids: tuple[int, ...], target_ids: tuple[int, ...] | None) -> Output:
        tokenizer, written = self.tokenizer, ids if target_ids is None else target_ids
        if self.output_kind == "vector":
            states = model_output.last_hidden_state[0].float()
            is_mean = self.loaded.kind == "encoder"
            vector = states.mean(0) if is_mean else states[-1]
            return Output("vector", vector.cpu(), len(written) - 1, str, "mean" if is_mean else "last")
        position = len(written)
        if self.output_kind == "masked-token":
            # The first mask token, else the last token of the text itself.
            wrapping = special_tokens(tokenizer)
            masked = [place for place, token in enumerate(ids) if token == tokenizer.mask_token_id]
            position = masked[0] if masked else len(ids) - len(wrapping.after) - 1
            logits = model_output.logits[0, position]
        else:
            logits = model_output.logits[0, -1]
        before = written[:position]
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
