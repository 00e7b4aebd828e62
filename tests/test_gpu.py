"""Every CUDA step against float64: regimes, shapes, packed sequences, states, NaN, graphs, streams, golden cases.

The steps come from csrc/steps.def, so a new one is covered as soon as it is listed. What `fwd` itself does on a GPU
(views, devices, torch.compile, waiting for nothing) is in test_ops_gpu.py.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import golden
import pytest
import torch

import kda_lab
from kda_lab import microbench, native, reference
from kda_lab.compare import assert_close, output_tolerance, relative_rms, state_tolerance
from kda_lab.inputs import REGIMES, Inputs, Result, make_inputs
from kda_lab.native.library import I64

pytestmark = pytest.mark.gpu

# Largest relative RMS error of a tensor-core step's output. fp32 steps are held to what their output's rounding costs.
TENSOR_CORE_OUT = {"forget": 6e-3, "mixed": 6e-3, "saturated": 6e-3, "retain": 8e-3, "collinear": 3e-2}
TENSOR_CORE_CORRELATED = {0.5: 8e-3, 0.9: 1.5e-2, 1.0: 3e-2}  # by the cosine between keys
STATE_TO_OUT = 2.0  # their final state's error against the output's: it is the sum of what single outputs average

FP32_STEPS = (0, 1, 2, 3)
PAIRWISE_STEPS = (0, 1, 2)  # right at any lower_bound


def _ladder() -> list[tuple[int, int]]:
    """(step, chunk) of everything that runs on CUDA. A step without chunks takes any."""
    text = (native.csrc_dir() / "steps.def").read_text()
    found = re.findall(r"^KDA_STEP\((\d+), \w+, ([^,]*), [^,]*, ([^,]*),", text, flags=re.MULTILINE)
    return [
        (int(number), int(chunk) or 16)
        for number, devices, chunks in found
        if "CUDA" in devices
        for chunk in chunks.split("|")
    ]


LADDER = _ladder()
STEPS = sorted({step for step, _ in LADDER})
every_step = pytest.mark.parametrize("step", STEPS)
every_step_and_chunk = pytest.mark.parametrize(("step", "chunk"), LADDER)


def bound_for(step: int, chunk: int) -> float:
    """-5, or as much of it as a factored step can represent at this chunk size."""
    return -5.0 if step in PAIRWISE_STEPS or chunk == 16 else -80.0 / chunk


def run(inputs: Inputs, step: int, chunk: int = 16, **options: Any) -> Result:
    return kda_lab.forward(inputs, step=step, chunk=chunk, **options)


def assert_right(inputs: Inputs, step: int, chunk: int = 16, *, rms: float = 6e-3, **options: Any) -> Result:
    """Runs a step on the GPU and holds it against float64; `rms` is the limit of the output of a tensor-core step."""
    inputs = inputs.to("cuda")
    result = run(inputs, step, chunk, **options)
    out, final_state = (x.cpu() for x in reference.recurrent_torch(inputs))
    out_rms, state_rms = rms, STATE_TO_OUT * rms
    if step in FP32_STEPS:
        out_rms, state_rms = output_tolerance(out), state_tolerance(final_state, result.final_state.dtype)
    assert_close(result.out.cpu(), out, rms=out_rms, name=f"out of step {step}, chunk {chunk}")
    assert_close(result.final_state.cpu(), final_state, rms=state_rms, name=f"final_state of step {step}")
    return result


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


# ---- Numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("regime", REGIMES)
@every_step_and_chunk
def test_every_regime(step: int, chunk: int, regime: str) -> None:
    inputs = make_inputs(2, 250, 4, regime=regime, lower_bound=bound_for(step, chunk), initial_state="fp32")
    assert_right(inputs, step, chunk, rms=TENSOR_CORE_OUT[regime])


@pytest.mark.parametrize("T", [1, 15, 16, 17, 31, 33, 37, 63, 97, 1500])
@every_step_and_chunk
def test_lengths_that_are_no_multiple_of_a_chunk(step: int, chunk: int, T: int) -> None:
    heads = 57 if T < 16 else 5  # an error is judged on at least 4 heads x 16 tokens; odd, so beta's rows are uneven
    assert_right(make_inputs(2, T, heads, lower_bound=bound_for(step, chunk)), step, chunk)


@pytest.mark.parametrize("seq_lens", [None, (0, 30, 100, 0, 17, 33)])
@every_step
def test_more_work_than_the_chip_holds_at_once(step: int, seq_lens: tuple[int, ...] | None) -> None:
    assert_right(make_inputs(1, 180, 500, seq_lens=seq_lens, initial_state="fp32"), step)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.95, 1.2])
def test_every_way_to_divide_a_head(share: float, precise: bool) -> None:
    """Step 6 cuts heads in two while the chip has room for all halves; near that limit two share their copies."""
    heads = int(share * torch.cuda.get_device_properties(0).multi_processor_count / 2 / 3)
    inputs = make_inputs(H=heads, seq_lens=(0, 150, 77), regime="retain", initial_state="fp32")
    result = assert_right(inputs, 6, precise=precise, rms=TENSOR_CORE_OUT["retain"])
    again = run(inputs.to("cuda"), 6, precise=precise)
    assert same_bits(result.out, again.out)
    assert same_bits(result.final_state, again.final_state)


WIDE_BOUND = -10.4  # what step 6 can represent at chunk 16: exponents relative to the middle row
register_state = pytest.mark.parametrize("D", [64, 128])


def workspace_of(inputs: Inputs, precise: bool = False) -> int:
    """Bytes between the kernels of step 6: none where it is one kernel."""
    sizes = {name: getattr(inputs, name) for name in ("B", "T", "H", "K", "V", "N")}
    args = native.KdaArgs(struct_bytes=ctypes.sizeof(native.KdaArgs), chunk=16, precise=precise, **sizes)
    if inputs.cu_seqlens is not None:
        args.cu_seqlens, args.cu_seqlens_dtype = inputs.cu_seqlens.data_ptr(), I64
    return native.load("cuda").workspace_bytes(6, args)


@pytest.mark.parametrize(
    ("sizes", "fused"),
    [
        ({"B": 2, "T": 16, "H": 57}, True),
        ({"B": 2, "T": 17, "H": 57}, False),
        ({"B": 1, "T": 16, "H": 115}, False),
        ({"B": 2, "T": 16, "H": 57, "K": 64, "V": 64}, False),
        ({"seq_lens": (0, 9, 7), "H": 38}, True),
        ({"seq_lens": (1, 9, 7), "H": 38}, False),  # the host does not know that no sequence is longer
    ],
)
def test_which_calls_are_one_kernel(sizes: dict[str, Any], fused: bool) -> None:
    assert (workspace_of(make_inputs(**sizes)) == 0) == fused


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("lower_bound", [-5.0, WIDE_BOUND])
@pytest.mark.parametrize("lengths", [(1,), (16,), (0, 7, 9), (13, 0, 2)])
def test_one_kernel_for_one_chunk_gives_the_bits_of_two(
    lengths: tuple[int, ...], lower_bound: float, precise: bool
) -> None:
    """Step 6 fuses its kernels for up to 16 tokens, but not with more heads than run at once."""
    few = make_inputs(H=24, seq_lens=lengths, lower_bound=lower_bound, regime="mixed", initial_state="fp32").to("cuda")
    fused = assert_right(few, 6, precise=precise, rms=6e-3)
    heads_of = {"q": 2, "k": 2, "v": 2, "g": 2, "beta": 2, "A_log": 0, "dt_bias": 0, "initial_state": 1}
    many = few.with_(**{name: torch.cat([getattr(few, name)] * 10, dim) for name, dim in heads_of.items()})
    assert (workspace_of(few, precise), workspace_of(many, precise) > 0) == (0, True), "one of them is fused, one not"
    in_two = run(many, 6, precise=precise)
    assert same_bits(in_two.out[:, :, -24:], fused.out)
    assert same_bits(in_two.final_state[:, -24:], fused.final_state)


@register_state
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("lower_bound", [-5.2, -5.21, WIDE_BOUND])
@pytest.mark.parametrize("regime", ["forget", "mixed", "saturated"])
def test_bounds_beyond_what_exponents_from_the_chunks_start_can_hold(
    regime: str, lower_bound: float, precise: bool, D: int
) -> None:
    inputs = make_inputs(2, 150, 3, D, D, regime=regime, lower_bound=lower_bound, initial_state="fp32")
    assert_right(inputs, 6, precise=precise)
    packed = make_inputs(H=3, K=D, V=D, seq_lens=(0, 30, 100, 0, 17), regime=regime, lower_bound=lower_bound)
    assert_right(packed, 6, precise=precise)


def test_a_bound_below_what_step_6_can_represent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"can represent -10\.4 to 0"):
        run(make_inputs(1, 16, 1, lower_bound=-10.41, device="cuda"), 6)


@register_state
def test_relative_to_the_middle_row_no_chunk_sees_a_later_one(D: int) -> None:
    """Within a chunk outputs depend on the chunk's gates, to rounding only; across chunks not by a bit."""
    inputs = make_inputs(1, 64, 2, D, D, lower_bound=WIDE_BOUND, device="cuda")
    g = inputs.g.clone()
    g[:, 37:] = 30.0
    before, after = run(inputs, 6).out, run(inputs.with_(g=g), 6).out
    assert same_bits(before[:, :32], after[:, :32])
    assert relative_rms(after[:, 32:37].cpu(), before[:, 32:37].cpu()) < 6e-3
    assert not same_bits(before[:, 37:], after[:, 37:])


