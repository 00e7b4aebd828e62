"""What exp(+G) and exp(-G) do in a number format, G = cumsum of the log-decay over a chunk, and what that costs.

The factored chunk form needs both factors; ``lower_bound`` times the chunk size decides whether they fit.
:func:`explore` evaluates one setting: ranges from a sample of gates, and two errors measured on a small problem.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np
import torch

from kda_lab import arguments, reference, rounding
from kda_lab.compare import relative_rms
from kda_lab.inputs import Inputs, make_inputs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GATES = ("saturated", "forget", "mixed", "retain")
SILENT_ERROR = 0.02  # finite, and several times the 0.4 to 0.7 % that bf16 factors cost in range: wrong without a sign

_GATE_LOGITS = {
    "saturated": (30.0, 0.0),
    "forget": (0.0, 1.0),
    "mixed": (-4.0, 2.0),
    "retain": (-8.0, 1.0),
}  # mean, std
_TOKENS, _HEADS, SIZE = 48, 4, 64  # of the measured problem; tokens are rounded up to whole chunks, SIZE is K and V


@dataclasses.dataclass(frozen=True)
class Format:
    """The limits of a number format for exp(x), x in natural log."""

    largest: float  # ln of the largest finite value: exp(x) is infinite above
    smallest_normal: float  # ln of it: bf16 and fp32 results flush to 0 below (ex2.approx.ftz)
    smallest: float  # ln below which exp(x) becomes 0; under smallest_normal only for fp16, which keeps subnormals

    @classmethod
    def of(cls, dtype: str) -> Format:
        info = torch.finfo(DTYPES[dtype])
        normal = math.log(info.tiny)
        # fp16 is rounded from an fp32 result, so half of its smallest subnormal still rounds up.
        smallest = math.log(info.smallest_normal * info.eps / 2) if dtype == "fp16" else normal
        return cls(largest=math.log(info.max), smallest_normal=normal, smallest=smallest)


@dataclasses.dataclass(frozen=True)
class RangeReport:
    """One setting of the explorer, and what it does. Logs are natural unless a name says log2."""

    lower_bound: float
    chunk: int
    dtype: str
    A_log: float
    dt_bias: float
    gate: str | tuple[float, float]

    g_cumsum_min: float
    g_cumsum_max: float
    share_flushed: float  # of all exp(+G) and exp(-G): 0 in this format
    share_overflowed: float  # of the same: infinite in this format
    share_subnormal: float  # of all k_decayed = k_hat exp(+G): below the smallest normal but not 0, so bits are lost

    flush_limit: float  # lower_bound at which a saturated gate's exp(+G) leaves the format's normal numbers
    overflow_limit: float  # lower_bound at which its exp(-G) overflows
    half_life_tokens: float  # tokens until half of the state is left, at the mean log-decay; infinite without decay
    growth_per_token: float  # what one token multiplies the state by, at the mean log-decay; above 1 it grows

    native_error: (
        float | None
    )  # measured: the compiled fp32 step 'factored' against float64; NaN if its NaN set differs
    mirror_error: float | None  # measured: the rounding mirror (bf16 factors and state) against float64

    @property
    def exp_pos_log2(self) -> tuple[float, float]:
        """Smallest and largest log2 of exp(+G)."""
        return self.g_cumsum_min / math.log(2), self.g_cumsum_max / math.log(2)

    @property
    def exp_neg_log2(self) -> tuple[float, float]:
        """Smallest and largest log2 of exp(-G)."""
        return 0.0 - self.g_cumsum_max / math.log(2), 0.0 - self.g_cumsum_min / math.log(2)  # never -0.0

    @property
    def limit(self) -> float:
        """The smallest lower_bound that keeps both factors normal and finite for this chunk and format."""
        return max(self.flush_limit, self.overflow_limit)

    @property
    def verdict(self) -> str:
        """One sentence: in range, or what goes wrong."""
        if self.mirror_error is not None and math.isnan(self.mirror_error):
            return "NaN: a factor overflows, and infinity times zero reaches the output."
        if self.lower_bound > 0:
            return f"Growth: every token multiplies the state by {self.growth_per_token:.3g}."
        if self.mirror_error is not None and self.mirror_error > SILENT_ERROR:
            return f"Silently wrong in bf16: every number is finite, and the output is {self.mirror_error:.1%} off."
        if self.share_overflowed > 0:
            return f"Overflow: {self.share_overflowed:.1%} of the factors are infinite in {self.dtype}."
        if self.share_flushed > 0:
            return f"Flush: {self.share_flushed:.1%} of the factors are zero in {self.dtype}."
        return f"In range: every factor is finite and not zero in {self.dtype}."

    def describe(self) -> str:
        """The report in plain words, a few lines."""
        gate = self.gate if isinstance(self.gate, str) else f"N({self.gate[0]:g}, {self.gate[1]:g}²)"
        (pos_low, pos_high), (neg_low, neg_high) = self.exp_pos_log2, self.exp_neg_log2
        return "\n".join(
            [
                f"lower_bound {self.lower_bound:g}, chunks of {self.chunk}, {self.dtype}, {gate} gate",
                self.verdict,
                f"cumsum(g) lies in [{self.g_cumsum_min:.4g}, {self.g_cumsum_max:.4g}]: exp(+cumsum(g)) in "
                f"2^[{pos_low:.1f}, {pos_high:.1f}], exp(-cumsum(g)) in 2^[{neg_low:.1f}, {neg_high:.1f}]",
                f"{self.share_flushed:.1%} of the factors are flushed to 0, {self.share_overflowed:.1%} overflow; "
                f"{self.share_subnormal:.1%} of k_decayed are subnormal",
                f"limit for this chunk and format: lower_bound {self.limit:.4f}",
                self._memory(),
                f"error against float64: compiled fp32 step {_error_text(self.native_error)}, "
                f"bf16 rounding mirror {_error_text(self.mirror_error)}",
            ]
        )

    __str__ = describe

    def _memory(self) -> str:
        if self.growth_per_token > 1:
            return f"the state grows {self.growth_per_token:.3g}-fold with every token"
        if math.isinf(self.half_life_tokens):
            return "the state never decays"
        return f"half of the state is left after {self.half_life_tokens:.3g} tokens"


def explore(
    lower_bound: float,
    chunk: int = 16,
    dtype: str = "bf16",
    A_log: float = 0.0,
    dt_bias: float = 0.0,
    gate: str | tuple[float, float] = "saturated",
    errors: bool = True,
) -> RangeReport:
    """Evaluates one setting of the gate's range.

    dtype: "bf16", "fp16" or "fp32", the format that exp(±G) is held in; it does not change the measured errors, which
        are those of fp32 factors (compiled) and bf16 factors (mirror).
    A_log, dt_bias: of every head and channel. gate: a name in ``GATES`` or (mean, std) of the gate's logits.
    errors: also run the compiled step and the mirror; without, both errors are None (not measured).

    Raises ValueError for a bound that is not finite, a chunk other than 8, 16, 32 or 64, or an unknown dtype or gate;
    TypeError for what is no number where one belongs.
    """
    lower_bound = arguments.number("lower_bound", lower_bound)
    if not abs(lower_bound) <= 1000:
        raise ValueError(f"lower_bound is {lower_bound}; expected a number between -1000 and 1000")
    A_log, dt_bias = arguments.number("A_log", A_log), arguments.number("dt_bias", dt_bias)
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; expected a finite number")
    if arguments.whole("chunk", chunk) not in (8, 16, 32, 64):
        raise ValueError(f"chunk is {chunk}; expected 8, 16, 32 or 64")
    if dtype not in tuple(DTYPES):
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    inputs = problem(lower_bound, chunk, A_log, dt_bias, gate)

    _, k_hat, g, _ = reference.activate(inputs)  # [T, H, K]
    g_cumsum = g.reshape(-1, chunk, *g.shape[1:]).cumsum(axis=1)
    exponents = np.stack([g_cumsum, -g_cumsum])
    limits = Format.of(dtype)
    with np.errstate(over="ignore", divide="ignore"):
        k_decayed = np.log(np.abs(k_hat)).reshape(g_cumsum.shape) + g_cumsum
    mean_g = float(g.mean())
    return RangeReport(
        lower_bound=lower_bound,
        chunk=chunk,
        dtype=dtype,
        A_log=A_log,
        dt_bias=dt_bias,
        gate=gate,
        g_cumsum_min=float(g_cumsum.min()),
        g_cumsum_max=float(g_cumsum.max()),
        share_flushed=float((exponents < limits.smallest).mean()),
        share_overflowed=float((exponents > limits.largest).mean()),
        share_subnormal=float(((k_decayed < limits.smallest_normal) & (g_cumsum >= limits.smallest)).mean()),
        flush_limit=limits.smallest_normal / chunk,
        overflow_limit=-limits.largest / chunk,
        half_life_tokens=math.log(2) / -mean_g if mean_g < 0 else math.inf,
        growth_per_token=math.exp(min(mean_g, 700.0)),
        **(_measure(inputs, chunk) if errors else dict(native_error=None, mirror_error=None)),
    )


def _measure(inputs: Inputs, chunk: int) -> dict[str, float]:
    from kda_lab import bench, ops  # loads (and on first use compiles) the native library: only when errors are wanted

    truth = reference.recurrent(inputs).out
    with bench.one_thread():  # operators this small lose more to waking threads than they gain
        native = ops.forward(inputs, step="factored", chunk=chunk, allow_unsafe=True)
        mirror = rounding.forward(inputs, chunk=chunk)
    return dict(native_error=relative_rms(native.out, truth), mirror_error=relative_rms(mirror.out, truth))


def problem(
    lower_bound: float,
    chunk: int = 16,
    A_log: float = 0.0,
    dt_bias: float = 0.0,
    gate: str | tuple[float, float] = "saturated",
    size: int = SIZE,
) -> Inputs:
    """The small problem that `explore` measures its errors on: a gate of the wanted distribution, K = V = size.

    Its bf16 g is rounded like any other input. Raises ValueError for an unknown gate.
    """
    if isinstance(gate, str):
        if gate not in _GATE_LOGITS:
            raise ValueError(f"gate is {gate!r}; expected (mean, std) or one of {', '.join(GATES)}")
        gate = _GATE_LOGITS[gate]
    try:
        mean, std = (arguments.number("gate", value) for value in gate)
    except (TypeError, ValueError):
        raise ValueError(f"gate is {gate!r}; expected (mean, std) or one of {', '.join(GATES)}") from None
    base = _base_problem(-(-_TOKENS // chunk) * chunk, size)
    return base.with_(
        lower_bound=lower_bound,
        g=(mean + std * base.g.float()).bfloat16(),
        A_log=torch.full_like(base.A_log, A_log),
        dt_bias=torch.full_like(base.dt_bias, dt_bias),
    )


@cache
def _base_problem(tokens: int, size: int) -> Inputs:
    """What no slider changes; the "forget" regime's gate logits are N(0, 1)."""
    return make_inputs(T=tokens, H=_HEADS, K=size, V=size, regime="forget")


def _error_text(error: float | None) -> str:
    if error is None:
        return "not measured"
    return f"{error:.1e}" if math.isfinite(error) else "NaN"
