# SPDX-License-Identifier: Apache-2.0
"""Learning rates by DeepSpeed's names, as torch's schedulers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from pagoda.errors import UserError

# The learning rate of a step, counted from 0, given the one that the optimizer was made with.
Rate = Callable[[int, float], float]


class Schedule(LRScheduler):
    """Sets each group's rate to what a function of the step says."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Rate) -> None:
        self._rate = rate
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [self._rate(self.last_epoch, float(base)) for base in self.base_lrs]


def _warmth(step: int, steps: int, kind: str) -> float:
    if kind not in ("log", "linear"):
        raise UserError(f"scheduler.params.warmup_type is '{kind}': it takes log or linear")
    if step >= steps:
        return 1.0
    return step / steps if kind == "linear" else math.log(step + 1) / math.log(max(steps, 2))


def _warmup(p: dict[str, Any]) -> Rate:
    least, most = p.pop("warmup_min_lr", 0.0), p.pop("warmup_max_lr", 0.001)
    steps, kind = p.pop("warmup_num_steps", 1000), p.pop("warmup_type", "log")
    _warmth(0, steps, kind)
    return lambda step, base: least + (most - least) * _warmth(step, steps, kind)


def _warmup_decay(p: dict[str, Any]) -> Rate:
    total, steps = p.pop("total_num_steps"), p.get("warmup_num_steps", 1000)
    least = p.get("warmup_min_lr", 0.0)
    warm = _warmup(p)

    def rate(step: int, base: float) -> float:
        if step < steps:
            return warm(step, base)
        left = max(0.0, (total - step) / max(1.0, total - steps))
        return float(least + (warm(step, base) - least) * left)

    return rate


def _warmup_cosine(p: dict[str, Any]) -> Rate:
    total, steps = p.pop("total_num_steps"), p.pop("warmup_num_steps", 1000)
    least, start = p.pop("cos_min_ratio", 0.0001), p.pop("warmup_min_ratio", 0.0)
    kind = p.pop("warmup_type", "log")
    _warmth(0, steps, kind)

    def rate(step: int, base: float) -> float:
        if step < steps:
            return float(base * (start + (1 - start) * _warmth(step, steps, kind)))
        angle = math.pi * (step - steps + 1) / max(1, total - steps)
        return float(base * max(0.0, least + (1 - least) * (1 + math.cos(angle)) / 2))

    return rate


def _range_test(p: dict[str, Any]) -> Rate:
    least, size = p.pop("lr_range_test_min_lr", 1e-3), p.pop("lr_range_test_step_size", 2000)
    growth, stairs = p.pop("lr_range_test_step_rate", 1.0), p.pop("lr_range_test_staircase", False)

    def rate(step: int, base: float) -> float:
        at = (step + 1) / size
        return float(least * (1 + (math.floor(at) if stairs else at) * growth))

    return rate


def _one_cycle(p: dict[str, Any]) -> Rate:
    least, most = p.pop("cycle_min_lr"), p.pop("cycle_max_lr")
    up = p.pop("cycle_first_step_size", 2000)
    down = p.pop("cycle_second_step_size", None) or up
    decay, size = p.pop("decay_lr_rate", 0.0), p.pop("decay_step_size", 0)
    for key in ("cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate",
                "cycle_first_stair_count", "cycle_second_stair_count"):
        if p.pop(key, None):
            warnings.warn(f"'scheduler.params.{key}' has no effect: momentum stays, rates are smooth",
                          stacklevel=4)

    def rate(step: int, base: float) -> float:
        if step <= up:
            return float(least + (most - least) * step / up)
        if step <= up + down:
            return float(most - (most - least) * (step - up) / down)
        periods = (step - up - down) / size if size else 0.0
        return float(least / (1 + periods * decay))

    return rate


_KINDS: dict[str, Callable[[dict[str, Any]], Rate]] = {
    "WarmupLR": _warmup, "WarmupDecayLR": _warmup_decay, "WarmupCosineLR": _warmup_cosine,
    "LRRangeTest": _range_test, "OneCycle": _one_cycle,
}


def make_schedule(optimizer: torch.optim.Optimizer, kind: str | None,
                  params: dict[str, Any]) -> Schedule | None:
    """The scheduler that a configuration names; None where it names none."""
    if kind is None:
        return None
    if kind not in _KINDS:
        raise UserError(f"scheduler.type '{kind}' is none of {', '.join(_KINDS)}")
    left = dict(params)
    left.pop("last_batch_iteration", None)
    try:
        rate = _KINDS[kind](left)
    except KeyError as missing:
        raise UserError(f"scheduler.params needs {missing} for {kind}") from None
    if left:
        raise UserError(f"there is no key 'scheduler.params.{next(iter(left))}' for {kind}")
    return Schedule(optimizer, rate)
