"""The kernel that finds the ends of the rows of dense masks, and attention that skips the tiles outside of them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from polyhead import Mask, attention
from polyhead.ops.common import kernel_masks
from tests.ops.interpreter.interpreted import in_the_interpreter

CASES = [(1, 70, 300), (3, 33, 129), (2, 1, 200), (2, 40, 1), (0, 5, 5), (1, 0, 4), (1, 3, 0)]


def ends(shown: Tensor) -> list[Tensor]:
    """The definition, one row at a time."""
    columns = shown.shape[-1]
    rows = [row.nonzero().flatten().tolist() for row in shown.reshape(shown.shape[0] * shown.shape[1], columns)]
    first = torch.tensor([row[0] if row else columns for row in rows], dtype=torch.int32)
    last = torch.tensor([row[-1] if row else -1 for row in rows], dtype=torch.int32)
    is_full = [len(row) > 0 and row == list(range(row[0], row[-1] + 1)) for row in rows]
    full = torch.where(torch.tensor(is_full, dtype=torch.bool), first, 2**31 - 1)
    return [x.view(shown.shape[:2]) for x in (first, last, full)]


def check_ends(device: str) -> None:
    from polyhead.ops.common.kernels.row_ends import mask_ends

    generator = torch.Generator().manual_seed(0)
    for batch, rows, columns in CASES:
        wide = torch.rand(batch, 2, rows, columns + 3, generator=generator) < 0.02
        wide[:, 1, ::3, columns // 3 :] = True  # every third row may be without gaps
        wide[:, 1, ::3, : columns // 3] = False
        shown = wide[:, 1, :, :columns]
        for mask in (
            shown,
            shown.transpose(1, 2).contiguous().transpose(1, 2),
            shown[:1].expand(batch, -1, -1) if batch else shown,
            torch.where(shown, torch.nan, -torch.inf),  # NaN is visible, as in the formula
            torch.where(shown, -1e30, -torch.inf).bfloat16(),
        ):
            is_shown = mask if mask.dtype is torch.bool else mask != -torch.inf
            for found, exact in zip(mask_ends(mask.to(device)), ends(is_shown), strict=True):
                assert found.cpu().equal(exact)
            for found, exact in zip(mask_ends(mask.to(device).transpose(1, 2)), ends(is_shown.mT), strict=True):
                assert found.cpu().equal(exact)


def check_document_ends(device: str) -> None:
    from polyhead.ops.common.kernels.row_ends import document_ends

    generator = torch.Generator().manual_seed(3)
    for batch, rows, columns in CASES:
        ids = torch.randint(-2, 6, (batch, rows), generator=generator).sort(-1).values
        others = torch.randint(-2, 9, (batch, 2 * columns), generator=generator)[:, ::2]
        for left, right in ((ids, others), (ids << 40, others << 40), (ids[:1], others), (ids, others[:1])):
            shown = (left[..., None] == right[:, None]) & (left >= 0)[..., None]
            document, found = document_ends(left.to(device), right.to(device), none=-7)
            exact = ends(shown)
            for x, y in zip(found, exact, strict=True):
                assert x.cpu().equal(y)
            assert document.cpu().equal(torch.where(exact[1] >= 0, exact[0], -7))


def masks(tokens: int, device: str) -> dict[str, Mask]:
    """Dense masks with tiles to skip on the left, on the right and in between, and a row that sees nothing."""
    index = torch.arange(tokens, device=device)
    shift = torch.tensor([[0], [tokens // 5]], device=device)
    causal = index[None] <= index[:, None]
    document = index // (tokens // 3)
    documents = causal & (document[None] == document[:, None])
    documents[5] = False
    padding = index < torch.tensor([[tokens], [tokens // 2]], device=device)
    apart = (index[None] < 4) | (index[None] > tokens - 4)
    bias = torch.zeros(2, 1, tokens, tokens, device=device).masked_fill(
        ~(causal & padding[:, None])[:, None], -torch.inf
    )
    return {
        "causal": Mask.dense(causal[None, None]),
        "documents": Mask.dense(documents[None, None]),
        "padding": Mask.dense(padding[:, None, None]),
        "ends of the keys": Mask.dense(apart[None, None].expand(1, 1, tokens, tokens)),
        "documents and a window": Mask.dense(documents[None, None]) & Mask.window(tokens // 4),
        "documents twice": Mask.dense(causal[None, None]) & Mask.documents(document.expand(2, -1)),
        "padding on the left, with positions": Mask.dense((causal & (index >= shift)[:, None])[:, None])
        & Mask.positions(index - shift, torch.where(index >= shift, index - shift, -1)),
        "documents in turns": Mask.documents(index % 5),
        "packed documents": Mask.causal() & Mask.documents(document.expand(2, -1)),
        "padding by length": Mask.lengths([tokens, tokens // 2]),
        "bias": Mask.bias(bias),
        "two heads": Mask.dense(torch.stack([causal, causal.mT])[None]),
    }


def relative_error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))


def check_attention(
    device: str, tokens: int, dtype: torch.dtype, bound: float, kinds: tuple[str, ...] | None = None
) -> None:
    """Outputs, statistics and gradients are those of the formula, and tiles are skipped; `kinds` are of `masks`."""
    generator = torch.Generator().manual_seed(1)
    names = ("entropy", "visible_keys", "mean_distance", "sink_mass", "self_mass", "previous_mass")
    shapes = [(2, 2, tokens, 32), (2, 1, tokens, 32), (2, 1, tokens, 32), (2, 2, tokens, 32)]
    *inputs, direction = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    for name, mask in masks(tokens, device).items():
        if kinds is not None and name not in kinds:
            continue
        results = []
        for backend in ("fused", "reference"):
            leaves = [x.clone().requires_grad_() for x in inputs]
            with mock.patch.object(kernel_masks, "_ends", wraps=kernel_masks._ends) as search:
                result = attention(*leaves, mask=mask, statistics=names, backend=backend)
            is_dense = name not in ("two heads", "documents in turns", "packed documents", "padding by length")
            assert search.called == (backend == "fused" and is_dense), name
            terms = [getattr(result.statistics, column).nan_to_num() for column in names if column != "visible_keys"]
            total = (result.output * direction).sum() + sum(term.sum() for term in terms)
            rows = [getattr(result.statistics, column) for column in names]
            results.append([result.output, *rows, *torch.autograd.grad(total, leaves)])
        for found, exact in zip(*results, strict=True):
            assert found.isfinite().equal(exact.isfinite()), name
            finite = exact.isfinite()
            assert relative_error(found[finite], exact[finite]) < bound, name


def check_bias_gradient(device: str, tokens: int, bound: float) -> None:
    """The gradient of a bias is zero where tiles are skipped."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, 2, tokens, 16, generator=generator).to(device) for _ in range(3))
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    bias = torch.randn(1, 1, tokens, tokens, generator=generator).to(device).masked_fill(~causal, -torch.inf)
    gradients = []
    for backend in ("fused", "reference"):
        leaf = bias.clone().requires_grad_()
        output = attention(query, key, value, mask=Mask.bias(leaf), backend=backend).output
        gradients += torch.autograd.grad(output.square().sum(), leaf)
    assert relative_error(*gradients) < bound
    assert not gradients[0][..., ~causal].any()


