"""Exercises of lesson 8: judging claims."""

from __future__ import annotations

import math

from kda_lab.exercises.exercise import READ, WRITE, Cost, Exercise, expect_choice

CONFIRMED, REFUTED, NOT_MEASURED = VERDICTS = ("confirmed", "refuted", "not measured")


def judge_speedup(ratio, noise):
    """The verdict on "a gain of at least 15 %" for a measured ratio of times, None if there is none.

    noise: how far the same program differs from itself, as a share. Where it decides, nothing was measured.
    """
    if ratio is None or ratio - noise < 1.15 <= ratio + noise:
        return "not measured"
    return "confirmed" if ratio >= 1.15 else "refuted"


def _judge_speedup(answer) -> None:
    cases = [
        (1.30, 0.02, CONFIRMED, "1.30 with a noise of 0.02 is clearly above 1.15."),
        (1.02, 0.02, REFUTED, "1.02 with a noise of 0.02 is clearly below 1.15."),
        (1.20, 0.30, NOT_MEASURED, "A program that differs from itself by 30 % cannot show a difference of 15 %."),
        (1.05, 0.30, NOT_MEASURED, "Noise works both ways: it may hide a gain as well as pretend one."),
        (None, 0.02, NOT_MEASURED, "Nothing was measured: None is neither yes nor no."),
    ]
    for ratio, noise, expected, hint in cases:
        expect_choice(answer(ratio, noise), expected, VERDICTS, dict.fromkeys(VERDICTS, hint))


def only_from_sm80(counts):
    """The verdict on "this instruction exists only on SM80 and newer" from counts by architecture, {75: 1, 90: 1}.

    An architecture that was not compiled for is None or absent.
    """
    older = [count for arch, count in counts.items() if arch < 80 and count is not None]
    if not older:
        return "not measured"
    return "refuted" if any(older) else "confirmed"


def _judge_sm80(answer) -> None:
    cases = [
        ({75: 1, 90: 1}, REFUTED, "It is there on 75, which is older."),
        ({75: 0, 90: 1}, CONFIRMED, "It is on 90 and not on 75, as claimed."),
        ({80: 1, 90: 1}, NOT_MEASURED, "Both are 80 or newer: they say nothing about older ones."),
        ({75: None, 90: 1}, NOT_MEASURED, "Nobody compiled for 75: None is not 0."),
    ]
    for counts, expected, hint in cases:
        expect_choice(answer(dict(counts)), expected, VERDICTS, dict.fromkeys(VERDICTS, hint))


def clamp_or_factor(gate):
    """Is lower_bound a "clamp" or a "factor"? gate(logit, lower_bound) is a black box: ask it as often as you like."""
    weak, halved = gate(-2.0, -5.0), gate(-2.0, -2.5)
    return "factor" if abs(weak - halved) > 1e-3 else "clamp"


def _judge_clamp(answer) -> Cost:
    asked = []

    def factor(logit, lower_bound):
        asked.append(logit)
        return lower_bound / (1 + math.exp(-logit))

    def clamp(logit, lower_bound):
        return max(lower_bound, -math.log1p(math.exp(logit)))

    kinds = ("clamp", "factor")
    hint = "Both reach lower_bound when the gate is strong: an experiment must look where they differ, at a weak gate."
    expect_choice(answer(factor), "factor", kinds, {"clamp": f"This gate scales with lower_bound everywhere. {hint}"})
    expect_choice(answer(clamp), "clamp", kinds, {"factor": f"This gate is cut off at lower_bound. {hint}"})
    questions = len(asked)
    clamp_or_factor(factor)
    return Cost(questions, len(asked) - questions, "questions to the black box")


EXERCISES = (
    Exercise(
        "8.1",
        "Noise has a verdict",
        READ,
        "A claim says that the gain is at least 15 %. You have a ratio of times and know your noise. When may you say "
        "yes, when no, and when neither?",
        judge_speedup,
        _judge_speedup,
        ("The true ratio lies within ratio ± noise.", "If 1.15 lies within it, the measurement decides nothing."),
    ),
    Exercise(
        "8.2",
        "What was not asked",
        WRITE,
        "Someone counted an instruction in code compiled for some architectures. Judge the claim that it exists only "
        "on SM80 and newer.",
        only_from_sm80,
        _judge_sm80,
        ("Only older architectures can refute it, or confirm it.", "None means that nobody looked."),
    ),
    Exercise(
        "8.3",
        "Design an experiment",
        WRITE,
        "Two write-ups disagree: one says that `lower_bound` is a clamp, one that it is a factor. You get the gate as "
        "a black box. Find out. The cost is the number of your questions.",
        clamp_or_factor,
        _judge_clamp,
        ("What do both do to a gate far above the bound?", "Change lower_bound and see whether a weak gate follows."),
        points=2,
    ),
)
