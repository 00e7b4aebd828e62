"""Claims on the design: chunk size, formats, the split into two kernels, and what the operator is."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kda_lab import bench, compare, native, numeric_range, ops, reference, rounding
from kda_lab.claims import evidence
from kda_lab.claims.claim import Evidence, Judgement, Number, claim, conditional, confirmed, refuted, unsettled
from kda_lab.claims.evidence import live
from kda_lab.inputs import make_inputs
from kda_lab.profiling import kernel_events
from kda_lab.profiling.target import repeated_inputs
from kda_lab.rounding import Rounding

TOPIC = "design"
TOLERABLE = numeric_range.SILENT_ERROR


CHEAPER = 1.1  # times as long at chunk 64, for a claim of "cheap" at 16


def compare_chunks() -> Evidence:
    """Time of the inverse in step 3 by chunk, measured twice, and what −5 does to the range at each."""
    inputs = make_inputs(T=128, H=4, lower_bound=-1.0)
    inverse, again = (
        {chunk: bench.stage_ms(3, inputs, chunk, runs=40)["invert_unit_lower"] for chunk in (16, 64)} for _ in range(2)
    )
    small, large = (numeric_range.explore(-5.0, chunk=chunk) for chunk in (16, 64))
    inputs = make_inputs(T=128, H=4, K=64, V=64, regime="saturated")
    pairwise = compare.relative_rms(ops.forward(inputs, step=1, chunk=64).out, reference.recurrent(inputs).out)
    return live(
        inverse_64_over_16=min(inverse[64], again[64]) / min(inverse[16], again[16]),
        noise=max(abs(inverse[chunk] / again[chunk] - 1) for chunk in inverse),
        error_at_16=small.mirror_error,
        overflowed_at_64=large.share_overflowed,
        pairwise_error_at_64=pairwise,
    )


@claim(22, TOPIC, "Chunk 16 instead of 64 makes the inversion cheap and keeps the range.", compare_chunks)
def chunk_16(
    inverse_64_over_16: float,
    noise: float,
    error_at_16: float,
    overflowed_at_64: float,
    pairwise_error_at_64: float,
) -> Judgement:
    because = (
        f"The inverse takes {inverse_64_over_16:.1f} times as long at chunk 64; with −5 and every gate at its "
        f"strongest {overflowed_at_64:.0%} of the factors overflow there, and none at 16."
    )
    keeps_range = overflowed_at_64 > 0 and error_at_16 < TOLERABLE
    if abs(inverse_64_over_16 / CHEAPER - 1) <= noise:
        return unsettled(f"{because} The inverse's time differs from itself by up to {noise:.0%}: too noisy to say.")
    if inverse_64_over_16 > CHEAPER and keeps_range:
        return confirmed(because, f"the decay is factored: pairwise, chunk 64 is only {pairwise_error_at_64:.1e} off")
    if inverse_64_over_16 > CHEAPER or keeps_range:
        return conditional(because, "it named one of its halves only: the other does not hold here")
    return refuted(because)


def round_the_state() -> Evidence:
    """Error of the output when nothing but the state is rounded to bf16, beside that of rounding the output."""
    only_state = Rounding.exact().replace(state=True)
    errors = {}
    for regime in ("forget", "retain"):
        inputs = make_inputs(T=512, H=2, K=64, V=64, regime=regime)
        truth = reference.recurrent(inputs).out
        errors[regime] = compare.relative_rms(rounding.forward(inputs, only_state).out, truth)
    output = compare.relative_rms(torch.from_numpy(truth).bfloat16(), truth)
    return live(forgetting_error=errors["forget"], retaining_error=errors["retain"], output_rounding=output)


@claim(23, TOPIC, "Storing the state in bf16 between chunks loses no measurable accuracy.", round_the_state)
def bf16_state(forgetting_error: float, retaining_error: float, output_rounding: float) -> Judgement:
    because = (
        f"It costs {forgetting_error:.1e} where gates forget and {retaining_error:.1e} where they retain (512 tokens); "
        f"rounding the output alone costs {output_rounding:.1e}."
    )
    if max(forgetting_error, retaining_error) < output_rounding / 2:
        return confirmed(because)
    if forgetting_error < output_rounding / 2:
        return conditional(because, "gates forget within tens of tokens; the loss grows with what is retained")
    return refuted(because)


TANH_APPROX_BITS = 11  # tanh.approx.f32: relative error up to 2^-11 (PTX ISA, "tanh")
RETAINING_LOGIT = -8.0  # of the gates that keep the state for hundreds of tokens


def approximate_tanh() -> Evidence:
    """Relative error of the gate 0.5 tanh(x / 2) + 0.5 when tanh has 11 bits, and recorded errors of two kernels."""

    def worst(logit: float) -> float:
        x = np.linspace(logit - 0.5, logit + 0.5, 1001)
        fraction, exponent = np.frexp(np.tanh(x / 2))
        rounded = np.ldexp(np.round(fraction * 2.0**TANH_APPROX_BITS) / 2.0**TANH_APPROX_BITS, exponent)
        exact = 1 / (1 + np.exp(-x))
        return float(np.abs((0.5 * rounded + 0.5) / exact - 1).max())

    rows = [
        row for row in evidence.recorded_rows("accuracy") if row["regime"] == "retain" and row["lower_bound"] == -5.0
    ]
    longest = max((row["T"] for row in rows), default=None)
    errors = {row.get("peer", row.get("step")): row["state_error_rms"] for row in rows if row["T"] == longest}
    numbers = {
        "gate_error_at_0": worst(0.0),
        "gate_error_at_minus_8": worst(RETAINING_LOGIT),
        "published_state_error": errors.get("flash_kda"),
        "step_5_state_error": errors.get(5),
    }
    return Evidence(numbers, (f"tanh rounded to 11 bits, {evidence.here()}", evidence.ladder_label()))


@claim(24, TOPIC, "Sigmoid through tanh.approx is precise enough for the gate.", approximate_tanh)
def tanh_sigmoid(
    gate_error_at_0: float,
    gate_error_at_minus_8: float,
    published_state_error: float | None = None,
    step_5_state_error: float | None = None,
) -> Judgement:
    because = f"The gate is off by {gate_error_at_0:.2%} at logit 0 and by {gate_error_at_minus_8:.0%} at −8"
    if published_state_error is not None and step_5_state_error is not None:
        because += (
            f"; retaining gates on a GPU: state error {published_state_error:.1e} with it (published kernel), "
            f"{step_5_state_error:.1e} without (step 5)"
        )
    if max(gate_error_at_0, gate_error_at_minus_8) < 0.01:
        return confirmed(f"{because}.")
    if gate_error_at_0 < 0.01:
        return conditional(f"{because}: ½ tanh + ½ cancels.", "gates forget: logits well above −8")
    return refuted(f"{because}.")


def invert_in_fp16() -> Evidence:
    """The inverse and the powers of L on unlike and on equal keys, and the error of the series in fp16."""
    numbers: dict[str, Number] = {}
    for name, correlation in (("unlike", 0.0), ("equal", 1.0)):
        inputs = make_inputs(T=256, H=2, regime="collinear", key_correlation=correlation)
        truth, chunked = reference.recurrent(inputs).out, reference.chunked(inputs)
        exact = rounding.forward(inputs, Rounding.published().replace(inverse="exact")).out
        numbers[f"error_{name}_keys"] = compare.relative_rms(rounding.forward(inputs).out, truth)
        numbers[f"error_{name}_keys_exact_inverse"] = compare.relative_rms(exact, truth)
    numbers["largest_in_inverse"] = float(np.abs(chunked.INV).max())
    powers = [np.abs(np.linalg.matrix_power(chunked.L, power)).max() for power in range(1, 16)]
    numbers["largest_in_powers"] = float(max(powers))
    return live(**numbers)


@claim(
    25,
    TOPIC,
    "The inverse's elements lie in [−1, 1], so fp16 is enough for the Neumann series.",
    invert_in_fp16,
)
def fp16_series(
    largest_in_inverse: float,
    largest_in_powers: float,
    error_unlike_keys: float,
    error_equal_keys: float,
    error_equal_keys_exact_inverse: float,
) -> Judgement:
    ulp = 2.0 ** (math.floor(math.log2(max(largest_in_powers, 1.0))) - 10)
    because = (
        f"The inverse stays within {largest_in_inverse:.3g}, but powers of L reach {largest_in_powers:,.0f}, where an "
        f"fp16 ulp is {ulp:g}: error {error_equal_keys:.2g} "
        f"on equal keys, {error_equal_keys_exact_inverse:.1e} with an exact inverse."
    )
    if error_equal_keys < 2 * error_equal_keys_exact_inverse:
        return confirmed(because)
    if error_unlike_keys < TOLERABLE:
        return refuted(
            because, f"keys are unlike each other (error {error_unlike_keys:.1e}): then the powers are small too"
        )
    return refuted(because)


SPLIT_GAIN = 1.15


def recorded_split() -> Evidence:
    """Step 4's time over step 5's in every recorded case."""
    one, two = evidence.recorded_ms(4), evidence.recorded_ms(5)
    ratios = {case: one[case] / two[case] for case in one if case in two}
    longer = [ratio for case, ratio in ratios.items() if not case.startswith("T 16,")]
    numbers = {
        "cases": len(ratios),
        "smallest": min(ratios.values(), default=None),
        "smallest_beyond_one_chunk": min(longer, default=None),
        "largest": max(ratios.values(), default=None),
    }
    return Evidence(numbers, (evidence.ladder_label(),))


@claim(26, TOPIC, "Splitting the fused kernel in two gives at least 15 %.", recorded_split)
def split_in_two(cases: int, smallest: float, smallest_beyond_one_chunk: float, largest: float) -> Judgement:
    because = f"Two kernels are {smallest:.2f} to {largest:.2f} times as fast as one, over {cases} shapes."
    if smallest >= SPLIT_GAIN:
        return confirmed(because)
    if smallest_beyond_one_chunk >= SPLIT_GAIN:
        return conditional(
            f"{because} Beyond one chunk the least is {smallest_beyond_one_chunk:.2f}.",
            "sequences have more than one chunk: with 16 tokens there is nothing to split, and a launch more",
        )
    if largest >= SPLIT_GAIN:
        return conditional(because, "the shape is one of those that gain: kda-lab ladder shows them")
    return refuted(because)


_BOUNDS = re.compile(r"__launch_bounds__\(D, [^)]*\)(?=\s*prepare\()")
# CTAs that the compiler is to leave registers for. Shared memory holds 9, so asking for more could only add spills.
_VARIANTS = {
    "free": "__launch_bounds__(D)",
    "limited": "__launch_bounds__(D, 8)",
    "tight": "__launch_bounds__(D, 9)",
}
_ROUNDS = 15


def limit_registers() -> Evidence:
    """Registers and spills of step 5's prepare with and without limits of registers (machine code), times on a GPU."""
    numbers: dict[str, Number] = {}
    readings: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kda_lab-") as folder:
        copies = {variant: _copy_with(bounds, Path(folder) / variant) for variant, bounds in _VARIANTS.items()}
        try:
            for variant, csrc in copies.items():
                with _sources(csrc):
                    kernel = evidence.kernel_of(evidence.compile_here, 5, "prepare")
                numbers[f"registers_{variant}"] = kernel.registers
                numbers[f"spill_bytes_{variant}"] = kernel.spill_store_bytes
            if torch.cuda.is_available():
                readings = _time_in_turn(copies)
        except native.BuildError as error:
            return Evidence(numbers, (str(error).splitlines()[0],))
    for variant in _VARIANTS:
        numbers[f"prepare_us_{variant}"] = statistics.median(readings[variant]) if readings else None
    numbers["spread"] = max((_spread(found, readings["free"]) for found in readings.values()), default=None)
    timed = f"timed on {torch.cuda.get_device_name()}" if readings else "times need a GPU"
    return Evidence(numbers, (evidence.compiled(), timed))


