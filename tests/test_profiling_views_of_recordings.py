"""What lessons show of a recording: its numbers under its label, and "not measured" for whatever is missing."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re

import numpy as np
import pytest
from test_profiling_readers import write_nsys
from test_profiling_views import CEILINGS, TWO, kernel_code, launch, report

from kda_lab import expforms, sass
from kda_lab.profiling import ncu, recorded, views
from kda_lab.profiling.recorded import Recording
from kda_lab.profiling.tools import ToolMissing

STEPS = (4, 5)
LABEL = "recorded on NVIDIA H200, 2026-11-29"

EVERY_VIEW = {
    "timeline": lambda recording: views.timeline(recording, 5),
    "timeline_explorer": lambda recording: views.timeline_explorer(recording, 5),
    "counters": lambda recording: views.counters(recording, 5),
    "comparison": lambda recording: views.comparison(recording, STEPS, "recurrence"),
    "kernels": lambda recording: views.kernels(recording, STEPS),
    "roofline": lambda recording: views.roofline_of(recording, STEPS),
    "floors": lambda recording: views.floors(recording, STEPS),
    "occupancy": lambda recording: views.occupancy(recording, STEPS),
    "stalls": lambda recording: views.stalls(recording, STEPS, "recurrence"),
    "sass": lambda recording: views.sass(recording, 1, 2, "gate"),
    "agreement": lambda recording: views.agreement(recording, STEPS),
    "race": lambda recording: views.race(recording, 4, 5),
    "errors": lambda recording: views.errors(recording, STEPS),
    "identical_keys": lambda recording: views.identical_keys(recording),
    "identical_keys_state": lambda recording: views.identical_keys(recording, "final state"),
    "price_of_precise": lambda recording: views.price_of_precise(recording, 6),
    "exponentials": lambda recording: views.exponentials(recording),
    "exponent_errors": lambda recording: views.exponent_errors(recording, -0.5),
    "gates": lambda recording: views.gates(recording),
    "history": lambda recording: views.history(recording, 6),
    "cycles": lambda recording: views.cycles(recording, 6),
    "short_calls": lambda recording: views.short_calls(recording),
}


def words(view) -> str:
    """The text of a table, a figure's alt text and title, or a widget's status."""
    if hasattr(view, "alt"):
        return " ".join([view.alt, *(axes.get_title() for axes in view.axes)])
    return view.status.value if hasattr(view, "status") else repr(view)


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """Everything of step 5, nothing of step 4; ncu's report is made here, because only ncu can write its files."""
    (tmp_path / "machine.json").write_text(json.dumps({"gpu": "NVIDIA H200", "date": "2026-11-29"}))
    for folder in ("nsys", "sass", "events"):
        (tmp_path / folder).mkdir()
    export = write_nsys(tmp_path / "export.sqlite").read_bytes()
    (tmp_path / "nsys/5_fused_two_kernel.sqlite.gz").write_bytes(gzip.compress(export))
    (tmp_path / "events/5_fused_two_kernel.json").write_text(json.dumps({"prepare": 205.0, "recurrence": 150.0}))
    for name, instructions in (("1_naive_exp", ("FFMA.SAT R1, R2", "MUFU.EX2 R1, R2")), ("2_rebased_ex2", ("EXIT",))):
        code = {"gate<16>": dataclasses.asdict(kernel_code("gate<16>", 0, *instructions))}
        (tmp_path / f"sass/{name}.json.gz").write_bytes(gzip.compress(json.dumps(code).encode()))
    row = {"B": 1, "T": 8192, "H": 96, "flops": 10**11, "case": "T 8192", "method": "events", "peer": "flash_kda"}
    row["floor_ms"] = 0.1
    rows = [row | {"median_ms": 1.4}, row | {"step": 4, "median_ms": 1.2}, row | {"step": 5, "median_ms": 0.8}]
    rows.append(row | {"case": "T 16", "step": 5, "median_ms": 0.1})
    rows += [row | {"step": 6, "median_ms": 0.8}, row | {"case": "T 8192, precise", "step": 6, "median_ms": 1.0}]
    throughput = [{"form": "expf", "results_per_clock_per_sm": 12.1}]
    error = {"step": 5, "T": 256, "lower_bound": -5.0, "regime": "retain", "key_correlation": None, "error_rms": 3e-3}
    collinear = error | {"regime": "collinear", "key_correlation": 0.9, "error_rms": 4e-3}
    accuracy = [error, collinear, error | {"T": 16, "error_rms": 9.0}, error | {"lower_bound": -1.0, "error_rms": 9.0}]
    ladder = {"machine": {}, "ceilings": CEILINGS, "rows": rows, "accuracy": accuracy}
    equal = {"gate_logit": -9.0, "T": 256, "step": 6, "state_error_rms": 0.013}
    ladder["identical_keys"] = [equal | {"error_rms": 0.05}, equal | {"precise": True, "error_rms": 0.007}]
    gate = [{"form": "expf: 1 / (1 + expf(-x))", "median_ms": 0.26, "K": 128}]
    ladder["exponential"] = {"throughput": throughput, "gate": gate}
    short = [{"case": "T 16", "step": 5, "median_ms": 0.0197}, {"case": "T 16", "peer": "fla", "median_ms": 0.044}]
    ladder["short_calls"] = {"machine": {"gpu": "NVIDIA H200", "date": "2026-11-29"}, "rows": short}
    (tmp_path / "ladder.json").write_text(json.dumps(ladder))
    powers = [2.0**x for x in expforms.X]
    forms = {"arch": "sm_90a", "instructions": {}, "values": {"exp2f": np.float32(powers).tolist()}}
    (tmp_path / "exp_forms.json").write_text(json.dumps(forms))
    change = {"kept": "yes", "change": "more stages", "shape": "H 96", "measured": "recurrence"}
    changes = [change | {"before_ms": 0.3, "after_ms": 0.2}, change | {"before_ms": None, "after_ms": 0.2}]
    changes.append(change | {"before_ms": None, "after_ms": None, "ratio": 1.03})
    changes[0]["group"] = "copies"
    in_cycles = {"method": "Clock readings.", "rows": [{"where": "in the loop", "what": "products", "cycles": 227}]}
    history = {"machine": "NVIDIA H200", "date": "2026-11-29", "method": "Medians.", "rows": changes}
    history["cycles"] = in_cycles
    (tmp_path / "step6_history.json").write_text(json.dumps(history))
    monkeypatch.setattr(Recording, "ncu", lambda self, step: TWO if str(step)[0] == "5" else None)
    return recorded.load(tmp_path)


