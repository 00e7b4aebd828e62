"""What every test may use: markers that skip with a reason, and the golden cases."""

from __future__ import annotations

import os

# The problems here are small and the machine may be busy: more threads would mostly wait for each other. The compiled
# library keeps two, so that its parallel loops are exercised.
os.environ.setdefault("OMP_NUM_THREADS", "2")

import golden
import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(params=golden.names())
def golden_case(request: pytest.FixtureRequest) -> golden.GoldenCase:
    """Every golden case in turn, by name."""
    return golden.load(request.param)
