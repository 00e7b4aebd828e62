"""A call like one before: what was checked of its tensors is not checked again.

`fwd` asks each tensor a dozen questions from Python, which takes longer than a GPU needs for a few tokens. A plan keeps
the answers, and with them torch.compile's own guard, which compares types, dtypes, devices, sizes, strides, negation
and requires_grad of all tensors in C++, in a microsecond. What may differ between two calls of one kind is asked every
time: addresses, their alignment and overlaps, the values of cu_seqlens, the stream, the library.
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
_POINTERS = struct.Struct("11P")  # of KdaArgs, from q to cu_seqlens
_OUT, _INITIAL, _FINAL, _OFFSETS = range(7, 11)  # the places of tensors among them
_MOST = 64  # plans kept
_ALIGNMENT = 256  # of a workspace

_plans: dict[Hashable, Plan] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A call whose tensors were right as they lay."""

    guard: Any
    tensors: int  # that it compares
    library: native.Library
    step: int
    args: bytes  # a KdaArgs without addresses and stream
    T: int
    device: torch.device
    spans: tuple[int, ...]  # bytes of each tensor, 0 for one that is not there
    counts_versions: tuple[bool, bool]  # of out and final_state: whether autograd watches what happens to them

    def run(
        self,
        given: Sequence[Tensor | None],
        check_offsets: Callable[[Tensor, int], None],
        launch: Callable[[native.Library, int, KdaArgs, torch.device], None],
    ) -> bool:
        """Runs the call, its tensors in the order of KdaArgs; False, and nothing done, if it is of another kind."""
        tensors = [x for x in given if x is not None]
        if len(tensors) != self.tensors or not self.guard.check(*tensors):
            return False
        if annotate.active() or native.loaded(self.device.type) is not self.library:
            return False
        pointers = [0 if x is None else x.data_ptr() for x in given]
        if functools.reduce(operator.or_, pointers) & 15 or self._overlaps(pointers):
            return False
        if given[_OFFSETS] is not None:
            check_offsets(given[_OFFSETS], self.T)
        args = KdaArgs.from_buffer_copy(self.args)
        _POINTERS.pack_into(args, KdaArgs.q.offset, *pointers)
        if self.device.type == "cuda":
            args.stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        give_workspace(self.library, self.step, args, tensors[0])
        launch(self.library, self.step, args, self.device)
        for counts, place in zip(self.counts_versions, (_OUT, _FINAL), strict=True):
            if counts:
                torch.autograd.graph.increment_version(given[place])
        return True

    def _overlaps(self, pointers: Sequence[int]) -> bool:
        """Whether a tensor that is written shares memory with another; the long way says whether it may."""
        for written in (_OUT, _FINAL) if pointers[_FINAL] else (_OUT,):
            begin = pointers[written]
            end = begin + self.spans[written]
            met = [b < end and begin < b + size for b, size in zip(pointers, self.spans, strict=True)]
            if met.count(True) > 1:
                return True
        return False


def give_workspace(library: native.Library, step: int, args: KdaArgs, q: Tensor) -> None:
    """Sets a call's workspace: memory of torch's allocator, on q's device, that lives as long as `args`.

    The library is asked in every call: on a CPU the size grows with the threads.
    """
    needed = library.workspace_bytes(step, args)
    if needed:
        args.owner = q.new_empty(needed // q.element_size() + _ALIGNMENT)
        args.workspace = -(-args.owner.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        args.workspace_bytes = needed


def find(key: Hashable) -> Plan | None:
    return _plans.get(key)


def remember(key: Hashable, given: Sequence[Tensor | None], library: native.Library, step: int, args: KdaArgs) -> None:
    """Keeps a call that was checked: tensors in the order of KdaArgs, none copied, empty or requiring grad."""
    if _make_guard is None:
        return
    tensors = [x for x in given if x is not None]
    kept = KdaArgs.from_buffer_copy(args)
    kept.stream = kept.workspace = kept.push_range = kept.pop_range = None
    kept.workspace_bytes = 0
    if len(_plans) >= _MOST:
        _plans.clear()
    _plans[key] = Plan(
        guard=_make_guard(*tensors),
        tensors=len(tensors),
        library=library,
        step=step,
        args=bytes(kept),
        T=args.T,
        device=tensors[0].device,
        spans=tuple(0 if x is None else x.nbytes for x in given),
        counts_versions=tuple(x is not None and not x.is_inference() for x in (given[_OUT], given[_FINAL])),
    )
