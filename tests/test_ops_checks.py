"""Every wrong argument of `fwd` is refused with its name, what it was and what is expected, and nothing is written."""

from __future__ import annotations

import contextlib
import itertools
import re
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import native_stub
import pytest
import torch

import kda_lab
from kda_lab import native, ops
from kda_lab.native import library as native_library

B, T, H, K, V = 2, 20, 3, 24, 40


@pytest.fixture(scope="module")
def stub_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    csrc = native_stub.make_csrc(tmp_path_factory.mktemp("stub") / "csrc")
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("KDA_LAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        return native.build("cpu", csrc)


@pytest.fixture
def stub(stub_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[native.Library]:
    """The stub is the CPU library."""
    with monkeypatch.context() as changed:
        changed.setenv("KDA_LAB_CPU_LIBRARY", str(stub_path))
        changed.setattr(native_library, "_loaded", {})
        yield native.load("cpu")


def arguments(packed: bool = False, **changes: Any) -> dict[str, Any]:
    """Arguments that are right, but for `changes`; a change that is a function is applied to the right argument."""
    inputs = kda_lab.make_inputs(B, T, H, K, V, initial_state="fp32")
    if packed:
        inputs = kda_lab.make_inputs(1, T, H, K, V, seq_lens=(5, 0, T - 5), initial_state="fp32")
    given = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "scale")}
    given["out"] = torch.full_like(inputs.v, -1)
    given |= {name: getattr(inputs, name) for name in ("A_log", "dt_bias", "lower_bound", "initial_state")}
    given["final_state"] = torch.full_like(inputs.initial_state, -1)
    given["cu_seqlens"] = inputs.cu_seqlens
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    return given


def refused(stub: native.Library, kind: type[Exception], message: str, given: dict[str, Any]) -> None:
    """Also right after a right call of the same kind, which leaves a plan for the next one."""
    with contextlib.suppress(Exception):
        ops.fwd(**arguments(given["cu_seqlens"] is not None))
    calls = native_stub.calls(stub)
    written = {name: given[name] for name in ("out", "final_state") if isinstance(given[name], torch.Tensor)}
    before = {name: x.detach().clone() for name, x in written.items()}
    with pytest.raises(kind, match=message):
        ops.fwd(**given)
    assert native_stub.calls(stub) == calls, "the library was called"
    for name, x in written.items():
        assert torch.equal(x.detach(), before[name]), f"{name} was written"


def test_right_arguments_reach_the_library(stub):
    for packed in (False, True):
        given = arguments(packed)
        assert ops.fwd(**given) is None
        N = 3 if packed else B
        got = native_stub.last_args(stub)
        sizes = {"B": 1 if packed else B, "T": T, "H": H, "K": K, "V": V, "N": N, "chunk": 16}
        assert {name: got[name] for name in sizes} == sizes
        pointers = {name: x.data_ptr() for name, x in given.items() if isinstance(x, torch.Tensor)}
        assert {name: got[name] for name in pointers} == pointers
        assert got["cu_seqlens_dtype"] == (native_library.I64 if packed else native_library.NONE)
        assert got["initial_state_dtype"] == got["final_state_dtype"] == native_library.F32
        assert (got["scale"], got["lower_bound"]) == (int(given["scale"] * 1000), -5000)
        assert given["out"].view(torch.uint8).unique().tolist() == [7]
        assert given["final_state"].view(torch.uint8).unique().tolist() == [7]


def test_optional_tensors_are_null(stub):
    ops.fwd(**arguments(initial_state=None, final_state=None))
    got = native_stub.last_args(stub)
    absent = ("initial_state", "final_state", "cu_seqlens")
    assert [got[name] for name in absent] == [0, 0, 0]
    assert [got[f"{name}_dtype"] for name in absent] == [0, 0, 0]


TENSORS = ("q", "k", "v", "g", "beta", "out", "A_log", "dt_bias", "initial_state", "final_state")


