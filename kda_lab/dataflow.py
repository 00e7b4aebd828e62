"""Where the data of a chunk is and what it costs to move it, counted from what the CUDA steps declare.

    moves(5)                          # bytes a token and head: what each kernel reads and writes in device memory
    on_chip("5 recurrence")           # what one CTA holds in registers and shared memory
    residency("5 recurrence", registers=217)  # how many such CTAs a multiprocessor can hold at most, and why no more

K = V = `head_size`. The compiled steps run chunk 16 and head sizes 64 and 128; other values say what the same layout
would need. What a profiler measured is kda_lab.profiling's business.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from kda_lab import registry

BF16, FP32 = 2, 4  # bytes

# One multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide, "Technical specifications").
REGISTER_BYTES = 65536 * 4
MAX_REGISTERS_PER_THREAD = 255
REGISTER_UNIT = 8  # registers of a thread are given out in this many at a time
SHARED_BYTES = 228 * 1024
SHARED_BYTES_PER_CTA = 227 * 1024
RESERVED_BYTES_PER_CTA = 1024  # of shared memory, by the system
MAX_THREADS = 2048
MAX_CTAS = 32


@dataclasses.dataclass(frozen=True)
class Move:
    """What one kernel reads or writes in device memory, counted once however often it is used."""

    kernel: str
    tensor: str
    way: str  # "read" or "write"
    bytes: float  # a token and head
    between_kernels: bool  # written by one kernel of the step to be read by another


@dataclasses.dataclass(frozen=True)
class Piece:
    """Something that one CTA holds while it works on a chunk."""

    name: str
    where: str  # "registers" or "shared memory"
    bytes: int


@dataclasses.dataclass(frozen=True)
class Residency:
    """How many CTAs of a kernel one multiprocessor can hold at most."""

    ctas: int
    limited_by: str  # "shared memory", "registers", "threads", "CTAs"; all that are equally tight, joined by "and"
    threads: int  # of a CTA
    registers_per_thread: int  # that the named pieces take; indices, addresses and temporaries come on top
    compiled_registers: int | None  # of a thread, all in all, where they were given

    @property
    def occupancy(self) -> float:
        """Share of the threads that a multiprocessor can hold."""
        return self.ctas * self.threads / MAX_THREADS


def moves(step: int | str, chunk: int = 16, head_size: int = 128) -> list[Move]:
    """What the kernels of a CUDA step move, in order, in bytes a token and head (no states).

    Step 6: of calls that are not fused, so of more than one chunk.
    """
    number, C, D = registry.get(step, "cuda").number, chunk, head_size
    row, row_fp32, beta, triangle = D * BF16, D * FP32, BF16, (C + 1) / 2 * FP32
    image = _image_bytes(C, D) / C
    if number in (0, 4):
        kernel = {0: "recurrence", 4: "fused"}[number]
        inputs = [(kernel, name, "read", row, False) for name in ("q", "k", "v", "g")]
        return _moves([*inputs, (kernel, "beta", "read", beta, False), (kernel, "out", "write", row, False)])
    if number in (1, 2, 3):
        sums = [("g_cumsum", row_fp32), ("q_hat", row_fp32), ("k_hat", row_fp32)]
        triangles = [("INV_beta", triangle), ("Mqk", triangle)]
        return _moves(
            [
                *(("gate", name, "read", row, False) for name in ("g", "q", "k")),
                *(("gate", name, "write", size, True) for name, size in sums),
                *(("intra_chunk", name, "read", size, True) for name, size in sums),
                ("intra_chunk", "beta", "read", beta, False),
                *(("intra_chunk", name, "write", size, True) for name, size in triangles),
                *(("recurrence", name, "read", size, True) for name, size in sums + triangles),
                ("recurrence", "v", "read", row, False),
                ("recurrence", "out", "write", row, False),
            ]
        )
    return _moves(
        [
            *(("prepare", name, "read", row, False) for name in ("q", "k", "g")),
            ("prepare", "beta", "read", beta, False),
            ("prepare", "image", "write", image, True),
            ("recurrence", "image", "read", image, True),
            ("recurrence", "v", "read", row, False),
            ("recurrence", "out", "write", row, False),
        ]
    )


def kernels() -> tuple[str, ...]:
    """The kernels that `on_chip` knows, such as "5 recurrence"."""
    return tuple(_LAYOUTS)


def on_chip(kernel: str, chunk: int = 16, head_size: int = 128) -> list[Piece]:
    """What one CTA of a kernel holds while it works on a chunk. Raises ValueError naming the kernels there are."""
    return _layout(kernel).pieces(chunk, head_size)


def residency(kernel: str, chunk: int = 16, head_size: int = 128, registers: int | None = None) -> Residency:
    """How many CTAs fit on a multiprocessor at most: 0 where not even one does.

    registers: of a thread, as compiled (kda_lab.profiling.views.registers). None: the named pieces alone are counted,
    and more CTAs seem to fit than do.
    """
    threads, holders = _layout(kernel).threads(head_size)
    held = {place: sum(p.bytes for p in on_chip(kernel, chunk, head_size) if p.where == place) for place in PLACES}
    named = -(-held["registers"] // (4 * holders))
    shared = held["shared memory"] + RESERVED_BYTES_PER_CTA
    limits = {
        "shared memory": SHARED_BYTES // shared if held["shared memory"] <= SHARED_BYTES_PER_CTA else 0,
        "registers": REGISTER_BYTES // held["registers"] if named <= MAX_REGISTERS_PER_THREAD else 0,
        "threads": MAX_THREADS // threads,
        "CTAs": MAX_CTAS,
    }
    if registers is not None:
        limits["registers"] = ctas_by_registers(registers, threads)
    fewest = min(limits.values())
    tightest = " and ".join(name for name, ctas in limits.items() if ctas == fewest)
    return Residency(fewest, tightest, threads, named, registers)


def ctas_by_registers(registers: int, threads: int) -> int:
    """How many CTAs of so many threads the registers of a multiprocessor are enough for."""
    taken = 4 * threads * -(-registers // REGISTER_UNIT) * REGISTER_UNIT
    return min(REGISTER_BYTES // taken, MAX_THREADS // threads)


PLACES = ("registers", "shared memory")


@dataclasses.dataclass(frozen=True)
class _Layout:
    pieces: Callable[[int, int], list[Piece]]  # of (chunk, head size)
    threads: Callable[[int], tuple[int, int]]  # of (head size): all threads, and those that hold the registers' pieces


def _moves(rows: list[tuple[str, str, str, float, bool]]) -> list[Move]:
    return [Move(*row) for row in rows]


def _image_bytes(C: int, D: int) -> int:
    """ChunkImage of steps 4 to 6: three bf16 matrices [C, D], the decay in fp32, two bf16 squares; 128-byte aligned."""
    return -(-(3 * C * D * BF16 + D * FP32 + 2 * C * C * BF16) // 128) * 128


def _fused(C: int, D: int) -> list[Piece]:
    rest = {"image of the chunk": _image_bytes(C, D), "v of two chunks": 2 * C * D * BF16, "k_inv": C * D * BF16}
    rest |= {"L": C * C * FP32, "sums of the gate": C // 2 * D * FP32, "beta": C * FP32}
    return _state(D, D) + _shared(rest)


def _prepare_5(C: int, D: int) -> list[Piece]:
    rest = {"image of the chunk": _image_bytes(C, D), "k_inv": C * D * BF16, "L": C * C * FP32}
    rest |= {"sums of the gate": C // 4 * D * FP32, "beta": C * FP32}
    return _rows(C, D) + _shared(rest)


def _prepare_6(C: int, D: int) -> list[Piece]:
    squares = C * C * FP32 + 3 * C * C * BF16  # L; Mqk as two bf16; what INV's rounding left
    rest = {"image of the chunk": _image_bytes(C, D), "q, g, k, also the next chunk's": 3 * C * D * BF16}
    rest |= {"L, Mqk, INV or sums of the gate": max(squares, C // 4 * D * FP32), "beta": C * FP32}
    rest |= {"bias of the gate": D * FP32, "decay to the middle row": D * FP32}
    return _rows(C, D) + _shared(rest)


def _recurrence(step: int, rows: int | None = None) -> Callable[[int, int], list[Piece]]:
    """A CTA that carries `rows` rows of the state (None: all)."""

    def pieces(C: int, D: int) -> list[Piece]:
        stages, columns = _constant(step, "STAGES"), rows or D
        ring = {f"images of {stages} chunks": stages * _image_bytes(C, D)}
        ring[f"v of {stages} chunks"] = stages * C * columns * BF16
        return _state(columns, D) + _shared(ring)

    return pieces


def _state(rows: int, D: int) -> list[Piece]:
    return [Piece("state", "registers", rows * D * FP32), Piece("state in bf16", "registers", rows * D * BF16)]


def _rows(C: int, D: int) -> list[Piece]:
    return [Piece("q, k", "registers", 2 * C * D * BF16), Piece("G", "registers", C * D * FP32)]


def _shared(pieces: dict[str, int]) -> list[Piece]:
    return [Piece(name, "shared memory", size) for name, size in pieces.items()]


def _constant(step: int, name: str) -> int:
    """A constexpr int of a step's source, so that the layout moves with the kernel it describes."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in registry.get(step, "cuda").sources["cuda"])
    return int(re.search(rf"constexpr int {name} = (\d+);", text)[1])


def _warpgroups(D: int) -> tuple[int, int]:
    """Step 6's recurrence: a warpgroup of consumers for 64 rows; the producer is one too, or a warp beside one."""
    consumers = D // 64 * 128
    return (consumers + 128 if D > 64 else consumers + 32, consumers)


_LAYOUTS = {
    "4 fused": _Layout(_fused, lambda D: (2 * D, 2 * D)),
    "5 prepare": _Layout(_prepare_5, lambda D: (D, D)),
    "5 recurrence": _Layout(_recurrence(5), lambda D: (2 * D, 2 * D)),
    "6 prepare": _Layout(_prepare_6, lambda D: (D, D)),
    "6 recurrence": _Layout(_recurrence(6), _warpgroups),
    "6 recurrence, split": _Layout(_recurrence(6, rows=64), lambda D: _warpgroups(64)),
}


def _layout(kernel: str) -> _Layout:
    if kernel not in _LAYOUTS:
        raise ValueError(f"kernel is {kernel!r}; expected one of {', '.join(_LAYOUTS)}")
    return _LAYOUTS[kernel]
