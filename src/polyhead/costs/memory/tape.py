"""What lives in memory while a layer runs: tensors that are made, let go, kept for the backward and differentiated.

A layer is told to a `Tape` step by step, as the code of its forward has it. The tape follows how much lives at once, in
the forward and, walking back over its steps as autograd does, in the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Block:
    """A tensor: its memory, or the memory that it is a view of, and the gradient that a backward makes of it."""

    size: int  # bytes of its own; 0 for a view
    gradient_size: int  # 0 where it has none
    base: Block | None = None  # whose memory it is a view of
    is_named: bool = True  # whether Python still has a name for it
    keepers: int = 0  # steps that keep it for the backward
    gradient: int = 0  # bytes of its gradient that live, in the backward
    is_apart: bool = False  # whether the heads of a token do not lie side by side

    @property
    def root(self) -> Block:
        return self if self.base is None else self.base.root

    @property
    def lives(self) -> bool:
        return self.is_named or self.keepers > 0


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    reads: tuple[Block, ...]
    results: tuple[Block, ...]
    keeps: tuple[Block, ...]
    gradient_work: int = 0
    is_passed_on: bool = False


@dataclass(slots=True)
class Tape:
    """Bytes that one call of one layer takes beside its input and its parameters.

    `now` lives at this moment, `peak` is the most so far. Outside training nothing is kept.
    """

    training: bool
    now: int = 0
    peak: int = 0
    _steps: list[_Step] = field(default_factory=list)
    _made: list[Block] = field(default_factory=list)

    def given(self, size: int) -> Block:
        """A tensor of the caller, whose memory is not counted here; its gradient is."""
        return Block(0, size)

    def step(
        self,
        *reads: Block,
        gives: int,
        keeps: Iterable[Block] = (),
        keeps_result: bool = False,
        own: int = 0,
        work: int = 0,
        gradient_work: int = 0,
        is_passed_on: bool = False,
    ) -> Block:
        """A tensor of `gives` bytes, made of others.

        Args:
            keeps: what the step keeps for its backward; `keeps_result` its result as well.
            own: bytes that it keeps besides: a log-sum-exp, a copy of its own.
            work: bytes that live while it runs and no longer; `gradient_work` the same for its backward, gradients of
                parameters among it, which are added to those that are there.
            is_passed_on: the gradient of the one tensor it reads is that of its result.
        """
        result = Block(gives, gives)
        private = Block(own, 0)
        self._made.append(result)
        self._grow(gives + own + work)
        self.now -= work
        if self.training:
            kept = (*keeps, *((result,) if keeps_result else ()), private)
            for block in kept:
                block.root.keepers += 1
            self._steps.append(_Step(reads, (result,), kept, gradient_work, is_passed_on))
        self.let_go(private)
        return result

    def last(self, size: int) -> None:
        """Bytes that stay behind the call: tables that a layer makes in its first."""
        self._grow(size)

    def views(self, block: Block, *gradient_sizes: int) -> tuple[Block, ...]:
        """Parts of a tensor, none of which is copied; their gradients are put together to one of the whole."""
        parts = tuple(Block(0, size, block) for size in gradient_sizes)
        if self.training:
            self._steps.append(_Step((block,), parts, ()))
        return parts

    def let_go(self, *blocks: Block) -> None:
        """Python has no name for them any more, nor for views of them."""
        for block in blocks:
            if block.is_named and block.base is None:
                block.is_named = False
                self.now -= 0 if block.lives else block.size

    def finish(self, result: Block) -> None:
        """The call returns: all names go but that of its result."""
        self.let_go(*(block for block in self._made if block is not result))
        self._made.clear()

    def backward(self) -> None:
        """Walk back over all steps. The gradient of the last result is the caller's, as is that result."""
        for step in reversed(self._steps):
            arrived = sum(block.gradient for block in step.results)
            if step.is_passed_on:
                step.reads[0].gradient += arrived
            else:
                self._grow(sum(block.gradient_size for block in step.reads) + step.gradient_work)
                self.now -= step.gradient_work + arrived
                for block in step.reads:
                    if block.gradient:  # two gradients of one tensor are added to a third
                        self._grow(block.gradient_size)
                        self.now -= block.gradient_size + block.gradient
                    block.gradient = block.gradient_size
            for block in step.keeps:
                root = block.root
                root.keepers -= 1
                self.now -= 0 if root.lives else root.size

    def _grow(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
