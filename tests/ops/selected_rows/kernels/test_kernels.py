"""The kernels of selected rows against float64, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead import Mask, Statistics
from polyhead.errors import BackendUnsupported
from polyhead.ops.common.kernel_call import KernelCall
from polyhead.ops.common.kernels.availability import has_hopper_kernels
from polyhead.ops.common.kernels.mask_arguments import MaskArguments
from polyhead.ops.common.statistics import LINEAR
from polyhead.ops.selected_rows.api import RaggedRows, ragged_attention
from tests.error_budget import DRAWS, Compared, assert_draws_within_error_budget
from tests.ops.attention.kernels.test_forward import SINK_KEYS, WINDOW, bounds, check_statistics
from tests.ops.interpreter.interpreted import in_the_interpreter, poisoned_memory
from tests.ops.oracle import Scene, Who, normal
from tests.ops.selected_rows.chosen_rows import Chosen, check, random_choice
from tests.two_dtypes import in_two_dtypes


def scene(
    *,
    batch: int = 1,
    heads: tuple[int, int] = (3, 1),
    queries: int = 37,
    keys: int = 37,
    dims: tuple[int, int] = (16, 8),
    **options: Any,
) -> Scene:
    return Scene(
        normal(batch, heads[0], queries, dims[0], seed=1),
        normal(batch, heads[1], keys, dims[0], seed=2),
        normal(batch, heads[1], keys, dims[1], seed=3),
        **options,
    )


def chosen(whole: Scene, share: float = 0.5, padding: int = 0, **options: Any) -> Chosen:
    """Select random rows, an odd number of them including the padding."""
    which = random_choice(whole, share)
    which[0, 0, 0] ^= (int(which.sum()) + padding) % 2 == 0
    return Chosen(whole, which, padding=padding, **options)


@functools.cache  # who sees whom is asked pair by pair, once for all dtypes
def cases(size: int = 37) -> dict[str, Chosen]:
    """Every kind of mask and every option, by itself; `size` is that of the sequences.

    Triton compiles anew where 16 divides a size, a stride or the difference of the lengths: sizes are odd, and the
    difference is a multiple of 16 as that of equal lengths is.
    """
    half = size - size // 32 * 16
    some = {"queries": size, "keys": size}
    more = {"queries": half, "keys": size}
    documents = ((0,) * (size // 3) + (-1,) * 3 + (1,) * (size - size // 3 - 3),)
    lengths = (size - 4, size // 3)
    two = {"batch": 2, "heads": (2, 1)}
    dense = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(3)) < 0.6
    dense[..., 5:8, :] = False
    causal = Who(causal=True)
    return {
        "nothing": chosen(scene(**some), padding=19),
        "causal": chosen(scene(**some, who=causal), padding=3),
        "by head": chosen(scene(**two, **some, who=causal), by_head=True, padding=1),
        "a cache before the queries": chosen(scene(**more, who=causal)),
        "more queries than keys": chosen(scene(queries=size, keys=half, who=causal)),
        "window": chosen(scene(**some, who=Who(left=9, right=0))),
        "window and first keys": chosen(scene(**some, who=Who(left=9, right=2, first=3))),
        "right padding": chosen(scene(**two, **some, who=replace(causal, key_lengths=lengths)), by_head=True),
        "left padding": chosen(scene(**two, **more, who=Who(key_lengths=lengths, side="left", left=7, first=2))),
        "documents": chosen(scene(**some, who=replace(causal, query_documents=documents))),
        "dense": chosen(scene(**some, who=Who(dense=dense))),
        "bias": chosen(scene(**some, bias=normal(1, 3, size, size, seed=5))),
        "table": chosen(scene(**some, table=normal(3, 9, seed=6), zero=5, who=causal)),
        "softcap": chosen(scene(**some, softcap=2.5, who=causal)),
        "bias, table and softcap": chosen(
            scene(
                heads=(2, 1),
                **some,
                bias=normal(1, 2, size, size, seed=5),
                table=normal(1, 9, seed=6),
                zero=5,
                softcap=2.5,
                scale=torch.tensor([0.3, -0.6], dtype=torch.float64),
                who=Who(dense=dense[:, :1]),
            )
        ),
        "sinks": chosen(scene(**two, **some, sinks=normal(2, seed=7), who=causal), padding=2),
        "sinks alone": chosen(scene(**two, **some, sinks=normal(2, seed=7), who=Who(key_lengths=(size, 0)))),
        "a scale a head": chosen(scene(**some, scale=torch.tensor([0.3, -0.6, 0.0], dtype=torch.float64))),
        "one row": Chosen(scene(**some, who=causal), one_row(size)),
        "no rows": Chosen(scene(**some, who=causal), torch.zeros(1, 3, size, dtype=torch.bool), padding=5),
        "all rows": Chosen(scene(**some, who=causal), torch.ones(1, 3, size, dtype=torch.bool)),
        "dims of 40 and 72": chosen(scene(heads=(2, 2), **some, dims=(40, 72), who=causal)),
    }


def one_row(size: int) -> Tensor:
    which = torch.zeros(1, 3, size, dtype=torch.bool)
    which[0, 2, size // 2] = True
    return which


def without_learned_terms(case: Chosen) -> Chosen:
    """Return the case with constant biases, tables and scales, of which the kernels have no gradient."""
    return replace(case, scene=_Given(**{name: getattr(case.scene, name) for name in case.scene.__dataclass_fields__}))


class _Given(Scene):
    def with_gradients(self) -> Scene:
        own = super().with_gradients()
        return replace(own, bias=self.bias, table=self.table, scale=self.scale)


@contextmanager
def small_tiles() -> Iterator[None]:
    """Tiles so small that short sequences have several, full ones among them."""
    from polyhead.ops.attention.kernels import forward
    from polyhead.ops.common.kernels.resources import Blocks
    from polyhead.ops.selected_rows.kernels import backward

    blocks = (Blocks(16, 32, 4, 2), Blocks(32, 16, 4, 2))
    with (
        mock.patch.object(forward, "choose_blocks", return_value=Blocks(16, 16, 4, 1)),
        mock.patch.object(backward, "choose_blocks", return_value=blocks),
    ):
        yield


def check_cases(names: tuple[str, ...], dtypes: list[torch.dtype], device: str) -> None:
    for name in names:
        check_case(name, cases()[name], dtypes, device)


def check_case(name: str, case: Chosen, dtypes: list[torch.dtype], device: str, draws: int = 1) -> None:
    """Check output, log-sum-exp and gradients, with fresh memory filled with NaN."""
    for dtype in dtypes:
        with small_tiles() if device == "cpu" else nullcontext(), poisoned_memory():
            check(name, without_learned_terms(case), "fused", dtype, device, draws=draws)


def check_rows(case: Chosen, device: str, dtype: torch.dtype = torch.float32, names: tuple[str, ...] = ()) -> None:
    """Check the statistics in `names`, or all, of the selected rows."""
    case = case.to(dtype)
    exact_case = case.to(torch.float64)
    requested = Statistics(*names, sink_keys=SINK_KEYS, window=WINDOW)
    with small_tiles() if device == "cpu" else nullcontext(), poisoned_memory(), torch.no_grad():
        found = case.run("fused", device, statistics=requested).statistics
    there = exact_case.scene.on(device)
    exact = there.run("reference", there.query.device.type, statistics=requested).statistics
    count = int(case.which.sum())
    right = {name: case.picked(x).cpu() for name, x in exact.items()}
    assert [name for name, _ in found.items()] == list(right)
    there = {name: x[:count].cpu() for name, x in found.items()}
    check_statistics("rows", there, replace(exact, **right), bounds(exact_case.scene))
    for name, x in found.items():
        assert (x[count:] == (-torch.inf if name == "max_logit" else 0.0)).all(), name


def check_gradients_of_statistics(device: str) -> None:
    """Check all supported gradients of statistics at once, and that those of the maxima raise."""
    whole = scene(heads=(2, 1), queries=19, keys=29, sinks=normal(2, seed=7), who=Who(causal=True))
    case = chosen(whole, padding=3)
    names = ("entropy", "learned_sink_mass", *LINEAR)
    requested = Statistics(*names, sink_keys=SINK_KEYS, window=WINDOW)
    count = int(case.which.sum())

    def gradients(case: Chosen, dtype: torch.dtype, fused: bool) -> dict[str, Tensor]:
        own = replace(case, scene=case.scene.to(dtype).with_gradients())
        count = int(case.which.sum())
        factors = {name: normal(count, seed=20 + i) for i, name in enumerate(names)}
        if fused:
            statistics = own.run("fused", device, statistics=requested).statistics
            rows = {name: getattr(statistics, name)[:count].cpu() for name in names}
        else:
            statistics = own.scene.run("reference", statistics=requested).statistics
            rows = {name: own.picked(getattr(statistics, name)) for name in names}
        loss = sum((rows[name] * factors[name].to(rows[name].dtype)).sum() for name in names)
        learned = ("query", "key", "sinks")
        found = torch.autograd.grad(loss, [getattr(own.scene, name) for name in learned])
        return dict(zip(learned, found, strict=True))

    with small_tiles() if device == "cpu" else nullcontext(), poisoned_memory():
        actual = gradients(case, torch.float32, True)
    draws = Chosen(whole.redrawn(), case.which.repeat(1, DRAWS, 1))
    samples = []
    for some, ours in ((case, actual), (draws, {})):
        exact, plain = gradients(some, torch.float64, False), gradients(some, torch.float32, False)
        samples.append({f"gradient of {x}": Compared(ours.get(x), exact[x], plain[x]) for x in exact})
    assert_draws_within_error_budget(samples)
    own = replace(case, scene=whole.to(torch.float32).with_gradients())
    told = own.run("fused", device, statistics="max_logit").statistics.max_logit
    with pytest.raises(BackendUnsupported, match=r"no gradient of max_logit.* backend=\"blockwise\""):
        told[:count].sum().backward()


def check_searches(device: str, pairs: int) -> None:
    """Check that every row belongs to one program and every query is found, for any number of search steps."""
    import triton.language as tl

    from polyhead.ops.selected_rows.kernels.forward import num_programs
    from polyhead.ops.selected_rows.kernels.tiles import Rows
    from tests.ops.selected_rows.kernels.searches import search_kernel

    counts = torch.randint(0, 40, (pairs,), generator=torch.Generator().manual_seed(5))
    counts[3:-2] = 0
    counts[0] = 300
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    total = int(offsets[-1]) + 21
    positions = (torch.arange(total) * 5).int()
    programs = num_programs(total, pairs, 16)
    found = torch.full((programs, 4), -77, dtype=torch.int32, device=device)
    rows = Rows(positions.to(device), offsets.int().to(device), None, None, total, pairs, 1, pairs, tl.constexpr(False))
    search_kernel[(programs,)](rows, found, BLOCK_M=16)
    ends = [*offsets[1:].tolist(), total]
    starts = offsets.tolist()
    expected = [(i, row, ends[i]) for i in range(pairs + 1) for row in range(starts[i], ends[i], 16)]
    found = found.cpu()
    busy = found[found[:, 1] < found[:, 2]]
    assert [tuple(row[:3]) for row in busy.tolist()] == expected
    right = [min(-(-7 * program // 5), 300) for program in range(programs)]
    assert found[:, 3].tolist() == right


def check_many_pairs(device: str, heads: int) -> None:
    """Check more pairs than the second and third axis of a grid allow, most of them empty."""
    generator = torch.Generator().manual_seed(5)
    which = torch.rand(1, heads, 3, generator=generator) < 0.2
    query, key, value = (normal(1, heads, 3, 16, seed=i) for i in (1, 2, 3))
    case = Chosen(Scene(query, key, value, who=Who(causal=True)), which)
    # So many heads leave nothing to chance: their errors need no 32 orders beside them.
    check(f"{heads} heads", case, "fused", torch.float32, device, orders=1)


def check_refusals(device: str) -> None:
    """Check that learned biases, tables and scales are reported as unsupported and use another backend."""
    learned = [
        chosen(scene(bias=normal(1, 3, 37, 37, seed=5))),
        chosen(scene(table=normal(3, 9, seed=6), zero=5)),
        chosen(scene(scale=normal(3, seed=6))),
    ]
    for case in learned:
        own = replace(case, scene=case.scene.to(torch.float32).with_gradients())
        with pytest.raises(BackendUnsupported, match="no gradient of a bias, a table or a scale per head"):
            own.run("fused", device)


def check_compiled(device: str) -> None:
    """Check that the operators pass PyTorch's opcheck, and that a compiled call equals an eager one."""
    whole = scene(heads=(2, 1), queries=11, keys=11, sinks=normal(2, seed=7)).to(torch.float32)
    case = chosen(whole, padding=2)
    rows = case.rows(device)
    query = torch.cat([case.picked(whole.query), torch.full((2, 16), torch.nan)]).to(device)
    inputs = [x.to(device).requires_grad_() for x in (query, whole.key, whole.value, whole.sinks)]

    def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, positions: Tensor, offsets: Tensor) -> Any:
        own = RaggedRows(positions, offsets, 11)
        result = ragged_attention(
            query, key, value, own, mask=Mask.causal(), sinks=sinks, statistics="entropy", backend="fused"
        )
        return result.output, result.logsumexp, result.statistics.entropy

    def everything(function: Any) -> list[Tensor]:
        output, logsumexp, entropy = function(*inputs, rows.positions, rows.offsets)
        loss = output.square().sum() + (logsumexp[:-2] * entropy[:-2]).sum()
        return [output, logsumexp, entropy, *torch.autograd.grad(loss, inputs)]

    expected = everything(call)
    for actual, right in zip(
        everything(torch.compile(call, fullgraph=True, backend="aot_eager")), expected, strict=True
    ):
        torch.testing.assert_close(actual, right)
    mask, (query, key, value, sinks) = MaskArguments(right=0), inputs
    flat = KernelCall(query, key, value, mask, scale=0.25, sinks=sinks, names=("entropy",), window=64).flat()
    arguments = (rows.positions.int(), rows.offsets, 11, False, *flat)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.polyhead.ragged_attention_forward.default, arguments, test_utils=checks)


