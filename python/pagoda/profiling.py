# SPDX-License-Identifier: Apache-2.0
"""torch.profiler asks tensors for their pointers to record input shapes, flops and Python stacks, in
places where an error of a page ends the process or is printed for every operator. While an engine lives
these three are off, with one warning; times, memory and modules are recorded as usual."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler

from pagoda.errors import UserError
from pagoda.warning import warn

# What makes the profiler read pointers, in the order of its keywords.
_POINTERS = ("record_shapes", "with_flops", "with_stack")

_living: weakref.WeakSet[Any] = weakref.WeakSet()
_running: tuple[str, ...] = ()  # of the profiler that was started last


def require_no_pointer_profiler() -> None:
    """Before an engine is made: a profiler that runs already cannot be changed."""
    if profiler._is_profiler_enabled and _running:
        raise UserError(f"torch.profiler runs with {', '.join(f'{name}=True' for name in _running)}, and reads "
                        "the pointers of parameters, which move: start it after the engine is made, where these "
                        "are switched off, or without them")


def profile_without_pointers(engine: Any) -> None:
    """For as long as the engine lives."""
    _living.add(engine)


def _watch() -> None:
    plain: Callable[..., Any] = profiler.profile.config

    @functools.wraps(plain)
    def config(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _running
        asked = tuple(name for name in _POINTERS if getattr(self, name))
        if asked and any(engine.is_open for engine in _living):
            for name in asked:
                setattr(self, name, False)
            warn(f"torch.profiler: {', '.join(asked)} {'is' if len(asked) == 1 else 'are'} off while a "
                 "pagoda.Engine lives, for the pointers of its parameters cannot be read; profile_memory and "
                 "with_modules are recorded")
            asked = ()
        _running = asked
        return plain(self, *args, **kwargs)

    profiler.profile.config = config  # type: ignore[method-assign]


_watch()
