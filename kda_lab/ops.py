"""The operator: `fwd` writes into given tensors, `forward` runs an `Inputs`. Every check of a tensor is here, once.

`fwd` is `torch.ops.kda_lab.fwd` with a friendlier signature. The operator is registered with torch.library, so
torch.compile traces it, and runs on the library that was loaded last: an edited kernel is picked up by `forward()` and
`native.load()`, which look at the sources, and not by `fwd`, which is to cost a few microseconds. For the same reason
`fwd` does not repeat the checks of a call like one before (call_plan).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kda_lab import annotate, arguments, call_plan, native, registry
from kda_lab.native.library import BF16, F32, I32, I64, NONE, KdaArgs

if TYPE_CHECKING:
    from kda_lab.inputs import Inputs, Result

LOWEST_BOUND = -1000.0  # beyond it fp32's error in the argument of exp grows past what the steps promise
DEFAULT_CHUNK = 16
_STATE_DTYPES = {torch.bfloat16: BF16, torch.float32: F32}
_OFFSET_DTYPES = {torch.int32: I32, torch.int64: I64}
_BF16, _F32 = torch.bfloat16, torch.float32
_STRUCT_BYTES = ctypes.sizeof(KdaArgs)
_PLAIN = {Tensor, type(None)}
_GIVEN = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "out", "initial_state", "final_state", "cu_seqlens")
_LARGEST_SCALE = torch.finfo(torch.float32).max
_WRITTEN = ("out", "final_state")
_STATES = {"initial_state", "final_state"}


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    step: int | str | None = None,
    allow_unsafe: bool = False,
    precise: bool = False,
) -> None:
    """Runs Kimi Delta Attention forward on the tensors' device and writes `out` and `final_state`.

    B batch rows, T tokens, H heads, K and V sizes of a key and a value; N sequences: B, or those of `cu_seqlens`.

    Args:
        q, k, g: [B, T, H, K] bf16. Queries and keys are normalised inside; g is the gate before its activation.
        v, out: [B, T, H, V] bf16.
        beta: [B, T, H] bf16, logits of the strength of a write.
        scale: multiplies the normalised queries.
        A_log, dt_bias: [H] and [H, K] fp32, the gate's parameters.
        lower_bound: smallest log-decay of a token, 0 or negative, and inside what the step can represent
            (`lower_bound_limit`) unless `allow_unsafe`.
        initial_state, final_state: [N, H, V, K] bf16 or fp32, or None. They may be the same tensor.
        cu_seqlens: [N + 1] int32 or int64: sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1] of the one row.
        step: number or slug of a step of the ladder; None is the best for the device.
        allow_unsafe: runs a lower_bound that the step cannot represent, for experiments.
        precise: keys are written to the state as sums of two bf16, 16 bits of mantissa instead of 8. Their roundings
            add up where keys resemble each other and hardly decay: over thousands of tokens the error without it can
            grow to the size of the output. Steps that hold keys in fp32 do nothing else; CUDA's fused_one_kernel and
            fused_two_kernel cannot.

    Limits of the CUDA steps, which the CPU steps do not have: a query or key longer than 1.8e19 overflows fp32 when it
    is squared and counts as zero; with saturated gates, steps 3 to 6 lose digits of queries much shorter than 1e-3.

    Inputs that are strided or not aligned to 16 bytes are copied first, whatever the step; `out` and `final_state` must
    be contiguous and aligned, and overlap no input. When an error is raised nothing was written. The entries of a
    cu_seqlens on a GPU are checked once for every version of the tensor, and not while a CUDA graph is captured.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, device, layout, offset or bound is wrong; the message says what is expected.
        NotImplementedError: the step cannot do this on this device, or an input requires grad or has a tangent (there
            is no derivative, backward or forward).
    """
    if type(scale) is not float:
        scale = arguments.number("scale", scale)
    if type(lower_bound) is not float:
        lower_bound = arguments.number("lower_bound", lower_bound)
    if step is not None and type(step) is not str:
        step = str(step)
    if allow_unsafe is not False:
        _check_flag("allow_unsafe", allow_unsafe)
    if precise is not False:
        _check_flag("precise", precise)
    given = (q, k, v, g, beta, A_log, dt_bias, out, initial_state, final_state, cu_seqlens)
    eager = _nothing_listens()
    if eager:
        states = (initial_state is None, final_state is None, final_state is initial_state)
        inference = torch.is_inference_mode_enabled()
        shape = getattr(q, "shape", None)  # shapes that take turns, as prompts and single tokens do, keep their plans
        kind = (scale, lower_bound, step, allow_unsafe, precise, states, cu_seqlens is None, inference, shape)
        plan = call_plan.find(kind)
        if plan is not None and plan.run(given, _check_offsets):
            return
    values = (
        *given[:5],
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        *given[-3:],
        step,
        DEFAULT_CHUNK,
        allow_unsafe,
        precise,
    )
    if not (eager and _are_plain(given)) or torch.jit.is_tracing():  # which a plan's guard tells by the dispatch keys
        _dispatch(*values)
        return
    call = _run(*values)
    if call is not None:
        call_plan.remember(kind, given, *call)


def _nothing_listens() -> bool:
    """Whether no dispatch mode, transform, tracer or forward-mode derivative stands between a call and its kernel.

    Plain tensors then need no dispatcher, which takes two thirds of what a call like one before costs without it.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
    )


