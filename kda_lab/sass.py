"""Compiles one step for one GPU architecture and reads its machine code: listings, counts, differences.

Needs nvcc and nvdisasm, from a system toolkit or from pip wheels, and no GPU: any nvcc compiles for every architecture
it knows. What is compiled is kept in the cache, under a key of sources, flags and compilers.
"""

from __future__ import annotations

import collections
import difflib
import functools
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kda_lab.native import BuildError, CompilerNotFound, cache, cache_dir, csrc_dir, find_cxx, find_nvcc

FLAGS = ("-std=c++17", "-O3", "-lineinfo")
"""What csrc/CMakeLists.txt compiles with, so that the code read here is the code that runs. No fast-math flag."""

PIPES = {
    "xu": r"(MUFU|I2F|F2I|F2F|FRND|POPC|FLO|BREV)$",
    "tensor": r"[A-Z]+MMA$",
    "fma": r"FFMA|FMUL|FADD|FCHK|IMAD|HFMA2|HADD2|HMUL2|D(FMA|ADD|MUL)",
    "async copy": r"LDGSTS|LDGDEPBAR|DEPBAR|UBLK|UTMA|SYNCS|ARRIVES",
    "global": r"LDG|STG|ATOMG|REDG?$|LD$|ST$|CCTL",
    "shared": r"LDS|STS|LDSM|STSM|ATOMS|MOVM",
    "shuffle": r"SHFL|VOTE|MATCH|REDUX",
    "local": r"LDL|STL",
    "constant": r"LDC|LDCU|ULDC",
    "control": r"BRA|BRX|EXIT|BAR|WARPSYNC|BSSY|BSYNC|BREAK|CALL|RET|NOP|MEMBAR|FENCE|ACQBULK|PREEXIT|ELECT|"
    r"ENDCOLLECTIVE|WARPGROUP|NANOSLEEP|YIELD|KILL|BPT|ERRBAR|USETMAXREG",
    "uniform": r"U[A-Z]|[RS]2UR",
}
"""Groups of opcodes by what executes them, the first match wins; any other is "alu" (integers, comparisons, moves).
Pipes are called as in Nsight Compute; memory instructions are split by the memory they reach."""


@dataclass(frozen=True)
class Compiled:
    """The machine code of one source file for one architecture."""

    name: str  # "2_rebased_ex2", "exp_throughput"
    arch: str  # "sm_90a"
    cubin: Path
    ptxas: str  # what ptxas says of registers, spills and shared memory


@dataclass(frozen=True)
class Kernel:
    """One kernel of it."""

    name: str  # "recurrence<16>"
    symbol: str
    instructions: tuple[str, ...]  # "FFMA R5, R0, R4, R5", without address, encoding and the padding after the last
    registers: int  # of a thread
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int  # declared in the kernel; a launch may add to it

    @property
    def opcodes(self) -> collections.Counter[str]:
        """How often each opcode occurs, with its modifiers: {"FFMA": 20, "MUFU.EX2": 4, ...}."""
        return collections.Counter(opcode(instruction) for instruction in self.instructions)


def compile_step(step: int | str, arch: str = "sm_90a") -> Compiled:
    """Compiles a step (number, slug or name) or "exp_throughput" for an architecture such as "sm_80" or "sm_90a".

    From compute capability 9 on "sm_90" means "sm_90a", which is what the library is built for. Raises ValueError for
    what has no CUDA source or is no architecture; BuildError, or CompilerNotFound with the command that installs it.
    """
    source, target = _source(step), _target(arch)
    cubin, log = _compile(source, target, "cubin", ["-cubin", "-Xptxas", "-v"])
    return Compiled(source.stem, f"sm_{target}", cubin, log)


def ptx(step: int | str, arch: str = "sm_90a") -> str:
    """The PTX of a step; arguments and errors as for compile_step."""
    return _compile(_source(step), _target(arch), "ptx", ["-ptx"])[0].read_text()


def listing(compiled: Compiled) -> str:
    """The machine code as nvdisasm prints it, all kernels one after the other."""
    return _listing(compiled.cubin, _find_nvdisasm())


def kernels(compiled: Compiled) -> dict[str, Kernel]:
    """The kernels by name, with instructions and resources."""
    return {kernel.name: kernel for kernel in _kernels(listing(compiled), compiled.ptxas)}


def count_instructions(compiled: Compiled) -> dict[str, dict[str, int]]:
    """How many instructions of each group in `PIPES`, and of "alu", every kernel has: {"gate<16>": {"xu": 9, ...}}.

    It counts what is written, not what is executed: an instruction in a loop counts once.
    """
    return {
        name: dict(collections.Counter(pipe(instruction) for instruction in kernel.instructions))
        for name, kernel in kernels(compiled).items()
    }


def diff(before: Kernel, after: Kernel, context: int = 3) -> str:
    """What changes from one kernel to another, as a unified diff; register numbers, labels and offsets do not count."""
    names = (before.name, after.name)
    sides = ([normalised(instruction) for instruction in kernel.instructions] for kernel in (before, after))
    return "\n".join(difflib.unified_diff(*sides, *names, n=context, lineterm=""))


def opcode(instruction: str) -> str:
    """ "@!P0 FFMA.SAT R4, R0, R5, 0.5" -> "FFMA.SAT"."""
    words = instruction.split()
    return words[1] if words[0].startswith("@") else words[0]


def pipe(instruction: str) -> str:
    """The group in `PIPES` that executes an instruction, or "alu"."""
    base = opcode(instruction).split(".")[0]
    return next((name for name, pattern in PIPES.items() if re.match(pattern, base)), "alu")


