"""What dataflow counts, against what the CUDA sources declare and what the design says of the byte floors."""

from __future__ import annotations

import subprocess

import pytest

from kda_lab import bench, dataflow, registry
from kda_lab.inputs import make_inputs
from kda_lab.native import CompilerNotFound, csrc_dir, find_nvcc
from kda_lab.profiling import metrics, recorded, views

CUDA_STEPS = [step.number for step in registry.steps() if "cuda" in step.devices]
TYPES = {
    "4 fused": "step4::Smem<{D}>",
    "5 prepare": "step5::PrepareSmem<{D}>",
    "5 recurrence": "step5::RecurrenceStage<{D}>[kda::step5::STAGES]",
    "6 prepare": "step6::PrepareSmem<{D}, false>",
    "6 recurrence": "step6::RecurrenceStage<{D}, {D} / 64, false>[kda::step6::STAGES]",
    "6 recurrence, split": "step6::RecurrenceStage<{D}, 1, false>[kda::step6::STAGES]",
}


@pytest.mark.slow
def test_shared_memory_is_what_the_kernels_declare(tmp_path):
    """The compiler compares: sizes here may leave out the padding behind a structure, nothing more."""
    try:
        nvcc = find_nvcc()[0].path
    except CompilerNotFound as error:
        pytest.skip(str(error))
    lines = [f'#include "{csrc_dir()}/cuda/steps/{registry.get(n, "cuda").name}.cu"' for n in (4, 5, 6)]
    for kernel, pattern in TYPES.items():
        for D in (64, 128):
            pieces = dataflow.on_chip(kernel, 16, D)
            counted = sum(piece.bytes for piece in pieces if piece.where == "shared memory")
            declared = f"sizeof(kda::{pattern.format(D=D)})"
            padding = f"{declared} >= {counted} && {declared} < {counted} + (kernel_stages) * 1024"
            stages = 8 if "recurrence" in kernel else 1
            lines.append(f'static_assert({padding.replace("kernel_stages", str(stages))}, "{kernel}, D {D}");')
    source = tmp_path / "sizes.cu"
    source.write_text("\n".join(lines))
    command = [nvcc, "-std=c++17", "-arch=sm_90a", "-O0", "-ptx", "-o", str(tmp_path / "sizes.ptx"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def total(step: int, between: bool | None = None) -> float:
    return sum(m.bytes for m in dataflow.moves(step) if between is None or m.between_kernels is between)


@pytest.mark.parametrize("step", CUDA_STEPS)
def test_inputs_and_outputs_are_moved_once_at_least(step):
    inputs = make_inputs(T=16, H=2)
    assert total(step, between=False) == bench.io_bytes(inputs) / (inputs.T * inputs.H)


@pytest.mark.parametrize("step", CUDA_STEPS)
def test_what_is_read_between_kernels_was_written(step):
    moves = [move for move in dataflow.moves(step) if move.between_kernels]
    written = {move.tensor: move.bytes for move in moves if move.way == "write"}
    assert {move.tensor for move in moves if move.way == "read"} == set(written)
    assert all(move.bytes == written[move.tensor] for move in moves)


@pytest.mark.parametrize("step", CUDA_STEPS)
def test_every_kernel_that_moves_is_launched(step):
    text = registry.get(step, "cuda").sources["cuda"][0].read_text()
    for kernel in {move.kernel for move in dataflow.moves(step)}:
        assert f'"{kernel}", args' in text


def test_counts_of_the_published_design():
    """Design notes: prepare reads 770 and writes 864, recurrence writes 256, one pass over everything is 1,282."""
    of = {(m.kernel, m.way): 0.0 for m in dataflow.moves(5)}
    for move in dataflow.moves(5):
        of[move.kernel, move.way] += move.bytes
    expected = {("prepare", "read"): 770, ("prepare", "write"): 864, ("recurrence", "write"): 256}
    assert {key: of[key] for key in expected} == expected
    assert total(4) == 1282


def test_fusing_leaves_nothing_between_kernels_and_splitting_brings_some_back():
    assert total(4, between=True) == 0
    assert 0 < total(5, between=True) < total(3, between=True)


def test_residency_is_the_tightest_limit():
    one = dataflow.residency("5 prepare")
    assert (one.threads, one.limited_by) == (128, "shared memory")
    held = sum(p.bytes for p in dataflow.on_chip("5 prepare") if p.where == "shared memory")
    assert one.ctas == 228 * 1024 // (held + 1024)
    assert one.occupancy == one.ctas * 128 / 2048


@pytest.mark.parametrize("kernel", dataflow.kernels())
@pytest.mark.parametrize("head_size", [64, 128])
def test_registers_are_recorded_of_every_kernel(kernel, head_size):
    """A kernel that the recording does not know would seem to fit more often than it does."""
    if (kernel, head_size) == ("6 recurrence, split", 64):
        pytest.skip("a head size of 64 is not split: it is one warpgroup's")
    registers = views.registers(recorded.load(), kernel, head_size)
    fits = dataflow.residency(kernel, 16, head_size, registers)
    assert fits.compiled_registers == registers > 0
    assert fits.ctas <= dataflow.residency(kernel, 16, head_size).ctas
    assert views.registers(None, kernel, head_size) is None


@pytest.mark.parametrize(("kernel", "step"), [("4 fused", 4), ("5 prepare", 5), ("5 recurrence", 5), ("6 prepare", 6)])
@pytest.mark.ncu_report
def test_residency_is_what_the_profiler_reports(kernel, step):
    recording = recorded.load()
    occupancy = metrics.occupancy(recording.ncu(step), kernel.split()[1])
    fits = dataflow.residency(kernel, registers=views.registers(recording, kernel))
    assert fits.ctas == min(occupancy["blocks_per_multiprocessor"].values())
    assert fits.occupancy == pytest.approx(occupancy["possible"] / 100)
    assert occupancy["limited_by"] in fits.limited_by


def test_registers_are_given_out_in_eights_and_ties_are_named():
    # 80 of 128 threads: 6 CTAs of 65,536 registers; 81 count as 88, so 5
    assert [dataflow.residency("6 prepare", registers=n).ctas for n in (80, 81)] == [6, 5]
    assert dataflow.residency("6 prepare", registers=80).limited_by == "registers"
    assert dataflow.residency("6 recurrence", registers=168).limited_by == "shared memory and registers"


def test_what_does_not_fit_says_why():
    assert dataflow.residency("4 fused", 16, 256).limited_by == "registers"
    assert dataflow.residency("5 recurrence", 64, 128).ctas == 0
    assert dataflow.residency("5 recurrence", 64, 128).limited_by == "shared memory"


def test_an_unknown_kernel_is_named():
    with pytest.raises(ValueError, match="'7 fused'; expected one of 4 fused, 5 prepare"):
        dataflow.on_chip("7 fused")


@pytest.mark.parametrize("chunk", [16, 64])
def test_of_the_triangles_only_what_exists_is_moved(chunk):
    rows = [i + 1 for i in range(chunk)]  # columns j <= i, as the workspace of steps 1 to 3 says
    for move in dataflow.moves(3, chunk):
        if move.tensor in ("INV_beta", "Mqk"):
            assert move.bytes == 4 * sum(rows) / chunk


@pytest.mark.parametrize("name", recorded.available())
def test_what_was_measured_is_near_what_is_counted(name):
    """Memory moves in pieces of 32 bytes, and a cache keeps some; neither is much of whole tensors."""
    measured = views.moved(recorded.load(name), CUDA_STEPS)
    assert len(measured) == len(CUDA_STEPS)
    for step in CUDA_STEPS:
        assert measured[registry.get(step, "cuda").name] == pytest.approx(total(step), rel=0.06)