def _are_plain(given: tuple[Tensor | None, ...]) -> bool:
    """Whether no subclass wants to see the call. Raises TypeError for what is no tensor, and says so plainly."""
    if not _PLAIN.issuperset(map(type, given)):
        for name, x in zip(_GIVEN, given, strict=True):
            if x is not None and not isinstance(x, Tensor):
                raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor, {_SHAPES[name]}")
        return False
    return not (given[0] is None or given[0].is_meta)


def forward(
    inputs: Inputs,
    step: int | str | None = "fused_two_kernel",
    chunk: int = DEFAULT_CHUNK,
    device: torch.device | str | None = None,
    allow_unsafe: bool = False,
    precise: bool = False,
) -> Result:
    """Runs a step on `inputs` and returns its out [B, T, H, V] bf16 and final_state [N, H, V, K].

    The final state has the dtype of the initial state, or fp32 if there is none. `device` moves the inputs first.
    `step`, `allow_unsafe` and `precise` as in `fwd`.
    Kernels edited since they were loaded are built and loaded first. Raises what `fwd` and `native.load` raise.
    """
    from kda_lab.inputs import Result, check_inputs

    check_inputs(inputs)
    chunk = arguments.whole("chunk", chunk)
    _check_flag("allow_unsafe", allow_unsafe)
    _check_flag("precise", precise)
    if device is not None:
        inputs = inputs.to(device)
    native.load(inputs.q.device.type)
    state = inputs.initial_state
    shape = (max(inputs.N, 0), inputs.H, inputs.V, inputs.K)
    final_state = torch.empty(shape, dtype=_F32 if state is None else state.dtype, device=inputs.q.device)
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    _dispatch(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        arguments.number("scale", inputs.scale),
        out,
        inputs.A_log,
        inputs.dt_bias,
        arguments.number("lower_bound", inputs.lower_bound),
        state,
        final_state,
        inputs.cu_seqlens,
        None if step is None else str(step),
        chunk,
        allow_unsafe,
        precise,
    )
    return Result(out, final_state)


def lower_bound_limit(step: int | str | None = None, chunk: int = DEFAULT_CHUNK, device: str = "cpu") -> float:
    """The lowest `lower_bound` that `step` can represent on `device` with chunks of `chunk` tokens."""
    chunk = arguments.whole("chunk", chunk, least=1)
    return _limit(_find_step(native.load(device), None if step is None else str(step)), chunk)


def check_lower_bound(
    lower_bound: float,
    step: int | str | None = None,
    chunk: int = DEFAULT_CHUNK,
    device: str = "cpu",
    allow_unsafe: bool = False,
) -> None:
    """Raises what `fwd` raises for this lower_bound."""
    lower_bound = arguments.number("lower_bound", lower_bound)
    chunk = arguments.whole("chunk", chunk, least=1)
    _check_lower_bound(
        lower_bound, _find_step(native.load(device), None if step is None else str(step)), chunk, allow_unsafe
    )


# The operator. `step` is None, a number as a string, or a slug: tracing needs no library to resolve it.
_SCHEMA = """fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, Tensor A_log,
    Tensor dt_bias, float lower_bound, Tensor? initial_state, Tensor(b!)? final_state, Tensor? cu_seqlens,
    str? step=None, int chunk=16, bool allow_unsafe=False, bool precise=False) -> ()"""


def _dispatch(*args: Any) -> None:
    """Calls the operator. To its kernel what torch.func.grad differentiates looks as if it required no grad."""
    if not torch.compiler.is_compiling():
        _check_grad(args)
    _op(*args)


