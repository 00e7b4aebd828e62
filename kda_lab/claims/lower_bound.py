"""Claims on lower_bound: what it is, and what range it keeps."""

from __future__ import annotations

import math

import numpy as np
import torch

from kda_lab import compare, numeric_range, ops, reference, registry, rounding
from kda_lab.claims import evidence
from kda_lab.claims.claim import Evidence, Judgement, claim, conditional, confirmed, refuted
from kda_lab.claims.evidence import live, observed_log_decay
from kda_lab.inputs import make_inputs

TOPIC = "lower_bound"
TOLERABLE = numeric_range.SILENT_ERROR  # of the output in bf16: several times what rounding alone costs


def observe_extremes() -> Evidence:
    """The smallest gate before its activation that was put in, and the smallest after it that was observed."""
    logits = [-100.0, -10.0, 0.0, 10.0, 100.0]
    return live(lower_bound=-5.0, smallest_before=min(logits), smallest_after=float(observed_log_decay(logits).min()))


@claim(12, TOPIC, "lower_bound is the smallest value of the gate before its activation.", observe_extremes)
def before_activation(lower_bound: float, smallest_before: float, smallest_after: float) -> Judgement:
    if smallest_before >= lower_bound:
        return confirmed(f"No gate below {lower_bound:g} reached the activation.")
    return refuted(
        f"A gate of {smallest_before:g} is taken as it is; after the activation nothing is below {smallest_after:.4g}.",
        "'before' read 'after': it is the limit of lower_bound · sigmoid(·)",
    )


def observe_weak_gate() -> Evidence:
    """How a gate far above the bound changes when the bound is halved: a clamp would leave it alone."""
    weak, halved = (float(observed_log_decay([-2.0], lower_bound=bound)[0]) for bound in (-5.0, -2.5))
    return live(weak_gate=weak, weak_gate_at_half_the_bound=halved)


@claim(13, TOPIC, "It is a floor (a clamp) applied after the activation.", observe_weak_gate)
def is_a_clamp(weak_gate: float, weak_gate_at_half_the_bound: float) -> Judgement:
    ratio = weak_gate / weak_gate_at_half_the_bound
    if abs(ratio - 1) < 0.01:
        return confirmed("A gate above the bound does not depend on it.")
    return refuted(
        f"Halving lower_bound divides a gate far above it by {ratio:.3g}: it is a factor of every gate, not a clamp.",
        "it only says that no gate falls below lower_bound",
    )


def observe_formula() -> Evidence:
    """Largest distance of the observed gate from two formulas, with A_log 1 and dt_bias 0.5."""
    logits = np.arange(-8.0, 9.0)
    observed = observed_log_decay(logits.tolist(), A_log=1.0, dt_bias=0.5)
    with_slope = -5.0 / (1.0 + np.exp(-math.e * (logits + 0.5)))
    plain = 1.0 / (1.0 + np.exp(-(logits + 0.5)))
    return live(
        from_sigmoid=float(np.abs(observed - plain).max()),
        from_bound_times_sigmoid=float(np.abs(observed - with_slope).max()),
    )


@claim(14, TOPIC, "gate = sigmoid(g + dt_bias).", observe_formula)
def plain_sigmoid(from_sigmoid: float, from_bound_times_sigmoid: float) -> Judgement:
    if from_sigmoid < 1e-3:
        return confirmed(f"The gate is within {from_sigmoid:.1e} of sigmoid(g + dt_bias).")
    return refuted(
        f"The gate is {from_sigmoid:.3g} away from that and within {from_bound_times_sigmoid:.1e} of "
        "lower_bound · sigmoid(exp(A_log) · (g + dt_bias)).",
        "it were about beta, which is sigmoid(beta)",
    )


def explore_five() -> Evidence:
    report = numeric_range.explore(-5.0, chunk=16, dtype="bf16")
    return live(
        smallest_log2=report.exp_pos_log2[0],
        largest_log2=report.exp_neg_log2[1],
        share_out_of_range=report.share_flushed + report.share_overflowed,
        bf16_error=report.mirror_error,
    )


