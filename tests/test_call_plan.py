"""A call like one before skips the long checks, and nothing else: not an address, not an offset, not the library."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise, permutations
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


def positional(i: Inputs, out: torch.Tensor) -> tuple:
    return (i.q, i.k, i.v, i.g, i.beta, i.scale, out, i.A_log, i.dt_bias, i.lower_bound)


def call(inputs: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = inputs.new_out()
    final = None if inputs.initial_state is None else torch.empty_like(inputs.initial_state)
    kda_lab.fwd(*positional(inputs, out), inputs.initial_state, final, inputs.cu_seqlens, **options)
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


def test_shapes_that_take_turns_keep_their_plans(monkeypatch):
    prompt, token = (kda_lab.make_inputs(T=T, H=2, initial_state="fp32") for T in (40, 1))
    expected = {id(inputs): kda_lab.forward(inputs, step=5) for inputs in (prompt, token)}
    for inputs in (prompt, token):
        call(inputs)
    monkeypatch.setattr(ops, "_run", None)
    for inputs in (prompt, token, token, prompt):
        out, final = call(inputs)
        assert torch.equal(out, expected[id(inputs)].out)
        assert torch.equal(final, expected[id(inputs)].final_state)


def test_a_state_is_updated_in_place(monkeypatch):
    first, second = (kda_lab.make_inputs(T=40, H=2, initial_state="fp32", seed=seed) for seed in (1, 2))
    call(first)
    states = [first.initial_state.clone(), second.initial_state.clone()]
    kda_lab.fwd(*positional(first, first.new_out()), states[0], states[0])
    monkeypatch.setattr(ops, "_run", None)
    out = second.new_out()
    version = states[1]._version
    kda_lab.fwd(*positional(second, out), states[1], states[1])
    assert states[1]._version == version + 1
    monkeypatch.undo()
    for inputs, state in zip((first, second), states, strict=True):
        assert torch.equal(state, kda_lab.forward(inputs, step=5).final_state)
    assert torch.equal(out, kda_lab.forward(second, step=5).out)


PRESENT = {
    "no state": (),
    "initial": ("initial_state",),
    "final": ("final_state",),
    "both": ("initial_state", "final_state"),
    "in place": ("initial_state", "final_state", "the same"),
    "offsets": ("cu_seqlens",),
}


@pytest.mark.parametrize(("first", "second"), list(permutations(PRESENT, 2)))
def test_a_plan_is_of_calls_with_the_same_tensors(first, second):
    """The state's tensors have one shape, so that only being there tells the calls apart."""
    packed = kda_lab.make_inputs(H=2, seq_lens=(17, 23))
    inputs = packed.with_(cu_seqlens=None, initial_state=kda_lab.make_inputs(H=2, initial_state="fp32").initial_state)
    for kind in (first, first, second):
        present = PRESENT[kind]
        initial = inputs.initial_state.clone() if "initial_state" in present else None
        final = initial if "the same" in present else torch.zeros_like(inputs.initial_state)
        offsets = packed.cu_seqlens if "cu_seqlens" in present else None
        expected = kda_lab.forward(inputs.with_(initial_state=initial, cu_seqlens=offsets), step=5)
        out = inputs.new_out()
        given = (initial, final if "final_state" in present else None, offsets)
        kda_lab.fwd(*positional(inputs, out), *given)
        assert torch.equal(out, expected.out)
        if given[1] is not None:
            assert torch.equal(given[1], expected.final_state)


def test_tensors_side_by_side_do_not_overlap(monkeypatch):
    inputs = kda_lab.make_inputs(T=40, H=2)
    memory = torch.cat([inputs.v.flatten(), torch.zeros(inputs.v.numel(), dtype=torch.bfloat16)])
    v, out = memory.view(2, *inputs.v.shape)
    expected = call(inputs)[0]
    monkeypatch.setattr(ops, "_run", None)
    kda_lab.fwd(*positional(inputs.with_(v=v), out))
    assert torch.equal(out, expected)


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


def overlap_v(inputs: Inputs) -> torch.Tensor:
    """Shares its last 16 bytes with v's first."""
    size = inputs.v.numel()
    memory = torch.empty(2 * size - 8, dtype=torch.bfloat16)
    memory[size - 8 :] = inputs.v.flatten()
    inputs.v.set_(memory[size - 8 :].view(inputs.v.shape))
    return memory[:size].view(inputs.v.shape)


