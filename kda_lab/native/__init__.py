"""The compiled code: finds compilers, builds with CMake into a cache, loads with ctypes."""

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
