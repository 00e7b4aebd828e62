"""How claims get their numbers: compiled machine code, live runs on this machine, and recordings of a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from kda_lab import bench, native, ops, sass
from kda_lab.claims.claim import Evidence, Number
from kda_lab.inputs import make_inputs
from kda_lab.profiling import recorded

ARCH = "sm_90a"

READ = "read on 2026-11-29 in FlashKDA, commit 1ce47ea: "
"""What was read of the published kernel's source, and when. Facts about it stand beside the claim that needs them."""


def here() -> str:
    """The label of a number that was measured just now."""
    machine = bench.machine()
    return f"measured on {machine['cpu']}, {machine['date']}"


def live(**numbers: Number) -> Evidence:
    return Evidence(numbers, (here(),))


Code = Callable[[int | str, str], dict[str, sass.Kernel]]
"""Kernels by name of a step, or of "exp_throughput", for an architecture."""


def compiled(arch: str = ARCH) -> str:
    """The label of a number that was counted in machine code compiled just now."""
    return f"compiled for {arch} with {_nvcc_release()}, {bench.machine()['date']}"


def compile_here(step: int | str, arch: str = ARCH) -> dict[str, sass.Kernel]:
    return sass.kernels(sass.compile_step(step, arch))


def read_recorded(step: int | str, arch: str = ARCH) -> dict[str, sass.Kernel]:
    """The machine code that a recording holds. Raises CompilerNotFound where none does."""
    recording = recorded.load()
    found = recording and recording.sass(step, "" if arch == ARCH else arch)
    if not found:
        raise native.CompilerNotFound(f"no recorded machine code of {step} for {arch}")
    return found


def from_code(measure: Callable[[Code], dict[str, Number]], names: Sequence[str], archs: str = ARCH) -> Evidence:
    """Numbers counted in machine code: compiled here or, where nvcc or nvdisasm is missing, recorded.

    Where neither is to be had all are None, with what is missing as the source.
    """
    try:
        return Evidence(measure(compile_here), (compiled(archs),))
    except native.BuildError as error:
        missing = str(error).splitlines()[0]
    try:
        return Evidence(measure(read_recorded), (f"machine code for {archs}, {report_label()}",))
    except native.BuildError:
        return Evidence(dict.fromkeys(names), (missing,))


def opcodes(kernel: sass.Kernel, pattern: str) -> int:
    """How many instructions of a kernel have an opcode that matches."""
    return sum(count for name, count in kernel.opcodes.items() if re.match(pattern, name))


def kernel_of(code: Code, step: int | str, name: str, arch: str = ARCH) -> sass.Kernel:
    """A step's kernel for the architecture; of several instances the one for 16 tokens, or 128 channels.

    Raises LookupError where there is none.
    """
    found = code(step, arch)
    for key in (f"{name}<16", f"{name}<128", name):
        for instance in sorted(found):
            if re.match(rf"{re.escape(key)}(?:[,>]|$)", instance):
                return found[instance]
    raise LookupError(f"step {step} has no kernel {name} among {', '.join(sorted(found))}")


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


def recorded_disagreement_ms(step: int) -> float:
    """How far four tools are apart on the time of any kernel of a step, in ms, as recorded; 0 where two did not."""
    recording = recorded.load()
    rows = recording.agreement(step) if recording else []
    times = [[us for name, us in row.items() if name.endswith("_us") and us is not None] for row in rows]
    return max((max(of_kernel) - min(of_kernel) for of_kernel in times if of_kernel), default=0.0) / 1e3


def report_label() -> str:
    """The label of the profilers' reports in the GPU recording that ships, or that there is none."""
    recording = recorded.load()
    return recording.label if recording else _NO_RECORDING


def ladder_label() -> str:
    """The label of the recorded ladder: its times, errors and exponentials."""
    recording = recorded.load()
    return recording.ladder_label if recording else _NO_RECORDING


_NO_RECORDING = "no GPU recording ships with this copy"


def recorded_rows(part: str) -> list[dict[str, Any]]:
    """A list of the recorded ladder.json, such as "rows" or "accuracy"; empty where it was not recorded."""
    recording = recorded.load()
    return ((recording and recording.ladder()) or {}).get(part) or []


def recorded_ms(step: int) -> dict[str, float]:
    """Recorded median milliseconds of a step, by case, as the lessons show them."""
    recording = recorded.load()
    return {case: times[step] for case, times in (recording.times() if recording else {}).items() if step in times}


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
