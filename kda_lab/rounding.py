"""A mirror of the published two-kernel design that rounds where it rounds, with every rounding on a switch.

The published kernel (FlashKDA) multiplies bf16 factors on tensor cores, inverts in fp16 and keeps its state in bf16.
:func:`forward` does the same arithmetic in torch, so a lesson can ask which rounding costs what::

    forward(inputs)                                            # as published
    forward(inputs, Rounding.published().replace(state=False))  # as published, but an fp32 state
    forward(inputs, Rounding.exact().replace(state=True))      # nothing but that rounding, everything else in float64

A tensor-core product is modelled as exact bf16 (or fp16) products summed in ``arithmetic``. The one thing not modelled
is the hardware's tanh.approx: an fp32 tanh stands in. Where the gate does not depend on it (saturated either way)
the mirror is the kernel bit for bit; elsewhere some roundings fall the other way.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
from torch import Tensor

from kda_lab.inputs import Inputs, Result, check_inputs
from kda_lab.reference import NORM_EPSILON

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny  # 2^-126, of bf16 too
_MMA_DEPTH = 16  # products one tensor-core instruction sums before it rounds its accumulator


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Which intermediate is rounded to what; the defaults are the published kernel's. False leaves ``arithmetic``.

    Products are named after what they make: ``k_decayed`` is the rounding of k_hat * exp(G) to bf16, and so on.
    """

    normalised: bool = True  # q_hat and k_hat to bf16
    scale: bool = True  # the attention scale to bf16
    sigmoid: Literal["tanh", "exact"] = "tanh"  # 1/2 tanh(x/2) + 1/2, or 1 / (1 + exp(-x))
    flush: bool = True  # exponentials below 2^-126 become 0 (ex2.approx.ftz)
    exponentials: bool = True  # exp(G), exp(-G) and, for k_restored, exp(G_C) to bf16
    k_decayed: bool = True  # to bf16
    q_decayed: bool = True  # to bf16, before and after the scale
    k_inv: bool = True  # to bf16
    k_restored: bool = True  # to bf16
    L: bool = True  # to fp16, before and after beta
    Mqk: bool = True  # to bf16
    beta: bool = True  # to fp16 where it multiplies L, to bf16 where it multiplies the values
    inverse: Literal["neumann_fp16", "exact"] = "neumann_fp16"  # the series in fp16, or forward substitution
    INV: bool = True  # to bf16
    U: bool = True  # S k_decayed, v minus that, times beta, and INV times that: each to bf16
    out: bool = True  # both products and their sum to bf16
    state: bool = True  # to bf16, once a chunk (and the initial state)
    arithmetic: Literal["fp32", "fp64"] = "fp32"  # of everything between two roundings

    @classmethod
    def published(cls) -> Rounding:
        """The published kernel's roundings, all of them."""
        return cls()

    @classmethod
    def exact(cls) -> Rounding:
        """No rounding but float64's, as a base to switch single ones on."""
        off = {field.name: False for field in dataclasses.fields(cls) if isinstance(field.default, bool)}
        return cls(**off, sigmoid="exact", inverse="exact", arithmetic="fp64")

    def replace(self, **changes: Any) -> Rounding:
        """A copy with some switches changed."""
        return dataclasses.replace(self, **changes)


def forward(inputs: Inputs, rounding: Rounding | None = None, chunk: int = 16) -> Result:
    """The factored chunk form with the given roundings (None: as published), on the inputs' device.

    Returns out [B, T, H, V], bf16 where ``rounding.out`` and the arithmetic's dtype otherwise, and final_state
    [N, H, V, K] in the arithmetic's dtype. The published chunk is 16 tokens; others show what the same roundings would
    do there.
    """
    check_inputs(inputs)
    r = Rounding.published() if rounding is None else rounding
    layout = inputs.chunks(chunk)
    q_hat, k_hat, v, g_log2, beta = (_to_chunks(rows, layout, chunk) for rows in _activate(inputs, r))

    # prepare: all chunks and heads at once, [M, H, C, ...]
    g_cumsum_log2 = _serial_cumsum(g_log2)
    exp_pos = _bf16(_exp2(g_cumsum_log2, r), r.exponentials)
    exp_neg = _bf16(_exp2(-g_cumsum_log2, r), r.exponentials)
    chunk_decay = _exp2(g_cumsum_log2[:, :, -1:], r)  # exp(G_C); the state is decayed by it unrounded
    scale = _bf16(q_hat.new_tensor(inputs.scale), r.scale)
    k_decayed = _bf16(k_hat * exp_pos, r.k_decayed)
    q_decayed = _bf16(_bf16(q_hat * exp_pos, r.q_decayed) * scale, r.q_decayed)
    k_inv = _bf16(k_hat * exp_neg, r.k_inv)
    k_restored = _bf16(k_inv * _bf16(chunk_decay, r.exponentials), r.k_restored)
    L = _fp16(k_decayed @ k_inv.mT, r.L).tril(-1)
    L = _fp16(L * _fp16(beta, r.beta), r.L)
    Mqk = _bf16(q_decayed @ k_inv.mT, r.Mqk).tril()
    INV = _bf16(_neumann_fp16(L) if r.inverse == "neumann_fp16" else _forward_substitution(L), r.INV)

    # recurrence: chunk after chunk
    beta = _bf16(beta, r.beta)
    out = v.new_zeros(inputs.B * inputs.T, inputs.H, inputs.V)
    state = _initial_state(inputs, r, v)
    for m, (sequence, first, count) in enumerate(layout):
        S = state[sequence]
        U = _bf16(v[m] - _bf16(k_decayed[m] @ S.mT, r.U), r.U)
        U = _bf16(INV[m] @ _bf16(U * beta[m], r.U), r.U)
        rows = _bf16(_bf16(q_decayed[m] @ S.mT, r.out) + _bf16(Mqk[m] @ U, r.out), r.out)  # [H, C, V]
        out[first : first + count] = rows.transpose(0, 1)[:count]
        state[sequence] = _bf16(S * chunk_decay[m] + U.mT @ k_restored[m], r.state)
    out = out.view(inputs.B, inputs.T, inputs.H, inputs.V)
    return Result(out.bfloat16() if r.out else out, state)


