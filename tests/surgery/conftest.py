"""Shared fixture of the surgery tests: a short text."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.integrations.huggingface import models


@pytest.fixture(scope="session")
def batches() -> list[dict[str, Tensor]]:
    """Six batches of random tokens for any small model."""
    return [{"input_ids": models.tokens(seed=seed)} for seed in range(6)]
