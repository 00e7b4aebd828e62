"""One NaN or infinity in any input, anywhere: what does not depend on it keeps every bit, on every CPU step."""

from __future__ import annotations

import math

import pytest
import torch
from ladder import STEPS_AND_CHUNKS, assert_right, bits

import kda_lab
from kda_lab import compare, reference
from kda_lab.inputs import Inputs, make_inputs

VALUES = (math.nan, math.inf, -math.inf)
TOKEN_INPUTS = ("q", "k", "v", "g", "beta")
ROW, HEAD, CHANNEL = 1, 1, 9


def poisoned(inputs: Inputs, name: str, at: tuple[int, ...], value: float) -> Inputs:
    tensor = getattr(inputs, name).clone()
    tensor[at] = value
    return inputs.with_(**{name: tensor})


def token_entry(name: str, row: int, token: int) -> tuple[int, ...]:
    return (row, token, HEAD) if name == "beta" else (row, token, HEAD, CHANNEL)


@pytest.mark.parametrize(("step", "chunk"), STEPS_AND_CHUNKS)
@pytest.mark.parametrize("name", TOKEN_INPUTS)
@pytest.mark.parametrize("value", VALUES)
def test_a_token_reaches_later_tokens_of_its_row_and_head_only(step: str, chunk: int, name: str, value: float) -> None:
    inputs = make_inputs(B=2, T=40, H=3, K=20, V=24, lower_bound=-1.3, initial_state="fp32")
    clean = kda_lab.forward(inputs, step=step, chunk=chunk)
    for token in (0, 3, 7, 8, 15, 16, 20, 31, 32, 39):  # first, last, in between, and both sides of the chunks' edges
        result = kda_lab.forward(poisoned(inputs, name, token_entry(name, ROW, token), value), step=step, chunk=chunk)
        touched = torch.zeros(2, 40, 3, dtype=torch.bool)
        touched[ROW, token : token + 1 if name == "q" else None, HEAD] = True  # a query is its own token's only
        assert torch.equal(bits(result.out)[~touched], bits(clean.out)[~touched]), token
        touched = torch.zeros(2, 3, dtype=torch.bool)
        touched[ROW, HEAD] = name != "q"
        assert torch.equal(bits(result.final_state)[~touched], bits(clean.final_state)[~touched]), token
        if math.isnan(value):
            assert torch.isnan(result.out[ROW, token, HEAD]).any(), token


@pytest.mark.parametrize(("step", "chunk"), STEPS_AND_CHUNKS)
@pytest.mark.parametrize("name", ["A_log", "dt_bias", "initial_state"])
@pytest.mark.parametrize("value", VALUES)
def test_a_parameter_reaches_its_head_only_and_a_state_its_sequence(
    step: str, chunk: int, name: str, value: float
) -> None:
    inputs = make_inputs(B=2, T=40, H=3, K=20, V=24, lower_bound=-1.3, initial_state="fp32")
    clean = kda_lab.forward(inputs, step=step, chunk=chunk)
    at = {"A_log": (HEAD,), "dt_bias": (HEAD, CHANNEL), "initial_state": (ROW, HEAD, 3, CHANNEL)}[name]
    result = kda_lab.forward(poisoned(inputs, name, at, value), step=step, chunk=chunk)
    touched = torch.zeros(2, 3, dtype=torch.bool)  # [N, H]
    touched[ROW if name == "initial_state" else slice(None), HEAD] = True
    out, clean_out = (bits(x.out).transpose(1, 2) for x in (result, clean))  # [N, H, T, V]
    assert torch.equal(out[~touched], clean_out[~touched])
    assert torch.equal(bits(result.final_state)[~touched], bits(clean.final_state)[~touched])
    if math.isnan(value):
        assert torch.isnan(result.final_state[touched]).any()


@pytest.mark.parametrize(("step", "chunk"), STEPS_AND_CHUNKS)
@pytest.mark.parametrize("name", TOKEN_INPUTS)
@pytest.mark.parametrize("value", VALUES)
def test_a_sequence_leaves_those_packed_around_it_alone(step: str, chunk: int, name: str, value: float) -> None:
    inputs = make_inputs(seq_lens=[21, 16], H=2, K=20, V=24, lower_bound=-1.3)
    clean = kda_lab.forward(inputs, step=step, chunk=chunk)
    for token in (0, 20, 21, 36):  # first, last of a sequence with a tail, first of the next, last
        result = kda_lab.forward(poisoned(inputs, name, token_entry(name, 0, token), value), step=step, chunk=chunk)
        other, rows = (1, slice(21, 37)) if token < 21 else (0, slice(0, 21))
        assert torch.equal(bits(result.out[:, rows]), bits(clean.out[:, rows])), token
        assert torch.equal(bits(result.final_state[other]), bits(clean.final_state[other])), token


@pytest.mark.parametrize(("step", "chunk"), STEPS_AND_CHUNKS)
@pytest.mark.parametrize("name", ["v", "beta", "g"])
@pytest.mark.parametrize("token", [0, 15, 20, 39])
def test_a_nan_is_where_the_definition_has_it(step: str, chunk: int, name: str, token: int) -> None:
    inputs = make_inputs(B=2, T=40, H=3, lower_bound=-1.3, initial_state="fp32")
    assert_right(poisoned(inputs, name, token_entry(name, ROW, token), math.nan), step, chunk)


@pytest.mark.parametrize(("step", "chunk"), STEPS_AND_CHUNKS)
@pytest.mark.parametrize("value", VALUES)
def test_an_infinite_last_value_ends_in_the_state_that_the_definition_has(step: str, chunk: int, value: float) -> None:
    for T in (1, 8, 15, 16, 17, 33, 63, 64):
        inputs = make_inputs(T=T, H=2, K=20, V=24, lower_bound=-1.3)
        inputs = poisoned(inputs, "v", token_entry("v", 0, T - 1), value)
        state = kda_lab.forward(inputs, step=step, chunk=chunk).final_state
        assert compare.compare(state, reference.recurrent(inputs).final_state).same_nonfinite, T
