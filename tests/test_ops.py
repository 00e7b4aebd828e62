"""`fwd` and `forward` on the real CPU library: published calls, views, packed sequences, torch.compile."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

import kda_lab
from kda_lab import call_plan, ops, reference, registry
from kda_lab.compare import relative_rms
from kda_lab.inputs import Inputs

CPU_STEPS = (0, 1, 2, 3, 5)


def positional(i: Inputs, out: torch.Tensor, *rest: torch.Tensor | None) -> tuple:
    return (i.q, i.k, i.v, i.g, i.beta, i.scale, out, i.A_log, i.dt_bias, i.lower_bound, *rest)


def output(i: Inputs, how: str = "fwd") -> torch.Tensor:
    """What `fwd` writes into a new tensor, or what `forward` returns."""
    if how == "forward":
        return kda_lab.forward(i).out
    out = i.new_out()
    kda_lab.fwd(*positional(i, out))
    return out


def randn(B: int, T: int, H: int, D: int = 128) -> Inputs:
    """Inputs as published examples draw them: everything from a normal distribution."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(B, T, H, D, dtype=torch.bfloat16) for _ in range(4))
    beta = torch.randn(B, T, H, dtype=torch.bfloat16)
    return Inputs(q, k, v, g, beta, torch.randn(H), torch.randn(H, D), scale=1.0, lower_bound=-5.0)


def assert_right(inputs: Inputs, out: torch.Tensor, final_state: torch.Tensor | None = None) -> None:
    expected = reference.recurrent(inputs)
    assert relative_rms(out, expected.out) < 2.5e-3  # rounding the output to bf16 costs 1.6e-3 to 1.8e-3
    if final_state is not None:
        assert relative_rms(final_state, expected.final_state) < (
            1e-5 if final_state.dtype == torch.float32 else 2.5e-3
        )


def test_published_call_with_keywords():
    i = randn(1, 128, 8)
    out = torch.empty_like(i.v)
    returned = kda_lab.fwd(
        q=i.q, k=i.k, v=i.v, g=i.g, beta=i.beta, scale=1.0, out=out, A_log=i.A_log, dt_bias=i.dt_bias, lower_bound=-5.0
    )
    assert returned is None
    assert_right(i, out)


def test_published_call_with_everything_positional():
    i = randn(2, 128, 12)
    initial = torch.randn(2, 12, 128, 128)
    out, final = torch.empty_like(i.v), torch.empty_like(initial)
    kda_lab.fwd(i.q, i.k, i.v, i.g, i.beta, 1.0, out, i.A_log, i.dt_bias, -5.0, initial, final, None)
    assert_right(i.with_(initial_state=initial), out, final)


def strided(x: torch.Tensor) -> torch.Tensor:
    """A view with the same values and a gap after every element."""
    return torch.stack([x, torch.full_like(x, 3)], dim=-1)[..., 0]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """A view with the same values whose first two dimensions lie the other way round in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else strided(x)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """A contiguous view with the same values that starts one element after a 16-byte boundary."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype)
    view = memory[1:].view(x.shape)
    view.copy_(x)
    assert view.data_ptr() % 16 == x.element_size() % 16 != 0
    return view


@pytest.mark.parametrize("step", CPU_STEPS)
@pytest.mark.parametrize("view", [strided, transposed, unaligned])
def test_views_give_the_same_bits(view, step):
    inputs = kda_lab.make_inputs(1, 37, 3, 48, 40, seq_lens=(20, 0, 17), initial_state="fp32")
    expected = ops.forward(inputs, step)
    tensors = {name: view(x) for name, x in vars(inputs).items() if isinstance(x, torch.Tensor)}
    assert all(torch.equal(x, getattr(inputs, name)) for name, x in tensors.items())
    for changed in (tensors, *({name: x} for name, x in tensors.items())):
        actual = ops.forward(inputs.with_(**changed), step)
        assert torch.equal(actual.out, expected.out), list(changed)
        assert torch.equal(actual.final_state, expected.final_state), list(changed)


