"""The ledger: every verdict can turn, a missing number is "not measured", and cheap claims are measured for real."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

from kda_lab import bench, claims, cli, native, ops, sass
from kda_lab.claims import CLAIMS, CONDITIONAL, CONFIRMED, NOT_MEASURED, REFUTED, Evidence, design, evidence
from kda_lab.profiling.recorded import Recording

YES, NO, IF, OPEN = CONFIRMED, REFUTED, CONDITIONAL, NOT_MEASURED

# Numbers that nobody measured, and the verdict they must lead to.
SYNTHETIC = {
    1: {
        YES: dict(expf_extra=1, exp2f_extra=0, ex2_rebased_extra=1),
        NO: dict(expf_extra=5, exp2f_extra=3, ex2_rebased_extra=0),
        IF: dict(expf_extra=8, exp2f_extra=3, ex2_rebased_extra=1),
    },
    2: {
        YES: dict(computed_on_host=1000, gate_elements=1000),
        NO: dict(computed_on_host=0, gate_elements=1000, kernels_beside=0),
    },
    3: {YES: dict(ex2_on_sm_75=0), NO: dict(ex2_on_sm_75=1)},
    4: {YES: dict(units_used=2), NO: dict(units_used=1)},
    5: {
        YES: dict(multiply_adds_removed=1, exponentials_in_recurrence=4),
        NO: dict(multiply_adds_removed=0, exponentials_in_recurrence=4),
        IF: dict(multiply_adds_removed=1, exponentials_in_recurrence=0),
    },
    6: {
        YES: dict(step_1_over_step_2=1.0, gate_alone_saves=0.0, gate_kernel_saves=0.07),
        NO: dict(step_1_over_step_2=1.01, gate_alone_saves=-0.05, gate_kernel_saves=0.005),
        IF: dict(step_1_over_step_2=1.3, gate_alone_saves=0.001, gate_kernel_saves=0.001),
    },
    7: {YES: dict(in_prepare=70, in_recurrence=2), NO: dict(in_prepare=70, in_recurrence=0)},
    8: {
        YES: dict(gate_saved_ms=2.0, elsewhere_saved_ms=1.0, noise_ms=0.1),
        NO: dict(gate_saved_ms=1.0, elsewhere_saved_ms=2.0, noise_ms=0.1),
        OPEN: dict(gate_saved_ms=1.0, elsewhere_saved_ms=2.0, noise_ms=1.5),
    },
    9: {
        NO: dict(architectures=2, different_instructions=1),
        IF: dict(architectures=2, different_instructions=2),
    },
    10: {
        YES: dict(smallest_ratio=1.0, largest_ratio=1.3, noise=0.02),
        NO: dict(smallest_ratio=0.98, largest_ratio=1.04, noise=0.04),
        OPEN: dict(smallest_ratio=1.0, largest_ratio=1.3, noise=0.2),
    },
    11: {YES: dict(entry_line=28, product_line=30), NO: dict(entry_line=28, product_line=128, device_line=322)},
    12: {
        YES: dict(lower_bound=-5.0, smallest_before=-4.0, smallest_after=-5.0),
        NO: dict(lower_bound=-5.0, smallest_before=-100.0, smallest_after=-5.0),
    },
    13: {
        YES: dict(weak_gate=-0.6, weak_gate_at_half_the_bound=-0.6),
        NO: dict(weak_gate=-0.6, weak_gate_at_half_the_bound=-0.3),
    },
    14: {
        YES: dict(from_sigmoid=1e-7, from_bound_times_sigmoid=6.0),
        NO: dict(from_sigmoid=6.0, from_bound_times_sigmoid=1e-7),
    },
    15: {
        YES: dict(smallest_log2=-115.0, largest_log2=115.0, share_out_of_range=0.0, bf16_error=5e-3),
        NO: dict(smallest_log2=-131.0, largest_log2=131.0, share_out_of_range=0.1, bf16_error=5e-3),
    },
    16: {
        YES: dict(share_overflowed=0.1, largest_log2=140.0, bf16_error=5e-3),
        NO: dict(share_overflowed=0.0, largest_log2=23.0, bf16_error=5e-3),
    },
    17: {
        YES: dict(largest_cumsum=16000.0, bf16_largest_log10=38.5, error=float("nan")),
        NO: dict(largest_cumsum=16000.0, bf16_largest_log10=38.5, error=2e-3),
    },
    18: {
        YES: dict(error_at_64=5e-3, error_at_1024=6e-3),
        NO: dict(error_at_64=5e-3, error_at_1024=6e-3, recorded_length=16384, recorded_error=float("nan")),
    },
    19: {
        YES: dict(accepted=1, share_of_state_not_finite=1.0),
        NO: dict(accepted=1, share_of_state_not_finite=0.0),
        IF: dict(accepted=0, share_of_state_not_finite=1.0),
    },
    20: {
        YES: dict(centre_moves_by=1.0, smallest_magnitude=5.0, largest_magnitude=9.0),
        NO: dict(centre_moves_by=0.0, smallest_magnitude=0.0, largest_magnitude=5.0),
        IF: dict(centre_moves_by=1.0, smallest_magnitude=0.0, largest_magnitude=5.0),
    },
    21: {
        YES: dict(steps_compared=4, steps_that_differ=0, largest_error=2e-3),
        NO: dict(steps_compared=4, steps_that_differ=1, largest_error=2e-3),
    },
    22: {
        YES: dict(inverse_64_over_16=2.0, noise=0.1, error_at_16=5e-3, overflowed_at_64=0.3, pairwise_error_at_64=2e-3),
        NO: dict(inverse_64_over_16=0.5, noise=0.1, error_at_16=5e-3, overflowed_at_64=0.0, pairwise_error_at_64=2e-3),
        IF: dict(inverse_64_over_16=0.5, noise=0.1, error_at_16=5e-3, overflowed_at_64=0.3, pairwise_error_at_64=2e-3),
        OPEN: dict(
            inverse_64_over_16=1.2, noise=0.3, error_at_16=5e-3, overflowed_at_64=0.3, pairwise_error_at_64=2e-3
        ),
    },
    23: {
        YES: dict(forgetting_error=1e-5, retaining_error=1e-5, output_rounding=2e-3),
        NO: dict(forgetting_error=3e-3, retaining_error=3e-3, output_rounding=2e-3),
        IF: dict(forgetting_error=1e-5, retaining_error=3e-3, output_rounding=2e-3),
    },
    24: {
        YES: dict(gate_error_at_0=1e-4, gate_error_at_minus_8=1e-4),
        NO: dict(gate_error_at_0=0.1, gate_error_at_minus_8=0.3),
        IF: dict(gate_error_at_0=1e-4, gate_error_at_minus_8=0.3),
    },
    25: {
        YES: dict(
            largest_in_inverse=1.0,
            largest_in_powers=1.0,
            error_unlike_keys=6e-3,
            error_equal_keys=7e-3,
            error_equal_keys_exact_inverse=6e-3,
        ),
        NO: dict(
            largest_in_inverse=1.0,
            largest_in_powers=3432.0,
            error_unlike_keys=6e-3,
            error_equal_keys=5.0,
            error_equal_keys_exact_inverse=6e-3,
        ),
    },
    26: {
        YES: dict(cases=3, smallest=1.2, smallest_beyond_one_chunk=1.3, largest=1.5),
        NO: dict(cases=3, smallest=0.9, smallest_beyond_one_chunk=0.9, largest=1.1),
        IF: dict(cases=3, smallest=0.9, smallest_beyond_one_chunk=1.2, largest=1.5),
    },
    27: {
        verdict: dict(
            registers_free=72,
            registers_limited=64,
            registers_tight=56,
            spill_bytes_limited=spilled,
            spill_bytes_tight=spilled,
            prepare_us_free=400.0,
            prepare_us_limited=limited,
            prepare_us_tight=500.0,
            spread=spread,
        )
        for verdict, spilled, limited, spread in (
            (YES, 100, 350.0, 0.01),
            (NO, 100, 450.0, 0.01),
            (IF, 0, 350.0, 0.01),
            (OPEN, 100, 399.0, 0.06),
        )
    },
    28: {
        YES: dict(share_flushed=0.3, share_overflowed=0.3, pairwise_error=1.0, pairwise_over_factored_time=2.0),
        NO: dict(share_flushed=0.0, share_overflowed=0.0, pairwise_error=2e-3, pairwise_over_factored_time=2.0),
        IF: dict(share_flushed=0.3, share_overflowed=0.3, pairwise_error=2e-3, pairwise_over_factored_time=2.0),
    },
    29: {
        YES: dict(share_nan_in_output=0.5, has_backward=1),
        NO: dict(share_nan_in_output=0.5, has_backward=0),
    },
    30: {YES: dict(answer_over_value=2.0), NO: dict(answer_over_value=1.0)},
}


def test_the_ledger_holds_the_thirty_claims():
    assert list(CLAIMS) == list(SYNTHETIC) == list(range(1, 31))
    assert {claim.topic for claim in CLAIMS.values()} == {"base 2", "lower_bound", "design"}
    assert len({claim.text for claim in CLAIMS.values()}) == 30


@pytest.mark.parametrize(
    ("number", "verdict"), [(number, verdict) for number, cases in SYNTHETIC.items() for verdict in cases]
)
def test_a_synthetic_measurement_turns_the_verdict(number, verdict):
    finding = CLAIMS[number].settle(Evidence(SYNTHETIC[number][verdict], ("nowhere",)))
    assert finding.verdict == verdict, finding.because
    assert finding.because.endswith((".", "!"))
    assert finding.source == "nowhere"
    assert bool(finding.condition) or verdict != CONDITIONAL


@pytest.mark.parametrize("number", SYNTHETIC)
def test_a_missing_number_is_not_measured(number):
    complete = next(iter(SYNTHETIC[number].values()))
    assert len(SYNTHETIC[number]) >= 2
    for name in CLAIMS[number].needed:
        finding = CLAIMS[number].settle(Evidence({**complete, name: None}, ()))
        assert finding.verdict == NOT_MEASURED
        assert name.replace("_", " ") in finding.because


MEASURED_HERE = {
    2: NO,
    12: NO,
    13: NO,
    14: NO,
    15: YES,
    16: NO,
    17: NO,
    19: IF,
    20: IF,
    21: NO,
    24: IF,
    25: NO,
    29: NO,
    30: NO,
}


@pytest.mark.parametrize("number", MEASURED_HERE)
def test_measured_on_this_machine(number):
    finding = claims.evaluate(number)
    assert finding.verdict == MEASURED_HERE[number], finding
    assert re.search(r"measured on .+, \d{4}-\d\d-\d\d", finding.source)
    assert not CLAIMS[number].missing(Evidence(finding.numbers, ()))


@pytest.mark.parametrize(("number", "verdict"), [(1, IF), (3, NO), (7, NO), (9, NO)])
def test_counted_in_machine_code(number, verdict):
    finding = claims.evaluate(number)
    if finding.verdict == NOT_MEASURED:
        assert "needed" in finding.source, "only a missing compiler may leave this open"
        pytest.skip(finding.source)
    assert finding.verdict == verdict
    assert "compiled for sm_" in finding.source


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """Writes a recording of a GPU that does not exist and makes it the one that ships."""
    monkeypatch.setenv("KDA_LAB_RECORDED", str(tmp_path))
    (tmp_path / "machine.json").write_text(json.dumps({"gpu": "GPU of a test", "date": "2026-01-02"}))

    def write(**files):
        for name, content in files.items():
            content = {"machine": {}} | content
            (tmp_path / f"{name}.json").write_text(json.dumps(content))

    return write


def row(step, ms, case="T 8192, H 96, no state"):
    return {"step": step, "case": case, "method": "events", "median_ms": ms, "floor_ms": 0.1}


@pytest.mark.parametrize(
    ("ms", "verdict"), [((2.0, 1.0), YES), ((1.0, 1.0), NO), ((1.0, 0.5, "B"), IF)], ids=["yes", "no", "if"]
)
def test_the_split_is_read_from_the_recorded_ladder(recording, ms, verdict):
    rows = [row(4, ms[0]), row(5, ms[1])]
    rows += [row(4, 1.0, ms[2]), row(5, 1.0, ms[2])] if len(ms) == 3 else []
    recording(ladder={"rows": rows})
    finding = claims.evaluate(26)
    assert finding.verdict == verdict
    assert "GPU of a test, 2026-01-02" in finding.source


def test_a_short_call_counts_in_a_cuda_graph(recording):
    """By events around each call it would be the host's time."""
    rows = [row(step, ms) for step, ms in ((4, 2.0), (5, 1.0))]
    rows += [row(step, 0.1, "T 16") | {"T": 16} for step in (4, 5)]
    rows += [row(step, ms, "T 16") | {"T": 16, "method": "cuda_graph"} for step, ms in ((4, 0.006), (5, 0.008))]
    recording(ladder={"rows": rows})
    assert claims.evaluate(26).numbers["smallest"] == pytest.approx(0.75)


