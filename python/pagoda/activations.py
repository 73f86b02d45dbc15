# SPDX-License-Identifier: Apache-2.0
"""What autograd saves for backward, off the device until it is needed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from pagoda.errors import translated
from pagoda.library import ActivationsHandle, SavedHandle


def kept_off_the_device(handle: ActivationsHandle) -> AbstractContextManager[Any]:
    """While it lasts, saved tensors go where `handle` says."""

    def pack(tensor: torch.Tensor) -> torch.Tensor | SavedHandle:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor  # a subclass has bytes that are not seen here
        with translated():
            saved = handle.keep(tensor)
        return tensor if saved is None else saved

    def unpack(saved: torch.Tensor | SavedHandle) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        with translated():
            return saved.restore()

    return saved_tensors_hooks(pack, unpack)
