"""Timing with the comparison first: a step that is not right is not timed.

Every row keeps its raw samples, and the bound beside each time is measured on the same machine in the same run: what a
large matrix product and a large copy reach there.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import platform
import statistics
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kda_lab import arguments, compare, ops, reference, registry
from kda_lab.inputs import Inputs, make_inputs

# Largest relative RMS error of the output in steps with bf16 factors and a bf16 state (ordinary gates); steps with fp32
# arithmetic are held to compare.output_tolerance().
BF16_TOLERANCE = 6e-3


class CheckFailed(AssertionError):
    """A step differs from the float64 definition by more than its tolerance, so that timing it would mean nothing."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """What this machine reached just now; no step can be faster than both allow."""

    flops_per_s: float  # of a square matrix product: fp32 on a CPU, bf16 on a GPU
    bytes_per_s: float  # of a copy, read and write counted

    def floor_ms(self, flops: int, bytes: int) -> float:
        """The shortest time in which this machine could do `flops` and move `bytes`, were nothing else in the way."""
        return 1e3 * max(flops / self.flops_per_s, bytes / self.bytes_per_s)


@dataclasses.dataclass(frozen=True)
class Row:
    """One step on one input: its error, its samples and the floor under its time."""

    step: int
    slug: str
    device: str
    B: int
    T: int
    H: int
    K: int
    V: int
    chunk: int
    seq_lens: tuple[int, ...] | None  # of packed sequences
    error_rms: float  # of the output against float64, relative
    samples_ms: tuple[float, ...]  # empty when the step was refused
    bytes: int  # of one pass over the inputs and outputs
    flops: int  # of the chunk form with 16 tokens a chunk
    floor_ms: float
    refused: str = ""  # why the step was not timed

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def min_ms(self) -> float | None:
        return min(self.samples_ms, default=None)

    @property
    def iqr_ms(self) -> float | None:
        """Distance between the quartiles of the samples."""
        if len(self.samples_ms) < 2:
            return None
        quartiles = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return quartiles[2] - quartiles[0]

    def as_dict(self) -> dict[str, Any]:
        """Every field and statistic, ready for JSON."""
        return dataclasses.asdict(self) | {"median_ms": self.median_ms, "min_ms": self.min_ms, "iqr_ms": self.iqr_ms}


def time_call(
    call: Callable[[], Any], *, device: str = "cpu", seconds: float = 1.0, warmup: int = 2
) -> tuple[float, ...]:
    """Times `call` repeatedly and returns the samples in ms: 5 to 50 of them, as many as fit into about `seconds`.

    On a CPU by perf_counter. On a GPU by CUDA events on the current stream, so that launch overhead hides behind the
    kernels as it does in use.
    """
    for _ in range(warmup):
        call()
    sample = _sample_cuda if device == "cuda" else _sample_cpu
    first = sample(call, 1)[0]
    count = max(5, min(50, int(1e3 * seconds / max(first, 1e-3))))
    return sample(call, count)


def _sample_cpu(call: Callable[[], Any], count: int) -> tuple[float, ...]:
    samples = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - start))
    return tuple(samples)


def _sample_cuda(call: Callable[[], Any], count: int) -> tuple[float, ...]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda.synchronize()
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return tuple(start.elapsed_time(end) for start, end in events)


STAGES = ("activate_gate", "accumulate_gate", "apply_decay", "form_L_and_Mqk", "invert_unit_lower", "recurrence")
"""Ranges of the CPU steps 1 to 3. "recurrence" is what happens chunk after chunk."""


def stage_ms(step: int | str, inputs: Inputs, chunk: int = 16, runs: int = 9) -> dict[str, float]:
    """Milliseconds of each of STAGES of a CPU step on one thread, in its fastest run, from the ranges it opens.

    Raises what ops.forward raises for the step and chunk; lower_bound is not checked.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler announces its start and stop
    call = partial(ops.forward, inputs, step=step, chunk=chunk, allow_unsafe=True)
    with one_thread():
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            for _ in range(runs):
                call()
    samples: dict[str, list[float]] = {}
    for event in profiled.events():
        samples.setdefault(event.name, []).append(event.cpu_time_total / 1e3)
    return {name: min(samples[name]) for name in STAGES if name in samples}


