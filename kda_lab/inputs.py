"""Inputs of one forward pass: the single source of data for tests, benchmarks, lessons and profiles."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_lab import arguments

REGIMES = ("forget", "mixed", "retain", "saturated", "collinear")

_TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
_STATE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Result(NamedTuple):
    """What a forward pass returns: float64 NumPy arrays from the reference, torch tensors from everything else."""

    out: Any  # [B, T, H, V]
    final_state: Any  # [N, H, V, K]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything one forward pass reads, by the names and shapes of ``kda_lab.fwd``.

    B batch rows, T tokens, H heads, K key size, V value size, N sequences (B, or the packed ones of ``cu_seqlens``).
    """

    q: Tensor  # [B, T, H, K] bf16
    k: Tensor  # [B, T, H, K] bf16
    v: Tensor  # [B, T, H, V] bf16
    g: Tensor  # [B, T, H, K] bf16, the gate before its activation
    beta: Tensor  # [B, T, H] bf16, logits
    A_log: Tensor  # [H] fp32
    dt_bias: Tensor  # [H, K] fp32
    scale: float
    lower_bound: float  # natural log of the smallest decay of one token
    initial_state: Tensor | None = None  # [N, H, V, K] bf16 or fp32; None: zeros
    cu_seqlens: Tensor | None = None  # [N + 1] int32 or int64, offsets of packed sequences; None: one per batch row

    @property
    def B(self) -> int:
        return self.q.shape[0]

    @property
    def T(self) -> int:
        return self.q.shape[1]

    @property
    def H(self) -> int:
        return self.q.shape[2]

    @property
    def K(self) -> int:
        return self.q.shape[3]

    @property
    def V(self) -> int:
        return self.v.shape[3]

    @property
    def N(self) -> int:
        return self.B if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    def spans(self) -> list[tuple[int, int]]:
        """(first, last + 1) token of each of the N sequences, counted through the batch rows: row b starts at b * T."""
        if self.cu_seqlens is None:
            return [(b * self.T, (b + 1) * self.T) for b in range(self.B)]
        offsets = self.cu_seqlens.tolist()
        return list(itertools.pairwise(offsets))

    def chunks(self, chunk: int) -> list[tuple[int, int, int]]:
        """(sequence, first token, number of tokens <= chunk) of every chunk, sequence after sequence."""
        chunk = arguments.whole("chunk", chunk, least=1)
        return [
            (sequence, start, min(chunk, stop - start))
            for sequence, (first, stop) in enumerate(self.spans())
            for start in range(first, stop, chunk)
        ]

    def to(self, device: torch.device | str) -> Inputs:
        """The same inputs on another device."""
        device = arguments.torch_device("device", device)
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return self.with_(**tensors)

    def with_(self, **changes: Any) -> Inputs:
        """A copy with some fields replaced: ``inputs.with_(lower_bound=-1.0)``."""
        return dataclasses.replace(self, **changes)

    def new_out(self) -> Tensor:
        """An uninitialised output, [B, T, H, V] bf16."""
        return torch.empty_like(self.v, memory_format=torch.contiguous_format)


def check_inputs(inputs: Any) -> None:
    """Raises TypeError for what is not :class:`Inputs` of dense tensors, ValueError for q or v of a wrong shape."""
    if not isinstance(inputs, Inputs):
        raise TypeError(f"inputs is a {type(inputs).__name__}; expected kda_lab.Inputs, as kda_lab.make_inputs() makes")
    for name in _TENSORS:
        x = getattr(inputs, name)
        if not isinstance(x, Tensor) and not (x is None and name in ("initial_state", "cu_seqlens")):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
        if x is not None and (x.layout is not torch.strided or x.is_quantized or x.is_nested):
            raise TypeError(
                f"{name} is {'quantized' if x.is_quantized else 'sparse or nested'}; expected a dense tensor"
            )
    for name, sizes in (("q", "[B, T, H, K]"), ("v", "[B, T, H, V]")):
        if getattr(inputs, name).dim() != 4:
            raise ValueError(f"{name} has shape {list(getattr(inputs, name).shape)}; expected {sizes}")


