"""The truth, in float64: the definition token by token, and the chunk form with every intermediate by name.

``recurrent`` is the definition of Kimi Delta Attention and what every step is compared with; ``recurrent_torch`` is its
twin for sizes that need a GPU. ``chunked`` is the algebra the kernels use, for lessons and for debugging a kernel stage
by stage. All of them read the bf16 inputs upcast to float64 and round nothing.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from kda_lab.inputs import Inputs, Result, check_inputs

NORM_EPSILON = 1e-6  # added to |q|^2 and |k|^2, inside the root


@np.errstate(over="ignore", invalid="ignore")  # a positive lower_bound may grow beyond float64: infinity, then NaN
def recurrent(inputs: Inputs) -> Result:
    """The definition, one token after another, in float64 NumPy: out [B, T, H, V] and final_state [N, H, V, K].

    S <- S diag(exp(g_t));  S <- S + beta_t (v_t - S k_t) k_t^T;  o_t = scale S q_t, with q, k normalised and g, beta
    activated (see :func:`activate`). Each sequence starts at its initial state, or zeros; an empty one ends there too.
    """
    check_inputs(inputs)
    q, k, g, beta = activate(inputs)
    decay = np.exp(g)
    v = _array(inputs.v).reshape(inputs.B * inputs.T, inputs.H, inputs.V)
    out = np.zeros_like(v)
    order, first, running = _lockstep(inputs)
    state = _initial_state(inputs)[order]
    for t, n in enumerate(running):
        tokens = first[:n] + t
        S, k_t = state[:n], k[tokens]  # [n, H, V, K] (a view: updated in place), [n, H, K]
        S *= decay[tokens][:, :, None, :]
        correction = beta[tokens][:, :, None] * (v[tokens] - np.einsum("nhvk,nhk->nhv", S, k_t))
        S += correction[:, :, :, None] * k_t[:, :, None, :]
        out[tokens] = inputs.scale * np.einsum("nhvk,nhk->nhv", S, q[tokens])
    return Result(out.reshape(inputs.B, inputs.T, inputs.H, inputs.V), state[np.argsort(order)])


def recurrent_torch(inputs: Inputs, device: torch.device | str | None = None) -> Result:
    """:func:`recurrent` in float64 torch tensors on ``device`` (default: where the inputs are), for large checks."""
    check_inputs(inputs)
    inputs = inputs if device is None else inputs.to(device)
    q, k, g, beta = _activate_torch(inputs)
    decay = g.exp_()
    v = inputs.v.double().flatten(0, 1)
    out = torch.zeros_like(v)
    order, first, running = _lockstep(inputs)
    state = torch.from_numpy(_initial_state(inputs)[order]).to(v.device)
    first = torch.from_numpy(first).to(v.device)
    for t, n in enumerate(running):
        tokens = first[:n] + t
        S, k_t = state[:n], k[tokens]
        S.mul_(decay[tokens][:, :, None, :])
        correction = beta[tokens][:, :, None] * (v[tokens] - (S @ k_t[..., None])[..., 0])
        S.addcmul_(correction[:, :, :, None], k_t[:, :, None, :])
        out[tokens] = (S @ q[tokens][..., None])[..., 0].mul_(inputs.scale)
    return Result(out.view(inputs.B, inputs.T, inputs.H, inputs.V), state[np.argsort(order)])


@np.errstate(over="ignore", invalid="ignore")
def activate(inputs: Inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Normalised q and k [B*T, H, K], log-decay g [B*T, H, K] and beta [B*T, H], in float64.

    exp(A_log) may overflow; the gate then saturates, and its argument is 0 where g + dt_bias is 0: no NaN from finite
    inputs.
    """

    def normalised(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + NORM_EPSILON)

    def rows(x: torch.Tensor, *shape: int) -> np.ndarray:
        return _array(x).reshape(inputs.B * inputs.T, *shape)

    H, K = inputs.H, inputs.K
    logits = rows(inputs.g, H, K) + _array(inputs.dt_bias)
    argument = np.where(logits == 0.0, 0.0, np.exp(_array(inputs.A_log))[:, None] * logits)
    g = inputs.lower_bound * _sigmoid(argument)
    return normalised(rows(inputs.q, H, K)), normalised(rows(inputs.k, H, K)), g, _sigmoid(rows(inputs.beta, H))


