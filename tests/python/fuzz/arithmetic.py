# SPDX-License-Identifier: Apache-2.0
"""docs/notes/numerics.md in numpy, which rounds a square root correctly and fuses nothing.
Shares no code with the library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

Floats = np.ndarray[Any, np.dtype[np.float32]]
ONE_NAN = np.array(0x7FC00000, dtype=np.uint32).view(np.float32)
LEAST = np.finfo(np.float32).tiny
BLOCK = 4096
WORD = (1 << 64) - 1


def mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def noise(seed: int, step: int, count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The random words of a parameter's elements; the lower half rounds m, the upper v."""
    key = mix(mix(mix(seed) ^ step) ^ 0)
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint32) ^ np.uint32(key & 0xFFFFFFFF)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D) + np.uint32(key >> 32)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def stochastic_bf16(x: Floats, words: np.ndarray[Any, np.dtype[np.uint32]]) -> Floats:
    """Rounded by 16 random bits; as the float that it stands for."""
    with np.errstate(over="ignore"):
        return ((x.view(np.uint32) + words) & np.uint32(0xFFFF0000)).view(np.float32)


def power(base: float, exponent: int) -> float:
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def settled(x: Floats) -> Floats:
    return np.where(np.isnan(x), ONE_NAN, x)


def settled_moment(x: Floats) -> Floats:
    x = settled(x)
    return np.where(np.abs(x) < LEAST, np.float32(0), x)


def norm_of_blocks(values: Floats) -> float:
    """The sum of squares of a page, in its order."""
    total = 0.0
    for begin in range(0, values.size, BLOCK):
        part = values[begin:begin + BLOCK].astype(np.float64)
        rows = np.zeros((-(-part.size // 32), 32))
        rows.reshape(-1)[:part.size] = part * part
        sums = np.add.accumulate(rows, axis=0)[-1]
        for half in (16, 8, 4, 2, 1):
            sums = sums[:half] + sums[half:2 * half]
        total += float(sums[0])
    return total


def f32(value: float) -> np.float32:
    return np.float32(value)


class Rule:
    """One parameter's optimizer: its moments, and the step over them."""

    def __init__(self, count: int, bf16_moments: bool, seed: int) -> None:
        self.m = np.zeros(count, np.float32)
        self.v = np.zeros(count, np.float32)
        self.updates = 0
        self.bf16_moments = bf16_moments
        self.seed = seed

    def step(self, group: dict[str, Any], factor: float, p: Floats, g: Floats) -> Floats:
        """The parameter after one more update."""
        self.updates += 1
        kind = group["optimizer"]
        with np.errstate(all="ignore"):
            g = g * f32(factor)
            out: Floats = {"adamw": self.adam, "adam": self.adam, "lion": self.lion,
                           "sgd": self.sgd}[kind](group, p, g)
        if self.bf16_moments:
            words = noise(self.seed, self.updates, p.size)
            self.m = stochastic_bf16(self.m, words & np.uint32(0xFFFF))
            self.v = stochastic_bf16(self.v, words >> np.uint32(16))
        return out

    def adam(self, group: dict[str, Any], p: Floats, g: Floats) -> Floats:
        lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        if group["optimizer"] == "adam":
            if decay != 0:
                g = g + f32(decay) * p
        else:
            p = p * f32(1 - lr * decay)
        self.m = settled_moment(f32(beta1) * self.m + f32(1 - beta1) * g)
        self.v = settled(f32(beta2) * self.v + f32(1 - beta2) * (g * g))
        size = f32(lr / (1 - power(beta1, self.updates)))
        unbias = f32(1 / math.sqrt(1 - power(beta2, self.updates)))
        divisor = np.sqrt(self.v) * unbias + f32(group["eps"])
        return settled(p - (size * self.m) / divisor)

    def lion(self, group: dict[str, Any], p: Floats, g: Floats) -> Floats:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        p = p * f32(1 - lr * group["weight_decay"])
        direction = f32(beta1) * self.m + f32(1 - beta1) * g
        change = np.where(direction > 0, f32(lr), np.where(direction < 0, -f32(lr), direction))
        self.m = settled_moment(f32(beta2) * self.m + f32(1 - beta2) * g)
        return settled(p - change)

    def sgd(self, group: dict[str, Any], p: Floats, g: Floats) -> Floats:
        momentum, decay = group["momentum"], group["weight_decay"]
        if decay != 0:
            g = g + f32(decay) * p
        p = p * f32(1)
        change = g
        if momentum != 0:
            first = self.updates == 1
            kept = f32(0) if first else f32(momentum)
            rest = f32(1) if first else f32(1 - group["dampening"])
            self.m = settled_moment(kept * self.m + rest * g)
            change = g + f32(momentum) * self.m if group["nesterov"] else self.m
        return settled(p - f32(group["lr"]) * change)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one row, as they lie in memory."""
    order = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    return tensor.permute(order).reshape(-1)


def floats(tensor: torch.Tensor) -> Floats:
    out: Floats = tensor.detach().float().cpu().contiguous().numpy().copy()
    return out
