"""What a call of kda_lab.fwd costs in Python: the checks, the operator, the foreign call.

On a CPU the work of the library is left out (kda_forward is replaced by nothing); on a GPU calls are enqueued without
waiting, launches included. Every number is the best of many short bursts: other processes only add to it.
"""

from __future__ import annotations

import itertools
import sys
import timeit
from collections.abc import Callable

import torch

import kda_lab
from kda_lab import annotate, call_plan, native, ops


def microseconds(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=5, repeat=5000)) / 5 * 1e6


def main(device: str) -> None:
    inputs = kda_lab.make_inputs(T=16, H=32, initial_state="fp32", device=device)
    packed = kda_lab.make_inputs(H=32, seq_lens=(8, 8), device=device)
    library = native.load(device)
    if device == "cpu":
        library.kda_forward = lambda step, args: 0
        library.kda_workspace_bytes = lambda step, args: 256  # a large block of CPU memory costs several microseconds
    nothing = torch.library.Library("kda_lab_nothing", "DEF")
    nothing.define(ops._SCHEMA)
    nothing.impl("fwd", lambda *args: None, device.upper())

    def arguments(i: kda_lab.Inputs) -> tuple:
        return (i.q, i.k, i.v, i.g, i.beta, i.scale, i.new_out(), i.A_log, i.dt_bias, i.lower_bound)

    plain, final = arguments(inputs), torch.empty_like(inputs.initial_state)
    with_states, in_place, with_offsets = (
        (*plain, inputs.initial_state, final),
        (*plain, final.zero_(), final),
        (*arguments(packed), None, None, packed.cu_seqlens),
    )
    others = itertools.cycle([arguments(inputs) for _ in range(call_plan.MOST_ADDRESSES + 1)])  # outs in turn
    print(f"T 16, H 32, {device}, torch {torch.__version__}; microseconds a call")
    for label, call in {
        "an operator that does nothing": lambda: torch.ops.kda_lab_nothing.fwd(*plain, None, None, None),
        "fwd": lambda: kda_lab.fwd(*plain),
        "fwd at addresses not remembered": lambda: kda_lab.fwd(*next(others)),
        "fwd with initial and final state": lambda: kda_lab.fwd(*with_states),
        "fwd with a state updated in place": lambda: kda_lab.fwd(*in_place),
        "fwd with cu_seqlens": lambda: kda_lab.fwd(*with_offsets),
        "profiler ranges while nobody listens": annotate.active,
    }.items():
        print(f"  {label:38s} {microseconds(call):6.2f}")
        if device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu")
