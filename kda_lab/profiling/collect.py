"""Runs one profiler on target.py in a subprocess and returns the file it wrote.

    path = collect.profile("5", "ncu", Path("reports"))

One profiler runs at a time (they share the GPU's counters and CUPTI), in an environment cleaned of what a notebook or
another profiler leaves there. Every way it can fail raises a ProfilingError that says what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kda_lab import registry
from kda_lab.profiling import tools
from kda_lab.profiling.tools import ProfilingError, ToolTooOld

TOOLS = ("ncu", "nsys", "torch")
SUFFIXES = {"ncu": ".ncu-rep", "nsys": ".sqlite.gz", "torch": ".json.gz"}

NCU_SECTIONS = (
    "SpeedOfLight",
    "LaunchStats",
    "Occupancy",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
    "InstructionStats",
)
NCU_METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "smsp__inst_executed.sum",
    "smsp__inst_executed_pipe_xu.sum",
)
_PASSES = {"ncu": 1, "nsys": 5, "torch": 3}  # ncu replays each launch itself

_TOO_OLD = (
    "unrecognised option",
    "unrecognized option",
    "unknown option",
    "Failed to find metric",
    "Failed to find sec",
)

# What another profiler or a notebook leaves behind; the tool under us sets its own.
_FOREIGN_PREFIXES = ("NSYS_", "NV_NSIGHT_", "NV_COMPUTE_PROFILER_", "NV_TPS_", "CUPTI_", "JPY_", "COLAB_")
_FOREIGN = ("MPLBACKEND", "LD_PRELOAD", "CUDA_INJECTION64_PATH", "CUDA_INJECTION32_PATH", "NVTX_INJECTION64_PATH")


class CountersDenied(ProfilingError):
    pass


class EmptyReport(ProfilingError):
    pass


class Busy(ProfilingError):
    pass


class TimedOut(ProfilingError):
    pass


class Cancelled(ProfilingError):
    pass


class TargetFailed(ProfilingError):
    pass


def profile(
    step: int | str,
    tool: str,
    out: Path,
    *,
    device: str = "cuda",
    B: int = 1,
    T: int = 8192,
    H: int = 96,
    chunk: int = 16,
    regime: str = "mixed",
    timeout: float = 300.0,
    progress: Callable[[str], None] = lambda line: None,
    cancel: threading.Event | None = None,
) -> Path:
    """Profiles one step and returns the report: out/<step>.ncu-rep, .sqlite.gz (nsys) or .json.gz (torch.profiler).

    progress: called with each line that the tool or the target prints. cancel: set it from another thread to stop.
    Raises a ProfilingError: ToolMissing, ToolTooOld, CountersDenied, EmptyReport, Busy, TimedOut, Cancelled or
    TargetFailed.
    """
    if tool not in TOOLS:
        raise ValueError(f"tool is {tool!r}; expected one of {', '.join(TOOLS)}")
    if device == "cpu" and tool != "torch":
        raise ValueError(f"tool is {tool!r} for device 'cpu'; Nsight profiles GPUs, use tool='torch'")
    name = registry.get(step, device).name
    found = None if tool == "torch" else tools.find(tool)
    out.mkdir(parents=True, exist_ok=True)
    report = out / (name + SUFFIXES[tool])
    target = [sys.executable, "-m", "kda_lab.profiling.target", "--step", name, "--device", device]
    target += [*_shape_options(B, T, H, chunk), "--regime", regime, "--iterations", str(_PASSES[tool])]
    with _one_at_a_time(), tempfile.TemporaryDirectory(prefix="kda_lab-") as folder:
        made = Path(folder) / ("report" + {"ncu": ".ncu-rep", "nsys": ".nsys-rep", "torch": ".json.gz"}[tool])
        if tool == "torch":
            command = [*target, "--torch-trace", str(made)]
        else:
            command = {"ncu": ncu_command, "nsys": nsys_command}[tool](found.path, made, target)
        output = run(command, timeout=timeout, progress=progress, cancel=cancel)
        _require(made, tool, output)
        if tool == "nsys":
            made = _export_sqlite(found.path, made, timeout, progress, cancel)
        shutil.move(made, report)
    return report


def kernel_events(step: int | str, out: Path, *, timeout: float = 120.0, iterations: int = 10, **shape: int) -> Path:
    """Times each kernel of a step with CUDA events, no profiler attached, and writes out/<step>.json: {kernel: µs}.

    shape: B, T, H and chunk as in `profile`. Raises ProfilingError.
    """
    name = registry.get(step, "cuda").name
    command = [sys.executable, "-m", "kda_lab.profiling.target", "--step", name, "--kernel-events"]
    command += ["--iterations", str(iterations), *_shape_options(**shape)]
    summary = json.loads(run(command, timeout=timeout).splitlines()[-1])
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps(summary["kernel_events_us"]) + "\n", encoding="utf-8")
    return path


def _shape_options(B: int = 1, T: int = 8192, H: int = 96, chunk: int = 16) -> list[str]:
    return ["-B", str(B), "-T", str(T), "-H", str(H), "--chunk", str(chunk)]


def ncu_command(ncu: Path, report: Path, target: Sequence[str]) -> list[str]:
    """Nsight Compute's command line: chosen sections, caches and clocks left as they are in use, NVTX ranges kept."""
    sections = [argument for section in NCU_SECTIONS for argument in ("--section", section)]
    return [
        str(ncu),
        "--target-processes=all",
        "--profile-from-start=off",
        "--clock-control=none",
        "--cache-control=none",
        "--nvtx",
        *sections,
        f"--metrics={','.join(NCU_METRICS)}",
        "--force-overwrite",
        f"--export={report.with_suffix('')}",
        *target,
    ]


