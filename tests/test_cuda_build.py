"""Every CUDA step compiles for every architecture it promises, and its machine code is what the lessons say. No GPU.

The first run compiles everything, on all cores (a few minutes on two); later runs find it in the cache.
"""

from __future__ import annotations

import concurrent.futures
import os
import re

import pytest

from kda_lab import native, sass

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
EXPONENTIAL = "exp_throughput"  # the micro-benchmark: also for sm_75, which the steps do not run on

# Registers of a thread and bytes spilled by it, at most, on any of them: what the manuals say of occupancy rests on it.
BUDGETS = {
    "0_token_by_token": {"recurrence": (96, 0)},
    "1_naive_exp": {"gate": (48, 0), "intra_chunk": (64, 0), "recurrence": (128, 0)},
    "2_rebased_ex2": {"gate": (48, 0), "intra_chunk": (64, 0), "recurrence": (128, 0)},
    "3_factored": {"gate": (48, 0), "intra_chunk": (64, 0), "recurrence": (128, 0)},
    "4_fused_one_kernel": {"fused": (255, 0)},
    "5_fused_two_kernel": {"prepare": (72, 8), "recurrence": (255, 0)},
    "6_register_state": {
        "prepare": (80, 0),
        "fused": (255, 0),
        **{f"prepare<{D}, {precise}, 1>": (128 if precise else 96, 0) for D in (64, 128) for precise in (0, 1)},
        "recurrence": (232, 0),
    },
    EXPONENTIAL: {"throughput": (64, 0), "single": (16, 0), "gate": (48, 0)},
}

# Arithmetic instructions of one call by nvcc 13.0, in `single<form>`; forms in exp_throughput.cu's order.
EXPONENTIAL_COST = {"expf": 8, "__expf": 5, "exp2f": 4, "ex2.approx": 4, "ex2.approx.ftz": 1, "rebased": 2}
ARITHMETIC = ("FFMA", "FMUL", "FADD", "FSETP", "SHF", "MUFU")

pytestmark = pytest.mark.cuda_compiler

BUILDS = [(name, arch) for name in BUDGETS for arch in ARCHITECTURES] + [(EXPONENTIAL, "sm_75")]


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str], dict[str, sass.Kernel]]:
    """The kernels of every step and of the micro-benchmark, by name, for every architecture."""

    def kernels(build: tuple[str, str]) -> dict[str, sass.Kernel]:
        return sass.kernels(sass.compile_step(*build))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(BUILDS, pool.map(kernels, BUILDS)))


def test_every_cuda_step_has_a_budget() -> None:
    listed = re.findall(r"KDA_STEP\((\d+), (\w+), ([^,]*)", (native.csrc_dir() / "steps.def").read_text())
    on_cuda = {f"{number}_{slug}" for number, slug, devices in listed if "CUDA" in devices}
    assert on_cuda | {EXPONENTIAL} == set(BUDGETS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), BUILDS)
def test_registers_and_spills_stay_inside_their_budgets(compiled, name: str, arch: str) -> None:
    kernels = compiled[name, arch].values()
    budgets = BUDGETS[name]  # by kernel, or by one of its instances
    assert {kernel.name.split("<")[0] for kernel in kernels} == {budget.split("<")[0] for budget in budgets}
    for kernel in kernels:
        registers, spilled_bytes = budgets.get(kernel.name) or budgets[kernel.name.split("<")[0]]
        assert kernel.registers <= registers, kernel.name
        assert max(kernel.spill_store_bytes, kernel.spill_load_bytes) <= spilled_bytes, kernel.name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_step_1_reduces_the_range_around_every_exponential(compiled, arch: str) -> None:
    for kernel in compiled["1_naive_exp", arch].values():
        assert kernel.opcodes["MUFU.EX2"] > 0, kernel.name
        assert kernel.opcodes["FFMA.SAT"] == kernel.opcodes["MUFU.EX2"], kernel.name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("step", ["2_rebased_ex2", "3_factored"])
def test_from_step_2_on_an_exponential_is_one_instruction(compiled, step: str, arch: str) -> None:
    for kernel in compiled[step, arch].values():
        assert kernel.opcodes["MUFU.EX2"] > 0, kernel.name
        assert kernel.opcodes["FFMA.SAT"] == 0, kernel.name
        # Without .ftz the argument would be compared with -126 and scaled, and the result scaled back.
        assert not any("-126" in instruction for instruction in kernel.instructions), kernel.name


def _moved(kernel: sass.Kernel) -> list[int]:
    """Instructions that reach memory or other lanes."""
    pipes = [sass.pipe(instruction) for instruction in kernel.instructions]
    return [pipes.count(pipe) for pipe in ("global", "shared", "shuffle")]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_step_2_changes_the_base_and_nothing_else(compiled, arch: str) -> None:
    before, after = compiled["1_naive_exp", arch], compiled["2_rebased_ex2", arch]
    assert set(before) == set(after)
    for name in before:
        for opcode in ("MUFU.EX2", "MUFU.RCP", "MUFU.RSQ"):  # as many exponentials, divisions and norms
            assert before[name].opcodes[opcode] == after[name].opcodes[opcode], (name, opcode)
        assert _moved(before[name]) == _moved(after[name]), name
        assert len(after[name].instructions) < len(before[name].instructions), name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_step_3_changes_one_kernel_only(compiled, arch: str) -> None:
    before, after = compiled["2_rebased_ex2", arch], compiled["3_factored", arch]
    for chunk in (16, 32, 64):
        for kernel in ("gate", "recurrence"):
            assert sass.diff(before[f"{kernel}<{chunk}>"], after[f"{kernel}<{chunk}>"]) == ""
        assert _moved(before[f"intra_chunk<{chunk}>"]) != _moved(after[f"intra_chunk<{chunk}>"])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", *ARCHITECTURES])
def test_what_one_exponential_costs(compiled, arch: str) -> None:
    """Claim 3: ex2.approx.ftz.f32 is no instruction of SM80 and newer only; sm_75 has it, as the same one MUFU.EX2."""
    if ", release 13.0" not in (version := native.find_nvcc()[0].version):
        pytest.skip(f"instructions are counted with nvcc 13.0, this is {version.splitlines()[-1]}")
    for form, cost in enumerate(EXPONENTIAL_COST.values()):
        opcodes = compiled[EXPONENTIAL, arch][f"single<{form}>"].opcodes
        counted = sum(count for opcode, count in opcodes.items() if opcode.split(".")[0] in ARITHMETIC)
        assert (form, counted, opcodes["MUFU.EX2"]) == (form, cost, 1)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", *ARCHITECTURES])
def test_the_microbenchmark_keeps_every_exponential(compiled, arch: str) -> None:
    for form in range(len(EXPONENTIAL_COST)):
        opcodes = compiled[EXPONENTIAL, arch][f"throughput<{form}>"].opcodes
        assert opcodes["MUFU.EX2"] % 32 == 0
        assert opcodes["MUFU.EX2"] >= 32
    assert compiled[EXPONENTIAL, arch]["throughput<4>"].opcodes["FFMA"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_split_has_the_matrix_products_of_the_fused_kernel(compiled, arch: str) -> None:
    """Steps 4 and 5 differ by the split alone: the ratio of their times measures it."""

    def products(step: str, size: int) -> int:
        return sum(
            count
            for name, kernel in compiled[step, arch].items()
            if name.endswith(f"<{size}>")
            for opcode, count in kernel.opcodes.items()
            if sass.pipe(opcode) == "tensor"
        )

    for size in (64, 128):
        assert products("4_fused_one_kernel", size) == products("5_fused_two_kernel", size) > 0
