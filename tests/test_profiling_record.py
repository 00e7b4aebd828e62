"""The recording script on a CPU that plays a GPU (a clock instead of events), and the arithmetic under its rows."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
import types

import pytest
import torch

from kda_lab import native, ops, peers, record, registry
from kda_lab.inputs import Inputs, make_inputs
from kda_lab.profiling import accuracy, evidence, ladder, machine
from kda_lab.profiling.recorded import Recording
from kda_lab.profiling.tools import ProfilingError

CPU_STEPS = (0, 3, 5)


class HostEvent:
    """A CUDA event by the host's clock."""

    def __init__(self, **_: object) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return 1e3 * (end.seconds - self.seconds)


@pytest.fixture
def fake_gpu(monkeypatch):
    """Lets the recording code run with every tensor on the CPU and the CPU library's steps."""
    steps, load, to = registry.steps(), native.load, Inputs.to
    monkeypatch.setattr(registry, "steps", lambda: tuple(step for step in steps if step.number in CPU_STEPS))
    monkeypatch.setattr(native, "load", lambda device: load("cpu"))
    monkeypatch.setattr(Inputs, "to", lambda self, device: self if device == "cuda" else to(self, device))
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(L2_cache_size=100_000)
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(machine, "describe", lambda: {"gpu": "a CPU that plays one"})
    ceilings = {"copy_bytes_per_s": 4e12, "bf16_flops_per_s": 8e14, "fp32_flops_per_s": 5e13}
    monkeypatch.setattr(evidence, "ceilings", lambda: ceilings)
    cases = (
        ladder.Case(1, 16, 2, methods=("events", "host_loop", "cuda_graph")),
        ladder.Case(1, 40, 2, seq_lens=(7, 0, 33), state="fp32"),
        ladder.Case(2, 32, 2, state="bf16", all_steps=True),
    )
    monkeypatch.setattr(ladder, "CASES", cases)
    monkeypatch.setattr(accuracy, "LENGTHS", (16, 32))
    monkeypatch.setattr(accuracy, "BOUND_LENGTH", 16)


def test_a_recording_has_a_row_for_every_version_case_and_method(fake_gpu, tmp_path):
    record.record(tmp_path, ["ceilings", "accuracy", "golden", "ladder"])
    content = json.loads((tmp_path / "ladder.json").read_text())
    rows = content["rows"]
    assert [(row["case"].split(",")[0], row["step"], row["method"]) for row in rows] == [
        ("T 16", 5, "events"),
        ("T 16", 5, "host_loop"),
        ("T 16", 5, "cuda_graph"),
        ("packed 3 sequences", 5, "events"),
        ("B 2", 0, "events"),
        ("B 2", 3, "events"),
        ("B 2", 5, "events"),
    ]
    for row in rows:
        assert row["median_ms"] == pytest.approx(statistics.median(row["samples_ms"]), abs=1e-5)
        assert len(row["samples_ms"]) == 40
        assert row["error_rms"] < 2e-3
        assert row["library"] == native.load("cuda").sha256
        assert row["floor_ms"] == pytest.approx(1e3 * max(row["bytes"] / 4e12, row["flops"] / 8e14))
    assert rows[3]["seq_lens"] == [7, 0, 33]
    assert rows[3]["state_error_rms"] < 1e-5
    assert len(content["accuracy"]) == (2 + 3) * len(CPU_STEPS) * len(accuracy.REGIMES)
    tensor_core_steps = [step for step in CPU_STEPS if step >= ladder.TENSOR_CORE_STEP]
    assert len(content["identical_keys"]) == len(tensor_core_steps) * len(accuracy.DRIFT_LOGITS)
    assert {row["case"] for row in content["golden"]} >= {"t16", "collinear_1.0"}
    assert set(content["peers_not_measured"]) == {"flash_kda", "fla"} - set(content["peers"])
    assert json.loads((tmp_path / "machine.json").read_text()) == {"gpu": "a CPU that plays one"}