def _fwd(*args: Any, **kwargs: Any) -> None:
    """The operator's kernel."""
    _run(*args, **kwargs)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None,
    final_state: Tensor | None,
    cu_seqlens: Tensor | None,
    step: str | None = None,
    chunk: int = DEFAULT_CHUNK,
    allow_unsafe: bool = False,
    precise: bool = False,
) -> tuple[native.Library, int, KdaArgs] | None:
    """Checks and runs; returns what a plan for calls like this one needs, None if they need to be checked again."""
    if q is None or q.dim() != 4:
        raise _bad_tensor("q", q)
    if v is None or v.dim() != 4:
        raise _bad_tensor("v", v)
    device = q.device
    B, T, H, K = keys_shape = q.shape
    V = v.shape[3]
    values_shape = (B, T, H, V)
    tensors = [
        ("q", q, _BF16, keys_shape),
        ("k", k, _BF16, keys_shape),
        ("v", v, _BF16, values_shape),
        ("g", g, _BF16, keys_shape),
        ("beta", beta, _BF16, (B, T, H)),
        ("A_log", A_log, _F32, (H,)),
        ("dt_bias", dt_bias, _F32, (H, K)),
        ("out", out, _BF16, values_shape),
    ]
    N, offsets_dtype, initial_dtype, final_dtype = B, NONE, NONE, NONE
    if cu_seqlens is not None:
        N, offsets_dtype = _check_cu_seqlens(cu_seqlens, B)
        tensors.append(("cu_seqlens", cu_seqlens, cu_seqlens.dtype, (N + 1,)))
    if initial_state is not None:
        initial_dtype = _state_dtype("initial_state", initial_state)
        tensors.append(("initial_state", initial_state, initial_state.dtype, (N, H, V, K)))
    if final_state is not None:
        final_dtype = _state_dtype("final_state", final_state)
        tensors.append(("final_state", final_state, final_state.dtype, (N, H, V, K)))

    # One pass over the tensors: half of what a call costs. `copies` keeps memory until the work is enqueued.
    grad = torch.is_grad_enabled()
    pointers, spans, copies = {}, {}, []
    for name, x, dtype, shape in tensors:
        if x is None or x.dtype is not dtype or x.shape != shape or x.device != device:
            raise _bad_tensor(name, x, dtype, shape, device)
        if grad and x.requires_grad:
            raise _forward_only(name)
        begin = x.data_ptr()
        if not begin and x.nbytes:
            raise ValueError(f"{name} has no memory: its storage was resized to 0 bytes; give it its memory back first")
        spans[name] = begin, begin + x.nbytes
        if begin & 15 or not x.is_contiguous() or x.is_neg():
            if name in _WRITTEN:
                raise _bad_layout(name, x)
            spans[name] = begin, begin + _extent(x)
            x = x.resolve_neg().clone(memory_format=torch.contiguous_format)
            copies.append(x)
            begin = x.data_ptr()
        pointers[name] = begin
    for name in _WRITTEN:
        if name in spans:
            begin, end = spans[name]
            for other, (other_begin, other_end) in spans.items():
                if begin < other_end and other_begin < end and other != name:
                    in_place = pointers[name] == pointers[other] and initial_dtype == final_dtype
                    if not (in_place and {name, other} == _STATES):
                        raise _overlap(name, other)

    device_type = device.type
    library = native.loaded(device_type) or native.load(device_type)
    rung = _find_step(library, step, device.index)
    if rung.chunks and chunk not in rung.chunks:
        raise ValueError(f"chunk is {chunk}; step {rung.name} on {device_type} runs {_either(rung.chunks)}")
    _check_lower_bound(lower_bound, rung, chunk, allow_unsafe)
    if not abs(scale) <= _LARGEST_SCALE:
        raise ValueError(f"scale is {scale}; expected a finite number that fp32 holds, such as K ** -0.5")
    if cu_seqlens is not None:
        _check_offsets(cu_seqlens, T)

    if H == 0:
        return None  # no tensor has an element but cu_seqlens
    args = KdaArgs(
        _STRUCT_BYTES,
        *(B, T, H, K, V, N, chunk, scale, lower_bound),
        initial_state_dtype=initial_dtype if pointers.get("initial_state") else NONE,  # an empty tensor has no address
        final_state_dtype=final_dtype if pointers.get("final_state") else NONE,
        cu_seqlens_dtype=offsets_dtype,
        precise=precise,
        **pointers,
    )
    gpu = device.index if device_type == "cuda" else None
    if gpu is not None:
        args.device = gpu
        args.stream = torch._C._cuda_getCurrentRawStream(gpu)
    args.workspace_bytes = library.workspace_bytes(rung.number, args)
    _memory = call_plan.give_workspace(args, q)  # held until the work is enqueued
    if annotate.active():
        args.push_range, args.pop_range = annotate.stage_callbacks()
        sizes = {"B": B, "T": T, "H": H, "K": K, "V": V, "N": N, "chunk": chunk}
        with annotate.range(rung.name), annotate.range(f"{rung.name}/forward", category="forward", payload=sizes):
            call_plan.launch(library, rung.number, args, gpu)
    else:
        call_plan.launch(library, rung.number, args, gpu)
    for x in (out, final_state):
        if x is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)  # autograd must know what it may no longer use
    alike = not copies and all(pointers.values()) and not any(x.requires_grad for _, x, _, _ in tensors)
    return (library, rung.number, args) if alike else None


