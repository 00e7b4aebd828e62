"""The program that is profiled: ``python -m kda_lab.profiling.target --step 5``. A profiler starts it; people can, too.

It warms up outside the profiled region and runs the iterations inside it. The region is what cudaProfilerStart and
cudaProfilerStop enclose, so that nsys (--capture-range=cudaProfilerApi) and ncu (--profile-from-start off) see nothing
else. With --torch-trace FILE it profiles itself with torch.profiler instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kda_lab import annotate, ops, registry
from kda_lab.inputs import REGIMES, Inputs, make_inputs
from kda_lab.profiling import kernel_events, torch_trace

DRAWN_TOKENS = 1024


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("target: --device cuda, but torch sees no GPU here")
    step = registry.get(options.step, options.device)
    inputs = repeated_inputs(options.B, options.T, options.H, options.regime, options.device)

    def iterate(count: int) -> None:
        for _ in range(count):
            ops.forward(inputs, step=step.number, chunk=options.chunk)
        if on_gpu:
            torch.cuda.synchronize()

    annotate.enable()
    iterate(options.warmup)
    if options.torch_trace:
        torch_trace.record(lambda: iterate(options.iterations), options.torch_trace)
    else:
        if on_gpu:
            torch.cuda.profiler.start()
        iterate(options.iterations)
        if on_gpu:
            torch.cuda.profiler.stop()
    summary: dict[str, Any] = {"step": step.number, "slug": step.slug, "B": options.B, "T": options.T, "H": options.H}
    if options.kernel_events:
        samples = kernel_events.measure(lambda: iterate(1), options.iterations)
        summary["kernel_events_us"] = {name: statistics.median(times) for name, times in samples.items()}
    print(json.dumps(summary))
    return 0


def repeated_inputs(B: int = 1, T: int = 8192, H: int = 96, regime: str = "mixed", device: str = "cuda") -> Inputs:
    """Inputs of a size to be timed. Speed depends on sizes, not values, and drawing many takes longer than profiling:
    the first DRAWN_TOKENS are repeated."""
    drawn = make_inputs(B, min(T, DRAWN_TOKENS), H, regime=regime, device=device)
    repeated = {}
    for name in ("q", "k", "v", "g", "beta"):
        tensor = getattr(drawn, name)
        repeats = [1, -(-T // DRAWN_TOKENS)] + [1] * (tensor.dim() - 2)
        repeated[name] = tensor.repeat(repeats)[:, :T].contiguous()
    return drawn.with_(**repeated)


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


if __name__ == "__main__":
    raise SystemExit(main())
