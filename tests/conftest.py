"""What every test may use: markers that skip with a reason, and the golden cases."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

# The problems here are small and the machine may be busy: more threads would mostly wait for each other. The compiled
# library keeps two, so that its parallel loops are exercised.
os.environ.setdefault("OMP_NUM_THREADS", "2")

import browsing
import golden
import pytest
import torch

from kda_lab import native, sass

if TYPE_CHECKING:
    import lessons

torch.set_num_threads(1)


def no_gpu() -> str:
    return "" if torch.cuda.is_available() else "needs a CUDA GPU"


def no_cuda_compiler() -> str:
    try:
        native.find_nvcc()
        sass._find_nvdisasm()
    except native.CompilerNotFound as error:
        return str(error).splitlines()[0]
    return ""


def no_ncu_report() -> str:
    return "" if importlib.util.find_spec("ncu_report") else "needs the package ncu-report (extra nsight)"


# What a laptop may lack. CI has everything but a GPU: there a missing tool fails, or a green run would test nothing.
MISSING = {"gpu": no_gpu}
if not os.environ.get("CI"):
    MISSING |= {"cuda_compiler": no_cuda_compiler, "ncu_report": no_ncu_report}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, missing in MISSING.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (reason := missing()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=golden.names())
def golden_case(request: pytest.FixtureRequest) -> golden.GoldenCase:
    """Every golden case in turn, by name."""
    return golden.load(request.param)


@pytest.fixture(scope="module")  # no longer: Playwright leaves an event loop running, which others could not start then
def browser():
    with browsing.chromium() as running:
        yield running


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The address of a JupyterLab that serves a copy of the lessons."""
    with browsing.jupyterlab(tmp_path_factory.mktemp("lab")) as address:
        yield address


@pytest.fixture(scope="session")
def book(tmp_path_factory) -> lessons.Book:
    """The book of all lessons."""
    import lessons  # here: the GPU tests run on machines without Jupyter

    return lessons.make_book(tmp_path_factory.mktemp("é book"))