@pytest.mark.parametrize("view", EVERY_VIEW.values(), ids=EVERY_VIEW)
def test_every_view_says_not_measured_without_a_recording(view, tmp_path):
    assert "not measured" in words(view(None))
    assert "not measured" in words(view(Recording(tmp_path)))


FROM_REPORTS = ("counters", "comparison", "kernels", "roofline", "floors", "occupancy", "stalls")


def test_reports_that_cannot_be_read_say_what_reads_them(recording, monkeypatch):
    """A machine without the package ncu-report: a sentence for its views, and all others as they were."""

    def missing(*args):
        raise ToolMissing("Reading Nsight Compute reports needs the package ncu-report.")

    monkeypatch.setattr(Recording, "ncu", missing)
    monkeypatch.setattr(ncu, "reader", missing)
    for name, view in EVERY_VIEW.items():
        assert ("pip install ncu-report" in words(view(recording))) == (name in FROM_REPORTS), name
    assert views.moved(recording, STEPS) == {}
    assert "205" in words(EVERY_VIEW["agreement"](recording))


@pytest.mark.parametrize(
    ("view", "number"),
    [
        ("timeline", "2 kernels take"),
        ("timeline_explorer", "2 kernels take"),
        ("counters", "200"),
        ("comparison", "5_fused_two_kernel"),
        ("kernels", "50"),
        ("roofline", "5_fused_two_kernel does"),
        ("floors", "5_fused_two_kernel takes"),
        ("occupancy", "prepare of 5_fused_two_kernel reaches 60 %"),
        ("stalls", "in 5_fused_two_kernel, warps mostly wait for data from device memory or L2"),
        ("sass", "2 instructions, 2 of the exponential"),
        ("agreement", "340"),
        ("race", "1.5"),
        ("errors", "largest is 0.004, 5_fused_two_kernel in collinear 0.9"),
        ("identical_keys", "0.007"),
        ("identical_keys_state", "0.013"),
        ("price_of_precise", "1.25"),
        ("exponentials", "12.1"),
        ("exponent_errors", "exp2f is off by 0.28 ulp there and by 0.5 at most"),
        ("gates", "0.26"),
        ("history", "1.5"),
        ("cycles", "227"),
        ("short_calls", "19.7"),
    ],
)
def test_views_show_the_recording_s_numbers(recording, view, number):
    shown = EVERY_VIEW[view](recording)
    text = words(shown)
    assert number in text
    assert LABEL in getattr(shown, "alt", LABEL).replace("Recorded", "recorded"), "words alone must say where and when"
    assert LABEL in text or view in ("timeline_explorer", "sass", "history", "cycles"), text


