"""One exponential in every form a kernel could use: its error in ulp over x, and the instructions it costs.

The forms of the CPU are measured when asked for; those of a GPU come from a recording, which

    python -m kda_lab.expforms DIR       # DIR/exp_forms.json; needs a GPU and nvcc

makes. What nobody measured has no numbers.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kda_lab.profiling.recorded import Recording

LOG2_E = math.log2(math.e)
X = tuple(float(x) for x in np.linspace(-79.87, 79.91, 256, dtype=np.float32))
"""Where the forms are measured: the exponents that a chunk of 16 tokens with lower_bound -5 can meet. No integers."""

GPU_FORMS = ("expf", "__expf", "exp2f", "ex2.approx", "ex2.approx.ftz", "ex2.approx.ftz(x * log2e)")
"""In the order of csrc/cuda/exp_throughput.cu, where form n is the kernel single<n>."""

_BASE_2 = ("exp2f", "ex2.approx", "ex2.approx.ftz")


@dataclasses.dataclass(frozen=True)
class Form:
    """One form on one device. Empty and None: not measured."""

    name: str
    device: str  # "CPU" or "GPU"
    x: tuple[float, ...]
    ulp: tuple[float, ...]  # distance from the exact value in units in the last place of fp32
    instructions: int | None = None  # between its argument in a register and its result in one
    arch: str = ""  # that they were compiled for

    @property
    def measured(self) -> bool:
        return bool(self.ulp)

    def ulp_at(self, x: float) -> float:
        """The error at the measured x nearest to this one."""
        return self.ulp[int(np.argmin(np.abs(np.asarray(self.x) - x)))]

    def describe(self, x: float) -> str:
        """Errors and instructions in a line."""
        found = f"error {self.ulp_at(x):.2g} ulp here, {max(self.ulp):.2g} at most" if self.measured else None
        count = None if self.instructions is None else f"instructions for {self.arch}: {self.instructions}"
        return f"{self.name} on the {self.device}: {found or 'error not measured'}, {count or 'cost not measured'}"


def forms(recording: Recording | None) -> tuple[Form, ...]:
    """The forms of this CPU, measured now, and those of the recording's GPU."""
    content = (recording.exp_forms() if recording else None) or {}
    values, counts, arch = content.get("values", {}), content.get("instructions", {}), content.get("arch", "")
    on_gpu = [
        Form(name, "GPU", X if name in values else (), _errors(name, values.get(name, ())), counts.get(name), arch)
        for name in GPU_FORMS
    ]
    return (*on_cpu(), *on_gpu)


def on_cpu() -> tuple[Form, ...]:
    """expf, exp2f and e^x by way of exp2f, from this machine's C library. Its instructions are not counted."""
    expf, exp2f = _c_function("expf"), _c_function("exp2f")
    log2_e = np.float32(LOG2_E)
    found: dict[str, Callable[[float], float]] = {
        "expf": expf,
        "exp2f": exp2f,
        "exp2f(x * log2e)": lambda x: exp2f(float(np.float32(x) * log2_e)),
    }
    return tuple(Form(name, "CPU", X, _errors(name, [form(x) for x in X])) for name, form in found.items())


def count_instructions(arch: str = "sm_90a") -> dict[str, int]:
    """Instructions of each GPU form between load and store, from its machine code. Needs nvcc, no GPU."""
    from kda_lab import sass

    code = sass.kernels(sass.compile_step("exp_throughput", arch))
    counts = {}
    for number, name in enumerate(GPU_FORMS):
        opcodes = [sass.opcode(instruction).split(".")[0] for instruction in code[f"single<{number}>"].instructions]
        counts[name] = opcodes.index("STG") - opcodes.index("LDG") - 1
    return counts


def gpu_values() -> dict[str, list[float]]:
    """What each GPU form makes of X, on torch's current GPU. Needs nvcc."""
    import torch

    from kda_lab import sass

    major, minor = torch.cuda.get_device_capability()
    compiled = sass.compile_step("exp_throughput", f"sm_{major}{minor}")
    code = sass.kernels(compiled)
    driver, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    values = torch.empty(len(X), device="cuda")  # also makes torch's context current, where the module goes
    _check(driver.cuModuleLoad(ctypes.byref(module), str(compiled.cubin).encode()))
    found = {}
    for number, name in enumerate(GPU_FORMS):
        values.copy_(torch.tensor(X))
        function, pointer = ctypes.c_void_p(), ctypes.c_void_p(values.data_ptr())
        symbol = code[f"single<{number}>"].symbol.encode()
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, symbol))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(driver.cuLaunchKernel(function, 1, 1, 1, len(X), 1, 1, 0, stream, arguments, None))
        found[name] = values.tolist()
    return found


def main(arguments: Sequence[str]) -> int:
    from kda_lab import bench

    folder = Path(arguments[0])
    content: dict[str, Any] = {"machine": bench.machine("cuda"), "arch": "sm_90a"}
    content |= {"instructions": count_instructions(), "values": gpu_values()}
    (folder / "exp_forms.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    return 0


def _errors(form: str, values: Sequence[float]) -> tuple[float, ...]:
    exact = np.exp2(np.float64(X)) if form in _BASE_2 else np.exp(np.float64(X))
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    return tuple(float(error) for error in np.abs(np.float64(values) - exact) / ulp) if len(values) else ()


def _c_function(name: str) -> Callable[[float], float]:
    function = getattr(ctypes.CDLL(ctypes.util.find_library("m")), name)
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
    return function


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver answered with error {status}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
