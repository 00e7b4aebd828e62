"""Readers of profiler files on small files made here, whose every number is known, and on damaged and foreign ones."""

from __future__ import annotations

import gzip
import json
import sqlite3

import pytest

from kda_lab.profiling import ncu, nsys, table, timeline, torch_trace
from kda_lab.profiling.table import ReportError
from kda_lab.profiling.timeline import Span

THREAD = (77 << 24) | 1234  # nsys' globalTid: process above, thread below


def write_nsys(path, *, text_by_id=True, with_domains=True, ranges_table="NVTX_EVENTS", kernels=True):
    """An export with one step range, one launch range inside, two launches, and a range of another domain."""
    if path.exists():
        path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        strings = ["5_fused_two_kernel", "prepare", "other", "kda_lab", "cudaLaunchKernel_v7000"]
        strings += ["void kda::step5::prepare<16>(Args)", "kda::step5::recurrence(Args)", "torch"]
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(strings)))
        text = "textId INTEGER, text TEXT" if text_by_id else "text TEXT"
        columns = f"start INTEGER, end INTEGER, eventType INTEGER, globalTid INTEGER, domainId INTEGER, {text}"
        db.execute(f"CREATE TABLE {ranges_table} ({columns}, category INTEGER, int64Value INTEGER)")

        def event(start, end, kind, domain, string, payload=None):
            words = (string, None) if text_by_id else (strings[string],)
            marks = ", ".join("?" * (7 + len(words)))
            values = (start, end, kind, THREAD, domain, *words, None, payload)
            db.execute(f"INSERT INTO {ranges_table} VALUES ({marks})", values)

        if with_domains:
            event(0, None, 75, 1, 3)
            event(0, None, 75, 2, 7)
        event(1_000, 90_000, 59, 1, 0, payload=8192)
        event(2_000, 20_000, 59, 1, 1)
        event(500, 95_000, 59, 2, 2)
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME "
            "(start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER)"
        )
        calls = [(3_000, 9_000, THREAD, 1, 4), (30_000, 34_000, THREAD, 2, 4)]
        db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", calls)
        db.execute("CREATE TABLE TARGET_INFO_GPU (name TEXT)")
        db.execute("INSERT INTO TARGET_INFO_GPU VALUES ('NVIDIA H200')")
        if kernels:
            db.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, "
                "streamId INTEGER, correlationId INTEGER, demangledName INTEGER, gridX INTEGER, "
                "registersPerThread INTEGER)"
            )
            launches = [(10_000, 350_000, 0, 7, 1, 5, 512, 40), (351_000, 631_000, 0, 7, 2, 6, 96, 168)]
            db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", launches)
    return path


@pytest.mark.parametrize(
    "variant", [{}, {"text_by_id": False}, {"with_domains": False}, {"ranges_table": "NVTX_PUSHPOP_RANGES"}]
)
def test_nsys_exports_of_every_variant_give_the_same_timeline(tmp_path, variant):
    found = nsys.read(write_nsys(tmp_path / "export.sqlite", **variant))
    assert found.gpu == "NVIDIA H200"
    kernels = {span.name: span for span in found.of("kernel")}
    assert {name: span.duration_us for name, span in kernels.items()} == {"prepare": 340.0, "recurrence": 280.0}
    assert kernels["prepare"].details["registers"] == 40
    ranges = {span.name: span for span in found.of("range")}
    assert ("other" in ranges) == (not variant.get("with_domains", True))
    assert ranges["prepare"].depth == ranges["5_fused_two_kernel"].depth + 1
    assert ranges["5_fused_two_kernel"].details["payload"] == 8192


def test_ranges_are_projected_on_the_work_they_launched(tmp_path):
    found = nsys.read(write_nsys(tmp_path / "export.sqlite"))
    zero = 1.0  # µs of the first event, which the timeline starts at
    projected = {span.name: (span.start_us + zero, span.end_us + zero) for span in found.of("projected")}
    assert projected == {"5_fused_two_kernel": (10.0, 631.0), "prepare": (10.0, 350.0)}


def test_rows_have_nsight_pythons_columns_and_the_outermost_range(tmp_path):
    rows = nsys.read(write_nsys(tmp_path / "export.sqlite")).rows()
    assert [(row["Annotation"], row["Kernel"], row["AvgValue"], row["Unit"], row["NumRuns"]) for row in rows] == [
        ("5_fused_two_kernel", "prepare", 340.0, "us", 1),
        ("5_fused_two_kernel", "recurrence", 280.0, "us", 1),
    ]


def test_a_gzipped_export_reads_the_same(tmp_path):
    path = write_nsys(tmp_path / "export.sqlite")
    packed = tmp_path / "export.sqlite.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert nsys.read(packed) == nsys.read(path)


def write_trace(path, events):
    path.write_text(json.dumps({"traceEvents": events, "deviceProperties": [{"name": "NVIDIA H200"}]}))
    return path


