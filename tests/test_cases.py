"""Inputs that broke kernels like this one, on every CPU step: each class of them, not only the reported instance.

Unless a test says otherwise: D = 128, A_log = 0, dt_bias = 0, scale = 128^-0.5.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from ladder import ANY_BOUND, CHUNKS, STEPS, STEPS_AND_CHUNKS, assert_right
from torch import Tensor

import kda_lab
from kda_lab import compare, ops, reference, rounding
from kda_lab.inputs import Inputs, Result, make_inputs

FACTORED = tuple(step for step in STEPS if step not in ANY_BOUND)
NAN = float("nan")


def run_fwd(inputs: Inputs, step: str = "fused_two_kernel", **changes) -> Result:
    """kda_lab.fwd with out and an fp32 final state of its own."""
    out = inputs.new_out()
    final_state = torch.empty(inputs.N, inputs.H, inputs.V, inputs.K)
    arguments = {**vars(inputs), "out": out, "final_state": final_state, **changes}
    kda_lab.fwd(**arguments, step=step)
    return Result(out, final_state)


def test_these_are_the_steps_and_chunks_of_the_library() -> None:
    cpu = [step for step in kda_lab.steps() if "cpu" in step.devices]
    assert tuple(step.slug for step in cpu) == STEPS
    assert {step.slug: tuple(step.chunks["cpu"]) or (16,) for step in cpu} == CHUNKS


# Range of the gate


@pytest.mark.parametrize("step", ANY_BOUND)
@pytest.mark.parametrize("lower_bound", [-5.45, -5.55, -6.0, -20.0, -1000.0])
def test_pairwise_steps_are_right_at_any_bound(step: str, lower_bound: float) -> None:
    inputs = make_inputs(T=48, regime="saturated", lower_bound=lower_bound, initial_state="fp32")
    for chunk in CHUNKS[step]:
        assert_right(inputs, step, chunk)


@pytest.mark.parametrize("step", FACTORED)
def test_factored_steps_are_right_up_to_their_limit(step: str) -> None:
    for chunk in CHUNKS[step]:
        limit = ops.lower_bound_limit(step, chunk)
        assert limit == pytest.approx(-87 / chunk)
        for regime in ("saturated", "forget", "mixed", "retain"):
            assert_right(make_inputs(T=48, regime=regime, lower_bound=limit, initial_state="fp32"), step, chunk)


@pytest.mark.parametrize(("step", "chunk"), [(step, chunk) for step in FACTORED for chunk in CHUNKS[step]])
def test_beyond_its_limit_a_factored_step_refuses(step: str, chunk: int) -> None:
    limit = -87 / chunk
    inputs = make_inputs(T=64, regime="saturated", lower_bound=limit * 1.03)
    with pytest.raises(ValueError, match=f"lower_bound.*{step}.*chunk {chunk} can represent {limit:g}.*allow_unsafe"):
        kda_lab.forward(inputs, step=step, chunk=chunk)
    # Past the limit exp(-G) is infinite in fp32 in the last row of a full chunk, and running it anyway shows that.
    out = kda_lab.forward(inputs, step=step, chunk=chunk, allow_unsafe=True).out
    assert not torch.isfinite(out[:, chunk - 1]).all()


@pytest.mark.parametrize("step", STEPS)
def test_no_step_takes_a_bound_below_minus_1000(step: str) -> None:
    inputs = make_inputs(T=4, lower_bound=-1000.5)
    with pytest.raises(ValueError, match=r"lower_bound is -1000\.5"):
        kda_lab.forward(inputs, step=step)


@pytest.mark.parametrize("step", STEPS)
def test_gates_of_a_trained_model(step: str) -> None:
    inputs = make_inputs(T=64, regime="forget", initial_state="fp32")
    heads = torch.tensor([1.0, 20.0, 201.0, 0.02])
    g = inputs.g.float() * 30
    g[0, ::7, :, ::5] = 2661.0
    g[0, 1::7, :, ::5] = -2661.0
    assert_right(inputs.with_(A_log=heads.log(), g=g.bfloat16()), step)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("A_log", [88.0, 88.73, 89.0, 300.0, 3e38])
def test_a_steepness_that_overflows_saturates(step: str, A_log: float) -> None:
    inputs = make_inputs(T=20, regime="forget", initial_state="fp32")
    g, dt_bias = inputs.g.clone(), inputs.dt_bias.clone()
    g[:, ::3] = 0.0  # the argument is 0 here, and infinity times 0 is not
    g[:, 1::3, :, 64:] = 1.5
    dt_bias[:, 64:] = -1.5  # and here
    assert_right(inputs.with_(A_log=torch.full((4,), A_log), g=g, dt_bias=dt_bias), step)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("A_log", [88.5, 90.0, 100.0, 1000.0])
@pytest.mark.parametrize("logit", [-1e-36, -1e-38, -1e-40, 1e-38, 1e-36])
def test_a_gate_is_as_steep_as_fp32_can_make_it(step: str, A_log: float, logit: float) -> None:
    """Steeper ones are taken for that, which their documentation says; steps in base 2 have log2(e) in the slope."""
    inputs = make_inputs(T=20, initial_state="fp32")
    inputs = inputs.with_(A_log=torch.full((4,), A_log), g=torch.full_like(inputs.g, logit))
    steepest = math.log(torch.finfo(torch.float32).max)
    if step not in ("token_by_token", "naive_exp"):
        steepest -= math.log(math.log2(math.e))
    as_steep = inputs.with_(A_log=torch.full((4,), min(A_log, steepest), dtype=torch.float64))
    assert_right(inputs, step, expected=reference.recurrent(as_steep))
    if abs(logit) > 1e-37:
        assert_right(inputs, step)


@pytest.mark.parametrize("step", STEPS)
def test_bounds_that_are_no_bounds(step: str) -> None:
    inputs = make_inputs(T=20, initial_state="fp32")
    with pytest.raises(TypeError, match="lower_bound is None; expected a number"):
        kda_lab.forward(inputs.with_(lower_bound=None), step=step)
    for bound in (NAN, math.inf, -math.inf):
        with pytest.raises(ValueError, match=f"lower_bound is {bound}"):
            kda_lab.forward(inputs.with_(lower_bound=bound), step=step, allow_unsafe=True)
    for bound in (0.5, 2.0):
        with pytest.raises(ValueError, match=f"lower_bound is {bound}; expected 0 or negative"):
            kda_lab.forward(inputs.with_(lower_bound=bound), step=step)
        assert_right(inputs.with_(lower_bound=bound), step, allow_unsafe=True, state_rms=1e-4)  # grows e^40-fold


@pytest.mark.parametrize("step", STEPS)
def test_bound_0_is_no_decay_exactly(step: str) -> None:
    inputs = make_inputs(T=40, lower_bound=0.0, initial_state="fp32")
    assert_right(inputs, step)
    kept = kda_lab.forward(inputs.with_(k=torch.zeros_like(inputs.k)), step=step).final_state
    assert torch.equal(kept, inputs.initial_state)


@pytest.mark.parametrize(("step", "chunk"), STEPS_AND_CHUNKS)
@pytest.mark.parametrize("gate", [-12.0, -3.0, 0.0, 1.0])
def test_constant_gates_over_a_chunk_boundary(step: str, chunk: int, gate: float) -> None:
    """Natural exp and exp2 mixed between two paths would show here."""
    inputs = make_inputs(T=17, lower_bound=-1.3, initial_state="fp32")
    assert_right(inputs.with_(g=torch.full_like(inputs.g, gate)), step, chunk)


# The inverse


@functools.cache
def collinear(T: int, H: int, correlation: float) -> tuple[Inputs, Result]:
    inputs = make_inputs(T=T, H=H, regime="collinear", key_correlation=correlation, initial_state="fp32")
    return inputs, reference.recurrent(inputs)


@pytest.mark.parametrize(
    ("step", "chunk"), [(step, chunk) for step, chunk in STEPS_AND_CHUNKS if step in ANY_BOUND or 5 * chunk <= 87]
)
@pytest.mark.parametrize("correlation", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("T", [64, 256])
def test_keys_that_resemble_each_other(step: str, chunk: int, correlation: float, T: int) -> None:
    inputs, expected = collinear(T, 4, correlation)
    assert_right(inputs, step, chunk, expected=expected)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("correlation", [0.9, 1.0])
def test_keys_that_resemble_each_other_for_16384_tokens(step: str, correlation: float) -> None:
    inputs, expected = collinear(16384, 1, correlation)
    assert_right(inputs, step, expected=expected, state_rms=5e-4)


# Shapes


@pytest.mark.parametrize(("step", "chunk"), STEPS_AND_CHUNKS)
@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 33, 37, 63, 97])
def test_lengths_that_are_no_multiple_of_a_chunk(step: str, chunk: int, T: int) -> None:
    # Three batch rows, odd H and T: rows of beta are at odd offsets.
    assert_right(make_inputs(B=3, T=T, H=5, K=32, V=32, lower_bound=-1.3, initial_state="fp32"), step, chunk)


@pytest.mark.parametrize("step", STEPS)
def test_a_long_odd_length(step: str) -> None:
    assert_right(make_inputs(T=1500, H=3, initial_state="bf16"), step)


EMPTY = [[0, 16], [16, 0, 16], [0], [0, 0, 5, 0]]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seq_lens", EMPTY, ids=str)
@pytest.mark.parametrize("state", [None, "fp32", "bf16"])
def test_empty_sequences(step: str, seq_lens: list[int], state: str | None) -> None:
    inputs = make_inputs(seq_lens=seq_lens, H=3, initial_state=state)
    result = assert_right(inputs, step)
    assert tuple(result.out.shape) == (1, sum(seq_lens), 3, 128)
    for n, length in enumerate(seq_lens):
        if length == 0:
            kept = torch.zeros_like(result.final_state[n]) if state is None else inputs.initial_state[n]
            assert torch.equal(result.final_state[n], kept)


ZEROS = [{"B": 0}, {"T": 0}, {"H": 0}, {"B": 0, "T": 0}, {"B": 0, "H": 0}, {"T": 0, "H": 0}]
ZEROS += [{"seq_lens": []}, {"seq_lens": [0]}, {"seq_lens": [0, 0], "H": 0}, {"seq_lens": [3, 0, 17], "H": 0}]


@pytest.mark.parametrize("sizes", ZEROS, ids=str)
@pytest.mark.parametrize("state", [None, "fp32", "bf16"])
def test_sizes_of_zero(sizes: dict, state: str | None) -> None:
    """What has no element has its shape, and the state of a sequence without tokens stays, for all who compute it."""
    inputs = make_inputs(**{"B": 1, "T": 20, "H": 2, "K": 8, "V": 16, "initial_state": state, **sizes})
    expected = reference.recurrent(inputs)
    assert expected.out.shape == (inputs.B, inputs.T, inputs.H, 16)
    assert expected.final_state.shape == (inputs.N, inputs.H, 16, 8)
    for step, chunk in STEPS_AND_CHUNKS:
        assert_right(inputs, step, chunk, expected=expected, allow_unsafe=True)
    others = reference.recurrent_torch(inputs), reference.chunked(inputs), rounding.forward(inputs)
    for other in others:
        assert compare.relative_rms(other.out, expected.out) == 0
        assert compare.relative_rms(other.final_state, expected.final_state) < 3e-3


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("K", "V"), [(0, 8), (8, 0), (0, 0)])
def test_keys_and_values_have_a_size(step: str, K: int, V: int) -> None:
    inputs = make_inputs(T=20, H=2, K=8, V=8)
    inputs = inputs.with_(**{name: getattr(inputs, name)[..., :K] for name in ("q", "k", "g", "dt_bias")})
    inputs = inputs.with_(v=inputs.v[..., :V])
    with pytest.raises(ValueError, match=r"[KV] is 0; expected 1 to"):
        kda_lab.forward(inputs, step=step)
    assert not reference.recurrent(inputs).out.any()  # the definition has nothing against them


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_dtypes_of_offsets_and_strided_ones(step: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(seq_lens=[20, 5, 33], H=3, initial_state="fp32")
    offsets = inputs.cu_seqlens.to(dtype)
    strided = torch.stack([offsets, torch.full_like(offsets, 7)], dim=1)[:, 0]
    assert not strided.is_contiguous()
    expected = reference.recurrent(inputs)
    assert_right(inputs.with_(cu_seqlens=offsets), step, expected=expected)
    assert_right(inputs.with_(cu_seqlens=strided), step, expected=expected)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 20, 40], r"cu_seqlens\[0\] is 1; expected 0"),
        ([-1, 20, 40], r"cu_seqlens\[0\] is -1"),
        ([0, 30, 20, 40], r"cu_seqlens\[2\] is 20, less than cu_seqlens\[1\] = 30"),
        ([0, 20, 39], r"cu_seqlens\[2\].* is 39; expected T = 40"),
        ([0, 20, 41], r"cu_seqlens\[2\].* is 41; expected T = 40"),
    ],
)
def test_wrong_offsets_are_named(step: str, offsets: list[int], message: str) -> None:
    inputs = make_inputs(seq_lens=[40], H=2)
    with pytest.raises(ValueError, match=message):
        kda_lab.forward(inputs.with_(cu_seqlens=torch.tensor(offsets)), step=step)


@pytest.mark.parametrize("step", STEPS)
def test_offsets_need_a_single_batch_row(step: str) -> None:
    inputs = make_inputs(B=2, T=20, H=2)
    with pytest.raises(ValueError, match="2 batch rows and cu_seqlens"):
        kda_lab.forward(inputs.with_(cu_seqlens=torch.tensor([0, 20])), step=step)


@pytest.mark.parametrize(("step", "chunk"), STEPS_AND_CHUNKS)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (256, 32), (1, 1), (7, 130), (33, 5)])
def test_any_key_and_value_size(step: str, chunk: int, K: int, V: int) -> None:
    assert_right(make_inputs(T=37, H=3, K=K, V=V, lower_bound=-1.3, initial_state="fp32"), step, chunk)


# Layout and precision


@pytest.mark.parametrize("step", STEPS)
def test_the_state_is_value_by_key(step: str) -> None:
    inputs = make_inputs(T=16, H=2)
    state = torch.arange(128.0)[:, None] + torch.arange(128.0)[None, :] / 1000
    inputs = inputs.with_(initial_state=state.expand(1, 2, 128, 128).contiguous())
    assert_right(inputs, step)
    transposed = inputs.with_(initial_state=inputs.initial_state.mT.contiguous())
    with pytest.raises(AssertionError):  # K = V, so nothing but the numbers tells
        assert_right(transposed, step, expected=reference.recurrent(inputs))


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([x, torch.full_like(x, NAN)], dim=-1)[..., : x.shape[-1]],
    "every other token": lambda x: torch.stack([x, torch.full_like(x, NAN)], dim=2).flatten(1, 2)[:, ::2],
    "unaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED)
def test_views_are_read_as_what_they_are(step: str, view: Callable[[Tensor], Tensor]) -> None:
    inputs = make_inputs(T=20, H=3)
    expected = reference.recurrent(inputs)
    views = {name: view(getattr(inputs, name)) for name in ("q", "k", "v", "g")}
    for name, x in views.items():
        assert torch.equal(x, getattr(inputs, name))
        assert_right(inputs.with_(**{name: x}), step, expected=expected)
    assert_right(inputs.with_(**views), step, expected=expected)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["out", "final_state"])
def test_what_is_written_must_be_contiguous(step: str, name: str) -> None:
    inputs = make_inputs(T=8, H=2)
    wanted = inputs.new_out() if name == "out" else torch.empty(1, 2, 128, 128)
    with pytest.raises(ValueError, match=f"{name} has strides .*contiguous"):
        run_fwd(inputs, step, **{name: wanted.mT.contiguous().mT})


@pytest.mark.parametrize("step", STEPS)
def test_an_fp32_state_keeps_what_bf16_would_lose(step: str) -> None:
    inputs = make_inputs(T=40, H=2, lower_bound=0.0)
    inputs = inputs.with_(
        beta=torch.full_like(inputs.beta, -30.0), initial_state=torch.full((1, 2, 128, 128), 1 + 2**-9)
    )
    assert kda_lab.forward(inputs, step=step).final_state == pytest.approx(1 + 2**-9, abs=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_a_state_may_be_updated_in_place(step: str) -> None:
    inputs = make_inputs(T=20, H=2, initial_state="fp32")
    expected = run_fwd(inputs, step)
    state = inputs.initial_state.clone()
    result = run_fwd(inputs, step, initial_state=state, final_state=state)
    assert torch.equal(result.out, expected.out)
    assert torch.equal(state, expected.final_state)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("magnitude", [1e-36, 1e-30, 1e4, 1e30])
def test_tiny_and_large_values(step: str, magnitude: float) -> None:
    inputs = make_inputs(T=40)
    assert_right(inputs.with_(v=(inputs.v.float() * magnitude).bfloat16()), step)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "magnitude", [1e-39, 1e-36, 1e-30, 1e-20, 1e-10, 1e-5, 1e-4, 1e-3, 1e4, 1e18, 1e19, 1e30, 5e37]
)
@pytest.mark.parametrize("regime", ["mixed", "saturated"])
def test_queries_and_keys_of_any_length(step: str, magnitude: float, regime: str) -> None:
    """Short ones stay short, for the epsilon under the root; squares of long and of short ones are beyond fp32."""
    inputs = make_inputs(T=40, regime=regime, initial_state="fp32")
    k = inputs.k.clone()
    k[:, ::2] = (k[:, ::2].float() * magnitude).bfloat16()
    assert_right(inputs.with_(k=k, q=(inputs.q.float() * magnitude).bfloat16()), step)
    assert_right(inputs.with_(k=(inputs.k.float() * magnitude).bfloat16()), step)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-10, -1.0, 0.0, 1e10, 1e30])
def test_any_scale(step: str, scale: float) -> None:
    assert_right(make_inputs(T=40, regime="saturated", scale=scale), step)


@pytest.mark.parametrize("step", STEPS)
def test_rows_of_zeros(step: str) -> None:
    inputs = make_inputs(T=40, initial_state="fp32")
    q, k = inputs.q.clone(), inputs.k.clone()
    q[:, 3], k[:, 5], q[:, 20], k[:, 20] = 0, 0, 0, 0
    result = assert_right(inputs.with_(q=q, k=k), step)
    assert not result.out[:, [3, 20]].any()
