"""Finds the tools that build the libraries: CMake, Ninja, a C++ compiler, nvcc."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kda_lab.native.errors import CompilerNotFound

# What CMake and the compilers read from the environment: part of what decides the bytes of a library.
FLAG_VARIABLES = (
    "CXXFLAGS",
    "CUDAFLAGS",
    "LDFLAGS",
    "CPATH",
    "LIBRARY_PATH",
    "CUDAHOSTCXX",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
)

_INSTALL = {
    "cmake": ("pip install cmake", "sudo apt-get install cmake", "conda install -c conda-forge cmake"),
    "ninja": ("pip install ninja", "sudo apt-get install ninja-build", "conda install -c conda-forge ninja"),
    "c++": ("sudo apt-get install g++", "conda install -c conda-forge cxx-compiler"),
    "nvcc": (
        'pip install "cuda-toolkit[nvcc,cudart,cccl]"',
        "sudo apt-get install nvidia-cuda-toolkit",
        "conda install -c conda-forge cuda-nvcc cuda-cudart-dev cuda-cccl",
    ),
}


@dataclass(frozen=True)
class Compiler:
    path: str
    version: str  # what `--version` printed: two compilers that print the same are the same to the cache

    @property
    def name(self) -> str:
        """A short name for messages, such as "g++ (Debian 12.2.0-14) 12.2.0" or "nvcc, release 13.0, V13.0.88"."""
        lines = self.version.splitlines()
        release = next((line.split("tools,")[-1].strip() for line in lines if "release" in line), None)
        return f"{Path(self.path).name} {release}" if release else lines[0]


@dataclass(frozen=True)
class Toolchain:
    """Everything but the sources that decides the bytes of a library."""

    device: str
    cmake: str
    ninja: str
    cxx: Compiler
    architectures: tuple[str, ...]  # the CPU model, or the CUDA architectures as CMake writes them
    nvcc: Compiler | None = None
    environment: dict[str, str] = field(default_factory=dict)  # added to the environment of the build

    @property
    def compiler(self) -> Compiler:
        return self.nvcc or self.cxx

    def cmake_definitions(self) -> list[str]:
        definitions = [
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_MAKE_PROGRAM={self.ninja}",
            f"-DCMAKE_CXX_COMPILER={self.cxx.path}",
            f"-DKDA_CUDA={'ON' if self.nvcc else 'OFF'}",
        ]
        if self.nvcc:
            definitions += [
                f"-DCMAKE_CUDA_COMPILER={self.nvcc.path}",
                f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(self.architectures)}",
            ]
        return definitions

    def key(self) -> str:
        """A digest of compilers, flags and architectures: equal keys can share a build tree."""
        parts = [self.device, self.cmake, *self.cmake_definitions(), *self.architectures]
        parts += [compiler.version for compiler in (self.cxx, self.nvcc) if compiler]
        parts += [f"{name}={os.environ.get(name, '')}" for name in FLAG_VARIABLES]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def find_toolchain(device: str) -> Toolchain:
    """Returns the tools for `device`; raises CompilerNotFound naming the first one that is missing."""
    cxx = find_cxx()
    cmake, ninja = _find_program("cmake", "CMAKE_BIN_DIR"), _find_program("ninja", "BIN_DIR")
    if device == "cpu":
        return Toolchain(device, cmake, ninja, cxx, (_cpu_model(),))
    nvcc, environment = find_nvcc()
    return Toolchain(device, cmake, ninja, cxx, cuda_architectures(nvcc), nvcc, environment)


def find_cxx() -> Compiler:
    """$CXX, else the first of c++, g++ and clang++ on PATH."""
    named = os.environ.get("CXX")
    for candidate in [named] if named else ["c++", "g++", "clang++"]:
        path = shutil.which(candidate)
        if path:
            return _identify(path)
    looked_for = f"CXX is {named!r}, which is no program" if named else "looked for c++, g++ and clang++ on PATH"
    raise _not_found("a C++ compiler", "c++", looked_for)


def find_nvcc() -> tuple[Compiler, dict[str, str]]:
    """$CUDACXX, else nvcc on PATH, in $CUDA_HOME or /usr/local/cuda, or from the pip wheels.

    Also returns what the build's environment needs: the wheels keep libcudart where nvcc does not look for it.
    """
    named = os.environ.get("CUDACXX")
    if named:
        path = shutil.which(named)
        if not path:
            raise _not_found("nvcc", "nvcc", f"CUDACXX is {named!r}, which is no program")
        return _identify(path), {}
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    for candidate in ["nvcc", *(f"{home}/bin/nvcc" for home in homes if home)]:
        path = shutil.which(candidate)
        if path:
            return _identify(path), {}
    for path in _wheel_nvccs():
        libraries = [str(path.parents[1] / "lib"), *filter(None, [os.environ.get("LIBRARY_PATH")])]
        return _identify(str(path)), {"LIBRARY_PATH": os.pathsep.join(libraries)}
    raise _not_found("nvcc", "nvcc", "looked for CUDACXX, nvcc on PATH, in CUDA_HOME, /usr/local/cuda and pip wheels")


def cuda_architectures(nvcc: Compiler) -> tuple[str, ...]:
    """The architectures to compile for, as CMake writes them.

    $KDA_LAB_CUDA_ARCHS ("90a" or "80;90a-real"), else those of the GPUs in this machine, else every one the steps know
    and this nvcc can compile for. From compute capability 9 the steps use instructions of that one architecture ("a").
    """
    asked = os.environ.get("KDA_LAB_CUDA_ARCHS")
    if asked:
        return tuple(asked.replace(",", ";").split(";"))
    present = {f"{major}{minor}{'a' if major >= 9 else ''}-real" for major, minor in _gpu_capabilities()}
    if present:
        return tuple(sorted(present))
    listed = _output([nvcc.path, "--list-gpu-arch"]).split()
    known = {"80": "80", "90": "90a-real", "100": "100a-real", "120": "120a-real"}  # 80 also as PTX, for what comes
    return tuple(name for number, name in known.items() if f"compute_{number}" in listed)


def _gpu_capabilities() -> list[tuple[int, int]]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def _wheel_nvccs() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace package: the wheels of one CUDA release share one folder
    for location in spec.submodule_search_locations or () if spec else ():
        yield from sorted(Path(location).glob("cu*/bin/nvcc"), reverse=True)


def _find_program(name: str, folder_attribute: str) -> str:
    """The PyPI package's program (found also where its environment is not activated), else the one on PATH."""
    if importlib.util.find_spec(name):
        folder = getattr(__import__(name), folder_attribute, None)
        path = shutil.which(name, path=folder) if folder else None
        if path:
            return path
    path = shutil.which(name)
    if path:
        return path
    raise _not_found(name, name, "looked for its Python package and on PATH")