def _activate_torch(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`activate` in torch, where the inputs are: at 8192 tokens x 96 heads the host would take minutes."""

    def normalised(x: torch.Tensor) -> torch.Tensor:
        x = x.double().flatten(0, 1)
        return x / ((x * x).sum(-1, keepdim=True) + NORM_EPSILON).sqrt()

    logits = inputs.g.double().flatten(0, 1) + inputs.dt_bias.double()
    argument = torch.where(logits == 0.0, logits, inputs.A_log.double().exp()[:, None] * logits)
    g = inputs.lower_bound * torch.sigmoid(argument)
    return normalised(inputs.q), normalised(inputs.k), g, torch.sigmoid(inputs.beta.double().flatten(0, 1))


@dataclasses.dataclass(frozen=True)
class Chunked:
    """Every intermediate of the chunk form, float64, by its symbol.

    The first index m runs over the chunks of all sequences, end to end; the last chunk of a sequence is padded with
    tokens that change nothing (q = k = v = 0, g = 0, beta = 0). C is the chunk size in tokens.
    """

    sequence: np.ndarray  # [M] int, which of the N sequences chunk m belongs to
    first_token: np.ndarray  # [M] int, counted through the batch rows
    tokens: np.ndarray  # [M] int, tokens of the chunk that are not padding
    q_hat: np.ndarray  # [M, H, C, K] normalised
    k_hat: np.ndarray  # [M, H, C, K] normalised
    beta: np.ndarray  # [M, H, C] activated
    g: np.ndarray  # [M, H, C, K] log-decay of each token
    g_cumsum: np.ndarray  # [M, H, C, K] G_i = g_1 + ... + g_i, from the chunk's start
    k_decayed: np.ndarray  # [M, H, C, K] k_hat exp(G)
    q_decayed: np.ndarray  # [M, H, C, K] scale q_hat exp(G)
    k_inv: np.ndarray  # [M, H, C, K] k_hat exp(-G), the factor that can overflow (here beyond 1e308)
    k_restored: np.ndarray  # [M, H, C, K] k_hat exp(G_C - G)
    L: np.ndarray  # [M, H, C, C] strictly lower: beta_i k_hat_i . k_hat_j exp(G_i - G_j)
    Mqk: np.ndarray  # [M, H, C, C] lower: scale q_hat_i . k_hat_j exp(G_i - G_j)
    INV: np.ndarray  # [M, H, C, C] (I + L)^-1
    w: np.ndarray  # [M, H, C, K] INV (beta k_decayed)
    u: np.ndarray  # [M, H, C, V] INV (beta V)
    U: np.ndarray  # [M, H, C, V] u - w S^T: the corrected values
    state: np.ndarray  # [M, H, V, K] S before the chunk
    out: np.ndarray  # [B, T, H, V]
    final_state: np.ndarray  # [N, H, V, K]


@np.errstate(over="ignore", invalid="ignore")
def chunked(inputs: Inputs, chunk: int = 16) -> Chunked:
    """The chunk form with pairwise exponents exp(G_i - G_j), so it is right for any lower_bound and chunk size.

    Equal to :func:`recurrent` to float64 rounding, but for NaN: products of matrices carry it to every row of a chunk.
    """
    check_inputs(inputs)
    layout = inputs.chunks(chunk)
    sequence, first_token, tokens = np.array(layout, dtype=np.int64).reshape(-1, 3).T
    q_hat, k_hat, g, beta = (_to_chunks(a, layout, chunk) for a in activate(inputs))
    v = _to_chunks(_array(inputs.v).reshape(inputs.B * inputs.T, inputs.H, inputs.V), layout, chunk)

    g_cumsum = np.cumsum(g, axis=2)
    k_decayed = k_hat * np.exp(g_cumsum)
    q_decayed = inputs.scale * q_hat * np.exp(g_cumsum)
    k_inv = k_hat * np.exp(-g_cumsum)
    k_restored = k_hat * np.exp(g_cumsum[:, :, -1:] - g_cumsum)
    L = beta[..., None] * np.tril(_pairwise(k_hat, k_hat, g_cumsum), -1)
    Mqk = inputs.scale * np.tril(_pairwise(q_hat, k_hat, g_cumsum))
    INV = _invert_unit_lower(L)
    w = INV @ (beta[..., None] * k_decayed)
    u = INV @ (beta[..., None] * v)

    U, state = np.empty_like(u), np.empty((len(sequence), inputs.H, inputs.V, inputs.K))
    out = np.zeros((inputs.B * inputs.T, inputs.H, inputs.V))
    final_state = _initial_state(inputs)
    for m, n in enumerate(sequence):
        S = state[m] = final_state[n]
        S_t = S.swapaxes(-1, -2)
        U[m] = u[m] - w[m] @ S_t
        rows = q_decayed[m] @ S_t + Mqk[m] @ U[m]  # [H, C, V]
        out[first_token[m] : first_token[m] + tokens[m]] = rows.swapaxes(0, 1)[: tokens[m]]
        final_state[n] = S * np.exp(g_cumsum[m, :, -1:]) + U[m].swapaxes(-1, -2) @ k_restored[m]

    return Chunked(
        sequence=sequence,
        first_token=first_token,
        tokens=tokens,
        q_hat=q_hat,
        k_hat=k_hat,
        beta=beta,
        g=g,
        g_cumsum=g_cumsum,
        k_decayed=k_decayed,
        q_decayed=q_decayed,
        k_inv=k_inv,
        k_restored=k_restored,
        L=L,
        Mqk=Mqk,
        INV=INV,
        w=w,
        u=u,
        U=U,
        state=state,
        out=out.reshape(inputs.B, inputs.T, inputs.H, inputs.V),
        final_state=final_state,
    )


def _pairwise(a: np.ndarray, b: np.ndarray, g_cumsum: np.ndarray) -> np.ndarray:
    """sum_d a_id b_jd exp(G_id - G_jd) for i >= j, zeros above, [M, H, C, C]: for a gate that decays, exp() <= 1."""
    C = a.shape[2]
    product = np.zeros((*a.shape[:3], C))
    for i in range(C):
        decay = np.exp(g_cumsum[:, :, i : i + 1] - g_cumsum[:, :, : i + 1])  # [M, H, i + 1, K]
        product[:, :, i, : i + 1] = np.einsum("mhk,mhjk,mhjk->mhj", a[:, :, i], b[:, :, : i + 1], decay)
    return product


def _invert_unit_lower(L: np.ndarray) -> np.ndarray:
    """(I + L)^-1 of strictly lower L [..., C, C] by forward substitution, row after row."""
    INV = np.broadcast_to(np.eye(L.shape[-1]), L.shape).copy()
    for i in range(1, L.shape[-1]):
        INV[..., i, :i] = -np.einsum("...j,...jl->...l", L[..., i, :i], INV[..., :i, :i])
    return INV


def _lockstep(inputs: Inputs) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """All sequences advance together, the longest first, so that those still running are always a prefix.

    Returns the order of the sequences [N], their first tokens in that order [N], and how many run at each step.
    """
    spans = np.array(inputs.spans(), dtype=np.int64).reshape(-1, 2)
    lengths = spans[:, 1] - spans[:, 0]
    order = np.argsort(-lengths, kind="stable")
    running = [int((lengths > t).sum()) for t in range(lengths.max(initial=0))]
    return order, spans[order, 0], running


def _to_chunks(rows: np.ndarray, layout: list[tuple[int, int, int]], chunk: int) -> np.ndarray:
    """[B*T, H, ...] to [M, H, chunk, ...], padded with zeros."""
    chunks = np.zeros((len(layout), chunk, *rows.shape[1:]))
    for m, (_, first, count) in enumerate(layout):
        chunks[m, :count] = rows[first : first + count]
    return chunks.swapaxes(1, 2)


def _initial_state(inputs: Inputs) -> np.ndarray:
    if inputs.initial_state is None:
        return np.zeros((inputs.N, inputs.H, inputs.V, inputs.K))
    return _array(inputs.initial_state).copy()


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()
