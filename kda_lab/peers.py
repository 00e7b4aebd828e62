"""Other people's kernels for the same operator, called with our inputs so that one run checks and times them, too.

Neither package is needed by kda_lab. A peer that cannot be imported is reported with the reason and not measured.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import torch

from kda_lab.inputs import Inputs, Result

Call = Callable[[], Result]
"""Runs a peer once on inputs bound before; returns out [B, T, H, V] bf16 and the final state [N, H, V, K] or None."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """One published kernel. ``bind(inputs, dtype of the final state or None for none)`` returns a :data:`Call`."""

    name: str
    version: str
    bind: Callable[[Inputs, torch.dtype | None], Call]


def find() -> tuple[list[Peer], dict[str, str]]:
    """The peers that import here, and why each of the others does not: (peers, {name: reason})."""
    peers, missing = [], {}
    # FLA hands chunk_kda to flash_kda when that is installed; off, or both would run the same kernel.
    os.environ["FLA_FLASH_KDA"] = "0"
    for name, distribution, module, bind in (
        ("flash_kda", "flash_kda", "flash_kda", _bind_flash_kda),
        ("fla", "fla-core", "fla.ops.kda", _bind_fla),
    ):
        try:
            importlib.import_module(module)
            peers.append(Peer(name, importlib.metadata.version(distribution), bind))
        except (ImportError, OSError, RuntimeError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return peers, missing


def _bind_flash_kda(inputs: Inputs, final_state: torch.dtype | None) -> Call:
    """FlashKDA's fwd takes the same arguments as ours; it reads cu_seqlens as int64 only."""
    import flash_kda

    inputs = inputs if inputs.cu_seqlens is None else inputs.with_(cu_seqlens=inputs.cu_seqlens.long())
    result = Result(inputs.new_out(), new_final_state(inputs, final_state))
    arguments = fwd_arguments(inputs, result)

    def call() -> Result:
        flash_kda.fwd(*arguments)
        return result

    return call


def _bind_fla(inputs: Inputs, final_state: torch.dtype | None) -> Call:
    """FLA's chunk_kda with all of it inside: gate and beta from logits, norms of q and k. States are fp32, [V, K]."""
    from fla.ops.kda import chunk_kda

    initial_state = None if inputs.initial_state is None else inputs.initial_state.float()
    cu_seqlens = None if inputs.cu_seqlens is None else inputs.cu_seqlens.long()
    dt_bias = inputs.dt_bias.flatten()

    def call() -> Result:
        with torch.inference_mode():
            out, state = chunk_kda(
                inputs.q,
                inputs.k,
                inputs.v,
                inputs.g,
                inputs.beta,
                scale=inputs.scale,
                initial_state=initial_state,
                output_final_state=final_state is not None,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                safe_gate=True,
                lower_bound=inputs.lower_bound,
                state_v_first=True,
                cu_seqlens=cu_seqlens,
                A_log=inputs.A_log,
                dt_bias=dt_bias,
            )
        return Result(out, state)

    return call


def fwd_arguments(inputs: Inputs, result: Result) -> tuple[Any, ...]:
    """The arguments of fwd, ours or the published one, in order: bound once, so that a timed call is the call alone."""
    return (
        *(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.scale, result.out),
        *(inputs.A_log, inputs.dt_bias, inputs.lower_bound),
        *(inputs.initial_state, result.final_state, inputs.cu_seqlens),
    )


def new_final_state(inputs: Inputs, dtype: torch.dtype | None) -> torch.Tensor | None:
    """An uninitialised final state [N, H, V, K] on the inputs' device, or None for no dtype."""
    if dtype is None:
        return None
    return torch.empty(inputs.N, inputs.H, inputs.V, inputs.K, dtype=dtype, device=inputs.q.device)
