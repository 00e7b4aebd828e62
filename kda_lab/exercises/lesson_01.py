"""Exercises of lesson 1: the chunk form."""

from __future__ import annotations

import numpy as np

from kda_lab.exercises import tally
from kda_lab.exercises.exercise import COUNT, WRITE, Cost, Exercise, Wrong, expect, expect_close, random


def exponentials(chunk, K):
    """How many exponentials the pairwise form computes for one chunk of one head, for the pairs i >= j."""
    return chunk * (chunk + 1) // 2 * K


def _judge_exponentials(answer) -> None:
    C, K = 16, 128
    expect_close(
        answer(C, K),
        C * (C + 1) // 2 * K,
        {
            "Only half of the pairs are needed: a token sees none that come after it.": C * C * K,
            "The pairs i = j count too: Mqk has a diagonal.": C * (C - 1) // 2 * K,
            "Each channel has a gate of its own, so every pair needs K exponentials.": C * (C + 1) // 2,
        },
        "Count the pairs i >= j of the chunk, then the channels.",
    )
    expect_close(answer(1, 1), 1, {}, "A chunk of one token has one pair.")


def make_L(k_hat, beta, G):
    """L [C, C] of one chunk and head: k_hat and G are [C, K], beta is [C]. Zero on and above the diagonal."""
    C = len(beta)
    L = np.zeros((C, C))
    for i in range(C):
        for j in range(i):
            L[i, j] = beta[i] * np.sum(k_hat[i] * k_hat[j] * np.exp(G[i] - G[j]))
    return L


def _judge_L(answer) -> Cost | None:
    k_hat, beta = random(5, 3), np.linspace(0.1, 0.9, 5)
    G = np.cumsum(-np.abs(random(5, 3, seed=1)), axis=0)
    with np.errstate(over="ignore"):
        pairs = np.einsum("id,jd,ijd->ij", k_hat, k_hat, np.exp(G[:, None] - G[None]))
        flipped = np.einsum("id,jd,ijd->ij", k_hat, k_hat, np.exp(G[None] - G[:, None]))
    expect_close(
        answer(k_hat, beta, G),
        np.tril(beta[:, None] * pairs, -1),
        {
            "The diagonal belongs to I, not to L: only pairs i > j.": np.tril(beta[:, None] * pairs),
            "beta belongs to the row, the token that is corrected.": np.tril(beta[None] * pairs, -1),
            "beta is missing.": np.tril(pairs, -1),
            "The exponent has the wrong sign: for i > j it must not be positive.": np.tril(beta[:, None] * flipped, -1),
            "The decay between the two tokens is missing.": np.tril(beta[:, None] * (k_hat @ k_hat.T), -1),
            "Everything above the diagonal must be 0: those tokens are still to come.": beta[:, None] * pairs,
        },
        "Compare with the formula under form_L_and_Mqk, entry by entry.",
    )
    k_hat, G = random(16, 8), np.cumsum(-np.abs(random(16, 8, seed=1)), axis=0)
    return tally.cost(
        answer,
        make_L,
        lambda watch: (k_hat, np.ones(16), watch(G)),
        "exponentials for each element of k",
        what=tally.EXPONENTIALS,
        per=k_hat.size,
    )


def invert(L):
    """(I + L)^-1 of a strictly lower triangular L [C, C], row after row, without np.linalg."""
    INV = np.eye(len(L))
    for i in range(1, len(L)):
        INV[i] -= L[i] @ INV
    return INV


class _ByHand(np.ndarray):
    """An array that np.linalg does not take."""

    def __array_function__(self, func, types, args, kwargs):
        if func.__module__.startswith("numpy.linalg"):
            raise Wrong(f"That is np.linalg.{func.__name__}. Write it row after row.")
        return super().__array_function__(func, types, args, kwargs)


def _judge_invert(answer) -> Cost | None:
    L = np.tril(random(6, 6), -1)
    exact = np.linalg.inv(np.eye(6) + L)
    expect_close(
        answer(L.copy()),
        exact,
        {
            "That is the first term of the series. It is exact only if tokens do not reach each other twice.": np.eye(6)
            - L,
            "That is I + L itself, not its inverse.": np.eye(6) + L,
            "That is the inverse of I - L: mind the sign.": np.linalg.inv(np.eye(6) - L),
            "That is the inverse's transpose.": exact.T,
        },
        "Row i of INV is row i of I minus L[i] times the rows above, which are known already.",
    )
    nilpotent = np.tril(np.ones((16, 16)), -1)
    expect(
        np.allclose(answer(nilpotent.copy()) @ (np.eye(16) + nilpotent), np.eye(16)),
        "On equal keys (all of L is 1) INV (I + L) is not the identity.",
    )
    answer(L.view(_ByHand))
    return tally.cost(answer, invert, lambda watch: (watch(nilpotent),), "C³ operations", per=16**3)


def update_state(S, U, k_hat, G):
    """The state after a chunk: S is [V, K], U [C, V], k_hat and G [C, K]."""
    return S * np.exp(G[-1]) + U.T @ (k_hat * np.exp(G[-1] - G))


def _judge_update(answer) -> None:
    S, U, k_hat = random(3, 4), random(5, 3, seed=1), random(5, 4, seed=2)
    G = np.cumsum(-np.abs(random(5, 4, seed=3)), axis=0)
    expect_close(
        answer(S, U, k_hat, G),
        update_state(S, U, k_hat, G),
        {
            "A key decays from its own token to the end of the chunk, not from the start.": S * np.exp(G[-1])
            + U.T @ (k_hat * np.exp(G)),
            "The new keys decay as well, each from its own token to the end of the chunk.": S * np.exp(G[-1])
            + U.T @ k_hat,
            "The old state decays over the whole chunk.": S + U.T @ (k_hat * np.exp(G[-1] - G)),
            "That exponent is positive: between token i and the end lies G_C - G_i.": S * np.exp(G[-1])
            + U.T @ (k_hat * np.exp(-G)),
        },
        "Old state times its decay over the chunk, plus each token's correction times what is left of its key.",
    )


EXERCISES = (
    Exercise(
        "1.1",
        "Count the exponentials",
        COUNT,
        "Step 1 computes $e^{G_i - G_j}$ for every pair of tokens that see each other. How many is that for one chunk "
        "of one head?",
        exponentials,
        _judge_exponentials,
        ("Draw the triangle for 3 tokens.", "Every channel decays at its own rate."),
    ),
    Exercise(
        "1.2",
        "What tokens do to each other",
        WRITE,
        "Write $L$ for one chunk and head. Loops are welcome. The cost is the number of exponentials for each element "
        "of $\\hat k$, in a chunk of 16.",
        make_L,
        _judge_L,
        ("Two loops: i over the tokens, j over those before i.", "The sum runs over channels, with the decay inside."),
    ),
    Exercise(
        "1.3",
        "Invert by hand",
        WRITE,
        "$L$ has nothing on or above its diagonal, so $(I + L)^{-1}$ needs no division. Write it. The cost is the "
        "number of operations. The solution's can be beaten: most of what it multiplies is 0.",
        invert,
        _judge_invert,
        ("(I + L) INV = I, read row by row.", "INV[i] = I[i] - L[i] @ INV, where L[i] reaches rows above i only."),
        points=2,
    ),
    Exercise(
        "1.4",
        "Hand the state on",
        WRITE,
        "What the next chunk starts from: the old state, decayed, and what this chunk has written.",
        update_state,
        _judge_update,
        ("`G[-1]` is the sum over the whole chunk.", "Token i's key has decayed by `G[-1] - G[i]` at the end."),
    ),
)