def _activate(inputs: Inputs, r: Rounding) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q_hat, k_hat, v, log-decay in base 2, each [B*T, H, ...], and activated beta [B*T, H, 1]."""
    dtype = torch.float32 if r.arithmetic == "fp32" else torch.float64

    def rows(x: Tensor) -> Tensor:
        return x.to(dtype).flatten(0, 1)

    def normalised(x: Tensor) -> Tensor:
        return _bf16(x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON), r.normalised)

    gate_scale_log2 = torch.tensor(inputs.lower_bound * math.log2(math.e), dtype=dtype)
    steepness = inputs.A_log.to(dtype).exp().clamp(max=torch.finfo(dtype).max)  # saturates: inf * 0 would be NaN
    g_log2 = gate_scale_log2 * _sigmoid(steepness[:, None] * (rows(inputs.g) + inputs.dt_bias.to(dtype)), r)
    beta = _sigmoid(rows(inputs.beta), r)[..., None]
    return normalised(rows(inputs.q)), normalised(rows(inputs.k)), rows(inputs.v), g_log2, beta


def _sigmoid(x: Tensor, r: Rounding) -> Tensor:
    return 0.5 * torch.tanh(0.5 * x) + 0.5 if r.sigmoid == "tanh" else torch.sigmoid(x)


def _exp2(x: Tensor, r: Rounding) -> Tensor:
    y = torch.exp2(x)
    return torch.where(y < _SMALLEST_NORMAL, torch.zeros_like(y), y) if r.flush else y


def _serial_cumsum(g: Tensor) -> Tensor:
    """G_i = G_(i-1) + g_i along the tokens of a chunk, rounded after every addition."""
    G = g.clone()
    for i in range(1, g.shape[2]):
        G[:, :, i] += G[:, :, i - 1]
    return G


def _neumann_fp16(L: Tensor) -> Tensor:
    """(I + L)^-1 = (I - L)(I + L^2)(I + L^4)... in fp16 with fp16 accumulation.

    L^C = 0, so the series is exact but for rounding. For keys that resemble each other its powers grow to binomial
    coefficients (3432 at C = 16, where one fp16 ulp is 2) while the inverse stays within [-1, 1]: it cancels.
    """
    INV = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device) - L
    power, exponent = L, 2
    while exponent < L.shape[-1]:
        power = _matmul_fp16(power, power)
        INV = _fp16(INV + _matmul_fp16(INV, power))
        exponent *= 2
    return INV


def _matmul_fp16(a: Tensor, b: Tensor) -> Tensor:
    """a @ b on tensor cores with an fp16 accumulator, which is rounded once per instruction."""
    product = torch.zeros_like(a)
    for d in range(0, a.shape[-1], _MMA_DEPTH):
        product = _fp16(product + a[..., d : d + _MMA_DEPTH] @ b[..., d : d + _MMA_DEPTH, :])
    return product


def _forward_substitution(L: Tensor) -> Tensor:
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    return torch.linalg.solve_triangular(identity + L, identity, upper=False, unitriangular=True)


def _initial_state(inputs: Inputs, r: Rounding, like: Tensor) -> Tensor:
    if inputs.initial_state is None:
        return like.new_zeros(inputs.N, inputs.H, inputs.V, inputs.K)
    return _bf16(inputs.initial_state.to(like.dtype, copy=True), r.state)


def _to_chunks(rows: Tensor, layout: list[tuple[int, int, int]], chunk: int) -> Tensor:
    """[B*T, H, X] to [M, H, chunk, X], padded with zeros."""
    chunks = rows.new_zeros(len(layout), chunk, *rows.shape[1:])
    for m, (_, first, count) in enumerate(layout):
        chunks[m, :count] = rows[first : first + count]
    return chunks.transpose(1, 2).contiguous()


def _bf16(x: Tensor, on: bool = True) -> Tensor:
    return x.bfloat16().to(x.dtype) if on else x


def _fp16(x: Tensor, on: bool = True) -> Tensor:
    return x.half().to(x.dtype) if on else x
