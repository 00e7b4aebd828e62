"""Finds Nsight Compute (ncu) and Nsight Systems (nsys) where they hide, and says what keeps them from working."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from pathlib import Path

MINIMUM = {"ncu": (2023, 1), "nsys": (2022, 4)}
"""Oldest versions that know Hopper and the options collect.py passes."""

VARIABLES = {"ncu": "KDA_LAB_NCU", "nsys": "KDA_LAB_NSYS"}
_NAMES = {"ncu": "Nsight Compute", "nsys": "Nsight Systems"}
_HIDEOUTS = {  # newest first, by sorting what each pattern finds
    "ncu": (
        "usr/local/cuda*/bin/ncu",
        "opt/nvidia/nsight-compute/*/ncu",
        "usr/local/NVIDIA-Nsight-Compute*/ncu",
    ),
    "nsys": (
        "usr/local/cuda*/bin/nsys",
        "opt/nvidia/nsight-systems/*/bin/nsys",
        "opt/nvidia/nsight-systems/*/target-linux-x64/nsys",
        "opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",  # Nsight Compute brings its own
    ),
}


class ProfilingError(RuntimeError):
    """A profiler could not be run. The text is one sentence that says what is wrong and one that says what to do."""


class ToolMissing(ProfilingError):
    pass


class ToolTooOld(ProfilingError):
    pass


@dataclasses.dataclass(frozen=True)
class Tool:
    name: str  # "ncu" or "nsys"
    path: Path
    version: str  # "2025.3.1.0"


def candidates(name: str, root: Path = Path("/")) -> list[Path]:
    """Where the tool is, the most wanted first: its variable, PATH, then the usual folders below `root`."""
    named = [os.environ[VARIABLES[name]]] if os.environ.get(VARIABLES[name]) else []
    on_path = [path] if (path := shutil.which(name)) else []
    hidden = [path for pattern in _HIDEOUTS[name] for path in sorted(root.glob(pattern), key=_numbers, reverse=True)]
    return list(dict.fromkeys(map(Path, [*named, *on_path, *hidden])))


def find(name: str, root: Path = Path("/")) -> Tool:
    """The first candidate that runs and is new enough.

    Raises ToolMissing where there is none, ToolTooOld where all are below MINIMUM; both say what to install.
    """
    too_old = None
    for path in candidates(name, root):
        version = _version(path)
        if version is None:
            continue
        if tuple(map(int, version.split(".")[:2])) >= MINIMUM[name]:
            return Tool(name, path, version)
        too_old = too_old or Tool(name, path, version)
    wanted = f"{_NAMES[name]} {'.'.join(map(str, MINIMUM[name]))} or newer"
    if too_old:
        raise ToolTooOld(
            f"{too_old.path} is {_NAMES[name]} {too_old.version}, which is too old. Install {wanted}, "
            f"or name one with {VARIABLES[name]}."
        )
    raise ToolMissing(
        f"{_NAMES[name]} ({name}) is not installed here. Install {wanted} from developer.nvidia.com/tools-overview "
        f"(or set {VARIABLES[name]} to it); until then the recorded reports are shown."
    )


def _version(path: Path) -> str | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(\d{4}\.\d+(?:\.\d+)*)", done.stdout + done.stderr)
    return match[1] if match else None


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]
