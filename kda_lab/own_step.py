"""A step of the reader's own: built in seconds, checked in every regime, and timed beside the ladder.

    own_step.start("my_step.cpp")          # writes a file that is right and slow
    report = own_step.run("my_step.cpp")   # builds, checks and times it in a process of its own, with limits
    report.right, report.failure, report.checks, report.times

The file is C++ (.cpp, namespace kda::cpu::step7) or CUDA (.cu, namespace kda::step7) and defines workspace_bytes() and
forward() as every step of the ladder does. A crash, an endless loop or a read outside a tensor is a sentence in the
report: tensors on the CPU end at a page that nobody may touch, and time and memory are limited.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import json
import math
import mmap
import os
import re
import shutil
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda_lab import bench, compare, native, ops, reference, registry, sandbox
from kda_lab.inputs import REGIMES, Inputs, make_inputs

NUMBER, SLUG = 7, "own_step"
TOLERANCE = bench.BF16_TOLERANCE
COLLINEAR_TOLERANCE = 1e-2  # equal keys add up what is rounded
SECONDS, MEGABYTES = 60.0, 1024  # that a step may take in all, and that it may allocate
TIMED = {"cpu": {"T": 128, "H": 4}, "cuda": {"T": 8192, "H": 32}}

_DEVICES = {".cpp": "cpu", ".cu": "cuda"}
_NAMESPACES = {"cpu": f"kda::cpu::step{NUMBER}", "cuda": f"kda::step{NUMBER}"}
_DATA = Path(__file__).parent / "data" / "own_step"


@dataclasses.dataclass(frozen=True)
class Check:
    """One case: errors of out and final state against float64, NaN where NaN or Inf appear."""

    case: str
    error_rms: float
    state_error_rms: float
    tolerance: float

    @property
    def right(self) -> bool:
        return self.error_rms <= self.tolerance and self.state_error_rms <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Report:
    """What happened to a step."""

    path: Path
    device: str
    failure: str  # why it did not run to its end: does not compile, crashed, too slow, ...; else ""
    checks: tuple[Check, ...]
    times: tuple[dict[str, Any], ...]  # "step", "slug", "median_ms" of the ladder's steps and of this one
    machine: dict[str, Any]

    @property
    def right(self) -> bool:
        """Whether it ran to its end and every case is within its tolerance."""
        return not self.failure and bool(self.checks) and all(check.right for check in self.checks)

    @property
    def wrong(self) -> str:
        """The cases that are wrong, with their errors; "" where none is."""
        texts = [
            f"{check.case} (out {check.error_rms:.1e}, state {check.state_error_rms:.1e})"
            for check in self.checks
            if not check.right
        ]
        return ", ".join(texts)

    @property
    def median_ms(self) -> float | None:
        """This step's time, None where it was not timed."""
        return next((row["median_ms"] for row in self.times if row["step"] == NUMBER), None)

    @property
    def beats(self) -> tuple[str, ...]:
        """Slugs of the ladder's steps that are slower."""
        if self.median_ms is None:
            return ()
        return tuple(row["slug"] for row in self.times if row["median_ms"] > self.median_ms)

    def __str__(self) -> str:
        if self.failure:
            return f"{self.path.name}: {self.failure}"
        if not self.right:
            return f"{self.path.name} is wrong: {self.wrong}. A step that is wrong is not timed."
        slower = ", ".join(self.beats) or "none"
        return f"{self.path.name} is right and takes {self.median_ms:.3g} ms. Slower steps of the ladder: {slower}."


def example(name: str) -> Path:
    """A file that ships: "start" (right and slow) or "fast"."""
    path = _DATA / f"{name}.cpp"
    if not path.exists():
        raise ValueError(f"example is {name!r}; expected 'start' or 'fast'")
    return path


