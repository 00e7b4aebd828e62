"""Where every step stands below the measured ceilings of the same GPU: memory, arithmetic and exponentials."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kda_lab.profiling import metrics
from kda_lab.profiling.ncu import Report

XU_LANES = 32  # threads of one warp instruction, each with its own result


@dataclasses.dataclass(frozen=True)
class Point:
    """One step: all of its kernels together."""

    name: str
    time_s: float
    bytes: float  # moved between the GPU and its memory, measured
    flops: float  # of the algorithm, not of the instructions (kda_lab.bench.flops)
    exponentials: float | None  # results of pipe XU: exponentials, and the conversions that share the pipe

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.time_s


def point(name: str, report: Report, flops: float) -> Point | None:
    """A step's point from its Nsight Compute report; None where time or bytes were not measured."""
    parts = [metrics.traffic(report, kernel) for kernel in report.kernels]
    if any(None in part.values() for part in parts):
        return None
    launches = {kernel: sum(launch.kernel == kernel for launch in report.launches) for kernel in report.kernels}
    xu = [metrics.mean(report, kernel, "smsp__inst_executed_pipe_xu.sum") for kernel in report.kernels]
    counts = list(launches.values())
    return Point(
        name,
        time_s=sum(part["time_s"] * count for part, count in zip(parts, counts)),
        bytes=sum(part["bytes"] * count for part, count in zip(parts, counts)),
        flops=flops,
        exponentials=None if None in xu else XU_LANES * sum(x * count for x, count in zip(xu, counts)),
    )


def floors(at: Point, ceilings: Mapping[str, Any]) -> dict[str, float | None]:
    """The shortest time in s that each ceiling allows for this step's own bytes, operations and exponentials."""
    exponentials_per_s = ceilings.get("exponentials_per_s")
    known = at.exponentials is not None and exponentials_per_s is not None
    return {
        "memory": at.bytes / ceilings["copy_bytes_per_s"],
        "tensor cores": at.flops / ceilings["bf16_flops_per_s"],
        "CUDA cores": at.flops / ceilings["fp32_flops_per_s"],
        "exponentials": at.exponentials / exponentials_per_s if known else None,
    }
