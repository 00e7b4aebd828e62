"""How far every CUDA step and the published kernel are from float64: by regime and length, and on the golden cases."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kda_lab import peers, reference, registry
from kda_lab.inputs import Inputs, make_inputs
from kda_lab.profiling import ladder
from kda_lab.profiling.ladder import relative_error

_GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden.py"  # in a checkout only

LENGTHS = (16, 256, 2048, 16384)
HEADS = 4
LOWER_BOUNDS = (-1.0, -0.1, 0.0)  # beside -5, at BOUND_LENGTH tokens
BOUND_LENGTH = 1024
DRIFT_LOGITS = (-12.0, -9.0, -6.0)  # one token keeps all but 3e-5, 6e-4 and 1.2e-2 of a channel at lower_bound -5
REGIMES = (  # regime, key correlation
    ("forget", None),
    ("mixed", None),
    ("retain", None),
    ("saturated", None),
    ("collinear", 0.5),
    ("collinear", 0.9),
    ("collinear", 1.0),
)


def by_regime(found: Sequence[peers.Peer], lengths: Sequence[int] = LENGTHS) -> Iterator[dict[str, Any]]:
    """Errors of out and of the fp32 final state for every regime, length and version, and for bounds near 0.

    The regimes of one length are the batch rows of one pass; a row's error is its own.
    """
    for lower_bound, T in [(-5.0, T) for T in lengths] + [(bound, BOUND_LENGTH) for bound in LOWER_BOUNDS]:
        inputs = _regimes_as_batch(T, lower_bound)
        expected = reference.recurrent_torch(inputs)
        for row, bind in _versions(found):
            result = bind(inputs, torch.float32)()
            for b, (regime, correlation) in enumerate(REGIMES):
                yield row | {
                    "regime": regime,
                    "key_correlation": correlation,
                    "lower_bound": lower_bound,
                    "T": T,
                    "H": HEADS,
                    "error_rms": relative_error(result.out[b], expected.out[b]),
                    "state_error_rms": relative_error(result.final_state[b], expected.final_state[b]),
                }


def identical_keys(
    found: Sequence[peers.Peer], lengths: Sequence[int] = LENGTHS[1:], logits: Sequence[float] = DRIFT_LOGITS
) -> Iterator[dict[str, Any]]:
    """How errors grow with T where all keys of a head are equal, for gates that keep ever less.

    Roundings of keys to bf16 then add up in the state, unless they are equal, too, or kept (`precise`).
    """
    for T in lengths:
        one = make_inputs(1, T, HEADS, regime="collinear")
        gates = torch.tensor(logits, dtype=one.g.dtype)[:, None, None, None]
        copies = {name: getattr(one, name).repeat(len(logits), 1, 1, 1) for name in ("q", "k", "v")}
        beta = one.beta.repeat(len(logits), 1, 1)
        inputs = one.with_(**copies, beta=beta, g=gates.expand_as(copies["q"]).contiguous()).to("cuda")
        expected = reference.recurrent_torch(inputs)
        for row, bind in (
            *_versions(found, ladder.TENSOR_CORE_STEP),
            *_versions([], ladder.PRECISE_STEP, precise=True),
        ):
            result = bind(inputs, torch.float32)()
            for b, logit in enumerate(logits):
                yield row | {
                    "gate_logit": logit,
                    "lower_bound": inputs.lower_bound,
                    "T": T,
                    "H": HEADS,
                    "error_rms": relative_error(result.out[b], expected.out[b]),
                    "state_error_rms": relative_error(result.final_state[b], expected.final_state[b]),
                }


def golden(found: Sequence[peers.Peer]) -> Iterator[dict[str, Any]]:
    """Errors on the golden cases (tests/golden.py), beside those of the peer's outputs recorded there.

    Empty where the tests are not at hand. Cases with a NaN in the truth are left to the tests.
    """
    if not _GOLDEN.exists():
        return
    spec = importlib.util.spec_from_file_location("golden", _GOLDEN)
    cases = sys.modules["golden"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    for name in cases.names():
        case = cases.load(name)
        if not case.fp64_out.isfinite().all():
            continue
        inputs, kept = _all_value_channels(case.inputs), case.inputs.V
        state_dtype = None if case.fp64_final_state is None else torch.float32
        if inputs.initial_state is not None:
            state_dtype = inputs.initial_state.dtype
        recorded = {"recorded_peer_error_rms": relative_error(case.peer_out, case.fp64_out)}
        for row, bind in _versions([peer for peer in found if peer.name == "flash_kda"]):
            result = bind(inputs, state_dtype)()
            yield (
                row
                | {
                    "case": name,
                    "lower_bound": inputs.lower_bound,
                    "T": inputs.T,
                    "H": inputs.H,
                    "error_rms": relative_error(result.out[..., :kept].cpu(), case.fp64_out),
                    "state_error_rms": None
                    if case.fp64_final_state is None
                    else relative_error(result.final_state[..., :kept, :].cpu(), case.fp64_final_state),
                }
                | recorded
            )


def _versions(
    found: Sequence[peers.Peer], first_step: int = 0, precise: bool = False
) -> list[tuple[dict[str, Any], Any]]:
    steps = [
        (
            {"step": step.number, "slug": step.slug, "precise": precise},
            ladder.step_binder(step.number, allow_unsafe=True, precise=precise),
        )
        for step in registry.steps()
        if "cuda" in step.devices and step.number >= first_step
    ]
    return steps + [({"peer": peer.name, "version": peer.version}, peer.bind) for peer in found if peer.name != "fla"]


def _regimes_as_batch(T: int, lower_bound: float) -> Inputs:
    parts = [
        make_inputs(1, T, HEADS, regime=regime, key_correlation=correlation, lower_bound=lower_bound, seed=seed)
        for seed, (regime, correlation) in enumerate(REGIMES)
    ]
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("q", "k", "v", "g", "beta")}
    return parts[0].with_(**joined).to("cuda")


def _all_value_channels(inputs: Inputs, V: int = 128) -> Inputs:
    """Golden cases keep a few of the 128 value channels the peer ran with; repeating them gives kernels all 128."""
    channels = torch.arange(V) % inputs.V
    state = None if inputs.initial_state is None else inputs.initial_state[:, :, channels].contiguous()
    return inputs.with_(v=inputs.v[..., channels].contiguous(), initial_state=state).to("cuda")