def _copy_with(bounds: str, folder: Path) -> Path:
    """A copy of the sources in which prepare has these launch bounds."""
    csrc = shutil.copytree(native.csrc_dir(), folder)
    source = csrc / "cuda" / "steps" / "5_fused_two_kernel.cu"
    text, found = _BOUNDS.subn(bounds, source.read_text(encoding="utf-8"))
    if found != 1:
        raise LookupError(f"{source.name}: expected one prepare with launch bounds, found {found}")
    source.write_text(text, encoding="utf-8")
    return csrc


def _time_in_turn(copies: dict[str, Path]) -> dict[str, list[float]]:
    """Microseconds of prepare, one reading a round of each copy, which all run in this process: what drifts meets all.

    The first round, in which they are built and loaded, does not count.
    """
    inputs = repeated_inputs()
    readings: dict[str, list[float]] = {variant: [] for variant in copies}
    try:
        for _ in range(1 + _ROUNDS):
            for variant, csrc in copies.items():
                with _sources(csrc):
                    times = kernel_events.measure(lambda: ops.forward(inputs, step=5), 5)
                readings[variant].append(statistics.median(times["prepare"]))
    finally:
        native.load("cuda")  # `fwd` runs what was loaded last
    return {variant: found[1:] for variant, found in readings.items()}


