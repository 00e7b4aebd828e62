"""Exercises of lesson 3: the factored decay and its range."""

from __future__ import annotations

import numpy as np

from kda_lab.exercises.exercise import COUNT, WRITE, Cost, Exercise, Wrong, expect, expect_close, random


def lowest_bound(chunk, largest_log):
    """The lowest lower_bound at which exp(-G) stays below exp(largest_log) in a chunk of so many tokens."""
    return -largest_log / chunk


def _judge_bound(answer) -> None:
    C, top = 16, 88.0
    expect_close(
        answer(C, top),
        -top / C,
        {
            "A bound is a logarithm of a decay, so it is negative.": top / C,
            "The longer the chunk, the closer to 0 the bound must be.": -top * C,
            "G sums over all tokens of the chunk, the first one included.": -top / (C - 1),
            "Every token adds one gate: the first token's exp(-G) is there already.": -top / (C + 1),
        },
        "If every gate is at its strongest, what is G at the last token?",
    )


def factored_Mqk(q_hat, k_hat, G, scale, exp):
    """Mqk [C, C] by a matrix product of decayed queries and undecayed keys [C, K]; exp is the only exponential."""
    return scale * np.tril((q_hat * exp(G)) @ (k_hat * exp(-G)).T)


class _Counted:
    """np.exp that counts its results."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x):
        self.count += np.size(x)
        return np.exp(x)


def _judge_Mqk(answer) -> Cost:
    q, k = random(16, 8), random(16, 8, seed=1)
    G = np.cumsum(-0.3 * np.abs(random(16, 8, seed=2)), axis=0)
    exp, scale = _Counted(), 0.25
    full = (q * np.exp(G)) @ (k * np.exp(-G)).T
    expect_close(
        answer(q, k, G, scale, exp),
        scale * np.tril(full),
        {
            "A token sees itself: keep the diagonal.": scale * np.tril(full, -1),
            "The scale is missing.": np.tril(full),
            "Everything above the diagonal must be 0: those tokens are still to come.": scale * full,
            "Both factors decay: the keys need exp(-G).": scale * np.tril((q * np.exp(G)) @ (k * np.exp(G)).T),
            "The signs are swapped: queries decay, keys are restored.": scale
            * np.tril((q * np.exp(-G)) @ (k * np.exp(G)).T),
        },
        "exp(G_i - G_j) = exp(G_i) exp(-G_j): which factor belongs to the query, which to the key?",
    )
    expect(exp.count > 0, "The values are right, but exp was never called: use the one you are given.")
    cost = Cost(exp.count / G.size, 2.0, "exponentials for each element")
    expect(
        exp.count <= 2 * G.size,
        f"The values are right, at {cost.value:g} exponentials for each element: that is the pairwise form. Factored, "
        "two are enough.",
    )
    return cost


def centred_factors(G):
    """exp(G - m) and exp(m - G) [C, K] with a row m of G chosen so that neither leaves the range early."""
    middle = G[len(G) // 2]
    return np.exp(G - middle), np.exp(middle - G)


def _judge_centred(answer) -> Cost:
    C = 16
    G = -5.0 * np.arange(1, C + 1)[:, None] * np.ones((1, 3))
    result = answer(G)
    expect(isinstance(result, tuple) and len(result) == 2, "Return two factors: one for rows i, one for columns j.")
    rows, columns = (np.asarray(factor, dtype=float) for factor in result)
    expect(rows.shape == columns.shape == G.shape, f"Both factors must have the shape of G, {G.shape}.")
    pairs = np.exp(G[:, None] - G[None])
    if not np.allclose(rows[:, None] * columns[None], pairs):
        raise Wrong("Their product must still be exp(G_i - G_j): what one factor divides by, the other multiplies by.")
    largest = np.log(max(rows.max(), columns.max()))
    plain = -G.min()
    expect(
        largest < 0.95 * plain,
        "The largest factor is as large as before: measured from the start (or the end), one factor takes all of it.",
    )
    expect(
        largest <= 0.6 * plain,
        f"The largest exponent is {largest / plain:.0%} of what it was; about half can be had. Which row is best?",
    )
    best = np.log(max(factor.max() for factor in centred_factors(G)))
    return Cost(round(largest / plain, 3), round(best / plain, 3), "of the largest exponent from the chunk's start")


EXERCISES = (
    Exercise(
        "3.1",
        "The limit",
        COUNT,
        "A format holds numbers up to $e^{x}$, with $x$ = `largest_log`. How low may `lower_bound` be?",
        lowest_bound,
        _judge_bound,
        ("At the last token G = chunk · lower_bound.", "exp(-G) must not exceed exp(largest_log)."),
    ),
    Exercise(
        "3.2",
        "Two exponentials instead of eight",
        WRITE,
        "Write $M^{qk}$ as one matrix product. The cost is the number of exponentials for each element.",
        factored_Mqk,
        _judge_Mqk,
        ("Scale the rows of q_hat and of k_hat before the product.", "`np.tril` keeps the diagonal."),
        points=2,
    ),
    Exercise(
        "3.3",
        "Another zero point",
        WRITE,
        "Nothing says that $e^{\\pm G}$ must be measured from the start of the chunk. Choose another row as zero, so "
        "that the largest factor has about half the exponent, and the product of the two is what it was. The cost is "
        "the largest exponent that is left.",
        centred_factors,
        _judge_centred,
        ("Subtract the same row from G in both factors.", "Which row makes the largest |G - m| smallest?"),
        points=2,
    ),
)