def test_short_calls_are_timed_on_one_set_of_tensors_under_their_machine(fake_gpu, tmp_path, monkeypatch):
    used, fwd = {}, ops.fwd

    def spy(*args, **options):
        used.setdefault(options["step"], []).append(args[0].data_ptr())
        fwd(*args, **options)

    monkeypatch.setattr(ops, "fwd", spy)
    monkeypatch.setattr(ladder, "SHORT_CASES", (ladder.Case(1, 16, 2, methods=("same_tensors",)),))
    record.record(tmp_path, ["short_calls"])
    short = json.loads((tmp_path / "ladder.json").read_text())["short_calls"]
    assert short["machine"] == {"gpu": "a CPU that plays one"}
    assert [(row["step"], row["method"], len(row["samples_ms"])) for row in short["rows"]] == [(5, "same_tensors", 40)]
    assert len(used[5]) == 1 + 41 * ladder.SHORT_CALLS_PER_SAMPLE  # the check, a round for warming up, the samples
    assert len(set(used[5])) == 1


def test_new_reports_are_not_labelled_with_the_machine_of_those_they_replace(tmp_path, monkeypatch):
    for tool in ("nsys", "torch"):
        (tmp_path / tool).mkdir()
        (tmp_path / tool / "machine.json").write_text(json.dumps({"gpu": "an older one"}))

    def profile(step, tool, out, **shape):
        if tool == "nsys":
            raise ProfilingError("no nsys")
        out.mkdir(exist_ok=True)
        path = out / f"{step}.gz"
        path.write_bytes(b"")
        return path

    monkeypatch.setattr(evidence.collect, "profile", profile)
    evidence.profiles(tmp_path, lambda line: None)
    recording = Recording(tmp_path)
    assert recording.machine_of("torch") == {}
    assert recording.machine_of("nsys") == {"gpu": "an older one"}  # whose reports stay


def test_a_part_does_not_take_the_place_of_a_whole_recording(fake_gpu, tmp_path, capsys):
    record.record(tmp_path, ["golden"])
    before = (tmp_path / "ladder.json").read_bytes()
    with pytest.raises(FileExistsError, match="another folder"):
        record.record(tmp_path, ["ceilings"])
    with pytest.raises(SystemExit):
        record.main(["--out", str(tmp_path), "--quick"])
    assert "a part of one would take its place" in capsys.readouterr().err
    assert (tmp_path / "ladder.json").read_bytes() == before


def test_precise_keys_have_rows_of_their_own(fake_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "TENSOR_CORE_STEP", 3)
    monkeypatch.setattr(ladder, "PRECISE_STEP", 5)
    monkeypatch.setattr(ladder, "CASES", (ladder.Case(1, 16, 2, state="fp32", precise=True),))
    fwd, calls = ops.fwd, []

    def spy(*args, **options):
        calls.append((options["step"], options["precise"], args[3].flatten(1).unique(dim=1).flatten().tolist()))
        fwd(*args, **options)
        args[6][1:2] *= 1.1  # the output of the second gate

    monkeypatch.setattr(ops, "fwd", spy)
    identical = list(accuracy.identical_keys([], (32,)))
    logits = list(accuracy.DRIFT_LOGITS)
    assert calls == [(3, False, logits), (5, False, logits), (5, True, logits)]
    assert [(row["step"], row["precise"], row["gate_logit"]) for row in identical] == [
        (step, precise, logit) for step, precise, _ in calls for logit in logits
    ]
    wrong = {logit: 0.1 * (logit == logits[1]) for logit in logits}
    assert all(row["error_rms"] == pytest.approx(wrong[row["gate_logit"]], abs=3e-3) for row in identical)
    assert all(row["state_error_rms"] < 1e-4 for row in identical)

    calls.clear()
    (row,) = record.record(tmp_path, ["ladder"])["rows"]
    assert (row["step"], row["case"], row["precise"]) == (5, "T 16, H 2, fp32 state, precise", True)
    assert {call[:2] for call in calls} == {(5, True)}


def test_a_graphs_time_is_that_of_one_of_its_calls(fake_gpu, monkeypatch):
    monkeypatch.setattr(ladder, "_time_events", lambda calls, samples: {key: [40.0] * samples for key in calls})
    assert ladder._time_cuda_graph({"a": [lambda: None]}, 2) == {"a": [40.0 / ladder.CALLS_PER_SAMPLE] * 2}


