"""Nsight Compute's numbers in plain words, with the tool's own name beside each."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kda_lab.profiling import table
from kda_lab.profiling.ncu import Report
from kda_lab.sass import Kernel


@dataclasses.dataclass(frozen=True)
class Metric:
    """How one number of Nsight Compute is shown."""

    raw: str  # the tool's name
    words: str  # what it says
    unit: str  # what it is shown in
    scale: float = 1.0  # from the report's base unit to `unit`


_NS, _BYTE = 1.0, 1.0  # ncu_report gives times in nanoseconds and sizes in bytes

SUMMARY = (
    Metric("gpu__time_duration.sum", "time on the GPU", "µs", _NS / 1e3),
    Metric("dram__bytes_read.sum", "read from device memory", "MB", _BYTE / 1e6),
    Metric("dram__bytes_write.sum", "written to device memory", "MB", _BYTE / 1e6),
    Metric("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "device memory, share of its peak", "%"),
    Metric(
        "sm__throughput.avg.pct_of_peak_sustained_elapsed", "multiprocessors, busiest pipe's share of its peak", "%"
    ),
    Metric("lts__t_sector_hit_rate.pct", "found in the L2 cache", "%"),
    Metric("sm__warps_active.avg.pct_of_peak_sustained_active", "occupancy reached", "%"),
    Metric("sm__maximum_warps_per_active_cycle_pct", "occupancy possible", "%"),
    Metric("smsp__issue_active.avg.per_cycle_active", "instructions issued a cycle and scheduler (at most 1)", ""),
    Metric("smsp__warps_eligible.avg.per_cycle_active", "warps ready to issue, a cycle and scheduler", ""),
    Metric("smsp__inst_executed.sum", "instructions of a warp executed", "million", 1e-6),
    Metric("smsp__inst_executed_pipe_xu.sum", "of them exponentials and conversions (pipe XU)", "million", 1e-6),
    Metric("sass__inst_executed_register_spilling", "of them spilling registers to memory", "million", 1e-6),
    Metric("launch__registers_per_thread", "registers a thread", ""),
    Metric("launch__shared_mem_per_block", "shared memory a block", "kB", _BYTE / 1e3),
    Metric("launch__block_size", "threads a block", ""),
    Metric("launch__grid_size", "blocks", ""),
    Metric("launch__waves_per_multiprocessor", "waves: times the grid fills the GPU", ""),
)

OCCUPANCY_LIMITS = {  # blocks of this kernel that fit on a multiprocessor, by what runs out
    "launch__occupancy_limit_registers": "registers",
    "launch__occupancy_limit_shared_mem": "shared memory",
    "launch__occupancy_limit_warps": "warps",
    "launch__occupancy_limit_blocks": "blocks",
    "launch__occupancy_limit_barriers": "barriers",
}

_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {  # cycles a warp spends between two of its instructions, by what it waits for
    "long_scoreboard": "data from device memory or L2",
    "short_scoreboard": "data from shared memory or a special function",
    "barrier": "other warps, at a block barrier",
    "wait": "a fixed delay of the instruction before",
    "not_selected": "its turn: it is ready, another warp was chosen",
    "math_pipe_throttle": "a busy arithmetic pipe",
    "mio_throttle": "a full queue of shared-memory and special-function instructions",
    "lg_throttle": "a full queue of memory instructions",
    "tex_throttle": "a full queue of texture instructions",
    "gmma": "a tensor-core product in flight",
    "dispatch_stall": "the dispatcher",
    "branch_resolving": "a branch to be decided",
    "no_instruction": "the next instruction to be fetched",
    "imc_miss": "a constant to be fetched",
    "membar": "a memory fence",
    "drain": "its last stores",
    "sleeping": "a sleep it asked for",
    "misc": "something else",
    "selected": "nothing: it issues",
}


def summary(report: Report) -> list[dict[str, Any]]:
    """One row a metric: words, unit, the mean for each kernel (None: not measured), the tool's own name."""
    rows = []
    for metric in SUMMARY:
        row: dict[str, Any] = {"what": metric.words, "unit": metric.unit}
        for kernel in report.kernels:
            row[kernel] = mean(report, kernel, metric.raw, metric.scale)
        rows.append(row | {"raw": metric.raw})
    return rows


