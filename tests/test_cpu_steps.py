"""What the CPU steps promise beyond being right: which exponential they call, threads, vectors, ranges, the C ABI."""

from __future__ import annotations

import ctypes
import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ladder import STEPS, STEPS_AND_CHUNKS, assert_right, bits

import kda_lab
from kda_lab import native, reference
from kda_lab.compare import assert_close
from kda_lab.inputs import REGIMES, Inputs, make_inputs
from kda_lab.native.library import BF16, I64, NONE, KdaArgs, RangePop, RangePush

CSRC = Path(__file__).parents[1] / "csrc"
SOURCES = {path.stem.split("_", 1)[1]: path for path in sorted((CSRC / "cpu/steps").glob("*.cpp"))}
FLAGS = ("-std=c++17", "-O3", "-fPIC")


def compile_with(*arguments: str | Path) -> None:
    compiler = native.compilers.find_cxx().path
    subprocess.run([compiler, *FLAGS, *map(str, arguments)], check=True, capture_output=True, text=True)


# Every regime, tails included


@pytest.mark.parametrize(("step", "chunk"), STEPS_AND_CHUNKS)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime(step: str, chunk: int, regime: str) -> None:
    lower_bound = -1.3 if step == "factored" else -5.0
    inputs = make_inputs(T=101, regime=regime, lower_bound=lower_bound, initial_state="fp32", seed=chunk)
    assert_right(inputs, step, chunk)


def test_decays_near_1_do_not_drift_in_the_definition() -> None:
    """Gates of -12 decay by 3e-5 a token: rounded to fp32, every token's decay would be off, to the same side."""
    inputs = make_inputs(T=4096, H=2, K=32, V=8, regime="retain")
    inputs = inputs.with_(beta=torch.full_like(inputs.beta, -8.0))  # writes too weak to replace what drifts
    result, expected = kda_lab.forward(inputs, step="token_by_token"), reference.recurrent(inputs)
    assert_close(result.final_state[:, 1], expected.final_state[:, 1], rms=2e-6, name="state of the constant head")


# Threads


def omp_threads(count: int) -> None:
    """Sets the threads of the library's OpenMP loops that this thread starts."""
    ctypes.CDLL("libgomp.so.1").omp_set_num_threads(count)


@pytest.mark.parametrize(("step", "chunk"), STEPS_AND_CHUNKS)
@pytest.mark.parametrize("layout", [{"B": 1, "H": 1}, {"B": 2, "H": 3}, {"seq_lens": (5, 0, 90, 17), "H": 3}])
def test_the_number_of_threads_changes_no_bit(step: str, chunk: int, layout: dict) -> None:
    inputs = make_inputs(**{"T": 112, "K": 40, "V": 72, "lower_bound": -1.3, "initial_state": "bf16", **layout})
    try:
        results = []
        for count in (1, 2, 5):
            omp_threads(count)
            results.append(kda_lab.forward(inputs, step=step, chunk=chunk))
    finally:
        omp_threads(int(os.environ["OMP_NUM_THREADS"]))
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert torch.equal(bits(actual), bits(expected))


def test_a_span_of_chunks_is_no_boundary() -> None:
    """The fused step works on a span of chunks at a time; what crosses that boundary must not change."""
    whole = make_inputs(T=1100, H=1, K=16, V=8, regime="retain")
    result = assert_right(whole, "fused_two_kernel")
    many = make_inputs(T=1100, H=40, K=16, V=8, regime="retain")  # the same work in spans of 6 chunks
    same_head = {name: getattr(whole, name) for name in ("q", "k", "v", "g", "beta")}
    many = many.with_(**{name: torch.cat([x, getattr(many, name)[:, :, 1:]], 2) for name, x in same_head.items()})
    assert torch.equal(bits(kda_lab.forward(many).out[:, :, :1]), bits(result.out))


# Base e, base 2


def called(source: Path, tmp_path: Path) -> set[str]:
    """Functions of the C library that the object file of a step calls."""
    compile_with("-c", source, "-o", tmp_path / "step.o")
    symbols = subprocess.run(["nm", "-u", tmp_path / "step.o"], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in symbols.splitlines()}


def test_naive_exp_calls_expf_and_rebased_ex2_calls_exp2f(tmp_path: Path) -> None:
    naive, rebased = called(SOURCES["naive_exp"], tmp_path), called(SOURCES["rebased_ex2"], tmp_path)
    assert "expf" in naive
    assert not {"exp2f", "exp", "exp2"} & naive
    assert "exp2f" in rebased  # and expf, once a head, for exp(A_log)
    assert not any(name.startswith("_ZGV") for name in naive | rebased), "a vector exp where a scalar one is taught"
    uses = re.findall(r"\bexpf\([^()]*", "\n".join(code_lines(SOURCES["rebased_ex2"])))
    assert uses == ["expf(args.A_log[h]"]


EXP2_PROBE = """
#include "{csrc}/cpu/common/simd.h"
using namespace kda::cpu;
extern "C" void exp2_all(const float* x, float* y, int64_t count) {{
  for (int64_t i = 0; i < count; i += kLanes) store(y + i, exp2(load(x + i)));
}}
"""


