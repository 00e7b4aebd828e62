"""Times every CUDA step and every peer on the same inputs in one process, interleaved, after checking each of them.

Samples of the versions alternate (A B A B ...), so a change of clock or temperature meets all of them, and the inputs
rotate through enough copies that none is still in the L2 cache.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kda_lab import bench, ops, peers, reference, registry
from kda_lab.inputs import Inputs, Result, make_inputs

Call = Callable[[], Result]

METHODS = {
    "events": "CUDA events around each call from Python",
    "host_loop": "host clock over back-to-back calls from Python, per call, on inputs that rotate as in the others",
    "same_tensors": "host clock over back-to-back calls from Python, per call, on the same tensors, as when decoding",
    "cuda_graph": "CUDA events around a replayed graph of calls, per call",
}
PRECISE_STEP = 6  # the one whose keys may be bf16 or more
TENSOR_CORE_STEP = 4  # from this step on a step is timed on every case, below only where a case asks for all steps
REGIME, SEED = "mixed", 0
CALLS_PER_SAMPLE = 20  # of the methods that time many calls at once
SHORT_CALLS_PER_SAMPLE = 200  # fewer launches than the driver queues


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape. ``state``: dtype of the initial and final state, None for neither."""

    B: int
    T: int
    H: int
    seq_lens: tuple[int, ...] | None = None
    state: str | None = None
    precise: bool = False  # keys of more than bf16: step 6 beside the published kernel
    all_steps: bool = False
    fla: bool = False  # FLA tunes itself for a minute at each new number of heads
    methods: tuple[str, ...] = ("events",)

    @property
    def label(self) -> str:
        shape = f"T {self.T}" if self.seq_lens is None else f"packed {len(self.seq_lens)} sequences, T {self.T}"
        batch = f"B {self.B}, " if self.B > 1 else ""
        return f"{batch}{shape}, H {self.H}, {self.state or 'no'} state{', precise' * self.precise}"


_MIX = (1300, 547, 2048, 963, 271, 3063)
_EIGHT = (1024,) * 8
_PER_CALL = ("events", "host_loop", "cuda_graph")

CASES = (
    Case(1, 16, 32, methods=_PER_CALL),
    Case(1, 16, 32, state="fp32", methods=_PER_CALL),
    Case(1, 256, 32, methods=_PER_CALL),
    Case(1, 512, 96, methods=_PER_CALL),
    Case(1, 512, 96, state="fp32"),
    Case(1, 8192, 16),
    Case(1, 8192, 16, state="fp32"),
    Case(1, 8192, 32),
    Case(1, 8192, 32, state="fp32"),
    Case(1, 8192, 64),
    Case(1, 8192, 64, state="fp32"),
    Case(1, 8192, 128),
    Case(1, 8192, 96, state="fp32"),
    Case(1, 8192, 96, state="fp32", precise=True),
    Case(1, 8192, 32, state="fp32", precise=True),
    Case(1, 8192, 96, state="bf16"),
    Case(1, 8185, 96),
    Case(1, 8192, 96, seq_lens=_MIX, state="fp32"),
    Case(1, 8192, 96, seq_lens=_EIGHT, state="fp32"),
    Case(1, 8192, 32, seq_lens=_EIGHT),
    Case(16, 2048, 32),
    Case(1, 65536, 32),
    Case(1, 65536, 32, state="fp32"),
    Case(1, 8192, 96, all_steps=True, fla=True),
    Case(1, 8192, 96, seq_lens=_MIX, fla=True),
    Case(1, 8192, 96, seq_lens=_EIGHT, fla=True),
)
"""FLA's cases come last: a run that is cut short while FLA tunes itself has everything else."""

SHORT_CASES = tuple(Case(1, 16, 32, state=state, methods=("same_tensors",)) for state in (None, "fp32"))
"""The GPU is done before the host: what is timed is the call itself."""

QUICK_CASES = tuple(case for case in CASES if (case.T, case.H, case.state) in ((16, 32, None), (8192, 96, None)))


@dataclasses.dataclass(frozen=True)
class Version:
    """A step or a peer, ready to be bound to inputs."""

    row: dict[str, Any]  # what identifies it in a recorded row
    bind: Callable[[Inputs, torch.dtype | None], Call]
    tolerance: float | None  # a step above it is not timed; a peer's error is recorded as it is