TRACE = [
    {"ph": "X", "cat": "user_annotation", "name": "5_fused_two_kernel", "ts": 100.0, "dur": 50.0, "pid": 1, "tid": 9},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 110.0, "dur": 5.0, "pid": 1, "tid": 9}
    | {"args": {"correlation": 3}},
    {"ph": "X", "cat": "kernel", "name": "void kda::prepare<16>(Args)", "ts": 130.0, "dur": 340.5, "pid": 0, "tid": 7}
    | {"args": {"correlation": 3, "device": 0, "stream": 7, "registers per thread": 40, "grid": [512, 96, 1]}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::empty", "ts": 101.0, "dur": 1.0, "pid": 1, "tid": 9},
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
]


def test_torch_traces_give_ranges_calls_and_kernels(tmp_path):
    found = torch_trace.read(write_trace(tmp_path / "trace.json", TRACE))
    assert [(span.kind, span.name, span.start_us, span.duration_us) for span in found.spans] == [
        ("range", "5_fused_two_kernel", 0.0, 50.0),
        ("launch", "cudaLaunchKernel", 10.0, 5.0),
        ("kernel", "prepare", 30.0, 340.5),
        ("projected", "5_fused_two_kernel", 30.0, 340.5),
    ]
    assert found.gpu == "NVIDIA H200"


@pytest.mark.parametrize("reader", [nsys.read, torch_trace.read, pytest.param(ncu.read, marks=pytest.mark.ncu_report)])
@pytest.mark.parametrize(
    "content", [b"", b"not a report", b"\x1f\x8b\x08damaged gzip", b"SQLite format 3\0" + bytes(90)]
)
def test_damaged_empty_and_foreign_files_are_a_clear_error(tmp_path, reader, content):
    path = tmp_path / ("file.sqlite.gz" if content[:2] == b"\x1f\x8b" else "file")
    path.write_bytes(content)
    with pytest.raises(ReportError, match=rf"{path.name}.*(damaged|empty|expected)"):
        reader(path)


@pytest.mark.parametrize("reader", [nsys.read, torch_trace.read, ncu.read])
def test_a_file_that_is_not_there_is_named(tmp_path, reader):
    with pytest.raises(FileNotFoundError, match="gone"):
        reader(tmp_path / "gone")


def test_a_truncated_export_is_damaged(tmp_path):
    path = write_nsys(tmp_path / "export.sqlite")
    packed = tmp_path / "export.sqlite.gz"
    packed.write_bytes(gzip.compress(path.read_bytes())[:-200])
    with pytest.raises(ReportError, match="damaged"):
        nsys.read(packed)


def test_files_in_which_nothing_ran_say_so(tmp_path):
    with pytest.raises(ReportError, match="no kernel"):
        nsys.read(write_nsys(tmp_path / "export.sqlite", kernels=False))
    with pytest.raises(ReportError, match="no range and no kernel"):
        torch_trace.read(write_trace(tmp_path / "trace.json", TRACE[3:]))
    with sqlite3.connect(tmp_path / "notes.sqlite") as db:
        db.execute("CREATE TABLE notes (text TEXT)")
    with pytest.raises(ReportError, match="without CUDA or NVTX tables"):
        nsys.read(tmp_path / "notes.sqlite")


def test_perfetto_export_has_every_span_on_a_named_track(tmp_path):
    found = nsys.read(write_nsys(tmp_path / "export.sqlite"))
    content = json.loads(timeline.save_perfetto(found, tmp_path / "trace.json").read_text())
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert sorted((e["name"], e["cat"], e["dur"]) for e in spans) == sorted(
        (span.name, span.kind, span.duration_us) for span in found.spans
    )
    named = {(e["pid"], e["tid"]) for e in content["traceEvents"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in spans} == named


def test_a_timeline_nests_only_within_a_thread():
    spans = [Span("outer", "range", "thread 1", 0, 10), Span("elsewhere", "range", "thread 2", 1, 2)]
    spans += [Span("inner", "range", "thread 1", 3, 4), Span("after", "range", "thread 1", 11, 12)]
    built = timeline.build("test", None, spans)
    assert {span.name: span.depth for span in built.spans} == {"outer": 0, "elsewhere": 0, "inner": 1, "after": 0}


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("void kda::step5::prepare<(int)16, std::pair<int, int>>(float const*, Args<3>)", "prepare"),
        ("kda::(anonymous namespace)::gate(Args)", "gate"),
        ("recurrence", "recurrence"),
    ],
)
def test_short_names_of_kernels(full, short):
    assert table.short_name(full) == short


def test_statistics_of_a_row():
    row = table.row("5", "prepare", "time", "us", [1.0, 2.0, 3.0])
    assert (row["AvgValue"], row["StdDev"], row["MinValue"], row["MaxValue"], row["NumRuns"]) == (2.0, 1.0, 1.0, 3.0, 3)
    assert row["CI95_Upper"] - row["AvgValue"] == pytest.approx(1.96 / 3**0.5)


def test_text_tables_say_not_measured():
    assert table.text([{"a": "x", "b": None}], {"a": "name", "b": "time"}).splitlines()[1] == "x     not measured"
    assert table.text([], {"a": "name"}) == "not measured"