def nsys_command(nsys: Path, report: Path, target: Sequence[str]) -> list[str]:
    """Nsight Systems' command line: CUDA calls, kernels and ranges from cudaProfilerStart to cudaProfilerStop."""
    return [
        str(nsys),
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={report.with_suffix('')}",
        *target,
    ]


def environment() -> dict[str, str]:
    """This process's environment without what a notebook or another profiler left in it; kda_lab importable."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    package_parent = str(Path(__file__).resolve().parents[2])
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, clean.get("PYTHONPATH")]))
    clean["KDA_LAB_PROFILE"] = "1"
    return clean


def run(
    command: Sequence[str],
    *,
    timeout: float,
    progress: Callable[[str], None] = lambda line: None,
    cancel: threading.Event | None = None,
) -> str:
    """Runs a command to its end and returns what it printed; stops it with all its children when late or cancelled.

    Raises TimedOut, Cancelled, or what `explain` makes of a failure.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(),
        start_new_session=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
    reader.start()
    output, deadline = [], time.monotonic() + timeout
    while True:
        try:
            line = lines.get(timeout=0.1)
        except queue.Empty:
            line = ""
        if line is None:
            break
        if line:
            output.append(line)
            progress(line.rstrip("\n"))
        if cancel is not None and cancel.is_set():
            _stop(process)
            raise Cancelled(f"{Path(command[0]).name} was stopped before it finished. Nothing was written.")
        if time.monotonic() > deadline:
            _stop(process)
            raise TimedOut(
                f"{Path(command[0]).name} took longer than {timeout:g} s and was stopped. Use a smaller T or H, or a "
                "longer timeout."
            )
    code, text = process.wait(), "".join(output)
    problem = explain(text, code)
    if problem is not None:
        raise problem
    return text


def explain(output: str, code: int) -> ProfilingError | None:
    """What a tool's output and exit status mean: None when all went well, otherwise the error with its remedy."""
    if "ERR_NVGPUCTRPERM" in output:
        return CountersDenied(
            "The NVIDIA driver lets only administrators read GPU performance counters. Run as root (in a container: "
            "--cap-add=SYS_ADMIN), or have an administrator load the driver with NVreg_RestrictProfilingToAdminUsers=0."
        )
    if "LibraryNotLoaded" in output:
        return CountersDenied(
            "This machine's sandbox hides the GPU's performance counters from Nsight Compute. Run on the host or in a "
            "virtual machine that passes the counters through; nsys and torch.profiler may work here."
        )
    if "No kernels were profiled" in output:
        return EmptyReport(
            "The profiler saw no kernel, so its report is empty. Check that the step runs on this GPU: "
            f"python -m kda_lab.profiling.target printed: {_tail(output)}"
        )
    for sign in _TOO_OLD:
        if sign in output:
            return ToolTooOld(
                f"This version of the tool does not know what kda_lab asks for ({_line_with(output, sign)}). Install "
                "the version that belongs to your driver's CUDA release."
            )
    if code != 0:
        return TargetFailed(f"The profiled program ended with status {code}: {_tail(output)}. Run it alone to see why.")
    return None


def _export_sqlite(nsys: Path, made: Path, timeout: float, progress: Callable, cancel: threading.Event | None) -> Path:
    database = made.with_suffix(".sqlite")
    run(
        [str(nsys), "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(made)],
        timeout=timeout,
        progress=progress,
        cancel=cancel,
    )
    _require(database, "nsys", "nsys export")
    packed = database.with_suffix(".sqlite.gz")
    packed.write_bytes(gzip.compress(database.read_bytes(), mtime=0))
    return packed


def _require(report: Path, tool: str, output: str) -> None:
    if report.exists() and report.stat().st_size > 0:
        return
    if list(report.parent.glob("*.qdstrm")):
        raise EmptyReport(
            "nsys recorded events but could not turn them into a report. Its importer lacks libraries: install libdw1 "
            f"and libelf1 (Debian, Ubuntu: apt-get install libdw1). It said: {_tail(output)}"
        )
    raise EmptyReport(f"{tool} ended without writing a report. It said: {_tail(output)}. Run it by hand to see more.")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    lock = Path(tempfile.gettempdir()) / f"kda_lab-profiler-{os.getuid()}.lock"
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                "Another profile of yours is running, and two disturb each other's counters. Wait for it, or stop it."
            ) from None
        yield


def _stop(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_lines(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _tail(output: str, lines: int = 3) -> str:
    last = [line.strip() for line in output.splitlines() if line.strip()][-lines:]
    return " / ".join(last) or "nothing"


def _line_with(output: str, sign: str) -> str:
    return next(line.strip() for line in output.splitlines() if sign in line)
