"""Timing: nothing wrong is timed, statistics follow from the samples, and the bound is the machine's."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time

import numpy as np
import pytest

from kda_lab import bench, ops, reference
from kda_lab.inputs import Result, make_inputs

BOUND = bench.Bound(flops_per_s=1e11, bytes_per_s=1e10)


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(B=1, T=48, H=4)


@pytest.fixture(scope="module")
def expected(inputs):
    return reference.recurrent(inputs).out


def test_row_keeps_its_samples_and_the_statistics_follow_from_them(inputs, expected):
    row = bench.measure("rebased_ex2", inputs, expected, BOUND, seconds=0.05)
    assert (row.step, row.slug, row.device, row.T, row.H) == (2, "rebased_ex2", "cpu", 48, 4)
    assert len(row.samples_ms) >= 5
    assert row.median_ms == statistics.median(row.samples_ms)
    assert row.min_ms == min(row.samples_ms)
    q1, q3 = np.percentile(row.samples_ms, [25, 75])
    assert row.iqr_ms == pytest.approx(q3 - q1)
    assert 0 < row.error_rms < 2e-3
    assert row.as_dict() | {"median_ms": 0} == dataclasses.asdict(row) | {
        "median_ms": 0,
        "min_ms": row.min_ms,
        "iqr_ms": row.iqr_ms,
    }


def test_a_step_that_is_wrong_is_refused(inputs, expected, monkeypatch):
    """A relative error of 1 % in one head is enough, and so is one NaN."""
    forward = ops.forward

    def one_percent_off(*args, **kwargs):
        result = forward(*args, **kwargs)
        result.out[:, :, 0] *= 1.01
        return result

    monkeypatch.setattr(ops, "forward", one_percent_off)
    with pytest.raises(bench.CheckFailed, match=r"step 3 \(factored\) on cpu"):
        bench.check(3, inputs, expected)
    row = bench.measure(3, inputs, expected, BOUND, seconds=0.05)
    assert row.samples_ms == ()
    assert row.median_ms is None
    assert row.iqr_ms is None
    assert "factored" in row.refused
    table = bench.format_table([row])
    assert "refused" in table
    assert row.refused in table


def test_a_nan_is_refused(inputs, expected, monkeypatch):
    forward = ops.forward

    def with_nan(*args, **kwargs):
        result = forward(*args, **kwargs)
        result.out[0, 40, 1, 3] = math.nan
        return Result(*result)

    monkeypatch.setattr(ops, "forward", with_nan)
    with pytest.raises(bench.CheckFailed, match="NaN 1, expected 0"):
        bench.check(0, inputs, expected)


def test_time_call_measures_the_call():
    samples = bench.time_call(lambda: time.sleep(0.004), seconds=0.05, warmup=1)
    assert 5 <= len(samples) <= 50
    assert 4 <= statistics.median(samples) < 8


def test_time_call_counts_warmup_apart():
    calls = []
    samples = bench.time_call(lambda: calls.append(1), seconds=0.01, warmup=3)
    assert len(calls) == 3 + 1 + len(samples)


def test_bound_is_the_slower_of_arithmetic_and_memory():
    bound = bench.Bound(flops_per_s=2e9, bytes_per_s=1e9)
    assert bound.floor_ms(flops=4_000_000, bytes=1_000_000) == pytest.approx(2.0)
    assert bound.floor_ms(flops=1_000_000, bytes=3_000_000) == pytest.approx(3.0)


def test_flops_and_bytes_of_the_published_shape():
    """117,760 FLOP and 1,282 bytes a token and head at D = 128 and 16 tokens a chunk."""
    inputs = make_inputs(B=2, T=32, H=3)
    assert bench.flops(inputs) == 117_760 * 2 * 32 * 3
    assert bench.io_bytes(inputs) == 1_282 * 2 * 32 * 3
    state = make_inputs(B=2, T=32, H=3, initial_state="fp32")
    assert bench.io_bytes(state) - bench.io_bytes(inputs) == 2 * (2 * 3 * 128 * 128 * 4)


def test_ladder_has_every_cpu_step_in_order_with_a_ratio_to_the_one_before():
    rows = bench.ladder("cpu", T=32, H=4, seconds=0.01, bound=BOUND)
    assert [row.step for row in rows] == [0, 1, 2, 3, 5]
    lines = bench.format_table(rows).splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["0", "1", "2", "3", "5"]
    assert lines[1].split()[5] == "–"
    assert lines[5].split()[5] == f"{rows[3].median_ms / rows[4].median_ms:.2f}"


def test_no_rows_are_not_measured():
    assert bench.format_table([]) == "not measured"


def test_machine_names_what_a_number_depends_on():
    record = bench.machine()
    assert all(record[name] for name in ("cpu", "threads", "python", "torch", "date", "commit"))
    assert time.strptime(record["date"], "%Y-%m-%d")


@pytest.mark.slow
def test_measured_bound_is_plausible():
    bound = bench.measure_bound("cpu")
    assert 1e9 < bound.flops_per_s < 1e15
    assert 1e8 < bound.bytes_per_s < 1e13