def _extent(x: Tensor) -> int:
    """Bytes from the first to the last element of a view, those between that are not its own included."""
    if x.numel() == 0:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))) * x.element_size()


def _fwd_fake(*args: Any, **_: Any) -> None:
    """Tracing: the operator returns nothing and its checks wait for real tensors, but two calls are refused at once."""
    _check_grad(args)
    for argument, x in zip(_op._schema.arguments, args, strict=False):
        if isinstance(x, Tensor) and x.device != args[0].device:
            raise _bad_tensor(argument.name, x, x.dtype, x.shape, args[0].device)


@functools.lru_cache
def _find_step(library: native.Library, step: str | None, gpu: int | None = None) -> native.LibraryStep:
    capability = registry.capability(gpu) if library.device == "cuda" and step is None else 0
    return registry.find(library.steps, step, library.device, capability)


# Checks. The functions that return an exception run only once something is wrong.
_SHAPES = {
    "q": "[B, T, H, K]",
    "k": "[B, T, H, K]",
    "v": "[B, T, H, V]",
    "g": "[B, T, H, K]",
    "beta": "[B, T, H]",
    "out": "[B, T, H, V]",
    "A_log": "[H]",
    "dt_bias": "[H, K]",
    "initial_state": "[N, H, V, K]",
    "final_state": "[N, H, V, K]",
    "cu_seqlens": "[N + 1]",
}


def _bad_tensor(
    name: str,
    x: Tensor | None,
    dtype: torch.dtype = _BF16,
    shape: tuple[int, ...] | None = None,
    device: torch.device | None = None,
) -> Exception:
    if x is None:
        return TypeError(f"{name} is None; expected a torch.Tensor, {_SHAPES[name]} {dtype}")
    if shape is None or x.shape != shape:
        sizes = "" if shape is None else f" = {list(shape)}, with the sizes of q and v"
        if name in ("initial_state", "final_state"):
            sizes += ", one state for each batch row, or for each sequence of cu_seqlens"
        return ValueError(f"{name} has shape {list(x.shape)}; expected {_SHAPES[name]}{sizes}")
    if x.dtype is not dtype:
        return TypeError(f"{name} is {x.dtype}; expected {dtype}: pass {name}.to({dtype})")
    return ValueError(f"{name} is on {x.device}, but q is on {device}; all tensors must be on one device")


def _forward_only(name: str) -> Exception:
    return NotImplementedError(
        f"{name} requires grad, but kda_lab.fwd is forward-only: there is no backward. Call it under torch.no_grad() "
        f"or torch.inference_mode(), or pass {name}.detach()"
    )


def _check_grad(args: tuple[Any, ...]) -> None:
    """Refuses the operator's arguments if one of them requires grad, or is to be differentiated in forward mode."""
    grad, dual = torch.is_grad_enabled(), forward_ad._current_level >= 0
    for argument, x in zip(_op._schema.arguments, args, strict=False):
        if not isinstance(x, Tensor):
            continue
        if grad and x.requires_grad:
            raise _forward_only(argument.name)
        if dual and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{argument.name} has a tangent, but kda_lab.fwd has no derivative in forward mode: pass its primal, "
                "torch.autograd.forward_ad.unpack_dual(x).primal"
            )


def _state_dtype(name: str, state: Tensor) -> int:
    try:
        return _STATE_DTYPES[state.dtype]
    except KeyError:
        raise TypeError(f"{name} is {state.dtype}; expected torch.bfloat16 or torch.float32") from None


def _bad_layout(name: str, x: Tensor) -> Exception:
    what = f"has strides {x.stride()}" if not x.is_contiguous() else "starts at an address that is no multiple of 16"
    return ValueError(
        f"{name} {what}; it is written in place, so it must be contiguous and 16-byte aligned: pass a tensor "
        f"from torch.empty({list(x.shape)}, ...) and copy from it afterwards"
    )


