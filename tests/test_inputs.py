"""Inputs: deterministic, of the shapes and dtypes promised, and of the regimes' distributions."""

from __future__ import annotations

import pytest
import torch

from kda_lab.inputs import REGIMES, Inputs, make_inputs


def tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("regime", REGIMES)
def test_a_seed_names_one_problem(regime: str) -> None:
    first, again, other = (make_inputs(T=20, regime=regime, initial_state="fp32", seed=seed) for seed in (3, 3, 4))
    for name, value in tensors(first).items():
        assert torch.equal(value, tensors(again)[name]), name
    for name in ("q", "k", "v", "initial_state"):
        assert not torch.equal(tensors(first)[name], tensors(other)[name]), name


def test_shapes_and_dtypes() -> None:
    inputs = make_inputs(B=2, T=5, H=3, K=8, V=6, initial_state="bf16")
    expected = {
        "q": ((2, 5, 3, 8), torch.bfloat16),
        "k": ((2, 5, 3, 8), torch.bfloat16),
        "v": ((2, 5, 3, 6), torch.bfloat16),
        "g": ((2, 5, 3, 8), torch.bfloat16),
        "beta": ((2, 5, 3), torch.bfloat16),
        "A_log": ((3,), torch.float32),
        "dt_bias": ((3, 8), torch.float32),
        "initial_state": ((2, 3, 6, 8), torch.bfloat16),
    }
    assert {name: (tuple(x.shape), x.dtype) for name, x in tensors(inputs).items()} == expected
    assert all(x.is_contiguous() for x in tensors(inputs).values())
    assert (inputs.B, inputs.T, inputs.H, inputs.K, inputs.V, inputs.N) == (2, 5, 3, 8, 6, 2)
    assert inputs.scale == 8**-0.5
    out = inputs.new_out()
    assert (tuple(out.shape), out.dtype, out.is_contiguous()) == ((2, 5, 3, 6), torch.bfloat16, True)


def test_the_gates_of_the_regimes() -> None:
    g = {regime: make_inputs(T=256, regime=regime).g.float() for regime in REGIMES}
    assert abs(g["forget"].mean()) < 0.02
    assert abs(g["forget"].std() - 1) < 0.02
    assert abs(g["mixed"].mean() + 4) < 0.02
    assert abs(g["mixed"].std() - 2) < 0.02
    assert abs(g["retain"][:, :, 0::2].mean() + 8) < 0.02
    assert abs(g["retain"][:, :, 0::2].std() - 1) < 0.02
    assert (g["retain"][:, :, 1::2] == -12).all()
    assert (g["saturated"] == 30).all()
    assert (g["collinear"] == -12).all()


def test_collinear_keys_are_equal_and_values_have_period_16() -> None:
    inputs = make_inputs(T=40, regime="collinear")
    assert torch.equal(inputs.k, inputs.k[:, :1].expand_as(inputs.k))
    assert torch.equal(inputs.v[:, 16:], inputs.v[:, :-16])
    assert not torch.equal(inputs.v[:, 1:], inputs.v[:, :-1])
    assert (inputs.beta == 8).all()


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9, 1.0])
def test_key_correlation_is_the_mean_cosine(correlation: float) -> None:
    k = make_inputs(T=64, regime="collinear", key_correlation=correlation).k[0].double()
    k = torch.nn.functional.normalize(k, dim=-1).transpose(0, 1)  # [H, T, K]
    cosines = k @ k.mT
    mean = (cosines.sum() - cosines.diagonal(dim1=-2, dim2=-1).sum()) / (4 * 64 * 63)
    assert mean == pytest.approx(correlation, abs=0.05)


def test_packed_sequences() -> None:
    inputs = make_inputs(seq_lens=[0, 3, 0, 17], initial_state="fp32")
    assert (inputs.B, inputs.T, inputs.N) == (1, 20, 4)
    assert inputs.cu_seqlens.tolist() == [0, 0, 3, 3, 20]
    assert inputs.cu_seqlens.dtype == torch.int64
    assert inputs.initial_state.shape[0] == 4
    assert inputs.spans() == [(0, 0), (0, 3), (3, 3), (3, 20)]
    assert inputs.chunks(16) == [(1, 0, 3), (3, 3, 16), (3, 19, 1)]


def test_spans_count_through_the_batch_rows() -> None:
    inputs = make_inputs(B=2, T=17)
    assert inputs.spans() == [(0, 17), (17, 34)]
    assert inputs.chunks(16) == [(0, 0, 16), (0, 16, 1), (1, 17, 16), (1, 33, 1)]


def test_no_tokens_at_all() -> None:
    inputs = make_inputs(seq_lens=[0])
    assert (inputs.T, inputs.N, inputs.chunks(16)) == (0, 1, [])


def test_with_changes_only_what_it_names() -> None:
    inputs = make_inputs(T=4)
    changed = inputs.with_(lower_bound=-1.0)
    assert changed.lower_bound == -1.0
    assert changed.q is inputs.q
    assert inputs.lower_bound == -5.0


def test_to_moves_every_tensor() -> None:
    moved = make_inputs(T=4, initial_state="fp32").to("meta")
    assert {x.device.type for x in tensors(moved).values()} == {"meta"}
    assert moved.cu_seqlens is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"regime": "random"}, "regime is 'random'; expected one of forget"),
        ({"initial_state": "fp16"}, "initial_state is 'fp16'; expected 'bf16', 'fp32' or None"),
        ({"key_correlation": 1.5}, "key_correlation is 1.5"),
        ({"B": 2, "seq_lens": [3, 4]}, "B is 2 with seq_lens"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_inputs(T=4, **arguments)