# Each of them another way through the kernels; a GPU runs all cases.
IN_FLOAT32 = (
    "nothing",
    "by head",
    "a cache before the queries",
    "window and first keys",
    "left padding",
    "documents",
    "bias, table and softcap",
    "sinks alone",
    "no rows",
)
IN_FLOAT16 = ("sinks", "right padding")


@pytest.mark.numerics
def test_in_the_interpreter_every_path_of_the_kernels_is_within_bounds() -> None:
    in_the_interpreter(check_cases, IN_FLOAT32, [torch.float32], "cpu")
    in_the_interpreter(check_cases, IN_FLOAT16, [torch.float16], "cpu")


@pytest.mark.numerics
def test_in_the_interpreter_statistics_keep_to_the_bounds() -> None:
    in_the_interpreter(check_rows, cases()["sinks"], "cpu")
    in_the_interpreter(check_rows, cases()["left padding"], "cpu", torch.float16)
    in_the_interpreter(check_gradients_of_statistics, "cpu")


def test_in_the_interpreter_searches_refusals_and_compilers() -> None:
    in_the_interpreter(check_searches, "cpu", 5)
    in_the_interpreter(check_searches, "cpu", 140)
    in_the_interpreter(check_refusals, "cpu")
    in_the_interpreter(check_compiled, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), in_two_dtypes(cases()))
