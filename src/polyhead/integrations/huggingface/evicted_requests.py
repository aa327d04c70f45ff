"""Tokens that continuous batching computes again: a full cache evicts requests, and prefills them again later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

_COMPUTED = "_polyhead_computed"  # attribute of a request: its first tokens that were computed before it was evicted

# By cache: for each sequence of the current step, its first rows that an earlier step has computed.
REPEATED: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


@contextmanager
def counted_once() -> Iterator[None]:
    """Record which rows of every step of continuous batching repeat those of an earlier step, in `REPEATED`."""
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    offload, prepare = OffloadingManager.offload_requests, ContinuousBatchingIOs.prepare_batch_tensors

    def marking_offload(self: Any) -> Any:
        active = {name: (state, state.position_offset) for name, state in self.scheduler.active_requests.items()}
        is_offloaded = offload(self)
        for name, (state, computed) in active.items():
            evicted = self.scheduler.waiting_requests.get(name)
            if evicted is not None:  # another object, unless its keys are kept on the host
                setattr(evicted, _COMPUTED, max(computed, getattr(state, _COMPUTED, 0)))
        return is_offloaded

    def recording_prepare(self: Any, requests_in_batch: list[Any], *args: Any, **kwargs: Any) -> None:
        REPEATED[self.cache] = [
            min(max(getattr(x.state, _COMPUTED, 0) - x.state.position_offset, 0), x.query_length)
            for x in requests_in_batch
        ]
        prepare(self, requests_in_batch, *args, **kwargs)

    OffloadingManager.offload_requests = marking_offload
    ContinuousBatchingIOs.prepare_batch_tensors = recording_prepare
    try:
        yield
    finally:
        OffloadingManager.offload_requests = offload
        ContinuousBatchingIOs.prepare_batch_tensors = prepare