@pytest.mark.parametrize("architecture", [[], ["-march=native"]], ids=["baseline", "native"])
def test_the_vector_exp2_is_within_1_5_ulp(tmp_path: Path, architecture: list[str]) -> None:
    probe = tmp_path / "probe.cpp"
    probe.write_text(EXP2_PROBE.format(csrc=CSRC))
    compile_with(*architecture, "-shared", probe, "-o", tmp_path / "probe.so")
    bit_patterns = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32)  # about a million floats of every kind
    whole = np.arange(-160, 140, dtype=np.float32)
    x = np.concatenate([bit_patterns.view(np.float32), whole, np.float32([0.0, -0.0, np.inf, -np.inf, np.nan])])
    x = np.pad(x, (0, -len(x) % 16))
    y = np.empty_like(x)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (x, y))
    ctypes.CDLL(str(tmp_path / "probe.so")).exp2_all(*pointers, ctypes.c_int64(len(x)))
    with np.errstate(all="ignore"):
        expected = np.exp2(x.astype(np.float64))
        nearest = expected.astype(np.float32)
        is_whole = x == np.round(x)
    assert np.array_equal(np.isnan(y), np.isnan(x))
    finite = np.isfinite(nearest)
    assert np.array_equal(y[np.isinf(nearest)], nearest[np.isinf(nearest)])
    ulps = np.abs(y[finite] - expected[finite]) / np.spacing(nearest[finite]).astype(np.float64)
    assert ulps.max() <= 1.5
    assert np.array_equal(y[finite & is_whole], nearest[finite & is_whole])


# The vector code at other widths than this machine's

RUN_A_LIBRARY = """
import json, sys
import kda_lab
from kda_lab import compare, reference
from kda_lab.inputs import make_inputs
errors = []
for sizes in json.loads(sys.argv[1]):
    inputs = make_inputs(B=2, T=37, H=3, initial_state="fp32", **sizes)
    result, expected = kda_lab.forward(inputs), reference.recurrent(inputs)
    errors += [compare.relative_rms(*pair) for pair in zip(result, expected)]
print(json.dumps(errors))
"""


@pytest.mark.parametrize("architecture", [[], ["-mavx2", "-mfma"]], ids=["baseline", "avx2"])
def test_narrower_vectors_compute_the_same(tmp_path: Path, architecture: list[str]) -> None:
    if architecture and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    library = tmp_path / "libkda_cpu.so"
    compile_with(*architecture, "-O1", "-shared", CSRC / "cpu/library.cpp", *SOURCES.values(), "-o", library)
    sizes = [{"K": 128, "V": 128}, {"K": 20, "V": 7}, {"K": 1, "V": 33}]
    run = subprocess.run(
        [sys.executable, "-c", RUN_A_LIBRARY, json.dumps(sizes)],
        env=os.environ | {"KDA_LAB_CPU_LIBRARY": str(library)},
        check=True,
        capture_output=True,
        text=True,
    )
    errors = json.loads(run.stdout)
    assert len(errors) == 2 * len(sizes)
    assert max(errors[0::2]) < 3e-3
    assert max(errors[1::2]) < 1e-5


# The C ABI: checked again behind Python's back