def on_short_masks(check: Callable[..., None], *arguments: object) -> None:
    """Run a check with masks that are searched, by the kernels as on a GPU."""
    with (
        mock.patch.object(kernel_masks, "_SEARCHED_PAIRS", 0),
        mock.patch.object(kernel_masks, "can_launch", return_value=True),
    ):
        check(*arguments)


def test_in_the_interpreter_ends_are_the_first_and_the_last_visible_column() -> None:
    in_the_interpreter(check_ends, "cpu")


def test_in_the_interpreter_ends_of_documents_are_the_first_and_the_last_equal_id() -> None:
    in_the_interpreter(check_document_ends, "cpu")


def test_in_the_interpreter_attention_under_dense_masks_skips_hidden_tiles_and_is_the_formula() -> None:
    in_the_interpreter(on_short_masks, check_attention, "cpu", 100, torch.float32, 1e-5)


def test_in_the_interpreter_a_bias_has_its_gradient_and_zero_in_skipped_tiles() -> None:
    in_the_interpreter(on_short_masks, check_bias_gradient, "cpu", 100, 1e-5)


@pytest.mark.gpu
def test_on_a_gpu_ends_are_the_first_and_the_last_visible_column() -> None:
    check_ends("cuda")
    check_document_ends("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        (torch.bfloat16, ("documents", "documents twice", "padding on the left, with positions", "documents in turns")),
        (torch.float32, ("documents", "packed documents")),
    ],
    ids=["bfloat16", "float32"],
)
def test_on_a_gpu_attention_skips_hidden_tiles_and_is_the_formula(dtype: torch.dtype, kinds: tuple[str, ...]) -> None:
    check_attention("cuda", 1536, dtype, 0.02 if dtype is torch.bfloat16 else 1e-5, kinds)


@pytest.mark.gpu
def test_on_a_gpu_a_bias_has_its_gradient_and_zero_in_skipped_tiles() -> None:
    check_bias_gradient("cuda", 1536, 1e-5)


# Inductor would rather have TensorFloat32, which is not requested here.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "bias"])
def test_on_a_gpu_a_compiled_call_is_the_formula(kind: str) -> None:
    """Compiled code finds the tiles with operators of PyTorch, for masks of any size."""
    tokens = 300
    index = torch.arange(tokens, device="cuda")
    causal = index[None] <= index[:, None]
    documents = causal & (index[None] // 90 == index[:, None] // 90)
    documents[7] = False
    generator = torch.Generator().manual_seed(4)
    inputs = [torch.randn(2, 2, tokens, 32, generator=generator).cuda() for _ in range(3)]

    def attend(query: Tensor, key: Tensor, value: Tensor, shown: Tensor, backend: str) -> list[Tensor]:
        mask = Mask.dense(shown) if kind == "dense" else Mask.bias(torch.where(shown, 0.5, -torch.inf))
        result = attention(query, key, value, mask=mask, statistics=("entropy", "sink_mass"), backend=backend)
        return [result.output, result.statistics.entropy, result.statistics.sink_mass]

    compiled = torch.compile(attend)
    for shown in (causal, documents):
        results = []
        for call, backend in ((compiled, "fused"), (attend, "reference")):
            leaves = [x.clone().requires_grad_() for x in inputs]
            found = call(*leaves, shown[None, None], backend)
            results.append(
                [*found, *torch.autograd.grad(found[0].square().sum() + found[1].nan_to_num().sum(), leaves)]
            )
        for found, exact in zip(*results, strict=True):
            assert found.isfinite().equal(exact.isfinite())
            assert relative_error(found.nan_to_num(), exact.nan_to_num()) < 5e-3