@register_state
@pytest.mark.parametrize("logit", [-12.0, -9.0, -6.0])
def test_precise_keys_do_not_drift(logit: float, D: int) -> None:
    """Identical keys, at decays where keys rounded to bf16 go wrong; the recorded ladder has 16384 tokens."""
    inputs = make_inputs(1, 2048, 4, D, D, regime="collinear", device="cuda")
    inputs = inputs.with_(g=torch.full_like(inputs.g, logit))
    expected = reference.recurrent_torch(inputs)
    precise = run(inputs, 6, precise=True)
    assert relative_rms(precise.out.cpu(), expected.out.cpu()) < 1e-2
    assert relative_rms(precise.final_state.cpu(), expected.final_state.cpu()) < 2e-2
    if logit == -9.0:
        assert relative_rms(run(inputs, 6).out.cpu(), expected.out.cpu()) > 5e-2


def test_keys_that_are_equal_stay_equal() -> None:
    """With decays that round away in a chunk the default is as good as `precise`: k^ is rounded before they come in."""
    inputs = make_inputs(1, 2048, 4, regime="collinear", device="cuda")
    expected = reference.recurrent_torch(inputs)
    assert relative_rms(run(inputs, 6).out.cpu(), expected.out.cpu()) < 1e-2


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("T", [1, 17, 1500])
def test_precise_in_every_regime(T: int, regime: str) -> None:
    assert_right(make_inputs(1, T, 4, regime=regime), 6, rms=min(TENSOR_CORE_OUT[regime], 1e-2), precise=True)