def arguments(inputs: Inputs, keep: list, step: int, **changes: object) -> KdaArgs:
    """Arguments of a valid call but for `changes`; `keep` holds the memory they point to."""
    out, final_state = inputs.new_out(), torch.zeros(inputs.N, inputs.H, inputs.V, inputs.K, dtype=torch.bfloat16)
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    tensors |= {"out": out, "final_state": final_state}
    keep += tensors.values()
    fields = {name: getattr(inputs, name) for name in ("B", "T", "H", "K", "V", "N", "scale", "lower_bound")}
    fields |= {name: x.data_ptr() for name, x in tensors.items()}
    fields |= {"struct_bytes": ctypes.sizeof(KdaArgs), "chunk": 16, "final_state_dtype": BF16}
    args = KdaArgs(**fields)
    needed = native.load("cpu").workspace_bytes(step, args)
    workspace = torch.empty(needed + 256, dtype=torch.uint8)
    keep.append(workspace)
    args.workspace, args.workspace_bytes = -(-workspace.data_ptr() // 256) * 256, needed
    for name, value in changes.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize(
    ("step", "changes", "message"),
    [
        (5, {"struct_bytes": 8}, r"struct_bytes is 8, the library's KdaArgs has \d+: rebuild"),
        (5, {"B": -1}, r"B is -1; expected 0 to"),
        (5, {"H": 0}, r"H is 0; expected 1 to"),
        (5, {"T": 2**40, "H": 2**20}, r"q \[B, T, H, K\] would have more than 2\^63 bytes"),
        (5, {"chunk": 32}, r"chunk is 32; step 5 \(fused_two_kernel\) runs 16"),
        (1, {"chunk": 24}, r"chunk is 24; step 1 \(naive_exp\) runs 8, 16, 32, 64"),
        (1, {"chunk": 0}, r"chunk is 0; step 1 \(naive_exp\) runs 8, 16, 32, 64"),
        (5, {"q": None}, r"q is NULL"),
        (5, {"q": 8}, r"q is at 0x8; expected an address that is a multiple of 16"),
        (5, {"A_log": None}, r"A_log is NULL"),
        (5, {"final_state": None}, r"final_state_dtype is 1; expected KDA_NONE"),
        (5, {"final_state_dtype": NONE}, r"final_state_dtype is 0; expected KDA_BF16 or KDA_F32"),
        (5, {"B": 1, "N": 0, "cu_seqlens": 8, "cu_seqlens_dtype": I64}, r"cu_seqlens has 1 entry.* T is 20; expect"),
        (5, {"N": 3}, r"B is 2 and N is 3; expected B = 1 with cu_seqlens, and N = B without"),
        (5, {"scale": float("inf")}, r"scale is inf"),
        (5, {"lower_bound": float("nan")}, r"lower_bound is nan|lower_bound is -nan"),
        (5, {"workspace_bytes": 1}, r"workspace is .* with 1 bytes; expected \d+ bytes"),
        (5, {"workspace": None}, r"workspace is .*256-byte aligned"),
        (7, {}, r"step is 7; kda_steps\(\) lists those there are"),
    ],
)
def test_the_library_refuses(step: int, changes: dict, message: str) -> None:
    keep: list = []
    args = arguments(make_inputs(B=2, T=20, H=2, K=8, V=8), keep, min(step, 5), **changes)
    with pytest.raises(ValueError, match=message):
        native.load("cpu").forward(step, args)


def test_the_library_has_no_step_of_another_device() -> None:
    keep: list = []
    args = arguments(make_inputs(T=20, H=2, K=8, V=8), keep, 5)
    with pytest.raises(NotImplementedError, match=r"step 4 \(fused_one_kernel\) does not exist on the CPU"):
        native.load("cpu").forward(4, args)


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5])
def test_every_pass_opens_one_range_and_closes_it(step: int) -> None:
    events: list[str] = []
    push, pop = RangePush(lambda name: events.append(name.decode())), RangePop(lambda: events.append(""))
    pointers = {"push_range": ctypes.cast(push, ctypes.c_void_p), "pop_range": ctypes.cast(pop, ctypes.c_void_p)}
    keep: list = []
    args = arguments(make_inputs(T=20, H=2, K=8, V=8), keep, step, **pointers)
    native.load("cpu").forward(step, args)
    ranges = {
        0: "recurrence",
        5: "prepare / recurrence",
    }
    chunked = (
        "gate activate_gate / accumulate_gate / / intra_chunk apply_decay / form_L_and_Mqk / invert_unit_lower / / "
        "recurrence"
    )
    assert [event or "/" for event in events] == f"{ranges.get(step, chunked)} /".split()


# The lesson is in the difference between the files


def code_lines(source: Path) -> list[str]:
    return [line for line in source.read_text().splitlines() if not line.lstrip().startswith("//")]


@pytest.mark.parametrize(("before", "after"), [("naive_exp", "rebased_ex2"), ("rebased_ex2", "factored")])
def test_one_idea_a_step(before: str, after: str) -> None:
    old, new = (SOURCES[step].read_text().splitlines() for step in (before, after))
    changed = [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[0] in "+-"][2:]
    assert 0 < len(changed) <= 80


def test_base_2_changes_nothing_but_the_base() -> None:
    """Undoing step 2's renaming gives step 1's code, but for the lines that set up the gate."""
    undo = [
        ("_log2", ""),
        ("exp2f", "expf"),
        ("step2", "step1"),
        ("static_cast<float>(kLog2e) * ", ""),
        ("kLog2e * ", ""),
    ]
    rebased = "\n".join(code_lines(SOURCES["rebased_ex2"]))
    rebased = re.sub(r"constexpr double kLog2e.*\n\n", "", rebased)
    naive = "\n".join(code_lines(SOURCES["naive_exp"]))
    for new, old in undo:
        rebased = rebased.replace(new, old)

    def squeeze(text: str) -> str:  # without comments, line breaks and alignment
        return re.sub(r"\s+", "", re.sub(r"//.*", "", text))

    assert squeeze(rebased) == squeeze(naive)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_one_short_file_with_its_manual_on_top(step: str) -> None:
    lines = SOURCES[step].read_text().splitlines()
    assert len(lines) <= 350
    assert max(map(len, lines)) <= 120
    first_code = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    manual = "\n".join(lines[:first_code])
    for heading in ("Idea", "Changed", "Profiler", "Cost", "Numerics", "`kda-lab diff"):
        assert heading in manual
    comments = sum("//" in line for line in lines) / len(lines)
    assert 0.15 <= comments <= 0.30
    functions = re.split(r"\n}\n", "\n".join(lines))
    assert max(text[text.rfind("\n\n") :].count("\n") for text in functions[:-1]) <= 45
