"""Drop-in: a caller of FLA's chunk_kda gets FLA's results from kda_lab.fwd, out and final state.

FLA holds its kernels to its own fp32 recurrence with a relative RMS error of 0.005 (its tests/ops/test_kda.py). So are
we here; and since either kernel may be that far off, the two may differ by twice as much.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import kda_lab
from kda_lab import peers
from kda_lab.compare import assert_close

pytestmark = pytest.mark.gpu

FLA_TOLERANCE = 0.005
LOWER_BOUND = -5.0


@dataclasses.dataclass(frozen=True)
class ChunkKda:
    """The tensors of a call of chunk_kda: states are [N, H, K, V] fp32 there, dt_bias is flat."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    initial_state: torch.Tensor
    cu_seqlens: torch.Tensor | None
    scale: float

    def by_fla(self) -> tuple[torch.Tensor, torch.Tensor]:
        from fla.ops.kda import chunk_kda

        with torch.inference_mode():
            return chunk_kda(
                **dataclasses.asdict(self),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                safe_gate=True,
                lower_bound=LOWER_BOUND,
            )

    def by_kda_lab(self) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.initial_state.mT.contiguous()  # [N, H, V, K]
        out = torch.empty_like(self.v)
        kda_lab.fwd(
            self.q,
            self.k,
            self.v,
            self.g,
            self.beta,
            self.scale,
            out,
            self.A_log,
            self.dt_bias.view(self.q.shape[2:]),
            LOWER_BOUND,
            initial_state=state,
            final_state=state,
            cu_seqlens=self.cu_seqlens,
        )
        return out, state.mT

    def by_recurrence(self) -> tuple[torch.Tensor, torch.Tensor]:
        """FLA's fp32 definition, which wants everything activated and normalised, one sequence at a time."""
        from fla.ops.kda.naive import naive_recurrent_kda

        q, k, v, g, beta = (x.float() for x in (self.q, self.k, self.v, self.g, self.beta))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        g = LOWER_BOUND * torch.sigmoid(self.A_log.exp()[:, None] * (g + self.dt_bias.view(g.shape[2:])))
        tokens = (q, k, v, g, beta.sigmoid())
        if self.cu_seqlens is None:
            return naive_recurrent_kda(*tokens, self.scale, self.initial_state, True)
        offsets = self.cu_seqlens.tolist()
        parts = [
            naive_recurrent_kda(*(x[:, a:b] for x in tokens), self.scale, self.initial_state[n : n + 1], True)
            for n, (a, b) in enumerate(itertools.pairwise(offsets))
        ]
        return torch.cat([out for out, _ in parts], 1), torch.cat([state for _, state in parts])


def chunk_kda_call(B: int, T: int, H: int, draw: str, offsets: list[int] | None) -> ChunkKda:
    """The sizes and distributions of FLA's tests; `rand` draws keys that all point into one corner."""
    generator = torch.Generator("cuda").manual_seed(42)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    def draws() -> torch.Tensor:
        x = normal(B, T, H, 128) if draw == "randn" else torch.rand(B, T, H, 128, generator=generator, device="cuda")
        return x.bfloat16()

    q, k, v = draws(), draws(), draws()
    return ChunkKda(
        q=q,
        k=k,
        v=v,
        g=normal(B, T, H, 128).bfloat16(),
        beta=normal(B, T, H).bfloat16(),
        A_log=normal(H),
        dt_bias=normal(H * 128),
        initial_state=normal(B if offsets is None else len(offsets) - 1, H, 128, 128),
        cu_seqlens=None if offsets is None else torch.tensor(offsets, device="cuda"),
        scale=0.1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("draw", ["randn", "rand"])
@pytest.mark.parametrize(
    ("B", "T", "H", "offsets"),
    [
        (1, 63, 1, None),
        (2, 500, 3, None),
        (4, 1024, 4, None),
        (1, 1000, 4, [0, 256, 500, 1000]),
        (1, 2000, 4, [0, 15, 100, 300, 1200, 2000]),
    ],
)
def test_a_call_of_chunk_kda(B: int, T: int, H: int, offsets: list[int] | None, draw: str) -> None:
    _, missing = peers.find()
    if "fla" in missing:
        pytest.skip(f"FLA is not importable: {missing['fla']}")
    call = chunk_kda_call(B, T, H, draw, offsets)
    ours, fla, expected = call.by_kda_lab(), call.by_fla(), call.by_recurrence()
    for name, x, by_fla, truth in zip(("out", "final_state"), ours, fla, expected, strict=True):
        assert_close(x.float().cpu(), truth.cpu(), rms=FLA_TOLERANCE, name=f"{name} against FLA's recurrence")
        assert_close(x.float().cpu(), by_fla.float().cpu(), rms=2 * FLA_TOLERANCE, name=f"{name} against chunk_kda")