@every_step
def test_precise_is_no_news_to_steps_in_fp32_and_refused_by_those_that_cannot(step: int) -> None:
    inputs = make_inputs(1, 100, 4, regime="collinear", device="cuda")
    if step in (4, 5):
        with pytest.raises(NotImplementedError, match="use register_state"):
            run(inputs, step, precise=True)
    else:
        assert same_bits(run(inputs, step, precise=True).out, run(inputs, step).out) is (step in FP32_STEPS)


@pytest.mark.slow
@every_step
def test_decays_near_1_for_16384_tokens(step: int) -> None:
    inputs = make_inputs(1, 16384, 4, regime="retain").to("cuda")
    result, expected = run(inputs, step), reference.recurrent_torch(inputs)
    limit = output_tolerance(expected.out.cpu()) if step in FP32_STEPS else TENSOR_CORE_OUT["retain"]
    assert relative_rms(result.out.cpu(), expected.out.cpu()) <= limit


@pytest.mark.parametrize("correlation", list(TENSOR_CORE_CORRELATED))
@every_step_and_chunk
def test_keys_that_resemble_each_other(step: int, chunk: int, correlation: float) -> None:
    inputs = make_inputs(1, 256, 4, regime="collinear", key_correlation=correlation, lower_bound=bound_for(step, chunk))
    assert_right(inputs, step, chunk, rms=TENSOR_CORE_CORRELATED[correlation])