@pytest.mark.parametrize("name", TENSORS)
def test_shape(name, stub):
    shapes = {"q": "[B, T, H, K]", "v": "[B, T, H, V]"}
    expected = re.escape(shapes.get(name, ops._SHAPES[name]))
    given = arguments()
    for dim in range(given[name].dim()):
        if (name, dim) in [("q", 0), ("q", 1), ("q", 2), ("q", 3), ("v", 3)]:
            continue  # q and v set the sizes: another tensor is found to differ from them
        wrong = given[name].repeat_interleave(2, dim)
        message = rf"{name} has shape {re.escape(str(list(wrong.shape)))}; expected {expected} = \["
        refused(stub, ValueError, message, {**given, name: wrong})
    for wrong in (given[name][None], given[name][0]):
        refused(stub, ValueError, rf"{name} has shape .*; expected {expected}", {**given, name: wrong})


def test_size_of_q_and_v_is_held_against_the_others(stub):
    for dim, other in enumerate(("k", "k", "k", "k")):
        refused(stub, ValueError, f"{other} has shape", arguments(q=lambda q, dim=dim: q.repeat_interleave(2, dim)))
    refused(stub, ValueError, "out has shape", arguments(v=lambda v: v.repeat_interleave(2, 3)))


@pytest.mark.parametrize("name", TENSORS)
def test_dtype(name, stub):
    for dtype in (torch.float16, torch.float64, torch.float32, torch.bfloat16, torch.int32):
        given = arguments(**{name: lambda x, dtype=dtype: x.to(dtype)})
        right = (torch.bfloat16, torch.float32) if name.endswith("_state") else (arguments()[name].dtype,)
        if dtype in right:
            ops.fwd(**given)
        else:
            expected = " or ".join(map(str, right))
            refused(stub, TypeError, f"{name} is {dtype}; expected {expected}", given)


@pytest.mark.parametrize("name", TENSORS[1:])
def test_device(name, stub):
    """Tensors on two devices (meta stands for the other one; torch would run the meta kernel, so this is below it)."""
    given = arguments(**{name: lambda x: x.to("meta")})
    with pytest.raises(ValueError, match=f"{name} is on meta, but q is on cpu; all tensors must be on one device"):
        ops._fwd(**given)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "out"])
def test_missing_tensor(name, stub):
    refused(stub, TypeError, f"{name} is None; expected a torch.Tensor", arguments(**{name: None}))


@pytest.mark.parametrize("name", ["q", "initial_state", "final_state", "cu_seqlens"])
def test_array_is_no_tensor(name, stub):
    refused(stub, TypeError, f"{name} is a list; expected a torch.Tensor", arguments(**{name: [1.0]}))


@pytest.mark.parametrize("name", ["out", "final_state"])
def test_layout_of_what_is_written(name, stub):
    def strided(x):
        return torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 0]

    def unaligned(x):
        return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)

    refused(stub, ValueError, rf"{name} has strides \(.*; it is written in place", arguments(**{name: strided}))
    refused(stub, ValueError, f"{name} starts at an address that is no multiple of 16", arguments(**{name: unaligned}))


def overlapping(given: dict[str, Any], name: str, other: str, offset_bytes: int = 0) -> dict[str, Any]:
    """`name` and `other` in one piece of memory, `other` `offset_bytes` after the start of `name`."""
    a, b = given[name], given[other]
    memory = torch.zeros(a.nbytes + b.nbytes + offset_bytes + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    place = {name: start, other: start + offset_bytes}
    views = {n: memory[p : p + given[n].nbytes].view(given[n].dtype).view(given[n].shape) for n, p in place.items()}
    return {**given, **views}


@pytest.mark.parametrize("other", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "final_state"])
def test_out_overlaps(other, stub):
    given = arguments()
    last = given["out"].nbytes // 16 * 16 - 16
    for offset in (0, 16, last):
        refused(stub, ValueError, f"out shares memory with {other}", overlapping(given, "out", other, offset))
    ops.fwd(**overlapping(given, "out", other, given["out"].nbytes + -given["out"].nbytes % 16))


