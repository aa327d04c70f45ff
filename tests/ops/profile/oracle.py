"""Requests of profiles and their expected results, computed from the full weights in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from polyhead.ops.profile.api import profile
from polyhead.ops.profile.request import AttentionProfile, BlockMap, offset_bins
from tests.ops.oracle import Scene, scenes

TOLERANCE = 2e-5  # of a weight or a sum of weights, times the sum where it is above 1


@dataclass(frozen=True, eq=False)
class Question:
    """A scene and the requested profile; `options` are those of `profile`."""

    scene: Scene  # in float64
    rows: tuple[int, int]
    columns: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Question({self.scene.sizes}, {self.scene.who}, {self.rows}, {self.columns}, {self.options})"

    def ask(self, dtype: torch.dtype, backend: str) -> AttentionProfile:
        scene = self.scene.to(dtype)
        logsumexp = scene.run("reference").logsumexp
        return profile(
            scene.query,
            scene.key,
            logsumexp,
            mask=scene.mask,
            scale=scene.scale,
            softcap=scene.softcap,
            rows=self.rows,
            columns=self.columns,
            backend=backend,
            **self.options,
        )

    def check(self, dtype: torch.dtype, backend: str, tolerance: float = TOLERANCE) -> None:
        assert_right(self.ask(dtype, backend), self, tolerance)


def weights_of(scene: Scene) -> Tensor:
    """Return the weights [batch, heads, queries, keys] of the formula, with the mask evaluated pair by pair."""
    weights = scene.formula().weights
    reference = scene.run("reference", scene.query.device.type, weights=True).weights
    torch.testing.assert_close(weights, reference)
    return weights


def assert_right(found: AttentionProfile, question: Question, tolerance: float = TOLERANCE) -> None:
    scene, options = question.scene, question.options
    batch, _, queries, keys = scene.sizes
    rows, columns = slice(*question.rows), slice(*question.columns)
    everywhere = weights_of(scene)
    weights = everywhere[:, :, rows, columns]
    visible = scene.visible()[:, :, rows, columns]

    def close(actual: Tensor | None, exact: Tensor, name: str) -> None:
        assert actual is not None, name
        assert actual.shape == exact.shape, f"{name}: {list(actual.shape)} and {list(exact.shape)}"
        error = (actual.double() - exact).abs() / exact.abs().clamp_min(1.0)
        worst = float(error.max()) if error.numel() else 0.0
        assert worst <= tolerance, f"{name}: off by {worst:.2e}"

    received = weights.sum(2)
    if options.get("received"):
        close(found.received, received, "received")
    else:
        assert found.received is None
    if options.get("received_by_group"):
        grouped = received.unflatten(1, (scene.key.shape[1], -1)).sum(2)
        close(found.received_by_group, grouped, "received by group")
    if options.get("block_map") is not None:
        grid = options["block_map"] if isinstance(options["block_map"], BlockMap) else BlockMap(options["block_map"])
        assert found.block is not None
        close(found.block_map, pooled(weights, found.block, grid.pool), "block map")
        for count, most in zip(found.block_map.shape[2:], grid.resolution or found.block_map.shape[2:], strict=True):
            assert count <= most
    if options.get("offsets"):
        table = offset_bins()
        distance = scene.who.distances(batch, queries, keys)[:, rows, columns].to(weights.device)
        exact = torch.stack(
            [(weights * ((low <= distance) & (distance <= high))[:, None]).sum((2, 3)) for low, high in table.tolist()],
            -1,
        )
        close(found.offsets, exact, "offsets")
        assert torch.equal(found.offset_bins.cpu(), table)
    largest = torch.where(visible, weights, -1.0)
    if options.get("argmax"):
        check_keys(found.argmax[..., None], None, largest, question, tolerance)
    if options.get("topk"):
        check_keys(found.top_keys, found.top_weights, largest, question, tolerance)
    if options.get("key_set") is not None:
        chosen = torch.as_tensor(options["key_set"])
        if chosen.dtype is not torch.bool:
            chosen = torch.zeros(keys, dtype=torch.bool).index_fill(0, chosen.long(), True)
        member = chosen.view(-1, 1, 1, keys)[..., columns].to(weights.device)
        close(found.key_set_mass, (weights * member).sum(-1), "mass on the key set")
    if options.get("pairs") is not None:
        pairs = torch.as_tensor(options["pairs"]).expand(batch, -1, 2)
        exact = torch.stack([everywhere[b][:, pairs[b, :, 0], pairs[b, :, 1]] for b in range(batch)])
        close(found.pair_weights, exact, "weights of pairs")
    if options.get("head_pairs") is not None:
        divergence, distance = head_divergences(weights, visible, options["head_pairs"])
        close(found.head_divergence, divergence, "divergence")
        # A square root makes of an error of 1e-8 at zero one of 1e-4.
        assert (found.head_distance.double() - distance).abs().le(10 * tolerance).all()
    assert not any(x.requires_grad for x in vars_of(found).values())


def vars_of(found: AttentionProfile) -> dict[str, Tensor]:
    return {name: x for name in found.__slots__ if isinstance(x := getattr(found, name), Tensor)}


def pooled(weights: Tensor, block: tuple[int, int], pool: str) -> Tensor:
    reduce = {"sum": torch.sum, "max": torch.amax, "mean": torch.mean}[pool]
    rows = [[reduce(x, (2, 3)) for x in row.split(block[1], 3)] for row in weights.split(block[0], 2)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def check_keys(
    keys: Tensor, found_weights: Tensor | None, largest: Tensor, question: Question, tolerance: float
) -> None:
    """Check that keys are distinct, visible, and have the largest weights; `largest` has -1 at masked keys."""
    count = keys.shape[-1]
    first = question.columns[0]
    width = largest.shape[-1]
    exact = torch.nn.functional.pad(largest, (0, count), value=-1.0).topk(count, -1).values
    there = keys >= 0
    assert torch.equal(there, exact >= 0)
    places = torch.where(there, keys - first, 0)
    assert ((places >= 0) & (places < width)).all()
    at_keys = torch.where(there, largest.gather(-1, places), -1.0)
    assert (at_keys - exact).abs().le(tolerance).all()
    apart = torch.where(there, keys, -1 - torch.arange(count, device=keys.device))
    assert (apart.sort(-1).values.diff(dim=-1) > 0).all()
    if found_weights is not None:
        assert (found_weights.double() - exact.clamp_min(0.0)).abs().le(tolerance).all()
        assert (found_weights.diff(dim=-1) <= 0).all()


def head_divergences(weights: Tensor, visible: Tensor, pairs: Any) -> tuple[Tensor, Tensor]:
    one, other = torch.as_tensor(pairs).reshape(-1, 2).long().unbind(-1)
    p, q = weights[:, one], weights[:, other]
    middle = (p + q) / 2
    terms = [torch.special.xlogy(x, torch.where(x > 0, x / middle, 1.0)) for x in (p, q)]
    rows = (terms[0] + terms[1]).sum(-1).clamp_min(0.0) / 2
    seen = (visible[:, one] | visible[:, other]).any(-1).double()
    count = seen.sum(-1).clamp_min(1)
    return (rows * seen).sum(-1) / count, (rows.sqrt() * seen).sum(-1) / count


@st.composite
def questions(draw: st.DrawFn, *, offsets: bool = True) -> Question:
    """Draw any scene, any window and any results of a profile."""
    scene = draw(scenes())
    batch, heads, queries, keys = scene.sizes

    def window(size: int) -> tuple[int, int]:
        if draw(st.booleans()):
            return 0, size
        first = draw(st.integers(0, size - 1))
        return first, draw(st.integers(first + 1, size))

    rows, columns = window(queries), window(keys)
    options: dict[str, Any] = {
        name: True for name in ("received", "received_by_group", "argmax") if draw(st.booleans())
    }
    if offsets and draw(st.booleans()):
        options["offsets"] = True
    if draw(st.booleans()):
        side = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 11, 16, 20, 32, 48])
        pool = draw(st.sampled_from(["sum", "mean", "max"]))
        if draw(st.booleans()):
            options["block_map"] = BlockMap(block=(draw(side), draw(side)), pool=pool)
        else:
            options["block_map"] = BlockMap(resolution=(draw(side), draw(side)), pool=pool)
    if draw(st.booleans()):
        options["topk"] = draw(st.integers(1, 16))
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        kind = draw(st.sampled_from(["indices", "shared", "by sequence"]))
        if kind == "indices":
            options["key_set"] = draw(st.lists(st.integers(0, keys - 1), max_size=5))
        else:
            shape = (keys,) if kind == "shared" else (batch, keys)
            options["key_set"] = torch.rand(shape, generator=generator) < 0.4
    if draw(st.booleans()):
        pair = st.tuples(st.integers(rows[0], rows[1] - 1), st.integers(columns[0], columns[1] - 1))
        count = draw(st.integers(1, 6))
        taken = torch.tensor(draw(st.lists(pair, min_size=batch * count, max_size=batch * count)))
        options["pairs"] = taken.view(batch, count, 2) if draw(st.booleans()) else taken
    if draw(st.booleans()) or not options:
        head = st.integers(0, heads - 1)
        options["head_pairs"] = draw(st.lists(st.tuples(head, head), min_size=1, max_size=5))
    return Question(scene, rows, columns, options)


def moved(found: AttentionProfile, device: torch.device | str) -> AttentionProfile:
    return replace(found, **{name: x.to(device) for name, x in vars_of(found).items()})