def versions(case: Case, found: Sequence[peers.Peer], library: str) -> list[Version]:
    """The steps and peers that are timed on a case."""
    result = []
    for step in registry.steps():
        first = 0 if case.all_steps else PRECISE_STEP if case.precise else TENSOR_CORE_STEP
        if "cuda" in step.devices and step.number >= first:
            row = {"step": step.number, "slug": step.slug, "library": library}
            result.append(Version(row, step_binder(step.number, precise=case.precise), bench.BF16_TOLERANCE))
    for peer in found:
        if peer.name != "fla" or case.fla:
            result.append(Version({"peer": peer.name, "version": peer.version}, peer.bind, None))
    return result


def make_all_inputs(cases: Sequence[Case]) -> dict[Case, Inputs]:
    """Inputs of every case, on the CPU: drawing takes longer than timing, so shapes are drawn once and in parallel.

    A case's packing and states do not change its other tensors, as in make_inputs.
    """

    def draw(shape: tuple[int, int, int]) -> Inputs:
        return make_inputs(*shape, regime=REGIME, seed=SEED)

    shapes = list(dict.fromkeys((case.B, case.T, case.H) for case in cases))
    with ThreadPoolExecutor(8) as pool:
        drawn = dict(zip(shapes, pool.map(draw, shapes)))
    return {case: _with_sequences(drawn[case.B, case.T, case.H], case) for case in cases}


def _with_sequences(inputs: Inputs, case: Case) -> Inputs:
    """The inputs packed into the case's sequences, with its initial state."""
    if case.seq_lens is not None:
        inputs = inputs.with_(cu_seqlens=torch.tensor([0, *case.seq_lens]).cumsum(0))
    if case.state is not None:
        shape, generator = (inputs.N, inputs.H, inputs.V, inputs.K), torch.Generator().manual_seed(SEED)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.state]
        inputs = inputs.with_(initial_state=torch.randn(shape, generator=generator).to(dtype))
    return inputs


def measure(
    case: Case, inputs: Inputs, found: Sequence[peers.Peer], bound: bench.Bound, library: str, samples: int = 40
) -> Iterator[dict[str, Any]]:
    """Checks and times every version on one case; yields a row for each and each of the case's methods."""
    first = inputs.to("cuda")
    expected = reference.recurrent_torch(first)
    copies = [first, *(_copy(first) for _ in range(_rotation(first) - 1))]
    state_dtype = None if first.initial_state is None else first.initial_state.dtype

    shape = {
        "case": case.label,
        "B": case.B,
        "T": case.T,
        "H": case.H,
        "K": first.K,
        "V": first.V,
        "seq_lens": None if case.seq_lens is None else list(case.seq_lens),
        "state": case.state,
        "precise": case.precise,
        "regime": REGIME,
        "seed": SEED,
        "bytes": bench.io_bytes(first),
        "flops": bench.flops(first),
        "floor_ms": bound.floor_ms(bench.flops(first), bench.io_bytes(first)),
    }
    rows, calls = {}, {}
    for version in versions(case, found, library):
        key = str(version.row)
        bound_calls = [version.bind(inputs, state_dtype) for inputs in copies]
        checked = _check(version, bound_calls[0], expected)
        rows[key] = version.row | shape | checked
        if "refused" not in checked:
            calls[key] = bound_calls

    timed = {method: _TIMERS[method](calls, samples) for method in case.methods}
    for key, row in rows.items():
        for method in case.methods:
            yield row | {"method": method} | statistics_of(timed[method].get(key, []))


def _check(version: Version, call: Call, expected: Result) -> dict[str, Any]:
    """Errors of out and of the final state, if there is one; "refused" says why a version is not to be timed."""
    try:
        result = call()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a peer raises; the other versions are measured all the same
        return {"error_rms": None, "state_error_rms": None, "refused": f"{type(error).__name__}: {error}"}
    error_rms = relative_error(result.out, expected.out)
    state = result.final_state
    checked: dict[str, Any] = {
        "error_rms": error_rms,
        "state_error_rms": None if state is None else relative_error(state, expected.final_state),
    }
    if version.tolerance is not None and not error_rms <= version.tolerance:
        checked["refused"] = f"error {error_rms:.2e} is above {version.tolerance:.0e}: not timed"
    return checked


