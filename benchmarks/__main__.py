"""`make bench`: measures what the project promises, each number beside its promise. Takes a few minutes.

python -m benchmarks [NAME ...]     cpu_fused, call_overhead, base_2, build, import, explorer; default: all
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

from kda_lab import bench, reference, widgets
from kda_lab.inputs import make_inputs


def program(name: str) -> None:
    """A benchmark that is a program of its own: it changes settings of torch or the library."""
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


def base_2() -> None:
    """What base 2 buys on this CPU: naive_exp against rebased_ex2, samples of both taken in turn."""
    inputs = make_inputs(T=1024, H=8)
    expected = reference.recurrent(inputs).out
    bound = bench.measure_bound("cpu")
    rounds = [[bench.measure(step, inputs, expected, bound, seconds=0.5) for step in (1, 2)] for _ in range(5)]
    naive, rebased = (statistics.median(pair[i].median_ms for pair in rounds) for i in (0, 1))
    ratios = sorted(pair[0].median_ms / pair[1].median_ms for pair in rounds)
    print(f"naive_exp {naive:.1f} ms, rebased_ex2 {rebased:.1f} ms, floor {rounds[0][0].floor_ms:.1f} ms")
    print(f"naive_exp / rebased_ex2: {statistics.median(ratios):.3f} (rounds from {ratios[0]:.3f} to {ratios[-1]:.3f})")


def build() -> None:
    """Time to build the CPU library with an empty cache. Promise: 20 s."""
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "kda_lab.cli", "build"],
            check=True,
            capture_output=True,
            env=os.environ | {"KDA_LAB_CACHE": cache},
        )
        seconds = time.perf_counter() - start
    _promise("building the CPU library", seconds, 20, "s")


def import_() -> None:
    """What `import kda_lab` takes beyond importing torch. Promise: 1.5 s."""
    code = "import time, torch; t = time.perf_counter(); import kda_lab; kda_lab.fwd; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(5)]
    _promise("import kda_lab, beyond torch", statistics.median(float(run.stdout) for run in runs), 1.5, "s")


def explorer() -> None:
    """From a slider's move to the new picture in the kernel. Promise: 100 ms median."""
    _promise("slider to picture, median", statistics.median(widgets.measure_latency()), 100, "ms")


BENCHMARKS: dict[str, Callable[[], None]] = {
    "cpu_fused": partial(program, "cpu_fused"),
    "call_overhead": partial(program, "call_overhead"),
    "base_2": base_2,
    "build": build,
    "import": import_,
    "explorer": explorer,
}


def _promise(what: str, value: float, limit: float, unit: str) -> None:
    print(f"{what}: {value:.2f} {unit} (promised: at most {limit:g} {unit}{'' if value <= limit else '; NOT KEPT'})")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; default: all")
    names = parser.parse_args(argv).names or list(BENCHMARKS)
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    machine = bench.machine()
    print(", ".join(f"{name} {machine[name]}" for name in ("cpu", "threads", "torch", "date", "commit")))
    for name in names:
        print(f"\n== {name}", flush=True)
        BENCHMARKS[name]()


if __name__ == "__main__":
    main()
