"""``kda-lab profile`` and doctor's lines on the tools; times by CUDA events; the optional nsight-python."""

from __future__ import annotations

import contextlib
import json
import sys
import types

import pytest
import torch
from test_profiling_readers import write_nsys
from test_profiling_record import HostEvent
from test_profiling_views import TWO

from kda_lab import ops
from kda_lab.inputs import make_inputs
from kda_lab.profiling import collect, command, kernel_events, ncu, nsight_python, recorded, target, tools


def test_profile_on_a_cpu_prints_the_time_of_every_stage(tmp_path):
    text = command.run(3, "torch", tmp_path, device="cpu", T=64, H=2)
    path, table = text.split("\n\n")
    assert path == str(tmp_path / "3_factored.json.gz")
    stages = {line.split()[0]: line.split()[-1] for line in table.splitlines()}
    assert stages["3_factored"] == "3"
    assert "activate_gate" in table


def test_a_report_of_nsight_compute_is_described_in_words(monkeypatch):
    monkeypatch.setattr(ncu, "read", lambda path: TWO)
    text = command.describe(TWO.path)
    line = next(line for line in text.splitlines() if line.startswith("time on the GPU"))
    assert line.split()[-4:] == ["µs", "200", "100", "gpu__time_duration.sum"]
    assert "not measured" in next(line for line in text.splitlines() if line.startswith("found in the L2 cache"))


def test_a_report_that_cannot_be_read_here_is_kept_and_says_why(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ncu_report", None)  # an import of it raises ImportError
    ncu.reader.cache_clear()
    report = tmp_path / "0_token_by_token.ncu-rep"
    report.write_bytes(b"a report")
    monkeypatch.setattr(collect, "profile", lambda *args, **options: report)
    text = command.run(0, "ncu", tmp_path)
    ncu.reader.cache_clear()
    assert text.startswith(f"{report}\n\nnot read: Reading Nsight Compute reports needs the package ncu-report.")
    assert text.endswith("pip install ncu-report.")


def test_doctor_names_each_tool_and_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tools, "candidates", lambda name, root=None: [])
    facts = {name: (ok, value, fix) for name, ok, value, fix in command.doctor()}
    assert set(facts) == {"Nsight Compute", "Nsight Systems", "GPU counters", "CUPTI", "ncu-report"}
    ok, value, fix = facts["Nsight Compute"]
    assert ok is None
    assert "not installed" in value
    assert fix.startswith("Install Nsight Compute")


def test_events_time_every_launch_by_its_ranges_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    inputs = make_inputs(T=64, H=1)
    times = kernel_events.measure(lambda: ops.forward(inputs, step=5), count=3)
    assert {"prepare", "recurrence"} <= set(times)
    assert [len(samples) for samples in times.values()] == [3] * len(times)
    assert all(sample > 0 for samples in times.values() for sample in samples)


def test_events_are_written_with_the_shape_they_were_asked_for(monkeypatch, tmp_path):
    commands = []

    def run(asked, **_):
        commands.append(asked)
        return 'a line\n{"step": 5, "kernel_events_us": {"prepare": 340.5}}\n'

    monkeypatch.setattr(collect, "run", run)
    path = collect.kernel_events(5, tmp_path, T=128, H=4)
    assert json.loads(path.read_text()) == {"prepare": 340.5}
    assert "-T 128 -H 4" in " ".join(commands[0])


def test_the_target_repeats_what_it_draws():
    inputs = target.repeated_inputs(T=2500, H=1, device="cpu")
    assert inputs.q.shape == (1, 2500, 1, 128)
    assert inputs.beta.shape == (1, 2500, 1)
    assert torch.equal(inputs.k[:, 2048:], inputs.k[:, : 2500 - 2048])


def test_times_of_the_tools_are_compared(tmp_path, monkeypatch):
    (tmp_path / "events").mkdir()
    (tmp_path / "events/5_fused_two_kernel.json").write_text('{"prepare": 325.0}')
    (tmp_path / "nsys").mkdir()
    export = write_nsys(tmp_path / "nsys/5_fused_two_kernel.sqlite")
    recording = recorded.Recording(tmp_path)
    monkeypatch.setattr(recorded.Recording, "nsys", lambda self, step: command.nsys.read(export))
    monkeypatch.setattr(recorded.Recording, "ncu", lambda self, step: TWO)
    prepare, recurrence = recording.agreement(5)
    assert (prepare["events_us"], prepare["nsys_us"], prepare["ncu_us"], prepare["torch_us"]) == (
        325.0,
        340.0,
        200.0,
        None,
    )
    assert prepare["spread"] == pytest.approx(0.7)
    assert (recurrence["events_us"], recurrence["nsys_us"]) == (None, 280.0)


def test_nsight_python_is_asked_for_what_ncu_would_measure(monkeypatch):
    asked = {}

    def kernel(**options):
        asked.update(options)
        frame = types.SimpleNamespace(to_dict=lambda orient: [{"Metric": "gpu__time_duration.sum", "AvgValue": 1.0}])
        return lambda function: lambda: function() or types.SimpleNamespace(to_dataframe=lambda: frame)

    fake = types.SimpleNamespace(analyze=types.SimpleNamespace(kernel=kernel), annotate=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "nsight", fake)
    monkeypatch.setattr(nsight_python, "make_inputs", lambda *shape, device: make_inputs(*shape))
    rows = nsight_python.profile(5, T=32, H=1, runs=4)
    assert rows == [{"Metric": "gpu__time_duration.sum", "AvgValue": 1.0}]
    assert (asked["runs"], asked["clock_control"], asked["cache_control"]) == (4, "none", "none")
    assert asked["combine_kernel_metrics"](1, 2) == 3
    monkeypatch.setitem(sys.modules, "nsight", None)
    with pytest.raises(tools.ToolMissing, match="pip install nsight-python"):
        nsight_python.profile(5)
