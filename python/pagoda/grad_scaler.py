# SPDX-License-Identifier: Apache-2.0
"""A torch.amp.GradScaler multiplies the loss and divides p.grad, which is None for attached parameters:
their gradients would stay multiplied. Dividing raises, and so does a backward pass from a loss that it
has multiplied when it reaches an attached parameter. A scaler for other parameters is left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from pagoda.errors import UserError
from pagoda.wrappers import when_imported

_ADVICE = ("create the engine with loss_scale='dynamic' and call engine.backward(loss) "
           "with the unscaled loss")

IsAttached = Callable[[Iterable[torch.Tensor]], bool]


def guard_grad_scalers(is_attached: IsAttached, any_attached: Callable[[], bool]) -> None:
    """From now on."""

    def guard(scaler: type[GradScaler]) -> None:
        _guard_scale(scaler, any_attached)
        _guard_unscale(scaler, is_attached)

    def guard_sharded(module: ModuleType) -> None:
        guard(module.ShardedGradScaler)  # which has methods of its own

    guard(GradScaler)
    when_imported("torch.distributed.fsdp.sharded_grad_scaler", guard_sharded)


def refused(call: str) -> UserError:
    return UserError(f"{call}: a GradScaler scales the loss outside of the engine, which owns the "
                     f"gradients of these parameters; {_ADVICE}")


def _guard_scale(scaler: type[GradScaler], any_attached: Callable[[], bool]) -> None:
    plain: Callable[..., Any] = scaler.scale

    @functools.wraps(plain)
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = plain(self, outputs)
        return _marked(scaled) if self.is_enabled() and any_attached() else scaled

    scaler.scale = scale  # type: ignore[method-assign]


def _guard_unscale(scaler: type[GradScaler], is_attached: IsAttached) -> None:
    plain = scaler.unscale_

    @functools.wraps(plain)
    def unscale_(self: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if self.is_enabled() and is_attached(p for group in optimizer.param_groups
                                             for p in group["params"]):
            raise refused("GradScaler.unscale_()")
        plain(self, optimizer)

    scaler.unscale_ = unscale_  # type: ignore[method-assign]


def _marked(scaled: Any) -> Any:
    """What scale() returns: a tensor, or an iterable of such."""
    if isinstance(scaled, torch.Tensor):
        if scaled.requires_grad:
            scaled.register_hook(_mark_pass)  # type: ignore[no-untyped-call]
        return scaled
    if isinstance(scaled, (list, tuple)):
        for item in scaled:
            _marked(item)
        return scaled
    return map(_marked, scaled)


def _mark_pass(_: torch.Tensor) -> None:
    """The pass that runs comes from a scaled loss."""
    torch.ops.pagoda.mark_scaled_pass()