@pytest.mark.parametrize("lower_bound", [0.0, -1.0, -20.0, -1000.0])
@every_step
def test_pairwise_steps_are_right_at_any_bound(step: int, lower_bound: float) -> None:
    if step not in PAIRWISE_STEPS and lower_bound < -5:
        with pytest.raises(ValueError, match="lower_bound"):
            run(make_inputs(1, 32, 1, lower_bound=lower_bound, device="cuda"), step)
        return
    assert_right(make_inputs(1, 60, 4, regime="saturated", lower_bound=lower_bound), step)


@every_step
def test_gates_of_a_trained_model(step: int) -> None:
    inputs = make_inputs(1, 100, 4, regime="forget")
    steep = inputs.with_(
        g=(inputs.g.float() * 900).bfloat16(),
        A_log=torch.tensor([-3.0, 0.0, 2.0, 5.3]),
        dt_bias=torch.linspace(-6, 3, 4 * 128).reshape(4, 128),
    )
    assert_right(steep, step)


@pytest.mark.parametrize("A_log", [88.8, 1000.0])
@every_step
def test_a_steepness_that_overflows_saturates(step: int, A_log: float) -> None:
    inputs = make_inputs(1, 40, 4)
    g = inputs.g.clone()
    g[:, ::3] = 0.0  # times exp(A_log) = inf
    assert_right(inputs.with_(A_log=torch.full((4,), A_log), g=g), step)


@every_step
def test_a_large_bias_does_not_decide_alone(step: int) -> None:
    """exp(A_log) dt_bias overflows, g lies on either side of it."""
    inputs = make_inputs(1, 40, 4)
    g = torch.full_like(inputs.g, 1000.0)
    g[:, ::3] = -1000.0
    bias = torch.tensor([300.0, -300.0]).repeat(4, 64)
    assert_right(inputs.with_(A_log=torch.full((4,), 88.7), dt_bias=bias, g=g), step, rms=8e-3)


@pytest.mark.parametrize("magnitude", [1e-30, 1e4])
@every_step
def test_tiny_and_large_values(step: int, magnitude: float) -> None:
    inputs = make_inputs(1, 100, 4)
    assert_right(inputs.with_(v=(inputs.v.double() * magnitude).bfloat16()), step)


def with_all_values(inputs: Inputs) -> Inputs:
    """The golden cases hold a few of their 128 value channels, which never meet; CUDA steps want all: the rest is 0."""
    missing = inputs.K - inputs.V
    state = inputs.initial_state
    return inputs.with_(
        v=torch.nn.functional.pad(inputs.v, (0, missing)),
        initial_state=None if state is None else torch.nn.functional.pad(state, (0, 0, 0, missing)),
    )


