# SPDX-License-Identifier: Apache-2.0
"""accelerator.save_state() and load_state() take the weights first, and would fail there: that checkpoints of
the engine's optimizer are not supported is said at once."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from pagoda.wrappers import when_imported


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
        from pagoda.optimizer import Optimizer

        for prepared in self._optimizers:
            inner = getattr(prepared, "optimizer", prepared)
            if isinstance(inner, Optimizer):
                inner.require_no_state(f"accelerator.{name}()")
        return plain(self, *args, **kwargs)

    setattr(accelerator, name, checked)
