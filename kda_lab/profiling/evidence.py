"""Records what ships in data/recorded/<gpu>: ceilings of the GPU, profiler reports and machine code of every step."""

from __future__ import annotations

import dataclasses
import gzip
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from kda_lab import bench, microbench, registry, sass
from kda_lab.profiling import collect, machine
from kda_lab.profiling.tools import ProfilingError

TEACHING_SHAPE = {"B": 1, "T": 8192, "H": 96, "chunk": 16}


def ceilings() -> dict[str, float]:
    """What this GPU reaches just now, per second: a copy's bytes, bf16 and fp32 matrix products, exponentials."""
    bound = bench.measure_bound("cuda")
    n = 8192
    a, b, out = (torch.randn(n, n, device="cuda") for _ in range(3))
    fp32_ms = statistics.median(bench.time_call(lambda: torch.mm(a, b, out=out), device="cuda"))
    return {
        "copy_bytes_per_s": bound.bytes_per_s,
        "bf16_flops_per_s": bound.flops_per_s,
        "fp32_flops_per_s": 2 * n**3 / (fp32_ms / 1e3),
        "exponentials_per_s": _exponentials_per_s(),
    }


def _exponentials_per_s() -> float | None:
    """The best form's results a clock, on all multiprocessors, at the clock the GPU runs at right after."""
    rows = microbench.exp_throughput()
    clock_mhz = machine.clocks()["clocks.sm"]
    best = max(row["results_per_clock_per_sm"] * row["sms"] for row in rows)
    return None if clock_mhz is None else best * clock_mhz * 1e6


def bound(measured: dict[str, float]) -> bench.Bound:
    return bench.Bound(flops_per_s=measured["bf16_flops_per_s"], bytes_per_s=measured["copy_bytes_per_s"])


def profiles(out: Path, report: Callable[[str], None]) -> None:
    """Every CUDA step under every tool at TEACHING_SHAPE, to out/<tool>/<step>.*; a tool that fails is reported."""
    for tool in collect.TOOLS:
        for step in registry.steps():
            if "cuda" not in step.devices:
                continue
            try:
                path = collect.profile(step.number, tool, out / tool, **TEACHING_SHAPE)
                if path.suffix != ".gz":
                    path = _pack(path)
                (out / tool / "machine.json").unlink(missing_ok=True)  # of reports that this one takes the place of
                report(f"{path.relative_to(out)}: {path.stat().st_size / 1e3:.0f} kB")
            except ProfilingError as error:
                report(f"{tool} {step.name}: not measured. {error}")


def _pack(path: Path) -> Path:
    """Replaces a report by its gzipped form, an eighth of the size."""
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()
    return packed


def kernel_events(out: Path, report: Callable[[str], None]) -> None:
    """Each kernel's time by CUDA events with no profiler attached, at TEACHING_SHAPE, to out/events/<step>.json."""
    for step in registry.steps():
        if "cuda" in step.devices:
            path = collect.kernel_events(step.number, out / "events", **TEACHING_SHAPE)
            report(f"{path.relative_to(out)}: {path.read_text(encoding='utf-8').strip()}")


OTHER_CODE = (("exp_throughput", ""), ("exp_throughput", "sm_75"), (5, "sm_80"))
"""What claims count instructions in beside the steps' code for the GPU itself ("")."""


def code(out: Path, report: Callable[[str], None], arch: str = "sm_90a") -> None:
    """The machine code and resources of every CUDA step's kernels for one architecture, to out/sass/<step>.json.gz,
    and of OTHER_CODE, where another architecture is a part of the file's name."""
    (out / "sass").mkdir(parents=True, exist_ok=True)
    steps = [(step.number, "") for step in registry.steps() if "cuda" in step.devices]
    for step, other in (*steps, *OTHER_CODE):
        compiled = sass.compile_step(step, other or arch)
        content = json.dumps({name: dataclasses.asdict(kernel) for name, kernel in sass.kernels(compiled).items()})
        path = out / "sass" / f"{compiled.name}{other and '.'}{other}.json.gz"
        path.write_bytes(gzip.compress(content.encode(), mtime=0))
        report(f"{path.relative_to(out)}: {path.stat().st_size / 1e3:.0f} kB")