def misalign(inputs: Inputs) -> torch.Tensor:
    return torch.empty(inputs.v.numel() + 4, dtype=torch.bfloat16)[4:].view(inputs.v.shape)


@pytest.mark.parametrize(
    ("make_out", "message"),
    [
        (lambda inputs: inputs.v.view(inputs.v.shape), "out shares memory with v"),
        (overlap_v, "out shares memory with v"),
        (misalign, "out starts at an address that is no multiple of 16"),
    ],
)
def test_other_addresses_are_checked_after_those_that_were_right(make_out, message):
    inputs = kda_lab.make_inputs(T=40, H=2)
    right, wrong = inputs.new_out(), make_out(inputs)
    for _ in range(3):
        kda_lab.fwd(*positional(inputs, right))
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            kda_lab.fwd(*positional(inputs, wrong))
    right.zero_()
    kda_lab.fwd(*positional(inputs, right))
    assert torch.equal(right, kda_lab.forward(inputs, step=5).out)


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("name", ["q", "out", "initial_state", "final_state", "cu_seqlens"])
def test_a_tensor_that_lost_its_memory_is_refused(name, calls_before):
    """As sharded training frees it: the tensor keeps its shape, and its address is that of an empty one, 0."""
    inputs = kda_lab.make_inputs(**KINDS["packed"])
    given = {"out": inputs.new_out(), "final_state": torch.empty_like(inputs.initial_state)}
    given |= {key: getattr(inputs, key) for key in ops._GIVEN if key not in given}
    for _ in range(calls_before):
        kda_lab.fwd(**given, scale=inputs.scale, lower_bound=inputs.lower_bound)
    given[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{name} has no memory"):
        kda_lab.fwd(**given, scale=inputs.scale, lower_bound=inputs.lower_bound)


def test_the_final_state_is_checked_too():
    inputs = kda_lab.make_inputs(T=40, H=2, initial_state="fp32")
    expected = kda_lab.forward(inputs, step=5)
    call(inputs)
    state, out = inputs.initial_state, inputs.new_out()
    memory = torch.empty(2 * state.numel() - 4)
    initial, final = memory[: state.numel()].view(state.shape), memory[state.numel() - 4 :].view(state.shape)
    with pytest.raises(ValueError, match="final_state shares memory with initial_state"):
        kda_lab.fwd(*positional(inputs, out), initial, final)
    kda_lab.fwd(*positional(inputs, out), state, state.view(state.shape))  # in place, by another name
    assert torch.equal(state, expected.final_state)


def test_inputs_may_share_memory():
    inputs = kda_lab.make_inputs(T=40, H=2)
    call(inputs)
    inputs = inputs.with_(k=inputs.q.view(inputs.q.shape))
    assert torch.equal(call(inputs)[0], kda_lab.forward(inputs, step=5).out)


def test_more_addresses_than_are_remembered(monkeypatch):
    monkeypatch.setattr(call_plan, "MOST_ADDRESSES", 2)
    calls = [kda_lab.make_inputs(T=17, H=1, seed=seed) for seed in range(5)]
    expected = [kda_lab.forward(inputs, step=5).out for inputs in calls]
    call(calls[0])
    monkeypatch.setattr(ops, "_run", None)
    for _ in range(2):
        for inputs, right in zip(calls, expected, strict=True):
            assert torch.equal(call(inputs)[0], right)
    (plan,) = call_plan._plans.values()
    assert plan.args_at.cache_info().currsize == 2


def test_threads_share_a_plan(monkeypatch):
    calls = [kda_lab.make_inputs(T=17, H=1, initial_state="fp32", seed=seed) for seed in range(4)]
    expected = [kda_lab.forward(inputs, step=5) for inputs in calls]
    call(calls[0])
    monkeypatch.setattr(ops, "_run", None)

    def run(index: int) -> bool:
        made = [call(calls[index]) for _ in range(200)]
        right = expected[index]
        return all(torch.equal(out, right.out) and torch.equal(final, right.final_state) for out, final in made)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(4)))


