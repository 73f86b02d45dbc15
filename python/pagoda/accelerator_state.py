# SPDX-License-Identifier: Apache-2.0
"""accelerator.save_state() and load_state() take the weights first, and would fail there: that checkpoints of
the engine's optimizer are not supported is said at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pagoda.wrappers import when_imported

if TYPE_CHECKING:
    from pagoda.optimizer import Optimizer


def optimizers_of(accelerator: Any) -> Iterator[Optimizer]:
    """The engines' among those that it drives."""
    from pagoda.optimizer import Optimizer

    for prepared in accelerator._optimizers:
        inner = getattr(prepared, "optimizer", prepared)
        if isinstance(inner, Optimizer):
            yield inner


def guard_accelerator_state() -> None:
    """From now on, once accelerate is imported."""

    def guard(module: ModuleType) -> None:
        for name in ("save_state", "load_state"):
            _guard(module.Accelerator, name)

    when_imported("accelerate.accelerator", guard)


def _guard(accelerator: Any, name: str) -> None:
    plain = getattr(accelerator, name)

    @functools.wraps(plain)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        for optimizer in optimizers_of(self):
            optimizer.require_no_state(f"accelerator.{name}()")
        return plain(self, *args, **kwargs)

    setattr(accelerator, name, checked)
