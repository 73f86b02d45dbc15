# SPDX-License-Identifier: Apache-2.0
"""Pages that stay where raw pointers can see them."""

from __future__ import annotations

from types import TracebackType

from pagoda.errors import UserError, translated
from pagoda.library import PinHandle


class Pin:
    """While it lives or its `with` block runs, its pages are on the device.

    >>> import torch, pagoda
    >>> engine = pagoda.Engine(device="cpu", device_budget="1MiB")
    >>> with engine.build():
    ...     model = torch.nn.Linear(2, 2)
    >>> with engine.pin(model):
    ...     model.weight.detach().numpy().shape
    (2, 2)
    """

    def __init__(self, handle: PinHandle) -> None:
        self._handle = handle

    def release(self) -> None:
        """Lets the pages go; once more does nothing. UserError where numpy has written to one between
        the last backward() of a step and step(): that was undone."""
        with translated():
            self._handle.release()

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            self.release()
        except UserError:
            if error is None:  # else that one says more
                raise
