"""Simulated memory of a running layer: tensors that are allocated, released, saved for the backward, differentiated.

The forward of a layer is recorded on a `Tape` step by step. The tape tracks the live bytes in the forward and, walking
back over its steps as autograd does, in the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Block:
    """A tensor: its storage or the storage it is a view of, and its gradient."""

    size: int  # bytes of its own storage; 0 for a view
    gradient_size: int  # 0 if it has no gradient
    base: Block | None = None  # tensor that it is a view of
    is_referenced: bool = True  # whether Python still references it
    save_count: int = 0  # number of steps that save it for the backward
    gradient: int = 0  # live bytes of its gradient in the backward
    is_strided: bool = False  # whether the heads of a token are not contiguous

    @property
    def root(self) -> Block:
        return self if self.base is None else self.base.root

    @property
    def lives(self) -> bool:
        return self.is_referenced or self.save_count > 0


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    reads: tuple[Block, ...]
    results: tuple[Block, ...]
    saves: tuple[Block, ...]
    backward_workspace: int = 0
    passes_gradient: bool = False


@dataclass(slots=True)
class Tape:
    """Bytes of one call of one layer, without its input and parameters.

    `now` is the number of live bytes, `peak` its maximum so far. Outside training nothing is saved.
    """

    training: bool
    now: int = 0
    peak: int = 0
    _steps: list[_Step] = field(default_factory=list)
    _made: list[Block] = field(default_factory=list)

    def external(self, size: int) -> Block:
        """Return a tensor owned by the caller: its storage is not counted, its gradient is."""
        return Block(0, size)

    def step(
        self,
        *reads: Block,
        output_size: int,
        saves: Iterable[Block] = (),
        save_output: bool = False,
        saved_bytes: int = 0,
        workspace: int = 0,
        backward_workspace: int = 0,
        passes_gradient: bool = False,
        frees: Iterable[Block] = (),
        is_strided: bool = False,
    ) -> Block:
        """Record an operation on `reads` and return its output of `output_size` bytes.

        Args:
            saves: tensors saved for the backward; with `save_output` also the output.
            saved_bytes: further bytes saved for the backward: a log-sum-exp, an internal copy.
            workspace: temporary bytes while the operation runs; `backward_workspace` the same for its backward,
                including gradients of parameters before they are accumulated.
            passes_gradient: the gradient of its one input is the gradient of its output, without a copy.
            frees: tensors that are released after the operation.
            is_strided: whether the heads of a token are not contiguous in the output.
        """
        result = Block(output_size, output_size, is_strided=is_strided)
        private = Block(saved_bytes, 0)
        self._made.append(result)
        self._grow(output_size + saved_bytes + workspace)
        self.now -= workspace
        if self.training:
            saved_blocks = (*saves, *((result,) if save_output else ()), private)
            for block in saved_blocks:
                block.root.save_count += 1
            self._steps.append(_Step(reads, (result,), saved_blocks, backward_workspace, passes_gradient))
        self.release(private, *frees)
        return result

    def views(self, block: Block, *gradient_sizes: int) -> tuple[Block, ...]:
        """Return views of parts of a tensor; their gradients are concatenated into one."""
        parts = tuple(Block(0, size, block) for size in gradient_sizes)
        if self.training:
            self._steps.append(_Step((block,), parts, ()))
        return parts

    def release(self, *blocks: Block) -> None:
        """Drop the Python references to these tensors and to views of them."""
        for block in blocks:
            if block.is_referenced and block.base is None:
                block.is_referenced = False
                self.now -= 0 if block.lives else block.size

    def finish(self, result: Block) -> None:
        """Return from the call: drop all references except that to its result."""
        self.release(*(block for block in self._made if block is not result))
        self._made.clear()

    def backward(self) -> None:
        """Run the backward over all steps; the last output and its gradient belong to the caller."""
        for step in reversed(self._steps):
            arrived = sum(block.gradient for block in step.results)
            if step.passes_gradient:
                step.reads[0].gradient += arrived
            else:
                self._grow(sum(block.gradient_size for block in step.reads) + step.backward_workspace)
                self.now -= step.backward_workspace + arrived
            for block in step.saves:  # autograd releases them before it sums gradients
                root = block.root
                root.save_count -= 1
                self.now -= 0 if root.lives else root.size
            for block in () if step.passes_gradient else step.reads:
                if block.gradient:  # two gradients of one tensor are summed into a third
                    self._grow(block.gradient_size)
                    self.now -= block.gradient_size + block.gradient
                block.gradient = block.gradient_size

    def _grow(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
