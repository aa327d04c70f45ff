"""Errors planted into the tiles of `blockwise`, each of which must exceed the error budget."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any, NamedTuple

import pytest
import torch

from polyhead.ops.attention import blockwise, tiled_softmax
from polyhead.ops.common import tiles
from polyhead.ops.common.visibility import Visibility
from tests.ops.attention.test_against_formula import (
    _small_tiles,
    assert_within_budgets,
    everything_scene,
    fixed_scene,
)
from tests.ops.oracle import Scene, Who

__all__ = ["_small_tiles"]  # a fixture: several tiles at the sizes of these tests


class Planted(NamedTuple):
    owner: Any
    name: str
    right: str
    wrong: str
    dtype: torch.dtype = torch.float32


OUTPUT = "acc.mul_(decay).baddbmm_(dropped, value_rows)"
PLANTED = {
    "the sum of exponentials is not rescaled": Planted(
        tiled_softmax, "_attend_rows", "else row_sum * decay + tile_sum", "else row_sum + tile_sum"
    ),
    "the output is not rescaled": Planted(tiled_softmax, "_attend_rows", OUTPUT, "acc.baddbmm_(dropped, value_rows)"),
    "the output is not rescaled, in bfloat16": Planted(
        tiled_softmax, "_attend_rows", OUTPUT, "acc.baddbmm_(dropped, value_rows)", torch.bfloat16
    ),
    "a bfloat16 accumulator": Planted(tiled_softmax, "_attend_rows", OUTPUT, f"acc.copy_({OUTPUT}.bfloat16())"),
    "a float16 accumulator": Planted(tiled_softmax, "_attend_rows", OUTPUT, f"acc.copy_({OUTPUT}.half())"),
    "a bfloat16 accumulator for float16": Planted(
        tiled_softmax, "_attend_rows", OUTPUT, f"acc.copy_({OUTPUT}.bfloat16())", torch.float16
    ),
    "a causal mask off by one": Planted(
        Visibility, "_band_tile", "before = distance <= right", "before = distance <= right + 1"
    ),
    "a causal mask off by one, in float16": Planted(
        Visibility, "_band_tile", "before = distance <= right", "before = distance < right", torch.float16
    ),
    "sinks left out of the sum": Planted(
        tiled_softmax,
        "_attend_rows",
        "row_sum = torch.exp(column - row_max)",
        "row_sum = torch.zeros_like(running_max)",
    ),
    "logits rounded to float16": Planted(
        tiles.Tiling,
        "logits",
        'torch.bmm(query_rows, key_columns, out=self.buffer("logits", shape, query_rows))',
        "torch.bmm(query_rows, key_columns).half().to(query_rows.dtype)",
    ),
    "a constant of few digits in the exponential": Planted(
        tiles.Tiling,
        "exponential",
        "if not x.is_cpu or _IS_X86:\n        return torch.exp(x, out=target)\n    return torch.mul(x, _LOG2_E",
        "return torch.mul(x, 1.44270",
    ),
    "dO . O dropped from the gradient of logits": Planted(
        tiled_softmax, "_row_gradients", "common = common - (outputs.output * grad_output).sum(-1)", "pass"
    ),
    "the gradient of the log-sum-exp dropped": Planted(
        tiled_softmax,
        "_row_gradients",
        "common = torch.zeros_like(row_sum) if grad_logsumexp is None else grad_logsumexp",
        "common = torch.zeros_like(row_sum)",
    ),
    "the slope of the softcap dropped": Planted(
        tiled_softmax, "_backward_tiles", "grad_tile.mul_(1 - tanh_logits * tanh_logits)", "pass"
    ),
    "a tile's gradient of keys in place of the sum": Planted(
        tiled_softmax,
        "_backward_tiles",
        "key_sums[:, :, key_slice] += torch.bmm(query_rows.transpose(1, 2), grad_tile)",
        "key_sums[:, :, key_slice] = torch.bmm(query_rows.transpose(1, 2), grad_tile)",
    ),
    "a gradient of values summed in bfloat16": Planted(
        tiled_softmax,
        "_backward_tiles",
        "value_sums[:, :, key_slice] += torch.bmm(grad_rows.transpose(1, 2), dropped)",
        "value_sums[:, :, key_slice] += torch.bmm(grad_rows.transpose(1, 2), dropped).bfloat16()",
    ),
    "a gradient of the table summed in float16": Planted(
        tiled_softmax, "_sum_dtype", "torch.float64 if is_sum_over_rows", "torch.float16 if is_sum_over_rows"
    ),
    "a scale of few digits": Planted(tiles, "prepare", "scale.to(dtype)[:, None, None]", "scale.half()[:, None, None]"),
}


def scenes() -> list[tuple[Scene, bool]]:
    who = Who(causal=True)
    return [(fixed_scene(19, 23, who), False), (everything_scene(19, 23, who), True)]


def check(dtype: torch.dtype) -> None:
    for scene, everything in scenes():
        assert_within_budgets(scene, ["blockwise"], [dtype], everything=everything)


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_without_an_error_the_same_scenes_stay_within_the_budget(dtype: torch.dtype) -> None:
    check(dtype)


@pytest.mark.numerics
@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_exceeds_the_budget(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYHEAD_BUDGETS", raising=False)  # the record is one of what we lose
    owner, name, right, wrong, dtype = PLANTED[error]
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1, f"{name} has no {right!r} any more, or several; plant the error elsewhere"
    found: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(right, wrong), function.__globals__, found)
    monkeypatch.setattr(owner, name, found[name])
    if owner is tiles:
        monkeypatch.setattr(blockwise, name, found[name])
    with pytest.raises(AssertionError, match="exceeds"):
        check(dtype)
