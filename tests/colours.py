"""Colours as people and programs see them: contrast (WCAG 2), colour blindness, and what a CSS filter makes of them.

A colour is an array [3] of sRGB values between 0 and 1.
"""

from __future__ import annotations

import re

import numpy as np

# G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, "A physiologically-based model for simulation of color vision
# deficiency", IEEE TVCG 15 (2009), severity 1.0; for linear RGB.
VISION = {
    "ordinary": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])  # of linear sRGB
_WHITE = _XYZ.sum(axis=1)


def linear(colour: np.ndarray) -> np.ndarray:
    return np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)


def encoded(light: np.ndarray) -> np.ndarray:
    light = np.clip(light, 0, 1)
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    """WCAG 2's ratio, from 1 to 21."""
    dark, light = sorted(float(linear(colour) @ _XYZ[1]) for colour in (a, b))
    return (light + 0.05) / (dark + 0.05)


def seen(colour: np.ndarray, vision: str) -> np.ndarray:
    return encoded(VISION[vision] @ linear(colour))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Euclidean in CIELAB (D65): 2.3 is just noticeable."""
    return float(np.linalg.norm(_lab(a) - _lab(b)))


def _lab(colour: np.ndarray) -> np.ndarray:
    t = _XYZ @ linear(colour) / _WHITE
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def filtered(colour: np.ndarray, css: str) -> np.ndarray:
    """What the filter functions invert() and hue-rotate() make of a colour (W3C Filter Effects)."""
    for name, value in re.findall(r"([\w-]+)\(([\d.]+)(?:deg)?\)", css):
        if name == "invert":
            colour = float(value) + colour * (1 - 2 * float(value))
        elif name == "hue-rotate":
            cos, sin = np.cos(np.radians(float(value))), np.sin(np.radians(float(value)))
            grey = np.tile([0.213, 0.715, 0.072], (3, 1))
            turn = np.array([[-0.213, -0.715, 0.928], [0.143, 0.140, -0.283], [-0.787, 0.715, 0.072]])
            colour = (grey + cos * (np.eye(3) - grey) + sin * turn) @ colour
        else:
            raise ValueError(name)
        colour = np.clip(colour, 0, 1)
    return colour