def fastest_ms(calls: Sequence[Callable[[], Any]], seconds: float = 0.5) -> list[float]:
    """Milliseconds of one thread's processor time in each call's fastest run, the calls in turn.

    Whatever else runs on the machine can only add to a run, and its waiting is not counted: of enough runs the fastest
    is the program's own time, on a busy machine as well.
    """
    fastest = [math.inf] * len(calls)
    with one_thread():
        for call in calls:
            call()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or math.inf in fastest:
            for i, call in enumerate(calls):
                start = time.thread_time()
                call()
                fastest[i] = min(fastest[i], 1e3 * (time.thread_time() - start))
    return fastest


@contextmanager
def one_thread() -> Iterator[None]:
    """Operators on one thread: nothing waits for another, which on a busy machine may not run at all.

    The CPU library shares torch's OpenMP threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measure_bound(device: str = "cpu") -> Bound:
    """Measures the matrix-product rate and the copy bandwidth of `device` ("cpu" or "cuda")."""
    _check_device(device)
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (2048, torch.float32)
    a, b, out = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(3))
    product_ms = statistics.median(time_call(lambda: torch.mm(a, b, out=out), device=device))
    source = torch.ones(2**28 if device == "cuda" else 2**26, device=device)  # fp32: 1 GiB or 256 MiB, beyond any cache
    target = torch.empty_like(source)
    copy_ms = statistics.median(time_call(lambda: target.copy_(source), device=device))
    return Bound(flops_per_s=2 * n**3 / (product_ms / 1e3), bytes_per_s=2 * source.nbytes / (copy_ms / 1e3))


def flops(inputs: Inputs, chunk: int = 16) -> int:
    """Multiply-adds counted as 2, of the chunk form's matrix products and its inverse, for all tokens and heads."""
    K, V, C = inputs.K, inputs.V, chunk
    intra_chunk = 2 * (2 * C * K) + 6 * (2 * C * C)  # L and Mqk; the inverse as six C x C products
    recurrence = 3 * (2 * K * V) + 2 * (
        2 * C * V
    )  # against the state, the same for the output, the update; INV and Mqk
    return inputs.B * inputs.T * inputs.H * (intra_chunk + recurrence)


def io_bytes(inputs: Inputs) -> int:
    """Bytes of one pass over what the operator must read or write once: q, k, v, g, beta, out and the states."""
    tensors = [inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.v]  # out has the size of v
    states = 0 if inputs.initial_state is None else 2 * inputs.initial_state.nbytes
    return sum(tensor.nbytes for tensor in tensors) + states


def check(step: int | str, inputs: Inputs, expected: Any, *, chunk: int = 16) -> float:
    """The relative RMS error of a step's output against the float64 `expected` [B, T, H, V].

    Raises CheckFailed when it is above the step's tolerance, or when NaN or Inf appear where they should not.
    """
    device = inputs.q.device.type
    found = registry.get(step, device)
    out = ops.forward(inputs, step=found.number, chunk=chunk).out
    tolerance = BF16_TOLERANCE if device == "cuda" and found.number >= 4 else compare.output_tolerance(expected)
    try:
        compare.assert_close(out, expected, rms=tolerance)
    except AssertionError as error:
        raise CheckFailed(f"step {found.number} ({found.slug}) on {device}: {error}") from None
    return compare.relative_rms(out, expected)


def measure(
    step: int | str, inputs: Inputs, expected: Any, bound: Bound, *, chunk: int = 16, seconds: float = 1.0
) -> Row:
    """Checks one step against `expected`, then times it. A red check gives a row without samples that says why."""
    device = inputs.q.device.type
    found = registry.get(step, device)
    samples: tuple[float, ...] = ()
    refused = ""
    try:
        error_rms = check(found.number, inputs, expected, chunk=chunk)
        samples = time_call(lambda: ops.forward(inputs, step=found.number, chunk=chunk), device=device, seconds=seconds)
    except CheckFailed as failure:
        error_rms, refused = float("nan"), str(failure)
    offsets = None if inputs.cu_seqlens is None else inputs.cu_seqlens.diff().tolist()
    operations, moved = flops(inputs), io_bytes(inputs)
    return Row(
        step=found.number,
        slug=found.slug,
        device=device,
        B=inputs.B,
        T=inputs.T,
        H=inputs.H,
        K=inputs.K,
        V=inputs.V,
        chunk=chunk,
        seq_lens=None if offsets is None else tuple(offsets),
        error_rms=error_rms,
        samples_ms=samples,
        bytes=moved,
        flops=operations,
        floor_ms=bound.floor_ms(operations, moved),
        refused=refused,
    )


