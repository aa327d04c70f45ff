"""Scenes with selected rows, and their expected results: the rows of full attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhead import AttentionOutput, Mask
from polyhead.ops.selected_rows.api import RaggedRows, ragged_attention
from tests.error_budget import DRAWS, ORDERS, Compared, assert_draws_within_error_budget
from tests.ops.oracle import Scene, normal

LEARNED = ("query", "key", "value", "sinks")


@dataclass(frozen=True, eq=False)
class Chosen:
    scene: Scene
    which: Tensor  # boolean [batch, heads, queries]
    by_head: bool = False
    padding: int = 0  # rows behind the last pair

    @property
    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return sequence, head and query of each row, in the order of the rows."""
        if self.by_head:
            head, batch, query = self.which.transpose(0, 1).nonzero().unbind(-1)
        else:
            batch, head, query = self.which.nonzero().unbind(-1)
        return batch, head, query

    def rows(self, device: str = "cpu") -> RaggedRows:
        counts = (self.which.transpose(0, 1) if self.by_head else self.which).sum(-1).flatten()
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        # What stands in padding is nobody's query.
        positions = torch.cat([self.index[2], torch.full((self.padding,), -(1 << 30))])
        return RaggedRows(positions.to(device), offsets.int().to(device), self.which.shape[2], self.by_head)

    def to(self, dtype: torch.dtype) -> Chosen:
        return replace(self, scene=self.scene.to(dtype))

    def drawn(self, draw: int) -> Chosen:
        """Return the same rows, mask and scales with other random numbers; draw 0 is the case itself."""
        if draw == 0:
            return self
        tensors = {name: x for name, x in self.scene.learned.items() if name != "scale"}
        seeds = range(100 * draw, 100 * draw + len(tensors))
        fresh = {
            name: normal(*x.shape, seed=seed, dtype=x.dtype)
            for (name, x), seed in zip(tensors.items(), seeds, strict=True)
        }
        return replace(self, scene=replace(self.scene, **fresh))

    def reordered(self, orders: int, seed: int = 0) -> Chosen:
        """Return several orders of the tokens as additional heads; rows are selected by their index in each."""
        return replace(self, scene=self.scene.reordered(orders, seed), which=self.which.repeat(1, orders, 1))

    def picked(self, full: Tensor) -> Tensor:
        """Return the selected rows of [batch, heads, queries, ...]."""
        return full[tuple(x.to(full.device) for x in self.index)]

    def run(self, backend: str, device: str = "cpu", **options: object) -> AttentionOutput:
        """Run `ragged_attention` on the scene, with NaN in padding rows."""
        scene = self.scene
        query = self.picked(scene.query)
        padding = query.detach().new_full((self.padding, query.shape[1]), torch.nan)
        inputs = {"query": torch.cat([query, padding]), "key": scene.key, "value": scene.value, **scene.options()}
        if device != "cpu":
            inputs = {name: x.to(device) if isinstance(x, Tensor | Mask) else x for name, x in inputs.items()}
        return ragged_attention(**inputs, rows=self.rows(device), backend=backend, **options)


def random_choice(scene: Scene, share: float = 0.4, seed: int = 0) -> Tensor:
    """Select every row with equal probability, except that one pair has none and another all."""
    batch, heads, queries, _ = scene.sizes
    which = torch.rand(batch, heads, queries, generator=torch.Generator().manual_seed(seed)) < share
    if batch * heads > 2:
        which.view(-1, queries)[1] = False
        which.view(-1, queries)[-1] = True
    return which


def everything(
    case: Chosen, backend: str | None, device: str = "cpu", *, seed: int = 7
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return output, log-sum-exp, and the gradients of query, key, value and sinks of a random functional of both.

    Without a backend they come from the formula of the whole attention. NaN arrives at the padding.
    """
    case = replace(case, scene=case.scene.with_gradients())
    if backend is None:
        result = case.scene.formula()
        output, logsumexp = case.picked(result.output), case.picked(result.logsumexp)
    else:
        found = case.run(backend, device)
        assert found.backend == backend
        output, logsumexp = found.output, found.logsumexp
    count = int(case.which.sum())
    generator = torch.Generator().manual_seed(seed)
    directions = []
    for x in (output, logsumexp):
        # bfloat16 numbers, so that the functional is the same one in every dtype.
        direction = torch.randn(count, *x.shape[1:], generator=generator).bfloat16().to(x.dtype)
        direction = torch.cat([direction, direction.new_full((x.shape[0] - count, *x.shape[1:]), torch.nan)])
        directions.append(direction.to(x.device))
    directions[1] = torch.where(logsumexp.detach() == -torch.inf, 0.0, directions[1])
    inputs = {name: x for name, x in case.scene.learned.items() if name in LEARNED}
    grads = torch.autograd.grad([output, logsumexp], list(inputs.values()), directions, allow_unused=True)
    named = {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(inputs.items(), grads, strict=True)
    }
    return output.detach(), logsumexp.detach(), named


def check(
    name: str,
    case: Chosen,
    backend: str,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    draws: int = 1,
    orders: int | None = None,
) -> None:
    """Check output, log-sum-exp and gradients against the error budget (float64: exact), and that padding is empty.

    The budget is one for all draws of the case and for several orders of its keys, queries and channels. Interpreted
    kernels would take too long for all orders. The formula is computed on the device of the kernels where it is large.
    """
    name = f"{name}, {dtype}"
    drawn = [case.drawn(draw) for draw in range(draws)]
    case, *drawn = (replace(x, scene=x.scene.on(device)) for x in (case, *drawn))
    found = [_compared(name, x.to(dtype), backend, device, seed=7 + draw) for draw, x in enumerate(drawn)]
    if dtype is not torch.float64:
        is_interpreted = (backend, device) == ("fused", "cpu")
        if orders is None:
            orders = DRAWS if is_interpreted else ORDERS
        # On a GPU not all at once: tests share its memory, and Triton compiles anew for heads that 16 divides.
        parts = [orders] if device == "cpu" else [min(orders, 11)] * -(-orders // 11)
        for seed, part in enumerate(parts):
            other = case.reordered(part, seed).to(dtype)
            found.append(_compared(name, other, None if is_interpreted else backend, device, seed=7))
        assert_draws_within_error_budget(found, name=name)
        return
    for draw in found:
        for what, (actual, right, _) in draw.items():
            where = f"{name}: {what}"
            torch.testing.assert_close(actual, right, rtol=1e-10, atol=1e-10, msg=lambda m, w=where: f"{w}: {m}")


def _compared(name: str, case: Chosen, backend: str | None, device: str, *, seed: int) -> dict[str, Compared]:
    """Return the results of a backend, if any, together with those of the formula."""
    exact, plain = everything(case.to(torch.float64), None, seed=seed), everything(case, None, seed=seed)
    parts = {"output": Compared(None, exact[0], plain[0]), "logsumexp": Compared(None, exact[1], plain[1])}
    parts |= {f"gradient of {what}": Compared(None, exact[2][what], plain[2][what]) for what in exact[2]}
    if backend is None:
        return parts
    count = int(case.which.sum())
    output, logsumexp, grads = everything(case, backend, device, seed=seed)
    assert output.dtype is case.scene.query.dtype
    assert (output[count:] == 0).all(), f"{name}: padding has an output"
    assert (logsumexp[count:] == -torch.inf).all(), f"{name}: padding has a log-sum-exp"
    ours = {"output": output[:count], "logsumexp": logsumexp[:count]}
    ours |= {f"gradient of {what}": grad for what, grad in grads.items()}
    return {what: part._replace(actual=ours[what].to(part.exact.device)) for what, part in parts.items()}