@pytest.mark.parametrize("name", ["q", "v", "A_log", "beta"])
def test_out_overlaps_a_strided_view(name, stub):
    """It would be copied before out is written, and still be lost to the caller."""
    given = arguments()
    wanted = given[name]
    memory = torch.zeros(max(2 * wanted.nbytes, given["out"].nbytes) + 64, dtype=torch.uint8)
    given["out"] = memory[: given["out"].nbytes].view(torch.bfloat16).view(given["out"].shape)
    strided = memory[: 2 * wanted.nbytes].view(wanted.dtype).view(*wanted.shape, 2)[..., 0]
    refused(stub, ValueError, f"out shares memory with {name}", {**given, name: strided})
    last = memory[given["out"].nbytes - 16 :].view(torch.bfloat16)[:1]  # one element that is everywhere, in out's end
    refused(stub, ValueError, "out shares memory with beta", {**given, "beta": last.expand(given["beta"].shape)})


@pytest.mark.parametrize("other", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens"])
def test_final_state_overlaps(other, stub):
    given = arguments(packed=True)
    refused(stub, ValueError, f"final_state shares memory with {other}", overlapping(given, "final_state", other))


def test_final_state_may_be_the_initial_state_itself_and_nothing_else_of_it(stub):
    given = arguments()
    ops.fwd(**{**given, "final_state": given["initial_state"]})
    ops.fwd(**{**given, "final_state": given["initial_state"].view(given["initial_state"].shape)})
    refused(
        stub,
        ValueError,
        r"final_state shares memory with initial_state \(only initial_state itself may be final_state\)",
        overlapping(given, "initial_state", "final_state", 16),
    )
    given["initial_state"] = given["initial_state"].bfloat16()
    refused(stub, ValueError, "shares memory with initial_state", overlapping(given, "initial_state", "final_state"))


def test_strided_input_may_interleave_with_out(stub):
    """What the kernel reads is a copy."""
    memory = torch.zeros(B, T, H, 2 * V, dtype=torch.bfloat16)
    ops.fwd(**arguments(v=memory[..., :V]))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, T], r"cu_seqlens\[0\] is 1; expected 0"),
        ([-1, T], r"cu_seqlens\[0\] is -1; expected 0"),
        ([0, 12, 7, T], r"cu_seqlens\[2\] is 7, less than cu_seqlens\[1\] = 12"),
        ([0, T + 1, T], rf"cu_seqlens\[2\] is {T}, less than cu_seqlens\[1\] = {T + 1}"),
        ([0, 5, T - 1], rf"cu_seqlens\[2\], the last, is {T - 1}; expected T = {T}"),
        ([0, T + 16], rf"cu_seqlens\[1\], the last, is {T + 16}; expected T = {T}"),
        ([0], rf"cu_seqlens\[0\], the last, is 0; expected T = {T}"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_entries_of_cu_seqlens(offsets, message, dtype, stub):
    states = {name: torch.zeros(len(offsets) - 1, H, V, K) for name in ("initial_state", "final_state")}
    given = arguments(packed=True, cu_seqlens=torch.tensor(offsets, dtype=dtype), **states)
    refused(stub, ValueError, message, given)
    strided = torch.stack([given["cu_seqlens"], given["cu_seqlens"]], dim=1).flatten()[::2]
    refused(stub, ValueError, message, {**given, "cu_seqlens": strided})


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda x: x.float(), TypeError, "cu_seqlens is torch.float32; expected torch.int32 or torch.int64"),
        (lambda x: x[None], ValueError, r"cu_seqlens has shape \[1, 4\]; expected \[N \+ 1\]"),
        (lambda x: x[:0], ValueError, r"cu_seqlens has shape \[0\]; expected \[N \+ 1\]"),
        (lambda x: x.sum(), ValueError, r"cu_seqlens has shape \[\]; expected \[N \+ 1\]"),
    ],
)
def test_kind_of_cu_seqlens(change, kind, message, stub):
    refused(stub, kind, message, arguments(packed=True, cu_seqlens=change))


