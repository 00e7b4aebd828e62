"""What ran when: ranges and launches on the host, kernels on the GPU, from whichever tool recorded them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kda_lab.profiling import table
from kda_lab.profiling.table import Row


@dataclasses.dataclass(frozen=True)
class Span:
    """Something with a beginning and an end, in microseconds since the timeline's first event."""

    name: str
    kind: str  # "range" and "launch" on the host; "kernel", "copy" and "projected" (a range's kernels) on the GPU
    track: str  # the thread or stream
    start_us: float
    end_us: float
    depth: int = 0  # how many ranges of its track it lies in
    correlation: int | None = None  # ties a launch to what it started on the GPU
    details: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    def encloses(self, other: Span) -> bool:
        return self.track == other.track and self.start_us <= other.start_us and other.end_us <= self.end_us


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Spans in order of their beginning. ``tool`` recorded them; ``gpu`` is the device's name where the tool says."""

    tool: str
    gpu: str | None
    spans: tuple[Span, ...]

    def of(self, *kinds: str) -> list[Span]:
        return [span for span in self.spans if span.kind in kinds]

    @property
    def duration_us(self) -> float:
        return max((span.end_us for span in self.spans), default=0.0)

    def rows(self, kind: str = "kernel") -> list[Row]:
        """Tidy rows of the durations, in microseconds, of what has the same name (see kda_lab.profiling.table)."""
        around = _outermost_range(self)
        by_name: dict[str, list[Span]] = {}
        for span in self.of(kind):
            by_name.setdefault(span.name, []).append(span)
        return [
            table.row(around.get(spans[0].correlation, ""), name, "duration", "us", [s.duration_us for s in spans])
            for name, spans in by_name.items()
        ]

    def between(self, start_us: float, end_us: float) -> Timeline:
        """The spans that touch an interval."""
        spans = tuple(span for span in self.spans if span.end_us >= start_us and span.start_us <= end_us)
        return dataclasses.replace(self, spans=spans)


def build(tool: str, gpu: str | None, spans: Iterable[Span]) -> Timeline:
    """A timeline from spans with any zero: shifted to start at 0, nested, and with every range projected on the GPU."""
    spans = sorted(spans, key=lambda span: (span.start_us, -span.end_us))
    zero = spans[0].start_us if spans else 0.0
    spans = [dataclasses.replace(span, start_us=span.start_us - zero, end_us=span.end_us - zero) for span in spans]
    spans = _nest(spans)
    spans += _project(spans)
    return Timeline(tool, gpu, tuple(sorted(spans, key=lambda span: (span.start_us, -span.end_us))))


def _nest(spans: Sequence[Span]) -> list[Span]:
    """Sets the depth of each host span: how many ranges of its track are open when it begins."""
    open_ranges: dict[str, list[Span]] = {}
    nested = []
    for span in spans:
        if span.kind in ("range", "launch"):
            stack = open_ranges.setdefault(span.track, [])
            while stack and not stack[-1].encloses(span):
                stack.pop()
            span = dataclasses.replace(span, depth=len(stack))
            if span.kind == "range":
                stack.append(span)
        nested.append(span)
    return nested


def _project(spans: Sequence[Span]) -> list[Span]:
    """For each range, the interval in which the work it launched ran on each stream."""
    launches = [span for span in spans if span.kind == "launch" and span.correlation is not None]
    started = {}
    for span in spans:
        if span.kind in ("kernel", "copy") and span.correlation is not None:
            started.setdefault(span.correlation, []).append(span)
    projected = []
    for outer in (span for span in spans if span.kind == "range"):
        work = [job for launch in launches if outer.encloses(launch) for job in started.get(launch.correlation, [])]
        for stream in dict.fromkeys(job.track for job in work):
            mine = [job for job in work if job.track == stream]
            projected.append(
                Span(
                    name=outer.name,
                    kind="projected",
                    track=stream,
                    start_us=min(job.start_us for job in mine),
                    end_us=max(job.end_us for job in mine),
                    depth=outer.depth,
                    details=outer.details,
                )
            )
    return projected


def _outermost_range(timeline: Timeline) -> dict[int | None, str]:
    """For each correlation of a launch, the outermost range that encloses it."""
    outer = [span for span in timeline.of("range") if span.depth == 0]
    found: dict[int | None, str] = {}
    for launch in timeline.of("launch"):
        for span in outer:
            if span.encloses(launch):
                found[launch.correlation] = span.name
                break
    return found


def perfetto(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the trace-event format that ui.perfetto.dev and chrome://tracing open."""
    groups = {"range": "host", "launch": "host", "kernel": "GPU", "copy": "GPU", "projected": "GPU, ranges"}
    tracks: dict[tuple[str, str], tuple[int, int]] = {}
    processes: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for span in timeline.spans:
        group = groups[span.kind]
        if (group, span.track) not in tracks:
            if group not in processes:
                processes[group] = len(processes) + 1
                events.append(_metadata("process_name", processes[group], 0, group))
            tracks[group, span.track] = (processes[group], len(tracks) + 1)
            events.append(_metadata("thread_name", *tracks[group, span.track], span.track))
        pid, tid = tracks[group, span.track]
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": pid,
                "tid": tid,
                "ts": span.start_us,
                "dur": span.duration_us,
                "args": span.details,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"tool": timeline.tool, "gpu": timeline.gpu}}


def save_perfetto(timeline: Timeline, path: Path | str) -> Path:
    """Writes `perfetto(timeline)` as JSON and returns the path."""
    path = Path(path)
    path.write_text(json.dumps(perfetto(timeline)), encoding="utf-8")
    return path


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