@every_step
def test_golden_case(golden_case: golden.GoldenCase, step: int) -> None:
    case, inputs = golden_case, golden_case.inputs
    if step not in PAIRWISE_STEPS and inputs.lower_bound < -5.2:
        pytest.skip(f"lower_bound {inputs.lower_bound} is beyond what a factored step can represent")
    result = run(with_all_values(inputs), step, device="cuda", allow_unsafe=inputs.lower_bound > 0)
    out = result.out.cpu()[..., : inputs.V]
    if step in FP32_STEPS:
        assert_close(out, case.fp64_out, rms=output_tolerance(case.fp64_out))
        if case.fp64_final_state is not None:
            limit = state_tolerance(case.fp64_final_state, result.final_state.dtype)
            final_state = result.final_state.cpu()[..., : inputs.V, :]
            assert_close(final_state, case.fp64_final_state, rms=limit, name="final_state")
        return
    good = case.fp64_out.isfinite() & case.peer_out.isfinite()
    if not case.fp64_out.isfinite().all():
        pytest.skip("the rows that a NaN reaches are test_a_nan_stays_where_it_belongs' to check")
    peer = relative_rms(case.peer_out[good], case.fp64_out[good])
    assert good.all() or peer > 0.01  # a case where the peer is wrong
    limit = 1.1 * peer if peer < 0.02 else 3e-2
    assert_close(out, case.fp64_out, rms=limit, name=f"out (the peer's error is {peer:.2e})")


# ---- Packed sequences, states ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [None, "bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@every_step_and_chunk
def test_packed_sequences(step: int, chunk: int, dtype: torch.dtype, state: str | None) -> None:
    lengths = [0, 5, 0, 16, 33, 0, 0, 1, 64, 70, 17, 0]
    inputs = make_inputs(H=5, seq_lens=lengths, initial_state=state, lower_bound=bound_for(step, chunk))
    assert_right(inputs.with_(cu_seqlens=inputs.cu_seqlens.to(dtype)), step, chunk)


@every_step_and_chunk
def test_thousands_of_sequences(step: int, chunk: int) -> None:
    lengths = [(7 * n) % 5 * (n % 3) for n in range(3000)]
    inputs = make_inputs(H=2, seq_lens=lengths, lower_bound=bound_for(step, chunk), initial_state="bf16")
    assert_right(inputs, step, chunk, rms=8e-3)


@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 16], [16, 0, 16]])
@every_step
def test_an_empty_sequence_keeps_its_state(step: int, lengths: list[int]) -> None:
    inputs = make_inputs(H=4, seq_lens=lengths, initial_state="fp32", device="cuda")
    result = run(inputs, step)
    empty = [n for n, length in enumerate(lengths) if not length]
    assert same_bits(result.final_state[empty], inputs.initial_state[empty])
    zeros = run(inputs.with_(initial_state=None), step).final_state[empty]
    assert not zeros.any()


@every_step_and_chunk
def test_a_packed_sequence_is_what_it_is_alone(step: int, chunk: int) -> None:
    """The chunks of a sequence begin at its own first token, so packing changes no bit."""
    packed = make_inputs(H=3, seq_lens=[21, 40, 3], lower_bound=bound_for(step, chunk), device="cuda")
    together = run(packed, step, chunk)
    for n, (start, stop) in enumerate(packed.spans()):
        rows = {name: getattr(packed, name)[:, start:stop].contiguous() for name in ("q", "k", "v", "g", "beta")}
        alone = run(packed.with_(**rows, cu_seqlens=None), step, chunk)
        assert same_bits(together.out[:, start:stop], alone.out)
        assert same_bits(together.final_state[n : n + 1], alone.final_state)


