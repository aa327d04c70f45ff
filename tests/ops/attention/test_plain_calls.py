"""Plain calls take a short way, on a GPU after the first of their sizes, and return what the long way returns."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyhead import Mask, Statistics, attention
from polyhead.errors import BackendUnsupported, DtypeError, MaskError, OptionError, ShapeError
from polyhead.ops.attention import api, plain_calls

SHAPE = (2, 6, 19, 8)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    plain_calls._known.clear()
    plain_calls._known_statistics.clear()
    yield
    plain_calls._known.clear()
    plain_calls._known_statistics.clear()


def tensors(*, kv_heads: int = 6, keys: int = 19, value_dim: int = 8) -> list[Tensor]:
    return [torch.randn(SHAPE), torch.randn(2, kv_heads, keys, 8), torch.randn(2, kv_heads, keys, value_dim)]


def transposed(inputs: list[Tensor], *axes: int) -> list[Tensor]:
    return [x.transpose(*axes).contiguous().transpose(*axes) for x in inputs]


SHORT = {
    "heads": tensors(),
    "groups": tensors(kv_heads=2),
    "tokens first": transposed(tensors(), 1, 2),
    "float64": [x.double() for x in tensors()],
    "bfloat16": [x.bfloat16() for x in tensors()],
}
LONG = {"another value width": tensors(value_dim=5), "columns first": transposed(tensors(), 2, 3)}


def long_way(inputs: list[Tensor], **options: object) -> Tensor:
    return attention(*inputs, backend="sdpa", **options).output


@pytest.mark.parametrize("mask", [None, Mask.causal()], ids=["unmasked", "causal"])
@pytest.mark.parametrize("kind", [*SHORT, *LONG])
def test_every_call_gives_the_numbers_and_the_gradients_of_the_named_backend(kind: str, mask: Mask | None) -> None:
    expected = long_way((SHORT | LONG)[kind], mask=mask, scale=0.3)
    inputs = [x.detach().requires_grad_() for x in (SHORT | LONG)[kind]]
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad(long_way(inputs, mask=mask, scale=0.3), inputs, direction)
    with (
        mock.patch.object(plain_calls, "checked_request", side_effect=AssertionError("for other devices")),
        mock.patch.object(api, "checked_request", wraps=api.checked_request) as check,
    ):
        result = attention(*inputs, mask=mask, scale=0.3)
    assert check.call_count == (kind in LONG)
    assert result.backend == "sdpa"
    assert result.output.equal(expected)
    found = torch.autograd.grad(result.output, inputs, direction)
    assert all(map(torch.equal, found, gradients))


def test_cross_attention_and_one_query_under_a_causal_mask_stay_right() -> None:
    for queries in (1, 5):
        query, key, value = tensors()
        for _ in range(2):
            for mask in (None, Mask.causal()):
                result = attention(query[:, :, :queries], key, value, mask=mask)
                expected = attention(query[:, :, :queries], key, value, mask=mask, backend="reference")
                assert torch.allclose(result.output, expected.output, atol=1e-6)


MASKS = {"unmasked": None, "causal": Mask.causal(), "window": Mask.window(5)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [-0.5, 0.0], ids=["negative", "zero"])
def test_a_scale_of_zero_or_below_hides_nothing_and_shows_nothing(scale: float, mask: str) -> None:
    inputs, terms = [x.double().requires_grad_() for x in tensors()], ("output",)
    options = {"terms": terms, "mask": MASKS[mask], "scale": scale}
    expected = attention(*inputs, mask=MASKS[mask], scale=scale, backend="reference").output
    gradients = gradients_of(inputs, "reference", **options)
    for backend in ("auto", "sdpa", "blockwise"):
        torch.testing.assert_close(attention(*inputs, mask=MASKS[mask], scale=scale, backend=backend).output, expected)
        torch.testing.assert_close(gradients_of(inputs, backend, **options), gradients)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # in torch.func.jvp itself
def test_what_changes_between_calls_of_one_size_is_read_in_every_call() -> None:
    query, key, value = tensors()
    first = attention(query, key, value, mask=Mask.causal()).output
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(query, key, value, mask=Mask.causal()).output.dtype is torch.bfloat16
    with sdpa_kernel(SDPBackend.MATH):
        assert attention(query, key, value, mask=Mask.causal()).backend == "blockwise"
    gradient = torch.func.grad(lambda x: attention(x, key, value, mask=Mask.causal()).output.sum())(query)
    assert gradient.isfinite().all()
    _, tangent = torch.func.jvp(lambda x: attention(x, key, value, mask=Mask.causal()).output, (query,), (query,))
    assert tangent.isfinite().all()
    broken = value.clone()
    broken[:, :, -1] = torch.nan
    result = attention(query, key, broken, mask=Mask.causal()).output
    assert torch.equal(result[:, :, :-1], first[:, :, :-1])
    assert result[:, :, -1].isnan().all()
    assert attention(query, key, value, mask=Mask.causal()).output.equal(first)
    assert not attention(query, key, value).output.equal(first)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"scale": float("nan")}, OptionError),
        ({"scale": "1"}, OptionError),
        ({"dropout": False}, OptionError),
        ({"mask": torch.ones(19, 19, dtype=torch.bool)}, MaskError),
        ({"key": torch.randn(2, 6, 19, 8).double()}, DtypeError),
        ({"key": torch.randn(2, 5, 19, 8)}, ShapeError),
        ({"backend": "flash"}, OptionError),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_wrong_call_is_refused_after_a_right_one_of_the_same_sizes(
    options: dict[str, object], error: type[Exception]
) -> None:
    query, key, value = tensors()
    arguments = {"query": query, "key": key, "value": value}
    attention(**arguments)
    for _ in range(2):
        with pytest.raises(error):
            attention(**(arguments | options))


def test_dtypes_that_autocast_casts_are_refused_without_it() -> None:
    query, key, value = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        attention(query, key.bfloat16(), value)
    with pytest.raises(DtypeError, match="query, key and value must have one dtype"):
        attention(query, key.bfloat16(), value)


def test_the_number_of_known_sizes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_calls, "_MOST_KNOWN", 3)
    for keys in range(1, 9):
        plain_calls.attend(*tensors(keys=keys), None, None, False)  # `attention` does not call it on a CPU
        assert 1 <= len(plain_calls._known) <= 3


# ---- NaN and Inf on a CPU

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NON_FINITE = (torch.nan, torch.inf, -torch.inf)


# Every pair of two options occurs; more of them at once take no other path.
BROKEN = [
    (kind, ("key", "value")[(i + j) % 2], dtype, bool((i + j // 2) % 2))
    for i, kind in enumerate(["heads", "groups", "tokens first"])
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("kind", "part", "dtype", "records"), BROKEN, ids=str)
def test_a_broken_key_or_value_reaches_exactly_the_rows_that_see_it(
    kind: str, part: str, dtype: torch.dtype, records: bool
) -> None:
    inputs = [x.to(dtype) for x in SHORT[kind]]
    group = SHAPE[1] // inputs[1].shape[1]

    def run(tensors: list[Tensor], shown: int) -> list[Tensor]:
        """Return the output, and the gradients that flow from the first `shown` rows."""
        leaves = [x.detach().requires_grad_(records) for x in tensors]
        output = attention(*leaves, mask=Mask.causal()).output
        direction = (torch.arange(SHAPE[2]) < shown).to(dtype)[:, None].expand_as(output)
        return [output.detach(), *(torch.autograd.grad(output, leaves, direction) if records else ())]

    for position in range(SHAPE[2]):
        clean_output, *clean_gradients = run(inputs, position)
        for filler in NON_FINITE:
            broken = [x.clone() for x in inputs]
            broken[1 if part == "key" else 2][1, 1, position, 5] = filler
            output, *gradients = run(broken, position)
            is_hit = torch.zeros(SHAPE[:3], dtype=torch.bool)
            is_hit[1, group : 2 * group, position:] = True
            assert output[is_hit].isnan().all()
            assert output[~is_hit].equal(clean_output[~is_hit])
            for found, expected in zip(gradients, clean_gradients, strict=True):
                assert found.equal(expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_infinities_that_cancel_and_sums_that_overflow_are_no_exception(dtype: torch.dtype) -> None:
    query, key, value = (x.to(dtype) for x in tensors())
    clean = attention(query, key, value, mask=Mask.causal()).output
    broken = value.clone()
    broken[0, 0, -1, 0], broken[0, 0, -1, 1] = torch.inf, -torch.inf
    output = attention(query, key, broken, mask=Mask.causal()).output
    assert output[:, :, :-1].equal(clean[:, :, :-1])
    assert output[0, 0, -1].isnan().all()
    largest = torch.finfo(dtype).max
    assert not torch.full_like(value, largest).sum().isfinite()
    huge = torch.zeros_like(value)
    huge[0, 0, -2:] = largest
    output = attention(query, key, huge, mask=Mask.causal()).output
    assert output.equal(F.scaled_dot_product_attention(query, key, huge, is_causal=True))
    assert (output[:, :, :-2] == 0).all()
    assert output[:, :, :-1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_the_output_of_pytorchs_kernel_alone_does_not_show_every_key_that_is_not_finite(dtype: torch.dtype) -> None:
    """Why keys and values are tested before the kernel, and not its output afterwards."""
    query, key, value = (x.to(dtype) for x in tensors())
    query[..., 0] = query[..., 0].abs() + 1
    key[:, :, -1, 0] = -torch.inf  # a logit of -inf in the only row that sees it: its weight is 0
    assert F.scaled_dot_product_attention(query, key, value, is_causal=True).isfinite().all()
    output = attention(query, key, value, mask=Mask.causal()).output
    assert output[:, :, -1].isnan().all()
    assert output[:, :, :-1].isfinite().all()


# ---- with statistics, on Hopper

NAMES = ("entropy", "max_logit", "mean_distance")


def on_gpu(*shape: int, kv_heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    batch, heads, tokens, dim = shape or (2, 4, 150, 64)
    sizes = (heads, kv_heads, kv_heads)
    return [torch.randn(batch, x, tokens, dim, device="cuda", dtype=dtype) for x in sizes]


def assert_same(inputs: list[Tensor], *, backend: str = "fused", **options: object) -> None:
    """Compare the call with that of a named backend, which takes the long way."""
    found, expected = attention(*inputs, **options), attention(*inputs, backend=backend, **options)
    assert found.backend == backend
    torch.testing.assert_close(found.output, expected.output, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.logsumexp, expected.logsumexp, rtol=0, atol=0, equal_nan=True)
    for name in NAMES:
        one, other = (getattr(x.statistics, name) for x in (found, expected))
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_calls_with_statistics_are_validated_once_and_stay_the_same() -> None:
    transposed_inputs = transposed(on_gpu(), 1, 2)
    for inputs in (on_gpu(), transposed_inputs, on_gpu(2, 4, 150, 96), on_gpu(dtype=torch.float16), on_gpu()):
        for options in ({}, {"mask": Mask.causal(), "finite": True}, {"scale": 0.3}):
            for statistics in (NAMES, "entropy", ("max_logit",), Statistics(*NAMES)):
                for _ in range(2):
                    assert_same(inputs, statistics=statistics, **options)
    inputs = on_gpu()
    attention(*inputs, statistics=NAMES)
    with mock.patch.object(plain_calls, "checked_request", side_effect=AssertionError):
        for scale in (None, 0.5):
            attention(*inputs, statistics=NAMES, scale=scale)


@pytest.mark.gpu
def test_on_a_gpu_what_changes_between_calls_with_statistics_is_read_in_every_call() -> None:
    inputs = on_gpu()
    causal = {"mask": Mask.causal(), "statistics": NAMES}
    with torch.no_grad():
        assert_same(inputs, finite=True, **causal)
        # An address that is no multiple of 16 bytes, with the same sizes and strides.
        shifted = [torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in inputs]
        assert_same(shifted, finite=True, **causal)
        assert_same([inputs[0], *shifted[1:]], finite=True, **causal)
        for scale in (-0.3, 0.0, 1, 1.0):
            assert_same(inputs, finite=True, scale=scale, **causal)
        broken = [x.clone() for x in inputs]
        broken[1][:, :, -1], broken[2][:, :, -1] = torch.nan, torch.inf
        assert_same(broken, **causal)
        result = attention(*broken, **causal)
        assert result.output[:, :, :-1].isfinite().all()
        assert result.output[:, :, -1].isnan().all()
        with pytest.raises(OptionError, match="a statistic must be one of"):
            attention(*inputs, statistics=("entropy", "magic"))
        with pytest.raises(OptionError, match="a statistic must be one of"):
            attention(*inputs, statistics=(["entropy"],))
        with pytest.raises(DtypeError, match="must be tensors"):
            attention(inputs[0], None, inputs[2], statistics=NAMES)
        with pytest.raises(DtypeError, match="one dtype"):
            attention(inputs[0], inputs[1].half(), inputs[2], statistics=NAMES)
        with torch.autocast("cuda", torch.bfloat16):
            assert attention(inputs[0].float(), *inputs[1:], statistics=NAMES).output.dtype is torch.bfloat16
    inputs[0].requires_grad_()
    result = attention(*inputs, statistics=NAMES)
    (gradient,) = torch.autograd.grad(result.statistics.entropy.sum(), inputs[0])
    assert gradient.abs().sum() > 0


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_every_variant_of_a_known_kernel_is_launched_as_compiled() -> None:
    """Poison of one sequence and one head, cut for a later offset, starts at an address of its own."""
    for queries in (150, 149, 146, 150):
        query, key, value = on_gpu(1, 1, 150, 64, kv_heads=1)
        for broken in (False, True):
            if broken:
                key[:, :, 3] = torch.nan
            for finite in (True, False) if not broken else (False,):
                inputs = [query[:, :, -queries:], key, value]
                found = attention(*inputs, mask=Mask.causal(), statistics=NAMES, finite=finite)
                exact = attention(*(x.double() for x in inputs), mask=Mask.causal(), statistics=NAMES)
                assert found.backend == "fused"
                torch.testing.assert_close(found.output.double(), exact.output, rtol=0.03, atol=0.03, equal_nan=True)
                for name in NAMES:
                    one, other = (getattr(x.statistics, name) for x in (found, exact))
                    torch.testing.assert_close(one.double(), other, rtol=0.02, atol=0.02, equal_nan=True)


def gradients_of(
    inputs: list[Tensor], backend: str, *, terms: tuple[str, ...], rows: slice = slice(None), **options: object
) -> list[Tensor]:
    """Gradients of query, key and value through these rows of the output and of statistics."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    statistics = terms[1:] or None
    result = attention(*leaves, statistics=statistics, backend=backend, **options)
    generator = torch.Generator().manual_seed(3)
    total = torch.zeros((), device=leaves[0].device, dtype=torch.float64)
    for name in terms:
        x = result.output if name == "output" else getattr(result.statistics, name)
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        total = total + (x.double() * direction)[:, :, rows].sum()
    return list(torch.autograd.grad(total, leaves))


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("terms", [("output",), ("output", "entropy", "mean_distance"), ("output", "max_logit")])
@pytest.mark.parametrize("mask", [None, Mask.causal()], ids=["unmasked", "causal"])
def test_on_a_gpu_gradients_of_small_calls_are_those_of_the_formula(
    mask: Mask | None, terms: tuple[str, ...], kv_heads: int
) -> None:
    sound = on_gpu(2, 4, 150, 64, kv_heads=kv_heads)
    for inputs in (sound, transposed(sound, 1, 2)):
        expected = gradients_of([x.double() for x in inputs], "reference", terms=terms, mask=mask, scale=0.3)
        for _ in range(2):
            found = gradients_of(inputs, "auto", terms=terms, mask=mask, scale=0.3)
            assert max(map(relative_error, found, expected)) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", [150, 4096], ids=["short", "long"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [-0.5, 0.0], ids=["negative", "zero"])
