"""`fwd` on a GPU: streams, devices, CUDA graphs, the cached check of cu_seqlens, sizes a step cannot run."""

from __future__ import annotations

import pytest
import torch

import kda_lab
from kda_lab import call_plan, ops, reference
from kda_lab.compare import relative_rms
from kda_lab.inputs import Inputs

pytestmark = pytest.mark.gpu

LIMIT = 2e-2  # tensor-core steps stay below 1e-2 on these inputs; wrong data is off by order 1


def arguments(i: Inputs, out: torch.Tensor, *rest: torch.Tensor | None) -> tuple:
    return (i.q, i.k, i.v, i.g, i.beta, i.scale, out, i.A_log, i.dt_bias, i.lower_bound, *rest)


@pytest.fixture
def inputs() -> Inputs:
    return kda_lab.make_inputs(1, 100, 4, initial_state="fp32", device="cuda")


@pytest.fixture
def packed() -> Inputs:
    return kda_lab.make_inputs(1, H=4, seq_lens=(40, 0, 37), device="cuda")


def assert_right(i: Inputs, out: torch.Tensor, final: torch.Tensor | None = None) -> None:
    expected = reference.recurrent(i.to("cpu"))
    assert relative_rms(out.cpu(), expected.out) < LIMIT
    if final is not None:
        assert relative_rms(final.cpu(), expected.final_state) < LIMIT


def test_forward_moves_the_inputs(inputs):
    result = kda_lab.forward(inputs.to("cpu"), None, device="cuda")
    assert result.out.device.type == "cuda"
    assert_right(inputs, *result)


def test_views_give_the_same_bits(inputs):
    expected = kda_lab.forward(inputs)
    tensors = {name: torch.stack([x, x], -1)[..., 0] for name, x in vars(inputs).items() if isinstance(x, torch.Tensor)}
    actual = kda_lab.forward(inputs.with_(**tensors))
    assert torch.equal(actual.out, expected.out)
    assert torch.equal(actual.final_state, expected.final_state)


@pytest.mark.parametrize("repeated", [False, True])
def test_work_is_enqueued_on_the_current_stream(inputs, repeated, monkeypatch):
    """v is filled on a side stream after a long wait: only a kernel on the same stream reads it filled."""
    monkeypatch.setattr(call_plan, "_plans", {})
    if repeated:
        ops.fwd(*arguments(inputs, inputs.new_out(), inputs.initial_state))
    late = inputs.with_(v=torch.full_like(inputs.v, float("nan")))
    out = inputs.new_out()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.v.copy_(inputs.v)
        ops.fwd(*arguments(late, out, late.initial_state))
    side.synchronize()
    assert_right(inputs, out)


def test_device_need_not_be_the_current_one(inputs):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = inputs.to("cuda:1")
    assert torch.cuda.current_device() == 0
    assert_right(inputs, *kda_lab.forward(other))
    out, final = other.new_out(), torch.empty_like(other.initial_state)
    for _ in range(2):
        out.zero_()
        ops.fwd(*arguments(other, out, other.initial_state, final))
        assert_right(inputs, out, final)
    assert torch.cuda.current_device() == 0


def test_tensors_on_two_devices_are_refused(inputs):
    with pytest.raises(ValueError, match="A_log is on cpu, but q is on cuda:0; all tensors must be on one device"):
        ops.fwd(*arguments(inputs.with_(A_log=inputs.A_log.cpu()), inputs.new_out()))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences(packed, dtype):
    packed = packed.with_(cu_seqlens=packed.cu_seqlens.to(dtype))
    assert_right(packed, *kda_lab.forward(packed))
    strided = packed.with_(cu_seqlens=torch.stack([packed.cu_seqlens, packed.cu_seqlens], -1)[..., 0])
    assert_right(packed, *kda_lab.forward(strided))


def test_entries_of_cu_seqlens_are_read_back_once(packed):
    out = packed.new_out()
    call = arguments(packed, out, None, None, packed.cu_seqlens)
    ops.fwd(*call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.fwd(*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    packed.cu_seqlens[1] = 78
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] is 40, less than cu_seqlens\[1\] = 78"):
        ops.fwd(*call)


def test_call_does_not_wait_for_the_gpu(inputs):
    final = torch.empty_like(inputs.initial_state)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.fwd(*arguments(inputs, inputs.new_out(), inputs.initial_state, final))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_cuda_graph_replays_with_new_inputs(kind, inputs, packed):
    i = inputs if kind == "plain" else packed
    out, final = i.new_out(), torch.empty(i.N, i.H, i.V, i.K, device="cuda")
    call = arguments(i, out, i.initial_state, final, i.cu_seqlens)
    ops.fwd(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.fwd(*call)
    i.v.copy_(torch.randn_like(i.v))
    if kind == "packed":
        i.cu_seqlens.copy_(torch.tensor([0, 3, 60, 77]))
    graph.replay()
    torch.cuda.synchronize()
    assert_right(i, out, final)


def test_torch_compile(inputs):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(v):
        out = torch.empty_like(v)
        ops.fwd(*arguments(inputs.with_(v=v), out, inputs.initial_state))
        return out

    assert_right(inputs, layer(inputs.v))


@pytest.mark.parametrize("sizes", [(32, 32), (128, 64)])
def test_size_that_a_step_cannot_run_is_named(sizes):
    odd = kda_lab.make_inputs(1, 20, 2, *sizes, device="cuda")
    with pytest.raises((NotImplementedError, ValueError), match="128"):
        kda_lab.forward(odd, "fused_two_kernel")
