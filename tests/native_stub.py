"""The stub library of tests/stub_csrc: builds in a second, computes nothing, tells what it was given."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kda_lab import native

REPOSITORY = Path(__file__).resolve().parents[1]


def make_csrc(folder: Path) -> Path:
    """A csrc folder with the stub and the project's own kda.h and steps.def."""
    shutil.copytree(REPOSITORY / "tests" / "stub_csrc", folder)
    for name in ("kda.h", "steps.def"):
        shutil.copy(native.csrc_dir() / name, folder)
    return folder


def edit(csrc: Path, old: str, new: str) -> None:
    source = csrc / "cpu" / "stub.cpp"
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new))


def environment(csrc: Path, cache: Path, **changes: str | None) -> dict[str, str]:
    """This process's environment with another csrc and cache; None removes a variable."""
    variables = {**os.environ, "KDA_LAB_CSRC": str(csrc), "KDA_LAB_CACHE": str(cache), "PYTHONPATH": str(REPOSITORY)}
    for name in ("KDA_LAB_CPU_LIBRARY", "KDA_LAB_CUDA_LIBRARY", "CXX"):
        variables.pop(name, None)
    variables.update({name: value for name, value in changes.items() if value is not None})
    return {name: value for name, value in variables.items() if changes.get(name, "") is not None}


def start_build(environment: dict[str, str], device: str = "cpu") -> subprocess.Popen[str]:
    """A process that builds, prints the library's path and checks that it loads."""
    code = f"from kda_lab import native; print(native.load({device!r}).path)"
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout.strip(), stderr


def calls(library: native.Library) -> int:
    return library.dll.stub_calls()


def last_args(library: native.Library) -> dict[str, int]:
    """The KdaArgs of the last forward as C read them; scale and lower_bound in thousandths."""
    library.dll.stub_last_args.restype = ctypes.c_char_p
    lines = library.dll.stub_last_args().decode().splitlines()
    return {name: int(value) for name, value in map(str.split, lines)}
