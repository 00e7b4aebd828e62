"""sass.py reads machine code right: on a listing written here by hand, and on a step compiled for real."""

from __future__ import annotations

import shutil

import pytest

from kda_lab import sass
from kda_lab.native import BuildError, CompilerNotFound

LISTING = """\
	.section	.text._ZN3kda5step220_GLOBAL__N__deadbeef4gateILi16EEEvPf,"ax",@progbits
.text._ZN3kda5step220_GLOBAL__N__deadbeef4gateILi16EEEvPf:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/              @!P0 FFMA.SAT R4, R0, R5.reuse, 0.5 ;
        /*0020*/                   MUFU.EX2 R5, -R4 ;
        /*0030*/              @P1  BRA `(.L_x_0) ;
        /*0040*/                   STG.E desc[UR4][R2.64+0x10], R5 ;
        /*0050*/                   EXIT ;
.L_x_1:
        /*0060*/                   BRA `(.L_x_1);
        /*0070*/                   NOP;
	.section	.nv.info
"""
PTXAS = """\
ptxas info    : Compiling entry function '_ZN3kda5step220_GLOBAL__N__deadbeef4gateILi16EEEvPf' for 'sm_90a'
ptxas info    : Function properties for _ZN3kda5step220_GLOBAL__N__deadbeef4gateILi16EEEvPf
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16640 bytes smem
"""


def test_kernels_of_a_listing() -> None:
    (kernel,) = sass._kernels(LISTING, PTXAS)
    assert kernel.name == "gate<16>"
    assert [sass.opcode(instruction) for instruction in kernel.instructions] == [
        "LDC",
        "FFMA.SAT",
        "MUFU.EX2",
        "BRA",
        "STG.E",
        "EXIT",
    ]
    assert (kernel.registers, kernel.smem_bytes) == (40, 16640)
    assert (kernel.stack_bytes, kernel.spill_store_bytes, kernel.spill_load_bytes) == (8, 4, 12)
    assert kernel.opcodes["MUFU.EX2"] == 1


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("MUFU.RCP R0, R1", "xu"),
        ("F2I.TRUNC R0, R1", "xu"),
        ("F2FP.BF16.F32.PACK_AB R0, R1, R2", "alu"),
        ("@P0 FFMA R0, R1, R2, R3", "fma"),
        ("HFMA2.MMA R5, -RZ, RZ, 1, 0", "fma"),
        ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "tensor"),
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "tensor"),
        ("LDG.E.128 R4, desc[UR4][R2.64]", "global"),
        ("LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]", "async copy"),
        ("LDS.128 R4, [R1]", "shared"),
        ("LDSM.16.M88.4 R4, [R1]", "shared"),
        ("LDL R4, [R1]", "local"),
        ("LDC.64 R2, c[0x0][0x210]", "constant"),
        ("SHFL.BFLY PT, R3, R2, 0x10, 0x1f", "shuffle"),
        ("UIADD3 UR4, UR4, 0x1, URZ", "uniform"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "control"),
        ("IADD3 R1, R2, R3, RZ", "alu"),
        ("FSETP.GEU.AND P0, PT, R0, -126, PT", "alu"),
    ],
)
def test_pipe(instruction: str, expected: str) -> None:
    assert sass.pipe(instruction) == expected


def test_diff_ignores_registers_labels_and_offsets() -> None:
    def kernel(*instructions: str) -> sass.Kernel:
        return sass.Kernel("k", "k", instructions, 0, 0, 0, 0, 0)

    before = kernel("LDG.E R4, desc[UR4][R2.64+0x10]", "FMUL R4, R4.reuse, R5", "@P0 BRA `(.L_x_1)", "EXIT")
    same = kernel("LDG.E R9, desc[UR6][R8.64+0x20]", "FMUL R9, R9, R1", "@P2 BRA `(.L_x_7)", "EXIT")
    other = kernel("LDG.E R9, desc[UR6][R8.64+0x20]", "FADD R9, R9, R1", "@P2 BRA `(.L_x_7)", "EXIT")
    assert sass.diff(before, same) == ""
    changed = [line for line in sass.diff(before, other, context=0).splitlines() if line[0] in "+-"][2:]
    assert changed == ["-FMUL R, R, R", "+FADD R, R, R"]


@pytest.mark.cuda_compiler
def test_a_step_is_found_by_number_slug_and_name() -> None:
    by = [sass.compile_step(step, "sm_80") for step in (2, "2", "rebased_ex2", "2_rebased_ex2")]
    assert len({compiled.cubin for compiled in by}) == 1
    assert by[0].name == "2_rebased_ex2"
    assert by[0].arch == "sm_80"
    kernels = sass.kernels(by[0])
    assert {f"{kernel}<{chunk}>" for kernel in ("gate", "intra_chunk", "recurrence") for chunk in (16, 32, 64)} == set(
        kernels
    )
    assert sum(sass.count_instructions(by[0])["gate<16>"].values()) == len(kernels["gate<16>"].instructions)
    assert "ex2.approx.ftz.f32" in sass.ptx(2, "sm_80")
    assert "/*0000*/" in sass.listing(by[0])


def test_what_is_no_step_or_architecture_is_named() -> None:
    with pytest.raises(ValueError, match=r"step is 77; expected .* 0_token_by_token"):
        sass.compile_step(77)
    with pytest.raises(ValueError, match=r"arch is 'hopper'; expected \"sm_\""):
        sass.compile_step(2, "hopper")


@pytest.mark.cuda_compiler
def test_a_step_that_does_not_compile_shows_the_compilers_words(tmp_path, monkeypatch) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(sass.csrc_dir(), csrc)
    monkeypatch.setenv("KDA_LAB_CSRC", str(csrc))
    (csrc / "cuda" / "steps" / "2_rebased_ex2.cu").write_text("no_such_type x;\n")
    with pytest.raises(BuildError, match=r"2_rebased_ex2.cu does not compile for sm_80:(?s:.*)no_such_type"):
        sass.compile_step(2, "sm_80")


@pytest.mark.cuda_compiler
@pytest.mark.parametrize(
    "header", ["kda.h", "common/error.h", "cuda/common/tensors.cuh", "cuda/steps/6_register_state/prepare.cuh"]
)
def test_an_edit_is_compiled_again(header, tmp_path, monkeypatch) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(sass.csrc_dir(), csrc)
    before = sass.compile_step(0, "sm_80").cubin
    monkeypatch.setenv("KDA_LAB_CSRC", str(csrc))
    assert sass.compile_step(0, "sm_80").cubin == before  # the same bytes elsewhere are the same code
    (csrc / header).write_text((csrc / header).read_text() + "\n// edited\n")
    assert sass.compile_step(0, "sm_80").cubin != before


@pytest.mark.cuda_compiler
def test_a_missing_disassembler_is_named_with_its_cure(monkeypatch) -> None:
    compiled = sass.compile_step(0, "sm_80")
    monkeypatch.setattr(sass.shutil, "which", lambda name: None)
    monkeypatch.setattr(sass, "find_nvcc", lambda: (type("Compiler", (), {"path": "/opt/none/bin/nvcc"}), {}))
    with pytest.raises(CompilerNotFound, match=r"nvdisasm is needed(?s:.*)pip install nvidia-cuda-nvdisasm"):
        sass.listing(compiled)
