# SPDX-License-Identifier: Apache-2.0
"""What autograd saves for backward, off the device until it is needed."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from pagoda.errors import from_runtime_error, translated
from pagoda.library import ActivationsHandle, SavedHandle


class _NamedTensor:
    """One that the library cannot take, because its dimensions have names."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # The result of what saves it would refer to itself.
        self._tensor = tensor.detach() if tensor.grad_fn is not None else tensor
        self._version = tensor._version

    def restore(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self._tensor.type()} {list(self._tensor.shape)}] is at "
                f"version {self._tensor._version}; expected version {self._version} instead.")
        return self._tensor


class ActivationHooks(saved_tensors_hooks):
    """While it lasts, saved tensors go where `handle` says."""

    def __init__(self, handle: ActivationsHandle) -> None:
        # Called for every saved tensor: a try block costs nothing, a context manager does.
        def pack(tensor: torch.Tensor) -> SavedHandle:
            try:
                return handle.keep(tensor)
            except RuntimeError as error:
                if tensor.has_names():
                    return _NamedTensor(tensor)
                raise from_runtime_error(error) from None

        def unpack(saved: SavedHandle) -> torch.Tensor:
            try:
                return saved.restore()
            except RuntimeError as error:
                raise from_runtime_error(error) from None

        super().__init__(pack, unpack)
        self.handle = handle

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        with translated():
            self.handle.sweep()  # what the forward's own variables held may leave now
