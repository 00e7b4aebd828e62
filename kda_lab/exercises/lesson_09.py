"""Exercises of lesson 9: a step of your own."""

from __future__ import annotations

import math
from pathlib import Path

from kda_lab import own_step
from kda_lab.exercises.exercise import READ, WRITE, Cost, Exercise, Wrong, expect, expect_choice, expect_close


def offset(b, t, h, d, T, H, K):
    """Where element [b, t, h, d] of a contiguous tensor [B, T, H, K] stands, counted in elements from its start."""
    return ((b * T + t) * H + h) * K + d


def _judge_offset(answer) -> None:
    b, t, h, d, T, H, K = 1, 2, 3, 4, 10, 5, 8
    expect_close(
        answer(b, t, h, d, T, H, K),
        ((b * T + t) * H + h) * K + d,
        {
            "That is the order [B, H, T, K]: here the heads of one token are neighbours.": ((b * H + h) * T + t) * K
            + d,
            "The batch row is missing: row b starts b * T tokens further on.": (t * H + h) * K + d,
            "That is in bytes; a pointer to bf16 counts elements.": 2 * (((b * T + t) * H + h) * K + d),
            "The channel is missing.": ((b * T + t) * H + h) * K,
        },
        "The last index is the fastest: start from b, multiply by the next size, add the next index.",
    )


CAUSES = ("state not handed on", "range of the exponentials", "inverse", "none")


def diagnose(errors):
    """The likeliest cause of a step's errors {regime: relative RMS, NaN if not finite}: one of CAUSES.

    "state not handed on", "range of the exponentials", "inverse", or "none" where all are below 1e-2.
    """
    bad = {regime for regime, error in errors.items() if not error < 1e-2}
    if not bad:
        return "none"
    if "saturated" in bad and "retain" not in bad:
        return "range of the exponentials"
    return "inverse" if bad == {"collinear"} else "state not handed on"


def _judge_diagnosis(answer) -> None:
    good = dict.fromkeys(("forget", "mixed", "retain", "saturated", "collinear"), 2e-3)
    cases = [
        ({}, "none", "All errors are as small as bf16 allows."),
        (
            {"retain": 0.9, "mixed": 0.4, "collinear": 0.8},
            "state not handed on",
            "Where gates forget it is right, where they retain it is wrong: something is lost between chunks.",
        ),
        (
            {"saturated": math.nan},
            "range of the exponentials",
            "Only the strongest gates fail, with a NaN (which is below nothing and above nothing): exp(-G) left "
            "its range.",
        ),
        ({"collinear": 2.2}, "inverse", "Only equal keys fail: that is where the powers of L explode."),
    ]
    for changed, expected, hint in cases:
        expect_choice(answer(good | changed), expected, CAUSES, dict.fromkeys(CAUSES, hint))


FASTER = 2.0  # than the starting file


def my_step():
    """The path of your source file: right in every regime, and at least twice as fast as the starting file."""
    return own_step.example("fast")


def _judge_step(answer) -> Cost:
    path = answer()
    expect(isinstance(path, (str, Path)), f"Return the path of your file, not {type(path).__name__}.")
    expect(Path(path).is_file(), f"There is no file {path}. own_step.start('my_step.cpp') writes one to begin with.")
    report = own_step.run(path)
    if report.failure:
        raise Wrong(report.failure)
    expect(report.right, f"It is not right in every regime: {report.wrong}.")
    start = own_step.run(own_step.example("start"))
    faster = start.median_ms / report.median_ms
    expect(
        faster >= FASTER,
        f"It is right, and {faster:.2f} times as fast as the starting file; {FASTER:g} times is asked. What does the "
        "inner loop do that could be done once?",
    )
    solution = report if Path(path) == my_step() else own_step.run(my_step())
    shares = (round(run.median_ms / start.median_ms, 3) for run in (report, solution))
    return Cost(*shares, "of the starting file's time")


EXERCISES = (
    Exercise(
        "9.1",
        "Find an element",
        READ,
        "Your step gets pointers. Where does `q[b, t, h, d]` stand?",
        offset,
        _judge_offset,
        ("Two neighbours in d are one element apart.", "Two neighbours in t are H · K elements apart."),
    ),
    Exercise(
        "9.2",
        "Read the errors",
        READ,
        "A step is right in some regimes and wrong in others. The pattern tells you where to look.",
        diagnose,
        _judge_diagnosis,
        (
            "forget hides the state, saturated stresses the range, collinear the inverse.",
            "`not error < limit` catches NaN.",
        ),
    ),
    Exercise(
        "9.3",
        "Twice as fast",
        WRITE,
        "Make the starting file at least twice as fast, and keep it right in every regime. Your function returns the "
        "path of your file. The cost is its share of the starting file's time.",
        my_step,
        _judge_step,
        (
            "exp and sigmoid are computed for every value row: once a token is enough.",
            "The loops over d can be one pass for decay and recall, and float instead of double lets them vectorise.",
        ),
        points=3,
    ),
)
