"""The plan of attention layers over several ranks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from polyhead.costs.collectives import LayerShare, calls_of, other_parameters
from polyhead.costs.layouts.model_layout import ModelLayout
from polyhead.costs.memory import estimate_memory
from polyhead.costs.options import Dimension, Phase, Ranks
from polyhead.costs.phases import PhaseSizes, call_options, has_cache, outside_bytes, verdict
from polyhead.costs.ranks_plan import Collective, RankPhase, RanksPlan
from polyhead.costs.timing.machine import Machine
from polyhead.errors import OptionError


def plan_ranks(
    model: ModelLayout, ranks: Ranks, phases: tuple[Phase, ...], sizes: PhaseSizes, machine: Machine | None = None
) -> RanksPlan:
    """Plan the attention layers of a model over ranks.

    Args:
        model: attention layers of the model.
        ranks: number of ranks by dimension, and options.
        phases: phases to plan; with context parallel those that need a cache are left out, with a note.
        sizes: sequences of a rank, of which the ranks of FSDP2 have others, tokens of a whole sequence, and dtypes.
        machine: machine of each rank, for verdicts.

    Raises:
        OptionError: a layer cannot be distributed in this way, or the tokens do not divide the ranks.
    """
    shares, notes = [LayerShare.of(group, ranks) for group in model.groups], []
    if ranks.context > 1 and any(has_cache(model, phase, sizes.context) for phase in phases):
        phases = tuple(phase for phase in phases if not has_cache(model, phase, sizes.context))
        notes.append("context parallel has no cache: phases with one are not planned over ranks")
    if ranks.tensor > 1:
        notes.append("over ranks: all weights outside attention count as divided evenly; their sums are not counted")
    return RanksPlan(
        ranks=ranks,
        heads=tuple(x.heads for x in shares),
        parameters=sum(x.layers * x.elements(ranks.fsdp) for x in shares),
        cache_bytes_per_token=sum(x.layers * x.cache_bytes_per_token(sizes.cache_dtype) for x in shares),
        phases=tuple(_plan_phase(model, shares, ranks, phase, sizes, machine) for phase in phases),
        notes=tuple(notes),
    )


def _plan_phase(
    model: ModelLayout, shares: list[LayerShare], ranks: Ranks, phase: Phase, sizes: PhaseSizes, machine: Machine | None
) -> RankPhase:
    training, tokens, dtype = phase == "training", sizes.context, sizes.dtype
    if phase != "decode":
        tokens = _divided(sizes.context, ranks, training=training)
    options = call_options(model, phase, replace(sizes, context=tokens))
    options["device"] = "cuda" if machine is None else machine.device
    memories = []
    for share in shares:
        stored = share.layers * share.elements(ranks.fsdp) * dtype.itemsize
        memory = estimate_memory(share.config, **options, layers=share.layers)
        memories.append(replace(memory, parameters=stored, gradients=stored if training else 0))
    attention = sum(x.layers * x.elements(ranks.fsdp) for x in shares)
    planned = RankPhase(
        phase,
        _collectives(calls_of(model, shares, ranks, phase, sizes), ranks),
        functools.reduce(operator.add, memories),
        _gathered(model, shares, ranks, sizes, training=training),
        **outside_bytes(other_parameters(model, ranks), attention, phase, dtype),
        verdict=None,
    )
    return planned if machine is None else replace(planned, verdict=verdict(planned.needed, machine.memory_bytes))


def _divided(context: int, ranks: Ranks, *, training: bool) -> int:
    """Return the tokens of a rank of context parallel."""
    chunks = 2 * ranks.context if ranks.context > 1 else 1
    if context % chunks:
        raise OptionError(
            f"context parallel over {ranks.context} ranks needs a multiple of {chunks} tokens, got {context:,}; "
            f"pad to {context + -context % chunks:,}"
        )
    tokens = context // ranks.context
    if ranks.sequence_parallel and training and tokens % ranks.tensor:
        raise OptionError(
            f"sequence parallel needs tokens that {ranks.tensor} ranks divide, got {tokens:,}; "
            f"pad to {(tokens + -tokens % ranks.tensor) * ranks.context:,}"
        )
    return tokens


def _collectives(calls: Iterator[Collective], ranks: Ranks) -> tuple[Collective, ...]:
    """Add up the calls of all kinds of layers."""
    totals: dict[Collective, Collective] = {}
    for call in calls:
        kind = replace(call, calls=0, bytes=0)
        total = totals.get(kind, kind)
        totals[kind] = replace(total, calls=total.calls + call.calls, bytes=total.bytes + call.bytes)
    timed = []
    for total in totals.values():
        bandwidth = ranks.bandwidth_of(total.dimension)
        timed.append(total if bandwidth is None else replace(total, seconds=total.bytes / bandwidth))
    return tuple(sorted(timed, key=lambda x: (x.is_backward, get_args(Dimension).index(x.dimension))))


def _gathered(model: ModelLayout, shares: list[LayerShare], ranks: Ranks, sizes: PhaseSizes, *, training: bool) -> int:
    """Return the bytes received from other ranks that are live at the peak.

    With FSDP2 these are the weights of two blocks and in training the gradients of one; with context parallelism, the
    keys and values of the running layer, or of all layers if autograd saves them.
    """
    total = running = 0
    if ranks.fsdp > 1:
        others = (model.other_parameters or 0) // (ranks.tensor * model.layers)
        largest = max(x.elements(1) for x in shares) + others
        total += (3 if training else 2) * largest * sizes.dtype.itemsize
    for share in shares if ranks.context > 1 else ():
        sent = share.context_bytes(ranks, sizes)
        if sent.method == "all_gather" and training:  # which autograd saves in each layer
            total += sent.forward * share.layers
        elif sent.method == "all_gather":
            running = max(running, sent.forward)
        else:
            hops = ranks.context - 1
            shard, gradients = sent.forward // hops, (sent.backward - sent.forward) // hops
            running = max(running, shard + (3 * gradients if training else 0))
    return total + running