def _spread(readings: list[float], free: list[float]) -> float:
    """How far the middle half of the rounds is apart on the ratio of a variant's time to the free one's."""
    low, _, high = statistics.quantiles(time / reference for time, reference in zip(readings, free, strict=True))
    return high - low


@contextlib.contextmanager
def _sources(csrc: Path) -> Iterator[None]:
    """Builds and loads another copy of the sources, whatever was set before."""
    before = {name: os.environ.pop(name, None) for name in ("KDA_LAB_CSRC", "KDA_LAB_CUDA_LIBRARY")}
    os.environ["KDA_LAB_CSRC"] = str(csrc)
    try:
        yield
    finally:
        del os.environ["KDA_LAB_CSRC"]
        os.environ.update({name: value for name, value in before.items() if value is not None})


WORTH_SPILLS = 0.05  # of prepare's time: what a limit of registers must at least promise to be worth a second look


@claim(27, TOPIC, "Raising occupancy of the first kernel at the price of some spills pays.", limit_registers)
def occupancy_for_spills(
    registers_free: int,
    registers_limited: int,
    registers_tight: int,
    spill_bytes_limited: int,
    spill_bytes_tight: int,
    prepare_us_free: float,
    prepare_us_limited: float,
    prepare_us_tight: float,
    spread: float,
) -> Judgement:
    because = (
        f"prepare takes {prepare_us_free:.0f} µs with {registers_free} registers a thread, {prepare_us_limited:.0f} µs "
        f"with {registers_limited} and {spill_bytes_limited} spilled bytes, {prepare_us_tight:.0f} µs with "
        f"{registers_tight} and {spill_bytes_tight}."
    )
    variants = ((spill_bytes_limited, prepare_us_limited), (spill_bytes_tight, prepare_us_tight))
    spilling = [time for spilled, time in variants if spilled]
    if not spilling:
        return conditional(because, "a limit low enough to make the compiler spill; these do not")
    gain = 1 - min(spilling) / prepare_us_free
    if gain > spread:
        loss = max(spilling) / prepare_us_free - 1
        few = f"few bytes spill: the other limit loses {loss:.0%}" if loss > spread else ""
        return confirmed(f"{because} It pays: {gain:.1%}, where rounds agree within {spread:.1%}.", few)
    if gain < -spread:
        return refuted(f"{because} It does not pay: {-gain:.1%} slower at best.")
    excluded = f"the same within {spread:.1%}, so no more than {gain + spread:.1%} can be gained"
    if gain + spread < WORTH_SPILLS:
        return refuted(f"{because} It does not pay: at best {excluded}.")
    return unsettled(f"{because} At best {excluded}: too noisy to say.")