def test_another_report_changes_what_is_shown(recording, monkeypatch):
    from_ncu = ("counters", "kernels", "roofline", "floors", "stalls")
    before = {name: words(EVERY_VIEW[name](recording)) for name in from_ncu}
    stalled = {"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": 9.0}
    other = report(launch("prepare", 400e3, 600e6, 100e6), launch("recurrence", 90e3, 100e6, 0.0, **stalled))
    monkeypatch.setattr(Recording, "ncu", lambda self, step: other if str(step)[0] == "5" else None)
    for name, text in before.items():
        assert words(EVERY_VIEW[name](recording)) != text, name


def test_the_agreement_names_the_largest_spread_of_long_kernels(recording):
    # prepare: 205 by events, 340 by nsys, 200 by ncu; recurrence: 150, 280, 100
    assert "Largest spread of kernels of 100 µs and more: 180.0%, recurrence of 5_fused_two_kernel" in words(
        EVERY_VIEW["agreement"](recording)
    )


def test_a_race_needs_both_steps_on_a_shape(recording):
    text = words(EVERY_VIEW["race"](recording))
    assert "T 8192" in text
    assert "T 16" not in text


def test_measured_bytes_are_those_of_a_token_and_head(recording):
    # TWO moves 400 MB and 200 MB
    assert views.moved(recording, STEPS) == {"5_fused_two_kernel": 600e6 / (8192 * 96)}
    assert views.moved(None, STEPS) == {}


def test_a_history_can_be_of_one_kernel_and_of_one_idea(recording):
    assert "not measured" in repr(views.history(recording, 6, "prepare"))
    assert repr(views.history(recording, 6, "recurrence")).count("more stages") == 3
    assert repr(views.history(recording, 6, "recurrence", "copies")).count("more stages") == 1
    assert "not measured" in repr(views.history(recording, 6, "prepare", "copies"))


def test_a_history_shows_a_ratio_only_where_there_is_one(recording):
    lines = words(EVERY_VIEW["history"](recording)).splitlines()[2:]
    assert [line.split()[-1] for line in lines] == ["1.5", "measured", "1.03"]


@pytest.mark.parametrize("name", recorded.available())
def test_what_ships_is_shown_in_every_view(name):
    for label, view in EVERY_VIEW.items():
        assert not words(view(recorded.load(name))).endswith("not measured"), label


def test_the_gate_forms_stand_beside_their_registers():
    """As shipped: base 2 is slower alone, and its code asks for more registers, so fewer warps fit."""
    shipped = recorded.load()
    rows = {row["form"].split(":")[0]: row["median_ms"] for row in shipped.ladder()["exponential"]["gate"]}
    text = repr(views.gates(shipped)).splitlines()
    for form, line in zip(rows, text[2:], strict=True):
        assert line.startswith(form)
    kernels = [shipped.sass("exp_throughput")[f"gate<{number}>"] for number in range(len(rows))]
    for kernel, line in zip(kernels, text[2:], strict=True):
        warps = 4 * min(16, 65536 // (128 * kernel.registers))
        memory, xu = (list(map(sass.pipe, kernel.instructions)).count(name) for name in ("global", "xu"))
        written = [len(kernel.instructions), memory, xu, kernel.registers, warps]
        assert line.split()[-5:] == [str(number) for number in written]
    expf, ex2, _ = kernels
    assert rows["ex2.approx.ftz"] > rows["expf"]
    assert ex2.registers > expf.registers
    assert len(ex2.instructions) < len(expf.instructions)
    for name in ("global", "xu"):
        assert list(map(sass.pipe, ex2.instructions)).count(name) == list(map(sass.pipe, expf.instructions)).count(name)


def test_in_the_gate_stage_a_thread_has_one_load_under_way():
    """As lesson 2 says of what ships: behind a load of g comes the store that needs it, and only then the next load."""
    code = recorded.load().sass("exp_throughput")
    for number in range(3):
        opcodes = (sass.opcode(instruction) for instruction in code[f"gate<{number}>"].instructions)
        order = "".join({"LDG.E.U16": "L", "STG.E": "S"}.get(name, "") for name in opcodes)
        assert order == "LS" * 9  # eight unrolled and the rest's loop


def test_a_history_of_short_times_is_in_microseconds(recording):
    path = recording.folder / "step6_history.json"
    content = json.loads(path.read_text())
    content["rows"][0] |= {"before_ms": 0.0125, "after_ms": 0.005}
    path.write_text(json.dumps(content))
    shown = repr(views.history(recording, 6, group="copies"))
    assert "Before, µs  After, µs" in shown
    assert re.search(r" 12\.5 +5 +2\.5$", shown)


def test_a_history_can_be_of_the_microbenchmark(recording):
    assert repr(views.history(recording, "exp_throughput")) == "What was tried on exp_throughput: not measured"
    content = (recording.folder / "step6_history.json").read_text()
    (recording.folder / "exp_throughput_history.json").write_text(content)
    assert repr(views.history(recording, "exp_throughput")) == repr(views.history(recording, 6))