def test_cu_seqlens_with_batch_rows(stub):
    given = arguments(cu_seqlens=torch.tensor([0, T]))
    refused(stub, ValueError, f"q has {B} batch rows and cu_seqlens is given; expected B = 1", given)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_changed_entries_of_cu_seqlens_are_seen(dtype, stub):
    given = arguments(packed=True, cu_seqlens=lambda x: x.to(dtype))
    ops.fwd(**given)
    given["cu_seqlens"][1] = T + 1
    refused(stub, ValueError, "less than", given)


def test_offsets_that_were_right_are_known_until_they_change():
    """What spares the host the wait for a cu_seqlens on a GPU."""
    offsets = torch.tensor([0, 5, T])
    assert not ops._known_right(offsets, T)
    ops._remember_right(offsets, T)
    assert ops._known_right(offsets, T)
    assert not ops._known_right(offsets, T + 1)
    assert not ops._known_right(offsets.clone(), T)
    offsets[1] = 6
    assert not ops._known_right(offsets, T)
    ops._remember_right(offsets, T)
    key = id(offsets)
    assert key in ops._right_offsets
    del offsets
    assert key not in ops._right_offsets
    with torch.inference_mode():
        offsets = torch.tensor([0, 5, T])
        ops._remember_right(offsets, T)
        assert not ops._known_right(offsets, T)


