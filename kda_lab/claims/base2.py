"""Claims on base 2: what a power of 2 costs beside a power of e, and where it matters."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kda_lab import bench, ops, sass
from kda_lab.claims import evidence
from kda_lab.claims.claim import Evidence, Judgement, claim, conditional, confirmed, refuted, unsettled
from kda_lab.claims.evidence import READ, Code, from_code, kernel_of, opcodes, recorded_exponential, recorded_ms
from kda_lab.inputs import make_inputs
from kda_lab.profiling import recorded

TOPIC = "base 2"
TEACHING_CASE = "T 8192, H 96, no state"
_FORMS = {"expf": 0, "fast_expf": 1, "exp2f": 2, "ex2": 4, "ex2_rebased": 5}  # of csrc/cuda/exp_throughput.cu
_MULTIPLY_ADD = r"(FMUL|FFMA|FADD)"


def _forms(code: Code, arch: str = evidence.ARCH) -> dict[str, sass.Kernel]:
    found = code("exp_throughput", arch)
    return {name: found[f"single<{number}>"] for name, number in _FORMS.items()}


def count_forms() -> Evidence:
    """Instructions of one exponential beyond those of ex2.approx.ftz."""

    def measure(code: Code) -> dict[str, int]:
        forms = _forms(code)
        least = len(forms["ex2"].instructions)
        return {f"{name}_extra": len(kernel.instructions) - least for name, kernel in forms.items() if name != "ex2"}

    return from_code(measure, [f"{name}_extra" for name in _FORMS if name != "ex2"])


@claim(1, TOPIC, "Computing e^x needs a change of base that costs instructions; base 2 avoids it.", count_forms)
def change_of_base(expf_extra: int, exp2f_extra: int, ex2_rebased_extra: int) -> Judgement:
    if ex2_rebased_extra <= 0:
        return refuted("Multiplying by log2(e) first compiles to as many instructions as the bare exponential.")
    rest = expf_extra - ex2_rebased_extra
    because = f"The change of base is {ex2_rebased_extra} instruction; expf takes {expf_extra} more than ex2.approx.ftz"
    if rest <= 0:
        return confirmed(f"{because}, and all of them are the change of base.")
    return conditional(
        f"{because}, but {rest} of them guard range and rounding, and exp2f has {exp2f_extra} of that kind too.",
        "log2(e) can be folded into a factor that is multiplied anyway, and the approximate instruction is asked for.",
    )


class _Written(TorchDispatchMode):
    """Counts the elements that torch's operators compute on the host; an empty tensor is none, a copy is."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "aten" and "empty" not in function.name():
            self.elements += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def watch_host() -> Evidence:
    """Elements that the host computes in a call, those of the gate that are others afterwards, and kernels on a GPU.

    Watched here, on the CPU step of the two-kernel design, whose host side is the GPU's; a GPU's kernels as recorded.
    """
    inputs = make_inputs(T=64, H=4)
    before, watched = inputs.g.clone(), _Written()
    with watched:
        ops.forward(inputs, step=5)
    recording = recorded.load()
    timeline = recording and recording.nsys(5)
    launched = timeline and {span.name for span in timeline.of("kernel")}
    source = READ + "csrc/flash_kda.cpp:128, float(lower_bound * 1.4426950408889634), one scalar"
    return Evidence(
        {
            "computed_on_host": watched.elements + int((inputs.g != before).sum()),
            "gate_elements": inputs.g.numel(),
            "kernels_beside": launched and len(launched - {"prepare", "recurrence"}),
        },
        (evidence.here(), evidence.report_label(), source),
    )


@claim(2, TOPIC, "The host multiplies the gate tensor by 1/ln 2 before launch.", watch_host)
def host_multiplies_gate(computed_on_host: int, gate_elements: int, kernels_beside: int | None = None) -> Judgement:
    because = (
        f"In a call with {gate_elements:,} gate elements the host computes {computed_on_host:,} and leaves the gate as "
        "it was; log2(e) goes into one scalar, lower_bound."
    )
    if kernels_beside is not None:
        because += f" On a GPU it launches {kernels_beside} kernels beside prepare and recurrence."
    if computed_on_host >= gate_elements:
        return confirmed(f"The host computes {computed_on_host:,} elements for {gate_elements:,} of the gate.")
    return refuted(because, "g itself were rewritten before the launch, one more pass over it")


