"""What every test may use: markers that skip with a reason, and the golden cases."""

from __future__ import annotations

import os

# Two busy cores are the smallest machine this has to run on; nested thread pools only slow it down.
os.environ.setdefault("OMP_NUM_THREADS", "2")

import golden
import pytest
import torch


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
