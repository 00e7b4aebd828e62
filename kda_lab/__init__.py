"""kda_lab: how a GPU kernel gets fast, one idea a step, on Kimi Delta Attention forward."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Name -> module, imported at first use: `import kda_lab` stays quick, and needs no compiler.
_EXPORTS = {
    "Inputs": "inputs",
    "Result": "inputs",
    "Step": "registry",
    "forward": "ops",
    "fwd": "ops",
    "make_inputs": "inputs",
    "steps": "registry",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kda_lab' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kda_lab.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
