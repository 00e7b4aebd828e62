"""A call like one before: what was checked of its tensors is not checked again.

`fwd` asks each tensor a dozen questions from Python, which takes longer than a GPU needs for a few tokens. A plan keeps
the answers, and with them torch.compile's own guard, which compares types, dtypes, devices, sizes, strides, negation
and requires_grad of all tensors in C++, in a microsecond. What may differ between two calls of one kind is asked every
time: addresses, the values of cu_seqlens, the stream, the library. That tensors at certain addresses are aligned and
apart is remembered too: a model meets the same ones again and again.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from kda_lab import annotate, native
from kda_lab.native.library import KdaArgs


def _guards() -> Callable[..., Any] | None:
    """Makes a guard of tensors; None in a torch that has none like it, where every call is checked at length."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        make = functools.partial(TensorGuards, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        make(torch.empty(1)).check(torch.empty(1))
    except (ImportError, TypeError, RuntimeError):
        return None
    return make


_make_guard = _guards()
_increment_version = torch.autograd.graph.increment_version
_POINTERS = struct.Struct("11P")  # of KdaArgs, from q to cu_seqlens
_OUT, _INITIAL, _FINAL, _OFFSETS = range(7, 11)  # the places of tensors among them
_MOST = 64  # plans kept
MOST_ADDRESSES = 512  # sets of addresses kept in each, under 1 KB apiece: more than a model has layers
_ALIGNMENT = 256  # of a workspace

_plans: dict[Hashable, Plan] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A call whose tensors were right as they lay. Threads share it, so a call fills a KdaArgs of its own."""

    tensors_of: Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]  # those that are there, each once
    guard: Callable[..., bool]  # of these tensors
    args_at: Callable[..., bytes | None]  # of their addresses: `_args_at`, with its answers remembered
    library: native.Library
    step: int
    T: int
    gpu: int | None  # the index of a CUDA device
    counted: tuple[int, ...]  # places of written tensors whose versions autograd compares

    def run(self, given: Sequence[Tensor | None], check_offsets: Callable[[Tensor, int], None]) -> bool:
        """Runs the call, its tensors in the order of KdaArgs; False, and nothing done, if it is of another kind."""
        tensors = self.tensors_of(given)
        if not self.guard(*tensors) or annotate.active() or native.loaded(self.library.device) is not self.library:
            return False
        checked = self.args_at(*map(Tensor.data_ptr, tensors))
        if checked is None:
            return False
        if given[_OFFSETS] is not None:
            check_offsets(given[_OFFSETS], self.T)
        args = KdaArgs.from_buffer_copy(checked)
        if self.gpu is not None:
            args.stream = torch._C._cuda_getCurrentRawStream(self.gpu)
        _memory = give_workspace(args, tensors[0])  # held until the work is enqueued
        launch(self.library, self.step, args, self.gpu)
        for place in self.counted:
            _increment_version(given[place])
        return True


def _args_at(args: bytes, sizes: Sequence[int], order: Callable[..., Any], *addresses: int) -> bytes | None:
    """A plan's KdaArgs with tensors at `addresses`; None where the long way has to copy, or say what is wrong.

    `sizes` are the tensors' bytes; `order` brings addresses, followed by a 0, into the order of KdaArgs.
    """
    if not all(addresses) or functools.reduce(operator.or_, addresses) & 15:
        return None
    ends = sorted(map(operator.add, addresses, sizes))
    if any(map(operator.gt, ends, sorted(addresses)[1:])):  # two share memory; the long way says whether they may
        return None
    filled = bytearray(args)
    _POINTERS.pack_into(filled, KdaArgs.q.offset, *order((*addresses, 0)))
    return bytes(filled)


def give_workspace(args: KdaArgs, q: Tensor) -> Tensor | None:
    """Sets `args.workspace` to `args.workspace_bytes` of torch's memory on q's device, which the caller holds.

    Let go once the call is enqueued, it goes to what comes later in the stream. Calls never share it: they may run at
    once.
    """
    if not args.workspace_bytes:
        return None
    memory = q.new_empty((args.workspace_bytes + _ALIGNMENT) // 2)  # bf16
    args.workspace = -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT
    return memory


def launch(library: native.Library, step: int, args: KdaArgs, gpu: int | None) -> None:
    """Runs a checked call, on the GPU of this index if there is one."""
    if gpu is None or gpu == torch._C._cuda_getDevice():
        library.forward(step, args)
    else:
        with torch.cuda.device(gpu):  # the library's own guard leaves a context on the device that was current
            library.forward(step, args)


def find(key: Hashable) -> Plan | None:
    return _plans.get(key)


def remember(key: Hashable, given: Sequence[Tensor | None], library: native.Library, step: int, args: KdaArgs) -> None:
    """Keeps a call that was checked: tensors in the order of KdaArgs, none copied, empty or requiring grad.

    The key says which tensors are None, whether final_state is initial_state, and whether this is inference mode.
    """
    if _make_guard is None:
        return
    in_place = given[_FINAL] is given[_INITIAL]
    places = [place for place, x in enumerate(given) if x is not None and not (in_place and place == _FINAL)]
    tensors = [given[place] for place in places]
    sources = [places.index(place) if place in places else len(places) for place in range(len(given))]
    if in_place:
        sources[_FINAL] = sources[_INITIAL]
    kept = KdaArgs.from_buffer_copy(args)
    kept.push_range = kept.pop_range = None  # a profiler may have listened; addresses and stream are set in every call
    sizes = [x.nbytes for x in tensors]
    args_at = functools.partial(_args_at, bytes(kept), sizes, operator.itemgetter(*sources))
    if len(_plans) >= _MOST:
        _plans.clear()
    _plans[key] = Plan(
        tensors_of=operator.itemgetter(*places),
        guard=_make_guard(*tensors).check,
        args_at=functools.lru_cache(MOST_ADDRESSES)(args_at),
        library=library,
        step=step,
        T=args.T,
        gpu=tensors[0].device.index if library.device == "cuda" else None,
        counted=tuple(p for p in (_OUT, _FINAL) if given[p] is not None and not given[p].is_inference()),
    )
