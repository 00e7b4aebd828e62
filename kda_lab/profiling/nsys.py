"""Reads Nsight Systems exports (SQLite, also gzipped). Tables and columns are discovered: they differ by version."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kda_lab.annotate import DOMAIN
from kda_lab.profiling import table, timeline
from kda_lab.profiling.table import ReportError, unpacked
from kda_lab.profiling.timeline import Span, Timeline

_DOMAIN_CREATED, _CATEGORY_NAMED = 75, 33  # values of NVTX_EVENTS.eventType


def read(path: Path | str) -> Timeline:
    """Reads an export: ranges of NVTX domain kda_lab, CUDA calls, kernels and copies.

    Raises FileNotFoundError, or ReportError for a file that is not a complete nsys export or in which nothing ran.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with _open(path) as database:
            tables = _tables(database)
            if not any(name.startswith(("CUPTI_ACTIVITY", "NVTX_")) for name in tables):
                raise ReportError(f"{path} is a SQLite file without CUDA or NVTX tables; expected an export of nsys")
            strings = dict(database.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}
            spans = [
                *_ranges(database, tables, strings),
                *_calls(database, tables, strings),
                *_kernels(database, tables, strings),
            ]
            spans += _copies(database, tables)
            gpu = _gpu(database, tables)
    except sqlite3.DatabaseError as error:
        raise ReportError(f"{path} is not a SQLite export of nsys, or is damaged ({error})") from None
    if not any(span.kind == "kernel" for span in spans):
        raise ReportError(f"{path} holds no kernel: nothing ran on the GPU while nsys recorded")
    return timeline.build("nsys", gpu, spans)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[sqlite3.Connection]:
    with unpacked(path) as plain, contextlib.closing(sqlite3.connect(f"file:{plain}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        yield database


def _tables(database: sqlite3.Connection) -> dict[str, set[str]]:
    """Columns of every table, by the table's name."""
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
    return {name: {column[1] for column in database.execute(f'PRAGMA table_info("{name}")')} for name in names}


def _ranges(database: sqlite3.Connection, tables: dict[str, set[str]], strings: dict[int, str]) -> Iterator[Span]:
    for name, columns in tables.items():
        if not name.startswith("NVTX_") or not {"start", "end"} <= columns or not {"text", "textId"} & columns:
            continue
        events = [dict(event) for event in database.execute(f'SELECT * FROM "{name}"')]
        domains = {_domain_key(e): _text(e, strings) for e in events if e.get("eventType") == _DOMAIN_CREATED}
        categories = {
            (_domain_key(e), e.get("category")): _text(e, strings)
            for e in events
            if e.get("eventType") == _CATEGORY_NAMED
        }
        ours = {key for key, text in domains.items() if text == DOMAIN}
        for event in events:
            is_range = event["start"] is not None and event["end"] is not None
            is_ours = not domains or _domain_key(event) in ours
            if is_range and is_ours and event.get("eventType") not in (_DOMAIN_CREATED, _CATEGORY_NAMED):
                details = {"category": categories.get((_domain_key(event), event.get("category")))} | _payload(event)
                yield Span(
                    name=_text(event, strings) or "?",
                    kind="range",
                    track=f"thread {(event.get('globalTid') or 0) & 0xFFFFFF}",
                    start_us=event["start"] / 1e3,
                    end_us=event["end"] / 1e3,
                    details={key: value for key, value in details.items() if value is not None},
                )


def _domain_key(event: dict[str, Any]) -> tuple[Any, Any]:
    """A domain's number counts within a process, which is in the upper bits of globalTid."""
    return ((event.get("globalTid") or 0) >> 24, event.get("domainId"))


def _text(event: dict[str, Any], strings: dict[int, str]) -> str | None:
    return event.get("text") or strings.get(event.get("textId"))


def _payload(event: dict[str, Any]) -> dict[str, Any]:
    names = ("uint64Value", "int64Value", "doubleValue", "uint32Value", "int32Value", "floatValue", "jsonText")
    return {"payload": next((event[name] for name in names if event.get(name) is not None), None)}


def _calls(database: sqlite3.Connection, tables: dict[str, set[str]], strings: dict[int, str]) -> Iterator[Span]:
    if "CUPTI_ACTIVITY_KIND_RUNTIME" not in tables:
        return
    for event in map(dict, database.execute("SELECT * FROM CUPTI_ACTIVITY_KIND_RUNTIME")):
        yield Span(
            name=strings.get(event["nameId"], "CUDA call").split("_v")[0],
            kind="launch",
            track=f"thread {(event.get('globalTid') or 0) & 0xFFFFFF}",
            start_us=event["start"] / 1e3,
            end_us=event["end"] / 1e3,
            correlation=event.get("correlationId"),
        )


def _kernels(database: sqlite3.Connection, tables: dict[str, set[str]], strings: dict[int, str]) -> Iterator[Span]:
    if "CUPTI_ACTIVITY_KIND_KERNEL" not in tables:
        return
    for event in map(dict, database.execute("SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL")):
        full_name = strings.get(event.get("demangledName"), strings.get(event.get("shortName"), "?"))
        yield Span(
            name=table.short_name(full_name),
            kind="kernel",
            track=f"GPU {event.get('deviceId', 0)}, stream {event.get('streamId', 0)}",
            start_us=event["start"] / 1e3,
            end_us=event["end"] / 1e3,
            correlation=event.get("correlationId"),
            details={
                "kernel": full_name,
                "grid": [event.get(f"grid{axis}") for axis in "XYZ"],
                "block": [event.get(f"block{axis}") for axis in "XYZ"],
                "registers": event.get("registersPerThread"),
                "local_bytes": event.get("localMemoryPerThread"),
            },
        )


def _copies(database: sqlite3.Connection, tables: dict[str, set[str]]) -> Iterator[Span]:
    for name, label in (("CUPTI_ACTIVITY_KIND_MEMCPY", "copy"), ("CUPTI_ACTIVITY_KIND_MEMSET", "set")):
        if name in tables:
            for event in map(dict, database.execute(f"SELECT * FROM {name}")):
                yield Span(
                    name=f"memory {label}",
                    kind="copy",
                    track=f"GPU {event.get('deviceId', 0)}, stream {event.get('streamId', 0)}",
                    start_us=event["start"] / 1e3,
                    end_us=event["end"] / 1e3,
                    correlation=event.get("correlationId"),
                    details={"bytes": event.get("bytes")},
                )


def _gpu(database: sqlite3.Connection, tables: dict[str, set[str]]) -> str | None:
    if "name" not in tables.get("TARGET_INFO_GPU", set()):
        return None
    first = database.execute("SELECT name FROM TARGET_INFO_GPU").fetchone()
    return first["name"] if first else None
