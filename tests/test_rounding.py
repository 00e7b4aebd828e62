"""The rounding mirror: exact with its switches off, and every switch does what its name says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kda_lab import reference, rounding
from kda_lab.compare import assert_close, relative_rms
from kda_lab.inputs import Inputs, make_inputs
from kda_lab.rounding import Rounding

SWITCHES = [field.name for field in dataclasses.fields(Rounding) if isinstance(field.default, bool)]


def error(inputs: Inputs, r: Rounding) -> float:
    return relative_rms(rounding.forward(inputs, r).out, reference.recurrent(inputs).out)


@pytest.fixture(scope="module")
def ordinary() -> Inputs:
    return make_inputs(T=50, H=4, K=64, V=48, initial_state="fp32", scale=0.3)


@pytest.mark.parametrize("chunk", [8, 16, 32])
@pytest.mark.parametrize(
    "shape",
    [dict(T=50), dict(B=2, T=17, initial_state="bf16"), dict(seq_lens=[5, 0, 33], initial_state="fp32")],
    ids=["tail", "batch", "packed"],
)
def test_without_roundings_it_is_the_definition(shape: dict, chunk: int) -> None:
    inputs = make_inputs(H=3, K=32, V=24, regime="forget", **shape)
    inputs = inputs.with_(A_log=torch.tensor([-0.5, 0.0, 0.7]), dt_bias=torch.linspace(-1, 1, 96).view(3, 32))
    expected, result = reference.recurrent(inputs), rounding.forward(inputs, Rounding.exact(), chunk)
    assert_close(result.out, expected.out, rms=1e-12)
    assert_close(result.final_state, expected.final_state, rms=1e-12, name="final_state")


@pytest.mark.gpu
def test_a_gpu_rounds_like_the_cpu(ordinary: Inputs) -> None:
    here, there = rounding.forward(ordinary), rounding.forward(ordinary.to("cuda"))
    assert_close(there.out, here.out, rms=3e-3)  # sums in another order, so a few roundings fall the other way
    exact = rounding.forward(ordinary.to("cuda"), Rounding.exact())
    assert_close(exact.out, reference.recurrent(ordinary).out, rms=1e-12)


def test_the_published_roundings_are_the_default(ordinary: Inputs) -> None:
    assert Rounding.published() == Rounding()
    default, published = rounding.forward(ordinary), rounding.forward(ordinary, Rounding.published())
    assert torch.equal(default.out, published.out)
    assert default.out.dtype == torch.bfloat16
    assert default.final_state.dtype == torch.float32
    assert torch.equal(default.final_state, default.final_state.bfloat16().float())  # the state lives in bf16
    assert 3e-3 < error(ordinary, Rounding.published()) < 8e-3


@pytest.mark.parametrize("name", sorted(set(SWITCHES) - {"flush"}))
def test_every_rounding_costs_something_alone(ordinary: Inputs, name: str) -> None:
    alone = error(ordinary, Rounding.exact().replace(**{name: True}))
    # One bf16 or fp16 rounding: never nothing, never more than all together.
    assert 1e-6 < alone < 5e-3


@pytest.mark.parametrize("name", sorted(set(SWITCHES) - {"flush"}))
def test_every_rounding_is_part_of_the_published_ones(ordinary: Inputs, name: str) -> None:
    published = rounding.forward(ordinary)
    without = rounding.forward(ordinary, Rounding.published().replace(**{name: False}))
    assert not torch.equal(published.out.double(), without.out.double())


def test_flushing_bites_below_the_smallest_normal() -> None:
    flush = Rounding.exact().replace(flush=True)
    in_range, below = (make_inputs(T=48, K=32, V=32, regime="saturated", lower_bound=b) for b in (-5.4, -5.5))
    assert error(in_range, flush) < 1e-12
    assert error(below, flush) > 0.01


def test_bf16_factors_fail_silently_where_fp32_factors_do_not() -> None:
    inputs = make_inputs(T=48, regime="saturated", lower_bound=-5.45)
    assert torch.isfinite(rounding.forward(inputs).out).all()
    assert error(inputs, Rounding.published()) > 0.05
    fp32 = Rounding.exact().replace(arithmetic="fp32", flush=True)
    assert error(inputs, fp32) < 1e-5


def test_the_series_in_fp16_is_what_identical_keys_break() -> None:
    inputs = make_inputs(T=256, H=2, regime="collinear", initial_state="fp32")
    assert error(inputs, Rounding.published()) > 0.2
    assert error(inputs, Rounding.published().replace(inverse="exact")) < 0.03
    assert error(inputs, Rounding.exact().replace(inverse="neumann_fp16")) > 0.2


def test_the_tanh_form_is_too_coarse_for_gates_that_retain() -> None:
    fp32 = Rounding.exact().replace(arithmetic="fp32")
    retaining = make_inputs(T=64, regime="retain", initial_state="fp32")
    forgetting = make_inputs(T=64, regime="forget", initial_state="fp32")
    g_error = [
        relative_rms(rounding._activate(inputs, fp32.replace(sigmoid=sigmoid))[3] / 1.4426950408889634, truth)
        for inputs in (retaining, forgetting)
        for truth in [reference.activate(inputs)[2]]
        for sigmoid in ("tanh", "exact")
    ]
    retain_tanh, retain_exact, forget_tanh, forget_exact = g_error
    assert retain_tanh > 100 * retain_exact
    assert forget_tanh < 3 * forget_exact


def test_a_bf16_state_loses_what_an_fp32_state_keeps() -> None:
    inputs = make_inputs(T=16, regime="collinear", lower_bound=0.0)
    inputs = inputs.with_(
        beta=torch.full_like(inputs.beta, -30.0), initial_state=torch.full((1, 4, 128, 128), 1 + 2**-9)
    )
    assert (rounding.forward(inputs).final_state == 1.0).all()
    kept = rounding.forward(inputs, Rounding.published().replace(state=False)).final_state
    assert kept == pytest.approx(1 + 2**-9, abs=1e-6)


def test_the_inputs_are_left_alone(ordinary: Inputs) -> None:
    before = ordinary.initial_state.clone()
    rounding.forward(ordinary, Rounding.published().replace(state=False))
    assert torch.equal(ordinary.initial_state, before)
