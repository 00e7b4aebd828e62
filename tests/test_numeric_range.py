"""The range explorer: limits against the formats themselves, errors from real runs."""

from __future__ import annotations

import math

import pytest
import torch

from kda_lab import numeric_range, ops, reference, rounding
from kda_lab.compare import relative_rms
from kda_lab.inputs import Result
from kda_lab.numeric_range import explore


@pytest.mark.parametrize(
    ("chunk", "flush", "overflow"), [(16, -5.4585, -5.545), (32, -2.7293, -2.772), (64, -1.3646, -1.386)]
)
def test_the_limits_of_bf16(chunk: int, flush: float, overflow: float) -> None:
    report = explore(-1.0, chunk, errors=False)
    assert report.flush_limit == pytest.approx(flush, abs=1e-4)
    assert report.overflow_limit == pytest.approx(overflow, abs=1e-3)
    assert report.limit == report.flush_limit


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("gate", ["saturated", "forget", "mixed", (1.0, 3.0)])
@pytest.mark.parametrize("lower_bound", [-0.6, -1.2, -5.45, -5.5, -6.0, -20.0, 3.0])
def test_shares_are_those_of_the_format_itself(lower_bound: float, gate: str, dtype: str) -> None:
    report = explore(lower_bound, dtype=dtype, gate=gate, errors=False)
    inputs = numeric_range.problem(lower_bound, 16, 0.0, 0.0, gate)
    g = lower_bound * torch.sigmoid(inputs.g[0].double())
    g_cumsum = g.view(3, 16, *g.shape[1:]).cumsum(1)
    assert report.g_cumsum_min == pytest.approx(float(g_cumsum.min()), rel=1e-9)
    assert report.g_cumsum_max == pytest.approx(float(g_cumsum.max()), rel=1e-9)

    exact = torch.exp(torch.stack([g_cumsum, -g_cumsum]))
    if dtype != "fp16":  # ex2.approx.ftz; fp16 is rounded from fp32 and keeps subnormals
        exact[exact < torch.finfo(torch.float32).tiny] = 0
    held = exact.to(numeric_range.DTYPES[dtype])
    assert report.share_flushed == pytest.approx(float((held == 0).double().mean()), abs=1e-3)
    assert report.share_overflowed == pytest.approx(float(held.isinf().double().mean()), abs=1e-3)


@pytest.mark.parametrize(
    ("lower_bound", "dtype"), [(-5.3, "bf16"), (-5.45, "bf16"), (-5.5, "fp32"), (-0.6, "fp16"), (-0.9, "fp16")]
)
def test_the_share_of_k_decayed_that_loses_bits(lower_bound: float, dtype: str) -> None:
    inputs = numeric_range.problem(lower_bound, 16, 0.0, 0.0, "saturated")
    k_hat = torch.nn.functional.normalize(inputs.k[0].double(), dim=-1)
    decay = torch.exp(lower_bound * torch.arange(1, 17).double()).repeat(3)[:, None, None]
    info = torch.finfo(numeric_range.DTYPES[dtype])
    # exp(+G) itself is flushed below the smallest normal in bf16, and rounded to 0 below 2^-25 in fp16.
    kept = decay >= (2.0**-25 if dtype == "fp16" else info.tiny)
    expected = ((k_hat.abs() * decay < info.tiny) & kept).double().mean()
    report = explore(lower_bound, dtype=dtype, errors=False)
    assert report.share_subnormal == pytest.approx(float(expected), abs=1e-3)
    assert expected > 0


def test_both_runs_use_the_chunk_asked_for() -> None:
    for chunk, broken in ((16, False), (32, True)):  # 3 * 32 is beyond ln of the largest fp32 and bf16, 88.7
        report = explore(-3.0, chunk)
        assert math.isnan(report.native_error) == broken
        assert math.isnan(report.mirror_error) == broken


def test_the_presets_of_the_lesson() -> None:
    assert explore(-5.0).verdict.startswith("In range")
    assert explore(-1.0).verdict.startswith("In range")
    silent = explore(-5.45)
    assert silent.verdict.startswith("Silently wrong")
    assert silent.mirror_error > 0.02
    assert silent.native_error < 0.0025  # fp32 factors are still right here, up to the bf16 output
    assert silent.share_subnormal > 0.01  # and this is why
    broken = explore(-6.0)
    assert broken.verdict.startswith("NaN")
    assert math.isnan(broken.native_error)
    growing = explore(0.5)
    assert growing.verdict.startswith("Growth")
    assert growing.growth_per_token == pytest.approx(math.exp(0.5), rel=1e-6)


