"""The fused CPU step against what the machine can do (a matrix product) and against chunked PyTorch, all in float32.

python -m benchmarks.cpu_fused [ROUNDS]

Promises, at T 4096, H 8, K = V = 128: at least 40 % of the FLOP rate of torch.mm at n = 2048, and at least 3 times as
fast as a straightforward chunked PyTorch implementation. The three are timed in turn in every round, so that a machine
which is busy, or throttles, slows down all of them; rates are medians, ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import kda_lab
from kda_lab import compare, reference
from kda_lab.inputs import Inputs

T, H, D, CHUNK, MATRIX = 4096, 8, 128, 16, 2048
FLOP_PER_TOKEN_AND_HEAD = 117_760  # at D = 128 and CHUNK = 16: prepare 11,264, recurrence 106,496
LEAST_SHARE_OF_MATRIX_PRODUCT = 0.40
LEAST_SPEED_UP_OVER_TORCH = 3.0


def chunked_torch(inputs: Inputs) -> Tensor:
    """The chunk form in PyTorch, float32, batched over heads and chunks where that is possible. Returns [1, T, H, V].

    Factored, so lower_bound * CHUNK must be at least -87; T must be a multiple of CHUNK.
    """

    def chunks(x: Tensor) -> Tensor:  # [1, T, H, size] -> [chunks, H, CHUNK, size]
        return x[0].float().unflatten(0, (-1, CHUNK)).transpose(1, 2)

    gate = torch.sigmoid(inputs.A_log.exp()[:, None] * (inputs.g.float() + inputs.dt_bias))
    G = chunks(inputs.lower_bound * gate).cumsum(2)
    beta = chunks(inputs.beta[..., None]).sigmoid()
    q, k, v = chunks(inputs.q), chunks(inputs.k), chunks(inputs.v)
    q_decayed = inputs.scale * q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * G.exp()
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    k_decayed, k_inv, k_restored = k * G.exp(), k * (-G).exp(), k * (G[:, :, -1:] - G).exp()
    total_decay = G[:, :, -1:].exp()  # [chunks, H, 1, K]

    L = beta * (k_decayed @ k_inv.mT).tril(-1)
    Mqk = (q_decayed @ k_inv.mT).tril()
    both = torch.linalg.solve_triangular(L, beta * torch.cat([v, k_decayed], -1), upper=False, unitriangular=True)
    u, w = both.split([D, D], -1)

    S = torch.zeros(H, D, D)  # [H, K, V]
    out = []
    for c in range(T // CHUNK):
        U = u[c] - w[c] @ S
        out.append(q_decayed[c] @ S + Mqk[c] @ U)
        S = total_decay[c].mT * S + k_restored[c].mT @ U
    return torch.stack(out).transpose(1, 2).reshape(1, T, H, D)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(rounds: int = 25) -> None:
    torch.set_grad_enabled(False)
    inputs = kda_lab.make_inputs(T=T, H=H, K=D, V=D)
    out = inputs.new_out()
    a, b = F.normalize(torch.randn(MATRIX, MATRIX)), torch.randn(MATRIX, MATRIX)
    work = {
        "matrix product": lambda: torch.mm(a, b),
        "fused step": lambda: kda_lab.fwd(
            *(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.scale, out),
            *(inputs.A_log, inputs.dt_bias, inputs.lower_bound),
        ),
        "chunked torch": lambda: chunked_torch(inputs),
    }
    work["fused step"]()
    expected = reference.recurrent_torch(inputs).out
    compare.assert_close(out, expected, rms=compare.output_tolerance(expected))
    compare.assert_close(chunked_torch(inputs), expected, rms=1e-5, name="chunked torch")

    samples = [{name: seconds(call) for name, call in work.items()} for _ in range(rounds)]
    flop = FLOP_PER_TOKEN_AND_HEAD * T * H
    rate = {name: flop / statistics.median(sample[name] for sample in samples) / 1e9 for name in work}
    rate["matrix product"] *= 2 * MATRIX**3 / flop
    share = statistics.median(s["matrix product"] / s["fused step"] for s in samples) * flop / (2 * MATRIX**3)
    speed_up = statistics.median(s["chunked torch"] / s["fused step"] for s in samples)

    print(f"T {T}, H {H}, K = V = {D}: {flop / 1e9:.2f} GFLOP, {torch.get_num_threads()} threads, {rounds} rounds")
    print(f"bound          {flop / rate['matrix product'] / 1e6:8.1f} ms  at the rate of torch.mm, n = {MATRIX}")
    for name in ("fused step", "chunked torch"):
        print(f"{name:14} {flop / rate[name] / 1e6:8.1f} ms  {rate[name]:6.1f} GFLOP/s")
    print(f"matrix product {' ' * 11}  {rate['matrix product']:6.1f} GFLOP/s")
    promise("share of the matrix product's rate", share, LEAST_SHARE_OF_MATRIX_PRODUCT)
    promise("times as fast as chunked torch", speed_up, LEAST_SPEED_UP_OVER_TORCH)


def promise(what: str, value: float, least: float) -> None:
    print(f"{what}: {value:.2f} (promised: at least {least:.2f}{'' if value >= least else '; NOT KEPT'})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
