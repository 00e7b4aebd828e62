"""How claims get their numbers: compiled machine code, live runs on this machine, and recordings of a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from kda_lab import bench, native, ops, sass
from kda_lab.claims.claim import Evidence, Number
from kda_lab.inputs import Inputs, make_inputs
from kda_lab.profiling import recorded

STAGES = ("activate_gate", "accumulate_gate", "apply_decay", "form_L_and_Mqk", "invert_unit_lower", "recurrence")
ARCH = "sm_90a"

READ = "read on 2026-11-29 in FlashKDA, commit 1ce47ea: "
"""What was read of the published kernel's source, and when. Facts about it stand beside the claim that needs them."""


def here() -> str:
    """The label of a number that was measured just now."""
    machine = bench.machine()
    return f"measured on {machine['cpu']}, {machine['date']}"


def compiled(arch: str = ARCH) -> str:
    """The label of a number that was counted in machine code just now."""
    return f"compiled for {arch} with {_nvcc_release()}, {bench.machine()['date']}"


def live(**numbers: Number) -> Evidence:
    return Evidence(numbers, (here(),))


def from_code(measure: Callable[[], dict[str, Number]], names: Sequence[str], arch: str = ARCH) -> Evidence:
    """Numbers that need nvcc and nvdisasm; all None, with the reason as the source, where they cannot be had."""
    try:
        return Evidence(measure(), (compiled(arch),))
    except native.BuildError as error:
        return Evidence(dict.fromkeys(names), (str(error).splitlines()[0],))


def opcodes(kernel: sass.Kernel, pattern: str) -> int:
    """How many instructions of a kernel have an opcode that matches."""
    return sum(count for name, count in kernel.opcodes.items() if re.match(pattern, name))


def kernel_of(step: int | str, name: str, arch: str = ARCH) -> sass.Kernel:
    """A step's kernel compiled for the architecture; of several sizes the one for 16 tokens, or 128 channels."""
    found = sass.kernels(sass.compile_step(step, arch))
    return next(found[key] for key in (f"{name}<16>", f"{name}<128>", name) if key in found)


def observed_log_decay(
    logits: Sequence[float], *, lower_bound: float = -5.0, A_log: float = 0.0, dt_bias: float = 0.0
) -> np.ndarray:
    """The activated gate of each logit [K], natural log, as the compiled definition (step 0) applies it.

    One token with a zero key writes nothing, so a state of ones becomes exp(g).
    """
    K = len(logits)
    inputs = make_inputs(T=1, H=1, K=K, V=1, lower_bound=lower_bound)
    inputs = inputs.with_(
        k=torch.zeros_like(inputs.k),
        g=torch.tensor(logits).view(1, 1, 1, K).bfloat16(),
        A_log=torch.full_like(inputs.A_log, A_log),
        dt_bias=torch.full_like(inputs.dt_bias, dt_bias),
        initial_state=torch.ones(1, 1, 1, K),
    )
    state = ops.forward(inputs, step="token_by_token", allow_unsafe=True).final_state
    return np.log(state.double().numpy()).ravel()


def stage_ms(step: int | str, inputs: Inputs, chunk: int = 16, runs: int = 9) -> dict[str, float]:
    """Milliseconds of each stage of a CPU step in the fastest of some runs, from the ranges it opens for a profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler announces its start and stop
    call = partial(ops.forward, inputs, step=step, chunk=chunk, allow_unsafe=True)
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        for _ in range(runs):
            call()
    samples: dict[str, list[float]] = {}
    for event in profiled.events():
        samples.setdefault(event.name, []).append(event.cpu_time_total / 1e3)
    return {name: min(samples[name]) for name in STAGES if name in samples}


def interleaved_ms(calls: Sequence[Callable[[], Any]], rounds: int = 3) -> list[float]:
    """Milliseconds of each call's fastest run, in turn, so that what disturbs the machine meets all of them."""
    for call in calls:
        call()
    samples = [bench.time_call(call, seconds=0.0, warmup=0) for _ in range(rounds) for call in calls]
    return [min(sum(samples[i :: len(calls)], ())) for i in range(len(calls))]


def gpu_label() -> str:
    """The label of the GPU recording that ships, or that there is none."""
    recording = recorded.load()
    return recording.label if recording else "no GPU recording ships with this copy"


def recorded_rows(part: str) -> list[dict[str, Any]]:
    """A list of the recorded ladder.json, such as "rows" or "accuracy"; empty where it was not recorded."""
    recording = recorded.load()
    return ((recording and recording.ladder()) or {}).get(part) or []


def recorded_ms(step: int) -> dict[str, float]:
    """Recorded median milliseconds of a step, by case, timed by CUDA events around each call."""
    rows = recorded_rows("rows")
    return {
        row["case"]: row["median_ms"]
        for row in rows
        if row.get("step") == step and row["method"] == "events" and row["median_ms"] is not None
    }


def recorded_kernel_ms(step: int) -> dict[str, float]:
    """Recorded milliseconds of each kernel of a step by CUDA events; empty where they were not recorded."""
    recording = recorded.load()
    return {kernel: us / 1e3 for kernel, us in ((recording and recording.events(step)) or {}).items()}


def recorded_exponential(part: str, column: str) -> dict[str, float]:
    """Recorded column of the forms of the exponential, by form; `part` is "throughput" or "gate"."""
    recording = recorded.load()
    measured = ((recording and recording.ladder()) or {}).get("exponential") or {}
    return {row["form"].split(":")[0]: row[column] for row in measured.get(part, [])}


def _nvcc_release() -> str:
    release = re.search(r"release ([\d.]+)", native.find_nvcc()[0].version)
    return f"nvcc {release[1]}" if release else "nvcc"