def _not_found(what: str, program: str, looked_for: str) -> CompilerNotFound:
    commands = _INSTALL[program]
    if program == "c++" and sys.platform == "darwin":
        commands = ("xcode-select --install", *commands)
    if "CONDA_PREFIX" in os.environ:
        commands = sorted(commands, key=lambda command: not command.startswith("conda"))
    install = "\n".join(f"    {command}" for command in commands)
    return CompilerNotFound(
        f"{what} is needed to build kda_lab's kernels and was not found ({looked_for}).\n"
        f"Install it with one of:\n{install}"
    )


def _identify(path: str) -> Compiler:
    path = os.path.abspath(path)  # not realpath: ccache and wrappers go by the name they are called
    return Compiler(path, _version(path, os.stat(path).st_mtime_ns))


@functools.lru_cache
def _version(path: str, modified_ns: int) -> str:
    return _output([path, "--version"])


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not done.stdout.strip():
        raise CompilerNotFound(f"{' '.join(command)} does not work (exit status {done.returncode}):\n{done.stderr}")
    return done.stdout.strip()


@functools.lru_cache
def _cpu_model() -> str:
    """Model and instruction sets: -march=native gives other code on another CPU that shares this home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    facts = dict(line.split(":", 1) for line in lines if line.startswith(wanted) and ":" in line)
    return " ".join([platform.machine(), *(facts[key].strip() for key in sorted(facts))])
