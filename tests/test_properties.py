"""Properties that hold for every input, searched by hypothesis: truth, causality, packing, carrying the state."""

from __future__ import annotations

import ladder
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kda_lab
from kda_lab import reference, rounding
from kda_lab.compare import assert_close
from kda_lab.inputs import REGIMES, Inputs, make_inputs

# Deterministic, so that a red test is a change in the code; a deadline would measure the machine.
settings.register_profile(
    "kda_lab", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kda_lab")

steps_and_chunks = st.sampled_from(ladder.STEPS_AND_CHUNKS)


@st.composite
def problems(draw: st.DrawFn, *, packed: bool | None = None, shortest: int = 1) -> Inputs:
    """Inputs of any shape and regime in which every parameter matters."""
    if draw(st.booleans()) if packed is None else packed:
        lengths = dict(seq_lens=draw(st.lists(st.integers(0, 40), min_size=1, max_size=4)))
    else:
        lengths = dict(B=draw(st.integers(1, 3)), T=draw(st.integers(shortest, 70)))
    inputs = make_inputs(
        **lengths,
        H=draw(st.integers(1, 3)),
        K=draw(st.integers(1, 48)),
        V=draw(st.integers(1, 48)),
        regime=draw(st.sampled_from(REGIMES)),
        lower_bound=draw(st.sampled_from([0.0, -0.1, -1.0, -1.35])),  # every step represents these with every chunk
        initial_state=draw(st.sampled_from([None, "bf16", "fp32"])),
        key_correlation=draw(st.sampled_from([None, 0.7])),
        seed=draw(st.integers(0, 10_000)),
    )
    generator = torch.Generator().manual_seed(0)
    return inputs.with_(
        A_log=torch.randn(inputs.H, generator=generator) / 2,
        dt_bias=torch.randn(inputs.H, inputs.K, generator=generator) / 2,
        scale=draw(st.sampled_from([inputs.scale, 1.0])),
    )


@given(problems(), steps_and_chunks)
@settings(max_examples=200)
def test_every_step_is_the_definition(inputs: Inputs, step_and_chunk: tuple[str, int]) -> None:
    step, chunk = step_and_chunk
    # A handful of bf16 values may all round the same way; their error is then not comparable to a mean one.
    assume(inputs.T * inputs.B * inputs.H * inputs.V >= 256)
    ladder.assert_right(inputs, step, chunk)


@given(problems(), st.sampled_from([1, 8, 16, 64]))
def test_the_chunk_form_and_the_torch_twin_are_the_definition(inputs: Inputs, chunk: int) -> None:
    expected = reference.recurrent(inputs)
    for result in (
        reference.recurrent_torch(inputs),
        reference.chunked(inputs, chunk),
        rounding.forward(inputs, rounding.Rounding.exact(), chunk),
    ):
        assert_close(result.out, expected.out, rms=1e-11)
        assert_close(result.final_state, expected.final_state, rms=1e-11, name="final_state")


@given(problems(packed=False, shortest=2), steps_and_chunks, st.data())
def test_later_tokens_never_change_earlier_outputs(
    inputs: Inputs, step_and_chunk: tuple[str, int], data: st.DataObject
) -> None:
    step, chunk = step_and_chunk
    first_changed = data.draw(st.integers(1, inputs.T - 1))
    other = make_inputs(inputs.B, inputs.T, inputs.H, inputs.K, inputs.V, regime="forget", seed=99)
    changed = {}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name] = getattr(inputs, name).clone()
        changed[name][:, first_changed:] = getattr(other, name)[:, first_changed:]
    before = kda_lab.forward(inputs, step=step, chunk=chunk).out
    after = kda_lab.forward(inputs.with_(**changed), step=step, chunk=chunk).out
    assert torch.equal(ladder.bits(before[:, :first_changed]), ladder.bits(after[:, :first_changed]))


