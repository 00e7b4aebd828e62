"""Loads a library with ctypes. The structures mirror csrc/kda.h, where every field is explained."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from kda_lab.native import cache
from kda_lab.native.build import DEVICES, build, csrc_dir, source_paths
from kda_lab.native.errors import LibraryError

ABI_VERSION = 3
NONE, BF16, F32, I32, I64 = range(5)  # KdaDtype
_DEVICE_BITS = {"cpu": 1, "cuda": 2}
_CHUNKS = (8, 16, 32, 64)

_i32, _i64, _f64, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
RangePush = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
RangePop = ctypes.CFUNCTYPE(None)


class KdaArgs(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", _i64),
        *((name, _i64) for name in ("B", "T", "H", "K", "V", "N", "chunk")),
        ("scale", _f64),
        ("lower_bound", _f64),
        *((name, _ptr) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "out")),
        *((name, _ptr) for name in ("initial_state", "final_state", "cu_seqlens")),
        *((name, _i32) for name in ("initial_state_dtype", "final_state_dtype", "cu_seqlens_dtype")),
        ("device", _i32),
        ("precise", _i32),
        ("stream", _ptr),
        ("workspace", _ptr),
        ("workspace_bytes", _i64),
        ("push_range", _ptr),
        ("pop_range", _ptr),
    ]


class _KdaStep(ctypes.Structure):
    _fields_ = [
        *((name, _i32) for name in ("number", "devices", "chunks", "compute_capability")),
        ("exponent_budget", _f64),
        *((name, ctypes.c_char_p) for name in ("slug", "title", "idea")),
    ]


@dataclass(frozen=True)
class LibraryStep:
    """One rung of the ladder as one library reports it."""

    number: int
    slug: str
    title: str
    idea: str
    devices: tuple[str, ...]  # where the step exists at all
    chunks: tuple[int, ...]  # chunk sizes, in tokens, that this library runs; empty: the step has no chunks
    compute_capability: int  # the only one it runs on, on CUDA: 90 for 9.0; 0: any the library is built for
    exponent_budget: float  # largest |lower_bound| * chunk it can represent; 0: no such limit

    @property
    def name(self) -> str:
        return f"{self.number}_{self.slug}"


class Library:
    """A loaded library. Pointers are passed as they are: kda_lab.ops checks everything before."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = Path(path), device
        try:
            dll = ctypes.CDLL(str(path))
            dll.kda_abi_version.restype = _i32
            version = dll.kda_abi_version()
        except (OSError, AttributeError) as error:
            raise LibraryError(f"{path} cannot be loaded as a kda_lab library: {error}") from error
        if version != ABI_VERSION:
            raise LibraryError(
                f"{path} has version {version} of the C ABI, this kda_lab has {ABI_VERSION}: build it again "
                "from the csrc that belongs to this kda_lab"
            )
        self.kda_forward, self.kda_workspace_bytes = dll.kda_forward, dll.kda_workspace_bytes
        self.kda_forward.argtypes = self.kda_workspace_bytes.argtypes = (_i32, _ptr)
        self.kda_forward.restype, self.kda_workspace_bytes.restype = _i32, _i64
        self._steps, self._last_error = dll.kda_steps, dll.kda_last_error
        self._steps.restype, self._steps.argtypes = ctypes.POINTER(_KdaStep), (ctypes.POINTER(_i32),)
        self._last_error.restype = ctypes.c_char_p
        self.dll = dll

    def __repr__(self) -> str:
        return f"Library({self.device!r}, {str(self.path)!r})"

    @functools.cached_property
    def sha256(self) -> str:
        return cache.sha256(self.path)

    @functools.cached_property
    def steps(self) -> tuple[LibraryStep, ...]:
        count = _i32()
        array = self._steps(ctypes.byref(count))
        return tuple(_step(array[index]) for index in range(count.value))

    def workspace_bytes(self, step: int, args: KdaArgs) -> int:
        needed = self.kda_workspace_bytes(step, ctypes.addressof(args))
        if needed < 0:
            raise self.error(-needed)
        return needed

    def forward(self, step: int, args: KdaArgs) -> None:
        """Runs a step; raises ValueError, NotImplementedError, MemoryError or LibraryError, with the library's text."""
        status = self.kda_forward(step, ctypes.addressof(args))
        if status:
            raise self.error(status)

    def error(self, status: int) -> Exception:
        """The exception for a KdaStatus, with this thread's kda_last_error()."""
        kind = {1: ValueError, 2: NotImplementedError, 4: MemoryError}.get(status, LibraryError)
        return kind((self._last_error() or b"").decode(errors="replace") or f"status {status} without a text")


def _step(step: _KdaStep) -> LibraryStep:
    return LibraryStep(
        number=step.number,
        slug=step.slug.decode(),
        title=step.title.decode(),
        idea=step.idea.decode(),
        devices=tuple(device for device, bit in _DEVICE_BITS.items() if step.devices & bit),
        chunks=tuple(chunk for chunk in _CHUNKS if step.chunks & chunk),
        compute_capability=step.compute_capability,
        exponent_budget=step.exponent_budget,
    )


@dataclass(frozen=True)
class _Loaded:
    library: Library
    asked: tuple[str | None, str | None]  # the variables that say what to load
    stamps: dict[str, tuple[int, int] | None]  # of the sources it was built from, and of their folders


_loaded: dict[str, _Loaded] = {}
_lock = threading.Lock()


def load(device: str) -> Library:
    """Returns the library for `device` ("cpu" or "cuda"), built from the sources as they are now.

    An edited kernel is noticed by its file's size and time (about 0.1 ms), built, and loaded beside the old library, so
    the next call runs the new code in the same process. If it does not compile, BuildError is raised and the library
    loaded before stays what `loaded()`, and with it `kda_lab.fwd`, uses. $KDA_LAB_CPU_LIBRARY or $KDA_LAB_CUDA_LIBRARY
    names a library that was built elsewhere; it is loaded once, as it is.
    """
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; expected one of {', '.join(map(repr, DEVICES))}")
    prebuilt = os.environ.get(f"KDA_LAB_{device.upper()}_LIBRARY")
    asked = (prebuilt, os.environ.get("KDA_LAB_CSRC"))
    with _lock:
        before = _loaded.get(device)
        if before and before.asked == asked and all(_stamp(path) == stamp for path, stamp in before.stamps.items()):
            return before.library
        stamps = {} if prebuilt else _stamps(device)  # before the sources are read: a later edit is seen next time
        path = Path(prebuilt) if prebuilt else build(device)
        library = before.library if before and before.library.path == path else Library(path, device)
        _loaded[device] = _Loaded(library, asked, stamps)
        return library


def loaded(device: str) -> Library | None:
    """The library that was loaded last, without looking at the sources; None before the first `load()`."""
    return _loaded[device].library if device in _loaded else None


def _stamps(device: str) -> dict[str, tuple[int, int] | None]:
    sources = source_paths(csrc_dir(), device)
    folders = {path.parent for path in sources}  # a folder's time changes when a file comes or goes
    return {str(path): _stamp(str(path)) for path in (*sources, *folders)}


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
