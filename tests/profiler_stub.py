#!/usr/bin/env python3
"""Stands in for ncu and nsys: behaves as STUB_MODE says. Tests put it on PATH under the tool's name."""

import os
import pathlib
import sqlite3
import sys
import time

MODE = os.environ.get("STUB_MODE", "good")
VERSION = os.environ.get("STUB_VERSION", "2025.3.1.0")


def option(name: str) -> str:
    return next(argument.split("=", 1)[1] for argument in sys.argv if argument.startswith(f"--{name}="))


def main() -> int:
    if "--version" in sys.argv:
        print(f"NVIDIA (R) stub profiler\nVersion {VERSION} (build 1)")
        return 0
    if MODE == "denied":
        print(
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
        )
        return 1
    if MODE == "sandbox":
        print("==ERROR== Failed to initialize the profiler: LibraryNotLoaded")
        return 1
    if MODE == "no-kernels":
        print("==WARNING== No kernels were profiled.")
        return 0
    if MODE == "old":
        print("unrecognised option '--capture-range-end=stop'. Use --help for further details.")
        return 1
    if MODE == "target-fails":
        print("Traceback (most recent call last):\nRuntimeError: no CUDA GPU here")
        return 3
    if MODE == "hangs":
        print("collecting", flush=True)
        time.sleep(600)
    if MODE == "no-report":
        print("done, but nothing was written")
        return 0
    output = pathlib.Path(option("output") if "nsys" in sys.argv[0] else option("export"))
    if MODE == "qdstrm":
        output.with_suffix(".qdstrm").write_text("events")
        print("error while loading shared libraries: libdw.so.1")
        return 0
    if sys.argv[1] == "export":
        with sqlite3.connect(output) as database:
            database.execute("CREATE TABLE META_DATA_EXPORT (name TEXT)")
    else:
        output.with_suffix(".nsys-rep" if "nsys" in sys.argv[0] else ".ncu-rep").write_text("report")
    if MODE == "environment":
        output.with_suffix(".ncu-rep").write_text("\n".join(f"{k}={v}" for k, v in os.environ.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
