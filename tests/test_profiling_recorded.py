"""Recordings: what ships is labelled, what is missing is None, and a swapped report changes the numbers."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import shutil
from statistics import mean

import pytest
from test_profiling_readers import write_nsys

from kda_lab import registry
from kda_lab.profiling import metrics, recorded, views
from kda_lab.profiling.table import ReportError
from kda_lab.sass import Kernel


@pytest.fixture
def recording(tmp_path):
    """A recording of one machine with one nsys report and one listing."""
    (tmp_path / "machine.json").write_text(json.dumps({"gpu": "NVIDIA H200", "date": "2026-11-29"}))
    for folder in ("nsys", "sass"):
        (tmp_path / folder).mkdir()
    export = write_nsys(tmp_path / "export.sqlite").read_bytes()
    (tmp_path / "nsys/5_fused_two_kernel.sqlite.gz").write_bytes(gzip.compress(export))
    kernel = Kernel("prepare", "_Z7prepare", ("MUFU.EX2 R1, R2", "EXIT"), 40, 0, 0, 0, 0)
    code = json.dumps({"prepare": dataclasses.asdict(kernel)}).encode()
    (tmp_path / "sass/5_fused_two_kernel.json.gz").write_bytes(gzip.compress(code))
    return recorded.load(tmp_path)


def test_a_recording_is_labelled_with_its_machine_and_date(recording):
    assert recording.label == "recorded on NVIDIA H200, 2026-11-29"


def test_reports_of_another_day_keep_their_label_and_are_not_compared_with_the_rest(recording):
    (recording.folder / "torch").mkdir()
    shipped = SHIPPED[0].folder / "torch/5_fused_two_kernel.json.gz"
    (recording.folder / "torch/5_fused_two_kernel.json.gz").write_bytes(shipped.read_bytes())
    kernel = recording.torch(5).of("kernel")[0].name

    def by_torch():
        return {row["kernel"]: row["torch_us"] for row in recording.agreement(5)}

    assert recording.label_of("torch") == recording.label
    assert by_torch()[kernel] > 0
    (recording.folder / "torch/machine.json").write_text(json.dumps({"gpu": "NVIDIA H200", "date": "2026-11-28"}))
    assert recording.label_of("torch") == "recorded on NVIDIA H200, 2026-11-28"
    assert recording.label_of("nsys") == recording.label == "recorded on NVIDIA H200, 2026-11-29"
    assert "2026-11-28" in views.timeline(recording, 5, "torch").alt
    assert by_torch().get(kernel) is None
    assert any(row["nsys_us"] for row in recording.agreement(5))
    (recording.folder / "nsys/machine.json").write_text(json.dumps({"gpu": "NVIDIA H200", "date": "2026-11-28"}))
    assert not any(row["nsys_us"] for row in recording.agreement(5))


def test_reports_are_found_by_number_slug_or_name(recording):
    for step in (5, "5", "fused_two_kernel", "5_fused_two_kernel"):
        assert recording.nsys(step).of("kernel")
    assert recording.sass(5)["prepare"].instructions == ("MUFU.EX2 R1, R2", "EXIT")


def test_what_is_not_there_is_none(recording):
    assert recording.ladder() is None
    assert recording.ncu(5) is None
    assert recording.torch(5) is None
    assert recording.nsys(4) is None
    assert recording.sass(4) is None


def test_another_report_in_its_place_changes_the_numbers(recording):
    before = recording.nsys(5).rows()
    swapped = write_nsys(recording.folder / "export.sqlite", text_by_id=False)
    text = swapped.read_bytes().replace(b"recurrence", b"elsewhere!")
    (recording.folder / "nsys/5_fused_two_kernel.sqlite.gz").write_bytes(gzip.compress(text))
    assert [row["Kernel"] for row in before] != [row["Kernel"] for row in recording.nsys(5).rows()]


def test_the_ladder_as_text_is_labelled_and_says_not_measured(recording):
    assert recorded.ladder_text(recording) == "recorded on NVIDIA H200, 2026-11-29: not measured"
    row = {
        "case": "T 16",
        "method": "events",
        "step": 5,
        "slug": "fused_two_kernel",
        "floor_ms": 0.5,
        "error_rms": 4e-3,
    }
    timed = row | {"median_ms": 2.0, "iqr_ms": 0.1}
    refused = row | {"step": 4, "slug": "fused_one_kernel", "median_ms": None, "iqr_ms": None}
    machine = {"gpu": "NVIDIA H200", "date": "2026-11-30", "commit": "abc"}  # another day than the reports
    content = {"machine": machine, "rows": [timed, refused]}
    (recording.folder / "ladder.json").write_text(json.dumps(content))
    text = recorded.ladder_text(recording)
    assert text.startswith("recorded on NVIDIA H200, 2026-11-30, commit abc")
    assert "5 fused_two_kernel  2             0.1           25.0%         0.004" in text
    assert "4 fused_one_kernel  not measured" in text


def test_a_damaged_file_is_named(recording):
    (recording.folder / "ladder.json").write_text('{"rows": [')
    with pytest.raises(ReportError, match=r"ladder\.json is damaged"):
        recording.ladder()


WHOLE = {
    "machine.json": {},
    "ladder.json": {
        "machine": {},
        "rows": [{"case": "T 16", "method": "events", "median_ms": 1.0, "floor_ms": 0.5, "peer": "fla"}],
        "accuracy": [{"T": 1, "regime": "mixed", "lower_bound": -5.0, "key_correlation": None, "error_rms": 1e-3}],
    },
    "claims.json": {"claims": [{"number": 1, "numbers": {}, "sources": []}]},
    "step6_history.json": {
        "machine": "NVIDIA H200",
        "date": "2026-11-29",
        "method": "medians",
        "rows": [{"kept": True, "change": "a", "shape": "b", "measured": "prepare", "before_ms": 2.0, "after_ms": 1.0}],
    },
    "events/5_fused_two_kernel.json": {},
    "exp_forms.json": {},
}
READ = {
    "machine.json": lambda recording: recording.machine,
    "ladder.json": recorded.ladder_text,
    "claims.json": lambda recording: recording.claims(),
    "step6_history.json": lambda recording: views.history(recording, 6),
    "events/5_fused_two_kernel.json": lambda recording: recording.agreement(5),
    "exp_forms.json": lambda recording: recording.exp_forms(),
}


def write(recording, name: str, content: str) -> None:
    (recording.folder / name).parent.mkdir(exist_ok=True)
    (recording.folder / name).write_text(content)


def without_one_key(content: dict):
    """(What was taken away, the rest) for every key of a file and of the rows of its lists."""
    for key in content:
        yield f"{key!r}", {name: value for name, value in content.items() if name != key}
        for row in content[key] if isinstance(content[key], list) else ():
            for column in row:
                rows = [{name: value for name, value in row.items() if name != column}]
                column = "step or peer" if column == "peer" else column
                yield f"{column!r} in {key}[0]", content | {key: rows}


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_that_is_not_whole_is_named_with_what_it_lacks(name, recording):
    write(recording, name, json.dumps(WHOLE[name]))
    READ[name](recording)
    for text in ("", "{", "[]", "3", "null", '"text"'):
        write(recording, name, text)
        with pytest.raises(ReportError, match=rf"{name} (is damaged|has no object)"):
            READ[name](recording)
    optional = {"'machine'", "'rows'", "'accuracy'", "'floor_ms' in rows[0]"} if name == "ladder.json" else set()
    for what, rest in without_one_key(WHOLE[name]):
        write(recording, name, json.dumps(rest))
        if what in optional:
            READ[name](recording)
            continue
        with pytest.raises(ReportError, match=re.escape(f"{name} has no {what}, which") + ".*record it again"):
            READ[name](recording)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"prepare": {}}', b'{"prepare": 3}', b"3"])
def test_machine_code_that_is_not_whole_is_named(content, recording):
    path = recording.folder / "sass/5_fused_two_kernel.json.gz"
    for data in (gzip.compress(content), content, gzip.compress(content)[:-9], b"\x1f\x8b\x08" + 40 * b"\xff"):
        path.write_bytes(data)
        with pytest.raises(ReportError, match=r"5_fused_two_kernel\.json\.gz (is damaged|holds no kernels)"):
            recording.sass(5)


def test_a_folder_can_be_named_by_the_environment(recording, monkeypatch):
    monkeypatch.setenv("KDA_LAB_RECORDED", str(recording.folder))
    assert recorded.load() == recording
    shutil.rmtree(recording.folder)
    with pytest.raises(ValueError, match="no recording"):
        recorded.load()


CUDA_STEPS = [step.number for step in registry.steps() if "cuda" in step.devices]
SHIPPED = [recorded.load(name) for name in recorded.available()]


@pytest.mark.parametrize("step", CUDA_STEPS)
@pytest.mark.parametrize("shipped", SHIPPED, ids=recorded.available())
def test_every_step_ships_with_its_reports(shipped, step):
    report, timeline = shipped.ncu(step), shipped.nsys(step)
    name = registry.get(step, "cuda").name
    assert {launch.ranges[0] for launch in report.launches} == {name}
    assert set(report.kernels) == {span.name for span in timeline.of("kernel")}
    assert {row["Annotation"] for row in timeline.rows()} == {name}
    assert {span.name for span in shipped.torch(step).of("kernel")} >= set(report.kernels)
    for row in metrics.kernels(report, shipped.ladder()["ceilings"]["copy_bytes_per_s"], shipped.sass(step)):
        assert None not in row.values(), row


# Launched while the kernel before it drains: on nsys's timeline it begins with its own set-up and waits for the other.
STARTED_EARLY = {(6, "recurrence")}


@pytest.mark.parametrize("step", CUDA_STEPS)
@pytest.mark.parametrize("shipped", SHIPPED, ids=recorded.available())
def test_the_tools_agree_on_long_kernels(shipped, step):
    rows = shipped.agreement(step)
    for row in rows:
        times = [row[f"{tool}_us"] for tool in ("events", "nsys", "ncu")]
        assert None not in times, row
        if (step, row["kernel"]) in STARTED_EARLY:
            before = next(other for other in rows if other["kernel"] == "prepare")
            times.remove(row["nsys_us"])
            assert row["events_us"] < row["nsys_us"] < row["events_us"] + before["events_us"], row
        if min(times) >= 100:
            assert max(times) / min(times) <= 1.10, row


@pytest.mark.parametrize("shipped", SHIPPED, ids=recorded.available())
def test_the_split_changes_where_exponentials_are_computed_and_not_how_many(shipped):
    """Executed instructions of the special function unit. Step 4's 8 warps need twice as many as step 5's 4 for the
    rsqrt of a chunk; the rest is the same, so the ratio of the two steps measures the split.
    """
    executed = [
        sum(mean(report.values(kernel, "smsp__inst_executed_pipe_xu.sum")) for kernel in report.kernels)
        for report in (shipped.ncu(4), shipped.ncu(5))
    ]
    assert 1.0 <= executed[0] / executed[1] < 1.02


@pytest.mark.parametrize("shipped", SHIPPED, ids=recorded.available())
def test_a_recording_is_small_enough_to_ship(shipped):
    assert sum(path.stat().st_size for path in shipped.folder.rglob("*") if path.is_file()) <= 12e6
