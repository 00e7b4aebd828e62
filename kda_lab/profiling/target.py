"""The program that is profiled: ``python -m kda_lab.profiling.target --step 5``. A profiler starts it; people can, too.

It warms up outside the profiled region and runs the iterations inside it. The region is what cudaProfilerStart and
cudaProfilerStop enclose, so that nsys (--capture-range=cudaProfilerApi) and ncu (--profile-from-start off) see nothing
else. With --torch-trace FILE it profiles itself with torch.profiler instead.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kda_lab import annotate, ops, registry
from kda_lab.inputs import REGIMES, make_inputs
from kda_lab.profiling import kernel_events


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("target: --device cuda, but torch sees no GPU here")
    step = registry.get(options.step, options.device)
    inputs = make_inputs(options.B, options.T, options.H, regime=options.regime, device=options.device)

    def iterate(count: int) -> None:
        for _ in range(count):
            ops.forward(inputs, step=step.number, chunk=options.chunk)
        if on_gpu:
            torch.cuda.synchronize()

    annotate.enable()
    iterate(options.warmup)
    with _region(options, on_gpu):
        iterate(options.iterations)
    summary: dict[str, Any] = {"step": step.number, "slug": step.slug, "B": options.B, "T": options.T, "H": options.H}
    if options.kernel_events:
        samples = kernel_events.measure(lambda: iterate(1), options.iterations)
        summary["kernel_events_us"] = {name: statistics.median(times) for name, times in samples.items()}
    print(json.dumps(summary))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kda_lab.profiling.target", description="Run a step for a profiler."
    )
    parser.add_argument("--step", required=True, help="number or name of a step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("-B", type=int, default=1, help="batch rows")
    parser.add_argument("-T", type=int, default=8192, help="tokens")
    parser.add_argument("-H", type=int, default=96, help="heads")
    parser.add_argument("--chunk", type=int, default=16, help="tokens of a chunk")
    parser.add_argument("--regime", choices=REGIMES, default="mixed")
    parser.add_argument("--warmup", type=int, default=2, help="passes before the profiled region")
    parser.add_argument("--iterations", type=int, default=1, help="passes inside the profiled region")
    parser.add_argument("--torch-trace", type=Path, metavar="FILE", help="write a torch.profiler trace (.json.gz)")
    parser.add_argument("--kernel-events", action="store_true", help="then time each kernel with CUDA events, too")
    return parser


@contextlib.contextmanager
def _region(options: argparse.Namespace, on_gpu: bool) -> Any:
    if options.torch_trace:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            yield
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            options.torch_trace.write_bytes(gzip.compress(trace.read_bytes(), mtime=0))
    elif on_gpu:
        torch.cuda.profiler.start()
        yield
        torch.cuda.profiler.stop()
    else:
        yield


if __name__ == "__main__":
    raise SystemExit(main())