def test_savings_of_kernels_are_read_from_the_recording(recording, tmp_path):
    (tmp_path / "events").mkdir()
    for step, gate in (("1_naive_exp", 900.0), ("2_rebased_ex2", 200.0)):
        content = {"gate": gate, "intra_chunk": gate / 2, "recurrence": 10.0}
        (tmp_path / "events" / f"{step}.json").write_text(json.dumps(content))
    recording()
    finding = claims.evaluate(8)
    assert finding.verdict == CONFIRMED
    assert finding.numbers["gate_saved_ms"] == pytest.approx(0.7)
    assert finding.source == "recorded on GPU of a test, 2026-01-02"


def test_end_to_end_is_read_from_the_recorded_ladder(recording):
    forms = [
        {"form": "expf: 1 / (1 + expf(-x))", "median_ms": 0.2},
        {"form": "ex2.approx.ftz: 1 / ...", "median_ms": 0.1},
    ]
    content = {"rows": [row(1, 10.0), row(2, 9.9), row(5, 1.0)], "exponential": {"gate": forms, "throughput": []}}
    recording(ladder=content)
    assert claims.evaluate(6).verdict == YES
    forms[0]["median_ms"] = 0.101
    recording(ladder=content)
    assert claims.evaluate(6).verdict == NO