@pytest.mark.parametrize("step", CPU_STEPS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_state_updated_in_place(dtype, step):
    inputs = kda_lab.make_inputs(2, 37, 3, 48, 40, initial_state=dtype)
    expected = ops.forward(inputs, step)
    state, out = inputs.initial_state.clone(), inputs.new_out()
    ops.fwd(*positional(inputs, out, state, state), step=step)
    assert torch.equal(state, expected.final_state)
    assert torch.equal(out, expected.out)


@pytest.mark.parametrize("step", CPU_STEPS)
def test_state_dtypes_may_differ(step):
    inputs = kda_lab.make_inputs(1, 20, 2, 32, 32, initial_state="bf16")
    final, out = torch.empty(1, 2, 32, 32), inputs.new_out()
    ops.fwd(*positional(inputs, out, inputs.initial_state, final), step=step)
    assert_right(inputs, out, final)


@pytest.mark.parametrize("step", CPU_STEPS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [[0, 0, 16], [0, 16, 16, 32], [0, 0], [0]])
def test_empty_segments_keep_their_state(offsets, dtype, step):
    T, N = offsets[-1], len(offsets) - 1
    inputs = kda_lab.make_inputs(1, T, 2, 16, 24).with_(
        cu_seqlens=torch.tensor(offsets, dtype=dtype), initial_state=torch.randn(N, 2, 24, 16)
    )
    result = ops.forward(inputs, step)
    assert_right(inputs, result.out, result.final_state)
    for n in range(N):
        if offsets[n] == offsets[n + 1]:
            assert torch.equal(result.final_state[n], inputs.initial_state[n])


@pytest.mark.parametrize("step", CPU_STEPS)
@pytest.mark.parametrize("sizes", [(2, 0, 3), (0, 5, 3), (2, 5, 0), (0, 0, 0)])
def test_empty_tensors(sizes, step):
    inputs = kda_lab.make_inputs(*sizes, 16, 24, initial_state="fp32")
    result = ops.forward(inputs, step)
    assert result.out.shape == (*sizes, 24)
    if sizes[1] == 0:
        assert torch.equal(result.final_state, inputs.initial_state)


def test_forward_takes_every_chunk_that_the_step_lists():
    inputs = kda_lab.make_inputs(1, 70, 2, 32, 32, lower_bound=-1.0)
    for step in registry.steps():
        if "cpu" in step.devices:
            for chunk in step.chunks["cpu"] or (16,):
                result = kda_lab.forward(inputs, step.number, chunk)
                assert_right(inputs, result.out, result.final_state)


def test_forward_moves_the_inputs():
    inputs = kda_lab.make_inputs(1, 1, 1)
    assert_right(inputs, *kda_lab.forward(inputs, device="cpu"))
    with pytest.raises(ValueError, match="device is 'meta'; expected one of 'cpu', 'cuda'"):
        kda_lab.forward(inputs, device="meta")


# torch.compile and the other tracers
def compiled_call(i: Inputs, final: torch.Tensor, backend: str) -> torch.Tensor:
    @torch.compile(fullgraph=True, backend=backend)
    def layer(i_tensors, v, state, final):
        q, k, g, beta, A_log, dt_bias = i_tensors
        out = torch.empty_like(v)
        kda_lab.fwd(q, k, v, g, beta, i.scale, out, A_log, dt_bias, i.lower_bound, state, final, step=3)
        return out * 2

    return layer((i.q, i.k, i.g, i.beta, i.A_log, i.dt_bias), i.v, i.initial_state, final)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [False, True], ids=["two states", "one state"])
def test_torch_compile_traces_it_in_one_graph(backend, in_place):
    torch._dynamo.reset()
    inputs = kda_lab.make_inputs(1, 20, 2, 16, 16, initial_state="fp32")
    expected = ops.forward(inputs, 3)
    traced = inputs.with_(initial_state=inputs.initial_state.clone())
    final = traced.initial_state if in_place else torch.full_like(inputs.initial_state, -1)
    out = compiled_call(traced, final, backend)
    assert torch.equal(out, expected.out * 2)
    assert torch.equal(final, expected.final_state)


