"""What works on this machine: one fact a line, and a fix under every one that is not green."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable

from kda_lab import native
from kda_lab.profiling import command


@dataclasses.dataclass(frozen=True)
class Fact:
    """One line of the report. ok: True is green, False red; None is missing but needed only for something optional."""

    name: str
    ok: bool | None
    value: str
    fix: str = ""


def facts() -> list[Fact]:
    """Runs every check, in the order a walkthrough needs them; builds the CPU library if it is not built yet.

    Never raises: a check that fails for a reason nobody foresaw is a red line with that reason.
    """
    return [*(_run(name, check) for name, check in CHECKS.items()), *(Fact(*found) for found in command.doctor())]


def healthy(found: Iterable[Fact]) -> bool:
    """Whether nothing that a walkthrough needs is red."""
    return all(fact.ok is not False for fact in found)


def report(found: Iterable[Fact]) -> str:
    """The facts as text: mark, name and value a line; a fix below where there is one."""
    marks = {True: "ok", False: "RED", None: "-"}
    lines = []
    for fact in found:
        lines.append(f"{marks[fact.ok]:<4}{fact.name:<16}{fact.value}")
        lines += [f"{'':<20}{line}" for line in (f"Fix: {fact.fix}" if fact.fix else "").splitlines()]
    return "\n".join(lines)


Answer = tuple[bool | None, str, str]  # ok, value, fix


def _run(name: str, check: Callable[[], Answer]) -> Fact:
    try:
        return Fact(name, *check())
    except native.BuildError as error:  # its text names what is missing and the command that installs it
        first, _, rest = str(error).partition("\n")
        return Fact(name, False, first, rest.strip() or first)
    except native.LibraryError as error:
        return Fact(name, False, str(error), f"delete {native.cache_dir()}, then run kda-lab build")
    except Exception as error:
        return Fact(name, False, f"{type(error).__name__}: {error}", "report this line as a bug of kda_lab")


def _python() -> Answer:
    ok = sys.version_info >= (3, 10)
    return ok, f"{platform.python_version()} at {sys.executable}", "" if ok else "install Python 3.10 or newer"


def _torch() -> Answer:
    try:
        import torch
    except (ImportError, OSError) as error:
        return False, f"does not import: {error}", "pip install torch"
    return True, f"{torch.__version__}, {torch.get_num_threads()} threads", ""


def _compiler() -> Answer:
    found = native.find_cxx()
    return True, f"{found.name} at {found.path}", ""


def _cmake() -> Answer:
    toolchain = native.find_toolchain("cpu")
    cmake, ninja = _first_line(toolchain.cmake, "--version"), _first_line(toolchain.ninja, "--version")
    return True, f"{cmake}, ninja {ninja.split('.git')[0]}", ""


def _cache() -> Answer:
    folder = native.cache_dir()
    if folder.name.startswith("kda_lab-"):  # native's fallback where the home cannot be written
        return None, f"{folder} (temporary)", "set KDA_LAB_CACHE to a folder that can be written, to keep what is built"
    return True, str(folder), ""


def _library() -> Answer:
    library = native.load("cpu")
    return True, f"{len(library.steps)} steps in {library.path}", ""


def _openmp() -> Answer:
    code = native.load("cpu").path.read_bytes()
    if b"GOMP_parallel" in code or b"__kmpc_fork_call" in code:
        return True, "the library uses every core", ""
    return (
        None,
        "the library uses one core",
        "install OpenMP for your compiler (macOS: brew install libomp), then kda-lab build",
    )


def _nvtx() -> Answer:
    return _package("nvtx", needed=False)


def _ipywidgets() -> Answer:
    return _package("ipywidgets", needed=True)


def _kernel() -> Answer:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        return False, "Jupyter finds no kernel named python3", "pip install ipykernel"
    program = spec.argv[0]
    ours = program == sys.executable or "/" not in program
    fix = "" if ours else f"{sys.executable} -m ipykernel install --sys-prefix"
    return ours, f"python3 runs {'this Python' if ours else program}", fix


def _gpu() -> Answer:
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return True, f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}", ""
    reason = "this torch is built for CPUs only" if torch.version.cuda is None else "torch finds no CUDA device"
    if shutil.which("nvidia-smi"):
        return None, reason, "install a CUDA build of torch: https://pytorch.org/get-started"
    return None, f"{reason}; the lessons show recorded GPU numbers", ""


def _nvcc() -> Answer:
    try:
        found, _ = native.find_nvcc()
    except native.CompilerNotFound:
        return None, "none; CUDA steps cannot be compiled", "pip install 'kda-lab[cuda]'"
    return True, f"{found.name} at {found.path}", ""


CHECKS: dict[str, Callable[[], Answer]] = {
    "python": _python,
    "torch": _torch,
    "C++ compiler": _compiler,
    "cmake": _cmake,
    "cache": _cache,
    "library": _library,
    "OpenMP": _openmp,
    "nvtx": _nvtx,
    "ipywidgets": _ipywidgets,
    "Jupyter kernel": _kernel,
    "GPU": _gpu,
    "nvcc": _nvcc,
}


def _package(name: str, *, needed: bool) -> Answer:
    try:
        return True, importlib.metadata.version(name), ""
    except importlib.metadata.PackageNotFoundError:
        return (False if needed else None), "not installed", f"pip install {name}"


def _first_line(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