def test_errors_move_towards_the_limit() -> None:
    errors = [explore(bound).mirror_error for bound in (-5.0, -5.3, -5.45, -5.5)]
    assert errors == sorted(errors)
    assert errors[-1] > 10 * errors[0]


def test_half_life() -> None:
    assert explore(-1.0, errors=False).half_life_tokens == pytest.approx(math.log(2), rel=1e-6)
    retaining = explore(-5.0, gate="retain", errors=False).half_life_tokens
    # The mean of sigmoid(N(-8, 1)) is close to exp(-8 + 1/2).
    assert retaining == pytest.approx(math.log(2) / 5 / math.exp(-7.5), rel=0.05)
    assert explore(0.0, errors=False).half_life_tokens == math.inf
    assert "never decays" in explore(0.0, errors=False).describe()


def test_A_log_and_dt_bias_move_the_gate() -> None:
    centred = explore(-5.0, gate="forget", errors=False)
    assert explore(-5.0, gate="forget", dt_bias=3.0, errors=False).half_life_tokens < centred.half_life_tokens
    assert explore(-5.0, gate="forget", dt_bias=-3.0, errors=False).half_life_tokens > centred.half_life_tokens
    steep = explore(-5.0, gate=(1.0, 0.0), A_log=3.0, errors=False)  # sigmoid(e^3) is 1
    assert steep.g_cumsum_min == pytest.approx(-80.0, abs=1e-5)
    assert explore(-5.45, gate="mixed").verdict.startswith("In range")  # random gates hide what saturated ones show


def test_logs_base_2_name_the_same_range() -> None:
    report = explore(-5.0, errors=False)
    assert report.exp_pos_log2 == pytest.approx((-80 / math.log(2), -5 / math.log(2)), rel=1e-6)
    assert report.exp_neg_log2 == pytest.approx((5 / math.log(2), 80 / math.log(2)), rel=1e-6)


def test_the_native_error_comes_from_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = explore(-5.0)
    real = ops.forward

    def stub(inputs, **options) -> Result:
        result = real(inputs, **options)
        return Result(torch.zeros_like(result.out), result.final_state)

    monkeypatch.setattr(ops, "forward", stub)
    stubbed = explore(-5.0)
    assert stubbed.native_error == pytest.approx(1.0)
    assert measured.native_error < 0.0025
    assert stubbed.mirror_error == measured.mirror_error


def test_the_mirror_error_comes_from_the_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = explore(-5.0)
    exact = numeric_range.rounding.Rounding.exact()
    real = numeric_range.rounding.forward
    monkeypatch.setattr(numeric_range.rounding, "forward", lambda inputs, chunk: real(inputs, exact, chunk))
    assert explore(-5.0).mirror_error < 1e-10 < measured.mirror_error


def test_without_runs_errors_are_not_measured() -> None:
    report = explore(-5.0, errors=False)
    assert report.native_error is None
    assert report.mirror_error is None
    assert report.describe().count("not measured") == 2


@pytest.mark.parametrize("lower_bound", [-5.0, -6.0, -1000.0, 0.0, 0.5, 100.0])
@pytest.mark.parametrize("chunk", [8, 16, 32, 64])
def test_any_setting_can_be_described(lower_bound: float, chunk: int) -> None:
    report = explore(lower_bound, chunk)
    assert f"lower_bound {lower_bound:g}" in report.describe()
    assert str(report) == report.describe()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(lower_bound=float("nan")), "lower_bound is nan"),
        (dict(lower_bound=-5.0, chunk=12), "chunk is 12; expected 8, 16, 32 or 64"),
        (dict(lower_bound=-5.0, dtype="fp8"), "dtype is 'fp8'; expected one of bf16"),
        (dict(lower_bound=-5.0, gate="random"), "gate is 'random'; expected"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explore(**arguments)


def test_the_problem_is_the_one_whose_errors_are_reported() -> None:
    """A lesson that looks further at -5.45 looks at the same numbers; more channels make the same bound worse."""
    report, errors = explore(-5.45), []
    for size in (numeric_range.SIZE, 2 * numeric_range.SIZE):
        inputs = numeric_range.problem(-5.45, size=size)
        assert inputs.K == inputs.V == size
        errors.append(relative_rms(rounding.forward(inputs).out, reference.recurrent(inputs).out))
    assert errors[0] == pytest.approx(report.mirror_error, rel=1e-6)
    assert errors[1] > errors[0]