def go_without_the_bound() -> Evidence:
    """Factored and pairwise at −20, and what the pairwise step costs more."""
    report = numeric_range.explore(-20.0)
    inputs = make_inputs(T=64, H=4, K=64, V=64, regime="saturated", lower_bound=-20.0)
    pairwise = compare.relative_rms(ops.forward(inputs, step=2).out, reference.recurrent(inputs).out)
    inputs = make_inputs(T=256, H=4)
    pair_ms, factored_ms = bench.fastest_ms([partial(ops.forward, inputs, step=step) for step in (2, 3)])
    return live(
        share_flushed=report.share_flushed,
        share_overflowed=report.share_overflowed,
        pairwise_error=pairwise,
        pairwise_over_factored_time=pair_ms / factored_ms,
    )


@claim(
    28,
    TOPIC,
    "Without the bound, large negative sums underflow or need expensive rescaling.",
    go_without_the_bound,
)
def without_the_bound(
    share_flushed: float, share_overflowed: float, pairwise_error: float, pairwise_over_factored_time: float
) -> Judgement:
    because = (
        f"At −20 the factored form loses {share_flushed:.0%} of its factors to 0, {share_overflowed:.0%} to infinity; "
        f"the pairwise form is {pairwise_error:.1e} off and takes {pairwise_over_factored_time:.2f} times as long here."
    )
    if share_flushed + share_overflowed == 0:
        return refuted(because)
    if pairwise_error < TOLERABLE:
        return conditional(because, "the decay is factored; pairwise differences need no bound, at that price")
    return confirmed(because)