def test_calls_that_run_at_once_share_nothing(monkeypatch):
    inputs = kda_lab.make_inputs(T=17, H=1, initial_state="fp32")
    out = inputs.new_out()
    kda_lab.fwd(*positional(inputs, out), inputs.initial_state, inputs.initial_state)
    seen = []

    def forward(step: int, args: native.KdaArgs) -> None:
        before = bytes(args)
        if len(seen) < 3:
            seen.append(range(args.workspace, args.workspace + args.workspace_bytes))
            kda_lab.fwd(*positional(inputs, out), inputs.initial_state, inputs.initial_state)
        assert bytes(args) == before

    monkeypatch.setattr(native.load("cpu"), "forward", forward)
    monkeypatch.setattr(ops, "_run", None)
    kda_lab.fwd(*positional(inputs, out), inputs.initial_state, inputs.initial_state)
    seen.sort(key=lambda memory: memory.start)
    assert all(memory.start % 256 == 0 for memory in seen)
    assert all(first.stop <= second.start for first, second in pairwise(seen))
    assert len(seen) == 3


def test_a_call_on_a_gpu_asks_for_stream_and_device(monkeypatch):
    """With a GPU of make-believe, and the CPU's memory."""
    inputs = kda_lab.make_inputs(T=17, H=1)
    out, _ = call(inputs)
    (plan,) = call_plan._plans.values()
    plan = dataclasses.replace(plan, gpu=1)
    given = (*(getattr(inputs, name) for name in ops._GIVEN[:7]), out, None, None, None)
    current = {"stream": 7, "device": 1}
    seen = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current["device"] = current["device"], index
        yield
        current["device"] = before

    def forward(step: int, args: native.KdaArgs) -> None:
        seen.append((args.stream, current["device"]))

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: current["stream"] + gpu, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current["device"], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(plan.library, "forward", forward)
    assert plan.run(given, ops._check_offsets)
    current.update(stream=70, device=0)
    assert plan.run(given, ops._check_offsets)
    assert seen == [(8, 1), (71, 1)]
    assert current["device"] == 0


def test_a_missing_tensor_is_named():
    inputs = kda_lab.make_inputs(T=17, H=1)
    call(inputs)
    with pytest.raises(TypeError, match="k is None"):
        call(inputs.with_(k=None))


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


def test_a_plan_serves_more_threads():
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
    kda_lab.fwd(*positional(inputs, out), inputs.initial_state, final)
    assert (out._version, final._version) == (versions[0] + 1, versions[1] + 1)


def test_inference_tensors_and_others_have_plans_of_their_own():
    """To the guard an inference tensor outside inference mode is what another tensor is inside."""
    inputs = kda_lab.make_inputs(T=17, H=1)
    out = inputs.new_out()
    with torch.inference_mode():
        counting_nothing = kda_lab.make_inputs(T=17, H=1)
        out_counting_nothing = counting_nothing.new_out()
    kda_lab.fwd(*positional(counting_nothing, out_counting_nothing))
    with torch.inference_mode():
        kda_lab.fwd(*positional(inputs, out))
    assert out._version == 1


def test_a_tensor_that_came_to_require_grad_is_refused():
    inputs = kda_lab.make_inputs(T=40, H=2)
    call(inputs)
    with pytest.raises(NotImplementedError, match="q requires grad"):
        call(inputs.with_(q=inputs.q.clone().requires_grad_()))


def test_a_plan_is_of_calls_with_the_same_options(monkeypatch):
    inputs, seen = kda_lab.make_inputs(T=40, H=2), []
    monkeypatch.setattr(call_plan, "launch", lambda library, step, args, gpu: seen.append((step, args.precise)))
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


def test_a_plan_made_while_a_profiler_listened_calls_none_later(monkeypatch):
    inputs = kda_lab.make_inputs(T=40, H=2)
    with monkeypatch.context() as listening:
        listening.setattr(annotate, "_enabled", True)
        call(inputs)
    seen = []
    monkeypatch.setattr(
        native.load("cpu"), "forward", lambda step, args: seen.append((args.push_range, args.pop_range))
    )
    monkeypatch.setattr(ops, "_run", None)
    call(inputs)
    assert seen == [(None, None)]


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