def count_old_architecture() -> Evidence:
    """MUFU.EX2 in one ex2.approx.ftz, compiled for sm_75, the oldest that CUDA 13 compiles for, and for sm_90a."""

    def measure(code: Code) -> dict[str, int]:
        return {f"ex2_on_{arch}": opcodes(_forms(code, arch)["ex2"], r"MUFU\.EX2") for arch in ("sm_75", "sm_90a")}

    return from_code(measure, ["ex2_on_sm_75", "ex2_on_sm_90a"], "sm_75 and sm_90a")


@claim(3, TOPIC, "ex2.approx.ftz.f32 exists only on SM80 and newer.", count_old_architecture)
def only_new_architectures(ex2_on_sm_75: int) -> Judgement:
    if ex2_on_sm_75 > 0:
        return refuted(f"It compiles for sm_75, to {ex2_on_sm_75} MUFU.EX2, as for sm_90a.")
    return confirmed("For sm_75 no MUFU.EX2 comes out.")


def count_units() -> Evidence:
    """What executes each form (machine code), and the results a clock and multiprocessor (recorded)."""

    def measure(code: Code) -> dict[str, int]:
        kinds = {name for kernel in _forms(code).values() for name in kernel.opcodes if name.startswith("MUFU")}
        return {"units_used": len(kinds)}

    counted = from_code(measure, ["units_used"])
    rates = recorded_exponential("throughput", "results_per_clock_per_sm")
    numbers = {**counted.numbers, "expf_per_clock": rates.get("expf"), "ex2_per_clock": rates.get("ex2.approx.ftz")}
    return Evidence(numbers, (*counted.sources, evidence.ladder_label()))


@claim(
    4,
    TOPIC,
    "The ex2 unit has a higher throughput than the exp unit; newer GPUs have dedicated base-2 units.",
    count_units,
)
def separate_units(
    units_used: int, expf_per_clock: float | None = None, ex2_per_clock: float | None = None
) -> Judgement:
    if units_used > 1:
        return confirmed(f"The forms of the exponential use {units_used} different instructions of the special unit.")
    rate = ""
    if expf_per_clock and ex2_per_clock:
        rate = (
            f" expf gives {expf_per_clock:.3g} results a clock, ex2.approx.ftz {ex2_per_clock:.3g}: the rest is FMAs."
        )
    return refuted(
        "There is no unit for base e: expf, __expf, exp2f and ex2.approx all end in the same MUFU.EX2." + rate,
        "a kernel does nothing but accurate expf: base 2 then drops the instructions around MUFU.EX2",
    )


def count_gate_and_recurrence() -> Evidence:
    """Multiply-adds that leave with the change of base, and exponentials in the recurrence of the two-kernel step."""

    def measure(code: Code) -> dict[str, int]:
        forms = _forms(code)
        removed = opcodes(forms["ex2_rebased"], _MULTIPLY_ADD) - opcodes(forms["ex2"], _MULTIPLY_ADD)
        return {
            "multiply_adds_removed": removed,
            "exponentials_in_recurrence": opcodes(kernel_of(code, 5, "recurrence"), r"MUFU\.EX2"),
        }

    return from_code(measure, ["multiply_adds_removed", "exponentials_in_recurrence"])


@claim(
    5,
    TOPIC,
    "Base 2 removes one FMA per gate activation and shortens the critical path of the recurrence.",
    count_gate_and_recurrence,
)
def critical_path(multiply_adds_removed: int, exponentials_in_recurrence: int) -> Judgement:
    removed = f"A gate activation loses {multiply_adds_removed} multiply"
    if multiply_adds_removed < 1:
        return refuted(f"{removed}: there is nothing to remove.")
    if exponentials_in_recurrence == 0:
        return conditional(
            f"{removed}; the recurrence of the two-kernel step has no exponential at all.",
            "the recurrence computes exponentials itself, as in steps 1 and 2",
        )
    return confirmed(f"{removed}, and the recurrence waits for {exponentials_in_recurrence} exponentials.")


SIGNIFICANT = 0.05  # a third of 15 %


def recorded_end_to_end() -> Evidence:
    """Step 1 against 2 on a GPU, and what base 2 saves in the gate as a share of the two-kernel step's time.

    The gate twice: alone, in two forms, and as the kernels of steps 1 and 2.
    """
    one, two, five = (recorded_ms(step).get(TEACHING_CASE) for step in (1, 2, 5))
    gate = recorded_exponential("gate", "median_ms")
    in_e, in_2 = gate.get("expf"), gate.get("ex2.approx.ftz")
    kernel_e, kernel_2 = (evidence.recorded_kernel_ms(step).get("gate") for step in (1, 2))
    numbers = {
        "step_1_over_step_2": one / two if one and two else None,
        "gate_alone_saves": (in_e - in_2) / five if in_e and in_2 and five else None,
        "gate_kernel_saves": (kernel_e - kernel_2) / five if kernel_e and kernel_2 and five else None,
    }
    return Evidence(numbers, (evidence.ladder_label(), evidence.report_label()))