def test_on_a_gpu_a_scale_of_zero_or_below_is_the_formula(
    scale: float, dtype: torch.dtype, tokens: int, mask: str
) -> None:
    inputs = on_gpu(1, 2, tokens, 64, dtype=dtype)
    exact = [x.double() for x in inputs]
    expected = attention(*exact, mask=MASKS[mask], scale=scale, backend="reference").output
    gradients = gradients_of(exact, "reference", terms=("output",), mask=MASKS[mask], scale=scale)
    for backend in ("auto", "sdpa", "fused"):
        found = attention(*inputs, mask=MASKS[mask], scale=scale, backend=backend).output
        assert relative_error(found, expected) < 0.01
        for one, other in zip(
            gradients_of(inputs, backend, terms=("output",), mask=MASKS[mask], scale=scale), gradients, strict=True
        ):
            assert float((one.double() - other).norm()) <= 0.01 * float(other.norm())  # both 0 for a scale of zero


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [("output",), ("output", "entropy", "mean_distance"), ("output", "max_logit")])
def test_on_a_gpu_gradients_of_rows_before_a_broken_token_do_not_see_it(terms: tuple[str, ...]) -> None:
    inputs = on_gpu(2, 4, 150, 64)
    inputs[1][:, :, -20], inputs[2][:, :, -10] = torch.nan, torch.inf
    options = {"mask": Mask.causal(), "terms": terms, "rows": slice(0, 130)}
    whole = [x.double().nan_to_num(0.0, 0.0, 0.0) for x in inputs]
    expected, found = gradients_of(whole, "reference", **options), gradients_of(inputs, "auto", **options)
    assert relative_error(found[0][:, :, :130], expected[0][:, :, :130]) < 0.01
    if terms == ("output",):  # with statistics the broken rows make the gradients of all keys NaN, as in the formula
        assert max(map(relative_error, found[1:], expected[1:])) < 0.01


