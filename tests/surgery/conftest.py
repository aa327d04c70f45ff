"""What the tests of surgery share: a short text."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.integrations.huggingface import models


@pytest.fixture(scope="session")
def batches() -> list[dict[str, Tensor]]:
    """Six batches of random tokens, as any small model reads them."""
    return [{"input_ids": models.tokens(seed=seed)} for seed in range(6)]
