"""A text that a model reads layer by layer, each time from where it stopped: what blocks gave is kept, and they rest.

Converting layer k calls the model several times, and all blocks before it would compute the same again; with what the
last of them gave at hand they need not run. Whether a model can be entered so is tried on the first batch of each
block, by comparing; where it cannot, it runs from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhead.observation import observe
from polyhead.ops.attended import Attended
from polyhead.surgery.adapters.attention_layer import AttentionLayer
from polyhead.surgery.calibration.layer_capture import AttentionRecorder, LayerCapture, StopForward, capture_layer
from polyhead.surgery.calibration.temporary import lent

MAX_CACHE_BYTES = 2 << 30  # of what blocks gave; a longer text is read from its beginning each time


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlocks:
    """Blocks that need not run, and what the last of them gave."""

    blocks: tuple[nn.Module, ...]
    gave: Tensor
    in_tuple: bool

    @contextmanager
    def skipping(self) -> Iterator[None]:
        with ExitStack() as back:
            for number, block in enumerate(self.blocks):
                is_last = number == len(self.blocks) - 1
                back.callback(_restore_forward, block, vars(block).get("forward"))
                block.forward = _constant_forward(self.gave if is_last else None, self.in_tuple)
            yield


def _restore_forward(block: nn.Module, forward: Any) -> None:
    """The forward of a block's class again, or one of its own that it had."""
    del block.forward
    if forward is not None:
        block.forward = forward


