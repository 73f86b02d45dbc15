# SPDX-License-Identifier: Apache-2.0
"""Learning rates by DeepSpeed's names, as torch's schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from pagoda.errors import UserError

# The learning rate of a group after so many calls of step(), given the one it was made with.
Rate = Callable[[int, int, float], float]


class Schedule(LRScheduler):
    """Sets each group's rate, and its first beta where there is a cycle for it, to what functions
    of the calls of step() say."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Rate,
                 momentum: Callable[[int], float] | None = None) -> None:
        self._rate = rate
        self._momentum = momentum
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [self._rate(self.last_epoch, number, float(base))
                for number, base in enumerate(self.base_lrs)]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self._momentum is None:
            return
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (self._momentum(self.last_epoch), _SECOND_BETA)


_SECOND_BETA = 0.99  # what DeepSpeed's OneCycle sets it to


def _by_group(key: str, value: Any) -> Callable[[int], float]:
    """A number for all groups, or a list with one for each."""
    def of(number: int) -> float:
        if not isinstance(value, (list, tuple)):
            return float(value)
        if number >= len(value):
            raise UserError(f"scheduler.params.{key} has {len(value)} values, fewer than there "
                            "are parameter groups")
        return float(value[number])

    return of


def _warmth(calls: int, steps: int, kind: str) -> float:
    """From 0 to 1. DeepSpeed counts the calls from the second one: the first two steps are alike."""
    at, steps = max(0, calls - 1), max(2, steps)
    if at >= steps:
        return 1.0
    return at / steps if kind == "linear" else math.log(at + 1) / math.log(steps)


def _warmup_steps(p: dict[str, Any]) -> tuple[int, str]:
    steps, kind = p.pop("warmup_num_steps", 1000), p.pop("warmup_type", "log")
    if kind not in ("log", "linear"):
        raise UserError(f"scheduler.params.warmup_type is '{kind}': expected log or linear")
    if not isinstance(steps, int) or steps <= 0:
        raise UserError(f"scheduler.params.warmup_num_steps is {steps}: expected an integer > 0")
    return steps, kind


def _warmup(p: dict[str, Any], bases: list[float]) -> Rate:
    least = _by_group("warmup_min_lr", p.pop("warmup_min_lr", 0.0))
    most = _by_group("warmup_max_lr", p.pop("warmup_max_lr", bases[0]))
    steps, kind = _warmup_steps(p)
    return lambda calls, group, base: (
        least(group) + (most(group) - least(group)) * _warmth(calls, steps, kind))


def _warmup_decay(p: dict[str, Any], bases: list[float]) -> Rate:
    total, steps = p.pop("total_num_steps"), max(2, p.get("warmup_num_steps", 1000))
    least = _by_group("warmup_min_lr", p.get("warmup_min_lr", 0.0))
    p.setdefault("warmup_max_lr", 0.001)
    warm = _warmup(p, bases)

    def rate(calls: int, group: int, base: float) -> float:
        at = calls - 1
        if at < steps:
            return warm(calls, group, base)
        left = max(0.0, (total - at) / max(1.0, total - steps))
        return float(least(group) + (warm(calls, group, base) - least(group)) * left)

    return rate


def _warmup_cosine(p: dict[str, Any], bases: list[float]) -> Rate:
    total = p.pop("total_num_steps")
    least, start = p.pop("cos_min_ratio", 0.0001), p.pop("warmup_min_ratio", 0.0)
    steps, kind = _warmup_steps(p)

    def rate(calls: int, group: int, base: float) -> float:
        at = calls - 1
        if at < 0:
            return 0.0
        if at < max(2, steps):
            return float(base * (start + (1 - start) * _warmth(calls, steps, kind)))
        gone = min(1.0, (at - max(2, steps) + 1) / max(1, total - max(2, steps)))
        return float(base * max(0.0, least + (1 - least) * (1 + math.cos(math.pi * gone)) / 2))

    return rate


def _range_test(p: dict[str, Any], bases: list[float]) -> Rate:
    least = _by_group("lr_range_test_min_lr", p.pop("lr_range_test_min_lr", 1e-3))
    size = p.pop("lr_range_test_step_size", 2000)
    growth, stairs = p.pop("lr_range_test_step_rate", 1.0), p.pop("lr_range_test_staircase", False)

    def rate(calls: int, group: int, base: float) -> float:
        at = calls / size
        return float(least(group) * (1 + (math.floor(at) if stairs else at) * growth))

    return rate


