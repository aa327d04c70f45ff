"""The kernel that replaces NaN and Inf in keys and values, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreter.interpreted import in_the_interpreter

CASES = [  # batch, heads, tokens, key dim, value dim, dtype
    (2, 3, 71, 16, 24, torch.float32),
    (1, 5, 1, 8, 8, torch.float16),
    (3, 1, 129, 40, 64, torch.float32),
    (2, 2, 0, 16, 16, torch.float32),
]


def check(device: str, dtype: torch.dtype | None = None) -> None:
    from polyhead.ops.common.kernels.clean_keys import clean_keys

    torch.manual_seed(0)
    for batch, heads, tokens, dim_key, dim_value, case_dtype in CASES:
        # Views into one wider tensor: every stride but the last differs from a contiguous tensor's.
        both = torch.randn(batch, tokens, heads, dim_key + dim_value + 3, device=device).to(dtype or case_dtype)
        for place, bad in zip((5, 17, 40), (torch.nan, torch.inf, -torch.inf), strict=True):
            both.view(-1)[place * 31 % max(both.numel(), 1) :: 997] = bad
        key, value = (x.transpose(1, 2) for x in (both[..., :dim_key], both[..., dim_key : dim_key + dim_value]))
        clean_key, clean_value, poison = clean_keys(key, value)
        assert clean_key.equal(torch.where(key.isfinite(), key, 0.0))
        assert clean_value.equal(torch.where(value.isfinite(), value, 0.0))
        assert poison.isnan().equal(~(key.isfinite().all(-1) & value.isfinite().all(-1)))
        assert torch.where(poison.isnan(), 0.0, poison).abs().sum() == 0


def test_in_the_interpreter_every_broken_element_is_zero_and_every_broken_key_is_marked() -> None:
    in_the_interpreter(check, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_on_a_gpu_every_broken_element_is_zero_and_every_broken_key_is_marked(dtype: torch.dtype) -> None:
    check("cuda", dtype)


@pytest.mark.gpu
def test_no_kernel_is_launched_on_tensors_without_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from polyhead.ops.common.nonfinite import without_nonfinite

    with FakeTensorMode():
        key = torch.randn(2, 3, 71, 16, device="cuda")
        for requires_grad in (False, True):
            clean_key, clean_value, poison = without_nonfinite(key.requires_grad_(requires_grad), key)
            assert clean_key.shape == clean_value.shape == key.shape
            assert poison.shape == key.shape[:-1]
    torch.cuda.synchronize()
