"""Checks of what a caller passes. An error names the argument, what it was and what is expected."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch


def whole(name: str, value: Any, least: int = 0) -> int:
    """`value` as an int. Raises TypeError for what is no whole number, ValueError below `least` or beyond 2^63."""
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor of several elements
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} is {_shown(value)}; expected a whole number, {least} or more")
    if not least <= number < 2**63:
        raise ValueError(f"{name} is {number}; expected a whole number, {least} or more, that 64 bits hold")
    return number


def number(name: str, value: Any) -> float:
    """`value` as a float, NaN and infinities among them. Raises TypeError for what is no number."""
    if not isinstance(value, (str, bytes)):
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return float(value)
    raise TypeError(f"{name} is {_shown(value)}; expected a number")


def torch_device(name: str, value: Any) -> torch.device:
    """The device; raises TypeError or ValueError for what torch knows no device by, or finds none for, here."""
    if not isinstance(value, (str, torch.device)):
        raise TypeError(f'{name} is {_shown(value)}; expected "cpu", "cuda" or a torch.device')
    try:
        device = torch.device(value)
    except RuntimeError:
        raise ValueError(f'{name} is {value!r}; expected "cpu", "cuda" or a torch.device') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{name} is {device}; torch finds no GPU here: leave it out, or see `kda-lab doctor`")
    return device


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:40]}..." if len(text) > 43 else text
