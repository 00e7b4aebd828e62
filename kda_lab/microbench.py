"""Measures one exponential, and the gate stage alone, in every form that a kernel could use. Needs a CUDA GPU."""

from __future__ import annotations

import ctypes
import statistics
from typing import TypedDict

import torch

from kda_lab import native
from kda_lab.inputs import Inputs, make_inputs

_THREADS, _PER_ITERATION = 1024, 32  # csrc/cuda/kda_exp.h: of a block; exponentials of a thread
_SAMPLES = 15


class ExpRow(TypedDict):
    """One form of the exponential, from registers only."""

    form: str  # "expf", "ex2.approx.ftz", ...
    results_per_clock_per_sm: float  # median of the samples
    samples: list[float]
    sms: int  # that ran it at once, one block each


class GateRow(TypedDict):
    """One form of the gate stage: sigmoid, scaling and the sum over chunks of 16 tokens, tensors in device memory."""

    form: str
    median_ms: float
    samples_ms: list[float]
    bytes: int  # read and written: 2 + 4 a gate value
    tokens: int
    H: int
    K: int


def exp_throughput(device: int | None = None, iterations: int = 2000) -> list[ExpRow]:
    """Results per clock and SM of every form of the exponential, in clocks that the SMs count themselves.

    Every SM runs one block of 1024 threads, each with eight independent chains; the GPU's clock rate does not matter.
    Raises RuntimeError where there is no CUDA GPU.
    """
    library, device = _library(), _device(device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device(device):
        clocks = torch.empty(sms, dtype=torch.int64, device="cuda")
        results = torch.empty(sms, _THREADS, dtype=torch.float32, device="cuda")
        rows: list[ExpRow] = []
        for number, form in enumerate(_names(library, "kda_exp_forms")):
            samples = []
            for sample in range(_SAMPLES + 1):
                pointers = (_ptr(torch.cuda.current_stream().cuda_stream), sms, iterations, _ptr(clocks.data_ptr()))
                _check(library, library.dll.kda_exp_throughput(number, device, *pointers, _ptr(results.data_ptr())))
                taken = statistics.median(clocks.tolist())  # waits for the kernel
                if sample:  # the first one loads the code
                    samples.append(iterations * _THREADS * _PER_ITERATION / taken)
            rows.append(
                ExpRow(form=form, results_per_clock_per_sm=statistics.median(samples), samples=samples, sms=sms)
            )
    return rows


def gate(inputs: Inputs | None = None, device: int | None = None) -> list[GateRow]:
    """Times of the gate stage alone in every form, in ms, on `inputs` (none: T 8192, H 96, K 128).

    Raises RuntimeError where there is no CUDA GPU, ValueError for packed sequences.
    """
    library, device = _library(), _device(device)
    if inputs is not None and inputs.cu_seqlens is not None:
        raise ValueError("inputs has cu_seqlens; expected batch rows: the gate stage is measured without packing")
    with torch.cuda.device(device):
        inputs = inputs or make_inputs(1, 8192, 96, V=1)
        g, A_log, dt_bias = (tensor.cuda() for tensor in (inputs.g, inputs.A_log, inputs.dt_bias))
        g_cumsum = torch.empty(g.shape, dtype=torch.float32, device="cuda")
        args = native.KdaArgs(struct_bytes=ctypes.sizeof(native.KdaArgs), lower_bound=inputs.lower_bound)
        args.B, args.T, args.H, args.K = g.shape
        args.g, args.A_log, args.dt_bias = g.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr()
        args.device, args.stream = device, torch.cuda.current_stream().cuda_stream
        rows: list[GateRow] = []
        for number, form in enumerate(_names(library, "kda_gate_forms")):
            samples = []
            for sample in range(_SAMPLES + 1):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                _check(library, library.dll.kda_gate(number, ctypes.byref(args), _ptr(g_cumsum.data_ptr())))
                stop.record()
                stop.synchronize()
                if sample:  # the first one loads the code
                    samples.append(start.elapsed_time(stop))
            rows.append(
                GateRow(
                    form=form,
                    median_ms=statistics.median(samples),
                    samples_ms=samples,
                    bytes=g.numel() * 6,
                    tokens=inputs.B * inputs.T,
                    H=inputs.H,
                    K=inputs.K,
                )
            )
    return rows


_ptr = ctypes.c_void_p


def _library() -> native.Library:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "the exponential is measured on a CUDA GPU, and torch finds none (torch.cuda.is_available())"
        )
    return native.load("cuda")


def _device(device: int | None) -> int:
    return torch.cuda.current_device() if device is None else device


def _names(library: native.Library, function: str) -> list[str]:
    count = ctypes.c_int32()
    names = getattr(library.dll, function)
    names.restype = ctypes.POINTER(ctypes.c_char_p)
    return [name.decode() for name in names(ctypes.byref(count))[: count.value]]


def _check(library: native.Library, status: int) -> None:
    if status:
        raise library.error(status)
