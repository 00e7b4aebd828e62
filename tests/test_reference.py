"""The float64 truth against the definition written out in scalars, its twin, and its chunk form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kda_lab import reference
from kda_lab.compare import assert_close
from kda_lab.inputs import REGIMES, Inputs, make_inputs

SHAPES = {
    "one token": dict(T=1),
    "tail": dict(T=37, H=3),
    "batch": dict(B=3, T=17, H=2, initial_state="fp32"),
    "K != V": dict(T=20, K=24, V=40, initial_state="bf16"),
    "packed": dict(seq_lens=[5, 0, 33, 16, 1], initial_state="fp32"),
    "packed, no state": dict(seq_lens=[0, 0, 16]),
    "no tokens": dict(seq_lens=[0], initial_state="bf16"),
}


def small(regime: str = "mixed", **shape) -> Inputs:
    """Inputs in which every parameter matters."""
    inputs = make_inputs(regime=regime, **{"K": 32, "V": 16, **shape})
    generator = torch.Generator().manual_seed(1)
    return inputs.with_(
        A_log=torch.randn(inputs.H, generator=generator) / 2,
        dt_bias=torch.randn(inputs.H, inputs.K, generator=generator) / 2,
        scale=0.3,
    )


def in_scalars(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The definition for one sequence (B = 1), one number at a time, with nothing but Python's math."""

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def unit(x: list[float]) -> list[float]:
        norm = math.sqrt(math.fsum(a * a for a in x) + 1e-6)
        return [a / norm for a in x]

    q, k, v, g, beta = (x[0].double().tolist() for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
    out = np.zeros((1, inputs.T, inputs.H, inputs.V))
    final_state = np.zeros((1, inputs.H, inputs.V, inputs.K))
    for h in range(inputs.H):
        steepness = math.exp(float(inputs.A_log[h]))
        S = inputs.initial_state[0, h].double().tolist()
        for t in range(inputs.T):
            q_hat, k_hat = unit(q[t][h]), unit(k[t][h])
            decay = [
                math.exp(inputs.lower_bound * sigmoid(steepness * (g[t][h][d] + float(inputs.dt_bias[h, d]))))
                for d in range(inputs.K)
            ]
            for row in range(inputs.V):
                S[row] = [s * a for s, a in zip(S[row], decay, strict=True)]
                predicted = math.fsum(s * b for s, b in zip(S[row], k_hat, strict=True))
                correction = sigmoid(beta[t][h]) * (v[t][h][row] - predicted)
                S[row] = [s + correction * b for s, b in zip(S[row], k_hat, strict=True)]
                out[0, t, h, row] = inputs.scale * math.fsum(s * a for s, a in zip(S[row], q_hat, strict=True))
        final_state[0, h] = S
    return out, final_state


def test_the_definition_in_scalars() -> None:
    inputs = small("forget", T=5, H=2, K=4, V=3, initial_state="fp32")
    out, final_state = in_scalars(inputs)
    result = reference.recurrent(inputs)
    assert_close(result.out, out, rms=1e-14)
    assert_close(result.final_state, final_state, rms=1e-14, name="final_state")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_torch_twin_is_equal(shape: dict) -> None:
    inputs = small(**shape)
    expected, twin = reference.recurrent(inputs), reference.recurrent_torch(inputs)
    assert twin.out.dtype == twin.final_state.dtype == torch.float64
    assert_close(twin.out, expected.out, rms=1e-13)
    assert_close(twin.final_state, expected.final_state, rms=1e-13, name="final_state")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_torch_twin_is_equal_on_a_gpu(shape: dict) -> None:
    inputs = small(**shape)
    expected, twin = reference.recurrent(inputs), reference.recurrent_torch(inputs, device="cuda")
    assert twin.out.device.type == twin.final_state.device.type == "cuda"
    assert_close(twin.out, expected.out, rms=1e-13)
    assert_close(twin.final_state, expected.final_state, rms=1e-13, name="final_state")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("chunk", [8, 16, 64])
def test_the_chunk_form_is_equal(shape: dict, chunk: int) -> None:
    inputs = small(**shape)
    expected, chunked = reference.recurrent(inputs), reference.chunked(inputs, chunk)
    assert_close(chunked.out, expected.out, rms=1e-12)
    assert_close(chunked.final_state, expected.final_state, rms=1e-12, name="final_state")


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("lower_bound", [0.0, -5.0, -1000.0])
def test_the_chunk_form_is_equal_in_every_regime(regime: str, lower_bound: float) -> None:
    inputs = make_inputs(T=70, H=2, regime=regime, lower_bound=lower_bound)
    expected, chunked = reference.recurrent(inputs), reference.chunked(inputs, 32)
    assert_close(chunked.out, expected.out, rms=1e-12)
    assert_close(chunked.final_state, expected.final_state, rms=1e-11, name="final_state")


def test_every_intermediate_is_what_its_symbol_says() -> None:
    inputs = small(T=40, initial_state="fp32")
    c = reference.chunked(inputs)
    decayed = np.exp(c.g_cumsum)
    identity = np.eye(16)
    beta = c.beta[..., None]
    close = dict(rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(np.diff(c.g_cumsum, axis=2), c.g[:, :, 1:], **close)
    np.testing.assert_allclose(c.k_decayed, c.k_hat * decayed, **close)
    np.testing.assert_allclose(c.q_decayed, inputs.scale * c.q_hat * decayed, **close)
    np.testing.assert_allclose(c.k_inv, c.k_hat / decayed, **close)
    np.testing.assert_allclose(c.k_restored, c.k_inv * decayed[:, :, -1:], **close)
    # The pairwise products equal the factored ones while those are in range.
    np.testing.assert_allclose(c.L, np.tril(beta * (c.k_decayed @ c.k_inv.swapaxes(-1, -2)), -1), **close)
    np.testing.assert_allclose(c.Mqk, np.tril(c.q_decayed @ c.k_inv.swapaxes(-1, -2)), **close)
    np.testing.assert_allclose(c.INV @ (identity + c.L), np.broadcast_to(identity, c.L.shape), **close)
    np.testing.assert_allclose((identity + c.L) @ c.w, beta * c.k_decayed, **close)
    np.testing.assert_allclose(c.U, c.u - c.w @ c.state.swapaxes(-1, -2), **close)
    assert c.sequence.tolist() == [0, 0, 0]
    assert c.first_token.tolist() == [0, 16, 32]
    assert c.tokens.tolist() == [16, 16, 8]
    assert not c.k_hat[2, :, 8:].any()


@pytest.mark.parametrize("A_log", [88.0, 88.75, 200.0, 1e30])
@pytest.mark.parametrize("form", [reference.recurrent, reference.recurrent_torch, reference.chunked])
def test_a_gate_that_overflows_saturates(A_log: float, form) -> None:
    inputs = make_inputs(T=20, H=2, K=32, V=16, regime="forget", initial_state="fp32")
    g = inputs.g.clone()
    g[:, :, :, :4] = 0.0  # where g + dt_bias = 0 the argument is 0, so the log-decay is half of lower_bound
    result = form(inputs.with_(g=g, A_log=torch.full((2,), A_log)))
    # exp(88) is steep enough: the smallest |g| of bf16 N(0, 1) noise makes the sigmoid 0 or 1.
    expected = reference.recurrent(inputs.with_(g=g, A_log=torch.full((2,), 60.0)))
    assert_close(result.out, expected.out, rms=1e-12)
    assert_close(result.final_state, expected.final_state, rms=1e-12, name="final_state")


def test_no_decay_keeps_the_state_exactly() -> None:
    inputs = make_inputs(T=9, H=2, K=32, V=16, lower_bound=0.0, initial_state="fp32")
    inputs = inputs.with_(k=torch.zeros_like(inputs.k))
    assert np.array_equal(reference.recurrent(inputs).final_state, inputs.initial_state.double().numpy())


def test_a_nan_reaches_only_its_own_channel_and_later_rows() -> None:
    inputs = make_inputs(B=2, T=12, H=2, K=32, V=16)
    v = inputs.v.clone()
    v[0, 5, 1, 7] = float("nan")
    expected, result = reference.recurrent(inputs), reference.recurrent(inputs.with_(v=v))
    should_be_nan = np.zeros(expected.out.shape, dtype=bool)
    should_be_nan[0, 5:, 1, 7] = True
    assert np.array_equal(np.isnan(result.out), should_be_nan)
    assert np.array_equal(result.out[~should_be_nan], expected.out[~should_be_nan])


def test_the_inputs_are_left_alone() -> None:
    inputs = small(T=5, initial_state="fp32")
    before = inputs.initial_state.clone()
    reference.recurrent(inputs)
    reference.recurrent_torch(inputs)
    reference.chunked(inputs)
    assert torch.equal(inputs.initial_state, before)


def test_keys_of_zeros_are_normalised_with_epsilon_inside_the_root() -> None:
    inputs = make_inputs(T=3, H=1, K=4, V=4)
    k = torch.zeros_like(inputs.k)
    k[0, 1] = 1e-3  # |k|^2 = 4e-6, of the size of epsilon
    q_hat, k_hat, _, _ = reference.activate(inputs.with_(k=k))
    value = float(torch.tensor(1e-3).bfloat16())
    assert not k_hat[0].any()
    assert k_hat[1, 0, 0] == pytest.approx(value / math.sqrt(4 * value**2 + 1e-6), rel=1e-12)
    assert np.linalg.norm(q_hat, axis=-1) == pytest.approx(1.0, abs=1e-5)