def test_on_a_gpu_every_mask_and_option_keeps_to_the_bounds(name: str, dtype: torch.dtype) -> None:
    # In float32 the errors of gradients are those of the one row that loses most; 16 bits hide it by their rounding.
    check_case(name, cases(517)[name], [dtype], "cuda", DRAWS if dtype is torch.float32 else 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "dtype"), in_two_dtypes([16, 64, 80, 128, 256]))
def test_on_a_gpu_every_head_dim_keeps_to_the_bounds(dim: int, dtype: torch.dtype) -> None:
    for who in (Who(), Who(causal=True)):
        whole = scene(heads=(4, 2), queries=389, keys=517, dims=(dim, dim), who=who)
        check_case(f"head_dim {dim}", chosen(whole, 0.3, padding=40), [dtype], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sinks", "left padding", "nothing"])
def test_on_a_gpu_statistics_keep_to_the_bounds(name: str) -> None:
    check_rows(cases(517)[name], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("check_rest", [check_gradients_of_statistics, check_refusals, check_compiled])
def test_on_a_gpu_other_checks_hold(check_rest: Callable[[str], None]) -> None:
    check_rest("cuda")


@pytest.mark.gpu
def test_on_a_gpu_any_number_of_pairs_is_served() -> None:
    check_searches("cuda", 5)
    check_searches("cuda", 40_000)
    check_many_pairs("cuda", 70_000)


BANDS = {
    "all": Who(),
    "causal": Who(causal=True),
    "window": Who(left=200, right=0),
    "window both ways": Who(left=150, right=90),
}


def hopper_scene(dims: tuple[int, int], name: str) -> Scene:
    queries = 389 + 128 * (list(BANDS).index(name) % 2)
    return scene(batch=2, heads=(4, 2), queries=queries, keys=517, dims=dims, who=BANDS[name])


def check_hopper(dtype: torch.dtype, dims: tuple[int, int], name: str) -> None:
    """Check the Hopper kernel where it is supported (bands of keys, any rows), and that it was the one that ran."""
    from polyhead.ops.selected_rows.kernels import forward_hopper

    place = list(BANDS).index(name)
    case = chosen(hopper_scene(dims, name), 0.3, by_head=place % 2 == 0, padding=140 * place)
    with mock.patch.object(forward_hopper, "ragged_forward", wraps=forward_hopper.ragged_forward) as served:
        check_case(f"twin, {name}", case, [dtype], "cuda")
        check_rows(case, "cuda", dtype, forward_hopper.STATISTICS)
        assert served.call_count == 2


def check_hopper_rows(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    """Check no rows at all, and all rows with one non-finite key."""
    whole = hopper_scene(dims, "window both ways")
    which = torch.zeros(2, 4, 517, dtype=torch.bool)
    check_case("twin, no rows", Chosen(whole, which, padding=1201), [dtype], "cuda")
    key = whole.key.clone()
    key[1, 1, 300] = torch.nan
    case = Chosen(replace(whole, key=key, who=Who(causal=True)), torch.ones_like(which)).to(dtype)
    output = case.run("fused", "cuda").output.cpu()
    batch, head, query = case.index
    assert output.isnan().all(-1).equal((batch == 1) & (head // 2 == 1) & (query >= 300))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*BANDS, None])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_hopper_the_gluon_kernel_is_within_bounds(
    dtype: torch.dtype, dims: tuple[int, int], name: str | None
) -> None:
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("the twin is for Hopper alone")
    if name is None:
        check_hopper_rows(dtype, dims)
    else:
        check_hopper(dtype, dims, name)


@pytest.mark.gpu
def test_on_a_gpu_more_elements_than_32_bits_count_are_served() -> None:
    rows, heads = (1 << 31) // 128 // 4 + 1000, 4
    offsets = torch.arange(heads + 1, device="cuda") * rows
    positions = torch.arange(rows, device="cuda").repeat(heads)
    query = torch.zeros(rows * heads, 128, dtype=torch.bfloat16, device="cuda")
    ends = normal(500, 128, seed=1).cuda()
    query[-500:] = ends.bfloat16()
    key, value = (normal(1, heads, 64, 128, seed=i).cuda() for i in (2, 3))
    found = ragged_attention(
        query, key.bfloat16(), value.bfloat16(), RaggedRows(positions, offsets, rows), backend="fused"
    )
    weights = torch.softmax(ends @ key[0, -1].T * 128**-0.5, -1)
    exact = weights @ value[0, -1]
    torch.testing.assert_close(found.output[-500:].double(), exact, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found.output[:500].double(), value[0, 0].mean(0).expand(500, 128), rtol=0.02, atol=0.02)