@given(problems(packed=True), steps_and_chunks)
def test_packed_sequences_are_what_they_are_alone(inputs: Inputs, step_and_chunk: tuple[str, int]) -> None:
    step, chunk = step_and_chunk
    packed = kda_lab.forward(inputs, step=step, chunk=chunk)
    for n, (begin, end) in enumerate(inputs.spans()):
        rows = {name: getattr(inputs, name)[:, begin:end] for name in ("q", "k", "v", "g", "beta")}
        state = None if inputs.initial_state is None else inputs.initial_state[n : n + 1]
        alone = kda_lab.forward(inputs.with_(**rows, initial_state=state, cu_seqlens=None), step=step, chunk=chunk)
        assert torch.equal(ladder.bits(packed.out[:, begin:end]), ladder.bits(alone.out))
        assert torch.equal(ladder.bits(packed.final_state[n]), ladder.bits(alone.final_state[0]))


@given(problems(packed=False), steps_and_chunks)
def test_batch_rows_are_packed_sequences_of_one_length(inputs: Inputs, step_and_chunk: tuple[str, int]) -> None:
    step, chunk = step_and_chunk
    rows = {name: getattr(inputs, name).flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta")}
    offsets = torch.arange(inputs.B + 1) * inputs.T
    batched = kda_lab.forward(inputs, step=step, chunk=chunk)
    packed = kda_lab.forward(inputs.with_(**rows, cu_seqlens=offsets), step=step, chunk=chunk)
    assert torch.equal(ladder.bits(batched.out.flatten(0, 1)[None]), ladder.bits(packed.out))
    assert torch.equal(ladder.bits(batched.final_state), ladder.bits(packed.final_state))


@given(problems(packed=False, shortest=2), steps_and_chunks, st.data())
def test_two_halves_with_the_state_carried_are_the_whole(
    inputs: Inputs, step_and_chunk: tuple[str, int], data: st.DataObject
) -> None:
    step, chunk = step_and_chunk
    if inputs.initial_state is not None:
        inputs = inputs.with_(initial_state=inputs.initial_state.float())  # a bf16 state is rounded at the cut
    cut = data.draw(st.integers(1, inputs.T - 1))

    def part(tokens: slice, state: Tensor | None) -> Inputs:
        rows = {name: getattr(inputs, name)[:, tokens] for name in ("q", "k", "v", "g", "beta")}
        return inputs.with_(**rows, initial_state=state)

    whole = kda_lab.forward(inputs, step=step, chunk=chunk)
    first = kda_lab.forward(part(slice(0, cut), inputs.initial_state), step=step, chunk=chunk)
    second = kda_lab.forward(part(slice(cut, None), first.final_state), step=step, chunk=chunk)
    out = torch.cat([first.out, second.out], dim=1)
    if cut % chunk == 0 or step == "token_by_token":  # the same chunks: not a bit may differ
        assert torch.equal(ladder.bits(out), ladder.bits(whole.out))
        assert torch.equal(ladder.bits(second.final_state), ladder.bits(whole.final_state))
    else:
        assert_close(second.final_state, whole.final_state, rms=1e-5, name="final_state")
        assert_close(out.double(), whole.out.double(), rms=2e-3)  # sums differ in fp32, a few bf16 roundings with them


@given(problems(), steps_and_chunks)
def test_heads_do_not_meet(inputs: Inputs, step_and_chunk: tuple[str, int]) -> None:
    step, chunk = step_and_chunk
    together = kda_lab.forward(inputs, step=step, chunk=chunk)
    head = inputs.H - 1
    one = {name: getattr(inputs, name)[:, :, head:] for name in ("q", "k", "v", "g", "beta")}
    state = None if inputs.initial_state is None else inputs.initial_state[:, head:]
    alone = kda_lab.forward(
        inputs.with_(**one, A_log=inputs.A_log[head:], dt_bias=inputs.dt_bias[head:], initial_state=state),
        step=step,
        chunk=chunk,
    )
    assert torch.equal(ladder.bits(together.out[:, :, head:]), ladder.bits(alone.out))
    assert torch.equal(ladder.bits(together.final_state[:, head:]), ladder.bits(alone.final_state))


@given(problems(), steps_and_chunks)
@settings(max_examples=20)
def test_a_run_repeats_bit_for_bit(inputs: Inputs, step_and_chunk: tuple[str, int]) -> None:
    step, chunk = step_and_chunk
    first, again = (kda_lab.forward(inputs, step=step, chunk=chunk) for _ in range(2))
    assert torch.equal(ladder.bits(first.out), ladder.bits(again.out))
    assert torch.equal(ladder.bits(first.final_state), ladder.bits(again.final_state))
