"""A call like one before skips the long checks, and nothing else: not an address, not an offset, not the library."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import kda_lab
from kda_lab import annotate, call_plan, native, ops
from kda_lab.inputs import Inputs
from kda_lab.native import library as native_library


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.setattr(call_plan, "_plans", {})


def call(inputs: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = inputs.new_out()
    final = None if inputs.initial_state is None else torch.empty_like(inputs.initial_state)
    arguments = {key: value for key, value in vars(inputs).items() if key != "scale"}
    kda_lab.fwd(**arguments, scale=inputs.scale, out=out, final_state=final, **options)
    return out, final


KINDS = {
    "plain": {"T": 40, "H": 2},
    "states": {"B": 2, "T": 40, "H": 2, "initial_state": "fp32"},
    "bf16 states": {"T": 17, "H": 2, "initial_state": "bf16"},
    "packed": {"H": 2, "seq_lens": (17, 0, 23), "initial_state": "fp32"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_call_is_not_checked_at_length_and_is_right(kind, monkeypatch):
    first, second = (kda_lab.make_inputs(**KINDS[kind], seed=seed) for seed in (1, 2))
    expected = [kda_lab.forward(inputs, step=5) for inputs in (first, second)]
    call(first)
    monkeypatch.setattr(ops, "_run", None)
    for inputs, right in ((second, expected[1]), (first, expected[0])):
        out, final = call(inputs)
        assert torch.equal(out, right.out)
        assert final is None or torch.equal(final, right.final_state)


def test_a_state_is_updated_in_place_the_long_way():
    inputs = kda_lab.make_inputs(T=40, H=2, initial_state="fp32")
    expected = kda_lab.forward(inputs, step=5).final_state
    call(inputs)
    state = inputs.initial_state.clone()
    arguments = {key: value for key, value in vars(inputs).items() if key not in ("scale", "initial_state")}
    kda_lab.fwd(**arguments, scale=inputs.scale, out=inputs.new_out(), initial_state=state, final_state=state)
    assert torch.equal(state, expected)


OTHERS = {
    "another length": {"T": 41, "H": 2},
    "more heads": {"T": 40, "H": 3},
    "another value size": {"T": 40, "H": 2, "V": 64},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_call_is_checked_anew(name):
    inputs, other = kda_lab.make_inputs(T=40, H=2), kda_lab.make_inputs(**OTHERS[name])
    call(inputs)
    assert torch.equal(call(other)[0], kda_lab.forward(other, step=5).out)
    assert torch.equal(call(inputs)[0], kda_lab.forward(inputs, step=5).out)


def test_strided_and_unaligned_inputs_take_the_long_way():
    inputs = kda_lab.make_inputs(T=40, H=2)
    expected = kda_lab.forward(inputs, step=5).out
    call(inputs)
    strided = torch.stack([inputs.k, inputs.k], -1)[..., 0]
    memory = torch.empty(inputs.v.numel() + 1, dtype=torch.bfloat16)
    unaligned = memory[1:].view(inputs.v.shape).copy_(inputs.v)
    for changed in ({"k": strided}, {"v": unaligned}, {"A_log": torch._neg_view(-inputs.A_log)}):
        assert torch.equal(call(inputs.with_(**changed))[0], expected)


def test_offsets_are_read_again():
    inputs = kda_lab.make_inputs(**KINDS["packed"])
    call(inputs)
    inputs.cu_seqlens[1] = 50
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] is 17, less than cu_seqlens\[1\] = 50"):
        call(inputs)


def test_another_library_is_called_once_it_is_loaded(monkeypatch):
    inputs = kda_lab.make_inputs(T=40, H=2)
    call(inputs)
    monkeypatch.setattr(native_library, "_loaded", {})
    library = native.load("cpu")
    called = []
    monkeypatch.setattr(library, "forward", lambda step, args: called.append(step))
    call(inputs)
    assert called == [5]


def test_more_threads_get_a_larger_workspace():
    inputs = kda_lab.make_inputs(T=64, H=4)
    expected = call(inputs)[0]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 3)
        assert torch.equal(call(inputs)[0], expected)
    finally:
        torch.set_num_threads(before)


def test_autograd_hears_of_what_was_written():
    inputs = kda_lab.make_inputs(**KINDS["states"])
    call(inputs)
    out, final = inputs.new_out(), torch.empty_like(inputs.initial_state)
    versions = out._version, final._version
    arguments = {key: value for key, value in vars(inputs).items() if key != "scale"}
    kda_lab.fwd(**arguments, scale=inputs.scale, out=out, final_state=final)
    assert (out._version, final._version) == (versions[0] + 1, versions[1] + 1)


def test_a_tensor_that_came_to_require_grad_is_refused():
    inputs = kda_lab.make_inputs(T=40, H=2)
    call(inputs)
    with pytest.raises(NotImplementedError, match="q requires grad"):
        call(inputs.with_(q=inputs.q.clone().requires_grad_()))


def test_a_plan_is_of_calls_with_the_same_options(monkeypatch):
    inputs, seen = kda_lab.make_inputs(T=40, H=2), []
    monkeypatch.setattr(ops, "_launch", lambda library, step, args, device: seen.append((step, args.precise)))
    for options in ({"step": 5}, {"step": 5, "precise": True}, {"step": 3}):
        call(inputs, **options)
        call(inputs, **options)
    assert seen == [(5, 0)] * 2 + [(5, 1)] * 2 + [(3, 0)] * 2


def test_a_profiler_sees_every_call(monkeypatch):
    inputs = kda_lab.make_inputs(T=40, H=2)
    call(inputs)
    seen = []
    monkeypatch.setattr(ops, "_run", lambda *args: seen.append(args))
    monkeypatch.setattr(annotate, "_enabled", True)
    call(inputs)
    assert len(seen) == 1


def test_plans_are_few_and_keep_no_tensor(monkeypatch):
    monkeypatch.setattr(call_plan, "_MOST", 3)
    inputs = kda_lab.make_inputs(T=16, H=1)
    for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
        call(inputs.with_(scale=scale))
        assert len(call_plan._plans) <= 3
    q = weakref.ref(inputs.q)
    del inputs
    gc.collect()
    assert q() is None


def test_a_torch_without_the_guard_checks_every_call(monkeypatch):
    monkeypatch.setattr(call_plan, "_make_guard", None)
    inputs = kda_lab.make_inputs(T=40, H=2)
    assert torch.equal(call(inputs)[0], call(inputs)[0])
    assert not call_plan._plans