def normalised(instruction: str) -> str:
    """An instruction without what differs from one compilation to the next: registers, labels, constant offsets."""
    text = re.sub(r"\b(U?[RPB])\d+\b", r"\1", instruction)
    text = re.sub(r"\.reuse\b", "", text)
    text = re.sub(r"`\([^)]*\)", "label", text)
    return re.sub(r"(?<=\[)0x[0-9a-f]+(?=\])|\+-?0x[0-9a-f]+(?=\])", "", text)


def _source(step: int | str) -> Path:
    folder = csrc_dir() / "cuda"
    sources = {path.stem: path for path in [*sorted(folder.glob("steps/*.cu")), folder / "exp_throughput.cu"]}
    for name, path in sources.items():
        if str(step) in (name, *name.split("_", 1)):
            return path
    raise ValueError(f"step is {step!r}; expected the number, slug or name of one of {', '.join(sources)}")


def _target(arch: str) -> str:
    match = re.fullmatch(r"sm_(\d{2,3})a?", arch)
    if not match:
        raise ValueError(f'arch is {arch!r}; expected "sm_" and a compute capability, such as "sm_80" or "sm_90a"')
    return f"{match[1]}a" if int(match[1]) >= 90 else match[1]


def _compile(source: Path, target: str, suffix: str, options: list[str]) -> tuple[Path, str]:
    """The compiled file and what the compiler printed, from the cache where it is."""
    nvcc, cxx, csrc = find_nvcc()[0], find_cxx(), csrc_dir()
    command = [nvcc.path, *FLAGS, *options, "-ccbin", cxx.path, "-gencode", f"arch=compute_{target},code=sm_{target}"]
    if suffix == "ptx":
        command[-1] = f"arch=compute_{target},code=compute_{target}"
    digest = hashlib.sha256("\0".join([*command, nvcc.version, cxx.version]).encode())
    for path in [source, csrc / "kda.h", *sorted(csrc.glob("common/*.h")), *sorted(csrc.glob("cuda/**/*.*h"))]:
        digest.update(f"\0{path.relative_to(csrc)}\0".encode() + path.read_bytes())
    folder, name = cache_dir() / "sass" / digest.hexdigest()[:32], f"code.{suffix}"
    if not cache.find(folder, name):
        with tempfile.TemporaryDirectory(prefix="kda_lab-") as temporary:
            built = Path(temporary) / name
            log = _run([*command, "-o", str(built), str(source)], f"{source.name} does not compile for sm_{target}")
            cache.publish(built, folder, {"source": source.name, "log": log})
        cache.drop_unused(folder.parent)
    return folder / name, json.loads((folder / "built.json").read_text())["log"]


@functools.lru_cache(maxsize=64)
def _listing(cubin: Path, nvdisasm: str) -> str:
    return _run([nvdisasm, "-c", str(cubin)], f"{cubin} cannot be disassembled")


def _kernels(text: str, ptxas: str) -> Iterator[Kernel]:
    resources = dict(re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry|\Z)", ptxas, flags=re.DOTALL))
    for symbol, body in re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\s*\.section|\Z)", text, flags=re.DOTALL | re.MULTILINE):
        found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;", body, flags=re.MULTILINE)
        instructions = [re.sub(r"\s+", " ", instruction.strip("{} ")) for instruction in found]
        while instructions and opcode(instructions[-1]) in ("NOP", "BRA"):  # padding: NOPs after a branch to itself
            instructions.pop()
        said = resources[symbol]

        def number(pattern: str, said: str = said) -> int:
            match = re.search(pattern, said)
            return int(match[1]) if match else 0

        yield Kernel(
            name=_demangle(symbol),
            symbol=symbol,
            instructions=tuple(instructions),
            registers=number(r"Used (\d+) registers"),
            stack_bytes=number(r"(\d+) bytes stack frame"),
            spill_store_bytes=number(r"(\d+) bytes spill stores"),
            spill_load_bytes=number(r"(\d+) bytes spill loads"),
            smem_bytes=number(r"(\d+) bytes smem"),
        )


def _demangle(symbol: str) -> str:
    """ "_ZN3kda5step1...10recurrenceILi16EEEv..." -> "recurrence<16>": the last name and its integer arguments."""
    rest, name = re.sub(r"^_ZN?", "", symbol), symbol
    while match := re.match(r"\d+", rest):
        end = match.end() + int(match[0])
        name, rest = rest[match.end() : end], rest[end:]
    arguments = re.match(r"I((?:L[a-z]\d+E)+)E", rest)
    if not arguments:
        return name
    return f"{name}<{', '.join(re.findall('[0-9]+', arguments[1]))}>"


def _find_nvdisasm() -> str:
    """Beside nvcc, on PATH, in /usr/local/cuda, or from the pip wheels."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [
        path for root in (spec.submodule_search_locations or () if spec else ()) for path in Path(root).glob("cu*")
    ]
    homes = [Path(find_nvcc()[0].path).parents[1], Path("/usr/local/cuda"), *sorted(wheels, reverse=True)]
    for candidate in [f"{homes[0]}/bin/nvdisasm", "nvdisasm", *(f"{home}/bin/nvdisasm" for home in homes[1:])]:
        if path := shutil.which(candidate):
            return path
    raise CompilerNotFound(
        "nvdisasm is needed to read machine code and was not found (looked beside nvcc, on PATH, in /usr/local/cuda "
        "and pip wheels).\nInstall it with one of:\n    pip install nvidia-cuda-nvdisasm\n"
        "    sudo apt-get install nvidia-cuda-toolkit\n    conda install -c conda-forge cuda-nvdisasm"
    )


def _run(command: list[str], failure: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        log = done.stdout + done.stderr
        raise BuildError(f"{failure}:\n\n{log.strip()}", log)
    return done.stdout + done.stderr