@claim(
    6,
    TOPIC,
    "Base 2 contributes significantly to an end-to-end speed-up of about 15 %.",
    recorded_end_to_end,
)
def end_to_end(step_1_over_step_2: float, gate_alone_saves: float, gate_kernel_saves: float | None = None) -> Judgement:
    because = (
        f"In the pairwise steps base 2 is {step_1_over_step_2:.2f} times as fast. Of the two-kernel step's time a gate "
        f"stage alone {_saves(gate_alone_saves)} in base 2"
    )
    if gate_kernel_saves is not None:
        because += f", and the gate kernel of step 2 {_saves(gate_kernel_saves)} against step 1's"
    because += "."
    if max(gate_alone_saves, gate_kernel_saves or 0.0) >= SIGNIFICANT:
        return confirmed(because)
    if step_1_over_step_2 >= 1 + SIGNIFICANT:
        return conditional(because, "exponentials are pairwise, C/2 for every element, as in steps 1 and 2")
    return refuted(because)


def _saves(share: float) -> str:
    return f"saves {share:.1%}" if share >= 0 else f"costs {-share:.1%} more"


def count_both_kernels() -> Evidence:
    """Exponentials in the machine code of prepare and recurrence of step 5."""

    def measure(code: Code) -> dict[str, int]:
        return {f"in_{name}": opcodes(kernel_of(code, 5, name), r"MUFU\.EX2") for name in ("prepare", "recurrence")}

    counted = from_code(measure, ["in_prepare", "in_recurrence"])
    read = READ + "ex2_approx_ftz_f32 is called in csrc/smxx/fwd_kernel1.cuh (3 places) and not in fwd_kernel2.cuh"
    return Evidence(counted.numbers, (*counted.sources, read))


@claim(7, TOPIC, "Exponentials are evaluated in both kernels.", count_both_kernels)
def both_kernels(in_prepare: int, in_recurrence: int) -> Judgement:
    if in_prepare and in_recurrence:
        return confirmed(f"prepare has {in_prepare} MUFU.EX2, recurrence {in_recurrence}.")
    return refuted(
        f"prepare has {in_prepare} MUFU.EX2, recurrence {in_recurrence}: the decay of a chunk is handed over.",
        "the recurrence were handed G instead of exp(G)",
    )


def time_stages() -> Evidence:
    """Milliseconds that base 2 saves from step 1 to 2 in the gate and where it saves most beside it.

    Of the kernels recorded on a GPU, at the teaching shape; where there is no recording, of the stages on this CPU.
    """
    before, after = evidence.recorded_kernel_ms(1), evidence.recorded_kernel_ms(2)
    if before and after:
        saved = {kernel: before[kernel] - after[kernel] for kernel in before}
        gate = saved.pop("gate")
        noise = max(evidence.recorded_disagreement_ms(step) for step in (1, 2))
        numbers = {"gate_saved_ms": gate, "elsewhere_saved_ms": max(saved.values()), "noise_ms": noise}
        return Evidence(numbers, (evidence.report_label(),))
    inputs = make_inputs(T=128, H=4)
    one, two, again = (bench.stage_ms(step, inputs, runs=40) for step in (1, 2, 1))
    saved = {stage: one[stage] - two[stage] for stage in one}
    noise = max(abs(one[stage] - again[stage]) for stage in one)
    gate = saved.pop("activate_gate")
    return evidence.live(gate_saved_ms=gate, elsewhere_saved_ms=max(saved.values()), noise_ms=noise)


@claim(8, TOPIC, "The improvement is largest in the gate activation stage.", time_stages)
def largest_in_gate(gate_saved_ms: float, elsewhere_saved_ms: float, noise_ms: float) -> Judgement:
    gate = f"saves {gate_saved_ms:.3f} ms" if gate_saved_ms >= 0 else f"costs {-gate_saved_ms:.3f} ms more"
    because = f"In base 2 the gate {gate}; the stage that saves most beside it saves {elsewhere_saved_ms:.3f} ms."
    if abs(gate_saved_ms - elsewhere_saved_ms) <= noise_ms:
        return unsettled(f"{because} One stage's times differ by up to {noise_ms:.3f} ms: too noisy to say.")
    if gate_saved_ms > elsewhere_saved_ms:
        return confirmed(because)
    return refuted(because, "few exponentials are left outside the gate, as in the factored steps")