def test_a_recorded_ledger_stands_in_for_what_needs_a_gpu(recording):
    recording()
    assert claims.evaluate(26).verdict == NOT_MEASURED
    numbers = {"cases": 2, "smallest": 1.3, "smallest_beyond_one_chunk": 1.3, "largest": 1.6}
    recording(claims={"machine": {}, "claims": [{"number": 26, "numbers": numbers, "sources": ["measured there"]}]})
    finding = claims.evaluate(26)
    assert finding.verdict == CONFIRMED
    assert finding.numbers == numbers
    assert finding.source == "measured there (recorded on GPU of a test, 2026-01-02)"


def test_the_ledger_can_be_written_where_it_is_read(recording, tmp_path):
    """kda-lab claims --json > $KDA_LAB_RECORDED/claims.json: the shell has emptied the file before it is asked for."""
    recording()
    (tmp_path / "claims.json").touch()
    assert claims.evaluate(26).verdict == NOT_MEASURED


def test_command_prints_the_ledger(capsys):
    assert cli.main(["claims", "12", "30"]) == 0
    text = capsys.readouterr().out
    assert "REFUTED" in text
    assert text.rstrip().endswith("0 confirmed, 2 refuted, 0 true only under a condition, 0 not measured")
    assert cli.main(["claims", "--json", "13"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["machine"]["date"]
    assert [entry["verdict"] for entry in content["claims"]] == [REFUTED]
    assert content["claims"][0]["numbers"]["weak_gate"] < 0
    assert cli.main(["claims", "31"]) == 2
    assert "expected a number from 1 to 30" in capsys.readouterr().err


def test_a_host_that_rewrites_the_gate_is_seen(monkeypatch):
    def forward(inputs, step):
        return real(inputs.with_(g=(inputs.g * 1.4427).bfloat16()), step=step)

    real = ops.forward
    monkeypatch.setattr(ops, "forward", forward)
    assert claims.evaluate(2).verdict == CONFIRMED


def test_waiting_is_not_counted_as_a_calls_time():
    slept, worked = bench.fastest_ms([lambda: time.sleep(0.02), lambda: sum(range(500_000))], 0.05)
    assert slept < 10 < 1e3 * 0.02
    assert worked > slept


def test_kernels_whose_times_disagree_settle_nothing(recording, tmp_path):
    """Claim 8 on a recording whose tools are further apart than the stages' savings."""
    (tmp_path / "events").mkdir()
    for step, gate in (("1_naive_exp", 900.0), ("2_rebased_ex2", 890.0)):
        (tmp_path / "events" / f"{step}.json").write_text(json.dumps({"gate": gate, "recurrence": 10.0}))
    recording()
    assert claims.evaluate(8).verdict == CONFIRMED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recording, "agreement", lambda self, step: [{"events_us": 900.0, "ncu_us": 800.0, "spread": 0.1}])
        assert claims.evaluate(8).verdict == NOT_MEASURED


def no_compiler(*args):
    raise native.CompilerNotFound("nvcc is needed and was not found\nInstall it")


@pytest.mark.parametrize(("number", "verdict"), [(1, IF), (3, NO), (4, NO), (5, IF), (7, NO), (9, NO)])
def test_without_a_compiler_recorded_machine_code_is_counted(monkeypatch, number, verdict):
    monkeypatch.setattr(sass, "compile_step", no_compiler)
    finding = claims.evaluate(number)
    assert finding.verdict == verdict
    assert finding.sources[0].startswith("machine code for sm_")
    assert "recorded on NVIDIA H200" in finding.sources[0]


@pytest.mark.parametrize("number", [1, 3, 5, 7, 9, 27])
def test_without_a_compiler_machine_code_is_not_measured(recording, monkeypatch, number):
    recording()
    monkeypatch.setattr(sass, "compile_step", no_compiler)
    finding = claims.evaluate(number)
    assert finding.verdict == NOT_MEASURED
    assert finding.sources[0] == "nvcc is needed and was not found"


@pytest.mark.parametrize(
    ("limited", "tight", "spread", "verdict", "words"),
    [
        (390.0, 500.0, 0.02, YES, "It pays: 2.5%"),
        (500.0, 390.0, 0.02, YES, "It pays: 2.5%"),
        (398.0, 500.0, 0.03, NO, "does not pay: at best the same within 3.0%, so no more than 3.5% can be gained"),
        (404.0, 500.0, 0.03, NO, "does not pay: at best the same within 3.0%, so no more than 2.0% can be gained"),
        (420.0, 500.0, 0.03, NO, "does not pay: 5.0% slower at best"),
        (500.0, 600.0, 0.10, NO, "does not pay: 25.0% slower at best"),
        (390.0, 500.0, 0.03, OPEN, "no more than 5.5% can be gained: too noisy"),
    ],
)
def test_registers_pay_or_not_or_cannot_be_told(limited, tight, spread, verdict, words):
    measured = {"prepare_us_limited": limited, "prepare_us_tight": tight, "spread": spread}
    finding = CLAIMS[27].settle(Evidence(SYNTHETIC[27][YES] | measured, ()))
    assert finding.verdict == verdict
    assert words in finding.because


def test_only_a_variant_that_spills_can_pay_for_the_claim():
    fast_without_spills = {"spill_bytes_limited": 0, "prepare_us_limited": 300.0}
    assert CLAIMS[27].settle(Evidence(SYNTHETIC[27][YES] | fast_without_spills, ())).verdict == NO


def test_times_of_a_gpu_settle_the_claim_on_registers(monkeypatch):
    """As on a GPU that gets slower from round to round: the variants took turns, so their ratios hardly move."""
    kernel = sass.Kernel("prepare<128>", "", (), 64, 0, 16, 16, 0)
    drift = [1.0 + 0.05 * i for i in range(design._ROUNDS)]
    readings = {"free": [400.0 * x for x in drift], "limited": [440.0 * x for x in drift]}
    readings["tight"] = [500.0 * x + i % 2 for i, x in enumerate(drift)]
    monkeypatch.setattr(evidence, "compile_here", lambda step, arch: {"prepare<128>": kernel})
    monkeypatch.setattr(design, "_time_in_turn", lambda copies: readings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU of a test")
    monkeypatch.setattr(evidence, "compiled", lambda: "compiled")
    finding = claims.evaluate(27)
    assert finding.verdict == REFUTED
    assert "10.0% slower" in finding.because
    assert finding.numbers["prepare_us_limited"] == pytest.approx(440.0 * 1.35)
    assert 0 < finding.numbers["spread"] < 0.003
    assert "timed on GPU of a test" in finding.source


def test_variants_take_turns_and_the_first_round_does_not_count(monkeypatch, tmp_path):
    ran, sources = [], {name: tmp_path / name for name in ("free", "tight")}

    def measure(forward, count):
        ran.append(Path(os.environ["KDA_LAB_CSRC"]).name)
        return {"prepare": [len(ran)] * count, "recurrence": [0.0] * count}

    monkeypatch.setenv("KDA_LAB_CSRC", "what was set before")
    monkeypatch.setattr(design, "repeated_inputs", lambda: None)
    monkeypatch.setattr(design.kernel_events, "measure", measure)
    monkeypatch.setattr(native, "load", lambda device: ran.append(os.environ["KDA_LAB_CSRC"]))
    readings = design._time_in_turn(sources)
    assert ran == ["free", "tight"] * (1 + design._ROUNDS) + ["what was set before"]
    assert readings["free"] == list(range(3, 2 + 2 * design._ROUNDS, 2))


@pytest.mark.cuda_compiler
def test_the_variants_of_prepare_are_compiled():
    numbers = CLAIMS[27].measure().numbers
    assert numbers["registers_free"] > numbers["registers_limited"] > numbers["registers_tight"]
    assert 0 == numbers["spill_bytes_free"] < numbers["spill_bytes_limited"] < numbers["spill_bytes_tight"]