def statistics_of(samples_ms: Sequence[float]) -> dict[str, Any]:
    """samples_ms with their median, minimum and distance between quartiles; None for all three where there are none."""
    if len(samples_ms) < 2:
        return {"samples_ms": list(samples_ms), "median_ms": None, "min_ms": None, "iqr_ms": None}
    low, middle, high = statistics.quantiles(samples_ms, n=4, method="inclusive")
    rounded = [round(sample, 6) for sample in samples_ms]
    return {"samples_ms": rounded, "median_ms": middle, "min_ms": min(samples_ms), "iqr_ms": high - low}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| on the tensors' device; NaN where either has one."""
    expected = expected.to(actual.device)
    return float((actual.double() - expected).norm() / expected.norm())


def step_binder(
    step: int, allow_unsafe: bool = False, precise: bool = False
) -> Callable[[Inputs, torch.dtype | None], Call]:
    """Our own fwd, called as the peers are: the caller owns out and final_state."""

    def bind(inputs: Inputs, final_state: torch.dtype | None) -> Call:
        result = Result(inputs.new_out(), peers.new_final_state(inputs, final_state))
        arguments = peers.fwd_arguments(inputs, result)
        options = {"step": step, "allow_unsafe": allow_unsafe, "precise": precise}

        def call() -> Result:
            ops.fwd(*arguments, **options)
            return result

        return call

    return bind


def _copy(inputs: Inputs) -> Inputs:
    tensors = {name: value.clone() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return inputs.with_(**tensors)


def _rotation(inputs: Inputs) -> int:
    """How many copies of the inputs make four times the L2 cache."""
    l2_bytes = torch.cuda.get_device_properties(inputs.q.device).L2_cache_size
    return max(1, math.ceil(4 * l2_bytes / bench.io_bytes(inputs)))


def _warm_up(calls: dict[str, list[Call]]) -> None:
    for bound_calls in calls.values():
        for call in bound_calls[:3]:
            call()
    torch.cuda.synchronize()


def _time_events(calls: dict[str, list[Call]], samples: int) -> dict[str, list[float]]:
    _warm_up(calls)
    events = {key: [] for key in calls}
    for i in range(samples):
        for key, bound_calls in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            bound_calls[i % len(bound_calls)]()
            end.record()
            events[key].append((start, end))
        if i % 8 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return {key: [start.elapsed_time(end) for start, end in pairs] for key, pairs in events.items()}


def _time_host_loop(calls: dict[str, list[Call]], samples: int) -> dict[str, list[float]]:
    _warm_up(calls)
    times = {key: [] for key in calls}
    for i in range(samples):
        for key, bound_calls in calls.items():
            batch = _batch(bound_calls, i)
            start = time.perf_counter()
            for call in batch:
                call()
            torch.cuda.synchronize()
            times[key].append(1e3 * (time.perf_counter() - start) / len(batch))
    return times


def _time_same_tensors(calls: dict[str, list[Call]], samples: int) -> dict[str, list[float]]:
    times = {key: [] for key in calls}
    for _ in range(samples + 1):  # the first is for warming up
        for key, (call, *_) in calls.items():
            start = time.perf_counter()
            for _ in range(SHORT_CALLS_PER_SAMPLE):
                call()
            torch.cuda.synchronize()
            times[key].append(1e3 * (time.perf_counter() - start) / SHORT_CALLS_PER_SAMPLE)
    return {key: samples_ms[1:] for key, samples_ms in times.items()}


def _time_cuda_graph(calls: dict[str, list[Call]], samples: int) -> dict[str, list[float]]:
    _warm_up(calls)
    graphs = {}
    for key, bound_calls in calls.items():
        graphs[key] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[key]):
            for call in _batch(bound_calls, 0):
                call()
    replays = {key: [graph.replay] for key, graph in graphs.items()}
    timed = _time_events(replays, samples)
    return {key: [sample / CALLS_PER_SAMPLE for sample in samples_ms] for key, samples_ms in timed.items()}


def _batch(bound_calls: list[Call], i: int) -> list[Call]:
    return [bound_calls[(i * CALLS_PER_SAMPLE + j) % len(bound_calls)] for j in range(CALLS_PER_SAMPLE)]


_TIMERS = {
    "events": _time_events,
    "host_loop": _time_host_loop,
    "same_tensors": _time_same_tensors,
    "cuda_graph": _time_cuda_graph,
}
