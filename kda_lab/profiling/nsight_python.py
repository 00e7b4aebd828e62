"""A step measured by NVIDIA's nsight-python, for those who have it: the same rows as ours (kda_lab.profiling.table).

It brings its own way of attaching Nsight Compute and needs a recent one; where it does not work, collect.py may.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from kda_lab import ops, registry
from kda_lab.inputs import make_inputs
from kda_lab.profiling.table import Row
from kda_lab.profiling.tools import ToolMissing

SUMS = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum")
"""Metrics that may be added up over the kernels of a step, as nsight-python does within one annotation."""


def profile(
    step: int | str, *, T: int = 8192, H: int = 96, chunk: int = 16, runs: int = 3, metrics: Sequence[str] = SUMS
) -> list[Row]:
    """One row a metric, over all kernels of the step, of `runs` forward passes.

    Raises ToolMissing where nsight-python is not installed, and what nsight-python itself raises.
    """
    try:
        nsight = importlib.import_module("nsight")
    except ImportError:
        raise ToolMissing(
            "nsight-python is not installed here. Install it: pip install nsight-python; "
            "kda_lab.profiling.collect needs only Nsight Compute itself."
        ) from None
    name = registry.get(step, "cuda").name
    inputs = make_inputs(1, T, H, device="cuda")

    @nsight.analyze.kernel(
        metrics=list(metrics),
        runs=runs,
        clock_control="none",
        cache_control="none",
        combine_kernel_metrics=lambda one, other: one + other,
    )
    def forward() -> None:
        with nsight.annotate(name):
            ops.forward(inputs, step=name, chunk=chunk)

    return forward().to_dataframe().to_dict("records")
