"""One generated GPU case of each variant; without a GPU they are put to `blockwise`, so that they stay true."""

from __future__ import annotations

import pytest

from tests import gpu_cases


@pytest.mark.parametrize("index", range(len(gpu_cases.variants())), ids=lambda i: str(gpu_cases.variants()[i]))
def test_one_case_of_each_variant_is_within_its_bounds(index: int) -> None:
    used = gpu_cases.check(gpu_cases.draw(gpu_cases.variants()[index], seed=index))
    assert {name: share for name, share in used.items() if not share <= 1} == {}