def test_torch_compile_keeps_what_is_written_for_later_reads():
    """The state is written by one call and read by the next: nothing may be reordered or dropped."""
    torch._dynamo.reset()
    inputs = kda_lab.make_inputs(1, 20, 2, 16, 16, initial_state="fp32")

    def two_calls(state):
        outs = []
        for _ in range(2):
            out = torch.empty_like(inputs.v)
            kda_lab.fwd(*positional(inputs, out, state, state), step=3)
            outs.append(out)
        return torch.cat(outs), state.sum()

    eager = two_calls(inputs.initial_state.clone())
    traced = torch.compile(two_calls, fullgraph=True, backend="aot_eager")(inputs.initial_state.clone())
    assert all(torch.equal(a, e) for a, e in zip(traced, eager, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_refuses_a_gradient(backend):
    torch._dynamo.reset()
    inputs = kda_lab.make_inputs(1, 4, 1, 16, 16)
    q = inputs.q.clone().requires_grad_()

    def call(q):
        out = torch.empty_like(inputs.v)
        kda_lab.fwd(*positional(inputs.with_(q=q), out))
        return out

    with pytest.raises(Exception, match=r"q requires grad, but kda_lab.fwd is forward-only"):
        torch.compile(call, fullgraph=True, backend=backend)(q)


def test_opcheck():
    """torch's own test of a registered operator: schema, mutation, fake implementation, tracing."""
    inputs = kda_lab.make_inputs(1, 20, 2, 16, 16, initial_state="fp32")
    final = torch.empty_like(inputs.initial_state)
    args = positional(inputs, inputs.new_out(), inputs.initial_state, final, None)
    options = {"step": "3", "chunk": 16, "allow_unsafe": False, "precise": True}
    torch.library.opcheck(torch.ops.kda_lab.fwd.default, args, options)


@pytest.mark.parametrize("step", CPU_STEPS)
def test_precise_is_no_news_to_steps_in_fp32(step):
    inputs = kda_lab.make_inputs(1, 20, 2, 16, 16, regime="collinear", initial_state="fp32")
    rounded, precise = (kda_lab.forward(inputs, step=step, precise=precise) for precise in (False, True))
    assert torch.equal(precise.out, rounded.out)
    assert torch.equal(precise.final_state, rounded.final_state)


def test_torch_compile_passes_precise_on(monkeypatch):
    inputs = kda_lab.make_inputs(1, 4, 1, 16, 16)
    seen = []
    monkeypatch.setattr(call_plan, "launch", lambda library, step, args, gpu: seen.append(args.precise))
    torch._dynamo.reset()

    def call(q, out):
        kda_lab.fwd(*positional(inputs.with_(q=q), out), step=0, precise=True)

    torch.compile(call, fullgraph=True, backend="eager")(inputs.q, inputs.new_out())
    assert seen == [1]


def test_meta_tensors_run_nothing():
    inputs = kda_lab.make_inputs(1, 4, 1, 16, 16).to("meta")
    assert ops.fwd(*positional(inputs, inputs.new_out())) is None


# The package
def test_exports_are_there_and_listed():
    for name in kda_lab.__all__:
        assert getattr(kda_lab, name) is not None
        assert name in dir(kda_lab)
    with pytest.raises(AttributeError, match="module 'kda_lab' has no attribute 'backward'"):
        kda_lab.backward  # noqa: B018


def test_import_loads_nothing_large():
    code = "import sys, kda_lab; print(sorted({'torch', 'numpy', 'nvtx'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_autograd_knows_what_was_written():
    inputs = kda_lab.make_inputs(T=16, H=2, K=8, V=8, initial_state="fp32")
    out, final = inputs.new_out(), torch.zeros_like(inputs.initial_state)
    weight = torch.ones_like(out, dtype=torch.float32).requires_grad_()
    product = (weight * out.float().requires_grad_(False)).sum() + (final * torch.ones(1, requires_grad=True)).sum()
    kda_lab.fwd(
        *(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.scale, out, inputs.A_log, inputs.dt_bias),
        *(inputs.lower_bound, inputs.initial_state, final),
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_negated_view_is_read_as_what_it_is():
    inputs = kda_lab.make_inputs(T=40, H=2)
    expected = kda_lab.forward(inputs.with_(v=-inputs.v)).out
    negated = inputs.with_(v=torch._neg_view(inputs.v))
    assert torch.equal(kda_lab.forward(negated).out, expected)
    out = inputs.new_out()
    i = negated
    kda_lab.fwd(i.q, i.k, i.v, i.g, i.beta, i.scale, out, i.A_log, i.dt_bias, i.lower_bound)
    assert torch.equal(out, expected)


def test_a_tracer_sees_an_eager_call():
    from torch.fx.experimental.proxy_tensor import make_fx

    i = kda_lab.make_inputs(T=16, H=1, K=8, V=8)

    def call(q, out):
        kda_lab.fwd(q, i.k, i.v, i.g, i.beta, i.scale, out, i.A_log, i.dt_bias, i.lower_bound)
        return out

    assert "kda_lab.fwd" in make_fx(call)(i.q, i.new_out()).code


@pytest.mark.filterwarnings("ignore")  # that what Python decides is no part of a trace
@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_jit_trace_holds_the_call(calls_before):
    i = kda_lab.make_inputs(T=16, H=1, K=8, V=8)

    def call(q):
        out = torch.zeros_like(i.v)
        kda_lab.fwd(*positional(i.with_(q=q), out))
        return out

    for _ in range(calls_before):
        call(i.q)
    traced = torch.jit.trace(call, (i.q,), check_trace=False)
    assert torch.equal(traced(-i.q), call(-i.q))


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("how", ["fwd", "forward"])
def test_a_transform_that_differentiates_is_refused(how, calls_before):
    """Its wrapper requires grad, and what the operator's kernel gets does not: the gradient would be zeros."""
    i = kda_lab.make_inputs(T=16, H=1, K=8, V=8)

    def loss(q):
        return output(i.with_(q=q), how).float().sum()

    for _ in range(calls_before):
        loss(i.q)
    with pytest.raises(NotImplementedError, match="q requires grad"):
        torch.func.grad(loss)(i.q)


@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("how", ["dual", "jvp"])
def test_a_derivative_in_forward_mode_is_refused(how, calls_before):
    """Its tangent would be lost, and a derivative of zero came back."""
    i = kda_lab.make_inputs(T=16, H=1, K=8, V=8)

    def out(k):
        return output(i.with_(k=k))

    for _ in range(calls_before):
        out(i.k)
    tangent = torch.ones_like(i.k)

    def differentiate():
        if how == "jvp":
            return torch.func.jvp(out, (i.k,), (tangent,))
        with forward_ad.dual_level():
            return out(forward_ad.make_dual(i.k, tangent))

    with pytest.raises(NotImplementedError, match="k has a tangent"):
        differentiate()
    with forward_ad.dual_level():  # with no tangent there is nothing to lose
        assert torch.equal(out(i.k), kda_lab.forward(i).out)


def test_tensors_on_meta_and_elsewhere_are_refused():
    i = kda_lab.make_inputs(T=16, H=1, K=8, V=8)
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        kda_lab.fwd(i.q.to("meta"), i.k, i.v, i.g, i.beta, i.scale, i.new_out(), i.A_log, i.dt_bias, i.lower_bound)


@pytest.mark.parametrize("name", ["q", "cu_seqlens"])
def test_a_list_is_no_tensor(name):
    i = kda_lab.make_inputs(T=16, H=1, K=8, V=8)
    given = {"q": i.q, "cu_seqlens": None, name: [0, 16]}
    with pytest.raises(TypeError, match=f"{name} is a list; expected a torch.Tensor"):
        kda_lab.fwd(
            *(given["q"], i.k, i.v, i.g, i.beta, i.scale, i.new_out(), i.A_log, i.dt_bias, i.lower_bound),
            cu_seqlens=given["cu_seqlens"],
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="torch finds no GPU here"):
        kda_lab.forward(kda_lab.make_inputs(T=1, H=1), device="cuda")