def make_inputs(
    B: int = 1,
    T: int = 256,
    H: int = 4,
    K: int = 128,
    V: int = 128,
    *,
    regime: str = "mixed",
    lower_bound: float = -5.0,
    seed: int = 0,
    scale: float | None = None,
    seq_lens: Sequence[int] | None = None,
    initial_state: str | None = None,
    key_correlation: float | None = None,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Random inputs with unit-variance q, k and v, A_log = 0 and dt_bias = 0, the same for a seed on every device.

    ``regime`` sets the gate's logits g, and with them how much of the state one token keeps:

    ========= ===================================================== ==========================================
    forget    N(0, 1)                                               half of the log-decay range, gone in tokens
    mixed     N(-4, 2^2)                                            channels that forget beside some that keep
    retain    N(-8, 1) in even heads, constant -12 in odd ones      almost no decay
    saturated +30                                                   every log-decay is lower_bound itself
    collinear -12, with beta logits +8 and v repeating every 16     keys that resemble each other, no decay
    ========= ===================================================== ==========================================

    seq_lens: lengths of packed sequences (zeros allowed); needs B = 1 and replaces T by their sum.
    initial_state: "bf16" or "fp32" for a unit-variance state [N, H, V, K]; None for none.
    key_correlation: expected cosine between any two keys of a head, in [0, 1]; 1 makes them equal. None means 1 in the
        collinear regime and 0 in the others.
    scale: None means K ** -0.5.

    Raises ValueError for an unknown regime, state dtype or device, a negative size (K and V are at least 1), a
    correlation outside [0, 1], or seq_lens with B > 1; TypeError for what is no number where one belongs.
    """
    B, T, H = (arguments.whole(name, size) for name, size in (("B", B), ("T", T), ("H", H)))
    K, V = (arguments.whole(name, size, least=1) for name, size in (("K", K), ("V", V)))
    lower_bound = arguments.number("lower_bound", lower_bound)
    seed = arguments.whole("seed", seed)
    scale = K**-0.5 if scale is None else arguments.number("scale", scale)
    device = arguments.torch_device("device", device)
    if regime not in REGIMES:
        raise ValueError(f"regime is {regime!r}; expected one of {', '.join(REGIMES)}")
    if initial_state not in (None, *_STATE_DTYPES):
        raise ValueError(f"initial_state is {initial_state!r}; expected 'bf16', 'fp32' or None")
    collinear = regime == "collinear"
    if key_correlation is None:
        key_correlation = 1.0 if collinear else 0.0
    key_correlation = arguments.number("key_correlation", key_correlation)
    if not 0.0 <= key_correlation <= 1.0:
        raise ValueError(f"key_correlation is {key_correlation}; expected a cosine in [0, 1]")
    cu_seqlens = None
    if seq_lens is not None:
        if B != 1:
            raise ValueError(f"B is {B} with seq_lens; packed sequences share one batch row, so pass B=1")
        if isinstance(seq_lens, str) or not isinstance(seq_lens, Iterable):
            raise TypeError(f"seq_lens is {seq_lens!r}; expected the lengths of the sequences, such as (17, 0, 47)")
        seq_lens = [arguments.whole(f"seq_lens[{n}]", length) for n, length in enumerate(seq_lens)]
        cu_seqlens = torch.tensor([0, *seq_lens], dtype=torch.int64).cumsum(0)
        T = int(cu_seqlens[-1])

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q = normal(B, T, H, K)
    shared_key, own_key = normal(1, 1, H, K), normal(B, T, H, K)
    k = key_correlation**0.5 * shared_key + (1.0 - key_correlation) ** 0.5 * own_key
    v = normal(B, T, H, V)
    gate_noise, beta = normal(B, T, H, K), normal(B, T, H)
    if collinear:
        v = normal(B, 16, H, V).repeat(1, -(-T // 16), 1, 1)[:, :T]
        beta = torch.full_like(beta, 8.0)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    state = None if initial_state is None else normal(N, H, V, K).to(_STATE_DTYPES[initial_state])

    return Inputs(
        q=q.bfloat16(),
        k=k.bfloat16(),
        v=v.bfloat16().contiguous(),
        g=_gate_logits(regime, gate_noise).bfloat16(),
        beta=beta.bfloat16(),
        A_log=torch.zeros(H),
        dt_bias=torch.zeros(H, K),
        scale=scale,
        lower_bound=lower_bound,
        initial_state=state,
        cu_seqlens=cu_seqlens,
    ).to(device)


def _gate_logits(regime: str, noise: Tensor) -> Tensor:
    """Gate logits [B, T, H, K] of a regime from unit-variance noise of that shape."""
    if regime == "forget":
        return noise
    if regime == "mixed":
        return -4.0 + 2.0 * noise
    if regime == "retain":
        odd_head = (torch.arange(noise.shape[2]) % 2 == 1)[:, None]
        return torch.where(odd_head, -12.0, noise - 8.0)
    return torch.full_like(noise, 30.0 if regime == "saturated" else -12.0)
