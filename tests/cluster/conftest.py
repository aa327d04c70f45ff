"""A Ray cluster on this machine, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster with four CPU slots, whatever the machine has, and no GPU."""
    from polyhead.parallel.ray_workers import join_cluster

    with join_cluster("local", cpus=4) as joined:
        yield joined