def _overlap(name: str, other: str) -> Exception:
    allowed = " (only initial_state itself may be final_state)" if "initial_state" in (name, other) else ""
    return ValueError(f"{name} shares memory with {other}{allowed}; give {name} memory of its own")


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected True or False")


def _limit(step: native.LibraryStep, chunk: int) -> float:
    return -step.exponent_budget / chunk if step.exponent_budget else LOWEST_BOUND


def _check_lower_bound(lower_bound: float, step: native.LibraryStep, chunk: int, allow_unsafe: bool) -> None:
    if not math.isfinite(lower_bound):
        raise ValueError(f"lower_bound is {lower_bound}; expected a finite number, 0 or negative")
    if allow_unsafe:
        return
    if lower_bound > 0:
        raise ValueError(
            f"lower_bound is {lower_bound}; expected 0 or negative: with a positive bound the state grows by up "
            "to e^lower_bound a token. allow_unsafe=True runs it anyway"
        )
    limit = _limit(step, chunk)
    if lower_bound < limit:
        if step.exponent_budget:
            why = f"it needs |lower_bound| * chunk <= {step.exponent_budget:g}, or one of its factors overflows"
            fix = "a bound in that range, a smaller chunk, or a step without factored decay (0, 1 or 2)"
        else:
            why, fix = "below that the argument of exp is too coarse in fp32", "a bound in that range"
        raise ValueError(
            f"lower_bound is {lower_bound}; step {step.name} with chunk {chunk} can represent {limit:g} to 0: {why}. "
            f"Use {fix}; allow_unsafe=True runs it anyway"
        )


def _check_cu_seqlens(cu_seqlens: Tensor, B: int) -> tuple[int, int]:
    """Returns N and the KdaDtype."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; expected [N + 1], one dimension, N sequences")
    if cu_seqlens.dtype not in _OFFSET_DTYPES:
        raise TypeError(f"cu_seqlens is {cu_seqlens.dtype}; expected torch.int32 or torch.int64")
    if B != 1:
        raise ValueError(
            f"q has {B} batch rows and cu_seqlens is given; expected B = 1: put all sequences one after another "
            "into one row, [1, T, H, K], or leave cu_seqlens out"
        )
    return cu_seqlens.numel() - 1, _OFFSET_DTYPES[cu_seqlens.dtype]


def _check_offsets(cu_seqlens: Tensor, T: int) -> None:
    """Checks the entries of cu_seqlens. The host waits for those on a GPU, so it reads a version of a tensor once."""
    on_gpu = cu_seqlens.device.type == "cuda"
    if on_gpu and (torch.cuda.is_current_stream_capturing() or _known_right(cu_seqlens, T)):
        return  # while a graph is captured nothing may wait: the kernels clamp to [0, T]
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens[0] is {offsets[0]}; expected 0, the first token")
    for index, (begin, end) in enumerate(itertools.pairwise(offsets), start=1):
        if end < begin:
            raise ValueError(
                f"cu_seqlens[{index}] is {end}, less than cu_seqlens[{index - 1}] = {begin}; expected offsets that "
                "never decrease"
            )
    if offsets[-1] != T:
        raise ValueError(
            f"cu_seqlens[{len(offsets) - 1}], the last, is {offsets[-1]}; expected T = {T}, the number of tokens"
        )
    if on_gpu:
        _remember_right(cu_seqlens, T)


# By id of a cu_seqlens that was right: the tensor, its version then, and T.
_right_offsets: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}


def _known_right(cu_seqlens: Tensor, T: int) -> bool:
    tensor, *then = _right_offsets.get(id(cu_seqlens), (None,))
    return tensor is not None and tensor() is cu_seqlens and then == [cu_seqlens._version, T]


def _remember_right(cu_seqlens: Tensor, T: int) -> None:
    if not cu_seqlens.is_inference():  # such a tensor counts no versions
        key = id(cu_seqlens)
        reference = weakref.ref(cu_seqlens, lambda _: _right_offsets.pop(key, None))
        _right_offsets[key] = (reference, cu_seqlens._version, T)


def _either(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, numbers))


_library = torch.library.Library("kda_lab", "DEF")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _library.impl("fwd", _fwd, _key)
torch.library.register_fake("kda_lab::fwd", _fwd_fake, lib=_library)
_op = torch.ops.kda_lab.fwd.default