def start(path: str | Path) -> Path:
    """Writes a file to begin with: C++ for .cpp; for .cu, step 0 under the new namespace. Never overwrites.

    Raises ValueError for another suffix, FileExistsError if there is such a file.
    """
    path = Path(path)
    if _device(path) == "cpu":
        text = example("start").read_text(encoding="utf-8")
    else:
        text = (native.csrc_dir() / "cuda" / "steps" / "0_token_by_token.cu").read_text(encoding="utf-8")
        text = text.replace("kda::step0", f"kda::step{NUMBER}")
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return path


def build(path: str | Path) -> Path:
    """Builds a library that has the ladder and this file as step 7; returns its path.

    Raises ValueError for a suffix that is neither .cpp nor .cu, and BuildError with the compiler's text, in which the
    file goes by its own name.
    """
    path = Path(path)
    device = _device(path)
    flag, chunks = f"KDA_DEVICE_{device.upper()}", "8 | 16 | 32 | 64"
    with tempfile.TemporaryDirectory(prefix="kda_lab-") as folder:
        csrc = Path(shutil.copytree(native.csrc_dir(), Path(folder) / "csrc"))
        target = csrc / device / "steps" / f"{NUMBER}_{SLUG}{path.suffix}"
        target.write_bytes(path.read_bytes())
        with (csrc / "steps.def").open("a", encoding="utf-8") as steps:
            steps.write(f'KDA_STEP({NUMBER}, {SLUG}, {flag}, {chunks}, {chunks}, 0, 0, 0, "Your own", "your idea")\n')
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # its progress; what went wrong is in the error
                return native.build(device, csrc)
        except native.BuildError as error:
            raise type(error)(str(error).replace(str(target), str(path)), error.log) from None


def run(path: str | Path, *, seconds: float = SECONDS, megabytes: int = MEGABYTES) -> Report:
    """Builds, checks and, if all is right, times a step, in a process with limits. Whatever it does, this returns.

    Raises ValueError for a wrong suffix, FileNotFoundError, and CompilerNotFound where there is no compiler.
    """
    path = Path(path)
    device = _device(path)
    report = partial(Report, path, device, machine=bench.machine(device))
    try:
        library = build(path)
    except native.CompilerNotFound:
        raise
    except native.BuildError as error:
        return report(failure=f"It does not compile.\n{error}", checks=(), times=())
    with tempfile.TemporaryDirectory(prefix="kda_lab-") as folder:
        log = Path(folder) / "events"
        outcome = sandbox.run(
            ["-m", "kda_lab.own_step", device, str(seconds), str(megabytes), str(log)],
            seconds=seconds,
            env={f"KDA_LAB_{device.upper()}_LIBRARY": str(library)},
        )
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    found = {kind: [event[kind] for event in events if kind in event] for kind in ("doing", "check", "time", "failure")}
    failure = "".join(found["failure"])
    if not failure and not any("done" in event for event in events):
        doing = found["doing"][-1] if found["doing"] else "starting"
        failure = f"{outcome.failure or 'It ended the process.'} That was in: {doing}."
        if outcome.text.strip() and not found["doing"]:
            failure += f"\n{outcome.text.strip()}"
    return report(failure=failure, checks=tuple(Check(**check) for check in found["check"]), times=tuple(found["time"]))


def cases() -> dict[str, Inputs]:
    """Every regime with a last chunk that is not full, packed sequences with states, and batch rows of another size."""
    inputs = {regime: make_inputs(T=72, H=4, regime=regime, initial_state="fp32") for regime in REGIMES}
    inputs["packed sequences"] = make_inputs(H=4, seq_lens=(17, 0, 47), initial_state="fp32")
    inputs["batch rows"] = make_inputs(B=2, T=33, H=4, initial_state="bf16")
    inputs["no state"] = make_inputs(T=33, H=4)
    return inputs


