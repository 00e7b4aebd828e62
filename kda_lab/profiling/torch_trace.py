"""Records and reads traces of torch.profiler (Chrome trace JSON, also gzipped)."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kda_lab.profiling import table, timeline
from kda_lab.profiling.table import ReportError
from kda_lab.profiling.timeline import Span, Timeline

_KINDS = {
    "user_annotation": "range",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
}


def record(call: Callable[[], None], path: Path) -> None:
    """Runs `call` under torch.profiler, with the GPU where there is one, and writes its trace to a .json.gz file."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="kda_lab-") as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        path.write_bytes(gzip.compress(trace.read_bytes(), mtime=0))


def profile(call: Callable[[], None]) -> Timeline:
    """Runs `call` under torch.profiler and returns what ran when."""
    with tempfile.TemporaryDirectory(prefix="kda_lab-") as folder:
        path = Path(folder) / "trace.json.gz"
        record(call, path)
        return read(path)


def read(path: Path | str) -> Timeline:
    """Reads a trace: ranges, CUDA calls, kernels and copies. Operators of torch are left out.

    Raises FileNotFoundError, or ReportError for a file that is not such a trace or is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with table.unpacked(path) as plain:
            content = json.loads(plain.read_bytes())
        events = content["traceEvents"]
        devices = content.get("deviceProperties") or []
        spans = [_span(event) for event in events if event.get("ph") == "X" and event.get("cat") in _KINDS]
    except ReportError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReportError(f"{path} is not a trace of torch.profiler, or is damaged ({error})") from None
    if not spans:
        raise ReportError(f"{path} holds no range and no kernel: nothing of kda_lab ran while torch.profiler recorded")
    return timeline.build("torch.profiler", devices[0].get("name") if devices else None, spans)


def _span(event: dict[str, Any]) -> Span:
    kind, args = _KINDS[event["cat"]], event.get("args", {})
    on_gpu = kind in ("kernel", "copy")
    details = {"kernel": event["name"], "grid": args.get("grid"), "block": args.get("block")}
    details["registers"] = args.get("registers per thread")
    return Span(
        name=table.short_name(event["name"]) if kind == "kernel" else event["name"],
        kind=kind,
        track=f"GPU {args.get('device', 0)}, stream {args.get('stream', 0)}" if on_gpu else f"thread {event['tid']}",
        start_us=float(event["ts"]),
        end_us=float(event["ts"]) + float(event["dur"]),
        correlation=args.get("correlation"),
        details=details if kind == "kernel" else {},
    )
