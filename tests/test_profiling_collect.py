"""Running profilers: every way a tool can fail, played by a stub executable, and what the user is told."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from kda_lab.profiling import collect, tools, torch_trace

STUB = Path(__file__).with_name("profiler_stub.py")


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Puts the stub first on PATH as ncu and nsys, gives the profiler lock a folder of its own, and sets STUB_MODE."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in tools.MINIMUM:
        shutil.copy(STUB, folder / name)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(collect.tempfile, "gettempdir", lambda: str(tmp_path))

    def mode(name: str, version: str = "2025.3.1.0") -> None:
        monkeypatch.setenv("STUB_MODE", name)
        monkeypatch.setenv("STUB_VERSION", version)

    mode("good")
    return mode


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_a_good_run_leaves_the_report_under_the_steps_name(stub, tool, tmp_path):
    path = collect.profile(5, tool, tmp_path / "out")
    assert path == tmp_path / "out" / f"5_fused_two_kernel{collect.SUFFIXES[tool]}"
    assert path.stat().st_size > 0


@pytest.mark.parametrize(
    ("mode", "tool", "error", "problem", "remedy"),
    [
        ("denied", "ncu", collect.CountersDenied, "only administrators", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("sandbox", "ncu", collect.CountersDenied, "sandbox", "torch.profiler may work"),
        ("no-kernels", "ncu", collect.EmptyReport, "no kernel", "kda_lab.profiling.target"),
        ("no-report", "ncu", collect.EmptyReport, "without writing a report", "by hand"),
        ("no-report", "nsys", collect.EmptyReport, "without writing a report", "by hand"),
        ("qdstrm", "nsys", collect.EmptyReport, "importer lacks libraries", "libdw1"),
        ("old", "nsys", tools.ToolTooOld, "capture-range-end", "driver's CUDA release"),
        ("target-fails", "ncu", collect.TargetFailed, "status 3", "no CUDA GPU here"),
    ],
)
def test_each_failure_is_named_with_its_remedy(stub, mode, tool, error, problem, remedy, tmp_path):
    stub(mode)
    with pytest.raises(error) as caught:
        collect.profile(5, tool, tmp_path / "out")
    assert problem in str(caught.value)
    assert remedy in str(caught.value)
    assert not list((tmp_path / "out").iterdir())


def test_a_missing_tool_is_named_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tools.ToolMissing, match=r"Nsight Compute \(ncu\) is not installed.*Install Nsight Compute"):
        tools.find("ncu", root=tmp_path)


def test_a_tool_that_is_too_old_is_refused_before_it_runs(stub, tmp_path):
    stub("good", version="2019.5.0")
    with pytest.raises(tools.ToolTooOld, match=r"2019\.5\.0, which is too old"):
        tools.find("nsys", root=tmp_path)


def test_tools_are_found_where_they_hide_the_newest_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for version in ("2024.3.2", "2025.10.1", "2025.3.1"):
        hidden = tmp_path / "opt/nvidia/nsight-compute" / version / "ncu"
        hidden.parent.mkdir(parents=True)
        shutil.copy(STUB, hidden)
        hidden.chmod(0o755)
    assert [path.parent.name for path in tools.candidates("ncu", tmp_path)] == ["2025.10.1", "2025.3.1", "2024.3.2"]
    named = tmp_path / "mine"
    monkeypatch.setenv("KDA_LAB_NCU", str(named))
    assert tools.candidates("ncu", tmp_path)[0] == named


def test_a_run_that_takes_too_long_is_stopped_with_its_children(stub, tmp_path):
    stub("hangs")
    begin = time.monotonic()
    with pytest.raises(collect.TimedOut, match=r"longer than 1\.5 s"):
        collect.profile(5, "ncu", tmp_path, timeout=1.5)
    assert time.monotonic() - begin < 10


def test_a_run_can_be_cancelled_and_reports_progress(stub, tmp_path):
    stub("hangs")
    cancel, lines = threading.Event(), []

    def progress(line: str) -> None:
        lines.append(line)
        cancel.set()

    with pytest.raises(collect.Cancelled):
        collect.profile(5, "ncu", tmp_path, timeout=60, progress=progress, cancel=cancel)
    assert lines == ["collecting"]


def test_only_one_profiler_runs_at_a_time(stub, tmp_path):
    with (tmp_path / f"kda_lab-profiler-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(collect.Busy, match="Another profile"):
            collect.profile(5, "ncu", tmp_path)


def test_the_target_gets_an_environment_without_other_profilers_and_notebooks(stub, tmp_path, monkeypatch):
    stub("environment")
    for name in ("MPLBACKEND", "NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "JPY_PARENT_PID"):
        monkeypatch.setenv(name, "left behind")
    monkeypatch.setenv("KEPT_FOR_THE_USER", "yes")
    text = collect.profile(5, "ncu", tmp_path / "out").read_text()
    assert "left behind" not in text
    assert "KEPT_FOR_THE_USER=yes" in text
    assert "KDA_LAB_PROFILE=1" in text


@pytest.mark.parametrize(
    ("tool", "device", "text"), [("perf", "cuda", "expected one of"), ("ncu", "cpu", "tool='torch'")]
)
def test_arguments_that_make_no_sense_are_refused(tool, device, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        collect.profile(5, tool, tmp_path, device=device)


def test_torch_profiler_works_on_a_cpu_and_nests_step_forward_and_stages(tmp_path):
    path = collect.profile(5, "torch", tmp_path, device="cpu", T=64, H=2)
    ranges = torch_trace.read(path).of("range")
    first = {span.depth: span.name for span in reversed(ranges)}
    assert first[0] == "5_fused_two_kernel"
    assert first[1] == "5_fused_two_kernel/forward"
    assert {"prepare", "recurrence"} <= {span.name for span in ranges if span.depth == 2}
    assert sum(span.name == "prepare" for span in ranges) == 3  # the passes inside the profiled region, no warm-up
