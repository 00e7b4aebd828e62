"""Exercises of lesson 0: the definition."""

from __future__ import annotations

import numpy as np

from kda_lab.exercises import tally
from kda_lab.exercises.exercise import READ, WRITE, Cost, Exercise, expect, expect_close, random


def share_left(lower_bound, tokens):
    """What is left of a channel of the state after some tokens, when every gate is at its strongest."""
    return np.exp(lower_bound * tokens)


def _judge_share(answer) -> None:
    lb, n = -0.5, 3
    expect_close(
        answer(lb, n),
        np.exp(lb * n),
        {
            "That is what one token leaves, times the number of tokens: each token multiplies again.": n * np.exp(lb),
            "That is the log of it: the gate is added up, the state is multiplied by its exponential.": lb * n,
            "That is one token only.": np.exp(lb),
            "lower_bound is a natural logarithm, not the factor itself.": lb**n,
        },
        "Each token multiplies the channel by exp(g), and g is at its strongest when it equals lower_bound.",
    )


def one_token(S, q, k, v, g, beta, scale):
    """One token of the definition: returns the new S [V, K] and the output [V]. q and k have length 1 already."""
    S = S * np.exp(g)
    S = S + np.outer(beta * (v - S @ k), k)
    return S, S @ (scale * q)


def _judge_token(answer) -> Cost | None:
    S, q, k, v = random(3, 4), random(4, seed=1), random(4, seed=2), random(3, seed=3)
    q, k, g, beta, scale = q / np.linalg.norm(q), k / np.linalg.norm(k), -np.abs(random(4, seed=4)), 0.6, 0.5
    before = S.copy()
    result = answer(S.copy(), q, k, v, g, beta, scale)
    expect(isinstance(result, tuple) and len(result) == 2, "Return two things: the new state and the output.")
    state, out = one_token(S, q, k, v, g, beta, scale)
    decayed = before * np.exp(g)
    late = before + beta * np.outer(v - before @ k, k)
    expect_close(
        result[0],
        state,
        {
            "The decay comes first: the correction looks at the state that is left.": late * np.exp(g),
            "Nothing has decayed yet.": late,
            "That writes the value itself. The delta rule writes what the state's answer lacks, v - S k.": decayed
            + beta * np.outer(v, k),
            "beta says how far the correction goes; here it goes all the way.": decayed + np.outer(v - decayed @ k, k),
        },
        "The new state is not right. Follow the three lines of the definition: forget, correct, read.",
    )
    expect_close(
        result[1],
        out,
        {
            "The output reads the state after the update: a token sees itself.": scale * before @ q,
            "That is the state after the decay, before the correction.": scale * decayed @ q,
            "The scale is missing.": state @ q,
        },
        "The output is not right: scale times S q, with the new S.",
    )
    S, q, k, v, g = random(64, 64), random(64), random(64), random(64), -np.ones(64)
    return tally.cost(
        answer, one_token, lambda watch: (watch(S), q, k, v, g, 0.6, 0.5), "operations for each entry of S", per=S.size
    )


def relative_error(actual, expected):
    """Relative RMS error, |actual - expected| / |expected| in Euclidean norms; NaN if either holds a NaN."""
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def _judge_error(answer) -> None:
    expected = random(50) * np.linspace(1e-6, 1.0, 50)
    actual = expected + 0.01 * random(50, seed=1)
    d = actual - expected
    expect_close(
        answer(actual, expected),
        np.linalg.norm(d) / np.linalg.norm(expected),
        {
            "That is the mean of each entry's own error: entries near 0 dominate it.": np.mean(np.abs(d / expected)),
            "That is the largest error, which one entry decides.": np.abs(d).max() / np.abs(expected).max(),
            "That is absolute: the same kernel on larger values would look worse.": np.sqrt(np.mean(d**2)),
            "Take the root.": np.sum(d**2) / np.sum(expected**2),
        },
        "Norm of the difference, divided by the norm of what is expected.",
    )
    actual[7] = np.nan
    expect(
        bool(np.isnan(answer(actual, expected))),
        "A NaN passed unseen: a check that skips NaN is green on a kernel that returns nothing else.",
    )


EXERCISES = (
    Exercise(
        "0.1",
        "What is left",
        READ,
        "A gate is the natural logarithm of what one token leaves of a channel. Say what some number of tokens leave "
        "when all of them forget as strongly as `lower_bound` allows.",
        share_left,
        _judge_share,
        ("One token leaves e^g.", "Logarithms add where factors multiply."),
    ),
    Exercise(
        "0.2",
        "One token",
        WRITE,
        "Write the definition for one token of one head: forget, correct, read, in this order. The cost is the "
        "number of operations for each entry of the state; the lesson counted seven.",
        one_token,
        _judge_token,
        (
            "`S * np.exp(g)` scales every column d by its own decay.",
            "`np.outer(a, b)[i, j]` is `a[i] * b[j]`.",
            "beta and scale can be multiplied into a vector before it meets the matrix.",
        ),
        points=2,
    ),
    Exercise(
        "0.3",
        "An error that cannot lie",
        WRITE,
        "Everything in this course rests on one number, the relative RMS error. Write it so that a NaN can never pass.",
        relative_error,
        _judge_error,
        ("`np.linalg.norm` of the difference.", "Leave NaN alone: it spreads by itself."),
    ),
)
