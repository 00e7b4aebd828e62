"""Exercises of lesson 2: base 2."""

from __future__ import annotations

import math

import numpy as np

from kda_lab.exercises.exercise import MEASURE, READ, WRITE, Cost, Exercise, expect, expect_close, random


def gate_scale_log2(lower_bound):
    """The factor of the sigmoid that makes every G come out in base 2."""
    return lower_bound * math.log2(math.e)


def _judge_scale(answer) -> None:
    lb = -5.0
    expect_close(
        answer(lb),
        lb * math.log2(math.e),
        {
            "That is the way back: ln 2 turns base 2 into base e.": lb * math.log(2),
            "That is the factor alone; the sigmoid needs lower_bound in it.": math.log2(math.e),
            "This is still base e.": lb,
        },
        "e^x = 2^(x log2 e): what must lower_bound be multiplied by?",
    )


def activate_gate(g_raw, A_log, dt_bias, lower_bound, exp2):
    """The gate in base 2 [T, K] from its logits [T, K]: log2 of what a token leaves. exp2 is the only exponential."""
    slope = math.log2(math.e) * exp2(math.log2(math.e) * A_log)
    return lower_bound * math.log2(math.e) / (1 + exp2(-slope * (g_raw + dt_bias)))


class _Counted:
    """np.exp2 that counts its results."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x):
        self.count += np.size(x)
        return np.exp2(x)


def _judge_gate(answer) -> Cost:
    g_raw, A_log, dt_bias, lb = random(8, 4), 0.7, random(4, seed=1), -5.0
    exp2, log2e = _Counted(), math.log2(math.e)
    logits = math.exp(A_log) * (g_raw + dt_bias)
    result = answer(g_raw, A_log, dt_bias, lb, exp2)
    expect_close(
        result,
        lb * log2e / (1 + np.exp(-logits)),
        {
            "That is the gate in base e: fold log2(e) into the factor in front.": lb / (1 + np.exp(-logits)),
            "The sigmoid contains an exponential too: its argument needs log2(e).": lb * log2e / (1 + np.exp2(-logits)),
            "exp(A_log) is an exponential as well: its argument needs log2(e).": lb
            * log2e
            / (1 + np.exp(-(2.0**A_log) * (g_raw + dt_bias))),
        },
        "Write the gate with exp first; then put 2^(x log2 e) in the place of every e^x.",
    )
    expect(exp2.count > 0, "The values are right, but exp2 was never called: use it for every exponential.")
    expect(
        exp2.count > g_raw.size,
        "The values are right, but some exponential is not computed by exp2: there is one for every logit, and one "
        "for A_log.",
    )
    return Cost(exp2.count / g_raw.size, (g_raw.size + 1) / g_raw.size, "exponentials for each gate value")


def end_to_end(share, ratio):
    """How many times as fast a program becomes when `share` of its time becomes `ratio` times as fast."""
    return 1 / (1 - share + share / ratio)


def _judge_amdahl(answer) -> None:
    p, r = 0.4, 1.25
    expect_close(
        answer(p, r),
        1 / (1 - p + p / r),
        {
            "That forgets the part that stays as slow as it was.": r / p,
            "That mixes speeds; times add, speeds do not.": 1 - p + p * r,
            "That is the new time as a share of the old one; the question was how many times as fast.": 1 - p + p / r,
            "That is the stage alone.": r,
        },
        "Add up the new times: what stays, and what shrinks.",
    )
    expect_close(answer(1.0, 2.0), 2.0, {}, "If all of it becomes twice as fast, the whole does.")
    expect_close(answer(0.0, 9.0), 1.0, {}, "If nothing is faster, nothing changes.")


EXERCISES = (
    Exercise(
        "2.1",
        "One factor",
        READ,
        "Which factor in front of the sigmoid makes every sum $G$ a logarithm to base 2?",
        gate_scale_log2,
        _judge_scale,
        ("e^x = 2^(x log2(e)).", "It is computed once, so an exact `math.log2` costs nothing."),
    ),
    Exercise(
        "2.2",
        "A gate without base e",
        WRITE,
        "Write `activate_gate` so that the only exponential is the function `exp2` that you are given. Fold every "
        "$\\log_2 e$ into a factor that is there anyway. The cost is the number of exponentials for each gate value.",
        activate_gate,
        _judge_gate,
        (
            "There are two places with an exponential: the slope exp(A_log), and the sigmoid.",
            "sigmoid(x) = 1 / (1 + e^-x)",
        ),
        points=2,
    ),
    Exercise(
        "2.3",
        "From a stage to the whole",
        MEASURE,
        "A stage takes a share of the time and becomes some times as fast. What does the whole gain?",
        end_to_end,
        _judge_amdahl,
        ("Set the old time to 1.", "The stage's new time is share / ratio."),
    ),
)