def count_architectures() -> Evidence:
    """Different exponential instructions in one source compiled for two architectures."""

    def measure(code: Code) -> dict[str, int]:
        kinds = [
            {name for name in kernel_of(code, 5, "prepare", arch).opcodes if name.startswith("MUFU.EX2")}
            for arch in ("sm_80", "sm_90a")
        ]
        return {"architectures": len(kinds), "different_instructions": len(set.union(*kinds))}

    return from_code(measure, ["architectures", "different_instructions"], "sm_80 and sm_90a")


@claim(9, TOPIC, "The hardware instruction is selected by GPU architecture when `fwd` runs.", count_architectures)
def selected_at_run_time(architectures: int, different_instructions: int) -> Judgement:
    if different_instructions > 1:
        return conditional(
            f"{different_instructions} instructions for {architectures} architectures, chosen by the compiler.",
            "the library holds code for several architectures; the driver then picks a binary, when it is loaded",
        )
    return refuted(
        f"The same instruction stands in the binaries for {architectures} architectures: the source names it, the "
        "compiler emits it, and nothing is left to select."
    )


NEGLIGIBLE = 0.05
SHAPES = ((1, 16), (1, 64), (4, 16))  # B, T: short, so that many runs fit between what disturbs them


def time_shapes() -> Evidence:
    """Step 1's processor time over step 2's at several shapes; each step is measured twice, which shows the noise.

    It measures on while the noise is too large to decide, up to ten times as long.
    """
    inputs = [make_inputs(B, T, 2) for B, T in SHAPES]
    calls = [[partial(ops.forward, given, step=step) for step in (1, 2, 1, 2)] for given in inputs]
    fastest = [[math.inf] * 4 for _ in SHAPES]
    for _ in range(10):
        for i, of_shape in enumerate(calls):
            fastest[i] = [min(pair) for pair in zip(fastest[i], bench.fastest_ms(of_shape))]
        noise = max(max(abs(one / one2 - 1), abs(two / two2 - 1)) for one, two, one2, two2 in fastest)
        if noise < NEGLIGIBLE / 4:
            break
    ratios = [min(one, one2) / min(two, two2) for one, two, one2, two2 in fastest]
    return evidence.live(smallest_ratio=min(ratios), largest_ratio=max(ratios), noise=noise)


@claim(10, TOPIC, "The improvement varies with sequence length and batch size.", time_shapes)
def varies_with_shape(smallest_ratio: float, largest_ratio: float, noise: float) -> Judgement:
    because = (
        f"On one core of this CPU step 2 is {smallest_ratio:.3f} to {largest_ratio:.3f} times as fast as step 1 at "
        f"{len(SHAPES)} shapes; a step differs from itself by up to {noise:.1%}, and shapes less than {NEGLIGIBLE:.0%} "
        "apart count as alike."
    )
    variation = largest_ratio / smallest_ratio - 1
    if variation > NEGLIGIBLE + 2 * noise:
        return confirmed(because)
    if variation - noise < NEGLIGIBLE and noise < NEGLIGIBLE:  # noise only adds to what is seen of it
        return refuted(
            f"{because} Exponentials are counted by tokens and heads, however they are arranged.",
            "the shape is so small that something else than the step takes the time",
        )
    return unsettled(f"{because} That is too noisy to say.")


def read_entry_point() -> Evidence:
    """Lines of the host's entry point, of the scalar product in it, and of its use on the device."""
    source = READ + "csrc/flash_kda.cpp (fwd from line 28), csrc/smxx/fwd_kernel1.cuh:322, gate_scale * sigmoid"
    return Evidence({"entry_line": 28, "product_line": 128, "device_line": 322}, (source,))


NEAR_THE_TOP = 20  # lines


@claim(11, TOPIC, "The scale is applied near the top of the host's entry point.", read_entry_point)
def near_the_top(entry_line: int, product_line: int, device_line: int | None = None) -> Judgement:
    below = product_line - entry_line
    if device_line is None and below <= NEAR_THE_TOP:
        return confirmed(f"It is applied {below} lines below the function's first.")
    return refuted(
        f"The host prepares a scalar {below} lines below the function's first line (line {product_line}), after all "
        f"checks; it is applied on the device (line {device_line} of the first kernel). A line number without a "
        "commit, as two write-ups give it, says nothing.",
    )