def guarded(tensor: Tensor) -> Tensor:
    """A copy that ends where a page begins that nobody may read or write (aligned to 16 bytes)."""
    if tensor.nbytes == 0:
        return tensor
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    if protect(ctypes.c_void_p(address + size), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    begin = (size - tensor.nbytes) // 16 * 16
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin).view(tensor.shape)
    return copy.copy_(tensor)


def _device(path: Path) -> str:
    try:
        return _DEVICES[path.suffix]
    except KeyError:
        raise ValueError(f"{path.name} ends in {path.suffix!r}; expected a .cpp (C++) or .cu (CUDA) file") from None


# In the process with limits from here on.
def _main(device: str, seconds: str, megabytes: str, log: str) -> None:
    try:
        native.load(device)
    except native.LibraryError as error:
        Path(log).write_text(json.dumps({"failure": _not_defined(device, str(error))}) + "\n", encoding="utf-8")
        return
    torch.ones(64, 64, device=device) @ torch.ones(
        64, 64, device=device
    )  # threads and libraries exist before the limit
    problems = cases()
    truths = {name: reference.recurrent(inputs) for name, inputs in problems.items()}
    with open(log, "a", encoding="utf-8") as file:

        def tell(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        cuda_maps = 2**20 if device == "cuda" else 0  # megabytes of addresses, far more than it uses
        sandbox.limit(float(seconds), int(megabytes) + cuda_maps)
        try:
            right = True
            for name, inputs in problems.items():
                tell(doing=name)
                check = _check(name, inputs, truths[name], device)
                tell(check=dataclasses.asdict(check))
                right = right and check.right
            if right:
                _time(device, tell)
        except MemoryError:
            tell(failure=f"It asked for more than {megabytes} MB of memory.")
        except Exception as error:  # what the library says of its failure is the answer
            tell(failure=f"{type(error).__name__}: {error}")
        tell(done=True)
    os._exit(0)  # a damaged heap must not crash the way out


def _not_defined(device: str, error: str) -> str:
    """What a file lacks that compiles and cannot be loaded."""
    missing = re.search(r"undefined symbol: \w*?(workspace_bytes|forward)", error)
    if not missing:
        return error
    return (
        f"It compiles, but does not define {missing[1]}(const KdaArgs&) in namespace {_NAMESPACES[device]}. A step "
        "needs workspace_bytes and forward there; own_step.start('another.cpp') writes a file that has both."
    )


def _check(name: str, inputs: Inputs, truth: Any, device: str) -> Check:
    place = guarded if device == "cpu" else partial(Tensor.to, device=device)
    placed = {key: place(value) for key, value in vars(inputs).items() if isinstance(value, Tensor)}
    inputs = inputs.with_(**placed)
    out = place(torch.full_like(inputs.v, math.nan, device="cpu"))  # what is not written stays NaN
    state = place(torch.full((inputs.N, inputs.H, inputs.V, inputs.K), math.nan))
    ops.fwd(
        *(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.scale, out),
        *(inputs.A_log, inputs.dt_bias, inputs.lower_bound, inputs.initial_state, state, inputs.cu_seqlens),
        step=NUMBER,
    )
    tolerance = COLLINEAR_TOLERANCE if name == "collinear" else TOLERANCE
    errors = compare.relative_rms(out, truth.out), compare.relative_rms(state, truth.final_state)
    return Check(name, *errors, tolerance)


def _time(device: str, tell: Any) -> None:
    inputs = make_inputs(**TIMED[device], device=device)
    for step in native.load(device).steps:  # its own list: that of the CPU's library lacks a CUDA step of the reader's
        if device in step.devices and step.compute_capability in (0, registry.capability() if device == "cuda" else 0):
            tell(doing=f"timing of {step.slug}")
            samples = bench.time_call(partial(ops.forward, inputs, step=step.number), device=device, seconds=0.3)
            tell(time={"step": step.number, "slug": step.slug, "median_ms": statistics.median(samples)})


if __name__ == "__main__":
    _main(*sys.argv[1:])