def look_for_gradients() -> Evidence:
    """NaN in the forward pass beyond the range, and whether there is a backward to carry it."""
    inputs = make_inputs(T=48, H=2, K=64, V=64, regime="saturated", lower_bound=-6.0)
    share = float(rounding.forward(inputs).out.isnan().float().mean())
    try:
        ops.forward(inputs.with_(v=inputs.v.clone().requires_grad_()), step=3, allow_unsafe=True)
        backward = 1
    except NotImplementedError:
        backward = 0
    read = evidence.READ + "csrc and flash_kda define fwd and no backward"
    return Evidence({"share_nan_in_output": share, "has_backward": backward}, (evidence.here(), read))


@claim(29, TOPIC, "Overflow here causes NaN gradients in training.", look_for_gradients)
def nan_gradients(share_nan_in_output: float, has_backward: int) -> Judgement:
    if not has_backward:
        return refuted(
            f"There is no backward, here or in the published kernel. The output itself is NaN already, "
            f"{share_nan_in_output:.0%} of it at −6.",
            "a backward pass existed and used the same factors",
        )
    if share_nan_in_output > 0:
        return confirmed(f"{share_nan_in_output:.0%} of the output is NaN, and the backward would carry it.")
    return refuted("No NaN appears.")


def write_twice() -> Evidence:
    """What a state answers to a key after the same pair was written twice without forgetting, in units of the value."""
    inputs = make_inputs(T=2, H=1, regime="retain")
    first_token = {name: getattr(inputs, name)[:, :1].expand(-1, 2, -1, -1).contiguous() for name in ("q", "k", "v")}
    inputs = inputs.with_(
        **first_token, g=torch.full_like(inputs.g, -60.0), beta=torch.full_like(inputs.beta, 30.0), scale=1.0
    )
    inputs = inputs.with_(q=inputs.k)
    out = ops.forward(inputs, step="token_by_token").out[0, -1, 0].double()
    value = inputs.v[0, 0, 0].double()
    return live(answer_over_value=float(out @ value / (value @ value)))


@claim(30, TOPIC, "The kernel implements selective state space models of the Mamba kind.", write_twice)
def mamba_kind(answer_over_value: float) -> Judgement:
    because = f"After writing one pair twice the state answers {answer_over_value:.3g} times the value"
    if abs(answer_over_value - 2) < 0.05:
        return confirmed(f"{because}: writes add up, as in a state space model.")
    return refuted(
        f"{because}: the delta rule corrects what is there, where a state space model adds (it would answer 2). "
        "What the two have in common is a gate that depends on the input.",
    )