@pytest.mark.gpu
def test_on_a_gpu_a_row_that_sees_a_broken_token_is_nan_with_gradients_as_well() -> None:
    inputs = on_gpu(1, 2, 150, 64)
    inputs[1][:, :, 100] = torch.inf
    leaves = [x.detach().requires_grad_() for x in inputs]
    for statistics in (None, ("entropy",)):
        result = attention(*leaves, mask=Mask.causal(), statistics=statistics)
        assert result.output.requires_grad
        assert result.output[:, :, :100].isfinite().all()
        assert result.output[:, :, 100:].isnan().all()


@pytest.mark.gpu
def test_on_a_gpu_small_calls_have_no_second_derivative_and_keep_to_what_is_used() -> None:
    leaves = [x.requires_grad_() for x in on_gpu(1, 2, 150, 64)]
    for options, error in (({}, RuntimeError), ({"statistics": ("entropy",)}, BackendUnsupported)):
        output = attention(*leaves, mask=Mask.causal(), **options).output
        first = torch.autograd.grad(output.sum(), leaves, create_graph=True)
        with pytest.raises(error):
            torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
    result = attention(*leaves, mask=Mask.causal(), statistics=("entropy", "max_logit"))
    (only_entropy,) = torch.autograd.grad(result.statistics.entropy.sum(), leaves[0])
    exact = [x.detach().double().requires_grad_() for x in leaves]
    formula = attention(*exact, mask=Mask.causal(), statistics=("entropy",))
    (expected,) = torch.autograd.grad(formula.statistics.entropy.sum(), exact[0])
    assert float((only_entropy.double() - expected).norm() / expected.norm()) < 0.01
