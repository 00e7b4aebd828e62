"""Times each kernel of a forward pass with CUDA events: a third opinion beside Nsight's two."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from kda_lab import annotate
from kda_lab.native.library import RangePop, RangePush


def measure(forward: Callable[[], None], count: int) -> dict[str, list[float]]:
    """Times in microseconds of every launch, by the name of its range, over `count` calls of `forward`.

    The library calls back before and after each launch (KdaArgs.push_range, pop_range); here an event is recorded then.
    An event costs the GPU about a microsecond, so kernels shorter than ten are better timed by Nsight.
    """
    launches: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def push(name: bytes) -> None:
        launches.append((name.decode(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        launches[-1][1].record()

    def pop() -> None:
        launches[-1][2].record()

    callbacks = RangePush(push), RangePop(pop)  # referenced here for as long as C may call them
    addresses = tuple(ctypes.cast(callback, ctypes.c_void_p).value for callback in callbacks)
    listening = annotate.active, annotate.stage_callbacks
    annotate.active, annotate.stage_callbacks = lambda: True, lambda: addresses
    try:
        for _ in range(count):
            forward()
        torch.cuda.synchronize()
    finally:
        annotate.active, annotate.stage_callbacks = listening
    times: dict[str, list[float]] = {}
    for name, start, end in launches:
        times.setdefault(name, []).append(1e3 * start.elapsed_time(end))
    return times
