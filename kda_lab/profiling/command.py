"""``kda-lab profile``: run a step under a profiler and print what it found; and what doctor says about the tools."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kda_lab.profiling import collect, metrics, ncu, nsys, table, tools, torch_trace
from kda_lab.profiling.tools import ProfilingError


def run(
    step: int | str,
    tool: str,
    out: Path = Path("build/profile"),
    *,
    progress: Callable[[str], None] = lambda line: None,
    **options: object,
) -> str:
    """Profiles a step (options: those of collect.profile) and returns the report's path and its table as text.

    A report that cannot be read here is kept, with the reason in the text. Raises ProfilingError or ReportError with
    one sentence on what is wrong and one on what to do.
    """
    path = collect.profile(step, tool, out, progress=progress, **options)
    try:
        return f"{path}\n\n{describe(path)}"
    except tools.ToolMissing as error:
        return f"{path}\n\nnot read: {error}"


def describe(path: Path) -> str:
    """What a report says, as plain text: metrics of each kernel (ncu), or its times (nsys, torch.profiler)."""
    if path.name.endswith(collect.SUFFIXES["ncu"]):
        report = ncu.read(path)
        kernels = {kernel: kernel for kernel in report.kernels}
        return table.text(
            metrics.summary(report), {"what": "metric", "unit": "", **kernels, "raw": "in Nsight Compute"}
        )
    timeline = (nsys if path.name.endswith(collect.SUFFIXES["nsys"]) else torch_trace).read(path)
    kind = "kernel" if timeline.of("kernel") else "range"
    columns = {"Kernel": kind, "AvgValue": "mean µs", "MinValue": "min µs", "MaxValue": "max µs", "NumRuns": "runs"}
    return table.text(timeline.rows(kind), columns)


def doctor() -> list[tuple[str, bool | None, str, str]]:
    """(name, ok, value, fix) of every profiling tool; ok is None for what only recorded reports can stand in for."""
    facts: list[tuple[str, bool | None, str, str]] = []
    for name, label in (("ncu", "Nsight Compute"), ("nsys", "Nsight Systems")):
        try:
            found = tools.find(name)
            facts.append((label, True, f"{found.version} at {found.path}", ""))
        except ProfilingError as error:
            problem, _, remedy = str(error).partition(". ")
            facts.append((label, None, problem, remedy))
    facts.append(("GPU counters", *_counters()))
    facts.append(("CUPTI", *_cupti()))
    facts.append(("ncu-report", *_reader()))
    return facts


def _counters() -> tuple[bool | None, str, str]:
    """Whether the driver lets this user read counters, as far as its parameters tell."""
    parameters = Path("/proc/driver/nvidia/params")
    if not parameters.exists():
        return None, "no NVIDIA driver here", ""
    restricted = "RmProfilingAdminOnly: 1" in parameters.read_text(encoding="utf-8", errors="replace")
    if restricted and os.geteuid() != 0:
        return (
            None,
            "for administrators only",
            "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or run as root",
        )
    return True, "readable by everyone" if not restricted else "readable, as root", ""


def _cupti() -> tuple[bool | None, str, str]:
    """Whether torch.profiler can record GPU work."""
    import torch

    if torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities():
        return True, "torch.profiler records the GPU", ""
    return (
        None,
        "torch.profiler records the CPU only",
        "install a CUDA build of torch" if torch.version.cuda is None else "",
    )


def _reader() -> tuple[bool | None, str, str]:
    try:
        ncu.reader()
    except ProfilingError:
        return None, "not installed", "pip install ncu-report"
    return True, "reads .ncu-rep files", ""
