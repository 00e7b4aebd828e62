"""The machine a number was measured on, as a dictionary that travels beside the number."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from kda_lab import bench

_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "temperature.gpu", "power.draw")


def describe(device: int = 0) -> dict[str, object]:
    """bench.machine() with what profiles need besides: the GPU's size, the driver, and whether the tree was committed.

    Raises RuntimeError where torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA GPU here: a machine record describes the GPU that was measured")
    gpu = torch.cuda.get_device_properties(device)
    return bench.machine("cuda") | {
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "memory_bytes": gpu.total_memory,
        "l2_bytes": gpu.L2_cache_size,
        "driver": _nvidia_smi("driver_version", device),
        "commit": commit(),
    }


def clocks(device: int = 0) -> dict[str, float | None]:
    """Clocks in MHz, temperature in degrees and power in watts at this moment, under nvidia-smi's names."""
    return {name: _number(_nvidia_smi(name, device)) for name in _CLOCKS}


def commit() -> str:
    """Commit of this source tree, "+dirty" where tracked files differ.

    KDA_LAB_COMMIT if that is set: a copied tree may have lost its history, or carry another one.
    """
    if "KDA_LAB_COMMIT" in os.environ:
        return os.environ["KDA_LAB_COMMIT"]
    root = Path(__file__).resolve().parents[2]
    try:
        sha = _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
        changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return sha + ("+dirty" if changed else "")


def _nvidia_smi(query: str, device: int) -> str | None:
    try:
        return _output(["nvidia-smi", f"--id={device}", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    except (OSError, subprocess.SubprocessError):
        return None


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def _number(text: str | None) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None
