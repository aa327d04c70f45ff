"""`ragged_attention` in plain PyTorch: the selected rows equal those of full attention, and no others are computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from polyhead import Mask, Statistics
from polyhead.errors import BackendUnsupported, DeviceError, OptionError, ShapeError
from polyhead.ops.selected_rows.api import RaggedRows, ragged_attention
from tests.error_budget import DRAWS
from tests.ops.oracle import Scene, Who, normal, scenes
from tests.ops.selected_rows.chosen_rows import Chosen, check, random_choice

PLAIN = ("blockwise", "reference")


def scene(
    *, batch: int = 2, heads: tuple[int, int] = (6, 3), queries: int = 23, keys: int = 23, **options: Any
) -> Scene:
    return Scene(
        normal(batch, heads[0], queries, 11, seed=1),
        normal(batch, heads[1], keys, 11, seed=2),
        normal(batch, heads[1], keys, 7, seed=3),
        **options,
    )


@pytest.mark.parametrize("backend", PLAIN)
@settings(max_examples=30)
@given(scenes(), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.booleans(), st.integers(0, 3))
def test_any_rows_under_any_mask_equal_those_of_full_attention(
    backend: str, whole: Scene, share: float, by_head: bool, padding: int
) -> None:
    which = random_choice(whole, share) if 0 < share < 1 else torch.full(whole.sizes[:3], share == 1)
    check("any", Chosen(whole, which, by_head, padding), backend, torch.float64)


@pytest.mark.numerics
@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_keeps_to_the_error_budget(backend: str, dtype: torch.dtype) -> None:
    whole = scene(sinks=normal(6, seed=4), who=Who(causal=True))
    check("causal", Chosen(whole, random_choice(whole), padding=2), backend, dtype, draws=DRAWS)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("backend", PLAIN)
def test_statistics_are_those_of_the_selected_rows(backend: str, by_head: bool) -> None:
    whole = scene(keys=29, sinks=normal(6, seed=4), who=Who(left=9, right=1, first=2, key_lengths=(29, 13)))
    case = Chosen(whole, random_choice(whole), by_head, padding=3)
    requested = Statistics(sink_keys=2, window=3)
    found = case.run(backend, statistics=requested).statistics
    exact = whole.run("reference", statistics=requested).statistics
    assert found is not None
    assert exact is not None
    count = int(case.which.sum())
    names = [name for name, _ in exact.items()]
    assert [name for name, _ in found.items()] == names
    for name in names:
        actual, right = getattr(found, name), case.picked(getattr(exact, name))
        torch.testing.assert_close(actual[:count], right)
        assert (actual[count:] == (-torch.inf if name == "max_logit" else 0.0)).all(), name


def test_statistics_can_be_differentiated() -> None:
    whole = scene(who=Who(causal=True)).with_gradients()
    case = Chosen(whole, random_choice(whole))
    found = case.run("blockwise", statistics=["entropy", "max_logit"]).statistics
    right = whole.run("reference", statistics=["entropy", "max_logit"]).statistics
    for name in ("entropy", "max_logit"):
        inputs = [whole.query, whole.key]
        actual, exact = (
            torch.autograd.grad(x.sum(), inputs, retain_graph=True)
            for x in (getattr(found, name), case.picked(getattr(right, name)))
        )
        torch.testing.assert_close(actual, exact)


@pytest.mark.parametrize("backend", PLAIN)
def test_a_selected_row_without_visible_keys_is_empty(backend: str) -> None:
    whole = scene(who=Who(key_lengths=(23, 0), causal=True))
    case = Chosen(whole, torch.ones(2, 6, 23, dtype=torch.bool))
    found = case.run(backend)
    assert (found.output[6 * 23 :] == 0).all()
    assert (found.logsumexp[6 * 23 :] == -torch.inf).all()


@pytest.mark.parametrize("backend", PLAIN)
def test_nonfinite_keys_reach_only_the_rows_that_see_them(backend: str) -> None:
    whole = scene(who=Who(causal=True))
    key = whole.key.clone()
    key[0, 1, 17] = torch.nan
    broken = Chosen(replace(whole, key=key), random_choice(whole))
    found, clean = broken.run(backend), replace(broken, scene=whole).run(backend)
    batch, head, query = broken.index
    sees = (batch == 0) & (head // 2 == 1) & (query >= 17)
    assert sees.any()
    assert (~sees).any()
    assert found.output.isnan().all(-1).equal(sees)
    assert found.output[~sees].equal(clean.output[~sees])


def _of_product(accumulated: torch.Size, first: torch.Size, second: torch.Size, **_: object) -> int:
    return 2 * first.numel() * second[-1]


def test_the_cost_is_proportional_to_the_number_of_rows() -> None:
    def operations(rows: RaggedRows, mask: Mask | None = None) -> int:
        query, key = torch.zeros(rows.positions.shape[0], 16), torch.zeros(1, 2, 2048, 16)
        in_place = {torch.ops.aten.baddbmm_: _of_product}  # PyTorch counts the operator that returns a new tensor alone
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            ragged_attention(query, key, key, rows, mask=mask, backend="blockwise")
        return counter.get_total_flops()

    def every(step: int) -> RaggedRows:
        positions = torch.arange(0, 2048, step)
        return RaggedRows(positions.repeat(2), torch.arange(3) * positions.shape[0])

    whole = operations(every(1))
    assert operations(every(4)) == whole // 4
    # Early rows see few keys, and tiles that none of them sees are skipped.
    early = RaggedRows(torch.arange(64).repeat(2), torch.arange(3) * 64)
    assert operations(early, Mask.causal()) <= whole // 32 // 32


def test_autocast_matches_attention() -> None:
    whole = scene().to(torch.float32)
    case = Chosen(whole, random_choice(whole))
    with torch.autocast("cpu", torch.bfloat16):
        assert case.run("auto").output.dtype is torch.bfloat16


def test_auto_is_blockwise_on_a_cpu_and_a_named_backend_never_falls_back() -> None:
    whole = scene()
    case = Chosen(whole, random_choice(whole))
    assert case.run("auto").backend == "blockwise"
    with pytest.raises(BackendUnsupported, match=r"our kernels take float16, bfloat16 or float32, got torch\.float64"):
        case.run("fused")
    with pytest.raises(OptionError, match="one of 'fused', 'blockwise', 'reference', got 'sdpa'"):
        case.run("sdpa")


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("backend", PLAIN)
def test_an_empty_batch_has_only_padding_rows(backend: str, padding: int, by_head: bool) -> None:
    query, key, value = (
        torch.zeros(shape, requires_grad=True) for shape in ((padding, 11), (0, 3, 23, 11), (0, 3, 23, 7))
    )
    rows = RaggedRows(torch.zeros(padding, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 5, by_head, 6)
    options: dict[str, Any] = {"mask": Mask.causal() & Mask.lengths([], queries=[]), "sinks": torch.zeros(6)}
    result = ragged_attention(query, key, value, rows, statistics=True, backend=backend, **options)
    assert result.backend == backend
    assert result.output.equal(torch.zeros(padding, 7))
    assert result.logsumexp.equal(torch.full((padding,), -torch.inf))
    assert result.statistics is not None
    assert result.statistics.entropy.equal(torch.zeros(padding))
    assert result.statistics.max_logit.equal(torch.full((padding,), -torch.inf))
    for gradient, of in zip(
        torch.autograd.grad(result.output.sum(), (query, key, value)), (query, key, value), strict=True
    ):
        assert gradient.equal(torch.zeros_like(of))
    told_less = ragged_attention(query, key, value, replace(rows, num_heads=None), backend=backend)
    assert told_less.output.shape == (padding, 7)


def call(
    query: Tensor | None = None,
    positions: object = (0, 3, 6, 1, 2),
    offsets: object = (0, 3, 5),
    **options: Any,
) -> None:
    query = torch.zeros(5, 8) if query is None else query
    key = options.pop("key", torch.zeros(1, 2, 7, 8))
    made = (torch.tensor(x) if isinstance(x, tuple) else x for x in (positions, offsets))
    told = {name: options.pop(name, None) for name in ("num_queries", "num_heads")}
    ragged_attention(query, key, key, RaggedRows(*made, **told), **options)


def test_errors_state_the_rule_and_the_value() -> None:
    call()
    with pytest.raises(OptionError, match=r"rows must be a RaggedRows\(positions, offsets\), got list"):
        ragged_attention(torch.zeros(5, 8), torch.zeros(1, 2, 7, 8), torch.zeros(1, 2, 7, 8), [0, 3, 5])
    with pytest.raises(ShapeError, match=r"query must be \[total, head_dim\].*got shapes \[5, 1, 8\]"):
        call(torch.zeros(5, 1, 8))
    with pytest.raises(
        ShapeError, match=r"offsets must be a 1-D tensor of int32 or int64, got torch.float32 of shape \[3\]"
    ):
        call(offsets=(0.0, 3.0, 5.0))
    with pytest.raises(ShapeError, match="every row needs a position, got 6 rows and 5 positions"):
        call(torch.zeros(6, 8))
    with pytest.raises(ShapeError, match=r"batch \* heads \+ 1 numbers .* got 3 for a batch of 3"):
        call(key=torch.zeros(3, 2, 7, 8))
    call(num_heads=2)
    with pytest.raises(ShapeError, match=r"got 3 for a batch of 2 and 2 heads; query rows and keys must have the same"):
        call(key=torch.zeros(2, 1, 7, 8), num_heads=2)
    with pytest.raises(ShapeError, match="got 3 for a batch of 0; query rows"):
        call(key=torch.zeros(0, 2, 7, 8))
    for heads in (0, True, 2.0):
        with pytest.raises(ShapeError, match=f"num_heads must be a positive integer, got {heads}"):
            call(num_heads=heads)
    with pytest.raises(ShapeError, match="multiple of KV heads, got 2 and 3"):
        call(key=torch.zeros(1, 3, 7, 8))
    with pytest.raises(DeviceError, match="positions must be on the device of the query, got meta and cpu"):
        call(positions=torch.zeros(5, dtype=torch.int32, device="meta"))
    with pytest.raises(OptionError, match=r"not decrease and end at 5 rows or before, got \[0, 3, 6\]"):
        call(offsets=(0, 3, 6))
    with pytest.raises(OptionError, match=r"offsets must start at 0.*got \[1, 3, 5\]"):
        call(offsets=(1, 3, 5))
    with pytest.raises(OptionError, match="query indices, 0 to 5, got 0 to 6"):
        call(num_queries=6)
    with pytest.raises(OptionError, match=r"must ascend within a .* pair, got 3 before 3 at row 1"):
        call(positions=(0, 3, 3, 1, 2))