def test_a_step_that_is_wrong_is_not_timed(fake_gpu, tmp_path, monkeypatch):
    bind = ladder.step_binder

    def broken(step, **options):
        def bound(inputs, dtype):
            call = bind(step, **options)(inputs, dtype)

            def wrong():
                result = call()
                result.out.mul_(1.1)
                return result

            return wrong

        return bound

    monkeypatch.setattr(ladder, "step_binder", broken)
    rows = record.record(tmp_path, ["ladder"])["rows"]
    assert all(row["median_ms"] is None and row["samples_ms"] == [] for row in rows)
    assert all("not timed" in row["refused"] for row in rows)


def test_a_version_that_raises_is_named_and_the_others_are_measured(fake_gpu, tmp_path, monkeypatch):
    def bind(inputs, dtype):
        def call():
            raise RuntimeError("no kernel for this GPU")

        return call

    monkeypatch.setattr(peers, "find", lambda: ([peers.Peer("flash_kda", "1", bind)], {}))
    rows = record.record(tmp_path, ["ladder"])["rows"]
    assert {row["refused"] for row in rows if "peer" in row} == {"RuntimeError: no kernel for this GPU"}
    assert all(row["median_ms"] for row in rows if "step" in row)


def test_the_published_shapes_are_all_measured():
    shapes = {(case.B, case.T, case.H, case.seq_lens, case.state) for case in ladder.CASES}
    mix, eight = (1300, 547, 2048, 963, 271, 3063), (1024,) * 8
    for H in (16, 32, 64, 96, 128):
        assert (1, 8192, H, None, None) in shapes
    for state in (None, "fp32"):
        for shape in ((8192, 96, None), (8192, 96, mix), (8192, 96, eight), (65536, 32, None), (512, 96, None)):
            assert (1, *shape, state) in shapes
        assert (1, 16, 32, None, state) in shapes


def test_cases_share_tensors_but_not_packing_and_states():
    plain, packed = ladder.Case(1, 24, 2), ladder.Case(1, 24, 2, seq_lens=(8, 16), state="bf16")
    inputs = ladder.make_all_inputs([plain, packed])
    assert inputs[plain].q is inputs[packed].q
    assert torch.equal(inputs[plain].q, make_inputs(1, 24, 2, regime="mixed", seed=0).q)
    assert inputs[plain].cu_seqlens is None
    assert inputs[packed].cu_seqlens.tolist() == [0, 8, 24]
    assert inputs[packed].initial_state.shape == (2, 2, 128, 128)
    assert inputs[packed].initial_state.dtype == torch.bfloat16


def test_errors_are_relative_and_nan_never_passes():
    expected = torch.tensor([3.0, 4.0])
    assert ladder.relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    nan = ladder.relative_error(torch.tensor([3.0, float("nan")]), expected)
    assert nan != nan
    assert not nan <= 1.0  # how measure() decides


def test_statistics_of_few_samples_are_not_measured():
    assert ladder.statistics_of([])["median_ms"] is None
    found = ladder.statistics_of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found["median_ms"], found["min_ms"], found["iqr_ms"]) == (3.0, 1.0, 2.0)


def test_a_peer_that_does_not_import_is_missing_with_the_reason(monkeypatch, tmp_path):
    (tmp_path / "flash_kda.py").write_text("raise OSError('libtorch_cuda.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    found, missing = peers.find()
    assert "flash_kda" not in {peer.name for peer in found}
    assert "libtorch_cuda.so" in missing["flash_kda"]


def test_peers_are_called_with_our_inputs(monkeypatch):
    """A stand-in with the published signature computes the definition; through the adapter it gives our results."""

    def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state, final_state, cu_seqlens):
        assert cu_seqlens.dtype == torch.int64  # the peer reads no other
        ops.fwd(
            *(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound),
            initial_state=initial_state,
            final_state=final_state,
            cu_seqlens=cu_seqlens,
            step=0,
        )

    monkeypatch.setitem(__import__("sys").modules, "flash_kda", types.SimpleNamespace(fwd=fwd))
    inputs = make_inputs(H=2, seq_lens=(5, 9), initial_state="fp32")
    inputs = inputs.with_(cu_seqlens=inputs.cu_seqlens.int())
    result = peers._bind_flash_kda(inputs, torch.float32)()
    expected = ops.forward(inputs, step=0)
    assert torch.equal(result.out, expected.out)
    assert torch.equal(result.final_state, expected.final_state)
