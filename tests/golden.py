"""The golden cases: what an independent kernel made of 28 inputs, and the float64 truth (see data/README.md)."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kda_lab.inputs import Inputs

ARCHIVE = Path(__file__).parent / "data" / "golden.npz"


@dataclasses.dataclass(frozen=True)
class GoldenCase:
    name: str
    inputs: Inputs
    peer_out: Tensor  # [B, T, H, V] bf16
    peer_final_state: Tensor | None  # [N, H, V, K] in the initial state's dtype; None where the peer had no state
    fp64_out: Tensor  # [B, T, H, V] float64, stored as float32
    fp64_final_state: Tensor | None


@cache
def _archive() -> dict[str, dict[str, np.ndarray]]:
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(ARCHIVE) as archive:
        for key in archive.files:
            case, name = key.split("/")
            cases.setdefault(case, {})[name] = archive[key]
    return cases


def names() -> list[str]:
    return list(_archive())


def load(name: str) -> GoldenCase:
    arrays = {key: _tensor(array) for key, array in _archive()[name].items()}
    lower_bound, scale = arrays.pop("scalars").tolist()
    truth = {key: arrays.pop(key).double() for key in ("fp64_out", "fp64_final_state") if key in arrays}
    peer = {key: arrays.pop(key) for key in ("peer_out", "peer_final_state") if key in arrays}
    return GoldenCase(
        name=name,
        inputs=Inputs(**arrays, scale=scale, lower_bound=lower_bound),
        peer_out=peer["peer_out"],
        peer_final_state=peer.get("peer_final_state"),
        fp64_out=truth["fp64_out"],
        fp64_final_state=truth.get("fp64_final_state"),
    )


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype == np.uint16:  # the bit patterns of bf16 values
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