@pytest.mark.parametrize("value", [None, "low", torch.zeros(2)])
def test_kind_of_numbers(value, stub):
    for name in ("lower_bound", "scale"):
        refused(stub, TypeError, f"{name} is .*; expected a number", arguments(**{name: value}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("allow_unsafe", [False, True])
def test_numbers_that_are_not_finite(value, allow_unsafe, stub):
    unsafe = {"allow_unsafe": allow_unsafe}
    refused(stub, ValueError, f"lower_bound is {value}; expected a finite", {**arguments(lower_bound=value), **unsafe})
    refused(stub, ValueError, f"scale is {value}; expected a finite", {**arguments(scale=value), **unsafe})


@pytest.mark.parametrize(
    ("step", "chunk", "limit"),
    [
        *((step, chunk, -1000) for step, chunk in itertools.product((1, 2), (8, 16, 32, 64))),
        *((3, chunk, -87 / chunk) for chunk in (8, 16, 32, 64)),
        (0, 16, -1000),
        (5, 16, -5.4375),
    ],
)
def test_lower_bound_limit_of_step_and_chunk(step, chunk, limit, stub):
    assert ops.lower_bound_limit(step, chunk) == pytest.approx(limit)
    inputs = kda_lab.make_inputs(1, 1, 1, 8, 8)
    for allowed in (0, -0.0, limit / 2, limit):
        ops.forward(inputs.with_(lower_bound=allowed), step, chunk)
        ops.check_lower_bound(allowed, step, chunk)
    below = inputs.with_(lower_bound=limit * (1 + 1e-6))
    number = re.escape(f"{limit:g}")
    for call in (ops.forward, lambda i, *rest: ops.check_lower_bound(i.lower_bound, *rest)):
        with pytest.raises(ValueError, match=rf"lower_bound is .*; step {step}_\w+ .*can represent {number} to 0"):
            call(below, step, chunk)
    ops.forward(below, step, chunk, allow_unsafe=True)


def test_positive_lower_bound(stub):
    refused(stub, ValueError, "lower_bound is 0.5; expected 0 or negative", arguments(lower_bound=0.5))
    ops.fwd(**arguments(lower_bound=0.5), allow_unsafe=True)


def test_chunk(stub):
    inputs = kda_lab.make_inputs(1, 1, 1, 8, 8)
    with pytest.raises(ValueError, match="chunk is 17; step 3_factored on cpu runs 8 or 16 or 32 or 64"):
        ops.forward(inputs, 3, 17)
    with pytest.raises(ValueError, match="chunk is 8; step 5_fused_two_kernel on cpu runs 16"):
        ops.forward(inputs, 5, 8)


@pytest.mark.parametrize("step", [3, "3", "factored", "3_factored"])
def test_step_by_number_slug_or_name(step, stub):
    inputs = kda_lab.make_inputs(1, 603, 1, 1, 1)  # T = 603: the stub fails and says which step it ran
    with pytest.raises(native.LibraryError, match="from step 3"):
        ops.forward(inputs, step)


def test_step_none_is_the_best_of_the_device(stub):
    with pytest.raises(native.LibraryError, match="from step 5"):
        ops.forward(kda_lab.make_inputs(1, 603, 1, 1, 1), None)


def test_step_that_is_none_of_the_ladder(stub):
    given = arguments()
    calls = native_stub.calls(stub)
    with pytest.raises(ValueError, match=r"step is 'fastest'; expected None .* 0 or .token_by_token., 1 or"):
        ops.fwd(**given, step="fastest")
    with pytest.raises(ValueError, match="step 4_fused_one_kernel runs on cuda, not on cpu; steps for cpu: 0 or"):
        ops.fwd(**given, step=4)
    assert native_stub.calls(stub) == calls


@pytest.mark.parametrize(
    "sizes", [(2, 0, 3), (0, 5, 3), (2, 5, 0), (0, 0, 0)], ids=["no tokens", "no rows", "no heads", "nothing"]
)
def test_empty_tensors_reach_the_library(sizes, stub):
    inputs = kda_lab.make_inputs(*sizes, K, V, initial_state="bf16")
    result = ops.forward(inputs)
    assert result.out.shape == (*sizes, V)
    assert result.final_state.shape == (sizes[0], sizes[2], V, K)


def test_no_sequences_at_all(stub):
    inputs = kda_lab.make_inputs(1, 0, H, K, V).with_(cu_seqlens=torch.tensor([0]))
    assert ops.forward(inputs).final_state.shape == (0, H, V, K)


@pytest.mark.parametrize("initial_state", [None, "bf16", "fp32"])
def test_forward_returns_a_final_state_of_the_initial_states_dtype(initial_state, stub):
    result = ops.forward(kda_lab.make_inputs(B, T, H, K, V, initial_state=initial_state))
    assert result.out.dtype == torch.bfloat16
    assert result.final_state.dtype == (torch.bfloat16 if initial_state == "bf16" else torch.float32)


def test_forward_leaves_the_inputs_alone(stub):
    inputs = kda_lab.make_inputs(B, T, H, K, V, initial_state="fp32")
    before = {name: value.clone() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    ops.forward(inputs)
    assert all(torch.equal(getattr(inputs, name), value) for name, value in before.items())


@pytest.mark.parametrize("name", TENSORS)
def test_no_silent_zero_gradients(name, stub):
    given = arguments(**{name: lambda x: x.clone().requires_grad_()})
    message = f"{name} requires grad, but kda_lab.fwd is forward-only"
    refused(stub, NotImplementedError, message, given)
    with pytest.raises(NotImplementedError, match=message):
        torch.ops.kda_lab.fwd(*given.values())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            ops.fwd(**given)


def test_gradient_of_a_tensor_on_the_way(stub):
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    refused(stub, NotImplementedError, "q requires grad", arguments(q=lambda q: q * weight))


def test_published_signature():
    import inspect

    names = "q k v g beta scale out A_log dt_bias lower_bound initial_state final_state cu_seqlens"
    positional = [p for p in inspect.signature(ops.fwd).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert " ".join(p.name for p in positional) == names
    assert [p.default for p in positional[10:]] == [None, None, None]


def test_cost_of_a_call(stub):
    """All checks together cost a few times what torch takes for an operator that does nothing."""
    library = torch.library.Library("kda_lab_test", "DEF")
    library.define(ops._SCHEMA)
    library.impl("fwd", lambda *args: None, "CPU")
    given = tuple(arguments(packed=True).values())

    def best(call) -> float:
        return min(timeit.repeat(call, number=5, repeat=2000)) / 5

    nothing = best(lambda: torch.ops.kda_lab_test.fwd(*given, None, 16, False))
    call = best(lambda: ops.fwd(*given))
    assert call < 12 * nothing, f"fwd takes {call * 1e6:.1f} µs, an operator that does nothing {nothing * 1e6:.1f} µs"