@claim(
    15, TOPIC, "With lower_bound −5 and chunks of 16 tokens, exp(cumsum(g)) stays inside bf16's range.", explore_five
)
def five_is_in_range(
    smallest_log2: float, largest_log2: float, share_out_of_range: float, bf16_error: float
) -> Judgement:
    because = (
        f"With every gate at its strongest the factors span 2^{smallest_log2:.0f} to 2^{largest_log2:.0f}, and the "
        f"output's error is {bf16_error:.1e}."
    )
    if share_out_of_range == 0 and bf16_error < TOLERABLE:
        return confirmed(because, "lower_bound times chunk stays as small: −5.45 at chunk 16 is wrong already")
    return refuted(because)


def explore_towards_zero() -> Evidence:
    reports = [numeric_range.explore(bound) for bound in (-1.0, -0.1)]
    return live(
        share_overflowed=max(report.share_overflowed for report in reports),
        largest_log2=max(report.exp_neg_log2[1] for report in reports),
        bf16_error=max(report.mirror_error for report in reports),
    )


@claim(16, TOPIC, "Moving lower_bound towards 0 (−1, −0.1) lets exp(cumsum(g)) overflow bf16.", explore_towards_zero)
def towards_zero(share_overflowed: float, largest_log2: float, bf16_error: float) -> Judgement:
    if share_overflowed > 0 or math.isnan(bf16_error):
        return confirmed(f"{share_overflowed:.1%} of the factors overflow.")
    return refuted(
        f"The range shrinks: at −1 and −0.1 no factor exceeds 2^{largest_log2:.1f}, and the error is {bf16_error:.1e}.",
        "the bound moved the other way, away from 0",
    )


def run_far_below() -> Evidence:
    """A pairwise step where cumsum(g) is a thousand times as large as at −5."""
    inputs = make_inputs(T=64, H=4, K=64, V=64, regime="saturated", lower_bound=-1000.0)
    error = compare.relative_rms(ops.forward(inputs, step="naive_exp").out, reference.recurrent(inputs).out)
    return live(largest_cumsum=1000.0 * 16, bf16_largest_log10=math.log10(torch.finfo(torch.bfloat16).max), error=error)


@claim(17, TOPIC, "The cumulative sum itself must stay in bf16's narrow range.", run_far_below)
def cumsum_in_bf16(largest_cumsum: float, bf16_largest_log10: float, error: float) -> Judgement:
    if error < TOLERABLE:
        return refuted(
            f"With sums down to −{largest_cumsum:,.0f} the pairwise step's error is {error:.1e}. The sums are kept in "
            f"fp32, and bf16's own range reaches 10^{bf16_largest_log10:.0f}: what is narrow is its precision.",
            "it were about exp(±sum) in the factored form",
        )
    return confirmed(f"With sums down to −{largest_cumsum:,.0f} the pairwise step's error is {error:.1e}.")


def measure_lengths() -> Evidence:
    """bf16 errors with every gate at its strongest, short and long: by the mirror here, by step 5 on a GPU."""
    errors = []
    for T in (64, 1024):
        inputs = make_inputs(T=T, H=2, K=64, V=64, regime="saturated")
        errors.append(compare.relative_rms(rounding.forward(inputs).out, reference.recurrent(inputs).out))
    rows = [
        row
        for row in evidence.recorded_rows("accuracy")
        if row["regime"] == "saturated" and row["lower_bound"] == -5.0 and row.get("step") == 5
    ]
    longest = max(rows, key=lambda row: row["T"], default=None)
    numbers = {
        "error_at_64": errors[0],
        "error_at_1024": errors[1],
        "recorded_length": longest and longest["T"],
        "recorded_error": longest and longest["error_rms"],
    }
    return Evidence(numbers, (evidence.here(), evidence.ladder_label()))


@claim(18, TOPIC, "The choice −5 is safe across sequence lengths up to those tested.", measure_lengths)
def safe_at_any_length(
    error_at_64: float, error_at_1024: float, recorded_length: int | None = None, recorded_error: float | None = None
) -> Judgement:
    because = f"The error is {error_at_64:.1e} at 64 tokens and {error_at_1024:.1e} at 1024"
    if recorded_error is not None:
        because += f"; on a GPU, at {recorded_length:,}, {recorded_error:.1e}"
    worst = [error_at_64, error_at_1024, recorded_error or 0.0]
    if all(error < TOLERABLE for error in worst):
        return confirmed(
            f"{because}: sums start again with every chunk.", "the chunk stays 16: the range depends on it and not on T"
        )
    return refuted(f"{because}.")


