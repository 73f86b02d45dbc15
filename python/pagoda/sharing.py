# SPDX-License-Identifier: Apache-2.0
"""torch sends a tensor to another process by moving its storage into shared memory: a DataLoader whose
workers are spawned, torch.multiprocessing, share_memory_(). A page belongs to its engine, which moves
it itself: it is refused before anything is moved and before a process is started.

A forked child has none of its parent's pages, and nothing is asked there. DataLoader's workers share batches on
a thread of their queue, on which torch runs no operator. The first operator of a thread takes the lock of
torch's list of callbacks, and a fork leaves that taken if another thread of the parent was at it (its first
operator, a backward): the worker would wait for ever."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from pagoda.errors import UserError
from pagoda.library import page_at

# All that torch moves a storage by, or hands its memory out by.
_WAYS = ("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_")
_process: int | None = None  # the one that has engines


def guard_sharing() -> None:
    """From now on."""
    global _process
    guarded, _process = _process is not None, os.getpid()
    if guarded:
        return
    for name in _WAYS:
        _guard(name)


def _guard(name: str) -> None:
    plain: Callable[..., Any] = getattr(torch.UntypedStorage, name)

    @functools.wraps(plain)
    def checked(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        page = page_at(self._cdata) if os.getpid() == _process else None
        if page is not None:
            raise UserError(f"parameter '{page}' cannot be shared with another process: the engine owns "
                            "its memory. Keep the model out of what is sent (a dataset, a process's "
                            "arguments), send a copy (copy.deepcopy), or release() the model first")
        return plain(self, *args, **kwargs)

    setattr(torch.UntypedStorage, name, checked)