def mean(report: Report, kernel: str, metric: str, scale: float = 1.0) -> float | None:
    """The mean over a kernel's launches, or None when it was not measured."""
    values = report.values(kernel, metric)
    return statistics.fmean(values) * scale if values else None


def stalls(report: Report, kernel: str) -> dict[str, float]:
    """Cycles between two instructions of a warp by what it waits for, longest first. Empty: not measured."""
    cycles = {words: mean(report, kernel, _STALL.format(reason)) for reason, words in STALLS.items()}
    return dict(sorted(((words, n) for words, n in cycles.items() if n), key=lambda item: -item[1]))


def occupancy(report: Report, kernel: str) -> dict[str, Any]:
    """Occupancy reached and possible in %, and what limits it: the resource, and the blocks that fit by each."""
    limits = {words: mean(report, kernel, raw) for raw, words in OCCUPANCY_LIMITS.items()}
    limits = {words: blocks for words, blocks in limits.items() if blocks is not None}
    tightest = min(limits, key=limits.__getitem__, default=None)
    return {
        "reached": mean(report, kernel, "sm__warps_active.avg.pct_of_peak_sustained_active"),
        "possible": mean(report, kernel, "sm__maximum_warps_per_active_cycle_pct"),
        "limited_by": tightest,
        "blocks_per_multiprocessor": limits,
    }


def traffic(report: Report, kernel: str) -> dict[str, float | None]:
    """Time in s and bytes moved between the GPU and its memory, as means over a kernel's launches."""
    read, written = (mean(report, kernel, f"dram__bytes_{way}.sum") for way in ("read", "write"))
    time = mean(report, kernel, "gpu__time_duration.sum", _NS * 1e-9)
    return {"time_s": time, "bytes": None if read is None or written is None else read + written}


def kernels(
    report: Report, copy_bytes_per_s: float | None = None, code: Mapping[str, Kernel] | None = None
) -> list[dict[str, Any]]:
    """A row for each kernel: time, bytes moved, their rate as a share of a copy's, registers, spills, occupancy.

    code: the step's machine code, for the spills; what is not known is None.
    """
    rows = []
    for kernel in report.kernels:
        moved = traffic(report, kernel)
        known = None not in (*moved.values(), copy_bytes_per_s)
        full_name = next(launch.full_name for launch in report.launches if launch.kernel == kernel)
        compiled = (code or {}).get(table.instance_name(full_name))
        rows.append(
            {
                "kernel": kernel,
                "time_us": None if moved["time_s"] is None else 1e6 * moved["time_s"],
                "bytes": moved["bytes"],
                "share_of_copy": moved["bytes"] / moved["time_s"] / copy_bytes_per_s if known else None,
                "registers": mean(report, kernel, "launch__registers_per_thread"),
                "spill_bytes": None if compiled is None else compiled.spill_store_bytes + compiled.spill_load_bytes,
                "occupancy": mean(report, kernel, "sm__warps_active.avg.pct_of_peak_sustained_active"),
            }
        )
    return rows


def comparison(reports: Mapping[str, Report], metrics: Sequence[Metric] = SUMMARY) -> list[dict[str, Any]]:
    """Steps side by side: one row a metric and kernel that any of them has, a column for each step; None: not there."""
    kernels_of_all = dict.fromkeys(kernel for report in reports.values() for kernel in report.kernels)
    return [
        {"what": metric.words, "kernel": kernel, "unit": metric.unit}
        | {name: mean(report, kernel, metric.raw, metric.scale) for name, report in reports.items()}
        | {"raw": metric.raw}
        for metric in metrics
        for kernel in kernels_of_all
    ]