class _Cycle:
    """Up, down and what comes after: the share of the way from the least to the most."""

    def __init__(self, p: dict[str, Any]) -> None:
        self.up = p.pop("cycle_first_step_size", 2000)
        self.down = p.pop("cycle_second_step_size", None) or self.up
        self.stairs_up = p.pop("cycle_first_stair_count", 0) or 0
        stairs_down = p.pop("cycle_second_stair_count", None)
        self.stairs_down = self.stairs_up if stairs_down is None else stairs_down
        self.decay_size = p.pop("decay_step_size", 0)

    def share(self, calls: int) -> float:
        rising = calls <= self.up
        share = calls / self.up if rising else (self.up + self.down - calls) / self.down
        stairs = self.stairs_up if rising else self.stairs_down
        return float(math.floor(share * stairs + 1e-9) / stairs if stairs > 0 else share)

    def after(self, calls: int) -> float | None:
        """Intervals of decay since the cycle was over; None while it is not."""
        gone = calls - self.up - self.down
        if gone <= 0:
            return None
        return gone / self.decay_size if self.decay_size else 0.0


def _one_cycle(p: dict[str, Any], cycle: _Cycle) -> Rate:
    least, most = p.pop("cycle_min_lr"), p.pop("cycle_max_lr")
    decay = p.pop("decay_lr_rate", 0.0)

    def rate(calls: int, group: int, base: float) -> float:
        after = cycle.after(calls)
        if after is None:
            return float(least + (most - least) * cycle.share(calls))
        return float(least / (1 + after * decay))

    return rate


def _one_cycle_momentum(p: dict[str, Any], cycle: _Cycle) -> Callable[[int], float] | None:
    least, most = p.pop("cycle_min_mom", 0.8), p.pop("cycle_max_mom", 0.9)
    decay = p.pop("decay_mom_rate", 0.0)
    if not p.pop("cycle_momentum", True):
        return None

    def momentum(calls: int) -> float:
        if calls == 0:
            return float(least)
        after = cycle.after(calls)
        if after is None:
            return float(most - (most - least) * cycle.share(calls))
        return float(most * (1 + after * decay))

    return momentum


_KINDS: dict[str, Callable[[dict[str, Any], list[float]], Rate]] = {
    "WarmupLR": _warmup, "WarmupDecayLR": _warmup_decay, "WarmupCosineLR": _warmup_cosine,
    "LRRangeTest": _range_test,
}


_WORDS = {"warmup_type"}
_FLAGS = {"lr_range_test_staircase", "cycle_momentum"}
_ABOVE_ZERO = {"warmup_num_steps", "total_num_steps", "lr_range_test_step_size",
               "cycle_first_step_size"}


def _check_params(params: dict[str, Any]) -> None:
    """Numbers are numbers: an error here is of the configuration, later it is of some step."""
    for key, value in params.items():
        if key in _WORDS or value is None:
            continue
        if key in _FLAGS:
            if not isinstance(value, bool):
                raise UserError(f"scheduler.params.{key} is {value!r}: expected true or false")
            continue
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, bool) or not isinstance(number, (int, float)) or (
                    not math.isfinite(number)):
                raise UserError(f"scheduler.params.{key} is {value!r}: expected a number")
            if key in _ABOVE_ZERO and number <= 0:
                raise UserError(f"scheduler.params.{key} is {value}: expected a number > 0")


def make_schedule(optimizer: torch.optim.Optimizer, kind: str | None,
                  params: dict[str, Any]) -> Schedule | None:
    """The scheduler that a configuration names; None where it names none."""
    if kind is None:
        return None
    if kind not in _KINDS and kind != "OneCycle":
        raise UserError(f"scheduler.type '{kind}' is not supported; "
                        f"use one of {', '.join(_KINDS)}, OneCycle")
    _check_params(params)
    left = dict(params)
    left.pop("last_batch_iteration", None)
    momentum = None
    try:
        if kind == "OneCycle":
            cycle = _Cycle(left)
            rate, momentum = _one_cycle(left, cycle), _one_cycle_momentum(left, cycle)
        else:
            rate = _KINDS[kind](left, [float(group["lr"]) for group in optimizer.param_groups])
    except KeyError as missing:
        raise UserError(f"scheduler.params needs {missing} for {kind}") from None
    if left:
        raise UserError(f"there is no key 'scheduler.params.{next(iter(left))}' for {kind}")
    return Schedule(optimizer, rate, momentum)
