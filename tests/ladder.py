"""The CPU ladder as tests name it; test_cases.py holds it against the compiled library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kda_lab
from kda_lab import reference
from kda_lab.compare import assert_close, output_tolerance, state_tolerance
from kda_lab.inputs import Inputs, Result

CHUNKS = {
    "token_by_token": (16,),  # has no chunks: one size is as good as another
    "naive_exp": (8, 16, 32, 64),
    "rebased_ex2": (8, 16, 32, 64),
    "factored": (8, 16, 32, 64),
    "fused_two_kernel": (16,),
}
STEPS = tuple(CHUNKS)
ANY_BOUND = ("token_by_token", "naive_exp", "rebased_ex2")
STEPS_AND_CHUNKS = [(step, chunk) for step, chunks in CHUNKS.items() for chunk in chunks]


def assert_right(
    inputs: Inputs,
    step: str,
    chunk: int = 16,
    *,
    expected: Result | None = None,
    state_rms: float = 0.0,
    **options: Any,
) -> Result:
    """Runs a step and holds output and final state against float64, at the tolerances every fp32 step must keep."""
    expected = reference.recurrent(inputs) if expected is None else expected
    result = kda_lab.forward(inputs, step=step, chunk=chunk, **options)
    assert_close(result.out, expected.out, rms=output_tolerance(expected.out), name=f"out of {step}")
    rms = max(state_rms, state_tolerance(expected.final_state, result.final_state.dtype))
    assert_close(result.final_state, expected.final_state, rms=rms, name=f"final_state of {step}")
    return result


def bits(x: Tensor) -> Tensor:
    """The bit patterns of bf16 or fp32 values: equal bits is a stronger claim than equal values, and NaN takes part."""
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)