def default_device() -> str:
    """ "cuda" where torch finds a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def ladder(
    device: str | None = None,
    *,
    B: int | None = None,
    T: int | None = None,
    H: int | None = None,
    regime: str = "mixed",
    steps: Sequence[int | str] | None = None,
    seconds: float = 1.0,
    bound: Bound | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Checks, then times every step that `device` has, in order, on one input.

    Args:
        device: "cpu" or "cuda"; None is the GPU where there is one.
        B, T, H: default to 1, 1024 and 8 on a CPU, to 1, 8192 and 96 on a GPU.
        steps: numbers or slugs; None is all of them.
        seconds: spent on each step's samples.
        bound: measured when None.
        progress: told what happens next.
    """
    device = device or default_device()
    _check_device(device)
    default_T, default_H = (8192, 96) if device == "cuda" else (1024, 8)
    inputs = make_inputs(B or 1, T or default_T, H or default_H, regime=regime, device=device)
    chosen = [registry.get(step, device) for step in steps] if steps else _steps_of(device)
    if bound is None:
        progress("matrix product and copy, for the bound")
        bound = measure_bound(device)
    progress("the definition in float64")
    truth = reference.recurrent_torch if device == "cuda" else reference.recurrent
    expected = truth(inputs).out
    rows = []
    for step in chosen:
        progress(f"step {step.number}, {step.slug}")
        rows.append(measure(step.number, inputs, expected, bound, seconds=seconds))
    return rows


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; expected 'cpu' or 'cuda'")
    arguments.torch_device("device", device)


def _steps_of(device: str) -> list[registry.Step]:
    return [step for step in registry.steps() if device in step.devices]


def format_table(rows: Sequence[Row]) -> str:
    """The ladder as text: `table_cells` in columns, and `legend` below."""
    if not rows:
        return "not measured"
    lines = table_cells(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    pad = [str.ljust, str.ljust] + [str.rjust] * (len(widths) - 2)
    table = ["  ".join(f(cell, width) for f, cell, width in zip(pad, line, widths)).rstrip() for line in lines]
    return "\n".join([*table, "", textwrap.fill(legend(rows), 100), *(row.refused for row in rows if row.refused)])


def table_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A head, then a line a row: step, name, error, time, ratio to the row before, the bound's share of the time."""
    head = ("step", "name", "error", "median ms", "iqr ms", "× faster", "bound")
    return [head, *(_cells(before, row) for before, row in zip([None, *rows], rows))]


def legend(rows: Sequence[Row]) -> str:
    """What was run, and what the columns of `table_cells` mean."""
    row = rows[0]
    return (
        f"B {row.B}, T {row.T}, H {row.H}, K {row.K}, V {row.V} on {row.device}. error: relative RMS of the output "
        "against float64, checked before timing. × faster: than the step above. bound: share of the fastest this "
        f"machine could be, {row.floor_ms:.3g} ms: its rates now for {row.flops / 1e9:.3g} GFLOP of matrix products "
        f"and {row.bytes / 1e6:.3g} MB copied."
    )


def _cells(before: Row | None, row: Row) -> tuple[str, ...]:
    if row.median_ms is None:
        return str(row.step), row.slug, "red", "refused", "", "", ""
    faster = f"{before.median_ms / row.median_ms:.2f}" if before and before.median_ms else "–"
    share = f"{row.floor_ms / row.median_ms:.1%}"
    return str(row.step), row.slug, f"{row.error_rms:.2e}", f"{row.median_ms:.3f}", f"{row.iqr_ms:.3f}", faster, share


def machine(device: str = "cpu") -> dict[str, Any]:
    """What a measurement must be labelled with: processor, versions, date and commit ("unknown" outside a checkout)."""
    record: dict[str, Any] = {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }
    if device == "cuda":
        record["gpu"] = torch.cuda.get_device_name()
        record["cuda"] = torch.version.cuda
    return record


def label(device: str = "cpu") -> str:
    """`machine` in a line, for those who read a measurement."""
    facts = machine(device)
    return f"{facts.get('gpu') or facts['cpu']}, torch {facts['torch']}, {facts['date']}, commit {facts['commit']}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
