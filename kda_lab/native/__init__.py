"""The compiled code: finds compilers, builds with CMake into a cache, loads with ctypes.

What the environment may say; nothing has to be set:

    KDA_LAB_CACHE          where built libraries are kept; else kda_lab in $XDG_CACHE_HOME or ~/.cache
    KDA_LAB_CSRC           another copy of the sources
    KDA_LAB_CPU_LIBRARY    a library built elsewhere, loaded as it is
    KDA_LAB_CUDA_LIBRARY
    KDA_LAB_CUDA_ARCHS     CUDA architectures as CMake writes them, such as 90a; else those of the GPUs here, else all
    CXX, CUDACXX           the compilers; else those on PATH, for CUDA also in CUDA_HOME, /usr/local/cuda and pip wheels
    CXXFLAGS, CUDAFLAGS    more flags; another value is another library
"""

from __future__ import annotations

from kda_lab.native.build import build, csrc_dir
from kda_lab.native.cache import cache_dir
from kda_lab.native.compilers import find_cxx, find_nvcc, find_toolchain
from kda_lab.native.errors import BuildError, CompilerNotFound, LibraryError
from kda_lab.native.library import KdaArgs, Library, LibraryStep, load, loaded

__all__ = [
    "BuildError",
    "CompilerNotFound",
    "KdaArgs",
    "Library",
    "LibraryError",
    "LibraryStep",
    "build",
    "cache_dir",
    "csrc_dir",
    "find_cxx",
    "find_nvcc",
    "find_toolchain",
    "load",
    "loaded",
]
