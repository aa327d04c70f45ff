"""The kernel that recomputes rows of an output that are not finite, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyhead import Mask, attention
from tests.error_budget import assert_within_error_budget, plain_formula
from tests.ops.interpreter.interpreted import in_the_interpreter

STATISTICS = ("max_logit", "entropy", "confidence", "mean_distance", "mean_offset")
CASES = [  # batch, heads, KV heads, queries, keys, head_dim, value_dim, left, right
    (2, 4, 2, 71, 71, 16, 16, None, 0),
    (1, 2, 2, 40, 130, 24, 40, None, 0),
    (2, 3, 1, 70, 70, 8, 8, 9, 0),
    (1, 1, 1, 66, 90, 16, 16, 5, 20),
]
# Key and value with NaN or Inf: the first and the last, one in the middle, all from the middle on, none.
BROKEN = {
    "first": slice(0, 1),
    "last": slice(-1, None),
    "middle": slice(33, 34),
    "half": slice(33, None),
    "none": slice(0, 0),
}


def visible_keys(queries: int, keys: int, left: int | None, right: int, device: str) -> Tensor:
    positions = torch.arange(queries, device=device)[:, None] + keys - queries
    distance = torch.arange(keys, device=device) - positions
    return (distance <= right) & (distance >= -(keys if left is None else left))


def check(device: str, dtype: torch.dtype, *, case: tuple[int, ...], broken: str, part: str, marked: bool) -> None:
    """Make rows NaN, as a kernel makes those with a masked NaN in their last tile, and compare them with clean ones."""
    from polyhead.ops.attention.kernels.nonfinite_rows import recompute_nonfinite_rows

    torch.manual_seed(0)
    batch, heads, kv_heads, queries, keys, head_dim, value_dim, left, right = case
    query = torch.randn(batch, queries, heads, head_dim, device=device).to(dtype).transpose(1, 2)
    key = torch.randn(batch, kv_heads, keys, head_dim, device=device).to(dtype)
    value = torch.randn(batch, keys, kv_heads, value_dim, device=device).to(dtype).transpose(1, 2)
    visible = visible_keys(queries, keys, left, right, device)
    exact = attention(
        *(x.double() for x in (query, key, value)),
        mask=Mask.window(left=left, right=right),
        statistics=STATISTICS,
        logsumexp=True,
        backend="reference",
    )
    plain = plain_formula(query, key, value, visible=visible.expand(batch, heads, queries, keys))
    fillers = itertools.cycle((torch.nan, torch.inf, -torch.inf))
    bad = {"key": key, "value": value}[part]
    for place in range(keys)[BROKEN[broken]]:
        bad[-1, -1, place, place % bad.shape[-1]] = next(fillers)
    nonfinite = (~(key.isfinite().all(-1) & value.isfinite().all(-1))).repeat_interleave(heads // kv_heads, 1)
    sees = (visible & nonfinite[:, :, None]).any(-1)
    # Every second row near a broken key is NaN, and any row that sees one.
    is_nan = sees.clone()
    if nonfinite.any():
        is_nan[-1, -1, ::2] = True
    output = exact.output.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    output[is_nan] = torch.nan
    before = output.clone()
    logsumexp = torch.where(is_nan, torch.nan, exact.logsumexp).float() if marked else None
    statistics = {name: getattr(exact.statistics, name).float() for name in STATISTICS} if marked else {}
    expected = {name: x.clone() for name, x in statistics.items()}
    options = {"scale": head_dim**-0.5, "left": left, "right": right}
    recompute_nonfinite_rows(query, key, value, output, logsumexp=logsumexp, statistics=statistics, **options)
    assert output.isnan().all(-1).equal(sees)
    assert output.isnan().any(-1).equal(sees)
    assert output[~is_nan].equal(before[~is_nan])  # these are not written
    assert_within_error_budget(output[~sees], exact=exact.output[~sees], plain=plain.output[~sees], name="output")
    if logsumexp is not None:
        assert logsumexp.isnan().equal(sees)
        exact_rows, plain_rows = (x.logsumexp[~sees] for x in (exact, plain))
        assert_within_error_budget(logsumexp[~sees], exact=exact_rows, plain=plain_rows, name="logsumexp")
    for name, found in statistics.items():
        assert found.isnan().equal(sees), name
        assert found[~sees].equal(expected[name][~sees]), name


VARIANTS = [
    {"case": case, "broken": broken, "part": part, "marked": marked}
    for case in CASES
    for broken in BROKEN
    for part in ("key", "value")
    for marked in (False, True)
]


def check_all(device: str, dtype: torch.dtype, *, every: int = 1) -> None:
    for variant in VARIANTS[::every]:
        check(device, dtype, **variant)


def test_in_the_interpreter_rows_are_as_without_the_keys_that_they_do_not_see() -> None:
    in_the_interpreter(check_all, "cpu", torch.float16, every=3)  # each part and form with every kind of key


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_rows_are_as_without_the_keys_that_they_do_not_see(dtype: torch.dtype) -> None:
    check_all("cuda", dtype)


@pytest.mark.parametrize(("marked", "architecture"), [(False, 80), (True, 90)])
def test_the_kernel_compiles_without_a_gpu(
    marked: bool, architecture: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The interpreter accepts what the compiler does not, such as a variable that changes its shape in a loop."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from polyhead.ops.attention.kernels.nonfinite_rows import _plan, _recompute_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape, strides = torch.Size((2, 4, 300, 24)), (4 * 300 * 24, 300 * 24, 24, 1)
    *_, constants = _plan(shape, shape, strides, strides, strides, strides, span=1024 if marked else 64)
    names = _recompute_kernel.arg_names
    values = dict(zip(names[-len(constants) :], constants, strict=True))
    signature, constexprs = dict.fromkeys(names, "i32") | {"scale": "fp32"}, {}
    for index, name in enumerate(names):
        is_row = name.startswith("ptr_") and name not in ("ptr_query", "ptr_key", "ptr_value", "ptr_output")
        if name in values or (is_row and not marked):
            signature[name], constexprs[(index,)] = "constexpr", values.get(name)
        elif name.startswith("ptr_"):
            signature[name] = "*fp32" if is_row else "*bf16"
    source = ASTSource(_recompute_kernel, signature, constexprs)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"enable_fp_fusion": True})
    assert len(compiled.asm["cubin"]) > 0
