"""Named ranges for profilers: one call opens an NVTX range (domain "kda_lab") and a torch.profiler record_function.

A forward pass nests three: 5_fused_two_kernel (the step), 5_fused_two_kernel/forward (the call) and one for every
stage or launch, such as prepare, which the library opens through two callbacks. All of it happens only while somebody
listens: a torch profiler is running, Nsight started this process, KDA_LAB_PROFILE=1 is set, or `enable()` was called.
Otherwise a forward pass pays for one test of two flags, far below a microsecond: `python -m benchmarks call_overhead`
prints it ("profiler ranges while nobody listens").
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch.autograd.profiler as torch_profiler

from kda_lab.native.library import RangePop, RangePush

DOMAIN = "kda_lab"

# Set by nsys and ncu in the processes that they start.
_NSIGHT_VARIABLES = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")


def _asked_for(environment: Mapping[str, str]) -> bool:
    asked = environment.get("KDA_LAB_PROFILE", "0") not in ("", "0")
    return asked or any(environment.get(variable) for variable in _NSIGHT_VARIABLES)


_enabled = _asked_for(os.environ)


def enable(on: bool = True) -> None:
    """Opens ranges from now on even if no profiler is seen, or (`on=False`) only while a torch profiler runs."""
    global _enabled
    _enabled = on


def active() -> bool:
    """Whether ranges are opened now."""
    return _enabled or torch_profiler._is_profiler_enabled


class range:
    """`with range(name):` marks what runs inside, under `name` in NVTX (where nvtx is installed) and torch.profiler.

    `category` is an NVTX category; `payload` is a number or a dict of numbers, such as {"T": 4096, "H": 8}.
    """

    __slots__ = ("_category", "_domain", "_name", "_payload", "_record")

    def __init__(self, name: str, *, category: str = "step", payload: float | dict[str, int] | None = None) -> None:
        self._name, self._category, self._payload = name, category, payload
        self._domain = self._record = None

    def __enter__(self) -> range:
        if _enabled:
            self._domain = _nvtx_domain()
        if self._domain is not None:
            self._domain.push_range(_attributes(self._name, self._category, _nvtx_payload(self._payload)))
        if torch_profiler._is_profiler_enabled:
            args = None if self._payload is None else str(self._payload)
            self._record = torch_profiler.record_function(self._name, args).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        # What was opened is closed, whether or not a profiler still runs.
        if self._record is not None:
            self._record.__exit__(None, None, None)
        if self._domain is not None:
            self._domain.pop_range()
        self._domain = self._record = None


def stage_callbacks() -> tuple[int | None, int | None]:
    """Addresses of push_range and pop_range for KdaArgs; (None, None) while nobody listens."""
    return _STAGE_CALLBACKS if active() else (None, None)


_open = threading.local()


def _push_stage(name: bytes) -> None:
    opened = range(name.decode(), category="stage").__enter__()
    _open.__dict__.setdefault("stages", []).append(opened)


def _pop_stage() -> None:
    _open.stages.pop().__exit__()


_push, _pop = RangePush(_push_stage), RangePop(_pop_stage)  # module variables: C holds no reference to them
_STAGE_CALLBACKS = tuple(ctypes.cast(callback, ctypes.c_void_p).value for callback in (_push, _pop))


@functools.cache
def _nvtx_domain() -> Any | None:
    try:
        import nvtx
    except ImportError:  # optional
        return None
    return nvtx.get_domain(DOMAIN)


def _attributes(name: str, category: str, payload: Any) -> Any:
    return _nvtx_domain().get_event_attributes(message=name, category=category, payload=payload)


def _nvtx_payload(payload: float | dict[str, int] | None) -> Any:
    """A dict becomes a NumPy record, which NVTX shows with its field names."""
    if not isinstance(payload, dict):
        return payload
    import numpy as np

    return np.array(tuple(payload.values()), dtype=[(name, np.int64) for name in payload])
