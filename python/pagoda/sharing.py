# SPDX-License-Identifier: Apache-2.0
"""torch sends a tensor to another process by moving its storage into shared memory: a DataLoader whose
workers are spawned, torch.multiprocessing, share_memory_(). A page belongs to its engine, which moves
it itself: it is refused before anything is moved and before a process is started."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pagoda.errors import UserError
from pagoda.library import page_at

# All that torch moves a storage by, or hands its memory out by.
_WAYS = ("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_")
_guarded = False


def guard_sharing() -> None:
    """From now on."""
    global _guarded
    if _guarded:
        return
    _guarded = True
    for name in _WAYS:
        _guard(name)


def _guard(name: str) -> None:
    plain: Callable[..., Any] = getattr(torch.UntypedStorage, name)

    @functools.wraps(plain)
    def checked(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        page = page_at(self._cdata)
        if page is not None:
            raise UserError(f"parameter '{page}' cannot be shared with another process: the engine owns "
                            "its memory. Keep the model out of what is sent (a dataset, a process's "
                            "arguments), send a copy (copy.deepcopy), or release() the model first")
        return plain(self, *args, **kwargs)

    setattr(torch.UntypedStorage, name, checked)