def _constant_forward(gave: Tensor | None, in_tuple: bool) -> Any:
    def forward(*given: Any, **named: Any) -> Any:
        found = gave if gave is not None else given[0] if given else named["hidden_states"]
        return (found,) if in_tuple else found

    return forward


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCapture:
    """What passed through one layer in one call, and how its heads attended there."""

    look: LayerCapture
    attended: Attended
    real: Tensor | None  # [batch or 1, queries], False for padding


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One batch of a text, and where it can be entered: in the model with parameters lent, and as it was."""

    batch: Mapping[str, Any]
    now: CachedBlocks | None = None
    before: CachedBlocks | None = None

    def look(
        self, model: nn.Module, layer: AttentionLayer, *, lending: Mapping[str, Tensor] | None
    ) -> LayerCapture | None:
        """At a layer of the model with these parameters lent; None for the model as it was."""
        rest = self.before if lending is None else self.now
        with ExitStack() as back:
            if lending is not None:
                back.enter_context(lent(model, lending))
            if rest is not None:
                back.enter_context(rest.skipping())
            return capture_layer(model, layer, self.batch)

    def first_row(self) -> Piece:
        """Its first row alone, where every tensor of the batch has one of each."""
        tensors = [x for x in self.batch.values() if isinstance(x, Tensor)]
        rests = [rest for rest in (self.now, self.before) if rest is not None]
        if len({len(x) if x.ndim else 0 for x in (*tensors, *(rest.gave for rest in rests))}) != 1:
            return self
        batch = {name: x[:1] if isinstance(x, Tensor) else x for name, x in self.batch.items()}
        now, before = (rest and replace(rest, gave=rest.gave[:1]) for rest in (self.now, self.before))
        return Piece(batch, now, before)

    def capture_attention(
        self, model: nn.Module, layer: AttentionLayer, *, lending: Mapping[str, Tensor] | None
    ) -> AttentionCapture | None:
        """The same with how its heads attended; None where it is not called, or not seen to attend."""
        caught = AttentionRecorder(layer.site)
        with observe(model, layers=[layer.site], statistics=False, collect=[caught]):
            look = self.look(model, layer, lending=lending)
        if look is None or caught.attended is None:
            return None
        return AttentionCapture(look, caught.attended, caught.real)


@dataclass(eq=False)
class Streams:
    """The batches of a text as they stand before a layer.

    Where nobody looks at the model as it was (`before=None` is what pieces then have), it is not run.
    """

    model: nn.Module
    batches: Sequence[Mapping[str, Any]]
    needs_original: bool = True
    _place: tuple[str, int] = ("", 0)  # the list of blocks, and how many of them rest
    _kept: list[tuple[Tensor, ...]] = field(default_factory=list)  # of each batch: lent, and as it was
    _in_tuple: bool = False

    def before(self, layer: AttentionLayer, lending: Mapping[str, Tensor]) -> list[Piece]:
        """Every batch, entered at the block of this layer if that gives what the whole model gives."""
        plain = uncached_pieces(self.batches)
        found = _block_of(self.model, layer)
        if found is None or found[1] == 0 or not plain:
            self._place, self._kept = ("", 0), []
            return plain
        path, number = found
        if self._place[0] != path:
            self._place, self._kept = (path, 0), []
        if self._place[1] < number and not self._advance(path, number, lending):
            self._place, self._kept = ("", 0), []
            return plain
        blocks = tuple(self.model.get_submodule(path).children())[:number]
        pieces = [
            Piece(batch, *(CachedBlocks(blocks, gave, self._in_tuple) for gave in kept))
            for batch, kept in zip(self.batches, self._kept, strict=True)
        ]
        return pieces if self._agrees(pieces[0].first_row(), plain[0].first_row(), layer, lending) else plain

    def _advance(self, path: str, number: int, lending: Mapping[str, Tensor]) -> bool:
        """Keep what block number - 1 gives; False where that is nothing that can be handed on."""
        blocks = tuple(self.model.get_submodule(path).children())
        skipping, kept, size = self._place[1], [], 0
        for place, batch in enumerate(self.batches):
            outputs = []
            for side, parameters in enumerate(self._sides(lending)):
                with ExitStack() as back:
                    back.enter_context(lent(self.model, parameters or {}))
                    if skipping:
                        rest = CachedBlocks(blocks[:skipping], self._kept[place][side], self._in_tuple)
                        back.enter_context(rest.skipping())
                    outputs.append(_block_output(self.model, blocks[number - 1], batch))
            found = [output for output in outputs if output is not None]
            if len(found) < len(outputs):
                return False
            kept.append(tuple(gave for gave, _ in found))
            size += sum(gave.nbytes for gave, _ in found)
            self._in_tuple = found[0][1]
            if size > MAX_CACHE_BYTES:
                return False
        self._place, self._kept = (path, number), kept
        return True

    def _sides(self, lending: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor] | None, ...]:
        return (lending, None) if self.needs_original else (lending,)

    def _agrees(self, piece: Piece, plain: Piece, layer: AttentionLayer, lending: Mapping[str, Tensor]) -> bool:
        for parameters in self._sides(lending):
            one, other = (x.look(self.model, layer, lending=parameters) for x in (piece, plain))
            if one is None or other is None or one.heads.shape != other.heads.shape:
                return False
            if not torch.allclose(one.heads, other.heads, rtol=1e-4, atol=1e-5 * float(other.heads.abs().max())):
                return False
        return True


@torch.no_grad()
def _block_output(model: nn.Module, block: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, bool] | None:
    """What a block gives in one call, and whether in a tuple; None where it is no tensor alone."""
    found: list[Any] = []

    def end(module: nn.Module, given: object, gave: Any) -> None:
        found.append(gave)
        raise StopForward

    hook = block.register_forward_hook(end)
    try:
        with suppress(StopForward):
            model(**batch)
    finally:
        hook.remove()
    gave = found[0] if found else None
    in_tuple = isinstance(gave, tuple) and len(gave) == 1
    tensor = gave[0] if isinstance(gave, tuple) and in_tuple else gave
    return (tensor.detach(), in_tuple) if isinstance(tensor, Tensor) else None


def _block_of(model: nn.Module, layer: AttentionLayer) -> tuple[str, int] | None:
    """The list of blocks that a layer lies in, by path, and the number of its block."""
    parts = layer.path.split(".")
    for place, part in enumerate(parts):
        path = ".".join(parts[:place])
        if part.isdecimal() and place and isinstance(model.get_submodule(path), nn.ModuleList):
            return path, int(part)
    return None


def uncached_pieces(batches: Iterable[Mapping[str, Any]]) -> list[Piece]:
    """Batches that are read from the beginning."""
    return [Piece(batch) for batch in batches]