def run_positive() -> Evidence:
    """Whether fwd takes +0.5, and what becomes of the state when it is forced to."""
    inputs = make_inputs(T=256, H=2, K=64, V=64, regime="saturated", lower_bound=0.5)
    try:
        ops.forward(inputs, step="token_by_token")
        accepted = 1
    except ValueError:
        accepted = 0
    state = ops.forward(inputs, step="token_by_token", allow_unsafe=True).final_state
    share = float((~state.isfinite()).float().mean())
    return live(accepted=accepted, share_of_state_not_finite=share)


@claim(19, TOPIC, "A positive lower_bound is accepted and makes the values grow until they overflow.", run_positive)
def positive_bound(accepted: int, share_of_state_not_finite: float) -> Judgement:
    grows = f"{share_of_state_not_finite:.0%} of the state is infinite or NaN after 256 tokens at +0.5"
    if share_of_state_not_finite == 0:
        return refuted(f"Nothing overflows: {grows}.")
    if accepted:
        return confirmed(f"fwd accepts it, and {grows}.")
    return conditional(
        f"fwd refuses it; forced, {grows}.",
        "allow_unsafe=True, or the published kernel, which checks no bound (" + evidence.READ + "csrc/flash_kda.cpp)",
    )


def observe_bias() -> Evidence:
    """Where the gate's centre lies with dt_bias 3, and the smallest and largest magnitude it takes."""
    logits = np.arange(-30.0, 31.0)
    moved = observed_log_decay(logits.tolist(), dt_bias=3.0)
    magnitude = np.abs(observed_log_decay(logits.tolist()))
    return live(
        centre_moves_by=-float(logits[np.abs(moved + 2.5).argmin()]) / 3.0,
        smallest_magnitude=float(magnitude.min()),
        largest_magnitude=float(magnitude.max()),
    )


@claim(
    20,
    TOPIC,
    "dt_bias moves the centre of the gate's distribution; lower_bound sets the smallest magnitude.",
    observe_bias,
)
def bias_and_bound(centre_moves_by: float, smallest_magnitude: float, largest_magnitude: float) -> Judgement:
    if abs(centre_moves_by - 1) > 0.1:
        return refuted(f"The centre moves by {centre_moves_by:.2g} of dt_bias.")
    if smallest_magnitude > 4.0:
        return confirmed(f"The centre moves with dt_bias, and no gate is weaker than {smallest_magnitude:.3g}.")
    return conditional(
        f"The centre moves with dt_bias; but |g| runs from {smallest_magnitude:.1e} to {largest_magnitude:.3g}: the "
        "bound sets the largest magnitude.",
        "'magnitude' means the factor exp(g), whose smallest value is exp(lower_bound)",
    )


def compare_bits() -> Evidence:
    """Outputs of the CPU steps that differ in their bits from step 0's, on one input, and the largest error of any."""
    inputs = make_inputs(T=128, H=4)
    truth = reference.recurrent(inputs).out
    steps = [step.number for step in registry.steps() if "cpu" in step.devices]
    outs = [ops.forward(inputs, step=step).out for step in steps]
    differing = sum(not torch.equal(out, outs[0]) for out in outs[1:])
    return live(
        steps_compared=len(outs) - 1,
        steps_that_differ=differing,
        largest_error=max(compare.relative_rms(out, truth) for out in outs),
    )


@claim(21, TOPIC, "Precision is bit-exact across Python, C++ and CUDA.", compare_bits)
def bit_exact(steps_compared: int, steps_that_differ: int, largest_error: float) -> Judgement:
    if steps_that_differ == 0:
        return confirmed(f"All {steps_compared} steps return the same bits.")
    return refuted(
        f"Already in C++ {steps_that_differ} of {steps_compared} steps return other bits than step 0; all are within "
        f"{largest_error:.1e} of float64.",
        "it were about one program on one machine: a step repeats itself to the bit",
    )