@pytest.mark.parametrize("T", [9, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every_step
def test_a_state_may_be_updated_in_place(step: int, dtype: torch.dtype, T: int) -> None:
    inputs = make_inputs(2, T, 3, initial_state="fp32", device="cuda")
    inputs = inputs.with_(initial_state=inputs.initial_state.to(dtype))
    expected = run(inputs, step)
    state, out = inputs.initial_state.clone(), inputs.new_out()
    i = inputs
    tensors = (i.q, i.k, i.v, i.g, i.beta, i.scale, out, i.A_log, i.dt_bias, i.lower_bound)
    kda_lab.fwd(*tensors, state, state, step=step)
    assert same_bits(out, expected.out)
    assert same_bits(state, expected.final_state)


@every_step
def test_the_state_is_value_by_key(step: int) -> None:
    inputs = make_inputs(1, 20, 4, initial_state="fp32")
    v, k = torch.arange(128.0)[:, None], torch.arange(128.0)
    assert_right(inputs.with_(initial_state=(v + k / 1000).expand(1, 4, 128, 128).contiguous() / 128), step)


@every_step
def test_an_fp32_state_keeps_what_bf16_would_lose(step: int) -> None:
    """1 + 2^-9 is no bf16 number. Nothing decays (bound 0) and nothing is written (beta is e^-30)."""
    inputs = make_inputs(1, 40, 2, lower_bound=0.0, initial_state="fp32", device="cuda")
    state = torch.full_like(inputs.initial_state, 1 + 2**-9)
    result = run(inputs.with_(initial_state=state, beta=torch.full_like(inputs.beta, -30.0)), step)
    assert (result.final_state - state).abs().max() < 1e-6


# ---- What must not reach what ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@every_step_and_chunk
def test_a_nan_stays_where_it_belongs(step: int, chunk: int, name: str) -> None:
    """Rows before it (tensor-core steps: chunks before it), other heads and other batch rows keep every bit."""
    token = 20
    clean = make_inputs(2, 40, 3, lower_bound=bound_for(step, chunk), device="cuda")
    poisoned = getattr(clean, name).clone()
    poisoned[0, token, 1].view(-1)[0] = float("nan")
    before, after = run(clean, step, chunk), run(clean.with_(**{name: poisoned}), step, chunk)
    first = token if step in FP32_STEPS else token // chunk * chunk
    assert same_bits(before.out[0, :first, 1], after.out[0, :first, 1])
    assert same_bits(before.out[:, :, [0, 2]], after.out[:, :, [0, 2]])
    assert same_bits(before.out[1], after.out[1])
    assert same_bits(before.final_state[:, [0, 2]], after.final_state[:, [0, 2]])
    assert same_bits(before.final_state[1], after.final_state[1])
    assert after.out[0, token, 1].isnan().any()


@pytest.mark.parametrize("lengths", [[19, 7, 30], [5, 4, 6]])
@every_step_and_chunk
def test_a_nan_leaves_the_sequences_packed_around_it_alone(step: int, chunk: int, lengths: list[int]) -> None:
    clean = make_inputs(H=2, seq_lens=lengths, lower_bound=bound_for(step, chunk), device="cuda")
    poisoned = {name: getattr(clean, name).clone() for name in ("q", "k", "v", "g", "beta")}
    begin, end = clean.spans()[1]
    for tensor in poisoned.values():
        tensor[0, begin:end] = float("nan")
    before, after = run(clean, step, chunk), run(clean.with_(**poisoned), step, chunk)
    for tokens in (slice(0, begin), slice(end, None)):
        assert same_bits(before.out[:, tokens], after.out[:, tokens])
    assert same_bits(before.final_state[[0, 2]], after.final_state[[0, 2]])


@every_step_and_chunk
def test_later_tokens_change_no_earlier_output(step: int, chunk: int) -> None:
    inputs = make_inputs(1, 100, 3, lower_bound=bound_for(step, chunk), device="cuda")
    other = make_inputs(1, 100, 3, lower_bound=bound_for(step, chunk), seed=1, device="cuda")
    cut = 64
    changed = {
        name: torch.cat([getattr(inputs, name)[:, :cut], getattr(other, name)[:, cut:]], 1)
        for name in ("q", "k", "v", "g", "beta")
    }
    before, after = run(inputs, step, chunk).out, run(inputs.with_(**changed), step, chunk).out
    assert same_bits(before[:, :cut], after[:, :cut])
    assert not same_bits(before[:, cut:], after[:, cut:])


@every_step_and_chunk
def test_two_runs_give_the_same_bits(step: int, chunk: int) -> None:
    inputs = make_inputs(2, 700, 16, lower_bound=bound_for(step, chunk), initial_state="bf16", device="cuda")
    first = run(inputs, step, chunk)
    for _ in range(3):
        again = run(inputs, step, chunk)
        assert same_bits(first.out, again.out)
        assert same_bits(first.final_state, again.final_state)


# ---- Streams, graphs, sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [9, 100])
@every_step
def test_a_side_stream(step: int, T: int) -> None:
    """v is filled on the side stream after a long wait: only kernels on that stream read it filled."""
    inputs = make_inputs(1, T, 4, device="cuda")
    expected = run(inputs, step).out
    late = inputs.with_(v=torch.zeros_like(inputs.v))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.v.copy_(inputs.v)
        out = run(late, step).out
    side.synchronize()
    assert same_bits(out, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("lengths", "new", "H"),
    [
        ([20, 0, 44, 16], [0, 1, 33, 33, 80], 3),
        ([20, 0, 44, 16], [0, 1, 33, 33, 80], 16),  # in step 6 two CTAs of a head share their copies (132 SMs)
        ([5, 0, 9, 2], [0, 1, 7, 7, 16], 3),  # and here it is one kernel
    ],
)
@every_step
def test_a_graph_takes_new_sequences_and_survives_wrong_ones(
    step: int, lengths: list[int], new: list[int], H: int, dtype: torch.dtype
) -> None:
    """cu_seqlens is read when the graph runs; entries that nobody checked lead to no access outside."""
    inputs = make_inputs(H=H, seq_lens=lengths, device="cuda")
    inputs = inputs.with_(cu_seqlens=inputs.cu_seqlens.to(dtype))
    run(inputs, step)  # loads the library and the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(inputs, step)
    for wrong in ([0, 0, 0, 0, 0], new[::-1], [-7, 1000, -1000, 3, 2**31 - 1], new):
        inputs.cu_seqlens.copy_(torch.tensor(wrong, dtype=dtype))
        graph.replay()
        torch.cuda.synchronize()
    expected = run(inputs.with_(cu_seqlens=torch.tensor(new, dtype=dtype, device="cuda")), step)
    assert same_bits(captured.out, expected.out)
    assert same_bits(captured.final_state, expected.final_state)


@pytest.mark.slow
@every_step_and_chunk
def test_more_than_2_31_elements(step: int, chunk: int) -> None:
    """T * H * K beyond 2^31: the last tokens are what they are alone, since a saturated gate forgets the rest."""
    T, H, tail = 4 * 43712, 96, 128  # 2.15e9 elements; T is a multiple of 64
    if torch.cuda.mem_get_info()[0] < 100e9:
        pytest.skip("needs 100 GB of free GPU memory")
    torch.manual_seed(0)
    rows = {name: torch.randn(1, T, H, 128, dtype=torch.bfloat16, device="cuda") for name in ("q", "k", "v")}
    rows |= {"g": torch.full_like(rows["q"], 30.0), "beta": torch.randn(1, T, H, dtype=torch.bfloat16, device="cuda")}
    gate = {"A_log": torch.zeros(H, device="cuda"), "dt_bias": torch.zeros(H, 128, device="cuda")}
    whole = Inputs(**rows, **gate, scale=128**-0.5, lower_bound=bound_for(step, chunk))
    out = run(whole, step, chunk).out[:, -tail // 2 :].clone()
    end = {name: tensor[:, -tail:].contiguous() for name, tensor in rows.items()}
    assert relative_rms(out.cpu(), run(whole.with_(**end), step, chunk).out[:, -tail // 2 :].cpu()) < 1e-3


def test_the_exponential_is_bound_by_its_unit() -> None:
    rows = {row["form"]: row["results_per_clock_per_sm"] for row in microbench.exp_throughput()}
    assert all(0 < rate <= 16.5 for rate in rows.values()), rows
    assert rows["ex2.approx.ftz"] >= 0.95 * max(rows.values())
    assert rows["expf"] < rows["ex2.approx.ftz"]


def test_the_gate_alone_is_measured_in_every_form() -> None:
    rows = microbench.gate(make_inputs(1, 512, 8))
    assert len(rows) == 3
    assert all(row["median_ms"] > 0 and row["bytes"] == 512 * 8 * 128 * 6 for row in rows)
